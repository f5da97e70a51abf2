"""A silo's round in FedAvg (McMahan et al. 2017): what local adaptation, kNN-Per and global searches begin with."""

from dataclasses import dataclass, replace

from fedloom.platform.clients.execution import Assignment, Outcome
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.silos.network import GLOBAL, silo_data, train_network
from fedloom.platform.silos.outcome import shared_outcome
from fedloom.platform.silos.scoring import Of, network_of, own_scores
from fedloom.platform.spaces.base import Weights


@dataclass(frozen=True)
class TrainShared:
    """Trains the received network on the silo's data; `joined` with its validation data."""

    of: Of
    local: LocalSGD
    joined: bool = True
    scored: bool = False
    weighting: str = "fedavg"

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """The update holds all that was trained; nothing stays with the silo."""
        network = network_of(worker, self.of)
        data = silo_data(worker, assignment, joined=self.joined)
        shared = train_network(worker, assignment, network, weights, data, self.local)
        unseen = self.scored and not self.joined
        scores = own_scores(worker, assignment, network, shared.tensors, GLOBAL) if unseen else ()
        return replace(shared_outcome(shared, data, self.weighting), measurements=scores)
