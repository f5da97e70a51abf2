"""Clients that are tested on a share of their own training samples: `data.test_share`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fedloom.platform.data.allocation import held_out_size, set_aside
from fedloom.platform.data.artefact import IntArray, atomic_folder, write_artefact
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset, TestReadError
from fedloom.platform.data.federated import FederatedData
from fedloom.platform.data.partition import Partition, check_arrays, prepare_partition
from fedloom.platform.data.prepare import prepare_dataset
from fedloom.platform.data.registry import check

SPLITS = ("train", "validation", "test")
KINDS = ("lda", "iid", "consecutive", "natural")
LETTERS = {"ANNE": (41, 11), "BEN": (8, 30), "CARL": (31, 0), "DORA": (21, 1), "EVE": (101, 51)}
"""Letters per role in its training line and in its test line (0: no line): 5, 1, 4, 3 and 11 sequences of 10."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("originals")
    (folder / "ptb").mkdir()
    (folder / "ptb" / "ptb.train.txt").write_text("one two three\n" * 20)  # 79 labels: 16 sequences of 5
    (folder / "ptb" / "ptb.test.txt").write_text("two\n" * 8)  # 15 labels: 3 sequences
    (folder / "shakespeare").mkdir()
    for i, part in enumerate(("train", "test")):
        with h5py.File(folder / "shakespeare" / f"shakespeare_{part}.h5", "w") as file:
            for name, counts in LETTERS.items():
                if counts[i]:
                    file[f"examples/{name}/snippets"] = np.array([b"x" * counts[i]])
    return folder


def options(root: Path, kind: str, **changes: Any) -> DataConfig:
    of_kind: dict[str, dict[str, Any]] = {
        "lda": {"num_clients": 20, "alpha": 0.5},
        "iid": {"partition": "iid", "num_clients": 20},
        "consecutive": {"dataset": "ptb", "partition": "iid", "num_clients": 3, "sequence_length": 5},
        "natural": {"dataset": "shakespeare", "partition": "natural", "num_clients": 5, "sequence_length": 10},
    }
    shares = {"validation_share": 0.2, "test_share": 0.2}
    folders = {"root": str(root), "cache": str(root / "cache")}
    return DataConfig(**{**folders, **shares, **of_kind[kind], **changes})


def opened(config: DataConfig, seed: int = 0) -> tuple[Dataset, Partition]:
    dataset = Dataset.open(prepare_dataset(config))
    return dataset, Partition.open(prepare_partition(config, dataset, seed), dataset)


def own(partition: Partition, client_id: int, splits: tuple[str, ...] = SPLITS) -> list[int]:
    return sorted(np.concatenate([partition.indices(client_id, split) for split in splits]).tolist())


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "test", "validation", "train"),
    [
        ("lda", [14] * 20, [14] * 20, [43] * 20),  # 1438 // 20 = 71, of which .2 are 14.2
        ("iid", [14] * 20, [14] * 20, [44] * 18 + [43] * 2),  # 18 of 72 and 2 of 71
        ("consecutive", [1, 1, 1], [1, 1, 1], [4, 3, 3]),
        ("natural", [1, 0, 1, 1, 2], [1, 0, 1, 1, 2], [3, 1, 2, 1, 7]),  # who has one sequence trains on it
    ],
)
def test_both_shares_are_of_all_of_a_clients_samples(
    root: Path, kind: str, test: list[int], validation: list[int], train: list[int]
) -> None:
    _, partition = opened(options(root, kind))
    assert partition.sizes("test").tolist() == test
    assert partition.sizes("validation").tolist() == validation
    assert partition.sizes("train").tolist() == train
    assert [partition.part(split) for split in SPLITS] == ["train", "train", "train"]


@pytest.mark.parametrize(
    ("num_left", "share", "num_all", "held_out"),
    [
        (10, 0.2, 10, 2),
        (8, 0.2, 10, 2),
        (71, 0.2, 71, 14),
        (57, 0.2, 71, 14),
        (1, 0.2, 1, 0),
        (1, 0.2, 2, 0),
        (2, 0.2, 3, 1),
        (5, 0.0, 9, 0),
        (4, 0.6, 10, 3),
        (9, 0.01, 10, 1),
    ],
)
def test_how_many_are_set_aside(num_left: int, share: float, num_all: int, held_out: int) -> None:
    assert held_out_size(num_left, share, num_all) == held_out


@settings(deadline=None)
@given(n=st.integers(1, 60), shares=st.tuples(st.floats(0.001, 0.999), st.floats(0, 0.999)), seed=st.integers(0, 99))
def test_nothing_is_lost_or_in_two_splits(n: int, shares: tuple[float, float], seed: int) -> None:
    drawn = np.random.default_rng(seed).permutation(4 * n + 7)[: 3 * n].reshape(3, n)
    rest, test_pieces = set_aside(drawn, drawn, shares[0], np.random.default_rng(seed))
    train, validation = map(np.stack, set_aside(rest, drawn, shares[1], np.random.default_rng(seed + 1)))
    test = np.stack(test_pieces)
    together = np.concatenate([train, validation, test], axis=1)
    assert np.array_equal(np.sort(together, axis=1), np.sort(drawn, axis=1))
    assert train.shape[1] >= 1
    assert test.shape[1] >= min(1, n - 1)
    if sum(shares) < 1 - 2 / n:  # as many as asked for, wherever rounding leaves one to train
        assert abs(test.shape[1] - shares[0] * n) <= 1
        assert abs(validation.shape[1] - shares[1] * n) <= 1


