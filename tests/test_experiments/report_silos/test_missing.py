"""What a report says is missing: silos without an accuracy or training, pairs, searches that have not ended."""

from collections.abc import Mapping
from typing import Any

import pytest

from fedloom.experiments.analysis.silos import phases
from fedloom.experiments.analysis.tables import load
from fedloom.experiments.report.runs import write_report
from fedloom.experiments.report.silos import missing_of_silos

OF_SHARED = "the personal score there is that of the shared model, with initial values for what is never shared"


def said_of(silos: Any, run_id: str = "r1") -> str:
    tables = load(silos.root, [run_id])
    status = str(tables.runs["status"].iloc[0])
    return " | ".join(missing_of_silos(tables, run_id, status))


def test_silos_that_failed_in_the_evaluation_are_named_and_those_without_test_samples_not(silos: Any) -> None:
    writer = silos.begin("r1", data__num_clients=4)
    writer.add_training([(silos.DECIDED,) * 4])
    writer.add_model("personal", [0.2], [silos.DECIDED])
    place = {"stage": "evaluation", "round": 0, "model": "personal", "client_id": 2, "architecture": silos.DECIDED}
    writer.add("evaluations", **place, split="test", metric="accuracy", value=0.0, samples=0)
    for silo in (1, 3):
        writer.add("clients", stage="evaluation", round=0, client_id=silo, status="failed", error="out of memory")
    writer.close()
    assert said_of(silos) == "no accuracy on test data of silos 1, 3: mean, std and worst are over the others"
    assert "no accuracy on test data of silos 1, 3" in silos.summary("r1").replace("N", "n")


def test_when_all_failed_nothing_was_measured(silos: Any) -> None:
    writer = silos.begin("r1")
    writer.add_training([(silos.DECIDED,) * 3])
    writer.add("rounds", stage="evaluation", round=0, clients_planned=3)
    for silo in range(3):
        writer.add("clients", stage="evaluation", round=0, client_id=silo, status="failed")
    writer.close()
    assert said_of(silos) == "nothing was measured on test data: no accuracy of silos"


@pytest.mark.parametrize(
    ("method", "model", "consequence"),
    [
        ("spider", "personal", OF_SHARED),
        ("ditto", "personal", OF_SHARED),
        ("fedproto", "personal", OF_SHARED),
        ("fedpnas", "personal", "score there is that of the shared base with cells that were never trained"),
        ("fednas", "global", "the shared model has learned nothing from the data there"),
        ("knn_per", "personal", "the shared model has learned nothing from the data there"),
    ],
)
def test_silos_that_never_counted_in_training_are_named(silos: Any, method: str, model: str, consequence: str) -> None:
    writer = silos.begin("r1", method, method={"name": method, "train": {"rounds": 3}})
    writer.add_training([(silos.DECIDED,)] * 3)
    for round_, (one, two) in enumerate([("failed", "dropped"), ("ok", "timed_out"), ("dropped", "failed")]):
        for silo, status in ((1, one), (2, two)):
            writer.add("clients", stage="spider", round=round_, client_id=silo, status=status)
    writer.add_model(model, [0.2, 0.3, 0.4], [silos.DECIDED] * 3)
    for silo in range(3):  # a row of what only measures is no training
        writer.add("clients", stage="evaluation", round=0, client_id=silo, status="ok")
    writer.close()
    first, second = said_of(silos).split(": ")
    assert first == "no training round of silo 2 counted (failed, dropped or late every time)"
    assert second.endswith(consequence)


def test_a_silo_that_was_neither_trained_nor_scored_is_named_once(silos: Any) -> None:
    writer = silos.begin("r1")
    writer.add_training([(silos.DECIDED,) * 2])
    writer.add_model("personal", [0.2, 0.3], [silos.DECIDED] * 2)
    writer.close()
    assert said_of(silos) == "no accuracy on test data of silo 2: mean, std and worst are over the others"


