"""The tiers' upper bounds, which the tables do not hold: worked out again from the stored configuration."""

from fedloom.experiments.config import config_from_dict
from fedloom.experiments.report.frames import Tables, configuration
from fedloom.platform.config import RunConfig
from fedloom.platform.run import source_hash
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.world import split_into_tiers

Bounds = dict[tuple[str, str], float]
"""Per (run, tier) the greatest cost that the tier affords, in the unit of `tiers.cost`."""


def given_bounds(tables: Tables) -> Bounds:
    """The bounds of the runs whose configuration gives them outright; costs nothing."""
    found: Bounds = {}
    for paths in tables.paths:
        uppers = configuration(tables, paths.run_id).get("tiers", {}).get("upper_bounds") or []
        found |= {(paths.run_id, f"tier{i}"): float(upper) for i, upper in enumerate(uppers, start=1)}
    return found


def upper_bounds(tables: Tables) -> Bounds:
    """The bounds of all runs made by this version of the platform, and those that were given outright.

    Another version may cost and draw paths differently: its bounds stay unknown. Takes a second or two per space.
    """
    found, known = given_bounds(tables), {}
    for paths in tables.paths:
        stored = configuration(tables, paths.run_id)
        hashes = tables.runs.loc[tables.runs["run_id"] == paths.run_id, "source_hash"]
        if not stored or stored["tiers"]["upper_bounds"] or list(hashes) != [source_hash()]:
            continue
        config = config_from_dict(stored)
        key = (str(config.space), str(config.tiers), config.seed_for("search"))
        if key not in known:
            known[key] = _uppers(config)
        found |= {(paths.run_id, name): upper for name, upper in known[key].items()}
    return found


def _uppers(config: RunConfig) -> dict[str, float]:
    space = build_space(config.space)
    tiers = split_into_tiers(config, space, space.cost_table(config.tiers.cost))
    return {tier.name: tier.upper for tier in tiers}
