"""Constraints of a search: the cost of an architecture, from a table or predicted, must lie in an interval."""

import math
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedloom.platform.search.base import Architecture, Interval
from fedloom.platform.search.sampling import IntervalSampler, sample_new
from fedloom.platform.spaces.genome import Floats, Genome, Ints, PlainGenome, as_array
from fedloom.tiers.costs import CostTable

# -- uniform draws inside a narrow interval by meet-in-the-middle (Horowitz & Sahni 1974), for few decisions ----------

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


# -- constraints ------------------------------------------------------------------------------------------------------

Bools = NDArray[np.bool_]

BATCHES = (256, 1024, 4096)
"""Sizes of the batches of random draws before a constraint searches for the missing architectures."""
USEFUL = 0.05
"""Random drawing continues while at least this share of a batch is new and inside."""
MOST_LISTED = 8192
"""The largest number of architectures inside that are all enumerated instead of sampled."""
CLIMBERS = 256
CLIMBING_STEPS = 64
CLIMBING_MUTATION = 0.1


class Constraint(Protocol):
    """A constraint on the cost; architectures are integer arrays (n, decisions)."""

    @property
    def interval(self) -> Interval:
        """The interval of allowed costs, in the unit of `costs`."""
        ...

    def costs(self, architectures: Ints) -> Floats:
        """Cost per architecture (n,); infinite if the device does not support it."""
        ...

    def inside(self, architectures: Ints) -> Bools:
        """Whether each architecture's cost lies in the interval (n,)."""
        ...

    def sample(self, count: int, known: Collection[Architecture], rng: np.random.Generator) -> list[Architecture]:
        """Random distinct architectures inside, none in `known`; fewer than `count` only if no more are found."""
        ...

    def nearest(self, rng: np.random.Generator) -> float:
        """A reachable cost near the interval, for error messages."""
        ...


@dataclass(frozen=True)
class TableConstraint:
    """An interval of a cost table; `sample` returns fewer than asked only if the interval has no more architectures.

    Architectures are drawn from the genome (default: every decision one gene) while enough of them lie inside. The
    missing ones are drawn uniformly from all architectures inside if they can be counted (`Halves`), otherwise found by
    `IntervalSampler`, which raises ValueError if an interval is too narrow to be searched.
    """

    table: CostTable
    interval: Interval
    genome: Genome | None = None

    @cached_property
    def _sampler(self) -> IntervalSampler:
        return IntervalSampler(self.table, self.interval)

    @cached_property
    def _genome(self) -> Genome:
        return self.genome or PlainGenome(tuple(len(row) for row in self.table.options))

    def costs(self, architectures: Ints) -> Floats:
        """Bitwise equal to `table.cost`."""
        # table.costs adds the fixed part last, and different rounding could change whether a cost is inside.
        total = np.full(len(architectures), self.table.fixed, dtype=np.float64)
        join = np.add if self.table.reduce == "sum" else np.maximum
        for decision, row in enumerate(self._sampler.rows):
            total = join(total, row[architectures[:, decision]])
        return total

    def inside(self, architectures: Ints) -> Bools:
        return inside_interval(self.costs(architectures), self.interval)

    def sample(self, count: int, known: Collection[Architecture], rng: np.random.Generator) -> list[Architecture]:
        new: dict[Architecture, None] = {}
        for size in BATCHES:
            before = len(new)
            self._add(new, self._genome.draw(size, rng), known, count)
            if len(new) >= count:
                return list(new)
            if len(new) - before < USEFUL * size:
                break
        if self._halves is not None and self._uniform(self._halves, new, count, known, rng):
            return list(new)
        return [*new, *sample_new(self._sampler, count - len(new), {*known, *new}, rng)]

    @cached_property
    def _halves(self) -> Halves | None:
        return Halves(self.table, self.interval) if Halves.applies(self.table) else None

    def _uniform(
        self,
        halves: Halves,
        new: dict[Architecture, None],
        count: int,
        known: Container[Architecture],
        rng: np.random.Generator,
    ) -> bool:
        """Adds uniform draws to `new`; returns whether it then holds `count` or all architectures inside."""
        if len(halves) <= MOST_LISTED:
            self._add(new, halves.rows(rng.permutation(len(halves))), known, count)
            return True
        for size in BATCHES:
            self._add(new, halves.rows(rng.integers(len(halves), size=size)), known, count)
            if len(new) >= count:
                return True
        return False

    def _add(self, new: dict[Architecture, None], rows: Ints, known: Container[Architecture], most: int) -> None:
        add_new(new, rows[self.inside(rows)], known, most)

    def nearest(self, rng: np.random.Generator) -> float:
        """Exact outside the table's range; within it, the nearest of random draws."""
        drawn = self.costs(self._genome.draw(BATCHES[-1], rng))
        costs = np.concatenate([drawn, [self.table.smallest, self.table.largest]])
        return float(costs[np.argmin(distance(costs, self.interval))])


