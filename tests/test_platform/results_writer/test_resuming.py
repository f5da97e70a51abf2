"""A run is resumed at exactly the position of its checkpoint, or not at all."""

import contextlib
import itertools
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from fedloom.platform.results.tables import read_table
from fedloom.platform.results.writer import RunWriter

NEVER = 1e9
AddRounds = Callable[..., dict[str, int]]
Rounds = Callable[[Path], list[int]]


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
@pytest.mark.parametrize("flush_after", [None, 3, 9])
@pytest.mark.parametrize("back_to", [0, 2, 5, 9])
def test_resuming_restores_exactly_the_position(
    tmp_path: Path, rows_per_file: int, flush_after: int | None, back_to: int, add_rounds: AddRounds, rounds: Rounds
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
    assert resumed.position == {**positions[back_to], "journal": None}
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, back_to: int, add_rounds: AddRounds, rounds: Rounds
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


def test_resuming_ignores_a_torn_line_and_removes_temporary_files(
    tmp_path: Path, add_rounds: AddRounds, rounds: Rounds
) -> None:
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


def test_resuming_without_a_needed_row_changes_nothing(tmp_path: Path, add_rounds: AddRounds, rounds: Rounds) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=NEVER)
    add_rounds(writer, 0, 2)
    writer.flush()
    position = add_rounds(writer, 2, 5)
    (journal,) = tmp_path.rglob("journal-*.jsonl")
    whole = journal.read_bytes()
    journal.write_bytes(b"".join(itertools.takewhile(lambda line: b'["rounds",3,' not in line, whole.splitlines(True))))
    for _ in range(2):
        with pytest.raises(ValueError, match="is damaged"):
            RunWriter.resume(tmp_path, "demo", "r1", position)
        assert rounds(tmp_path) == [0, 1]
        assert journal.exists()
    journal.unlink()
    with pytest.raises(ValueError, match="lacks row 2 of table 'rounds', which its checkpoint counts"):
        RunWriter.resume(tmp_path, "demo", "r1", position)
    with pytest.raises(ValueError, match="counts rows of table 'nothing'"):
        RunWriter.resume(tmp_path, "demo", "r1", {"nothing": 0})
    with pytest.raises(ValueError, match="no run 'r2' of experiment 'demo'"):
        RunWriter.resume(tmp_path, "demo", "r2", position)


def test_resuming_refuses_damaged_and_missing_files(tmp_path: Path, add_rounds: AddRounds) -> None:
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


def test_a_run_continues_after_its_results_were_moved(tmp_path: Path, add_rounds: AddRounds, rounds: Rounds) -> None:
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


def test_a_second_file_of_the_runs_row_is_refused_and_left_as_it_is(tmp_path: Path, add_rounds: AddRounds) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1", flush_interval_s=NEVER)
    position = add_rounds(writer, 0, 2)
    writer.close()
    (row,) = tmp_path.glob("runs/*/*/*.parquet")
    shutil.copyfile(row, row.with_name("part-00001.parquet"))
    with pytest.raises(ValueError, match=r"run_id=r1 holds 2 files, of which fedloom wrote the first: delete"):
        RunWriter.resume(tmp_path, "demo", "r1", position)
    assert len(list(row.parent.iterdir())) == 2
