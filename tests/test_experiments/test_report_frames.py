"""From result tables to the report's frames: literal numbers on a small run written by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedloom.experiments.analysis.clients import failures, fairness
from fedloom.experiments.analysis.outcomes import per_model
from fedloom.experiments.analysis.rounds import communication, communication_by_kind, convergence, megabytes
from fedloom.experiments.analysis.settings import Estimate, estimate
from fedloom.experiments.analysis.tables import Tables, latest_run, load
from fedloom.experiments.analysis.tiers import architectures, pareto, per_tier
from fedloom.experiments.report.runs import records
from fedloom.experiments.report.tiers import cell, columns_of, tier_summaries
from fedloom.experiments.report.wording import percent, seconds, si
from fedloom.platform.results.writer import RunWriter

CONFIG = {"tiers": {"count": 3, "upper_bounds": None, "cost": "macs"}, "method": {"name": "fedoras", "search": {}}}


def round_row(stage: str, round_: int, down: int, up: int, loss: float | None = None, **more: Any) -> dict[str, Any]:
    row = {"stage": stage, "round": round_, "bytes_down": down, "bytes_up": up, "loss": loss, "clients_planned": 2}
    return {"macs": 1000, "simulated_s": 0.5, "wall_s": 2.0, **row, **more}


def evaluation(
    stage: str, round_: int, model: str, tier: str, value: float | None, client_id: int | None = None, **more: Any
) -> dict[str, Any]:
    row = {"stage": stage, "round": round_, "model": model, "tier": tier, "architecture": "0-1", "client_id": client_id}
    return {**row, "split": "test", "metric": "accuracy", "value": value, "samples": 10, **more}


def candidate(tier: str, architecture: str, macs: int, metric: float | None, on_front: bool = False) -> dict[str, Any]:
    row = {"stage": f"search/{tier}", "round": 1, "tier": tier, "generation": 0, "architecture": architecture}
    feasible = metric is not None
    return {**row, "macs": macs, "parameters": 2 * macs, "metric": metric, "feasible": feasible, "on_front": on_front}


def add_scores(writer: RunWriter, stage: str, round_: int, model: str, tier: str, *values: float) -> None:
    """What a training stage writes that scores its weights after the last round: a row of `rounds` without clients."""
    nothing = {"clients_planned": 0, "clients_ok": 0, "clients_failed": 0, "macs": 0, "simulated_s": 0.0}
    writer.add("rounds", **round_row(stage, round_, 0, 0, **nothing))
    for i, value in enumerate(values):
        row = evaluation(stage, round_, model, tier, value, split="validation", architecture=f"{i}-1")
        writer.add("evaluations", **row)


def write_run(
    root: Path, run_id: str, fine_tuned: float = 0.8, experiment: str = "demo", *, scored: bool = False
) -> None:
    """Two of three tiers hold models; tier1 is evaluated, tier2 is not yet; one client has no test data.

    With `scored` the training stages score their weights after the last round.
    """
    writer = RunWriter.create(root, experiment, run_id)
    writer.update_run(config=json.dumps(CONFIG), status="done", method="fedoras")
    for i, (down, loss) in enumerate(((100, 2.0), (120, 1.5))):
        writer.add("rounds", **round_row("supernet", i, down, down - 10, loss, metric=0.25))
    writer.add("evaluations", **evaluation("supernet", 0, "supernet", "server", 0.1, split="validation"))
    second = evaluation("supernet", 0, "supernet", "server", 0.3, split="validation", architecture="1-1")
    writer.add("evaluations", **second)
    if scored:
        add_scores(writer, "supernet", 2, "supernet", "server", 0.5, 0.7)
    for row in (
        candidate("tier1", "0-1", 50, 0.5, on_front=True),
        candidate("tier1", "0-0", 40, 0.4, on_front=True),
        candidate("tier1", "1-1", 60, 0.5),
        candidate("tier1", "1-0", 55, None),
        candidate("tier2", "2-2", 90, 0.6, on_front=True),
    ):
        writer.add("candidates", **row)
    for model in ("fine_tuned", "rand_init"):
        writer.add("rounds", **round_row(f"{model}/tier1", 0, 30, 20, 1.25, metric=0.5))
        if scored:
            add_scores(writer, f"{model}/tier1", 1, model, "tier1", 0.75)
    for round_, (model, value) in enumerate((("supernet_init", 0.3), ("fine_tuned", fine_tuned), ("rand_init", 0.6))):
        writer.add("rounds", **round_row("evaluation", round_, 7, 0))
        writer.add("evaluations", **evaluation("evaluation", round_, model, "tier1", value))
        writer.add("evaluations", **evaluation("evaluation", round_, model, "tier1", value - 0.1, split="validation"))
        for client_id, own in enumerate((0.5, 1.0, 0.0)):
            writer.add("evaluations", **evaluation("evaluation", round_, model, "tier1", own, client_id))
        writer.add("evaluations", **evaluation("evaluation", round_, model, "tier1", None, 9, samples=0))
        kept = {"tier": "tier1", "architecture": "0-1", "macs": 50, "parameters": 100, "file": "f", "hash": "h"}
        writer.add("models", stage="evaluation", round=round_, **kept)
    writer.add("clients", stage="supernet", round=0, client_id=4, status="ok", tier="tier1")
    for client_id, late_s in ((5, 1.25), (6, 3.5e-7)):
        error = f"simulated time {late_s} s is over the deadline of 0.5 s"
        writer.add("clients", stage="fine_tuned/tier1", round=3, client_id=client_id, status="timed_out", error=error)
    writer.close()


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    write_run(tmp_path, "r1")
    return load(tmp_path)


def test_per_tier_joins_winners_costs_and_test_metrics(tables: Tables) -> None:
    frame = per_tier(tables, {("r1", "tier2"): 95.5})
    assert frame["tier"].tolist() == ["tier1", "tier2", "tier3"]
    first, second, third = records(frame)
    assert first["architecture"] == "0-1"
    assert (first["macs"], first["parameters"], first["search_metric"]) == (50, 100, 0.5)
    assert (first["test_supernet_init"], first["test_fine_tuned"], first["test_rand_init"]) == (0.3, 0.8, 0.6)
    assert first["gain"] == pytest.approx(0.2)
    assert (second["architecture"], second["macs"], second["upper_bound"]) == ("2-2", 90, 95.5)
    assert second["test_fine_tuned"] is None
    assert second["gain"] is None
    assert (third["architecture"], third["macs"]) == (None, None)


def test_the_winner_of_a_search_that_is_not_evaluated_yet_ties_to_fewer_macs(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1")
    for architecture, macs, metric in (("1-1", 60, 0.5), ("0-1", 50, 0.5), ("0-0", 40, 0.4), ("2-2", 10, None)):
        writer.add("candidates", **candidate("tier1", architecture, macs, metric))
    writer.close()
    assert architectures(load(tmp_path)) == {("r1", "tier1"): "0-1"}


def test_fairness_counts_clients_with_test_data_only(tables: Tables) -> None:
    rows = records(fairness(tables))
    assert [(r["model"], r["tier"]) for r in rows] == [
        (model, tier) for model in ("supernet_init", "fine_tuned", "rand_init") for tier in ("tier1", "all")
    ]
    for row in rows:
        assert (row["clients"], row["excluded"]) == (3, 1)
        assert row["mean"] == pytest.approx(0.5)
        assert row["std"] == pytest.approx(math.sqrt(1 / 6))
        assert row["worst"] == 0.0


def test_fairness_over_all_tiers_pools_the_clients(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1")
    for tier, values in (("tier10", (0.2,)), ("tier2", (0.6, 0.7))):
        for client_id, value in enumerate(values):
            writer.add("evaluations", **evaluation("evaluation", 0, "fine_tuned", tier, value, client_id))
    writer.close()
    frame = fairness(load(tmp_path))
    assert frame["tier"].tolist() == ["tier2", "tier10", "all"]
    assert frame["mean"].tolist() == pytest.approx([0.65, 0.2, 0.5])
    assert frame["worst"].tolist() == [0.6, 0.2, 0.2]


def test_communication_sums_per_stage_and_leaves_baseline_and_evaluation_out_of_the_method(
    tables: Tables,
) -> None:
    stages = communication(tables)
    assert stages["stage"].tolist() == ["supernet", "fine_tuned/tier1", "rand_init/tier1", "evaluation"]
    assert stages["bytes_down"].tolist() == [220, 30, 30, 21]
    assert stages["bytes_up"].tolist() == [200, 20, 20, 0]
    assert stages["rounds"].tolist() == [2, 1, 1, 3]
    assert stages["clients"].tolist() == [4, 2, 2, 6]
    method = communication_by_kind(stages).set_index("kind").loc["method"]
    assert (method["bytes_down"], method["bytes_up"], method["macs"]) == (250, 220, 3000)
    assert (method["simulated_s"], method["wall_s"]) == (1.5, 6.0)


def test_megabytes_add_up_from_a_stages_beginning(tables: Tables) -> None:
    sent = megabytes(tables)
    assert sent["stage"].value_counts()["supernet"] == 3
    supernet = sent[sent["stage"] == "supernet"]
    assert supernet["rounds_done"].tolist() == [0, 1, 2]
    assert supernet["megabytes"].iloc[[0, 2]].tolist() == pytest.approx([0.0, 420e-6])
    assert sent[sent["stage"] == "rand_init/tier1"]["megabytes"].tolist() == pytest.approx([0.0, 50e-6])


def test_without_a_supernet_rand_init_is_the_method(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "plain", "r1")
    writer.add("rounds", **round_row("rand_init/tier1", 0, 30, 20, 1.0))
    writer.add("rounds", **round_row("evaluation", 0, 5, 0))
    writer.close()
    kinds = communication_by_kind(communication(load(tmp_path))).set_index("kind")
    assert kinds.loc["method", "bytes_down"] == 30


def test_convergence_places_training_after_and_validation_before_the_round(tables: Tables) -> None:
    frame = convergence(tables)
    supernet = frame[frame["kind"] == "supernet"]
    train = supernet[supernet["series"] == "train"]
    assert train["rounds_done"].tolist() == [1, 2]
    assert train["loss"].tolist() == [2.0, 1.5]
    validation = supernet[supernet["series"] == "validation"]
    assert validation["rounds_done"].tolist() == [0]
    assert validation["metric"].tolist() == pytest.approx([0.2])
    assert validation["tier"].tolist() == [""]
    tuned = frame[(frame["kind"] == "fine_tuned") & (frame["series"] == "validation")]
    assert tuned[["tier", "rounds_done"]].values.tolist() == [["tier1", 1]]
    assert tuned["metric"].tolist() == pytest.approx([0.7])


def test_scores_after_the_last_round_end_the_validation_curves(tmp_path: Path) -> None:
    write_run(tmp_path, "r1", scored=True)
    frame = convergence(load(tmp_path))
    validation = frame[frame["series"] == "validation"].set_index("stage")
    assert validation.loc["supernet", "rounds_done"].tolist() == [0, 2]
    assert validation.loc["supernet", "metric"].tolist() == pytest.approx([0.2, 0.6])
    # The final evaluation scored the same weights, and does not count twice.
    assert validation.loc["fine_tuned/tier1", ["rounds_done", "metric"]].tolist() == [1, 0.75]
    assert (frame["series"] == "train").sum() == 4


def test_scores_after_the_last_round_are_no_round_of_training(tmp_path: Path) -> None:
    for run_id, scored in (("r1", False), ("r2", True)):
        write_run(tmp_path, run_id, scored=scored)
    both = [load(tmp_path, [run_id]) for run_id in ("r1", "r2")]
    assert len(both[1].rounds) == len(both[0].rounds) + 3
    for frame in (communication, per_model, lambda t: communication_by_kind(communication(t))):
        expected, found = (frame(tables).drop(columns=["run_id", "seeds"], errors="ignore") for tables in both)
        pd.testing.assert_frame_equal(found, expected)


def test_a_round_in_training_without_clients_counts_and_so_do_rounds_of_the_server_alone(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1")
    for round_, planned in enumerate((2, 0, 0)):  # nobody was available for the second round, nor for the last
        writer.add("rounds", **round_row("supernet", round_, 10, 10, clients_planned=planned, lr=0.1))
    for stage, rounds in (("search/tier1", 1), ("slices", 2)):
        for round_ in range(rounds):
            writer.add("rounds", **round_row(stage, round_, 0, 0, clients_planned=0))
    writer.close()
    stages = communication(load(tmp_path))
    assert dict(zip(stages["stage"], stages["rounds"], strict=True)) == {"supernet": 3, "search/tier1": 1, "slices": 2}


def test_a_final_score_of_what_all_train_ends_the_curve_of_its_stage(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1")
    writer.add("rounds", **round_row("fedavg", 0, 10, 10, loss=1.0))
    writer.add("evaluations", **evaluation("evaluation", 0, "fedavg", "server", 0.5, split="validation"))
    writer.close()
    frame = convergence(load(tmp_path))
    validation = frame[frame["series"] == "validation"]
    assert validation[["stage", "rounds_done", "metric"]].values.tolist() == [["fedavg", 1, 0.5]]


def test_clients_without_test_text_are_excluded_from_perplexity_as_from_accuracy(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1")
    for client, samples in ((0, 10), (1, 0)):
        value = 0.5 if samples else None
        writer.add("evaluations", **evaluation("evaluation", 0, "m", "tier1", value, client, samples=samples))
    writer.add("evaluations", **evaluation("evaluation", 0, "m", "tier1", 3.5, 0, metric="perplexity"))
    writer.close()
    for metric in ("accuracy", "perplexity"):
        assert fairness(load(tmp_path), metric)[["clients", "excluded"]].values.tolist() == [[1, 1], [1, 1]]
    assert fairness(load(tmp_path), "loss").empty


def test_pareto_keeps_feasible_candidates_and_marks_front_and_winner(tables: Tables) -> None:
    frame = pareto(tables).set_index("architecture")
    assert frame.index.tolist() == ["0-1", "0-0", "1-1", "2-2"]
    assert frame["on_front"].tolist() == [True, True, False, True]
    assert frame["is_winner"].tolist() == [True, False, False, True]


def test_failures_group_causes_that_differ_in_numbers_only(tables: Tables) -> None:
    (row,) = records(failures(tables))
    assert (row["kind"], row["status"], row["count"]) == ("fine_tuned", "timed_out", 2)
    assert row["example"] == "simulated time 1.25 s is over the deadline of 0.5 s"
    assert (row["client_id"], row["stage"], row["round"]) == (5, "fine_tuned/tier1", 3)


def test_summaries_give_student_intervals_over_the_seeds_of_a_setting(tmp_path: Path) -> None:
    for run_id, value in (("r1", 0.7), ("r2", 0.8), ("r3", 0.9)):
        write_run(tmp_path, run_id, value)
    write_run(tmp_path, "r4", 0.1, experiment="other")
    tables = load(tmp_path, ["r1", "r2", "r3", "r4"])
    first, other = tier_summaries(tables, {})
    assert (first.setting.name, first.setting.run_ids) == ("demo", ("r1", "r2", "r3"))
    tier = first.tiers[0]
    tuned = tier.values["test_fine_tuned"]
    # t(0.975; 2 degrees of freedom) = 4.302653; standard deviation 0.1.
    assert tuned is not None
    assert (tuned.mean, tuned.runs) == (pytest.approx(0.8), 3)
    assert tuned.half_width == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)
    column = next(c for c in columns_of(first) if c.key == "test_fine_tuned")
    assert cell(column, tier) == "80.0 ± 24.8"
    assert [t.tier for t in first.tiers] == ["tier1", "tier2", "tier3", "all"]
    assert first.tiers[-1].values["fine_tuned_worst"] == Estimate(0.0, 0.0, 3, (0.0, 0.0, 0.0))
    assert other.tiers[0].values["test_fine_tuned"] == Estimate(0.1, None, 1, (0.1,))


def test_estimates_leave_out_what_is_not_known() -> None:
    assert estimate([None, float("nan"), pd.NA]) is None
    assert estimate([1.0, None]) == Estimate(1.0, None, 1, (1.0,))
    # Two values are shown as they are: their interval would be 2 ± 12.7.
    assert estimate([1.0, 3.0]) == Estimate(2.0, None, 2, (1.0, 3.0))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (182376, "182 k"),
        (999_999, "1.00 M"),
        (1.2e9, "1.20 G"),
        (2.128e18, "2.13 E"),
        (7, "7"),
        (0, "0"),
        (0.5, "0.500"),
        (None, "–"),
    ],
)
def test_numbers_with_prefixes(value: float | None, text: str) -> None:
    assert si(value) == text


def test_percents_and_durations() -> None:
    assert (percent(0.5), percent(0.125, sign=True), percent(pd.NA)) == ("50.0", "+12.5", "–")
    assert (seconds(0.25), seconds(83.4), seconds(720), seconds(12240)) == ("0.25 s", "83.4 s", "12 min", "3.4 h")
    assert si(1_500_000, "B") == "1.50 MB"


def test_loading_knows_all_runs_beginnings_of_ids_and_refuses_unknown_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no runs under"):
        load(tmp_path)
    write_run(tmp_path, "a1")
    write_run(tmp_path, "b1")
    assert latest_run(tmp_path) == "b1"
    assert [p.run_id for p in load(tmp_path).paths] == ["a1", "b1"]
    assert [p.run_id for p in load(tmp_path, ["a", "a1"]).paths] == ["a1"]
    assert load(tmp_path, ["a"], tables=["rounds"]).clients.empty
    with pytest.raises(ValueError, match="no run 'c'"):
        load(tmp_path, ["c"])
