"""The analysis of result tables: literal numbers over seeds, tests against a baseline, fronts, and large folders."""

import ast
import json
import math
import os
import subprocess
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedloom.experiments import analysis
from fedloom.experiments.analysis.compare import difference
from fedloom.experiments.analysis.fronts import front_of
from fedloom.experiments.analysis.intervals import estimate
from fedloom.experiments.analysis.seeds import estimate_by_seed, spread
from fedloom.experiments.analysis.settings import settings_of
from fedloom.experiments.analysis.tables import CLIENT_COLUMNS
from fedloom.experiments.benchmarks.analysis import files_of, measure
from fedloom.experiments.benchmarks.generated import write_results
from fedloom.platform.methods.registry import METHODS
from fedloom.platform.methods.silo.silos import SiloTrainingConfig
from fedloom.platform.results.tables import read_runs
from fedloom.platform.results.writer import RunWriter

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
EXAMPLE = EXPERIMENTS / "examples" / "analysis.py"
WEIGHTING = "method.train.weighting"


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncing guards against power failures only, and is slow on a busy disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def begin(
    root: Path, run_id: str, seed: int, experiment: str = "demo", name: str = "fedavg", **train: Any
) -> RunWriter:
    """A run that has trained for one round, with this seed and these keys of `method.train`."""
    writer = RunWriter.create(root, experiment, run_id)
    seeds = {"partition": 1, "training": seed}
    config = {"experiment": experiment, "seed": seed, "seeds": {}, "method": {"name": name, "train": train}}
    writer.update_run(config=json.dumps(config), seeds=json.dumps(seeds), status="done")
    work = {"bytes_down": 30, "bytes_up": 12, "macs": 7, "simulated_s": 0.5, "wall_s": 2.0 + seed}
    writer.add("rounds", stage="rand_init/tier1", round=0, clients_planned=2, loss=1.0, **work)
    writer.add("rounds", stage="evaluation", round=0, clients_planned=2, **(work | {"bytes_down": 10**6}))
    return writer


def evaluate(writer: RunWriter, accuracy: float, model: str = "rand_init", tier: str = "tier1", **more: Any) -> None:
    place = {"stage": "evaluation", "round": 0, "model": model, "tier": tier, "architecture": "0-1", "split": "test"}
    for metric, value in (("accuracy", accuracy), ("loss", 1 - accuracy)):
        writer.add("evaluations", **(place | {"metric": metric, "value": value, "samples": 10} | more))


def write(root: Path, run_id: str, accuracy: float, seed: int, experiment: str = "demo", **train: Any) -> None:
    writer = begin(root, run_id, seed, experiment, **train)
    evaluate(writer, accuracy)
    kept = {"tier": "tier1", "architecture": "0-1", "macs": 50, "parameters": 100, "file": "f", "hash": "h"}
    writer.add("models", stage="evaluation", round=0, **kept)
    writer.close()


def write_pairs(root: Path) -> None:
    """OPA and FedAvg with three seeds each; the differences are 0.1, 0.2 and 0.05."""
    for seed, (opa, fedavg) in enumerate(((0.5, 0.4), (0.7, 0.5), (0.6, 0.55)), 1):
        write(root, f"a{seed}", fedavg, seed, weighting="fedavg", lr=0.1)
        write(root, f"b{seed}", opa, seed, weighting="opa", lr=0.1)


# -- load --------------------------------------------------------------------------------------------------------------


def test_load_reads_what_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path, "r1", 0.5, 1)
    write(tmp_path, "r2", 0.5, 1, experiment="other")
    assert [p.run_id for p in analysis.load(tmp_path).paths] == ["r1", "r2"]
    assert [p.run_id for p in analysis.load(str(tmp_path), experiment="other").paths] == ["r2"]
    assert [p.run_id for p in analysis.load(tmp_path, "r1").paths] == ["r1"]
    with pytest.raises(ValueError, match=r"no runs of experiment 'otter'.*demo, other"):
        analysis.load(tmp_path, experiment="otter")
    with pytest.raises(ValueError, match="no table 'round': the tables are runs, rounds"):
        analysis.load(tmp_path, tables=["round"])


