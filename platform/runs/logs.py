"""A run's log file, independent of the console's log level."""

import logging
from pathlib import Path


def log_to(path: Path) -> logging.Handler:
    """Writes fedloom's log records of level warning and above to a file, until `close_log`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, delay=True)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("fedloom").addHandler(handler)
    return handler


def close_log(handler: logging.Handler) -> None:
    """Removes the handler and closes the file."""
    logging.getLogger("fedloom").removeHandler(handler)
    handler.close()
