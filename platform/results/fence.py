"""The number of a run's owner in the names of its files: what an owner that was replaced writes replaces nothing.

Every process that takes a run up has a higher number than all before it (see `owner`), and every file that it writes
has the number in its name, as `state~2.json`. The first one's is 0 and is left out. Of files whose names differ in the
number alone only the highest is read. So it does no harm if an owner is suspended after it has asked whether it still
is the owner, is replaced, and then goes on with what it was about to do.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedloom.platform.results.files import publish, remove_temporaries, write_atomically

MOST_OWNERS = 999_999_999
_NUMBER = re.compile(r"~([0-9]{1,9})(?=\.)")


def number_of(name: str) -> int:
    """The number in a file's name; 0 if there is none."""
    found = _NUMBER.search(name)
    return int(found[1]) if found else 0


def plain(name: str) -> str:
    """A file's name, or path, without the number."""
    return _NUMBER.sub("", name)


def newest(path: Path) -> Path:
    """The file with this plain name that is read; the path itself if there is none."""
    return max(_namesakes(path), key=lambda p: number_of(p.name), default=path)


def current(files: Iterable[Path]) -> list[Path]:
    """Those of the parts of tables that are read: the highest number of each, none below that of a part before it.

    An owner continues a table from its last part on, so that later parts with lower numbers are a replaced owner's.
    """
    best: dict[tuple[Path, str], Path] = {}
    for file in files:
        if file.name.startswith((".", "_")):  # not a part, whatever it is
            continue
        key = file.parent, plain(file.name)
        best[key] = max(best.get(key, file), file, key=lambda p: number_of(p.name))
    found, highest = [], dict[Path, int]()
    for (folder, _), file in sorted(best.items()):
        if (number := number_of(file.name)) >= highest.get(folder, 0):
            highest[folder] = number
            found.append(file)
    return found


def _namesakes(path: Path) -> list[Path]:
    name = plain(path.name)
    try:
        return [path.with_name(other) for other in os.listdir(path.parent) if plain(other) == name]
    except (FileNotFoundError, NotADirectoryError):  # whoever opens the path itself says what is wrong with it
        return []


@dataclass
class Fence:
    """How one owner writes the files of its run.

    `check` is called directly before every change: it raises OwnershipLostError if another process is the owner now.
    """

    number: int = 0
    check: Callable[[], None] = lambda: None

    def named(self, path: Path) -> Path:
        """The path that this owner writes instead."""
        stem, dot, suffix = plain(path.name).rpartition(".")
        return path.with_name(f"{stem}~{self.number}{dot}{suffix}") if self.number else path.with_name(plain(path.name))

    def write(self, path: Path, content: bytes) -> None:
        """Writes a file atomically under this owner's number."""
        with self._changing():
            write_atomically(self.named(path), content, check=self.check)

    def replace(self, path: Path, content: bytes) -> None:
        """Writes a file like `write`, and removes those that it replaces."""
        self.write(path, content)
        self._remove_replaced(path)

    def publish(self, temporary: Path, path: Path) -> None:
        """Gives a finished file the name of `path` under this owner's number, and removes those that it replaces."""
        with self._changing():
            publish(temporary, self.named(path))
        self._remove_replaced(path)

    def remove(self, path: Path) -> None:
        """Removes a file, unless a later owner wrote it."""
        self.check()
        if number_of(path.name) <= self.number:
            path.unlink(missing_ok=True)

    def remove_temporaries(self, folder: Path) -> None:
        """Removes what killed writers left behind in a folder."""
        self.check()
        remove_temporaries(folder, lambda name: number_of(name) <= self.number)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        self.check()
        try:
            yield
        except OSError:
            self.check()  # whoever has taken over has removed what this owner was just writing
            raise

    def _remove_replaced(self, path: Path) -> None:
        # Not asked before: a replaced owner finds a higher number here, and removes what it has just written.
        highest = newest(path)
        for other in _namesakes(path):
            if number_of(other.name) < number_of(highest.name):
                other.unlink(missing_ok=True)
