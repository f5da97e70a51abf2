import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedloom.platform.data.allocation import draw_samples, label_distributions, set_aside
from fedloom.platform.data.artefact import FloatArray, IntArray, atomic_folder, write_artefact
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.partition import Partition, check_arrays, prepare_partition
from fedloom.platform.data.prepare import prepare_dataset


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def label_counts(drawn: IntArray, labels: IntArray, num_classes: int) -> IntArray:
    return np.stack([np.bincount(labels[row], minlength=num_classes) for row in drawn])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset.open(prepare_dataset(DataConfig(cache=str(tmp_path_factory.mktemp("cache")))))


def options(cache: Path, **changes: Any) -> DataConfig:
    return DataConfig(cache=str(cache), **{"num_clients": 20, "alpha": 0.5, **changes})


@given(
    alpha=st.sampled_from([1e-300, 1e-6, 0.01, 0.1, 1.0, 1000.0, 1e12]),
    prior=st.lists(st.integers(0, 5), min_size=1, max_size=12).filter(any),
    seed=st.integers(0, 1000),
)
def test_label_distributions_are_distributions(alpha: float, prior: list[int], seed: int) -> None:
    p = np.array(prior) / sum(prior)
    q = label_distributions(alpha, p, 7, rng(seed))
    assert q.shape == (7, len(prior))
    assert (q >= 0).all()
    assert (q[:, p == 0] == 0).all()
    np.testing.assert_allclose(q.sum(axis=1), 1)


def test_label_distributions_have_the_moments_of_the_dirichlet() -> None:
    p = np.array([0.5, 0.3, 0.2])
    q = label_distributions(4.0, p, 200_000, rng())
    np.testing.assert_allclose(q.mean(axis=0), p, atol=0.003)
    np.testing.assert_allclose(q.var(axis=0), p * (1 - p) / (4 * len(p) + 1), atol=0.001)  # p (1 - p) / (alpha C + 1)


def test_a_vanishing_alpha_gives_one_class_by_the_prior() -> None:
    q = label_distributions(1e-300, np.array([0.75, 0.25]), 4000, rng())
    assert set(np.unique(q)) == {0.0, 1.0}
    assert abs(q[:, 0].mean() - 0.75) < 0.03


