"""What runs end with: which models count, what they cost, and methods side by side."""

import math
from typing import Any

import pandas as pd
import pytest

from fedloom.experiments import analysis
from fedloom.experiments.analysis.outcomes import final_model


@pytest.mark.parametrize(
    ("models", "final"),
    [
        (["supernet_init", "fine_tuned", "rand_init"], "fine_tuned"),
        (["supernet_init", "rand_init"], "supernet_init"),
        (["global", "personal"], "personal"),
        (["searched", "supernet"], "searched"),
        (["rand_init", "mine"], "mine"),
        (["heterofl"], "heterofl"),
        ([], ""),
    ],
)
def test_the_final_model_is_the_last_step_and_no_baseline(models: list[str], final: str) -> None:
    assert final_model(pd.DataFrame({"model": [*models, None]})) == final


def test_a_run_is_one_row_of_its_final_models_and_all_costs(runs: Any) -> None:
    writer = runs.begin("a", 1)
    for tier, tuned, fresh in (("tier1", 0.5, 0.9), ("tier2", 0.7, 0.8)):
        runs.evaluate(writer, fresh, tier=tier)
        runs.evaluate(writer, tuned, "fine_tuned", tier)
        runs.evaluate(writer, tuned - 0.1, "fine_tuned", tier, split="validation")
        for client, own in enumerate((tuned, tuned + 0.2)):
            runs.evaluate(writer, own, "fine_tuned", tier, client_id=client)
        kept = {"tier": tier, "architecture": "0-1", "macs": 50, "parameters": 100, "file": "f", "hash": "h"}
        writer.add("models", stage="evaluation", round=0, **kept)
    work = {"clients_planned": 2, "bytes_down": 5, "bytes_up": 3, "macs": 11, "simulated_s": 2.0, "wall_s": 1.0}
    for index, epsilon in enumerate((0.5, 0.75)):
        writer.add("rounds", stage="supernet", round=index, loss=1.0, epsilon=epsilon, **work)
    writer.close()
    (row,) = analysis.outcomes(analysis.load(runs.root)).to_dict("records")
    assert (row["model"], row["tier"], row["final_model"], row["models"]) == ("final", "all", "fine_tuned", 2)
    assert (row["accuracy"], row["least_accuracy"]) == (pytest.approx(0.6), 0.5)
    assert row["validation_accuracy"] == pytest.approx(0.5)
    assert (row["client_accuracy"], row["worst_client"]) == (pytest.approx(0.7), 0.5)
    # Without the evaluation, and without rand-init, which a run with a supernet has for comparison only.
    assert (row["total_bytes"], row["total_macs"], row["simulated_s"]) == (16, 22, 4.0)
    assert (row["epsilon"], row["macs"], row["parameters"]) == (0.75, 50, 100)


def test_epsilon_is_that_of_the_methods_own_training_if_all_of_it_is_private(runs: Any) -> None:
    spent = {"supernet": 0.5, "fine_tuned/tier1": 0.75, "rand_init/tier1": 2.0, "search/tier1": None}
    for name, epsilons in (("private", spent), ("in-part", {**spent, "fine_tuned/tier1": None})):
        writer = runs.begin(name, 1, name)
        runs.evaluate(writer, 0.5, "fine_tuned")
        work = {"clients_planned": 2, "bytes_down": 5, "bytes_up": 3, "macs": 11, "simulated_s": 2.0, "wall_s": 1.0}
        for stage, epsilon in epsilons.items():
            writer.add("rounds", stage=stage, round=1, loss=1.0, epsilon=epsilon, **work)
        writer.add("rounds", stage="slices", round=1, **{**work, "clients_planned": 0})  # the server's work
        writer.close()
    frame = analysis.outcomes(analysis.load(runs.root)).set_index("experiment")["epsilon"]
    assert frame["private"] == 0.75, "rand-init is a baseline"
    assert math.isnan(frame["in-part"])


def test_silos_and_families_have_worst_clients(runs: Any) -> None:
    writer = runs.begin("silos", 1, "silos", method="ditto")
    writer.update_run(traits='{"kind": "silos", "own": "model"}')
    for client, accuracy in enumerate((0.5, 0.75)):
        runs.evaluate(writer, accuracy, "personal", client_id=client)
    writer.close()
    writer = runs.begin("family", 1, "family", method="superfednas")
    writer.update_run(traits='{"kind": "subnets"}')
    for member, accuracy in (("0-0", 0.4), ("1-1", 0.6)):
        runs.evaluate(writer, accuracy, "supernet", "", architecture=member)
        runs.evaluate(writer, accuracy - 0.2, "supernet", "tier1", architecture=member, client_id=3)
    writer.close()
    found = analysis.outcomes(analysis.load(runs.root)).set_index("experiment").to_dict("index")
    silos, family = found["silos"], found["family"]
    assert (silos["accuracy"], silos["client_accuracy"], silos["worst_client"]) == (0.625, 0.625, 0.5)
    assert math.isnan(silos["least_accuracy"])
    assert (family["models"], family["accuracy"], family["least_accuracy"]) == (2, pytest.approx(0.5), 0.4)
    assert (family["client_accuracy"], family["worst_client"]) == (pytest.approx(0.3), pytest.approx(0.2))


def test_a_run_that_was_not_evaluated_has_its_costs_alone(runs: Any) -> None:
    runs.begin("a", 1).close()
    (row,) = analysis.outcomes(analysis.load(runs.root)).to_dict("records")
    assert (row["model"], row["models"], row["total_bytes"]) == (None, 0, 42)
    assert all(math.isnan(row[name]) for name in ("accuracy", "worst_client", "epsilon", "parameters"))


def test_methods_with_other_models_are_compared_run_by_run(runs: Any) -> None:
    for seed, (wide, tuned) in enumerate(((0.5, 0.6), (0.4, 0.6), (0.45, 0.55)), 1):
        for name, model, accuracy in (("widths", "heterofl", wide), ("paths", "fine_tuned", tuned)):
            writer = runs.begin(f"{name}{seed}", seed, name, method=name)
            runs.evaluate(writer, accuracy, model)
            writer.close()
    tables = analysis.load(runs.root)
    apart = analysis.compare(tables, "experiment", baseline="widths")
    assert set(apart["test"].dropna()) == {"none"}  # no model of one has its like in the other
    frame = analysis.compare(tables, "experiment", each="run", baseline="widths").to_dict("records")
    assert [(r["value"], r["n"]) for r in frame] == [("widths", 3), ("paths", 3)]
    assert (frame[1]["test"], frame[1]["compared"]) == ("paired t", 3)
    assert frame[1]["difference"] == pytest.approx(0.4 / 3)
    with pytest.raises(ValueError, match="no metric 'worst_clients': the nearest are worst_client"):
        analysis.compare(tables, "experiment", "worst_clients", each="run")
    with pytest.raises(ValueError, match="each='runs': there are model, run"):
        analysis.compare(tables, "experiment", each="runs")
