"""A summary of the silos of each setting: mean, spread, worst, costs, and intervals over seeds."""

from typing import Any

import pytest

from fedloom.experiments.analysis.silos import per_silo, silo_summaries
from fedloom.experiments.analysis.tables import load


def test_a_run_has_mean_spread_worst_and_costs_of_its_silos(silos: Any) -> None:
    silos.spider("r1")
    assert silos.values("r1") == {
        "accuracy": pytest.approx(0.7),
        "std": pytest.approx(0.2 * (2 / 3) ** 0.5),
        "worst": pytest.approx(0.5),
        "best_accuracy": None,
        "best_round": None,
        "global_accuracy": pytest.approx(0.5),
        "gain": pytest.approx((0.15 + 0.25 - 0.05) / 3),
        "parameters": 200.0,
        "macs": 2000.0,
        "peak_memory_bytes": 3003.0,  # silo 2 in the last round of training; what measures gains does not count
        "bytes_per_round": 30.0,  # 4 rounds of 90 bytes for 3 silos
        "wall_s": 6.0,
        "architectures": 2.0,
    }


def test_the_best_round_on_test_data_stands_beside_the_last_and_says_what_it_is(silos: Any) -> None:
    writer = silos.begin("r1")
    writer.add_training([(silos.DECIDED,) * 3] * 3)
    writer.add_model("personal", [0.5, 0.6, 0.7], [silos.DECIDED] * 3)
    for round_, accuracies in enumerate([[0.2, 0.3, 0.4], [0.9, 0.5, 0.7], [0.7, 0.9, 0.5], [0.9, 0.95]]):
        for client_id, value in enumerate(accuracies):
            row = {"stage": "spider", "round": round_, "client_id": client_id, "split": "test", "samples": 10}
            writer.add("evaluations", **row, model="personal", metric="accuracy_while_training", value=value)
            writer.add("evaluations", **row, model="global", metric="accuracy_while_training", value=1.0)
    writer.close()
    values = silos.values("r1")
    assert (values["accuracy"], values["best_accuracy"], values["best_round"]) == pytest.approx((0.6, 0.7, 2)), (
        "the first of equal rounds, counted from 1, and none that misses a silo"
    )
    text = " ".join(silos.summary(["r1"]).split())
    assert "too high, as test data chose that round" in text


def test_seeds_are_one_setting_with_intervals_and_methods_are_rows_of_one_table(silos: Any) -> None:
    silos.spider("r1", gains=False)
    silos.spider("r2", 0.1, gains=False, seed=2)
    silos.spider("r3", gains=False, method__train__lr=0.5)
    silos.fixed("r4")
    silos.fixed("r5", "fednas", model="global")
    runs = ["r1", "r2", "r3", "r4", "r5"]
    found = silo_summaries(load(silos.root, runs))
    assert [(s.setting.name, s.method, s.model) for s in found] == [
        ("spider_tiny, lr=0.1", "spider", "personal"),
        ("spider_tiny, lr=0.5", "spider", "personal"),
        ("knn_per", "knn_per", "personal"),
        ("fednas", "fednas", "global"),
    ]
    accuracy = found[0].values["accuracy"]
    assert accuracy is not None
    assert (accuracy.values, accuracy.half_width) == (pytest.approx((0.7, 0.8)), None)
    assert found[3].values["global_accuracy"] is None
    text = silos.summary(runs)
    line = next(t for t in text.splitlines() if t.startswith("knn_per"))
    assert line.split() == ["knn_per", "40.0", "8.2", "30.0", "–", "1"]
    costs = [t for t in text.splitlines() if t.startswith("knn_per")][1]
    assert costs.split() == ["knn_per", "200", "2.00", "k", "3.00", "kB", "30", "B", "3", "s"]
    assert "(fednas: the shared one)" in " ".join(text.split())
    assert "gain" not in text


def test_a_repeated_seed_is_one_sample_with_its_mean(silos: Any) -> None:
    for run_id, better, seed in (("r1", 0.0, 1), ("r2", 0.1, 1), ("r3", 0.25, 2)):
        silos.spider(run_id, better - 0.1, gains=False, seed=seed)
    (found,) = silo_summaries(load(silos.root, ["r1", "r2", "r3"]))
    accuracy = found.values["accuracy"]
    assert accuracy is not None
    # Of seeds 1 and 2: 0.65 and 0.85.
    assert (accuracy.mean, accuracy.runs) == (pytest.approx(0.75), 2)
    assert accuracy.values == pytest.approx((0.65, 0.85))
    text = " ".join(silos.summary(["r1", "r2", "r3"]).split())
    assert (
        "The values of 2 seeds of a setting; a repeated seed counts once, with its mean; fewer than three seeds give "
        "no interval." in text
    )
    text = " ".join(silos.summary(["r1", "r2"]).split())
    assert "Mean over the runs of one seed, which give no interval." in text
    assert "±" not in text


def test_several_data_sets_have_a_column_that_tells_them_apart(silos: Any) -> None:
    silos.spider("r1", gains=False)
    assert "digits" not in silos.summary("r1")
    silos.spider("r2", gains=False, data__dataset="cifar10")
    text = silos.summary(["r1", "r2"])
    assert "digits" in text
    assert "cifar10" in text


def test_a_silo_without_test_samples_is_left_out_and_the_rest_counts(silos: Any) -> None:
    writer = silos.begin("r1")
    writer.add_training([(silos.DECIDED,) * 3])
    writer.add_model("personal", [0.2, 0.4], [silos.DECIDED, silos.OTHER])
    place = {"stage": "evaluation", "round": 0, "model": "personal", "client_id": 2, "architecture": silos.DECIDED}
    writer.add("evaluations", **place, split="test", metric="accuracy", value=0.0, samples=0)
    writer.close()
    rows = per_silo(load(silos.root))
    assert rows["client_id"].tolist() == [0, 1, 2]
    assert rows["samples"].tolist() == [10, 10, 0]
    assert rows["accuracy"].isna().tolist() == [False, False, True]
    values = silos.values("r1")
    assert (values["accuracy"], values["worst"]) == (pytest.approx(0.3), 0.2)
    assert "1 clients have no test samples" in silos.summary("r1")


def test_rows_of_silos_hold_what_the_method_measures(silos: Any) -> None:
    silos.fixed("r1")
    rows = per_silo(load(silos.root))
    assert rows[["client_id", "model", "architecture"]].values.tolist() == [[i, "personal", "0"] for i in range(3)]
    assert rows["neighbour_share"].fillna(-1).tolist() == [-1, 0.4, -1]
    assert rows["global_accuracy"].isna().all()
    assert rows["parameters"].tolist() == [100, 200, 300]
