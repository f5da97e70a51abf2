"""Readers of image files: class folders, CINIC-10, the CIFAR pickles, the hub's Parquet files, and torchvision."""

import inspect
import io
import json
import os
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import file_digest, sha256
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from annotated_types import Interval
from PIL import Image

from fedloom.platform.data.artefact import AnyArray, ByteArray, Fields, IntArray, hash_of_file
from fedloom.platform.data.config import DataConfig, data_root
from fedloom.platform.data.source import HELD_OUT_SHARE, LabelSet, Source, held_out
from fedloom.platform.plugins import PluginError, in_one_line
from fedloom.platform.settings import NOT_EMPTY


def decode_image(
    encoded: bytes, where: str, shape: tuple[int, int], *, grey: bool = False, resized: bool = False
) -> ByteArray:
    """The pixels (3, H, W), or (1, H, W) if `grey`, of an encoded image; a grey image gets three equal channels.

    `resized` scales the image to `shape` (H, W) bilinearly. Raises a ValueError that starts with `where` if the image
    cannot be decoded, or has another shape and is not resized.
    """
    # Pillow gives the same pixels as torchvision's decoder at the same speed (75 µs measured), without importing it.
    try:
        image = Image.open(io.BytesIO(encoded)).convert("L" if grey else "RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{where} is not an image ({error}); expected PNG or JPEG") from error
    if resized and (image.height, image.width) != shape:
        image = image.resize((shape[1], shape[0]), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    if pixels.shape[:2] != shape:
        channels = (1,) if grey else (3,)
        raise ValueError(f"{where} has shape {(*pixels.shape[:2], *channels)}; expected {(*shape, *channels)}")
    return pixels[None] if grey else pixels.transpose(2, 0, 1)


# -- class folders: PART/CLASS/*.png, or CLASS/*.png without a test part ----------------------------------------------

PARTS = ("train", "test")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")

Listing = tuple[tuple[str, int], ...]
"""Names and sizes in bytes of the images of a class, sorted by name."""


@dataclass(frozen=True, slots=True)
class FolderSource(Source):
    """Images of `PART/CLASS/`, sorted by class and file name; created by `find_folders` or `find_cinic`.

    `shape` is (height, width) of all images; with `resized` images are scaled to it.
    """

    folder: Path
    listings: dict[str, tuple[Listing, ...]]
    class_names: tuple[str, ...] = field()  # without `field()` the base's property would be the default
    layout: str = field()
    shape: tuple[int, int] = field()
    grey: bool = False
    resized: bool = False
    scale: float = 255

    def identity(self) -> Fields:
        # Names and sizes, not contents: reading 180 000 small files from a cold disk takes minutes in every run, and an
        # image with other pixels rarely has the same size.
        digest = sha256()
        for part, listings in self.listings.items():
            for label, listing in zip(self.class_names, listings, strict=True):
                for name, size_bytes in listing:
                    digest.update(f"{part}/{label}/{name}\t{size_bytes}\n".encode())
        return {"layout": self.layout, "sha256_of_names_and_sizes": digest.hexdigest()}

    def labels(self, part: str) -> IntArray:
        counts = [len(listing) for listing in self.listings[part]]
        return np.repeat(np.arange(len(counts), dtype=np.int64), counts)

    def inputs(self, part: str, rows: IntArray) -> ByteArray:
        files = self._files(part)
        images_NCHW = np.empty((len(rows), 1 if self.grey else 3, *self.shape), dtype=np.uint8)
        for i, row in enumerate(rows.tolist()):
            encoded = files[row].read_bytes()
            images_NCHW[i] = decode_image(encoded, str(files[row]), self.shape, grey=self.grey, resized=self.resized)
        return images_NCHW

    def _files(self, part: str) -> list[Path]:
        folders = (self.folder / part / label for label in self.class_names)
        listings = zip(folders, self.listings[part], strict=True)
        return [folder / name for folder, listing in listings for name, _ in listing]


@dataclass(frozen=True, slots=True)
class OwnFolders(FolderSource):
    """A user's own folders; without a test part, a fifth of each class is held out for testing."""

    together: bool = False
    """Whether `folder` has the class folders directly, so that the test part is drawn from them."""

    def identity(self) -> Fields:
        options = {"shape": list(self.shape), "grey": self.grey, "resized": self.resized}
        return {**FolderSource.identity(self), **options, "held_out": HELD_OUT_SHARE if self.together else 0}

    def labels(self, part: str) -> IntArray:
        if not self.together:
            return FolderSource.labels(self, part)
        return FolderSource.labels(self, "")[self._rows(part)]

    def inputs(self, part: str, rows: IntArray) -> ByteArray:
        if not self.together:
            return FolderSource.inputs(self, part, rows)
        return FolderSource.inputs(self, "", self._rows(part)[rows])

    def _rows(self, part: str) -> IntArray:
        train, test = held_out(FolderSource.labels(self, ""))
        return test if part == "test" else train


def find_folders(folder: Path, size: int | None, *, grey: bool) -> OwnFolders:
    """The images in a folder's class folders; PluginError naming what is missing.

    With a `size`, images are scaled to size x size; otherwise all must have the size of the first.
    """
    if not folder.is_dir():
        raise PluginError(f"data set 'folder': {folder} is no folder; set data.options.path")
    together = not (folder / "train").is_dir()
    classes = _subfolders(folder if together else folder / "train")
    if len(classes) < 2:
        raise PluginError(
            f"data set 'folder': {folder} has {len(classes)} class folders: expected train/CLASS/*.png and "
            "test/CLASS/*.png, or CLASS/*.png"
        )
    listings = {part: _listings(folder / part, classes) for part in ([""] if together else PARTS)}
    shape = (size, size) if size is not None else _shape_of_first(folder, listings, classes)
    return OwnFolders(folder, listings, classes, "image folders", shape, grey, size is not None, together=together)


def _subfolders(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(f.name for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".")))


