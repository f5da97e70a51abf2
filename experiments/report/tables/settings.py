"""Table of the settings of a report and the keys in which they differ."""

from collections.abc import Sequence

from fedloom.experiments.analysis.settings import NOT_SET, Setting, value_text
from fedloom.experiments.report.parts.block import Block
from fedloom.experiments.report.parts.numbers import ABSENT


def settings_block(settings: Sequence[Setting]) -> Block:
    """One row per setting with its differences, runs and number of seeds; no rows if there is only one setting."""
    rows = [(s.name, _differences(s), ", ".join(s.run_ids), str(s.num_seeds)) for s in settings]
    text = (
        "Runs of one experiment whose configurations differ in seeds alone are a setting: numbers are means over its "
        "seeds, and never over settings. Listed are the keys in which an experiment's settings differ; experiments may "
        "differ in anything, see the configurations below.",
    )
    heads = ("setting", "differs in", "runs", "seeds")
    return Block("Settings", text, heads, tuple(rows) if len(rows) > 1 else (), labels=3)


def _differences(setting: Setting) -> str:
    found = [
        f"{key} {NOT_SET}" if value == NOT_SET else f"{key}={value_text(value)}"
        for key, value in setting.differences.items()
    ]
    return ", ".join(found) or ABSENT
