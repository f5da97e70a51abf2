"""The journal of a run: committed rows that are not yet in Parquet, on disk after each commit.

A file's first line names its run, and every line carries a hash of all lines up to it: lines that were exchanged, taken
out, repeated or put in another order are noticed.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

from fedloom.platform.results.fence import Fence, number_of, plain
from fedloom.platform.results.files import MOST_BYTES, content_hash, from_json, read_file, sync_folder
from fedloom.platform.results.sealed import ADVICE
from fedloom.platform.words import shown

JournalledRows = dict[str, dict[int, dict[str, Any]]]
"""For each table, its rows by their running index."""

HEAD = "journal"
"""Stands in a file's first line where the others have a table."""
_LINK_LENGTH = 16


class Journal:
    """Appends lines to the run's current journal file; the first commit after a rotation starts a new one."""

    def __init__(self, folder: Path, run_id: str, fence: Fence | None = None) -> None:
        self._folder, self._run_id, self._fence = folder, run_id, fence or Fence()
        self._number = 0
        self._descriptor: int | None = None
        self._length_bytes, self._link = 0, ""

    def append(self, rows: Iterable[tuple[str, int, str]]) -> None:
        """Appends rows, each with its table, its index and its JSON; waits until they are on disk.

        After an OSError none of them is stored.
        """
        descriptor = self._open()
        entries = [(HEAD, self._number, json.dumps({"run_id": self._run_id}))] if not self._length_bytes else []
        link, lines = self._link, []
        for table, index, row_json in (*entries, *rows):
            line = f'"{table}",{index},{row_json}'.encode()
            link = _link(link, line)
            lines.append(_line(line, link))
        content = b"".join(lines)
        try:
            _write_all(descriptor, content)
            os.fsync(descriptor)
        except OSError:
            # After a full disk the file may end in the middle of a line.
            os.ftruncate(descriptor, self._length_bytes)
            raise
        self._length_bytes += len(content)
        self._link = link

    def rotate(self) -> None:
        """Deletes the current file; to be called when all its rows are stored elsewhere."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)
            self._fence.remove(self._path())

    def _open(self) -> int:
        if self._descriptor is None:
            self._number += 1
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC
            self._descriptor = os.open(self._path(), flags, 0o644)
            self._length_bytes, self._link = 0, ""
            sync_folder(self._folder)
        return self._descriptor

    def _path(self) -> Path:
        return self._fence.named(self._folder / _name(self._number))


def _name(number: int) -> str:
    return f"journal-{number:06d}.jsonl"


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _line(content: bytes, link: str) -> bytes:
    """A line's content with its link, and the checksum of both, by which a line that was cut short is told."""
    linked = b'%s,"%s"' % (content, link.encode())
    return b"[%s,%d]\n" % (linked, crc32(linked))


def _link(before: str, content: bytes) -> str:
    """What tells a line from every other with the same content: a hash of all lines up to it."""
    return content_hash(before.encode() + content)[:_LINK_LENGTH]


def journal_files(folder: Path) -> list[Path]:
    """The journal files of a run, oldest first."""
    return sorted(folder.glob("journal-*.jsonl"))


def read_journals(folder: Path, run_id: str, owner: int = 0) -> JournalledRows:
    """All rows in the journal files of the run's owner with this number, that of its checkpoint.

    Reading a file stops at its first incomplete or damaged line, left by a killed writer: nothing from there on was
    committed. The caller checks by the indices that all needed rows exist. Raises ValueError for a journal of another
    run, and for whole lines that are not in the order in which they were written.
    """
    rows: JournalledRows = {}
    for path in journal_files(folder):
        if number_of(path.name) != owner:  # replaced before it could save a checkpoint, or after another one has
            continue
        for table, index, row in _rows(path, run_id):
            rows.setdefault(table, {})[index] = row
    return rows


def _rows(path: Path, run_id: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    link: str | None = None
    for number, line in enumerate(read_file(path, MOST_BYTES).split(b"\n")[:-1], 1):
        try:
            *values, checksum = from_json(line, path)
            content = line[1 : line.rindex(b",")]
        except (ValueError, TypeError):
            return
        if crc32(content) != checksum or len(values) not in (3, 4):
            return
        table, index, row, *links = values
        if not (isinstance(table, str) and type(index) is int and isinstance(row, dict)):
            raise ValueError(f"{path}: line {number} is no row: {ADVICE}")
        if links:
            if number == 1:
                _check_head(path, run_id, table, index, row)
                link = ""
            if link is not None:
                link = _link(link, content[: content.rindex(b',"')])
        if link != (links[0] if links else None):
            raise ValueError(f"{path}: line {number} does not follow the line before it: {ADVICE}")
        if table != HEAD:  # earlier versions wrote neither a head nor links
            yield table, index, row


def _check_head(path: Path, run_id: str, table: str, number: int, head: Mapping[str, Any]) -> None:
    if table != HEAD or type(number) is not int or not isinstance(head, dict):
        raise ValueError(f"{path} lacks its first line: {ADVICE}")
    named = head.get("run_id")
    if (named, _name(number)) != (run_id, plain(path.name)):
        raise ValueError(f"{path} is {shown(_name(number))} of run {shown(named)}: {ADVICE}")
