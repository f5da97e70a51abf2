"""Reports go by setting: unlike runs are never averaged, a repeated seed is no further sample, differences are said."""

import json
import math
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from fedloom.experiments.analysis.clients import client_metrics
from fedloom.experiments.analysis.rounds import communication, communication_by_kind, convergence
from fedloom.experiments.analysis.settings import Setting, settings_of
from fedloom.experiments.analysis.tables import Tables, by_stage, load
from fedloom.experiments.analysis.tiers import pareto
from fedloom.experiments.report import content
from fedloom.experiments.report.clients import clients_figure
from fedloom.experiments.report.drawing import setting_label
from fedloom.experiments.report.pages import markdown_page
from fedloom.experiments.report.rounds import communication_figure, convergence_figure
from fedloom.experiments.report.runs import load_chosen, report_content, report_json, summary_table, write_report
from fedloom.experiments.report.tiers import pareto_figure
from fedloom.platform.results.writer import RunWriter

OPA, FEDAVG = "demo, weighting=opa", "demo, weighting=fedavg"
pytestmark = pytest.mark.usefixtures("undrawn")

ROUNDS = 3


def write_run(
    root: Path,
    run_id: str,
    seed: int,
    accuracy: float = 0.5,
    *,
    experiment: str = "demo",
    weighting: str = "opa",
    stem: int = 8,
    sent: int = 100,
    is_tested: bool = True,
) -> None:
    """A run of FedorAS with two tiers: every accuracy is `accuracy`, every round sends `sent` bytes each way."""
    writer = RunWriter.create(root, experiment, run_id)
    tiers = [{"tier": f"tier{i}", "upper": 1000.0 * i, "clients": 2} for i in (1, 2)]
    config = {
        "experiment": experiment,
        "seed": seed,
        "space": {"stem_channels": stem},
        "tiers": {"count": 2, "upper_bounds": None, "cost": "macs"},
        "method": {"name": "fedoras", "train": {"weighting": weighting, "rounds": ROUNDS}, "search": {}},
    }
    recorded = {"seeds": json.dumps({"partition": 1, "training": seed}), "tiers": json.dumps(tiers)}
    writer.update_run(config=json.dumps(config), status="done", method="fedoras", **recorded)
    _add_rounds(writer, "supernet", accuracy, sent)
    for tier in ("tier1", "tier2"):
        for i in range(4):
            place = {"stage": f"search/{tier}", "round": 0, "tier": tier, "generation": 0, "architecture": f"{i}-0"}
            values = {"macs": 100 * stem + i, "parameters": 7, "metric": accuracy - 0.01 * i, "feasible": True}
            writer.add("candidates", **place, **values, on_front=i == 0)
        _add_rounds(writer, f"fine_tuned/{tier}", accuracy, sent)
        for client_id in (None, 0, 1) if is_tested else ():
            place = {"stage": "evaluation", "round": 0, "model": "fine_tuned", "tier": tier, "architecture": "0-0"}
            scored = {"split": "test", "metric": "accuracy", "value": accuracy, "samples": 10}
            writer.add("evaluations", **place, **scored, client_id=client_id)
        kept = {"tier": tier, "architecture": "0-0", "macs": 100 * stem, "parameters": 7, "file": "f", "hash": "h"}
        writer.add("models", stage="evaluation", round=0, **kept)
    writer.close()


def _add_rounds(writer: RunWriter, stage: str, accuracy: float, sent: int) -> None:
    for round_ in range(ROUNDS):
        work = {"clients_planned": 2, "bytes_down": sent, "bytes_up": sent, "macs": 10, "wall_s": 1.0}
        writer.add("rounds", stage=stage, round=round_, loss=1.0 - accuracy, metric=accuracy, simulated_s=2.0, **work)
        status = {"status": "failed", "error": "out of memory"} if stage == "supernet" and not round_ else {}
        writer.add("clients", stage=stage, round=round_, client_id=0, **({"status": "ok"} | status))


def write_opa_and_fedavg(root: Path) -> list[str]:
    """Two seeds of each: 50 and 60 % with 100 bytes, 20 and 30 % with 300 bytes a round."""
    for seed in (1, 2):
        write_run(root, f"a{seed}", seed, 0.4 + 0.1 * seed)
        write_run(root, f"b{seed}", seed, 0.1 + 0.1 * seed, weighting="fedavg", sent=300)
    return ["a1", "b1", "a2", "b2"]


