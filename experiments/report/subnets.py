"""The section of SuperFedNAS: evaluated subnets, the search, beta, and the cost of training k models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedloom.experiments.analysis.architectures import decoder
from fedloom.experiments.analysis.settings import SEEDS, Setting, is_absent, settings_of, spread
from fedloom.experiments.analysis.subnets import (
    FRONT,
    SAMPLES,
    SEARCHED,
    SUPERNET,
    CostComparison,
    Labels,
    SubnetSummary,
    cost_comparisons,
    scored,
    subnets,
    targets_of,
)
from fedloom.experiments.analysis.tables import ALONE, SUBNETS, Tables, only, real_rounds, runs_of_kind
from fedloom.experiments.report.content import Block, Picture, sheets
from fedloom.experiments.report.drawing import (
    BLUE,
    COUNTS,
    DASHED,
    GREEN,
    GREY,
    INK,
    LEGEND,
    LEGEND_LINE_IN,
    MARKERS,
    VERMILION,
    WITHOUT_STAR,
    grid_of,
    legend_below,
    legend_height_in,
    legend_line,
    legend_mark,
    legend_text,
    line_width,
    looks,
    new_figure,
    quiet,
    setting_handles,
    setting_label,
    stars,
    tier_colours,
    tiers_in_order,
    title_text,
    whole_numbers,
)
from fedloom.experiments.report.wording import (
    ABSENT,
    Write,
    caption_of,
    over_runs,
    percent,
    seconds,
    sentence,
    si,
    si_scale,
    size,
    times,
    with_interval,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {
    SUPERNET: "the family's subnets are cut from the supernet",
    SEARCHED: "rows of targets and tiers are the search's winners, cut from the supernet without further training",
    ALONE: "every subnet was trained alone",
}


def _perplexity(value: Any) -> str:
    return ABSENT if is_absent(value) else f"{float(value):.4g}"


COLUMNS: tuple[tuple[str, str, Write], ...] = (
    ("macs", "MACs", si),
    ("parameters", "params", si),
    ("validation_accuracy", "validation %", percent),
    ("test_accuracy", "test %", percent),
    ("validation_perplexity", "validation\nperplexity", _perplexity),
    ("test_perplexity", "test\nperplexity", _perplexity),
)

PREDICTED: Mapping[str, tuple[str, Write, str]] = {
    "accuracy": ("accuracy", percent, " percentage points"),
    "loss": ("loss", lambda value: f"{value:.4f}", ""),
    "latency_s": ("latency", seconds, ""),
}
"""By measure of a predictor: its name, and the format and unit of its values."""


def subnet_block(summary: SubnetSummary, *, wide: bool) -> Block:
    """One row per evaluated subnet, or per target; `wide` adds architectures and ids, too wide for a terminal."""
    columns = [c for c in COLUMNS if any(s.values[c[0]] is not None for s in summary.subnets)]
    labels = ("subnet", "architecture", "id") if wide else ("subnet",)
    decode = decoder(summary.setting.config)
    rows = []
    for s in summary.subnets:
        choices = (s.label, ABSENT) if s.architecture is None else (decode(s.architecture), s.architecture)
        values = (with_interval(s.values[key], write, summary.setting.num_seeds) for key, _, write in columns)
        rows.append((s.target or s.label, *(choices if wide else ()), *values))
    kinds = "; ".join(KINDS[model] for model in dict.fromkeys(s.model for s in summary.subnets))
    text = [
        sentence(over_runs(summary.setting)),
        f"{kinds[:1].upper()}{kinds[1:]}. Validation and test scores are on the server's whole data.",
    ]
    for predictor in summary.predictors:
        measure, write, unit = PREDICTED[predictor.measure]
        held_out = ABSENT if predictor.held_out is None else f"{predictor.held_out.mean:.0f}"
        tau = with_interval(predictor.kendall_tau, lambda value: f"{value:.2f}")
        error = with_interval(predictor.mean_absolute_error, write)
        text.append(
            f"Predictor of {measure}, on {held_out} held-out subnets: Kendall tau {tau}, mean absolute error "
            f"{error}{unit}."
        )
    heads = (*labels, *(head for _, head, _ in columns))
    return Block(f"Subnets: {summary.setting.name}", tuple(text), heads, tuple(rows), labels=len(labels))


def cost_block(comparison: CostComparison) -> Block:
    """iFedAvg over the first k members compared with the supernet, and FedAvg on the largest member alone."""
    c, last, largest = comparison, comparison.steps[-1], comparison.largest
    which = "the largest subnet" if largest.member.is_largest else f"the largest member, {largest.member.label},"
    text = [
        "Cost of training only, summed over all clients: bytes down and up, and MACs. iFedAvg trains the first k "
        "members of the family one by one; one supernet serves any number of them.",
        f"{last.k} {'member costs' if last.k == 1 else 'members cost'} {times(last.communication_ratio)} the "
        f"supernet's communication and {times(last.compute_ratio)} its compute; {which} alone "
        f"{times(largest.communication_ratio)} and {times(largest.compute_ratio)}.",
    ]
    if c.differences:
        text.append(f"They were not trained on equal terms: {'; '.join(c.differences)}.")
    named = [(str(step.k), step.member.label, step) for step in c.steps]
    rows = [
        (
            k,
            member,
            size(step.total.size_bytes),
            size(c.supernet_cost.size_bytes),
            times(step.communication_ratio),
            si(step.total.macs),
            si(c.supernet_cost.macs),
            times(step.compute_ratio),
        )
        for k, member, step in (*named, ("FedAvg", f"{largest.member.label} alone", largest))
    ]
    measured = [f"{what},\n{whose}" for what in ("bytes", "MACs") for whose in ("iFedAvg", "supernet")]
    heads = ("k", "with member", *measured[:2], "\nratio", *measured[2:], "\nratio")
    return Block(f"Cost of k models: {c.supernet} against {c.separately}", tuple(text), heads, tuple(rows))


LOGARITHMIC_FROM = 20.0
"""Ratio of the largest to the smallest MACs from which the axis is logarithmic, so that small subnets stay apart."""

PANEL_IN = 5.4
"""The width of a setting's panel in inches."""


