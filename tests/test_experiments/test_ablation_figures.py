"""Figures of ablations, on small tables of planted numbers: lines of two axes, megabytes, legends that fit."""

import pytest
from matplotlib.figure import Figure

from fedloom.experiments import analysis
from fedloom.experiments.report.ablation import Study, bytes_figure, crossed_figure, study_of
from fedloom.experiments.report.drawing import legend_below, legend_line, looks, png
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
    assert [axes.get_title(loc="left") for axes in (left, right)] == ["decay_share: 0.5", "decay_share: 0.8"]
    assert (left.get_xlabel(), left.get_ylabel(), right.get_ylabel()) == ("beta_0", "mean test accuracy (%)", "")
    assert left.get_ylim() == right.get_ylim()
    lines = [line for line in right.lines if len(line.get_xdata()) == 2]
    # Of five subnets of 70, 74, ... %, less 4 at beta_0 .5, and 3 and 1 for a constant and a linear decay.
    assert [line.get_ydata() for line in lines] == [pytest.approx([v, v - 4]) for v in (75.0, 77.0, 78.0)]
    first, second, third = (line.get_xdata() for line in lines)
    assert second == pytest.approx([0.9, 0.5])
    assert [first[1], third[1]] == pytest.approx([0.5 - 0.009 * 0.4, 0.5 + 0.009 * 0.4]), "their bars are side by side"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["constant", "linear", "cosine"]


def test_accuracy_stands_over_the_megabytes_of_both_directions(study: Study) -> None:
    figure = bytes_figure(study)
    assert figure is not None
    (axes,) = figure.axes
    # A round of ten clients that receive and send 4000 bytes each; validated after every fifth one.
    assert axes.lines[0].get_xdata() == pytest.approx([0.0, 0.4, 0.8, 1.2])
    assert axes.get_xscale() == "log"
    figure.canvas.draw()
    assert {"0.5", "1"} <= {label.get_text() for label in axes.get_xticklabels()}


def test_eight_lines_have_eight_colours_and_markers() -> None:
    colours, markers = zip(*looks(range(8)).values(), strict=True)
    assert len(set(colours)) == len(set(markers)) == 8


@pytest.mark.parametrize(("labels", "rows"), [(["a rather long name"] * 7, 3), (["mean", "Krum"] * 4, 2), (["a"], 1)])
def test_a_legend_is_no_wider_than_its_figure(labels: list[str], rows: int) -> None:
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    figure.subplots()
    legend_below(figure, [legend_line(label=label) for label in labels], 6, "rule")
    png(figure)
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert len({round(text.get_window_extent().y0) for text in figure.legends[0].get_texts()}) == rows