def shown(root: Path, run_ids: Sequence[str], width: int = 150) -> str:
    console = Console(width=width, file=StringIO(), record=True)
    console.print(summary_table(root, run_ids))
    return " ".join(console.export_text().split())  # titles break where the table is narrower


def page_of(root: Path, run_ids: Sequence[str]) -> str:
    """The page without its figures."""
    return markdown_page(report_content(load_chosen(root, run_ids)))


def rows_of(page: str, title: str) -> list[list[str]]:
    """The body of the table below a heading of the page."""
    table = page.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def tuned(summary: Any) -> dict[str, Any]:
    found: dict[str, Any] = summary["tiers"][0]["test_fine_tuned"]
    return found


# -- tables ------------------------------------------------------------------------------------------------------------


def test_two_settings_of_an_experiment_have_tables_of_their_own(tmp_path: Path) -> None:
    runs = write_opa_and_fedavg(tmp_path)
    text, page = shown(tmp_path, runs), page_of(tmp_path, runs)
    for name in (OPA, FEDAVG):
        assert f"{name}: the values of 2 runs, which give no interval" in text
        assert f"## Tiers: {name}\n\nThe values of 2 runs, which give no interval." in page
    assert "4 runs" not in text
    first, second = report_json(tmp_path, runs)["summary"]
    assert (first["run_ids"], second["run_ids"]) == (["a1", "a2"], ["b1", "b2"])
    assert (tuned(first)["mean"], tuned(second)["mean"]) == (pytest.approx(0.55), pytest.approx(0.25))
    assert (tuned(first)["half_width"], tuned(first)["values"]) == (None, pytest.approx([0.5, 0.6]))
    assert rows_of(page, f"Tiers: {OPA}")[0][:2] == ["tier1", "0-0"]


def test_runs_of_two_spaces_are_never_averaged(tmp_path: Path) -> None:
    write_run(tmp_path, "a1", 1, 0.96)
    write_run(tmp_path, "a2", 1, 0.12, stem=4)
    assert "±" not in shown(tmp_path, ["a1", "a2"])
    values = [tuned(summary) for summary in report_json(tmp_path, ["a1", "a2"])["summary"]]
    assert [(v["mean"], v["half_width"], v["runs"]) for v in values] == [(0.96, None, 1), (0.12, None, 1)]


def test_three_repeats_of_a_seed_are_one_sample_with_their_mean(tmp_path: Path) -> None:
    for i, accuracy in enumerate((0.5, 0.5, 0.8)):
        write_run(tmp_path, f"r{i}", 1, accuracy)
    runs = ["r0", "r1", "r2"]
    text, page = shown(tmp_path, runs), page_of(tmp_path, runs)
    assert "demo: mean over 3 runs of one seed, which give no interval" in text
    assert "±" not in text + page
    (summary,) = report_json(tmp_path, runs)["summary"]
    assert (summary["run_ids"], summary["seeds"]) == (runs, 1)
    assert tuned(summary) == {
        "mean": pytest.approx(0.6),
        "half_width": None,
        "runs": 1,
        "values": (pytest.approx(0.6),),
    }
    assert rows_of(page, "Fairness over clients")[0][-3:] == ["60.0", "0.0", "60.0"]


def test_a_seed_that_was_run_twice_weighs_as_much_as_one_that_was_run_once(tmp_path: Path) -> None:
    for run_id, seed, accuracy in (("r0", 1, 0.4), ("r1", 1, 0.6), ("r2", 2, 0.7)):
        write_run(tmp_path, run_id, seed, accuracy)
    runs = ["r0", "r1", "r2"]
    (summary,) = report_json(tmp_path, runs)["summary"]
    # Of seeds 1 and 2: 0.5 and 0.7.
    assert (tuned(summary)["mean"], tuned(summary)["runs"]) == (pytest.approx(0.6), 2)
    assert tuned(summary)["values"] == pytest.approx([0.5, 0.7])
    said = "values of 2 seeds (3 runs; a repeated seed counts once, with its mean)"
    assert said in shown(tmp_path, runs)
    assert said in page_of(tmp_path, runs)