def subnet_accuracy_figure(subnets: pd.DataFrame, settings: Sequence[Setting]) -> Figure | None:
    """Test accuracy (perplexity for text) against MACs, a panel per data set, a line per setting; None without values.

    `subnets` comes from `analysis.subnets.subnets`. Source: SuperFed, Fig. 4.
    """
    panels = _panels(subnets, settings)
    if not panels:
        return None
    drawn, width = looks((s.name for s in settings), markers=WITHOUT_STAR), 2.2 + 5.6 * len(panels)
    height = 4.4 + legend_height_in([setting_label(s) for s in settings], width)
    figure = new_figure((width, height))
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (dataset, quality, rows) in zip(row, panels, strict=True):
        scale, prefix = si_scale(float(rows["macs"].max()))
        for setting in settings:
            points = setting.rows(rows)
            _family(axes, points[points["model"] != SEARCHED], drawn[setting.name], scale)
            _winners(axes, points[points["model"] == SEARCHED], drawn[setting.name][0], scale)
        if rows["macs"].max() >= LOGARITHMIC_FROM * rows["macs"].min():
            axes.set_xscale("log")
        label = "test perplexity" if quality == "perplexity" else "test accuracy (%)"
        quiet(axes, title=dataset, xlabel=f"MACs of one forward pass{COUNTS[prefix]}", ylabel=label)
    shown = [s for s in settings if any(len(s.rows(rows)) for _, _, rows in panels)]
    with_winners = any((rows["model"] == SEARCHED).any() for _, _, rows in panels)
    handles = setting_handles(shown, drawn, width, 6)
    handles += [legend_mark("*", 12, "winner of the search")] if with_winners else []
    legend_below(figure, handles)
    return figure


