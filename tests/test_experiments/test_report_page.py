"""Report files: one page that needs nothing but itself, plots that show something, and runs in any state."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console

from fedloom.experiments.analysis.tables import load, upper_bounds
from fedloom.experiments.cli import main
from fedloom.experiments.report.content import Block, Content, Picture, RunFacts, rich_block
from fedloom.experiments.report.drawing import draw
from fedloom.experiments.report.pages import ReportFiles, html_page, markdown_page
from fedloom.experiments.report.runs import report_json, summary_table, write_report
from fedloom.platform.results.status import StatusFile
from fedloom.platform.results.writer import RunWriter

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Checks that tags are balanced, and collects what the page refers to and says."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.references: list[str] = []
        self.text: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def write_run(root: Path, run_id: str, *, tiers: int = 2, stages: str = "all", seed: int = 1) -> RunWriter:
    """A run as FedorAS writes it; `stages` all, supernet (still training) or none. The writer is left open."""
    config = {"tiers": {"count": tiers, "upper_bounds": [100.0 * (i + 1) for i in range(tiers)], "cost": "macs"}}
    config["method"] = {"name": "fedoras", "search": {}, "rand_init": {}}
    writer = RunWriter.create(root, "demo", run_id)
    bounds = json.dumps([{"tier": f"tier{i + 1}", "upper": 100.0 * (i + 1), "clients": 2} for i in range(tiers)])
    writer.update_run(
        config=json.dumps(config), status="running", method="fedoras", seeds=f'{{"training": {seed}}}', tiers=bounds
    )
    rng = np.random.default_rng(seed)
    if stages == "none":
        return writer
    for i in range(5):
        add_round(writer, "supernet", i, rng)
        row = {"model": "supernet", "tier": "server", "split": "validation", "samples": 9, "value": i / 5}
        writer.add("evaluations", stage="supernet", round=i, metric="accuracy", **row)
    if stages == "all":
        for tier in (f"tier{i + 1}" for i in range(tiers)):
            add_tier(writer, tier, rng)
    return writer


def add_round(writer: RunWriter, stage: str, round_: int, rng: np.random.Generator) -> None:
    figures = {"clients_planned": 3, "loss": 2 / (round_ + 1), "metric": rng.random(), "macs": 10, "wall_s": 1.0}
    writer.add("rounds", stage=stage, round=round_, bytes_down=50, bytes_up=40, simulated_s=0.1, **figures)
    writer.add("clients", stage=stage, round=round_, client_id=1, status="failed", error="loss is <nan> & worse")


def add_tier(writer: RunWriter, tier: str, rng: np.random.Generator) -> None:
    for i in range(6):
        place = {"stage": f"search/{tier}", "round": 0, "tier": tier, "generation": 0, "architecture": f"{i}-0"}
        values = {"macs": 10 * i + 5, "parameters": 7, "metric": i / 10, "feasible": True, "on_front": i > 3}
        writer.add("candidates", **place, **values)
    for model in ("fine_tuned", "rand_init"):
        for i in range(3):
            add_round(writer, f"{model}/{tier}", i, rng)
    for model in ("supernet_init", "fine_tuned", "rand_init"):
        row = {"stage": "evaluation", "round": 0, "model": model, "tier": tier, "architecture": "5-0"}
        for client_id in (None, *range(8)):
            for metric in ("accuracy", "loss"):
                value = float(rng.random())
                whole = {**row, "client_id": client_id, "metric": metric, "value": value, "samples": 8}
                writer.add("evaluations", split="test", **whole)
        writer.add("models", stage="evaluation", round=0, tier=tier, architecture="5-0", macs=55, parameters=7)


def text_of(renderable: object, width: int = 80) -> str:
    console = Console(width=width, record=True, soft_wrap=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


def pictures(files: ReportFiles) -> list[str]:
    return [p.name for p in files.plots if p.suffix == ".png"]


def test_a_report_is_complete_and_self_contained(tmp_path: Path, colours: Callable[[bytes], int]) -> None:
    write_run(tmp_path, "r1").close()
    files = write_report(tmp_path)
    assert files.folder == tmp_path / "reports" / "r1"
    assert pictures(files) == ["convergence.png", "pareto.png", "communication.png", "clients.png"]
    for plot in files.plots:
        if plot.suffix == ".pdf":
            assert plot.read_bytes().startswith(b"%PDF"), plot.name
        else:
            assert colours(plot.read_bytes()) > 50, f"{plot.name} is empty"
            with Image.open(plot) as image:
                assert image.width > 600, plot.name
    assert [p.name for p in files.plots if p.suffix == ".pdf"] == [n.replace("png", "pdf") for n in pictures(files)]
    assert r"\begin{tabular}" in files.latex.read_text()
    page = Page(files.html.read_text())
    assert len(page.references) == 4
    assert all(r.startswith("data:image/png;base64,") for r in page.references)
    assert not page.tags & {"link", "iframe"}
    source = files.html.read_text()
    assert source.count("<script>") == 1
    assert "url(" not in source
    assert "@import" not in source
    whole = " ".join(page.text)
    assert "loss is <nan> & worse" in whole
    assert "20 of 20" not in whole
    assert "17 of 17 client rows are not ok." in whole
    assert "200" in whole  # tier2's upper bound, from the configuration
    text = files.markdown.read_text()
    assert "| tier1 | 5-0 | 100 | 55 | 7 | 50.0 |" in text
    assert all(f"({name})" in text for name in pictures(files))
    assert not list(files.folder.glob(".*"))
    assert files._repr_html_().startswith("<iframe srcdoc=")


def test_everything_on_the_page_is_escaped() -> None:
    evil = "<b>&\"'</b>"
    block = Block(evil, (evil,), (evil, evil), ((evil, evil),))
    picture = Picture("a", evil, evil, Figure())
    content = Content(evil, (RunFacts(evil, ((evil, evil),), evil),), (evil,), (block,), (picture,))
    page = Page(html_page(content, [(picture, draw(picture.figure))]))
    assert "b" not in page.tags
    assert " ".join(page.text).count(evil) == 15
    assert "a\\|b" in markdown_page(Content("t", (), (), (Block("t", (), ("a|b",), (("c",),)),), ()))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("stages", "plots"), [("none", 0), ("supernet", 2)])
def test_an_unfinished_run_is_reported_with_what_is_missing(tmp_path: Path, stages: str, plots: int) -> None:
    writer = write_run(tmp_path, "r1", stages=stages)
    writer.commit()
    writer.flush()
    files = write_report(tmp_path, ["r1"], tmp_path / "out")
    assert len(pictures(files)) == plots
    said = " ".join(files.missing)
    assert "status is running" in said
    assert ("No finished round" in said) == (stages == "none")
    assert ("no Pareto front" in said and "no test metric and no fairness" in said) == (stages == "supernet")
    Page(files.html.read_text())
    shown = text_of(summary_table(tmp_path, "r1"), 200)
    assert "status is running" in shown
    json.dumps(report_json(tmp_path), allow_nan=False)
    writer.close()


@pytest.mark.usefixtures("undrawn")
def test_the_page_of_a_run_at_work_loads_itself_again_until_it_is_done(tmp_path: Path) -> None:
    writer = write_run(tmp_path, "r1", stages="supernet")
    writer.commit()
    writer.flush()
    status = StatusFile(writer.paths.status)
    status.write("running", stage="supernet", round=5, rounds_total=9)
    files = write_report(tmp_path)
    assert files.is_live
    assert '<meta http-equiv="refresh" content="30">' in files.html.read_text()
    assert "in supernet, round 6 of 9" in " ".join(files.missing)
    status.write("done")
    files = write_report(tmp_path)
    assert not files.is_live
    assert "refresh" not in files.html.read_text()
    writer.close()


@pytest.mark.usefixtures("undrawn")
def test_following_a_run_writes_its_report_until_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = write_run(tmp_path, "r1", stages="supernet")
    writer.close()
    status = StatusFile(writer.paths.status)
    status.write("running", stage="supernet", round=5, rounds_total=9)
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            status.write("done")

    monkeypatch.setattr("fedloom.experiments.cli.time", SimpleNamespace(sleep=nap))
    with pytest.raises(SystemExit) as ending:
        main(["report", "r1", "--follow", "--results", str(tmp_path)])
    assert (ending.value.code, naps) == (0, [30, 30])
    assert "report.html: open it in a browser; it is rewritten every 30 s" in capsys.readouterr().out
    assert "refresh" not in (tmp_path / "reports" / "r1" / "report.html").read_text()


def test_a_number_is_broken_over_lines_only_before_its_interval() -> None:
    block = Block("t", (), ("setting", "accuracy", "bytes"), (("a b", "69.0 ± 1.3", "1.20 GB, 1.30 GB"),), labels=1)
    page = html_page(Content("t", (), (), (block,), ()))
    assert "<td>69.0 ±~1.3</td><td>1.20~GB, 1.30~GB</td>" in page.replace("\N{NO-BREAK SPACE}", "~")
    assert '<td class="text">a b</td>' in page


@pytest.mark.usefixtures("undrawn")
def test_a_plain_fedavg_run_without_evaluation_is_reported(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "fedavg", "r1")
    config = {"tiers": {"count": 4, "upper_bounds": None, "cost": "macs"}, "method": {"name": "fedavg"}}
    writer.update_run(config=json.dumps(config), status="done")
    place = {"stage": "rand_init/tier1", "round": 0}
    writer.add("rounds", **place, loss=1.0, bytes_down=5, bytes_up=5, macs=1, clients_planned=1)
    writer.add("clients", **place, client_id=0, architecture="0-0", status="ok", tier="tier4")
    writer.close()
    files = write_report(tmp_path)
    assert pictures(files) == ["convergence.png", "communication.png"]
    (row,) = report_json(tmp_path)["per_tier"]
    assert (row["tier"], row["architecture"], row["test_rand_init"]) == ("tier1", "0-0", None)


@pytest.mark.usefixtures("undrawn")
def test_several_runs_share_a_report_and_experiments_have_plots_of_their_own(tmp_path: Path) -> None:
    for i in (1, 2):
        write_run(tmp_path, f"r{i}", seed=i).close()
    other = RunWriter.create(tmp_path, "other", "r3")
    other.add("rounds", stage="supernet", round=0, loss=1.0, bytes_down=5, bytes_up=5, macs=1, clients_planned=1)
    other.close()
    files = write_report(tmp_path, ["r1", "r2"])
    assert files.folder.name.startswith("r1-and-1-more-")
    assert "values of 2 runs" in files.markdown.read_text()
    both = write_report(tmp_path, ["r1", "r3"], tmp_path / "both")
    assert {p.name for p in both.plots} >= {"convergence-demo.png", "convergence-other.png", "pareto-demo.png"}


def test_the_summary_fits_a_narrow_terminal(tmp_path: Path) -> None:
    write_run(tmp_path, "r1", tiers=4).close()
    shown = text_of(summary_table(tmp_path, "r1"), 84)
    assert "…" not in shown
    lines = [line.split() for line in shown.splitlines()]
    assert next(line for line in lines if line[:1] == ["tier3"])[1:5] == ["300", "55", "7", "50.0"]


def test_nothing_in_a_table_is_cut_however_narrow_the_terminal_is() -> None:
    name = "superfednas_cifar10_small, 20261122-113000-superfednas_cifar10_small-a1b2c3"
    block = Block("t", (), ("setting", "method", "a", "b"), ((name, "SuperFed", "1.5 ± 0.1", "2.5 ± 0.2"),), labels=2)
    for width in (40, 80, 120):
        lines = [line.split() for line in text_of(rich_block(block), width).splitlines()]
        assert [*name.split(), "SuperFed", "1.5", "2.5"] in lines
        assert ["±", "0.1", "±", "0.2"] in lines


def test_the_summary_does_without_matplotlib(tmp_path: Path) -> None:
    write_run(tmp_path, "r1").close()
    code = (
        "import sys; from pathlib import Path; from fedloom.experiments.report.runs import summary_table\n"
        f"summary_table(Path({str(tmp_path)!r}), 'r1')\n"
        "assert 'matplotlib' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_bounds_are_those_that_the_run_recorded(tmp_path: Path) -> None:
    config = json.dumps({"tiers": {"count": 2, "upper_bounds": None, "cost": "macs"}, "method": {"name": "fedoras"}})
    recorded = json.dumps(
        [{"tier": "tier1", "upper": 10.5, "clients": 3}, {"tier": "tier2", "upper": 20, "clients": 1}]
    )
    for run_id, tiers in (("r1", recorded), ("r2", None)):
        writer = RunWriter.create(tmp_path, "fedoras_digits", run_id)
        writer.update_run(config=config, tiers=tiers)
        writer.close()
    assert upper_bounds(load(tmp_path, ["r1", "r2"])) == {("r1", "tier1"): 10.5, ("r1", "tier2"): 20.0}
    assert "did not record" in " ".join(write_report(tmp_path, ["r2"]).missing)


def test_bad_input_is_refused_and_nothing_written(tmp_path: Path) -> None:
    write_run(tmp_path, "r1").close()
    with pytest.raises(ValueError, match="no run 'nope'"):
        write_report(tmp_path, ["nope"])
    assert not (tmp_path / "reports").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        write_report(tmp_path, ["r1"], tmp_path / "file" / "below")
    next((tmp_path / "rounds").rglob("*.parquet")).write_bytes(b"junk")
    with pytest.raises(ValueError, match="not a readable Parquet file"):
        write_report(tmp_path, ["r1"])
