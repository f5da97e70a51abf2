"""A run's log file, independent of the console's log level."""

import logging
import sys
from contextlib import suppress
from pathlib import Path


class _LogFile(logging.FileHandler):
    """Says once, and not with a traceback for every record, that the file cannot be written, as on a full disk."""

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


def log_to(path: Path) -> logging.Handler:
    """Writes fedloom's log records of level warning and above to a file, until `close_log`."""
    handler = _LogFile(path, delay=True)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("fedloom").addHandler(handler)
    return handler


def close_log(handler: logging.Handler) -> None:
    """Removes the handler and closes the file."""
    logging.getLogger("fedloom").removeHandler(handler)
    with suppress(OSError):
        handler.close()