def _panels(subnets: pd.DataFrame, settings: Sequence[Setting]) -> list[tuple[str, str, pd.DataFrame]]:
    """For each data set: its name, the compared quality, and the rows with `value` in the unit of the axis."""
    dataset_of = {r: str(s.config["data"]["dataset"]) for s in settings for r in s.run_ids}
    datasets = subnets["run_id"].map(dataset_of)
    panels = []
    for dataset in dict.fromkeys(datasets):
        rows = subnets[datasets == dataset]
        quality = "perplexity" if rows["test_perplexity"].notna().any() else "accuracy"
        values = rows[f"test_{quality}"] * (1 if quality == "perplexity" else 100)
        rows = rows.assign(value=values)[values.notna() & rows["macs"].notna()]
        if len(rows):
            panels.append((str(dataset), quality, rows))
    return panels


def _family(axes: Axes, rows: pd.DataFrame, look: tuple[str, str], scale: float) -> None:
    if rows.empty:
        return
    macs = spread(rows, ["architecture"], "macs")["mean"]
    points = spread(rows, ["architecture"], "value").assign(macs=macs).sort_values("macs")
    x = points["macs"].to_numpy(dtype=float) / scale
    colour, marker = look
    axes.plot(x, points["mean"].to_numpy(dtype=float), color=colour, marker=marker, markersize=6, linewidth=1.6)
    if rows[SEEDS].nunique() > 1:
        low, high = (points[end].to_numpy(dtype=float) for end in ("min", "max"))
        axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)


def _winners(axes: Axes, rows: pd.DataFrame, colour: str, scale: float) -> None:
    if rows.empty:
        return
    points = spread(rows, ["target"], "value")
    x, y = spread(rows, ["target"], "macs")["mean"] / scale, points["mean"]
    if rows[SEEDS].nunique() > 1:
        bars = [y - points["min"], points["max"] - y]
        axes.errorbar(x, y, yerr=bars, fmt="none", ecolor=colour, elinewidth=1.0, capsize=2)
    axes.scatter(x, y, s=170, marker="*", color=colour, edgecolors="black", linewidths=0.8, zorder=4)


