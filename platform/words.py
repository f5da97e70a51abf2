"""Texts of one line: values cut to a readable length, and errors of the file system in words."""

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
"""Whole numbers of more bits are not written in decimal: that takes long, and beyond some length Python refuses it."""

NO_SUCH_PLACE = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
"""The errors of a path that cannot exist: the fault of whoever gave it, not of the machine."""
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
"""Errors of writing that do not name the file; other errors name theirs, or concern no file."""


_PICTURES = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd"),
}
"""Visible signs for characters that control a terminal: those of ASCII and Latin-1, and those of text direction."""


def printable(text: str) -> str:
    """The text with characters that control a terminal replaced, as it may be a stranger's; tabs and newlines stay."""
    return text if text.isprintable() else text.translate(_PICTURES)


class PrintableFormatter(logging.Formatter):
    """Formats the records of a log as printable text."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's line and its traceback, printable."""
        return printable(super().format(record))


def shown(value: Any, how: Callable[[Any], str] = str, most: int = MOST) -> str:
    """A value as text of at most `most` characters, without its middle if it is longer."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"a number of {value.bit_length()} bits"
    text = how(value)
    head = (most - 3) // 2
    return text if len(text) <= most else f"{text[:head]}...{text[len(text) + head + 3 - most :]}"


def said(error: BaseException, most: int = MOST_SAID) -> str:
    """An error's message in one line; empty if the error fails to give one."""
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
    """Whether memory could not be allocated, which torch reports as a RuntimeError."""
    return isinstance(error, MemoryError) or "can't allocate memory" in said(error)


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Adds the path to errors of writing in the block that do not name a file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        _named(error, path)
        raise


def _named(error: OSError, path: Path | str) -> OSError:
    if error.errno in DISK and error.filename is None:
        error.filename = str(path)
    return error
