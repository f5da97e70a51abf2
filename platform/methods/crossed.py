"""One silo's architecture on another silo's data: the training and scoring of p_ij (SPIDER, Sec. 5.2.2, Fig. 3)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedloom.platform.clients.assignments import Assignment, ClientResult, Measurement, client_of
from fedloom.platform.clients.mixed import MixedNetwork
from fedloom.platform.clients.networks import Network
from fedloom.platform.clients.scoring import measurements_of, own_test_data, score_loaded, score_network
from fedloom.platform.clients.trainer import client_samples, train_network
from fedloom.platform.clients.training import SGD, LocalSGD, Score, Step, epoch_sizes
from fedloom.platform.clients.worker import Worker
from fedloom.platform.methods.personal import unpacked
from fedloom.platform.methods.scoring import scored_outcome, trained_and_scored
from fedloom.platform.spaces.slices import Subspace, Weights

LAST, BY_VALIDATION, BY_TEST = "last", "validation", "test"
"""Which epoch's accuracy is p_ij: the last one's, or the best one's on validation or on test data."""

BEST_ON_TEST = "best_test_accuracy"
"""The largest accuracy on test data of all epochs: optimistic, because test data has chosen the epoch."""


@dataclass(frozen=True)
class ScoreModel:
    """Scores a silo's final model as it is, from the assignment's state, on its own test data (SPIDER's p_ii)."""

    subspace: Subspace
    model: str

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Measures the model called `model`."""
        network = MixedNetwork(self.subspace).on(worker)
        data = own_test_data(worker, assignment)
        score = score_network(worker, assignment, network, _begin(assignment, weights), data)
        return scored_outcome(worker, network, score, measurements_of(self.model, network.name, "test", score))


@dataclass(frozen=True)
class TrainAndScore:
    """Trains one silo's architecture on another silo's data and scores it there (SPIDER's p_ij, Fig. 3).

    Training starts from the shared weights of its operators, or from the model in the assignment's state.

    Attributes:
        epoch: `last` scores after the last epoch. `validation` scores after the epoch with the highest accuracy on
            validation data, which then is not trained on. `test` scores after the last epoch and adds the highest test
            accuracy of all epochs, under a name of its own.
    """

    subspace: Subspace
    model: str
    local: LocalSGD
    epoch: str = LAST

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Measures the model called `model`; the silo's own state does not change."""
        network = MixedNetwork(self.subspace).on(worker)
        data, test = (
            client_samples(worker, assignment, use_validation=self.use_validation),
            own_test_data(worker, assignment),
        )
        chosen_on = worker.client_data(client_of(assignment), "validation") if self.epoch == BY_VALIDATION else test
        best = BestEpoch()

        def on_test() -> Score:
            return score_loaded(worker, assignment, network, test)

        def look() -> None:
            found = score_loaded(worker, assignment, network, chosen_on)
            best.see(found, None if chosen_on is test else on_test)
            worker.set_mode(network.module, training=True)

        def watched(sgd: SGD) -> Step:
            steps = len(epoch_sizes(len(data[1]), self.local.batch_size))
            return sgd if self.epoch == LAST else EachEpoch(sgd, steps, look)

        begin = _begin(assignment, weights)
        trained = train_network(worker, assignment, network, begin, data, self.local, watched).checked()
        score = best.on_test if self.epoch == BY_VALIDATION else None
        if score is None:
            score = on_test()
            best.samples += score.samples
        rows = (*measurements_of(self.model, network.name, "test", score), *self._of_epochs(network, best))
        return trained_and_scored(worker, trained, score, rows, evaluated=best.samples)

    @property
    def use_validation(self) -> bool:
        """Whether it trains on validation data, too."""
        return self.epoch != BY_VALIDATION

    def _of_epochs(self, network: Network, best: "BestEpoch") -> list[Measurement]:
        """The epoch that was chosen, from 1, and the highest test accuracy if test data have chosen it."""
        if best.on_test is None:
            return []
        rows = [Measurement(self.model, network.name, None, "best_epoch", best.epoch, 0)]
        if self.epoch == BY_TEST:
            score = best.on_test
            rows.append(Measurement(self.model, network.name, "test", BEST_ON_TEST, score.metric, score.samples))
        return rows


@dataclass
class BestEpoch:
    """The epoch (from 1) with the highest metric on the data that choose it, the first of equals.

    `on_test` is the score on test data then; `samples` counts all samples that were evaluated.
    """

    epoch: int = 0
    on_test: Score | None = None
    samples: int = 0
    seen: int = 0
    highest: float = -math.inf

    def see(self, chosen_by: Score, on_test: Callable[[], Score] | None) -> None:
        """Takes the next epoch's score; `on_test` scores on test data, None if that is what chooses."""
        self.seen += 1
        self.samples += chosen_by.samples
        if chosen_by.metric > self.highest:
            self.epoch, self.highest = self.seen, chosen_by.metric
            self.on_test = chosen_by
            if on_test is not None:
                self.on_test = on_test()
                self.samples += self.on_test.samples


class EachEpoch:
    """SGD that calls `ended` after every epoch of `steps` steps."""

    def __init__(self, sgd: SGD, steps: int, ended: Callable[[], None]) -> None:
        self.sgd, self.steps, self.ended, self.made = sgd, steps, ended, 0

    def step(self) -> None:
        """One step."""
        self.sgd.step()
        self.made += 1
        if self.made % self.steps == 0:
            self.ended()


def _begin(assignment: Assignment, weights: Weights) -> Weights:
    return unpacked(assignment.state).weights if assignment.state else weights