def search_figure(scored: pd.DataFrame, settings: Sequence[Setting]) -> Figure | None:
    """Validation accuracy against MACs of all scored subnets, a panel per setting; None without rows.

    `scored` comes from `analysis.subnets.scored`. Samples are faint, the verified front is a line per run, the
    finalists of each target are dots and its winner is a star.
    """
    shown = [s for s in settings if len(s.rows(scored))]
    if not shown:
        return None
    targets = tiers_in_order(t for t in scored["tier"] if t not in (SAMPLES, FRONT))
    columns = min(len(shown), 2)
    figure = new_figure((3.0 + PANEL_IN * columns, 0.6 + 4.0 * -(-len(shown) // columns)))
    for axes, setting in zip(grid_of(figure, len(shown), columns), shown, strict=True):
        rows = setting.rows(scored)
        scale, prefix = si_scale(float(rows["macs"].max()))
        _seen(axes, rows.assign(macs=rows["macs"] / scale, metric=rows["metric"] * 100), targets)
        title = title_text(setting.name, PANEL_IN) if len(shown) > 1 else ""
        quiet(axes, title=title, xlabel=f"MACs of one forward pass{COUNTS[prefix]}", ylabel="validation accuracy (%)")
    colours, handles = tier_colours(targets), []
    if (scored["tier"] == SAMPLES).any():
        handles.append(legend_mark("o", 4.5, "sample", face=GREY, edge="none", alpha=0.6))
    if (scored["tier"] == FRONT).any():
        handles.append(legend_line(color=VERMILION, marker="o", markersize=4, label="verified front"))
    handles += [legend_mark("o", 6, f"scored for {t}", face=colours[t], edge="none") for t in targets]
    handles += [legend_mark("*", 12, "winner")] if scored["is_winner"].any() else []
    figure.legend(handles=handles, loc="outside right center", **LEGEND)
    return figure


def _seen(axes: Axes, rows: pd.DataFrame, targets: Sequence[str]) -> None:
    colours = tier_colours(targets)
    samples = rows[rows["tier"] == SAMPLES]
    axes.scatter(samples["macs"], samples["metric"], s=12, color=GREY, alpha=0.35, linewidths=0, zorder=2)
    front = rows[rows["tier"] == FRONT]
    axes.scatter(front["macs"], front["metric"], s=16, color=VERMILION, alpha=0.45, linewidths=0, zorder=3)
    for _, run in front[front["on_front"]].sort_values("macs").groupby("run_id"):
        axes.plot(run["macs"], run["metric"], color=VERMILION, marker="o", markersize=4, linewidth=1.4, zorder=3)
    for target in targets:
        scores = rows[rows["tier"] == target]
        axes.scatter(scores["macs"], scores["metric"], s=22, color=colours[target], alpha=0.75, linewidths=0, zorder=4)
        won = scores[scores["is_winner"]]
        stars(axes, won["macs"], won["metric"], colours[target])


def beta_figure(rounds: pd.DataFrame, settings: Sequence[Setting]) -> Figure | None:
    """beta against rounds, a line per setting; None if no run recorded it. Source: SuperFed, Sec. 4 and Fig. 5."""
    known = rounds[rounds["beta"].notna()]
    shown = [s for s in settings if len(s.rows(known))]
    if not shown:
        return None
    drawn, width = looks(s.name for s in settings), 7.0
    height = 3.6 + legend_height_in([s.name for s in shown], width)
    figure = new_figure((width, height))
    axes = figure.subplots()
    for i, setting in enumerate(shown):
        beta = spread(setting.rows(known), ["round"], "beta")["mean"]
        style: dict[str, Any] = {"color": drawn[setting.name][0], "label": legend_text(setting.name, width)}
        axes.plot(beta.index + 1, beta.to_numpy(dtype=float), linewidth=line_width(i, len(shown)), **style)
    quiet(axes, xlabel="round", ylabel="beta")
    whole_numbers(axes)
    axes.set_ylim(0, 1)
    if len(settings) > 1:
        figure.legend(loc="outside lower center", ncols=1, **LEGEND)
    return figure


def cost_figure(comparisons: Sequence[CostComparison]) -> Figure | None:
    """Bytes and MACs to train k models with iFedAvg and with a supernet; None without comparisons.

    Source: SuperFedNAS, Fig. 6.
    """
    if not comparisons:
        return None
    separate, supernets = {c.separately: c for c in comparisons}, {c.supernet: c for c in comparisons}
    looks_alone = list(zip(separate.items(), cycle(ALONE_COLOURS), cycle(MARKERS), strict=False))
    looks_together = list(zip(supernets.items(), cycle(TOGETHER_COLOURS), strict=False))
    width, handles = 10.2, []
    for (name, c), colour, marker in looks_alone:
        first_k = legend_text(f"{name}: each of the first k alone", width)
        handles.append(legend_line(color=colour, marker=marker, markersize=5, label=first_k))
        largest = legend_text(f"{name}: {c.largest.member.label} alone (FedAvg)", width)
        handles.append(legend_line(color=colour, linewidth=1.0, linestyle=DASHED, label=largest))
    for (name, _), colour in looks_together:
        supernet = legend_text(f"{name}: one supernet for all", width)
        handles.append(legend_line(color=colour, linewidth=2.0, label=supernet))
    lines = sum(1 + str(handle.get_label()).count("\n") for handle in handles)
    figure = new_figure((width, 4.0 + LEGEND_LINE_IN * lines))
    most = max(len(c.steps) for c in comparisons)
    panels = (("size_bytes", "communication, both ways", "B"), ("macs", "compute", "MACs"))
    for axes, (what, title, unit) in zip(figure.subplots(1, 2), panels, strict=True):
        scale, prefix = si_scale(max(getattr(s.total, what) for c in comparisons for s in (*c.steps, c.largest)))
        for (_, c), colour, marker in looks_alone:
            totals = [getattr(step.total, what) / scale for step in c.steps]
            axes.plot(
                [s.k for s in c.steps], totals, color=colour, marker=marker, markersize=5, linewidth=1.7, zorder=3
            )
            level = getattr(c.largest.total, what) / scale
            axes.plot([0.7, most + 0.3], [level, level], color=colour, linewidth=1.0, linestyle=DASHED)
        for i, ((_, c), colour) in enumerate(looks_together):
            level = getattr(c.supernet_cost, what) / scale
            axes.plot([0.7, most + 0.3], [level, level], color=colour, linewidth=line_width(i, len(supernets)))
        if len(comparisons) == 1:
            last = comparisons[0].steps[-1]
            ratio = last.communication_ratio if what == "size_bytes" else last.compute_ratio
            style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9, "color": INK}
            point = (last.k, getattr(last.total, what) / scale)
            axes.annotate(times(ratio), point, (-9, 0), ha="right", va="center", **style)
        quiet(axes, title=title, xlabel="models k", ylabel=f"{prefix}{unit}")
        whole_numbers(axes)
        axes.set_ylim(bottom=0)
        axes.set_xlim(0.7, most + 0.5)
    legend_below(figure, handles)
    return figure


ALONE_COLOURS = (VERMILION, "#E69F00", "#CC79A7")
TOGETHER_COLOURS = (BLUE, GREEN, "#56B4E9", INK)

CAPTIONS = {
    "accuracy-macs": (
        "Test accuracy against MACs",
        "Every point is a subnet on the server's whole test set. Lines join a family: subnets cut from one supernet "
        "without further training, or each trained alone. Stars are winners of the search, also cut without further "
        "training. For several runs of a setting, points are means; bands and bars reach from the minimum to the "
        "maximum.",
    ),
    "search": (
        "What the search saw",
        "Subnets of the trained supernet, scored on the server's validation data. Grey: the samples that the "
        "predictors learn from. The line joins the subnets of NSGA-II's verified front that no other beats; paler dots "
        "are the rest of the front. Coloured dots were scored for a target; the star is its winner.",
    ),
    "beta": (
        "Share of the largest subnet",
        "beta in every round: the weight that the client with the largest subnet has in the average; the other clients "
        "share the rest.",
    ),
    "cost": (
        "Cost of k models",
        "Bytes both ways and MACs of training, summed over all clients. Markers: iFedAvg, which trains the first k "
        "members of the family one by one. Solid horizontal line: one supernet for all of them. Dashed: FedAvg on the "
        "largest member alone. The number is iFedAvg's cost divided by the supernet's.",
    ),
}


def subnet_pictures(tables: Tables, labels: Labels) -> Iterator[Picture]:
    """The figures of all SuperFedNAS runs; none if there is no such run."""
    elastic = only(tables, runs_of_kind(tables, SUBNETS))
    if not elastic.paths:
        return
    settings = [s for s in settings_of(tables) if s.kind == SUBNETS]
    family, searched, rounds = subnets(elastic, labels), scored(elastic), real_rounds(elastic.rounds)
    for sheet in sheets(settings):
        figures = {
            "accuracy-macs": subnet_accuracy_figure(family, sheet.settings),
            "search": search_figure(searched, sheet.settings),
            "beta": beta_figure(rounds, sheet.settings),
        }
        for name, figure in figures.items():
            if figure is not None:
                title, caption = CAPTIONS[name]
                yield sheet.labelled(Picture(name, title, caption_of(sheet.settings, caption), figure))
    figure = cost_figure(cost_comparisons(tables, labels))
    if figure is not None:
        title, caption = CAPTIONS["cost"]
        yield Picture("cost", title, caption_of(settings, caption), figure)


def missing_of_subnets(run: Tables, tested: pd.DataFrame, state: str) -> list[str]:
    """Missing parts of a SuperFedNAS run: the evaluation, or winners of targets."""
    lines = [] if len(tested) else ["nothing was measured on test data yet: no accuracy of subnets"]
    winners = set(tested.loc[tested["model"] == SEARCHED, "tier"])
    lost = [target for target in targets_of(run, run.paths[0].run_id) if target not in winners]
    if state == "done" and lost:
        lines.append(f"{', '.join(lost)}: the search chose no subnet for {'it' if len(lost) == 1 else 'them'}")
    return lines
