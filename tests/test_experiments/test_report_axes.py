"""Axes that panels share, and curves that coincide."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedloom.experiments.analysis.settings import SEEDS, Setting
from fedloom.experiments.report import drawing
from fedloom.experiments.report.ablation import values_legend
from fedloom.experiments.report.axes import Series, draw_series
from fedloom.experiments.report.drawing import pdf, png, same_limits, tint
from fedloom.experiments.report.rounds import communication_figure, convergence_figure

REAL_FONTS = drawing.PDF_FONTS
"""Before the other tests' fonts are rough."""


def setting(run_id: str, name: str = "demo") -> Setting:
    return Setting(name, "demo", (run_id,), ("1",), "tiers", {}, {})


def test_panels_share_a_range_unless_one_would_be_flat() -> None:
    left, right = Figure().subplots(1, 2)
    left.set_ylim(0.0, 1.0)
    right.set_ylim(0.5, 0.9)
    assert same_limits([left, right], y=True, most=3.0)
    assert left.get_ylim() == right.get_ylim() == (0.0, 1.0)
    right.set_ylim(0.5, 0.8)
    assert not same_limits([left, right], y=True, most=3.0)
    assert right.get_ylim() == (0.5, 0.8)
    assert same_limits([left, right], y=True), "settings are there to be compared, however flat"
    assert right.get_ylim() == (0.0, 1.0)
    assert same_limits([], x=True, y=True)


def test_a_line_along_an_axis_goes_from_left_to_right_in_whatever_order_its_values_are_given() -> None:
    given = [0.5, 0.9, 0.7]
    axis = pd.Categorical(given, categories=given, ordered=True)
    rows = pd.DataFrame({"share": axis, "mean": [0.1, 0.3, 0.2], "half_width": [0.01, 0.03, 0.02], "n": 3})
    rows["values"] = [[mean, mean, mean] for mean in rows["mean"]]
    axes = Figure().subplots()
    draw_series(axes, "share", given, [Series("all", rows, "black", "o")], "accuracy (%)")
    (line,) = (line for line in axes.lines if line.get_label() == "all")
    assert [*map(tuple, line.get_xydata())] == [(0.5, 10), (0.7, 20), (0.9, 30)]


def curves(kind: str, losses: list[float]) -> pd.DataFrame:
    rows = {"rounds_done": range(1, len(losses) + 1), "loss": losses, "metric": np.linspace(0.2, 0.9, len(losses))}
    return pd.DataFrame(rows).assign(run_id="r1", kind=kind, tier="", series="train", **{SEEDS: "1"})


def test_a_stage_that_moves_little_has_an_axis_of_its_own() -> None:
    frame = pd.concat([curves("supernet", [2.3, 1.0, 0.2]), curves("fine_tuned", [0.2, 0.15, 0.1])])
    figure = convergence_figure(frame, [setting("r1")], ("loss", "metric"))
    assert figure is not None
    losses, accuracies = figure.axes[:2], figure.axes[2:]
    assert losses[1].get_ylim()[1] < 0.25 < 2.0 < losses[0].get_ylim()[1]
    assert losses[1].yaxis.get_tick_params()["labelleft"], "an own axis has its numbers"
    assert accuracies[0].get_ylim() == accuracies[1].get_ylim()
    assert not accuracies[1].yaxis.get_tick_params()["labelleft"]


def test_curves_of_both_directions_are_seen_where_they_coincide() -> None:
    rounds = pd.DataFrame(
        {"run_id": "r1", "kind": "supernet", "stage": "supernet", "bytes_down": [5, 5], "bytes_up": [5, 5]}
    )
    kinds = pd.DataFrame({"run_id": ["r1"], "kind": ["supernet"], "bytes_down": [10], "bytes_up": [10]})
    figure = communication_figure(kinds, rounds, [setting("r1")])
    assert figure is not None
    down, up = figure.axes[1].lines[:2]
    assert down.get_ydata() == pytest.approx(up.get_ydata())
    assert down.get_linewidth() > up.get_linewidth(), "the upper one leaves the lower one's edges"
    assert (down.is_dashed(), up.is_dashed()) == (False, True)


def test_a_run_that_trained_for_no_round_has_bytes_of_other_stages_and_a_figure() -> None:
    rounds = pd.DataFrame(columns=["run_id", "kind", "stage", "bytes_down", "bytes_up"])
    kinds = pd.DataFrame({"run_id": ["r1"], "kind": ["evaluation"], "bytes_down": [10], "bytes_up": [0]})
    assert communication_figure(kinds.assign(**{SEEDS: "1"}), rounds, [setting("r1")]) is not None


def centre(artist: Artist) -> float:
    box = artist.get_window_extent()
    return float(box.x0 + box.x1) / 2


def test_legends_are_centred_below_their_panel_or_figure() -> None:
    rounds = pd.DataFrame(
        {"run_id": "r1", "kind": "supernet", "stage": "supernet", "bytes_down": [5, 5], "bytes_up": [5, 5]}
    )
    kinds = pd.DataFrame({"run_id": ["r1"], "kind": ["supernet"], "bytes_down": [10], "bytes_up": [10]})
    figure = communication_figure(kinds, rounds, [setting("r1")])
    assert figure is not None
    png(figure)
    assert centre(figure.legends[0]) == pytest.approx(figure.bbox.width / 2, abs=2)
    panels = Figure(figsize=(9, 4), layout="constrained")
    left, right = panels.subplots(1, 2)
    for axes, label in ((left, "a"), (right, "a longer one")):
        axes.set_ylabel("accuracy (%)")
        values_legend(axes, "beta", [Line2D([], [], label=label)])
    png(panels)
    for axes in (left, right):
        legend = axes.get_legend()
        assert legend is not None
        assert centre(legend) == pytest.approx(centre(axes.patch), abs=2)


def test_a_tint_is_lighter_and_hides_what_is_below() -> None:
    assert tint("#000000") == "#747474"
    assert tint("#ffffff") == "#ffffff"


def test_papers_get_fonts_that_conferences_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "PDF_FONTS", REAL_FONTS)
    figure = Figure()
    figure.subplots().set_title("accuracy")
    content = pdf(figure)
    assert b"/Type3" not in content
    assert b"/CIDFontType2" in content
