"""Samplers of supernet paths within a client's budget (FedorAS, Sec. 3.1: one path per batch)."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from fedloom.platform.spaces.slices import Architecture, Subspace
from fedloom.tiers.costs import CostTable


class PathSampler(Protocol):
    """Draws paths of a subspace whose cost is within a budget."""

    def sample(self, rng: np.random.Generator) -> Architecture:
        """Draws one path whose cost is within the budget."""
        ...


def cheapest_path_cost(table: CostTable, subspace: Subspace) -> float:
    """Cost of the cheapest path of a subspace.

    Raises:
        ValueError: a subspace of another length, a layer without operators, or an operator outside the table.
    """
    if len(subspace) != len(table.options):
        raise ValueError(f"the subspace has {len(subspace)} layers, the {table.measure} table {len(table.options)}")
    for layer, options in enumerate(subspace):
        if not options or min(options) < 0 or max(options) >= len(table.options[layer]):
            raise ValueError(f"layer {layer} keeps {options} of the operators 0 to {len(table.options[layer]) - 1}")
    return table.cost([min(options, key=row.__getitem__) for row, options in zip(table.options, subspace, strict=True)])


def _check_budget(table: CostTable, subspace: Subspace, budget: float) -> float:
    cheapest = cheapest_path_cost(table, subspace)
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
