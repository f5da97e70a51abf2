"""SuperFedNAS in reports: subnets and targets, settings over seeds, dry runs, and what k models cost."""

import copy
import json
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedloom.experiments.analysis.clients import fairness
from fedloom.experiments.analysis.rounds import convergence
from fedloom.experiments.analysis.settings import Estimate, settings_of
from fedloom.experiments.analysis.subnets import (
    Cost,
    cost_comparisons,
    labels_of,
    subnet_summaries,
    subnets,
    targets_of,
)
from fedloom.experiments.analysis.tables import load
from fedloom.experiments.analysis.tiers import per_tier
from fedloom.experiments.report.runs import report_json, summary_table, write_report
from fedloom.platform.results.writer import RunWriter

SMALLEST, MIDDLE, LARGEST = "0-0", "5-5", "11-11"
MACS = {SMALLEST: 100, MIDDLE: 250, LARGEST: 900}
CONFIG: dict[str, Any] = {
    "experiment": "elastic",
    "seed": 1,
    "dry_run": False,
    "data": {"dataset": "digits", "num_clients": 4},
    "executor": {"kind": "serial"},
    "tiers": {"count": 4, "upper_bounds": None, "cost": "macs"},
    "space": {
        "name": "resnet_elastic_small",
        "input_shape": [1, 8, 8],
        "stem_channels": 4,
        "stage_widths": [8, 16],
        "stage_strides": [1, 2],
        "depths": [1, 1],
        "expansions": [0.5, 1.0, 1.5],
        "norm": "none",
    },
    "method": {
        "name": "superfednas",
        "separately": False,
        "search": {"samples": 3, "macs": [260.0], "latency_s": [0.004]},
        "train": {"rounds": 2, "lr": 0.1, "shares": {"beta_0": 0.9}},
    },
}


def config(**changes: Any) -> dict[str, Any]:
    """CONFIG with values changed by dotted keys, their dots written as two underscores."""
    changed = copy.deepcopy(CONFIG)
    for key, value in changes.items():
        *path, last = key.split("__")
        place = changed
        for part in path:
            place = place[part]
        place[last] = value
    return changed


def begin(root: Path, run_id: str, experiment: str, configuration: dict[str, Any]) -> RunWriter:
    writer = RunWriter.create(root, experiment, run_id)
    tiers = json.dumps([{"tier": f"tier{i + 1}", "upper": 200.0 * (i + 1), "clients": 1} for i in range(4)])
    writer.update_run(config=json.dumps(configuration), status="done", method="superfednas", tiers=tiers)
    return writer


def add_rounds(writer: RunWriter, stage: str, count: int, sent: int, macs: int, *, dry: bool = False) -> None:
    for i in range(count):
        trained = {} if dry else {"loss": 2.0 / (i + 1), "metric": 0.1 * i}
        beta = {"beta": 0.9 - 0.1 * i} if stage == "supernet" else {}
        work = {"clients_planned": 2, "bytes_down": sent, "bytes_up": sent, "macs": macs, "simulated_s": 1.0}
        writer.add("rounds", stage=stage, round=i, wall_s=0.1, **work, **trained, **beta)


def add_evaluation(
    writer: RunWriter, model: str, tier: str, architecture: str, accuracy: float, perplexity: float | None = None
) -> None:
    place = {"stage": "evaluation", "round": 0, "model": model, "tier": tier, "architecture": architecture}
    for split, value in (("validation", accuracy + 0.02), ("test", accuracy)):
        values = {"loss": 1 - accuracy, "accuracy": value} | ({"perplexity": perplexity} if perplexity else {})
        for metric, number in values.items():
            writer.add("evaluations", **place, split=split, metric=metric, value=number, samples=50)
    for metric, cost in (("macs", MACS[architecture]), ("parameters", 2 * MACS[architecture])):
        writer.add("evaluations", **place, metric=metric, value=cost)


def add_candidate(writer: RunWriter, tier: str, architecture: str, metric: float, on_front: bool = False) -> None:
    costs = {"macs": MACS[architecture], "parameters": 7, "metric": metric, "loss": 1.0, "feasible": True}
    stage = "search/samples" if tier == "samples" else "search/winners"
    place = {"stage": stage, "round": 1, "tier": tier, "generation": 0, "architecture": architecture}
    writer.add("candidates", **place, **costs, on_front=on_front)


