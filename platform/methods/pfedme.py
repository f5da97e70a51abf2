"""pFedMe (Dinh et al. 2020, Alg. 1): personal models that minimise Moreau envelopes around the shared one.

    in every round, silo i:   w_i <- w
                              for every batch: theta_i <- K steps of learning rate lr, from its last value, on
                                                          f_i(theta; batch) + lambda / 2 ||theta - w_i||^2
                                               w_i <- w_i - eta lambda (w_i - theta_i)
    server:                   w <- (1 - beta) w + beta times the unweighted mean of the w_i (weighting=plain)

theta_i starts every round at w, as in the authors' code; the paper does not say where it starts. A silo's model is the
theta_i of its last round. Beyond the paper, the authors' code also has a weight decay of .001 (here `weight_decay`) and
weights silos by their samples, and all silos train in every round although only some are averaged; here only selected
silos train. With K = 1, eta lambda = 1 and beta = 1 this is FedAvg.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.local_rules import pull_towards
from fedloom.platform.clients.networks import Network, Subnet
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.scoring import PERSONAL, validation_scores
from fedloom.platform.clients.trainer import (
    ValidationUse,
    client_samples,
    received,
    train_network,
    trained_outcome,
    update_of,
)
from fedloom.platform.clients.training import LocalSGD, Optimizer, Outputs
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.trees import rows_of
from fedloom.platform.federation.algorithm import Round
from fedloom.platform.federation.method import Method, Stage
from fedloom.platform.federation.training_config import EPOCHS, Rules, Schedule
from fedloom.platform.federation.world import World
from fedloom.platform.methods.silos import Personal, ScoreOwn, SiloTrainingConfig, SubnetConfig, subnet_stages
from fedloom.platform.settings import BELOW_ONE, POSITIVE, ZERO_OR_MORE, ComponentName
from fedloom.platform.spaces.slices import Weights
from fedloom.platform.words import shown


@dataclass
class PFedMeTrainingConfig(SiloTrainingConfig):
    """Training of the silos, by default as in the paper."""

    pull: Annotated[float, POSITIVE, "lambda: the pull of a personal model towards the silo's shared one"] = 15.0
    inner_steps: Annotated[int, EPOCHS, "K: steps of the personal model on every batch"] = 5
    outer_lr: Annotated[float, POSITIVE, "eta: the rate at which the silo's shared model follows the personal one"] = (
        0.005
    )
    beta: Annotated[float, POSITIVE, "the server's step from the old weights to the mean; 1: the mean"] = 1.0
    momentum: Annotated[float, BELOW_ONE, "momentum of the personal model's SGD"] = 0.0
    clip_norm: Annotated[float, ZERO_OR_MORE, "limit of the norm of the gradient, pull included, 0 for none"] = 0.0
    # With a learning rate of zero in the last round, a personal model would end as the shared one.
    schedule: Annotated[Schedule, "lr of the personal models over rounds"] = "fixed"
    weighting: Annotated[str, ComponentName("weighting rule"), "weights of a silo's tensors in the mean"] = "plain"


@dataclass
class PFedMeConfig(SubnetConfig):
    """A personal model per silo, and a shared model around which they are trained."""

    name: str = "pfedme"
    train: PFedMeTrainingConfig = field(default_factory=PFedMeTrainingConfig)


class MoreauSteps:
    """Makes K steps of the personal model on every batch, then one step of the silo's shared model.

    `outer_weights` are the parameters of the silo's shared model, w_i. Batches are recorded in the forward pass.
    """

    def __init__(self, network: Network, outer_weights: Mapping[str, Tensor], train: PFedMeTrainingConfig) -> None:
        self.network, self.outer_weights, self.train = network, outer_weights, train

    def watched(self) -> Network:
        """The network, which records every batch for the further passes."""
        return replace(self.network, forward=self._forward, loss=self._loss, compilable=False)

    def _forward(self, x: Any) -> Outputs:
        self.x = x
        return self.network.forward(x)

    def _loss(self, objective: Objective, outputs: Outputs, targets: Any) -> Tensor:
        self.objective, self.targets = objective, targets
        return objective.loss(outputs, targets)

    def of(self, sgd: Optimizer) -> "MoreauSteps":
        """The steps of this optimiser, pulled towards the silo's shared model."""
        self.sgd = sgd.resume({}, pull_towards(self.train.pull, self.outer_weights))
        return self

    def step(self) -> None:
        """Makes the K steps, then the outer one; the first gradient is given, the other K - 1 are computed here."""
        self.sgd.step()
        for _ in range(self.train.inner_steps - 1):
            loss = self.objective.loss(self.network.forward(self.x), self.targets)
            loss.backward()  # type: ignore[no-untyped-call]
            self.sgd.step()
        personal = [tensor.detach() for tensor in self.sgd.parameters]
        outer = [self.outer_weights[name] for name in self.sgd.names]
        torch._foreach_lerp_(outer, personal, self.train.outer_lr * self.train.pull)


@dataclass(frozen=True)
class TrainPFedMe:
    """One round of a silo: the update is its w_i, with the personal model's buffers; theta_i stays in its state."""

    subnet: Subnet
    local: LocalSGD
    train: PFedMeTrainingConfig
    rules: Rules
    validation: ValidationUse = "trained"

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Trains both models from the received weights."""
        network = self.subnet.on(worker)
        data = client_samples(worker, assignment, use_validation=self.validation == "trained")
        outer = {name: tensor.clone() for name, tensor in received(worker, network, weights).items()}
        steps = MoreauSteps(network, outer, self.train)
        personal = train_network(worker, assignment, steps.watched(), weights, data, self.local, steps.of).copied()
        shared = replace(personal, tensors={**personal.tensors, **{name: outer[name] for name in personal.parameters}})
        samples = rows_of(data[1])
        outcome = trained_outcome(shared, samples, update_of(shared, samples, self.rules.weighting))
        return replace(
            outcome,
            steps=self.train.inner_steps * outcome.steps,
            macs=self.train.inner_steps * outcome.macs,
            state=Personal(personal.tensors, {}).packed(),
            measurements=validation_scores(worker, assignment, network, PERSONAL)
            if self.validation == "scored"
            else (),
        )


def stages(config: PFedMeConfig, world: World) -> list[Stage]:
    """Training of both models, then the evaluation of the personal ones."""
    train = config.train
    for name, value, allowed in (("local_rule", train.local_rule, "sgd"), ("server", train.server, "replace")):
        if value != allowed:
            raise ValueError(
                f"method.train.{name}={shown(value)}: pfedme has rules of its own for its silos (pull, outer_lr) and "
                f"its server (beta); use {allowed}"
            )
    if train.beta != 1:
        options = {**train.options, "server_lr": train.beta, "server_momentum": 0.0}
        config = replace(config, train=replace(train, server="fedavgm", options=options))

    def client(subnet: Subnet, round_: Round, validation: ValidationUse) -> TrainPFedMe:
        return TrainPFedMe(subnet, round_.local, train, round_.rules, validation)

    return subnet_stages(world, config, ScoreOwn, client)


METHOD = Method(PFedMeConfig, stages, kind="silos", own="model", lacks=("candidates", "models"))
