"""Rows that are committed and flushed: how often the disk is asked for it, into which files, and what readers see."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest

from fedloom.platform.results.tables import read_table
from fedloom.platform.results.writer import ROW_TABLES, RunWriter

NEVER = 1e9
AddRounds = Callable[..., dict[str, int]]
Rounds = Callable[[Path], list[int]]
RowsOfParts = Callable[[Path, str], list[int]]


def test_committed_rows_reach_parquet_in_order(tmp_path: Path, add_rounds: AddRounds, rounds: Rounds) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=NEVER)
    assert writer.commit() == dict.fromkeys(ROW_TABLES, 0) | {"journal": None}
    position = add_rounds(writer, 0, 4)
    assert {table: position[table] for table in ROW_TABLES if position[table]} == {"rounds": 4, "clients": 12}
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


def test_a_commit_is_one_write_and_one_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, add_rounds: AddRounds
) -> None:
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


def test_rows_become_visible_when_the_interval_has_passed(
    tmp_path: Path, add_rounds: AddRounds, rounds: Rounds
) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=0.0)
    add_rounds(writer, 0, 1)
    assert rounds(tmp_path) == [0]
    add_rounds(writer, 1, 2)
    assert rounds(tmp_path) == [0, 1]
    assert not list(tmp_path.rglob("journal-*"))


def test_a_full_file_is_left_alone_and_a_new_one_begins(
    tmp_path: Path, add_rounds: AddRounds, rows_of_parts: RowsOfParts
) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=NEVER, rows_per_file=10)
    add_rounds(writer, 0, 7, clients=2)
    assert rows_of_parts(tmp_path, "clients") == [10]  # ten waiting rows fill a file, four still wait
    first = next(tmp_path.glob("clients/*/*/part-00000.parquet"))
    inode = first.stat().st_ino
    add_rounds(writer, 7, 18, clients=2)
    writer.close()
    assert rows_of_parts(tmp_path, "clients") == [10, 10, 10, 6]
    assert first.stat().st_ino == inode
    assert read_table(tmp_path, "clients")["round"].tolist() == [i // 2 for i in range(36)]


def test_a_long_run_leaves_few_files(tmp_path: Path, add_rounds: AddRounds, rows_of_parts: RowsOfParts) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=0.05)
    add_rounds(writer, 0, 50, clients=100)
    writer.close()
    assert rows_of_parts(tmp_path, "clients") == [5000]
    assert rows_of_parts(tmp_path, "rounds") == [50]


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


def test_readers_see_a_prefix_at_any_time(tmp_path: Path, add_rounds: AddRounds) -> None:
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
