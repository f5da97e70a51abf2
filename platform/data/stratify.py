"""Stratified and uniform sub-samples."""

import numpy as np

from fedloom.platform.data.artefact import IntArray
from fedloom.platform.seeding import stream

HELD_OUT_SHARE = 0.2
"""The share of samples held out as the test part of a data set without one."""


def stratified_rows(labels: IntArray, samples: int, rng: np.random.Generator) -> IntArray:
    """Sorted rows of a random sub-sample of exactly `samples`, with each class's count within one of its quota."""
    counts = np.bincount(labels)
    chosen = [
        rng.permutation(np.flatnonzero(labels == label))[:quota]
        for label, quota in enumerate(_quotas(counts, samples).tolist())
    ]
    return np.sort(np.concatenate(chosen))


def held_out(labels: IntArray) -> tuple[IntArray, IntArray]:
    """Training rows and test rows (a fifth of each class), independent of the run's seed.

    Labels are (n,); for text (n, T) the sub-sample is uniform.
    """
    count, rng = round(HELD_OUT_SHARE * len(labels)), stream(0, "held out")
    test = stratified_rows(labels, count, rng) if labels.ndim == 1 else uniform_rows(len(labels), count, rng)
    return np.setdiff1d(np.arange(len(labels)), test), test


def uniform_rows(num_rows: int, samples: int, rng: np.random.Generator) -> IntArray:
    """Sorted rows of a uniformly random sub-sample of exactly `samples`."""
    return np.sort(rng.permutation(num_rows)[:samples])


def _quotas(counts: IntArray, samples: int) -> IntArray:
    # The largest remainder method in integers, so that rounding cannot change the total.
    whole, remainder = np.divmod(counts * samples, counts.sum())
    largest = np.argsort(-remainder, kind="stable")[: samples - int(whole.sum())]
    whole[largest] += 1
    return whole.astype(np.int64)
