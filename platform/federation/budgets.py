"""Client budgets: the share of its tier's budget that a client has in a round, by a built-in rule or the user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedloom.platform.federation.config import BudgetConfig
from fedloom.platform.plugins import ComponentSpec, PluginError, Registry, is_import_path
from fedloom.platform.seeding import stream
from fedloom.platform.settings import component_specs
from fedloom.tiers.budgets import Budget, ScheduleBudget, StaticBudget, TraceBudget, make_budget

if TYPE_CHECKING:
    from fedloom.platform.federation.world import World

BUDGETS: Registry[Callable[[int, np.random.Generator], float]] = Registry(
    "budget", {"static": StaticBudget, "schedule": ScheduleBudget, "trace": TraceBudget}, ("round", "rng")
)
"""A user's budget is a function of the round (from 0) and of a random generator for that round and client.

It returns the client's share of the tier's budget, above 0 and at most 1.
"""


@dataclass(frozen=True)
class OwnBudget:
    """Adapts a user's function to a `Budget`."""

    choice: ComponentSpec

    def factor(self, round: int, rng: np.random.Generator) -> float:
        """The share of the budget; PluginError if the function returns no number above 0 and at most 1."""
        share = BUDGETS.make(self.choice)(round, rng)
        if not (isinstance(share, int | float | np.floating) and 0 < share <= 1):
            raise PluginError(f"budget {self.choice.name!r} gives {share!r:.60}: give a share above 0 and at most 1")
        return float(share)


def configured_budget(config: BudgetConfig) -> Budget:
    """The configured budget; ValueError for an unknown one or invalid options."""
    if not is_import_path(config.kind):
        if config.options:
            raise ValueError(f"tiers.budget.options: a {config.kind} budget has none; use factors or states")
        try:
            return make_budget(config.kind, factors=config.factors, states=config.states)
        except ValueError as error:
            raise ValueError(f"tiers.budget: {error}") from error
    own = OwnBudget(component_specs([(BUDGETS, config.kind)], config.options, "tiers.budget.options")[0])
    for round_ in range(2):
        own.factor(round_, stream(0, "trial", round_))
    return own


def training_budget(world: World, client_id: int, stage: str, round_: int) -> float:
    """The largest cost of an architecture for the client in this round, at least the cost of the cheapest one."""
    rng = stream(world.config.seed_for("selection"), "budget", stage, round_, client_id)
    share, table = world.budget.factor(round_, rng), world.costs_by_tier[int(world.tier_of_client[client_id])]
    return max(world.tier(client_id).upper * share, table.cost(world.space.cheapest(table)))
