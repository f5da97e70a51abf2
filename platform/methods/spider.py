"""SPIDER: every silo searches a personal architecture while all silos train a shared supernet (Mushtaq et al.).

in every round a silo
    decides one edge of each cell of its personal network, if the round searches (Alg. 2; or by gradients, MiLeNAS),
    trains the shared supernet on its data, and sends it,
    trains its personal network on the same batches, pulled towards the shared weights of its operators (Alg. 1)
the server averages the shared supernet; a silo's personal network stays in its state
at the end every silo's network is scored on the silo's own test data, and optionally on all other silos' data (gains)

What Alg. 1 leaves open: a silo trains the shared supernet with fresh momentum in every round (`keep_momentum`: with its
momentum of the last round, which belongs to the weights before averaging), and its own network with the momentum kept
from the last round. Its own network starts from the first shared weights (`own_start`: from weights of its own).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
from annotated_types import Interval

from fedloom.platform.clients.assignments import Assignment, ClientResult, Measurement, client_of
from fedloom.platform.clients.evaluation import Score
from fedloom.platform.clients.local_rules import pull_towards
from fedloom.platform.clients.networks import MixedNetwork
from fedloom.platform.clients.scoring import (
    PERSONAL,
    measurements_of,
    own_test_data,
    score_loaded,
    score_network,
    validation_scores,
)
from fedloom.platform.clients.trainer import client_samples, received, train_network
from fedloom.platform.clients.training import LocalSGD, Optimizer, Step, epoch_sizes
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.trees import rows_of
from fedloom.platform.federation.algorithm import SUPERNET, Plan, Round, RunState, fresh_supernet, to_all
from fedloom.platform.federation.method import Method, Stage
from fedloom.platform.federation.training_config import Rules
from fedloom.platform.federation.world import World
from fedloom.platform.methods.evaluation import ClientEvaluation, as_measured
from fedloom.platform.methods.silo_search import (
    ArchitectureSearchConfig,
    Searcher,
    all_decided,
    by_magnitude,
    participation,
    searched_space,
    searcher_of,
)
from fedloom.platform.methods.silos import (
    ScoreOwn,
    SiloTraining,
    SiloTrainingConfig,
    begun,
    check_validation,
    checked_silos,
    own_network,
    pair_outcome,
    resumed,
    scored_outcome,
    trained_and_scored,
    under,
    unpacked,
    validation_use,
    without_schedule,
)
from fedloom.platform.seeding import torch_stream
from fedloom.platform.settings import POSITIVE, ZERO_OR_MORE
from fedloom.platform.spaces.capabilities import HasCells, with_cells
from fedloom.platform.spaces.slices import Subspace, Weights
from fedloom.tiers.devices import TRAINING_FACTOR

SHARED_MOMENTUM = "shared_momentum/"
"""The shared supernet's momentum buffers in a silo's state, with `keep_momentum`."""
LAST, BY_VALIDATION, BY_TEST = "last", "validation", "test"
"""Which epoch's accuracy is p_ij: the last one's, or the best one's on validation or on test data."""

BEST_ON_TEST = "best_test_accuracy"
"""The largest accuracy on test data of all epochs: optimistic, because test data has chosen the epoch."""


# -- configuration ----------------------------------------------------------------------------------------------------


@dataclass
class SpiderTrainingConfig(SiloTrainingConfig):
    """Training of the silos."""

    pull: Annotated[float, ZERO_OR_MORE, "lambda: the pull towards the shared weights; 0: local training only"] = 0.01
    keep_momentum: Annotated[
        bool, "the shared supernet's momentum stays with each silo between rounds, as its own network's does"
    ] = False
    own_start: Annotated[
        bool, "a silo's own network starts from fresh weights of its own; false: from the first shared ones"
    ] = False


@dataclass
class GainConfig:
    """How personalisation gains are measured.

    With `start=shared`, all silos (also for p_ii) start from the shared weights of the architecture's operators, so
    that only architectures are compared. With `own`, they start from the trained model of the silo that found the
    architecture; the paper fine-tunes it on the other silos' data alone, so that p_ii is the final model itself
    (`tune_own=false`). Models train on training and validation data, on training data alone if validation data choose
    the epoch. `epoch=test` adds the paper's "best accuracy achieved" as `best_test_accuracy`. It is too high, because
    its epoch is chosen on the test data that it is measured on, and among many epochs for p_ij, but not for p_ii.
    """

    epochs: Annotated[int, Interval(ge=0, le=100_000), "epochs of training; 0: do not measure gains"] = 0
    clients: Annotated[int | None, Interval(ge=2), "number of silos, the first ones; null: all"] = None
    lr: Annotated[float, POSITIVE, "learning rate"] = 0.01
    start: Annotated[Literal["shared", "own"], "the initial weights"] = "shared"
    tune_own: Annotated[bool, "whether p_ii is trained like the others; false: the silo's final model as it is"] = True
    epoch: Annotated[
        Literal["last", "validation", "test"], "the epoch reported: the last, or the best on these data"
    ] = "last"


