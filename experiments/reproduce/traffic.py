"""Costs of rounds, counted without data or training: of FedorAS, of methods of widths, and of elastic supernets."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.federation.tiers import measure_costs, split_into_tiers
from fedloom.platform.federation.training_config import TrainingConfig, cohort_size
from fedloom.platform.methods.fedoras import FedorASConfig
from fedloom.platform.methods.fedoras_sampling import CommunicationBudget, path_sampler, sample_subspace
from fedloom.platform.methods.superfednas import SuperFedNASConfig
from fedloom.platform.methods.tier_models import WidthConfig
from fedloom.platform.seeding import stream
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.genome import ElasticStage
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.costs import CostTable, size_of

SUBSPACES, PATHS, MODELS = 30, 20, 20_000
"""Draws per tier, paths of each subspace, and models of the whole space: a mean is exact to 1 or 2 %."""
WEIGHT_BYTES = 4
BOTH_WAYS = 2
"""What a client receives, it also sends."""


Likelihood = Callable[[ElasticStage, tuple[int, ...]], float]
"""The probability that a random subnet has these widths in a stage."""


def accounts(overrides: Sequence[str]) -> Mapping[str, Any]:
    """The costs of FedorAS, or of a method of widths, by which of them the configuration's method is."""
    method = compose_config(overrides).method
    return width_accounts(overrides) if isinstance(method, WidthConfig) else fedoras_accounts(overrides)


def width_accounts(overrides: Sequence[str]) -> Mapping[str, Any]:
    """The costs of training widths, whose clients receive and return the widest network of their tier.

    sent_parameters (to a client per round, the mean over clients), supernet_parameters, and supernet_bytes (received
    and sent by all clients in all rounds), without the statistics of batch norms that clients measure in the end.

    Source: FedorAS, Tab. 17.
    """
    config = compose_config(overrides)
    method: WidthConfig = config.method
    space = _space(json.dumps(asdict(config.space)))
    costs = measure_costs(config.tiers, space)
    tiers, sizes = split_into_tiers(config, space, costs.budget), space.cost_table("parameters")
    widest = []
    for tier in tiers:
        affordable = [width for width in space.enumerate() if costs.budget.cost(width) <= tier.upper]
        if not affordable:
            measure = costs.budget.measure
            raise ValueError(f"no width costs at most {tier.upper:.6g} {measure}: raise the tier's upper bound")
        widest.append(max(affordable, key=costs.budget.cost))
    sent = float(np.average([sizes.cost(width) for width in widest], weights=config.tiers.shares))
    return {
        "sent_parameters": sent,
        "supernet_parameters": sizes.cost(space.largest),
        "supernet_bytes": _bytes(method.train, sent, config.data.num_clients),
    }


def fedoras_accounts(overrides: Sequence[str]) -> Mapping[str, Any]:
    """The costs of stages 1 and 3.

    sent_parameters (to a client per round, the mean over clients), supernet_parameters, macs_per_sample (forward) and
    macs_per_round (of all epochs, per sample that a client has), supernet_bytes (received and sent by all clients in
    all rounds), model_parameters and finetune_bytes (of a random model of each tier), and their means over tiers.

    Source: FedorAS, Tab. 12, 17 and 18.
    """
    config = compose_config(overrides)
    method: FedorASConfig = config.method
    space = _space(json.dumps(asdict(config.space)))
    costs = measure_costs(config.tiers, space)
    tiers, sizes = split_into_tiers(config, space, costs.budget), space.cost_table("parameters")
    budget = CommunicationBudget(method.train.communication.unit, method.train.communication.value)
    table, limit = budget.resolve(space)
    by_tier = []  # parameters that a client receives in a round, and MACs of the paths that it trains, per sample
    for tier in tiers:
        rng, clients = stream(0, "accounting", tier.name), []
        for _ in range(SUBSPACES):
            subspace = sample_subspace(table, limit, rng, costs.budget, tier.upper)
            sampler = path_sampler(method.train.paths, costs.budget, subspace, tier.upper)
            paths = np.array([sampler.sample(rng) for _ in range(PATHS)])
            clients.append((size_of(sizes, subspace), float(costs.macs.costs(paths).mean())))
        by_tier.append(np.mean(clients, axis=0))
    sent, macs = (float(mean) for mean in np.average(by_tier, axis=0, weights=config.tiers.shares))
    drawn = space.genome.draw(MODELS, stream(0, "accounting"))
    drawn_costs, drawn_sizes = costs.budget.costs(drawn), sizes.costs(drawn)
    models = [float(drawn_sizes[(drawn_costs > t.lower) & (drawn_costs <= t.upper)].mean()) for t in tiers]
    finetune = [_bytes(method.finetune, size, config.data.num_clients) for size in models]
    return {
        "sent_parameters": sent,
        "supernet_parameters": sizes.fixed + sum(map(sum, sizes.options)),
        "macs_per_sample": macs,
        "macs_per_round": macs * method.train.epochs,
        "supernet_bytes": _bytes(method.train, sent, config.data.num_clients),
        "model_parameters": models,
        "finetune_bytes": finetune,
        "mean_model_parameters": sum(models) / len(models),
        "mean_finetune_bytes": sum(finetune) / len(finetune),
    }


@lru_cache(maxsize=2)
def _space(config: str) -> SearchSpace:
    """The space of a configuration in JSON: its cost tables, which take a second, serve all settings with it."""
    return build_space(SpaceConfig(**json.loads(config)))


def _bytes(stage: TrainingConfig, parameters: float, num_clients: int) -> float:
    """Bytes in both directions of a stage whose clients all receive and return as many parameters."""
    return 2.0 * WEIGHT_BYTES * parameters * stage.rounds * cohort_size(stage, num_clients)


def elastic_round_facts(overrides: Sequence[str]) -> Mapping[str, Any]:
    """What one round of training costs, by the way of training, and that of training k of the family's members alone.

    `communication` is in bytes, up and down, of all clients, `compute` in forward MACs of all clients for one sample
    each; both have the places MaxNet, single-stage, multi-stage, FedAvg smallest and FedAvg largest. Random subnets
    count by their exact mean over the space, which is what their sum tends to over many rounds. `family` has the same
    two for the k most expensive members of the family, each trained alone, with the places 1, 2, ...

    Source: SuperFed, App. G, Fig. 6; SuperFedNAS, Sec. 3.2, Fig. 3.
    """
    config = compose_config(overrides)
    space, method = build_space(config.space), config.method
    assert isinstance(space, ElasticSpace), "an item counts subnets of elastic spaces only"
    assert isinstance(method, SuperFedNASConfig), "an item counts rounds of SuperFedNAS only"
    family, clients = [*map(space.parse, method.family)], cohort_size(method.train, config.data.num_clients)
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
