"""Lines for people, which are discarded after their reader has closed the pipe (`fedloom run | head`)."""

import os
import sys
from collections.abc import Callable

from fedloom.platform.words import printable


def stop_printing() -> None:
    """Discards all further output."""
    # Output that is still buffered would otherwise fail again when the interpreter exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def complain(text: str) -> None:
    """Says a line on standard error."""
    sys.stderr.write(f"fedloom: {printable(text)}\n")


def tell_at_once(text: str) -> None:
    """Says on a terminal what is being done, before anything slow is loaded; files and pipes get results alone."""
    if sys.stdout.isatty():
        while_read(print, text)


def while_read(show: Callable[..., None], *values: object) -> None:
    """Calls `show(*values)` and flushes; discards this and all later output if the reader is gone."""
    try:
        show(*values)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich turns a broken pipe into a SystemExit
        stop_printing()
