"""Output whose reader is gone (`fedloom run | head`): it is thrown away, and the work goes on."""

import os
import sys
from collections.abc import Callable


def stop_printing() -> None:
    """Throws away everything that is printed from now on."""
    # What is still buffered would fail once more when the interpreter ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def while_read(show: Callable[..., None], *values: object) -> None:
    """Shows something; throws it and all later output away if the reader is gone."""
    try:
        show(*values)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich makes a SystemExit of a broken pipe
        stop_printing()
