"""Reading of files that strangers may have made, atomic writes, and JSON files that carry their own hash.

Results are passed on. Paths that a results file names must stay in its folder, links are not followed, and pipes and
devices are not waited for. Readers of a file that is being written find the old or the new content.
"""

import errno
import glob
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import MISSING, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from fedloom.platform.words import naming, said, shown

MOST_BYTES = 1 << 36
"""Size of the largest file of tensors or rows that is opened, 64 GiB."""
MOST_NOTE_BYTES = 1 << 20
"""Size of the largest file that only holds a few words, 1 MiB."""
MOST_TEXT_BYTES = 1 << 28
"""Size of the largest text or JSON that is read, 256 MiB: a checkpoint's state holds about 100 bytes per client."""

T = TypeVar("T")

_MOST_BITS = 63
_OWNER_NUMBER = re.compile(r"~[0-9]{1,9}(?=\.)")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.+-]*|[0-9]+[A-Za-z_.+-][A-Za-z0-9_.+-]*")


def check_name(kind: str, name: str, longest: int = 100) -> str:
    """Returns the name if it is valid as part of a path and of a partition; ValueError otherwise.

    Names of digits only are invalid, because partition discovery would turn them into an integer column.
    """
    if not is_name(name, longest):
        raise ValueError(
            f"{kind} {shown(name, repr)} cannot be a file name here: use 1 to {longest} letters, digits and any of "
            "_ . + -, starting with a letter or digit and not digits alone"
        )
    return name


def is_name(name: str, longest: int = 100) -> bool:
    """Whether the name is valid for `check_name`."""
    return len(name) <= longest and _NAME.fullmatch(name) is not None


def within(folder: Path, name: object) -> Path:
    """The path in a folder that a results file names; ValueError for a name that leads out of the folder."""
    parts = name.split("/") if isinstance(name, str) else [""]
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError(f"{shown(name, repr)} is no name of a file in {folder}")
    return folder.joinpath(*parts)


def opened(path: Path, flags: int = os.O_RDONLY, most_bytes: int = MOST_BYTES) -> int:
    """The descriptor of a regular file in results; never blocks.

    Raises a one-line ValueError for a link, a pipe, a device, a folder, and a file of more than `most_bytes`; OSError
    like `os.open`.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):  # a link; a pipe without a reader or a socket
            raise
        raise ValueError(irregular(path)) from error
    status = os.fstat(descriptor)
    is_regular = stat.S_ISREG(status.st_mode)
    if is_regular and status.st_size <= most_bytes:
        return descriptor
    os.close(descriptor)
    if is_regular:
        raise ValueError(f"{path} has {status.st_size} bytes, of which at most {most_bytes} are read: move it away")
    raise ValueError(irregular(path))


def is_irregular(path: Path | str) -> bool:
    """Whether there is a link, a pipe or the like at this path: neither a regular file, nor a folder, nor nothing."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    return not (stat.S_ISDIR(mode) or stat.S_ISREG(mode))


def first_irregular(folder: Path, name: str) -> Path | None:
    """The first link, pipe or the like on the way from a folder to what has this name in it; None if there is none."""
    paths = accumulate(Path(name).parts, Path, initial=folder)
    return next((path for path in paths if path != folder and is_irregular(path)), None)


def irregular(path: Path) -> str:
    """The one-line error for a link, a pipe and the like, or a folder where a file belongs."""
    return f"{path} is a link, a pipe or the like: nothing in results is followed; put the file itself in its place"


def read_file(path: Path, most_bytes: int = MOST_TEXT_BYTES) -> bytes:
    """The content of a file in results; raises like `opened`."""
    with os.fdopen(opened(path, most_bytes=most_bytes), "rb") as file:
        return file.read()


def read_json(path: Path, most_bytes: int = MOST_TEXT_BYTES) -> Any:
    """The value in a JSON file of results; ValueError naming the file if it is not JSON; also raises like `opened`."""
    return from_json(read_file(path, most_bytes), path)