def test_a_value_that_some_seeds_lack_says_how_many_have_it(tmp_path: Path) -> None:
    for seed in (1, 2, 3, 4):
        write_run(tmp_path, f"r{seed}", seed, 0.4 + 0.1 * seed, is_tested=seed < 4)
    runs = [f"r{seed}" for seed in (1, 2, 3, 4)]
    page = page_of(tmp_path, runs)
    assert "Mean ± 95 % interval (Student's t) over 4 runs." in page
    # The search has ended in all runs, the final evaluation in three: 50, 60, 70 %, Student's t of 2 degrees is 4.30.
    assert rows_of(page, "Tiers: demo")[0][4:7] == ["7", "65.0 ± 20.5", "60.0 ± 24.8 (n = 3)"]
    assert "60.0 ± 24.8 (n = 3)" in shown(tmp_path, runs)
    assert "(n = 2)" in page_of(tmp_path, runs[1:])
    assert "(n =" not in page_of(tmp_path, runs[:3])


def test_scores_of_a_diverged_seed_are_null_in_json(tmp_path: Path) -> None:
    for seed, accuracy in ((1, 0.5), (2, 0.6), (3, math.inf)):
        write_run(tmp_path, f"r{seed}", seed, accuracy)
    values = report_json(tmp_path, ["r1", "r2", "r3"])
    json.dumps(values, allow_nan=False)
    expected = {"mean": None, "half_width": None, "runs": 3, "values": (0.5, 0.6, None)}
    assert tuned(values["summary"][0]) == expected


def test_fairness_and_communication_go_by_setting(tmp_path: Path) -> None:
    page = page_of(tmp_path, write_opa_and_fedavg(tmp_path))
    fairness = {tuple(row[:3]): row[5] for row in rows_of(page, "Fairness over clients")}
    assert fairness[OPA, "fine-tuned", "all"] == "50.0, 60.0"
    assert fairness[FEDAVG, "fine-tuned", "all"] == "20.0, 30.0"
    stages = {tuple(row[:2]): row[4] for row in rows_of(page, "Communication and work per stage")}
    # Three rounds of supernet training, and of fine-tuning for each of two tiers.
    assert stages[OPA, "method in total"] == "900 B"
    assert stages[FEDAVG, "method in total"] == "2.70 kB"
    assert stages[FEDAVG, "fine-tuning, all tiers"] == "1.80 kB"


def test_clients_that_failed_are_counted_per_setting(tmp_path: Path) -> None:
    runs = write_opa_and_fedavg(tmp_path)
    said = page_of(tmp_path, runs).split("## Clients that did not finish\n")[1]
    assert f"4 of 36 client rows are not ok: 2 of 18 ({OPA}), 2 of 18 ({FEDAVG})." in said
    assert "1 of 9 client rows are not ok." in page_of(tmp_path, ["a1"])


def test_one_setting_is_named_after_its_experiment_alone(tmp_path: Path) -> None:
    write_opa_and_fedavg(tmp_path)
    page = page_of(tmp_path, ["a1", "a2"])
    assert "## Tiers: demo\n\nThe values of 2 runs, which give no interval." in page
    assert "| experiment | model | tier |" in page
    assert "weighting=" not in page.split("## Runs")[0]
    assert page.startswith("# demo: 2 runs\n")
    assert "## Settings" not in page
    assert "| setting |" not in page


# -- figures -----------------------------------------------------------------------------------------------------------


def loaded(root: Path, run_ids: Sequence[str]) -> tuple[Tables, list[Setting]]:
    tables = load(root, run_ids)
    return tables, settings_of(tables)


def names_of(figure: Figure | None) -> list[str]:
    """The names above the parts of a figure."""
    assert figure is not None
    return [str(part.get_suptitle()) for part in figure.subfigs]


def test_curves_of_settings_are_drawn_apart_over_seeds(tmp_path: Path) -> None:
    runs = write_opa_and_fedavg(tmp_path)
    write_run(tmp_path, "a3", 2, 0.8)  # repeats seed 2, which then has 70 %
    tables, settings = loaded(tmp_path, [*runs, "a3"])
    figure = convergence_figure(convergence(tables), settings, ("metric",))
    assert names_of(figure) == [OPA, FEDAVG]
    assert figure is not None
    opa, fedavg = (part.axes[0] for part in figure.subfigs)
    assert opa.lines[0].get_ydata() == pytest.approx([60.0] * ROUNDS)  # 50 and 70 %
    assert fedavg.lines[0].get_ydata() == pytest.approx([25.0] * ROUNDS)
    band = opa.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (pytest.approx(50.0), pytest.approx(70.0))
    assert opa.get_ylim() == fedavg.get_ylim()


