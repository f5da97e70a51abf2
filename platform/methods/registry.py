"""Methods by the name of their configuration."""

from collections.abc import Callable
from typing import Any

from fedloom.platform.federation.stage import Stage
from fedloom.platform.federation.world import World
from fedloom.platform.methods import fedavg, federated_nas, fedmn, fedoras, personalised, spider, superfednas
from fedloom.platform.methods.shared_training import SharedTraining

_METHODS: dict[type, Callable[[Any, World], list[Stage]]] = {
    fedoras.FedorASConfig: fedoras.stages,
    superfednas.SuperFedNASConfig: superfednas.stages,
    spider.SpiderConfig: spider.stages,
    personalised.LocalAdaptationConfig: personalised.local_adaptation,
    personalised.DittoConfig: personalised.ditto,
    personalised.PerFedAvgConfig: personalised.per_fedavg,
    personalised.KnnPerConfig: personalised.knn_per,
    federated_nas.GlobalNasConfig: federated_nas.global_nas,
    federated_nas.FedNasConfig: federated_nas.fednas,
    federated_nas.FedPnasConfig: federated_nas.fedpnas,
    fedmn.FedMnConfig: fedmn.stages,
    fedavg.FedAvgConfig: fedavg.stages,
}
"""How the stages of every method are built from its configuration."""

_SHARED_TRAINING: dict[type, Callable[[Any], SharedTraining | None]] = {
    fedoras.FedorASConfig: fedoras.shared_training,
    superfednas.SuperFedNASConfig: superfednas.shared_training,
}
"""What the methods whose runs can share their training say about it."""

CONFIGS: dict[str, type] = {config().name: config for config in _METHODS}
"""The configuration class of every method."""


def build_stages(world: World) -> list[Stage]:
    """The stages of the configured method, checked; ValueError for settings that cannot run."""
    config = world.config.method
    if type(config) not in _METHODS:
        raise ValueError(f"no method was configured: choose method={' or method='.join(CONFIGS)}")
    return _METHODS[type(config)](config, world)


def shared_training(method: Any) -> SharedTraining | None:
    """What runs of this method's configuration can share; None if every run trains its own."""
    declared = _SHARED_TRAINING.get(type(method))
    return None if declared is None else declared(method)
