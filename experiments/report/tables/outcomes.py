"""Table of what each setting ends with: one row per setting, whatever its method."""

from collections.abc import Sequence

import pandas as pd

from fedloom.experiments.analysis.frames import METRIC
from fedloom.experiments.report.parts.block import Block
from fedloom.experiments.report.parts.numbers import Write, mean_over_seeds, percent, seconds, si, size
from fedloom.experiments.report.parts.words import INTERVALS, model_name

Groups = Sequence[tuple[tuple[str, ...], pd.DataFrame]]
"""Settings: their labels, and their rows of `analysis.outcomes`."""

COLUMNS: tuple[tuple[str, str, Write], ...] = (
    (METRIC, "accuracy %", percent),
    ("least_accuracy", "worst model", percent),
    ("validation_accuracy", "validation", percent),
    ("client_accuracy", "clients", percent),
    ("worst_client", "worst client", percent),
    ("total_bytes", "bytes", size),
    ("total_macs", "total MACs", si),
    ("simulated_s", "simulated", seconds),
    ("epsilon", "epsilon", lambda value: f"{float(value):.3g}"),
    ("macs", "MACs", si),
    ("parameters", "parameters", si),
)
"""The measure, its head and its format."""

TEXT = (
    "What a setting ends with, so that methods with different models can be compared: accuracy in %, the mean over its "
    "final models on the whole test data (a model per tier; one for all; over the silos where each has its own), and "
    "the worst of them; the mean on validation data; on each client's own test data with its tier's model the mean "
    "and the worst client. A model for all is measured on all clients, also those that could not run it.",
    "Bytes are received and sent by all clients; total MACs are those of forward passes; both, and the simulated time, "
    "are of all stages of the method. MACs of one forward pass and parameters are means over the models. "
    f"{INTERVALS}",
)


def outcomes_block(groups: Groups, heads: tuple[str, ...]) -> Block:
    """A row per setting, without the columns that no setting has; `heads` are those of the labels."""
    known = [(labels, rows) for labels, every in groups if len(rows := evaluated(every))]
    shown = [column for column in COLUMNS if any(rows[column[0]].notna().any() for _, rows in known)]
    cells = [
        (
            *labels,
            _models(own),
            str(own["seeds"].nunique()),
            *(mean_over_seeds(own, measure, write) for measure, _, write in shown),
        )
        for labels, own in known
    ]
    names = (*heads, "models", "n", *(head for _, head, _ in shown))
    return Block("What each setting ends with", TEXT, names, tuple(cells), labels=len(heads) + 1)


def evaluated(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of runs that were evaluated: the others' costs are those of a part of the work."""
    return rows[rows["model"].notna()]


def _models(rows: pd.DataFrame) -> str:
    """The final model's name (names, where a seed's search found nothing), with their number if there are several."""
    names = dict.fromkeys(model_name(str(name)) for name in rows["final_model"])
    name, most = " or ".join(names), int(rows["models"].max())
    return name if most == 1 else f"{most} × {name}"
