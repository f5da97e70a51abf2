"""The writer of a run: adding, committing, flushing, resuming."""

import contextlib
import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from fedloom.platform.results import files
from fedloom.platform.results.tables import read_table
from fedloom.platform.results.writer import RunWriter

NEVER = 1e9


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncing guards against power failures only, and is slow on a busy disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def add_rounds(writer: RunWriter, start: int, stop: int, clients: int = 3) -> dict[str, int]:
    for number in range(start, stop):
        writer.add("rounds", stage="train", round=number, loss=number / 7)
        for client in range(clients):
            writer.add("clients", stage="train", round=number, client_id=client)
        position = writer.commit()
    return position


def rounds(root: Path, run_id: str = "r1") -> list[int]:
    return [int(number) for number in read_table(root, "rounds", run_id=run_id)["round"]]


def parts(root: Path, table: str) -> list[int]:
    return [pq.read_metadata(path).num_rows for path in sorted(root.glob(f"{table}/*/*/*.parquet"))]


def test_committed_rows_reach_parquet_in_order(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=NEVER)
    assert writer.commit() == {"rounds": 0, "clients": 0, "candidates": 0, "evaluations": 0, "models": 0}
    position = add_rounds(writer, 0, 4)
    assert position == {"rounds": 4, "clients": 12, "candidates": 0, "evaluations": 0, "models": 0}
    assert rounds(tmp_path) == []
    writer.add("rounds", stage="train", round=4)
    writer.flush()
    assert rounds(tmp_path) == [0, 1, 2, 3]
    writer.close()
    assert rounds(tmp_path) == [0, 1, 2, 3, 4]
    frame = pd.read_parquet(tmp_path / "clients")
    assert frame["client_id"].tolist() == [0, 1, 2] * 4
    assert frame["experiment"].unique().tolist() == ["demo"]
    assert frame["run_id"].unique().tolist() == ["r1"]
    assert not list(tmp_path.rglob("journal-*"))
    assert not list(tmp_path.rglob(".*"))


def test_a_commit_is_one_write_and_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=NEVER)
    add_rounds(writer, 0, 1)  # starts the journal
    calls: list[str] = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda *args: (calls.append("write"), write(*args))[1])
    monkeypatch.setattr(os, "fsync", lambda _: calls.append("sync"))
    add_rounds(writer, 1, 2)
    assert calls == ["write", "sync"]
    writer.commit()
    assert calls == ["write", "sync"]


def test_a_file_is_synced_before_and_its_folder_after_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=NEVER)
    writer.add("rounds", round=0)
    writer.commit()
    calls: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(Path(f"/proc/self/fd/{fd}").resolve().name))
    monkeypatch.setattr(os, "replace", lambda *args: (calls.append("replace"), replace(*args)))
    writer.flush()
    assert calls == [".part-00000.parquet.tmp", "replace", "run_id=r1"]


def test_rows_become_visible_when_the_interval_has_passed(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=0.0)
    add_rounds(writer, 0, 1)
    assert rounds(tmp_path) == [0]
    add_rounds(writer, 1, 2)
    assert rounds(tmp_path) == [0, 1]
    assert not list(tmp_path.rglob("journal-*"))


def test_a_full_file_is_left_alone_and_a_new_one_begins(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=NEVER, rows_per_file=10)
    add_rounds(writer, 0, 7, clients=2)
    assert parts(tmp_path, "clients") == [10]  # ten waiting rows fill a file, four still wait
    first = next(tmp_path.glob("clients/*/*/part-00000.parquet"))
    inode = first.stat().st_ino
    add_rounds(writer, 7, 18, clients=2)
    writer.close()
    assert parts(tmp_path, "clients") == [10, 10, 10, 6]
    assert first.stat().st_ino == inode
    assert read_table(tmp_path, "clients")["round"].tolist() == [i // 2 for i in range(36)]


def test_a_long_run_leaves_few_files(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=0.05)
    add_rounds(writer, 0, 50, clients=100)
    writer.close()
    assert parts(tmp_path, "clients") == [5000]
    assert parts(tmp_path, "rounds") == [50]


@pytest.mark.parametrize("flushed", [False, True])
def test_special_floats_survive(tmp_path: Path, flushed: bool) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=NEVER)
    for value in (math.inf, -math.inf, math.nan, 0.1, 5e-324, -0.0):
        writer.add("evaluations", metric="x", value=value)
    position = writer.commit()
    if flushed:
        writer.flush()
    RunWriter.resume(tmp_path, "demo", "r1", position).close()
    (path,) = tmp_path.glob("evaluations/*/*/*.parquet")
    values = pq.ParquetFile(path).read()["value"].to_pylist()
    assert values[:2] == [math.inf, -math.inf]
    assert math.isnan(values[2])  # a NaN, not a null
    assert values[3:5] == [0.1, 5e-324]
    assert math.copysign(1.0, values[5]) == -1.0


