"""What a report says, before it becomes a page or Markdown: facts, tables, pictures, and what is missing."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.frames import (
    ALL_TIERS,
    METRIC,
    communication,
    communication_by_kind,
    failures,
    fairness,
    natural,
    per_tier,
    shown_models,
    tiers_of,
)
from fedloom.experiments.analysis.intervals import estimate, is_absent
from fedloom.experiments.analysis.kinds import elastic_run_ids, is_dry, is_elastic, is_silo, silo_run_ids
from fedloom.experiments.analysis.labels import Labels
from fedloom.experiments.analysis.silos import GAINS
from fedloom.experiments.analysis.subnets import ALONE, SEARCHED, subnet_summaries, targets_of
from fedloom.experiments.analysis.tables import Tables, configuration
from fedloom.experiments.report.costs import cost_comparisons
from fedloom.experiments.report.elastic_blocks import cost_block, subnet_block
from fedloom.experiments.report.picture import Picture
from fedloom.experiments.report.silo_blocks import missing_of_silos, silo_blocks
from fedloom.experiments.report.table import Block, Summary, header_and_rows, note, summarise
from fedloom.experiments.report.words import ABSENT, model_name, percent, seconds, si, stage_name
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.results.status import Status, read_status

MOST_CAUSES = 30
DRY = (
    "a dry run: nothing was trained, so there are no losses, no accuracies and no models; bytes, MACs and "
    "simulated times are those of the assignments"
)


@dataclass(frozen=True)
class RunFacts:
    """A run's identity: names and values, and its configuration as indented JSON."""

    run_id: str
    facts: tuple[tuple[str, str], ...]
    config: str


@dataclass(frozen=True)
class Content:
    """Everything in a report.

    `about` is the heading over the facts of the `runs`; with `refresh_s` the page loads itself again so often.
    `pictures_first` puts them above the tables, which may be long.
    """

    title: str
    runs: tuple[RunFacts, ...]
    missing: tuple[str, ...]
    blocks: tuple[Block, ...]
    pictures: tuple[Picture, ...]
    about: str = "Runs"
    refresh_s: int | None = None
    pictures_first: bool = False


def summaries_of(tables: Tables, bounds: dict[tuple[str, str], float]) -> list[Summary]:
    """The per-tier summaries of the runs, one per experiment."""
    return summarise(per_tier(tables, bounds), fairness(tables))


def blocks_of(tables: Tables, summaries: Sequence[Summary], labels: Labels) -> tuple[Block, ...]:
    """All tables of the report; one that would be empty is left out."""
    blocks = []
    for summary in summaries:
        heads, rows = header_and_rows(summary)
        blocks.append(Block(f"Tiers: {summary.experiment}", (_sentence(note(summary)),), tuple(heads), _cells(rows)))
    blocks += [subnet_block(summary, wide=True) for summary in subnet_summaries(tables, labels)]
    blocks += [cost_block(comparison) for comparison in cost_comparisons(tables, labels)]
    blocks += silo_blocks(tables, wide=True)
    blocks += [_fairness_block(tables), _communication_block(tables, labels), failures_block(tables)]
    return tuple(block for block in blocks if block.rows)


def _sentence(text: str) -> str:
    # A name such as macs=3000000 is no word to begin with a capital.
    first = text.split(maxsplit=1)[0]
    return (text if "=" in first else text[:1].upper() + text[1:]) + "."


def _cells(rows: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(row) for row in rows)


def _over_runs(values: Any, write: Callable[[Any], str]) -> str:
    value = estimate(values)
    if value is None:
        return ABSENT
    return write(value.mean) if value.half_width is None else f"{write(value.mean)} ± {write(value.half_width)}"


def _fairness_block(tables: Tables) -> Block:
    frame = fairness(tables)
    rows = []
    for (experiment, model, tier), group in sorted(
        frame.groupby(["experiment", "model", "tier"]), key=lambda item: _fairness_order(frame, item[0])
    ):
        counts = [_over_runs(group[c], _count) for c in ("clients", "excluded")]
        values = [_over_runs(group[c], percent) for c in ("mean", "std", "worst")]
        rows.append((str(experiment), model_name(str(model)), str(tier), *counts, *values))
    text = (
        "Accuracy in % of each model on every client's own test data; every client weighs the same. The standard "
        "deviation is that of the clients (divided by their number). Clients without test samples are left out and "
        "counted beside.",
    )
    heads = ("experiment", "model", "tier", "clients", "left out", "mean", "std", "worst")
    return Block("Fairness over clients", text, heads, _cells(rows), labels=3)


def _fairness_order(frame: pd.DataFrame, key: Any) -> tuple[Any, ...]:
    experiment, model, tier = (str(part) for part in key)
    return (experiment, shown_models(list(frame["model"])).index(model), tier == ALL_TIERS, natural(tier))


