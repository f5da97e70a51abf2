"""FedorAS' draws for a client within its budgets: the operators that it receives, and the paths that it trains.

Source: Dudziak et al., TMLR 2022, Sec. 3.1 and Eq. 1.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.slices import Architecture, Subspace
from fedloom.tiers.costs import CostTable, size_of


def communication_limit(space: SearchSpace, unit: str, value: float) -> tuple[CostTable, float]:
    """The table of tensor sizes, and the limit on what is sent to one client, in the table's unit.

    `unit` is fraction (of the supernet's parameters), parameters, or bytes.

    Raises:
        ValueError: a value that is not positive, or a fraction above one.
    """
    if not value > 0 or (unit == "fraction" and value > 1):
        allowed = "above 0 and at most 1" if unit == "fraction" else "above 0"
        raise ValueError(f"a communication budget in {unit} must be {allowed}, given {value}")
    table = space.cost_table("bytes" if unit == "bytes" else "parameters")
    return table, value * (table.fixed + sum(map(sum, table.options))) if unit == "fraction" else value


def sample_subspace(
    size_table: CostTable,
    limit: float,
    rng: np.random.Generator,
    cost_table: CostTable | None = None,
    train_budget: float | None = None,
) -> Subspace:
    """Drops operators in uniformly random order until the fixed part and the kept operators are within the limit.

    Operators of infinite size or cost are never kept, others of size zero always. An operator is also kept if dropping
    it would leave no path within both the limit (in the unit of `size_table`) and the client's `train_budget` (in the
    unit of `cost_table`).

    Raises:
        ValueError: no path is within the limit, the training budget, or both.
    """
    if (cost_table is None) != (train_budget is None):
        raise ValueError("a training budget and its cost table must be given together")
    paths = _Paths(size_table, limit, cost_table, math.inf if train_budget is None else train_budget)
    # What the device does not support costs infinity, and is not sent.
    supported = (size_table if cost_table is None else cost_table).supported
    operators_by_layer = [
        [option for option in sized if option in known]
        for sized, known in zip(size_table.supported, supported, strict=True)
    ]
    paths.check(operators_by_layer)
    total = size_of(size_table, tuple(map(tuple, operators_by_layer)))
    prunable = [
        (layer, o) for layer, row in enumerate(operators_by_layer) for o in row if size_table.options[layer][o] > 0
    ]
    for index in rng.permutation(len(prunable)).tolist():
        if total <= limit:
            break
        layer, option = prunable[index]
        # One pass is enough, because an operator that cannot be dropped now cannot be dropped when fewer remain. The
        # pass ends within the limit, because such an operator lies on every feasible path that remains.
        rest = [other for other in operators_by_layer[layer] if other != option]
        if rest and paths.exists_with(layer, rest):
            operators_by_layer[layer] = rest
            paths.restrict(layer, rest)
            total -= size_table.options[layer][option]
    return tuple(map(tuple, operators_by_layer))


Pair = tuple[float, float]
"""An operator's size and its training cost."""


