"""Tables of every class's accuracy, and of the paragraphs that language models write."""

from collections.abc import Sequence

import pandas as pd

from fedloom.experiments.analysis.details import of_final_models, paragraphs, per_class
from fedloom.experiments.analysis.frames import natural
from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.analysis.tables import Tables
from fedloom.experiments.report.parts.block import Block
from fedloom.experiments.report.parts.numbers import ABSENT, count, mean_over_seeds, percent
from fedloom.experiments.report.parts.words import model_name, over_runs, sentence

MOST_COLUMNS = 10
"""Tiers or targets beside each other; a table of more would not fit a page."""
MOST_PARAGRAPHS = 12


def class_blocks(tables: Tables, settings: Sequence[Setting]) -> list[Block]:
    """Per setting, the accuracy of every class with the models that the method ends with, a column per tier."""
    frame = per_class(tables)
    return [block for setting in settings if (block := _class_block(of_final_models(setting.rows(frame)), setting))]


def _class_block(rows: pd.DataFrame, setting: Setting) -> Block | None:
    tiers = sorted(set(rows["tier"].astype(str)), key=natural)
    if rows.empty or len(tiers) > MOST_COLUMNS:
        return None
    found = []
    for name in dict.fromkeys(rows["class_name"]):
        own = rows[rows["class_name"] == name]
        cells = [_recall(own[own["tier"] == tier]) for tier in tiers]
        found.append((str(name), mean_over_seeds(own[own["tier"] == own["tier"].iloc[0]], "samples", count), *cells))
    model = model_name(str(rows["model"].iloc[0]))
    text = (
        f"Accuracy in % on the test samples of each class, {model}; {over_runs(setting)}.",
        "Precision and F1: `analysis.per_class`.",
    )
    return Block(f"{setting.name}: classes", text, ("class", "samples", *tiers), tuple(found), labels=1)


def _recall(rows: pd.DataFrame) -> str:
    return mean_over_seeds(rows, "recall", percent) if len(rows) else ABSENT


def paragraph_block(tables: Tables, settings: Sequence[Setting]) -> Block:
    """A paragraph by every tier's model of every setting's first run: what it goes on with after the same beginning."""
    frame, rows = paragraphs(tables), []
    for setting in settings:
        own = of_final_models(frame[frame["run_id"] == setting.run_ids[0]])
        for _, row in own.sort_values("tier", key=lambda names: names.map(natural), kind="stable").iterrows():
            written = " ".join(f"[{row['given']}]{row['written']}".split())
            rows.append((setting.name, str(row["tier"]), written, f"{row['loss']:.2f}"))
    text = (
        "What the models write after the beginning of a test text, in brackets, drawn token by token.",
        sentence("loss: how surprising what they wrote is to themselves, in nats per token"),
    )
    heads = ("setting", "tier", "text", "loss")
    return Block("Written by the models", text, heads, tuple(rows[:MOST_PARAGRAPHS]), labels=3)
