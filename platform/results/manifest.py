"""The manifest of a run: sizes and hashes of its files, so that a change that fedloom did not make is noticed.

It holds the files of tables, the configuration, the costs, the copies of plug-ins and input files, and the models'
cards. What changes with every round carries its own hash: the checkpoint's state, which holds those of its tensors, and
the journal's lines; a card holds the hash of its model. Logs, the status and TensorBoard's files belong to no result.

A file that is replaced is listed with its old and its new content before, so that after a crash one of them is there.
Rows are read from all files of a table's folder, so that a file there which is not listed is a problem, too.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from fedloom.platform.results.files import (
    ADVICE,
    as_stored,
    content_hash,
    irregular,
    is_sealed,
    opened,
    read_file,
    sealed_json,
    unsealed,
    within,
    write_atomically,
)
from fedloom.platform.results.paths import STATE_FILE, RunPaths, leading_elsewhere
from fedloom.platform.words import said

FILE = "manifest.json"
_TRIES = 20
_TRY_AGAIN_S = 0.05


class Seal(NamedTuple):
    """What identifies a file's content."""

    size_bytes: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.size_bytes} bytes, SHA-256 {self.sha256[:12]}"


ANY = Seal(-1, "")
"""Stands for any content."""

Seals = tuple[Seal | None, ...]
"""The contents that a file may have; None: it may be missing."""

Replacing = Callable[[Path, Seal], AbstractContextManager[None]]
"""Within the block the file is replaced by this content."""