def write_supernet(
    root: Path,
    run_id: str,
    *,
    better: float = 0.0,
    winner: str = MIDDLE,
    experiment: str = "elastic",
    perplexity: float | None = None,
    **changes: Any,
) -> None:
    """A supernet with a family of two, a winner for one of two targets, and predictors."""
    writer = begin(root, run_id, experiment, config(**changes))
    add_rounds(writer, "supernet", 2, sent=50, macs=1000)
    for i, architecture in enumerate((SMALLEST, MIDDLE, LARGEST)):
        add_candidate(writer, "samples", architecture, 0.5 + 0.1 * i, on_front=i == 0)
        add_candidate(writer, "front", architecture, 0.5 + 0.1 * i, on_front=True)
    add_candidate(writer, "macs=260", winner, 0.6, on_front=True)
    for what, tau, error in (("accuracy", 0.75, 0.02), ("latency_s", 0.25, 0.003)):
        for metric, value in (("kendall_tau", tau), ("mae", error), ("held_out", 24.0)):
            row = {"model": "predictor", "tier": "server", "metric": f"predictor_{metric}_{what}", "value": value}
            writer.add("evaluations", stage="search/winners", round=1, split="validation", **row)
    add_rounds(writer, "search/samples", 1, 0, 0, dry=True)
    add_evaluation(writer, "supernet", "server", SMALLEST, 0.5 + better, perplexity)
    add_evaluation(writer, "supernet", "server", LARGEST, 0.8 + better, perplexity)
    add_evaluation(writer, "searched", "macs=260", winner, 0.6 + better, perplexity)
    kept = {"architecture": LARGEST, "macs": 900, "parameters": 1800, "file": "f", "hash": "h"}
    writer.add("models", stage="supernet", round=2, tier="", **kept)
    writer.close()


def write_alone(
    root: Path,
    run_id: str,
    members: Sequence[tuple[str, int, int]],
    rounds: Sequence[int] = (2, 2, 2),
    *,
    dry: bool = False,
    **changes: Any,
) -> None:
    """iFedAvg over members of (architecture, bytes each way per round, MACs per round)."""
    writer = begin(root, run_id, "ifedavg", config(method__separately=True, dry_run=dry, **changes))
    for (architecture, sent, macs), count in zip(members, rounds, strict=False):
        add_rounds(writer, f"alone/{architecture}", count, sent, macs, dry=dry)
    if not dry:
        for i, (architecture, *_) in enumerate(members):
            add_evaluation(writer, "alone", "server", architecture, 0.4 + 0.2 * i)
    writer.close()


FAMILY = ((SMALLEST, 20, 300), (MIDDLE, 30, 700), (LARGEST, 100, 2000))


