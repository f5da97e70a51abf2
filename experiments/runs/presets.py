"""Where the presets lie."""

import re
from pathlib import Path

CONF = Path(__file__).resolve().parent.parent / "conf"


def ablations() -> list[str]:
    """Names of the ready-made ablations."""
    return sorted(file.stem for file in (CONF / "ablation").glob("*.yaml"))


def experiments() -> list[str]:
    """Names of the presets."""
    return sorted(file.stem for file in (CONF / "experiment").glob("*.yaml"))


def of_method(method: str) -> list[str]:
    """Names of the presets that choose this method."""
    line = re.compile(rf"^ *- override /method: {re.escape(method)}$", re.MULTILINE)
    return [name for name in experiments() if line.search((CONF / "experiment" / f"{name}.yaml").read_text())]
