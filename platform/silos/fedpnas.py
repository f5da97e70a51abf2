"""A silo's round in FedPNAS: a shared base is averaged, the cells after it and their architecture are the silo's own.

Source: Hoang & Kingsford 2021, in SPIDER's setting: the shared base keeps all operators, and every silo searches its
own part by perturbation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from fedloom.platform.averaging.average import Update
from fedloom.platform.clients.execution import Assignment, Outcome
from fedloom.platform.clients.tasks import client_of, subspace_id
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.silos.network import (
    PERSONAL,
    Network,
    final_measurements,
    score_network,
    silo_data,
    train_network,
    update_of,
)
from fedloom.platform.silos.outcome import shared_outcome
from fedloom.platform.silos.scoring import own_scores, scored_outcome
from fedloom.platform.silos.search import Perturbation, Searched, restricted, searched
from fedloom.platform.silos.state import Personal, begun
from fedloom.platform.spaces.base import Weights
from fedloom.platform.spaces.darts import DartsSpace
from fedloom.platform.spaces.operator_choice import Subspace


def split_network(worker: Worker, kept: Subspace, base_cells: int) -> Network:
    """The first cells with all operators, the others with those that are kept."""
    space, module = cast(DartsSpace, worker.space), worker.supernet
    everything = space.subspace_slices(space.largest_subspace)
    slices = {**space.subspace_slices(kept), **{name: everything[name] for name in space.base_tensors(base_cells)}}
    return Network(
        module,
        lambda x: cast(Tensor, module(x, kept, None, base_cells)),
        slices,
        space.cost_of_cells("macs", kept, base_cells),
        int(space.cost_of_cells("parameters", kept, base_cells)),
        subspace_id(kept),
        kept,
    )


@dataclass(frozen=True)
class TrainSplit:
    """One round of a silo: base and own part are trained as one network."""

    local: LocalSGD
    search: Perturbation
    base_cells: int
    scored: bool = False
    use_validation: bool = True
    weighting: str = "fedavg"

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """The update holds the base alone; the silo's own part and architecture stay in its state."""
        space = cast(DartsSpace, worker.space)
        base = frozenset(space.base_tensors(self.base_cells))
        begun_with = own_part(space, assignment, weights, base)
        before = self._before(worker, assignment, begun_with, _joined(weights, begun_with, base))
        silo = before.silo
        joined = self.use_validation and self.search.is_over(space, silo.kept)
        data = silo_data(worker, assignment, joined=joined)

        network = split_network(worker, silo.kept, self.base_cells)
        received = _joined(weights, silo, base)
        trained = train_network(worker, assignment, network, received, data, self.local, momentum=silo.momentum)

        kept = Personal(without(trained.tensors, base), without(trained.momentum, base), silo.kept)
        unseen = self.scored and not joined
        scores = own_scores(worker, assignment, network, trained.tensors) if unseen else ()
        update = _only(update_of(trained, len(data[1]), self.weighting), base)
        return replace(
            shared_outcome(trained, data, self.weighting, update),
            macs=trained.macs + before.macs,
            forward_macs=before.macs,
            measurements=scores,
            state=kept.packed(),
        )

    def _before(self, worker: Worker, assignment: Assignment, silo: Personal, weights: Weights) -> Searched:
        """One step of the search with `weights`, base and own part together."""
        space = cast(DartsSpace, worker.space)
        if not self.search.due or self.search.is_over(space, silo.kept):
            return Searched(silo)
        network = split_network(worker, silo.kept, self.base_cells)
        kept, macs = searched(
            worker,
            assignment,
            network,
            weights,
            worker.client_data(client_of(assignment), "validation"),
            prune_edges=self.search.prune_edges,
            base_cells=self.base_cells,
        )
        return Searched(restricted(space, silo, kept), macs)


def own_part(space: DartsSpace, assignment: Assignment, weights: Weights, base: frozenset[str]) -> Personal:
    """The silo's own part; one that never took part keeps everything, with the weights that came first."""
    return begun(assignment.state, without(weights, base), space.largest_subspace)


def without(tensors: Mapping[str, Tensor], names: frozenset[str]) -> dict[str, Tensor]:
    """The tensors that are not among these."""
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def _only(update: Update, names: frozenset[str]) -> Update:
    sent = [name for name in update.tensors if name in names]
    return Update(
        {name: update.tensors[name] for name in sent},
        {name: update.slices[name] for name in sent},
        {name: update.weights[name] for name in sent},
    )


def _joined(weights: Weights, silo: Personal, base: frozenset[str]) -> Weights:
    return {**silo.weights, **{name: weights[name] for name in base}}


@dataclass(frozen=True)
class ScoreSplit:
    """Scores the shared base with a silo's own part on the silo's test data."""

    base_cells: int

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """The rows of `personal`."""
        space = cast(DartsSpace, worker.space)
        base = frozenset(space.base_tensors(self.base_cells))
        silo = own_part(space, assignment, weights, base)
        network = split_network(worker, silo.kept, self.base_cells)
        data = worker.client_data(client_of(assignment), "test")
        score = score_network(worker, assignment, network, _joined(weights, silo, base), data)
        return scored_outcome(network, score, final_measurements(PERSONAL, network, score))
