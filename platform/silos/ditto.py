"""A silo's round in Ditto (Li et al. 2021, Alg. 1): FedAvg beside a model of its own, pulled towards the shared one."""

from dataclasses import dataclass, replace

from fedloom.platform.clients.execution import Assignment, Outcome
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.silos.network import Pull, fixed_network, silo_data, train_network
from fedloom.platform.silos.outcome import pair_outcome
from fedloom.platform.silos.scoring import own_scores
from fedloom.platform.silos.state import Personal, begun
from fedloom.platform.spaces.base import Architecture, Weights


@dataclass(frozen=True)
class TrainDitto:
    """One round of a silo; `pull` is lambda, towards the weights that were received."""

    architecture: Architecture
    local: LocalSGD
    pull: float
    joined: bool = True
    scored: bool = False
    weighting: str = "fedavg"

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """The update holds the shared model alone; the silo's own stays in its state."""
        silo = begun(assignment.state, weights)
        network = fixed_network(worker, self.architecture)
        data = silo_data(worker, assignment, joined=self.joined)

        shared = train_network(worker, assignment, network, weights, data, self.local)
        own = train_network(
            worker,
            assignment,
            network,
            silo.weights,
            data,
            self.local,
            pull=Pull(self.pull, weights),
            momentum=silo.momentum,
        )
        kept = Personal(own.tensors, own.momentum)
        unseen = self.scored and not self.joined
        scores = own_scores(worker, assignment, network, own.tensors) if unseen else ()
        return replace(pair_outcome(shared, own, data, self.weighting, kept), measurements=scores)
