"""Tables of cross-silo methods: per setting, per silo, and personalisation gains."""

from collections.abc import Sequence
from typing import Any

from fedloom.experiments.analysis.intervals import is_absent
from fedloom.experiments.analysis.silo_gains import best_on_test, p_matrix, personalisation_gains
from fedloom.experiments.analysis.silo_summaries import SiloSummary, silo_summaries
from fedloom.experiments.analysis.silos import PERSONAL, in_short, per_silo, silos
from fedloom.experiments.analysis.tables import Tables, configuration, only
from fedloom.experiments.report.parts.block import Block
from fedloom.experiments.report.parts.numbers import (
    ABSENT,
    Write,
    count,
    percent,
    points,
    seconds,
    si,
    size,
    with_interval,
)
from fedloom.experiments.report.parts.words import over_settings

COSTS = ("parameters", "macs", "peak_memory_bytes", "bytes_per_round", "wall_s")
"""Columns that the terminal shows in a separate table."""


COLUMNS: tuple[tuple[str, str, Write], ...] = (
    ("accuracy", "test %,\nmean", percent),
    ("std", "\nstd", percent),
    ("worst", "\nworst", percent),
    ("best_accuracy", "best\nround %", percent),
    ("best_round", "that\nround", count),
    ("global_accuracy", "before\npers.", percent),
    ("gain", "arch.\ngain", points),
    ("parameters", "params", si),
    ("macs", "MACs", si),
    ("architectures", "different\narch.", count),
    ("peak_memory_bytes", "peak\nmemory", size),
    ("bytes_per_round", "bytes per\nround", size),
    ("wall_s", "wall\ntime", seconds),
)


def silo_blocks(tables: Tables, *, wide: bool) -> list[Block]:
    """The table of all settings, in two halves for a terminal; with `wide` one table, plus gains and silos per run."""
    own = silos(tables)
    summaries = silo_summaries(own)
    if not wide:
        blocks = [summary_block(summaries, "Silos", costs=False), summary_block(summaries, "Costs", accuracy=False)]
    else:
        blocks = [summary_block(summaries)]
        blocks += [gains_block(only(own, [p.run_id])) for p in own.paths]
        blocks += [run_block(only(own, [p.run_id])) for p in own.paths]
    return [block for block in blocks if block.rows]


def summary_block(
    summaries: Sequence[SiloSummary], title: str = "Silos", *, accuracy: bool = True, costs: bool = True
) -> Block:
    """One row per setting (SPIDER, Tab. 1 and 3); columns without any value are left out."""
    wanted = [c for c in COLUMNS if (costs if c[0] in COSTS else accuracy)]
    columns = [c for c in wanted if any(s.values[c[0]] is not None for s in summaries)]
    if not columns:
        return Block(title, (), (), ())
    datasets = [str(s.setting.config["data"]["dataset"]) for s in summaries]
    several = len(set(datasets)) > 1
    # Presets are named after their method, so that a column of methods would repeat it.
    named = all(s.method in s.setting.name for s in summaries) and not several
    labels = ("setting", "method", "data")[: 1 if named else 2 + several]
    rows = tuple(
        (
            *(summary.setting.name, summary.method, dataset)[: len(labels)],
            *(with_interval(summary.values[key], write) for key, _, write in columns),
        )
        for summary, dataset in zip(summaries, datasets, strict=True)
    )
    heads = (*labels, *(head for _, head, _ in columns))
    return Block(title, _text(summaries, {key for key, _, _ in columns}), heads, rows, labels=len(labels))


