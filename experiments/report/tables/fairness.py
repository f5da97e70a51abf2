"""Table of the distribution of test accuracy over clients."""

from collections.abc import Sequence

import pandas as pd

from fedloom.experiments.analysis.frames import (
    fairness,
    natural,
    shown_models,
)
from fedloom.experiments.analysis.kinds import ALL_TIERS
from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.analysis.tables import Tables
from fedloom.experiments.analysis.texts import PERPLEXITY
from fedloom.experiments.report.parts.block import Block
from fedloom.experiments.report.parts.numbers import Write, count, mean_over_seeds, percent, two_digits
from fedloom.experiments.report.parts.words import model_name, setting_head


def fairness_blocks(tables: Tables, settings: Sequence[Setting]) -> list[Block]:
    """The distribution of accuracy, of texts that of perplexity, over clients (FedorAS, Tab. 7)."""
    by_perplexity = fairness(tables, PERPLEXITY)
    texts = set(by_perplexity["run_id"])
    images = [s for s in settings if not texts.intersection(s.run_ids)]
    rest = [s for s in settings if texts.intersection(s.run_ids)]
    accuracy, perplexity = ("Accuracy in %", percent), ("Perplexity", two_digits)
    blocks = [_block(fairness(tables), images, *accuracy, setting_head(settings))] if images or not rest else []
    return [*blocks, *([_block(by_perplexity, rest, *perplexity, setting_head(settings))] if rest else [])]


def _block(frame: pd.DataFrame, settings: Sequence[Setting], what: str, write: Write, head: str) -> Block:
    """One row per setting, model and tier."""
    models = shown_models(list(frame["model"]))
    rows = []
    for setting in settings:
        groups = [(str(m), str(t), group) for (m, t), group in setting.rows(frame).groupby(["model", "tier"])]
        groups.sort(key=lambda g: (models.index(g[0]), g[1] == ALL_TIERS, natural(g[1])))
        for model, tier, group in groups:
            counts = [mean_over_seeds(group, c, count) for c in ("clients", "excluded")]
            values = [mean_over_seeds(group, c, write) for c in ("mean", "std", "worst")]
            rows.append((setting.name, model_name(model), tier, *counts, *values))
    text = (
        f"{what} of each model on every client's own test data; every client weighs the same. The standard deviation "
        "is that of the clients (divided by their number). Clients without test samples are left out and counted "
        "beside.",
    )
    heads = (head, "model", "tier", "clients", "left out", "mean", "std", "worst")
    title = "Fairness over clients" if what.startswith("Accuracy") else "Fairness over clients: perplexity"
    return Block(title, text, heads, tuple(rows), labels=3)
