"""The per-tier table: for the terminal, as Markdown, and as plain values."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table
from rich.text import Text

from fedloom.experiments.analysis.frames import ALL_TIERS, natural, shown_models
from fedloom.experiments.analysis.intervals import Estimate, estimate, is_absent
from fedloom.experiments.report.words import ABSENT, model_name, percent, si

FAIRNESS = ("mean", "std", "worst")


@dataclass(frozen=True)
class TierSummary:
    """One tier of one experiment, over the experiment's runs.

    `architecture` is None where the runs chose different ones. `values` holds an estimate, or None, for upper_bound,
    macs, parameters, search_metric, test_MODEL, gain, kendall_tau and MODEL_mean, MODEL_std, MODEL_worst (fairness
    over the tier's clients); tier "all" knows the latter only.
    """

    tier: str
    architecture: str | None
    values: dict[str, Estimate | None]


@dataclass(frozen=True)
class Summary:
    """One experiment: its runs and its tiers."""

    experiment: str
    run_ids: tuple[str, ...]
    tiers: tuple[TierSummary, ...]


def summarise(per_tier: pd.DataFrame, fairness: pd.DataFrame) -> list[Summary]:
    """Per experiment and tier, means and intervals over runs of the frames' numbers."""
    spread = _wide(fairness)
    both = per_tier.merge(spread, on=["experiment", "run_id", "tier"], how="outer", sort=False)
    summaries = []
    for experiment in dict.fromkeys(per_tier["experiment"]):
        rows = both[both["experiment"] == experiment]
        tiers = sorted(dict.fromkeys(rows["tier"]), key=lambda t: (t == ALL_TIERS, natural(t)))
        run_ids = tuple(dict.fromkeys(per_tier.loc[per_tier["experiment"] == experiment, "run_id"]))
        summaries.append(Summary(experiment, run_ids, tuple(_tier(t, rows[rows["tier"] == t]) for t in tiers)))
    return summaries


def _wide(fairness: pd.DataFrame) -> pd.DataFrame:
    key = ["experiment", "run_id", "tier"]
    if fairness.empty:
        return pd.DataFrame(columns=key, dtype=object)
    pieces = [fairness.pivot(index=key, columns="model", values=what).add_suffix(f"_{what}") for what in FAIRNESS]
    wide = pd.concat(pieces, axis=1).rename_axis(columns=None)
    return wide.reset_index().astype(dict.fromkeys(key, object))


def _tier(tier: str, rows: pd.DataFrame) -> TierSummary:
    names = {str(a) for a in rows["architecture"] if not is_absent(a)}
    numbers = [c for c in rows.columns if c not in ("experiment", "run_id", "tier", "architecture")]
    return TierSummary(tier, names.pop() if len(names) == 1 else None, {c: estimate(rows[c]) for c in numbers})


@dataclass(frozen=True)
class Block:
    """A table with its title, sentences before it, heads and cells; `labels` columns on the left are text."""

    title: str
    text: tuple[str, ...]
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 2


def rich_block(block: Block, *, stacked: bool = True) -> Table:
    """The block for the terminal, its sentences below it; `stacked` has intervals below their means."""
    caption = Text("\n".join(block.text), style="dim")
    table = Table(title=Text(block.title), caption=caption, box=box.SIMPLE_HEAD)
    table.title_justify = table.caption_justify = "left"
    table.show_edge, table.padding = False, (0, 1, 0, 0)
    for i, head in enumerate(block.heads):
        table.add_column(Text(head), justify="left" if i < block.labels else "right", no_wrap=True)
    for row in block.rows:
        table.add_row(*(Text(text.replace(" ± ", "\n± ") if stacked else text) for text in row))
    return table


Format = Callable[[Any], str]


@dataclass(frozen=True)
class Column:
    """A column of the table: its head, a head for narrow terminals, and how its value is written."""

    head: str
    short: str
    key: str
    write: Format


def columns_of(summary: Summary) -> list[Column]:
    """The columns for which the experiment has any value."""
    keys = {key for tier in summary.tiers for key, value in tier.values.items() if value is not None}
    models = shown_models([key.removeprefix("test_") for key in keys if key.startswith("test_")])
    columns = [
        Column("upper bound", "upper\nbound", "upper_bound", si),
        Column("MACs", "MACs", "macs", si),
        Column("parameters", "params", "parameters", si),
        Column("search, validation %", "search", "search_metric", percent),
        *(Column(f"{model_name(m)}, test %", _narrow(model_name(m)), f"test_{m}", percent) for m in models),
        Column("gain over rand-init", "gain", "gain", _signed),
        Column("Kendall tau", "Kendall\ntau", "kendall_tau", _tau),
    ]
    last = final_model(keys)
    heads = {"mean": "client\nmean", "std": "\nstd", "worst": "\nworst"}
    columns += [Column(f"clients' test %, {what}", heads[what], f"{last}_{what}", percent) for what in FAIRNESS]
    return [c for c in columns if c.key in keys]


def final_model(keys: Iterable[str]) -> str:
    """The model whose fairness the table shows: fine_tuned, or the last that was measured on clients."""
    measured = {key.removesuffix("_mean") for key in keys if key.endswith("_mean")}
    return next((m for m in ("fine_tuned", *reversed(shown_models(list(measured)))) if m in measured), "")


def _narrow(name: str) -> str:
    return name.replace("supernet", "super").replace(" ", "\n", 1).replace("-", "-\n", 1)


def _signed(value: Any) -> str:
    return percent(value, sign=True)


def _tau(value: Any) -> str:
    return ABSENT if is_absent(value) else f"{float(value):.2f}"


def cell(column: Column, tier: TierSummary) -> str:
    """The value, with its interval where several runs give one."""
    value = tier.values.get(column.key)
    if value is None:
        return ABSENT
    text = column.write(value.mean)
    if value.half_width is None or (value.half_width == 0 and column.key in ("upper_bound", "macs", "parameters")):
        return text
    return f"{text} ± {column.write(value.half_width).removeprefix('+')}"


def note(summary: Summary) -> str:
    """What the numbers are, in one sentence."""
    runs = len(summary.run_ids)
    if runs == 1:
        return f"run {summary.run_ids[0]}"
    return f"mean ± 95 % interval (Student's t) over {runs} runs"


def legend(summary: Summary) -> list[str]:
    """What the columns of `rich_table` mean."""
    keys = {key for tier in summary.tiers for key, value in tier.values.items() if value is not None}
    lines = []
    if "search_metric" in keys:
        lines.append("search: validation accuracy in %, with the supernet's weights")
    tested = [model_name(m) for m in shown_models([k.removeprefix("test_") for k in keys if k.startswith("test_")])]
    if tested:
        lines.append(f"{', '.join(tested)}: accuracy in % on the whole test set")
    if "gain" in keys:
        lines.append("gain: fine-tuned less rand-init, in percentage points")
    if last := final_model(keys):
        lines.append(f"clients: {model_name(last)}, accuracy in % on each client's own test data")
    return lines


def rich_table(summary: Summary, notes: Sequence[str] = ()) -> Table:
    """The table for the terminal, narrow enough for 80 columns where one run has four tiers; notes stand below it."""
    caption = Text("\n".join([*legend(summary), *notes]), style="dim")
    table = Table(title=Text(f"{summary.experiment}: {note(summary)}"), caption=caption, box=box.SIMPLE_HEAD)
    table.title_justify = table.caption_justify = "left"
    table.show_edge, table.padding = False, (0, 1, 0, 0)
    columns = columns_of(summary)
    for head in ("tier", *(column.short for column in columns)):
        table.add_column(Text(head), justify="left" if head == "tier" else "right", no_wrap=True)
    for tier in summary.tiers:
        if tier.tier == ALL_TIERS:
            table.add_section()
        # The interval below the mean: side by side they would not fit.
        table.add_row(tier.tier, *(cell(c, tier).replace(" ± ", "\n± ") for c in columns))
    return table


def header_and_rows(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """The table as text, with the architectures: one list of heads, and one list per tier."""
    columns = columns_of(summary)
    heads = ["tier", "architecture", *(c.head for c in columns)]
    rows = [[t.tier, _architecture(t, summary), *(cell(c, t) for c in columns)] for t in summary.tiers]
    return heads, rows


def _architecture(tier: TierSummary, summary: Summary) -> str:
    if tier.architecture is not None:
        return tier.architecture
    known = tier.values.get("macs") is not None and len(summary.run_ids) > 1
    return "differs" if known else ABSENT


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], labels: int = 2) -> str:
    """A Markdown table; the first `labels` columns to the left, numbers to the right."""
    lines = [_line(heads), _line([":--" if i < labels else "--:" for i in range(len(heads))])]
    return "\n".join([*lines, *(_line(row) for row in rows)]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ").strip() for c in cells) + " |"


def as_dict(summary: Summary) -> dict[str, Any]:
    """The summary as JSON values: null where a value is not known, {mean, half_width, runs} where it is."""
    return {
        "experiment": summary.experiment,
        "run_ids": list(summary.run_ids),
        "tiers": [
            {"tier": t.tier, "architecture": t.architecture, **{k: _plain(v) for k, v in t.values.items()}}
            for t in summary.tiers
        ],
    }


def _plain(value: Estimate | None) -> dict[str, float | int | None] | None:
    return None if value is None else {"mean": value.mean, "half_width": value.half_width, "runs": value.runs}


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The frame's rows as JSON values."""
    rows = frame.astype(object).to_dict(orient="records")
    return [{str(k): _value(v) for k, v in row.items()} for row in rows]


def _value(value: Any) -> Any:
    if is_absent(value):
        return None
    item = value.item() if callable(getattr(value, "item", None)) else value
    return item if isinstance(item, bool | int | float | str) else str(item)
