"""The board's views of chosen runs, as JSON values: curves, clients, fronts, ablations, configurations.

Each view is a function that gets results from a `Reader`, which rereads a run's tables only if their files changed.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute

from fedloom.experiments.analysis.ablation import ablation_frame, values_of
from fedloom.experiments.analysis.architectures import decoded
from fedloom.experiments.analysis.importances import MORE, NOISE, importances
from fedloom.experiments.analysis.outcomes import OUTCOMES, final_model
from fedloom.experiments.analysis.settings import NOT_SET, differing, essential, flat, names_apart, value_text
from fedloom.experiments.analysis.subnets import FRONT, SAMPLES
from fedloom.experiments.analysis.tables import (
    EVALUATION,
    GAINS,
    METRIC,
    SEARCH,
    TRAINING,
    WITHOUT_CLIENTS,
    load_paths,
    natural,
)
from fedloom.experiments.board.index import LONGEST, UNREADABLE, Stamps, plain, read_columns, stamps_of
from fedloom.experiments.store.ablations import PLAN, Ablation, axis_value, read_ablation
from fedloom.experiments.store.trials import ENDS, trial_states
from fedloom.platform.results.files import from_json, stamp_of
from fedloom.platform.results.paths import RunPaths, runs_called
from fedloom.platform.results.tables import COLUMNS, TABLES, unit_of
from fedloom.platform.words import said, shown

MOST_CACHED_BYTES = 1 << 28
"""Memory for cached tables, 256 MiB."""
MOST_ROWS = 400_000
"""Maximum number of clients' rows in one heat map; beyond it, only the last rounds are shown."""


class Reader:
    """Reads columns of runs' tables and caches them until their files change; thread-safe."""

    def __init__(self, most_bytes: int = MOST_CACHED_BYTES) -> None:
        self._most_bytes = most_bytes
        self._known: OrderedDict[Any, tuple[tuple[Any, ...], Any, int]] = OrderedDict()
        self._size_bytes = 0
        self._lock = threading.Lock()
        self.read = 0
        """The number of times that files were read."""

    def table(self, paths: RunPaths, table: str, columns: tuple[str, ...]) -> pa.Table:
        """The columns of a run's table, as `read_columns` gives them."""
        stamps = stamps_of(paths, table)
        return self.value((paths, table, columns), stamps, lambda: _sized(read_columns(paths, table, columns)))

    def value(self, key: Any, stamps: tuple[Any, ...], make: Callable[[], tuple[Any, int]]) -> Any:
        """The cached value for files with these stamps, or else the one that `make` returns with its size in bytes."""
        value = self.known(key, stamps)
        if value is None:
            value, size_bytes = make()
            self.remember(key, stamps, value, size_bytes)
        return value

    def known(self, key: Any, stamps: tuple[Any, ...]) -> Any:
        """The cached value for files with these stamps; None if there is none."""
        with self._lock:
            if key not in self._known or self._known[key][0] != stamps:
                return None
            self._known.move_to_end(key)
            return self._known[key][1]

    def remember(self, key: Any, stamps: tuple[Any, ...], value: Any, size_bytes: int) -> None:
        """Caches a value made from files with these stamps; evicts the least recently used ones beyond the limit."""
        with self._lock:
            self.read += 1
            self._size_bytes += size_bytes - self._known.pop(key, ((), None, 0))[2]
            self._known[key] = (stamps, value, size_bytes)
            while self._size_bytes > self._most_bytes and len(self._known) > 1:
                self._size_bytes -= self._known.popitem(last=False)[1][2]

    def configuration(self, paths: RunPaths) -> dict[str, Any]:
        """The configuration that a run recorded; empty if it ended before that."""
        config, _ = self.value((paths, "config"), stamps_of(paths, "runs"), partial(_configuration, paths))
        return dict(config)

    def trained_by(self, paths: RunPaths) -> RunPaths:
        """The run whose tables record the supernet's training: itself, unless it took another run's supernet."""
        _, source = self.value((paths, "config"), stamps_of(paths, "runs"), partial(_configuration, paths))
        return next(iter(runs_called(paths.root, source)), paths) if source not in (None, paths.run_id) else paths


