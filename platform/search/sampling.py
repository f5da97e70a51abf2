"""Sampling and enumeration of the architectures whose cost lies in an interval."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedloom.platform.search.base import Architecture, Interval
from fedloom.tiers.costs import CostTable

Floats = NDArray[np.float64]

REJECTION_DRAWS = 256
MAX_DISTINCT_COSTS = 1 << 16
"""The largest number of distinct costs of the last decisions stored exactly; beyond it, costs are approximated."""
MAX_NODES = 100_000
"""Nodes visited without a result before a search gives up, because finding an exact cost is a subset-sum problem."""


@dataclass(frozen=True)
class _Suffix:
    """The costs that the decisions from a depth on can add, and the number of combinations for each cost.

    `sums` holds the sorted costs, `cumulated` their cumulative counts; both are None if there are too many costs. Then
    only the smallest and largest cost, and the mean and variance of a uniform choice, are known.
    """

    smallest: float
    largest: float
    mean: float
    variance: float
    sums: Floats | None = None
    cumulated: Floats | None = None


class IntervalSampler:
    """Samples and enumerates the architectures of a cost table inside an interval.

    It knows the costs that the remaining decisions can add (exactly for the last ones), so that a partial architecture
    is pruned as soon as no completion is inside. Only `table.cost` decides whether an architecture is inside.
    """

    def __init__(self, table: CostTable, interval: Interval) -> None:
        self.table = table
        self.interval = interval
        self.rows = [np.asarray(row, dtype=np.float64) for row in table.options]
        self.supported = [np.array(options, dtype=np.int64) for options in table.supported]

    def contains(self, architecture: Architecture) -> bool:
        """Whether the architecture's cost lies in the interval."""
        return self.interval.contains(self.table.cost(architecture))

    def sample(self, rng: np.random.Generator) -> Architecture | None:
        """A random architecture inside the interval; None if there is none.

        It is uniform (by rejection) if the interval holds more than about one in a hundred architectures, and
        approximately uniform otherwise; every architecture inside has positive probability.
        Raises ValueError if neither is decided within MAX_NODES steps.
        """
        if self._empty:
            return None
        columns = [choices[rng.integers(len(choices), size=REJECTION_DRAWS)] for choices in self.supported]
        draws = np.stack(columns, axis=1).astype(np.int64)
        costs = self.table.costs(draws)
        for row in draws[(costs > self.interval.lower - self._slack) & (costs <= self.interval.upper + self._slack)]:
            architecture = as_architecture(row)
            if self.contains(architecture):
                return architecture
        return next(self._search(rng), None)

    def enumerate(self, limit: int | None = None) -> Iterator[Architecture]:
        """The architectures inside the interval in lexicographic order, at most `limit` of them.

        Raises ValueError if the next one is not found within MAX_NODES steps.
        """
        architectures = self._search(None) if not self._empty else iter(())
        for index, architecture in enumerate(architectures):
            if limit is not None and index >= limit:
                return
            yield architecture

    @property
    def _empty(self) -> bool:
        return not math.isfinite(self.table.fixed) or any(len(choices) == 0 for choices in self.supported)

    @cached_property
    def _slack(self) -> float:
        # Integers below 2^53 add up exactly in any order; other sums depend on rounding.
        finite = np.concatenate([row[np.isfinite(row)] for row in self.rows] + [np.array([self.table.fixed])])
        largest = float(np.abs(finite).sum())
        exact = bool(np.all(finite == np.floor(finite))) and largest < 2**53
        return 0.0 if exact or self.table.reduce == "max" else 1e-12 * largest

    def _join(self, a: Floats, b: Floats) -> Floats:
        joined: Floats = a + b if self.table.reduce == "sum" else np.maximum(a, b)
        return joined

    @cached_property
    def _suffixes(self) -> list[_Suffix]:
        nothing = 0.0 if self.table.reduce == "sum" else -np.inf
        suffixes = [_Suffix(nothing, nothing, 0.0, 0.0, np.array([nothing]), np.array([0.0, 1.0]))]
        for row, choices in zip(reversed(self.rows), reversed(self.supported), strict=True):
            suffixes.append(self._prepend(row[choices], suffixes[-1]))
        return suffixes[::-1]

    def _prepend(self, row: Floats, after: _Suffix) -> _Suffix:
        """The suffix with one more decision, whose supported costs are `row`."""
        ends = self._join(np.array([row.min(), row.max()]), np.array([after.smallest, after.largest]))
        suffix = _Suffix(float(ends[0]), float(ends[1]), after.mean + row.mean(), after.variance + row.var())
        values, repeats = np.unique(row, return_counts=True)
        if after.sums is None or after.cumulated is None:
            return suffix
        # With more decisions, the number of distinct maxima stays small, but that of distinct sums multiplies.
        most = MAX_DISTINCT_COSTS if self.table.reduce == "sum" else math.inf
        if len(values) * len(after.sums) > 16 * most:
            return suffix
        joined = self._join(values[:, None], after.sums[None, :])
        sums, where = np.unique(joined, return_inverse=True)
        if len(sums) > most:
            return suffix
        ways = repeats[:, None] * np.diff(after.cumulated)[None, :]
        counts = np.bincount(where.ravel(), weights=ways.ravel()).astype(np.float64)
        return replace(suffix, sums=sums, cumulated=np.concatenate([[0.0], np.cumsum(counts)]))

    def _completions(self, partial: Floats, suffix: _Suffix) -> Floats:
        """Per partial cost, the approximate number of completions inside (up to a factor); 0 if there is none."""
        lower, upper = self.interval.lower - self._slack, self.interval.upper + self._slack
        if suffix.sums is None or suffix.cumulated is None:
            from scipy.special import ndtr  # importing takes half a second, and only searches need it

            possible = (partial + suffix.largest > lower) & (partial + suffix.smallest <= upper)
            scale = max(suffix.variance, np.finfo(float).tiny) ** 0.5
            share = ndtr((upper - partial - suffix.mean) / scale) - ndtr((lower - partial - suffix.mean) / scale)
            return np.where(possible, np.maximum(share, 1e-9), 0.0)
        if self.table.reduce == "max":
            below = np.where(partial > lower, 0, np.searchsorted(suffix.sums, lower, "right"))
            upto = np.where(partial > upper, below, np.searchsorted(suffix.sums, upper, "right"))
        else:
            below = np.searchsorted(suffix.sums, lower - partial, "right")
            upto = np.searchsorted(suffix.sums, upper - partial, "right")
        ways = suffix.cumulated[upto] - suffix.cumulated[below]
        # Huge counts may cancel to 0 in float64, but an existing completion needs positive probability.
        return np.where(upto > below, np.maximum(ways, 1.0), 0.0)

    def _branches(self, depth: int, partial: float, rng: np.random.Generator | None) -> list[tuple[int, float]]:
        """A decision's options that have completions inside, with their partial costs; the last is tried first."""
        choices = self.supported[depth]
        partials = self._join(np.full(len(choices), partial), self.rows[depth][choices])
        weights = self._completions(partials, self._suffixes[depth + 1])
        order = np.flatnonzero(weights > 0)[::-1]
        if rng is not None:
            # Exponential clocks give a random order whose first is drawn by weight (Efraimidis & Spirakis 2006).
            clocks = np.log(rng.exponential(size=len(order))) - np.log(weights[order])
            order = order[np.argsort(-clocks, kind="stable")]
        return [(int(choices[i]), float(partials[i])) for i in order]

    def _search(self, rng: np.random.Generator | None) -> Iterator[Architecture]:
        """Depth-first search, in random order with a generator, otherwise in lexicographic order."""
        prefix: list[tuple[int, float]] = []
        stack = [self._branches(0, self.table.fixed, rng)]
        fruitful = [False]
        dead: set[tuple[int, float]] = set()
        nodes = 0
        while stack:
            if not stack[-1]:  # go one level up; a state without results below it is not visited again
                stack.pop()
                any_below = fruitful.pop()
                if prefix:
                    _, partial = prefix.pop()
                    fruitful[-1] = fruitful[-1] or any_below
                    if not any_below:
                        dead.add((len(stack), partial))
                continue
            option, partial = stack[-1].pop()
            depth = len(stack)
            if depth == len(self.rows):
                architecture = (*(choice for choice, _ in prefix), option)
                if self.contains(architecture):
                    yield architecture
                    nodes, fruitful[-1] = 0, True
            elif (depth, partial) not in dead:
                prefix.append((option, partial))
                stack.append(self._branches(depth, partial, rng))
                fruitful.append(False)
            nodes += 1
            if nodes > MAX_NODES:
                raise ValueError(
                    f"no architecture found in ({self.interval.lower}, {self.interval.upper}] after {MAX_NODES} steps: "
                    "widen the interval"
                )


def as_architecture(row: NDArray[np.int64]) -> Architecture:
    """A row of an integer array as an architecture of plain ints."""
    return tuple(int(choice) for choice in row)


def sample_new(
    sampler: IntervalSampler, count: int, known: Collection[Architecture], rng: np.random.Generator
) -> list[Architecture]:
    """Up to `count` distinct architectures inside the interval, none in `known`; fewer only if there are no more.

    When most draws are repetitions, the remaining architectures are enumerated and drawn from.
    """
    new: dict[Architecture, None] = {}
    for _ in range(4 * count + 64):
        architecture = sampler.sample(rng) if len(new) < count else None
        if architecture is None:
            break
        if architecture not in known:
            new[architecture] = None
    if len(new) < count:
        listed = sampler.enumerate(limit=len(known) + len(new) + max(count, 1024))
        left = [a for a in listed if a not in known and a not in new]
        order = rng.permutation(len(left))[: count - len(new)]
        new.update((left[i], None) for i in order)
    return list(new)
