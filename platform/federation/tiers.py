"""A run's tiers: the costs of architectures, the tiers' bounds, their clients and devices, and the clients' budgets."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.platform.federation.config import GENERATED, BudgetConfig, DevicesConfig, RunConfig, TiersConfig
from fedloom.platform.plugins import ComponentSpec, PluginError, Registry, is_import_path
from fedloom.platform.results.files import read_json, write_atomically
from fedloom.platform.seeding import stream
from fedloom.platform.settings import component_specs
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.cnn import parse_operator
from fedloom.platform.spaces.genome import Genome, draw_supported
from fedloom.platform.spaces.operator_choice import NamedOperatorSpace
from fedloom.tiers.availability import DAY_S, Availability, DailyAvailability, TraceAvailability
from fedloom.tiers.budgets import Budget, ScheduleBudget, StaticBudget, TraceBudget, make_budget
from fedloom.tiers.costs import CostTable, combine, with_unsupported
from fedloom.tiers.device_files import read_device_table, read_intervals
from fedloom.tiers.devices import DeviceProfile, DeviceTable, generate_device_table
from fedloom.tiers.tier import (
    Tier,
    by_device_table,
    by_list,
    by_shares,
    check_upper_bounds,
    make_tiers,
    tier_upper_bounds,
)

# -- costs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunCosts:
    """Cost tables in the unit of the tiers' budgets and in MACs; they are stored because latency measurements vary."""

    budget: CostTable
    macs: CostTable


def measure_costs(config: TiersConfig, space: SearchSpace) -> RunCosts:
    """The configured tables: one measure or a weighted sum of several; unsupported operators cost infinity."""
    if config.cost_weights:
        names = sorted(config.cost_weights)
        table = combine([space.cost_table(n) for n in names], [config.cost_weights[n] for n in names])
    else:
        table = space.cost_table(config.cost)
    if config.unsupported:
        table = with_unsupported(table, _places(space, config.unsupported))
    return RunCosts(table, space.cost_table("macs"))


def _places(space: SearchSpace, unsupported: list[str]) -> list[tuple[int, int]]:
    if not isinstance(space, NamedOperatorSpace):
        raise ValueError("tiers.unsupported names operators, and this space has none to choose from")
    known = {name for layer in space.operator_names for name in layer}
    names = [name if name in known else _respelt(name) for name in unsupported]
    for name in names:
        if name not in known:
            raise ValueError(f"tiers.unsupported: no operator {name!r}; there are {', '.join(sorted(known))}")
    return [(i, o) for i, layer in enumerate(space.operator_names) for o, name in enumerate(layer) if name in names]


def _respelt(operator: str) -> str:
    """An operator of a CNN by its name in the space, `ds(3,0.5)` for `ds(3,.5)`; any other as it is."""
    try:
        return parse_operator(operator).name
    except ValueError:
        return operator


def store_costs(path: Path, costs: RunCosts) -> None:
    """Writes the tables to a JSON file."""
    write_atomically(path, json.dumps({"budget": _plain(costs.budget), "macs": _plain(costs.macs)}).encode())