def seal_of(path: Path) -> Seal:
    """The seal of a file."""
    with os.fdopen(opened(path), "rb") as file:
        return Seal(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def seal_of_bytes(content: bytes) -> Seal:
    """The seal of a content."""
    return Seal(len(content), content_hash(content))


def manifest_path(paths: RunPaths) -> Path:
    """The place of a run's manifest."""
    return as_stored(paths.artifacts / FILE)


def encoded(files: Mapping[str, Seals]) -> bytes:
    """The content of a manifest."""
    return sealed_json({"version": 1, "files": {name: list(seals) for name, seals in sorted(files.items())}})


def decoded(content: bytes, path: Path) -> dict[str, Seals]:
    """The files of a manifest; ValueError naming `path` for one that is damaged, or newer than this version.

    All of them lie in the results.
    """
    values = unsealed(content, path)
    if values.get("version") != 1:
        raise ValueError(f"{path} was written by a newer version of fedloom: use that version")
    try:
        files = {n: tuple(None if s is None else Seal(*s) for s in seals) for n, seals in values["files"].items()}
        for name in files:
            within(path.parent, name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not the manifest of a run ({said(error)}): {ADVICE}") from error
    return files


def either(one: Mapping[str, Seals], other: Mapping[str, Seals]) -> dict[str, Seals]:
    """A manifest that fits the files of either, and every mixture of them."""
    missing: Seals = (None,)
    return {n: tuple(dict.fromkeys((*one.get(n, missing), *other.get(n, missing)))) for n in {**one, **other}}


class Manifest:
    """The manifest of a run as its only writer keeps it."""

    def __init__(self, paths: RunPaths, files: Mapping[str, Seals] | None = None) -> None:
        """Nothing is written before `begin`, unless `files` are those of a run that has begun."""
        self._paths, self._begun = paths, files is not None
        self._files: dict[str, Seals] = dict(files or {})

    @classmethod
    def of_run(cls, paths: RunPaths) -> "Manifest":
        """The manifest of a run to go on with; of one that an earlier version wrote, all of its files are sealed."""
        path = manifest_path(paths)
        if path.exists():
            return cls(paths, decoded(read_file(path), path))
        manifest = cls(paths, {})
        manifest.add(sealed_files(paths))
        return manifest

    def add(self, files: Iterable[Path]) -> None:
        """Seals files that are not replaced any more."""
        self._files |= {self._name(path): (seal_of(path),) for path in files}
        self._write()

    def begin(self) -> None:
        """Seals the files of a new run, and writes its manifest."""
        self._begun = True
        self.add(sealed_files(self._paths))

    def require(self, path: Path) -> None:
        """Lists a file that has to be there, and carries its own hash."""
        if self._files.get(self._name(path)) != (ANY,):
            self._files[self._name(path)] = (ANY,)
            self._write()

    def settle(self) -> None:
        """Forgets what replaced files held before."""
        self._write()

    @contextmanager
    def replacing(self, path: Path, new: Seal) -> Iterator[None]:
        """Within the block the file is replaced by a content of this seal."""
        name = self._name(path)
        self._files[name] = (*self._files.get(name, (None,)), new)
        self._write()
        yield
        self._files[name] = (new,)

    @contextmanager
    def deleting(self, path: Path) -> Iterator[None]:
        """Within the block the file is deleted."""
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


def sealed_files(paths: RunPaths) -> list[Path]:
    """The files of a run that its manifest lists."""
    own = [paths.config, *paths.artifacts.glob("costs.json"), *paths.artifacts.glob("plugins*/**/*")]
    own += paths.artifacts.glob("inputs/*")
    cards = paths.models.glob("*.json")
    parts = (part for folder in paths.tables() for part in folder.glob("part-*.parquet"))
    return sorted(path for path in (*own, *cards, *parts) if path.is_file() and not path.name.startswith("."))


def problems(paths: RunPaths) -> list[str]:
    """What does not match a run's manifest, and what to do: a line per file.

    Nothing for a run without a manifest, if an earlier version wrote it or it ended before its first checkpoint.
    """
    if elsewhere := leading_elsewhere(paths):
        return [irregular(path) for path in elsewhere]
    path = manifest_path(paths)
    last: tuple[bytes, list[str]] | None = None
    for _ in range(_TRIES):
        try:
            content = read_file(path)
        except FileNotFoundError:
            return [f"{path} is missing: {ADVICE}"] if has_sealed_checkpoint(paths) else []
        listed = decoded(content, path)
        found = [*_mismatches(paths, listed), *_unlisted(paths, listed)]
        # Of a run at work, a file may have been replaced since the manifest was read.
        if not found or (last is not None and last == (content, found)):
            return found
        last = (content, found)
        time.sleep(_TRY_AGAIN_S)
    return last[1] if last else []


def has_sealed_checkpoint(paths: RunPaths) -> bool:
    """Whether a run has a checkpoint with a hash of its own: all versions that write these write manifests, too."""
    return is_sealed(as_stored(paths.checkpoint / STATE_FILE))


def check_leads_nowhere(paths: RunPaths) -> None:
    """Raises ValueError, in one line, for a link, a pipe or a device in a run's folders."""
    for path in leading_elsewhere(paths):
        raise ValueError(irregular(path))


def check_files(paths: RunPaths) -> None:
    """Raises ValueError, in one line, for the first file of a run that does not match its manifest."""
    found = problems(paths)
    if found:
        more = f" (and {len(found) - 1} more: fedloom verify {paths.run_id})" if len(found) > 1 else ""
        raise ValueError(f"{found[0]}{more}")


def _mismatches(paths: RunPaths, files: Mapping[str, Seals]) -> list[str]:
    return [
        f"{line}: {ADVICE}" for name, seals in sorted(files.items()) if (line := _mismatch(paths.root / name, seals))
    ]


def _unlisted(paths: RunPaths, files: Mapping[str, Seals]) -> list[str]:
    """A part that was copied, or that a program which keeps folders alike put there, would double rows."""
    parts = sorted(part for folder in paths.tables() for part in folder.rglob("*.parquet"))
    return [
        f"{part} was not written by its run, and would be read as rows of it: move it out of the results"
        for part in parts
        if not part.name.startswith((".", "_")) and part.relative_to(paths.root).as_posix() not in files
    ]


def _mismatch(path: Path, seals: Sequence[Seal | None]) -> str:
    try:
        found: Seal | None = seal_of(as_stored(path) if ANY in seals else path)
    except FileNotFoundError:
        found = None
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    except ValueError as error:
        return str(error)
    if found in seals or (found is not None and ANY in seals):
        return ""
    expected = " or ".join("its content" if seal == ANY else str(seal) for seal in seals if seal is not None)
    return f"{path} is not what its run wrote: expected {expected}, found {found or 'no file'}"
