"""Comparisons against a baseline: which test, over which seeds, and what cannot be compared."""

import math
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedloom.experiments import analysis
from fedloom.experiments.analysis.compare import Difference, difference, paired

WEIGHTING = "method.train.weighting"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, runs_in: Callable[[Path], Any]) -> Path:
    """A folder with the runs of `write_pairs` and no others."""
    runs = runs_in(tmp_path_factory.mktemp("pairs"))
    runs.write_pairs()
    return Path(runs.root)


def test_a_paired_test_over_seeds(pairs: Path) -> None:
    frame = analysis.compare(analysis.load(pairs), by=WEIGHTING)
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


def test_seeds_that_do_not_pair_are_compared_by_welch(runs: Any) -> None:
    runs.write_pairs()
    runs.write("b4", 0.8, 4, weighting="opa", lr=0.1)
    tables = analysis.load(runs.root)
    row = analysis.compare(tables, WEIGHTING).to_dict("records")[1]
    opa, fedavg = np.array([0.5, 0.7, 0.6, 0.8]), np.array([0.4, 0.5, 0.55])
    parts = [opa.var(ddof=1) / 4, fedavg.var(ddof=1) / 3]
    error, freedom = math.sqrt(sum(parts)), sum(parts) ** 2 / (parts[0] ** 2 / 3 + parts[1] ** 2 / 2)
    mean = opa.mean() - fedavg.mean()
    assert (row["test"], row["n"], row["compared"]) == ("Welch t", 4, 7)
    assert row["p_value"] == pytest.approx(2 * stats.t.sf(mean / error, freedom))
    assert row["difference_low"] == pytest.approx(mean - stats.t.ppf(0.975, freedom) * error)
    three = analysis.load(runs.root, ["a1", "a2", "a3", "b1", "b2", "b3"])
    assert analysis.compare(three, WEIGHTING, pair=None)["test"].tolist()[1] == "Welch t"
    # All runs have one partition: it pairs nobody.
    assert analysis.compare(three, WEIGHTING, pair="seeds.partition")["test"].tolist()[1] == "Welch t"
    assert analysis.compare(three, WEIGHTING, pair="seeds.training")["test"].tolist()[1] == "paired t"


@pytest.mark.parametrize(("run_ids", "difference"), [(["a1", "b1"], 0.1), (["a1", "a2", "b1", "b2"], 0.15)])
def test_one_or_two_seeds_give_neither_interval_nor_test(pairs: Path, run_ids: list[str], difference: float) -> None:
    row = analysis.compare(analysis.load(pairs, run_ids), WEIGHTING).to_dict("records")[1]
    assert (row["n"], row["test"], row["difference"]) == (len(run_ids) / 2, "none", pytest.approx(difference))
    assert all(math.isnan(row[k]) for k in ("half_width", "difference_low", "difference_high", "p_value"))


def test_what_does_not_vary_has_no_p_value(pairs: Path) -> None:
    row = analysis.compare(analysis.load(pairs), WEIGHTING, "total_bytes").to_dict("records")[1]
    assert (row["difference"], row["difference_low"], row["difference_high"]) == (0, 0, 0)
    assert math.isnan(row["p_value"])
    shifted = difference(np.array([0.3, 0.4, 0.5]), np.array([0.2, 0.3, 0.4]), paired=True)
    assert (shifted.p_value, shifted.difference) == (None, pytest.approx(0.1))


@pytest.mark.parametrize("is_paired", [True, False])
def test_the_loss_of_a_diverged_run_is_not_tested(is_paired: bool) -> None:
    diverged, other = np.array([math.inf, 2.0, 3.0]), np.array([1.0, 2.0, 3.5])
    assert difference(diverged, other, paired=is_paired) == Difference("none", 3 if is_paired else 6, math.inf)
    assert difference(other, diverged, paired=is_paired).difference == -math.inf
    assert math.isnan(difference(diverged, diverged, paired=is_paired).difference)


