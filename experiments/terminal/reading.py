"""What happens to output that nobody reads any more (`fedloom run | head`): the work goes on without."""

import os
import sys
from collections.abc import Callable


def stop_printing() -> None:
    """Lets everything that is still printed vanish."""
    # What is still buffered would fail once more when the interpreter ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def while_read(show: Callable[..., None], *values: object) -> None:
    """Shows something for as long as somebody reads it."""
    try:
        show(*values)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich makes a SystemExit of a broken pipe
        stop_printing()
