"""Scored candidates of a search as rows of the table `candidates`."""

from collections.abc import Container, Iterable

from fedloom.platform.federation.algorithm import Row
from fedloom.platform.federation.world import World
from fedloom.platform.search.base import Scored
from fedloom.platform.spaces.slices import Architecture, architecture_id


def candidate_rows(
    world: World,
    tier: str,
    scored: Iterable[Scored],
    front: Container[Architecture],
    won: Architecture | None = None,
) -> list[Row]:
    """One row per candidate; `tier` is the tier or target of the search, `front` the candidates on its Pareto front.

    `won` is the candidate that the search chose, None if it chose none.
    """
    macs, parameters = world.macs_table, world.space.cost_table("parameters")
    return [
        (
            "candidates",
            {
                "tier": tier,
                "generation": s.generation,
                "architecture": architecture_id(s.architecture),
                "macs": macs.cost(s.architecture),
                "parameters": int(parameters.cost(s.architecture)),
                "loss": s.loss,
                "metric": s.metric,
                "feasible": s.feasible,
                "on_front": s.architecture in front,
                "winner": s.architecture == won,
            },
        )
        for s in scored
    ]
