"""Shards of sorted samples (McMahan et al. 2017) and quantity skew (Li et al. 2022): by hand, and their laws."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedloom.platform.data.allocation import deal_shards, dirichlet_sizes
from fedloom.platform.data.artefact import IntArray
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.federated import FederatedData, size_variation
from fedloom.platform.data.partition import prepare_partition
from fedloom.platform.data.prepare import prepare_dataset

MNIST = np.repeat(np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])
"""The training labels of MNIST but for their order, which no partition depends on."""


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def opened(cache: Path, seed: int = 3, **changes: Any) -> FederatedData:
    config = DataConfig(cache=str(cache), num_clients=20, **changes)
    folder = prepare_dataset(config)
    return FederatedData.open(folder, prepare_partition(config, Dataset.open(folder), seed))


def classes_of(clients: list[IntArray], labels: IntArray) -> list[int]:
    return [len(np.unique(labels[samples])) for samples in clients]


# -- shards -----------------------------------------------------------------------------------------------------------


class Straight:
    """A generator that leaves everything in its order."""

    def permutation(self, of: int) -> IntArray:
        return np.arange(of)


def test_shards_by_hand() -> None:
    labels = np.array([1, 0, 2, 0, 1, 2, 0])
    # In order of their labels: 1, 3, 6 | 0, 4 | 2, 5; in four shards: 1, 3 | 6, 0 | 4, 2 | 5.
    clients = deal_shards(labels, 2, 2, Straight())  # type: ignore[arg-type]
    assert [samples.tolist() for samples in clients] == [[0, 1, 3, 6], [2, 4, 5]]


def test_two_shards_of_mnist_are_what_the_paper_says() -> None:
    # "200 shards of size 300, and assign each of 100 clients 2 shards ... most clients will only have examples of two
    # digits." Of the shards 9 hold two digits, as no digit's samples fill whole ones.
    clients = deal_shards(MNIST, 100, 2, rng())
    assert {len(samples) for samples in clients} == {600}
    classes = classes_of(clients, MNIST)
    assert np.bincount(classes).argmax() == 2
    assert np.mean(np.array(classes) <= 2) > 0.85
    assert max(classes) <= 4


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 6), st.integers(0, 10_000))
def test_every_sample_is_in_one_shard(num_clients: int, per_client: int, num_classes: int, seed: int) -> None:
    labels = rng(seed).permutation(np.repeat(np.arange(num_classes), 50))
    clients = deal_shards(labels, num_clients, per_client, rng(seed))
    assert sorted(np.concatenate(clients).tolist()) == list(range(len(labels)))
    sizes = [len(samples) for samples in clients]
    assert max(sizes) - min(sizes) <= per_client
    # A shard that is not larger than a class holds at most two.
    if num_clients * per_client >= num_classes:
        assert max(classes_of(clients, labels)) <= 2 * per_client


def test_test_samples_are_of_a_clients_own_classes(tmp_path: Path) -> None:
    data = opened(tmp_path, partition="shards", validation_share=0.2)
    assert data.partition.generator["shards_per_client"] == 2
    assert "alpha" not in data.partition.generator
    with data.reading_test():
        for client in range(20):
            own, tested = (
                set(data.dataset.labels(data.partition.part(split))[data.indices(client, split)].tolist())
                for split in ("train", "test")
            )
            assert tested <= own | set(data.dataset.labels("train")[data.indices(client, "validation")].tolist()), (
                client
            )
        assert sum(data.sizes("test")) == 359


def test_more_shards_than_samples_are_one_line(tmp_path: Path) -> None:
    message = (
        r"data.shards_per_client=72: 20 clients need 1440 shards, but .* has 1438 training samples; must be at most 71"
    )
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, partition="shards", shards_per_client=72)
    assert opened(tmp_path, partition="shards", shards_per_client=71).num_clients == 20


# -- quantity ---------------------------------------------------------------------------------------------------------


class Halves:
    """A generator whose Dirichlet distribution is given."""

    def dirichlet(self, alpha: list[float], size: int) -> Any:
        assert np.allclose(alpha, 0.5)
        return np.array([[0.5, 0.3, 0.2]])

    def choice(self, classes: int, size: int, p: list[float]) -> IntArray:
        assert size == 0
        return np.zeros(0, dtype=np.int64)


def test_sizes_by_hand() -> None:
    # 20 samples: one each, and of the other 17 the first 8, 5 more (up to 13.6) and the rest.
    assert dirichlet_sizes(0.5, 20, 3, Halves()).tolist() == [9, 6, 5]  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1e-9, 0.1, 1.0, 1e6]), st.integers(1, 50), st.integers(0, 400), st.integers(0, 10_000))
def test_sizes_sum_up_and_leave_nobody_out(alpha: float, num_clients: int, more: int, seed: int) -> None:
    sizes = dirichlet_sizes(alpha, num_clients + more, num_clients, rng(seed))
    assert sizes.sum() == num_clients + more
    assert sizes.min() >= 1


def test_sizes_vary_as_the_dirichlet_distribution() -> None:
    # Of N shares from Dirichlet(alpha) the squared deviation, in units of the mean, is (N - 1) / (N alpha + 1).
    measured = [size_variation(dirichlet_sizes(0.5, 1_000_000, 10, rng(seed))) ** 2 for seed in range(400)]
    assert np.mean(measured) == pytest.approx(9 / 6, rel=0.05)


def test_quantity_skew_leaves_labels_alike(tmp_path: Path) -> None:
    data = opened(tmp_path, partition="quantity", alpha=0.5, validation_share=0.0)
    sizes = data.sizes("train")
    assert sizes.sum() == 1438
    assert size_variation(sizes) > 0.5
    labels = data.dataset.labels("train")[data.indices(int(sizes.argmax()), "train")]
    assert np.bincount(labels).min() > 0.5 * len(labels) / 10
    with data.reading_test():
        assert data.sizes("test").sum() == 359
        assert np.abs(data.sizes("test") - sizes * 359 / 1438).max() < 1
    assert data.partition.generator["alpha"] == 0.5
    assert opened(tmp_path, seed=4, partition="quantity", alpha=0.5).partition_hash != data.partition_hash