def test_a_table_that_was_not_read_is_never_taken_for_an_empty_one(tmp_path: Path) -> None:
    write(tmp_path, "r1", 0.5, 1)
    tables = analysis.load(tmp_path, tables=["rounds"])
    assert analysis.communication(tables)["bytes_down"].tolist() == [30, 10**6]
    for function, table in (
        (analysis.summary, "evaluations"),
        (analysis.failures, "clients"),
        (analysis.fairness, "evaluations"),
        (analysis.hypervolume, "candidates"),
    ):
        with pytest.raises(ValueError, match=f"needs the table '{table}', which was not read"):
            function(tables)


def test_an_unknown_column_is_refused_with_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "r1", 0.5, 1)
    with pytest.raises(ValueError, match="table 'clients' has no column 'client'; the nearest is 'client_id'"):
        read_runs(analysis.load(tmp_path).paths, "clients", ["client"])


def test_columns_that_an_older_file_lacks_are_null(tmp_path: Path) -> None:
    writer = begin(tmp_path, "r1", 1)
    writer.add("clients", stage="rand_init/tier1", round=0, client_id=3, status="ok", macs=5, device="cpu")
    writer.close()
    (file,) = (tmp_path / "clients").rglob("*.parquet")
    pq.write_table(pq.read_table(file, partitioning=None).drop_columns(["macs", "error"]), file)
    clients = analysis.load(tmp_path).clients
    assert list(clients.columns) == ["experiment", "run_id", *CLIENT_COLUMNS]
    assert clients["client_id"].tolist() == [3]
    assert clients[["macs", "error"]].isna().all(axis=None)


# -- summary -----------------------------------------------------------------------------------------------------------


def test_summaries_give_student_intervals_over_seeds(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.1, 0.2, 0.3), 1):
        write(tmp_path, f"r{seed}", accuracy, seed)
    (row,) = analysis.summary(analysis.load(tmp_path)).to_dict("records")
    assert (row["setting"], row["model"], row["tier"], row["architecture"]) == ("demo", "rand_init", "tier1", "0-1")
    assert (row["runs"], row["seeds"], row["accuracy_n"]) == (3, 3, 3)
    assert row["accuracy_mean"] == pytest.approx(0.2)
    # t quantile of 2 degrees of freedom 4.302653, standard error 0.1 / sqrt(3)
    assert row["accuracy_half_width"] == pytest.approx(0.24841377, rel=1e-7)
    assert row["loss_mean"] == pytest.approx(0.8)
    assert (row["macs_mean"], row["macs_half_width"], row["parameters_mean"]) == (50, 0, 100)
    # The final evaluation is no part of what the method sends.
    assert (row["total_bytes_mean"], row["simulated_s_mean"], row["wall_s_mean"]) == (42, 0.5, 4.0)


def test_one_seed_has_no_interval_and_a_repeated_seed_is_no_second_one(tmp_path: Path) -> None:
    write(tmp_path, "r1", 0.5, 1)
    write(tmp_path, "r2", 0.7, 1)
    (row,) = analysis.summary(analysis.load(tmp_path)).to_dict("records")
    assert (row["runs"], row["seeds"], row["accuracy_n"]) == (2, 1, 1)
    assert row["accuracy_mean"] == pytest.approx(0.6)
    assert math.isnan(row["accuracy_half_width"])


def test_a_run_without_an_evaluation_counts_with_its_costs_only(tmp_path: Path) -> None:
    begin(tmp_path, "r1", 1).close()
    (row,) = analysis.summary(analysis.load(tmp_path)).to_dict("records")
    assert pd.isna(row["model"])
    assert (row["runs"], row["accuracy_n"], row["total_bytes_n"], row["total_bytes_mean"]) == (1, 0, 1, 42)
    assert math.isnan(row["accuracy_mean"])
    write(tmp_path, "r2", 0.5, 2)  # of the same setting: the unfinished run is not mixed with it
    (row,) = analysis.summary(analysis.load(tmp_path)).to_dict("records")
    assert (row["model"], row["runs"], row["total_bytes_n"]) == ("rand_init", 1, 1)


