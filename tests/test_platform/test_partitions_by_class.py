"""Class by class and client after client: the label and size variation of the authors' partitions, and their laws."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedloom.platform.data.allocation import (
    EXHAUSTED_MASS,
    FEWEST,
    class_shares,
    cut_in_shares,
    draw_in_sequence,
    draw_samples,
    label_distributions,
    split_classes,
)
from fedloom.platform.data.artefact import FloatArray, IntArray
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.federated import FederatedData, label_variation, size_variation
from fedloom.platform.data.partition import prepare_partition
from fedloom.platform.data.prepare import prepare_dataset

CIFAR = np.repeat(np.arange(10), 5000)
"""The training labels of CIFAR-10 but for their order, which no partition depends on."""


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def offsets_of(clients: list[IntArray]) -> IntArray:
    return np.cumsum([0, *map(len, clients)])


# -- what alpha means -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "num_clients", "labels", "sizes"), [(0.1, 20, 0.744, 0.60), (0.2, 8, 0.616, 0.32)], ids=["sf", "spider"]
)
def test_class_by_class_varies_as_much_as_the_authors_partition(
    alpha: float, num_clients: int, labels: float, sizes: float
) -> None:
    def measured(seed: int) -> tuple[float, float]:
        clients, _ = split_classes(alpha, CIFAR, 10, num_clients, rng(seed))
        per_client = np.array([len(own) for own in clients])
        return label_variation(CIFAR[np.concatenate(clients)], offsets_of(clients), 10), size_variation(per_client)

    # Over single draws the deviations are .03 and .09, so that their mean over 20 is known to .007 and .02.
    mean = np.mean([measured(seed) for seed in range(20)], axis=0)
    assert mean == pytest.approx([labels, sizes], abs=0.03)


def test_client_after_client_is_more_skewed_than_in_turn() -> None:
    def measured(draw: Any, alpha: float) -> float:
        q = label_distributions(alpha, np.full(10, 0.1), 100, rng(1))
        drawn = draw(q, CIFAR, 500, rng(2))
        return label_variation(CIFAR[drawn.reshape(-1)], np.arange(101) * 500, 10)

    assert measured(draw_in_sequence, 0.1) == pytest.approx(0.733, abs=0.025)  # FedorAS' framework: .733
    assert measured(draw_samples, 0.1) == pytest.approx(0.665, abs=0.025)
    assert measured(draw_in_sequence, 1000) == pytest.approx(0.06, abs=0.01)


def test_variations_in_numbers() -> None:
    # Two of four classes; all of one class; one of each class; nothing, which does not count.
    labels = np.array([0, 1, 2, 2, 2, 0, 1, 2, 3])
    assert label_variation(labels, np.array([0, 2, 5, 9, 9]), 4) == pytest.approx((0.5 + 0.75 + 0.0) / 3)
    assert size_variation(np.array([2, 4, 6])) == pytest.approx(np.sqrt(8 / 3) / 4)


def test_label_variation_takes_any_number_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    labels, offsets = rng().integers(0, 5, 1000), np.arange(0, 1001, 10)
    at_once = label_variation(labels, offsets, 5)
    monkeypatch.setattr("fedloom.platform.data.federated.CLIENTS_AT_ONCE", 7)
    assert label_variation(labels, offsets, 5) == pytest.approx(at_once, rel=1e-12)


# -- class by class ---------------------------------------------------------------------------------------------------


class Drawn:
    """A generator whose Dirichlet distributions are given."""

    def __init__(self, rows: list[list[float]]) -> None:
        self.rows = iter(rows)

    def dirichlet(self, alpha: FloatArray) -> FloatArray:
        assert np.array_equal(alpha, np.full(3, 0.5))
        return np.array(next(self.rows))

    def choice(self, values: IntArray) -> int:
        return int(values[0])


def test_shares_by_hand() -> None:
    drawn = Drawn([[0.5, 0.3, 0.2], [0.6, 0.1, 0.3], [0.25, 0.75, 0.0], [1.0, 0.0, 0.0]])
    shares, sizes = class_shares(0.5, [10, 10, 10, 6], 3, drawn)  # type: ignore[arg-type]
    # 36 samples, 12 per client. After the second class: 5 + 6 = 11, 3 + 1 = 4, 2 + 3 = 5: all take part.
    np.testing.assert_allclose(shares[:2], [[0.5, 0.3, 0.2], [0.6, 0.1, 0.3]])
    # The third gives 2 (of 2.5), 8 and 0: 13, 12, 5. Only the last has less than 12, and it drew nothing: it takes all.
    np.testing.assert_allclose(shares[2:], [[0.25, 0.75, 0.0], [0.0, 0.0, 1.0]])
    assert sizes.tolist() == [13, 12, 11]


def test_pieces_are_rounded_down_by_their_sums() -> None:
    pieces = cut_in_shares(np.arange(10), np.array([0.25, 0.25, 0.5]))
    assert [piece.tolist() for piece in pieces] == [[0, 1], [2, 3, 4], [5, 6, 7, 8, 9]]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([0.1, 1.0, 1e4]), st.integers(1, 6), st.integers(5, 10), st.integers(0, 10_000))
def test_every_sample_goes_to_one_client(alpha: float, num_clients: int, num_classes: int, seed: int) -> None:
    labels = rng(seed).integers(0, num_classes, 400)
    clients, shares = split_classes(alpha, labels, num_classes, num_clients, rng(seed))
    assert sorted(np.concatenate(clients).tolist()) == list(range(400))
    assert min(map(len, clients)) >= FEWEST
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    assert (shares >= 0).all()


def test_a_partition_that_cannot_be_is_one_line() -> None:
    labels = np.zeros(200, dtype=np.int64)  # with one class and a tiny alpha one client gets everything
    with pytest.raises(ValueError, match=r"data.alpha=1e-06: .* a client of 5 with fewer than 10 samples; choose"):
        split_classes(1e-6, labels, 1, 5, rng())


# -- client after client ----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([1e-3, 0.1, 1.0, 1e4]), st.integers(1, 9), st.integers(0, 10_000))
def test_clients_draw_distinct_samples(alpha: float, num_clients: int, seed: int) -> None:
    labels = rng(seed).integers(0, 4, 90)
    q = label_distributions(alpha, np.full(4, 0.25), num_clients, rng(seed))
    drawn = draw_in_sequence(q, labels, 90 // num_clients, rng(seed))
    assert drawn.shape == (num_clients, 90 // num_clients)
    assert len(np.unique(drawn)) == drawn.size


def one_by_one(q: FloatArray, labels: IntArray, per_client: int, generator: np.random.Generator) -> IntArray:
    """Client after client, sample after sample; label counts (num_clients, C)."""
    pools = [list(np.flatnonzero(labels == c)) for c in range(q.shape[1])]
    counts = np.zeros(q.shape, dtype=np.int64)
    for k in range(len(q)):
        for _ in range(per_client):
            p = (q[k] + EXHAUSTED_MASS) * [len(pool) > 0 for pool in pools]
            c = generator.choice(len(p), p=p / p.sum())
            pools[c].pop()
            counts[k, c] += 1
    return counts


def test_the_same_statistics_as_sample_after_sample() -> None:
    labels = np.repeat(np.arange(4), 20)
    q = np.array([[0.7, 0.3, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])

    def quick(seed: int) -> IntArray:
        drawn = draw_in_sequence(q, labels, 20, rng(seed))
        return np.stack([np.bincount(labels[own], minlength=4) for own in drawn])

    quickly = np.mean([quick(seed) for seed in range(300)], axis=0)
    slowly = np.mean([one_by_one(q, labels, 20, rng(seed)) for seed in range(300)], axis=0)
    np.testing.assert_allclose(quickly, slowly, atol=0.8)


# -- the artefact -----------------------------------------------------------------------------------------------------


def opened(root: Path, **changes: Any) -> tuple[Dataset, FederatedData]:
    config = DataConfig(**{"cache": str(root), "num_clients": 8, "alpha": 0.2, **changes})
    folder = prepare_dataset(config)
    dataset = Dataset.open(folder)
    return dataset, FederatedData.open(folder, prepare_partition(config, dataset, seed=3))


@pytest.mark.parametrize("test_share", [None, 0.2])
def test_test_samples_have_the_labels_of_training(tmp_path: Path, test_share: float | None) -> None:
    dataset, data = opened(tmp_path, partition="dirichlet_classes", validation_share=0.2, test_share=test_share)
    partition = data.partition
    assert partition.generator["name"] == "dirichlet_classes"
    assert partition.generator["alpha"] == 0.2
    with data.reading_test():
        tested = [dataset.labels(partition.part("test"))[partition.indices(k, "test")] for k in range(8)]
    shares = np.stack([np.bincount(labels, minlength=10) / max(len(labels), 1) for labels in tested])
    assert np.abs(shares - partition.label_distributions).sum(axis=1).mean() / 2 < 0.15
    assert sum(map(len, tested)) == (359 if test_share is None else pytest.approx(0.2 * 1438, abs=8))
    assert data.label_variation() > 0.5
    assert size_variation(data.sizes("train")) > 0.15


def test_client_after_client_keeps_sizes_equal(tmp_path: Path) -> None:
    _, data = opened(tmp_path, partition="lda_sequential", num_clients=20)
    assert data.partition.generator["name"] == "lda_sequential"
    assert data.sizes("train").tolist() == [64] * 20
    _, in_turn = opened(tmp_path, partition="lda", num_clients=20)
    assert data.label_variation() > in_turn.label_variation()
    assert data.partition_hash != in_turn.partition_hash


def test_too_many_clients_for_ten_samples_each_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"digits has 1438 training samples; every client needs at least 10$"):
        opened(tmp_path, partition="dirichlet_classes", num_clients=144)
