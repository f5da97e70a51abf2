"""Atomic file writes: readers, also after a crash, find either the old or the new content."""

import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import NamedTuple, Self

from fedloom.platform.words import naming, shown

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.+-]*|[0-9]+[A-Za-z_.+-][A-Za-z0-9_.+-]*")


def check_name(kind: str, name: str, longest: int = 100) -> str:
    """Returns the name if it is valid as part of a path and of a partition; ValueError otherwise.

    Names of digits only are invalid, because partition discovery would turn them into an integer column.
    """
    if not _NAME.fullmatch(name) or len(name) > longest:
        raise ValueError(
            f"{kind} {shown(name, repr)} cannot be a file name here: use 1 to {longest} letters, digits and any of "
            "_ . + -, starting with a letter or digit and not digits alone"
        )
    return name


def content_hash(content: bytes) -> str:
    """SHA-256 of the content, as 64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def temporary_path(path: Path) -> Path:
    """The temporary path for the next content of `path`; data set readers ignore names that begin with a dot."""
    return path.with_name(f".{path.name}.tmp")


def remove_temporaries(folder: Path) -> None:
    """Deletes the temporary files of killed writers in this folder."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Waits until the file's content is on the disk."""
    _sync(path, os.O_RDONLY)


def sync_folder(folder: Path) -> None:
    """Waits until the folder's entries (creations, renames, deletions) are on the disk."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, path: Path) -> None:
    """Replaces `path` durably by a finished temporary file that is already synced."""
    os.replace(temporary, path)
    sync_folder(path.parent)


def write_atomically(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replaces the file's content atomically.

    Without `durable` it does not wait for the disk: readers still see the old or the new content, but a power failure
    may restore an older one.
    """
    temporary = temporary_path(path)
    with naming(path), open(temporary, "wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        publish(temporary, path)
    else:
        os.replace(temporary, path)


class Stamp(NamedTuple):
    """Identifies the version of a file: a file that was replaced atomically has another inode."""

    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> Self:
        """The stamp of a file that is open, or was just looked at."""
        return cls(stat.st_ino, stat.st_size, stat.st_mtime_ns)


def stamp_of(path: Path) -> Stamp | None:
    """The stamp of a file; None if it is missing."""
    try:
        return Stamp.of(path.stat())
    except FileNotFoundError:
        return None


def check_writable(folder: Path, what: str = "results folder") -> None:
    """Raises ValueError if the folder, which need not exist, is not writable; leaves no files.

    `what` is how the message calls it.
    """
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        # A real file instead of os.access, because read-only mounts and quotas only fail on writing.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(
            f"{what} {folder} cannot be written ({error.strerror}): choose another folder or change its permissions"
        ) from error