# -- who has what -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_clients_samples_are_those_of_before(root: Path, kind: str) -> None:
    dataset, without = opened(options(root, kind, test_share=None))
    before = [own(without, k, ("train", "validation")) for k in range(without.num_clients)]
    for share in (0.1, 0.2, 0.6):
        _, partition = opened(options(root, kind, test_share=share))
        assert [own(partition, k) for k in range(partition.num_clients)] == before
        if kind in ("lda", "natural"):
            what = "label_distributions" if kind == "lda" else "natural_clients"
            assert np.array_equal(getattr(partition, what), getattr(without, what))
    assert max(max(rows) for rows in before) < dataset.num_samples("train")


@pytest.mark.parametrize("kind", KINDS)
def test_another_validation_share_leaves_the_test_samples(root: Path, kind: str) -> None:
    tests = [opened(options(root, kind, validation_share=share))[1].all_indices("test") for share in (0.0, 0.2, 0.5)]
    assert len(tests[0])
    assert all(np.array_equal(test, tests[0]) for test in tests)


def test_test_and_validation_samples_are_drawn_independently(root: Path) -> None:
    for kind in ("lda", "iid"):
        test = opened(options(root, kind))[1].all_indices("test")
        validation = opened(options(root, kind, test_share=None))[1].all_indices("validation")
        assert len(test) == len(validation) == 280
        assert 20 < np.isin(test, validation).sum() < 120, "one stream would set the same samples aside"


def test_test_samples_follow_the_seed_and_nothing_else(root: Path) -> None:
    for kind in ("iid", "natural"):
        _, one = opened(options(root, kind))
        _, again = opened(options(root, kind, cache=str(root / "elsewhere")))
        assert one.hash == again.hash
    tests = {tuple(opened(options(root, "natural"), seed)[1].all_indices("test").tolist()) for seed in range(9)}
    assert len(tests) > 1


def test_test_labels_are_like_the_clients_training_labels(root: Path) -> None:
    dataset, partition = opened(options(root, "lda", alpha=0.1))
    labels = dataset.labels("train")
    largest = [
        [np.bincount(labels[partition.indices(k, split)]).argmax() for split in ("train", "test")] for k in range(20)
    ]
    assert np.mean([train == test for train, test in largest]) > 0.8


# -- the artefact -----------------------------------------------------------------------------------------------------


def test_partitions_without_a_test_share_are_those_of_before_there_was_one(root: Path) -> None:
    # Hashes recorded before the option existed; texts, as their partitions hold no rounded numbers.
    before = {
        "consecutive": "ae3a798f7d25df73d1faa341385fa31e313483709f8d98bc4bb3ea972b6f73ba",
        "natural": "c098560e97cf3d65e0c547db81cb5206c1ce32453d4270056975a879344a79cf",
    }
    for kind, validation_share in (("consecutive", 0.2), ("natural", 0.3)):
        _, partition = opened(options(root, kind, validation_share=validation_share, test_share=None))
        assert partition.hash == before[kind]
        assert [partition.part(split) for split in SPLITS] == ["train", "train", "test"]
    assert "test_share" not in opened(options(root, "lda", test_share=None))[1].generator


@pytest.mark.parametrize("kind", KINDS)
def test_the_share_is_recorded_and_part_of_the_hash(root: Path, kind: str) -> None:
    made = [opened(options(root, kind, test_share=share))[1] for share in (None, 0.2, 0.3)]
    assert [p.generator["test_share"] for p in made[1:]] == [0.2, 0.3]
    assert len({p.hash for p in made}) == 3
    assert len({p.path for p in made}) == 3
    with pytest.raises(ValueError, match="split=valid: must be one of"):
        made[1].part("valid")


GOOD = {
    "train": [0, 1, 2],
    "train_offsets": [0, 1, 3],
    "validation": [3],
    "validation_offsets": [0, 0, 1],
    "test": [4],
    "test_offsets": [0, 1, 1],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test": [1]}, "test.npy: a sample is in two splits"),
        ({"test": [3]}, "test.npy: a sample is in two splits"),
        ({"validation": [2]}, "validation.npy: a sample is in two splits"),
        ({"test": [4, 4], "test_offsets": [0, 1, 2]}, "test.npy: a sample is there twice"),
        ({"test": [10]}, r"test.npy: indices must be in 0..9"),
    ],
)
def test_a_test_sample_that_is_in_another_split_is_refused(changes: dict[str, list[int]], message: str) -> None:
    good = {k: np.array(v) for k, v in GOOD.items()}
    bad = good | {k: np.array(v) for k, v in changes.items()}
    check_arrays(Path("p"), good, 2, 10, None)
    with pytest.raises(ValueError, match=message):
        check_arrays(Path("p"), bad, 2, 10, None)
    if changes in ({"test": [1]}, {"test": [3]}):  # the same number in the test part is another sample
        check_arrays(Path("p"), bad, 2, 10, 5)


