"""A run's log files, independent of the console and of its log level, and the line of a finished round."""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.platform.words import PrintableFormatter

if TYPE_CHECKING:
    # Showing a run's lines needs no torch, which this imports.
    from fedloom.platform.federation.loop import RoundProgress


def as_bytes(size_bytes: float) -> str:
    """Formats a size, such as 3.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:  # else it is rounded to 1e+03
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"


def as_time(seconds: float) -> str:
    """Formats a duration, such as 2:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def round_line(p: "RoundProgress") -> str:
    """Stage and round, clients, loss, accuracies, bytes, and the time that the whole run will still take."""
    parts = [f"{p.stage:<18} {p.round + 1:>4}/{p.rounds_total}"]
    if p.counted != "rounds":
        parts[0] += f" {p.counted}"
    if p.clients_planned:
        parts.append(f"clients {p.clients_ok}/{p.clients_planned}")
    if p.loss is not None:
        parts.append(f"loss {p.loss:.4f}")
    if p.metric is not None:
        parts.append(f"clients' {p.metric_of} accuracy {p.metric:.4f}")
    if p.validated is not None:
        after = "" if p.validated.rounds is None else f" after {p.validated.rounds}"
        parts.append(f"validation {p.validated.accuracy:.4f}{after}")
    if p.bytes_down:
        parts.append(f"down {as_bytes(p.bytes_down)} up {as_bytes(p.bytes_up)}")
    parts.append(f"{p.wall_s:.2f} s")
    left = "left at most" if p.may_end_early else "left"
    if p.left_s is None and p.stage_left_s:
        parts.append(f"{left} {as_time(p.stage_left_s)} in this stage")
    elif p.left_s is not None and p.left_s > 0:
        parts.append(f"{left} {as_time(p.left_s)}")
    if p.stopped:
        parts.append(f"the stage ends: {p.stopped}")
    return "  ".join(parts)


CONSOLE = logging.getLogger("fedloom.console")
"""The logger of the lines that the console shows; they also go to a file of the run, wherever it is watched from."""


class _LogFile(logging.FileHandler):
    """Reports once, not with a traceback for every record, that the file cannot be written (such as on a full disk)."""

    told = False

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record; never raises."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - logging's signature
        """Called in place of the error."""
        error = sys.exc_info()[1]
        if not self.told:
            self.told = True
            reason = error.strerror if isinstance(error, OSError) else error
            with suppress(OSError):
                sys.stderr.write(f"fedloom: the log {self.baseFilename} cannot be written ({reason})\n")


def log_to(folder: Path) -> Sequence[logging.Handler]:
    """Writes fedloom's records of level warning and above to `server.log`, and `CONSOLE` to `console.log`.

    Both stay active until `close_log`, and neither fails on a full disk.
    """
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    CONSOLE.setLevel(logging.INFO)
    CONSOLE.propagate = False
    server = _handler(folder / "server.log", logging.WARNING, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("fedloom").addHandler(server)
    console = _handler(folder / "console.log", logging.INFO, "%(asctime)s %(message)s")
    CONSOLE.addHandler(console)
    return server, console


def _handler(path: Path, level: int, form: str) -> logging.Handler:
    handler = _LogFile(path, delay=True)
    handler.setLevel(level)
    handler.setFormatter(PrintableFormatter(form))
    return handler


class _Texts(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.texts.append(record.getMessage())
        except (TypeError, ValueError):  # arguments that do not fit the format
            self.handleError(record)


@contextmanager
def warnings_in(texts: list[str]) -> Iterator[None]:
    """Adds the messages of fedloom's warnings in the block to a list, without their tracebacks."""
    handler = _Texts(texts)
    logging.getLogger("fedloom").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("fedloom").removeHandler(handler)


def and_logged(watch: "Callable[[RoundProgress], None]") -> "Callable[[RoundProgress], None]":
    """Wraps a watcher of rounds so that every round's line also goes to `CONSOLE`."""

    def told(progress: "RoundProgress") -> None:
        CONSOLE.info("%s", round_line(progress))
        watch(progress)

    return told


def close_log(handlers: Sequence[logging.Handler]) -> None:
    """Removes the handlers and closes their files."""
    for handler in handlers:
        for logger in (logging.getLogger("fedloom"), CONSOLE):
            logger.removeHandler(handler)
        with suppress(OSError):
            handler.close()