def _count(value: Any) -> str:
    return f"{float(value):.0f}" if float(value).is_integer() else f"{float(value):.1f}"


def _communication_block(tables: Tables, labels: Labels) -> Block:
    stages = communication(tables)
    elastic = set(elastic_run_ids(tables))
    kinds = communication_by_kind(stages)
    rows = []
    for experiment in dict.fromkeys(stages["experiment"]):
        own = stages[stages["experiment"] == experiment]
        sums = kinds[kinds["experiment"] == experiment]
        for kind in dict.fromkeys(own["kind"]):
            of_kind = own[own["kind"] == kind]
            tiers = list(dict.fromkeys(of_kind["tier"]))
            for tier in tiers:
                of_tier = of_kind[of_kind["tier"] == tier]
                name = labels.of(of_tier["run_id"].iloc[0], tier) if kind == ALONE else tier
                rows.append(_communication_row(experiment, f"{stage_name(kind)} {name}", of_tier))
            if len(tiers) > 1:
                # The parts of a SuperFedNAS stage are subnets, or the steps of a search.
                every = "in all" if elastic.issuperset(of_kind["run_id"]) else "all tiers"
                rows.append(_communication_row(experiment, f"{stage_name(kind)}, {every}", sums[sums["kind"] == kind]))
        rows.append(_communication_row(experiment, stage_name("method"), sums[sums["kind"] == "method"]))
    heads = ("experiment", "stage", "rounds", "client tasks", "down", "up", "MACs", "simulated", "wall")
    return Block("Communication and work per stage", (_communication_text(tables),), heads, _cells(rows))


def _communication_text(tables: Tables) -> str:
    of_silos = set(silo_run_ids(tables))
    others = any(p.run_id not in of_silos for p in tables.paths)
    left_out = ["the rand-init baseline (where there is a supernet)"] if others else []
    left_out += ["the final evaluation", *(["personalisation gains"] if tables.rounds["stage"].eq(GAINS).any() else [])]
    return (
        f"Sums over all clients that took part. The method in total is without {' and without '.join(left_out)}. "
        f"{'A central search sends nothing. ' if others else ''}"
        "Simulated time is that of the virtual clock, wall time that of this machine."
    )


def _communication_row(experiment: str, name: str, rows: pd.DataFrame) -> tuple[str, ...]:
    counts = [_over_runs(rows[c], _count) for c in ("rounds", "clients")]
    sizes = [_over_runs(rows[c], lambda v: si(v, "B")) for c in ("bytes_down", "bytes_up")]
    times = [_over_runs(rows[c], seconds) for c in ("simulated_s", "wall_s")]
    return (experiment, name.strip(), *counts, *sizes, _over_runs(rows["macs"], si), *times)


def failures_block(tables: Tables) -> Block:
    """The clients that did not end well, by cause."""
    frame = failures(tables)
    rows = []
    for row in frame.head(MOST_CAUSES).to_dict(orient="records"):
        first = f"client {row['client_id']}, {row['stage']}, round {row['round']}"
        cells = (row["run_id"], stage_name(row["kind"]), row["status"], row["example"] or ABSENT, first)
        rows.append((*(str(c) for c in cells), str(row["count"])))
    text = [f"{int(frame['count'].sum())} of {len(tables.clients)} client rows are not ok."]
    if len(frame) > MOST_CAUSES:
        text.append(f"The {MOST_CAUSES} most frequent of {len(frame)} causes are shown.")
    heads = ("run", "stage", "status", "cause (of the first)", "first", "rows")
    return Block("Clients that did not finish", tuple(text), heads, _cells(rows), labels=5)


def facts_of(tables: Tables) -> tuple[RunFacts, ...]:
    """Who, what, when and with which versions, per run."""
    return tuple(_facts(tables, paths) for paths in tables.paths)


def _facts(tables: Tables, paths: RunPaths) -> RunFacts:
    found = tables.runs[tables.runs["run_id"] == paths.run_id].to_dict(orient="records")
    row: dict[str, Any] = {str(k): v for k, v in found[0].items()} if found else {}
    facts = [("experiment", paths.experiment), ("run", paths.run_id), ("status", state_of(tables, paths))]
    names = ("method", "space", "dataset", "seeds", "versions", "source_hash", "partition_hash")
    facts += [(name.replace("_", " "), _plain(row.get(name))) for name in names]
    facts += [(name, _time(row.get(name))) for name in ("started", "ended")]
    if not is_absent(row.get("error")):
        facts.append(("error", str(row["error"])))
    return RunFacts(paths.run_id, tuple(facts), json.dumps(configuration(tables, paths.run_id), indent=1))


