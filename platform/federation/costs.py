"""A run's cost tables: the measure of its budgets, and MACs; stored because latency measurements vary."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.platform.federation.config import TiersConfig
from fedloom.platform.results.files import read_json, write_atomically
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.operator_choice import NamedOperatorSpace
from fedloom.tiers.costs import CostTable, combine, with_unsupported


@dataclass(frozen=True)
class RunCosts:
    """Cost tables of paths in the unit of the tiers' budgets, and in MACs."""

    budget: CostTable
    macs: CostTable


def measure_costs(config: TiersConfig, space: SearchSpace) -> RunCosts:
    """The configured tables: one measure or a weighted sum of several, with infinite cost of unsupported operators."""
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
    for name in unsupported:
        if name not in known:
            raise ValueError(f"tiers.unsupported: no operator {name!r}; there are {', '.join(sorted(known))}")
    return [
        (i, o) for i, layer in enumerate(space.operator_names) for o, name in enumerate(layer) if name in unsupported
    ]


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