def _sized(table: pa.Table) -> tuple[pa.Table, int]:
    return table, table.nbytes


def _configuration(paths: RunPaths) -> tuple[tuple[dict[str, Any], str | None], int]:
    rows = read_columns(paths, "runs", ("config", "supernet_run_id")).to_pylist() or [{}]
    text = rows[0].get("config")
    values = from_json(text, paths.table("runs")) if text else {}
    if not isinstance(values, dict):
        raise ValueError(f"{paths.table('runs')}: the recorded configuration is no object")
    return (values, rows[0].get("supernet_run_id")), len(text or "")


# -- names -------------------------------------------------------------------------------------------------------------


def labels(reader: Reader, runs: Sequence[RunPaths]) -> dict[str, str]:
    """A name for each run: its preset if there are several, and how its configuration differs within the preset.

    Seeds count as differences, because a curve shows one run. Names of equal and of damaged runs end with their id.
    """
    configs: dict[str, dict[str, dict[str, Any]]] = {}
    for paths in runs:
        of_preset = configs.setdefault(paths.experiment, {})
        try:
            config = reader.configuration(paths)
            seeds = {key: value for key, value in flat(config) if key.split(".")[0] in ("seed", "seeds")}
            of_preset[paths.run_id] = {**essential(config), **seeds}
        except UNREADABLE:
            of_preset[paths.run_id] = {}
    names: dict[str, str] = {}
    for preset, of_preset in configs.items():
        head = preset if len(configs) > 1 or len(runs) == 1 else ""
        names |= dict(zip(of_preset, names_apart([*of_preset.values()], [*of_preset], head), strict=True))
    return {run_id: shown(name, most=LONGEST) for run_id, name in names.items()}


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
        values["config"] = [
            [shown(key, most=LONGEST), shown(value_text(value), most=2000)]
            for key, value in flat(reader.configuration(paths))
        ]
        for table in ("rounds", "clients", "candidates", "evaluations", "models"):
            values["rows"][table] = reader.table(paths, table, ("round",)).num_rows
        values["models"] = _records(
            reader.table(paths, "models", ("stage", "tier", "architecture", "macs", "parameters", "file"))
        )
    except UNREADABLE as error:
        values["problem"] = said(error)
    return values


def _records(table: pa.Table) -> list[dict[str, Any]]:
    return [{name: plain(value) for name, value in row.items()} for row in table.to_pylist()]


def report_file(root: Path, name: str) -> Path:
    """Where `fedloom report` writes the page of a run or an ablation."""
    return root / "reports" / name / "report.html"


def has_report(root: Path, name: str) -> bool:
    """Whether that page exists; symbolic links do not count."""
    file = report_file(root, name)
    return file.is_file() and not any(path.is_symlink() for path in (file, file.parent, file.parent.parent))


# -- curves ------------------------------------------------------------------------------------------------------------

ROUND_COLUMNS = ("stage", "round", "clients_planned", "lr", "bytes_down", "bytes_up", "simulated_s")
NOT_CURVES = ("stage", "round", "schedules", "stopped")
OF_ROUNDS = tuple(name for name in COLUMNS["rounds"] if name not in NOT_CURVES)
"""The columns of `rounds` that are drawn over rounds."""
SCORE_COLUMNS = ("stage", "round", "client_id", "split", "metric", "value")
AXES = ("rounds", "megabytes", "hours")
NOT_TRAINING = (SEARCH, EVALUATION, GAINS)
SERVER, CLIENTS, NO_SPLIT = "server", "clients", "none"


