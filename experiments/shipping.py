"""What a cluster job gets: this package's source and the files that the user names, no more than 50 MiB of it."""

import importlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PACKAGE = "fedloom"
PARTS = ("tiers", "platform", "actors", "experiments")
MIB = 2**20
MOST_BYTES = 50 * MIB
LEFT_OUT = frozenset({"__pycache__", "data", "results", "tests", "venv"})
"""Folders that are not shipped, nor are hidden ones; one that holds an `__init__.py` is code, whatever its name."""


@dataclass(frozen=True)
class ShippedFile:
    """A file here, and where it lies in the job's folder."""

    source: Path
    target: PurePosixPath
    size_bytes: int


@dataclass(frozen=True)
class Shipment:
    """All that is shipped, sorted by target."""

    files: tuple[ShippedFile, ...]

    @property
    def size_bytes(self) -> int:
        """The sum of the files' sizes."""
        return sum(file.size_bytes for file in self.files)

    def largest(self, count: int = 4) -> list[tuple[str, int]]:
        """The largest entries, two folders deep (such as fedloom/platform), and their sizes in bytes."""
        sizes: Counter[str] = Counter()
        for file in self.files:
            sizes["/".join(file.target.parts[:2])] += file.size_bytes
        return sizes.most_common(count)

    def summary(self) -> str:
        """Number of files, size and largest entries in one line."""
        entries = ", ".join(f"{name} {as_mib(size)}" for name, size in self.largest())
        return f"{len(self.files)} files, {as_mib(self.size_bytes)} ({entries})"


def as_mib(size_bytes: int) -> str:
    """A size in MiB, as the limit is given."""
    return f"{size_bytes / MIB:.2f} MiB"


def plan_shipment(include: Sequence[Path] = ()) -> Shipment:
    """The package as it runs here and the included files; nothing is copied yet.

    An included path keeps its place relative to the working directory, so that overrides name it as they do here; one
    from elsewhere lies at the top. Below a named folder, data, results, tests and hidden entries are left out.

    Raises:
        ValueError: a path that does not exist or lies where another does, or more than `MOST_BYTES`.
    """
    found: dict[PurePosixPath, ShippedFile] = {}
    for part in PARTS:
        found |= {file.target: file for file in _files(package_folder(part), PurePosixPath(PACKAGE, part))}
    for path in include:
        for file in _files(_existing(path), target_of(path)):
            _add(found, file)
    shipment = Shipment(tuple(found[target] for target in sorted(found)))
    if shipment.size_bytes > MOST_BYTES:
        raise ValueError(
            f"a job may be given {MOST_BYTES // MIB} MiB, this would be {shipment.summary()}: leave out what is large "
            "with narrower --include, and let the job read data from the cluster's own disks (FEDLOOM_DATA, data.root)"
        )
    return shipment


@contextmanager
def shipped(shipment: Shipment) -> Iterator[Path]:
    """A temporary folder that holds the shipment for the block."""
    with tempfile.TemporaryDirectory(prefix="fedloom-submit-") as folder:
        for file in shipment.files:
            copy = Path(folder, file.target)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.source, copy)
        yield Path(folder)


def package_folder(part: str) -> Path:
    """Where the running `fedloom.PART` lies, be it a checkout or an installed wheel."""
    # A namespace package's path may begin with, or hold, entries that are no folders (an editable install's marker).
    places: Iterable[str] = importlib.import_module(f"fedloom.{part}").__path__
    return next(Path(place) for place in places if Path(place).is_dir())


def target_of(path: Path) -> PurePosixPath:
    """Where an included path lies in the job's folder."""
    absolute = Path(os.path.abspath(path.expanduser()))
    inside = absolute.is_relative_to(Path.cwd())
    return PurePosixPath(absolute.relative_to(Path.cwd()) if inside else absolute.name)


def _existing(path: Path) -> Path:
    if not path.expanduser().exists():
        raise ValueError(f"--include {path}: there is no such file or folder here")
    return path.expanduser()


def _files(source: Path, target: PurePosixPath, above: tuple[Path, ...] = ()) -> Iterator[ShippedFile]:
    """The files at or below a path; links are followed, but not in circles."""
    if source.is_file():
        yield ShippedFile(source, target, source.stat().st_size)
    elif source.is_dir() and source.resolve() not in above:
        for entry in sorted(source.iterdir()):
            if not _is_left_out(entry):
                yield from _files(entry, target / entry.name, (*above, source.resolve()))


def _is_left_out(entry: Path) -> bool:
    # Hidden: .git, .venv and caches, but also .env with its secrets and the .gitignore that Ray would obey.
    if entry.name.startswith("."):
        return True
    if not entry.is_dir():
        return entry.suffix == ".pyc"
    named = entry.name in LEFT_OUT and not (entry / "__init__.py").exists()
    return named or (entry / "pyvenv.cfg").exists()


def _add(found: dict[PurePosixPath, ShippedFile], file: ShippedFile) -> None:
    if file.target.parts[0] == PACKAGE:
        raise ValueError(
            f"--include: {file.source} would lie in the job's {PACKAGE}/, which holds this package: rename it"
        )
    there = found.setdefault(file.target, file)
    if there.source.resolve() != file.source.resolve():
        raise ValueError(
            f"--include: {file.source} and {there.source} would both be {file.target} in the job's folder: "
            "include only one of them, or rename it"
        )
