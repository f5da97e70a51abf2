"""How silos search architectures: by masking operators (SPIDER, Alg. 2), or by gradients (MiLeNAS).

A search starts from all operators of every edge of the space's cells and ends with one each. It is part of the silos'
training: a `Perturbation` decides edges before a round, a `Milenas` changes the round's training steps.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.platform.clients.assignments import Assignment, client_of, places_of
from fedloom.platform.clients.evaluation import Score, evaluate
from fedloom.platform.clients.networks import MixedNetwork, Network
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import Optimizer, Samples, Step, epoch_sizes
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.dataset import StoredSamples
from fedloom.platform.federation.algorithm import SUPERNET, Round, RunState, TasksOfRound, to_all
from fedloom.platform.federation.training_config import Rules, cohort_size
from fedloom.platform.federation.world import World
from fedloom.platform.methods.silos import (
    KEPT,
    Personal,
    SiloTrainingConfig,
    check_validation,
    endless_batches,
    own_network,
    unpacked,
    validation_use,
)
from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.settings import ONE_OR_MORE, POSITIVE, ZERO_OR_MORE
from fedloom.platform.spaces.capabilities import HasCells, HasSubspaces, SumsOptions, with_cells
from fedloom.platform.spaces.darts import CELL_TYPES
from fedloom.platform.spaces.slices import Subspace, Weights, parse_subspace

logger = logging.getLogger(__name__)

BATCH, RUNNING = "batch", "running"
"""The statistics with which batch norms normalise a masked network's activations: the batch's, or the stored ones."""
EDGES_KEPT = 2
"""Number of incoming edges per node after pruning, as in DARTS."""
PARAMETER_FREE = ("none", "noise", "skip_connect", "max_pool_3x3", "avg_pool_3x3")

# -- configuration ----------------------------------------------------------------------------------------------------


@dataclass
class ArchitectureSearchConfig:
    """When and how architectures are searched.

    `perturbation`: in every round t >= `start` (t_s) that is a multiple of `every` (tau), one edge of the normal and
    one of the reduction cell keeps only the operator that is most important on validation data. Rounds count from 0, as
    in Alg. 1 and in the tables: with 30 and 20 these are the rounds 40, 60, 80, and so on (SPIDER, Alg. 2, line 3).
    `milenas`: for `rounds` rounds, SGD with learning rate `lr` on architecture parameters, with the gradient on
    training data plus `validation_weight` times that on validation data; then every edge keeps the largest operator.
    """

    kind: Annotated[Literal["perturbation", "milenas"], "how architectures are searched"] = "perturbation"
    start: Annotated[int, ZERO_OR_MORE, "perturbation: no edge is decided in earlier rounds"] = 30
    every: Annotated[int, ONE_OR_MORE, "perturbation: decisions are made in rounds that are multiples of this"] = 20
    prune_edges: Annotated[bool, "perturbation: finally, every node keeps its two most important edges"] = False
    # The paper does not say which; its prose asks for the operator's effect alone, and its code uses the batch's.
    statistics: Annotated[
        Literal["batch", "running"],
        "perturbation: statistics of batch norms in masked networks: the batch's or the stored ones",
    ] = "batch"
    max_macs: Annotated[float | None, POSITIVE, "the most MACs of the architecture found; null: no limit"] = None
    rounds: Annotated[int, ONE_OR_MORE, "milenas: rounds of search"] = 400
    lr: Annotated[float, POSITIVE, "milenas: learning rate of the architecture parameters"] = 0.01
    validation_weight: Annotated[float, ZERO_OR_MORE, "milenas: weight of the gradients on validation data"] = 1.0


def searched_space(
    world: World,
    config: ArchitectureSearchConfig,
    rounds: int,
    who: str,
    *,
    share: float = 1.0,
    kind: str | None = None,
    base_cells: int = 0,
) -> HasCells:
    """The space; raises ValueError for an invalid search, and warns about edges that will not be searched.

    `rounds` is the number of rounds in which decisions take effect; `share` is the share of them, on average, in which
    a searching silo (or the server) takes part; `kind` is the only kind of search that the method has; the first
    `base_cells` cells keep all operators.
    """
    if kind is not None and config.kind != kind:
        raise ValueError(f"method.search.kind={config.kind}: {who} searches by {kind}")
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
    if config.kind == "perturbation" and config.statistics == BATCH and world.data.sizes("validation").min() < 2:
        raise ValueError(
            f"method.search.statistics={BATCH}: a silo has a single validation sample, which has no variance; raise "
            f"data.validation_share, or set {RUNNING}"
        )
    _check_rounds(space, config, rounds, share)
    if config.max_macs is not None:
        least = MacTarget.of(space, config.max_macs, base_cells).least(space.largest_subspace)
        if least > config.max_macs:
            base = f", with {base_cells} cells as a base that keeps all operators" if base_cells else ""
            raise ValueError(
                f"method.search.max_macs={config.max_macs:g}: the smallest architecture of {space.name} has {least:g}"
                f"{base}; raise it, or lower space.channels or space.cells"
            )
    return space


def participation(world: World, train: SiloTrainingConfig) -> float:
    """The share of the rounds that a silo takes part in, on average."""
    return cohort_size(train, world.num_clients) / world.num_clients


def _check_rounds(space: HasCells, config: ArchitectureSearchConfig, rounds: int, share: float) -> None:
    """Warns about edges that keep all operators until the end; ValueError if there is also a MAC target."""
    made = steps_made(config, rounds, share)
    if config.kind == "milenas":
        # In the last round, the cosine schedule's learning rate is zero.
        left = 0 if rounds > config.rounds + 1 else sum(options > 1 for options in space.options)
    else:
        choices = [sum(space.options[d] > 1 for d in space.decisions(t)) for t in CELL_TYPES]
        left = sum(max(0, count - made) for count in choices)
    if left and config.max_macs is not None:
        raise ValueError(
            f"method.search.max_macs: {left} of {len(space.options)} edges keep all operators until the last round, "
            "whatever MACs they have; search earlier or more often, or train for more rounds"
        )
    if left and config.kind == "milenas":
        logger.warning(
            "none of the %d edges will be decided before the last round: lower method.search.rounds (%d), or train for "
            "more than %d rounds",
            *(left, config.rounds, config.rounds + 1),
        )
    elif left:
        logger.warning(
            "%d of %d edges will not be searched before the last round: lower method.search.start or "
            "method.search.every, or train for more rounds",
            *(left, len(space.options)),
        )
    elif config.prune_edges and search_steps(space, prune_edges=True) > made:
        logger.warning(
            "not all edges will be pruned before the last round: that takes %d search rounds, there are %d",
            *(search_steps(space, prune_edges=True), made),
        )


def turns(config: ArchitectureSearchConfig, rounds: int) -> int:
    """The number of search steps due in the first `rounds` rounds: in multiples of `every` from `start` on."""
    return len(range(_first(config), rounds, config.every))


def _first(config: ArchitectureSearchConfig) -> int:
    return math.ceil(config.start / config.every) * config.every


def steps_made(config: ArchitectureSearchConfig, rounds: int, share: float) -> int:
    """The number of search steps before the last round of a silo that takes part in this share of rounds on average.

    Missed steps are made up for in later rounds, one per round.
    """
    return min(turns(config, rounds - 1), math.floor(share * len(range(_first(config), rounds - 1))))


# -- the remaining operators, and a limit on the MACs of the architecture that a search ends with ---------------------


def is_decided(remaining: Subspace) -> bool:
    """Whether every edge has at most one operator."""
    return all(len(row) <= 1 for row in remaining)


def with_row(remaining: Subspace, decision: int, row: tuple[int, ...]) -> Subspace:
    """The subspace with the operators of one decision replaced."""
    return (*remaining[:decision], row, *remaining[decision + 1 :])


@dataclass(frozen=True)
class MacTarget:
    """The MACs of a network of cells by operator, and the largest number that the searched architecture may have.

    The baselines of SuperFedNAS (Tab. 3, 5, 6) are searched once per MAC target; neither it nor their papers say how a
    target enters the search. Here it only removes operators that would make the target unreachable.

    Attributes:
        fixed: MACs outside the searched operators, those of a shared base included.
        rows: MACs per decision and option.
        most: the target.
    """

    fixed: float
    rows: tuple[tuple[float, ...], ...]
    most: float

    @classmethod
    def of(cls, space: HasCells, most: float, base_cells: int = 0) -> "MacTarget":
        """The target `most` for networks whose first `base_cells` cells keep all operators."""
        empty: Subspace = ((),) * len(space.options)
        fixed = space.cost_of_cells("macs", empty, base_cells)
        rows = tuple(
            tuple(space.cost_of_cells("macs", with_row(empty, d, (o,)), base_cells) - fixed for o in range(options))
            for d, options in enumerate(space.options)
        )
        return cls(fixed, rows, most)

    def least(self, remaining: Subspace) -> float:
        """MACs of the cheapest architecture that keeps one of these operators per edge."""
        return self.fixed + sum(self._cheapest(d, row) for d, row in enumerate(remaining))

    def _cheapest(self, decision: int, row: Sequence[int]) -> float:
        return min((self.rows[decision][option] for option in row), default=0.0)

    def allowed(self, remaining: Subspace, decision: int) -> tuple[int, ...]:
        """The operators of an edge with which the target can be reached, whatever edges are decided next."""
        row = remaining[decision]
        others = self.least(remaining) - self._cheapest(decision, row)
        return tuple(option for option in row if others + self.rows[decision][option] <= self.most)

    def most_probable(self, alphas: Tensor, remaining: Subspace) -> Subspace:
        """The architecture within the target with the largest product of softmax weights; ties go to fewer MACs.

        The result is exact: a partial architecture is dropped only if another one with no more MACs scores at least as
        high.
        """
        to_come = self.least(remaining) - self.fixed
        partial: list[tuple[float, float, Subspace]] = [(self.fixed, 0.0, ())]
        for decision, row in enumerate(remaining):
            to_come -= self._cheapest(decision, row)
            values = [float(alphas[decision, option]) for option in row]
            most = max(values, default=0.0)
            total = most + math.log(sum(math.exp(value - most) for value in values)) if values else 0.0
            options: list[tuple[float, float, tuple[int, ...]]] = [
                (self.rows[decision][option], value - total, (option,))
                for option, value in zip(row, values, strict=True)
            ]
            options = options or [(0.0, 0.0, ())]  # a pruned edge
            longer = [(macs + m, score + s, (*rows, o)) for macs, score, rows in partial for m, s, o in options]
            within = [state for state in longer if state[0] + to_come <= self.most]
            partial = []
            for state in sorted(within, key=lambda state: (state[0], -state[1])):
                if not partial or state[1] > partial[-1][1]:
                    partial.append(state)
        return partial[-1][2]


# -- by masking operators and edges (SPIDER, Alg. 2; Wang et al. 2021) ------------------------------------------------

ScoreOf = Callable[[Subspace], Score]
"""Returns the validation score of the network with these operators."""


def masked_scores(score: ScoreOf, remaining: Subspace, decision: int) -> dict[int, Score]:
    """Per operator of an edge, the validation score of the network without it."""
    row = remaining[decision]
    return {option: score(with_row(remaining, decision, tuple(o for o in row if o != option))) for option in row}


def by_importance(scores: dict[int, Score]) -> list[int]:
    """Sorts by importance, the most important first: lowest masked accuracy, then largest masked loss, then index.

    Removals that give no finite loss come first.
    SPIDER's listing says highest accuracy; its text, the method that it cites and the authors' code say lowest.
    """

    def key(index: int) -> tuple[float, float, int]:
        score = scores[index]
        # A network without a finite loss predicts the first class, so its accuracy says nothing.
        return (score.metric, -score.loss, index) if math.isfinite(score.loss) else (-math.inf, -math.inf, index)

    return sorted(scores, key=key)


def decide(
    space: HasCells,
    score: ScoreOf,
    remaining: Subspace,
    rng: np.random.Generator,
    *,
    prune_edges: bool,
    target: MacTarget | None = None,
) -> Subspace:
    """One search step: a random undecided edge of each cell type keeps only its most important operator.

    With a target, only operators that leave it reachable count. After all edges are decided, with `prune_edges`, a
    node of each cell type keeps its two most important in-edges.
    """

    def drawn(values: Sequence[int]) -> int:
        return values[int(rng.integers(len(values)))]

    prune = prune_edges and is_decided(remaining)
    for cell_type in CELL_TYPES:
        undecided = [decision for decision in space.decisions(cell_type) if len(remaining[decision]) > 1]
        crowded = crowded_nodes(space, remaining, cell_type)
        if prune and crowded:
            edges = crowded[drawn(sorted(crowded))]
            without = {edge: score(with_row(remaining, edge, ())) for edge in edges}
            for edge in by_importance(without)[EDGES_KEPT:]:
                remaining = with_row(remaining, edge, ())
        elif undecided and not prune:
            decision = drawn(undecided)
            allowed = remaining[decision] if target is None else target.allowed(remaining, decision)
            scores = masked_scores(score, remaining, decision)
            most_important = by_importance({option: scores[option] for option in allowed})[0]
            remaining = with_row(remaining, decision, (most_important,))
    return remaining


def crowded_nodes(space: HasCells, remaining: Subspace, cell_type: str) -> dict[int, list[int]]:
    """The nodes of a cell type with more than `EDGES_KEPT` incoming edges, with the decisions of these edges."""
    incoming: dict[int, list[int]] = {}
    for decision, (_source, node) in zip(space.decisions(cell_type), space.edges(cell_type), strict=True):
        if remaining[decision]:
            incoming.setdefault(node, []).append(decision)
    return {node: edges for node, edges in incoming.items() if len(edges) > EDGES_KEPT}


def is_settled(space: HasCells, remaining: Subspace, *, prune_edges: bool) -> bool:
    """Whether the search has ended: all edges are decided and, with `prune_edges`, all nodes pruned."""
    return steps_left(space, remaining, prune_edges=prune_edges) == 0


def search_steps(space: HasCells, *, prune_edges: bool) -> int:
    """The number of search steps from the whole supernet to the end of the search."""
    return steps_left(space, space.largest_subspace, prune_edges=prune_edges)


def steps_left(space: HasCells, remaining: Subspace, *, prune_edges: bool) -> int:
    """The number of search steps until the search has ended."""
    steps = max(sum(len(remaining[decision]) > 1 for decision in space.decisions(t)) for t in CELL_TYPES)
    return steps + (max(len(crowded_nodes(space, remaining, t)) for t in CELL_TYPES) if prune_edges else 0)


@dataclass(frozen=True)
class Perturbation:
    """Search by masking operators (SPIDER, Alg. 2).

    Attributes:
        turns: the number of search steps that are due by this round. A silo that has made fewer, because it did not
            take part in a round, makes one of them; a silo that always takes part makes each when it is due.
        prune_edges: whether nodes keep only their two most important edges, after all edges are decided.
        statistics: `batch` scores masked networks with the statistics of their own batches, `running` with the stored
            ones, which belong to the network with all its operators.
        batch_size: samples per batch, if its statistics matter.
        max_macs: the most MACs of the architecture that the search ends with.
    """

    turns: int
    prune_edges: bool = False
    statistics: str = BATCH
    batch_size: int = 32
    max_macs: float | None = None
    passes = 1

    def before(self, worker: Worker, assignment: Assignment, silo: Personal) -> tuple[Personal, float]:
        """The silo's model after the search step that is due before the round's training, and the step's MACs."""
        space = with_cells(worker.space, "a search by perturbation")
        if not self.is_due(space, silo.remaining):
            return silo, 0.0
        data = worker.scored_data(client_of(assignment), "validation")
        remaining, macs = self.decided(worker, assignment, MixedNetwork(silo.remaining).on(worker), silo.weights, data)
        return silo.restricted(space, remaining), macs

    def is_due(self, space: HasCells, remaining: Subspace) -> bool:
        """Whether a step is to be made now."""
        left = steps_left(space, remaining, prune_edges=self.prune_edges)
        made = search_steps(space, prune_edges=self.prune_edges) - left
        return left > 0 and made < self.turns

    def is_over(self, space: HasCells, remaining: Subspace) -> bool:
        """Whether the search has ended."""
        return is_settled(space, remaining, prune_edges=self.prune_edges)

    def step(self, worker: Worker, assignment: Assignment, silo: Personal) -> Callable[[Optimizer], Step]:
        """The training step of the silo's network: plain SGD."""
        del worker, assignment, silo
        return lambda sgd: sgd

    def decided(
        self,
        worker: Worker,
        assignment: Assignment,
        network: Network,
        weights: Weights,
        data: StoredSamples,
        base_cells: int = 0,
    ) -> tuple[Subspace, float]:
        """Makes one step of the search with these weights, on these validation data.

        Returns the remaining operators, and the MACs of all masked networks' forward passes.
        """
        assert network.remaining is not None, "only a part of a supernet is searched"
        who: str | int = "server" if assignment.client_id is None else assignment.client_id
        ids = (assignment.stage, assignment.round, who)
        seed, space, macs = worker.spec.training_seed, with_cells(worker.space, "a search by perturbation"), 0.0
        worker.load(network.module, weights, network.slices)
        worker.set_mode(network.module, training=False)
        in_batches, sizes = self.statistics == BATCH, None
        if in_batches:  # in random order, because samples are stored client by client, and in batches as in training
            order = torch.randperm(len(data), generator=torch_stream(seed, "masked_batches", *ids))
            data = replace(data, indices=data.indices[order.numpy()])
            sizes = epoch_sizes(len(data), self.batch_size)

        def score(rest: Subspace) -> Score:
            nonlocal macs
            macs += space.cost_of_cells("macs", rest, base_cells) * len(data)
            return evaluate(lambda x: network.module(x, rest, None, base_cells), data, worker.objective, sizes)

        target = None if self.max_macs is None else MacTarget.of(space, self.max_macs, base_cells)
        rng, prune = stream(seed, "edges", *ids), self.prune_edges
        normalised = batch_statistics(network.module) if in_batches else nullcontext()
        with worker.randomness(network.module, torch_stream(seed, "masks", *ids)), normalised:
            remaining = decide(space, score, network.remaining, rng, prune_edges=prune, target=target)
        return remaining, macs


