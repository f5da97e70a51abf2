"""Search by masking operators and edges (SPIDER, Alg. 2): which steps a silo makes, and how masked networks score."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from fedloom.platform.clients.assignments import Assignment, client_of
from fedloom.platform.clients.mixed import MixedNetwork
from fedloom.platform.clients.networks import Network
from fedloom.platform.clients.training import SGD, Samples, Score, Step, epoch_sizes, evaluate
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.on_device import upload
from fedloom.platform.methods.mac_target import MacTarget
from fedloom.platform.methods.personal import Personal, Searched, restricted
from fedloom.platform.methods.perturbation import decide, is_settled, search_steps, steps_left
from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.spaces.capabilities import HasCells, with_cells
from fedloom.platform.spaces.slices import Subspace, Weights

BATCH, RUNNING = "batch", "running"
"""What batch norms normalise a masked network's activations with."""


@dataclass(frozen=True)
class Perturbation:
    """Search by masking operators (SPIDER, Alg. 2).

    Attributes:
        turns: the number of search steps that are due by this round. A silo that has made fewer, because it did not
            take part in a round, makes one of them; whoever always takes part makes each in its own round.
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

    def before(self, worker: Worker, assignment: Assignment, silo: Personal) -> Searched:
        """Decides one edge, or prunes one node, of each cell type (see `perturbation.decide`)."""
        space = with_cells(worker.space, "a search by perturbation")
        if not self.is_due(space, silo.kept):
            return Searched(silo)
        data = worker.client_data(client_of(assignment), "validation")
        network = MixedNetwork(silo.kept).on(worker)
        kept, macs = self.decided(worker, assignment, network, silo.weights, data)
        return Searched(restricted(space, silo, kept), macs)

    def is_due(self, space: HasCells, kept: Subspace) -> bool:
        """Whether a step is to be made now."""
        left = steps_left(space, kept, prune_edges=self.prune_edges)
        made = search_steps(space, prune_edges=self.prune_edges) - left
        return left > 0 and made < self.turns

    def is_over(self, space: HasCells, kept: Subspace) -> bool:
        return is_settled(space, kept, prune_edges=self.prune_edges)

    def step(self, worker: Worker, assignment: Assignment, silo: Personal) -> Callable[[SGD], Step]:
        """Plain SGD."""
        del worker, assignment, silo
        return lambda sgd: sgd

    def decided(
        self,
        worker: Worker,
        assignment: Assignment,
        network: Network,
        weights: Weights,
        data: Samples,
        base_cells: int = 0,
    ) -> tuple[Subspace, float]:
        """Makes one step of the search with these weights, on these validation data.

        Returns the remaining operators, and the MACs of all masked networks' forward passes.
        """
        assert network.kept is not None, "only a part of a supernet is searched"
        who: str | int = "server" if assignment.client_id is None else assignment.client_id
        place = (assignment.stage, assignment.round, who)
        seed, space, macs = worker.spec.training_seed, with_cells(worker.space, "a search by perturbation"), 0.0
        worker.load(network.module, weights, network.slices)
        worker.set_mode(network.module, training=False)
        in_batches = self.statistics == BATCH
        data, sizes = self._batches(data, torch_stream(seed, "masked_batches", *place)) if in_batches else (data, None)

        def score(rest: Subspace) -> Score:
            nonlocal macs
            macs += space.cost_of_cells("macs", rest, base_cells) * len(data[1])
            return evaluate(lambda x: network.module(x, rest, None, base_cells), data, worker.objective, sizes)

        target = None if self.max_macs is None else MacTarget.of(space, self.max_macs, base_cells)
        rng, prune = stream(seed, "edges", *place), self.prune_edges
        normalised = batch_statistics(network.module) if in_batches else nullcontext()
        with worker.randomness(network.module, torch_stream(seed, "masks", *place)), normalised:
            kept = decide(space, score, network.kept, rng, prune_edges=prune, target=target)
        return kept, macs

    def _batches(self, data: Samples, generator: torch.Generator) -> tuple[Samples, list[int]]:
        """The samples in random order, because they lie client by client, and the batches' sizes as in training."""
        x, y = data
        order = upload(torch.randperm(len(y), generator=generator), y.device)
        return (x.index_select(0, order), y.index_select(0, order)), epoch_sizes(len(y), self.batch_size)


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
