"""Personalised baselines on a network of fixed architecture: local adaptation, Ditto, perFedAvg, kNN-Per.

Sources: Cheng et al. 2021; Li et al. 2021; Fallah et al. 2020; Marfoq et al. 2022; settings of SPIDER, App. B.1.
"""

from dataclasses import dataclass, field, replace

from fedloom.platform.clients.execution import Task
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.federation.stage import Stage
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.world import World
from fedloom.platform.methods.silo_stage import (
    SiloEvaluation,
    SiloStage,
    SiloTrainingConfig,
    check_pull,
    check_silos,
    check_validation,
    given_architecture,
)
from fedloom.platform.silos.ditto import TrainDitto
from fedloom.platform.silos.fedavg import TrainShared
from fedloom.platform.silos.knn_per import ScoreNearest
from fedloom.platform.silos.per_fedavg import TrainMeta
from fedloom.platform.silos.scoring import AdaptAndScore, ScoreOwn
from fedloom.platform.spaces.base import Architecture


@dataclass
class AdaptationConfig:
    """What a silo does with the shared model before it uses it: SGD over its own data.

    Without `lr` at the rate that training began with; perFedAvg's is then its inner step's.
    """

    epochs: int = 5
    lr: float | None = 0.01


@dataclass
class LocalAdaptationConfig:
    """FedAvg, then every silo fine-tunes the shared model; `architecture` is the space's first if not given."""

    name: str = "local_adaptation"
    architecture: str | None = None
    train: SiloTrainingConfig = field(default_factory=SiloTrainingConfig)
    adapt: AdaptationConfig = field(default_factory=AdaptationConfig)


@dataclass
class DittoTrainingConfig(SiloTrainingConfig):
    """Training of the silos; `pull` is Ditto's lambda."""

    pull: float = 0.1


@dataclass
class DittoConfig:
    """FedAvg, and beside it every silo's own model, pulled towards the shared one."""

    name: str = "ditto"
    architecture: str | None = None
    train: DittoTrainingConfig = field(default_factory=DittoTrainingConfig)


@dataclass
class PerFedAvgTrainingConfig(SiloTrainingConfig):
    """Training of the silos; the inner step's rate (alpha) is `local_factor` times `lr` and does not decay with it."""

    local_factor: float = 1.0


@dataclass
class PerFedAvgConfig:
    """First-order MAML over the silos, then every silo adapts the shared model."""

    name: str = "per_fedavg"
    architecture: str | None = None
    train: PerFedAvgTrainingConfig = field(default_factory=PerFedAvgTrainingConfig)
    adapt: AdaptationConfig = field(default_factory=lambda: AdaptationConfig(epochs=1, lr=None))


@dataclass
class KnnPerConfig:
    """FedAvg, then every silo mixes in its own nearest samples.

    The mixing weight is chosen on validation data, so that data never joins the training data here.
    """

    name: str = "knn_per"
    architecture: str | None = None
    train: SiloTrainingConfig = field(default_factory=lambda: SiloTrainingConfig(use_validation=False))
    neighbours: int = 10
    scale: float = 1.0


class _FixedStage(SiloStage):
    def __init__(self, world: World, config: SiloTrainingConfig, name: str, architecture: Architecture) -> None:
        space = world.space
        super().__init__(world, config, name, lambda g: space.initial_subnet_weights(architecture, g))
        self.architecture = architecture


class FedAvgStage(_FixedStage):
    """All silos train the shared model."""

    def task(self, state: RunState) -> Task:
        """FedAvg."""
        config, round_ = self.config, state.round
        scored = self.is_scored(round_)
        return TrainShared(self.architecture, self.local(round_), config.use_validation, scored, config.weighting)


class DittoStage(_FixedStage):
    """All silos train the shared model and their own."""

    config: DittoTrainingConfig

    def task(self, state: RunState) -> Task:
        """Ditto."""
        config, round_ = self.config, state.round
        return TrainDitto(
            self.architecture,
            self.local(round_),
            config.pull,
            config.use_validation,
            self.is_scored(round_),
            config.weighting,
        )


class PerFedAvgStage(_FixedStage):
    """All silos train the shared model to be adapted."""

    config: PerFedAvgTrainingConfig

    def task(self, state: RunState) -> Task:
        """First-order MAML."""
        config, local = self.config, self.local(state.round)
        return TrainMeta(
            self.architecture,
            local,
            config.local_factor * config.lr,
            config.use_validation,
            self.is_scored(state.round),
            config.weighting,
        )


def adaptation(world: World, config: AdaptationConfig, train: SiloTrainingConfig, rate: float) -> LocalSGD:
    """The silos' training before the final evaluation, at `rate` if none is given.

    Raises ValueError for settings that cannot run.
    """
    lr = rate if config.lr is None else config.lr
    if config.epochs < 1 or not lr > 0:
        raise ValueError(f"method.adapt.epochs={config.epochs}, lr={config.lr}: must be at least 1, and greater than 0")
    local = LocalSGD.of(train, 0, augment=world.config.data.augment != "none")
    return replace(local, epochs=config.epochs, lr=lr)


def local_adaptation(config: LocalAdaptationConfig, world: World) -> list[Stage]:
    """FedAvg, then adaptation."""
    check_silos(world, config.train)
    architecture = given_architecture(world, config.architecture)
    task = AdaptAndScore(
        architecture, adaptation(world, config.adapt, config.train, config.train.lr), config.train.use_validation
    )
    return [FedAvgStage(world, config.train, config.name, architecture), SiloEvaluation(world, lambda _: task)]


def ditto(config: DittoConfig, world: World) -> list[Stage]:
    """Two models per silo, then the evaluation of the silos' own."""
    check_silos(world, config.train)
    check_pull(config.train.pull)
    architecture = given_architecture(world, config.architecture)
    stage = DittoStage(world, config.train, config.name, architecture)
    return [stage, SiloEvaluation(world, lambda _: ScoreOwn(architecture))]


def per_fedavg(config: PerFedAvgConfig, world: World) -> list[Stage]:
    """MAML, then adaptation."""
    check_silos(world, config.train)
    if not config.train.local_factor > 0:
        raise ValueError(f"method.train.local_factor={config.train.local_factor}: must be greater than 0")
    architecture = given_architecture(world, config.architecture)
    task = AdaptAndScore(
        architecture,
        adaptation(world, config.adapt, config.train, config.train.local_factor * config.train.lr),
        config.train.use_validation,
    )
    stage = PerFedAvgStage(world, config.train, config.name, architecture)
    return [stage, SiloEvaluation(world, lambda _: task)]


def knn_per(config: KnnPerConfig, world: World) -> list[Stage]:
    """FedAvg, then neighbours."""
    if len(world.space.input_shape) != 3:
        raise ValueError(f"method=knn_per classifies images, and {world.config.data.dataset} is text")
    check_silos(world, config.train)
    if config.neighbours < 1 or not config.scale > 0:
        raise ValueError(
            f"method.neighbours={config.neighbours}, scale={config.scale}: must be at least 1, and greater than 0"
        )
    if config.train.use_validation:
        raise ValueError("method.train.use_validation: kNN-Per chooses its mixing weight on validation data; set false")
    check_validation(world, "choose the mixing weight")
    architecture = given_architecture(world, config.architecture)
    task = ScoreNearest(architecture, config.neighbours, config.scale)
    return [FedAvgStage(world, config.train, config.name, architecture), SiloEvaluation(world, lambda _: task)]
