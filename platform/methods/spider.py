"""SPIDER: every silo searches an architecture of its own while a shared supernet is trained by all of them.

Source: SPIDER (Mushtaq et al.); only the shared weights travel, what a silo keeps stays in its state.
"""

import logging
from dataclasses import dataclass, field

from fedloom.platform.clients.execution import Task
from fedloom.platform.federation.stage import Stage
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.world import World
from fedloom.platform.methods.silo_stage import (
    GainConfig,
    GainStage,
    SiloEvaluation,
    SiloStage,
    SiloTrainingConfig,
    check_gains,
    check_pull,
    check_silos,
    check_validation,
)
from fedloom.platform.silos.perturbation import search_steps
from fedloom.platform.silos.scoring import ScoreOwn
from fedloom.platform.silos.search import KINDS, ArchitectureSearchConfig, searcher_of
from fedloom.platform.silos.spider import TrainSpider
from fedloom.platform.spaces.darts import DartsSpace

logger = logging.getLogger(__name__)

PARAMETER_FREE = ("none", "noise", "skip_connect", "max_pool_3x3", "avg_pool_3x3")


@dataclass
class SpiderTrainingConfig(SiloTrainingConfig):
    """Training of the silos; `pull` is lambda: 0 leaves every silo alone with its data."""

    pull: float = 0.01


@dataclass
class SpiderConfig:
    """Training with the search in it, every silo's own test data, and, if asked for, personalisation gains."""

    name: str = "spider"
    train: SpiderTrainingConfig = field(default_factory=SpiderTrainingConfig)
    search: ArchitectureSearchConfig = field(default_factory=ArchitectureSearchConfig)
    gains: GainConfig = field(default_factory=GainConfig)


def darts_space(world: World) -> DartsSpace:
    """The space; raises ValueError if it is another kind."""
    if not isinstance(world.space, DartsSpace):
        raise ValueError(f"{world.config.space.name} is not a space of DARTS cells: choose darts_s2, for instance")
    return world.space


def check_search(world: World, config: ArchitectureSearchConfig, rounds: int) -> DartsSpace:
    """The space; raises ValueError for a search that cannot run, warns of edges that will not be searched."""
    space = darts_space(world)
    if config.kind not in KINDS:
        raise ValueError(f"method.search.kind={config.kind!r}: allowed are {', '.join(KINDS)}")
    if (
        config.every < 1
        or config.start < 0
        or config.rounds < 1
        or not config.lr > 0
        or not config.validation_weight >= 0
    ):
        raise ValueError(
            "method.search: every and rounds must be at least 1, start and validation_weight 0 or more, lr above 0"
        )
    names = {name for names in space.operator_names for name in names}
    if config.prune_edges and config.kind == "milenas":
        raise ValueError("method.search.prune_edges: edges are pruned by perturbation, not by milenas; leave it out")
    if config.prune_edges and not names & set(PARAMETER_FREE):
        raise ValueError(
            f"method.search.prune_edges needs an operator without parameters ({', '.join(PARAMETER_FREE)}), and the "
            f"space has {', '.join(sorted(names))}: add one to space.operators, or leave it out"
        )
    check_validation(world, "search")
    _warn_of_unsearched(space, config, rounds)
    return space


def _warn_of_unsearched(space: DartsSpace, config: ArchitectureSearchConfig, rounds: int) -> None:
    left = unsearched_edges(space, config, rounds)
    if left and config.kind == "milenas":
        logger.warning(
            "none of the %d edges will be decided before the last round: lower method.search.rounds (%d), or train for "
            "more than %d rounds",
            left,
            config.rounds,
            config.rounds + 1,
        )
    elif left:
        logger.warning(
            "%d of %d edges will not be searched before the last round: lower method.search.start or "
            "method.search.every, or train for more rounds",
            left,
            len(space.options),
        )
    elif config.prune_edges and search_steps(space, prune_edges=True) > _turns(config, rounds):
        logger.warning(
            "not all edges will be pruned before the last round: that takes %d search rounds, there are %d",
            search_steps(space, prune_edges=True),
            _turns(config, rounds),
        )


def _turns(config: ArchitectureSearchConfig, rounds: int) -> int:
    return len(range(config.start, rounds - 1, config.every))


def unsearched_edges(space: DartsSpace, config: ArchitectureSearchConfig, rounds: int) -> int:
    """How many edges will still have a choice before the last round, in which a cosine leaves no rate to train with."""
    if config.kind == "milenas":
        return 0 if rounds > config.rounds + 1 else sum(options > 1 for options in space.options)
    choices = [sum(space.options[d] > 1 for d in space.decisions(t)) for t in ("normal", "reduction")]
    return sum(max(0, count - _turns(config, rounds)) for count in choices)


class SpiderStage(SiloStage):
    """Averages the shared supernet; every silo's own network is in its state."""

    config: SpiderTrainingConfig

    def __init__(self, world: World, config: SpiderConfig, space: DartsSpace) -> None:
        super().__init__(world, config.train, "spider", space.initial_weights)
        self.search = config.search

    def task(self, state: RunState) -> Task:
        """The same for every silo; which phase it is in, its state knows."""
        config, round_ = self.config, state.round
        return TrainSpider(
            self.local(round_),
            config.pull,
            searcher_of(self.search, round_),
            self.is_scored(round_),
            config.use_validation,
            config.weighting,
        )


def stages(config: SpiderConfig, world: World) -> list[Stage]:
    """Training with the search in it, the evaluation, and the gains if there are to be any."""
    check_silos(world, config.train)
    check_pull(config.train.pull)
    space = check_search(world, config.search, config.train.rounds)
    check_gains(config.gains, world.num_clients)
    sequence: list[Stage] = [SpiderStage(world, config, space), SiloEvaluation(world, lambda _state: ScoreOwn())]
    return [*sequence, GainStage(world, config.gains, config.train, space)] if config.gains.epochs else sequence
