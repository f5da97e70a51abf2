"""What a command line may not hold or holds twice, whichever command it is for, before anything slow is imported."""

import argparse
from pathlib import Path

from fedloom.experiments.runs.spelling import last_values
from fedloom.platform.settings import PATH
from fedloom.platform.words import shown

OVERRIDES = ("overrides", "given")
"""Where commands keep `key=value`."""
RUNS = ("run", "runs", "resume", "retry_failed")
"""Where commands keep runs and ablations."""


def check_typed(args: argparse.Namespace) -> None:
    """Raises ValueError for an impossible path and a run without a name; of a key given twice the last value stays."""
    values = vars(args)
    for option, given in values.items():
        for path in given if isinstance(given, list) else [given]:
            if isinstance(path, Path) and not PATH.holds(str(path)):
                raise ValueError(f"--{option} {shown(path)}: must be {PATH}")
    for option in RUNS:
        given = values.get(option)
        if "" in (given if isinstance(given, list) else [given]):
            raise ValueError("'' names no run and no ablation: give an id, the beginning of one, a name or a tag")
    for option in OVERRIDES:
        if option in values:
            setattr(args, option, last_values(values[option]))
    results = values.get("results")
    if isinstance(results, Path) and results.exists() and not results.is_dir():
        raise ValueError(f"--results {results} is not a folder: give the folder that holds the results, or a URL")