@dataclass
class SpiderConfig:
    """Training with the search, evaluation on every silo's test data, and optionally personalisation gains."""

    name: str = "spider"
    train: SpiderTrainingConfig = field(default_factory=SpiderTrainingConfig)
    search: ArchitectureSearchConfig = field(default_factory=ArchitectureSearchConfig)
    gains: GainConfig = field(default_factory=GainConfig)


# -- a round of a silo ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainSpider:
    """One round of a silo.

    The paper trains the two models alternately, batch by batch. Training one after the other over the same batches is
    equivalent, because the pull is towards the received weights, not towards the shared model in training.

    Attributes:
        pull: lambda; 0 trains the personal model without the shared one.
        scored: whether the personal model is scored on the silo's validation data after training.
        use_validation: whether to train also on the validation data once the search has ended.
        keep_momentum, own_start: as in `SpiderTrainingConfig`.
    """

    local: LocalSGD
    pull: float
    search: Searcher
    rules: Rules
    scored: bool = False
    use_validation: bool = True
    keep_momentum: bool = False
    own_start: bool = False

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """The update holds only the shared model; the personal one stays in the silo's state."""
        space = with_cells(worker.space, "spider")
        state, start = assignment.state or {}, weights
        if self.own_start and not state:
            generator = torch_stream(worker.spec.training_seed, "own_start", assignment.stage, client_of(assignment))
            start = worker.space.initial_weights(generator)
        silo = begun(assignment.state, start, space.largest_subspace)
        silo, searching_macs = self.search.before(worker, assignment, silo)
        searched = self.search.is_over(space, silo.remaining)
        validation = validation_use(trained=self.use_validation and searched, scored=self.scored)
        data = client_samples(worker, assignment, use_validation=validation == "trained")

        supernet = MixedNetwork().on(worker)
        before = under(state, SHARED_MOMENTUM) if self.keep_momentum else {}
        shared = train_network(worker, assignment, supernet, weights, data, self.local, resumed(before)).copied()
        network = own_network(worker, silo)
        pull = pull_towards(self.pull, received(worker, network, weights))
        resume, search_step = resumed(silo.momentum, pull), self.search.step(worker, assignment, silo)
        personal = train_network(
            worker, assignment, network, silo.weights, data, self.local.plain, lambda sgd: search_step(resume(sgd))
        )
        scores = validation_scores(worker, assignment, network, PERSONAL) if validation == "scored" else ()
        personal = personal.copied()
        alphas = None if silo.alphas is None else silo.alphas.detach()
        silo = replace(silo, weights=personal.tensors, momentum=personal.momentum, alphas=alphas)
        passes = 1 if searched else self.search.passes
        macs = shared.macs + passes * personal.macs + searching_macs
        outcome = pair_outcome(shared, personal, data, self.rules.weighting, silo)
        momentum = {f"{SHARED_MOMENTUM}{n}": t for n, t in shared.momentum.items()} if self.keep_momentum else {}
        after = {**(outcome.state or {}), **momentum}
        return replace(outcome, macs=macs, forward_macs=searching_macs, measurements=scores, state=after)


# -- personalisation gains: every silo's architecture, trained on every silo's data (Eq. 6, Fig. 3) -------------------


@dataclass(frozen=True)
class ScoreModel:
    """Scores a silo's final model as it is, from the assignment's state, on its own test data (SPIDER's p_ii)."""

    subspace: Subspace
    model: str

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Measures the model called `model`."""
        network = MixedNetwork(self.subspace).on(worker)
        data = own_test_data(worker, assignment)
        score = score_network(worker, assignment, network, start_of(assignment, weights), data)
        return scored_outcome(worker, network, score, measurements_of(self.model, network.name, "test", score))


def start_of(assignment: Assignment, weights: Weights) -> Weights:
    """The model in the assignment's state, or without one the shared weights."""
    return unpacked(assignment.state).weights if assignment.state else weights


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
        data = client_samples(worker, assignment, use_validation=self.epoch != BY_VALIDATION)
        test = own_test_data(worker, assignment)
        chosen_on = worker.client_data(client_of(assignment), "validation") if self.epoch == BY_VALIDATION else test
        best = BestEpoch()

        def on_test() -> Score:
            return score_loaded(worker, assignment, network, test)

        def look() -> None:
            score = score_loaded(worker, assignment, network, chosen_on)
            best.see(score, None if chosen_on is test else on_test)
            worker.set_mode(network.module, training=True)

        def watched(sgd: Optimizer) -> Step:
            steps = len(epoch_sizes(rows_of(data[1]), self.local.batch_size))
            return sgd if self.epoch == LAST else EachEpoch(sgd, steps, look)

        start = start_of(assignment, weights)
        trained = train_network(worker, assignment, network, start, data, self.local, watched).checked()
        score = best.on_test if self.epoch == BY_VALIDATION else None
        if score is None:
            score = on_test()
            best.samples += score.samples
        rows = [*measurements_of(self.model, network.name, "test", score)]
        if best.on_test is not None:
            rows.append(Measurement(self.model, network.name, None, "best_epoch", best.epoch, 0))
        if best.on_test is not None and self.epoch == BY_TEST:
            metric, samples = best.on_test.metric, best.on_test.samples
            rows.append(Measurement(self.model, network.name, "test", BEST_ON_TEST, metric, samples))
        return trained_and_scored(worker, trained, score, tuple(rows), evaluated=best.samples)


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
        """Records the next epoch's score; `on_test` scores on test data, None if test data choose the epoch."""
        self.seen += 1
        self.samples += chosen_by.samples
        if chosen_by.metric > self.highest:
            self.epoch, self.highest = self.seen, chosen_by.metric
            self.on_test = chosen_by
            if on_test is not None:
                self.on_test = on_test()
                self.samples += self.on_test.samples


