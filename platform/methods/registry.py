"""The registry of methods by name."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from fedloom.platform.federation.stage import Stage
from fedloom.platform.federation.world import World
from fedloom.platform.methods.method import Method, SharedTraining
from fedloom.platform.plugins import PluginError, Shipped, blaming, is_import_path, resolve
from fedloom.platform.settings import check_settings

_PLACES: Mapping[str, tuple[str, ...]] = {
    "tiered": ("fedoras", "fedavg"),
    "elastic": ("superfednas",),
    "silo": (
        "spider",
        "local_adaptation",
        "ditto",
        "per_fedavg",
        "knn_per",
        "fedmn",
        "global_nas",
        "fednas",
        "fedpnas",
    ),
}

METHODS: Mapping[str, Method] = Shipped(
    {name: f"fedloom.platform.methods.{family}.{name}:METHOD" for family, names in _PLACES.items() for name in names}
)
"""The built-in methods, each imported on demand."""


def find_method(name: str) -> Method:
    """The method of that name, or a user's own by its import path `module:METHOD`.

    Raises PluginError for an unknown method, or an object that is no `Method`.
    """
    found: Any = resolve("method", name, METHODS)
    if not isinstance(found, Method):
        raise PluginError(
            f"method {name!r} is {type(found).__name__}: give the import path of a Method, see "
            "fedloom.platform.methods.method"
        )
    if is_import_path(name):
        _check_config(name, found.config)
    return found


def _check_config(name: str, config: Any) -> None:
    if not (isinstance(config, type) and is_dataclass(config) and "name" in {f.name for f in fields(config)}):
        raise PluginError(f"method {name!r}: its config must be a dataclass with a field `name: str`")
    with blaming("method", name):
        config()


def method_of(config: Any) -> Method:
    """The method of a configuration; ValueError if it is None."""
    if config is None:
        raise ValueError(f"no method was configured: choose method={' or method='.join(METHODS)}")
    return find_method(config.name)


def build_stages(world: World) -> list[Stage]:
    """The stages of the configured method; ValueError for invalid settings."""
    config = world.config.method
    method = method_of(config)
    check_settings(config, "method.")
    if not is_import_path(config.name):
        return method.stages(config, world)
    with blaming("method", config.name, spare=ValueError):
        stages = method.stages(config, world)
    for stage in stages:
        missing = [
            part for part in ("name", "begin", "rounds_left", "plan", "merge", "end") if not hasattr(stage, part)
        ]
        if missing:
            raise PluginError(f"method {config.name!r}: its stage {type(stage).__name__} has no {', '.join(missing)}")
    return stages


def shared_training(config: Any) -> SharedTraining | None:
    """The training that runs of this method's configuration can share; None if there is none."""
    return method_of(config).shared_training(config)
