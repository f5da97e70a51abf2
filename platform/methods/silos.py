"""Shared by the cross-silo methods: their configuration, a silo's personal model, the final scores, and their stages.

A silo is a client of a cross-silo method, which may keep state between rounds. By default every silo takes part in
every round.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from fedloom.platform.averaging.average import Update
from fedloom.platform.clients.assignments import Assignment, ClientResult, Evaluation, Measurement, Task, evaluations_of
from fedloom.platform.clients.evaluation import Score
from fedloom.platform.clients.networks import Described, MixedNetwork, Network, Subnet
from fedloom.platform.clients.scoring import (
    GLOBAL,
    PERSONAL,
    measurements_of,
    own_test_data,
    score_loaded,
    score_network,
)
from fedloom.platform.clients.trainer import (
    Train,
    TrainedNetwork,
    ValidationUse,
    client_samples,
    train_network,
    trained_outcome,
    update_of,
)
from fedloom.platform.clients.training import Corrections, LocalSGD, Optimizer, Samples, batch_indices
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.augment import augmentation
from fedloom.platform.data.on_device import upload
from fedloom.platform.data.trees import first, rows_of, single, taken
from fedloom.platform.federation.algorithm import (
    SUPERNET,
    Initial,
    Plan,
    PostRoundEvaluation,
    Round,
    RoundResult,
    RoundUpdate,
    RunState,
    TrainingStage,
    from_generator,
    to_all,
)
from fedloom.platform.federation.method import Stage
from fedloom.platform.federation.selection import selection_traits
from fedloom.platform.federation.training_config import (
    EPOCHS,
    Rules,
    Schedule,
    TrainingConfig,
    augmentation_of,
    check_training,
    local_sgd,
    rules_of,
)
from fedloom.platform.federation.world import World
from fedloom.platform.methods.evaluation import ClientEvaluation, as_measured
from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.settings import BELOW_ONE, NOT_EMPTY, ONE_OR_MORE, PART, POSITIVE, ZERO_OR_MORE
from fedloom.platform.spaces.capabilities import HasSubspaces, summing_options
from fedloom.platform.spaces.slices import Subspace, Weights
from fedloom.platform.words import shown
from fedloom.tiers.devices import EVALUATION_FACTOR, TRAINING_FACTOR

logger = logging.getLogger(__name__)

WATCHED = "accuracy_while_training"
"""The metric of silos' test accuracies during training; a name of its own keeps them apart from final results."""
KEPT = "kept"
"""The name of the remaining operators in a silo's state, or in the run's state where all silos share them."""
ALPHAS = "alphas"
WEIGHTS = "weights/"
MOMENTUM = "momentum/"

# -- configuration ----------------------------------------------------------------------------------------------------


@dataclass
class SiloTrainingConfig(TrainingConfig):
    """Training of silos (SPIDER, App. B.1)."""

    rounds: Annotated[int, ONE_OR_MORE, "number of rounds"] = 1000
    clients_per_round: Annotated[int | None, ONE_OR_MORE, "number of silos per round; null: all"] = None
    batch_size: Annotated[int, ONE_OR_MORE, "samples per step of a silo's SGD"] = 32
    lr: Annotated[float, POSITIVE, "learning rate of the silos' SGD"] = 0.03
    momentum: Annotated[float, BELOW_ONE, "momentum of the silos' SGD"] = 0.9
    clip_norm: Annotated[float, ZERO_OR_MORE, "limit of the gradient's norm, 0 for none"] = 5.0
    schedule: Annotated[Schedule, "lr over rounds"] = "cosine"
    final_lr_share: Annotated[float, PART, "cosine: the share of lr that is left in the last round"] = 0.0
    use_validation: Annotated[
        bool,
        "train also on validation data once no search needs it, as in the paper; it is not scored from then on",
    ] = True
    test_every: Annotated[
        int, ZERO_OR_MORE, "rounds between two scores on test data, which are only reported; 0 for none"
    ] = 0


