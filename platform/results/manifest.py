"""The manifest of a run: sizes and hashes of its files, so that a change that fedloom did not make is noticed.

It lists the files of tables, the configuration, the costs, the copies of plug-ins and input files, and the models'
cards. What changes with every round is covered by hashes of its own: the checkpoint's state carries its hash and those
of its tensors and the journal, and a card carries the hash of its model. Logs, the status and TensorBoard's files are
not listed, because no result depends on them.

Before a file is replaced, its old and new content are listed, so that after a crash it matches one of them. Rows are
read from all files of a table's folder, and models from all cards, so that an unlisted file there is a problem, too.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from fedloom.platform.results.files import (
    ADVICE,
    as_stored,
    content_hash,
    from_hashed_json,
    hashed_json,
    irregular,
    is_hashed,
    is_irregular,
    opened,
    read_file,
    within,
    write_atomically,
)
from fedloom.platform.results.paths import STATE_FILE, RunPaths
from fedloom.platform.results.tables import count_rows, stored_parts
from fedloom.platform.words import said

FILE = "manifest.json"
_TRIES = 20
_TRY_AGAIN_S = 0.05


class Digest(NamedTuple):
    """Size and hash of a file's content."""

    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> Self:
        """The digest of this content."""
        return cls(len(content), content_hash(content))

    def __str__(self) -> str:
        return f"{self.size_bytes} bytes, SHA-256 {self.sha256[:12]}"


ANY = Digest(-1, "")
"""Stands for any content."""

Digests = tuple[Digest | None, ...]
"""The contents that a file may have; None: it may be missing."""

Replacing = Callable[[Path, Digest], AbstractContextManager[None]]
"""A context manager: within its block, the caller replaces the file by content of this digest."""


def digest_of(path: Path) -> Digest:
    """The digest of a file."""
    with os.fdopen(opened(path), "rb") as file:
        return Digest(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def manifest_path(paths: RunPaths) -> Path:
    """The place of a run's manifest."""
    return as_stored(paths.artifacts / FILE)


def encoded(files: Mapping[str, Digests]) -> bytes:
    """The content of a manifest."""
    return hashed_json({"version": 1, "files": {name: list(digests) for name, digests in sorted(files.items())}})


def decoded(content: bytes, path: Path) -> dict[str, Digests]:
    """The digests in a manifest by file name, after checking that the names do not lead out of the results.

    Raises ValueError naming `path` for one that is damaged, or newer than this version.
    """
    values = from_hashed_json(content, path)
    if values.get("version") != 1:
        raise ValueError(f"{path} was written by a newer version of fedloom: use that version")
    files: dict[str, Digests] = {}
    try:
        for name, digests in values["files"].items():
            within(path.parent, name)
            files[name] = tuple(None if digest is None else Digest(*digest) for digest in digests)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not the manifest of a run ({said(error)}): {ADVICE}") from error
    return files


def either(one: Mapping[str, Digests], other: Mapping[str, Digests]) -> dict[str, Digests]:
    """A manifest that fits the files of either, and every mixture of them."""
    missing: Digests = (None,)
    return {n: tuple(dict.fromkeys((*one.get(n, missing), *other.get(n, missing)))) for n in {**one, **other}}


class Manifest:
    """The manifest of a run as its only writer keeps it."""

    def __init__(self, paths: RunPaths, files: Mapping[str, Digests] | None = None) -> None:
        """Writes nothing before `begin`, unless `files` of a run that has begun are given."""
        self._paths, self._begun = paths, files is not None
        self._files: dict[str, Digests] = dict(files or {})

    @classmethod
    def of_run(cls, paths: RunPaths) -> "Manifest":
        """The manifest of a run to resume; for a run that an earlier version wrote without one, lists all its files."""
        path = manifest_path(paths)
        if path.exists():
            return cls(paths, decoded(read_file(path), path))
        manifest = cls(paths, {})
        manifest.add(listed_files(paths))
        return manifest

    def add(self, files: Iterable[Path]) -> None:
        """Lists files that are not replaced any more, with their digests."""
        self._files |= {self._name(path): (digest_of(path),) for path in files}
        self._write()

    def begin(self) -> None:
        """Lists the files of a new run with their digests, and writes its manifest."""
        self._begun = True
        self.add(listed_files(self._paths))

    def require(self, path: Path) -> None:
        """Lists a file that must exist, with any content, because it carries its own hash."""
        if self._files.get(self._name(path)) != (ANY,):
            self._files[self._name(path)] = (ANY,)
            self._write()

    def settle(self) -> None:
        """Writes the manifest without the earlier contents of replaced files."""
        self._write()

    @contextmanager
    def replacing(self, path: Path, new: Digest) -> Iterator[None]:
        """Lists the old and the new content while the caller replaces the file, within the block."""
        name = self._name(path)
        self._files[name] = (*self._files.get(name, (None,)), new)
        self._write()
        yield
        self._files[name] = (new,)

    @contextmanager
    def deleting(self, path: Path) -> Iterator[None]:
        """Lists the file as possibly missing while the caller deletes it, within the block."""
        name = self._name(path)
        self._files[name] = (*self._files.get(name, ()), None)
        self._write()
        yield
        self._files.pop(name, None)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._paths.root).as_posix()

    def _write(self) -> None:
        if self._begun:
            write_atomically(self._paths.artifacts / FILE, encoded(self._files))


