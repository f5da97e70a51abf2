"""APFL (Deng et al. 2020, Alg. 1): every client mixes a personal model with the shared one, and learns the weight.

w <- fresh; v_i <- w; alpha_i <- alpha
in every round: a selected client takes the shared model w_i <- w, and in every step on a batch
                    w_i     <- w_i - lr grad f(w_i)
                    v_i     <- v_i - lr alpha_i grad f(m),  m = alpha_i v_i + (1 - alpha_i) w_i
                    alpha_i <- alpha_i - lr <v_i - w_i, grad f(m)>, within [0, 1]           (Eq. 10; unless it is fixed)
                all three from the values before the step; it keeps v_i and alpha_i, and sends w_i;
                the server averages the w_i
at the end:     every client's mixture with the last shared model is scored on its own test data

Alpha takes a step on every batch, as the indices of Eq. 10 say. A client that has never taken part has v_i = w, so its
mixture is the shared model whatever alpha is. Where the network has batch norms, the mixture is scored with mixed
running statistics, alpha of the personal ones (those of m) plus 1 - alpha of the shared ones, of which the paper says
nothing; statistics estimated anew gave two or five points more in two runs on digits.

Published code differs from the paper. The authors' FedTorch mixes the outputs of the two models, not their weights,
uses w_i after its step, and updates alpha once per round, with a decay of .02 alpha_i and the gradients of f(m) with
respect to v_i and w_i, weighted once more by alpha_i and 1 - alpha_i: for a linear model that is Eq. 10's step times
alpha_i^2 + (1 - alpha_i)^2. FedRep's repository weights both models by alpha (correct only for .5). PFLlib trains v_i
on its own loss and replaces it with the mixture after every round.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.platform.clients.assignments import Assignment, ClientResult, Measurement, TaskError
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.scoring import PERSONAL, validation_scores
from fedloom.platform.clients.trainer import ValidationUse, client_samples, train_network, trained_outcome, update_of
from fedloom.platform.clients.training import LocalSGD, Optimizer, Outputs
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.on_device import moved
from fedloom.platform.data.trees import Tree, rows_of
from fedloom.platform.federation.algorithm import Round
from fedloom.platform.federation.method import Method, Stage
from fedloom.platform.federation.training_config import Rules
from fedloom.platform.federation.world import World
from fedloom.platform.methods.personal_layers import with_own
from fedloom.platform.methods.silos import WEIGHTS, SubnetConfig, subnet_stages, tested_outcome, under
from fedloom.platform.settings import PART
from fedloom.platform.spaces.slices import Weights, first_not_finite

ALPHA = "alpha"
"""The name of the personal model's mixing weight, in a client's state and among its measurements."""


@dataclass
class APFLConfig(SubnetConfig):
    """FedAvg plus a personal model per client, which is mixed with the shared model."""

    name: str = "apfl"
    alpha: Annotated[float, PART, "initial weight of the personal model in a client's mixture"] = 0.5
    adaptive: Annotated[bool, "whether every client learns its alpha (Eq. 10); false: alpha is fixed"] = True


# -- a client ---------------------------------------------------------------------------------------------------------


def mixed(alpha: Tensor, personal: Weights, shared: Weights) -> dict[str, Tensor]:
    """alpha times the personal plus (1 - alpha) times the shared tensors; batch-norm counters are the shared model's.

    The result is exactly the shared model for alpha = 0, and exactly the personal one for alpha = 1.
    """
    return {
        n: torch.lerp(t, personal[n], alpha) if t.is_floating_point() else t for n, t in shared.items() if n in personal
    }


@dataclass
class Mixture:
    """Forward passes of the shared model and of the mixture; each has its own outputs and running statistics."""

    module: nn.Module
    shared: Mapping[str, Tensor]
    personal: Mapping[str, Tensor]
    alpha: Tensor
    shared_outputs: Outputs = None

    def __call__(self, x: Tree) -> Outputs:
        """The mixture's outputs; their gradients flow to the personal parameters and alpha, not to the shared ones."""
        self.shared_outputs = self.module(x)
        parameters = {n: t.detach() for n, t in self.shared.items() if t.requires_grad}
        return functional_call(self.module, {**self.personal, **mixed(self.alpha, self.personal, parameters)}, (x,))

    def loss(self, objective: Objective, outputs: Outputs, targets: Any) -> Tensor:
        """The sum of both models' losses, which share no parameters."""
        return objective.loss(self.shared_outputs, targets) + objective.loss(outputs, targets)


