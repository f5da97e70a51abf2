"""FedMN: a shared modular network, of which every silo uses the modules that a shared router chooses for its data.

Source: Wang et al. 2022 (ICDM), "Personalized Federated Learning via Heterogeneous Modular Networks"; rounds as in
SPIDER, App. B.1. As fedloom reads it:

1. Pre-training: FedAvg of the whole network, every module on; the router neither travels nor is trained.
2. Then, in every round, a silo receives the router, draws its modules, and receives these alone; it trains both, and
   sends both back. A module is averaged over the silos that chose it, by samples; the fixed part and the router over
   all of them.
3. In the end every silo uses what the router chooses without noise, and adapts it to its own data.

Neither a silo's data nor what the router reads of them is ever sent; which modules it chose is.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedloom.platform.clients.execution import Task
from fedloom.platform.federation.stage import Stage
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.world import World
from fedloom.platform.methods.personalised import AdaptationConfig, adaptation
from fedloom.platform.methods.silo_stage import SiloEvaluation, SiloStage, SiloTrainingConfig, check_silos
from fedloom.platform.silos.fedavg import TrainShared
from fedloom.platform.silos.fedmn import ScoreModular, TrainModular
from fedloom.platform.silos.router import initial_router
from fedloom.platform.spaces.kept import KeptSpace


@dataclass
class FedMnTrainingConfig(SiloTrainingConfig):
    """Training of the silos: `rounds` in all, the first `pretraining_rounds` of them with every module on.

    `router_lr` is the router's learning rate, the same in all rounds; `temperature` that of the sigmoid whose gradients
    the gates have: the lower, the less do modules learn that were far from being drawn otherwise.
    """

    pretraining_rounds: int = 500
    router_lr: float = 0.01
    temperature: float = 1.0


@dataclass
class FedMnConfig:
    """Pre-training and training with the router, then every silo's own choice of modules, adapted to its data."""

    name: str = "fedmn"
    train: FedMnTrainingConfig = field(default_factory=FedMnTrainingConfig)
    adapt: AdaptationConfig = field(default_factory=lambda: AdaptationConfig(epochs=1))


class FedMnStage(SiloStage):
    """Averages the modules by who chose them, and the router."""

    config: FedMnTrainingConfig

    def __init__(self, world: World, config: FedMnConfig, space: KeptSpace) -> None:
        classes = world.config.space.num_classes

        def initial(generator: torch.Generator) -> dict[str, Tensor]:
            return {**space.initial_weights(generator), **initial_router(space, classes, generator)}

        super().__init__(world, config.train, config.name, initial)
        self.space = space

    def task(self, state: RunState) -> Task:
        """FedAvg of the whole network first, then of what each silo chooses."""
        config, round_ = self.config, state.round
        local, scored = self.local(round_), self.is_scored(round_)
        if round_ < config.pretraining_rounds:
            return TrainShared(self.space.largest_subspace, local, config.use_validation, scored, config.weighting)
        return TrainModular(
            local, config.router_lr, config.temperature, config.use_validation, scored, config.weighting
        )


def modular_space(world: World) -> KeptSpace:
    """The space; raises ValueError if its decisions cannot keep any number of options."""
    if not isinstance(world.space, KeptSpace):
        raise ValueError(
            f"space.name={world.config.space.name}: fedmn takes a space of modules that are each on or off: choose "
            "resnet18_modular, for instance, or a space of DARTS cells"
        )
    return world.space


def check_fedmn(train: FedMnTrainingConfig) -> None:
    """Raises ValueError for settings that cannot run."""
    if not 0 <= train.pretraining_rounds <= train.rounds:
        raise ValueError(
            f"method.train.pretraining_rounds={train.pretraining_rounds}: must be between 0 and method.train.rounds, "
            f"which are all rounds ({train.rounds})"
        )
    for key, value in (("router_lr", train.router_lr), ("temperature", train.temperature)):
        if not value > 0:
            raise ValueError(f"method.train.{key}={value}: must be greater than 0")


def stages(config: FedMnConfig, world: World) -> list[Stage]:
    """Both phases of training, then the modules chosen for every silo, as shared and adapted."""
    check_silos(world, config.train)
    check_fedmn(config.train)
    space = modular_space(world)
    task = ScoreModular(adaptation(world, config.adapt, config.train, config.train.lr), config.train.use_validation)
    return [FedMnStage(world, config, space), SiloEvaluation(world, lambda _: task)]