def listed_files(paths: RunPaths) -> list[Path]:
    """The files of a run that its manifest lists."""
    patterns = ("costs.json", "plugins*/**/*", "inputs/*", "models/*.json")
    files = [paths.config, *(path for pattern in patterns for path in paths.artifacts.glob(pattern))]
    files += [part for folder in paths.tables() for part in folder.glob("part-*.parquet")]
    return sorted(path for path in files if path.is_file() and not path.name.startswith("."))


# -- checks ------------------------------------------------------------------------------------------------------------


def problems(paths: RunPaths) -> list[str]:
    """The files that do not match a run's manifest, and what to do: a line per file.

    Empty for a run without a manifest, if an earlier version wrote it or it ended before its first checkpoint.
    """
    if irregular_paths := _irregular_paths(paths):
        return [irregular(path) for path in irregular_paths]
    path = manifest_path(paths)
    last: tuple[bytes, list[str]] | None = None
    for _ in range(_TRIES):
        try:
            content = read_file(path)
        except FileNotFoundError:
            return [f"{path} is missing: {ADVICE}"] if has_hashed_checkpoint(paths) else []
        listed = decoded(content, path)
        mismatches = (_mismatch(paths.root / name, digests) for name, digests in sorted(listed.items()))
        lines = [f"{line}: {ADVICE}" for line in mismatches if line]
        # A part that was copied there, for example by a program that synchronises folders, would double rows.
        parts = sorted(part for folder in paths.tables() for part in folder.rglob("*.parquet"))
        readable = {part: "rows" for part in parts if not part.name.startswith((".", "_"))}
        readable |= dict.fromkeys(sorted(paths.models.glob("*.json")), "a model")
        lines += [
            f"{file} was not written by its run, and would be read as {what} of it: move it out of the results"
            for file, what in readable.items()
            if file.relative_to(paths.root).as_posix() not in listed
        ]
        # If the run is at work, a file may have been replaced since the manifest was read.
        if not lines or last == (content, lines):
            return lines
        last = (content, lines)
        time.sleep(_TRY_AGAIN_S)
    return last[1] if last else []


def check_files(paths: RunPaths) -> None:
    """Raises ValueError, in one line, for the first file of a run that does not match its manifest."""
    lines = problems(paths)
    if lines:
        more = f" (and {len(lines) - 1} more: fedloom verify {paths.run_id})" if len(lines) > 1 else ""
        raise ValueError(f"{lines[0]}{more}")


def lost_records(paths: RunPaths) -> list[str]:
    """A line, if a run has rounds and neither a manifest nor a checkpoint: a resume would drop all its rows."""
    records = manifest_path(paths), as_stored(paths.checkpoint / STATE_FILE)
    if any(path.exists() for path in records) or not any(map(count_rows, stored_parts(paths.table("rounds")))):
        return []
    return [
        f"{paths.table('rounds')} has rows, but {records[0]} and {records[1]} are missing: "
        "restore both from a copy, or start a new run"
    ]


def check_regular(paths: RunPaths) -> None:
    """Raises ValueError, in one line, for a link, a pipe or a device in a run's folders."""
    for path in _irregular_paths(paths):
        raise ValueError(irregular(path))


def has_hashed_checkpoint(paths: RunPaths) -> bool:
    """Whether a run has a checkpoint with a hash of its own: all versions that write these write manifests, too."""
    return is_hashed(as_stored(paths.checkpoint / STATE_FILE))


def _irregular_paths(paths: RunPaths) -> list[Path]:
    """What in a run's folders, and which of the folders, is neither a folder nor a regular file.

    Reading such a path could block for ever, and writing through it would change files outside the results.
    """
    tops = (paths.artifacts, *paths.tables())
    above = {folder for top in tops for folder in (top, *top.parents) if folder.is_relative_to(paths.root)}
    irregular_paths = sorted(folder for folder in above - {paths.root} if is_irregular(folder))
    for top in tops:
        for parent, folders, names in os.walk(top):
            paths_there = (Path(parent, name) for name in sorted((*folders, *names)))
            irregular_paths += [path for path in paths_there if is_irregular(path)]
    return irregular_paths


def _mismatch(path: Path, digests: Digests) -> str:
    """How a file differs from the contents that it may have; empty if it matches one."""
    try:
        stored: Digest | None = digest_of(as_stored(path) if ANY in digests else path)
    except FileNotFoundError:
        stored = None
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    except ValueError as error:
        return str(error)
    if stored in digests or (stored is not None and ANY in digests):
        return ""
    expected = " or ".join("its content" if digest == ANY else str(digest) for digest in digests if digest is not None)
    return f"{path} is not what its run wrote: expected {expected}, found {stored or 'no file'}"