def _text(summaries: Sequence[SiloSummary], shown: set[str]) -> tuple[str, ...]:
    text = [over_settings([s.setting for s in summaries])]
    if "accuracy" in shown:
        shared = [s.method for s in summaries if s.model != PERSONAL and s.values["accuracy"] is not None]
        which = f" ({', '.join(dict.fromkeys(shared))}: the shared one)" if shared else ""
        text.append(
            f"Accuracy of every silo's model{which} on its own test data in %; all silos weigh the same, std is "
            "that of the silos (divided by their number)."
        )
    notes = {
        "best_accuracy": "best round: the highest mean test accuracy of the rounds measured, as papers report it. Test "
        "data have chosen that round, so that it is too high; nothing is trained, searched or chosen by it.",
        "global_accuracy": "before pers.: the shared model's mean accuracy.",
        "gain": "arch. gain: mean over silos of g, by which a silo's architecture beats the others' on its own data.",
        "parameters": "params: of a silo's model, mean.",
        "macs": "MACs: of a silo's model, one forward pass of one sample, mean.",
        "peak_memory_bytes": "peak memory: the most of any silo in training.",
        "bytes_per_round": "bytes per round: both ways, per silo.",
        "wall_s": "wall time: all training rounds, on the machine that computed them.",
    }
    said = " ".join(note for key, note in notes.items() if key in shown)
    return (*text, said[:1].upper() + said[1:]) if said else tuple(text)


def run_block(run: Tables) -> Block:
    """One row per silo of one run."""
    rows = per_silo(run)
    with_cells = has_cells(run) and any("/" in str(text) for text in rows["architecture"])
    columns: list[tuple[str, str, Write]] = [
        ("samples", "test samples", count),
        ("accuracy", "test %", percent),
        ("loss", "test loss", lambda v: f"{float(v):.3g}"),
        ("global_accuracy", "before personalisation %", percent),
        ("neighbour_share", "neighbours' share", lambda v: f"{float(v):.2g}"),
        ("parameters", "parameters", si),
        ("macs", "MACs", si),
    ]
    columns = [c for c in columns if rows[c[0]].notna().any()]
    cells = tuple(
        (
            str(row["client_id"]),
            _architecture(row["architecture"], with_cells),
            *(ABSENT if is_absent(row[key]) else write(row[key]) for key, _, write in columns),
        )
        for row in rows.to_dict(orient="records")
    )
    heads = ("silo", "architecture", *(head for _, head, _ in columns))
    text = _run_text(with_cells, searched=bool(configuration(run, _name(run))["method"].get("search")))
    return Block(f"Silos of run {_name(run)}", text, heads, cells)


def _name(run: Tables) -> str:
    return run.paths[0].run_id


def has_cells(run: Tables) -> bool:
    """Whether the run's architectures are those of DARTS cells."""
    config = configuration(run, _name(run))
    return str(config.get("space", {}).get("name", "")).startswith("darts")


def _architecture(text: Any, with_cells: bool) -> str:
    if is_absent(text):
        return ABSENT
    return in_short(str(text)) if with_cells else str(text)


def _run_text(with_cells: bool, *, searched: bool) -> tuple[str, ...]:
    text = ["Every silo's model on its own test data."]
    if with_cells:
        several = "what is undecided" if searched else "several that are used together"
        text.append(
            "The architecture is the operator kept on each edge of the normal, then of the reduction cell, by its "
            f"number; a dot is an edge without any, braces hold {several}."
        )
    return tuple(text)


BEST_EPOCH = (
    "Fine-tuned models count with their best epoch on the test data, as in the paper: that is too high. The accuracy "
    "after the last epoch is in the table of evaluations."
)


def gains_block(run: Tables) -> Block:
    """g_i of one run's silos and their mean (SPIDER, Eq. 6)."""
    gains = personalisation_gains(p_matrix(run))
    rows = [
        (str(r.client_id), *(percent(v) for v in (r.own, r.others, r.best_other)), str(r.compared), points(r.gain))
        for r in gains.itertuples()
    ]
    if len(rows) > 1:
        means = (percent(gains[c].mean()) for c in ("own", "others", "best_other"))
        rows.append(("mean", *means, count(gains["compared"].mean()), points(gains["gain"].mean())))
    text = (
        "Test accuracy in % on a silo's data of its own architecture and of the other silos', all fine-tuned on its "
        "data. The gain is its own less the others' mean, in percentage points.",
        *([BEST_EPOCH] if best_on_test(run) else []),
    )
    heads = ("silo", "own architecture", "others', mean", "others', best", "others", "gain")
    return Block(f"Personalisation gains of run {_name(run)}", text, heads, tuple(rows), labels=1)
