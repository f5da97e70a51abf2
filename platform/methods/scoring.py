"""The final scoring on silos: of personal models, the shared model, and the shared model after local adaptation."""

from dataclasses import dataclass, replace

from fedloom.platform.clients.assignments import Assignment, ClientResult, Measurement
from fedloom.platform.clients.networks import Described, Network, Subnet
from fedloom.platform.clients.scoring import (
    GLOBAL,
    PERSONAL,
    measurements_of,
    own_test_data,
    score_loaded,
    score_network,
)
from fedloom.platform.clients.trainer import TrainedNetwork, client_samples, train_network
from fedloom.platform.clients.training import LocalSGD, Samples, Score
from fedloom.platform.clients.worker import Worker
from fedloom.platform.methods.personal import begun
from fedloom.platform.methods.searchers import own_network
from fedloom.platform.spaces.capabilities import summing_options
from fedloom.platform.spaces.slices import Weights
from fedloom.tiers.devices import EVALUATION_FACTOR, TRAINING_FACTOR


def final_measurements(worker: Worker, model: str, network: Network, score: Score) -> tuple[Measurement, ...]:
    """The measurements of a final evaluation: the score on test data, and the network's MACs and parameters."""
    costs = {"macs": network.macs, "parameters": network.parameters(worker)}
    of_costs = (Measurement(model, network.name, None, name, value, 0) for name, value in costs.items())
    return (*measurements_of(model, network.name, "test", score), *of_costs)


def scored_outcome(
    worker: Worker, network: Network, score: Score, measurements: tuple[Measurement, ...]
) -> ClientResult:
    """The outcome of scoring a network."""
    return ClientResult(
        samples=score.samples,
        macs=network.macs * score.samples,
        parameters=network.parameters(worker),
        measurements=measurements,
        clock_factor=EVALUATION_FACTOR,
        architecture=network.architecture,
        subspace=network.subspace,
    )


@dataclass(frozen=True)
class ScoreOwn:
    """Scores a silo's personal model on its test data; `subnet` is its architecture, None if it is searched."""

    subnet: Subnet | None = None

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Measures the model `personal`; a silo that has never taken part uses the shared model."""
        if self.subnet is None:
            silo = begun(assignment.state, weights, summing_options(worker.space, "a search").largest_subspace)
            network = own_network(worker, silo)
        else:
            silo = begun(assignment.state, weights)
            network = self.subnet.on(worker)
        score = score_network(worker, assignment, network, silo.weights, own_test_data(worker, assignment))
        return scored_outcome(worker, network, score, final_measurements(worker, PERSONAL, network, score))


@dataclass(frozen=True)
class ScoreShared:
    """Scores the shared model on a silo's test data."""

    network: Described

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Measures the model `global`."""
        network = self.network.on(worker, assignment)
        score = score_network(worker, assignment, network, weights, own_test_data(worker, assignment))
        return scored_outcome(worker, network, score, final_measurements(worker, GLOBAL, network, score))


@dataclass(frozen=True)
class AdaptAndScore:
    """Trains the shared model on a silo's data (local adaptation), and scores it before and after."""

    subnet: Subnet
    local: LocalSGD
    use_validation: bool = True

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Measures `global`, before the adaptation, and `personal`, after it."""
        data = client_samples(worker, assignment, use_validation=self.use_validation)
        return adapted_outcome(worker, assignment, self.subnet.on(worker), weights, data, self.local)


def adapted_outcome(
    worker: Worker, assignment: Assignment, network: Network, weights: Weights, data: Samples, local: LocalSGD
) -> ClientResult:
    """The outcome of scoring the network on test data before (`global`) and after (`personal`) training on `data`."""
    test = own_test_data(worker, assignment)
    before = score_network(worker, assignment, network, weights, test)
    adapted = train_network(worker, assignment, network, weights, data, local).checked()
    after = score_loaded(worker, assignment, network, test)
    models = ((GLOBAL, before), (PERSONAL, after))
    rows = tuple(row for model, score in models for row in final_measurements(worker, model, network, score))
    return trained_and_scored(worker, adapted, after, rows, evaluated=2 * after.samples)


def trained_and_scored(
    worker: Worker, trained: TrainedNetwork, score: Score, measurements: tuple[Measurement, ...], *, evaluated: int
) -> ClientResult:
    """The outcome of training a network only to score it, on `evaluated` samples in all."""
    forward_macs = trained.network.macs * evaluated
    return replace(
        scored_outcome(worker, trained.network, score, measurements),
        steps=trained.figures.steps,
        macs=trained.macs + forward_macs,
        forward_macs=forward_macs,
        clock_factor=TRAINING_FACTOR,
    )
