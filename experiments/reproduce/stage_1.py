"""What the clients of FedorAS receive and compute in stage 1, counted from subspaces and paths that are drawn."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.clients.path_samplers import path_sampler
from fedloom.platform.clients.subspace import CommunicationBudget, sample_subspace
from fedloom.platform.federation.building import split_into_tiers
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.costs import RunCosts, measure_costs
from fedloom.platform.methods.tiered.fedoras import SupernetConfig
from fedloom.platform.seeding import stream
from fedloom.platform.spaces.registry import build_space
from fedloom.tiers.costs import size_of
from fedloom.tiers.tier import Tier

SUBSPACES, PATHS = 50, 20
"""Draws per tier: with these the standard error of a mean is about 1 %."""
WEIGHT_BYTES = 4


def stage_1_facts(overrides: Sequence[str]) -> Mapping[str, Any]:
    """Means over clients, whose tiers have the configured shares, and the totals of the stage.

    sent_parameters, bytes (all clients receive and send in all rounds), macs_per_sample (forward), macs_per_round (of a
    client, per sample that it has). Source: FedorAS, Sec. 3.1, Tab. 12 and 17.
    """
    config = compose_config(overrides)
    train: SupernetConfig = config.method.train
    space = build_space(config.space)
    costs = measure_costs(config.tiers, space)
    tiers = split_into_tiers(config, space, costs.budget)
    shares = config.tiers.shares or [1 / len(tiers)] * len(tiers)
    by_tier = [np.mean([*_draws(config, costs, tier, space.cost_table("parameters"))], axis=0) for tier in tiers]
    sent, macs = (float(mean) for mean in np.average(by_tier, axis=0, weights=shares))
    clients = train.rounds * (train.clients_per_round or 0)
    return {
        "sent_parameters": sent,
        "bytes": 2 * clients * sent * WEIGHT_BYTES,
        "macs_per_sample": macs,
        "macs_per_round": macs * train.epochs,
    }