def test_other_keys_make_groups_unless_they_are_ignored(runs: Any) -> None:
    runs.write_pairs()
    runs.write("c1", 0.1, 1, weighting="fedavg", lr=0.5)
    runs.write("c2", 0.3, 2, weighting="opa", lr=0.5)
    frame = analysis.compare(analysis.load(runs.root), WEIGHTING, baseline="opa")
    assert list(zip(frame["within"], frame["value"], frame["n"], strict=True)) == [
        ("lr=0.1", "opa", 3),
        ("lr=0.1", "fedavg", 3),
        ("lr=0.5", "opa", 1),
        ("lr=0.5", "fedavg", 1),
    ]
    apart = analysis.load(runs.root, ["a1", "a2", "c2"])
    with pytest.raises(ValueError, match=r"also differ in method.train.lr: name those that belong to it in ignore="):
        analysis.compare(apart, WEIGHTING)
    assert analysis.compare(apart, WEIGHTING, ignore=["method.train.lr"])["n"].tolist() == [2, 1]


def test_experiments_are_compared_whatever_they_differ_in(runs: Any) -> None:
    for seed in (1, 2, 3):
        runs.write(f"r{seed}", 0.1 * seed, seed, "one", lr=0.1, epochs=2)
        runs.write(f"s{seed}", 0.3 * seed, seed, "two", lr=0.5)
    frame = analysis.compare(analysis.load(runs.root), "experiment", baseline="two")
    assert frame["value"].tolist() == ["two", "one"]
    assert frame["test"].tolist()[1] == "paired t"
    assert frame["difference"].tolist()[1] == pytest.approx(-0.4)
    runs.write("s4", 0.1, 4, "two", lr=0.7)
    with pytest.raises(ValueError, match=r"runs of experiment 'two' differ in method.train.lr"):
        analysis.compare(analysis.load(runs.root), "experiment")


def write_named(runs: Any, name: str, accuracies: list[float], first: int = 1, **train: Any) -> None:
    for seed, accuracy in enumerate(accuracies, first):
        writer = runs.begin(f"{name}{seed}", seed, **train)
        writer.update_run(name=name, partition_hash="same")
        runs.evaluate(writer, accuracy)
        writer.close()


def test_runs_with_names_are_compared_and_what_they_differ_in_is_said(runs: Any) -> None:
    write_named(runs, "plain", [0.4, 0.5, 0.55], lr=0.1, rounds=2)
    write_named(runs, "fast", [0.5, 0.7, 0.6], lr=0.5, rounds=2, epochs=3)
    runs.write("nameless", 0.9, 1)
    row = analysis.compare(analysis.load(runs.root), "name", baseline="plain").to_dict("records")[1]
    assert (row["value"], row["test"], row["over"]) == ("fast", "paired t", "paired over 3 seeds")
    assert row["differs_in"] == "method.train.lr, 1 key that some do not have"
    assert row["p_value"] == pytest.approx(1 - math.sqrt(7) / 3)
    assert row["values"] == pytest.approx([0.5, 0.7, 0.6])
    write_named(runs, "fast", [0.8], 4, lr=0.9, rounds=2, epochs=3)
    with pytest.raises(ValueError, match=r"runs of name 'fast' differ in method.train.lr"):
        analysis.compare(analysis.load(runs.root), "name")
    row = analysis.compare(analysis.load(runs.root), "name", ignore=["method.train.lr"]).to_dict("records")[1]
    assert (row["test"], math.isnan(row["p_value"])) == ("none", True)


def test_where_an_ignored_key_differs_there_is_no_p_value(runs: Any) -> None:
    for seed in (1, 2, 3):
        runs.write(f"r{seed}", 0.1 * seed, seed, weighting="opa", lr=0.1)
        runs.write(f"s{seed}", 0.3 * seed, seed, weighting="fedavg", lr=0.5)
    row = analysis.compare(analysis.load(runs.root), WEIGHTING, ignore=["method.train.lr"]).to_dict("records")[1]
    assert (row["differs_in"], row["test"], row["n"]) == ("method.train.lr", "none", 3)
    assert row["difference"] == pytest.approx(0.4)
    assert all(math.isnan(row[name]) for name in ("difference_low", "difference_high", "p_value"))


