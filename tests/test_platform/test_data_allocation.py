"""Partitions other than LDA: uniform, consecutive and natural."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset, TestReadError
from fedloom.platform.data.federated import FederatedData
from fedloom.platform.data.partition import Partition, prepare_partition
from fedloom.platform.data.prepare import prepare_dataset

LETTERS = {"ANNE": (41, 11), "BEN": (8, 30), "CARL": (31, 0), "DORA": (21, 1), "EVE": (101, 51)}
"""Letters per role in its training line and in its test line (0: no line)."""


def write_roles(root: Path) -> None:
    (root / "shakespeare").mkdir(parents=True)
    for i, part in enumerate(("train", "test")):
        with h5py.File(root / "shakespeare" / f"shakespeare_{part}.h5", "w") as file:
            for name, counts in LETTERS.items():
                if counts[i]:
                    file[f"examples/{name}/snippets"] = np.array([b"x" * counts[i]])


def options(root: Path, **changes: Any) -> DataConfig:
    defaults = {"root": str(root), "cache": str(root / "cache"), "num_clients": 3}
    return DataConfig(**{**defaults, **changes})


def roles(root: Path, **changes: Any) -> DataConfig:
    return options(root, **{"dataset": "shakespeare", "partition": "natural", "sequence_length": 10, **changes})


def opened(config: DataConfig, seed: int = 0) -> tuple[Dataset, Partition]:
    dataset = Dataset.open(prepare_dataset(config))
    return dataset, Partition.open(prepare_partition(config, dataset, seed), dataset)


def own(partition: Partition, client_id: int) -> list[int]:
    both = (partition.indices(client_id, "train"), partition.indices(client_id, "validation"))
    return sorted(np.concatenate(both).tolist())


# -- uniform ----------------------------------------------------------------------------------------------------------


def test_a_uniform_partition_gives_every_sample_to_one_client(tmp_path: Path) -> None:
    dataset, partition = opened(options(tmp_path, partition="iid", num_clients=20, validation_share=0.25))
    assert partition.generator == {"name": "uniform", "num_clients": 20, "validation_share": 0.25, "seed": 0}
    assert partition.label_distributions is None
    assert partition.natural_clients is None
    # 1438 = 18 x 72 + 2 x 71: all 18 validate; 359 = 19 x 18 + 17.
    assert partition.sizes("validation").tolist() == [18] * 20
    assert partition.sizes("train").tolist() == [54] * 18 + [53] * 2
    assert partition.sizes("test").tolist() == [18] * 19 + [17]
    assert sorted(row for k in range(20) for row in own(partition, k)) == list(range(1438))
    assert np.array_equal(np.sort(partition.all_indices("test")), np.arange(359))
    labels = np.stack([np.bincount(dataset.labels("train")[own(partition, k)], minlength=10) for k in range(20)])
    expected = labels.sum(axis=0) / 20
    assert ((labels - expected) ** 2 / expected).sum() < 235  # chi-square, 19 x 9 degrees of freedom, p = 0.001


def test_a_uniform_partition_follows_its_seed_and_not_alpha(tmp_path: Path) -> None:
    def made(seed: int = 0, **changes: Any) -> Partition:
        return opened(options(tmp_path, partition="iid", **changes), seed)[1]

    assert made().hash == made(alpha=0.1).hash
    assert own(made(), 1) != own(made(seed=1), 1)
    assert own(made(), 1) == own(made(validation_share=0.5), 1)
    assert len({made().hash, made(seed=1).hash, made(num_clients=4).hash, opened(options(tmp_path))[1].hash}) == 4


# -- consecutive ------------------------------------------------------------------------------------------------------


def test_clients_get_consecutive_pieces_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "ptb.train.txt").write_text("one two three\n" * 20)  # 79 labels: 16 sequences of 5
    (tmp_path / "ptb" / "ptb.test.txt").write_text("two\n" * 8)  # 15 labels: 3 sequences
    config = options(tmp_path, dataset="ptb", partition="iid", sequence_length=5, validation_share=0.2)
    _, partition = opened(config)
    assert partition.generator["name"] == "consecutive"
    assert [own(partition, k) for k in range(3)] == [list(range(6)), list(range(6, 11)), list(range(11, 16))]
    assert partition.sizes("validation").tolist() == [1, 1, 1]
    assert [partition.indices(k, "test").tolist() for k in range(3)] == [[0], [1], [2]]
    with pytest.raises(ValueError, match=r"data.num_clients=17: ptb has 16 training samples; every client needs"):
        opened(options(tmp_path, dataset="ptb", partition="iid", sequence_length=5, num_clients=17))


# -- natural ----------------------------------------------------------------------------------------------------------


def test_clients_are_the_roles_in_order_of_their_names(tmp_path: Path) -> None:
    write_roles(tmp_path)
    # n letters are n + 2 tokens and n + 1 labels: 5, 1, 4, 3 and 11 sequences of 10; 2, 4, 0, 1 and 6 to test.
    dataset, partition = opened(roles(tmp_path, num_clients=5, validation_share=0.3))
    assert partition.generator == {"name": "natural", "num_clients": 5, "validation_share": 0.3, "seed": 0}
    assert partition.natural_clients is not None
    assert [dataset.client_names[c] for c in partition.natural_clients] == ["ANNE", "BEN", "CARL", "DORA", "EVE"]
    assert [own(partition, k) for k in range(5)] == [
        list(range(5)),
        [5],
        list(range(6, 10)),
        list(range(10, 13)),
        list(range(13, 24)),
    ]
    # Who has one sequence trains on it.
    assert partition.sizes("train").tolist() == [3, 1, 3, 2, 8]
    assert partition.sizes("validation").tolist() == [2, 0, 1, 1, 3]
    assert [partition.indices(k, "test").tolist() for k in range(5)] == [
        [0, 1],
        list(range(2, 6)),
        [],
        [6],
        list(range(7, 13)),
    ]


def test_fewer_clients_are_the_same_clients(tmp_path: Path) -> None:
    write_roles(tmp_path)
    _, all_of_them = opened(roles(tmp_path, num_clients=4))
    _, two = opened(roles(tmp_path, num_clients=2))
    assert two.num_clients == 2
    for k in range(2):
        for split in ("train", "validation", "test"):
            assert np.array_equal(two.indices(k, split), all_of_them.indices(k, split))
    validations = {
        tuple(opened(roles(tmp_path, num_clients=2), seed)[1].all_indices("validation")) for seed in range(9)
    }
    assert len(validations) > 1


def test_more_clients_than_roles_with_enough_text(tmp_path: Path) -> None:
    write_roles(tmp_path)
    assert opened(roles(tmp_path, num_clients=5, validation_share=0.0))[1].sizes("train").tolist() == [5, 1, 4, 3, 11]
    message = r"data.num_clients=6: 5 of the 5 clients of shakespeare have a training sample; ask for at most 5$"
    with pytest.raises(ValueError, match=message):
        opened(roles(tmp_path, num_clients=6))


def test_a_role_without_its_sub_sample_is_no_client(tmp_path: Path) -> None:
    write_roles(tmp_path)
    with pytest.raises(ValueError, match=r"data.num_clients=5: \d of the 5 clients"):
        opened(roles(tmp_path, num_clients=5, train_samples=3))


# -- what runs read ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FederatedData:
    root: Path = tmp_path_factory.mktemp("roles")
    write_roles(root)
    config = roles(root, num_clients=5)
    path = prepare_dataset(config)
    return FederatedData.open(path, prepare_partition(config, Dataset.open(path), seed=3))


def test_a_client_reads_its_own_text(data: FederatedData) -> None:
    x, y = data.client(0, "train")
    assert (x.shape, y.shape, x.dtype, y.dtype) == ((4, 10), (4, 10), torch.int64, torch.int64)
    x, y = data.central("validation").tensors()
    pieces = [data.client(k, "validation") for k in range(5)]
    assert torch.equal(x, torch.cat([p[0] for p in pieces]))
    assert torch.equal(y, torch.cat([p[1] for p in pieces]))
    with data.reading_test():
        assert [len(data.client(k, "test")[1]) for k in range(5)] == [2, 4, 0, 1, 6]
        assert data.client(2, "test")[0].shape == (0, 10)
        assert data.central("test").tensors()[1].shape == (13, 10)


READS: list[Callable[[FederatedData], object]] = [
    lambda data: data.sizes("test"),
    lambda data: data.indices(0, "test"),
    lambda data: data.client(0, "test"),
    lambda data: data.central("test"),
    lambda data: data.dataset.labels("test"),
    lambda data: data.dataset.clients("test"),
    lambda data: data.dataset.tensors("test", np.array([0])),
]


@pytest.mark.parametrize("read", READS)
def test_test_text_is_locked_before_the_final_evaluation(
    data: FederatedData, read: Callable[[FederatedData], object]
) -> None:
    with pytest.raises(TestReadError, match="reading_test"):
        read(data)
    with data.reading_test():
        read(data)


def test_the_real_roles(tmp_path: Path) -> None:
    root = os.environ.get("FEDLOOM_DATA")
    if not root or not (Path(root) / "shakespeare" / "shakespeare_train.h5").is_file():
        pytest.skip("needs federated Shakespeare in HDF5: set FEDLOOM_DATA to the folder that holds shakespeare/")
    config = roles(Path(root), cache=str(tmp_path), sequence_length=None, num_clients=660)
    dataset, partition = opened(config)
    assert (partition.sizes("train") + partition.sizes("validation")).min() == 1
    for k in (0, 300, 659):
        rows = own(partition, k)
        assert set(dataset.clients("train")[rows]) == {partition.natural_clients[k]}  # type: ignore[index]
    with pytest.raises(ValueError, match=r"data.num_clients=716: 715 of the 715 clients"):
        opened(roles(Path(root), cache=str(tmp_path), sequence_length=None, num_clients=716))
    _, everybody = opened(
        roles(Path(root), cache=str(tmp_path), sequence_length=None, num_clients=715, validation_share=0.0)
    )
    assert everybody.sizes("train").sum() == dataset.num_samples("train")