@dataclass
class SubnetConfig:
    """A method that trains one architecture, without a search."""

    name: str = ""
    architecture: Annotated[str | None, NOT_EMPTY, "options such as 0-0-3; null: the space's first"] = None
    train: SiloTrainingConfig = field(default_factory=SiloTrainingConfig)


@dataclass
class AdaptationConfig:
    """A silo's adaptation of the shared model: SGD over its own data."""

    epochs: Annotated[int, EPOCHS, "passes over the silo's data"] = 5
    lr: Annotated[float | None, POSITIVE, "learning rate; null: the initial rate of training"] = 0.01


def without_schedule(world: World, train: SiloTrainingConfig, **changes: Any) -> LocalSGD:
    """The silos' SGD of the first round with some hyper-parameters changed, for training outside the rounds."""
    local = local_sgd(train, 0, augmentation_of(world, train), balanced=world.config.data.balanced_classes)
    return replace(local, **changes)


def adaptation(world: World, config: AdaptationConfig, train: SiloTrainingConfig) -> LocalSGD:
    """Hyper-parameters of the adaptation."""
    return without_schedule(world, train, epochs=config.epochs, lr=train.lr if config.lr is None else config.lr)


def checked_silos(world: World, train: SiloTrainingConfig) -> Rules:
    """The stage's rules; ValueError for invalid settings, and a warning if there are tiers, which are not used."""
    if len(world.tiers) > 1:
        logger.warning(
            "tiers.count=%d: silos train whole networks whatever their tier may spend; set tiers.count=1",
            len(world.tiers),
        )
    if world.config.tiers.unsupported:
        raise ValueError(
            "tiers.unsupported: silos train every operator of their space; remove unsupported ones from space.operators"
        )
    check_training(train, "method.train", world.num_clients)
    for name in ("optimizer", "optimizer_state", "local_warmup_steps", "local_cosine_to"):
        default = getattr(TrainingConfig(), name)
        if getattr(train, name) != default:
            raise ValueError(
                f"method.train.{name}={shown(getattr(train, name))}: silos train by SGD at one rate per round, with "
                f"the momentum that their method keeps; use {shown(default)}"
            )
    return rules_of(train, "method.train")


def refuse_feddyn(train: SiloTrainingConfig, who: str, beside: str) -> None:
    """Raises ValueError for FedDyn, whose clients correct the network's parameters alone, where more is averaged."""
    if train.server == "feddyn":
        raise ValueError(
            f"method.train.server=feddyn: {who} also averages {beside}, which FedDyn's clients do not correct; use "
            "another server and local rule"
        )


def check_validation(world: World, why: str) -> None:
    """Raises ValueError if a silo has no validation samples; `why` is the purpose shown in the message."""
    if not world.data.sizes("validation").all():
        raise ValueError(
            f"data.validation_share={world.config.data.validation_share:g} leaves a silo without validation samples to "
            f"{why} with: raise it, or give each silo more samples"
        )


def check_classes(world: World) -> None:
    """Raises ValueError if samples have no class label, or one per position."""
    dataset = world.data.dataset
    if not dataset.has_labels or dataset.per_position:
        raise ValueError(
            f"method={world.config.method.name} classifies samples, and {world.config.data.dataset} has no class label "
            "for each: use another method"
        )