@pytest.mark.parametrize("rows_per_file", [4, 1000])
@pytest.mark.parametrize("flush_after", [None, 0, 3, 6, 9])
@pytest.mark.parametrize("back_to", [0, 1, 2, 5, 9])
def test_resuming_restores_exactly_the_position(
    tmp_path: Path, rows_per_file: int, flush_after: int | None, back_to: int
) -> None:
    """A run of 9 rounds, flushed after some of them, goes back to the commit of an earlier one and on to 12."""
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=NEVER, rows_per_file=rows_per_file)
    positions = [writer.commit()]
    for number in range(9):
        if flush_after == number:
            writer.flush()
        positions.append(add_rounds(writer, number, number + 1))
    if flush_after == 9:
        writer.flush()
    writer.add("rounds", round=99)  # never committed

    resumed = RunWriter.resume(
        tmp_path, "demo", "r1", positions[back_to], flush_interval_s=NEVER, rows_per_file=rows_per_file
    )
    assert resumed.position == positions[back_to]
    assert rounds(tmp_path) == list(range(back_to))
    assert not list(tmp_path.rglob("journal-*"))
    add_rounds(resumed, back_to, 12)
    resumed.close()
    assert rounds(tmp_path) == list(range(12))
    clients = read_table(tmp_path, "clients")
    assert list(zip(clients["round"], clients["client_id"], strict=True)) == [
        (r, c) for r in range(12) for c in (0, 1, 2)
    ]


@pytest.mark.parametrize("back_to", [1, 8])
@pytest.mark.parametrize("step", range(12))
def test_a_restoration_stopped_at_any_step_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, back_to: int
) -> None:
    """Rounds 0 to 5 are in Parquet, 6 to 8 in the journal; the n-th renaming or deletion stops the process."""
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=NEVER, rows_per_file=4)
    writer._rows_per_file = 1000  # no flush by itself
    positions = [add_rounds(writer, number, number + 1, clients=1) for number in range(6)]
    writer.flush()
    positions += [add_rounds(writer, number, number + 1, clients=1) for number in range(6, 9)]
    calls: list[object] = []

    def stopping(function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object, **kwargs: object) -> None:
            calls.append(args)
            if len(calls) == step + 1:
                raise KeyboardInterrupt
            function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stopping(os.replace))
        patch.setattr(Path, "unlink", stopping(Path.unlink))
        with contextlib.suppress(KeyboardInterrupt):
            RunWriter.resume(tmp_path, "demo", "r1", positions[back_to], rows_per_file=4)
    assert len(calls) > min(step, 4)
    RunWriter.resume(tmp_path, "demo", "r1", positions[back_to], rows_per_file=4)
    assert rounds(tmp_path) == list(range(back_to + 1))
    assert read_table(tmp_path, "clients")["round"].tolist() == list(range(back_to + 1))


def test_resuming_ignores_a_torn_line_and_removes_temporary_files(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=NEVER)
    position = add_rounds(writer, 0, 3)
    (journal,) = tmp_path.rglob("journal-*.jsonl")
    with open(journal, "ab") as file:
        file.write(b'["rounds",3,{"stage":"tra')
    leftover = tmp_path / "rounds" / "experiment=demo" / "run_id=r1" / ".part-00000.parquet.tmp"
    leftover.write_bytes(b"half")
    assert len(pd.read_parquet(tmp_path / "rounds")) == 0
    RunWriter.resume(tmp_path, "demo", "r1", position)
    assert rounds(tmp_path) == [0, 1, 2]
    assert not leftover.exists()


def test_resuming_without_a_needed_row_changes_nothing(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=NEVER)
    add_rounds(writer, 0, 2)
    writer.flush()
    position = add_rounds(writer, 2, 5)
    (journal,) = tmp_path.rglob("journal-*.jsonl")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(line for line in lines if b'["rounds",3,' not in line))
    for _ in range(2):
        with pytest.raises(ValueError, match="lacks row 3 of table 'rounds', which its checkpoint counts"):
            RunWriter.resume(tmp_path, "demo", "r1", position)
        assert rounds(tmp_path) == [0, 1]
        assert journal.exists()
    with pytest.raises(ValueError, match="counts rows of table 'nothing'"):
        RunWriter.resume(tmp_path, "demo", "r1", {"nothing": 0})
    with pytest.raises(ValueError, match="no run 'r2' of experiment 'demo'"):
        RunWriter.resume(tmp_path, "demo", "r2", position)