def _listings(folder: Path, classes: Sequence[str]) -> tuple[Listing, ...]:
    if not folder.is_dir():
        raise PluginError(f"data set 'folder': {folder} not found: there is a train part, but no test part")
    foreign = sorted(set(_subfolders(folder)) - set(classes))
    if foreign:
        raise PluginError(f"data set 'folder': {folder / foreign[0]} is a class that the train part does not have")
    listings = tuple(list_images(folder / label) for label in classes)
    for label, listing in zip(classes, listings, strict=True):
        if not listing:
            raise PluginError(f"data set 'folder': {folder / label} has no images ({', '.join(SUFFIXES)})")
    return listings


def list_images(folder: Path, suffixes: Sequence[str] = SUFFIXES) -> Listing:
    """The images of a class; empty if the folder does not exist."""
    if not folder.is_dir():
        return ()
    with os.scandir(folder) as entries:
        return tuple(sorted((e.name, e.stat().st_size) for e in entries if e.name.lower().endswith(tuple(suffixes))))


def _shape_of_first(folder: Path, listings: Mapping[str, Sequence[Listing]], classes: Sequence[str]) -> tuple[int, int]:
    from PIL import Image

    part, first = next(iter(listings.items()))
    file = folder / part / classes[0] / first[0][0][0]
    try:
        with Image.open(file) as image:
            return image.height, image.width
    except (OSError, SyntaxError, ValueError) as error:
        raise PluginError(f"data set 'folder': {file} is not an image ({error})") from error


# -- CINIC-10 as its authors publish it: one folder per part and class (Darlow et al. 2018) ---------------------------

