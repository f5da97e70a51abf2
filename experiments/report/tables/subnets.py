"""Table of the evaluated subnets of SuperFedNAS, with the quality of the search's predictors."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.experiments.analysis.intervals import is_absent
from fedloom.experiments.analysis.stages import ALONE
from fedloom.experiments.analysis.subnets import SEARCHED, SUPERNET, Predictor, Subnet, SubnetSummary
from fedloom.experiments.report.parts.block import Block
from fedloom.experiments.report.parts.numbers import ABSENT, Write, percent, seconds, si, with_interval
from fedloom.experiments.report.parts.words import over_runs, sentence

KINDS = {
    SUPERNET: "the family's subnets are cut from the supernet",
    SEARCHED: "targets and tiers name the search's winners, cut without any training",
    ALONE: "every subnet was trained alone",
}


def subnet_block(summary: SubnetSummary, *, wide: bool) -> Block:
    """One row per evaluated subnet, or per target; `wide` adds the winners' choices, too wide for a terminal."""
    columns = [c for c in _columns() if any(s.values[c[0]] is not None for s in summary.subnets)]
    labels = ("subnet", "choices", "id") if wide else ("subnet",)
    heads = (*labels, *(head for _, head, _ in columns))
    rows = tuple((*_names(s)[: len(labels)], *_cells(s, columns)) for s in summary.subnets)
    return Block(f"Subnets: {summary.setting.name}", _text(summary), heads, rows, labels=len(labels))


def _cells(subnet: Subnet, columns: Sequence[tuple[str, str, Write]]) -> list[str]:
    return [with_interval(subnet.values[key], write) for key, _, write in columns]


def _columns() -> list[tuple[str, str, Write]]:
    columns: list[tuple[str, str, Write]] = [("macs", "MACs", si), ("parameters", "params", si)]
    for quality, unit, write in (("accuracy", " %", percent), ("perplexity", "\nperplexity", _perplexity)):
        columns += [(f"{split}_{quality}", f"{split}{unit}", write) for split in ("validation", "test")]
    return columns


def _perplexity(value: Any) -> str:
    return ABSENT if is_absent(value) else f"{float(value):.4g}"


def _names(subnet: Subnet) -> tuple[str, str, str]:
    return (subnet.target or subnet.label, subnet.label, subnet.architecture or ABSENT)


def _text(summary: SubnetSummary) -> tuple[str, ...]:
    over = sentence(over_runs(summary.setting))
    found = dict.fromkeys(s.model for s in summary.subnets)
    kinds = "; ".join(KINDS[model] for model in found)
    measured = f"{kinds[:1].upper()}{kinds[1:]}. Validation and test: the server's whole data."
    return (over, measured, *(_quality(p) for p in summary.predictors))


_MEASURES: Mapping[str, tuple[str, Write, str]] = {
    "accuracy": ("accuracy", percent, " percentage points"),
    "loss": ("loss", lambda value: f"{value:.4f}", ""),
    "latency_s": ("latency", seconds, ""),
}
"""Per measure of a predictor its name, how its values are written, and their unit."""


def _quality(predictor: Predictor) -> str:
    """A sentence on the predictor's rank correlation and error on held-out subnets."""
    what, shows, unit = _MEASURES[predictor.measure]
    tau, error = predictor.kendall_tau, predictor.mean_absolute_error
    shown = with_interval(error, shows)
    held_out = ABSENT if predictor.held_out is None else f"{predictor.held_out.mean:.0f}"
    return (
        f"Predictor of {what}, on {held_out} held-out subnets: "
        f"Kendall tau {with_interval(tau, lambda v: f'{v:.2f}')}, mean absolute error {shown}{unit}."
    )
