"""What a terminal shows: of text that was written to it here, and of a command on a pseudo-terminal of its own."""

import fcntl
import io
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from typing import Self

import pyte
import pytest


class Terminal(io.StringIO):
    """A terminal of a size, which is standard output in its `with` block."""

    encoding = "utf-8"

    def __init__(self, width: int = 100, height: int = 30) -> None:
        super().__init__()
        self.width, self.height = width, height

    def __enter__(self) -> Self:
        self._stdout, sys.stdout = sys.stdout, self
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout = self._stdout

    def isatty(self) -> bool:
        return True

    def screen(self) -> "pyte.Screen":
        """The screen after all that was written."""
        screen = pyte.Screen(self.width, self.height)
        pyte.Stream(screen).feed(self.getvalue().replace("\n", "\r\n"))
        return screen

    def resize(self, monkeypatch: pytest.MonkeyPatch, width: int, height: int) -> None:
        """Says the size to what is written by rich from now on."""
        self.width, self.height = width, height
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("LINES", str(height))


class PseudoTerminal:
    """A command on a pseudo-terminal, and its screen; the command is killed at the end of the `with` block."""

    def __init__(self, command: Sequence[str], width: int, height: int, env: Mapping[str, str] | None = None) -> None:
        self.screen = pyte.HistoryScreen(width, height, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self.written = b""
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            try:
                own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
                os.execvpe(command[0], command, {**own, "TERM": "xterm-256color", **(env or {})})
            finally:
                os._exit(127)
        self.resize(width, height)

    def __enter__(self) -> "PseudoTerminal":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        try:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        except (ProcessLookupError, ChildProcessError):
            return

    def resize(self, width: int, height: int) -> None:
        """Changes the size, as a window does."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.screen.resize(height, width)

    def type(self, keys: bytes) -> None:
        """Types keys; Ctrl-C is 0x03."""
        os.write(self._fd, keys)

    def read_until(self, text: str, timeout_s: float = 60.0) -> list[str]:
        """The screen's lines as soon as it shows a text."""
        end_s = time.monotonic() + timeout_s
        while not any(text in line for line in self.lines()):
            assert time.monotonic() < end_s, f"no {text!r} in {self.lines()}"
            assert self._read(), f"the command has ended without {text!r}: {self.lines()}"
        return self.lines()

    def wait(self, timeout_s: float = 60.0) -> int:
        """Reads to the end; the exit code."""
        end_s = time.monotonic() + timeout_s
        while self._read():
            assert time.monotonic() < end_s, f"the command goes on: {self.lines()}"
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def lines(self) -> list[str]:
        """What the screen shows, without blanks at the ends of lines."""
        return [line.rstrip() for line in self.screen.display]

    def _read(self) -> bool:
        if not select.select([self._fd], [], [], 0.1)[0]:
            return True
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # Linux's way of telling that the other side is closed
            return False
        self.written += data
        self._stream.feed(data)
        return bool(data)
