"""`fedloom describe`: a space in numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.clients.subspace import size_of
from fedloom.platform.federation.costs import measure_costs
from fedloom.platform.federation.world import genome_of, sampled_costs, split_into_tiers
from fedloom.platform.spaces.darts import DartsSpace
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.kept import KeptSpace
from fedloom.platform.spaces.operator_choice import OperatorChoiceSpace
from fedloom.platform.spaces.registry import build_space
from fedloom.tiers.bounds import share_of_models


def describe(overrides: Sequence[str]) -> dict[str, Any]:
    """Architectures, parameters, MACs, tier upper bounds and the share of models per tier.

    `space=NAME` is short for `space.name=NAME`. Parameters and MACs are those of the whole supernet, of its fixed part,
    and of the largest path (in an elastic space, of the smallest and the largest subnet); bounds are in the unit of the
    tiers' cost.
    """
    config = compose_config([f"space.name={o[6:]}" if o.startswith("space=") else o for o in overrides])
    space = build_space(config.space)
    measured, parameters = measure_costs(config.tiers, space), space.cost_table("parameters")
    if measured.budget.smallest == measured.budget.largest:  # one architecture, or all alike: nothing to be split
        config.tiers.count = 1
    macs, cost = measured.macs, measured.budget
    tiers = split_into_tiers(config, space, cost)
    uppers = [t.upper for t in tiers]
    costs = sampled_costs(genome_of(space), cost, config.tiers.paths)
    description: dict[str, Any] = {
        "space": config.space.name,
        "input_shape": list(space.input_shape),
        "architectures": space.num_architectures,
        "parameters": {"fixed": int(parameters.fixed), "largest": int(parameters.largest)},
        "macs": {"fixed": int(macs.fixed), "smallest": int(macs.smallest), "largest": int(macs.largest)},
        "tier_cost": cost.measure,
        "tier_upper_bounds": uppers,
        "share_of_models": [float(s) for s in np.round(share_of_models(costs, uppers), 6)],
    }
    if isinstance(space, ElasticSpace):
        description["parameters"] = {"smallest": int(parameters.smallest), "largest": int(parameters.largest)}
        description["state_bytes"] = int(space.cost_table("bytes").largest)
        description["smallest"], description["largest"] = space.label(space.smallest), space.label(space.largest)
    if isinstance(space, (OperatorChoiceSpace, KeptSpace)):
        sizes = space.num_parameters
        description["parameters"] = {
            "supernet": sizes.supernet,
            "fixed": sizes.fixed,
            "largest": sizes.largest_path,
        }
        description["edges" if isinstance(space, DartsSpace) else "layers"] = len(space.options)
        description["operators"] = sorted({name for names in space.operator_names for name in names})
    if isinstance(space, OperatorChoiceSpace):
        description["operators"] = list(space.operator_names[0])
    if isinstance(space, KeptSpace):
        everything = (size_of(table, space.largest_subspace) for table in (macs, space.cost_table("bytes")))
        description["macs"]["supernet"], description["state_bytes"] = map(int, everything)
    return description
