"""Table of the distribution of test accuracy over clients."""

from collections.abc import Sequence

from fedloom.experiments.analysis.frames import (
    fairness,
    natural,
    shown_models,
)
from fedloom.experiments.analysis.kinds import ALL_TIERS
from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.analysis.tables import Tables
from fedloom.experiments.report.parts.block import Block
from fedloom.experiments.report.parts.numbers import count, mean_over_seeds, percent
from fedloom.experiments.report.parts.words import model_name, setting_head


def fairness_block(tables: Tables, settings: Sequence[Setting]) -> Block:
    """One row per setting, model and tier (FedorAS, Tab. 7)."""
    frame = fairness(tables)
    models = shown_models(list(frame["model"]))
    rows = []
    for setting in settings:
        groups = [(str(m), str(t), group) for (m, t), group in setting.rows(frame).groupby(["model", "tier"])]
        groups.sort(key=lambda g: (models.index(g[0]), g[1] == ALL_TIERS, natural(g[1])))
        for model, tier, group in groups:
            counts = [mean_over_seeds(group, c, count) for c in ("clients", "excluded")]
            values = [mean_over_seeds(group, c, percent) for c in ("mean", "std", "worst")]
            rows.append((setting.name, model_name(model), tier, *counts, *values))
    text = (
        "Accuracy in % of each model on every client's own test data; every client weighs the same. The standard "
        "deviation is that of the clients (divided by their number). Clients without test samples are left out and "
        "counted beside.",
    )
    heads = (setting_head(settings), "model", "tier", "clients", "left out", "mean", "std", "worst")
    return Block("Fairness over clients", text, heads, tuple(rows), labels=3)