@contextmanager
def batch_statistics(module: nn.Module) -> Iterator[None]:
    """Lets the batch norms of a module in evaluation mode normalise each batch with its own statistics.

    The stored statistics are neither read nor changed. Source: the authors' code of SPIDER, which switches them off for
    the masked networks; a mask changes the activations, so that statistics of the unmasked network do not fit them.
    """
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    tracked = [norm.track_running_stats for norm in norms]
    for norm in norms:
        norm.track_running_stats = False
        norm.train()
    try:
        yield
    finally:
        for norm, before in zip(norms, tracked, strict=True):
            norm.track_running_stats = before
            norm.eval()


# -- by gradients (MiLeNAS, He et al. 2020, first order) --------------------------------------------------------------


@dataclass(frozen=True)
class Milenas:
    """Search by gradients; in the round with `ends`, every edge keeps the operator with the largest parameter."""

    ends: bool
    lr: float = 0.01
    validation_weight: float = 1.0
    max_macs: float | None = None
    passes = 2

    def before(self, worker: Worker, assignment: Assignment, silo: Personal) -> tuple[Personal, float]:
        """Starts the search with equal weights, or ends it by choosing one operator per edge."""
        del assignment
        space = with_cells(worker.space, "a search by gradients")
        if is_decided(silo.remaining):
            return silo, 0.0
        alphas = (first_alphas(space) if silo.alphas is None else silo.alphas).to(worker.device)
        if self.ends:
            return silo.restricted(space, chosen(space, alphas, silo.remaining, self.max_macs)), 0.0
        return replace(silo, alphas=alphas), 0.0

    def is_over(self, space: HasCells, remaining: Subspace) -> bool:
        """Whether the search has ended."""
        del space
        return is_decided(remaining)

    def step(self, worker: Worker, assignment: Assignment, silo: Personal) -> Callable[[Optimizer], Step]:
        """SGD on the weights and, with random validation batches, on the architecture parameters, changed in place."""
        alphas = silo.alphas
        if alphas is None:
            return lambda sgd: sgd
        network = own_network(worker, silo)
        data = worker.client_data(client_of(assignment), "validation")
        generator = torch_stream(worker.spec.training_seed, "architecture", *places_of(assignment))
        alphas.requires_grad_()
        objective = worker.objective.for_client(data[1])
        return lambda sgd: MixedStep(sgd, alphas, network, endless_batches(data, sgd.local, generator), self, objective)