def shown(renderable: object, width: int = 100) -> str:
    console = Console(width=width, file=StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


def words_after(text: str, name: str) -> list[str]:
    """The cells of the line that begins with this name."""
    return next(line.removeprefix(name).split() for line in text.splitlines() if line.startswith(name))


def test_a_row_per_subnet_and_target_with_costs_and_both_accuracies(tmp_path: Path) -> None:
    write_supernet(tmp_path, "r1")
    tables = load(tmp_path)
    frame = subnets(tables, labels_of(tables))
    assert frame["model"].tolist() == ["supernet", "supernet", "searched"]
    assert frame["target"].tolist() == ["", "", "macs=260"]
    assert frame["label"].tolist()[:2] == ["d=0,0 e=0.5", "d=1,1 e=1.5"]
    assert frame[["macs", "parameters"]].values.tolist() == [[100, 200], [900, 1800], [250, 500]]
    assert frame["test_accuracy"].tolist() == [0.5, 0.8, 0.6]
    assert frame["validation_accuracy"].tolist() == pytest.approx([0.52, 0.82, 0.62])
    assert frame["test_perplexity"].isna().all()


def test_the_summary_has_no_rows_of_tiers_samples_or_stages(tmp_path: Path) -> None:
    write_supernet(tmp_path, "r1")
    text = shown(summary_table(tmp_path, "r1"))
    assert words_after(text, "d=0,0 e=0.5") == ["100", "200", "52.0", "50.0"]
    assert words_after(text, "d=1,1 e=1.5") == ["900", "1.80", "k", "82.0", "80.0"]
    assert words_after(text, "macs=260") == ["250", "500", "62.0", "60.0"]
    for nonsense in ("winners –", "samples", "front", "tier1", "within the bounds", "upper"):
        assert nonsense not in text.replace("\n", " ")
    assert "latency_s=0.004: the search chose no subnet for it." in text
    assert "Kendall tau 0.75, mean absolute error 2.0 percentage points" in " ".join(text.split())
    assert "Kendall tau 0.25, mean absolute error 0.003 s" in " ".join(text.split())
    assert per_tier(load(tmp_path)).empty


def test_subnets_of_which_only_the_costs_are_known_have_no_qualities(tmp_path: Path) -> None:
    writer = begin(tmp_path, "r1", "elastic", config())
    place = {"stage": "evaluation", "round": 0, "model": "supernet", "tier": "server", "architecture": SMALLEST}
    for metric, cost in (("macs", 100), ("parameters", 200)):
        writer.add("evaluations", **place, metric=metric, value=cost)
    writer.close()
    tables = load(tmp_path)
    frame = subnets(tables, labels_of(tables))
    assert frame[["macs", "parameters"]].values.tolist() == [[100, 200]]
    assert frame[["validation_accuracy", "test_accuracy"]].isna().all(axis=None)


def test_members_stand_in_the_order_of_their_evaluation(tmp_path: Path) -> None:
    write_alone(tmp_path, "r1", FAMILY)
    tables = load(tmp_path)
    assert subnets(tables, labels_of(tables))["architecture"].tolist() == [SMALLEST, MIDDLE, LARGEST]


def test_texts_show_perplexity_beside_accuracy(tmp_path: Path) -> None:
    write_supernet(tmp_path, "r1", perplexity=123.456)
    assert words_after(shown(summary_table(tmp_path, "r1")), "macs=260")[-2:] == ["123.5", "123.5"]


def test_targets_are_those_of_the_configuration_or_the_tiers(tmp_path: Path) -> None:
    write_supernet(tmp_path, "r1")
    write_supernet(tmp_path, "r2", method__search={"samples": 3, "macs": [], "latency_s": []})
    write_supernet(tmp_path, "r3", method__search={"samples": 0, "macs": [260.0]})
    tables = load(tmp_path, ["r1", "r2", "r3"])
    assert targets_of(tables, "r1") == ["macs=260", "latency_s=0.004"]
    assert targets_of(tables, "r2") == ["tier1", "tier2", "tier3", "tier4"]
    assert targets_of(tables, "r3") == []


def test_seeds_of_a_configuration_are_one_setting_and_other_values_another(tmp_path: Path) -> None:
    write_supernet(tmp_path, "r1")
    write_supernet(tmp_path, "r2", better=0.1, seed=2, executor={"kind": "ray"}, winner=LARGEST)
    write_supernet(tmp_path, "r3", method__train__shares={"beta_0": 0.5})
    tables = load(tmp_path, ["r1", "r2", "r3"])
    found = {s.name: s.run_ids for s in settings_of(tables)}
    assert found == {
        "elastic, beta_0=0.9": ("r1", "r2"),
        "elastic, beta_0=0.5": ("r3",),
    }
    first, second = subnet_summaries(tables, labels_of(tables))
    assert [(s.model, s.target, s.architecture) for s in first.subnets] == [
        ("supernet", "", SMALLEST),
        ("supernet", "", LARGEST),
        ("searched", "macs=260", None),  # the seeds found different winners
    ]
    test = first.subnets[0].values["test_accuracy"]
    assert test is not None
    assert (test.mean, test.values, test.half_width) == (pytest.approx(0.55), pytest.approx((0.5, 0.6)), None)
    winners = first.subnets[2].values["macs"]
    assert winners is not None
    assert winners.mean == 575
    assert second.subnets[2].values["macs"] == Estimate(250.0, None, 1, (250.0,))


def test_a_repeated_seed_is_one_sample_of_subnets_predictors_and_costs(tmp_path: Path) -> None:
    for run_id, better, seed in (("r1", 0.0, 1), ("r2", 0.1, 1), ("r3", 0.25, 2)):
        write_supernet(tmp_path, run_id, better=better, seed=seed)
    for run_id, sent, seed in (("r4", 20, 1), ("r5", 40, 1), ("r6", 60, 2)):
        write_alone(tmp_path, run_id, [(SMALLEST, sent, 300)], seed=seed)
    tables = load(tmp_path, [f"r{i}" for i in range(1, 7)])
    (summary, _) = subnet_summaries(tables, labels_of(tables))
    # Of seeds 1 and 2: 0.55 and 0.75.
    test = summary.subnets[0].values["test_accuracy"]
    assert test is not None
    assert (test.mean, test.values, test.half_width) == (pytest.approx(0.65), pytest.approx((0.55, 0.75)), None)
    tau = summary.predictors[0].kendall_tau
    assert tau is not None
    assert tau.runs == 2
    (comparison,) = cost_comparisons(tables, labels_of(tables))
    # Two rounds of twice 30 and 60 bytes.
    assert comparison.steps[0].total == Cost(180.0, 600.0)
    text = " ".join(shown(summary_table(tmp_path, ["r1", "r2", "r3"])).split())
    assert "values of 2 seeds (3 runs; a repeated seed counts once, with its mean), which give no interval." in text
    text = " ".join(shown(summary_table(tmp_path, ["r1", "r2"])).split())
    assert "Mean over 2 runs of one seed, which give no interval." in text
    assert "±" not in text


def test_settings_that_only_newer_versions_tell_apart_are_named_after_their_runs(tmp_path: Path) -> None:
    for run_id, extra in (("r1", {}), ("r2", {"method__train__new": 1})):
        begin(tmp_path, run_id, "elastic", config(**extra)).close()
    assert [s.name for s in settings_of(load(tmp_path, ["r1", "r2"]))] == ["elastic, r1", "elastic, r2"]


def test_the_cost_of_the_first_k_members_against_the_supernet(tmp_path: Path) -> None:
    write_supernet(tmp_path, "r1")
    write_alone(tmp_path, "r2", FAMILY)
    tables = load(tmp_path, ["r1", "r2"])
    (comparison,) = cost_comparisons(tables, labels_of(tables))
    # The supernet: 2 rounds of 50 bytes each way and 1000 MACs.
    assert comparison.supernet_cost == Cost(200.0, 2000.0)
    assert [s.total for s in comparison.steps] == [Cost(80.0, 600.0), Cost(200.0, 2000.0), Cost(600.0, 6000.0)]
    assert [s.communication_ratio for s in comparison.steps] == [0.4, 1.0, 3.0]
    assert [s.compute_ratio for s in comparison.steps] == [0.3, 1.0, 3.0]
    assert comparison.largest.member.architecture == LARGEST
    assert comparison.largest.member.is_largest
    assert (comparison.largest.communication_ratio, comparison.largest.compute_ratio) == (2.0, 2.0)
    assert comparison.differences == ()
    text = shown(summary_table(tmp_path, ["r1", "r2"]))
    assert words_after(text, "3 ")[-1] == "3.00×"
    assert "the largest subnet alone 2.00× and 2.00×" in " ".join(text.split())


def test_stages_that_did_not_run_all_rounds_do_not_count(tmp_path: Path) -> None:
    write_supernet(tmp_path, "r1")
    write_alone(tmp_path, "r2", FAMILY, rounds=(2, 2, 1))
    write_alone(tmp_path, "r3", FAMILY, rounds=(1,), seed=3)
    tables = load(tmp_path, ["r1", "r2", "r3"])
    (comparison,) = cost_comparisons(tables, labels_of(tables))
    assert [s.k for s in comparison.steps] == [1, 2]
    assert comparison.steps[0].total == Cost(80.0, 600.0)
    assert not comparison.largest.member.is_largest


def test_unequal_terms_are_said_and_other_data_is_not_compared(tmp_path: Path) -> None:
    write_supernet(tmp_path, "r1")
    write_alone(tmp_path, "r2", FAMILY, method__train__lr=0.2)
    write_alone(tmp_path, "r3", FAMILY, data__dataset="cifar10")
    tables = load(tmp_path, ["r1", "r2", "r3"])
    (comparison,) = cost_comparisons(tables, labels_of(tables))
    assert comparison.differences == ("method.train.lr (0.1 and 0.2)",)


@pytest.mark.usefixtures("undrawn")
def test_a_dry_run_says_that_nothing_was_trained_and_shows_its_totals(tmp_path: Path) -> None:
    write_alone(tmp_path, "r1", FAMILY, dry=True)
    text = shown(summary_table(tmp_path, "r1"))
    assert words_after(text, "trained alone d=0,0 e=0.5") == ["2", "4", "40", "B", "40", "B", "600", "2", "s"]
    assert words_after(text, "in total") == ["6", "12", "300", "B", "300", "B", "6.00", "k", "6", "s"]
    assert "dry run: nothing was trained" in text
    assert "dry run: nothing was trained" not in shown(summary_table(tmp_path, "r1", missing=False))
    files = write_report(tmp_path, ["r1"])
    said = " ".join(files.missing)
    assert "dry run: nothing was trained" in said
    assert "measured on test data" not in said
    assert [p.stem for p in files.plots if p.suffix == ".png"] == ["communication"]


def test_the_page_the_json_and_the_figures_of_several_runs(tmp_path: Path, colours: Callable[[bytes], int]) -> None:
    for i in (1, 2):
        write_supernet(tmp_path, f"r{i}", better=0.05 * i, seed=i)
    write_supernet(tmp_path, "r3", method__train__shares={"beta_0": 0.5})
    write_alone(tmp_path, "r4", FAMILY)
    runs = ["r1", "r2", "r3", "r4"]
    files = write_report(tmp_path, runs)
    plots = {p.stem: p for p in files.plots if p.suffix == ".png"}
    assert {"accuracy-macs", "search", "beta", "cost"} <= set(plots)
    assert "pareto-elastic" not in plots
    for name in ("accuracy-macs", "search", "beta", "cost"):
        assert colours(plots[name].read_bytes()) > 50, name
    page = files.markdown.read_text()
    assert "| macs=260 | blocks " in page
    assert "| FedAvg | d=1,1 e=1.5 alone | 400 B | 200 B | 2.00× |" in page
    assert "| ifedavg | trained alone d=0,0 e=0.5 | 2 |" in page
    values = report_json(tmp_path, runs)
    json.dumps(values, allow_nan=False)
    assert [len(c["steps"]) for c in values["cost_comparison"]] == [3, 3]
    assert [s["run_ids"] for s in values["subnet_summary"]] == [["r1", "r2"], ["r3"], ["r4"]]
    assert values["subnet_summary"][0]["predictors"][0]["kendall_tau"]["mean"] == 0.75
    assert len(values["subnets"]) == 12


def test_a_space_that_cannot_be_built_leaves_ids(tmp_path: Path) -> None:
    write_supernet(tmp_path, "r1", space={"name": "resnet_elastic_small", "of_another_version": 1})
    write_supernet(tmp_path, "r2", space={"name": "gone.module:space"})
    for run_id in ("r1", "r2"):
        assert words_after(shown(summary_table(tmp_path, run_id)), SMALLEST)[0] == "100"


def test_curves_end_with_the_final_evaluation_of_the_subnets_that_training_scored(tmp_path: Path) -> None:
    write_supernet(tmp_path, "r1")  # the final evaluation scores smallest and largest: 52 and 82 %
    write_alone(tmp_path, "r2", FAMILY)
    for run_id, scored in (("r3", (SMALLEST, LARGEST)), ("r4", (SMALLEST, MIDDLE))):
        writer = begin(tmp_path, run_id, "elastic", config())
        add_rounds(writer, "supernet", 2, sent=50, macs=1000)
        for architecture, value in zip(scored, (0.1, 0.3), strict=True):
            row = {"model": "supernet", "tier": "server", "architecture": architecture, "split": "validation"}
            writer.add("evaluations", stage="supernet", round=0, **row, metric="accuracy", value=value, samples=50)
        for architecture, accuracy in ((SMALLEST, 0.5), (LARGEST, 0.8)):
            add_evaluation(writer, "supernet", "server", architecture, accuracy)
        writer.close()
    frame = convergence(load(tmp_path, ["r1", "r2", "r3", "r4"]))
    frame = frame[frame["series"] == "validation"]
    found = {key: list(zip(rows["rounds_done"], rows["metric"], strict=True)) for key, rows in frame.groupby("run_id")}
    assert found["r3"] == [(0, pytest.approx(0.2)), (2, pytest.approx(0.67))]
    # The last point would be of other subnets than those before.
    assert found["r4"] == [(0, pytest.approx(0.2))]
    assert "r1" not in found
    assert found["r2"] == [(2, pytest.approx(value)) for value in (0.42, 0.62, 0.82)]
    assert frame.loc[frame["run_id"] == "r2", "tier"].tolist() == [SMALLEST, MIDDLE, LARGEST]


def test_clients_of_a_family_are_counted_per_subnet(tmp_path: Path) -> None:
    writer = begin(tmp_path, "r1", "elastic", config())
    for architecture, value in ((SMALLEST, 0.25), (LARGEST, 0.75)):
        row = {"model": "supernet", "tier": "tier1", "architecture": architecture, "client_id": 3, "samples": 4}
        writer.add("evaluations", stage="evaluation", round=0, split="test", metric="accuracy", value=value, **row)
    writer.close()
    frame = fairness(load(tmp_path))
    own = frame[frame["tier"] == "tier1"]
    assert dict(zip(own["model"], own["worst"], strict=True)) == {"supernet 0-0": 0.25, "supernet 11-11": 0.75}
