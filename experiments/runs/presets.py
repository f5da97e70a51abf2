"""The presets of experiments and ablations, and the method that each preset chooses."""

from functools import cache
from pathlib import Path

import yaml

CONF = Path(__file__).resolve().parent.parent / "conf"
DEFAULT_METHOD = "fedoras"
"""The method of a run that chooses none, as in `config.yaml`."""
PRESET = "experiment="
"""How a command line chooses a preset."""
CHOICE = "override /method"
"""The entry of a preset's defaults that chooses its method."""


def ablations() -> list[str]:
    """Names of the ablations that ship with fedloom."""
    return sorted(file.stem for file in (CONF / "ablation").glob("*.yaml"))


def experiments() -> list[str]:
    """Names of the presets of experiments."""
    return sorted(file.stem for file in (CONF / "experiment").glob("*.yaml"))


def of_method(method: str) -> list[str]:
    """Names of the presets that choose this method."""
    return [name for name in experiments() if method_in(name) == method]


@cache
def method_in(preset: str) -> str:
    """The method that a preset chooses; the default method if it chooses none or if there is no such preset."""
    file = CONF / "experiment" / f"{preset}.yaml"
    defaults = yaml.safe_load(file.read_text()).get("defaults", []) if file.is_file() else []
    for each in defaults:
        if isinstance(each, dict) and CHOICE in each:
            return str(each[CHOICE])
        if isinstance(each, str) and each != "_self_":
            return method_in(each)
    return DEFAULT_METHOD