@dataclass
class MixedStep:
    """One step of MiLeNAS: weights use the training gradient, architecture parameters also the validation gradient.

    The running statistics of batch norms also include the validation batch, as in DARTS.

    alpha <- alpha - lr (grad of the training loss + validation_weight * grad of the validation loss), both at the
    weights before the step (SPIDER, App. C).
    """

    sgd: Optimizer
    alphas: Tensor
    network: Network
    batches: Iterator[Samples]
    search: Milenas
    objective: Objective

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


def first_alphas(space: SumsOptions) -> Tensor:
    """Initial architecture parameters (decisions, options), equal for all operators."""
    return torch.zeros((len(space.options), max(space.options)))


def by_magnitude(alphas: Tensor, remaining: Subspace) -> Subspace:
    """The operator with the largest parameter of every edge; ties go to the first."""
    values = alphas.tolist()
    return tuple((max(row, key=lambda o: (values[d][o], -o)),) if row else () for d, row in enumerate(remaining))


def chosen(space: HasCells, alphas: Tensor, remaining: Subspace, max_macs: float | None) -> Subspace:
    """The architecture that a search by gradients ends with, within `max_macs` if there is such a target."""
    if max_macs is None:
        return by_magnitude(alphas, remaining)
    return MacTarget.of(space, max_macs).most_probable(alphas, remaining)


