"""`fedloom describe`: size, costs and tiers of a space."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.federation.building import sampled_costs, split_into_tiers
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.costs import measure_costs
from fedloom.platform.federation.tasks import task_names
from fedloom.platform.methods.fedoras import PUBLISHED_RATIOS, FedorASConfig, epochs_per_operator
from fedloom.platform.spaces.registry import SPACES, build_space
from fedloom.tiers.measure import COUNTED_AS_MACS
from fedloom.tiers.tier import share_of_models


def describe(overrides: Sequence[str]) -> dict[str, Any]:
    """Describes a space: architectures, parameters, MACs, tier upper bounds and the share of models per tier.

    `space=NAME` is short for `space.name=NAME` with the number of classes that the space is designed for. Parameters
    and MACs are those of the whole supernet, of its fixed part, and of the largest path (in an elastic space, of the
    smallest and the largest subnet). Bounds are in the unit of the tiers' cost. Of FedorAS also how long an operator of
    the supernet is trained, as a multiple of rand-init's network.
    """
    config = compose_config([text for override in overrides for text in _in_full(override)])
    space = build_space(config.space)
    measured, parameters = measure_costs(config.tiers, space), space.cost_table("parameters")
    macs, cost = measured.macs, measured.budget
    tiers = split_into_tiers(config, space, cost)
    _check_heads(config, len(tiers))
    uppers = [t.upper for t in tiers]
    costs = sampled_costs(space.genome, cost, config.tiers.paths)
    description: dict[str, Any] = {
        "space": config.space.name,
        "input_shape": list(space.input_shape),
        "architectures": space.num_architectures,
        "parameters": {"fixed": int(parameters.fixed), "largest": int(parameters.largest)},
        "macs": {"fixed": int(macs.fixed), "smallest": int(macs.smallest), "largest": int(macs.largest)},
        "macs_count": COUNTED_AS_MACS,
        "tier_cost": cost.measure,
        "tier_upper_bounds": uppers,
        "share_of_models": [float(s) for s in np.round(share_of_models(costs, uppers), 6)],
    }
    if isinstance(config.method, FedorASConfig) and not space.slices_tensors:
        ratio = epochs_per_operator(config, space)
        facts = {"supernet_to_rand_init": ratio and round(ratio, 2), "published": PUBLISHED_RATIOS}
        description["epochs_per_operator"] = facts
    for name, figures in space.figures().items():
        description[name] = {**description["macs"], **figures} if name == "macs" else figures
    return description


def _in_full(override: str) -> list[str]:
    name = override.removeprefix("space=")
    if name == override:
        return [override]
    design = getattr(SPACES.known.get(name), "args", (None,))[-1]  # of `from_design`; a user's own space has none
    classes = getattr(design, "num_classes", None)
    return [f"space.name={name}", *([] if classes is None else [f"space.num_classes={classes}"])]


def _check_heads(config: RunConfig, tiers: int) -> None:
    """Raises ValueError for another number of classifiers than of tasks; their classes are the data set's to tell."""
    names, heads = task_names(config, tiers), config.space.heads
    if names and len(names) != len(heads or ()):
        given = "null" if heads is None else heads
        raise ValueError(f"space.heads={given}: give the number of classes of each task ({', '.join(names)})")