def metrics(reader: Reader, runs: Sequence[RunPaths]) -> dict[str, list[str]]:
    """The training stages of these runs, in their order, and the metrics that have curves.

    A metric is a column of `rounds` with values in some run, or WHERE/SPLIT/NAME from the table `evaluations`, where
    WHERE is server or clients, on whose data it was measured.
    """
    stages: dict[str, None] = {}
    columns: set[str] = set()
    scores: set[str] = set()
    for paths in dict.fromkeys(of for run in runs for of in (run, _trained_by(reader, run))):
        with suppress(*UNREADABLE):  # the curves say what is wrong
            known: tuple[list[str], set[str], set[str]] = reader.value(
                (paths, "metrics"), stamps_of(paths, "rounds", "evaluations"), partial(_metrics, paths)
            )
            stages |= dict.fromkeys(known[0])
            columns |= known[1]
            scores |= known[2]
    return {"stages": [*stages], "metrics": [*(name for name in OF_ROUNDS if name in columns), *sorted(scores)]}


def _metrics(paths: RunPaths) -> tuple[tuple[list[str], set[str], set[str]], int]:
    rounds = read_columns(paths, "rounds", ("stage", *OF_ROUNDS))
    stages = [name for name in rounds["stage"].unique().to_pylist() if name and name.split("/")[0] not in NOT_TRAINING]
    columns = {name for name in OF_ROUNDS if rounds[name].null_count < rounds.num_rows}
    table = read_columns(paths, "evaluations", SCORE_COLUMNS)
    where = pa.compute.is_valid(table["client_id"])
    keys = table.select(["stage", "split", "metric"]).append_column("where", where).group_by(
        ["stage", "where", "split", "metric"]
    ).aggregate([])  # fmt: skip
    scores = {
        f"{CLIENTS if row['where'] else SERVER}/{row['split'] or NO_SPLIT}/{row['metric']}"
        for row in keys.to_pylist()
        if str(row["stage"]).split("/")[0] not in NOT_TRAINING
    }
    return (stages, columns, scores), 200 * (len(scores) + len(columns) + len(stages))


def curves(reader: Reader, runs: Sequence[RunPaths], stage: str, metric: str, axis: str) -> dict[str, Any]:
    """Per run the values of a metric over rounds, megabytes, or simulated hours since the stage's beginning.

    `metric` is one of `metrics`; several measurements after one round are averaged. The default stage is the one that
    the run begins with, which may be the training of a supernet that it took from another run. `problem` says why a run
    cannot be read.
    """
    if axis not in AXES:
        raise ValueError(f"axis={shown(axis)}: there are {', '.join(AXES)}")
    by_run: dict[str, Any] = {}
    extra = (metric,) if metric in OF_ROUNDS and metric not in ROUND_COLUMNS else ()
    for paths in runs:
        x: list[float] = []
        y: list[float] = []
        problem = None
        try:
            rounds = reader.table(paths, "rounds", (*ROUND_COLUMNS, *extra))
            of = paths
            if stage in ("", TRAINING) and TRAINING not in rounds["stage"].unique().to_pylist():
                of = _trained_by(reader, paths)
                rounds = rounds if of == paths else reader.table(of, "rounds", (*ROUND_COLUMNS, *extra))
            if rounds.num_rows:
                x, y = _curve(reader, of, rounds, stage or rounds["stage"][0].as_py(), metric, axis)
        except UNREADABLE as error:
            problem = said(error)
        by_run[paths.run_id] = {"x": x, "y": y, "problem": problem}
    return {"curves": by_run}


def _trained_by(reader: Reader, paths: RunPaths) -> RunPaths:
    try:
        return reader.trained_by(paths)
    except UNREADABLE:  # its curve may be readable all the same
        return paths


