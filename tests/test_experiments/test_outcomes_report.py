"""The table and the figure of what settings end with."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedloom.experiments.analysis.outcomes import OUTCOMES
from fedloom.experiments.report.outcomes import outcomes_block, outcomes_figure


def rows(model: str | None, accuracies: list[float], **values: Any) -> pd.DataFrame:
    """Runs of a setting with these accuracies, a seed each; unknown measures are null."""
    known = {"total_bytes": 1e6, "total_macs": 2e9, "simulated_s": 7200.0, **values}
    place = {"model": "final" if model else None, "final_model": model, "models": 4 if model else 0}
    every = [{**dict.fromkeys(OUTCOMES, math.nan), **place, **known, "accuracy": a, "seeds": str(i)}
             for i, a in enumerate(accuracies)]  # fmt: skip
    return pd.DataFrame(every)


GROUPS = [
    (("FedorAS",), rows("fine_tuned", [0.5, 0.7], worst_client=0.25)),
    (("FjORD",), rows("fjord", [0.4, 0.4], total_bytes=2e6, total_macs=4e9, epsilon=1.5)),
    (("waiting",), rows(None, [math.nan])),
]


def test_a_row_per_evaluated_setting_without_what_nobody_measured() -> None:
    block = outcomes_block(GROUPS, ("method",))
    first, second = (dict(zip(block.heads, row, strict=True)) for row in block.rows)
    assert "clients" not in block.heads
    assert (first["method"], first["models"], first["n"]) == ("FedorAS", "4 × fine-tuned", "2")
    assert (first["accuracy %"], first["worst client"], first["epsilon"]) == ("50.0, 70.0", "25.0", "–")
    assert (second["bytes"], second["total MACs"], second["epsilon"]) == ("2.00 MB", "4.00 G", "1.5")


def test_a_panel_per_cost_and_the_front_through_what_is_not_beaten() -> None:
    figure = outcomes_figure(GROUPS, ("method",))
    assert figure is not None
    labels = [axes.get_xlabel() for axes in figure.axes]
    assert labels == ["bytes, both ways (MB)", "MACs (G)"], "both take the same time"
    fronts = [line for line in figure.axes[0].lines if line.get_drawstyle() == "steps-post"]
    # FjORD costs more and is worse.
    assert [(np.array(f.get_xdata()).tolist(), np.array(f.get_ydata()).tolist()) for f in fronts] == [
        ([1.0], [pytest.approx(60.0)])
    ]
    (legend,) = figure.legends
    assert legend.get_title().get_text() == "method"
    assert [text.get_text() for text in legend.get_texts()] == ["FedorAS", "FjORD"]


@pytest.mark.parametrize("accuracies", [[-0.6, -0.3], [2.4, 3.1]])
def test_a_metric_outside_0_and_1_is_inside_the_axes(accuracies: list[float]) -> None:
    beyond = rows("global", accuracies, total_bytes=3e6, total_macs=1e9)
    figure = outcomes_figure([(("mine",), beyond), (("other",), beyond.assign(total_bytes=1e6))])
    assert figure is not None
    low, high = figure.axes[0].get_ylim()
    assert low < 100 * min(accuracies) < 100 * max(accuracies) < high


def test_runs_at_work_do_not_count() -> None:
    begun = rows(None, [math.nan], total_bytes=20.0).assign(seeds="9")
    group = (GROUPS[1][0], pd.concat([GROUPS[1][1], begun]))
    block = outcomes_block([group], ("method",))
    (row,) = (dict(zip(block.heads, row, strict=True)) for row in block.rows)
    assert (row["n"], row["bytes"]) == ("2", "2.00 MB")


def test_a_seed_whose_search_found_nothing_is_named() -> None:
    mixed = pd.concat([rows("searched", [0.9]), rows("supernet", [0.2]).assign(seeds="1")])
    block = outcomes_block([(("SuperFedNAS",), mixed)], ("method",))
    assert block.rows[0][1] == "4 × searched or supernet"


def test_one_setting_or_one_cost_needs_no_figure() -> None:
    assert outcomes_figure([GROUPS[0], (("the same",), rows("fine_tuned", [0.3]))]) is None
    assert outcomes_figure(GROUPS[:1]) is None
    assert outcomes_figure([GROUPS[0], GROUPS[2]]) is None
