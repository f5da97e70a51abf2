"""DepthFL: clients train the first blocks of a network, whose exits teach each other (Kim et al. 2023, Alg. 1, Eq. 2).

    client with D blocks:
        for every batch minimise, over its exits i = 1 to D,
        sum_i cross entropy(y_i) + u(t) / (D - 1) sum_i sum_{j != i} KL(y_j's outputs || y_i's),
        where the teachers' outputs y_j are fixed targets, without gradients
    server:
        a block becomes the unweighted mean over the clients that hold it (weighting=plain)
    u(t) rises from exp(-5) to 1 over the first rounds: exp(-5 (1 - t / T)^2)

A tier's model is the deepest network that the tier affords; it classifies by the mean of its exits' logits. One block
for all tiers is FedAvg. The paper's server and local rule are FedDyn's: method.train.server=feddyn and
local_rule=feddyn with alpha=.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from torch.nn import functional as F

from fedloom.platform.clients.networks import Network, OfSubnet, Subnet
from fedloom.platform.clients.objectives import check_divergence, mean_counted
from fedloom.platform.federation.method import Method
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.methods.evaluation import EvaluationConfig
from fedloom.platform.methods.tier_models import largest_of_tiers, plainly_weighted, refuse_masked_rows, tier_stages
from fedloom.platform.plugins import is_import_path
from fedloom.platform.settings import PART, ZERO_OR_MORE
from fedloom.platform.spaces.capabilities import with_exits
from fedloom.platform.spaces.registry import try_exits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fedloom.platform.clients.assignments import Assignment
    from fedloom.platform.clients.objectives import Objective
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.federation.algorithm import Round
    from fedloom.platform.federation.method import Stage
    from fedloom.platform.federation.world import World


@dataclass
class DepthFLConfig:
    """Training of leading blocks with exits, and the tiers' models."""

    name: str = "depthfl"
    distillation: Annotated[float, ZERO_OR_MORE, "weight of the distillation between exits; 0: none"] = 1.0
    ramp_up: Annotated[float, PART, "share of the rounds over which the weight rises (the authors': .3)"] = 0.3
    train: TrainingConfig = field(default_factory=plainly_weighted)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


@dataclass(frozen=True)
class WithExits(OfSubnet):
    """A network of leading blocks whose exits are all trained, and distil each other with weight `distillation`."""

    distillation: float = 0.0

    def on(self, worker: Worker, assignment: Assignment) -> Network:
        """The network: its outputs are the logits that it classifies by; its loss uses the logits of each exit."""
        network, last = self.subnet.on(worker, assignment), list["Tensor"]()

        def forward(x_B: Tensor) -> Tensor:
            last.clear()
            outputs: Tensor = network.module(x_B, last)
            return outputs

        def loss(objective: Objective, outputs: Tensor, targets: Tensor) -> Tensor:
            return self.loss_of(objective, [each.to(outputs.dtype) for each in last], targets)

        return replace(network, forward=forward, loss=loss)

    def loss_of(self, objective: Objective, exits: Sequence[Tensor], targets: Tensor) -> Tensor:
        """The loss of a batch, given the exits' logits (N, classes), shallowest first."""
        return loss_of_exits(objective, exits, targets, self.distillation)


def loss_of_exits(objective: Objective, exits: Sequence[Tensor], targets: Tensor, distillation: float) -> Tensor:
    """Eq. 2: the exits' losses plus the distillation between every pair of exits, from their logits (N, classes)."""
    total = sum((objective.loss(logits, targets) for logits in exits[1:]), objective.loss(exits[0], targets))
    if not distillation or len(exits) == 1:
        return total
    # Each exit's softmax is taken once; `taught_loss` would take it again for every pair, and round differently.
    counted = [objective.targets(logits, targets) for logits in exits]
    logs, labels = [F.log_softmax(logits, dim=1) for logits, _ in counted], counted[0][1]
    for i, pupil in enumerate(logs):
        for teacher in [t.detach() for j, t in enumerate(logs) if j != i]:
            divergences = F.kl_div(pupil, teacher, reduction="none", log_target=True).sum(dim=1)
            total = total + distillation / (len(exits) - 1) * mean_counted(divergences, labels)
    return total


def ramped_up(config: DepthFLConfig, index: int) -> float:
    """The distillation weight in round t: exp(-5 (1 - t / T)^2) times the final one, with a ramp of T rounds."""
    length = config.ramp_up * config.train.rounds
    left = 1 - index / length if index < length else 0.0
    return config.distillation * math.exp(-5 * left**2)


def stages(config: DepthFLConfig, world: World) -> list[Stage]:
    """Training, the tiers' models, evaluation."""
    deepest = largest_of_tiers(world)
    refuse_masked_rows(world, config.name)
    check_divergence(world.data.dataset, "method.distillation", config.distillation)
    if is_import_path(world.config.space.name):
        try_exits(with_exits(world.space, config.name), world.config.space)

    def network(round_: Round, client_id: int) -> WithExits:
        subnet = Subnet(deepest[int(world.tier_of_client[client_id])])
        return WithExits(subnet, ramped_up(config, round_.index))

    return tier_stages(world, config.name, config.train, config.evaluation, network)


METHOD = Method(DepthFLConfig, stages, kind="tiers", lacks=("candidates",), needs=with_exits)