class _Paths:
    """Decides whether the operators kept so far contain a path within the size limit and the training budget."""

    def __init__(self, sizes: CostTable, limit: float, costs: CostTable | None, budget: float) -> None:
        self._sizes, self._limit = sizes, limit
        self._costs, self._budget = costs, budget
        self._fixed = (sizes.fixed, 0.0 if costs is None else costs.fixed)
        self._pairs = [
            [(size, 0.0 if costs is None else self._training_cost(costs.options[layer][option]))
             for option, size in enumerate(row)]
            for layer, row in enumerate(sizes.options)
        ]  # fmt: skip
        self._lean = [min(row) for row in self._pairs]
        self._cheap = [min(row, key=_cost_first) for row in self._pairs]
        self._rows = [list(row) for row in self._pairs]

    def _training_cost(self, cost: float) -> float:
        # Costs reduced by a maximum (peak memory) do not add up: operators within the budget are free, others are never
        # used.
        if self._costs is not None and self._costs.reduce == "max":
            return 0.0 if cost <= self._budget else math.inf
        return cost

    def check(self, operators_by_layer: list[list[int]]) -> None:
        """Raises ValueError if the whole space has no path within the limits."""
        least_size = _total(self._fixed, self._lean)[0]
        unit = self._sizes.measure
        if not least_size <= self._limit:
            raise ValueError(
                f"a communication budget of {self._limit:.12g} {unit} is below one operator per layer, "
                f"which takes {least_size:.12g}"
            )
        if self._costs is None:
            return
        measure, cheapest = self._costs.measure, self._costs.smallest
        if not cheapest <= self._budget or cheapest == math.inf:
            raise ValueError(
                f"a training budget of {self._budget:.12g} {measure} is below the cheapest path, "
                f"which takes {cheapest:.12g}"
            )
        if not self.exists_with(0, operators_by_layer[0]):
            raise ValueError(
                f"no path is within both the communication budget of {self._limit:.12g} {unit} "
                f"and the training budget of {self._budget:.12g} {measure}: raise one of them"
            )

    def exists_with(self, layer: int, options: list[int]) -> bool:
        """Whether a feasible path remains if the layer keeps only these options."""
        row = [self._pairs[layer][option] for option in options]
        leanest = _total(self._fixed, [*self._lean[:layer], min(row), *self._lean[layer + 1 :]])
        cheapest = _total(self._fixed, [*self._cheap[:layer], min(row, key=_cost_first), *self._cheap[layer + 1 :]])
        if leanest[0] > self._limit or cheapest[1] > self._budget or math.inf in (leanest[0], cheapest[1]):
            return False
        if leanest[1] <= self._budget or cheapest[0] <= self._limit:
            return True
        return self._search([*self._rows[:layer], row, *self._rows[layer + 1 :]])

    def restrict(self, layer: int, options: list[int]) -> None:
        """Drops all other options of the layer."""
        row = [self._pairs[layer][option] for option in options]
        self._rows[layer], self._lean[layer], self._cheap[layer] = row, min(row), min(row, key=_cost_first)

    def _search(self, rows: list[list[Pair]]) -> bool:
        # The smallest operators need not be the cheapest, so the search keeps the Pareto front of partial paths.
        front = [self._fixed]
        for row in rows:
            sums = sorted({(size + s, cost + c) for size, cost in front for s, c in row})
            front = []
            for size, cost in sums:
                if size <= self._limit and cost <= self._budget and (not front or cost < front[-1][1]):
                    front.append((size, cost))
        return bool(front)


def _cost_first(pair: Pair) -> Pair:
    return pair[1], pair[0]


def _total(fixed: Pair, pairs: list[Pair]) -> Pair:
    # Added in the same order as in `CostTable.cost`, for the same floating-point rounding.
    size, cost = fixed
    for more_size, more_cost in pairs:
        size += more_size
        cost += more_cost
    return size, cost


# -- paths ------------------------------------------------------------------------------------------------------------


class PathSampler(Protocol):
    """Draws paths of a subspace whose cost is within a budget."""

    def sample(self, rng: np.random.Generator) -> Architecture:
        """Draws one path whose cost is within the budget."""
        ...


def _check_budget(table: CostTable, subspace: Subspace, budget: float) -> float:
    """The cost of the cheapest path; ValueError if it is above the budget, or if the table is not the subspace's."""
    if len(subspace) != len(table.options):
        raise ValueError(f"the subspace has {len(subspace)} layers, the {table.measure} table {len(table.options)}")
    for layer, options in enumerate(subspace):
        if not options or min(options) < 0 or max(options) >= len(table.options[layer]):
            raise ValueError(f"layer {layer} keeps {options} of the operators 0 to {len(table.options[layer]) - 1}")
    path = [min(options, key=row.__getitem__) for row, options in zip(table.options, subspace, strict=True)]
    cheapest = table.cost(path)
    if not cheapest <= budget or cheapest == math.inf:
        raise ValueError(
            f"a budget of {budget:g} {table.measure} is below the cheapest path of the subspace, "
            f"which takes {cheapest:g}: raise the budget or keep cheaper operators"
        )
    return cheapest


