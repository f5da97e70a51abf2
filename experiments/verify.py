"""Checks of everything that a run has stored, for `fedloom verify`."""

import json
from dataclasses import asdict, dataclass

from fedloom.experiments.terminal.output import console, write_json
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.partition import prepared_for
from fedloom.platform.results.checkpoint import load_checkpoint
from fedloom.platform.results.journal import read_journals
from fedloom.platform.results.manifest import has_sealed_checkpoint, manifest_path, problems
from fedloom.platform.results.models import list_models, load_model
from fedloom.platform.results.names import NAMES, Names, read_names
from fedloom.platform.results.parts import count_rows
from fedloom.platform.results.paths import STATE_FILE, RunPaths
from fedloom.platform.results.tables import read_runs
from fedloom.platform.results.writer import ROW_TABLES


@dataclass(frozen=True)
class Verified:
    """What is wrong with a run's files (a line per problem), and what else is to know about them."""

    run_id: str
    problems: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all is what fedloom wrote."""
        return not self.problems


def verified(paths: RunPaths) -> Verified:
    """Checks a run's files, its models, rows and prepared data against what was recorded of them; changes nothing."""
    found: list[str] = []
    for check in (_manifest, _checkpoint, _models, _names, _data):
        try:
            found += check(paths)
        except ValueError as error:
            found.append(str(error))
    return Verified(paths.run_id, tuple(dict.fromkeys(found)), _remarks(paths))


def _remarks(paths: RunPaths) -> tuple[str, ...]:
    if manifest_path(paths).exists() or has_sealed_checkpoint(paths):
        return ()
    if (paths.checkpoint / STATE_FILE).exists():
        return ("no manifest: an earlier version of fedloom wrote this run",)
    return ("no manifest: an earlier version of fedloom wrote this run, or it ended before its first checkpoint",)


def _manifest(paths: RunPaths) -> list[str]:
    return problems(paths)


def _checkpoint(paths: RunPaths) -> list[str]:
    if not (paths.checkpoint / STATE_FILE).exists():
        return []
    position = load_checkpoint(paths.checkpoint).data["position"]
    journalled = read_journals(paths.artifacts)
    return [
        line
        for table in ROW_TABLES
        if (line := _short(paths, table, position.get(table, 0), set(journalled.get(table, {}))))
    ]


def _short(paths: RunPaths, table: str, counted: int, journalled: set[int]) -> str:
    stored = sum(count_rows(path) for path in sorted(paths.table(table).glob("part-*.parquet")))
    lacking = set(range(stored, counted)) - journalled
    if not lacking:
        return ""
    return (
        f"table {table} of {paths.run_id} is short: the checkpoint counts {counted} rows, {stored} are in "
        f"{paths.table(table)} and {counted - stored - len(lacking)} in the journal"
    )


def _models(paths: RunPaths) -> list[str]:
    found = []
    for name in list_models(paths):
        try:
            load_model(paths, name)
        except ValueError as error:
            found.append(str(error))
    return found


def _names(paths: RunPaths) -> list[str]:
    rows = read_runs([paths], "runs", ["name", "tags"]).to_dict("records")
    name, tags = (rows[0][c] if rows and isinstance(rows[0][c], str) else None for c in ("name", "tags"))
    stored, found = Names(name, tuple(json.loads(tags or "[]"))), read_names(paths.artifacts)
    if stored == found:
        return []
    return [
        f"{paths.artifacts / NAMES} says {_said(found)}, the run's row {_said(stored)}: `fedloom resume "
        f"{paths.run_id}` with the name and tags that are meant sets both"
    ]


def _data(paths: RunPaths) -> list[str]:
    """Reads all of the run's prepared data, if its cache is on this machine."""
    rows = read_runs([paths], "runs", ["partition_hash"])["partition_hash"].dropna()
    try:
        cache = json.loads(paths.config.read_text())["data"]["cache"]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # a run of an earlier version, or one whose manifest tells
    folder = prepared_for(DataConfig(cache=cache), rows.iloc[-1]) if len(rows) else None
    if folder is not None:
        Dataset.open(folder).verify()
    return []


def _said(names: Names) -> str:
    return f"name={names.name or 'null'} tags=[{','.join(names.tags)}]"


def show_verified(runs: list[Verified], *, as_json: bool) -> None:
    """Prints a line per problem, and one per whole run; or one JSON object."""
    if as_json:
        write_json({"runs": [{**asdict(run), "whole": run.whole} for run in runs]})
        return
    screen = console()
    for run in runs:
        for line in run.problems:
            screen.print(line)
        said = "whole" if run.whole else f"{len(run.problems)} problems"
        screen.print(f"run {run.run_id}: {'; '.join([said, *run.remarks])}")
