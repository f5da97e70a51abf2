"""Output that all commands share: exit codes, lines for people, tables and JSON."""

import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.experiments.terminal.notebook import NotebookOutput, in_notebook
from fedloom.platform.words import NO_SUCH_PLACE, in_words, is_out_of_memory, printable, said

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

OK = 0
CONFIGURATION = 2
CLIENTS_FAILED = 3
INFRASTRUCTURE = 4
INTERRUPTED = 130
_BY_KIND = {
    "done": OK,
    "refused": CONFIGURATION,
    "failed": CLIENTS_FAILED,
    "infrastructure": INFRASTRUCTURE,
    "interrupted": INTERRUPTED,
    "detached": INTERRUPTED,
}


RUN_THREAD = "run"
"""Name of a thread that executes a run beside the main thread."""


def of_run_end(kind: str) -> int:
    """The exit code for the kind of a run's end."""
    return _BY_KIND[kind]


EXPLAINED = (ValueError, OSError, MemoryError, RuntimeError)
"""Exceptions that `explained` may turn into one line."""


def explained(error: Exception) -> tuple[int, str] | None:
    """The exit code and the line for an error that ends a command; None for a defect, which needs its traceback."""
    if isinstance(error, ValueError):
        return CONFIGURATION, " ".join(str(error).split())
    if isinstance(error, ConnectionError):
        return CONFIGURATION, str(error)
    if isinstance(error, OSError):
        return CONFIGURATION if error.errno in NO_SUCH_PLACE else INFRASTRUCTURE, in_words(error)
    if isinstance(error, RecursionError):
        return CONFIGURATION, f"a value that is given or stored is nested too deeply ({said(error)})"
    if is_out_of_memory(error):
        return INFRASTRUCTURE, f"not enough memory ({said(error)}): ask for less, or use a larger machine"
    return None


def stop_printing() -> None:
    """Discards all further output."""
    # Output that is still buffered would otherwise fail again when the interpreter exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def complain(text: str) -> None:
    """Writes a line to standard error."""
    sys.stderr.write(f"fedloom: {printable(text)}\n")


def tell_at_once(text: str) -> None:
    """Says on a terminal what is being done, before slow imports; files and pipes get only results."""
    if sys.stdout.isatty():
        while_read(print, text)


def while_read(show: Callable[..., None], *values: object) -> None:
    """Calls `show(*values)` and flushes; discards this and all later output if the reader is gone."""
    try:
        show(*values)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich turns a broken pipe into a SystemExit
        stop_printing()


LOG_WIDTH = 110


def console(quiet: bool = False, *, folds: bool = True) -> "Console":
    """A console for the terminal, for one output of a notebook cell, or for a log of `LOG_WIDTH` characters' width.

    With `folds`, long lines are left to the terminal to fold; otherwise they are wrapped between words.

    Text is printed literally: brackets in a value or a message are no markup, and control characters are shown.
    """
    from rich.console import Console  # its import is half of the time of `fedloom --help`

    class PrintingConsole(Console):
        def render(self, renderable: "RenderableType", options: "ConsoleOptions | None" = None) -> Iterable["Segment"]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    settings: dict[str, Any] = {"highlight": False, "soft_wrap": folds, "quiet": quiet, "markup": False, "emoji": False}
    if in_notebook():
        return PrintingConsole(
            **settings, file=NotebookOutput(), width=LOG_WIDTH, force_jupyter=False, force_terminal=False
        )
    terminal = PrintingConsole(**settings)
    return terminal if terminal.is_terminal else PrintingConsole(**settings, width=LOG_WIDTH)


def where(results: str | Path) -> str:
    """The option `--results` for these results; empty for the default folder."""
    return "" if Path(results) == Path("results") else f" --results {shlex.quote(str(results))}"


def write_json(value: object) -> None:
    """Prints a value as JSON on one line, with null for numbers that are not finite, which JSON does not have."""
    sys.stdout.write(json.dumps(_finite(value), allow_nan=False) + "\n")


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return [*map(_finite, value)] if isinstance(value, list | tuple) else value


def show_facts(facts: dict[str, Any], as_json: bool) -> None:
    """Prints names and values as a table or as one JSON object."""
    if as_json:
        write_json(facts)
        return
    # Long lines are not wrapped, only folded by the terminal, so that paths can be copied.
    length = max(map(len, facts), default=0)
    for name, value in facts.items():
        console().print(f" {name.replace('_', ' '):<{length}}  {_text(value)}")


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e6 else f"{value:,.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return "  ".join(f"{k} {_text(v)}" for k, v in value.items())
    if isinstance(value, list):
        return "  ".join(_text(v) for v in value)
    return str(value)