def _scores(reader: Reader, paths: RunPaths, stage: str, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """The rounds after which a metric of `evaluations` was measured, and its mean after each."""
    where, split, name = [*metric.split("/", 2), "", ""][:3]
    table = reader.table(paths, "evaluations", SCORE_COLUMNS)
    is_split = pa.compute.is_null(table["split"]) if split == NO_SPLIT else pa.compute.equal(table["split"], split)
    is_where = pa.compute.equal(pa.compute.is_valid(table["client_id"]), where == CLIENTS)
    for is_wanted in (pa.compute.equal(table["stage"], stage), pa.compute.equal(table["metric"], name)):
        is_where = pa.compute.and_(is_where, is_wanted)
    rows = table.filter(pa.compute.and_(is_where, is_split))
    means = rows.group_by("round").aggregate([("value", "mean")]).sort_by("round")
    done = means["round"].to_numpy() + (where == CLIENTS)  # a client scores its own model after the round
    return done, means["value_mean"].to_numpy()


def _curve(
    reader: Reader, paths: RunPaths, table: pa.Table, stage: str, metric: str, axis: str
) -> tuple[list[Any], list[float]]:
    frame = table.filter(pa.compute.equal(table["stage"], stage)).sort_by("round")
    planned = frame["clients_planned"].fill_null(1).to_numpy()
    if len(planned) and planned[-1] == 0 < planned.max() and not frame["lr"][-1].is_valid:  # see `real_rounds`
        frame = frame.slice(0, len(planned) - 1)
    rounds = frame["round"].to_numpy()
    if metric in OF_ROUNDS:
        done, values = rounds + 1, frame[metric].to_numpy().astype(float)
    else:
        done, values = _scores(reader, paths, stage, metric)
    x = done.astype(float) if axis == "rounds" else _since_the_beginning(frame, rounds, done, axis)
    is_known = np.isfinite(values) & np.isfinite(x)
    return _short(x[is_known]), _short(values[is_known])


def _since_the_beginning(frame: pa.Table, rounds: np.ndarray, done: np.ndarray, axis: str) -> np.ndarray:
    """Megabytes or simulated hours spent until `done` rounds were completed; 0 before the first."""
    columns = [frame[name].fill_null(0).to_numpy() for name in ("bytes_down", "bytes_up", "simulated_s")]
    spent = (columns[0] + columns[1]) / 1e6 if axis == "megabytes" else columns[2] / 3600
    if not len(rounds):
        return np.where(done == 0, 0.0, np.nan)
    return np.asarray(np.interp(done, np.concatenate([[0], rounds + 1]), np.concatenate([[0.0], np.cumsum(spent)])))


def _short(values: np.ndarray) -> list[float]:
    """The values rounded to seven digits, which is enough for a plot and halves the size of an answer."""
    size = np.abs(values)
    scale = 10.0 ** (6 - np.floor(np.log10(size, where=size > 1e-280, out=np.zeros(len(size)))))
    rounded: list[float] = (np.round(values * scale) / scale).tolist()
    return rounded


# -- clients -----------------------------------------------------------------------------------------------------------

CLIENT_MEASURES = ("metric", "loss", "simulated_s", "bytes_up", "bytes_down", "samples", "staleness", "wall_s")


def clients(reader: Reader, paths: RunPaths, stage: str, measure: str) -> dict[str, Any]:
    """The client tasks of a stage as columns, with a row per task: round, client, final state and a measure.

    `accuracy` is each client's accuracy on its own test data with the final model, by client.
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
    rows = reader.table(paths, "evaluations", (*SCORE_COLUMNS, "model"))
    is_of_client = pa.compute.and_(pa.compute.is_valid(rows["client_id"]), pa.compute.equal(rows["split"], "test"))
    frame = rows.filter(pa.compute.and_(is_of_client, pa.compute.equal(rows["metric"], "accuracy"))).to_pandas()
    frame = frame[frame["stage"] == EVALUATION]
    means = frame[frame["model"] == final_model(frame)].groupby("client_id")["value"].mean()  # over a family's subnets
    return {str(int(client)): plain(float(value)) for client, value in means.items()}


# -- fronts ------------------------------------------------------------------------------------------------------------

CANDIDATE_COLUMNS = (
    "tier", "feasible", "generation", "architecture", "macs", "parameters", "loss", "metric", "on_front", "winner"
)  # fmt: skip
OF_CANDIDATES = CANDIDATE_COLUMNS[2:]


def fronts(reader: Reader, paths: RunPaths) -> dict[str, Any]:
    """The candidates of a run's searches, by tier or target, as columns in the order in which they were scored."""
    table = reader.table(paths, "candidates", CANDIDATE_COLUMNS)
    by_tier: dict[str, dict[str, list[Any]]] = {}
    for row in table.to_pylist():
        if row["feasible"] and row["metric"] is not None and row["macs"] is not None:
            columns = by_tier.setdefault(shown(row["tier"] or "", most=LONGEST), {n: [] for n in OF_CANDIDATES})
            for name in OF_CANDIDATES:
                columns[name].append(plain(row[name]))
    return {"tiers": [{"tier": tier, **by_tier[tier]} for tier in sorted(by_tier, key=_tiers_first)]}


def _tiers_first(name: str) -> tuple[Any, ...]:
    return (name in (SAMPLES, FRONT), *natural(name))  # a predictor's training samples and the overall front


def architecture(paths: RunPaths, text: str) -> dict[str, str]:
    """An architecture as text, with the names of its operators."""
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
    """Outcomes and problems, by run id; computes only the outcomes of trials whose tables changed."""
    outcomes: dict[str, Outcomes] = {}
    problems: dict[str, str] = {}
    changed: dict[RunPaths, Stamps] = {}
    for trial in ablation.trials:
        paths = RunPaths(root, trial.experiment, trial.run_id)
        stamps = stamps_of(paths, "runs", "rounds", "evaluations", "models")
        known = reader.known((paths, "outcomes"), stamps)
        if known is not None:
            outcomes[trial.run_id] = known
        elif stamps:
            changed[paths] = stamps
    try:
        computed = _outcomes_of([*changed], ablation)
    except UNREADABLE:  # a damaged trial does not hide the others
        computed = {}
        for paths in changed:
            try:
                computed |= _outcomes_of([paths], ablation)
            except UNREADABLE as error:
                problems[paths.run_id] = said(error)
    for paths, stamps in changed.items():
        if paths.run_id in computed:
            outcomes[paths.run_id] = computed[paths.run_id]
            reader.remember((paths, "outcomes"), stamps, computed[paths.run_id], 1000)
    return outcomes, problems


def importance_view(reader: Reader, root: Path, folder: Path, measure: str) -> dict[str, Any]:
    """How much each axis, and on a grid each pair of axes, affects an outcome (see `importances`)."""
    if measure not in OUTCOMES:
        raise ValueError(f"measure={shown(measure)}: there are {', '.join(OUTCOMES)}")
    ablation = planned(reader, folder)
    outcomes, _ = _outcomes(reader, root, ablation)
    trials = [trial for trial in ablation.trials if outcomes.get(trial.run_id, {}).get(METRIC) is not None]
    values = [outcomes[trial.run_id][measure] for trial in trials]
    columns: dict[str, Any] = {"seed": [trial.seed for trial in trials], measure: pd.array(values, dtype="float64")}
    for axis in ablation.axes:
        known = [axis_value(trial.setting[axis]) for trial in trials]
        columns[axis] = pd.Categorical(known, categories=values_of(ablation, axis), ordered=True)

    def make() -> tuple[list[Any], int]:
        rows = importances(pd.DataFrame(columns), ablation, measure)
        rows = rows.sort_values(["order", "importance"], ascending=[True, False], key=_seeds_last)
        return rows.to_dict("records"), 1000

    # Cached by values, not by files' stamps: those of running trials change every second, and a forest takes seconds.
    rows = reader.value((folder, "importances", measure), tuple(zip(columns["seed"], values, strict=True)), make)
    return {"measure": measure, "importances": rows}


def _seeds_last(column: "pd.Series[Any]") -> "pd.Series[Any]":
    return column.replace(NOISE, MORE + 1) if column.name == "order" else column


def _outcomes_of(runs: Sequence[RunPaths], ablation: Ablation) -> dict[str, Outcomes]:
    if not runs:
        return {}
    frame = ablation_frame(load_paths(runs, WITHOUT_CLIENTS), ablation, each="run")
    return {str(row["run_id"]): {n: plain(float(row[n])) for n in OUTCOMES} for row in frame.to_dict("records")}
