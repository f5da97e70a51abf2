"""What is printed while a notebook's cell runs: one output of the cell, which is replaced and needs no widgets."""

import io
import sys
from typing import Any

FIRST, LATEST = 1, 14
"""Lines that are shown of what was printed: the first and the latest ones."""
BAR = 30
"""Characters of the bar."""


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel; IPython is not imported to find out."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class NotebookOutput(io.StringIO):
    """A file that shows in a notebook what was written to it, with a line below that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.last_line = ""
        self._handle: Any = None
        self._shown = ""

    def flush(self) -> None:
        """Replaces what is shown."""
        text = self.text()
        if text == self._shown:
            return
        self._shown, content = text, {"text/plain": text}
        if self._handle is None:
            self._handle = sys.modules["IPython"].display.display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)

    def text(self) -> str:
        """The lines that are shown."""
        lines = self.getvalue().rstrip().splitlines()
        left_out = len(lines) - FIRST - LATEST
        if left_out > 1:
            lines[FIRST : FIRST + left_out] = [f"... {left_out} more lines"]
        return "\n".join([*lines, *([self.last_line] if self.last_line else [])])


def bar(fraction: float, text: str) -> str:
    """A bar that is filled to this fraction, and text behind it."""
    filled = round(BAR * min(1.0, fraction))
    return f"{'━' * filled}{'─' * (BAR - filled)} {text}"
