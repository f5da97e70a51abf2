"""A silo's architecture search during training: by perturbation, or by gradients (MiLeNAS)."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Protocol

import torch
from torch import Tensor

from fedloom.platform.clients.assignments import Assignment, client_of, places_of
from fedloom.platform.clients.mixed import MixedNetwork
from fedloom.platform.clients.networks import Network
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.training import SGD, Samples, Score, Step, endless_batches, evaluate
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.on_device import upload
from fedloom.platform.federation.world import World
from fedloom.platform.methods.silo.personal import Personal, is_decided
from fedloom.platform.methods.silo.perturbation import decide, is_settled, search_steps
from fedloom.platform.methods.silo.silos import check_validation
from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.settings import ONE_OR_MORE, POSITIVE, ZERO_OR_MORE, OneOf
from fedloom.platform.spaces.offers import HasCells, HasSubspaces, SumsOptions, summing_options, with_cells
from fedloom.platform.spaces.slices import Subspace, Weights

logger = logging.getLogger(__name__)

KINDS = ("perturbation", "milenas")


@dataclass
class ArchitectureSearchConfig:
    """When and how architectures are searched.

    `perturbation`: from round `start` (t_s) on, every `every` (tau) rounds one edge of the normal and one of the
    reduction cell keeps only the operator that is most important on validation data.
    `milenas`: for `rounds` rounds, SGD with learning rate `lr` on architecture parameters, with the gradient on
    training data plus `validation_weight` times that on validation data; then every edge keeps the largest operator.
    """

    kind: Annotated[str, OneOf(KINDS), "how architectures are searched"] = "perturbation"
    start: Annotated[int, ZERO_OR_MORE, "perturbation: first round of the search"] = 30
    every: Annotated[int, ONE_OR_MORE, "perturbation: rounds between two decisions"] = 20
    prune_edges: Annotated[bool, "perturbation: finally, every node keeps its two most important edges"] = False
    rounds: Annotated[int, ONE_OR_MORE, "milenas: rounds of search"] = 400
    lr: Annotated[float, POSITIVE, "milenas: learning rate of the architecture parameters"] = 0.01
    validation_weight: Annotated[float, ZERO_OR_MORE, "milenas: weight of the gradients on validation data"] = 1.0


@dataclass(frozen=True)
class Searched:
    """A silo's model after a search step, and the forward MACs of the step."""

    silo: Personal
    macs: float = 0.0


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
class Perturbation:
    """Search by masking operators (SPIDER, Alg. 2); `due` is whether the round makes a search step."""

    due: bool
    prune_edges: bool = False
    passes = 1

    def before(self, worker: Worker, assignment: Assignment, silo: Personal) -> Searched:
        """Decides one edge, or prunes one node, of each cell type (see `perturbation.decide`)."""
        space = with_cells(worker.space, "a search by perturbation")
        if not self.due or self.is_over(space, silo.kept):
            return Searched(silo)
        data = worker.client_data(client_of(assignment), "validation")
        network = MixedNetwork(silo.kept).on(worker)
        kept, macs = searched(worker, assignment, network, silo.weights, data, prune_edges=self.prune_edges)
        return Searched(restricted(space, silo, kept), macs)

    def is_over(self, space: HasCells, kept: Subspace) -> bool:
        return is_settled(space, kept, prune_edges=self.prune_edges)

    def step(self, worker: Worker, assignment: Assignment, silo: Personal) -> Callable[[SGD], Step]:
        """Plain SGD."""
        del worker, assignment, silo
        return lambda sgd: sgd


def searched(
    worker: Worker,
    assignment: Assignment,
    network: Network,
    weights: Weights,
    data: Samples,
    *,
    prune_edges: bool,
    base_cells: int = 0,
) -> tuple[Subspace, float]:
    """Makes one step of the search by perturbation with these weights, on these validation data.

    Returns the remaining operators, and the MACs of all masked networks' forward passes.
    """
    assert network.kept is not None, "only a part of a supernet is searched"
    who: str | int = "server" if assignment.client_id is None else assignment.client_id
    worker.load(network.module, weights, network.slices)
    worker.set_mode(network.module, training=False)
    rng = stream(worker.spec.training_seed, "edges", assignment.stage, assignment.round, who)
    generator = torch_stream(worker.spec.training_seed, "masks", assignment.stage, assignment.round, who)
    space, macs = with_cells(worker.space, "a search by perturbation"), 0.0

    def score(rest: Subspace) -> Score:
        nonlocal macs
        macs += space.cost_of_cells("macs", rest, base_cells) * len(data[1])
        return evaluate(lambda x: network.module(x, rest, None, base_cells), data, worker.objective)

    with worker.randomness(network.module, generator):
        kept = decide(space, score, network.kept, rng, prune_edges=prune_edges)
    return kept, macs


