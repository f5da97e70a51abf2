"""FedRolex: clients train a window of the channels, which moves on every round (Alam et al. 2022, Alg. 1).

    in round j: a client of width p trains, in every layer of K channels, channels j, j + 1, ..., j + pK - 1 (modulo K);
                a parameter becomes the mean over the clients that hold it

Channels j to j + pK - 1 are the leading channels of a network whose channels were rolled by j. A network computes the
same if the channels of all layers are permuted alike. So the server rolls its weights by one channel after every round,
and everything else is as in HeteroFL. A tier's model is the window after the last round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from fedloom.platform.clients.networks import Subnet
from fedloom.platform.federation.algorithm import SUPERNET
from fedloom.platform.federation.method import Method
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.methods.tier_models import (
    WidthConfig,
    largest_of_tiers,
    of_widths,
    plainly_weighted,
    refuse_what_stays,
    tier_stages,
)
from fedloom.platform.settings import ZERO_OR_MORE

if TYPE_CHECKING:
    from fedloom.platform.federation.algorithm import Plan, RoundResult, RunState
    from fedloom.platform.federation.method import Stage
    from fedloom.platform.federation.world import World


@dataclass
class FedRolexConfig(WidthConfig):
    """Training of rolling windows, and the tiers' models."""

    name: str = "fedrolex"
    step: Annotated[int, ZERO_OR_MORE, "channels by which the window moves after a round; 0: HeteroFL"] = 1
    train: TrainingConfig = field(default_factory=plainly_weighted)


def stages(config: FedRolexConfig, world: World) -> list[Stage]:
    """Training, the tiers' models and their statistics, evaluation."""
    space, widest = of_widths(world.space, config.name), largest_of_tiers(world)
    refuse_what_stays(config.train, config.name, "rolls the channels after every round")

    def roll(state: RunState, _plan: Plan, _result: RoundResult) -> RunState:
        return state.with_group(SUPERNET, space.rolled(state.weights(SUPERNET), config.step)) if config.step else state

    def network(_round: object, client_id: int) -> Subnet:
        return Subnet(widest[int(world.tier_of_client[client_id])])

    return tier_stages(
        *(world, config.name, config.train, config.evaluation, network),
        after=roll,
        statistics_clients=config.statistics_clients,
    )


METHOD = Method(FedRolexConfig, stages, kind="tiers", lacks=("candidates",), needs=of_widths)
