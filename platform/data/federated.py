"""Federated data: the clients' samples and the server's, with a lock on the test set."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedloom.platform.data.artefact import IntArray
from fedloom.platform.data.dataset import VALIDATION, Dataset, StoredSamples, TestGuard, check_split
from fedloom.platform.data.partition import Partition
from fedloom.platform.data.trees import Tree


@dataclass(frozen=True, slots=True, eq=False)
class FederatedData:
    """A data set and its partition into the splits "train", "validation" and "test"; created by `FederatedData.open`.

    Every access to the split "test", here or through `dataset` and `partition`, raises TestReadError outside
    `with data.reading_test():`. If clients' test samples are in the data set's train part (see `Partition.part`), only
    their indices are locked, without which they cannot be distinguished from the samples of other splits.
    """

    dataset: Dataset
    partition: Partition
    _guard: TestGuard

    @classmethod
    def open(cls, dataset_path: Path, partition_path: Path) -> "FederatedData":
        """Memory-maps the folders of `prepare_dataset` and `prepare_partition`; ValueError if one is damaged."""
        guard = TestGuard()
        dataset = Dataset.open(dataset_path, guard)
        return cls(dataset, Partition.open(partition_path, dataset, guard), guard)

    def on(self, device: torch.device, most_bytes: int) -> "FederatedData":
        """The same data with its samples on a device (see `Dataset.on`); both share one lock on the test set."""
        return replace(self, dataset=self.dataset.on(device, most_bytes))

    @property
    def num_clients(self) -> int:
        """The number of registered clients."""
        return self.partition.num_clients

    @property
    def partition_hash(self) -> str:
        """SHA-256 (hex) of the partition."""
        return self.partition.hash

    def reading_test(self) -> AbstractContextManager[None]:
        """Allows reading the test split within the block; only for the final evaluation."""
        return self._guard.reading_test()

    def size(self, client_id: int, split: str) -> int:
        """The client's number of samples in the split."""
        return self.partition.size(client_id, split)

    def sizes(self, split: str) -> IntArray:
        """The number of samples of every client in the split (num_clients,)."""
        return self.partition.sizes(split)

    def label_variation(self) -> float | None:
        """Mean total variation of a client's training labels from uniform ones; None for texts or without classes."""
        if self.dataset.per_position or not self.dataset.has_labels:
            return None
        labels = self.dataset.labels("train")
        offsets = np.concatenate([[0], np.cumsum(self.sizes("train"))])
        return label_variation(labels[self.partition.all_indices("train")], offsets, self.dataset.num_classes)

    def indices(self, client_id: int, split: str) -> IntArray:
        """The client's sample indices into the part of the data set that `partition.part(split)` names.

        This is the train part; for the split "test" it is the test part unless the partition has a `test_share`.
        """
        return self.partition.indices(client_id, split)

    def client(self, client_id: int, split: str) -> tuple[Tree, Tree]:
        """The client's inputs and labels as returned by `Dataset.tensors`; possibly empty."""
        return self.stored(client_id, split).tensors()

    def stored(self, client_id: int, split: str) -> StoredSamples:
        """The client's samples, to be read in batches."""
        return StoredSamples(self.dataset, self.partition.part(split), self.indices(client_id, split))

    def expect(self, splits_of_clients: Iterable[tuple[int, Sequence[str]]]) -> None:
        """Starts reading the samples of these clients in these splits before they are needed; see `Dataset.expect`."""
        self.dataset.expect(
            (self.partition.part(split), self.indices(client_id, split))
            for client_id, splits in splits_of_clients
            for split in splits
        )

    def clients(self, client_ids: Sequence[int], splits: Sequence[str]) -> tuple[tuple[Tree, Tree], list[int]]:
        """Stored samples of several clients, client after client, and their numbers; all splits must be of one part."""
        (part,) = {self.partition.part(split) for split in splits}
        indices = [np.concatenate([self.indices(client_id, split) for split in splits]) for client_id in client_ids]
        return self.dataset.stored(part, np.concatenate(indices)), [len(client_indices) for client_indices in indices]

    def num_central(self, split: str) -> int:
        """The number of samples that `central` returns."""
        return self.dataset.num_samples(split) if self._is_whole(split) else len(self.partition.all_indices(split))

    def _is_whole(self, split: str) -> bool:
        return split == "test" or (split == VALIDATION and self.dataset.has_validation)

    def central(self, split: str, share: float = 1.0, rng: np.random.Generator | None = None) -> StoredSamples:
        """All clients' samples of the split in client order; for "test" the data set's whole test part.

        The test part is in its own order and does not depend on the clients' test samples. For "validation" it is the
        data set's validation part, if it has one.
        A `share` below 1 selects a random part of the samples (at least one), drawn from `rng`, in unchanged order.
        Raises ValueError for a share outside (0, 1] or without a generator.
        """
        check_split(split)
        self._guard.check(split)
        if not 0 < share <= 1:
            raise ValueError(f"share={share}: must be in (0, 1]")
        if self._is_whole(split):
            part, indices = split, np.arange(self.dataset.num_samples(split))
        else:
            part, indices = "train", self.partition.all_indices(split)
        if share < 1 and len(indices):
            if rng is None:
                raise ValueError(f"share={share}: a share below 1 needs a random generator")
            size = max(1, round(share * len(indices)))
            indices = indices[np.sort(rng.choice(len(indices), size=size, replace=False))]
        return StoredSamples(self.dataset, part, indices)


CLIENTS_AT_ONCE = 10_000


def label_variation(labels: IntArray, offsets: IntArray, num_classes: int) -> float:
    """Mean over clients of the total variation distance of a client's labels from the uniform distribution.

    `labels` holds all clients' labels, client k's from `offsets[k]` to `offsets[k + 1]`. 0: every client has equally
    many samples of each class; 1 - 1/C: every client has one class. Clients without samples do not count.
    """
    total, clients = 0.0, 0
    for first in range(0, len(offsets) - 1, CLIENTS_AT_ONCE):
        bounds = offsets[first : first + CLIENTS_AT_ONCE + 1]
        owners = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        # Stored labels may be uint64, of which and of int64 NumPy makes float64.
        cells = owners * num_classes + labels[bounds[0] : bounds[-1]].astype(np.int64)
        counts = np.bincount(cells, minlength=(len(bounds) - 1) * num_classes).reshape(-1, num_classes)
        counts = counts[counts.sum(axis=1) > 0]
        shares = counts / counts.sum(axis=1, keepdims=True)
        total += float(np.abs(shares - 1 / num_classes).sum()) / 2
        clients += len(counts)
    return total / clients


def size_variation(sizes: IntArray) -> float:
    """Standard deviation of the clients' numbers of samples, in units of their mean."""
    return float(np.std(sizes) / np.mean(sizes))
