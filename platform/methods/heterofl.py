"""HeteroFL: every client trains the leading share of the channels that its tier affords (Diao et al. 2021, Alg. 1).

    in every round: each client trains the leading channels of the global network, as many as its tier's width allows
                    (dynamic: at most as many, drawn at random); in training, hidden layers are scaled up by the
                    inverse share; a parameter becomes the mean over the clients that hold it (weighting=plain)
    at the end:     clients measure the statistics of batch norms, which keep none in training (norm=static);
                    each tier's model is the leading part of the global network

In the paper, clients mask the classes that their data lack; the authors' code also leaves the classifier's rows of
these classes out of the mean. objective.name=masked_classes does both. One width for all is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from fedloom.platform.clients.networks import Subnet
from fedloom.platform.federation.method import Method
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.methods.tier_models import (
    WidthConfig,
    largest_of_tiers,
    of_widths,
    plainly_weighted,
    tier_stages,
    within,
)
from fedloom.platform.seeding import stream

if TYPE_CHECKING:
    from fedloom.platform.federation.algorithm import Round
    from fedloom.platform.federation.method import Stage
    from fedloom.platform.federation.world import World


@dataclass
class HeteroFLConfig(WidthConfig):
    """Training of leading channels, and the tiers' models."""

    name: str = "heterofl"
    dynamic: Annotated[bool, "in every round, clients draw one of the widths that their tier affords"] = False
    train: TrainingConfig = field(default_factory=plainly_weighted)


def stages(config: HeteroFLConfig, world: World) -> list[Stage]:
    """Training, the tiers' models and their statistics, evaluation."""
    widest = largest_of_tiers(world)

    def network(round_: Round, client_id: int) -> Subnet:
        if not config.dynamic:
            return Subnet(widest[int(world.tier_of_client[client_id])])
        rng = stream(world.config.seed_for("training"), "width", round_.index, client_id)
        affordable = within(world, world.training_budget(client_id, round_.stage, round_.index))
        return Subnet(affordable[int(rng.integers(len(affordable)))])

    clients = config.statistics_clients
    return tier_stages(world, config.name, config.train, config.evaluation, network, statistics_clients=clients)


METHOD = Method(
    HeteroFLConfig,
    stages,
    kind="tiers",
    lacks=("candidates",),
    needs=of_widths,
    budgets=lambda config: config.dynamic,
)
