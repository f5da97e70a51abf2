"""CIFAR-10 and CIFAR-100 as their authors publish them: Python 2 pickles of plain dictionaries.

They are not read by torchvision, because it requires the MD5 sums of the originals and unpickles arbitrary objects.
They are read from their folder, or from the archive that torchvision downloads, without unpacking it.
"""

import io
import pickle
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import numpy as np

from fedloom.platform.data.artefact import ByteArray, Fields, IntArray, hash_of_file
from fedloom.platform.data.label_sets import LabelSet
from fedloom.platform.data.source import Source
from fedloom.platform.plugins import in_one_line

_T = TypeVar("_T")

_UNREADABLE = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    ImportError,
    IndexError,
    KeyError,
    OverflowError,
    TypeError,
    ValueError,
)
"""The errors that damaged pickles raise, according to the documentation of `pickle` and to experiments."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Names of the files and of their keys."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    names_key: str
    labels_key: str
    coarse_names_key: str = ""
    coarse_labels_key: str = ""


LAYOUTS = {
    "cifar10": Layout(
        "cifar-10-batches-py",
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        ("test_batch",),
        "batches.meta",
        "label_names",
        "labels",
    ),
    "cifar100": Layout(
        *("cifar-100-python", ("train",), ("test",), "meta", "fine_label_names", "fine_labels"),
        *("coarse_label_names", "coarse_labels"),
    ),
}


ARCHIVES = {"cifar-10-batches-py": "cifar-10-python.tar.gz", "cifar-100-python": "cifar-100-python.tar.gz"}
"""The archives of the folders, as torchvision downloads them."""


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles NumPy arrays and plain containers, and rejects everything else."""

    def find_class(self, module: str, name: str) -> Any:
        # NumPy renamed `core` to `_core`; the published files use the old name.
        allowed = {
            ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"refers to {module}.{name}")
        return allowed[module, name]


def _is_packed(folder: Path) -> bool:
    """Whether only the archive of a folder is there."""
    return not folder.is_dir() and _archive(folder).is_file()


def _archive(folder: Path) -> Path:
    return folder.with_name(ARCHIVES[folder.name])


def _taken(folder: Path, names: Sequence[str], take: Callable[[IO[bytes]], _T]) -> dict[str, _T]:
    """What is taken of files in the folder's archive, which is read once.

    Raises ValueError if it is damaged or lacks one.
    """
    archive = _archive(folder)
    found: dict[str, _T] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = member.name.removeprefix(f"{folder.name}/")
                if name in names and (file := tar.extractfile(member)) is not None:
                    found[name] = take(file)
                if len(found) == len(names):
                    break
        return {name: found[name] for name in names}
    except (tarfile.TarError, EOFError, OSError, zlib.error, KeyError) as error:
        lost = next(name for name in names if name not in found)
        raise ValueError(
            f"{archive}: {lost} cannot be read from it ({in_one_line(error)}); download the archive again"
        ) from error


def _opened(path: Path) -> IO[bytes]:
    """A file of the folder, or of the archive beside it; ValueError for an archive that is damaged or lacks it."""
    if not _is_packed(path.parent):
        return path.open("rb")
    return io.BytesIO(_taken(path.parent, [path.name], lambda file: file.read())[path.name])


def _hashes(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of files of the folder; in the archive beside it they are the same: unpacking it changes nothing."""
    if not _is_packed(folder):
        return {name: hash_of_file(folder / name) for name in names}
    return _taken(folder, names, lambda file: file_digest(cast(Any, file), "sha256").hexdigest())


def _read(path: Path) -> dict[str, Any]:
    file = _opened(path)
    try:
        with file:
            content = _PlainUnpickler(file, encoding="latin1").load()
    except _UNREADABLE as error:
        raise ValueError(f"{path}: not a published CIFAR batch ({error}); expected a pickled dictionary") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}; expected a pickled dictionary")
    return content


def _read_batch(path: Path, labels_key: str, num_classes: int) -> tuple[ByteArray, IntArray]:
    content = _read(path)
    if "data" not in content or labels_key not in content:
        raise ValueError(f"{path}: keys {sorted(map(str, content))}; expected data and {labels_key}")
    x, labels = content["data"], content[labels_key]
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.shape != (len(labels), 3 * 32 * 32):
        raise ValueError(f"{path}: data is not uint8 of shape ({len(labels)}, 3072), one row per label")
    y = np.asarray(labels, dtype=np.int64)
    if y.size and not (y.min() >= 0 and y.max() < num_classes):
        raise ValueError(f"{path}: labels {y.min()}..{y.max()}; expected 0..{num_classes - 1}")
    return x.reshape(-1, 3, 32, 32), y


@dataclass(frozen=True, slots=True)
class PickleSource(Source):
    """The authors' `cifar-10-batches-py` or `cifar-100-python`; files are read on demand."""

    folder: Path
    layout: Layout
    scale: float = 255

    def missing_files(self) -> list[str]:
        """The names of the published files that are missing in the folder; none if the archive is there instead."""
        return [] if _is_packed(self.folder) else [f for f in self._files() if not (self.folder / f).is_file()]

    @property
    def class_names(self) -> tuple[str, ...]:
        """The published names of the (fine) classes."""
        path = self.folder / self.layout.meta
        meta = _read(path)
        if self.layout.names_key not in meta:
            raise ValueError(f"{path}: keys {sorted(map(str, meta))}; expected {self.layout.names_key}")
        return tuple(str(name) for name in meta[self.layout.names_key])

    @property
    def label_sets(self) -> Mapping[str, LabelSet]:
        """The published superclasses, if there are any."""
        if not self.layout.coarse_labels_key:
            return {}
        path, meta = self.folder / self.layout.train[0], _read(self.folder / self.layout.meta)
        content = _read(path)
        if self.layout.coarse_names_key not in meta or self.layout.coarse_labels_key not in content:
            return {}  # a copy without them is complete for all else
        fine, coarse = (np.asarray(content[k]) for k in (self.layout.labels_key, self.layout.coarse_labels_key))
        names = meta[self.layout.coarse_names_key]
        return {"coarse": LabelSet.from_labels(fine, coarse, len(self.class_names), names, path)}

    def identity(self) -> Fields:
        return {"layout": self.layout.folder, "sha256": _hashes(self.folder, self._files())}

    def labels(self, part: str) -> IntArray:
        return np.concatenate([y for _, y in self._batches(part)])

    def inputs(self, part: str, rows: IntArray) -> ByteArray:
        x: ByteArray = np.concatenate([x for x, _ in self._batches(part)])[rows]
        return x

    def _files(self) -> tuple[str, ...]:
        return (*self.layout.train, *self.layout.test, self.layout.meta)

    def _batches(self, part: str) -> list[tuple[ByteArray, IntArray]]:
        files = self.layout.train if part == "train" else self.layout.test
        num_classes = len(self.class_names)
        return [_read_batch(self.folder / f, self.layout.labels_key, num_classes) for f in files]
