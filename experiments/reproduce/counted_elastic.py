"""Costs of elastic supernets, counted without training: of subnets, and of a round by every way of training them.

A round's random subnets count by their exact mean over the space, which is what their sum tends to over many rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.federation.training_config import cohort_size
from fedloom.platform.methods.superfednas import SuperFedNASConfig
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.genome import ElasticStage
from fedloom.platform.spaces.registry import build_space
from fedloom.tiers.costs import CostTable

BOTH_WAYS = 2
"""What a client receives, it also sends."""

Likelihood = Callable[[ElasticStage, tuple[int, ...]], float]
"""The probability that a random subnet has these widths in a stage."""


def round_facts(overrides: Sequence[str]) -> Mapping[str, Any]:
    """What one round of training costs, by the way of training, and that of training k of the family's members alone.

    `communication` is in bytes, up and down, of all clients, `compute` in forward MACs of all clients for one sample
    each; both have the places MaxNet, single-stage, multi-stage, FedAvg smallest and FedAvg largest. `family` has the
    same two for the k most expensive members of the family, each trained alone, with the places 1, 2, ... Source:
    SuperFed, App. G, Fig. 6; SuperFedNAS, Sec. 3.2, Fig. 3.
    """
    space, family, clients = _family(tuple(overrides))
    method = _method(tuple(overrides))
    macs, sizes = space.cost_table("macs"), space.cost_table("bytes")
    compute, communication = _of_a_round(space, macs, clients, 1), _of_a_round(space, sizes, clients, BOTH_WAYS)
    # The whole supernet travels, and every batch is passed through several subnets (progressive shrinking).
    shrinking = method.train.shrinking
    widest, any_one = _mean(space, macs, _widest), _mean(space, macs, _uniform)
    drawn = shrinking.depth_share * widest + (1 - shrinking.depth_share) * any_one
    compute["multi-stage"] = clients * shrinking.subnets_per_batch * drawn
    communication["multi-stage"] = communication["FedAvg largest"]
    alone = {
        name: _up_to_k([factor * table.cost(member) for member in family])
        for name, table, factor in (("compute", macs, clients), ("communication", sizes, BOTH_WAYS * clients))
    }
    return {"compute": compute, "communication": communication, "family": alone}


@cache
def _family(overrides: tuple[str, ...]) -> tuple[ElasticSpace, tuple[tuple[int, ...], ...], int]:
    """The space, the family's subnets, and the number of clients per round."""
    config, method = compose_config(list(overrides)), _method(overrides)
    space = build_space(config.space)
    assert isinstance(space, ElasticSpace), "an item counts subnets of elastic spaces only"
    return space, tuple(map(space.parse, method.family)), cohort_size(method.train, config.data.num_clients)


def _method(overrides: tuple[str, ...]) -> SuperFedNASConfig:
    method = compose_config(list(overrides)).method
    assert isinstance(method, SuperFedNASConfig), "an item counts rounds of SuperFedNAS only"
    return method


def _of_a_round(space: ElasticSpace, table: CostTable, clients: int, ways: int) -> dict[str, float]:
    """Mean cost of a round of all clients; MaxNet gives one of them the largest and one the smallest subnet."""
    any_one, smallest, largest = _mean(space, table, _uniform), table.cost(space.smallest), table.cost(space.largest)
    return {
        "MaxNet": ways * (largest + smallest + (clients - 2) * any_one),
        "single-stage": ways * clients * any_one,
        "FedAvg smallest": ways * clients * smallest,
        "FedAvg largest": ways * clients * largest,
    }


def _mean(space: ElasticSpace, table: CostTable, likelihood: Likelihood) -> float:
    """The exact mean cost of a random subnet: stages are independent, and their costs are summed."""
    return table.fixed + sum(
        likelihood(stage, widths) * cost
        for stage, costs in zip(space.genome.stages, table.options, strict=True)
        for widths, cost in zip(stage.contents, costs, strict=True)
    )


def _uniform(stage: ElasticStage, widths: tuple[int, ...]) -> float:
    """Depths and widths are uniform and independent."""
    return _any_depth(stage) / float(stage.widths) ** len(widths)


def _widest(stage: ElasticStage, widths: tuple[int, ...]) -> float:
    """The depth is uniform, and every block has its full width."""
    return _any_depth(stage) if all(width == stage.widths - 1 for width in widths) else 0.0


def _any_depth(stage: ElasticStage) -> float:
    return 1 / (stage.most - stage.fewest + 1)


def _up_to_k(costs: Sequence[float]) -> dict[str, float]:
    """Costs of the k most expensive ones, by k."""
    return {str(k): total for k, total in enumerate(accumulate(sorted(costs, reverse=True)), 1)}