def test_resuming_refuses_damaged_and_missing_files(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1", rows_per_file=2)
    position = add_rounds(writer, 0, 5)
    writer.close()
    first, second, third = sorted(tmp_path.glob("rounds/*/*/*.parquet"))
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(ValueError, match=r"part-00001.parquet is missing"):
        RunWriter.resume(tmp_path, "demo", "r1", position)
    second.write_bytes(content[:50])
    with pytest.raises(ValueError, match=r"part-00001.parquet is not a readable Parquet file"):
        RunWriter.resume(tmp_path, "demo", "r1", position)
    newer = pq.read_table(second.with_name(first.name), partitioning=None)
    pq.write_table(newer.replace_schema_metadata({b"fedloom_schema_version": b"99"}), second)
    with pytest.raises(ValueError, match=r"part-00001.parquet was written by a newer version"):
        RunWriter.resume(tmp_path, "demo", "r1", position)
    assert third.exists()


def test_a_run_continues_after_its_results_were_moved(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "old", "demo", "r1", flush_interval_s=NEVER)
    add_rounds(writer, 0, 2)
    writer.flush()
    position = add_rounds(writer, 2, 4)
    shutil.move(tmp_path / "old", tmp_path / "new")
    resumed = RunWriter.resume(tmp_path / "new", "demo", "r1", position)
    add_rounds(resumed, 4, 6)
    resumed.close()
    assert rounds(tmp_path / "new") == [0, 1, 2, 3, 4, 5]
    assert not (tmp_path / "old").exists()


def test_the_row_of_the_run_is_updated_in_place(tmp_path: Path) -> None:
    started = datetime(2026, 1, 2, 3, 4, 5, 600, tzinfo=UTC)
    writer = RunWriter.create(tmp_path, "demo", "r1")
    writer.update_run(method="fedoras", status="running", started=started, error="none yet")
    resumed = RunWriter.resume(tmp_path, "demo", "r1", {})
    resumed.update_run(status="done", error=None)
    frame = read_table(tmp_path, "runs")
    assert len(frame) == 1
    row = frame.iloc[0]
    assert (row["run_id"], row["method"], row["status"]) == ("r1", "fedoras", "done")
    assert row["started"] == pd.Timestamp(started)
    assert pd.isna(row["error"])
    with pytest.raises(ValueError, match="no column 'statu'; the nearest is 'status'"):
        resumed.update_run(statu="done")
    with pytest.raises(ValueError, match="use update_run"):
        resumed.add("runs", status="done")


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


def test_a_full_disk_during_a_commit_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=NEVER)
    add_rounds(writer, 0, 2)
    write = os.write

    def half(descriptor: int, content: bytes) -> int:
        if len(content) < 100:
            raise OSError(28, "No space left on device")
        return write(descriptor, content[: len(content) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space left"):
            add_rounds(writer, 2, 3)
    position = writer.commit()
    assert position["rounds"] == 3
    RunWriter.resume(tmp_path, "demo", "r1", position)
    assert rounds(tmp_path) == [0, 1, 2]
    assert len(read_table(tmp_path, "clients")) == 9


@pytest.mark.parametrize("succeeding", range(6))
def test_a_failed_flush_is_repeated_without_duplicates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, succeeding: int
) -> None:
    """The disk is full after some of the files of a flush (1 of rounds, 5 of clients)."""
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=NEVER, rows_per_file=20)
    for number in range(10):
        writer.add("rounds", round=number)
        for client in range(9):
            writer.add("clients", round=number, client_id=client)
    replace, calls = os.replace, []

    def full(source: str, target: str) -> None:
        if len(calls) == succeeding:
            raise OSError(28, "No space left on device")
        calls.append(target)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            writer.commit()  # 90 waiting rows fill a file: flushes
    writer.close()
    assert rounds(tmp_path) == list(range(10))
    assert parts(tmp_path, "clients") == [20, 20, 20, 20, 10]
    clients = read_table(tmp_path, "clients")
    assert [9 * r + c for r, c in zip(clients["round"], clients["client_id"], strict=True)] == list(range(90))


def test_readers_see_a_prefix_at_any_time(tmp_path: Path) -> None:
    """A reader beside the writer finds rounds 0..n without gap, duplicate or half a file, and n never falls."""
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=0.0, rows_per_file=40)
    done = threading.Event()

    def read_all_the_time() -> list[int]:
        seen = []
        while not done.is_set():
            numbers = sorted(pd.read_parquet(tmp_path / "rounds")["round"])
            assert numbers == list(range(len(numbers)))
            seen.append(len(numbers))
        return seen

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read_all_the_time)
        add_rounds(writer, 0, 100, clients=1)
        done.set()
    seen = reader.result()
    assert seen == sorted(seen)
    assert len(set(seen)) > 3


def test_committing_a_round_of_clients_is_quick(tmp_path: Path) -> None:
    """100 rows of clients with all columns in under 1.5 ms, the disk's own time aside."""
    row = {
        "stage": "train",
        "round": 3,
        "client_id": 17,
        "tier": "t1",
        "architecture": "3-1-8-0-3-4",
        "samples": 500,
        "steps": 20,
        "macs": 123456789,
        "parameters": 1234,
        "bytes_down": 12345,
        "bytes_up": 2333,
        "loss": 0.1234,
        "metric": 0.5,
        "wall_s": 1.2345,
        "overhead_s": 0.00123,
        "simulated_s": 33.2,
        "peak_memory_bytes": 123456,
        "status": "ok",
        "selection_reason": "uniform",
        "selection_probability": 0.1,
        "device": "cpu",
        "attempts": 1,
    }
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=NEVER)
    durations = []
    for _ in range(60):
        started = time.perf_counter()
        for _ in range(100):
            writer.add("clients", **row)
        writer.commit()
        durations.append(time.perf_counter() - started)
    assert min(durations) < 1.5e-3
