"""What a target takes, on runs written by hand: rounds, megabytes and hours, and runs that never reach it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedloom.experiments.analysis import first_reached, load, to_target
from fedloom.experiments.analysis.subnets import labels_of
from fedloom.experiments.analysis.targets import stop_targets
from fedloom.experiments.cli import main
from fedloom.experiments.report.runs import records
from fedloom.experiments.report.targets import target_blocks
from fedloom.platform.results.writer import RunWriter

Curve = Mapping[int, float]


def begin(root: Path, run_id: str, seed: int = 1, method: str = "fedavg", **keys: Any) -> RunWriter:
    writer = RunWriter.create(root, "demo", run_id)
    config = {"seed": seed, "seeds": {}, "method": {"name": method, **keys}, "stop": {"metric": "loss", "target": 0.5}}
    writer.update_run(config=json.dumps(config), seeds=json.dumps({"training": seed}), status="done")
    return writer


def train(writer: RunWriter, stage: str, rounds: int, curve: Curve, clients: Sequence[int | None] = (None,)) -> None:
    """Rounds of 3 MB down, 1 MB up and half an hour; scores by the column `round`, of two models each."""
    for index in range(rounds):
        costs: dict[str, Any] = {"stopped": "it is good" if index == 5 else None}
        costs |= {"bytes_down": 3_000_000, "bytes_up": 1_000_000, "simulated_s": 1800.0, "macs": 1, "wall_s": 1.0}
        writer.add("rounds", stage=stage, round=index, clients_planned=2, loss=1.0, **costs)
    for index, accuracy in curve.items():
        for client_id in clients:
            row = {"stage": stage, "round": index, "model": "m", "architecture": "0", "client_id": client_id}
            for shift in (-0.05, 0.05):
                score = {"split": "validation", "metric": "accuracy", "value": accuracy + shift, "samples": 10}
                writer.add("evaluations", **row, **score)
            for split, metric, value in (("validation", "loss", 1 - accuracy), ("test", "accuracy", 1.0)):
                writer.add("evaluations", **row, split=split, metric=metric, value=value, samples=10)


@pytest.fixture
def seeds(tmp_path: Path) -> Path:
    """Two settings of three seeds, evaluated every second round."""
    curves = {
        0.1: ({0: 0.1, 2: 0.6, 4: 0.5, 6: 0.9}, {0: 0.1, 2: 0.5, 4: 0.7}, {0: 0.1, 2: 0.5, 4: 0.55}),
        0.01: ({2: 0.2}, {2: 0.3}, {2: 0.4}),
    }
    for lr, of_seeds in curves.items():
        for seed, curve in enumerate(of_seeds, 1):
            writer = begin(tmp_path, f"r{lr}-{seed}", seed, train={"lr": lr})
            train(writer, "fedavg", 6, curve)
            writer.close()
    return tmp_path


def test_a_row_per_run_says_when_it_first_reached_the_target(seeds: Path) -> None:
    rows = {row["run_id"]: row for row in records(first_reached(load(seeds), 0.6))}
    assert len(rows) == 6
    first = rows["r0.1-1"]
    assert (first["evaluations"], first["best"], first["reached"]) == (4, pytest.approx(0.9), True)
    assert (first["rounds"], first["megabytes"], first["simulated_h"]) == (2, 8, 1)
    second, third = rows["r0.1-2"], rows["r0.1-3"]
    assert (second["rounds"], second["megabytes"], second["simulated_h"]) == (4, 16, 2)
    assert (third["reached"], third["rounds"], third["megabytes"], third["simulated_h"]) == (False, None, None, None)


def test_settings_count_the_runs_that_never_reach_it(seeds: Path) -> None:
    slow, fast = records(to_target(load(seeds), 0.6))
    assert (fast["setting"], fast["kind"], fast["runs"], fast["reached"]) == ("demo, lr=0.1", "fedavg", 3, 2)
    assert (fast["rounds_n"], fast["rounds_mean"], fast["rounds_values"]) == (2, 3, [2, 4])
    assert (fast["megabytes_mean"], fast["simulated_h_values"]) == (12, [1, 2])
    assert fast["rounds_half_width"] is None, "of two"
    assert fast["best_mean"] == pytest.approx((0.9 + 0.7 + 0.55) / 3)
    assert (slow["runs"], slow["reached"], slow["rounds_mean"], slow["megabytes_values"]) == (3, 0, None, [])
    (whole,) = (row for row in records(to_target(load(seeds), 0.5)) if row["setting"] == "demo, lr=0.1")
    assert (whole["rounds_mean"], whole["rounds_half_width"]) == (2, 0)
    (_, of_loss) = records(to_target(load(seeds), 0.45, "loss"))
    assert (of_loss["reached"], of_loss["rounds_values"]) == (3, [2, 4, 4])


def test_earlier_stages_count_but_not_other_tiers_nor_a_baselines(tmp_path: Path) -> None:
    writer = begin(tmp_path, "r1", method="fedoras")
    train(writer, "supernet", 3, {0: 0.1, 3: 0.2})
    train(writer, "fine_tuned/tier1", 2, {0: 0.2, 1: 0.7})
    train(writer, "fine_tuned/tier2", 2, {0: 0.7, 1: 0.7})
    train(writer, "rand_init/tier1", 4, {2: 0.7})
    writer.close()
    rows = {row["stage"]: row for row in records(first_reached(load(tmp_path), 0.7))}
    assert [*rows] == ["supernet", "fine_tuned/tier1", "fine_tuned/tier2", "rand_init/tier1"]
    assert not rows["supernet"]["reached"]
    told = {stage: (row["rounds"], row["megabytes"], row["simulated_h"]) for stage, row in rows.items()}
    assert told["fine_tuned/tier1"] == (1, 16, 2)
    assert told["fine_tuned/tier2"] == (0, 12, 1.5), "the weights that it began with"
    assert told["rand_init/tier1"] == (2, 8, 1)


def test_silos_score_their_models_after_the_round(tmp_path: Path) -> None:
    writer = begin(tmp_path, "r1", method="ditto")
    train(writer, "ditto", 4, {0: 0.5, 2: 0.8}, clients=(0, 1))
    writer.close()
    (row,) = records(first_reached(load(tmp_path), 0.8))
    assert (row["evaluations"], row["rounds"], row["megabytes"]) == (2, 3, 12)


@pytest.mark.usefixtures("undrawn")
def test_the_table_of_a_report_has_what_was_asked_for_or_what_the_runs_were_to_end_at(
    seeds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = load(seeds)
    assert stop_targets(tables) == [("loss", 0.5)]
    groups = [(("fast",), ["r0.1-1", "r0.1-2", "r0.1-3"]), (("slow",), ["r0.01-1", "r0.01-2", "r0.01-3"])]
    (block,) = target_blocks(tables, groups, ("lr",), labels_of(tables), [("accuracy", 0.6)])
    assert block.title == "To accuracy 60.0 %"
    assert block.heads == ("lr", "stage", "reach it", "best", "rounds", "MB", "simulated")
    fast, slow = block.rows
    assert fast[:3] + fast[4:] == ("fast", "fedavg", "2 of 3", "2, 4", "8, 16", "60 min, 2.0 h")
    assert slow[2:] == ("0 of 3", "30.0 ± 24.8", "–", "–", "–")
    assert [block.title for block in target_blocks(tables, groups, ("lr",), labels_of(tables))] == ["To loss 0.5"]
    with pytest.raises(SystemExit):
        main(["report", "r0.1-1", "r0.1-2", f"--results={seeds}", "--target", "0.6", "--target", "loss=0.1", "--json"])
    written = json.loads(capsys.readouterr().out)
    page = Path(written["markdown"]).read_text()
    assert "## To accuracy 60.0 %" in page
    assert page.count("| ended early | fedavg, after round 6: it is good |") == 2
    of_accuracy, of_loss = written["targets"]
    assert (of_accuracy["metric"], of_accuracy["target"], of_accuracy["rows"][0]["reached"]) == ("accuracy", 0.6, 2)
    assert (of_loss["metric"], of_loss["rows"][0]["rounds_values"]) == ("loss", [6])


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("80", "argument --target: 80: must be a number, above 0 and at most 1"),
        ("f1=0.5", "argument --target: f1=0.5: the metric must be accuracy or loss"),
    ],
)
def test_a_target_that_no_run_can_reach_is_refused(capsys: pytest.CaptureFixture[str], target: str, line: str) -> None:
    with pytest.raises(SystemExit):
        main(["report", "--target", target])
    assert capsys.readouterr().err == f"fedloom: {line}; fedloom report --help says what is allowed\n"


def test_an_unknown_metric_of_a_target_is_refused(seeds: Path) -> None:
    with pytest.raises(ValueError, match="there are no targets for 'f1': give one of accuracy, loss"):
        to_target(load(seeds), 0.5, "f1")
    with pytest.raises(ValueError, match=r"^target=90: accuracies are shares, at most 1: give 0.9 for 90 %$"):
        to_target(load(seeds), 90)
