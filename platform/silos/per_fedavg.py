"""A silo's round in perFedAvg, first order (Fallah et al. 2020, Alg. 1; Finn et al. 2017)."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.clients.execution import Assignment, Outcome
from fedloom.platform.clients.tasks import places_of
from fedloom.platform.clients.training import SGD, LocalSGD, Step
from fedloom.platform.clients.worker import Worker
from fedloom.platform.seeding import torch_stream
from fedloom.platform.silos.batches import Batches, endless_batches
from fedloom.platform.silos.network import GLOBAL, fixed_network, silo_data, train_network
from fedloom.platform.silos.outcome import shared_outcome
from fedloom.platform.silos.scoring import own_scores
from fedloom.platform.spaces.base import Architecture, Weights

BATCHES_PER_STEP = 2


@dataclass(frozen=True)
class TrainMeta:
    """Trains the received network to be one step away from a good one; `inner_lr` is that step's rate (alpha)."""

    architecture: Architecture
    local: LocalSGD
    inner_lr: float
    joined: bool = True
    scored: bool = False
    weighting: str = "fedavg"

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """The update holds all that was trained; nothing stays with the silo."""
        network = fixed_network(worker, self.architecture)
        data = silo_data(worker, assignment, joined=self.joined)
        generator = torch_stream(worker.spec.training_seed, "meta_batches", *places_of(assignment))
        batches = endless_batches(data, self.local, generator)

        def meta(sgd: SGD) -> Step:
            return MetaStep(sgd, network.forward, batches, self.inner_lr)

        shared = train_network(worker, assignment, network, weights, data, self.local, step=meta)
        unseen = self.scored and not self.joined
        scores = own_scores(worker, assignment, network, shared.tensors, GLOBAL) if unseen else ()
        outcome = shared_outcome(shared, data, self.weighting)
        return replace(outcome, macs=BATCHES_PER_STEP * outcome.macs, measurements=scores)


class MetaStep:
    """w' = w - alpha * grad(w; one batch), then w <- w - beta * grad(w'; another batch): beta is SGD's own rate."""

    def __init__(self, sgd: SGD, forward: Callable[[Tensor], Tensor], batches: Batches, inner_lr: float) -> None:
        self.sgd, self.forward, self.batches, self.inner_lr = sgd, forward, batches, inner_lr

    def step(self) -> None:
        """Uses up the gradients of the first batch, and draws the second."""
        reached = [p for p in self.sgd.parameters if p.grad is not None]
        before = [p.detach().clone() for p in reached]
        with torch.no_grad():
            for parameter in reached:
                assert parameter.grad is not None, "those that were reached"
                parameter.sub_(parameter.grad, alpha=self.inner_lr)
                parameter.grad = None
        x, y = next(self.batches)
        F.cross_entropy(self.forward(x), y).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter, value in zip(reached, before, strict=True):
                parameter.copy_(value)
        self.sgd.step()
