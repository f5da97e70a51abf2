"""How far runs had computed when they were struck, and where they went on.

What a run prints says nothing of this, since it prints a round when that is safe. Its status names the round at work.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedloom.platform.results.paths import RunPaths, list_runs
from fedloom.platform.results.status import read_status
from fedloom.platform.results.tables import read_table

_ROUND = re.compile(r"\S+ \S+ (\S+) +(\d+)/\d+ ")
"""A round in a run's log, which counts rounds from 1."""
Round = tuple[str, int]
"""A round's stage, and its number from 0."""


@dataclass(frozen=True)
class Reached:
    """The round at which a run was at work, None before the first one, and the rounds that its log named as safe."""

    run: RunPaths
    at_work: Round | None
    safe: int


def reached(results: Path) -> list[Reached]:
    """How far every run under the results folder is; their processes must have ended."""
    return [_reached(run) for run in list_runs(results) if run.status.exists()]


def _reached(run: RunPaths) -> Reached:
    status = read_status(run.status)
    return Reached(run, (status.stage, status.round) if status.stage else None, len(logged(run)))


def logged(run: RunPaths) -> list[Round]:
    """The rounds in a run's log, of all processes that have worked on it."""
    log = run.logs / "console.log"
    found = [_ROUND.match(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [(match[1], int(match[2]) - 1) for match in found if match]


def rounds_again(before: Sequence[Reached]) -> int:
    """The rounds that were computed to their end and then once more, of runs that have ended since.

    A round that was at work is not among them. Of a run that writes a checkpoint after every round it is at most one,
    the round that was being stored while the next one was at work.
    """
    return sum(_again(each) for each in before)


def _again(before: Reached) -> int:
    rounds = logged(before.run)
    later = rounds[before.safe :]
    if before.at_work is None or not later:
        return 0
    table = read_table(before.run.root, "rounds", run_id=before.run.run_id)
    order = list(zip(table["stage"], table["round"], strict=True))
    return max(0, order.index(before.at_work) - order.index(later[0]))


def safe_again(results: Path) -> int:
    """The rounds that a run's log names as safe more than once."""
    return sum(len(rounds) - len(set(rounds)) for rounds in map(logged, list_runs(results)))
