"""Uniform draws inside a narrow cost interval by meet-in-the-middle (Horowitz & Sahni 1974), for few decisions."""

import math

import numpy as np

from fedloom.platform.search.base import Interval
from fedloom.platform.spaces.genome import Floats, Ints
from fedloom.tiers.costs import CostTable

MOST_COMBINATIONS = 1 << 16
"""The largest number of combinations of options of one half of the decisions."""


class Halves:
    """All architectures of an additive table whose cost lies in an interval, counted but not enumerated.

    The costs of all combinations of the last decisions are sorted; for each combination of the first decisions, the
    completions inside the interval form a range. Sums round differently here than in the table, so a few architectures
    outside within rounding error may be included, which the caller must check.
    """

    def __init__(self, table: CostTable, interval: Interval) -> None:
        middle = _middle(table)
        assert middle is not None, "ask `applies` first"
        rows = [np.asarray(row, dtype=np.float64) for row in table.options]
        self.shapes = [tuple(len(row) for row in half) for half in (rows[:middle], rows[middle:])]
        first, last = _sums(rows[:middle]) + table.fixed, _sums(rows[middle:])
        self.order = np.argsort(last, kind="stable")
        finite = first[np.isfinite(first)]
        slack = 1e-12 * float(np.abs(finite).max(initial=0.0) + np.abs(last[np.isfinite(last)]).max(initial=0.0))
        ordered = last[self.order]
        low, high = max(interval.lower, -1e300), min(interval.upper, 1e300)  # avoids differences of infinities
        self.start = np.searchsorted(ordered, low - slack - first, "right")
        stop = np.searchsorted(ordered, high + slack - first, "right")
        self.ends = np.cumsum(np.maximum(stop - self.start, 0))

    @staticmethod
    def applies(table: CostTable) -> bool:
        """Whether the table is additive, and each half of its decisions has few enough combinations."""
        return table.reduce == "sum" and math.isfinite(table.fixed) and _middle(table) is not None

    def __len__(self) -> int:
        return int(self.ends[-1])

    def rows(self, numbers: Ints) -> Ints:
        """The architectures (n, decisions) of these indices in 0..len-1."""
        first = np.searchsorted(self.ends, numbers, "right")
        before = np.where(first > 0, self.ends[first - 1], 0)
        last = self.order[self.start[first] + numbers - before]
        columns = [*np.unravel_index(first, self.shapes[0]), *np.unravel_index(last, self.shapes[1])]
        return np.stack(columns, axis=1).astype(np.int64)


def _middle(table: CostTable) -> int | None:
    """The index that splits the decisions into two non-empty halves; None if a half would be too large."""
    sizes = [len(row) for row in table.options]
    largest = {m: max(math.prod(sizes[:m]), math.prod(sizes[m:])) for m in range(1, len(sizes))}
    middle = min(largest, key=largest.__getitem__, default=None)
    return None if middle is None or largest[middle] > MOST_COMBINATIONS else middle


def _sums(rows: list[Floats]) -> Floats:
    """The cost of every combination of options, in lexicographic order."""
    sums = np.zeros(1)
    for row in rows:
        sums = (sums[:, None] + row).ravel()
    return sums
