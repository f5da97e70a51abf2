"""A silo's round in SPIDER (Alg. 1): the shared supernet, its own network beside it, and the search of its own."""

from dataclasses import dataclass, replace
from typing import cast

from fedloom.platform.clients.execution import Assignment, Outcome
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.silos.network import Pull, kept_network, silo_data, train_network
from fedloom.platform.silos.outcome import pair_outcome
from fedloom.platform.silos.scoring import own_scores
from fedloom.platform.silos.search import Searcher, own_network
from fedloom.platform.silos.state import begun
from fedloom.platform.spaces.base import Weights
from fedloom.platform.spaces.darts import DartsSpace


@dataclass(frozen=True)
class TrainSpider:
    """One round of a silo.

    The two models take turns batch by batch in the paper; as the pull is towards the weights that were received, not
    towards their copy in training, one after the other over the same batches gives the same.

    Attributes:
        pull: lambda; 0 leaves the silo's model to itself.
        scored: whether the silo's model is scored on its validation data after training.
        use_validation: whether validation data joins the training data once nothing is left to be searched.
    """

    local: LocalSGD
    pull: float
    search: Searcher
    scored: bool = False
    use_validation: bool = True
    weighting: str = "fedavg"

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """The update holds the shared model alone; the silo's own stays in its state."""
        space = cast(DartsSpace, worker.space)
        searched = self.search.before(worker, assignment, begun(assignment.state, weights, space.largest_subspace))
        silo = searched.silo
        joined = self.use_validation and self.search.is_over(space, silo.kept)
        data = silo_data(worker, assignment, joined=joined)

        shared = train_network(worker, assignment, kept_network(worker), weights, data, self.local)
        own = train_network(
            worker,
            assignment,
            own_network(worker, silo),
            silo.weights,
            data,
            self.local,
            pull=Pull(self.pull, weights),
            momentum=silo.momentum,
            step=self.search.step(worker, assignment, silo),
        )
        alphas = None if silo.alphas is None else silo.alphas.detach()
        silo = replace(silo, weights=own.tensors, momentum=own.momentum, alphas=alphas)
        unseen = self.scored and not joined  # what has joined the training data tells nothing any more
        scores = own_scores(worker, assignment, own.network, silo.weights) if unseen else ()
        passes = 1 if self.search.is_over(space, silo.kept) else self.search.passes
        macs = shared.macs + passes * own.macs + searched.macs
        outcome = pair_outcome(shared, own, data, self.weighting, silo)
        return replace(outcome, macs=macs, forward_macs=searched.macs, measurements=scores)
