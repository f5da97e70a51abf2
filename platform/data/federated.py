"""What a run reads: every client's share of a data set, and the central sets, with the test set under lock."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from fedloom.platform.data.artefact import IntArray
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.guard import TestGuard, TestReadError, check_split
from fedloom.platform.data.partition import Partition

__all__ = ["FederatedData", "TestReadError"]


@dataclass(frozen=True, slots=True, eq=False)
class FederatedData:
    """A data set and its partition; splits are "train", "validation" and "test"; made by `FederatedData.open`.

    Everything that touches split "test", here and through `dataset` and `partition`, raises TestReadError outside
    `with data.reading_test():`. Clients' test samples that lie in the data set's train part (`Partition.part`) are
    locked by their indices: without those nobody can tell them from the samples of other splits.
    """

    dataset: Dataset
    partition: Partition
    _guard: TestGuard

    @classmethod
    def open(cls, dataset_path: Path, partition_path: Path) -> "FederatedData":
        """Memory-maps what `prepare_dataset` and `prepare_partition` wrote; raises ValueError as they do on re-use."""
        guard = TestGuard()
        dataset = Dataset.open(dataset_path, guard)
        return cls(dataset, Partition.open(partition_path, dataset, guard), guard)

    @property
    def num_clients(self) -> int:
        """How many clients are registered."""
        return self.partition.num_clients

    @property
    def partition_hash(self) -> str:
        """SHA-256 (hex) of the partition."""
        return self.partition.hash

    def reading_test(self) -> AbstractContextManager[None]:
        """Allows reading the test split for the block: the final evaluation, and nothing else."""
        return self._guard.reading_test()

    def size(self, client_id: int, split: str) -> int:
        """How many samples the client has in the split."""
        return self.partition.size(client_id, split)

    def sizes(self, split: str) -> IntArray:
        """Samples (num_clients,) of every client in the split."""
        return self.partition.sizes(split)

    def indices(self, client_id: int, split: str) -> IntArray:
        """The client's sample indices: into the part of the data set that `partition.part(split)` names.

        That is the train part, and for split "test" the test part unless the partition was made with a `test_share`.
        """
        return self.partition.indices(client_id, split)

    def client(self, client_id: int, split: str) -> tuple[Tensor, Tensor]:
        """The client's inputs and labels as `Dataset.tensors` gives them; there may be none."""
        return self.dataset.tensors(self.partition.part(split), self.indices(client_id, split))

    def central(self, split: str, share: float = 1.0, rng: np.random.Generator | None = None) -> tuple[Tensor, Tensor]:
        """All clients' samples of the split in client order, as `client`; for "test" the data set's whole test part.

        The test part is in its own order, and the same whatever the clients' own test samples are.
        A `share` below 1 keeps that random part of them (at least one), drawn from `rng`, order unchanged.
        Raises ValueError for a share outside (0, 1] or without a generator.
        """
        check_split(split)
        if split == "test":
            part, indices = "test", np.arange(self.dataset.num_samples("test"))
        else:
            part, indices = "train", self.partition.all_indices(split)
        return self.dataset.tensors(part, _keep(indices, share, rng))


def _keep(indices: IntArray, share: float, rng: np.random.Generator | None) -> IntArray:
    if not 0 < share <= 1:
        raise ValueError(f"share={share}: must be in (0, 1]")
    if share == 1 or len(indices) == 0:
        return indices
    if rng is None:
        raise ValueError(f"share={share}: a share below 1 needs a random generator")
    kept = rng.choice(len(indices), size=max(1, round(share * len(indices))), replace=False)
    return indices[np.sort(kept)]