def write_gains(silos: Any, matrix: Mapping[tuple[int, int], float], status: str = "done", **gains: Any) -> None:
    method = {"name": "spider", "gains": {"epochs": 3, "clients": None, **gains}, "train": {"rounds": 1}}
    writer = silos.begin("r1", status=status, method=method)
    writer.add_training([(silos.DECIDED,) * 3])
    writer.add_model("personal", [0.2, 0.3, 0.4], [silos.DECIDED] * 3)
    writer.add_gains(matrix)
    writer.close()


def test_pairs_without_an_accuracy_are_named(silos: Any) -> None:
    write_gains(silos, {pair: p for pair, p in silos.MATRIX.items() if pair not in ((0, 1), (2, 2))})
    assert said_of(silos) == (
        "personalisation gains of silos 0, 2 are incomplete: 2 of 9 p_ij were not measured, (i, j) = (0, 1), (2, 2)"
    )


def test_many_pairs_are_counted_and_the_first_are_named(silos: Any) -> None:
    write_gains(silos, {(0, 0): 0.5, (1, 1): 0.5})
    assert said_of(silos) == (
        "personalisation gains of every silo are incomplete: 7 of 9 p_ij were not measured, "
        "(i, j) = (0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1), ..."
    )


@pytest.mark.parametrize(
    ("status", "gains", "left_out"),
    [("done", {}, set()), ("done", {"clients": 2}, {2}), ("running", {}, {2}), ("done", {"epochs": 0}, {1, 2})],
)
def test_pairs_that_were_not_to_be_measured_or_not_yet_are_not_missed(
    silos: Any, status: str, gains: dict[str, Any], left_out: set[int]
) -> None:
    write_gains(silos, {pair: p for pair, p in silos.MATRIX.items() if not left_out & set(pair)}, status, **gains)
    assert said_of(silos) == ""


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        (None, ""),
        (
            (0, 1),
            "personalisation gains of silo 0 are incomplete: 1 of 6 p_ij were not measured, (i, j) = (0, 1)",
        ),
    ],
)
def test_a_silo_without_test_samples_has_no_pairs_to_miss(
    silos: Any, left_out: tuple[int, int] | None, said: str
) -> None:
    method = {"name": "spider", "gains": {"epochs": 3}, "train": {"rounds": 1}}
    writer = silos.begin("r1", method=method)
    writer.add_training([(silos.DECIDED,) * 3])
    writer.add_model("personal", [0.2, 0.3], [silos.DECIDED] * 2)
    writer.add_gains({pair: p for pair, p in silos.MATRIX.items() if pair[0] != 2 and pair != left_out})
    for stage, model in (("evaluation", "personal"), ("gains", "silo-0")):
        place = {"stage": stage, "round": 0, "model": model, "client_id": 2}
        writer.add("evaluations", **place, split="test", metric="accuracy", value=0.0, samples=0)
    writer.close()
    assert said_of(silos) == said


@pytest.mark.usefixtures("undrawn")
def test_several_modules_per_edge_are_no_unfinished_search_where_nothing_is_searched(silos: Any) -> None:
    for run_id, method in (("r1", {"name": "fedmn"}), ("r2", {"name": "spider", "search": {"start": 1}})):
        writer = silos.begin(run_id, method["name"], method={**method, "train": {"rounds": 1}})
        writer.add_training([(silos.HALF,) * 3], validated=False)
        writer.add_model("personal", [0.5] * 3, [silos.HALF] * 3)
        writer.close()
    assert said_of(silos, "r1") == ""
    assert said_of(silos, "r2") == "the search ended with undecided edges in every silo"
    assert phases(load(silos.root, ["r1"])) == []
    for run_id, bars in (("r1", "that are used together"), ("r2", "that are undecided")):
        assert f"bars separate operators {bars}" in write_report(silos.root, [run_id]).markdown.read_text()
