"""A silo's round in FedMN (Wang et al. 2022): the modules that the router chooses for it, trained with the router."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from fedloom.platform.clients.execution import Assignment, Outcome
from fedloom.platform.clients.tasks import places_of
from fedloom.platform.clients.training import SGD, LocalSGD, Step
from fedloom.platform.clients.worker import Worker
from fedloom.platform.seeding import torch_stream
from fedloom.platform.silos.network import (
    GLOBAL,
    kept_network,
    silo_data,
    train_network,
    update_of,
    with_more,
)
from fedloom.platform.silos.outcome import shared_outcome
from fedloom.platform.silos.router import (
    PREFIX,
    Router,
    chosen,
    embedding_of,
    logistic_noise,
    received_router,
    straight_through,
)
from fedloom.platform.silos.scoring import adapted_outcome, own_scores
from fedloom.platform.spaces.base import Weights
from fedloom.platform.spaces.kept import KeptSpace


@dataclass(frozen=True)
class TrainModular:
    """One round of a silo: it chooses modules by the router and noise, and trains them and the router on its data.

    One draw per module holds for the round, as only what is chosen travels; so only the chosen modules' gates have
    gradients. The router takes SGD's steps at its own rate, without weight decay.

    Attributes:
        router_lr: the router's learning rate.
        temperature: of the gates' gradients.
        joined: whether validation data joins the training data.
        scored: whether the trained modules are scored on validation data, if it has not joined.
    """

    local: LocalSGD
    router_lr: float
    temperature: float
    joined: bool = True
    scored: bool = False
    weighting: str = "fedavg"

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """The update holds the chosen modules, the fixed part and the router; nothing stays with the silo."""
        data = silo_data(worker, assignment, joined=self.joined)
        gates = Gates.drawn(worker, assignment, weights, data, self.temperature)
        network = kept_network(worker, chosen(gates.hard), gates)

        def both(sgd: SGD) -> Step:
            router_local = replace(self.local, lr=self.router_lr, weight_decay=0.0)
            return Steps([sgd, SGD(router_local, list(gates.router.parameters()))])

        shared = train_network(worker, assignment, network, weights, data, self.local, step=both)
        unseen = self.scored and not self.joined
        scores = own_scores(worker, assignment, network, shared.tensors, GLOBAL) if unseen else ()
        router = {f"{PREFIX}{name}": tensor.detach() for name, tensor in gates.router.state_dict().items()}
        update = with_more(update_of(shared, len(data[1]), self.weighting), router)
        return replace(shared_outcome(shared, data, self.weighting, update), measurements=scores)


class Gates:
    """A round's gates (decisions, options): `hard` is what was drawn, their gradients are those of the router now."""

    def __init__(self, router: Router, embedding: Tensor, noise: Tensor, temperature: float) -> None:
        self.router, self.embedding, self.noise, self.temperature = router, embedding, noise, temperature
        with torch.no_grad():
            self.hard = (router(embedding) + noise > 0).to(noise.dtype)

    @classmethod
    def drawn(
        cls,
        worker: Worker,
        assignment: Assignment,
        weights: Weights,
        data: tuple[Tensor, Tensor],
        temperature: float,
    ) -> "Gates":
        """One draw per module, from the silo's own stream."""
        router, embedding = routed(worker, weights, data)
        generator = torch_stream(worker.spec.training_seed, "modules", *places_of(assignment))
        noise = logistic_noise((len(router.options), max(router.options)), generator)
        return cls(router, embedding, noise.to(worker.device), temperature)

    def __call__(self) -> Tensor:
        return straight_through(self.router(self.embedding) + self.noise, self.hard, self.temperature)


class Steps:
    """One training step after the other, each over parameters of its own."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps

    def step(self) -> None:
        """Uses up the gradients."""
        for each in self.steps:
            each.step()


def routed(worker: Worker, weights: Weights, data: tuple[Tensor, Tensor]) -> tuple[Router, Tensor]:
    """The router as it was received, and what it reads of these data."""
    classes = worker.spec.space.num_classes
    router = received_router(cast(KeptSpace, worker.space), classes, weights, worker.device)
    return router, embedding_of(data, classes)


@dataclass(frozen=True)
class ScoreModular:
    """Scores the modules that the router chooses for a silo without noise, before and after training on its data."""

    local: LocalSGD
    joined: bool = True

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """The rows of `global`, the shared modules as they are, and of `personal`, adapted."""
        data = silo_data(worker, assignment, joined=self.joined)
        router, embedding = routed(worker, weights, data)
        with torch.no_grad():
            network = kept_network(worker, chosen(router(embedding)))
        return adapted_outcome(worker, assignment, network, weights, data, self.local)