@dataclass(frozen=True)
class PredictedConstraint:
    """An interval of a predicted cost without a table, such as a latency.

    `predict` maps architectures (n, decisions) to costs (n,). If random draws rarely lie inside, hill climbing mutates
    the nearest ones towards the interval; both are bounded, so architectures inside may be missed.
    """

    predict: Callable[[Ints], Floats]
    genome: Genome
    interval: Interval

    def costs(self, architectures: Ints) -> Floats:
        return self.predict(architectures)

    def inside(self, architectures: Ints) -> Bools:
        return inside_interval(self.costs(architectures), self.interval)

    def sample(self, count: int, known: Collection[Architecture], rng: np.random.Generator) -> list[Architecture]:
        new: dict[Architecture, None] = {}
        self._climb(new, count, known, rng)
        return list(new)

    def nearest(self, rng: np.random.Generator) -> float:
        """The nearest cost that hill climbing reached."""
        costs = self.costs(self._climb({}, 1, (), rng))
        return float(costs[np.argmin(distance(costs, self.interval))])

    def _climb(
        self, new: dict[Architecture, None], count: int, known: Collection[Architecture], rng: np.random.Generator
    ) -> Ints:
        """Adds up to `count` architectures inside to `new`; returns the final population of the hill climbing."""
        rows = self._start(new, count, known, rng)
        away = distance(self.costs(rows), self.interval)
        # Fewer steps if known architectures are given, because these are inside already.
        for _ in range(CLIMBING_STEPS // 4 if known else CLIMBING_STEPS):
            if len(new) >= count:
                break
            moved = self.genome.mutate(rows, CLIMBING_MUTATION, rng)
            there = distance(self.costs(moved), self.interval)
            add_new(new, moved[there == 0], known, count)
            rows, away = _nearest(np.concatenate([moved, rows]), np.concatenate([there, away]), rng)
        return rows

    def _start(
        self, new: dict[Architecture, None], count: int, known: Collection[Architecture], rng: np.random.Generator
    ) -> Ints:
        """Adds random draws inside to `new`; returns the initial population: the nearest draws, and known ones."""
        for size in BATCHES:
            before = len(new)
            drawn = self.genome.draw(size, rng)
            away = distance(self.costs(drawn), self.interval)
            add_new(new, drawn[away == 0], known, count)
            if len(new) >= count or len(new) - before < USEFUL * size:
                break
        nearest = drawn[np.argsort(away, kind="stable")[:CLIMBERS]]
        if not known or len(new) >= count:
            return nearest
        # Neighbours of known architectures are likely inside. Sorted, because a set's order is not reproducible.
        listed = as_array(sorted(known))
        half = CLIMBERS // 2
        return np.concatenate([nearest[:half], listed[rng.integers(len(listed), size=half)]])


def _nearest(rows: Ints, away: Floats, rng: np.random.Generator) -> tuple[Ints, Floats]:
    """The nearest distinct rows; ties (such as all rows inside) are broken at random, for exploration."""
    # A random hash per row (with intended integer overflow) finds duplicates faster than comparing rows.
    numbers = rows @ rng.integers(1, 2**62, size=rows.shape[1])
    _, distinct = np.unique(numbers, return_index=True)
    order = distinct[np.lexsort((rng.random(len(distinct)), away[distinct]))[:CLIMBERS]]
    return rows[order], away[order]


def inside_interval(costs: Floats, interval: Interval) -> Bools:
    """`interval.contains` for an array of costs."""
    return (costs > interval.lower) & (costs <= interval.upper) & np.isfinite(costs)


def distance(costs: Floats, interval: Interval) -> Floats:
    """The distance of each cost to the interval: 0 inside, infinite for a cost that is not finite."""
    finite = np.isfinite(costs)
    known = np.where(finite, costs, interval.upper)
    # The lower bound itself is outside, so its distance is the smallest positive number.
    below = np.where(known <= interval.lower, np.maximum(interval.lower - known, np.finfo(float).tiny), 0.0)
    above = np.where(known > interval.upper, known - interval.upper, 0.0)
    return np.where(finite, above + below, np.inf)


def add_new(new: dict[Architecture, None], rows: Ints, known: Container[Architecture], most: int) -> None:
    """Adds the rows that are not in `known` to `new`, in order, until it holds `most`."""
    for row in rows.tolist():
        if len(new) >= most:
            return
        architecture = tuple(row)
        if architecture not in known:
            new[architecture] = None