def test_one_seed_has_no_band_however_often_it_was_run(tmp_path: Path) -> None:
    for i, accuracy in enumerate((0.4, 0.6)):
        write_run(tmp_path, f"r{i}", 1, accuracy)
    tables, settings = loaded(tmp_path, ["r0", "r1"])
    figure = convergence_figure(convergence(tables), settings, ("loss", "metric"))
    assert figure is not None
    assert names_of(figure) == []
    assert [len(axes.collections) for axes in figure.axes] == [0] * 4
    assert figure.axes[2].lines[0].get_ydata() == pytest.approx([50.0] * ROUNDS)


def test_fronts_of_settings_stand_beside_each_other_on_the_same_axes(tmp_path: Path) -> None:
    write_run(tmp_path, "a1", 1)
    write_run(tmp_path, "a2", 1, stem=4)
    tables, settings = loaded(tmp_path, ["a1", "a2"])
    bounds = {settings[0].name: {"tier1": 500.0, "tier2": 900.0}}
    figure = pareto_figure(pareto(tables), settings, bounds)
    assert names_of(figure) == ["demo, stem_channels=8", "demo, stem_channels=4"]
    assert figure is not None
    first, second = (part.axes[0] for part in figure.subfigs)
    assert first.get_xlim() == second.get_xlim()
    # A front per tier, and the bound between the tiers.
    assert (len(first.lines), len(second.lines)) == (3, 2)


def test_bytes_of_settings_are_means_over_their_own_seeds(tmp_path: Path) -> None:
    runs = write_opa_and_fedavg(tmp_path)
    write_run(tmp_path, "b3", 2, 0.3, weighting="fedavg", sent=500)  # repeats seed 2, which then sends 400
    tables, settings = loaded(tmp_path, [*runs, "b3"])
    kinds = communication_by_kind(communication(tables))
    figure = communication_figure(kinds, by_stage(tables.rounds), settings)
    assert names_of(figure) == [OPA, FEDAVG]
    assert figure is not None
    written = [[text.get_text() for text in part.axes[0].texts] for part in figure.subfigs]
    # Down and up, in three rounds of training and in three for each of two tiers; FedAvg's seeds send 300 and 400.
    assert written == [["300 B", "600 B"] * 2, ["1.05 kB", "2.10 kB"] * 2]


def test_clients_of_settings_are_drawn_apart_and_those_of_a_repeated_seed_once(tmp_path: Path) -> None:
    for run_id, seed, weighting in (("a1", 1, "opa"), ("a2", 1, "opa"), ("a3", 2, "opa"), ("b1", 1, "fedavg")):
        write_run(tmp_path, run_id, seed, 0.5, weighting=weighting)
    tables, settings = loaded(tmp_path, ["a1", "a2", "a3", "b1"])
    figure = clients_figure(client_metrics(tables), settings)
    assert names_of(figure) == [OPA, FEDAVG]
    assert figure is not None
    # Dots and the worst per tier: four clients of two seeds, two of one.
    dots = [[len(drawn.get_offsets()) for drawn in part.axes[0].collections] for part in figure.subfigs]
    assert dots == [[3, 1, 3, 1], [1, 1, 1, 1]]


def test_a_setting_that_alone_has_something_to_show_keeps_its_name(tmp_path: Path) -> None:
    write_run(tmp_path, "a1", 1)
    writer = RunWriter.create(tmp_path, "demo", "b1")
    writer.update_run(config=json.dumps({"experiment": "demo", "method": {"train": {"weighting": "fedavg"}}}))
    writer.close()
    tables, settings = loaded(tmp_path, ["a1", "b1"])
    assert names_of(convergence_figure(convergence(tables), settings, ("metric",))) == [OPA]
    assert names_of(pareto_figure(pareto(tables), settings)) == [OPA]


