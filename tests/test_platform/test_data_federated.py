from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset, TestReadError
from fedloom.platform.data.federated import FederatedData
from fedloom.platform.data.partition import prepare_partition
from fedloom.platform.data.prepare import prepare_dataset


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FederatedData:
    cache: Path = tmp_path_factory.mktemp("cache")
    config = DataConfig(cache=str(cache), num_clients=8, alpha=0.5, train_samples=400, test_samples=100)
    path = prepare_dataset(config)
    return FederatedData.open(path, prepare_partition(config, Dataset.open(path), seed=3))


def test_a_client_has_its_own_samples(data: FederatedData) -> None:
    assert (data.num_clients, data.size(2, "train"), data.size(2, "validation")) == (8, 45, 5)
    assert data.sizes("validation").tolist() == [5] * 8
    assert data.partition_hash == data.partition.hash
    x, y = data.client(2, "train")
    assert (x.shape, y.shape) == ((45, 1, 8, 8), (45,))
    expected_x, expected_y = data.dataset.tensors("train", data.indices(2, "train"))
    assert torch.equal(x, expected_x)
    assert torch.equal(y, expected_y)


def test_central_validation_is_all_clients_shares_in_order(data: FederatedData) -> None:
    x, y = data.central("validation").tensors()
    pieces = [data.client(k, "validation") for k in range(8)]
    assert torch.equal(x, torch.cat([p[0] for p in pieces]))
    assert torch.equal(y, torch.cat([p[1] for p in pieces]))


def test_a_share_of_the_central_validation_is_seeded(data: FederatedData) -> None:
    def half(seed: int) -> torch.Tensor:
        return data.central("validation", share=0.5, rng=np.random.default_rng(seed)).tensors()[0]

    assert len(half(0)) == 20
    assert torch.equal(half(0), half(0))
    assert not torch.equal(half(0), half(1))
    assert len(data.central("validation", share=1e-6, rng=np.random.default_rng(0))) == 1
    with pytest.raises(ValueError, match=r"share=0.5: .*needs a random generator"):
        data.central("validation", share=0.5)
    with pytest.raises(ValueError, match=r"share=0: must be in \(0, 1\]"):
        data.central("validation", share=0)


READS: list[Callable[[FederatedData], object]] = [
    lambda data: data.size(0, "test"),
    lambda data: data.sizes("test"),
    lambda data: data.indices(0, "test"),
    lambda data: data.client(0, "test"),
    lambda data: data.central("test"),
    lambda data: data.partition.indices(0, "test"),
    lambda data: data.partition.all_indices("test"),
    lambda data: data.dataset.labels("test"),
    lambda data: data.dataset.tensors("test", np.array([0])),
]


@pytest.mark.parametrize("read", READS)
def test_the_test_split_is_locked_before_the_final_evaluation(
    data: FederatedData, read: Callable[[FederatedData], object]
) -> None:
    with pytest.raises(TestReadError, match="reading_test"):
        read(data)
    with data.reading_test():
        read(data)
        with data.reading_test():
            read(data)
        read(data)
    with pytest.raises(TestReadError):
        read(data)


def test_the_lock_closes_after_an_error(data: FederatedData) -> None:
    with pytest.raises(KeyError), data.reading_test():
        raise KeyError
    with pytest.raises(TestReadError):
        data.sizes("test")


def test_central_test_is_the_whole_test_set(data: FederatedData) -> None:
    with data.reading_test():
        x, y = data.central("test").tensors()
        assert y.tolist() == data.dataset.labels("test").tolist()
        assert data.sizes("test").tolist() == [12] * 8
    assert x.shape == (100, 1, 8, 8)


def test_unknown_splits_are_named(data: FederatedData) -> None:
    for read in (data.sizes, data.central):
        with pytest.raises(ValueError, match="split=valid: must be one of train, validation, test"):
            read("valid")
    with pytest.raises(ValueError, match="split=valid"):
        data.client(0, "valid")
