"""Personalisation gains: literal numbers, the matrix they come from, and its heat map."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedloom.experiments.analysis.silos import as_square, best_on_test, p_matrix, personalisation_gains
from fedloom.experiments.analysis.tables import load
from fedloom.experiments.report.runs import write_report
from fedloom.experiments.report.silos import gains_block, gains_figure


def matrix(values: Mapping[tuple[int, int], float]) -> pd.DataFrame:
    rows = [("e", "r", i, j, p) for (i, j), p in values.items()]
    frame = pd.DataFrame(rows, columns=["experiment", "run_id", "client_id", "silo", "accuracy"])
    return frame.astype({"client_id": "Int64", "silo": "Int64"})


def gains_of(values: Mapping[tuple[int, int], float]) -> dict[int, float]:
    frame = personalisation_gains(matrix(values))
    return dict(zip(frame["client_id"], frame["gain"], strict=True))


def test_gains_of_two_silos_by_hand() -> None:
    found = gains_of({(0, 0): 0.9, (0, 1): 0.6, (1, 0): 0.75, (1, 1): 0.5})
    assert found == {0: pytest.approx(0.3), 1: pytest.approx(-0.25)}


def test_gains_of_three_silos_by_hand(silos: Any) -> None:
    found = gains_of(silos.MATRIX)
    # ((0.9 - 0.7) + (0.9 - 0.8)) / 2, ((0.8 - 0.5) + (0.8 - 0.6)) / 2, ((0.6 - 0.6) + (0.6 - 0.7)) / 2
    assert found == {0: pytest.approx(0.15), 1: pytest.approx(0.25), 2: pytest.approx(-0.05)}


def test_missing_entries_leave_gains_over_the_rest_or_none() -> None:
    frame = personalisation_gains(matrix({(0, 0): 0.9, (0, 2): 0.5, (1, 0): 0.5, (2, 2): 0.7})).set_index("client_id")
    assert frame.loc[0, "gain"] == pytest.approx(0.4)
    assert frame["compared"].to_dict() == {0: 1, 1: 1, 2: 0}
    assert np.isnan(frame.loc[1, "gain"])  # its own architecture was not measured
    assert np.isnan(frame.loc[2, "gain"])  # nobody else's was


def test_gains_agree_with_equation_6_read_word_by_word() -> None:
    rng = np.random.default_rng(3)
    p = rng.random((5, 5))
    found = gains_of({(i, j): p[i, j] for i in range(5) for j in range(5)})
    for i in range(5):
        assert found[i] == pytest.approx(sum(p[i, i] - p[i, j] for j in range(5) if j != i) / 4)


def test_the_matrix_is_read_from_the_stage_of_gains_alone(silos: Any) -> None:
    silos.spider("r1")
    frame = p_matrix(load(silos.root))
    pairs = zip(frame["client_id"], frame["silo"], strict=True)
    assert dict(zip(pairs, frame["accuracy"], strict=True)) == silos.MATRIX
    assert as_square(frame).values.tolist() == [[0.9, 0.7, 0.8], [0.5, 0.8, 0.6], [0.6, 0.7, 0.6]]


def test_the_best_epoch_on_test_data_counts_where_it_was_measured_and_is_named(silos: Any) -> None:
    writer = silos.begin("r1")
    writer.add_training([(silos.DECIDED,) * 3])
    writer.add_gains({(0, 0): 0.5, (0, 1): 0.25})
    assert not best_on_test(load(silos.root))
    row = {"stage": "gains", "round": 0, "client_id": 0, "split": "test", "samples": 10, "model": "silo-1"}
    writer.add("evaluations", **row, metric="best_test_accuracy", value=0.4)
    writer.close()
    tables = load(silos.root)
    assert best_on_test(tables)
    assert as_square(p_matrix(tables)).loc[0].tolist() == [0.5, 0.4]
    assert "best epoch on the test data" in " ".join(gains_block(tables).text)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("gains", "models"),
    [
        ({}, "with its own and with the other silos' architectures, trained on its data from the shared weights."),
        ({"start": "own", "tune_own": True}, "of its own and of the other silos' final models, all fine-tuned on"),
        ({"start": "own", "tune_own": False}, "of its own final model as it is, and of the other silos' final models"),
    ],
)
def test_table_and_figure_say_whose_accuracies_they_compare(silos: Any, gains: dict[str, Any], models: str) -> None:
    silos.spider("r1", method__gains=gains)
    page = write_report(silos.root).markdown.read_text()
    assert page.count(models) == 2


@pytest.mark.usefixtures("undrawn")
def test_a_part_of_the_matrix_is_square_with_gaps(silos: Any) -> None:
    writer = silos.begin("r1")
    writer.add_training([(silos.DECIDED,) * 3])
    writer.add_gains({(1, 1): 0.5, (1, 7): 0.25})
    writer.close()
    square = as_square(p_matrix(load(silos.root)))
    assert square.index.tolist() == square.columns.tolist() == [1, 7]
    assert square.loc[1].tolist() == [0.5, 0.25]
    assert square.loc[7].isna().all()
    assert {p.stem for p in write_report(silos.root).plots} >= {"gains"}


def test_the_heat_map_shows_points_and_gains_and_leaves_gaps_empty() -> None:
    figure = gains_figure(matrix({(0, 0): 0.9, (0, 1): 0.6, (1, 1): 0.5}))
    assert figure is not None
    left, right = ([t.get_text() for t in axes.texts] for axes in figure.axes)
    assert left == ["90.0", "60.0", "50.0"]
    assert right == ["+30.0", "+30.0"]
    assert gains_figure(matrix({})) is None
