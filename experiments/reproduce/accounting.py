"""What FedorAS and methods of widths send, counted without data or training; of FedorAS also what clients compute."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.clients.path_samplers import path_sampler
from fedloom.platform.clients.subspace import CommunicationBudget, sample_subspace
from fedloom.platform.federation.building import split_into_tiers
from fedloom.platform.federation.costs import measure_costs
from fedloom.platform.federation.training_config import TrainingConfig, cohort_size
from fedloom.platform.methods.fedoras import FedorASConfig, SupernetConfig
from fedloom.platform.methods.tier_models import WidthConfig
from fedloom.platform.seeding import stream
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import Architecture
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.costs import CostTable, size_of
from fedloom.tiers.tier import Tier

SUBSPACES, PATHS, MODELS = 30, 20, 20_000
"""Draws per tier, paths of each subspace, and models of the whole space: a mean is exact to 1 or 2 %."""
WEIGHT_BYTES = 4


@dataclass(frozen=True)
class Drawn:
    """A space with its tiers, and what is drawn from both.

    Attributes:
        sizes: in parameters.
        macs: of one forward pass of one sample.
        costs: in the unit of the tiers' bounds.
    """

    space: SearchSpace
    tiers: tuple[Tier, ...]
    sizes: CostTable
    macs: CostTable
    costs: CostTable

    def clients(self, config: SupernetConfig, tier: Tier) -> Iterator[tuple[float, float]]:
        """Parameters that a client of a tier receives in a round, and MACs of the paths that it trains, per sample."""
        budget = CommunicationBudget(config.communication.unit, config.communication.value)
        table, limit = budget.resolve(self.space)
        rng = stream(0, "accounting", tier.name)
        for _ in range(SUBSPACES):
            subspace = sample_subspace(table, limit, rng, self.costs, tier.upper)
            sampler = path_sampler(config.paths, self.costs, subspace, tier.upper)
            paths = np.array([sampler.sample(rng) for _ in range(PATHS)])
            yield size_of(self.sizes, subspace), float(self.macs.costs(paths).mean())

    def model_sizes(self) -> list[float]:
        """Mean parameters of random models per tier."""
        models = self.space.genome.draw(MODELS, stream(0, "accounting"))
        costs, sizes = self.costs.costs(models), self.sizes.costs(models)
        return [float(sizes[(costs > tier.lower) & (costs <= tier.upper)].mean()) for tier in self.tiers]


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
    widest = [_widest(space, costs.budget, tier.upper) for tier in tiers]
    sent = float(np.average([sizes.cost(width) for width in widest], weights=config.tiers.shares))
    return {
        "sent_parameters": sent,
        "supernet_parameters": sizes.cost(space.largest),
        "supernet_bytes": _bytes(method.train, sent, config.data.num_clients),
    }


def _widest(space: SearchSpace, table: CostTable, most: float) -> Architecture:
    """The most costly width within a tier's bound; ValueError without any."""
    affordable = [a for a in space.enumerate() if table.cost(a) <= most]
    if not affordable:
        raise ValueError(f"no width costs at most {most:.6g} {table.measure}: raise the tier's upper bound")
    return max(affordable, key=table.cost)


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
    drawn = Drawn(space, tiers, sizes, costs.macs, costs.budget)
    by_tier = [np.mean([*drawn.clients(method.train, tier)], axis=0) for tier in tiers]
    sent, macs = (float(mean) for mean in np.average(by_tier, axis=0, weights=config.tiers.shares))
    models = drawn.model_sizes()
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