# -- a silo's personal model ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Personal:
    """A silo's personal model, which is never sent.

    Attributes:
        weights: its tensors by their names in the shared model.
        momentum: SGD's momentum buffers by parameter, where there is one.
        remaining: the operators left on every edge (one each after a search); empty for a fixed architecture.
        alphas: the architecture parameters (decisions, options) during a search by gradients.
    """

    weights: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor]
    remaining: Subspace = ()
    alphas: Tensor | None = None

    def packed(self) -> dict[str, Tensor]:
        """The state as named tensors."""
        width = max((max(row, default=-1) for row in self.remaining), default=-1) + 1
        mask = torch.zeros((len(self.remaining), width), dtype=torch.bool)
        for decision, row in enumerate(self.remaining):
            mask[decision, list(row)] = True
        weights = {f"{WEIGHTS}{name}": tensor for name, tensor in self.weights.items()}
        momentum = {f"{MOMENTUM}{name}": tensor for name, tensor in self.momentum.items()}
        return {KEPT: mask, **weights, **momentum, **({} if self.alphas is None else {ALPHAS: self.alphas})}

    def restricted(self, space: HasSubspaces, remaining: Subspace) -> "Personal":
        """The model without the tensors of removed operators, and without architecture parameters."""
        names = space.subspace_slices(remaining).keys()
        weights, momentum = (
            {name: tensor for name, tensor in tensors.items() if name in names}
            for tensors in (self.weights, self.momentum)
        )
        return Personal(weights, momentum, remaining)


def unpacked(state: Weights) -> Personal:
    """The inverse of `Personal.packed`."""
    remaining = tuple(tuple(row.nonzero().flatten().tolist()) for row in state[KEPT])
    return Personal(under(state, WEIGHTS), under(state, MOMENTUM), remaining, state.get(ALPHAS))


def begun(state: Weights | None, weights: Weights, remaining: Subspace = ()) -> Personal:
    """A silo's state; before its first round it has the shared weights and the operators `remaining`."""
    return Personal(dict(weights), {}, remaining) if state is None else unpacked(state)


