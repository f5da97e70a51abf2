"""A full disk loses no row and writes none twice."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.platform.results.tables import read_table
from fedloom.platform.results.writer import RunWriter

NEVER = 1e9
AddRounds = Callable[..., dict[str, int]]
Rounds = Callable[[Path], list[int]]
RowsOfParts = Callable[[Path, str], list[int]]


def test_a_full_disk_during_a_commit_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, add_rounds: AddRounds, rounds: Rounds
) -> None:
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, succeeding: int, rounds: Rounds, rows_of_parts: RowsOfParts
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
    assert rows_of_parts(tmp_path, "clients") == [20, 20, 20, 20, 10]
    clients = read_table(tmp_path, "clients")
    assert [9 * r + c for r, c in zip(clients["round"], clients["client_id"], strict=True)] == list(range(90))
