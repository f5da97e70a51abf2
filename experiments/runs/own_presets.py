"""The user's own presets, `experiment=./mine.yaml`, which may extend one of fedloom's and choose any method."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from fedloom.experiments.runs.overrides import ENDINGS
from fedloom.experiments.runs.presets import CHOICE, PRESET, experiments, method_in
from fedloom.platform.methods.registry import METHODS
from fedloom.platform.plugins import is_import_path, nearest
from fedloom.platform.results.files import check_name
from fedloom.platform.words import in_words

GROUP = "own"
"""The subgroup of Hydra's group `experiment` that holds the user's own presets."""


@dataclass(frozen=True)
class OwnPreset:
    """One of the user's own presets, registered with Hydra.

    Attributes:
        choice: the override that chooses it.
        methods: the methods that it and the presets that it extends choose.
    """

    choice: str
    methods: tuple[str, ...]


def is_own(override: str) -> bool:
    """Whether an override names one of the user's own presets."""
    return override.startswith(PRESET) and override.endswith(ENDINGS)


def own_preset(override: str) -> OwnPreset:
    """Reads the preset file and registers it with Hydra; ValueError in one line for a file that is no preset."""
    path = override.removeprefix(PRESET)
    preset = _read(override, Path(path))
    name = check_name("experiment", Path(path).stem)
    preset.setdefault("experiment", name)
    if isinstance(method := preset.get("method"), str):
        raise ValueError(f"{override}: method is a text: choose it by defaults: [{{{CHOICE}: {method}}}]")
    defaults = _defaults(override, preset)
    preset.defaults = defaults if "_self_" in defaults else [*defaults, "_self_"]
    ConfigStore.instance().store(group=f"experiment/{GROUP}", name=name, node=preset, package="_global_")
    return OwnPreset(f"{PRESET}{GROUP}/{name}", tuple(_methods(preset.get("defaults"))))


def _read(override: str, path: Path) -> DictConfig:
    try:
        preset = OmegaConf.load(path)
    except FileNotFoundError:
        raise ValueError(f"{override}: there is no such file") from None
    except MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise ValueError(f"{override}: cannot be read as YAML: {error.problem}{line}") from error
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        why = in_words(error) if isinstance(error, OSError) else str(error).splitlines()[0]
        raise ValueError(f"{override}: cannot be read as YAML: {why}") from error
    if not isinstance(preset, DictConfig):
        raise ValueError(f"{override}: holds no keys; write a preset like fedloom's own")
    return preset


def _defaults(override: str, preset: DictConfig) -> list[Any]:
    """The preset's defaults list in Hydra's form: the presets of fedloom that it extends, and its choice of method."""
    defaults = preset.get("defaults")
    if not isinstance(defaults, ListConfig | None):
        raise ValueError(f"{override}: defaults is {defaults!r:.60}: give a list, such as [fedavg_digits]")
    for default in defaults or ():
        if isinstance(default, DictConfig):
            _check_method(override, default)
        elif default not in ("_self_", *experiments()):
            close = nearest(str(default), experiments())
            raise ValueError(f"{override}: defaults has {default!s:.60}, which is no preset of fedloom's{close}")
    return [f"/experiment/{d}@_global_" if isinstance(d, str) and d != "_self_" else d for d in defaults or ()]


def _check_method(override: str, default: DictConfig) -> None:
    if [*default] != [CHOICE]:
        raise ValueError(f"{override}: defaults chooses {', '.join(map(str, default))}: it may choose only {CHOICE!r}")
    method = str(default[CHOICE])
    if method not in METHODS and not is_import_path(method):
        close = nearest(method, [*METHODS])
        raise ValueError(f"{override}: defaults chooses the method {method!r}, which is not there{close}")


def _methods(defaults: Any) -> Iterator[str]:
    for default in defaults or ():
        if isinstance(default, DictConfig):
            yield str(default[CHOICE])
        elif default != "_self_":
            yield method_in(str(default).removeprefix("/experiment/").removesuffix("@_global_"))
