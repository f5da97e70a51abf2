"""Data that is damaged, foreign or missing, and results that cannot be written: the file or folder is named."""

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

Refuse = Callable[..., str]

CIFAR = ["experiment=fedoras_cifar10", "executor.kind=serial", "tiers.paths=1000"]


def foreign_folder(tmp_path: Path, write: Callable[[Path], None]) -> Path:
    folder = tmp_path / "data" / "cifar10"
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        write(folder / f"{part}-00000-of-00001.parquet")
    return folder.parent


def write_rubbish(file: Path) -> None:
    file.write_bytes(b"PAR1 this is not a Parquet file PAR1")


def write_foreign(file: Path) -> None:
    pq.write_table(pa.table({"text": ["to be", "or not to be"], "label": [0, 1]}), file)


def write_broken_images(file: Path) -> None:
    images = pa.array(
        [{"bytes": b"no image", "path": "a.png"}] * 200, pa.struct({"bytes": pa.binary(), "path": "string"})
    )
    pq.write_table(pa.table({"img": images, "label": [i % 10 for i in range(200)]}), file)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (write_rubbish, r"parquet: cannot be read"),
        (write_foreign, r"parquet: columns text, label; expected"),
        (write_broken_images, r"parquet: row \d+ is not an image"),
    ],
)
def test_a_corrupt_or_foreign_data_file_is_named(
    tmp_path: Path,
    refused: Refuse,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path], None],
    expected: str,
) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(foreign_folder(tmp_path, write)))
    cache = tmp_path / "cache"
    monkeypatch.setenv("FEDLOOM_CACHE", str(cache))
    assert re.search(expected, refused(preset=CIFAR))
    assert not list(cache.rglob("*.npy")), "half a data set was left in the cache"


def test_a_missing_data_set_says_where_it_was_looked_for(
    tmp_path: Path, refused: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "nothing"))
    line = refused(preset=CIFAR)
    assert f"cifar10 not found under {tmp_path / 'nothing'}" in line
    assert "FEDLOOM_DATA" in line


def test_a_data_root_below_a_file(tmp_path: Path, refused: Refuse) -> None:
    (tmp_path / "file").write_text("in the way")
    root = tmp_path / "file" / "data"
    line = refused(f"data.root={root}", preset=CIFAR)
    assert f"cifar10 not found under {root}" in line


@pytest.mark.parametrize("place", ["below a file", "in /proc"])
def test_a_results_folder_that_cannot_be_written(
    tmp_path: Path, refusal: Refuse, serial: Sequence[str], place: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = {"below a file": str(tmp_path / "file" / "results"), "in /proc": "/proc/fedloom-results"}[place]
    assert f"results folder {folder} cannot be written" in refusal("run", *serial, f"results={folder}")


@pytest.mark.parametrize("by", ["data.cache", "FEDLOOM_CACHE"])
def test_a_cache_that_cannot_be_written(
    tmp_path: Path, refused: Refuse, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = tmp_path / "file" / "cache"
    if by == "FEDLOOM_CACHE":
        monkeypatch.setenv(by, str(cache))
    line = refused(*([f"data.cache={cache}"] if by == "data.cache" else []))
    assert "the cache of prepared data cannot be written (" in line
    assert line.endswith("cache: not a directory): choose another folder by data.cache or FEDLOOM_CACHE")


LONG = "x" * 256
DEEP = "d/" * 2500


@pytest.mark.parametrize("path", [LONG, DEEP], ids=["name", "path"])
@pytest.mark.parametrize("key", ["results", "data.root", "data.cache", "tiers.device_table"])
def test_a_path_that_no_file_system_holds(key: str, path: str, refused: Refuse) -> None:
    line = refused(f"{key}={path}")
    assert line.startswith(f"fedloom: {key}={path[:20]}")
    assert "must be a path of at most 3000 bytes, each name in it of at most 255" in line


@pytest.mark.parametrize("path", [LONG, DEEP], ids=["name", "path"])
def test_an_option_or_a_preset_that_no_file_system_holds(path: str, refusal: Refuse) -> None:
    must = "must be a path of at most 3000 bytes, each name in it of at most 255"
    assert must in refusal("run", f"experiment=./{path}.yaml")
    assert must in refusal("ablate", f"ablation=./{path}.yaml", "experiment=fedoras_digits")
    for command in (["status"], ["report"], ["resume", "run"], ["export", "run"]):
        assert f"--results {path[:20]}" in refusal(*command, "--results", path)
    for command in (["report"], ["export", "run"]):
        assert f"--out {path[:20]}" in refusal(*command, "--out", path)


def test_data_of_a_path_that_no_file_system_holds(refused: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", f"/{LONG}")
    assert refused(preset=CIFAR).endswith(": file name too long")


def test_a_full_disk_is_told_with_the_file(
    tmp_path: Path,
    call: Callable[..., int],
    quick: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    full = partial(OSError, 28, "No space left on device")
    run = ["run", *quick, f"results={tmp_path / 'results'}"]
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", Mock(side_effect=full()))
        assert call(*run, f"data.cache={tmp_path / 'cache'}") == 4
    assert re.fullmatch(r"fedloom: .*/train_x.npy: no space left on device\n", capfd.readouterr().err)
    assert call("prepare", *quick) == 0
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", Mock(side_effect=[*[None] * 40, *(full() for _ in range(1000))]))
        assert call(*run) == 4
    last = capfd.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"fedloom: /.*/[\w.-]+: no space left on device", last), last
