"""Writing files so that a reader, or a crash at any moment, finds the old content or the new one, nothing between."""

import os
import re
import tempfile
from pathlib import Path

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.+-]*|[0-9]+[A-Za-z_.+-][A-Za-z0-9_.+-]*")


def check_name(kind: str, name: str, longest: int = 100) -> str:
    """The name itself, if it can be part of a path and of a partition; ValueError otherwise.

    A name that is only a number is refused too: partition discovery would turn it into an integer column.
    """
    if not _NAME.fullmatch(name) or len(name) > longest:
        raise ValueError(
            f"{kind} {name!r} cannot be a file name here: use 1 to {longest} letters, digits and any of _ . + -, "
            "starting with a letter or digit and not digits alone"
        )
    return name


def temporary_path(path: Path) -> Path:
    """Where the next content of `path` is written; data set readers ignore names that begin with a dot."""
    return path.with_name(f".{path.name}.tmp")


def remove_temporaries(folder: Path) -> None:
    """Deletes what a killed writer left half-written in this folder."""
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
    """Puts a finished temporary file, already synced, in the place of `path` for good."""
    os.replace(temporary, path)
    sync_folder(path.parent)


def write_atomically(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replaces the file's content in one step.

    Not `durable` leaves out the waiting for the disk: the replacement is still whole for every reader, but a power
    failure may bring back an older content.
    """
    temporary = temporary_path(path)
    with open(temporary, "wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        publish(temporary, path)
    else:
        os.replace(temporary, path)


def check_writable(folder: Path) -> None:
    """Raises ValueError if nothing can be written below the folder, which need not exist yet; leaves nothing behind."""
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        # A real file, not os.access alone: read-only mounts and quotas show only on writing.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(
            f"results folder {folder} cannot be written ({error.strerror}): "
            "choose another folder or change its permissions"
        ) from error
