"""The report of cross-silo runs: its page, figures and values, of one run in any state and of several."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from fedloom.experiments.report.runs import report_json, write_report


def test_the_report_of_a_run_has_all_tables_and_figures_and_no_tiers(
    silos: Any, colours: Callable[[bytes], int]
) -> None:
    silos.spider("r1")
    files = write_report(silos.root)
    names = [p.stem for p in files.plots if p.suffix == ".png"]
    assert names == ["silos", "phases", "gains", "reduction-cells", "normal-cells", "communication"]
    for plot in (p for p in files.plots if p.suffix == ".png"):
        assert colours(plot.read_bytes()) > 50, plot
    page = files.markdown.read_text()
    for title in ("## Silos\n", "## Silos of run r1", "## Personalisation gains of run r1"):
        assert title in page
    for nonsense in ("Tiers", "tier1", "rand-init", "Pareto", "central search", "Fairness", "pper bound"):
        assert nonsense not in page
    assert files.missing == ()
    assert "| 1 | 80.0 | 55.0 | 60.0 | 2 | +25.0 |" in page
    assert "| mean |" in page
    cells = (
        "normal: 0 = skip(c_k-2) + sep3(c_k-1), 1 = sep3(c_k-2) + skip(c_k-1); "
        "reduction: 0 = sep3(c_k-2, c_k-1), 1 = skip(c_k-2, c_k-1) + sep3(0)"
    )
    assert f"| 0 | {cells} | 10 | 50.0 | 0.5 | 40.0 | 100 | 1.00 k |" in page


def test_the_method_in_total_is_without_what_only_measures(silos: Any) -> None:
    silos.spider("r1")
    kinds = {row["kind"]: row for row in report_json(silos.root)["communication_by_kind"]}
    assert (kinds["method"]["bytes_down"], kinds["gains"]["bytes_down"]) == (120, 999)


def test_json_holds_settings_silos_matrix_gains_and_phases(silos: Any) -> None:
    silos.spider("r1")
    values = json.loads(json.dumps(report_json(silos.root), allow_nan=False))
    (row,) = values["silos"]
    assert (row["method"], row["run_ids"], row["accuracy"]["runs"]) == ("spider", ["r1"], 1)
    assert row["accuracy"]["mean"] == pytest.approx(0.7)
    assert len(values["silo_clients"]) == 3
    assert len(values["personalisation"]["matrix"]) == 9
    assert [g["gain"] for g in values["personalisation"]["gains"]] == pytest.approx([0.15, 0.25, -0.05])
    assert values["phases"][0] == {
        "run_id": "r1", "search_start": 1, "first_decided": 2, "last_decided": 2, "rounds": 4,
    }  # fmt: skip
    assert values["fairness"] == values["per_tier"] == values["summary"] == []


@pytest.mark.usefixtures("undrawn")
def test_a_run_in_training_says_that_nothing_was_measured_yet(silos: Any) -> None:
    writer = silos.begin("r1", status="running")
    writer.add_training([(silos.UNDECIDED,) * 3, (silos.HALF,) * 3])
    writer.close()
    files = write_report(silos.root)
    assert {p.stem for p in files.plots} == {"phases", "reduction-cells", "normal-cells", "communication"}
    said = " ".join(files.missing)
    assert "no accuracy of silos" in said
    assert "undecided" not in said
    assert "search has ended" not in said


def test_gains_that_were_asked_for_and_are_not_there_are_said(silos: Any) -> None:
    asked = {"name": "spider", "gains": {"epochs": 3}, "train": {"rounds": 1}}
    for run_id, status in (("r1", "running"), ("r2", "done")):
        silos.spider(run_id, gains=False, status=status, method=asked)
    assert "personalisation gains were not measured yet." in silos.summary("r1").replace("P", "p")
    assert "ersonalisation gains were not measured." in silos.summary("r2")


def test_a_search_that_ended_too_early_is_said(silos: Any) -> None:
    writer = silos.begin("r1")
    writer.add_training([(silos.UNDECIDED,) * 3])
    writer.add_model("personal", [0.5] * 3, [silos.DECIDED, silos.HALF, silos.HALF])
    writer.close()
    assert "undecided edges in silos 1, 2" in silos.summary("r1")


@pytest.mark.usefixtures("undrawn")
def test_a_dry_run_shows_what_it_counted_and_says_that_nothing_was_trained(silos: Any) -> None:
    writer = silos.begin("r1", dry_run=True)
    work = {"clients_planned": 3, "bytes_down": 30, "bytes_up": 60, "macs": 9, "simulated_s": 1.0}
    writer.add("rounds", stage="spider", round=0, wall_s=1.5, **work)
    writer.add("clients", stage="spider", round=0, client_id=0, status="ok", peak_memory_bytes=1000)
    writer.close()
    assert {name for name, value in silos.values("r1").items() if value is not None} == {"bytes_per_round"}
    files = write_report(silos.root)
    assert [p.stem for p in files.plots if p.suffix == ".png"] == ["communication"]
    assert "dry run" in " ".join(files.missing)
    assert "30 B" in silos.summary("r1")


@pytest.mark.usefixtures("undrawn")
def test_runs_with_tiers_keep_their_tables_beside_silos(silos: Any) -> None:
    silos.spider("r1")
    writer = silos.begin("r2", "fedavg", method={"name": "fedavg"})
    place = {"stage": "rand_init/tier1", "round": 0}
    writer.add("rounds", **place, loss=1.0, bytes_down=5, bytes_up=5, macs=1, clients_planned=1)
    row = {"stage": "evaluation", "round": 0, "model": "rand_init", "tier": "tier1", "architecture": "0-0"}
    for client_id in (None, 0):
        scored = {"split": "test", "metric": "accuracy", "value": 0.5, "samples": 9}
        writer.add("evaluations", **row, **scored, client_id=client_id)
    writer.close()
    files = write_report(silos.root, ["r1", "r2"])
    page = files.markdown.read_text()
    assert all(title in page for title in ("## Tiers: fedavg", "## Silos\n", "## Fairness over clients"))
    of_tiers = page.partition("## Tiers: fedavg")[2]  # after the table of what each ends with
    assert "spider_tiny | personal" in page.partition("## Tiers: fedavg")[0]
    assert "spider_tiny | personal" not in of_tiers
    assert {"convergence-fedavg", "clients-fedavg", "silos"} <= {p.stem for p in files.plots}
    assert "convergence-spider_tiny" not in {p.stem for p in files.plots}


@pytest.mark.usefixtures("undrawn")
def test_a_run_of_a_fixed_network_has_no_cells_phases_or_gains(silos: Any) -> None:
    silos.fixed("r1")
    files = write_report(silos.root)
    assert [p.stem for p in files.plots if p.suffix == ".png"] == ["silos", "phases", "communication"]
    assert files.missing == ()
    assert "neighbours' share" in files.markdown.read_text()


@pytest.mark.usefixtures("undrawn")
def test_several_runs_have_figures_together_and_of_each(silos: Any) -> None:
    silos.spider("r1")
    silos.spider("r2", 0.05, seed=2)
    silos.fixed("r3", "ditto")
    names = {p.stem for p in write_report(silos.root, ["r1", "r2", "r3"]).plots}
    assert names >= {"silos", "phases", "gains-r1", "gains-r2", "normal-cells-r1", "reduction-cells-r2"}
    assert "gains-r3" not in names
