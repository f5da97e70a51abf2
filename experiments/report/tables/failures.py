"""Table of the clients that failed, dropped out or were late."""

from collections.abc import Sequence

import pandas as pd

from fedloom.experiments.analysis.frames import (
    failures,
)
from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.analysis.tables import Tables
from fedloom.experiments.report.parts.block import Block
from fedloom.experiments.report.parts.numbers import ABSENT
from fedloom.experiments.report.parts.words import stage_name

MOST_CAUSES = 30


def failures_block(tables: Tables, settings: Sequence[Setting] = ()) -> Block:
    """The client rows whose status is not ok, by cause; for several settings also their number per setting."""
    frame = failures(tables)
    rows = []
    for row in frame.head(MOST_CAUSES).to_dict(orient="records"):
        first = f"client {row['client_id']}, {row['stage']}, round {row['round'] + 1}"
        cells = (row["run_id"], stage_name(row["kind"]), row["status"], row["example"] or ABSENT, first)
        rows.append((*(str(c) for c in cells), str(row["count"])))
    of = [f"{_failed(s.rows(frame))} of {len(s.rows(tables.clients))} ({s.name})" for s in settings]
    each = f": {', '.join(of)}" if len(of) > 1 else ""
    text = [f"{_failed(frame)} of {len(tables.clients)} client rows are not ok{each}."]
    if len(frame) > MOST_CAUSES:
        text.append(f"The {MOST_CAUSES} most frequent of {len(frame)} causes are shown.")
    heads = ("run", "stage", "status", "cause (of the first)", "first", "rows")
    return Block("Clients that did not finish", tuple(text), heads, tuple(rows), labels=5)


def _failed(causes: pd.DataFrame) -> int:
    return int(causes["count"].sum())
