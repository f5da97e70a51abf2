"""What the board shows of chosen runs, as JSON values: curves, clients, fronts, ablations, configurations.

Each view is a function of results that `Reader` has read, and reads a run's tables again only when their files changed.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from fedloom.experiments.analysis.ablation import ablation_frame, axis_value
from fedloom.experiments.analysis.outcomes import OUTCOMES
from fedloom.experiments.analysis.settings import NOT_SET, differing, essential, flat, names_apart, value_text
from fedloom.experiments.analysis.subnets import decoded
from fedloom.experiments.analysis.tables import (
    EVALUATION,
    GAINS,
    SEARCH,
    TIERS,
    Tables,
    by_stage,
    load_paths,
    natural,
    real_rounds,
    with_training,
)
from fedloom.experiments.board.index import LONGEST, Stamps, plain, read_columns, stamps_of
from fedloom.experiments.store.ablations import PLAN, Ablation, read_ablation
from fedloom.experiments.store.trials import ENDS, trial_states
from fedloom.platform.results.files import from_json, stamp_of
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.results.tables import COLUMNS, TABLES, unit_of
from fedloom.platform.words import said, shown

MOST_CACHED_BYTES = 1 << 28
"""Memory for tables that were read before, 256 MiB."""
MOST_ROWS = 400_000
"""Rows of clients in one heat map; of more, the last rounds are shown."""
UNREADABLE = (ValueError, OSError, KeyError, TypeError, AttributeError, pa.ArrowException)
"""What damaged or foreign files raise; the page says it in the run's place."""