CINIC_FOLDERS = ("CINIC-10", "cinic10")
CINIC_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""The class folders in the order of their labels."""
IMAGE_SHAPE = (32, 32)


def find_cinic(root: Path) -> FolderSource | None:
    """The source in `CINIC-10/` or `cinic10/` under `root`; None if neither exists.

    The original's validation set `valid` is not read: as for all data sets, a client's validation samples are taken
    from its training samples.
    Raises ValueError naming the folder that is missing, empty, or not one of the published classes.
    """
    there = [root / name for name in CINIC_FOLDERS if (root / name).is_dir()]
    if not there:
        return None
    folder = next((folder for folder in there if (folder / PARTS[0]).is_dir()), there[0])
    listings = {part: _list_cinic_part(folder / part) for part in PARTS}
    return FolderSource(folder, listings, CINIC_CLASSES, "CINIC-10 folders", IMAGE_SHAPE)


def _list_cinic_part(folder: Path) -> tuple[Listing, ...]:
    if not folder.is_dir():
        raise ValueError(f"{folder}: not found; CINIC-10 has the folders train and test: unpack the archive again")
    # Another folder would not change the labels, but shows that this is not the published data set.
    foreign = sorted(f.name for f in folder.iterdir() if f.is_dir() and f.name not in CINIC_CLASSES)
    if foreign:
        raise ValueError(f"{folder / foreign[0]}: not a class of CINIC-10; expected {', '.join(CINIC_CLASSES)}")
    return tuple(_list_cinic_class(folder / label) for label in CINIC_CLASSES)


def _list_cinic_class(folder: Path) -> Listing:
    if not folder.is_dir():
        raise ValueError(f"{folder}: not found; CINIC-10 has one folder per class: unpack the archive again")
    images = list_images(folder, (".png",))
    if not images:
        raise ValueError(f"{folder}: has no .png files; unpack the archive again")
    return images


# -- CIFAR-10 and CIFAR-100 as their authors publish them: Python 2 pickles of plain dictionaries ---------------------
# They are not read by torchvision, because it requires the MD5 sums of the originals and unpickles arbitrary objects.
# They are read from their folder, or from the archive that torchvision downloads, without unpacking it.

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


def _read_archive(folder: Path, names: Sequence[str], take: Callable[[IO[bytes]], _T]) -> dict[str, _T]:
    """What is taken of files in the folder's archive, which is read once.

    Raises ValueError if it is damaged or lacks one.
    """
    archive = _archive(folder)
    content_of: dict[str, _T] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = member.name.removeprefix(f"{folder.name}/")
                if name in names and (file := tar.extractfile(member)) is not None:
                    content_of[name] = take(file)
                if len(content_of) == len(names):
                    break
        return {name: content_of[name] for name in names}
    except (tarfile.TarError, EOFError, OSError, zlib.error, KeyError) as error:
        lost = next(name for name in names if name not in content_of)
        raise ValueError(
            f"{archive}: {lost} cannot be read from it ({in_one_line(error)}); download the archive again"
        ) from error


def _open_published(path: Path) -> IO[bytes]:
    """A file of the folder, or of the archive beside it; ValueError for an archive that is damaged or lacks it."""
    if not _is_packed(path.parent):
        return path.open("rb")
    return io.BytesIO(_read_archive(path.parent, [path.name], lambda file: file.read())[path.name])


def _hashes(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of files of the folder; in the archive beside it they are the same: unpacking it changes nothing."""
    if not _is_packed(folder):
        return {name: hash_of_file(folder / name) for name in names}
    return _read_archive(folder, names, lambda file: file_digest(cast(Any, file), "sha256").hexdigest())


def _unpickle(path: Path) -> dict[str, Any]:
    file = _open_published(path)
    try:
        with file:
            content = _PlainUnpickler(file, encoding="latin1").load()
    except _UNREADABLE as error:
        raise ValueError(f"{path}: not a published CIFAR batch ({error}); expected a pickled dictionary") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}; expected a pickled dictionary")
    return content


