"""Summaries: literal numbers over the seeds of a setting."""

import math
from typing import Any

import pandas as pd
import pytest

from fedloom.experiments import analysis


def test_summaries_give_student_intervals_over_seeds(runs: Any) -> None:
    for seed, accuracy in enumerate((0.1, 0.2, 0.3), 1):
        runs.write(f"r{seed}", accuracy, seed)
    (row,) = analysis.summary(analysis.load(runs.root)).to_dict("records")
    assert (row["setting"], row["model"], row["tier"], row["architecture"]) == ("demo", "rand_init", "tier1", "0-1")
    assert (row["runs"], row["seeds"], row["accuracy_n"]) == (3, 3, 3)
    assert row["accuracy_mean"] == pytest.approx(0.2)
    # t quantile of 2 degrees of freedom 4.302653, standard error 0.1 / sqrt(3)
    assert row["accuracy_half_width"] == pytest.approx(0.24841377, rel=1e-7)
    assert row["loss_mean"] == pytest.approx(0.8)
    assert (row["macs_mean"], row["macs_half_width"], row["parameters_mean"]) == (50, 0, 100)
    # The final evaluation is no part of what the method sends.
    assert (row["total_bytes_mean"], row["simulated_s_mean"], row["wall_s_mean"]) == (42, 0.5, 4.0)


def test_one_seed_has_no_interval_and_a_repeated_seed_is_no_second_one(runs: Any) -> None:
    runs.write("r1", 0.5, 1)
    runs.write("r2", 0.7, 1)
    (row,) = analysis.summary(analysis.load(runs.root)).to_dict("records")
    assert (row["runs"], row["seeds"], row["accuracy_n"]) == (2, 1, 1)
    assert row["accuracy_mean"] == pytest.approx(0.6)
    assert math.isnan(row["accuracy_half_width"])


def test_a_run_without_an_evaluation_counts_with_its_costs_only(runs: Any) -> None:
    runs.begin("r1", 1).close()
    (row,) = analysis.summary(analysis.load(runs.root)).to_dict("records")
    assert pd.isna(row["model"])
    assert (row["runs"], row["accuracy_n"], row["total_bytes_n"], row["total_bytes_mean"]) == (1, 0, 1, 42)
    assert math.isnan(row["accuracy_mean"])
    runs.write("r2", 0.5, 2)  # of the same setting: the unfinished run is not mixed with it
    (row,) = analysis.summary(analysis.load(runs.root)).to_dict("records")
    assert (row["model"], row["runs"], row["total_bytes_n"]) == ("rand_init", 1, 1)


def test_each_subnet_of_a_family_and_each_kind_of_silos_model_has_a_row(runs: Any) -> None:
    writer = runs.begin("r1", 1, "elastic", "superfednas")
    for architecture, accuracy, macs in (("0-0", 0.3, 10), ("2-2", 0.6, 90)):
        runs.evaluate(writer, accuracy, "supernet", "server", architecture=architecture)
        place = {"stage": "evaluation", "round": 0, "model": "supernet", "tier": "server", "architecture": architecture}
        writer.add("evaluations", **place, metric="macs", value=macs)
    writer.close()
    writer = runs.begin("r2", 1, "silos", "spider")
    for client_id, (own, shared) in enumerate(((0.5, 0.4), (0.9, 0.6))):
        runs.evaluate(writer, own, "personal", client_id=client_id)
        runs.evaluate(writer, shared, "global", client_id=client_id)
    writer.close()
    frame = analysis.summary(analysis.load(runs.root))
    rows = list(zip(frame["model"], frame["tier"], frame["subnet"], frame["accuracy_mean"].round(9), strict=True))
    assert rows == [
        ("supernet", "server", "0-0", 0.3),
        ("supernet", "server", "2-2", 0.6),
        ("global", "all", "", 0.5),
        ("personal", "all", "", 0.7),
    ]
    assert frame["macs_mean"].tolist()[:2] == [10, 90]