def test_each_subnet_of_a_family_and_each_kind_of_silos_model_has_a_row(tmp_path: Path) -> None:
    writer = begin(tmp_path, "r1", 1, "elastic", "superfednas")
    for architecture, accuracy, macs in (("0-0", 0.3, 10), ("2-2", 0.6, 90)):
        evaluate(writer, accuracy, "supernet", "server", architecture=architecture)
        place = {"stage": "evaluation", "round": 0, "model": "supernet", "tier": "server", "architecture": architecture}
        writer.add("evaluations", **place, metric="macs", value=macs)
    writer.close()
    writer = begin(tmp_path, "r2", 1, "silos", "spider")
    for client_id, (own, shared) in enumerate(((0.5, 0.4), (0.9, 0.6))):
        evaluate(writer, own, "personal", client_id=client_id)
        evaluate(writer, shared, "global", client_id=client_id)
    writer.close()
    frame = analysis.summary(analysis.load(tmp_path))
    rows = list(zip(frame["model"], frame["tier"], frame["subnet"], frame["accuracy_mean"].round(9), strict=True))
    assert rows == [
        ("supernet", "server", "0-0", 0.3),
        ("supernet", "server", "2-2", 0.6),
        ("global", "all", "", 0.5),
        ("personal", "all", "", 0.7),
    ]
    assert frame["macs_mean"].tolist()[:2] == [10, 90]


# -- compare -----------------------------------------------------------------------------------------------------------


