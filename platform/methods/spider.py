"""SPIDER: every silo searches an architecture of its own while a shared supernet is trained by all of them.

Source: SPIDER (Mushtaq et al.); only the shared weights travel, what a silo keeps stays in its state.
"""

import logging
from dataclasses import dataclass, field, replace

from fedloom.platform.methods.rows import evaluation_rows
from fedloom.platform.methods.supernet_stage import SUPERNET
from fedloom.platform.seeding import torch_stream
from fedloom.platform.selection import Cohort
from fedloom.platform.spaces.darts import DartsSpace
from fedloom.platform.spider_tasks import ScorePersonal, TrainPair
from fedloom.platform.stage import Merged, Plan, RoundResult, Stage
from fedloom.platform.state import RunState
from fedloom.platform.training import LocalSGD, TrainingConfig, check_training, learning_rate
from fedloom.platform.world import World

logger = logging.getLogger(__name__)


@dataclass
class SpiderTrainingConfig(TrainingConfig):
    """Training and search of all silos (SPIDER, Sec. 4, App. B).

    Every silo takes part in every round (`clients_per_round` is not used). `pull` is lambda. From round `search_from`
    on, every `search_every` rounds each silo decides one edge of the normal and one of the reduction cell; when nothing
    is left to be decided, its validation data joins its training data.
    """

    rounds: int = 1000
    batch_size: int = 32
    lr: float = 0.03
    momentum: float = 0.9
    clip_norm: float = 5.0
    schedule: str = "cosine"
    final_lr_share: float = 0.0
    pull: float = 0.01
    search_from: int = 30
    search_every: int = 20


@dataclass
class SpiderConfig:
    """Training with the search in it, then every silo's own test data."""

    name: str = "spider"
    train: SpiderTrainingConfig = field(default_factory=SpiderTrainingConfig)


def check(config: SpiderConfig, world: World) -> DartsSpace:
    """The space; raises ValueError for settings that cannot run, warns of edges that will not be searched."""
    space, train = world.space, config.train
    if not isinstance(space, DartsSpace):
        raise ValueError(f"{world.config.space.name} is not a space of DARTS cells: choose darts_s2, for instance")
    train.clients_per_round = world.num_clients
    check_training(train, "method.train", world.num_clients)
    if train.pull < 0 or train.search_every < 1 or train.search_from < 0:
        raise ValueError("method.train: pull and search_from must be 0 or more, search_every at least 1")
    if not world.data.sizes("validation").all():
        raise ValueError(
            f"data.validation_share={world.config.data.validation_share:g} leaves a silo without validation samples to "
            "search with: raise it, or give each silo more samples"
        )
    turns = len(range(train.search_from, train.rounds, train.search_every))
    left = 2 * max(0, len(space.edges("normal")) - turns)
    if left:
        logger.warning(
            "%d of %d edges will not be searched before the last round: lower search_from or search_every, or train "
            "for more rounds",
            left,
            len(space.options),
        )
    return space


def everybody(world: World) -> Cohort:
    """All silos, in every round."""
    return Cohort(tuple(range(world.num_clients)), 1.0, "all silos")


class SpiderStage:
    """Averages the shared model; every silo's own is in its state."""

    name = "spider"

    def __init__(self, world: World, config: SpiderTrainingConfig, space: DartsSpace) -> None:
        self.world, self.config, self.space = world, config, space

    def begin(self, state: RunState) -> RunState:
        """Fresh shared weights."""
        generator = torch_stream(self.world.config.seed_for("initialisation"), SUPERNET)
        return state.with_bag(SUPERNET, self.space.initial_weights(generator))

    def rounds_left(self, state: RunState) -> int:
        """Rounds still to come."""
        return self.config.rounds - state.round

    def _is_search_round(self, round_: int) -> bool:
        return round_ >= self.config.search_from and (round_ - self.config.search_from) % self.config.search_every == 0

    def plan(self, state: RunState) -> Plan:
        """The same task for every silo; where each stands is in its own state."""
        world, round_, config = self.world, state.round, self.config
        local = LocalSGD.of(config, round_, augment=world.config.data.augment != "none")
        scored = config.evaluate_every > 0 and round_ % config.evaluate_every == 0
        task = TrainPair(local, config.pull, self._is_search_round(round_), scored, weighting=config.weighting)
        cohort = everybody(world)
        ordered = world.in_plan_order(cohort.client_ids)
        assignments = [world.assign(self.name, round_, cohort, c, task) for c in ordered]
        return Plan(assignments, SUPERNET, {"lr": learning_rate(config, round_)})

    def merge(self, state: RunState, _plan: Plan, result: RoundResult) -> Merged:
        """Averages the shared weights by samples."""
        weights = result.sums.finish(state.weights(SUPERNET), self.config.min_contributors)
        return Merged(state.with_bag(SUPERNET, weights), evaluation_rows(result.reports))

    def end(self, state: RunState) -> Merged:
        """Nothing more to do."""
        return Merged(state)


class PersonalEvaluationStage:
    """Every silo scores its own model on its own test share: one round, and the only one that reads test data."""

    name = "evaluation"

    def __init__(self, world: World) -> None:
        self.world = world

    def begin(self, state: RunState) -> RunState:
        """Nothing to prepare."""
        return state

    def rounds_left(self, state: RunState) -> int:
        """One."""
        return 1 - state.round

    def plan(self, state: RunState) -> Plan:
        """A measurement, not a round of the simulated federation: nobody drops out of it."""
        cohort = everybody(self.world)
        planned = [
            self.world.assign(self.name, state.round, cohort, c, ScorePersonal("test"))
            for c in self.world.in_plan_order(cohort.client_ids)
        ]
        return Plan([replace(a, dropped="", deadline_s=None, reads_test=True) for a in planned], SUPERNET)

    def merge(self, state: RunState, _plan: Plan, result: RoundResult) -> Merged:
        """The silos' scores."""
        return Merged(state, evaluation_rows(result.reports))

    def end(self, state: RunState) -> Merged:
        """Nothing more to do."""
        return Merged(state)


def stages(config: SpiderConfig, world: World) -> list[Stage]:
    """Training with the search in it, then the evaluation."""
    return [SpiderStage(world, config.train, check(config, world)), PersonalEvaluationStage(world)]
