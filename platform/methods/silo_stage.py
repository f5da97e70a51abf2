"""Cross-silo stages: every silo in every round, then every silo's score on its own test data."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedloom.platform.clients.execution import Assignment, Task
from fedloom.platform.clients.tasks import parse_architecture
from fedloom.platform.clients.training import LocalSGD, TrainingConfig, check_training, learning_rate
from fedloom.platform.federation.selection import Cohort
from fedloom.platform.federation.stage import Merged, Plan, RoundResult
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.world import SERVER, World
from fedloom.platform.methods.rows import evaluation_rows
from fedloom.platform.methods.supernet_stage import SUPERNET
from fedloom.platform.seeding import torch_stream
from fedloom.platform.silos.scoring import TrainAndScore
from fedloom.platform.silos.search import by_magnitude
from fedloom.platform.silos.state import begun
from fedloom.platform.spaces.base import Architecture
from fedloom.platform.spaces.kept import KeptSpace

logger = logging.getLogger(__name__)


@dataclass
class SiloTrainingConfig(TrainingConfig):
    """Training of silos (SPIDER, App. B.1); without `clients_per_round` every silo takes part in every round.

    With `use_validation` validation data joins the training data as soon as no search needs it: from the first round
    where nothing is searched, as the baselines in the paper. Then no validation curve can be had from then on.
    """

    rounds: int = 1000
    clients_per_round: int | None = None
    batch_size: int = 32
    lr: float = 0.03
    momentum: float = 0.9
    clip_norm: float = 5.0
    schedule: str = "cosine"
    final_lr_share: float = 0.0
    use_validation: bool = True


def check_silos(world: World, train: SiloTrainingConfig) -> None:
    """Raises ValueError for settings that cannot run; warns of tiers, which are not used."""
    if len(world.tiers) > 1:
        logger.warning(
            "tiers.count=%d: silos train whole networks whatever their tier may spend; set tiers.count=1",
            len(world.tiers),
        )
    if world.config.tiers.unsupported:
        raise ValueError(
            "tiers.unsupported: silos train every operator of their space; leave them out of space.operators"
        )
    if train.rounds < 1:
        raise ValueError(f"method.train.rounds={train.rounds}: must be at least 1, silos have no model before")
    check_training(train, "method.train", world.num_clients)


def check_pull(pull: float) -> None:
    """Raises ValueError for a lambda below 0."""
    if not pull >= 0:
        raise ValueError(f"method.train.pull={pull}: must be 0 (every silo alone) or more")


def check_validation(world: World, why: str) -> None:
    """Raises ValueError if a silo has no validation samples; `why` says what they are needed for."""
    if not world.data.sizes("validation").all():
        raise ValueError(
            f"data.validation_share={world.config.data.validation_share:g} leaves a silo without validation samples to "
            f"{why} with: raise it, or give each silo more samples"
        )


def given_architecture(world: World, text: str | None) -> Architecture:
    """The architecture of this text, the space's first if not given; raises ValueError if it is not of the space."""
    try:
        architecture = tuple(0 for _ in world.space.options) if text is None else parse_architecture(text)
    except ValueError as error:
        raise ValueError(
            f"method.architecture={text!r}: give the number of an option for each of the {len(world.space.options)} "
            "decisions, such as 0-1-0"
        ) from error
    world.space.validate(architecture)
    return architecture


def everybody(world: World) -> Cohort:
    """All silos, in every round."""
    return Cohort(tuple(range(world.num_clients)), 1.0, "all silos")


def assigned(world: World, stage: str, round_: int, task: Task) -> list[Assignment]:
    """The same task for every silo, in plan order."""
    cohort = everybody(world)
    return [world.assign(stage, round_, cohort, c, task) for c in world.in_plan_order(cohort.client_ids)]


class SiloStage(ABC):
    """Averages a shared model that all silos train; what else a silo does is its task, what it keeps is in its state.

    Subclasses say what the task of a round is (`task`), may have the server do something beside (`server_tasks`), and
    may make something of the round's reports (`after`).
    """

    def __init__(
        self,
        world: World,
        config: SiloTrainingConfig,
        name: str,
        initial: Callable[[torch.Generator], dict[str, Tensor]],
    ) -> None:
        self.world, self.config, self.name, self.initial = world, config, name, initial

    def begin(self, state: RunState) -> RunState:
        """Fresh shared weights."""
        generator = torch_stream(self.world.config.seed_for("initialisation"), SUPERNET)
        return state.with_bag(SUPERNET, self.initial(generator))

    def rounds_left(self, state: RunState) -> int:
        """Rounds still to come."""
        return self.config.rounds - state.round

    def local(self, round_: int) -> LocalSGD:
        """The silos' local SGD of a round."""
        return LocalSGD.of(self.config, round_, augment=self.world.config.data.augment != "none")

    def is_scored(self, round_: int) -> bool:
        """Whether silos score their models on validation data after this round."""
        return self.config.evaluate_every > 0 and round_ % self.config.evaluate_every == 0

    def cohort(self, round_: int) -> Cohort:
        """The silos of a round: all of them, or as many as are configured."""
        if self.config.clients_per_round is None:
            return everybody(self.world)
        return self.world.select(self.name, round_, self.world.eligible_by_tier[0], self.config.clients_per_round)

    @abstractmethod
    def task(self, state: RunState) -> Task:
        """What every silo does in the coming round."""

    def server_tasks(self, _state: RunState) -> Sequence[Task]:
        """What the server does beside."""
        return ()

    def plan(self, state: RunState) -> Plan:
        """The same task for every silo of the round; where each stands is in its own state."""
        round_, task = state.round, self.task(state)
        cohort = self.cohort(round_)
        ordered = self.world.in_plan_order(cohort.client_ids)
        work = [self.world.assign(self.name, round_, cohort, c, task) for c in ordered]
        work += [Assignment(self.name, round_, None, SERVER, task) for task in self.server_tasks(state)]
        return Plan(work, SUPERNET, {"lr": learning_rate(self.config, round_)})

    def merge(self, state: RunState, _plan: Plan, result: RoundResult) -> Merged:
        """Averages the shared weights by samples."""
        weights = result.sums.finish(state.weights(SUPERNET), self.config.min_contributors)
        rows = evaluation_rows(result.reports)
        return Merged(self.after(state.with_bag(SUPERNET, weights), result), rows)

    def after(self, state: RunState, _result: RoundResult) -> RunState:
        """The state after a round's average."""
        return state

    def end(self, state: RunState) -> Merged:
        """Nothing more to do."""
        return Merged(state)


