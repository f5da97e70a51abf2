"""Uploads that fail are tried again, and said in one line if they fail to the end."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.platform.clients.execution import SerialExecutor
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import World
from fedloom.platform.results import copies as mirror_module
from fedloom.platform.results.copies import Mirror, MirrorError, mirror_run, mirrored, rank
from fedloom.platform.results.manifest import Manifest, manifest_path
from fedloom.platform.results.store import local_root, open_target
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import start_run

Elastic = Callable[..., RunConfig]
Machine = Callable[[str], None]
Serial = Callable[[World], SerialExecutor]


def test_a_failed_turn_goes_on_where_it_stopped(url: str, machine: Machine, small_run: Any, watched: Any) -> None:
    writer = small_run()
    failures = [OSError("the network is down")]

    def fail_once(_: str, name: str) -> None:
        if name.startswith("rounds/") and failures:
            raise failures.pop()

    target = watched(url, fail_once)
    mirror = Mirror(target, writer.paths)
    with pytest.raises(OSError, match="the network is down"):
        mirror.turn()
    sent = len(target.done)
    mirror.turn()
    assert 0 < sent < len(target.done)
    assert len(set(target.done)) == len(target.done) == len([p for p in local_root(url).rglob("*") if p.is_file()])
    mirror.turn()
    assert len(set(target.done)) == len(target.done), "what has not changed is not copied again"


def test_a_copy_that_fails_to_the_end_is_said_in_one_line(
    url: str,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    elastic_config: Elastic,
    caplog: pytest.LogCaptureFixture,
    bucket: Path,
    watched: Any,
    serial: Serial,
) -> None:
    def fail(_: str, name: str) -> None:
        if "/" in name:  # not the trial whether the folder can be written
            raise OSError("the network is down")

    monkeypatch.setattr(mirror_module, "open_target", lambda results: watched(results, fail))
    monkeypatch.setattr(mirror_module, "INTERVAL_S", 0.05)
    with caplog.at_level(logging.WARNING), pytest.raises(MirrorError) as error:
        start_run(elastic_config(results=url), serial)
    assert f"to {url} (the network is down); all of it is in {local_root(url)}" in str(error.value)
    assert "\n" not in str(error.value)
    assert "trying again at a later checkpoint" in caplog.text
    assert read_table(local_root(url), "runs")["status"].tolist() == ["done"]
    assert read_table(bucket, "runs").empty


def test_what_broke_a_run_is_told_before_what_broke_its_copy(
    url: str,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    small_run: Any,
    watched: Any,
) -> None:
    def fail(*_: str) -> None:
        raise OSError("the network is down")

    writer = small_run()
    monkeypatch.setattr(mirror_module, "open_target", lambda results: watched(results, fail))
    with pytest.raises(RuntimeError, match="the run broke"), mirrored(url, writer.paths):
        raise RuntimeError("the run broke")
    assert "run r1 could not be copied" in caplog.text


def test_the_copy_is_kept_up_to_date_in_the_background(
    url: str, machine: Machine, small_run: Any, watched: Any
) -> None:
    writer = small_run()
    arrived = threading.Event()

    def notice(_: str, name: str) -> None:
        if name.endswith("status.json"):
            arrived.set()

    mirror = Mirror(watched(url, notice), writer.paths, interval_s=0.02)
    mirror.start()
    assert arrived.wait(30)
    mirror.close()


def test_half_an_upload_is_never_seen(url: str, tmp_path: Path) -> None:
    target = open_target(url)
    (tmp_path / "old").write_bytes(b"old")
    with open(tmp_path / "old", "rb") as file:
        target.upload("x/y", file, 3)

    class Torn:
        def read(self, _: int) -> bytes:
            raise OSError("torn")

    with pytest.raises(OSError, match="torn"):
        target.upload("x/y", Torn(), 3)  # type: ignore[arg-type]
    assert target.read("x/y") == b"old"
    assert list(target.list()) == ["x/y"]


def test_what_is_copied_last_is_the_status() -> None:
    names = [
        "artifacts/r/status.json",
        "artifacts/r/checkpoint/state.json",
        "artifacts/r/models/a.json",
        "artifacts/r/models/a.0.safetensors",
        "artifacts/r/checkpoint/w.safetensors",
        "artifacts/r/journal-000001.jsonl",
        "runs/experiment=e/run_id=r/part-00000.parquet",
        "clients/experiment=e/run_id=r/part-00000.parquet",
        "artifacts/r/config.json",
    ]
    expected = [names[8], names[7], names[6], names[5], names[4], names[3], names[2], names[1], names[0]]
    assert sorted(names, key=rank) == expected


def test_a_manifest_that_was_damaged_there_is_written_anew(
    url: str, machine: Machine, small_run: Any, bucket: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = small_run()
    Manifest(writer.paths).begin()
    mirror_run(url, writer.paths)
    name = manifest_path(writer.paths).relative_to(writer.paths.root)
    (bucket / name).write_bytes(b"{}")
    with caplog.at_level(logging.WARNING):
        mirror_run(url, writer.paths)
    assert "was damaged" in caplog.text
    assert (bucket / name).read_bytes() == manifest_path(writer.paths).read_bytes()


def test_an_unexpected_error_of_the_mirror_is_said(
    url: str, machine: Machine, small_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Mirror, "turn", fail)
    with pytest.raises(MirrorError, match=r"could not be copied .*a bug"):
        mirror_run(url, small_run().paths)