def load_costs(path: Path) -> RunCosts:
    """Reads the tables from a JSON file; ValueError if it is damaged."""
    try:
        values = read_json(path)
        return RunCosts(_table(values["budget"]), _table(values["macs"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} does not hold the run's cost tables: restore it, or start a new run") from error


def _plain(table: CostTable) -> dict[str, Any]:
    # Strict JSON has no infinity, so the cost of an unsupported option is null.
    options = [[None if cost == math.inf else cost for cost in row] for row in table.options]
    return {"measure": table.measure, "fixed": table.fixed, "reduce": table.reduce, "options": options}


def _table(values: Mapping[str, Any]) -> CostTable:
    options = tuple(tuple(math.inf if cost is None else float(cost) for cost in row) for row in values["options"])
    return CostTable(values["measure"], float(values["fixed"]), options, values["reduce"])


# -- tiers and devices -------------------------------------------------------------------------------------------------

TOP_TIER_MACS_PER_S = 2e10
"""Assumed training speed of a recent phone; lower tiers are slower in proportion to their budgets."""


def split_into_tiers(config: RunConfig, space: SearchSpace, table: CostTable) -> tuple[Tier, ...]:
    """The tiers with their bounds, computed from random paths or taken from the configuration.

    If all architectures cost the same, as in a space of one network, there is nothing to split and only one tier.
    """
    tiers = config.tiers
    if tiers.upper_bounds is not None:
        uppers = check_upper_bounds(tiers.upper_bounds, table.cost(space.cheapest(table)), table.largest)
    else:
        costs = sampled_costs(space.genome, table, tiers.paths if space.num_architectures > 1 else 1)
        count = tiers.count if table.smallest < table.largest else 1
        start = space.common_cost(table)
        uppers = tier_upper_bounds(costs, start, table.largest, count, tiers.rho_low, tiers.rho_high)
    num_gpus = tiers.num_gpus if tiers.num_gpus is not None else 0.0
    num_cpus = tiers.num_cpus if tiers.num_cpus is not None else 1.0
    return make_tiers(uppers, num_gpus=num_gpus, num_cpus=num_cpus)


@lru_cache(maxsize=4)
def sampled_costs(genome: Genome, table: CostTable, paths: int) -> np.ndarray:
    """Costs, of shape (paths,), of random supported paths; the same for any seed, as tiers belong to the space."""
    return table.costs(draw_supported(genome, table, paths, stream(0, "tier_bounds")))


def device_table(config: RunConfig, num_clients: int) -> DeviceTable | None:
    """The configured devices, read or generated; None if there are none."""
    name = config.tiers.device_table
    if not name:
        return None
    if name == GENERATED:
        return generate_device_table(num_clients, stream(config.seed_for("partition"), "device_table"))
    return read_device_table(name)


def configured_availability(config: RunConfig, num_clients: int, devices: DeviceTable | None) -> Availability | None:
    """When the clients' devices are online; None if always. ValueError for a table that does not fit the clients."""
    table, period_s = config.devices.availability_table, config.devices.availability_period_s
    if not table:
        return None
    if table == GENERATED:
        return DailyAvailability(config.seed_for("partition"), config.devices.availability_share, period_s or DAY_S)
    intervals = read_intervals(table)
    try:
        ids = np.arange(num_clients) if devices is None else devices.device_id[:num_clients]
        return TraceAvailability(intervals, ids, period_s)
    except ValueError as error:
        raise ValueError(f"{table}: {error}") from error


def assigned_tiers(
    config: RunConfig, tiers: tuple[Tier, ...], num_clients: int, devices: DeviceTable | None
) -> np.ndarray:
    """The index of every client's tier; ValueError for a configuration that does not fit the tiers or the clients."""
    settings = config.tiers
    if devices is not None:
        if settings.cost != "macs" or settings.cost_weights:
            cost = settings.cost_weights or settings.cost
            raise ValueError(
                f"tiers.device_table: speeds in MAC/s say nothing about tiers.cost={cost}: use tiers.cost=macs"
            )
        if len(devices) < num_clients:
            raise ValueError(
                f"{settings.device_table} has {len(devices)} devices: give each of {num_clients} clients one"
            )
        uppers = [t.upper for t in tiers]
        table = by_device_table(devices, uppers, batch_size=settings.step_batch_size, max_step_s=settings.max_step_s)
        return table[:num_clients]
    if settings.clients is not None:
        return by_list(settings.clients, len(tiers), num_clients)
    shares = settings.shares if settings.shares is not None else [1 / len(tiers)] * len(tiers)
    if len(shares) != len(tiers):
        raise ValueError(f"tiers.shares has {len(shares)} values for {len(tiers)} tiers: give one per tier")
    return by_shares(num_clients, shares, stream(config.seed_for("partition"), "client_tiers"))


def device_profiles(devices: DevicesConfig, tiers: tuple[Tier, ...]) -> tuple[DeviceProfile, ...]:
    """One simulated device per tier, with the configured rates."""
    rates = devices.macs_per_s or [TOP_TIER_MACS_PER_S * t.upper / tiers[-1].upper for t in tiers]
    if len(rates) == 1:
        rates = list(rates) * len(tiers)
    if len(rates) != len(tiers):
        raise ValueError(f"devices.macs_per_s has {len(rates)} values: give one, or one per tier ({len(tiers)})")
    if devices.deadline_s is not None and devices.deadline_s <= 0:
        raise ValueError(f"devices.deadline_s={devices.deadline_s}: must be greater than 0, or null for none")
    return tuple(
        DeviceProfile(
            t.name, rate, devices.down_bytes_per_s, devices.up_bytes_per_s, devices.availability, devices.dropout
        )
        for t, rate in zip(tiers, rates, strict=True)
    )


# -- clients' budgets --------------------------------------------------------------------------------------------------


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
    budget = OwnBudget(component_specs([(BUDGETS, config.kind)], config.options, "tiers.budget.options")[0])
    for round_ in range(2):
        budget.factor(round_, stream(0, "trial", round_))
    return budget