def test_a_paired_test_over_seeds(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    frame = analysis.compare(analysis.load(tmp_path), by=WEIGHTING)
    fedavg, opa = frame.to_dict("records")
    assert (fedavg["value"], fedavg["baseline"], fedavg["n"]) == ("fedavg", "fedavg", 3)
    assert fedavg["mean"] == pytest.approx(1.45 / 3)
    assert pd.isna(fedavg["test"])
    assert (opa["value"], opa["test"], opa["compared"]) == ("opa", "paired t", 3)
    assert opa["mean"] == pytest.approx(0.6)
    assert opa["half_width"] == pytest.approx(0.24841377, rel=1e-7)
    # Differences 0.1, 0.2, 0.05: t = sqrt(7); with 2 degrees of freedom p = 1 - t / sqrt(2 + t^2).
    assert opa["difference"] == pytest.approx(0.35 / 3)
    assert opa["p_value"] == pytest.approx(1 - math.sqrt(7) / 3)
    assert opa["difference_high"] - opa["difference"] == pytest.approx(4.30265273 * math.sqrt(0.0175 / 9), rel=1e-7)
    assert opa["difference"] - opa["difference_low"] == pytest.approx(opa["difference_high"] - opa["difference"])


def test_seeds_that_do_not_pair_are_compared_by_welch(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    write(tmp_path, "b4", 0.8, 4, weighting="opa", lr=0.1)
    tables = analysis.load(tmp_path)
    row = analysis.compare(tables, WEIGHTING).to_dict("records")[1]
    opa, fedavg = np.array([0.5, 0.7, 0.6, 0.8]), np.array([0.4, 0.5, 0.55])
    parts = [opa.var(ddof=1) / 4, fedavg.var(ddof=1) / 3]
    error, freedom = math.sqrt(sum(parts)), sum(parts) ** 2 / (parts[0] ** 2 / 3 + parts[1] ** 2 / 2)
    mean = opa.mean() - fedavg.mean()
    assert (row["test"], row["n"], row["compared"]) == ("Welch t", 4, 7)
    assert row["p_value"] == pytest.approx(2 * stats.t.sf(mean / error, freedom))
    assert row["difference_low"] == pytest.approx(mean - stats.t.ppf(0.975, freedom) * error)
    three = analysis.load(tmp_path, ["a1", "a2", "a3", "b1", "b2", "b3"])
    assert analysis.compare(three, WEIGHTING, pair=None)["test"].tolist()[1] == "Welch t"
    # All runs have one partition: it pairs nobody.
    assert analysis.compare(three, WEIGHTING, pair="seeds.partition")["test"].tolist()[1] == "Welch t"
    assert analysis.compare(three, WEIGHTING, pair="seeds.training")["test"].tolist()[1] == "paired t"


def test_one_seed_gives_neither_interval_nor_test(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    row = analysis.compare(analysis.load(tmp_path, ["a1", "b1"]), WEIGHTING).to_dict("records")[1]
    assert (row["n"], row["test"], row["difference"]) == (1, "none", pytest.approx(0.1))
    assert all(math.isnan(row[k]) for k in ("half_width", "difference_low", "difference_high", "p_value"))


def test_what_does_not_vary_has_no_p_value(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    row = analysis.compare(analysis.load(tmp_path), WEIGHTING, "total_bytes").to_dict("records")[1]
    assert (row["difference"], row["difference_low"], row["difference_high"]) == (0, 0, 0)
    assert math.isnan(row["p_value"])
    shifted = difference(np.array([0.3, 0.4]), np.array([0.2, 0.3]), paired=True)
    assert (shifted.p_value, shifted.difference) == (None, pytest.approx(0.1))


def test_other_keys_make_groups_unless_they_are_ignored(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    write(tmp_path, "c1", 0.1, 1, weighting="fedavg", lr=0.5)
    write(tmp_path, "c2", 0.3, 2, weighting="opa", lr=0.5)
    frame = analysis.compare(analysis.load(tmp_path), WEIGHTING, baseline="opa")
    assert list(zip(frame["within"], frame["value"], frame["n"], strict=True)) == [
        ("lr=0.1", "opa", 3),
        ("lr=0.1", "fedavg", 3),
        ("lr=0.5", "opa", 1),
        ("lr=0.5", "fedavg", 1),
    ]
    apart = analysis.load(tmp_path, ["a1", "a2", "c2"])
    with pytest.raises(ValueError, match=r"differ in other keys, too: method.train.lr; name in ignore="):
        analysis.compare(apart, WEIGHTING)
    assert analysis.compare(apart, WEIGHTING, ignore=["method.train.lr"])["n"].tolist() == [2, 1]


def test_experiments_are_compared_whatever_they_differ_in(tmp_path: Path) -> None:
    for seed in (1, 2):
        write(tmp_path, f"r{seed}", 0.1 * seed, seed, "one", lr=0.1, epochs=2)
        write(tmp_path, f"s{seed}", 0.3 * seed, seed, "two", lr=0.5)
    frame = analysis.compare(analysis.load(tmp_path), "experiment", baseline="two")
    assert frame["value"].tolist() == ["two", "one"]
    assert frame["test"].tolist()[1] == "paired t"
    assert frame["difference"].tolist()[1] == pytest.approx(-0.3)
    write(tmp_path, "s3", 0.1, 3, "two", lr=0.7)
    with pytest.raises(ValueError, match=r"runs of experiment 'two' differ in method.train.lr"):
        analysis.compare(analysis.load(tmp_path), "experiment")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": "method.train.weigthing"}, "no run has the configuration key.*nearest are method.train.weighting"),
        ({"by": "weighting"}, "nearest are method.train.weighting"),
        ({"by": WEIGHTING, "metric": "acuracy"}, "no metric 'acuracy': the nearest are accuracy"),
        ({"by": WEIGHTING, "baseline": "plain"}, "no run has method.train.weighting=plain.*fedavg, opa"),
        (
            {"by": WEIGHTING, "pair": "seeds.trainin"},
            "cannot be paired by 'seeds.trainin'.*nearest are seeds.t",
        ),
        ({"by": "method.train.lr"}, "all runs have method.train.lr=0.1, so there is nothing to compare"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(tmp_path: Path, arguments: Any, message: str) -> None:
    write_pairs(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        analysis.compare(analysis.load(tmp_path), **arguments)
    assert "\n" not in str(caught.value)


def test_runs_that_are_not_evaluated_yet_compare_by_what_they_cost(tmp_path: Path) -> None:
    for run_id, rate in (("r1", 0.1), ("r2", 0.2)):
        begin(tmp_path, run_id, 1, lr=rate).close()
    tables = analysis.load(tmp_path)
    with pytest.raises(ValueError, match="no run has a value of accuracy yet"):
        analysis.compare(tables, "method.train.lr")
    assert analysis.compare(tables, "method.train.lr", "total_bytes")["mean"].tolist() == [42, 42]


def test_the_order_of_the_runs_does_not_matter(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    expected = None
    for run_ids in list(permutations(["a1", "b1", "a2", "b2", "a3"]))[::47]:
        tables = analysis.load(tmp_path, run_ids)
        summary = analysis.summary(tables).sort_values("setting", ignore_index=True)
        found = (summary, analysis.compare(tables, WEIGHTING))
        expected = expected or found
        for frame, first in zip(found, expected, strict=True):
            pd.testing.assert_frame_equal(frame, first, check_exact=True)


# -- hypervolume -------------------------------------------------------------------------------------------------------


def add_candidates(root: Path, run_id: str, points: list[tuple[int, float]]) -> None:
    writer = begin(root, run_id, 1)
    for i, (macs, metric) in enumerate(points):
        place = {"stage": "search/tier1", "round": 0, "tier": "tier1", "generation": 0, "architecture": str(i)}
        writer.add("candidates", **place, macs=macs, parameters=1, metric=metric, feasible=metric > 0, on_front=False)
    writer.close()


def test_hypervolumes_are_shares_of_one_box(tmp_path: Path) -> None:
    add_candidates(tmp_path, "r1", [(10, 0.5), (20, 0.9), (20, 0.4), (5, -1.0)])
    add_candidates(tmp_path, "r2", [(15, 0.7), (40, 0.05)])
    tables = analysis.load(tmp_path)
    first, second = analysis.hypervolume(tables, reference=(30, 0.1)).to_dict("records")
    # Scaled: (0, 0.5) and (0.5, 0) dominate 0.5 + 0.5 - 0.25; (0.25, 0.25) dominates 0.75 ** 2.
    assert (first["run_id"], first["tier"], first["points"]) == ("r1", "tier1", 2)
    assert first["hypervolume"] == pytest.approx(0.75)
    assert second["hypervolume"] == pytest.approx(0.5625)
    assert (first["ideal_macs"], first["ideal_metric"]) == (10, 0.9)
    assert (second["reference_macs"], second["reference_metric"]) == (30, 0.1)
    with pytest.raises(ValueError, match=r"must be worse than the best of tier1, \(10, 0.9\)"):
        analysis.hypervolume(tables, reference=(30, 0.95))


def test_the_reference_is_a_tenth_of_the_range_beyond_the_worst_of_the_fronts(tmp_path: Path) -> None:
    add_candidates(tmp_path, "r1", [(10, 0.5), (20, 0.9), (90, 0.2)])
    add_candidates(tmp_path, "r2", [(15, 0.7)])
    first, second = analysis.hypervolume(analysis.load(tmp_path)).to_dict("records")
    assert (first["reference_macs"], first["reference_metric"]) == (pytest.approx(21), pytest.approx(0.46))
    # In units of the box: (0, 10/11), (10/11, 0), and (5/11, 5/11).
    assert first["hypervolume"] == pytest.approx((11 + 11 - 1) / 121)
    assert second["hypervolume"] == pytest.approx(36 / 121)
    (alone,) = analysis.hypervolume(analysis.load(tmp_path, ["r2"])).to_dict("records")
    assert alone["hypervolume"] == pytest.approx(1.0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20))
def test_fronts_are_what_nothing_else_beats(points: list[tuple[int, int]]) -> None:
    def beats(one: tuple[int, int], other: tuple[int, int]) -> bool:
        return one != other and one[0] <= other[0] and one[1] >= other[1]

    expected = sorted({p for p in points if not any(beats(q, p) for q in points)})
    found = front_of(pd.DataFrame(points, columns=["macs", "metric"]))
    assert [tuple(map(int, point)) for point in found] == expected


# -- folders of many runs ----------------------------------------------------------------------------------------------


def test_a_generated_folder_is_summarised_in_little_memory_from_few_files(tmp_path: Path) -> None:
    write_results(tmp_path, runs=12, rounds=20, clients=10, candidates=3, rows_per_file=50)
    tables = analysis.load(tmp_path)
    assert len(tables.clients) == 12 * 20 * 10
    # A million rows then need 0.5 GB, and 2 GB are allowed for a process that holds them.
    assert tables.clients.memory_usage(deep=True).sum() / len(tables.clients) < 500
    assert 1 < files_of(tmp_path)["most_files_per_table_and_run"] <= 20
    summary = analysis.summary(tables)
    assert (summary["seeds"] == 3).all()
    assert len(summary) == summary["setting"].nunique() * 12 == 4 * 12
    opa = analysis.compare(tables, WEIGHTING, baseline="fedavg").query("value == 'opa'")
    assert (opa["test"] == "paired t").all()
    assert opa["difference"].mean() == pytest.approx(0.02, abs=0.005)
    assert measure(tmp_path)["client_rows"] == len(tables.clients)


def test_a_few_runs_are_read_without_looking_at_the_others(tmp_path: Path) -> None:
    write_results(tmp_path, runs=2, rounds=1, clients=2, candidates=2)
    (file,) = (tmp_path / "clients" / "experiment=generated" / "run_id=g0001").glob("*.parquet")
    file.write_bytes(b"damaged")
    assert len(analysis.load(tmp_path, ["g0000"]).clients) == 2
    with pytest.raises(ValueError, match=r"run_id=g0001.*not a readable Parquet file"):
        analysis.load(tmp_path)


def test_the_example_runs_on_any_results_folder(tmp_path: Path) -> None:
    write_results(tmp_path / "results", runs=8, rounds=2, clients=3, candidates=3)
    done = subprocess.run([sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "paired t" in done.stdout
    assert "\\begin{tabular}" in done.stdout


def test_no_module_knows_methods_by_their_names() -> None:
    named = {
        file.relative_to(EXPERIMENTS).as_posix()
        for folder in ("analysis", "report", "export")
        for file in (EXPERIMENTS / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in METHODS
    }
    assert named == {"report/parts/words.py"}, "how a model of that name is written"


def test_the_methods_for_silos_are_those_that_train_silos() -> None:
    trained = {name: getattr(method.config(), "train", None) for name, method in METHODS.items()}
    of_silos = {name for name, train in trained.items() if isinstance(train, SiloTrainingConfig)}
    assert {name for name, method in METHODS.items() if method.kind == "silos"} == of_silos


# -- settings ----------------------------------------------------------------------------------------------------------


def names_of(root: Path, *run_ids: str) -> list[str]:
    return [setting.name for setting in settings_of(analysis.load(root, run_ids))]


def test_a_name_begins_with_what_tells_its_setting_from_the_others(tmp_path: Path) -> None:
    common = {"a": 1, "b": 1, "c": 1, "d": 1, "zeta": 1}
    for run_id, changes in (("r1", {}), ("r2", {"zeta": 2}), ("r3", dict.fromkeys("abcd", 2))):
        begin(tmp_path, run_id, 1, **(common | changes)).close()
    assert names_of(tmp_path, "r1", "r2", "r3") == [
        "demo, a=1, b=1, c=1, zeta=1, and 1 more",
        "demo, a=1, b=1, c=1, zeta=2, and 1 more",
        "demo, a=2, b=2, c=2, d=2, and 1 more",
    ]


def test_long_values_are_cut_in_names_and_whole_in_what_differs(tmp_path: Path) -> None:
    for run_id, family in (("r1", ["x" * 40]), ("r2", ["y"])):
        begin(tmp_path, run_id, 1, family=family).close()
    first, second = settings_of(analysis.load(tmp_path))
    assert first.name == f"demo, family=[{'x' * 30}…"
    assert first.differences == {"method.train.family": ["x" * 40]}
    assert second.name == "demo, family=[y]"


def test_a_run_that_stored_no_configuration_is_a_setting_of_its_own(tmp_path: Path) -> None:
    for run_id in ("r1", "r2"):
        RunWriter.create(tmp_path, "demo", run_id).close()
    assert names_of(tmp_path, "r1", "r2") == ["demo, r1", "demo, r2"]


def test_a_setting_counts_its_distinct_seeds(tmp_path: Path) -> None:
    for i, seed in enumerate((1, 1, 2)):
        begin(tmp_path, f"r{i}", seed).close()
    (setting,) = settings_of(analysis.load(tmp_path))
    assert (setting.run_ids, setting.num_seeds, setting.repeats_seeds) == (("r0", "r1", "r2"), 2, True)


def test_a_spread_over_seeds_averages_the_runs_of_a_seed_first() -> None:
    rows = pd.DataFrame(
        [("r0", "s1", 0, 0.2), ("r0", "s1", 0, 0.4), ("r1", "s1", 0, 0.5), ("r2", "s2", 0, 0.8), ("r2", "s2", 1, 1.0)],
        columns=["run_id", "seeds", "round", "value"],
    )
    found = spread(rows, ["round"], "value")
    assert found.loc[0].tolist() == pytest.approx([0.6, 0.4, 0.8])
    assert found.loc[1].tolist() == [1.0, 1.0, 1.0]
    assert estimate_by_seed([0.2, None, 0.4, 0.8], ["s1", "s1", "s1", "s2"]) == estimate([0.8, 0.3])
    assert estimate_by_seed([None], ["s1"]) is None
