"""Which architectures a search may propose: those whose cost, from a table or predicted, lies in an interval."""

from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedloom.platform.search.base import Architecture, Interval
from fedloom.platform.search.halves import Halves
from fedloom.platform.search.sampling import IntervalSampler, sample_new
from fedloom.platform.spaces.genome import Floats, Genome, Ints, PlainGenome, as_array
from fedloom.tiers.costs import CostTable

Bools = NDArray[np.bool_]

BATCHES = (256, 1024, 4096)
"""Random draws that are tried, and kept if inside, before a constraint searches for what is missing."""
USEFUL = 0.05
"""Drawing goes on while at least this share of the draws is of use."""
MOST_LISTED = 8192
"""Up to so many architectures inside are all listed rather than drawn from."""
CLIMBERS = 256
CLIMBING_STEPS = 64
CLIMBING_MUTATION = 0.1


class Constraint(Protocol):
    """What a search must keep to; architectures are integer arrays of shape (n, decisions)."""

    @property
    def interval(self) -> Interval:
        """The costs that are allowed, in the unit of `costs`."""
        ...

    def costs(self, architectures: Ints) -> Floats:
        """Cost per architecture, shape (n,); infinite where a device does not support it."""
        ...

    def inside(self, architectures: Ints) -> Bools:
        """Which architectures' costs lie in the interval, shape (n,)."""
        ...

    def sample(self, count: int, known: Collection[Architecture], rng: np.random.Generator) -> list[Architecture]:
        """Random architectures: distinct, inside, none known; fewer than `count` only if no more are found."""
        ...

    def nearest(self, rng: np.random.Generator) -> float:
        """A reachable cost near the interval, to tell a user how far off it is."""
        ...


@dataclass(frozen=True)
class TableConstraint:
    """An interval of a cost table; `sample` comes back short only if the interval holds no more.

    Random draws follow the genome (default: every decision one gene) while enough of them lie inside. What is missing
    is then drawn uniformly from all that lie inside, where the space allows to count them (`Halves`), else found by
    `IntervalSampler`, which raises ValueError where an interval is too narrow to be searched.
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
        """See `Constraint.costs`; equal to `table.cost` to the last bit."""
        # table.costs adds the fixed part last, and sums that differ in a bit may differ in being inside.
        total = np.full(len(architectures), self.table.fixed, dtype=np.float64)
        join = np.add if self.table.reduce == "sum" else np.maximum
        for decision, row in enumerate(self._sampler.rows):
            total = join(total, row[architectures[:, decision]])
        return total

    def inside(self, architectures: Ints) -> Bools:
        """See `Constraint.inside`."""
        return inside_interval(self.costs(architectures), self.interval)

    def sample(self, count: int, known: Collection[Architecture], rng: np.random.Generator) -> list[Architecture]:
        """See `Constraint.sample`."""
        new: dict[Architecture, None] = {}
        for size in BATCHES:
            found = len(new)
            self._add(new, self._genome.draw(size, rng), known, count)
            if len(new) >= count:
                return list(new)
            if len(new) - found < USEFUL * size:
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
        """Adds uniform draws; whether these are `count` or all that there are."""
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
        """See `Constraint.nearest`: exact beyond the table's range, of random draws within it."""
        drawn = self.costs(self._genome.draw(BATCHES[-1], rng))
        costs = np.concatenate([drawn, [self.table.smallest, self.table.largest]])
        return float(costs[np.argmin(distance(costs, self.interval))])


@dataclass(frozen=True)
class PredictedConstraint:
    """An interval of a predicted cost, such as a latency, for which there is no table.

    `predict` maps architectures (n, decisions) to costs (n,). Where random draws rarely lie inside, the nearest ones
    climb towards the interval by mutations; both are bounded, so architectures inside may be missed.
    """

    predict: Callable[[Ints], Floats]
    genome: Genome
    interval: Interval

    def costs(self, architectures: Ints) -> Floats:
        """See `Constraint.costs`."""
        return self.predict(architectures)

    def inside(self, architectures: Ints) -> Bools:
        """See `Constraint.inside`."""
        return inside_interval(self.costs(architectures), self.interval)

    def sample(self, count: int, known: Collection[Architecture], rng: np.random.Generator) -> list[Architecture]:
        """See `Constraint.sample`."""
        new: dict[Architecture, None] = {}
        self._climb(new, count, known, rng)
        return list(new)

    def nearest(self, rng: np.random.Generator) -> float:
        """See `Constraint.nearest`: where climbing ended."""
        costs = self.costs(self._climb({}, 1, (), rng))
        return float(costs[np.argmin(distance(costs, self.interval))])

    def _climb(
        self, new: dict[Architecture, None], count: int, known: Collection[Architecture], rng: np.random.Generator
    ) -> Ints:
        """Adds up to `count` architectures inside; returns where the climbers stand."""
        rows = self._start(new, count, known, rng)
        away = distance(self.costs(rows), self.interval)
        # From what is known the interval need not be reached any more.
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
        """Keeps the random draws inside; returns where to climb from: the nearest draws, and some that are known."""
        for size in BATCHES:
            found = len(new)
            drawn = self.genome.draw(size, rng)
            away = distance(self.costs(drawn), self.interval)
            add_new(new, drawn[away == 0], known, count)
            if len(new) >= count or len(new) - found < USEFUL * size:
                break
        nearest = drawn[np.argsort(away, kind="stable")[:CLIMBERS]]
        if not known or len(new) >= count:
            return nearest
        # What was found before lies inside, and so may its neighbours; sorted, for a set's order is not the stream's.
        listed = as_array(sorted(known))
        half = CLIMBERS // 2
        return np.concatenate([nearest[:half], listed[rng.integers(len(listed), size=half)]])


def _nearest(rows: Ints, away: Floats, rng: np.random.Generator) -> tuple[Ints, Floats]:
    """The nearest distinct rows; ties, such as all that lie inside, are broken at random, so that they wander."""
    # One random number per row tells rows apart far quicker than comparing them; the product wraps around on purpose.
    numbers = rows @ rng.integers(1, 2**62, size=rows.shape[1])
    _, distinct = np.unique(numbers, return_index=True)
    order = distinct[np.lexsort((rng.random(len(distinct)), away[distinct]))[:CLIMBERS]]
    return rows[order], away[order]


def inside_interval(costs: Floats, interval: Interval) -> Bools:
    """`interval.contains` for many costs."""
    return (costs > interval.lower) & (costs <= interval.upper) & np.isfinite(costs)


def distance(costs: Floats, interval: Interval) -> Floats:
    """How far each cost lies from the interval: 0 inside, infinite for a cost that is not finite."""
    finite = np.isfinite(costs)
    known = np.where(finite, costs, interval.upper)
    # The lower bound itself is outside: it counts as the smallest distance there is.
    below = np.where(known <= interval.lower, np.maximum(interval.lower - known, np.finfo(float).tiny), 0.0)
    above = np.where(known > interval.upper, known - interval.upper, 0.0)
    return np.where(finite, above + below, np.inf)


def add_new(new: dict[Architecture, None], rows: Ints, known: Container[Architecture], most: int) -> None:
    """Adds the rows that are not known to `new`, in order, until it holds `most`."""
    for row in rows.tolist():
        if len(new) >= most:
            return
        architecture = tuple(row)
        if architecture not in known:
            new[architecture] = None
