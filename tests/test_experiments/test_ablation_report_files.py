"""An ablation's report as files: tables in Markdown and LaTeX, figures by name, trials in any state, and refusals."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from fedloom.experiments.analysis.tables import latest_run
from fedloom.experiments.cli import main
from fedloom.experiments.report.ablation import ablation_json, ablation_table, chosen_ablation, write_ablation_report
from fedloom.experiments.report.content import Block
from fedloom.experiments.report.pages import LONG, ReportFiles, escaped, latex_table, latex_tables
from fedloom.experiments.store.ablations import FIGURES, Ablation
from fedloom.platform.results.files import from_hashed_json, hashed_json
from fedloom.platform.results.writer import RunWriter
from tools.generated_ablation import Fates, write_planned

BETA = ["ablation=beta_schedule", "experiment=superfednas_digits"]
BUDGET = ["ablation=comm_budget", "experiment=fedoras_digits", "ablation.axes.averaging.values=[opa,fedavg,plain]"]

DIFFERENCES = ("differences-1", "differences-2", "differences-3")
"""The figures of what each axis changes."""


def written(root: Path, arguments: list[str], fates: Fates | None = None) -> Ablation:
    return write_planned(root, arguments, fates, rounds=10, candidates=4)


@pytest.fixture(scope="module")
def beta(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ablation, ReportFiles]:
    root = tmp_path_factory.mktemp("beta")
    ablation = written(root, BETA)
    return root, ablation, write_ablation_report(root, ablation.ablation_id)


@pytest.fixture(scope="module")
def budget(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ablation, ReportFiles]:
    """One trial failed, one at work, one waiting."""
    root = tmp_path_factory.mktemp("budget")
    ablation = written(root, BUDGET, Fates(failed=[1], running=[3], waiting=[17]))
    return root, ablation, write_ablation_report(root, ablation.ablation_id)


def rows_of(markdown: str, title: str) -> list[list[str]]:
    """The body of the table below a heading."""
    table = markdown.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_a_finished_ablation_has_all_files_and_nothing_missing(beta: tuple[Path, Ablation, ReportFiles]) -> None:
    root, ablation, files = beta
    assert files.folder == root / "reports" / ablation.ablation_id
    names = {path.name for path in files.folder.iterdir()}
    figures = {f"{name}.{end}" for name in ("macs_by_axis", *DIFFERENCES, "convergence") for end in ("png", "pdf")}
    assert names == {"report.html", "report.md", "tables.tex", *figures}
    assert files.missing == ()
    assert 'http-equiv="refresh"' not in files.html.read_text()
    assert len(files.run_ids) == 24


def test_the_tables_of_the_beta_schedule_have_24_runs_with_n_means_and_intervals(
    beta: tuple[Path, Ablation, ReportFiles],
) -> None:
    _, ablation, files = beta
    text = files.markdown.read_text()
    trials = rows_of(text, "Trials")
    assert [row[0] for row in trials] == [str(i) for i in range(24)]
    assert trials[0][1:] == ["0.9", "constant", "0.5", "1", "done", ablation.trials[0].run_id, "–", "10"]
    settings = rows_of(text, "Settings")
    assert len(settings) == 12 * 5
    assert settings[0] == [
        "0.9", "constant", "0.5", "d=0,0,0 e=0.25", "2", "68.9, 69.1", "150 k", "300 k", "800 kB", "20 s"
    ]  # fmt: skip
    compared = rows_of(text, "decay against cosine")
    assert compared[0] == ["constant – cosine", "d=0,0,0 e=0.25", "8", "2", "-2.7, -3.3", "–", "–"]
    assert len(rows_of(text, "beta_0 against 0.9")) == 5


def test_an_unfinished_ablation_says_how_its_trials_stand_and_refreshes(
    budget: tuple[Path, Ablation, ReportFiles],
) -> None:
    _, _, files = budget
    (said,) = files.missing
    assert re.fullmatch(r"15 of 18 trials are done at .* UTC; 1 failed, 1 running, 1 waiting\.", said)
    page = files.html.read_text()
    assert '<meta http-equiv="refresh" content="30">' in page
    assert "This page reloads itself every 30 s." in page
    trials = rows_of(files.markdown.read_text(), "Trials")
    assert [trials[i][4] for i in (0, 1, 3, 17)] == ["done", "failed", "running", "waiting"]
    assert "loss is not finite in layer_2" in trials[1][6]
    assert trials[3][6:] == ["in supernet, round 6 of 10", "5"]
    assert trials[17][6:] == ["–", "0"]
    assert "stages_by_axis.pdf" in {path.name for path in files.plots}


def test_figures_show_something_and_are_named_by_the_ablation(
    tmp_path: Path,
    beta: tuple[Path, Ablation, ReportFiles],
    budget: tuple[Path, Ablation, ReportFiles],
    colours: Callable[[bytes], int],
) -> None:
    ablation = written(tmp_path, [*BUDGET, f"ablation.figures=[{','.join(FIGURES)}]"], Fates(reusing={1: 0}))
    plan = ablation.folder(tmp_path) / "ablation.json"  # of a version that knows one more
    plan.write_bytes(hashed_json(from_hashed_json(plan.read_bytes(), plan) | {"figures": [*FIGURES, "fig5"]}))
    files = write_ablation_report(tmp_path, ablation.ablation_id, tmp_path / "out")
    drawn = {*FIGURES, *DIFFERENCES[:2], "convergence"} - {"fronts"}  # where all cost the same
    assert {p.stem for p in files.plots} == drawn
    assert files.missing == (f"There is no figure 'fig5'; the known ones are {', '.join(FIGURES)}.",)
    for path in (*files.plots, *beta[2].plots, *budget[2].plots):
        if path.suffix == ".pdf":
            assert path.read_bytes().startswith(b"%PDF-")
            continue
        assert colours(path.read_bytes()) > 50, path
        with Image.open(path) as image:
            assert image.width > 600, path


def test_reports_are_the_same_bytes_again(beta: tuple[Path, Ablation, ReportFiles], tmp_path: Path) -> None:
    root, ablation, files = beta
    again = write_ablation_report(root, ablation.ablation_id, tmp_path)
    for path in files.folder.iterdir():
        assert (again.folder / path.name).read_bytes() == path.read_bytes(), path.name


def test_before_any_trial_has_begun_there_is_a_report(tmp_path: Path) -> None:
    ablation = written(tmp_path, [*BUDGET, "ablation.seeds=[1]"], Fates(waiting=range(9)))
    files = write_ablation_report(tmp_path, ablation.ablation_id)
    assert files.plots == ()
    assert "9 waiting" in files.missing[0]
    assert len(rows_of(files.markdown.read_text(), "Trials")) == 9
    Console(file=StringIO()).print(ablation_table(tmp_path, ablation.ablation_id))
    assert ablation_json(tmp_path, ablation.ablation_id)["settings"] == []


@pytest.mark.parametrize(("run_id", "is_later"), [("20200101-000000-demo", False), ("29990101-000000-demo", True)])
def test_the_report_is_about_what_was_started_last(tmp_path: Path, run_id: str, is_later: bool) -> None:
    assert chosen_ablation(tmp_path, []) is None
    ablation = written(tmp_path, [*BUDGET, "ablation.seeds=[1]"], Fates(waiting=range(1, 9)))
    assert chosen_ablation(tmp_path, []) == ablation.ablation_id  # not its trial
    RunWriter.create(tmp_path, "demo", run_id).close()
    assert chosen_ablation(tmp_path, []) == (None if is_later else ablation.ablation_id)


def test_what_is_reproduced_is_not_the_latest_for_ever(tmp_path: Path) -> None:
    """Its ids, paper-..., sort after all that begin with a date."""
    for run_id, time_s in (("paper-x-tab1-small-abcdef-0001", 0), ("20260101-000000-demo", 1)):
        paths = RunWriter.create(tmp_path, "demo", run_id).paths
        paths.config.write_text("{}")
        os.utime(paths.config, (time_s, time_s))
    assert latest_run(tmp_path) == "20260101-000000-demo"
    os.utime(paths.config.parent.parent / "paper-x-tab1-small-abcdef-0001" / "config.json", (4e9, 4e9))
    assert latest_run(tmp_path) == "paper-x-tab1-small-abcdef-0001"


def test_the_numbers_are_json(budget: tuple[Path, Ablation, ReportFiles]) -> None:
    root, ablation, _ = budget
    found = json.loads(json.dumps(ablation_json(root, ablation.ablation_id), allow_nan=False))
    assert found["ablation"]["references"] == {"budget": 0.5, "averaging": "opa"}
    assert [t["state"] for t in found["trials"]].count("done") == 15
    chosen = [
        row
        for row in found["settings"]
        if (row["budget"], row["averaging"], row["model"], row["tier"]) == (0.5, "opa", "fine_tuned", "tier1")
    ]
    assert [(row["n"], round(row["mean"], 6)) for row in chosen] == [(2, 0.66)]
    assert {row["axis"] for row in found["differences"]} == {"budget", "averaging"}


def test_the_terminals_table_fits_80_columns(beta: tuple[Path, Ablation, ReportFiles]) -> None:
    root, ablation, _ = beta
    console = Console(width=80, file=StringIO(), record=True)
    console.print(ablation_table(root, ablation.ablation_id))
    text = console.export_text()
    assert "…" not in text
    assert "68.9, 69.1" in text


# -- the command line --------------------------------------------------------------------------------------------------


def test_the_command_writes_and_prints_an_ablations_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ablation = written(tmp_path, [*BUDGET, "ablation.seeds=[1]"], Fates(waiting=range(9)))  # there is nothing to draw
    with pytest.raises(SystemExit) as ended:
        main(["report", ablation.ablation_id[:-1], f"--results={tmp_path}", f"--out={tmp_path / 'out'}", "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["latex"] == str(tmp_path / "out" / "tables.tex")
    assert found["ablation"]["ablation_id"] == ablation.ablation_id


def test_several_or_mixed_ids_are_refused_in_one_line(
    budget: tuple[Path, Ablation, ReportFiles], capsys: pytest.CaptureFixture[str]
) -> None:
    root, ablation, _ = budget
    run_id = ablation.trials[0].run_id
    assert chosen_ablation(root, [run_id]) is None
    for given in ([ablation.ablation_id, run_id], [ablation.ablation_id, ablation.ablation_id]):
        with pytest.raises(SystemExit) as ended:
            main(["report", *given, "--results", str(root)])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "is an ablation, and a report is of one ablation or of runs" in said


# -- LaTeX -------------------------------------------------------------------------------------------------------------

EVIL = Block(
    "50% of {A_1} & B", ('a ± b × c – d α_β #1 $x ~ ^ \\ < > | " é 漢',), ("a_b", "n\nm"), (("x & y", "1 ± 2"),), 1
)


def test_what_latex_reads_as_signs_is_escaped() -> None:
    assert escaped("50% of {A_1} & B$") == r"50\% of \{A\_1\} \& B\$"
    assert escaped("α ± 1.5 × 2 – 3") == r"$\alpha$ $\pm$ 1.5 $\times$ 2 -- 3"
    assert escaped("λ ≤ β₀ ≥ μ") == r"$\lambda$ $\leq$ $\beta$$_0$ $\geq$ $\mu$"
    assert escaped('a\\b^c~d<e>|#"') == (
        r"a\textbackslash{}b\textasciicircum{}c\textasciitilde{}d\textless{}e\textgreater{}\textbar{}\#"
        r"\textquotedbl{}"
    )
    assert escaped("é漢\x00\n") == "é?  "
    numbers = Block("t", (), ("run", "a", "b"), (("1-2 -3", "-3.0", "-3.3 to -2.7"),), 1)
    assert r"1-2 -3 & $-$3.0 & $-$3.3 to $-$2.7 \\" in latex_table(numbers)


def balanced(text: str) -> bool:
    """Whether braces and environments are closed in order, and no sign is left that would be read as markup."""
    depth = 0
    for sign in re.sub(r"\\[{}%&#$_\\]", "", re.sub(r"(?m)^%.*$", "", text)):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        assert depth >= 0
        assert sign not in "%#~^<>|"
    open_: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            open_.append(name)
        else:
            assert open_.pop() == name
    return depth == 0 and not open_


def compiled(text: str, folder: Path) -> None:
    """Compiles the tables where there is a pdflatex."""
    if shutil.which("pdflatex") is None:
        return
    head = "\\documentclass{article}\\usepackage[T1]{fontenc}\\usepackage{booktabs,longtable}\\begin{document}\n"
    (folder / "paper.tex").write_text(f"{head}{text}\\end{{document}}\n")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:]


def test_latex_tables_are_balanced_and_compile(
    beta: tuple[Path, Ablation, ReportFiles], budget: tuple[Path, Ablation, ReportFiles], tmp_path: Path
) -> None:
    for files in (beta[2], budget[2]):
        assert files.latex is not None
        text = files.latex.read_text()
        assert balanced(text)
        titles = re.findall(r"(?m)^## (.+)$", files.markdown.read_text())
        assert text.count(r"\caption{") == sum(escaped(f"{title}.") in text for title in titles) >= 4
        compiled(text, tmp_path)
    assert balanced(latex_table(EVIL))
    compiled(latex_tables([EVIL]), tmp_path)


def test_long_tables_break_over_pages_and_every_row_has_all_columns() -> None:
    block = Block("t", (), ("a", "b", "c"), (("x", "y", "1"),) * (LONG + 1), 2)
    text = latex_table(block)
    assert r"\begin{longtable}{llr}" in text
    rows = [line for line in text.splitlines() if " & " in line]
    assert len(rows) == LONG + 3  # the head twice: on the first page, and on all others
    assert text.count(r"\caption") == 1
    assert {line.count(" & ") for line in rows} == {2}
    assert r"\begin{tabular}{llr}" in latex_table(Block("t", (), ("a", "b", "c"), (("x", "y", "1"),), 2))
