"""Where the presets lie."""

from pathlib import Path

CONF = Path(__file__).resolve().parent.parent / "conf"


def ablations() -> list[str]:
    """Names of the ready-made ablations."""
    return sorted(file.stem for file in (CONF / "ablation").glob("*.yaml"))


def experiments() -> list[str]:
    """Names of the presets."""
    return sorted(file.stem for file in (CONF / "experiment").glob("*.yaml"))
