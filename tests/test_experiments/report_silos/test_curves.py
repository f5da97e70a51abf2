"""Curves over rounds: means over silos, and the figures that draw them with a setting's phases."""

from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedloom.experiments.analysis.settings import settings_of
from fedloom.experiments.analysis.silos import curves, per_silo, phases
from fedloom.experiments.analysis.tables import load
from fedloom.experiments.report.silos import curves_figure, silo_accuracy_figure


def test_curves_are_means_over_silos_with_rounds_counted_over_all_stages(silos: Any) -> None:
    writer = silos.begin("r1")
    writer.add_training([(silos.UNDECIDED,) * 3] * 2, stage="first")
    writer.add_training([(silos.DECIDED,) * 3], stage="second")
    writer.add_gains({(0, 0): 0.5})
    writer.close()
    frame = curves(load(silos.root))
    train, validation = (frame[frame["series"] == s] for s in ("train", "validation"))
    assert train[["rounds_done", "mean_loss"]].values.tolist() == [[1, 3.0], [2, 2.0], [3, 3.0]]
    assert validation["rounds_done"].tolist() == [1, 2, 3]
    assert validation["mean"].tolist() == pytest.approx([0.1, 0.2, 0.1])
    assert validation["std"].tolist() == pytest.approx([0.1 * (2 / 3) ** 0.5] * 3)
    assert validation["silos"].tolist() == [3, 3, 3]


def test_what_silos_score_after_the_last_round_ends_their_curves_and_is_no_round(silos: Any) -> None:
    for run_id, scored in (("r1", False), ("r2", True)):
        writer = silos.begin(run_id)
        for stage in ("first", "second"):
            writer.add_training([(silos.UNDECIDED,) * 3] * 2, stage=stage)
            if scored:
                writer.add("rounds", stage=stage, round=2, clients_planned=0, bytes_down=0, bytes_up=0, wall_s=9.0)
                for silo in range(3):
                    row = {"model": "personal", "split": "validation", "metric": "accuracy", "samples": 5}
                    writer.add("evaluations", stage=stage, round=2, client_id=silo, value=0.8, **row)
        writer.close()
    assert silos.values("r2") == silos.values("r1")
    frame = curves(load(silos.root, ["r2"]))
    validation = frame[frame["series"] == "validation"]
    assert validation["rounds_done"].tolist() == [1, 2, 3, 4]
    assert validation["mean"].tolist() == pytest.approx([0.1, 0.8, 0.1, 0.8])
    assert validation["silos"].tolist() == [3] * 4
    assert frame.loc[frame["series"] == "train", "rounds_done"].tolist() == [1, 2, 3, 4]


def texts_of(figure: Figure | None) -> set[str]:
    assert figure is not None
    return {child.get_text() for axes in figure.axes for child in axes.texts}


def test_phases_are_named_where_they_agree_and_bars_where_they_do_not(silos: Any) -> None:
    silos.spider("r1", gains=False)
    silos.spider("r2", gains=False, method__train__lr=0.5)
    silos.spider("r3", gains=False, method__search__start=0)
    for runs, named, lines in ((["r1", "r2"], True, 2), (["r1", "r3"], False, 4)):
        tables = load(silos.root, runs)
        figure = curves_figure(curves(tables), phases(tables), settings_of(tables))
        assert bool(texts_of(figure)) == named, runs
        assert figure is not None
        assert [len(axes.lines) for axes in figure.axes] == [lines, lines]  # a curve, and a bar, per setting


def test_figures_draw_the_silos_of_a_repeated_seed_once_and_the_phases_of_all_seeds(silos: Any) -> None:
    for run_id, better, seed in (("r1", 0.0, 1), ("r2", 0.1, 1), ("r3", 0.0, 2)):
        silos.spider(run_id, better, gains=False, seed=seed)
    writer = silos.begin("r4", seed=3)
    writer.add_training([(s,) * 3 for s in (silos.UNDECIDED, silos.HALF, silos.HALF, silos.DECIDED)])
    writer.close()
    tables = load(silos.root, ["r1", "r2", "r3", "r4"])
    figure = silo_accuracy_figure(per_silo(tables), settings_of(tables))
    assert figure is not None
    dots = figure.axes[0].collections[0].get_offsets()
    # Seeds 1 (its runs have 50 and 60, 70 and 80, 90 and 100 %) and 2.
    assert sorted(np.asarray(dots)[:, 0]) == pytest.approx([50, 55, 70, 75, 90, 95])
    figure = curves_figure(curves(tables), phases(tables), settings_of(tables))
    assert figure is not None
    # The search ends after 2, 2 and 3 rounds.
    ends = [patch.get_extents().x1 for patch in figure.axes[0].patches]
    inside = figure.axes[0].transData.inverted().transform([(end, 0) for end in ends])[:, 0]
    assert inside == pytest.approx([1, 7 / 3, 4])
    assert "(3 seeds, 4 runs)" in figure.legends[0].get_texts()[0].get_text()