@dataclass
class EachEpoch:
    """SGD that calls `ended` after every epoch of `steps` steps."""

    sgd: Optimizer
    steps: int
    ended: Callable[[], None]
    made: int = 0

    def step(self) -> None:
        self.sgd.step()
        self.made += 1
        if self.made % self.steps == 0:
            self.ended()


class GainStage(ClientEvaluation):
    """One round per silo, in which all silos train and score its architecture."""

    name = "gains"

    def __init__(self, world: World, config: GainConfig, train: SiloTrainingConfig, space: HasCells) -> None:
        self.world, self.config, self.space = world, config, space
        self.silos = range(world.num_clients if config.clients is None else config.clients)
        self.local = without_schedule(world, train, lr=config.lr, epochs=config.epochs)

    @property
    def trains(self) -> bool:
        return True

    def rounds_left(self, state: RunState) -> int:
        """One round per silo's architecture."""
        return len(self.silos) - state.round

    def macs_left(self, state: RunState) -> float:
        """The MACs of training the remaining architectures on all silos' data, on their own silo's with `tune_own`."""
        data, silos = self.world.data, list(self.silos)
        samples = data.sizes("train") + (0 if self.config.epoch == BY_VALIDATION else data.sizes("validation"))
        silos_left = silos[state.round :]
        times = len(silos_left) - (not self.config.tune_own) * np.isin(silos, silos_left)
        return float(times @ samples[silos]) * self.config.epochs * TRAINING_FACTOR * self.world.expected_macs()

    def plan(self, state: RunState) -> Plan:
        """Trains the architecture of silo `state.round` on the data of every silo."""
        finder = state.round
        silo = begun(state.client_state(finder), state.weights(SUPERNET), self.space.largest_subspace)
        architecture = silo.remaining if silo.alphas is None else by_magnitude(silo.alphas, silo.remaining)
        name = f"silo-{finder}"
        task = TrainAndScore(architecture, name, self.local, self.config.epoch)
        planned = [a for a in self.planned(finder, task) if a.client_id in self.silos]
        # Set explicitly, so that the loop does not insert the silos' saved states.
        start = silo.packed() if self.config.start == "own" else {}
        assignments = [replace(a, state=start) for a in as_measured(planned)]
        if not self.config.tune_own:
            as_it_is = ScoreModel(architecture, name)
            assignments = [replace(a, task=as_it_is) if a.client_id == finder else a for a in assignments]
        return Plan(assignments, SUPERNET)


# -- stages -----------------------------------------------------------------------------------------------------------


def stages(config: SpiderConfig, world: World) -> list[Stage]:
    """Training with the search, the evaluation, and the gains if configured."""
    train, rules = config.train, checked_silos(world, config.train)
    space = searched_space(world, config.search, train.rounds, "spider", share=participation(world, train))
    gains = config.gains
    if gains.clients is not None and gains.clients > world.num_clients:
        raise ValueError(
            f"method.gains.clients={gains.clients}: must be between 2 and {world.num_clients}, the number of silos"
        )
    if not gains.tune_own and gains.start == "shared":
        raise ValueError(
            "method.gains.tune_own=false compares with the silos' final models, so training must start from them: "
            "set method.gains.start=own"
        )
    if gains.epochs and gains.epoch == BY_VALIDATION:
        check_validation(world, "choose the epoch of the gains")

    def client(round_: Round) -> TrainSpider:
        searcher = searcher_of(config.search, round_.index, train.batch_size)
        return TrainSpider(
            round_.local,
            train.pull,
            searcher,
            rules,
            round_.scored,
            train.use_validation,
            train.keep_momentum,
            train.own_start,
        )

    def decided(state: RunState) -> bool:
        return all_decided(state, world, space, searcher_of(config.search, state.round, train.batch_size))

    training = SiloTraining(
        *(world, train, rules),
        name=config.name,
        initial=fresh_supernet(world),
        tasks=to_all(client),
        settled=decided,
        test=lambda _state: ScoreOwn(),
    )
    sequence = training.and_evaluation()
    return [*sequence, GainStage(world, gains, train, space)] if gains.epochs else sequence


METHOD = Method(SpiderConfig, stages, kind="silos", own="model", lacks=("candidates", "models"), needs=with_cells)
