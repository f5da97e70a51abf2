"""Sub-samples: some that keep the shares of the classes, and some that know no classes."""

import numpy as np

from fedloom.platform.data.artefact import IntArray


def stratified_rows(labels: IntArray, samples: int, rng: np.random.Generator) -> IntArray:
    """Sorted rows of a random sub-sample of exactly `samples`, each class within one of its proportional share."""
    counts = np.bincount(labels)
    chosen = [
        rng.permutation(np.flatnonzero(labels == label))[:quota]
        for label, quota in enumerate(_quotas(counts, samples).tolist())
    ]
    return np.sort(np.concatenate(chosen))


def uniform_rows(num_rows: int, samples: int, rng: np.random.Generator) -> IntArray:
    """Sorted rows of a random sub-sample of exactly `samples`, each row as likely as any other."""
    return np.sort(rng.permutation(num_rows)[:samples])


def _quotas(counts: IntArray, samples: int) -> IntArray:
    # Largest remainder, in integers: no rounding can change the total.
    whole, remainder = np.divmod(counts * samples, counts.sum())
    largest = np.argsort(-remainder, kind="stable")[: samples - int(whole.sum())]
    whole[largest] += 1
    return whole.astype(np.int64)
