"""Rounds of federated searches for one architecture: by the server's validation data, or by averaged gradients."""

from dataclasses import dataclass, replace

from fedloom.platform.clients.execution import Assignment, Outcome
from fedloom.platform.clients.tasks import subspace_id
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.silos.network import GLOBAL, kept_network, silo_data, train_network, update_of, with_more
from fedloom.platform.silos.outcome import shared_outcome
from fedloom.platform.silos.scoring import own_scores
from fedloom.platform.silos.search import Milenas, own_network, searched
from fedloom.platform.silos.state import ALPHAS, Personal
from fedloom.platform.spaces.base import Weights
from fedloom.platform.spaces.operator_choice import Subspace
from fedloom.tiers.clock import EVALUATION_FACTOR


@dataclass(frozen=True)
class DecideCentrally:
    """The server's step of the search by perturbation (SPIDER, App. D.1): on all validation data, with w as it is."""

    kept: Subspace
    prune_edges: bool = False

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """The column `subspace` of the outcome is what is kept now."""
        data = worker.central_data("validation")
        kept, macs = searched(
            worker, assignment, kept_network(worker, self.kept), weights, data, prune_edges=self.prune_edges
        )
        return Outcome(samples=len(data[1]), macs=macs, subspace=subspace_id(kept), clock_factor=EVALUATION_FACTOR)


@dataclass(frozen=True)
class TrainMixed:
    """A silo's round of FedNAS (He et al. 2020): weights and architecture parameters are trained, and both are sent."""

    kept: Subspace
    local: LocalSGD
    search: Milenas
    scored: bool = False
    weighting: str = "fedavg"

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """The update holds the supernet and the architecture parameters, both by the silo's samples."""
        alphas = weights[ALPHAS].clone().to(worker.device)
        silo = Personal(weights, {}, self.kept, alphas)
        data = silo_data(worker, assignment, joined=False)
        network = own_network(worker, silo)
        step = self.search.step(worker, assignment, silo)
        shared = train_network(worker, assignment, network, weights, data, self.local, step=step)
        scores = own_scores(worker, assignment, network, shared.tensors, GLOBAL) if self.scored else ()
        update = with_more(update_of(shared, len(data[1]), self.weighting), {ALPHAS: alphas.detach()})
        outcome = shared_outcome(shared, data, self.weighting, update)
        return replace(outcome, macs=self.search.passes * outcome.macs, measurements=scores)
