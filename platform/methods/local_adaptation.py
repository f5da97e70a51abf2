"""Local adaptation (Cheng et al. 2021): FedAvg, then every silo fine-tunes the shared model on its own data.

Settings of SPIDER, App. B.1.
"""

from dataclasses import dataclass, field

from fedloom.platform.federation.method import Method, Stage
from fedloom.platform.federation.world import World
from fedloom.platform.methods.silos import AdaptAndScore, AdaptationConfig, SubnetConfig, adaptation, subnet_stages


@dataclass
class LocalAdaptationConfig(SubnetConfig):
    """FedAvg, then adaptation on every silo."""

    name: str = "local_adaptation"
    adapt: AdaptationConfig = field(default_factory=AdaptationConfig)


def stages(config: LocalAdaptationConfig, world: World) -> list[Stage]:
    """FedAvg, then the evaluation of the shared and the adapted model on every silo's test data."""
    local = adaptation(world, config.adapt, config.train)
    return subnet_stages(world, config, lambda subnet: AdaptAndScore(subnet, local, config.train.use_validation))


METHOD = Method(LocalAdaptationConfig, stages, kind="silos", lacks=("candidates", "models"))
