"""The configurations of a scale's settings, and the data sets that they need."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fedloom.experiments.reproduce.fields import read_yaml
from fedloom.experiments.reproduce.schema import EXPERIMENT, Scale
from fedloom.experiments.runs.overrides import ENDINGS, override_text
from fedloom.experiments.runs.presets import CONF, PRESET

DATASET = "data.dataset="
DEFAULT_DATASET = "digits"


def overrides_of(scale: Scale, setting: str) -> list[str]:
    """The overrides of one setting, as `key=value`; a preset of its own replaces that of the scale."""
    own = [f"{key}={override_text(value)}" for key, value in scale.settings[setting].items()]
    chosen = [override for override in own if override.startswith(PRESET)]
    others = [override for override in own if override not in chosen]
    return [*(chosen or [f"{PRESET}{scale.experiment}"]), *scale.overrides, *others]


def dataset_of(scale: Scale, setting: str) -> str:
    """The data set of a setting, without composing its configuration, which takes a tenth of a second."""
    overrides = overrides_of(scale, setting)
    given = [override.removeprefix(DATASET) for override in overrides if override.startswith(DATASET)]
    return given[-1] if given else dataset_in(overrides[0].removeprefix(PRESET))


def part_of(scale: Scale, setting: str) -> tuple[str, str, str]:
    """The item, the preset and the data set of a setting: those with the same ones are one ablation."""
    preset = str(scale.settings[setting].get(EXPERIMENT, scale.experiment))
    return scale.run_by[setting], preset, dataset_of(scale, setting)


@cache
def dataset_in(preset: str) -> str:
    """The data set that a preset chooses, itself or through the preset that it begins with."""
    file = Path(preset) if preset.endswith(ENDINGS) else CONF / "experiment" / f"{preset}.yaml"
    values: Any = read_yaml(file)
    own = values.get("data", {}).get("dataset")
    if own is not None:
        return str(own)
    before = [each for each in values.get("defaults", []) if isinstance(each, str) and each != "_self_"]
    return dataset_in(before[-1]) if before else DEFAULT_DATASET


def missing_data(dataset: str, overrides: Sequence[str] = ()) -> str:
    """What is missing of a data set of fedloom's on this machine, and where it belongs; empty if nothing is.

    `overrides` may say where the originals lie (`data.root=FOLDER`).
    """
    from fedloom.platform.data.config import DataConfig
    from fedloom.platform.data.sources import DATASETS

    known: Mapping[str, Any] = DATASETS.known
    root = next((o.partition("=")[2] for o in reversed(overrides) if o.startswith("data.root=")), None)
    if dataset not in known or dataset in ("folder", "npz") or "data.download=true" in overrides:
        return ""
    config = DataConfig(dataset=dataset)
    config.root = root if root is not None else config.root
    try:
        known[dataset](config)
    except ValueError as error:
        return str(error)
    return ""
