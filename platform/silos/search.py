"""How a silo searches an architecture while it trains: by perturbation, or by gradients (MiLeNAS)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.clients.execution import Assignment
from fedloom.platform.clients.tasks import client_of, places_of
from fedloom.platform.clients.training import SGD, Step
from fedloom.platform.clients.worker import Worker
from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.silos.batches import Batches, endless_batches
from fedloom.platform.silos.network import Network, kept_network
from fedloom.platform.silos.perturbation import decide, is_settled
from fedloom.platform.silos.state import Personal, is_decided
from fedloom.platform.spaces.base import Weights
from fedloom.platform.spaces.darts import DartsSpace
from fedloom.platform.spaces.operator_choice import Subspace

KINDS = ("perturbation", "milenas")


@dataclass
class ArchitectureSearchConfig:
    """When and how architectures are searched.

    `kind` perturbation: from round `start` on, every `every` rounds one edge of the normal and one of the reduction
    cell keeps the operator that is missed most on validation data (t_s and tau); with `prune_edges` every node keeps
    its two most missed edges afterwards.
    `kind` milenas: for `rounds` rounds SGD with rate `lr` on architecture parameters, by the gradients on training
    plus `validation_weight` times those on validation data; then the largest on every edge stays.
    """

    kind: str = "perturbation"
    start: int = 30
    every: int = 20
    prune_edges: bool = False
    rounds: int = 400
    lr: float = 0.01
    validation_weight: float = 1.0


@dataclass(frozen=True)
class Searched:
    """A silo's model after a step of its search, and the MACs (forward) that the step took."""

    silo: Personal
    macs: float = 0.0


class Searcher(Protocol):
    """One round of a silo's search."""

    def before(self, worker: Worker, assignment: Assignment, silo: Personal) -> Searched:
        """What is decided before the round's training."""
        ...

    @property
    def passes(self) -> int:
        """Forward passes per training step of the silo's network, while its search goes on."""
        ...

    def is_over(self, space: DartsSpace, kept: Subspace) -> bool:
        """Whether nothing is left to be searched."""
        ...

    def step(self, worker: Worker, assignment: Assignment, silo: Personal) -> Callable[[SGD], Step]:
        """What a training step of the silo's network does."""
        ...


@dataclass(frozen=True)
class Perturbation:
    """Search by masking (SPIDER, Alg. 2); `due` in the rounds that search."""

    due: bool
    prune_edges: bool = False
    passes = 1

    def before(self, worker: Worker, assignment: Assignment, silo: Personal) -> Searched:
        """One edge, or node, of each cell type; see `perturbation.decide`."""
        space = cast(DartsSpace, worker.space)
        if not self.due or self.is_over(space, silo.kept):
            return Searched(silo)
        data = worker.client_data(client_of(assignment), "validation")
        network = kept_network(worker, silo.kept)
        kept, macs = searched(worker, assignment, network, silo.weights, data, prune_edges=self.prune_edges)
        return Searched(restricted(space, silo, kept), macs)

    def is_over(self, space: DartsSpace, kept: Subspace) -> bool:
        """When every edge is decided and every node pruned."""
        return is_settled(space, kept, prune_edges=self.prune_edges)

    def step(self, _worker: Worker, _assignment: Assignment, _silo: Personal) -> Callable[[SGD], Step]:
        """SGD alone."""
        return lambda sgd: sgd


def searched(
    worker: Worker,
    assignment: Assignment,
    network: Network,
    weights: Weights,
    data: tuple[Tensor, Tensor],
    *,
    prune_edges: bool,
    base_cells: int = 0,
) -> tuple[Subspace, float]:
    """One step of the search by perturbation with these weights, on these validation data.

    What is kept then, and the MACs of all masked networks' forward passes.
    """
    assert network.kept is not None, "only a part of a supernet is searched"
    who: str | int = "server" if assignment.client_id is None else assignment.client_id
    worker.load(network.module, weights, network.slices)
    worker.set_mode(network.module, training=False)
    rng = stream(worker.spec.training_seed, "edges", assignment.stage, assignment.round, who)
    generator = torch_stream(worker.spec.training_seed, "masks", assignment.stage, assignment.round, who)
    space, macs = cast(DartsSpace, worker.space), 0.0

    def forward(x: Tensor, rest: Subspace) -> Tensor:
        nonlocal macs
        macs += space.cost_of_cells("macs", rest, base_cells) * len(x)
        return cast(Tensor, network.module(x, rest, None, base_cells))

    with worker.randomness(network.module, generator):
        kept = decide(space, forward, network.kept, data, rng, prune_edges=prune_edges)
    return kept, macs