def from_json(content: str | bytes, origin: object) -> Any:
    """The value of a JSON text; one-line ValueError naming the origin if it is invalid or nested too deeply."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{origin} is not readable JSON ({said(error)}): restore it from a copy") from error


def typed(kind: type[T], values: Any) -> T:
    """The dataclass `kind`, of numbers and texts, with the values of a JSON object; names of no field are ignored.

    Fields with a default may be missing. Raises TypeError or KeyError for values that are not of the fields' types.
    """
    if not isinstance(values, dict):
        raise TypeError(f"{shown(values)} is not a JSON object")
    arguments = {}
    for field in fields(kind):  # type: ignore[arg-type]  # dataclasses only
        if field.name not in values and field.default is not MISSING:
            continue
        value = arguments[field.name] = values[field.name]
        wanted = field.type if field.type in (int, float, bool) else str
        allowed = (int, float) if wanted is float else (wanted,)
        if type(value) not in allowed or (isinstance(value, int) and value.bit_length() > _MOST_BITS):
            raise TypeError(f"{field.name}={shown(value, repr)}")
    return kind(**arguments)


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


def sync(path: Path) -> None:
    """Waits until a file's content, or a folder's entries (creations, renames, deletions), are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, path: Path) -> None:
    """Replaces `path` durably by a finished temporary file that is already synced."""
    os.replace(temporary, path)
    sync(path.parent)


def write_atomically(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replaces the file's content atomically.

    Without `durable` it does not wait for the disk: readers still see the old or the new content, but a power failure
    may restore an older one.
    """
    temporary = temporary_path(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with naming(path), os.fdopen(opened(temporary, flags), "wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        publish(temporary, path)
    else:
        os.replace(temporary, path)


def without_number(name: str) -> str:
    """A file's name without the number of its run's owner, which revisions until 0872576 put there: `state~2.json`."""
    return _OWNER_NUMBER.sub("", name)


def as_stored(path: Path) -> Path:
    """The file itself or, if it is missing, the latest one that an earlier revision wrote under an owner's number."""
    if path.exists():
        return path
    numbered = path.parent.glob(f"{glob.escape(path.stem)}~*{path.suffix}")
    return max(numbered, key=lambda p: (len(p.name), p.name), default=path)


class Stamp(NamedTuple):
    """Identifies the version of a file: a file that was replaced atomically has another inode."""

    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> Self:
        """The stamp of a file from the result of its `stat`."""
        return cls(stat.st_ino, stat.st_size, stat.st_mtime_ns)


def stamp_of(path: Path) -> Stamp | None:
    """The stamp of a file; None if it is missing."""
    try:
        return Stamp.of(path.stat())
    except FileNotFoundError:
        return None


def check_writable(folder: Path, what: str = "results folder") -> None:
    """Raises ValueError if the folder, which need not exist, is not writable; leaves no files.

    `what` names the folder in the message.
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


# -- JSON files with their own hash ------------------------------------------------------------------------------------

HASH = "sha256"
_HEAD = b'{"%s": "' % HASH.encode()
ADVICE = "restore it from a copy, or start a new run"


def hashed_json(values: Mapping[str, Any]) -> bytes:
    """The values as JSON, with the hash of all of them; ValueError for values that JSON cannot hold."""
    return hashed_text(json.dumps(dict(values)))


def hashed_text(text: str) -> bytes:
    """The text of a JSON object, with its hash inserted."""
    body = text[1:].encode()
    return b'%s%s"%s' % (_HEAD, content_hash(body).encode(), b", " + body if body != b"}" else body)


def from_hashed_json(content: bytes, path: Path, *, allow_plain: bool = False) -> dict[str, Any]:
    """The values of a JSON object; ValueError naming `path` if it is incomplete, or was changed after it was written.

    With `allow_plain`, also reads an object that an earlier version wrote without a hash.
    """
    if allow_plain and not content.startswith(_HEAD):
        values = from_json(content, path)
        if not isinstance(values, dict):
            raise ValueError(f"{path} is damaged (it is not a JSON object): {ADVICE}")
        return values
    try:
        values = from_json(content, path)
        sha256 = values.pop(HASH)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged (it is cut short, or its hash is missing): {ADVICE}") from error
    head = b'%s%s"' % (_HEAD, str(sha256).encode())
    body = content[len(head) :].removeprefix(b", ")
    if not content.startswith(head) or content_hash(body) != sha256:
        raise ValueError(f"{path} is damaged (its content is not what was written): {ADVICE}")
    return dict(values)


def is_hashed(path: Path) -> bool:
    """Whether the file exists and begins like hashed JSON, whole or damaged."""
    try:
        with os.fdopen(opened(path), "rb") as file:
            return file.read(len(_HEAD)) == _HEAD
    except (OSError, ValueError):
        return False
