"""Figures of ablations, on small tables of planted numbers: lines of two axes, megabytes, legends that fit."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from fedloom.experiments import analysis
from fedloom.experiments.analysis.tables import METRIC
from fedloom.experiments.report.ablation import (
    Study,
    bytes_figure,
    crossed_figure,
    differences_figure,
    macs_figure,
    metric_figure,
    rounds_figure,
    stages_figure,
    study_of,
    tiers_figure,
)
from fedloom.experiments.report.axes import Series, draw_series, scale_of
from fedloom.experiments.report.drawing import WITHOUT_STAR, legend_below, legend_line, looks, png, with_bars
from fedloom.experiments.report.hover import spots
from tools.generated_ablation import write_planned


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Beta_0 .9 and .5, three decays, two shares of the decay, two seeds, five subnets."""
    root = tmp_path_factory.mktemp("planned")
    written = write_planned(root, ["ablation=beta_schedule", "experiment=superfednas_digits"], rounds=20, candidates=4)
    return study_of(*analysis.load_ablation(root, written.ablation_id))


def test_the_second_axis_has_lines_and_the_third_panels(study: Study) -> None:
    figure = crossed_figure(study)
    assert figure is not None
    left, right = (axes for axes in figure.axes if axes.get_visible())
    assert [axes.get_title(loc="left") for axes in (left, right)] == ["decay_share=0.5", "decay_share=0.8"]
    assert (left.get_xlabel(), left.get_ylabel()) == ("beta_0", "mean test accuracy (%)")
    assert left.get_ylim() == right.get_ylim()
    lines = [line for line in right.lines if len(line.get_xdata()) == 2]
    # Of five subnets of 70, 74, ... %, less 4 at beta_0 .5, and 3 and 1 for a constant and a linear decay.
    assert [line.get_ydata() for line in lines] == [pytest.approx([v - 4, v]) for v in (75.0, 77.0, 78.0)]
    first, second, third = (line.get_xdata() for line in lines)
    assert second == pytest.approx([0.5, 0.9]), "from left to right"
    assert [first[0], third[0]] == pytest.approx([0.5 - 0.009 * 0.4, 0.5 + 0.009 * 0.4]), "their bars are side by side"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["constant", "linear", "cosine"]


def test_differences_are_those_of_pairs_along_what_an_axis_is_crossed_with(study: Study) -> None:
    figure = differences_figure(study, "decay")
    assert figure is not None
    left, right = figure.axes
    assert [axes.get_title(loc="left") for axes in (left, right)] == ["decay_share=0.5", "decay_share=0.8"]
    assert (left.get_xlabel(), left.get_ylabel()) == ("beta_0", "difference to decay=cosine\n(percentage points)")
    lines = [line for line in right.lines if line.get_marker() in "os"]
    assert [line.get_ydata() for line in lines] == [pytest.approx([d, d]) for d in (-3.0, -1.0)]
    # The effects of two seeds are .9 and 1.1 times those of both: a dash each, and no interval.
    dashes = right.collections[0].get_offsets()
    assert dashes[:, 1].tolist() == pytest.approx([-2.7, -3.3])
    low, high = right.get_ylim()
    assert low < -3.3
    assert high > 0
    (legend,) = figure.legends
    assert legend.get_title().get_text() == "decay"
    assert [text.get_text() for text in legend.get_texts()] == ["constant", "linear"]


def test_names_are_points_below_each_other_with_a_colour_per_value_of_the_other_axis(study: Study) -> None:
    figure = metric_figure(study)
    assert figure is not None
    beta, decay, _ = figure.axes
    assert [text.get_text() for text in decay.get_yticklabels()] == ["constant", "linear", "cosine"]
    assert decay.get_xlabel() == "mean test accuracy (%)"
    assert decay.get_ylim() == (2.5, -0.5), "the first is on top"
    points = [line for line in decay.lines if line.get_marker() in "os" and len(line.get_xdata()) == 3]
    assert [line.get_linewidth() for line in points] == [0, 0]
    assert points[0].get_xdata() == pytest.approx([75.0, 77.0, 78.0])
    assert beta.get_xlabel() == "beta_0"
    assert [part.legends[0].get_title().get_text() for part in figure.subfigs] == ["decay_share", "beta_0", "beta_0"]


@pytest.mark.parametrize("factor", [-1, 4], ids=["below 0", "above 1"])
@pytest.mark.parametrize("draw", [crossed_figure, metric_figure, stages_figure, tiers_figure])
def test_a_metric_outside_0_and_1_is_inside_the_axes(
    study: Study, draw: Callable[..., Figure | None], factor: int
) -> None:
    frame = study.frame.assign(**{METRIC: factor * study.frame[METRIC], "model": "fine_tuned"})
    figure = draw(replace(study, frame=frame))
    assert figure is not None
    for axes in figure.axes[3 if draw == stages_figure else 0 :]:
        (left, right), (low, high) = sorted(axes.get_xlim()), axes.get_ylim()
        points = [xy for line in axes.lines if line.get_marker() in list("os") for xy in line.get_xydata()]
        points += [(left, bar.get_height()) for bar in axes.patches]
        assert points
        assert all(left <= x <= right and min(low, high) <= y <= max(low, high) for x, y in points)


def drawn(figure: Figure | None) -> list[float]:
    """The numbers of all lines and bars."""
    assert figure is not None
    lines = [number for axes in figure.axes for line in axes.lines for number in line.get_xydata().ravel()]
    return [*lines, *(bar.get_height() for axes in figure.axes for bar in axes.patches)]


