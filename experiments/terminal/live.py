"""The part at the bottom of a terminal that is drawn anew while a command is at work; what is printed appears above it.

A view draws lines for the size that the terminal has now. Whatever else is written meanwhile (warnings, a plug-in's
prints) goes above the view, and the terminal is left as it would be without one, after errors and Ctrl-C, too.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from fedloom.experiments.terminal.notebook import NotebookArea, NotebookOutput

REFRESHES_PER_S = 5
NARROWEST, LOWEST = 30, 6
"""Columns and lines that a terminal must have for a view."""
MOST_ABOVE = 100
"""Printed lines that are shown again above the view when the terminal is made smaller."""
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


def is_live(console: Console) -> bool:
    """Whether the console is a notebook's, or a terminal on which a view can be drawn, whose user wants no plain lines.

    NO_COLOR and TERM=dumb ask for plain lines; FORCE_COLOR makes no terminal of a pipe.
    """
    return isinstance(console.file, NotebookOutput) or (
        sys.stdout.isatty()
        and console.is_interactive
        and not console.is_dumb_terminal
        and not os.environ.get("NO_COLOR")
        and console.encoding.startswith("utf")
        and console.width >= NARROWEST
        and console.height >= LOWEST
    )


def area_below(console: Console, draw: Callable[[int, int], Sequence[Text]]) -> "LiveArea | NotebookArea":
    """The view below what a console prints, if it `is_live`."""
    return (NotebookArea if isinstance(console.file, NotebookOutput) else LiveArea)(console, draw)


def spinner() -> str:
    """The character that turns, so that one sees that the command lives."""
    return SPINNER[int(time.monotonic() * REFRESHES_PER_S) % len(SPINNER)]


class _Drawn:
    """What `draw(width, height)` returns, one text per line, at the size that the console has now."""

    def __init__(self, draw: Callable[[int, int], Sequence[Text]]) -> None:
        self._draw = draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = console.size
        for line in self._draw(width, height - 1)[: height - 1]:
            line.truncate(width, overflow="ellipsis")
            yield line


class LiveArea(Live):
    """A view at the bottom of a terminal, drawn several times per second from `start` to `stop`.

    `draw(width, height)` gives its lines; longer ones are cut. A terminal that is made smaller folds or moves what it
    shows, each in its own way, so that the screen is then cleared and drawn with the latest lines that were printed.
    """

    def __init__(self, console: Console, draw: Callable[[int, int], Sequence[Text]]) -> None:
        super().__init__(
            _Drawn(draw),
            console=console,
            refresh_per_second=REFRESHES_PER_S,
            # A file that errors go to gets them, also while standard output is a terminal.
            redirect_stderr=sys.stderr.isatty(),
        )
        self._above: deque[ConsoleRenderable] = deque(maxlen=MOST_ABOVE)
        self._size = console.size

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """What is printed, between what clears the view and what draws it again."""
        processed = super().process_renderables(renderables)
        before, self._size = self._size, self.console.size
        if self._size.width < before.width or self._size.height < before.height:
            processed[0] = Control(ControlType.HOME, ControlType.CLEAR)
            processed[1:1] = self._above
        self._above.extend(each for each in renderables if not isinstance(each, Control))
        return processed