def test_many_settings_are_spread_over_sheets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "MOST_SETTINGS", 2)  # panels take long to draw
    runs = ["r0", "r1", "r2"]
    for i, run_id in enumerate(runs):
        writer = RunWriter.create(tmp_path, "demo", run_id)
        writer.update_run(config=json.dumps({"experiment": "demo", "method": {"train": {"lr": i}}}), status="done")
        _add_rounds(writer, "supernet", 0.5, 100)
        writer.close()
    files = write_report(tmp_path, runs)
    names = ["convergence", "convergence-loss", "communication"]
    assert [path.stem for path in files.plots if path.suffix == ".png"] == [*names, *(f"{name}-2" for name in names)]
    page = files.markdown.read_text()
    assert page.count("Settings 1 to 2 of 3.") == page.count("Settings 3 to 3 of 3.") == 3


def test_the_page_has_a_figure_for_all_settings_of_an_experiment(tmp_path: Path) -> None:
    runs = write_opa_and_fedavg(tmp_path)
    files = write_report(tmp_path, runs)
    names = ["fronts", "convergence", "convergence-loss", "pareto", "communication", "clients"]
    assert [path.stem for path in files.plots if path.suffix == ".png"] == names
    page = files.markdown.read_text()
    assert page.count("One panel per setting") == 5
    assert "a repeated seed" not in page.lower()
    write_run(tmp_path, "a3", 2)
    captions = [p.caption for p in report_content(load_chosen(tmp_path, [*runs, "a3"])).pictures]
    assert sum("A repeated seed counts once, with its mean." in caption for caption in captions) == 4


def test_the_legend_of_a_figure_says_over_how_many_seeds_a_setting_is(tmp_path: Path) -> None:
    for run_id, seed in (("a1", 1), ("a2", 1), ("a3", 2), ("b1", 1), ("b2", 1), ("c1", 1)):
        write_run(tmp_path, run_id, seed, weighting=run_id[0])
    _, settings = loaded(tmp_path, ["a1", "a2", "a3", "b1", "b2", "c1"])
    assert [setting_label(s) for s in settings] == [
        "demo, weighting=a (2 seeds, 3 runs)",
        "demo, weighting=b (1 seed, 2 runs)",
        "demo, weighting=c",
    ]


# -- what the settings are ---------------------------------------------------------------------------------------------


def test_a_report_of_several_settings_says_in_what_they_differ(tmp_path: Path) -> None:
    runs = write_opa_and_fedavg(tmp_path)
    write_run(tmp_path, "a3", 2)
    write_run(tmp_path, "c1", 1, experiment="other")
    runs = [*runs, "a3", "c1"]
    page = page_of(tmp_path, runs)
    assert page.startswith("# demo, other: 6 runs of 3 settings\n")
    assert rows_of(page, "Settings") == [
        [OPA, "method.train.weighting=opa", "a1, a2, a3", "2"],
        [FEDAVG, "method.train.weighting=fedavg", "b1, b2", "2"],
        ["other", "–", "c1", "1"],
    ]
    assert f"| setting | {OPA} |" in page.split("### a1")[1]
    values = report_json(tmp_path, runs)
    assert values["settings"][0] == {
        "setting": OPA,
        "experiment": "demo",
        "run_ids": ["a1", "a2", "a3"],
        "seeds": 2,
        "differences": {"method.train.weighting": "opa"},
    }
    assert [s["setting"] for s in values["settings"]] == [OPA, FEDAVG, "other"]
    json.dumps(values, allow_nan=False)


def test_all_differences_are_said_where_names_have_no_room(tmp_path: Path) -> None:
    for run_id, value in (("r1", 1), ("r2", 2)):
        writer = RunWriter.create(tmp_path, "demo", run_id)
        train = dict.fromkeys("abcdef", value) | ({"new": 7} if run_id == "r2" else {})
        writer.update_run(config=json.dumps({"seed": 1, "method": {"name": "fedavg", "train": train}}), status="done")
        writer.close()
    first, second = rows_of(page_of(tmp_path, ["r1", "r2"]), "Settings")
    assert first[0] == "demo, a=1, b=1, c=1, d=1, and 2 more"
    assert first[1].count("=1") == 6
    assert first[1].endswith("method.train.new (not set)")
    assert second[1].endswith("method.train.new=7")