def restricted(space: DartsSpace, silo: Personal, kept: Subspace) -> Personal:
    """The silo's model without what is not kept any more."""
    slices = space.subspace_slices(kept)

    def of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if name in slices}

    return Personal(of(silo.weights), of(silo.momentum), kept)


@dataclass(frozen=True)
class Milenas:
    """Search by gradients (He et al. 2020, first order); `ends` in the round before which the largest are chosen."""

    ends: bool
    lr: float = 0.01
    validation_weight: float = 1.0
    passes = 2

    def before(self, worker: Worker, _assignment: Assignment, silo: Personal) -> Searched:
        """Begins with equal weights, ends with the largest of every edge."""
        space = cast(DartsSpace, worker.space)
        if is_decided(silo.kept):
            return Searched(silo)
        alphas = (first_alphas(space) if silo.alphas is None else silo.alphas).to(worker.device)
        if self.ends:
            return Searched(restricted(space, silo, by_magnitude(alphas, silo.kept)))
        return Searched(replace(silo, alphas=alphas))

    def is_over(self, _space: DartsSpace, kept: Subspace) -> bool:
        """When every edge is decided."""
        return is_decided(kept)

    def step(self, worker: Worker, assignment: Assignment, silo: Personal) -> Callable[[SGD], Step]:
        """SGD on weights and on architecture parameters, which are changed in place."""
        if silo.alphas is None:
            return lambda sgd: sgd
        return MixedStep.maker(worker, assignment, self, silo.alphas, own_network(worker, silo))


def own_network(worker: Worker, silo: Personal) -> Network:
    """A silo's network as it stands: what it keeps, by its architecture parameters while it has some."""
    kept, alphas = silo.kept, silo.alphas
    return kept_network(worker, kept, None if alphas is None else lambda: softmax(alphas, kept))


def first_alphas(space: DartsSpace) -> Tensor:
    """All operators alike."""
    return torch.zeros((len(space.options), max(space.options)))


def softmax(alphas: Tensor, kept: Subspace) -> Tensor:
    """The weights (decisions, options) of kept operators; those that an edge does not have are 0."""
    absent = torch.ones_like(alphas, dtype=torch.bool)
    for decision, row in enumerate(kept):
        absent[decision, list(row)] = False
    return alphas.masked_fill(absent, -torch.inf).softmax(dim=1)


def by_magnitude(alphas: Tensor, kept: Subspace) -> Subspace:
    """The largest operator of every edge; the first of equals."""
    values = alphas.tolist()
    return tuple((max(row, key=lambda o: (values[d][o], -o)),) if row else () for d, row in enumerate(kept))


class MixedStep:
    """One step of MiLeNAS: the weights by their gradient on training data, the architecture parameters by both.

    Batch norms see the validation batch, too, as in DARTS.

    alpha <- alpha - lr (grad of the training loss + validation_weight * grad of the validation loss), both at the
    weights before the step (SPIDER, App. C).
    """

    def __init__(self, sgd: SGD, alphas: Tensor, network: Network, batches: Batches, search: Milenas) -> None:
        self.sgd, self.alphas, self.network, self.batches, self.search = sgd, alphas, network, batches, search

    @classmethod
    def maker(
        cls, worker: Worker, assignment: Assignment, search: Milenas, alphas: Tensor, network: Network
    ) -> Callable[[SGD], Step]:
        """From SGD over the weights to such steps, on the silo's validation batches in random order."""
        data = worker.client_data(client_of(assignment), "validation")
        generator = torch_stream(worker.spec.training_seed, "architecture", *places_of(assignment))
        alphas.requires_grad_()
        return lambda sgd: cls(sgd, alphas, network, endless_batches(data, sgd.local, generator), search)

    def step(self) -> None:
        """Uses up the gradients of the training batch."""
        on_training = self.alphas.grad
        assert on_training is not None, "the network is mixed by its architecture parameters"
        x, y = next(self.batches)
        loss = F.cross_entropy(self.network.forward(x), y)
        (on_validation,) = torch.autograd.grad(loss, [self.alphas])
        with torch.no_grad():
            self.alphas -= self.search.lr * (on_training + self.search.validation_weight * on_validation)
        self.alphas.grad = None
        self.sgd.step()


def searcher_of(config: ArchitectureSearchConfig, round_: int) -> Perturbation | Milenas:
    """The search of a round, counted from 0."""
    if config.kind == "milenas":
        return Milenas(round_ >= config.rounds, config.lr, config.validation_weight)
    due = round_ >= config.start and (round_ - config.start) % config.every == 0
    return Perturbation(due, config.prune_edges)