class GreedyPaths:
    """Visits the layers in random order and chooses uniformly among the operators whose cost still fits.

    Layers without a zero-cost operator come first, and the cost of the remaining layers' cheapest operators is always
    reserved, so that no draw can fail (FedorAS, Sec. 3.1). Every path within the budget has a positive probability. One
    draw makes one call to the generator.

    Raises:
        ValueError: the budget is below the cheapest path of the subspace.
    """

    def __init__(self, table: CostTable, subspace: Subspace, budget: float) -> None:
        # The cheapest operators of all layers are reserved. An operator's extra cost is the difference to its layer's
        # cheapest; `_spare` is the budget for the extra costs of all layers.
        self._spare = budget - _check_budget(table, subspace, budget)
        self._extras: list[list[float]] = []
        self._options: list[list[int]] = []
        must_pay: list[int] = []
        free: list[int] = []
        for layer, options in enumerate(subspace):
            costs = sorted((table.options[layer][option], option) for option in options)
            (free if costs[0][0] == 0 else must_pay).append(layer)
            extras = [(_extra(table, costs[0][0], cost, budget), option) for cost, option in costs]
            self._extras.append([extra for extra, _ in extras if extra < math.inf])
            self._options.append([option for extra, option in extras if extra < math.inf])
        self._groups = [group for group in (must_pay, free) if group]

    def sample(self, rng: np.random.Generator) -> Architecture:
        """Draws one path whose cost is within the budget (up to the rounding of a float sum)."""
        num_layers = len(self._options)
        numbers: list[float] = rng.random(2 * num_layers).tolist()
        spare = self._spare
        path = [0] * num_layers
        for group in self._groups:
            for layer in sorted(group, key=numbers.__getitem__):
                extras = self._extras[layer]
                chosen = int(numbers[num_layers + layer] * bisect_right(extras, spare))
                path[layer] = self._options[layer][chosen]
                spare -= extras[chosen]
        return tuple(path)


def _extra(table: CostTable, cheapest: float, cost: float, budget: float) -> float:
    if cost == math.inf:
        return math.inf
    if table.reduce == "max":
        # Costs reduced by a maximum (peak memory) do not add up: an operator fits the budget or it does not.
        return 0.0 if cost <= budget else math.inf
    return cost - cheapest


class RejectionPaths:
    """Draws uniform paths until one is within the budget; the baseline of `GreedyPaths`.

    Raises:
        ValueError: the budget is below the cheapest path of the subspace, or `max_attempts` is below one.
    """

    def __init__(self, table: CostTable, subspace: Subspace, budget: float, max_attempts: int = 10_000) -> None:
        _check_budget(table, subspace, budget)
        if max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, given {max_attempts}")
        self._table = table
        self._subspace = subspace
        self._budget = budget
        self._max_attempts = max_attempts

    def sample(self, rng: np.random.Generator) -> Architecture:
        """Draws one path, uniform over the paths within the budget.

        Raises:
            ValueError: none of `max_attempts` draws was within the budget.
        """
        for _ in range(self._max_attempts):
            numbers: list[float] = rng.random(len(self._subspace)).tolist()
            path = tuple(options[int(u * len(options))] for options, u in zip(self._subspace, numbers, strict=True))
            if self._table.cost(path) <= self._budget:
                return path
        raise ValueError(
            f"none of {self._max_attempts} uniform paths was within {self._budget:g} {self._table.measure}: "
            f"use the sampler greedy, or raise max_attempts or the budget"
        )


def path_sampler(name: str, table: CostTable, operators: Sequence[Sequence[int]], budget: float) -> PathSampler:
    """The sampler called `greedy` or `rejection`.

    Raises:
        ValueError: another name, or a budget below the cheapest path of the operators.
    """
    subspace = tuple(tuple(options) for options in operators)
    match name:
        case "greedy":
            return GreedyPaths(table, subspace, budget)
        case "rejection":
            return RejectionPaths(table, subspace, budget)
    raise ValueError(f"unknown path sampler {name!r}: known are greedy, rejection")
