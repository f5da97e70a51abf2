"""Partitions: artefacts with every client's sample indices per split, written once and identified by their hash."""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.platform.data.allocation import allocate, check_enough, describe
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
from fedloom.platform.data.config import DataConfig, cache_root, check_cache
from fedloom.platform.data.dataset import MANIFEST as DATASET, SPLITS, Dataset, TestGuard, check_split
from fedloom.platform.data.registry import check

MANIFEST = "partition.json"
KEY_LENGTH = 16


def prepare_partition(config: DataConfig, dataset: Dataset, seed: int) -> Path:
    """The folder of the partition for these options, data set and seed; written if it does not exist.

    Raises ValueError for invalid options, too many clients for the data set, and a damaged folder.
    """
    check(config)
    check_enough(config, dataset)
    generator = describe(config, dataset, seed)
    key = hash_of({"format": FORMAT, "generator": generator, "dataset": dataset.hash})[:KEY_LENGTH]
    folder = cache_root(config) / "partitions" / f"{dataset.name}-{key}"
    if not folder.is_dir():
        check_cache(config)
        arrays = allocate(config, dataset, seed)
        fields: Fields = {
            "generator": generator,
            "dataset": {"name": dataset.name, "hash": dataset.hash},
            "num_clients": generator["num_clients"],
            "samples": {split: len(arrays[split]) for split in SPLITS},
        }
        with atomic_folder(folder) as temporary:
            write_artefact(temporary, MANIFEST, fields, arrays)
    Partition.open(folder, dataset)
    return folder


def prepared_for(config: DataConfig, partition_hash: str) -> Path | None:
    """The cached data set's folder to which the partition with this hash belongs; None if either is gone."""
    root = cache_root(config)
    partition_manifest = _with_hash(root.glob(f"partitions/*/{MANIFEST}"), partition_hash)
    if partition_manifest is None:
        return None
    dataset_manifest = _with_hash(root.glob(f"*/{DATASET}"), read_manifest(partition_manifest)["dataset"]["hash"])
    return dataset_manifest and dataset_manifest.parent


def _with_hash(manifests: Iterable[Path], wanted: str) -> Path | None:
    """The first manifest that records this hash; unreadable manifests are skipped."""
    for path in sorted(manifests):
        with suppress(ValueError, OSError, KeyError, TypeError):
            if json.loads(path.read_text())["hash"] == wanted:
                return path
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Every client's sample indices per split, memory-mapped; created by `Partition.open`."""

    path: Path
    hash: str
    """SHA-256 (hex) of the content and of the rule's parameters."""
    dataset_hash: str
    num_clients: int
    generator: Fields
    """Name, parameters and seed of the allocation rule."""
    label_distributions: FloatArray | None
    """The clients' label distributions (num_clients, C) of a partition by label, otherwise None.

    For lda and lda_sequential, those that samples were drawn from; otherwise those of the clients' samples.
    """
    natural_clients: IntArray | None
    """(num_clients,) indices into the data set's `client_names` of a natural partition, otherwise None."""
    _arrays: dict[str, AnyArray]
    _guard: TestGuard

    @classmethod
    def open(cls, path: Path, dataset: Dataset, guard: TestGuard | None = None) -> "Partition":
        """Opens a folder that `prepare_partition` wrote; test indices are readable while the guard is open (or None).

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
        num_test = dataset.num_samples("test") if _test_part(manifest["generator"]) == "test" else None
        check_arrays(path, arrays, manifest["num_clients"], dataset.num_samples("train"), num_test)
        return cls(
            path=path,
            hash=manifest["hash"],
            dataset_hash=manifest["dataset"]["hash"],
            num_clients=manifest["num_clients"],
            generator=manifest["generator"],
            label_distributions=arrays.get("label_distributions"),
            natural_clients=arrays.get("natural_clients"),
            _arrays=arrays,
            _guard=guard or TestGuard(is_open=True),
        )

    def part(self, split: str) -> str:
        """The part of the data set, "train" or "test", that the split's indices refer to.

        This is the train part for "train" and "validation". Test indices refer to the test part, or with a `test_share`
        to samples of the train part that are in no other split.
        Raises ValueError for an unknown split.
        """
        check_split(split)
        return _test_part(self.generator) if split == "test" else "train"

    def indices(self, client_id: int, split: str) -> IntArray:
        """The client's sample indices in the split, into the data set's part that `part` names; read-only.

        Raises TestReadError for guarded test indices, ValueError for an unknown split or client.
        """
        start, stop = self._range(client_id, split)
        indices: IntArray = self._arrays[split][start:stop]
        return indices

    def size(self, client_id: int, split: str) -> int:
        """The client's number of samples in the split; raises like `indices`."""
        start, stop = self._range(client_id, split)
        return stop - start

    def sizes(self, split: str) -> IntArray:
        """The number of samples of every client in the split (num_clients,); raises like `indices`."""
        return np.diff(self._array(split, "_offsets"))

    def all_indices(self, split: str) -> IntArray:
        """All clients' indices in the split, concatenated in client order, read-only; raises like `indices`."""
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


def _test_part(generator: Fields) -> str:
    return "train" if "test_share" in generator else "test"


def check_arrays(
    path: Path, arrays: dict[str, AnyArray], num_clients: int, num_train: int, num_test: int | None
) -> None:
    """Raises ValueError naming the file whose offsets or indices are not a partition of the data set.

    `num_train` and `num_test` are the data set's numbers of samples; `num_test` is None if the clients' test indices
    refer to the train part, too, and so must differ from those of the other splits.
    """
    for split in SPLITS:
        file, offsets, indices = path / f"{split}_offsets.npy", arrays[f"{split}_offsets"], len(arrays[split])
        rises = len(offsets) == num_clients + 1 and bool((np.diff(offsets) >= 0).all())
        if not rises or offsets[0] != 0 or offsets[-1] != indices:
            raise ValueError(f"{file}: must rise from 0 to {indices} in {num_clients + 1} numbers; prepare it again")
    if num_clients and np.diff(arrays["train_offsets"]).min() < 1:
        raise ValueError(f"{path / 'train_offsets.npy'}: a client has no training samples; prepare the partition again")
    used = np.zeros(num_train, dtype=bool)
    _mark(path / "train.npy", arrays["train"], used)
    _mark(path / "validation.npy", arrays["validation"], used)
    _mark(path / "test.npy", arrays["test"], used if num_test is None else np.zeros(num_test, dtype=bool))


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
