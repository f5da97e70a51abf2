"""The upper bounds of tiers that the runs recorded."""

import json

from fedloom.experiments.analysis.tables import Tables

Bounds = dict[tuple[str, str], float]
"""By (run, tier): the largest cost that the tier affords, in the unit of `tiers.cost`."""


def upper_bounds(tables: Tables) -> Bounds:
    """The bounds of all runs that recorded them."""
    found: Bounds = {}
    for row in tables.runs.itertuples():
        recorded = json.loads(row.tiers) if isinstance(row.tiers, str) else []
        found |= {(str(row.run_id), tier["tier"]): float(tier["upper"]) for tier in recorded}
    return found
