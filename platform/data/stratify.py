"""Sub-samples: some that keep the shares of the classes, and some that know no classes."""

import numpy as np

from fedloom.platform.data.artefact import IntArray
from fedloom.platform.seeding import stream

HELD_OUT_SHARE = 0.2
"""The share that becomes the test part of a data set that has none."""


def stratified_rows(labels: IntArray, samples: int, rng: np.random.Generator) -> IntArray:
    """Sorted rows of a random sub-sample of exactly `samples`, each class within one of its proportional share."""
    counts = np.bincount(labels)
    chosen = [
        rng.permutation(np.flatnonzero(labels == label))[:quota]
        for label, quota in enumerate(_quotas(counts, samples).tolist())
    ]
    return np.sort(np.concatenate(chosen))


def held_out(labels: IntArray) -> tuple[IntArray, IntArray]:
    """Rows that train and rows that test, a fifth of each class, the same whatever the run's seed.

    Labels (n,); those of text (n, T) have no classes to be kept.
    """
    count, rng = round(HELD_OUT_SHARE * len(labels)), stream(0, "held out")
    test = stratified_rows(labels, count, rng) if labels.ndim == 1 else uniform_rows(len(labels), count, rng)
    return np.setdiff1d(np.arange(len(labels)), test), test


def uniform_rows(num_rows: int, samples: int, rng: np.random.Generator) -> IntArray:
    """Sorted rows of a random sub-sample of exactly `samples`, each row as likely as any other."""
    return np.sort(rng.permutation(num_rows)[:samples])


def _quotas(counts: IntArray, samples: int) -> IntArray:
    # Largest remainder, in integers: no rounding can change the total.
    whole, remainder = np.divmod(counts * samples, counts.sum())
    largest = np.argsort(-remainder, kind="stable")[: samples - int(whole.sum())]
    whole[largest] += 1
    return whole.astype(np.int64)
