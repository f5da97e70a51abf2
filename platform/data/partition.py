"""A partition as an artefact: which sample belongs to which client and split, written once, referred to by hash."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.platform.data.artefact import (
    FORMAT,
    AnyArray,
    Fields,
    FloatArray,
    IntArray,
    atomic_folder,
    hash_of,
    open_arrays,
    read_manifest,
    verify_arrays,
    write_artefact,
)
from fedloom.platform.data.config import DataConfig, cache_root, check
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.guard import SPLITS, TestGuard, check_split
from fedloom.platform.data.lda import draw_samples, label_distributions, split_validation
from fedloom.platform.seeding import stream

MANIFEST = "partition.json"
KEY_LENGTH = 16


def prepare_partition(config: DataConfig, dataset: Dataset, seed: int) -> Path:
    """The folder of the partition for these options, this data set and this seed; written if it is not there yet.

    Raises ValueError for bad options, more clients than training samples, and a damaged folder.
    """
    check(config)
    _check_enough(config, dataset)
    generator: Fields = {
        "name": "lda_per_class",
        "num_clients": config.num_clients,
        "alpha": float(config.alpha),
        "validation_share": float(config.validation_share),
        "seed": seed,
    }
    key = hash_of({"format": FORMAT, "generator": generator, "dataset": dataset.hash})[:KEY_LENGTH]
    folder = cache_root(config) / "partitions" / f"{dataset.name}-{key}"
    if not folder.is_dir():
        _write(folder, dataset, generator, _generate(config, dataset, seed))
    Partition.open(folder, dataset)
    return folder


def _check_enough(config: DataConfig, dataset: Dataset) -> None:
    samples = dataset.num_samples("train")
    if config.num_clients > samples:
        raise ValueError(
            f"data.num_clients={config.num_clients}: {dataset.name} has {samples} training samples; "
            "every client needs at least one"
        )


def _generate(config: DataConfig, dataset: Dataset, seed: int) -> dict[str, AnyArray]:
    """The partition's arrays: label distributions, and per split the flat indices and the clients' offsets."""
    K = config.num_clients
    train_labels, test_labels = dataset.labels("train"), dataset.labels("test")
    prior = np.bincount(train_labels, minlength=dataset.num_classes) / len(train_labels)
    # One stream per purpose: another validation share leaves everybody's samples and test shares as they were.
    q = label_distributions(config.alpha, prior, K, stream(seed, "partition", "labels"))
    drawn = draw_samples(q, train_labels, len(train_labels) // K, stream(seed, "partition", "train"))
    train, validation = split_validation(drawn, config.validation_share, stream(seed, "partition", "validation"))
    test = np.sort(draw_samples(q, test_labels, len(test_labels) // K, stream(seed, "partition", "test")), axis=1)
    arrays: dict[str, AnyArray] = {"label_distributions": q}
    for split, indices in zip(SPLITS, (train, validation, test), strict=True):
        arrays[split] = indices.reshape(-1)
        arrays[f"{split}_offsets"] = np.arange(K + 1, dtype=np.int64) * indices.shape[1]
    return arrays


def _write(folder: Path, dataset: Dataset, generator: Fields, arrays: dict[str, AnyArray]) -> None:
    fields: Fields = {
        "generator": generator,
        "dataset": {"name": dataset.name, "hash": dataset.hash},
        "num_clients": generator["num_clients"],
        "samples": {split: len(arrays[split]) for split in SPLITS},
    }
    with atomic_folder(folder) as temporary:
        write_artefact(temporary, MANIFEST, fields, arrays)


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Every client's sample indices per split, memory-mapped; made by `Partition.open`."""

    path: Path
    hash: str
    """SHA-256 (hex) of the content and the parameters that made it."""
    dataset_hash: str
    num_clients: int
    generator: Fields
    """Name, parameters and seed of what made it."""
    label_distributions: FloatArray
    """q (num_clients, C): what the clients' labels were drawn from."""
    _arrays: dict[str, AnyArray]
    _guard: TestGuard

    @classmethod
    def open(cls, path: Path, dataset: Dataset, guard: TestGuard | None = None) -> "Partition":
        """Opens a folder that `prepare_partition` wrote; test indices can be read while the guard is open (or None).

        Raises ValueError naming the file if its hash is not the recorded one, it belongs to another data set, an
        index is out of range or in two places, or a client has no training samples.
        """
        path = Path(path)
        manifest = read_manifest(path / MANIFEST)
        if manifest["dataset"]["hash"] != dataset.hash:
            raise ValueError(
                f"{path / MANIFEST}: made for data set {manifest['dataset']['hash'][:KEY_LENGTH]}, "
                f"not for {dataset.hash[:KEY_LENGTH]} ({dataset.path}); prepare the partition again"
            )
        arrays = open_arrays(path, manifest)
        verify_arrays(path, manifest)
        check_arrays(path, arrays, manifest["num_clients"], dataset.num_samples("train"), dataset.num_samples("test"))
        return cls(
            path=path,
            hash=manifest["hash"],
            dataset_hash=manifest["dataset"]["hash"],
            num_clients=manifest["num_clients"],
            generator=manifest["generator"],
            label_distributions=arrays["label_distributions"],
            _arrays=arrays,
            _guard=guard or TestGuard(is_open=True),
        )

    def indices(self, client_id: int, split: str) -> IntArray:
        """The client's sample indices of the split, read-only: into the test part for "test", else the train part.

        Raises TestReadError for guarded test indices, ValueError for an unknown split or client.
        """
        start, stop = self._range(client_id, split)
        indices: IntArray = self._arrays[split][start:stop]
        return indices

    def size(self, client_id: int, split: str) -> int:
        """How many samples the client has in the split; raises as `indices`."""
        start, stop = self._range(client_id, split)
        return stop - start

    def sizes(self, split: str) -> IntArray:
        """Samples (num_clients,) of every client in the split; raises as `indices`."""
        return np.diff(self._array(split, "_offsets"))

    def all_indices(self, split: str) -> IntArray:
        """All clients' indices of the split, in client order, read-only; raises as `indices`."""
        return self._array(split, "")

    def _range(self, client_id: int, split: str) -> tuple[int, int]:
        if not 0 <= client_id < self.num_clients:
            raise ValueError(f"client_id={client_id}: must be in 0..{self.num_clients - 1}")
        offsets = self._array(split, "_offsets")
        return int(offsets[client_id]), int(offsets[client_id + 1])

    def _array(self, split: str, kind: str) -> IntArray:
        check_split(split)
        self._guard.check(split)
        array: IntArray = self._arrays[f"{split}{kind}"]
        return array


