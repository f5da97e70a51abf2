"""The tables of an ablation's report: trials, settings over seeds, and differences to the reference of each axis."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.ablation import (
    against_reference,
    by_setting,
    is_grid,
    references,
)
from fedloom.experiments.analysis.frames import METRIC
from fedloom.experiments.analysis.intervals import FEWEST, Estimate, is_absent
from fedloom.experiments.analysis.labels import Labels
from fedloom.experiments.analysis.stages import real_rounds
from fedloom.experiments.analysis.summary import MODEL_KEY
from fedloom.experiments.analysis.tables import Tables
from fedloom.experiments.report.parts.block import Block
from fedloom.experiments.report.parts.numbers import ABSENT, Write, percent, points, seconds, si, size, with_interval
from fedloom.experiments.report.parts.words import INTERVALS, model_name
from fedloom.experiments.store.ablations import Ablation, short
from fedloom.experiments.store.trials import TrialState

Names = Mapping[str, str]
"""Readable labels of subnets, by id."""

MEASURED: tuple[tuple[str, str, Write], ...] = (
    (METRIC, "accuracy %", percent),
    ("macs", "MACs", si),
    ("parameters", "parameters", si),
    ("total_bytes", "bytes", size),
    ("simulated_s", "simulated", seconds),
)
"""The columns of the table of settings: the measure, its head, and its format."""


def subnet_names(frame: pd.DataFrame, labels: Labels) -> dict[str, str]:
    """The labels of the subnets in an ablation's frame."""
    pairs = frame.dropna(subset=["subnet"]).drop_duplicates("subnet")[["run_id", "subnet"]]
    return {str(subnet): labels.of(str(run), str(subnet)) for run, subnet in pairs.itertuples(index=False)}


def trials_block(ablation: Ablation, states: Sequence[TrialState], tables: Tables) -> Block:
    """One row per planned trial: its setting and seed, its state, and the message of its run."""
    rounds = real_rounds(tables.rounds).groupby("run_id").size().to_dict()
    rows = [
        (
            str(s.trial.index),
            *(short(s.trial.setting[axis]) for axis in ablation.axes),
            str(s.trial.seed),
            s.state,
            s.trial.run_id,
            _said(s),
            str(rounds.get(s.trial.run_id, 0)),
        )
        for s in states
    ]
    text = ("Every trial is a run of its own. Rounds are those of all stages that are in the tables so far.",)
    heads = ("trial", *ablation.axes, "seed", "state", "run", "message", "rounds")
    return Block("Trials", text, heads, tuple(rows), labels=len(heads) - 1)


def _said(state: TrialState) -> str:
    status = state.status
    if state.message:
        return state.message
    if status is None or not status.stage or state.state == "done":
        return ABSENT
    return f"in {status.stage}, round {status.round_shown} of {status.rounds_total}"


def points_block(ablation: Ablation, frame: pd.DataFrame, names: Names, *, wide: bool) -> Block:
    """One row per setting and model, tier or subnet: n, accuracy and costs; `wide` includes all costs."""
    axes = list(ablation.axes)
    chosen = [m for m in MEASURED if wide or m[0] in (METRIC, "macs")]
    found = [by_setting(frame, measure, axes) for measure, _, _ in chosen]
    shown = _model_columns(found[0], names)
    key = [*axes, *MODEL_KEY]
    cells = [rows.set_index(key) for rows in found]
    rows = []
    for place in found[0][key].itertuples(index=False, name=None):
        settings = tuple(short(value) for value in place[: len(axes)])
        model = tuple(write(place[len(axes) + i]) for i, _, write in shown)
        n = str(cells[0].loc[place, "n"])
        measured = (_estimate(c, place, write) for c, (_, _, write) in zip(cells, chosen, strict=True))
        rows.append((*settings, *model, n, *measured))
    heads = (*axes, *(head for _, head, _ in shown), "n", *(head for _, head, _ in chosen))
    return Block("Settings", _settings_text(found[0], wide), heads, tuple(rows), labels=len(axes) + len(shown))


def _estimate(cells: pd.DataFrame, place: tuple[Any, ...], write: Write) -> str:
    if place not in cells.index:
        return ABSENT
    row = cells.loc[place]
    half_width = None if is_absent(row["half_width"]) else float(row["half_width"])
    return with_interval(Estimate(row["mean"], half_width, row["n"], tuple(row["values"])), write)


def _model_columns(rows: pd.DataFrame, names: Names) -> list[tuple[int, str, Write]]:
    """The columns among model, tier and subnet that differ between rows: index, head and format."""
    writers: dict[str, Write] = {
        "model": model_name,
        "tier": str,
        "subnet": lambda subnet: names.get(subnet, subnet) or ABSENT,
    }
    return [(i, column, writers[column]) for i, column in enumerate(MODEL_KEY) if rows[column].nunique() > 1]


def _settings_text(rows: pd.DataFrame, wide: bool) -> tuple[str, ...]:
    if rows.empty:
        return ("No trial has been evaluated yet.",)
    same = [
        f"{column} {model_name(str(rows[column].iloc[0]))}"
        for column in ("model", "tier")
        if rows[column].nunique() == 1
    ]
    costs = (
        " Bytes and simulated time are those of all that the method did, with the training of a supernet that the "
        "trial shared with others."
    )
    return (
        f"Test accuracy in %; MACs of one forward pass; n seeds. {INTERVALS}{costs if wide else ''}",
        *([f"All rows: {', '.join(same)}."] if same else []),
    )


def axis_blocks(ablation: Ablation, frame: pd.DataFrame, names: Names) -> list[Block]:
    """A table per axis of paired differences to its reference; none for a random search, which has no pairs."""
    if not is_grid(ablation):
        return []
    blocks = [_axis_block(ablation, frame, names, axis) for axis in ablation.axes]
    return [block for block in blocks if block.rows]


def _axis_block(ablation: Ablation, frame: pd.DataFrame, names: Names, axis: str) -> Block:
    found = against_reference(frame, ablation, axis)
    shown = _model_columns(found, names)
    rows = [
        (
            f"{short(row['value'])} – {short(row['reference'])}",
            *(write(row[head]) for _, head, write in shown),
            str(row["n"]),
            str(row["seeds"]),
            ", ".join(map(points, row["values"])) if len(row["values"]) < FEWEST else points(row["mean"]),
            _interval(row["low"], row["high"]),
            _probability(row["p_value"]),
        )
        for row in found.to_dict("records")
    ]
    heads = (axis, *(head for _, head, _ in shown), "n", "seeds", "difference", "95 % interval", "p")
    return Block(f"{axis} against {reference_text(ablation, axis)}", _PAIRS, heads, tuple(rows), 1 + len(shown))


_PAIRS = (
    "Differences of test accuracy in percentage points. A pair is two runs of one seed that differ in this axis alone. "
    "Of n pairs a seed counts once, with the mean of its own: mean difference, 95 % interval and "
    "two-sided p of the paired t test over seeds, not corrected for the number of rows. One or two seeds show their "
    "differences; they, and seeds that lack pairs which others have, give neither interval nor p.",
)


def reference_text(ablation: Ablation, axis: str) -> str:
    """The reference of an axis as text that says whether it is only the axis' first value."""
    value = short(references(ablation)[axis])
    whose = "" if axis in ablation.reference else ", the first value"
    return f"{value}{whose}"


def _interval(low: Any, high: Any) -> str:
    return ABSENT if is_absent(low) else f"{points(low)} to {points(high)}"


def _probability(p: Any) -> str:
    if is_absent(p):
        return ABSENT
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
