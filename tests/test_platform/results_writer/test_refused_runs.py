"""A run whose id, name or folder cannot be used is refused before anything is written."""

import shutil
from pathlib import Path

import pytest

from fedloom.platform.results import files
from fedloom.platform.results.writer import RunWriter


def test_a_run_id_is_never_used_twice(tmp_path: Path) -> None:
    RunWriter.create(tmp_path, "demo", "r1").close()
    with pytest.raises(ValueError, match=r"run 'r1' exists under .*: resume it, or give another run id"):
        RunWriter.create(tmp_path, "other", "r1")
    shutil.rmtree(tmp_path / "artifacts")
    with pytest.raises(ValueError, match="run 'r1' exists"):
        RunWriter.create(tmp_path, "demo", "r1")


@pytest.mark.parametrize("name", ["", "7", "a/b", "..", "a=b", "a b", "_a", "x" * 200])
def test_names_that_cannot_be_partitions_are_refused(tmp_path: Path, name: str) -> None:
    for experiment, run_id in ((name, "r1"), ("demo", name)):
        with pytest.raises(ValueError, match="cannot be a file name here"):
            RunWriter.create(tmp_path / "results", experiment, run_id)
    assert not (tmp_path / "results").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"results folder .*file/results cannot be written \(Not a directory\)"):
        RunWriter.create(tmp_path / "file" / "results", "demo", "r1")

    def read_only(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", read_only)
    with pytest.raises(ValueError, match=r"cannot be written .Read-only file system.: choose another folder") as caught:
        RunWriter.create(tmp_path / "results", "demo", "r1")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "results").exists()
