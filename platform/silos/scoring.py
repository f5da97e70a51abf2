"""How silos score models: their own, the shared one, and the shared one after some training on their own data."""

from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from fedloom.platform.clients.execution import Assignment, Measurement, Outcome
from fedloom.platform.clients.tasks import client_of, measurements_of
from fedloom.platform.clients.training import LocalSGD, Score
from fedloom.platform.clients.worker import Worker
from fedloom.platform.silos.network import (
    GLOBAL,
    PERSONAL,
    Network,
    TrainedNetwork,
    final_measurements,
    fixed_network,
    kept_network,
    score_network,
    silo_data,
    train_network,
)
from fedloom.platform.silos.search import own_network
from fedloom.platform.silos.state import begun, unpacked
from fedloom.platform.spaces.base import Architecture, Weights
from fedloom.platform.spaces.kept import KeptSpace
from fedloom.platform.spaces.operator_choice import Subspace
from fedloom.tiers.clock import EVALUATION_FACTOR, TRAINING_FACTOR

Of = Architecture | Subspace
"""A network of fixed architecture, or a part of the supernet."""


def network_of(worker: Worker, of: Of) -> Network:
    """The network as the worker's re-used module has it."""
    rows = tuple(row for row in of if isinstance(row, tuple))
    if rows:
        return kept_network(worker, rows)
    return fixed_network(worker, tuple(choice for choice in of if isinstance(choice, int)))


def own_scores(
    worker: Worker, assignment: Assignment, network: Network, weights: Weights, model: str = PERSONAL
) -> tuple[Measurement, ...]:
    """Loss and accuracy on the silo's own validation data."""
    data = worker.client_data(client_of(assignment), "validation")
    if len(data[1]) == 0:
        return ()
    score = score_network(worker, assignment, network, weights, data)
    return measurements_of(model, network.name, "validation", score)


def scored_outcome(network: Network, score: Score, measurements: tuple[Measurement, ...]) -> Outcome:
    """The row of a measurement."""
    return Outcome(
        samples=score.samples,
        macs=network.macs * score.samples,
        parameters=network.parameters,
        measurements=measurements,
        clock_factor=EVALUATION_FACTOR,
        architecture=network.architecture,
        subspace=network.subspace,
    )


@dataclass(frozen=True)
class ScoreOwn:
    """Scores a silo's own model on its own test data; `architecture` if it is not searched."""

    architecture: Architecture | None = None

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """The rows of `personal`; a silo that never took part in a round has the shared model."""
        if self.architecture is None:
            silo = begun(assignment.state, weights, cast(KeptSpace, worker.space).largest_subspace)
            network = own_network(worker, silo)
        else:
            silo = begun(assignment.state, weights)
            network = fixed_network(worker, self.architecture)
        score = score_network(worker, assignment, network, silo.weights, _test_data(worker, assignment))
        return scored_outcome(network, score, final_measurements(PERSONAL, network, score))


@dataclass(frozen=True)
class ScoreShared:
    """Scores the shared model on a silo's own test data."""

    of: Of

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """The rows of the model `global`."""
        network = network_of(worker, self.of)
        score = score_network(worker, assignment, network, weights, _test_data(worker, assignment))
        return scored_outcome(network, score, final_measurements(GLOBAL, network, score))


@dataclass(frozen=True)
class AdaptAndScore:
    """Trains the shared model on a silo's own data (local adaptation), and scores it before and after."""

    architecture: Architecture
    local: LocalSGD
    use_validation: bool = True

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """The rows of `global`, before, and of `personal`, after."""
        network = fixed_network(worker, self.architecture)
        data = silo_data(worker, assignment, joined=self.use_validation)
        return adapted_outcome(worker, assignment, network, weights, data, self.local)


def adapted_outcome(
    worker: Worker,
    assignment: Assignment,
    network: Network,
    weights: Weights,
    data: tuple[Tensor, Tensor],
    local: LocalSGD,
) -> Outcome:
    """The network on test data as it is (`global`), and after training on these data (`personal`)."""
    test = _test_data(worker, assignment)
    before = score_network(worker, assignment, network, weights, test)
    adapted = train_network(worker, assignment, network, weights, data, local)
    after = score_network(worker, assignment, network, adapted.tensors, test)
    rows = (*final_measurements(GLOBAL, network, before), *final_measurements(PERSONAL, network, after))
    return trained_and_scored(adapted, after, rows, passes=2)


def trained_and_scored(
    trained: TrainedNetwork, score: Score, measurements: tuple[Measurement, ...], passes: int = 1
) -> Outcome:
    """The row of a network that was trained only to be scored, `passes` times."""
    forward_macs = passes * trained.network.macs * score.samples
    return replace(
        scored_outcome(trained.network, score, measurements),
        steps=trained.figures.steps,
        macs=trained.macs + forward_macs,
        forward_macs=forward_macs,
        clock_factor=TRAINING_FACTOR,
    )


@dataclass(frozen=True)
class TrainAndScore:
    """Trains silo J's architecture on another silo's data and scores it there (SPIDER's p_ij, Fig. 3).

    It begins with the shared weights of its operators, for all silos alike, or with the model in its state.
    """

    kept: Subspace
    model: str
    local: LocalSGD

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """The rows of `model`; the silo's own state is not touched."""
        network = kept_network(worker, self.kept)
        begin = unpacked(assignment.state).weights if assignment.state else weights
        data = silo_data(worker, assignment, joined=True)
        trained = train_network(worker, assignment, network, begin, data, self.local)
        score = score_network(worker, assignment, network, trained.tensors, _test_data(worker, assignment))
        rows = measurements_of(self.model, network.name, "test", score)
        return trained_and_scored(trained, score, rows)


def _test_data(worker: Worker, assignment: Assignment) -> tuple[Tensor, Tensor]:
    return worker.client_data(client_of(assignment), "test")