def _read_batch(path: Path, labels_key: str, num_classes: int) -> tuple[ByteArray, IntArray]:
    content = _unpickle(path)
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
        meta = _unpickle(path)
        if self.layout.names_key not in meta:
            raise ValueError(f"{path}: keys {sorted(map(str, meta))}; expected {self.layout.names_key}")
        return tuple(str(name) for name in meta[self.layout.names_key])

    @property
    def label_sets(self) -> Mapping[str, LabelSet]:
        """The published superclasses, if there are any."""
        if not self.layout.coarse_labels_key:
            return {}
        path, meta = self.folder / self.layout.train[0], _unpickle(self.folder / self.layout.meta)
        content = _unpickle(path)
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


# -- the Parquet layout of the Hugging Face hub: images and labels in columns -----------------------------------------

LABEL_COLUMNS = {"cifar10": "label", "cifar100": "fine_label", "cinic10": "label"}
IMAGE_COLUMNS = ("img", "image")
COARSE_COLUMNS = {"cifar100": "coarse_label"}
NUM_CLASSES = {"cifar10": 10, "cifar100": 100, "cinic10": 10}
NUM_SUPERCLASSES = 20


def find_parquet(folder: Path, dataset: str) -> "ParquetSource | None":
    """The source in `folder` or in one of the hub's sub-folders below it; None if there are no files.

    Raises ValueError naming the file whose columns are not the expected ones.
    """
    for candidate in (folder, folder / "plain_text", folder / dataset, folder / "data"):
        files = {part: tuple(sorted(candidate.glob(f"{part}-*.parquet"))) for part in ("train", "test")}
        if files["train"] and files["test"]:
            for file in (*files["train"], *files["test"]):
                _check_columns(file, LABEL_COLUMNS[dataset])
            return ParquetSource(dataset, files)
    return None


def _expected(label: str) -> str:
    return f"expected a Parquet file with columns img{{bytes,path}} (or image) and {label} (integer)"


def _schema(file: Path, label: str) -> pa.Schema:
    try:
        return pq.read_schema(file)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file}: cannot be read ({str(error).splitlines()[0]}); {_expected(label)}") from error


def _image_column(names: Sequence[str]) -> str:
    return next((name for name in IMAGE_COLUMNS if name in names), IMAGE_COLUMNS[0])


def _check_columns(file: Path, label: str) -> None:
    schema = _schema(file, label)
    types = dict(zip(schema.names, schema.types, strict=True))
    img = types.get(_image_column(schema.names))
    has_bytes = img is not None and pa.types.is_struct(img) and img.get_field_index("bytes") >= 0
    if not has_bytes or label not in types or not pa.types.is_integer(types[label]):
        raise ValueError(f"{file}: columns {', '.join(schema.names)}; {_expected(label)}")


def _read_column(file: Path, column: str, label: str) -> pa.ChunkedArray:
    try:
        return pq.read_table(file, columns=[column]).column(0)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file}: cannot be read ({str(error).splitlines()[0]}); {_expected(label)}") from error


