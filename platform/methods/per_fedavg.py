"""perFedAvg, first order (Fallah et al. 2020, Alg. 1; Finn et al. 2017): a model that adapts well in one step.

Settings of SPIDER, App. B.1.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch

from fedloom.platform.clients.assignments import Assignment, ClientResult, places_of
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.scoring import validation_scores
from fedloom.platform.clients.trainer import ValidationUse, client_samples, train_network, trained_outcome, update_of
from fedloom.platform.clients.training import LocalSGD, Optimizer, Outputs, Samples, Step, gradient_of
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.trees import rows_of
from fedloom.platform.federation.algorithm import Round
from fedloom.platform.federation.method import Method, Stage
from fedloom.platform.federation.training_config import EPOCHS, Rules
from fedloom.platform.federation.world import World
from fedloom.platform.methods.silos import (
    AdaptAndScore,
    SiloTrainingConfig,
    SubnetConfig,
    endless_batches,
    subnet_stages,
    without_schedule,
)
from fedloom.platform.seeding import torch_stream
from fedloom.platform.settings import POSITIVE
from fedloom.platform.spaces.slices import Weights

BATCHES_PER_STEP = 2


@dataclass
class PerFedAvgTrainingConfig(SiloTrainingConfig):
    """Training of the silos."""

    local_factor: Annotated[float, POSITIVE, "the inner step's rate (alpha) in units of lr, without decay"] = 1.0


@dataclass
class InnerStepsConfig:
    """A silo's adaptation, which the shared model was trained for: steps without momentum, decay or clipping."""

    steps: Annotated[int, EPOCHS, "number of steps, each on one batch of the silo's data"] = 1
    lr: Annotated[float | None, POSITIVE, "learning rate; null: the inner step's, local_factor times lr"] = None


@dataclass
class PerFedAvgConfig(SubnetConfig):
    """First-order MAML over the silos, then every silo adapts the shared model."""

    name: str = "per_fedavg"
    train: PerFedAvgTrainingConfig = field(default_factory=PerFedAvgTrainingConfig)
    adapt: InnerStepsConfig = field(default_factory=InnerStepsConfig)


@dataclass(frozen=True)
class TrainMeta:
    """Trains the received network to be good after one inner step of learning rate `inner_lr` (alpha)."""

    subnet: Subnet
    local: LocalSGD
    inner_lr: float
    rules: Rules
    validation: ValidationUse = "trained"

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Trains the network; the update holds all of its tensors."""
        network = self.subnet.on(worker)
        data = client_samples(worker, assignment, use_validation=self.validation == "trained")
        generator = torch_stream(worker.spec.training_seed, "meta_batches", *places_of(assignment))
        batches, objective = endless_batches(data, self.local, generator), worker.objective.for_client(data[1])

        def meta(sgd: Optimizer) -> Step:
            return MetaStep(sgd, network.forward, batches, self.inner_lr, objective)

        shared = train_network(worker, assignment, network, weights, data, self.local, meta)
        scores = validation_scores(worker, assignment, network) if self.validation == "scored" else ()
        samples = rows_of(data[1])
        outcome = trained_outcome(shared, samples, update_of(shared, samples, self.rules.weighting))
        macs = BATCHES_PER_STEP * network.macs_of(shared.figures) + shared.rule_macs
        return replace(outcome, macs=macs, measurements=scores)


@dataclass
class MetaStep:
    """w' = w - alpha * grad(w; one batch), then w <- w - beta * grad(w'; another batch), beta being SGD's rate."""

    sgd: Optimizer
    forward: Callable[[Any], Outputs]
    batches: Iterator[Samples]
    inner_lr: float
    objective: Objective

    def step(self) -> None:
        """Takes the inner step with the first batch's gradients, then the outer step with those of a second batch."""
        reached = [p for p in self.sgd.parameters if p.grad is not None]
        before = [p.detach().clone() for p in reached]
        with torch.no_grad():
            for parameter in reached:
                parameter.sub_(gradient_of(parameter), alpha=self.inner_lr)
                parameter.grad = None
        x, y = next(self.batches)
        self.objective.loss(self.forward(x), y).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter, value in zip(reached, before, strict=True):
                parameter.copy_(value)
        self.sgd.step()


def stages(config: PerFedAvgConfig, world: World) -> list[Stage]:
    """First-order MAML, then the evaluation of the shared and the adapted model."""
    train, steps = config.train, config.adapt.steps
    inner_lr = train.local_factor * train.lr
    lr = inner_lr if config.adapt.lr is None else config.adapt.lr
    # A silo with fewer batches than steps passes over them again.
    adapt = without_schedule(
        *(world, train), epochs=steps, steps=steps, lr=lr, momentum=0.0, weight_decay=0.0, clip_norm=0.0
    )

    def client(subnet: Subnet, round_: Round, validation: ValidationUse) -> TrainMeta:
        return TrainMeta(subnet, round_.local, inner_lr, round_.rules, validation)

    return subnet_stages(world, config, lambda subnet: AdaptAndScore(subnet, adapt, train.use_validation), client)


METHOD = Method(PerFedAvgConfig, stages, kind="silos", lacks=("candidates", "models"))
