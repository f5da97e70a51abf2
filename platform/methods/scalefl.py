"""ScaleFL: submodels scaled in depth and width, whose exits learn from the last exit (Ilhan et al. 2023).

    client of level l, with J exits:
        trains the first blocks of the network, up to the J-th exit, with the share w_l of their channels;
        for every batch minimise 2 / (J (J + 1)) sum_j j L_j, where L_J = cross entropy(y_J) and for the other exits
        L_j = cross entropy(y_j) + g T^2 KL(y_J's outputs || y_j's), softened by T; y_J's are fixed targets here;
        in the first rounds g = 0
    server:
        a parameter becomes the unweighted mean over the clients that hold it (weighting=plain)

A level is a number of blocks and their width together (`space.widths`). A tier has the largest level that it affords;
its model classifies by the last exit. One block for all tiers is FedAvg. In the authors' code, KL is also averaged over
the classes, and also trains y_J. Their batch norms keep no statistics; here clients measure them at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.objectives import check_divergence, taught_loss
from fedloom.platform.federation.method import Method
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.methods.depthfl import WithExits
from fedloom.platform.methods.tier_models import (
    WidthConfig,
    largest_of_tiers,
    plainly_weighted,
    refuse_masked_rows,
    tier_stages,
)
from fedloom.platform.plugins import is_import_path
from fedloom.platform.settings import PART, POSITIVE, ZERO_OR_MORE
from fedloom.platform.spaces.capabilities import with_exits
from fedloom.platform.spaces.registry import try_exits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fedloom.platform.clients.objectives import Objective
    from fedloom.platform.federation.algorithm import Round
    from fedloom.platform.federation.method import Stage
    from fedloom.platform.federation.world import World


@dataclass
class ScaleFLConfig(WidthConfig):
    """Training of submodels with exits, and the tiers' models."""

    name: str = "scalefl"
    distillation: Annotated[float, ZERO_OR_MORE, "g, the weight of the distillation from the final exit; 0: none"] = (
        0.05
    )
    temperature: Annotated[float, POSITIVE, "T, by which logits are divided in distillation"] = 3.0
    distil_after: Annotated[float, PART, "share of the rounds, from the first, without distillation"] = 0.25
    train: TrainingConfig = field(default_factory=plainly_weighted)


@dataclass(frozen=True)
class Scaled(WithExits):
    """A submodel whose exits learn from the last one, with weight `distillation`."""

    temperature: float = 1.0

    def loss_of(self, objective: Objective, exits: Sequence[Tensor], targets: Tensor) -> Tensor:
        """The mean of the exits' losses, weighted by their depths."""
        *earlier, last = exits
        total = len(exits) * objective.loss(last, targets)
        for depth, logits in enumerate(earlier, start=1):
            loss = objective.loss(logits, targets)
            if self.distillation:
                taught = taught_loss(objective, logits, last.detach(), targets, self.temperature)
                loss = loss + self.distillation * self.temperature**2 * taught
            total = total + depth * loss
        return total / (len(exits) * (len(exits) + 1) / 2)


def stages(config: ScaleFLConfig, world: World) -> list[Stage]:
    """Training, the tiers' models and their statistics, evaluation."""
    levels = largest_of_tiers(world)
    refuse_masked_rows(world, config.name)
    check_divergence(world.data.dataset, "method.distillation", config.distillation)
    if is_import_path(world.config.space.name):
        try_exits(with_exits(world.space, config.name), world.config.space)

    def network(round_: Round, client_id: int) -> Scaled:
        taught = round_.index >= config.distil_after * config.train.rounds
        level = Subnet(levels[int(world.tier_of_client[client_id])])
        return Scaled(level, config.distillation if taught else 0.0, config.temperature)

    clients = config.statistics_clients
    return tier_stages(world, config.name, config.train, config.evaluation, network, statistics_clients=clients)


METHOD = Method(ScaleFLConfig, stages, kind="tiers", lacks=("candidates",), needs=with_exits)
