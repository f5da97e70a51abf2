"""The files of a cluster job: this package's source and the user's included files, at most 50 MiB."""

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
"""Folders that are not shipped, like hidden ones, unless they hold an `__init__.py` and are therefore code."""


@dataclass(frozen=True)
class ShippedFile:
    """A local file and its path in the job's folder."""

    source: Path
    target: PurePosixPath
    size_bytes: int


@dataclass(frozen=True)
class Shipment:
    """All shipped files, sorted by target."""

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
    """Formats a size in MiB, the unit of the limit."""
    return f"{size_bytes / MIB:.2f} MiB"


def plan_shipment(include: Sequence[Path] = ()) -> Shipment:
    """Lists the files of the running package and the included files without copying them.

    An included path keeps its location relative to the working directory, so that overrides with this path stay valid;
    a path outside the working directory is placed at the top. In included folders, data, results, tests and hidden
    entries are left out.

    Raises:
        ValueError: a path does not exist or has the same target as another, or the size exceeds `MOST_BYTES`.
    """
    top = Path(str(importlib.import_module(PACKAGE).__file__))
    files = {file.target: file for file in _files(top, PurePosixPath(PACKAGE, top.name))}
    for part in PARTS:
        files |= {file.target: file for file in _files(package_folder(part), PurePosixPath(PACKAGE, part))}
    for path in include:
        for file in _files(_existing(path), target_of(path)):
            _add(files, file)
    shipment = Shipment(tuple(files[target] for target in sorted(files)))
    if shipment.size_bytes > MOST_BYTES:
        raise ValueError(
            f"a job may be given {MOST_BYTES // MIB} MiB, this would be {shipment.summary()}: leave out what is large "
            "with narrower --include, and let the job read data from the cluster's own disks (FEDLOOM_DATA, data.root)"
        )
    return shipment


@contextmanager
def shipped(shipment: Shipment) -> Iterator[Path]:
    """Copies the shipment to a temporary folder that exists for the duration of the block."""
    with tempfile.TemporaryDirectory(prefix="fedloom-submit-") as folder:
        for file in shipment.files:
            copy = Path(folder, file.target)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.source, copy)
        yield Path(folder)


def package_folder(part: str) -> Path:
    """The folder of the running `fedloom.PART`, in a checkout or an installed wheel."""
    # The path of a namespace package may hold entries that are not folders (the marker of an editable install).
    folders: Iterable[str] = importlib.import_module(f"fedloom.{part}").__path__
    return next(Path(folder) for folder in folders if Path(folder).is_dir())


def target_of(path: Path) -> PurePosixPath:
    """The location of an included path in the job's folder."""
    absolute = Path(os.path.abspath(path.expanduser()))
    inside = absolute.is_relative_to(Path.cwd())
    return PurePosixPath(absolute.relative_to(Path.cwd()) if inside else absolute.name)


def _existing(path: Path) -> Path:
    if not path.expanduser().exists():
        raise ValueError(f"--include {path}: there is no such file or folder here")
    return path.expanduser()


def _files(source: Path, target: PurePosixPath, above: tuple[Path, ...] = ()) -> Iterator[ShippedFile]:
    """The files at or below a path; follows links, but not in cycles."""
    if source.is_file():
        yield ShippedFile(source, target, source.stat().st_size)
    elif source.is_dir() and source.resolve() not in above:
        for entry in sorted(source.iterdir()):
            if not _is_left_out(entry):
                yield from _files(entry, target / entry.name, (*above, source.resolve()))


def _is_left_out(entry: Path) -> bool:
    # Hidden entries include .git, .venv and caches, .env with secrets, and .gitignore, which Ray would apply.
    if entry.name.startswith("."):
        return True
    if not entry.is_dir():
        return entry.suffix == ".pyc"
    named = entry.name in LEFT_OUT and not (entry / "__init__.py").exists()
    return named or (entry / "pyvenv.cfg").exists()


def _add(files: dict[PurePosixPath, ShippedFile], file: ShippedFile) -> None:
    if file.target.parts[0] == PACKAGE:
        raise ValueError(
            f"--include: {file.source} would lie in the job's {PACKAGE}/, which holds this package: rename it"
        )
    there = files.setdefault(file.target, file)
    if there.source.resolve() != file.source.resolve():
        raise ValueError(
            f"--include: {file.source} and {there.source} would both be {file.target} in the job's folder: "
            "include only one of them, or rename it"
        )