def restricted(space: HasSubspaces, silo: Personal, kept: Subspace) -> Personal:
    """The silo's model without the tensors of removed operators."""
    slices = space.subspace_slices(kept)

    def of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if name in slices}

    return Personal(of(silo.weights), of(silo.momentum), kept)


@dataclass(frozen=True)
class Milenas:
    """Search by gradients (He et al. 2020, first order); in the round with `ends` the largest operators are chosen."""

    ends: bool
    lr: float = 0.01
    validation_weight: float = 1.0
    passes = 2

    def before(self, worker: Worker, assignment: Assignment, silo: Personal) -> Searched:
        """Starts the search with equal weights, or ends it with the largest operator of every edge."""
        del assignment
        space = summing_options(worker.space, "a search by gradients")
        if is_decided(silo.kept):
            return Searched(silo)
        alphas = (first_alphas(space) if silo.alphas is None else silo.alphas).to(worker.device)
        if self.ends:
            return Searched(restricted(space, silo, by_magnitude(alphas, silo.kept)))
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


def searcher_of(config: ArchitectureSearchConfig, round_: int) -> Perturbation | Milenas:
    """The searcher of a round (from 0)."""
    if config.kind == "milenas":
        return Milenas(round_ >= config.rounds, config.lr, config.validation_weight)
    due = round_ >= config.start and (round_ - config.start) % config.every == 0
    return Perturbation(due, config.prune_edges)


PARAMETER_FREE = ("none", "noise", "skip_connect", "max_pool_3x3", "avg_pool_3x3")


def searched_space(world: World, config: ArchitectureSearchConfig, rounds: int, who: str) -> HasCells:
    """The space; raises ValueError for an invalid search, and warns about edges that will not be searched."""
    space = with_cells(world.space, who)
    names = {name for names in space.operator_names for name in names}
    if config.prune_edges and config.kind == "milenas":
        raise ValueError("method.search.prune_edges: edges are pruned by perturbation, not by milenas; leave it out")
    if config.prune_edges and not names & set(PARAMETER_FREE):
        raise ValueError(
            f"method.search.prune_edges needs an operator without parameters ({', '.join(PARAMETER_FREE)}), and the "
            f"space has {', '.join(sorted(names))}: add one to space.operators, or leave it out"
        )
    check_validation(world, "search")
    _warn_of_unsearched(space, config, rounds)
    return space


def only_by(kind: str, search: ArchitectureSearchConfig, name: str) -> None:
    """Raises ValueError if the kind of search is not the method's."""
    if search.kind != kind:
        raise ValueError(f"method.search.kind={search.kind}: {name} searches by {kind}")


def _warn_of_unsearched(space: HasCells, config: ArchitectureSearchConfig, rounds: int) -> None:
    left = unsearched_edges(space, config, rounds)
    if left and config.kind == "milenas":
        logger.warning(
            "none of the %d edges will be decided before the last round: lower method.search.rounds (%d), or train for "
            "more than %d rounds",
            left,
            config.rounds,
            config.rounds + 1,
        )
    elif left:
        logger.warning(
            "%d of %d edges will not be searched before the last round: lower method.search.start or "
            "method.search.every, or train for more rounds",
            left,
            len(space.options),
        )
    elif config.prune_edges and search_steps(space, prune_edges=True) > _turns(config, rounds):
        logger.warning(
            "not all edges will be pruned before the last round: that takes %d search rounds, there are %d",
            search_steps(space, prune_edges=True),
            _turns(config, rounds),
        )


def _turns(config: ArchitectureSearchConfig, rounds: int) -> int:
    return len(range(config.start, rounds - 1, config.every))


def unsearched_edges(space: HasCells, config: ArchitectureSearchConfig, rounds: int) -> int:
    """The number of edges undecided before the last round, in which the cosine schedule's learning rate is zero."""
    if config.kind == "milenas":
        return 0 if rounds > config.rounds + 1 else sum(options > 1 for options in space.options)
    choices = [sum(space.options[d] > 1 for d in space.decisions(t)) for t in ("normal", "reduction")]
    return sum(max(0, count - _turns(config, rounds)) for count in choices)
