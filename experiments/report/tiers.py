"""The section of tiers: a table per setting, and the candidates of their searches with the Pareto fronts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedloom.experiments.analysis.architectures import decoded
from fedloom.experiments.analysis.clients import fairness
from fedloom.experiments.analysis.settings import SEEDS, Estimate, Setting, estimate_by_seed, is_absent, settings_of
from fedloom.experiments.analysis.tables import (
    ALL_TIERS,
    TIERS,
    Bounds,
    Tables,
    configuration,
    natural,
    runs_of_kind,
    shown_models,
)
from fedloom.experiments.analysis.tiers import FAIRNESS, fairness_by_tier, per_tier, tiers_of, with_perplexity
from fedloom.experiments.report.content import Block, Picture
from fedloom.experiments.report.drawing import (
    COUNTS,
    GREY,
    LEGEND,
    legend_line,
    legend_mark,
    multiples,
    quiet,
    same_limits,
    stars,
    tier_colours,
    tier_markers,
    tiers_in_order,
)
from fedloom.experiments.report.wording import (
    ABSENT,
    PANELS,
    Write,
    caption_of,
    model_name,
    over_runs,
    percent,
    points,
    sentence,
    si,
    si_scale,
    two_digits,
    with_interval,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


@dataclass(frozen=True)
class TierSummary:
    """One tier of one setting, over the setting's seeds.

    `architecture` is None if the runs chose different ones. `values` holds an estimate, or None, for upper_bound, macs,
    parameters, search_metric, test_MODEL, gain, kendall_tau and MODEL_mean, MODEL_std, MODEL_worst (fairness over the
    tier's clients), and for text data the columns of `analysis.with_perplexity`; tier "all" has only what is over
    clients.
    """

    tier: str
    architecture: str | None
    values: dict[str, Estimate | None]


@dataclass(frozen=True)
class Summary:
    """One setting and its tiers."""

    setting: Setting
    tiers: tuple[TierSummary, ...]


def tier_summaries(tables: Tables, bounds: Bounds) -> list[Summary]:
    """Means and intervals over seeds, per setting and tier; settings without tiers are left out."""
    of_tiers, of_clients = with_perplexity(per_tier(tables, bounds), tables), fairness_by_tier(fairness(tables))
    both = of_tiers.merge(of_clients, on=["experiment", "run_id", "tier"], how="outer", sort=False)
    summaries = []
    for setting in settings_of(tables):
        if len(setting.rows(of_tiers)):
            rows = setting.rows(both)
            tiers = sorted(dict.fromkeys(rows["tier"]), key=lambda t: (t == ALL_TIERS, natural(t)))
            summaries.append(Summary(setting, tuple(_tier(t, rows[rows["tier"] == t]) for t in tiers)))
    return summaries


def _tier(tier: str, rows: pd.DataFrame) -> TierSummary:
    names = {str(a) for a in rows["architecture"] if not is_absent(a)}
    numbers = [c for c in rows.columns if c not in ("experiment", "run_id", "tier", "architecture", SEEDS)]
    values = {c: estimate_by_seed(rows[c], rows[SEEDS]) for c in numbers}
    return TierSummary(tier, names.pop() if len(names) == 1 else None, values)


@dataclass(frozen=True)
class Column:
    """A column of the table: its head, a head for narrow terminals, the key of its value, and its format."""

    head: str
    short: str
    key: str
    write: Write


def columns_of(summary: Summary) -> list[Column]:
    """The columns for which the setting has any value."""
    keys = _keys(summary)
    costs = [
        Column("upper bound", "upper\nbound", "upper_bound", si),
        Column("MACs", "MACs", "macs", si),
        Column("parameters", "params", "parameters", si),
    ]
    tau = Column("Kendall tau", "Kendall\ntau", "kendall_tau", two_digits)
    narrow = {"mean": "client\nmean", "std": "\nstd", "worst": "\nworst"}
    if is_text(keys):
        last, write = _last_clients(keys), two_digits
        measured = [
            Column("search, validation perplexity", "search", "search_perplexity", write),
            *(Column(f"{name}, test perplexity", _narrow(name), f"perplexity_{m}", write) for m, name in _tested(keys)),
            Column("gain over rand-init", "gain", "perplexity_gain", partial(two_digits, sign=True)),
            tau,
            *(Column(f"clients' perplexity, {w}", narrow[w], f"clients_{last}_{w}", write) for w in FAIRNESS),
        ]
    else:
        last = last_measured(keys)
        measured = [
            Column("search, validation %", "search", "search_metric", percent),
            *(Column(f"{name}, test %", _narrow(name), f"test_{m}", percent) for m, name in _tested(keys)),
            Column("gain over rand-init", "gain", "gain", points),
            tau,
            *(Column(f"clients' test %, {w}", narrow[w], f"{last}_{w}", percent) for w in FAIRNESS),
        ]
    return [c for c in (*costs, *measured) if c.key in keys]


def _keys(summary: Summary) -> set[str]:
    return {key for tier in summary.tiers for key, value in tier.values.items() if value is not None}


def is_text(keys: Iterable[str]) -> bool:
    """Whether the setting's models are measured by perplexity."""
    return any(key.startswith("perplexity_") for key in keys)


def _tested(keys: Iterable[str]) -> list[tuple[str, str]]:
    """The models that were tested, with their readable names."""
    models = shown_models([key.removeprefix("test_") for key in keys if key.startswith("test_")])
    return [(model, model_name(model)) for model in models]


def _last_clients(keys: Iterable[str]) -> str:
    """`last_measured` of the columns of perplexity."""
    return last_measured({key.removeprefix("clients_") for key in keys if key.startswith("clients_")})


def last_measured(keys: Iterable[str]) -> str:
    """The model whose fairness the table shows: fine_tuned, else the last in display order that clients measured."""
    measured = {key.removesuffix("_mean") for key in keys if key.endswith("_mean")}
    return next((m for m in ("fine_tuned", *reversed(shown_models(list(measured)))) if m in measured), "")


def _narrow(name: str) -> str:
    return name.replace("supernet", "super").replace(" ", "\n", 1).replace("-", "-\n", 1)


def cell(column: Column, tier: TierSummary, num_seeds: int = 0) -> str:
    """The formatted value over seeds; see `with_interval`."""
    return with_interval(tier.values.get(column.key), column.write, num_seeds)


def tasks_text(setting: Setting) -> tuple[str, ...]:
    """A line with the task of each tier, if tasks differ: the row of all tiers is then a mean over tasks."""
    tasks = setting.config.get("tiers", {}).get("tasks")
    if not tasks or len(set(tasks)) == 1:
        return ()
    of_tiers = ", ".join(f"tier{i} {task}" for i, task in enumerate(tasks, 1))
    return (f"tasks: {of_tiers}; values for all tiers, or for the supernet, are means over the tasks",)


def legend(summary: Summary) -> tuple[str, ...]:
    """Explanations of the narrow table's columns."""
    keys = _keys(summary)
    text = is_text(keys)
    quality, lines = "perplexity" if text else "accuracy in %", []
    if "search_metric" in keys:
        lines.append(f"search: validation {quality}, with the supernet's weights")
    if tested := [name for _, name in _tested(keys)]:
        lines.append(f"{', '.join(tested)}: {quality} on the whole test set")
    if "gain" in keys:
        difference = "rand-init minus fine-tuned" if text else "fine-tuned minus rand-init, in percentage points"
        lines.append(f"gain: {difference}")
    if last := _last_clients(keys) if text else last_measured(keys):
        lines.append(f"clients: {model_name(last)}, {quality} on each client's own test data")
    return (*lines, *tasks_text(summary.setting))


def tier_block(summary: Summary, tables: Tables) -> Block:
    """One row per tier with its architecture in words, for the page."""
    columns = columns_of(summary)
    heads = ("tier", "architecture", *(c.head for c in columns))
    rows = []
    for tier in summary.tiers:
        architecture = tier.architecture
        if architecture is not None:
            words = decoded(tables, summary.setting.run_ids[0], architecture)
            architecture = words if words == architecture else f"{words} ({architecture})"
        elif tier.values.get("macs") is not None and len(summary.setting.run_ids) > 1:
            architecture = "differs"
        rows.append((tier.tier, architecture or ABSENT, *(cell(c, tier, summary.setting.num_seeds) for c in columns)))
    texts = (over_runs(summary.setting), *tasks_text(summary.setting))
    return Block(f"Tiers: {summary.setting.name}", tuple(map(sentence, texts)), heads, tuple(rows))


def narrow_tier_block(summary: Summary) -> Block:
    """One row per tier for a terminal; fits into 80 characters for a run with four tiers."""
    columns = columns_of(summary)
    heads = ("tier", *(c.short for c in columns))
    rows = tuple((t.tier, *(cell(c, t, summary.setting.num_seeds) for c in columns)) for t in summary.tiers)
    return Block(f"{summary.setting.name}: {over_runs(summary.setting)}", legend(summary), heads, rows, labels=1)


def pareto_figure(
    pareto: pd.DataFrame, settings: Sequence[Setting], upper_bounds: Mapping[str, Mapping[str, float]] | None = None
) -> Figure | None:
    """Validation accuracy against MACs of all candidates, with a line per tier's front and a star for its winner.

    There is a panel per setting, all with the same axes. `upper_bounds` (MACs per tier, by the setting's name) are thin
    vertical lines. None without candidates.
    """
    known = pareto[pareto["metric"].notna() & pareto["macs"].notna()].astype({"macs": "float64"})
    shown = [s for s in settings if len(s.rows(known))]
    if not shown:
        return None
    tiers = tiers_in_order(known["tier"])
    scale, prefix = si_scale(float(known["macs"].max()))
    bounds = {s.name: [b / scale for b in (upper_bounds or {}).get(s.name, {}).values()] for s in shown}
    figure, parts = multiples(shown, (8.8, 4.6), (5.4, 3.9), columns=2)
    panels = []
    for part, setting in zip(parts, shown, strict=True):
        axes = part.subplots()
        _candidates(axes, setting.rows(known), tiers, scale)
        for bound in sorted(bounds[setting.name])[:-1]:
            axes.axvline(bound, color="#B5B5B5", linewidth=0.9, linestyle=":", zorder=1)
        quiet(axes, xlabel=f"MACs of one forward pass{COUNTS[prefix]}", ylabel="validation accuracy in search (%)")
        panels.append(axes)
    same_limits(panels, x=True, y=True)
    handles = _handles(tiers, with_bounds=any(bounds.values()))
    position: dict[str, Any] = {"loc": "outside right center"}
    if parts[0] is not figure:
        position = {"loc": "outside lower center", "ncols": min(len(handles), 6)}
    figure.legend(handles=handles, **position, **LEGEND)
    return figure


def pareto_pictures(pareto: pd.DataFrame, settings: Sequence[Setting], bounds: Bounds) -> Iterator[Picture]:
    """The figure of the candidates, with the MACs bounds of settings whose runs all have the same bounds."""
    upper_bounds = {}
    for setting in settings:
        runs = [{tier: bound for (of, tier), bound in bounds.items() if of == run_id} for run_id in setting.run_ids]
        tiers = setting.config.get("tiers", {})
        if all(run == runs[0] for run in runs) and tiers.get("cost") == "macs" and not tiers.get("cost_weights"):
            upper_bounds[setting.name] = runs[0]
    figure = pareto_figure(pareto, settings, upper_bounds)
    if figure is not None:
        caption = (
            "Every candidate of the search, scored on validation data with the supernet's weights. Lines join the "
            "models that no other of the tier beats in both accuracy and cost; the star is the tier's winner."
        )
        own_fronts = "Every run has its own front and winner."
        text = caption_of(settings, caption, own_fronts, panels=PANELS, averaged=False)
        yield Picture("pareto", "Pareto front per tier", text, figure)


def _candidates(axes: Axes, candidates: pd.DataFrame, tiers: Sequence[str], scale: float) -> None:
    """Draws the candidates of one setting; every run has its own front."""
    colours, markers = tier_colours(tiers), tier_markers(tiers)
    for tier in tiers:
        rows = candidates[candidates["tier"] == tier]
        x, y = rows["macs"] / scale, rows["metric"] * 100
        axes.scatter(x, y, s=14, color=colours[tier], alpha=0.28, linewidths=0, zorder=2, label=tier)
        for _, run in rows[rows["on_front"]].sort_values("macs").groupby("run_id"):
            style: dict[str, Any] = {
                "marker": markers[tier],
                "markersize": 4.5,
                "linewidth": 1.6,
                "zorder": 3,
                "label": f"{tier}, front",
            }
            axes.plot(run["macs"] / scale, run["metric"] * 100, color=colours[tier], **style)
        won = rows["is_winner"]
        stars(axes, x[won], y[won], colours[tier])


def _handles(tiers: Sequence[str], *, with_bounds: bool) -> list[Line2D]:
    colours, markers = tier_colours(tiers), tier_markers(tiers)
    handles = [legend_line(color=colours[t], marker=markers[t], markersize=4.5, label=f"{t}: front") for t in tiers]
    handles.append(legend_mark("o", 4.5, "candidate", face=GREY, edge="none", alpha=0.5))
    handles.append(legend_mark("*", 12, "winner"))
    if with_bounds:
        handles.append(legend_line(color="#B5B5B5", linestyle=":", label="tier's bound"))
    return handles


def missing_of_tiers(run: Tables, tested: pd.DataFrame, state: str) -> list[str]:
    """Missing parts of a run with a model per tier: candidates, test metrics, baseline, or models of tiers."""
    run_id = run.paths[0].run_id
    method = configuration(run, run_id).get("method", {})
    lines = []
    if "search" in method and run.candidates.empty:
        lines.append("no tier's search has ended: no candidates and no Pareto front")
    if tested.empty:
        lines.append("nothing was measured on test data: no test metric and no fairness")
    elif "rand_init" in method and "rand_init" not in set(tested["model"]):
        lines.append("the rand-init baseline was not evaluated")
    if state == "done" and "search" in method:
        searched = {*run.models["tier"], *run.candidates["tier"]}
        empty = [tier for tier in tiers_of(run, run_id) if tier not in searched]
        lines += [f"{', '.join(empty)}: no model of the space lies within the bounds"] if empty else []
    return lines


def unknown_bounds(tables: Tables, bounds: Bounds) -> list[str]:
    """A sentence on the runs that did not record the bounds of their tiers."""
    known = {run_id for run_id, _ in bounds}
    with_tiers = runs_of_kind(tables, TIERS)  # others have no bounds
    unknown = [run_id for run_id in with_tiers if run_id not in known and configuration(tables, run_id)]
    if not unknown:
        return []
    return [f"Upper bounds are not shown for runs that did not record them: {', '.join(unknown)}."]