class SiloEvaluation:
    """Every silo scores its model on its own test data: one round, and with `GainStage` all that reads test data."""

    name = "evaluation"

    def __init__(self, world: World, task: Callable[[RunState], Task]) -> None:
        self.world, self.task = world, task

    def begin(self, state: RunState) -> RunState:
        """Nothing to prepare."""
        return state

    def rounds_left(self, state: RunState) -> int:
        """One."""
        return 1 - state.round

    def plan(self, state: RunState) -> Plan:
        """A measurement, not a round of the simulated federation: nobody drops out of it."""
        return Plan(as_measured(assigned(self.world, self.name, state.round, self.task(state))), SUPERNET)

    def merge(self, state: RunState, _plan: Plan, result: RoundResult) -> Merged:
        """The silos' scores; a network that was trained only to be scored is not kept."""
        return Merged(state, evaluation_rows(result.reports))

    def end(self, state: RunState) -> Merged:
        """Nothing more to do."""
        return Merged(state)


def as_measured(planned: Sequence[Assignment]) -> list[Assignment]:
    """The assignments as a final evaluation: they read test data, and nobody drops out."""
    return [replace(a, dropped="", deadline_s=None, reads_test=True) for a in planned]


@dataclass
class GainConfig:
    """Personalisation gains (SPIDER, Fig. 3): every silo's architecture is trained on every silo's data.

    `epochs` 0 leaves them out; `clients` restricts them to the first few silos. `start` shared begins with the shared
    weights of the architecture's operators for all alike, p_ii as well, so that architectures are compared; own with
    the weights of the silo that found it. Training is on training and validation data; what counts is the accuracy
    after the last epoch (the paper's best epoch would be chosen on test data).
    """

    epochs: int = 0
    clients: int | None = None
    lr: float = 0.01
    start: str = "shared"


STARTS = ("shared", "own")


def check_gains(config: GainConfig, num_clients: int) -> None:
    """Raises ValueError for settings that cannot run."""
    if config.start not in STARTS:
        raise ValueError(f"method.gains.start={config.start!r}: allowed are {', '.join(STARTS)}")
    if config.epochs < 0 or not config.lr > 0:
        raise ValueError("method.gains: epochs must be 0 (none) or more, lr greater than 0")
    if config.clients is not None and not 2 <= config.clients <= num_clients:
        raise ValueError(
            f"method.gains.clients={config.clients}: must be between 2 and the {num_clients} silos there are"
        )


class GainStage(SiloEvaluation):
    """One round per silo: its architecture is trained and scored by all silos."""

    name = "gains"

    def __init__(self, world: World, config: GainConfig, train: SiloTrainingConfig, space: KeptSpace) -> None:
        self.world, self.config, self.space = world, config, space
        silos = world.num_clients if config.clients is None else config.clients
        self.silos = range(silos)
        self.local = LocalSGD.of(train, 0, augment=world.config.data.augment != "none")
        self.local = replace(self.local, lr=config.lr, epochs=config.epochs)

    def rounds_left(self, state: RunState) -> int:
        """One for every silo's architecture."""
        return len(self.silos) - state.round

    def plan(self, state: RunState) -> Plan:
        """Architecture of silo `state.round`, on the data of every silo."""
        of = state.round
        silo = begun(state.client_state(of), state.weights(SUPERNET), self.space.largest_subspace)
        kept = silo.kept if silo.alphas is None else by_magnitude(silo.alphas, silo.kept)
        task = TrainAndScore(kept, f"silo-{of}", self.local)
        planned = [a for a in assigned(self.world, self.name, of, task) if a.client_id in self.silos]
        # Given explicitly, so that no silo's own state takes its place.
        begin = silo.packed() if self.config.start == "own" else {}
        return Plan([replace(a, state=begin) for a in as_measured(planned)], SUPERNET)