def check_arrays(path: Path, arrays: dict[str, AnyArray], num_clients: int, num_train: int, num_test: int) -> None:
    """Raises ValueError naming the file whose offsets or indices cannot be a partition of such a data set."""
    for split in SPLITS:
        _check_offsets(path / f"{split}_offsets.npy", arrays[f"{split}_offsets"], num_clients, len(arrays[split]))
    if num_clients and np.diff(arrays["train_offsets"]).min() < 1:
        raise ValueError(f"{path / 'train_offsets.npy'}: a client has no training samples; prepare the partition again")
    used = np.zeros(num_train, dtype=bool)
    _mark(path / "train.npy", arrays["train"], used)
    _mark(path / "validation.npy", arrays["validation"], used)
    _mark(path / "test.npy", arrays["test"], np.zeros(num_test, dtype=bool))


def _check_offsets(file: Path, offsets: IntArray, num_clients: int, num_indices: int) -> None:
    rises = len(offsets) == num_clients + 1 and bool((np.diff(offsets) >= 0).all())
    if not rises or offsets[0] != 0 or offsets[-1] != num_indices:
        raise ValueError(f"{file}: must rise from 0 to {num_indices} in {num_clients + 1} numbers; prepare it again")


def _mark(file: Path, indices: IntArray, used: AnyArray) -> None:
    """Marks the indices as used, in place; raises ValueError if one is out of range or was used before."""
    if len(indices) and not (indices.min() >= 0 and indices.max() < len(used)):
        raise ValueError(f"{file}: indices must be in 0..{len(used) - 1}; prepare the partition again")
    before = int(used.sum())
    if used[indices].any():
        raise ValueError(f"{file}: a sample is in two splits; prepare the partition again")
    used[indices] = True
    if int(used.sum()) - before != len(indices):
        raise ValueError(f"{file}: a sample is there twice; prepare the partition again")