def test_two_runs_of_one_seed_are_compared_over_clients(runs: Any) -> None:
    for weighting in ("fedavg", "opa"):
        writer = runs.begin(weighting, 1, weighting=weighting)
        writer.update_run(partition_hash="same")
        runs.evaluate(writer, 0.5)
        for client in range(6):
            own = 0.4 + (0.01 * (client + 1) if weighting == "opa" else 0)
            runs.evaluate(writer, own, tier=f"tier{1 + client % 2}", client_id=client)
        writer.close()
    row = analysis.compare(analysis.load(runs.root), WEIGHTING, over="clients").to_dict("records")[1]
    assert (row["tier"], row["test"], row["over"]) == ("all", "Wilcoxon", "paired over 6 clients, one seed")
    # .01 to .06, all one way: two of the 64 signs are as far out; standard deviation .0187, five degrees of freedom.
    assert (row["difference"], row["p_value"]) == (pytest.approx(0.035), pytest.approx(2 / 64))
    assert row["difference_high"] - 0.035 == pytest.approx(2.57058184 * math.sqrt(0.00035 / 6), rel=1e-6)
    writer = runs.begin("other", 1, weighting="plain")
    writer.update_run(partition_hash="another")
    runs.evaluate(writer, 0.5, client_id=0)
    writer.close()
    with pytest.raises(ValueError, match="their data differ: other and fedavg"):
        analysis.compare(analysis.load(runs.root), WEIGHTING, over="clients", baseline="fedavg")


def test_mcnemar_counts_the_samples_that_one_model_alone_has_right() -> None:
    sides = [
        pd.DataFrame({"run_id": name, "unit": range(20), "units": "h", "accuracy": right})
        for name, right in (("a", [1.0] * 6 + [0.0] + [1.0] * 13), ("b", [0.0] * 6 + [1.0] * 14))
    ]
    found, units = paired(*sides, "accuracy", "samples")
    assert (found.test, found.compared, units) == ("McNemar", 20, "test samples")
    # Six against one: the tails of seven throws of a coin, twice 8 of 128.
    assert (found.difference, found.p_value) == (pytest.approx(0.25), pytest.approx(0.125))
    same, _ = paired(sides[0], sides[0], "accuracy", "samples")
    assert (same.difference, same.p_value) == (0, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": WEIGHTING, "over": "rounds"}, "over='rounds': there are seeds, clients, samples"),
        ({"by": WEIGHTING, "over": "clients", "metric": "macs"}, "compares accuracy or loss, not macs"),
        ({"by": "name"}, "no run has a name"),
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
def test_what_cannot_be_compared_is_said_in_one_line(pairs: Path, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        analysis.compare(analysis.load(pairs), **arguments)
    assert "\n" not in str(caught.value)


def test_runs_that_are_not_evaluated_yet_compare_by_what_they_cost(runs: Any) -> None:
    for run_id, rate in (("r1", 0.1), ("r2", 0.2)):
        runs.begin(run_id, 1, lr=rate).close()
    tables = analysis.load(runs.root)
    with pytest.raises(ValueError, match="no run has a value of accuracy yet"):
        analysis.compare(tables, "method.train.lr")
    assert analysis.compare(tables, "method.train.lr", "total_bytes")["mean"].tolist() == [42, 42]


def test_the_order_of_the_runs_does_not_matter(pairs: Path) -> None:
    expected = None
    for run_ids in list(permutations(["a1", "b1", "a2", "b2", "a3"]))[::47]:
        tables = analysis.load(pairs, run_ids)
        summary = analysis.summary(tables).sort_values("setting", ignore_index=True)
        found = (summary, analysis.compare(tables, WEIGHTING))
        expected = expected or found
        for frame, first in zip(found, expected, strict=True):
            pd.testing.assert_frame_equal(frame, first, check_exact=True)