Searcher = Perturbation | Milenas
"""One round of a silo's search."""


def searcher_of(config: ArchitectureSearchConfig, round_: int, batch_size: int) -> Searcher:
    """The searcher of a round (from 0); `batch_size` is that of the silos' training."""
    if config.kind == "milenas":
        return Milenas(round_ >= config.rounds, config.lr, config.validation_weight, config.max_macs)
    return perturbation_of(config, round_, batch_size)


def all_decided(state: RunState, world: World, space: HasCells, searcher: Searcher) -> bool:
    """Whether the search of every silo has ended."""
    silos = [state.client_state(client_id) for client_id in range(world.num_clients)]
    return all(silo is not None and searcher.is_over(space, unpacked(silo).remaining) for silo in silos)


def perturbation_of(config: ArchitectureSearchConfig, round_: int, batch_size: int) -> Perturbation:
    """The search by perturbation of a round (from 0)."""
    due = turns(config, round_ + 1)
    return Perturbation(due, config.prune_edges, config.statistics, batch_size, config.max_macs)


# -- one architecture that all silos share ----------------------------------------------------------------------------


def remaining_of(state: RunState) -> Subspace:
    """The remaining operators of the shared architecture."""
    return parse_subspace(state.data[KEPT])


def restricted_to_remaining(state: RunState, space: HasSubspaces) -> RunState:
    """The state without the weights of removed operators and of architecture parameters.

    The tensors that a local rule shares (`SLOT/TENSOR`, such as SCAFFOLD's control variates) go with their weights.
    """
    names = space.subspace_slices(remaining_of(state)).keys()
    weights = {name: t for name, t in state.weights(SUPERNET).items() if name.rpartition("/")[2] in names}
    return state.with_group(SUPERNET, weights)


def train_remaining(
    train: SiloTrainingConfig, rules: Rules, space: HasCells, search: ArchitectureSearchConfig
) -> TasksOfRound:
    """FedAvg of the remaining operators, which trains also on validation data once the search has ended."""

    def client(round_: Round) -> Train:
        remaining = remaining_of(round_.state)
        is_over = is_settled(space, remaining, prune_edges=search.prune_edges)
        validation = validation_use(trained=train.use_validation and is_over, scored=round_.scored)
        return Train(MixedNetwork(remaining), round_.local, rules.weighting, validation)

    return to_all(client)
