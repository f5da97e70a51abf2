"""The registry of search spaces by name."""

from collections.abc import Mapping

from fedloom.platform.plugins import Registry, Shipped, is_import_path
from fedloom.platform.settings import component_specs
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.checked import try_space
from fedloom.platform.spaces.space_config import SpaceBuilder, SpaceConfig

_MODULES: Mapping[str, tuple[str, ...]] = {
    "cnn": ("cnn_cifar", "cnn_cifar_wide", "cnn_digits", "cnn_speech"),
    "resnet": ("resnet_elastic", "resnet_elastic_small"),
    "tcn": ("tcn_elastic",),
    "rnn": ("rnn_shakespeare",),
    "darts": ("darts_s1", "darts_s2", "darts_s3", "darts_s4", "darts_full", "darts_s2_small"),
    "resnet18": ("resnet18", "resnet18_small", "resnet34"),
    "darts_v2": ("darts_v2", "darts_v2_small", "fednas_v1"),
    "modular": ("resnet18_modular", "resnet18_modular_small"),
    "width": ("width", "cnn_width", "resnet_width", "lstm_width"),
    "depth": ("cnn_depth", "resnet_depth"),
}

SPACES: Registry[SpaceBuilder] = Registry(
    "space",
    Shipped({name: f"fedloom.platform.spaces.{m}:SPACES" for m, names in _MODULES.items() for name in names}),
    ("config",),
)
"""The builders of spaces."""


def build_space(config: SpaceConfig) -> SearchSpace:
    """Builds the configured search space.

    Raises:
        ValueError: an unknown name (lists the known ones), or a value that the space does not allow.
        PluginError: an import path that does not exist, or an object that is no space.
    """
    builder = SPACES.make(component_specs([(SPACES, config.name)], config.options, "space.options")[0])
    space = builder(config)
    if is_import_path(config.name):
        try_space(space, config)
    return space
