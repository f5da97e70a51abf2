"""A silo's architecture search during training: by perturbation, or by gradients (MiLeNAS)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from fedloom.platform.clients.assignments import Assignment, client_of, places_of
from fedloom.platform.clients.mixed import MixedNetwork
from fedloom.platform.clients.networks import Network
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.training import SGD, Samples, Step, endless_batches
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.on_device import upload
from fedloom.platform.methods.mac_target import MacTarget
from fedloom.platform.methods.masking import Perturbation
from fedloom.platform.methods.personal import Personal, Searched, is_decided, restricted
from fedloom.platform.methods.search_config import ArchitectureSearchConfig, turns
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.capabilities import HasCells, SumsOptions, with_cells
from fedloom.platform.spaces.slices import Subspace


class Searcher(Protocol):
    """One round of a silo's search."""

    def before(self, worker: Worker, assignment: Assignment, silo: Personal) -> Searched:
        """Makes the search step before the round's training."""
        ...

    @property
    def passes(self) -> int:
        """Forward passes per training step of the silo's network during the search."""
        ...

    def is_over(self, space: HasCells, kept: Subspace) -> bool:
        """Whether the search has ended."""
        ...

    def step(self, worker: Worker, assignment: Assignment, silo: Personal) -> Callable[[SGD], Step]:
        """The training step of the silo's network, made from SGD over its weights."""
        ...


@dataclass(frozen=True)
class Milenas:
    """Search by gradients (He et al. 2020, first order); in the round with `ends` the largest operators are chosen."""

    ends: bool
    lr: float = 0.01
    validation_weight: float = 1.0
    max_macs: float | None = None
    passes = 2

    def before(self, worker: Worker, assignment: Assignment, silo: Personal) -> Searched:
        """Starts the search with equal weights, or ends it with the largest operator of every edge."""
        del assignment
        space = with_cells(worker.space, "a search by gradients")
        if is_decided(silo.kept):
            return Searched(silo)
        alphas = (first_alphas(space) if silo.alphas is None else silo.alphas).to(worker.device)
        if self.ends:
            return Searched(restricted(space, silo, chosen(space, alphas, silo.kept, self.max_macs)))
        return Searched(replace(silo, alphas=alphas))

    def is_over(self, space: HasCells, kept: Subspace) -> bool:
        del space
        return is_decided(kept)

    def step(self, worker: Worker, assignment: Assignment, silo: Personal) -> Callable[[SGD], Step]:
        """SGD on the weights and on the architecture parameters, which change in place."""
        if silo.alphas is None:
            return lambda sgd: sgd
        return MixedStep.maker(worker, assignment, self, silo.alphas, own_network(worker, silo))


def own_network(worker: Worker, silo: Personal) -> Network:
    """A silo's network of its remaining operators, weighted by its architecture parameters if it has any."""
    kept, alphas = silo.kept, silo.alphas
    if alphas is None:
        return MixedNetwork(kept).on(worker)
    absent = absent_of(alphas, kept)
    return MixedNetwork(kept, lambda: softmax(alphas, absent)).on(worker)


def first_alphas(space: SumsOptions) -> Tensor:
    """Initial architecture parameters (decisions, options), equal for all operators."""
    return torch.zeros((len(space.options), max(space.options)))


def absent_of(alphas: Tensor, kept: Subspace) -> Tensor:
    """Which operators (decisions, options) do not remain."""
    absent = torch.ones(alphas.shape, dtype=torch.bool)
    for decision, row in enumerate(kept):
        absent[decision, list(row)] = False
    return upload(absent, alphas.device)


def softmax(alphas: Tensor, absent: Tensor) -> Tensor:
    """The softmax weights (decisions, options) of the remaining operators; 0 for all others."""
    return alphas.masked_fill(absent, -torch.inf).softmax(dim=1)


def by_magnitude(alphas: Tensor, kept: Subspace) -> Subspace:
    """The operator with the largest parameter of every edge; ties go to the first."""
    values = alphas.tolist()
    return tuple((max(row, key=lambda o: (values[d][o], -o)),) if row else () for d, row in enumerate(kept))


def chosen(space: HasCells, alphas: Tensor, kept: Subspace, max_macs: float | None) -> Subspace:
    """The architecture that a search by gradients ends with, within `max_macs` if there is such a target."""
    if max_macs is None:
        return by_magnitude(alphas, kept)
    return MacTarget.of(space, max_macs).most_probable(alphas, kept)


class MixedStep:
    """One step of MiLeNAS: weights use the training gradient, architecture parameters also the validation gradient.

    The running statistics of batch norms also include the validation batch, as in DARTS.

    alpha <- alpha - lr (grad of the training loss + validation_weight * grad of the validation loss), both at the
    weights before the step (SPIDER, App. C).
    """

    def __init__(
        self,
        sgd: SGD,
        alphas: Tensor,
        network: Network,
        batches: Iterator[Samples],
        search: Milenas,
        objective: Objective,
    ) -> None:
        self.sgd, self.alphas, self.network, self.batches = sgd, alphas, network, batches
        self.search, self.objective = search, objective

    @classmethod
    def maker(
        cls, worker: Worker, assignment: Assignment, search: Milenas, alphas: Tensor, network: Network
    ) -> Callable[[SGD], Step]:
        """Returns a function that makes the step from SGD over the weights, with random validation batches."""
        data = worker.client_data(client_of(assignment), "validation")
        generator = torch_stream(worker.spec.training_seed, "architecture", *places_of(assignment))
        alphas.requires_grad_()
        objective = worker.objective.for_client(data[1])
        return lambda sgd: cls(sgd, alphas, network, endless_batches(data, sgd.local, generator), search, objective)

    def step(self) -> None:
        """Applies the gradients of the training batch, and draws a validation batch."""
        on_training = self.alphas.grad
        assert on_training is not None, "the network is mixed by its architecture parameters"
        x, y = next(self.batches)
        loss = self.objective.loss(self.network.forward(x), y)
        (on_validation,) = torch.autograd.grad(loss, [self.alphas])
        with torch.no_grad():
            self.alphas -= self.search.lr * (on_training + self.search.validation_weight * on_validation)
        self.alphas.grad = None
        self.sgd.step()


def searcher_of(config: ArchitectureSearchConfig, round_: int, batch_size: int) -> Perturbation | Milenas:
    """The searcher of a round (from 0); `batch_size` is that of the silos' training."""
    if config.kind == "milenas":
        return Milenas(round_ >= config.rounds, config.lr, config.validation_weight, config.max_macs)
    due = turns(config, round_ + 1)
    return Perturbation(due, config.prune_edges, config.statistics, batch_size, config.max_macs)
