"""Tables of communication and compute per stage."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.frames import (
    communication,
    communication_by_kind,
)
from fedloom.experiments.analysis.kinds import SILOS, SUBNETS
from fedloom.experiments.analysis.labels import Labels
from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.analysis.stages import ALONE, GAINS
from fedloom.experiments.analysis.tables import Tables, only
from fedloom.experiments.report.parts.block import Block
from fedloom.experiments.report.parts.numbers import count, mean_over_seeds, seconds, si, size
from fedloom.experiments.report.parts.words import setting_head, stage_name


def communication_block(tables: Tables, settings: Sequence[Setting], labels: Labels) -> Block:
    """One row per setting and stage, and one row per setting with the total of the method itself."""
    stages = communication(tables)
    kinds = communication_by_kind(stages)
    rows = [row for s in settings for row in _communication_rows(s, s.rows(stages), s.rows(kinds), labels)]
    heads = (setting_head(settings), "stage", "rounds", "client tasks", "down", "up", "MACs", "simulated", "wall")
    return Block("Communication and work per stage", (_communication_text(tables, settings),), heads, tuple(rows))


def _communication_rows(
    setting: Setting, stages: pd.DataFrame, kinds: pd.DataFrame, labels: Labels
) -> Iterator[tuple[str, ...]]:
    """The rows of each kind of stage (its tiers and their sum), and the total of the method."""
    # The parts of a SuperFedNAS stage are subnets, or the steps of a search.
    every = "in all" if setting.kind == SUBNETS else "all tiers"
    for kind in dict.fromkeys(stages["kind"]):
        of_kind = stages[stages["kind"] == kind]
        tiers = list(dict.fromkeys(of_kind["tier"]))
        for tier in tiers:
            stage = _stage_label(setting.run_ids[0], kind, tier, labels)
            yield (setting.name, stage, *_work(of_kind[of_kind["tier"] == tier]))
        if len(tiers) > 1:
            yield (setting.name, f"{stage_name(kind)}, {every}", *_work(kinds[kinds["kind"] == kind]))
    if len(stages):
        yield (setting.name, stage_name("method"), *_work(kinds[kinds["kind"] == "method"]))


def _communication_text(tables: Tables, settings: Sequence[Setting]) -> str:
    others = any(s.kind != SILOS for s in settings)
    left_out = ["the rand-init baseline (where there is a supernet)"] if others else []
    left_out += ["the final evaluation", *(["personalisation gains"] if tables.rounds["stage"].eq(GAINS).any() else [])]
    return (
        f"Sums over all clients that took part. The method in total is without {' and without '.join(left_out)}. "
        f"{'A central search sends nothing. ' if others else ''}"
        "Simulated time is that of the virtual clock, wall time that of this machine."
    )


def _work(rows: pd.DataFrame) -> Sequence[str]:
    counts = [mean_over_seeds(rows, c, count) for c in ("rounds", "clients")]
    sizes = [mean_over_seeds(rows, c, size) for c in ("bytes_down", "bytes_up")]
    times = [mean_over_seeds(rows, c, seconds) for c in ("simulated_s", "wall_s")]
    return (*counts, *sizes, mean_over_seeds(rows, "macs", si), *times)


def dry_block(tables: Tables, run_id: str, labels: Labels) -> Block:
    """The counts of a dry run, per stage and in total."""
    stages = communication(only(tables, [run_id]))
    sums = {name: stages[name].sum() for name in ("rounds", "clients", "bytes_down", "bytes_up", "macs", "simulated_s")}
    rows = [
        (_stage_label(run_id, str(row["kind"]), str(row["tier"]), labels), *_counted(row))
        for row in stages.to_dict(orient="records")
    ]
    if len(rows) > 1:
        rows.append(("in total", *_counted(sums)))
    heads = ("stage", "rounds", "client\ntasks", "\ndown", "\nup", "\nMACs", "simulated\ntime")
    return Block(f"Dry run {run_id}", ("Counted over all clients; nothing was trained.",), heads, tuple(rows), labels=1)


def _stage_label(run_id: str, kind: str, tier: str, labels: Labels) -> str:
    """The readable name of a stage and its tier, or of the subnet that it trained alone."""
    return f"{stage_name(kind)} {labels.of(run_id, tier) if kind == ALONE else tier}".strip()


def _counted(row: Mapping[Any, Any]) -> Sequence[str]:
    sizes = (size(row["bytes_down"]), size(row["bytes_up"]))
    return (f"{row['rounds']:.0f}", f"{row['clients']:.0f}", *sizes, si(row["macs"]), seconds(row["simulated_s"]))
