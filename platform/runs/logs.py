"""A run's own log file, whatever the console shows."""

import logging
from pathlib import Path


def log_to(path: Path) -> logging.Handler:
    """Adds warnings and above of all of fedloom to a file; `close_log` takes it away again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, delay=True)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("fedloom").addHandler(handler)
    return handler


def close_log(handler: logging.Handler) -> None:
    """Ends the file."""
    logging.getLogger("fedloom").removeHandler(handler)
    handler.close()
