"""Cost tables: the cost of a path through a space, from one number per (decision, option)."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class CostTable:
    """Cost of the fixed part and of every option of every decision.

    `reduce` is "sum" for additive measures (macs, parameters, latency_s) and "max" for peaks (activation_bytes).
    An option that a device does not support costs infinity.
    """

    measure: str
    fixed: float
    options: tuple[tuple[float, ...], ...]
    reduce: str = "sum"

    def join(self, a: float, b: float) -> float:
        """Joint cost of two parts: their sum, or their maximum for a peak."""
        return a + b if self.reduce == "sum" else max(a, b)

    def cost(self, architecture: Sequence[int]) -> float:
        """Cost of one architecture."""
        total = self.fixed
        for row, choice in zip(self.options, architecture, strict=True):
            total = self.join(total, row[choice])
        return total

    def costs(self, architectures: np.ndarray) -> np.ndarray:
        """Costs, of shape (paths,), of many architectures, an integer array of shape (paths, decisions)."""
        per_decision = np.stack([np.asarray(row)[architectures[:, i]] for i, row in enumerate(self.options)])
        total: np.ndarray = per_decision.sum(axis=0) + self.fixed
        if self.reduce == "max":
            total = np.maximum(per_decision.max(axis=0), self.fixed)
        return total

    def extreme(self, most: Callable[[Iterable[float]], float]) -> tuple[int, ...]:
        """The cheapest (`min`) or the most expensive supported (`max`) option of every decision."""
        return tuple(row.index(most([c for c in row if c < math.inf] or row)) for row in self.options)

    @property
    def supported(self) -> tuple[tuple[int, ...], ...]:
        """The options of every decision that do not cost infinity."""
        return tuple(tuple(option for option, cost in enumerate(row) if cost < math.inf) for row in self.options)

    @property
    def smallest(self) -> float:
        """Cost of the cheapest architecture."""
        return self.cost(self.extreme(min))

    @property
    def largest(self) -> float:
        """Cost of the most expensive supported architecture; infinite only if none is supported."""
        return self.cost(self.extreme(max))


def size_of(table: CostTable, subspace: Sequence[Sequence[int]]) -> float:
    """Sum of the costs of the fixed part and of the options `subspace[decision]` of every decision."""
    return table.fixed + sum(
        row[option] for row, options in zip(table.options, subspace, strict=True) for option in options
    )


def with_unsupported(table: CostTable, unsupported: Iterable[tuple[int, int]]) -> CostTable:
    """The table with infinite cost for every (decision, option) that a device does not support.

    Raises:
        ValueError: a pair is outside the table, or a decision has no supported option left.
    """
    rows = [list(row) for row in table.options]
    for decision, option in unsupported:
        if not (0 <= decision < len(rows) and 0 <= option < len(rows[decision])):
            raise ValueError(
                f"unsupported (decision, option) ({decision}, {option}) is not in the {table.measure} table"
            )
        rows[decision][option] = math.inf
    for decision, row in enumerate(rows):
        if min(row) == math.inf:
            raise ValueError(f"decision {decision} is left without a supported option: keep at least one")
    return replace(table, options=tuple(map(tuple, rows)))


def _weighted(costs: Sequence[float], weights: Sequence[float]) -> float:
    # Infinity times a weight of 0 would be NaN, but an unsupported option stays unsupported.
    return math.inf if math.inf in costs else math.fsum(w * c for w, c in zip(weights, costs, strict=True))


def combine(tables: Sequence[CostTable], weights: Sequence[float], measure: str | None = None) -> CostTable:
    """Weighted sum of additive tables of the same space, as one additive table.

    `measure` names the result; the default spells out the sum, such as `0.5*macs+2*parameters`.

    Raises:
        ValueError: no table, unequal lengths or shapes, a negative or infinite weight, or a table of peaks.
    """
    if not tables or len(tables) != len(weights):
        raise ValueError(f"combine needs one weight per table, given {len(tables)} tables and {len(weights)} weights")
    for table in tables:
        if table.reduce != "sum":
            raise ValueError(f"only additive tables combine; {table.measure} is joined by {table.reduce}")
        if [len(row) for row in table.options] != [len(row) for row in tables[0].options]:
            raise ValueError(f"{table.measure} and {tables[0].measure} are tables of different spaces")
    for weight in weights:
        if not 0 <= weight < math.inf:
            raise ValueError(f"a weight must be finite and not negative, given {weight}")
    fixed = _weighted([t.fixed for t in tables], weights)
    options = tuple(
        tuple(_weighted(costs, weights) for costs in zip(*rows, strict=True))
        for rows in zip(*(t.options for t in tables), strict=True)
    )
    spelt = "+".join(f"{w:g}*{t.measure}" for w, t in zip(weights, tables, strict=True))
    return CostTable(measure or spelt, fixed, options)
