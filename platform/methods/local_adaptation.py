"""Local adaptation (Cheng et al. 2021): FedAvg, then every silo fine-tunes the shared model on its own data.

Settings of SPIDER, App. B.1.
"""

from dataclasses import dataclass, field
from typing import Annotated

from fedloom.platform.clients.networks import Subnet
from fedloom.platform.federation.algorithm import Method, Stage
from fedloom.platform.federation.world import World
from fedloom.platform.methods.scoring import AdaptAndScore
from fedloom.platform.methods.silo_stages import SiloTraining
from fedloom.platform.methods.silos import (
    AdaptationConfig,
    SiloTrainingConfig,
    adaptation,
    checked_silos,
    fedavg_of,
    fresh_subnet,
)
from fedloom.platform.settings import NOT_EMPTY


@dataclass
class LocalAdaptationConfig:
    """FedAvg, then adaptation on every silo."""

    name: str = "local_adaptation"
    architecture: Annotated[str | None, NOT_EMPTY, "options such as 0-0-3; null: the space's first"] = None
    train: SiloTrainingConfig = field(default_factory=SiloTrainingConfig)
    adapt: AdaptationConfig = field(default_factory=AdaptationConfig)


def stages(config: LocalAdaptationConfig, world: World) -> list[Stage]:
    """FedAvg, then the evaluation of the shared and the adapted model on every silo's test data."""
    train, rules = config.train, checked_silos(world, config.train)
    subnet = Subnet(world.architecture(config.architecture, "method.architecture"), stand_alone=True)
    task = AdaptAndScore(subnet, adaptation(world, config.adapt, train), train.use_validation)
    training = SiloTraining(
        *(world, train, rules),
        name=config.name,
        initial=fresh_subnet(world, subnet),
        tasks=fedavg_of(subnet, train),
        test=lambda _state: task,
    )
    return training.and_evaluation()


METHOD = Method(LocalAdaptationConfig, stages, kind="silos", lacks=("candidates", "models"))
