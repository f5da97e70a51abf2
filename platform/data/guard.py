"""The lock on the test set: test indices cannot be read before the final evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager

SPLITS = ("train", "validation", "test")


class TestReadError(RuntimeError):
    """An access to the test split outside `reading_test()`."""

    __test__ = False  # pytest would collect it as a test class because of its name


class TestGuard:
    """Allows or forbids reading the test split."""

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