class Reader:
    """Reads columns of runs' tables and remembers them until their files change; for several threads."""

    def __init__(self, most_bytes: int = MOST_CACHED_BYTES) -> None:
        self._most_bytes = most_bytes
        self._known: OrderedDict[Any, tuple[Stamps, Any, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.read = 0
        """The number of times that files were read."""

    def table(self, paths: RunPaths, table: str, columns: tuple[str, ...]) -> pa.Table:
        """The columns of a run's table, as `read_columns` gives them."""
        stamps = stamps_of(paths, table)
        return self.value((paths, table, columns), stamps, lambda: _sized(read_columns(paths, table, columns)))

    def value(self, key: Any, stamps: Stamps, make: Callable[[], tuple[Any, int]]) -> Any:
        """What `make` returned beside its size in bytes when the files had these stamps."""
        with self._lock:
            if key in self._known and self._known[key][0] == stamps:
                self._known.move_to_end(key)
                return self._known[key][1]
        value, size_bytes = make()
        with self._lock:
            self.read += 1
            self._known[key] = (stamps, value, size_bytes)
            self._known.move_to_end(key)
            while sum(known[2] for known in self._known.values()) > self._most_bytes and len(self._known) > 1:
                self._known.popitem(last=False)
        return value

    def configuration(self, paths: RunPaths) -> dict[str, Any]:
        """The configuration that a run recorded; empty if it ended before that."""
        return dict(self.value((paths, "config"), stamps_of(paths, "runs"), partial(_configuration, paths)))


def _sized(table: pa.Table) -> tuple[pa.Table, int]:
    return table, table.nbytes


def _configuration(paths: RunPaths) -> tuple[dict[str, Any], int]:
    texts = [text for text in read_columns(paths, "runs", ("config",))["config"].to_pylist() if text]
    values = from_json(texts[0], paths.table("runs")) if texts else {}
    if not isinstance(values, dict):
        raise ValueError(f"{paths.table('runs')}: the recorded configuration is no object")
    return values, len(texts[0]) if texts else 0


# -- names -------------------------------------------------------------------------------------------------------------


def labels(reader: Reader, runs: Sequence[RunPaths]) -> dict[str, str]:
    """A name for each run: the keys and values by which its configuration differs from those of the others.

    Seeds count, because a curve is of one run. Runs that differ in nothing, and damaged ones, are called by their id.
    """
    configs: dict[str, dict[str, Any]] = {}
    for paths in runs:
        try:
            config = reader.configuration(paths)
            seeds = {key: value for key, value in flat(config) if key.split(".")[0] in ("seed", "seeds")}
            configs[paths.run_id] = {"experiment": paths.experiment, **essential(config), **seeds} if config else {}
        except UNREADABLE:
            configs[paths.run_id] = {}
    whole = [run_id for run_id, config in configs.items() if config]
    named = dict(zip(whole, names_apart([configs[run_id] for run_id in whole], whole), strict=True))
    return {run_id: shown(named.get(run_id) or run_id, most=LONGEST) for run_id in configs}


def differences(reader: Reader, runs: Sequence[RunPaths]) -> dict[str, Any]:
    """The configurations of runs side by side: a row per key with each run's value as text, and whether they differ."""
    configs, problems = [], {}
    for paths in runs:
        try:
            configs.append(dict(flat(reader.configuration(paths))))
        except UNREADABLE as error:
            configs.append({})
            problems[paths.run_id] = said(error)
    differ = set(differing(configs)) if configs else set()
    keys = sorted({key for config in configs for key in config}, key=natural)
    rows = [
        {
            "key": shown(key, most=LONGEST),
            "values": [shown(value_text(c.get(key, NOT_SET)), most=2000) for c in configs],
            "differs": key in differ,
        }
        for key in keys
    ]
    return {"runs": [paths.run_id for paths in runs], "rows": rows, "problems": problems}


def facts(reader: Reader, paths: RunPaths) -> dict[str, Any]:
    """A run's row of the table `runs` without its configuration, the number of rows of its tables, and its report."""
    names = tuple(name for name in TABLES["runs"].names if name != "config")
    values: dict[str, Any] = {"facts": [], "rows": {}, "problem": None, "report": has_report(paths.root, paths.run_id)}
    try:
        for row in reader.table(paths, "runs", names).to_pylist()[:1]:
            values["facts"] = [
                {"name": name, "value": shown(str(plain(value)), most=2000), "meaning": COLUMNS["runs"][name].meaning}
                for name, value in row.items()
                if value is not None
            ]
        for table in ("rounds", "clients", "candidates", "evaluations", "models"):
            values["rows"][table] = reader.table(paths, table, ("round",)).num_rows
        values["models"] = _records(reader.table(paths, "models", ("stage", "tier", "architecture", "macs", "parameters")))
    except UNREADABLE as error:
        values["problem"] = said(error)
    return values


def _records(table: pa.Table) -> list[dict[str, Any]]:
    return [{name: plain(value) for name, value in row.items()} for row in table.to_pylist()]


def report_file(root: Path, name: str) -> Path:
    """Where `fedloom report` writes the page of a run or an ablation."""
    return root / "reports" / name / "report.html"


def has_report(root: Path, name: str) -> bool:
    """Whether there is such a page; a link is none."""
    file = report_file(root, name)
    return file.is_file() and not any(path.is_symlink() for path in (file, file.parent, file.parent.parent))


# -- curves ------------------------------------------------------------------------------------------------------------

ROUND_COLUMNS = ("stage", "round", "clients_planned", "bytes_down", "bytes_up", "simulated_s")
NOT_CURVES = ("stage", "round", "schedules", "stopped")
OF_ROUNDS = tuple(name for name in COLUMNS["rounds"] if name not in NOT_CURVES)
"""The columns of `rounds` that are drawn over rounds."""
SCORE_COLUMNS = ("stage", "round", "client_id", "split", "metric", "value")
AXES = ("rounds", "megabytes", "hours")
FIRST = ""
"""The stage that a run begins with, whatever its name: it trains."""


def curves(reader: Reader, runs: Sequence[RunPaths], stage: str, metric: str, axis: str) -> dict[str, Any]:
    """A curve per run: the values of a metric over rounds, megabytes, or simulated hours since the stage's beginning.

    `metric` is a column of `rounds`, or WHERE/SPLIT/NAME of what the table `evaluations` holds: measured on the
    server's data or on clients', the mean over what was measured after one round. The answer holds the stages and
    metrics that there are, and per run its label, x and y, and what is wrong with it.
    """
    if axis not in AXES:
        raise ValueError(f"axis={shown(axis)}: there are {', '.join(AXES)}")
    answer: dict[str, Any] = {"stages": [], "metrics": [], "curves": {}}
    stages: dict[str, None] = {}
    metrics: dict[str, None] = {}
    extra = (metric,) if metric in OF_ROUNDS and metric not in ROUND_COLUMNS else ()
    for paths in runs:
        curve: dict[str, Any] = {"x": [], "y": [], "problem": None}
        answer["curves"][paths.run_id] = curve
        try:
            rounds = reader.table(paths, "rounds", (*ROUND_COLUMNS, *extra))
            scores = _scores(reader, paths)
            names = [name for name in rounds["stage"].unique().to_pylist() if name is not None]
            stages |= dict.fromkeys(n for n in names if n.split("/")[0] not in (SEARCH, EVALUATION, GAINS))
            metrics |= dict.fromkeys(scores)
            chosen = stage or next(iter(names), "")
            curve["x"], curve["y"] = _curve(rounds, scores.get(metric), chosen, metric, axis)
        except UNREADABLE as error:
            curve["problem"] = said(error)
    answer["stages"] = [*stages]
    answer["metrics"] = [*({"key": key, "unit": unit_of(key)} for key in (*OF_ROUNDS, *sorted(metrics)))]
    for run_id, label in labels(reader, runs).items():
        answer["curves"][run_id]["label"] = label
    return answer


Scores = Mapping[str, pd.DataFrame]
"""By WHERE/SPLIT/NAME the rows of stage, round and value, a row per round."""


def _scores(reader: Reader, paths: RunPaths) -> Scores:
    stamps = stamps_of(paths, "evaluations")
    known: Scores = reader.value((paths, "scores"), stamps, lambda: _read_scores(paths))
    return known


def _read_scores(paths: RunPaths) -> tuple[Scores, int]:
    table = read_columns(paths, "evaluations", SCORE_COLUMNS)
    is_training = pa.compute.invert(pa.compute.is_in(table["stage"], pa.array([EVALUATION, GAINS])))
    rows = table.filter(is_training).to_pandas()
    where = np.where(rows["client_id"].isna(), "server", "clients")
    key = pd.Series(where, rows.index) + "/" + rows["split"].fillna("none") + "/" + rows["metric"]
    means = rows.groupby([key, "stage", "round"], sort=True)["value"].mean().rename("value").reset_index(level=[1, 2])
    scores = {str(name): group for name, group in means.groupby(level=0, sort=False)}
    return scores, int(means.memory_usage(deep=True).sum())


def _curve(
    table: pa.Table, scores: pd.DataFrame | None, stage: str, metric: str, axis: str
) -> tuple[list[Any], list[Any]]:
    is_stage = pa.compute.equal(table["stage"], stage)
    frame = table.filter(is_stage).sort_by("round")
    rounds = frame["round"].to_numpy()
    planned = frame["clients_planned"].fill_null(1).to_numpy()
    if len(planned) and planned[-1] == 0:  # the row of the final score (see `real_rounds`)
        frame, rounds = frame.slice(0, len(planned) - 1), rounds[:-1]
    if metric in OF_ROUNDS:
        done, values = rounds + 1, frame[metric].to_numpy().astype(float)
    elif scores is not None:
        of_stage = scores[scores["stage"] == stage]
        done, values = of_stage["round"].to_numpy(), of_stage["value"].to_numpy()
    else:
        return [], []
    x = done if axis == "rounds" else _since_the_beginning(frame, rounds, done, axis)
    is_known = np.isfinite(values) & np.isfinite(x.astype(float))
    return x[is_known].tolist(), _short(values[is_known])


def _since_the_beginning(frame: pa.Table, rounds: np.ndarray, done: np.ndarray, axis: str) -> np.ndarray:
    """Megabytes or simulated hours until so many rounds were done; nothing before the first."""
    columns = [frame[name].fill_null(0).to_numpy() for name in ("bytes_down", "bytes_up", "simulated_s")]
    spent = (columns[0] + columns[1]) / 1e6 if axis == "megabytes" else columns[2] / 3600
    if not len(rounds):
        return np.where(done == 0, 0.0, np.nan)
    return np.interp(done, np.concatenate([[0], rounds + 1]), np.concatenate([[0.0], np.cumsum(spent)]))


def _short(values: np.ndarray) -> list[float]:
    """The values in six digits, with which a curve is drawn and an answer is half as long."""
    return [float(f"{value:.6g}") for value in values.tolist()]


# -- clients -----------------------------------------------------------------------------------------------------------

CLIENT_MEASURES = ("metric", "loss", "simulated_s", "bytes_up", "bytes_down", "samples", "staleness", "wall_s")


def clients(reader: Reader, paths: RunPaths, stage: str, measure: str) -> dict[str, Any]:
    """Who took part in which round of a stage, how it ended, and a measure: a column of each, with a row per task.

    `accuracy` is each client's accuracy on its own test data in the end, by client, the mean over models.
    """
    if measure not in ("", *CLIENT_MEASURES):
        raise ValueError(f"measure={shown(measure)}: there are {', '.join(CLIENT_MEASURES)}")
    wanted = ("stage", "round", "client_id", "tier", "status", *([measure] if measure else []))
    table = reader.table(paths, "clients", wanted)
    stages = [name for name in table["stage"].unique().to_pylist() if name is not None]
    chosen = stage if stage in stages else next(iter(stages), "")
    table = table.filter(pa.compute.equal(table["stage"], chosen))
    table = table.filter(pa.compute.is_valid(table["client_id"]))
    dropped = 0
    if table.num_rows > MOST_ROWS:
        first = int(table["round"][table.num_rows - MOST_ROWS].as_py()) + 1
        table, dropped = table.filter(pa.compute.greater_equal(table["round"], first)), first
    status = table["status"].fill_null("").combine_chunks().dictionary_encode()
    tiers = {
        str(client): shown(tier or "", most=LONGEST)
        for client, tier in zip(table["client_id"].to_pylist(), table["tier"].to_pylist(), strict=True)
    }
    return {
        "stages": stages,
        "stage": chosen,
        "dropped": dropped,
        "round": table["round"].to_pylist(),
        "client": table["client_id"].to_pylist(),
        "states": [shown(name, most=LONGEST) for name in status.dictionary.to_pylist()],
        "state": status.indices.to_pylist(),
        "value": [plain(value) for value in table[measure].to_pylist()] if measure else [],
        "tiers": tiers,
        "accuracy": _client_accuracy(reader, paths),
    }


def _client_accuracy(reader: Reader, paths: RunPaths) -> dict[str, float | None]:
    rows = reader.table(paths, "evaluations", SCORE_COLUMNS)
    is_of_client = pa.compute.and_(pa.compute.is_valid(rows["client_id"]), pa.compute.equal(rows["split"], "test"))
    frame = rows.filter(pa.compute.and_(is_of_client, pa.compute.equal(rows["metric"], "accuracy"))).to_pandas()
    frame = frame[frame["stage"] == EVALUATION]
    return {str(int(client)): plain(float(value)) for client, value in frame.groupby("client_id")["value"].mean().items()}


# -- fronts ------------------------------------------------------------------------------------------------------------

CANDIDATE_COLUMNS = (
    "tier", "generation", "architecture", "macs", "parameters", "loss", "metric", "feasible", "on_front", "winner"
)  # fmt: skip


def fronts(reader: Reader, paths: RunPaths) -> dict[str, Any]:
    """The candidates of a run's searches, by tier or target, in the order of their scoring, as columns."""
    table = reader.table(paths, "candidates", CANDIDATE_COLUMNS)
    by_tier: dict[str, dict[str, list[Any]]] = {}
    for row in table.to_pylist():
        if row["feasible"] and row["metric"] is not None and row["macs"] is not None:
            columns = by_tier.setdefault(shown(row["tier"] or "", most=LONGEST), {n: [] for n in CANDIDATE_COLUMNS})
            for name, value in row.items():
                columns[name].append(plain(value))
    return {"tiers": [{"tier": tier, **by_tier[tier]} for tier in sorted(by_tier, key=natural)]}


def architecture(paths: RunPaths, text: str) -> dict[str, str]:
    """An architecture by the names of its operators."""
    return {"text": shown(decoded(load_paths([paths], ["runs"]), paths.run_id, text), most=2000)}


# -- ablations ---------------------------------------------------------------------------------------------------------


def planned(reader: Reader, folder: Path) -> Ablation:
    """The plan in an ablation's folder; ValueError like `read_ablation`."""
    plan: Ablation = reader.value((folder, PLAN), (stamp_of(folder / PLAN),), lambda: (read_ablation(folder), 1 << 20))
    return plan


def ablation_stamps(reader: Reader, root: Path, folder: Path) -> Stamps:
    """The stamps of the files that an ablation's view follows: its plan, its ends, and the trials' statuses."""
    trials = planned(reader, folder).trials
    statuses = (RunPaths(root, trial.experiment, trial.run_id).status for trial in trials)
    return tuple(stamp_of(path) for path in (folder / PLAN, folder / ENDS, *statuses))


def ablation_view(reader: Reader, root: Path, folder: Path) -> dict[str, Any]:
    """An ablation's axes with their values, and its trials: setting, seed, state and outcomes."""
    ablation = planned(reader, folder)
    outcomes, problems = _outcomes(reader, root, ablation)
    trials = [
        {
            "id": s.trial.run_id,
            "index": s.trial.index,
            "seed": s.trial.seed,
            "state": s.state,
            "message": shown(s.message or problems.get(s.trial.run_id, ""), most=LONGEST),
            "setting": {axis: axis_value(value) for axis, value in s.trial.setting.items()},
            "outcomes": outcomes.get(s.trial.run_id, {}),
        }
        for s in trial_states(root, ablation)
    ]
    return {
        "id": ablation.ablation_id,
        "title": shown(ablation.title, most=LONGEST),
        "experiment": ablation.experiment,
        "axes": [{"name": axis, "values": [axis_value(v) for v in values]} for axis, values in ablation.axes.items()],
        "outcomes": [{"name": name, "unit": unit_of(name)} for name in OUTCOMES],
        "trials": trials,
        "report": has_report(root, ablation.ablation_id),
    }


Outcomes = dict[str, float | None]


def _outcomes(reader: Reader, root: Path, ablation: Ablation) -> tuple[dict[str, Outcomes], dict[str, str]]:
    """By run the outcomes, and what is wrong with others; only of trials whose tables changed they are computed."""
    outcomes: dict[str, Outcomes] = {}
    problems: dict[str, str] = {}
    for trial in ablation.trials:
        paths = RunPaths(root, trial.experiment, trial.run_id)
        stamps = stamps_of(paths, "runs", "rounds", "evaluations", "models")
        if stamps:
            try:
                outcomes[trial.run_id] = reader.value((paths, "outcomes"), stamps, partial(_outcomes_of, paths, ablation))
            except UNREADABLE as error:
                problems[trial.run_id] = said(error)
    return outcomes, problems


def _outcomes_of(paths: RunPaths, ablation: Ablation) -> tuple[Outcomes, int]:
    frame = ablation_frame(with_training(load_paths([paths])), ablation, each="run")
    rows = frame.to_dict("records")[:1]
    return {name: plain(float(row[name])) for row in rows for name in OUTCOMES}, 1000
