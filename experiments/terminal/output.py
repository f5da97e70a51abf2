"""Text, tables and JSON for the terminal."""

import json
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from fedloom.platform.words import printable

LOG_WIDTH = 110


class PrintingConsole(Console):
    """A console that prints what is not its own styling by `printable`, whatever it is part of."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of what is printed."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def console(quiet: bool = False) -> Console:
    """A console for the terminal, or for a log file with a width of `LOG_WIDTH` characters.

    Text is printed as it is: brackets in a value or a message are no markup.
    """
    settings: dict[str, Any] = {"highlight": False, "soft_wrap": True, "quiet": quiet, "markup": False, "emoji": False}
    found = PrintingConsole(**settings)
    return found if found.is_terminal else PrintingConsole(**settings, width=LOG_WIDTH)


def where(results: str | Path) -> str:
    """The option `--results` for these results; empty for the default folder."""
    return "" if Path(results) == Path("results") else f" --results {shlex.quote(str(results))}"


def write_json(value: object) -> None:
    """Prints a value as JSON on one line."""
    sys.stdout.write(json.dumps(value) + "\n")


def show_facts(facts: dict[str, Any], as_json: bool) -> None:
    """Prints names and values as a table or as one JSON object."""
    if as_json:
        write_json(facts)
        return
    # Lines are as long as they have to be, and the terminal folds them: a path is there to be copied.
    length = max(map(len, facts), default=0)
    for name, value in facts.items():
        console().print(f" {name.replace('_', ' '):<{length}}  {_text(value)}")


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return "  ".join(f"{k} {_text(v)}" for k, v in value.items())
    if isinstance(value, list):
        return "  ".join(_text(v) for v in value)
    return str(value)
