"""Methods by the name of their configuration."""

from fedloom.platform.methods import fedavg, fedoras, spider, superfednas
from fedloom.platform.stage import Stage
from fedloom.platform.world import World

CONFIGS: dict[str, type] = {
    "fedoras": fedoras.FedorASConfig,
    "superfednas": superfednas.SuperFedNASConfig,
    "spider": spider.SpiderConfig,
    "fedavg": fedavg.FedAvgConfig,
}
"""The configuration class of every method."""


def build_stages(world: World) -> list[Stage]:
    """The stages of the configured method, checked; ValueError for settings that cannot run."""
    config = world.config.method
    if isinstance(config, fedoras.FedorASConfig):
        return fedoras.stages(config, world)
    if isinstance(config, superfednas.SuperFedNASConfig):
        return superfednas.stages(config, world)
    if isinstance(config, spider.SpiderConfig):
        return spider.stages(config, world)
    if isinstance(config, fedavg.FedAvgConfig):
        return fedavg.stages(config, world)
    raise ValueError(f"no method was configured: choose method={' or method='.join(CONFIGS)}")
