"""`fedloom status`, and that commands about one run do not look at the others."""

import builtins
import io
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fedloom.experiments import status
from fedloom.experiments.analysis.tables import load, with_training
from fedloom.experiments.benchmarks.analysis import EXPERIMENT, write_results
from fedloom.experiments.cli import main
from fedloom.experiments.report.runs import summary_table, write_report
from fedloom.experiments.runs.configuration import stored_config
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.results import tables
from fedloom.platform.results.lock import OwnedError, check_unowned, owned
from fedloom.platform.results.manifest import encoded
from fedloom.platform.results.paths import Names, RunPaths, find_run, is_used, write_names
from fedloom.platform.results.status import StatusFile
from fedloom.platform.results.tables import TABLES, read_table
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.words import PrintableFormatter

ABLATION = "20260101-000000-alpha-abcdef"
OPENING = ((builtins, "open"), (io, "open"), (os, "open"), (os, "listdir"), (os, "scandir"), (tables, "read_part"))


@pytest.fixture
def accesses(tmp_path: Path) -> Callable[[Callable[[], object]], list[str]]:
    """Runs a function; returns what Python opened and listed below the results, and which Parquet files it read."""

    def of(call: Callable[[], object]) -> list[str]:
        found: list[str] = []

        def noting(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
            def note(path: Any, *arguments: Any, **options: Any) -> Any:
                if str(path).startswith(str(tmp_path)):
                    found.append(f"{name} {path}")
                return own(path, *arguments, **options)

            return note

        with pytest.MonkeyPatch.context() as patch:
            for module, name in OPENING:
                patch.setattr(module, name, noting(name, getattr(module, name)))
            call()
        return found

    return of


def write_runs(root: Path, number: int) -> list[str]:
    ids = write_results(root, runs=number, rounds=1, clients=2, candidates=2)
    for run_id in ids:
        StatusFile(RunPaths(root, EXPERIMENT, run_id).status).write("done", stage="evaluation", rounds_total=3)
    return ids


def add_copies(root: Path, run_id: str, number: int) -> None:
    """Earlier runs, which are copies of a run."""
    paths = RunPaths(root, EXPERIMENT, run_id)
    for i in range(number):
        other = RunPaths(root, EXPERIMENT, f"a{i:03d}")
        for folder, copy in ((paths.artifacts, other.artifacts), *((paths.table(t), other.table(t)) for t in TABLES)):
            shutil.copytree(folder, copy)


def ask(root: Path) -> dict[str, Callable[[], object]]:
    """What is asked about a run, by its id, by the beginning of its id, and by its name."""
    return {
        "found": lambda: find_run(root, "g0001"),
        "used": lambda: is_used(root, "g0001"),
        "a table": lambda: read_table(root, "evaluations", run_id="g0001"),
        "tables": lambda: load(root, ["g0001"]),
        "reused": lambda: with_training(load(root, ["g0001"])),
        "a summary": lambda: summary_table(root, "g0001"),
        "status": lambda: status.show_status(root, ["g0001"], as_json=True),
        "by its beginning": lambda: load(root, ["g0001"[:5]]),
        "by its name": lambda: status.show_status(root, ["best"], as_json=True),
        "newest": lambda: status.show_status(root, [], as_json=False),
        "latest": lambda: summary_table(root),
    }


@pytest.mark.parametrize("what", [*ask(Path())])
def test_what_is_asked_about_a_run_costs_the_same_among_many(
    what: str, tmp_path: Path, accesses: Callable[[Callable[[], object]], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "MOST", 2)
    named = RunPaths(tmp_path, EXPERIMENT, write_runs(tmp_path, 2)[-1]).artifacts
    write_names(named, Names("best"))
    alone = accesses(ask(tmp_path)[what])
    add_copies(tmp_path, "g0000", 30)
    assert accesses(ask(tmp_path)[what]) == alone
    assert alone or what == "used"  # which asks whether one file is there
    assert not any("a00" in access for access in alone)


@pytest.mark.usefixtures("undrawn")
def test_a_report_and_a_resume_among_many(
    tmp_path: Path, accesses: Callable[[Callable[[], object]], list[str]], tiny_config: Callable[..., RunConfig]
) -> None:
    write_runs(tmp_path, 1)
    writer = RunWriter.create(tmp_path, "tiny", "mine")
    config = asdict(tiny_config(results=str(tmp_path)))
    writer.paths.config.write_text(json.dumps(config))
    writer.update_run(config=json.dumps(config))
    calls: list[Callable[[], object]] = [
        lambda: write_report(tmp_path, ["g0000"], tmp_path / "out"),
        lambda: stored_config(tmp_path, "mine"),
    ]
    calls[0]()  # which makes the folder that later ones find
    alone = [sorted(accesses(call)) for call in calls]
    add_copies(tmp_path, "g0000", 20)
    assert [sorted(accesses(call)) for call in calls] == alone


# -- what is shown -----------------------------------------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["status", *arguments])
    assert end.value.code == 0
    return capsys.readouterr().out


def write_status(root: Path, run_id: str, **values: Any) -> None:
    """A run, of which only the folders are there."""
    paths = RunPaths(root, "tiny", run_id)
    paths.table("runs").mkdir(parents=True)
    StatusFile(paths.status).write("done", **values)


def test_the_newest_are_shown_and_the_others_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = [f"20260101-{i:06d}-tiny-abcdef" for i in range(53)]
    for run_id in ids:
        write_status(tmp_path, run_id, stage="supernet", rounds_total=4)
    results = ["--results", str(tmp_path)]
    lines = said(capsys, *results).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ids[3:]
    assert lines[1].split() == [ids[3], "done", "supernet", "4/4"]
    assert lines[-1] == "and 3 earlier runs: fedloom status --all shows them"
    values = json.loads(said(capsys, *results, "--json"))
    assert [run["run_id"] for run in values["runs"]] == ids[3:]
    assert values["earlier"] == {"runs": 3, "ablations": 0}
    whole = said(capsys, *results, "--all").splitlines()
    assert [line.split()[0] for line in whole[1:]] == ids
    assert len(json.loads(said(capsys, *results, "--all", "--json"))["runs"]) == 53
    assert "no runs under" in said(capsys, "--results", str(tmp_path / "nowhere"))


def test_an_ablation_is_one_line_and_its_trials_are_not_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ablation_id in (ABLATION, f"{ABLATION}0", f"{ABLATION}1"):
        folder = tmp_path / "ablations" / ablation_id
        folder.mkdir(parents=True)
        (folder / "ablation.json").write_text("not read")
    status = StatusFile(tmp_path / "ablations" / ABLATION / "status.json")
    status.write("running", stage="alpha", round=2, rounds_total=6)
    StatusFile(tmp_path / "ablations" / f"{ABLATION}0" / "status.json").write(
        "failed", round=5, rounds_total=6, message="5 done, 1 failed"
    )
    for run_id in (f"{ABLATION}-0000", f"{ABLATION}-0001", "20260101-000001-tiny-abcdef"):
        write_status(tmp_path, run_id)
    lines = said(capsys, "--results", str(tmp_path)).splitlines()
    assert lines[:3] == [
        f"ablation {ABLATION} running: 2 of 6 trials ended",
        f"ablation {ABLATION}0 failed: 5 done, 1 failed",
        f"ablation {ABLATION}1 interrupted: no trial was begun",
    ]
    assert [line.split()[0] for line in lines[3:]] == ["run", "20260101-000001-tiny-abcdef"]
    values = json.loads(said(capsys, "--results", str(tmp_path), "--json"))
    shown = [(a["state"], a["ended"], a["planned"], a["message"]) for a in values["ablations"]]
    assert shown == [
        ("running", 2, 6, ""),
        ("failed", 5, 6, "5 done, 1 failed"),
        ("interrupted", 0, None, ""),
    ]


def test_ablations_are_listed_by_their_start_whatever_their_ids_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ablation_id in (ABLATION, "paper-tab1"):
        folder = tmp_path / "ablations" / ablation_id
        folder.mkdir(parents=True)
        (folder / "ablation.json").write_text("not read")
    os.utime(tmp_path / "ablations" / "paper-tab1" / "ablation.json", (1e9, 1e9))
    assert [line.split()[1] for line in said(capsys, "--results", str(tmp_path)).splitlines()] == [
        "paper-tab1",
        ABLATION,
    ]


def test_an_ablation_whose_status_cannot_be_read_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ablation_id in (ABLATION, f"{ABLATION}0"):
        folder = tmp_path / "ablations" / ablation_id
        folder.mkdir(parents=True)
        (folder / "ablation.json").write_text("not read")
        StatusFile(folder / "status.json").write("running", round=2, rounds_total=6)
    path = tmp_path / "ablations" / ABLATION / "status.json"
    path.write_text('{"state": "run')
    first, second = said(capsys, "--results", str(tmp_path)).splitlines()
    assert first.startswith(f"ablation {ABLATION} unknown: {path} is not a status file")
    assert second == f"ablation {ABLATION}0 running: 2 of 6 trials ended"
    value = json.loads(said(capsys, "--results", str(tmp_path), "--json"))["ablations"][0]
    assert (value["state"], value["ended"], value["planned"]) == ("unknown", 0, None)
    assert "is not a status file" in value["message"]


def test_a_run_whose_status_cannot_be_read_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(tmp_path, "a1")
    write_status(tmp_path, "a2")
    RunPaths(tmp_path, "tiny", "a1").status.write_text("damaged")
    runs = json.loads(said(capsys, "--results", str(tmp_path), "--json"))["runs"]
    assert [run["state"] for run in runs] == ["unknown", "done"]
    assert "is not a status file" in runs[0]["message"]
    assert "a2" in said(capsys, "--results", str(tmp_path))
    with pytest.raises(SystemExit) as end:
        main(["status", "a1", "--results", str(tmp_path)])
    assert end.value.code == 2


@pytest.mark.parametrize(
    "content", ["x" * 20, '{"round": "x"}', f'{{"round": {10**400}}}', "[" * 200_000, "fifo", "link"]
)
def test_no_status_file_hides_the_others_or_is_waited_for(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a stranger's, whose values are of other types than fedloom writes."""
    write_status(tmp_path, "a1")
    write_status(tmp_path, "a2")
    path = RunPaths(tmp_path, "tiny", "a1").status
    known = json.loads(path.read_text())
    path.unlink()
    if content == "fifo":
        os.mkfifo(path)
    elif content == "link":
        path.symlink_to("/dev/zero")
    else:
        path.write_text(json.dumps({**known, **json.loads(content)}) if content[0] == "{" else content)
    shown = said(capsys, "--results", str(tmp_path))
    assert [line.split()[:2] for line in shown.splitlines()[1:]] == [["a1", "unknown"], ["a2", "done"]]
    assert len(said(capsys, "a1", "a2", "--results", str(tmp_path)).splitlines()) == 3


def test_what_steers_a_terminal_is_shown_and_not_obeyed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a title of the window, a colour, a line that is written over, or text that runs from right to left."""
    evil = "a\x1b]0;owned\x1b[31mb\rc\x9bd\u202ee"
    shown = "a\u241b]0;owned\u241b[31mb c\ufffdd\ufffde"
    write_status(tmp_path, "a1")
    path = RunPaths(tmp_path, "tiny", "a1").status
    path.write_text(json.dumps({**json.loads(path.read_text()), "message": evil}))
    for width in ("200", "40"):
        monkeypatch.setenv("COLUMNS", width)
        assert shown.split(" ")[0] in said(capsys, "--results", str(tmp_path))
    (RunPaths(tmp_path, "tiny", "a1").artifacts / "manifest.json").write_bytes(encoded({evil: ()}))
    with owned(path.parent, "run a1", tmp_path, tmp_path):
        lease = {**json.loads((path.parent / ".owner").read_text()), "host": evil}
        (path.parent / ".owner").write_text(json.dumps(lease))
        with pytest.raises(OwnedError) as refused:
            check_unowned(path.parent, "run a1")
    logging.getLogger("fedloom").warning("%s", refused.value)
    for command in ("verify", "resume"):
        with pytest.raises(SystemExit):
            main([command, "a1", "--results", str(tmp_path)])
    streams = capsys.readouterr()
    assert shown.split(" ")[0] in streams.out
    assert shown.split(" ")[0] in streams.err
    assert not {*streams.out, *streams.err} & {"\x1b", "\x07", "\r", "\x9b", "\u202e"}
    record = logging.LogRecord("x", logging.ERROR, "", 1, "%s", (evil,), None)
    assert PrintableFormatter("%(message)s").format(record) == shown.replace(" ", "\u240d")


def test_what_only_reads_does_not_wait_for_what_trains() -> None:
    """Importing torch takes seconds, which is most of the time of a command that shows a few rows."""
    parts = ("status", "show", "report.runs", "report.ablation")
    modules = ", ".join(f"fedloom.experiments.{part}" for part in parts)
    code = (
        "import sys, fedloom.experiments.status\nassert 'pandas' not in sys.modules\n"
        f"import {modules}\nassert not {{'torch', 'ray', 'scipy.stats'}} & {{*sys.modules}}"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
