"""The journal of a run: committed rows that are not yet in Parquet, on disk after each commit."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zlib import crc32

from fedloom.platform.results.files import sync_folder

JournalledRows = dict[str, dict[int, dict[str, Any]]]
"""For each table, its rows by their running index."""


class Journal:
    """Appends lines to the run's current journal file; the first commit after a rotation starts a new one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._descriptor: int | None = None
        self._length_bytes = 0

    def append(self, lines: Iterable[str]) -> None:
        """Appends the lines and waits until they are on disk; after an OSError none of them is stored."""
        content = "".join(lines).encode()
        descriptor = self._open()
        try:
            _write_all(descriptor, content)
            os.fsync(descriptor)
        except OSError:
            # After a full disk the file may end in the middle of a line.
            os.ftruncate(descriptor, self._length_bytes)
            raise
        self._length_bytes += len(content)

    def rotate(self) -> None:
        """Deletes the current file; to be called when all its rows are stored elsewhere."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._path().unlink()
            self._descriptor = None

    def _open(self) -> int:
        if self._descriptor is None:
            self._number += 1
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC
            self._descriptor = os.open(self._path(), flags, 0o644)
            self._length_bytes = 0
            sync_folder(self._folder)
        return self._descriptor

    def _path(self) -> Path:
        return self._folder / f"journal-{self._number:06d}.jsonl"


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def journal_line(table: str, index: int, row_json: str) -> str:
    """A row's line in the journal, with a checksum."""
    content = f'"{table}",{index},{row_json}'
    return f"[{content},{crc32(content.encode())}]\n"


def journal_files(folder: Path) -> list[Path]:
    """The journal files of a run, oldest first."""
    return sorted(folder.glob("journal-*.jsonl"))


def read_journals(folder: Path) -> JournalledRows:
    """All rows in the run's journal files.

    Reading a file stops at its first incomplete line, left by a killed writer: nothing from there on was committed; and
    at a damaged one. The caller checks by the indices that all needed rows exist.
    """
    rows: JournalledRows = {}
    for path in journal_files(folder):
        for line in path.read_bytes().split(b"\n")[:-1]:
            try:
                table, index, row, checksum = json.loads(line)
            except ValueError:
                break
            if crc32(line[1 : line.rindex(b",")]) != checksum:
                break
            rows.setdefault(table, {})[index] = row
    return rows