@dataclass
class MixtureSteps:
    """Optimiser steps of the shared model, the personal model and, if it has a gradient, alpha."""

    sgd: Optimizer
    personal: Optimizer
    alpha: Tensor

    @torch.no_grad()
    def step(self) -> None:
        """Updates all three, with the gradients at the values before the step."""
        if self.alpha.grad is not None:
            self.alpha.sub_(self.alpha.grad, alpha=self.sgd.local.lr).clamp_(0, 1)
            self.alpha.grad = None
        self.sgd.step()
        self.personal.step()


@dataclass(frozen=True)
class TrainAPFL:
    """One round of a client; `alpha` is the mixing weight with which a client starts its first round."""

    subnet: Subnet
    local: LocalSGD
    alpha: float
    adaptive: bool
    rules: Rules
    validation: ValidationUse = "trained"

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Trains both models; the update holds the shared model, the client's state the personal one and alpha."""
        network = self.subnet.on(worker)
        data = client_samples(worker, assignment, use_validation=self.validation == "trained")
        samples, shared = rows_of(data[1]), worker.tensors_of(network.module)
        start = {name: tensor for name, tensor in with_own(assignment, weights).items() if name in shared}
        first = moved(start, worker.device)
        personal = {name: tensor.detach().clone() for name, tensor in first.items()}
        parameters = {name: tensor.requires_grad_() for name, tensor in personal.items() if shared[name].requires_grad}
        alpha = moved(assignment.state or {ALPHA: torch.tensor(self.alpha)}, worker.device)[ALPHA]
        alpha.requires_grad_(self.adaptive)
        mixture = Mixture(network.module, {name: shared[name] for name in personal}, personal, alpha)
        both = replace(network, forward=mixture, loss=mixture.loss, macs=2 * network.macs, compilable=False)

        def steps(sgd: Optimizer) -> MixtureSteps:
            # A local rule's own pass over the samples has left a gradient, and has changed running statistics.
            alpha.grad = None
            for name in personal.keys() - parameters.keys():
                personal[name].copy_(first[name])
            return MixtureSteps(sgd, Optimizer(self.local.plain, parameters), alpha)

        trained = train_network(worker, assignment, both, weights, data, self.local, steps).copied()
        broken = first_not_finite(personal, first.get)
        if broken is not None:
            raise TaskError(f"the personal model is not finite (first in {broken})")
        outcome = trained_outcome(trained, samples, update_of(trained, samples, self.rules.weighting))
        client_state = {
            ALPHA: alpha.detach(),
            **{f"{WEIGHTS}{name}": tensor.detach() for name, tensor in personal.items()},
        }
        if self.validation == "scored":
            worker.load(
                network.module,
                mixed(client_state[ALPHA], under(client_state, WEIGHTS), trained.tensors),
                network.slices,
            )
            outcome = replace(outcome, measurements=validation_scores(worker, assignment, network, PERSONAL))
        return replace(outcome, state={**trained.state, **client_state})


@dataclass(frozen=True)
class ScoreMixture:
    """Scores a client's mixture with the shared model on its test data."""

    subnet: Subnet

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Measures `personal` and the client's alpha; a client that has never taken part uses the shared model."""
        network, state = self.subnet.on(worker), assignment.state
        if state is None:
            return tested_outcome(worker, assignment, PERSONAL, network, weights)
        mixture = mixed(state[ALPHA], under(state, WEIGHTS), {n: t.cpu() for n, t in weights.items()})
        outcome = tested_outcome(worker, assignment, PERSONAL, network, mixture)
        alpha = Measurement(PERSONAL, network.name, None, ALPHA, state[ALPHA].item(), 0)
        return replace(outcome, measurements=(*outcome.measurements, alpha))


# -- stages -----------------------------------------------------------------------------------------------------------


def stages(config: APFLConfig, world: World) -> list[Stage]:
    """Training of both models, then the evaluation of the mixtures."""

    def client(subnet: Subnet, round_: Round, validation: ValidationUse) -> TrainAPFL:
        return TrainAPFL(subnet, round_.local, config.alpha, config.adaptive, round_.rules, validation)

    return subnet_stages(world, config, ScoreMixture, client)


METHOD = Method(APFLConfig, stages, kind="silos", own="model", lacks=("candidates", "models"))
