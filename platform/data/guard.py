"""The lock on the test set: nothing reads a test index before the final evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager

SPLITS = ("train", "validation", "test")


class TestReadError(RuntimeError):
    """The test split was accessed outside `reading_test()`."""

    __test__ = False  # the name makes pytest think that this is a test class


class TestGuard:
    """Says whether the test split may be read now."""

    __test__ = False

    def __init__(self, *, is_open: bool = False) -> None:
        self._is_open = is_open

    def check(self, split: str) -> None:
        """Raises TestReadError for split "test" while the guard is closed."""
        if split == "test" and not self._is_open:
            raise TestReadError("split 'test' was read before the final evaluation: use `with data.reading_test():`")

    @contextmanager
    def reading_test(self) -> Iterator[None]:
        """Opens the guard for the block."""
        before, self._is_open = self._is_open, True
        try:
            yield
        finally:
            self._is_open = before


def check_split(split: str) -> None:
    """Raises ValueError unless the split is one of train, validation, test."""
    if split not in SPLITS:
        raise ValueError(f"split={split}: must be one of {', '.join(SPLITS)}")
