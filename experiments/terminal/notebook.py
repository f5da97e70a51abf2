"""Output while a notebook cell runs: one text output of the cell, which is replaced and needs no widgets."""

import io
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

FIRST, LATEST = 1, 40
"""Numbers of the first and of the latest printed lines that are shown."""
WIDTH, HEIGHT = 100, 15
"""Size of a view, in characters and lines."""
REFRESH_S = 0.5


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel; IPython is not imported to find out."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class NotebookOutput(io.StringIO):
    """A file that shows in a notebook the text written to it, with the lines of a view below."""

    def __init__(self) -> None:
        super().__init__()
        self.view: Callable[[], Sequence[str]] = lambda: ()
        self._lock = threading.Lock()
        self._handle: Any = None
        self._shown = ""

    def flush(self) -> None:
        """Replaces the shown text if it has changed."""
        with self._lock:
            text = self.text()
            if text == self._shown:
                return
            self._shown, content = text, {"text/plain": text}
            if self._handle is None:
                self._handle = sys.modules["IPython"].display.display(content, raw=True, display_id=True)
            else:
                self._handle.update(content, raw=True)

    def text(self) -> str:
        """The text to show: the first and the latest printed lines, and the view."""
        lines = self.getvalue().rstrip().splitlines()
        left_out = len(lines) - FIRST - LATEST
        if left_out > 1:
            lines[FIRST : FIRST + left_out] = [f"... {left_out} more lines"]
        return "\n".join([*lines, *self.view()])


class NotebookArea:
    """Like `LiveArea`, but in a notebook: a view below the printed lines in the output of a cell."""

    transient = False

    def __init__(self, console: "Console", draw: "Callable[[int, int], Sequence[Text]]") -> None:
        assert isinstance(console.file, NotebookOutput), "it is a notebook's"
        self._output, self._draw = console.file, draw
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="notebook", daemon=True)

    def start(self) -> None:
        """Shows the view until `stop`."""
        self._output.view = self._lines
        self._thread.start()

    def refresh(self) -> None:
        """Draws the view now."""
        self._output.flush()

    def stop(self) -> None:
        """Ends the view; its last lines stay unless it is `transient`."""
        self._stopped.set()
        self._thread.join()
        self._output.view = lambda: ()
        if not self.transient:
            self._output.write("\n".join([*self._lines(), ""]))
        self._output.flush()

    def _refresh(self) -> None:
        while not self._stopped.wait(REFRESH_S):
            self._output.flush()

    def _lines(self) -> list[str]:
        return [line.plain.rstrip() for line in self._draw(WIDTH, HEIGHT)]