def test_a_well_signed_partition_that_tests_on_training_samples_is_refused(root: Path, tmp_path: Path) -> None:
    dataset, _ = opened(options(root, "iid"))
    arrays: dict[str, IntArray] = {}
    for split, indices in (("train", [7]), ("validation", [8]), ("test", [7])):
        arrays |= {split: np.array(indices), f"{split}_offsets": np.array([0, 1])}
    for name, generator in (("own", {"test_share": 0.2}), ("part", {})):
        about = {"dataset": {"name": "digits", "hash": dataset.hash}, "num_clients": 1, "samples": {}}
        with atomic_folder(tmp_path / name) as folder:
            write_artefact(folder, "partition.json", {"generator": generator, **about}, arrays)
    with pytest.raises(ValueError, match=r"test.npy: a sample is in two splits"):
        Partition.open(tmp_path / "own", dataset)
    assert Partition.open(tmp_path / "part", dataset).indices(0, "test").tolist() == [7]


def test_as_many_clients_as_samples(root: Path) -> None:
    _, partition = opened(options(root, "lda", num_clients=1438))
    assert (partition.size(0, "train"), partition.size(0, "validation"), partition.size(0, "test")) == (1, 0, 0)
    _, partition = opened(options(root, "lda", num_clients=719))
    assert [partition.size(0, split) for split in SPLITS] == [1, 0, 1], "the test sample is taken first"


# -- what runs read ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=KINDS)
def data(root: Path, request: pytest.FixtureRequest) -> FederatedData:
    config = options(root, request.param)
    path = prepare_dataset(config)
    return FederatedData.open(path, prepare_partition(config, Dataset.open(path), seed=3))


def test_a_client_tests_on_its_own_samples_of_the_train_part(data: FederatedData) -> None:
    with data.reading_test():
        x, y = data.client(0, "test")
        indices = data.indices(0, "test")
        expected_x, expected_y = data.dataset.tensors("train", indices)
    assert len(y) == len(indices) > 0
    assert torch.equal(x, expected_x)
    assert torch.equal(y, expected_y)
    others = np.concatenate([data.partition.all_indices("train"), data.partition.all_indices("validation")])
    assert not np.isin(indices, others).any()


def test_the_central_test_set_stays_the_test_part(data: FederatedData) -> None:
    with data.reading_test():
        x, y = data.central("test").tensors()
        everything = np.arange(data.dataset.num_samples("test"))
        expected_x, expected_y = data.dataset.tensors("test", everything)
    assert torch.equal(x, expected_x)
    assert torch.equal(y, expected_y)
    assert data.num_central("test") == len(everything)
    assert len(data.central("train")) == data.sizes("train").sum()
    assert len(data.central("validation")) == data.sizes("validation").sum()


READS: list[Callable[[FederatedData], object]] = [
    lambda data: data.size(0, "test"),
    lambda data: data.sizes("test"),
    lambda data: data.indices(0, "test"),
    lambda data: data.client(0, "test"),
    lambda data: data.central("test"),
    lambda data: data.partition.size(0, "test"),
    lambda data: data.partition.indices(0, "test"),
    lambda data: data.partition.all_indices("test"),
    lambda data: data.dataset.labels("test"),
]


@pytest.mark.parametrize("read", READS)
def test_the_clients_test_samples_are_locked(data: FederatedData, read: Callable[[FederatedData], object]) -> None:
    with pytest.raises(TestReadError, match="reading_test"):
        read(data)
    with data.reading_test():
        read(data)
    with pytest.raises(TestReadError):
        read(data)


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_share": 0.0}, r"^data.test_share=0.0: must be above 0 and below 1, or null$"),
        ({"test_share": 1.0}, r"^data.test_share=1.0: must be above 0 and below 1, or null$"),
        ({"test_share": -0.2}, r"^data.test_share=-0.2: must be above 0 and below 1, or null$"),
        ({"test_share": float("nan")}, r"^data.test_share=nan: must be above 0 and below 1, or null$"),
        (
            {"test_share": 0.9},
            r"^data.validation_share=0.1 and data.test_share=0.9: must sum to less than 1; the rest of a client's data",
        ),
        ({"test_share": 0.5, "validation_share": 0.6}, r"must sum to less than 1"),
    ],
)
def test_a_share_that_leaves_nothing_is_one_line(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        check(DataConfig(**changes))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_shares_that_leave_something_pass() -> None:
    assert DataConfig().test_share is None
    check(DataConfig(validation_share=0.2, test_share=0.2))
    check(DataConfig(validation_share=0.0, test_share=0.99))