@settings(deadline=None)
@given(data=st.data(), num_clients=st.integers(1, 12), num_classes=st.integers(1, 6), seed=st.integers(0, 1000))
def test_no_sample_twice_and_equal_sizes_whatever_the_labels(
    data: st.DataObject, num_clients: int, num_classes: int, seed: int
) -> None:
    labels = np.array(data.draw(st.lists(st.integers(0, num_classes - 1), min_size=num_clients, max_size=80)))
    alpha = data.draw(st.sampled_from([1e-6, 0.1, 1.0, 1000.0]))
    prior = np.bincount(labels, minlength=num_classes) / len(labels)
    q = label_distributions(alpha, prior, num_clients, rng(seed))
    drawn = draw_samples(q, labels, len(labels) // num_clients, rng(seed))
    assert drawn.shape == (num_clients, len(labels) // num_clients)
    assert len(np.unique(drawn)) == drawn.size
    assert drawn.min() >= 0
    assert drawn.max() < len(labels)


def test_clients_get_what_they_want_where_there_is_enough() -> None:
    labels = np.array([0, 1, 2] * 10)
    q = np.array([[1.0, 0, 0], [0, 0, 1.0]])
    drawn = draw_samples(q, labels, 10, rng())
    assert label_counts(drawn, labels, 3).tolist() == [[10, 0, 0], [0, 0, 10]]


def test_a_scarce_class_is_shared_fairly_and_the_losers_take_what_is_left() -> None:
    labels = np.array([0] * 40 + [1] * 60)
    drawn = draw_samples(np.tile([1.0, 0.0], (10, 1)), labels, 10, rng())
    assert label_counts(drawn, labels, 2).tolist() == [[4, 6]] * 10


def test_who_loses_is_random() -> None:
    labels = np.array([0, 1])
    wins = [int(draw_samples(np.tile([1.0, 0.0], (2, 1)), labels, 1, rng(seed))[0, 0] == 0) for seed in range(400)]
    assert abs(np.mean(wins) - 0.5) < 0.09


def test_too_few_samples() -> None:
    with pytest.raises(ValueError, match="2 clients x 3 samples: there are only 5 samples"):
        draw_samples(np.ones((2, 1)), np.zeros(5, dtype=np.int64), 3, rng())


def reference_draw(q: FloatArray, labels: IntArray, per_client: int, generator: np.random.Generator) -> IntArray:
    """One client and one sample at a time; returns label counts (num_clients, C)."""
    pools = [list(np.flatnonzero(labels == c)) for c in range(q.shape[1])]
    counts = np.zeros(q.shape, dtype=np.int64)
    for _ in range(per_client):
        for k in generator.permutation(len(q)):
            p = q[k] * [len(pool) > 0 for pool in pools]
            c = generator.choice(len(p), p=p / p.sum())
            pools[c].pop()
            counts[k, c] += 1
    return counts


def test_the_same_statistics_as_a_client_by_client_draw() -> None:
    labels = np.repeat(np.arange(4), 20)
    q = np.array([[0.7, 0.1, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7], [0.25, 0.25, 0.25, 0.25]])
    quick = np.mean([label_counts(draw_samples(q, labels, 20, rng(s)), labels, 4) for s in range(300)], axis=0)
    slow = np.mean([reference_draw(q, labels, 20, rng(s)) for s in range(300)], axis=0)
    np.testing.assert_allclose(quick, slow, atol=0.6)


def test_labels_follow_q_where_samples_abound() -> None:
    labels = np.repeat(np.arange(5), 4000)
    q = label_distributions(20.0, np.full(5, 0.2), 10, rng(1))
    counts = label_counts(draw_samples(q, labels, 400, rng(2)), labels, 5)
    chi_square = ((counts - 400 * q) ** 2 / (400 * q)).sum()
    assert chi_square < 73.4  # 10 x 4 degrees of freedom, p = 0.001


def test_at_a_large_alpha_every_client_has_the_prior() -> None:
    labels = np.repeat(np.arange(10), 500)
    q = label_distributions(1e6, np.full(10, 0.1), 50, rng())
    counts = label_counts(draw_samples(q, labels, 100, rng()), labels, 10)
    assert ((counts - 10.0) ** 2 / 10).sum() < 561  # 50 x 9 degrees of freedom at most, p < 0.001


def test_skew_grows_as_alpha_falls() -> None:
    labels = np.repeat(np.arange(10), 500)
    largest_share = []
    for alpha in (1000.0, 10.0, 1.0, 0.1):
        q = label_distributions(alpha, np.full(10, 0.1), 50, rng())
        counts = label_counts(draw_samples(q, labels, 100, rng()), labels, 10)
        largest_share.append(counts.max(axis=1).mean() / 100)
    assert largest_share == sorted(largest_share)
    assert largest_share[0] < 0.2
    assert largest_share[-1] > 0.45  # at alpha .1 per class about half of a client is of one class


@pytest.mark.parametrize(
    ("share", "per_client", "num_validation"),
    [(0.0, 10, 0), (0.1, 10, 1), (0.1, 3, 1), (0.1, 1, 0), (0.9, 2, 1), (0.99, 10, 9), (0.25, 40, 10)],
)
def test_sizes_of_the_validation_split(share: float, per_client: int, num_validation: int) -> None:
    drawn = np.arange(3 * per_client).reshape(3, per_client)
    train, validation = map(np.stack, set_aside(drawn, drawn, share, rng()))
    assert validation.shape == (3, num_validation)
    assert np.array_equal(np.sort(np.concatenate([train, validation], axis=1), axis=1), drawn)


def test_every_sample_is_as_likely_to_be_set_aside() -> None:
    drawn = np.arange(8).reshape(2, 4)
    chosen = [set_aside(drawn, drawn, 0.25, rng(seed))[1] for seed in range(800)]
    counts = np.bincount(np.concatenate(chosen, axis=None), minlength=8)
    assert ((counts - 200) ** 2 / 200).sum() < 22.5  # 2 x 3 degrees of freedom, p = 0.001


def test_a_hundred_thousand_clients_take_seconds() -> None:
    labels = rng().integers(0, 10, 500_000)
    started_s = time.perf_counter()
    q = label_distributions(0.1, np.bincount(labels) / len(labels), 100_000, rng())
    drawn = draw_samples(q, labels, 5, rng())
    assert time.perf_counter() - started_s < 5
    assert len(np.unique(drawn)) == 500_000


def test_the_artefact(tmp_path: Path, dataset: Dataset) -> None:
    folder = prepare_partition(options(tmp_path), dataset, seed=1)
    assert folder.parent == tmp_path / "partitions"
    partition = Partition.open(folder, dataset)
    # 1438 // 20 = 71 samples of which round(7.1) validate; 359 // 20 = 17 test.
    assert partition.sizes("train").tolist() == [64] * 20
    assert partition.sizes("validation").tolist() == [7] * 20
    assert partition.size(3, "test") == 17
    assert partition.label_distributions.shape == (20, 10)
    assert partition.generator == {
        "name": "lda_per_class",
        "num_clients": 20,
        "alpha": 0.5,
        "validation_share": 0.1,
        "seed": 1,
    }
    own = [set(partition.indices(k, split).tolist()) for k in range(20) for split in ("train", "validation")]
    assert len(set().union(*own)) == 20 * 71
    assert np.array_equal(partition.all_indices("test")[17:34], partition.indices(1, "test"))
    assert json.loads((folder / "partition.json").read_text())["samples"] == {
        "train": 1280,
        "validation": 140,
        "test": 340,
    }


def test_the_test_share_has_the_clients_own_labels(tmp_path: Path, dataset: Dataset) -> None:
    partition = Partition.open(prepare_partition(options(tmp_path, alpha=0.1), dataset, seed=0), dataset)
    train, test = dataset.labels("train"), dataset.labels("test")
    agree = [
        np.bincount(train[partition.indices(k, "train")]).argmax()
        == np.bincount(test[partition.indices(k, "test")]).argmax()
        for k in range(20)
    ]
    assert np.mean(agree) > 0.7


def test_equal_inputs_give_an_equal_hash_and_others_another(tmp_path: Path, dataset: Dataset) -> None:
    def hash_of(cache: str, seed: int = 1, **changes: Any) -> str:
        return Partition.open(prepare_partition(options(tmp_path / cache, **changes), dataset, seed), dataset).hash

    same = hash_of("a")
    assert hash_of("a") == same
    assert hash_of("b", augment="crop_flip") == same
    others = {
        hash_of("a", seed=2),
        hash_of("a", alpha=0.6),
        hash_of("a", num_clients=21),
        hash_of("a", validation_share=0.2),
    }
    assert len(others | {same}) == 5


def test_another_validation_share_leaves_the_clients_samples_as_they_were(tmp_path: Path, dataset: Dataset) -> None:
    one, two = (
        Partition.open(prepare_partition(options(tmp_path, validation_share=share), dataset, 0), dataset)
        for share in (0.0, 0.3)
    )
    both = np.sort(np.concatenate([two.indices(4, "train"), two.indices(4, "validation")]))
    assert np.array_equal(one.indices(4, "train"), both)
    assert np.array_equal(one.all_indices("test"), two.all_indices("test"))


def test_more_clients_than_samples(tmp_path: Path, dataset: Dataset) -> None:
    with pytest.raises(ValueError, match=r"data.num_clients=1439: digits has 1438 training samples"):
        prepare_partition(options(tmp_path, num_clients=1439), dataset, 0)
    partition = Partition.open(prepare_partition(options(tmp_path, num_clients=1438), dataset, 0), dataset)
    assert (partition.size(0, "train"), partition.size(0, "validation"), partition.size(0, "test")) == (1, 0, 0)


def test_unknown_clients_and_splits(tmp_path: Path, dataset: Dataset) -> None:
    partition = Partition.open(prepare_partition(options(tmp_path), dataset, 0), dataset)
    for client_id in (-1, 20):
        with pytest.raises(ValueError, match=rf"client_id={client_id}: must be in 0..19"):
            partition.indices(client_id, "train")
    with pytest.raises(ValueError, match="split=val: must be one of train, validation, test"):
        partition.sizes("val")


@pytest.mark.parametrize("name", ["train", "validation", "test", "train_offsets", "label_distributions"])
def test_a_changed_file_is_named(tmp_path: Path, dataset: Dataset, name: str) -> None:
    folder = prepare_partition(options(tmp_path), dataset, 0)
    file = folder / f"{name}.npy"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}.npy: SHA-256 differs"):
        Partition.open(folder, dataset)
    with pytest.raises(ValueError, match=f"{name}.npy: SHA-256 differs"):
        prepare_partition(options(tmp_path), dataset, 0)


def test_a_changed_description_and_another_data_set_are_refused(tmp_path: Path, dataset: Dataset) -> None:
    folder = prepare_partition(options(tmp_path), dataset, 0)
    other = Dataset.open(prepare_dataset(DataConfig(cache=str(tmp_path), train_samples=500)))
    with pytest.raises(ValueError, match=r"partition.json: made for data set"):
        Partition.open(folder, other)
    description = folder / "partition.json"
    description.write_text(description.read_text().replace('"alpha": 0.5', '"alpha": 5.0'))
    with pytest.raises(ValueError, match=r"partition.json: was changed"):
        Partition.open(folder, dataset)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation": [1]}, "validation.npy: a sample is in two splits"),
        ({"train": [0, 0, 2]}, "train.npy: a sample is there twice"),
        ({"test": [5]}, r"test.npy: indices must be in 0..4"),
        ({"train": [0, -1, 2]}, r"train.npy: indices must be in 0..9"),
        ({"train_offsets": [0, 3, 3]}, "train_offsets.npy: a client has no training samples"),
        ({"train_offsets": [0, 1, 2]}, "train_offsets.npy: must rise from 0 to 3 in 3 numbers"),
        ({"train_offsets": [0, 4, 3]}, "train_offsets.npy: must rise from 0 to 3 in 3 numbers"),
        ({"test_offsets": [0, 1]}, "test_offsets.npy: must rise from 0 to 1 in 3 numbers"),
    ],
)
def test_what_cannot_be_a_partition_is_refused(changes: dict[str, list[int]], message: str) -> None:
    good = {
        "train": [0, 1, 2],
        "train_offsets": [0, 1, 3],
        "validation": [3],
        "validation_offsets": [0, 0, 1],
        "test": [4],
        "test_offsets": [0, 1, 1],
    }
    check_arrays(Path("p"), {k: np.array(v) for k, v in good.items()}, 2, 10, 5)
    with pytest.raises(ValueError, match=message):
        check_arrays(Path("p"), {k: np.array(v) for k, v in (good | changes).items()}, 2, 10, 5)


def test_a_well_signed_partition_that_overlaps_is_refused(tmp_path: Path, dataset: Dataset) -> None:
    fields = {"generator": {}, "dataset": {"name": "digits", "hash": dataset.hash}, "num_clients": 1, "samples": {}}
    arrays = {"label_distributions": np.ones((1, 1))}
    for split in ("train", "validation", "test"):
        arrays |= {split: np.array([7]), f"{split}_offsets": np.array([0, 1])}
    with atomic_folder(tmp_path / "mine") as folder:
        write_artefact(folder, "partition.json", fields, arrays)
    with pytest.raises(ValueError, match=r"validation.npy: a sample is in two splits"):
        Partition.open(tmp_path / "mine", dataset)
