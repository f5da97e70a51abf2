"""The facts of every run: identity, status, seeds, versions and times."""

import json
from collections.abc import Sequence
from typing import Any

from fedloom.experiments.analysis.intervals import is_absent
from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.analysis.tables import Tables, configuration
from fedloom.experiments.report.pages.content import RunFacts
from fedloom.experiments.report.parts.numbers import ABSENT
from fedloom.platform.plugins import called
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.results.status import Status, read_status


def facts_of(tables: Tables, settings: Sequence[Setting]) -> tuple[RunFacts, ...]:
    """The facts of each run; they include the name of its setting if there are several settings."""
    named = {run_id: s.name for s in settings for run_id in s.run_ids} if len(settings) > 1 else {}
    return tuple(_facts(tables, paths, named.get(paths.run_id)) for paths in tables.paths)


def _facts(tables: Tables, paths: RunPaths, setting: str | None) -> RunFacts:
    found = tables.runs[tables.runs["run_id"] == paths.run_id].to_dict(orient="records")
    row: dict[str, Any] = {str(k): v for k, v in found[0].items()} if found else {}
    facts = [("experiment", paths.experiment), ("run", paths.run_id), ("status", state_of(tables, paths))]
    facts += [(key, _words(row.get(key))) for key in ("name", "tags") if not is_absent(row.get(key))]
    facts += [("setting", setting)] if setting is not None else []
    facts += [(name, called(_plain(row.get(name)))) for name in ("method", "space", "dataset")]
    names = ("seeds", "versions", "source_hash", "partition_hash")
    facts += [(name.replace("_", " "), _plain(row.get(name))) for name in names]
    facts += [(name, _time(row.get(name))) for name in ("started", "ended")]
    if not is_absent(row.get("error")):
        facts.append(("error", str(row["error"])))
    return RunFacts(paths.run_id, tuple(facts), json.dumps(configuration(tables, paths.run_id), indent=1))


def _words(text: Any) -> str:
    """A text, or the texts of a JSON list."""
    return ", ".join(json.loads(text)) if str(text).startswith("[") else str(text)


def _time(value: Any) -> str:
    return ABSENT if is_absent(value) else f"{value:%Y-%m-%d %H:%M:%S} UTC"


def _plain(text: Any) -> str:
    """Formats a JSON object as "name value, name value"; other text stays as it is."""
    if is_absent(text):
        return ABSENT
    if not str(text).startswith("{"):
        return str(text)
    return ", ".join(f"{name} {value}" for name, value in json.loads(str(text)).items())


def status_of(paths: RunPaths) -> Status | None:
    """The run's status file; None without one, as in a copied folder, for which the table `runs` suffices."""
    try:
        return read_status(paths.status)
    except ValueError:
        return None


def state_of(tables: Tables, paths: RunPaths) -> str:
    """The run's current state, from its status file, else from the table `runs`, without whose row no run is done."""
    status = status_of(paths)
    known = tables.runs.loc[tables.runs["run_id"] == paths.run_id, "status"].dropna()
    row = str(known.iloc[0]) if len(known) else "unknown"
    if status is None:
        return row
    return "interrupted" if status.state == "done" != row else status.state