@dataclass(frozen=True, slots=True)
class ParquetSource(Source):
    """The rows of one or more `train-*.parquet` and `test-*.parquet`, in the order of the file names."""

    dataset: str
    files: dict[str, tuple[Path, ...]]
    scale: float = 255

    @property
    def label(self) -> str:
        """Name of the label column."""
        return LABEL_COLUMNS[self.dataset]

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names in the hub's schema metadata; numbers if there are none."""
        return self._names(self.label, NUM_CLASSES[self.dataset])

    def _names(self, column: str, count: int) -> tuple[str, ...]:
        file = self.files["train"][0]
        metadata = _schema(file, self.label).metadata or {}
        try:
            names = json.loads(metadata[b"huggingface"])["info"]["features"][column]["names"]
        except (KeyError, TypeError, ValueError):
            return tuple(str(c) for c in range(count))
        if len(names) != count:
            raise ValueError(f"{file}: names {len(names)} classes; expected {count}")
        return tuple(map(str, names))

    @property
    def label_sets(self) -> Mapping[str, LabelSet]:
        """The superclasses, if the files have their column."""
        column, files = COARSE_COLUMNS.get(self.dataset), self.files["train"]
        if column is None or any(column not in _schema(file, self.label).names for file in files):
            return {}
        coarse = np.concatenate([_read_column(f, column, self.label).to_numpy().astype(np.int64) for f in files])
        names = self._names(column, NUM_SUPERCLASSES)
        return {"coarse": LabelSet.from_labels(self.labels("train"), coarse, len(self.class_names), names, files[0])}

    def identity(self) -> Fields:
        files = (*self.files["train"], *self.files["test"])
        return {"layout": f"{self.dataset} Parquet", "sha256": {f.name: hash_of_file(f) for f in files}}

    def labels(self, part: str) -> IntArray:
        return np.concatenate([self._labels_of(file) for file in self.files[part]])

    def _labels_of(self, file: Path) -> IntArray:
        column = _read_column(file, self.label, self.label)
        if column.null_count:
            raise ValueError(f"{file}: {column.null_count} of {len(column)} labels are missing")
        y: IntArray = column.to_numpy().astype(np.int64)
        if y.size and not (y.min() >= 0 and y.max() < NUM_CLASSES[self.dataset]):
            raise ValueError(f"{file}: labels {y.min()}..{y.max()}; expected 0..{NUM_CLASSES[self.dataset] - 1}")
        return y

    def inputs(self, part: str, rows: IntArray) -> ByteArray:
        wanted = np.sort(rows)
        decoded = np.stack(list(self._decoded(part, wanted)))
        return decoded if np.array_equal(wanted, rows) else decoded[np.searchsorted(wanted, rows)]

    def _decoded(self, part: str, sorted_rows: IntArray) -> Iterator[ByteArray]:
        start = 0
        for file in self.files[part]:
            column = _read_column(file, _image_column(_schema(file, self.label).names), self.label)
            here = sorted_rows[(sorted_rows >= start) & (sorted_rows < start + len(column))] - start
            for row, image in zip(here.tolist(), column.take(pa.array(here)), strict=True):
                encoded = (image.as_py() or {}).get("bytes")
                if not encoded:
                    raise ValueError(f"{file}: row {row} has no image; expected PNG or JPEG bytes in img")
                yield decode_image(encoded, f"{file}: row {row}", IMAGE_SHAPE)
            start += len(column)


# -- torchvision's classification data sets, by the names of their Python classes -------------------------------------

LABEL_ATTRIBUTES = ("targets", "labels", "_labels", "y")
"""The attributes in which torchvision's data sets store their labels."""
TEST_SPLITS = ("test", "val", "valid")
IMAGE_SIDE = Interval(ge=1, le=10_000)
"""Pixels to which images may be scaled."""


def torchvision_datasets() -> Any:
    """The module `torchvision.datasets`; ValueError if torchvision is incompatible with torch."""
    # Imported here because a torchvision built for another torch fails on import, and few data sets need it.
    try:
        from torchvision import datasets
    except (ImportError, RuntimeError, AttributeError) as error:
        raise ValueError(
            f"torchvision does not fit the installed torch ({error}); install the torchvision release made for it "
            "(pip install --upgrade torch torchvision), or use files that are there already"
        ) from error
    return datasets


def torchvision_set(
    name: str,
    config: DataConfig,
    *,
    size: Annotated[int | None, IMAGE_SIDE, "scale images to size x size; null: as they are"] = None,
    split: Annotated[str | None, NOT_EMPTY, "torchvision's own `split` where it says which set, as for EMNIST"] = None,
) -> "TorchvisionSource":
    """The data set `torchvision:NAME`, from files under data.root, or downloaded with data.download=true."""
    blame = f"data set 'torchvision:{name}'"
    kind = getattr(torchvision_datasets(), name, None)
    if not inspect.isclass(kind):
        raise PluginError(f"{blame}: torchvision.datasets has no {name!r}")
    parts = {part: _open_torchvision(kind, part, config, split, blame) for part in ("train", "test")}
    return TorchvisionSource(name, parts, size)


