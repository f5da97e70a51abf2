"""What is said in one line: values cut to a readable length, and errors of the file system in words."""

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST = 60
MOST_SAID = 300
_MOST_BITS = 200
"""Whole numbers of more bits are not written in decimal digits, which takes long and which Python refuses at last."""

NO_SUCH_PLACE = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
"""The errors of a path that cannot exist: the fault of whoever gave it, not of the machine."""
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
"""The errors of writing, which do not say to which file; others name theirs, or are of no file."""


_PICTURES = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd"),
}
"""Signs for the characters that steer a terminal: those of ASCII and of Latin-1, and those that turn text around."""


def printable(text: str) -> str:
    """Text whose characters that steer a terminal are replaced, since it may be a stranger's; tabs and lines stay."""
    return text if text.isprintable() else text.translate(_PICTURES)


class PrintableFormatter(logging.Formatter):
    """The lines of a log, printable."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's line, and those of its error."""
        return printable(super().format(record))


def shown(value: Any, how: Callable[[Any], str] = str, most: int = MOST) -> str:
    """A value as text of at most `most` characters, without its middle if it is longer."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"a number of {value.bit_length()} bits"
    text = how(value)
    head = (most - 3) // 2
    return text if len(text) <= most else f"{text[:head]}...{text[len(text) + head + 3 - most :]}"


def said(error: BaseException, most: int = MOST_SAID) -> str:
    """An error's message in one line, also of an error that fails to say it."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - an exception of a plug-in may fail in any way
        return ""
    return text if len(text) <= most else f"{text[:most]} ..."


def in_words(error: OSError) -> str:
    """The file and what is wrong with it, such as `results/status.json: no space left on device`."""
    if error.errno is None or error.errno not in errno.errorcode:
        return said(error, 2 * MOST_SAID)
    what = os.strerror(error.errno)
    named = (f for f in (error.filename, error.filename2) if isinstance(f, str | bytes | os.PathLike))
    files = " to ".join(shown(os.fsdecode(f), most=4 * MOST) for f in named)
    return f"{files}: {what[:1].lower()}{what[1:]}" if files else what


def why(error: Exception, path: Path | str) -> str:
    """What is wrong, in one line; with the path if it is an error of writing that does not name its file."""
    return in_words(_named(error, path)) if isinstance(error, OSError) else said(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be allocated; torch says that with a RuntimeError."""
    return isinstance(error, MemoryError) or "can't allocate memory" in said(error)


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Adds the path to errors of writing in the block that name none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        _named(error, path)
        raise


def _named(error: OSError, path: Path | str) -> OSError:
    if error.errno in DISK and error.filename is None:
        error.filename = str(path)
    return error