def under(state: Weights, prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def own_network(worker: Worker, silo: Personal) -> Network:
    """A silo's network of its remaining operators, weighted by its architecture parameters if it has any."""
    remaining, alphas = silo.remaining, silo.alphas
    if alphas is None:
        return MixedNetwork(remaining).on(worker)
    absent = absent_of(alphas, remaining)
    return MixedNetwork(remaining, lambda: softmax(alphas, absent)).on(worker)


def absent_of(alphas: Tensor, remaining: Subspace) -> Tensor:
    """The mask (decisions, options) of the operators that do not remain."""
    absent = torch.ones(alphas.shape, dtype=torch.bool)
    for decision, row in enumerate(remaining):
        absent[decision, list(row)] = False
    return upload(absent, alphas.device)


def softmax(alphas: Tensor, absent: Tensor) -> Tensor:
    """The softmax weights (decisions, options) of the remaining operators; 0 for all others."""
    return alphas.masked_fill(absent, -torch.inf).softmax(dim=1)


def endless_batches(data: Samples, local: LocalSGD, generator: torch.Generator) -> Iterator[Samples]:
    """Yields batches without end, reshuffled after every pass over the samples and augmented as in training."""
    (x, y), augment = data, augmentation(local.augment)
    while True:
        balanced = single(y, "a client with balanced classes") if local.balanced else None
        for index in batch_indices(rows_of(y), local.batch_size, 1, generator, first(x).device, balanced):
            x_B, y_B = taken(x, index), taken(y, index)
            yield (x_B if augment is None else augment(single(x_B, "an augmentation"), generator)), y_B


def resumed(momentum: Mapping[str, Tensor], correct: Corrections | None = None) -> Callable[[Optimizer], Optimizer]:
    """Makes SGD continue with the momentum of earlier training and, if given, a new correction (`Optimizer.resume`)."""
    return lambda sgd: sgd.resume(momentum, correct)


# -- what a silo sends ------------------------------------------------------------------------------------------------


def pair_outcome(
    shared: TrainedNetwork, personal: TrainedNetwork, data: Samples, weighting: ComponentSpec, silo: Personal
) -> ClientResult:
    """The outcome of training both models: loss and metric are the personal model's, the update the shared one's."""
    samples = rows_of(data[1])
    outcome = trained_outcome(shared, samples, update_of(shared, samples, weighting))
    return replace(
        outcome,
        steps=shared.figures.steps + personal.figures.steps,
        macs=shared.macs + personal.macs,
        loss=personal.figures.loss,
        metric=personal.figures.accuracy,
        parameters=personal.num_parameters,
        state={**silo.packed(), **shared.state},
        architecture=personal.network.architecture,
        subspace=personal.network.subspace,
    )


def only(update: Update, names: Collection[str]) -> Update:
    """The update with only these tensors, because what a silo keeps to itself is neither sent nor counted."""
    sent = [name for name in update.tensors if name in names]
    return replace(
        update,
        tensors={name: update.tensors[name] for name in sent},
        slices={name: update.slices[name] for name in sent},
        weights={name: update.weights[name] for name in sent},
    )


# -- the final scores -------------------------------------------------------------------------------------------------


def final_measurements(worker: Worker, model: str, network: Network, score: Score) -> tuple[Measurement, ...]:
    """The measurements of a final evaluation: the score on test data, and the network's MACs and parameters."""
    costs = {"macs": network.macs, "parameters": network.parameters(worker)}
    of_costs = (Measurement(model, network.name, None, name, value, 0) for name, value in costs.items())
    return (*measurements_of(model, network.name, "test", score), *of_costs)


def scored_outcome(
    worker: Worker, network: Network, score: Score, measurements: tuple[Measurement, ...], passes: int | None = None
) -> ClientResult:
    """The outcome of scoring a network; `passes` are the samples that it saw, if others than the score's."""
    return ClientResult(
        samples=score.samples,
        macs=network.macs * (score.samples if passes is None else passes),
        parameters=network.parameters(worker),
        measurements=measurements,
        clock_factor=EVALUATION_FACTOR,
        architecture=network.architecture,
        subspace=network.subspace,
    )


def tested_outcome(
    worker: Worker, assignment: Assignment, model: str, network: Network, weights: Weights
) -> ClientResult:
    """The outcome of scoring a network with these weights on the silo's test data, as `model`."""
    score = score_network(worker, assignment, network, weights, own_test_data(worker, assignment))
    return scored_outcome(worker, network, score, final_measurements(worker, model, network, score))


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


@dataclass(frozen=True)
class ScoreOwn:
    """Scores a silo's personal model on its test data; `subnet` is its architecture, None if it is searched."""

    subnet: Subnet | None = None

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Measures the model `personal`; a silo that has never taken part uses the shared model."""
        if self.subnet is None:
            silo = begun(assignment.state, weights, summing_options(worker.space, "a search").largest_subspace)
            return tested_outcome(worker, assignment, PERSONAL, own_network(worker, silo), silo.weights)
        silo = begun(assignment.state, weights)
        return tested_outcome(worker, assignment, PERSONAL, self.subnet.on(worker), silo.weights)


@dataclass(frozen=True)
class ScoreShared:
    """Scores the shared model on a silo's test data."""

    network: Described

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Measures the model `global`."""
        return tested_outcome(worker, assignment, GLOBAL, self.network.on(worker, assignment), weights)


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


# -- stages -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class SiloTraining(TrainingStage):
    """A training stage that also measures the silos' test accuracies every `test_every` rounds and after the last.

    The papers report the best test accuracy of all rounds (SPIDER, App. B.1). It is measured after a round has ended,
    by tasks that return nothing but rows, so that no test datum can change what is trained, searched or chosen.

    Attributes:
        test: the task that scores each silo's model on its test data.
        ready: whether there is a model to score before the end; a method may not have chosen one yet.
        sends_change: whether a silo sends the change of one network and nothing else, which is what privacy and
            processors act on, and some selection rules.
    """

    config: SiloTrainingConfig
    _: KW_ONLY
    test: Callable[[RunState], Task]
    ready: Callable[[RunState], bool] = lambda _state: True
    sends_change: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sends_change and selection_traits(selection := self.rules.selection.name).shortens_updates:
            raise ValueError(
                f"{self.rules.key}.selection={selection} says which share of its change a client sends, and the "
                f"clients of {self.name} send more than the change of one network: choose another selection rule"
            )
        if self.asynchronous is not None and not self.sends_change:
            raise ValueError(
                f"{self.rules.key}.arrivals={self.config.arrivals}: what the clients of {self.name} cost is not known "
                "before they have trained, and so neither whose answer comes first; leave it out, and "
                f"{self.rules.key}.asynchronous with it"
            )
        acts = self.processing.processors and not self.world.attackers  # the registry refuses attackers
        if acts and not self.sends_change:
            raise ValueError(
                f"privacy and processors: the clients of {self.name} send more than the change of one network; leave "
                "them out"
            )
        if acts and self.config.use_validation:
            raise ValueError(
                f"{self.rules.key}.use_validation=true: privacy and processors act on updates from training data only; "
                "set it to false"
            )
        if self.may_end_early and self.config.use_validation:
            raise ValueError(
                f"{self.rules.key}.use_validation=true: the silos train on their validation data, so that no score on "
                "them can end the stage (stop.*); set it to false"
            )

    def and_evaluation(self) -> list[Stage]:
        """This stage, and the evaluation of every silo's model."""
        return [self, ClientEvaluation(self.world, self.test, self.group)]

    def merge(self, state: RunState, plan: Plan, result: RoundResult) -> RoundUpdate:
        """The training stage's update, with an evaluation by all silos when one is due."""
        merged, every = super().merge(state, plan, result), self.config.test_every
        due = every > 0 and (state.round % every == 0 or state.round == self.config.rounds - 1)
        if not (due and self.ready(merged.state)):
            return merged
        assert merged.evaluation is None, "silos' models are scored by the silos, not by the server"
        planned = ClientEvaluation(self.world, self.test).planned(state.round, self.test(merged.state))
        tests = [replace(a, stage=self.name) for a in as_measured(planned)]

        def watched(measured: RoundResult) -> list[Evaluation]:
            evaluations = evaluations_of(measured.client_results)
            return [replace(e, metric=WATCHED) for e in evaluations if e.split == "test" and e.metric == "accuracy"]

        return replace(merged, evaluation=PostRoundEvaluation(Plan(tests, self.group), watched))


def validation_use(*, trained: bool, scored: bool) -> ValidationUse:
    """How validation data are used; data that are trained on are not scored: that would not measure generalisation."""
    return "trained" if trained else "scored" if scored else "unused"


def fresh_subnet(world: World, subnet: Subnet) -> Initial:
    """Initial weights of one architecture, shared by all silos."""
    return from_generator(world, lambda g: world.space.initial_subnet_weights(subnet.architecture, g), SUPERNET)


def subnet_stages(
    world: World,
    config: SubnetConfig,
    test: Callable[[Subnet], Task],
    client: Callable[[Subnet, Round, ValidationUse], Task] | None = None,
    *,
    sends_change: bool = False,
) -> list[Stage]:
    """Training of one architecture with the tasks of `client`, by default FedAvg's, and `test` on every silo.

    `sends_change` describes the tasks of `client`, as in `SiloTraining`; FedAvg's tasks always send the change.
    """
    train, rules = config.train, checked_silos(world, config.train)
    subnet = Subnet(world.architecture(config.architecture, "method.architecture"), stand_alone=True)

    def fedavg(subnet: Subnet, round_: Round, validation: ValidationUse) -> Train:
        return Train(subnet, round_.local, round_.rules.weighting, validation)

    def task_of(round_: Round) -> Task:
        validation = validation_use(trained=train.use_validation, scored=round_.scored)
        return (client or fedavg)(subnet, round_, validation)

    task = test(subnet)
    training = SiloTraining(
        *(world, train, rules),
        name=config.name,
        initial=fresh_subnet(world, subnet),
        tasks=to_all(task_of),
        test=lambda _state: task,
        sends_change=sends_change or client is None,
    )
    return training.and_evaluation()