def _open_torchvision(kind: Any, part: str, config: DataConfig, split: str | None, blame: str) -> Any:
    parameters = inspect.signature(kind).parameters
    options: dict[str, Any] = {"split": split} if split is not None else {}
    if "download" in parameters:
        options["download"] = config.download
    if "train" in parameters:
        choices: list[dict[str, Any]] = [{"train": part == "train"}]
    elif "split" in parameters and split is None:
        choices = [{"split": s} for s in (("train",) if part == "train" else TEST_SPLITS)]
    elif "image_set" in parameters:
        choices = [{"image_set": s} for s in (("train",) if part == "train" else TEST_SPLITS)]
    else:
        raise PluginError(f"{blame}: it does not say which of its samples train; use data.dataset=folder or npz")
    root, problem = data_root(config), ""
    for choice in choices:
        try:
            return kind(str(root), **choice, **options)
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            problem = problem or in_one_line(error).partition(" (line ")[0]
    download = "" if config.download else ", or set data.download=true"
    raise PluginError(f"{blame} cannot be opened in {root}: {problem}; set data.root to where its files lie{download}")


class TorchvisionSource(Source):
    """A torchvision data set without transforms."""

    scale: float = 255

    def __init__(self, name: str, parts: dict[str, Any], size: int | None) -> None:
        self.name, self.parts, self.size = name, parts, size
        self._labels = {
            part: _torchvision_labels(dataset, f"data set 'torchvision:{name}'") for part, dataset in parts.items()
        }

    @cached_property
    def class_names(self) -> Sequence[str]:
        """Torchvision's class names; numbers if it has none."""
        count = 1 + max(int(y.max()) for y in self._labels.values())
        names = getattr(self.parts["train"], "classes", None)
        texts = tuple(" / ".join(n) if isinstance(n, tuple) else str(n) for n in names) if names else ()
        return texts if len(texts) >= count else tuple(map(str, range(count)))

    def identity(self) -> Fields:
        # No hashes of the images: torchvision checks the files when it downloads them.
        labels = {part: sha256(y.tobytes()).hexdigest() for part, y in self._labels.items()}
        return {"layout": f"torchvision {self.name}", "sha256_of_labels": labels, "size": self.size}

    def labels(self, part: str) -> IntArray:
        return self._labels[part]

    def inputs(self, part: str, rows: IntArray) -> AnyArray:
        images = [self._pixels(self.parts[part][row][0], part, row) for row in rows.tolist()]
        shapes = {image.shape for image in images}
        if len(shapes) > 1:
            raise PluginError(
                f"data set 'torchvision:{self.name}' has images of different sizes, such as {sorted(shapes)[:2]}: set "
                "data.options.size"
            )
        return np.stack(images)

    def _pixels(self, image: Any, part: str, row: int) -> ByteArray:
        from PIL import Image

        if not isinstance(image, Image.Image):
            raise PluginError(
                f"data set 'torchvision:{self.name}': sample {row} of {part} is {type(image).__name__}, not an image"
            )
        if image.mode not in ("L", "RGB"):
            image = image.convert("RGB")
        if self.size is not None:
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        pixels = np.asarray(image)
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _torchvision_labels(dataset: Any, blame: str) -> IntArray:
    """The labels (n,), read without decoding images if the data set stores them separately."""
    targets = next(
        (getattr(dataset, name) for name in LABEL_ATTRIBUTES if getattr(dataset, name, None) is not None), None
    )
    if targets is None:
        targets = [dataset[row][1] for row in range(len(dataset))]
    try:
        labels = np.asarray(targets).reshape(-1).astype(np.int64)
    except (TypeError, ValueError):
        labels = np.array([], dtype=np.int64)
    if len(labels) != len(dataset) or not len(labels) or labels.min() < 0:
        raise PluginError(f"{blame}: its targets are not one class per image; it is no classification set")
    return labels