def _time(value: Any) -> str:
    return ABSENT if is_absent(value) else f"{value:%Y-%m-%d %H:%M:%S} UTC"


def _plain(text: Any) -> str:
    """JSON objects as "name value, name value"."""
    if is_absent(text):
        return ABSENT
    if not str(text).startswith("{"):
        return str(text)
    return ", ".join(f"{name} {value}" for name, value in json.loads(str(text)).items())


def _status(paths: RunPaths) -> Status | None:
    try:
        return read_status(paths.status)
    except ValueError:
        return None  # a copied results folder may lack it; the table knows enough then


def state_of(tables: Tables, paths: RunPaths) -> str:
    """The run's state now; what the table says if there is no status file."""
    status = _status(paths)
    if status is not None:
        return status.state
    known = tables.runs.loc[tables.runs["run_id"] == paths.run_id, "status"].dropna()
    return str(known.iloc[0]) if len(known) else "unknown"


def missing_of(tables: Tables) -> tuple[str, ...]:
    """One sentence for everything that a reader would look for in vain, per run."""
    several = len(tables.paths) > 1
    lines = [
        f"{paths.run_id}: {sentence}." if several else _sentence(sentence)
        for paths in tables.paths
        for sentence in _missing(tables, paths)
    ]
    dry = [p.run_id for p in tables.paths if is_dry(tables, p.run_id)]
    return (*lines, *([f"{', '.join(dry)}: {DRY}." if several else _sentence(DRY)] if dry else []))


def _missing(tables: Tables, paths: RunPaths) -> list[str]:
    def of(frame: pd.DataFrame) -> pd.DataFrame:
        return frame[frame["run_id"] == paths.run_id]

    state = state_of(tables, paths)
    lines = [] if state == "done" else [_progress(paths, state)]
    if of(tables.rounds).empty:
        return [*lines, "no finished round is in the tables yet"]
    config = configuration(tables, paths.run_id)
    if is_dry(tables, paths.run_id):
        return lines  # said once for all dry runs
    if is_elastic(config):
        return [*lines, *_missing_of_elastic(tables, paths.run_id, state)]
    if is_silo(config):
        tested = of(tables.evaluations)
        tested = tested[(tested["split"] == "test") & (tested["metric"] == METRIC)]
        return [*lines, *missing_of_silos(tables, paths.run_id, state), *_without_test_samples(tested)]
    method = config.get("method", {})
    if "search" in method and of(tables.candidates).empty:
        lines.append("no tier's search has ended: no candidates and no Pareto front")
    tested = of(tables.evaluations)
    tested = tested[(tested["split"] == "test") & (tested["metric"] == METRIC)]
    if tested.empty:
        lines.append("nothing was measured on test data: no test metric and no fairness")
    elif "rand_init" in method and "rand_init" not in set(tested["model"]):
        lines.append("the rand-init baseline was not evaluated")
    if state == "done" and "search" in method:
        chosen = set(of(tables.models)["tier"]) | set(of(tables.candidates)["tier"])
        empty = [t for t in tiers_of(tables, paths.run_id) if t not in chosen]
        lines += [f"{', '.join(empty)}: no model of the space lies within the bounds"] if empty else []
    return [*lines, *_without_test_samples(tested)]


def _without_test_samples(tested: pd.DataFrame) -> list[str]:
    excluded = tested[tested["client_id"].notna() & (tested["samples"].fillna(0) == 0)]["client_id"].nunique()
    return [f"{excluded} clients have no test samples and are left out of the fairness figures"] if excluded else []


def _missing_of_elastic(tables: Tables, run_id: str, state: str) -> list[str]:
    """What a SuperFedNAS run lacks: the evaluation, or targets without a winner."""
    tested = tables.evaluations[tables.evaluations["run_id"] == run_id]
    tested = tested[(tested["split"] == "test") & (tested["metric"] == METRIC)]
    targets = targets_of(tables, run_id)
    found = set(tested.loc[tested["model"] == SEARCHED, "tier"])
    lines = [] if len(tested) else ["nothing was measured on test data yet: no accuracy of subnets"]
    if state == "done" and (lost := [t for t in targets if t not in found]):
        lines.append(f"{', '.join(lost)}: the search chose no subnet for {'it' if len(lost) == 1 else 'them'}")
    return [*lines, *_without_test_samples(tested)]


def _progress(paths: RunPaths, state: str) -> str:
    status = _status(paths)
    if status is None:
        return f"the run's status is {state}"
    place = f" in {status.stage}, round {status.round + 1} of {status.rounds_total}" if status.stage else ""
    cause = f": {status.message}" if status.message else ""
    return f"the run is {state}{place}{cause}; what follows is what it has written so far"
