"""`fedloom new`: what it writes runs at once, and it never writes over anything."""

import subprocess
import sys
from pathlib import Path

import pytest

from fedloom.experiments.cli import main
from fedloom.experiments.new_project import new_project
from fedloom.experiments.terminal import CONFIGURATION, OK


def test_a_new_project_runs_and_its_tests_pass(tmp_path: Path) -> None:
    folder = tmp_path / "winters"
    new_project(folder)
    assert (folder / "README.md").read_text().startswith("# winters\n")
    done = subprocess.run(
        [sys.executable, "-m", "fedloom.experiments", "run", "experiment=my_preset.yaml", "method.train.rounds=1"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == OK, done.stderr
    assert "my_preset: run " in done.stdout
    first, second, *_ = done.stdout.splitlines()  # of a pipe: no control characters, nothing that is drawn again
    assert first.startswith("run ")
    assert second.startswith("fedavg                1/1  clients 6/6  loss ")
    assert "\x1b" not in done.stdout
    assert (folder / "results").is_dir()
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    passed = subprocess.run(tests, cwd=folder, capture_output=True, text=True, check=False)
    assert passed.returncode == 0, passed.stdout
    assert "4 passed" in passed.stdout


@pytest.mark.parametrize("folder", ["full", "file", "full/file/below"])
def test_nothing_is_written_where_something_is(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit) as ending:
        main(["new", folder])
    assert ending.value.code == CONFIGURATION
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "file", "full"]


def test_an_empty_folder_is_filled_and_said_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(SystemExit) as ending:
        main(["new", "mine"])
    assert ending.value.code == OK
    *files, after = capsys.readouterr().out.splitlines()
    assert sorted(files) == sorted(str(p.relative_to(tmp_path)) for p in (tmp_path / "mine").iterdir())
    assert after == "next: cd mine; fedloom run experiment=my_preset.yaml"
