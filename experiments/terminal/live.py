"""A view at the bottom of a terminal that is redrawn while a command is at work; printed lines appear above it.

A view draws its lines for the terminal's current size. All other output meanwhile (warnings, a plug-in's prints) goes
above it. Afterwards the terminal is restored, even after errors and Ctrl-C.
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
"""Minimum columns and lines of a terminal for a view."""
MOST_ABOVE = 100
"""Printed lines that are shown again above the view when the terminal is made smaller."""
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


def is_live(console: Console) -> bool:
    """Whether a view can be drawn: in a notebook, or on a suitable terminal whose user has not asked for plain lines.

    NO_COLOR and TERM=dumb ask for plain lines; FORCE_COLOR does not turn a pipe into a terminal.
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
    """The view below the lines that a console prints, which must be live (see `is_live`)."""
    return (NotebookArea if isinstance(console.file, NotebookOutput) else LiveArea)(console, draw)


def spinner() -> str:
    """The current character of a spinner, which shows that the command is alive."""
    return SPINNER[int(time.monotonic() * REFRESHES_PER_S) % len(SPINNER)]


class _Drawn:
    """Renders what `draw(width, height)` returns, one text per line, for the console's current size."""

    def __init__(self, draw: Callable[[int, int], Sequence[Text]]) -> None:
        self._draw = draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = console.size
        for line in self._draw(width, height - 1)[: height - 1]:
            line.truncate(width, overflow="ellipsis")
            yield line


class LiveArea(Live):
    """A view at the bottom of a terminal, drawn several times per second from `start` to `stop`.

    `draw(width, height)` returns its lines; longer ones are cut. Terminals that are made smaller fold or move what they
    show in different ways; the screen is then cleared and redrawn with the latest printed lines.
    """

    def __init__(self, console: Console, draw: Callable[[int, int], Sequence[Text]]) -> None:
        super().__init__(
            _Drawn(draw),
            console=console,
            refresh_per_second=REFRESHES_PER_S,
            # If standard error goes to a file, errors go there even while standard output is a terminal.
            redirect_stderr=sys.stderr.isatty(),
        )
        self._above: deque[ConsoleRenderable] = deque(maxlen=MOST_ABOVE)
        self._size = console.size

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Puts the printed lines between the controls that clear the view and the redrawn view."""
        processed = super().process_renderables(renderables)
        before, self._size = self._size, self.console.size
        if self._size.width < before.width or self._size.height < before.height:
            processed[0] = Control(ControlType.HOME, ControlType.CLEAR)
            processed[1:1] = self._above
        self._above.extend(each for each in renderables if not isinstance(each, Control))
        return processed