def with_two_names(study: Study, **of_fedavg: str) -> Study:
    """The study with `fine_tuned` as the final model, and `fedavg` as that of the trials with a constant decay."""
    frame = study.frame.assign(model="fine_tuned")
    frame.loc[frame["decay"] == "constant", ["model", *of_fedavg]] = ["fedavg", *of_fedavg.values()]
    return replace(study, frame=frame)


@pytest.mark.parametrize(
    "draw",
    [crossed_figure, metric_figure, stages_figure, lambda study: differences_figure(study, "decay")],
    ids=["crossed", "metric", "stages", "differences"],
)
def test_trials_whose_final_model_has_another_name_are_drawn(study: Study, draw: Callable[..., Figure | None]) -> None:
    assert drawn(draw(with_two_names(study))) == pytest.approx(drawn(draw(study)))


def test_networks_without_a_family_stand_beside_families(study: Study) -> None:
    figure = macs_figure(with_two_names(study, subnet=""))
    assert figure is not None
    constant, linear, _ = (line for line in figure.axes[1].lines if line.get_linewidth() == 1.7)
    # The mean of 70, 74, ..., 86 %, less 3 for a constant decay, and the subnets of 69, 73, ..., 85 % for a linear one.
    assert constant.get_ydata() == pytest.approx([75.0])
    assert linear.get_ydata() == pytest.approx([69.0, 73.0, 77.0, 81.0, 85.0])


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["sgd", "fedprox"], "names"),
        ([True, False], "names"),
        ([None, 0.5], "names"),
        ([0.5, 1.0], "linear"),
        ([1.0, 2.0, 3.0], "linear"),
        ([1.0, 0.5, 0.25], "log"),
        ([100.0, 1.0, 0.1], "log"),
        ([0, 0.01, 0.1], "symlog"),
        ([-1.0, 10.0], "linear"),
        ([0.0, 0.2, 0.4], "linear"),
    ],
)
def test_numbers_have_a_scale_and_names_have_none(values: list[object], kind: str) -> None:
    assert scale_of(values).kind == kind


@pytest.mark.parametrize("lying", [True, False])
def test_intervals_of_shares_end_at_0_and_100_percent(lying: bool) -> None:
    axes = Figure().subplots()
    rows = pd.DataFrame({"mean": [0.95, 0.4], "half_width": [0.1, 0.5], "values": [[], []]})
    with_bars(axes, [0.0, 1.0], rows, "black", lying=lying)
    ends = [np.ravel(part.get_segments())[not lying :: 2] for bars in axes.containers for part in bars[2]]
    assert ends == [pytest.approx([85.0, 100.0]), pytest.approx([0.0, 90.0])]


@pytest.mark.parametrize("values", [["x", "y"], [1.0, 2.0]], ids=["lying", "standing"])
def test_tooltips_say_whole_intervals_and_those_without_width(values: list[object]) -> None:
    figure = Figure()
    rows = pd.DataFrame({"a": values, "mean": [0.95, 0.4], "half_width": [0.1, 0.0], "values": [[], []]})
    draw_series(figure.subplots(), "a", values, [Series("", rows, "black", "o")], "accuracy (%)")
    figure.canvas.draw()
    said = [spot.text.splitlines()[-1] for spot in spots(figure)]
    assert said == ["95 % interval: 85 to 105", "95 % interval: 40 to 40"]


def test_accuracy_stands_over_the_megabytes_of_both_directions(study: Study) -> None:
    figure = bytes_figure(study)
    assert figure is not None
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        f"supernet training, decay={decay}" for decay in ("constant", "linear", "cosine")
    ]
    axes = figure.axes[-1]  # the reference, as that of the third axis is .8
    # A round of ten clients that receive and send 4000 bytes each; validated after every fifth one.
    assert axes.lines[0].get_xdata() == pytest.approx([0.0, 0.4, 0.8, 1.2])
    assert axes.get_xscale() == "log"
    figure.canvas.draw()
    assert {"0.5", "1"} <= {label.get_text() for label in axes.get_xticklabels()}


def test_a_value_without_validation_shows_what_its_clients_report(study: Study) -> None:
    tables, frame = study.tables, study.frame
    of_half = tables.evaluations["run_id"].isin(frame.loc[frame["beta_0"] == 0.5, "run_id"])
    without = replace(tables, evaluations=tables.evaluations[~of_half | (tables.evaluations["split"] != "validation")])
    figure = rounds_figure(replace(study, tables=without))
    assert figure is not None
    validated, reported = figure.axes[-1].lines
    assert (validated.get_linestyle(), reported.get_linestyle()) == ("-", "--")
    # Validated after every fifth of twenty rounds; clients report in every round.
    assert validated.get_xdata() == pytest.approx([0, 5, 10, 15])
    assert reported.get_xdata() == pytest.approx(range(1, 21))


def test_eight_lines_have_eight_colours_and_markers() -> None:
    colours, markers = zip(*looks(range(8)).values(), strict=True)
    assert len(set(colours)) == len(set(markers)) == 8
    assert len({*looks(range(88)).values()}) == 88
    assert len({*looks(range(80), markers=WITHOUT_STAR).values()}) == 80


@pytest.mark.parametrize(("labels", "rows"), [(["a rather long name"] * 7, 3), (["mean", "Krum"] * 4, 2), (["a"], 1)])
def test_a_legend_is_no_wider_than_its_figure(labels: list[str], rows: int) -> None:
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    figure.subplots()
    legend_below(figure, [legend_line(label=label) for label in labels], 6, "rule")
    png(figure)
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert len({round(text.get_window_extent().y0) for text in figure.legends[0].get_texts()}) == rows
