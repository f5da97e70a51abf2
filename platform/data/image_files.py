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
from torch import Tensor

from fedloom.platform.data.artefact import AnyArray, ByteArray, Fields, IntArray, hash_of_file
from fedloom.platform.data.config import DataConfig, data_root
from fedloom.platform.data.dataset import PARTS
from fedloom.platform.data.source import HELD_OUT_SHARE, LabelSet, Source, held_out
from fedloom.platform.plugins import PluginError, in_one_line
from fedloom.platform.settings import NOT_EMPTY


def decode_image(
    encoded: bytes, where: str, shape: tuple[int, int], *, grey: bool = False, resized: bool = False
) -> ByteArray:
    """The pixels (3, H, W), or (1, H, W) if `grey`, of an encoded image; a grey image gets three equal channels.

    `resized` scales the image to `shape` (H, W) bilinearly. Raises a ValueError that starts with `where` if the image
    cannot be decoded, has more than 8 bits per pixel, or has another shape and is not resized.
    """
    # Pillow gives the same pixels as torchvision's decoder at the same speed (75 µs measured), without importing it.
    try:
        original = Image.open(io.BytesIO(encoded))
        image = original.convert("L" if grey else "RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{where} is not an image ({error}); expected PNG or JPEG") from error
    if original.mode.startswith(("I", "F")):  # Pillow clips them: all values above 255 are white
        raise ValueError(
            f"{where} has more than 8 bits per pixel: convert it to 8 bits, or bring the values by data.dataset=npz"
        )
    if resized and (image.height, image.width) != shape:
        image = image.resize((shape[1], shape[0]), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    if pixels.shape[:2] != shape:
        channels = (1,) if grey else (3,)
        raise ValueError(f"{where} has shape {(*pixels.shape[:2], *channels)}; expected {(*shape, *channels)}")
    return pixels[None] if grey else pixels.transpose(2, 0, 1)


# -- class folders: PART/CLASS/*.png, or CLASS/*.png without a test part ----------------------------------------------

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")

Listing = tuple[tuple[str, int], ...]
"""Names and sizes in bytes of the images of a class, sorted by name."""


@dataclass(frozen=True, slots=True)
class FolderSource(Source):
    """Images of `PART/CLASS/`, sorted by class and file name; created by `find_folders` or `find_cinic`.

    `shape` is (height, width) of all images; with `resized` images are scaled to it. If the only part is "", the class
    folders are directly in `folder`, and a fifth of each class is held out for testing.
    """

    folder: Path
    listings: dict[str, tuple[Listing, ...]]
    class_names: tuple[str, ...] = field()  # without `field()` the base's property would be the default
    layout: str = field()
    shape: tuple[int, int] = field()
    grey: bool = False
    resized: bool = False
    options: Fields = field(default_factory=dict)
    """Further fields of `identity` that determine the content."""
    scale: float = 255
    _parts: dict[str, tuple[str, IntArray, IntArray]] = field(default_factory=dict, init=False)
    """What `_part` returns for each part, computed once."""

    def identity(self) -> Fields:
        digest = sha256()
        for part, listings in self.listings.items():
            for label, listing in zip(self.class_names, listings, strict=True):
                folder = self.folder / part / label
                for name, size_bytes in listing:
                    digest.update(f"{part}/{label}/{name}\t{size_or_hash(folder, name, size_bytes)}\n".encode())
        return {"layout": self.layout, "sha256_of_names_and_sizes": digest.hexdigest(), **self.options}

    def labels(self, part: str) -> IntArray:
        return self._part(part)[1]

    def inputs(self, part: str, rows: IntArray) -> ByteArray:
        folder, labels, places = self._part(part)
        images_NCHW = np.empty((len(rows), 1 if self.grey else 3, *self.shape), dtype=np.uint8)
        for image, label, position in zip(images_NCHW, labels[rows].tolist(), places[rows].tolist(), strict=True):
            file = self.folder / folder / self.class_names[label] / self.listings[folder][label][position][0]
            image[:] = decode_image(file.read_bytes(), str(file), self.shape, grey=self.grey, resized=self.resized)
        return images_NCHW

    def _part(self, part: str) -> tuple[str, IntArray, IntArray]:
        """A part's folder, and for each of its images the label and the position in the listing of its class."""
        if part not in self._parts:
            folder = part if part in self.listings else ""
            sizes = [len(listing) for listing in self.listings[folder]]
            labels, places = np.repeat(np.arange(len(sizes)), sizes), np.concatenate([np.arange(n) for n in sizes])
            blame = f"data set 'folder': {self.folder}"
            rows = np.arange(len(labels)) if folder == part else held_out(labels, blame)[PARTS.index(part)]
            self._parts[part] = folder, labels[rows], places[rows]
        return self._parts[part]


UNCOMPRESSED = (".bmp", ".pgm", ".ppm", ".tif", ".tiff")


def size_or_hash(folder: Path, name: str, size_bytes: int) -> str:
    """What identifies an image's content: its size, or, for an uncompressed one, the SHA-256 (hex) of its bytes."""
    # Reading 180 000 small files from a cold disk takes minutes in every run, and a compressed image with other pixels
    # rarely has the same size; uncompressed ones always have it.
    return hash_of_file(folder / name) if name.lower().endswith(UNCOMPRESSED) else str(size_bytes)


def find_folders(folder: Path, size: int | None, *, grey: bool) -> FolderSource:
    """The images in a folder's class folders; PluginError naming what is missing.

    With a `size`, images are scaled to size x size; otherwise all must have the size of the first.
    """
    blame = "data set 'folder':"
    if not folder.is_dir():
        raise PluginError(f"{blame} {folder} is no folder; set data.options.path")
    parts = PARTS if (folder / "train").is_dir() else ("",)
    classes = _subfolders(folder / parts[0])
    if len(classes) < 2:
        raise PluginError(
            f"{blame} {folder} has {len(classes)} class folders: expected train/CLASS/*.png and "
            "test/CLASS/*.png, or CLASS/*.png"
        )
    listings: dict[str, tuple[Listing, ...]] = {}
    for part in parts:
        if not (folder / part).is_dir():
            raise PluginError(f"{blame} {folder / part} not found: there is a train part, but no test part")
        foreign = sorted(set(_subfolders(folder / part)) - set(classes))
        if foreign:
            raise PluginError(f"{blame} {folder / part / foreign[0]} is a class that the train part does not have")
        listings[part] = tuple(list_images(folder / part / label) for label in classes)
        for label, listing in zip(classes, listings[part], strict=True):
            if not listing:
                raise PluginError(f"{blame} {folder / part / label} has no images ({', '.join(SUFFIXES)})")
    shape = (size or 0, size or 0)
    if size is None:
        first = folder / parts[0] / classes[0] / listings[parts[0]][0][0][0]
        try:
            with Image.open(first) as image:
                shape = image.height, image.width
        except (OSError, SyntaxError, ValueError) as error:
            raise PluginError(f"{blame} {first} is not an image ({error})") from error
    options = {"shape": list(shape), "grey": grey, "resized": size is not None}
    options["held_out"] = HELD_OUT_SHARE if parts == ("",) else 0
    return FolderSource(folder, listings, classes, "image folders", shape, grey, size is not None, options)


def _subfolders(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(f.name for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".")))


def list_images(folder: Path, suffixes: Sequence[str] = SUFFIXES) -> Listing:
    """The images of a class without hidden files, which macOS adds; empty if the folder does not exist."""
    if not folder.is_dir():
        return ()
    with os.scandir(folder) as entries:
        images = [e for e in entries if e.name.lower().endswith(tuple(suffixes)) and not e.name.startswith(".")]
        return tuple(sorted((e.name, e.stat().st_size) for e in images))


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
    listings: dict[str, tuple[Listing, ...]] = {}
    for part in PARTS:
        if not (folder / part).is_dir():
            raise ValueError(
                f"{folder / part}: not found; CINIC-10 has the folders train and test: unpack the archive again"
            )
        # Another folder would not change the labels, but shows that this is not the published data set.
        foreign = sorted(set(_subfolders(folder / part)) - set(CINIC_CLASSES))
        if foreign:
            expected = ", ".join(CINIC_CLASSES)
            raise ValueError(f"{folder / part / foreign[0]}: not a class of CINIC-10; expected {expected}")
        listings[part] = tuple(list_images(folder / part / label, (".png",)) for label in CINIC_CLASSES)
        for label, listing in zip(CINIC_CLASSES, listings[part], strict=True):
            if not (folder / part / label).is_dir():
                where = folder / part / label
                raise ValueError(f"{where}: not found; CINIC-10 has one folder per class: unpack the archive again")
            if not listing:
                raise ValueError(f"{folder / part / label}: has no .png files; unpack the archive again")
    return FolderSource(folder, listings, CINIC_CLASSES, "CINIC-10 folders", IMAGE_SHAPE)


# -- CIFAR-10 and CIFAR-100 as their authors publish them: Python 2 pickles of plain dictionaries ---------------------
# They are not read by torchvision, because it requires the MD5 sums of the originals and unpickles arbitrary objects.
# They are read from their folder, or from the archive that torchvision downloads, without unpacking it.

_T = TypeVar("_T")

_UNREADABLE = (
    *(pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, OverflowError),
    *(TypeError, ValueError),
)
"""The errors that damaged pickles raise, according to the documentation of `pickle` and to experiments."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Names of the files and of their keys."""

    folder: str
    archive: str
    """The archive of the folder, as torchvision downloads it."""
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    names_key: str
    labels_key: str
    coarse_names_key: str = ""
    coarse_labels_key: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        """All files."""
        return (*self.train, *self.test, self.meta)


LAYOUTS = {
    "cifar10": Layout(
        "cifar-10-batches-py",
        "cifar-10-python.tar.gz",
        train=tuple(f"data_batch_{i}" for i in range(1, 6)),
        test=("test_batch",),
        meta="batches.meta",
        names_key="label_names",
        labels_key="labels",
    ),
    "cifar100": Layout(
        "cifar-100-python",
        "cifar-100-python.tar.gz",
        train=("train",),
        test=("test",),
        meta="meta",
        names_key="fine_label_names",
        labels_key="fine_labels",
        coarse_names_key="coarse_label_names",
        coarse_labels_key="coarse_labels",
    ),
}


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


@dataclass(frozen=True, slots=True)
class PickleSource(Source):
    """The authors' `cifar-10-batches-py` or `cifar-100-python`; files are read on demand."""

    folder: Path
    layout: Layout
    scale: float = 255

    def missing_files(self) -> list[str]:
        """The names of the published files that are missing in the folder; none if the archive is there instead."""
        return [] if self._is_packed else [f for f in self.layout.files if not (self.folder / f).is_file()]

    @property
    def class_names(self) -> tuple[str, ...]:
        """The published names of the (fine) classes."""
        meta, key = self._unpickle(self.layout.meta), self.layout.names_key
        if key not in meta:
            raise ValueError(f"{self.folder / self.layout.meta}: keys {sorted(map(str, meta))}; expected {key}")
        return tuple(str(name) for name in meta[key])

    @property
    def label_sets(self) -> Mapping[str, LabelSet]:
        """The published superclasses, if there are any."""
        layout = self.layout
        if not layout.coarse_labels_key:
            return {}
        meta, content = self._unpickle(layout.meta), self._unpickle(layout.train[0])
        if layout.coarse_names_key not in meta or layout.coarse_labels_key not in content:
            return {}  # a copy without superclasses is otherwise complete
        fine, coarse = (np.asarray(content[k]) for k in (layout.labels_key, layout.coarse_labels_key))
        names, where = meta[layout.coarse_names_key], self.folder / layout.train[0]
        return {"coarse": LabelSet.from_labels(fine, coarse, len(self.class_names), names, where)}

    def identity(self) -> Fields:
        # The archive holds the same files, so that unpacking it does not change the identity.
        if self._is_packed:
            hashes = self._packed(self.layout.files, lambda file: file_digest(cast(Any, file), "sha256").hexdigest())
        else:
            hashes = {name: hash_of_file(self.folder / name) for name in self.layout.files}
        return {"layout": self.layout.folder, "sha256": hashes}

    def labels(self, part: str) -> IntArray:
        return np.concatenate([y for _, y in self._batches(part)])

    def inputs(self, part: str, rows: IntArray) -> ByteArray:
        x: ByteArray = np.concatenate([x for x, _ in self._batches(part)])[rows]
        return x

    def pieces(self, part: str, rows: IntArray) -> Iterator[ByteArray]:
        yield self.inputs(part, rows)  # reads the whole files in any case

    def _batches(self, part: str) -> Iterator[tuple[ByteArray, IntArray]]:
        labels_key, num_classes = self.layout.labels_key, len(self.class_names)
        for name in self.layout.train if part == "train" else self.layout.test:
            path, content = self.folder / name, self._unpickle(name)
            if "data" not in content or labels_key not in content:
                raise ValueError(f"{path}: keys {sorted(map(str, content))}; expected data and {labels_key}")
            x, labels = content["data"], content[labels_key]
            if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.shape != (len(labels), 3 * 32 * 32):
                raise ValueError(f"{path}: data is not uint8 of shape ({len(labels)}, 3072), one row per label")
            y = np.asarray(labels, dtype=np.int64)
            _check_labels(y, num_classes, path)
            yield x.reshape(-1, 3, 32, 32), y

    @property
    def _is_packed(self) -> bool:
        return not self.folder.is_dir() and self.folder.with_name(self.layout.archive).is_file()

    def _packed(self, names: Sequence[str], take: Callable[[IO[bytes]], _T]) -> dict[str, _T]:
        """The results of `take` for these files of the archive, read once; ValueError if it is damaged or lacks one."""
        archive = self.folder.with_name(self.layout.archive)
        content_of: dict[str, _T] = {}
        try:
            with tarfile.open(archive) as tar:
                for member in tar:
                    name = member.name.removeprefix(f"{self.folder.name}/")
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

    def _unpickle(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        encoded = self._packed([name], lambda file: file.read())[name] if self._is_packed else path.read_bytes()
        try:
            content = _PlainUnpickler(io.BytesIO(encoded), encoding="latin1").load()
        except _UNREADABLE as error:
            raise ValueError(f"{path}: not a published CIFAR batch ({error}); expected a pickled dictionary") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path}: holds a {type(content).__name__}; expected a pickled dictionary")
        return content


def _check_labels(y: IntArray, num_classes: int, path: Path) -> None:
    if y.size and not (y.min() >= 0 and y.max() < num_classes):
        raise ValueError(f"{path}: labels {y.min()}..{y.max()}; expected 0..{num_classes - 1}")


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
        files = {part: tuple(sorted(candidate.glob(f"{part}-*.parquet"))) for part in PARTS}
        if all(files.values()):
            source = ParquetSource(dataset, files)
            source.check_columns()
            return source
    return None


def _image_column(names: Sequence[str]) -> str:
    return next((name for name in IMAGE_COLUMNS if name in names), IMAGE_COLUMNS[0])


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

    def check_columns(self) -> None:
        """Raises ValueError naming the file that lacks images or labels."""
        for file in (*self.files["train"], *self.files["test"]):
            schema = self._read(pq.read_schema, file)
            types = dict(zip(schema.names, schema.types, strict=True))
            img = types.get(_image_column(schema.names))
            has_bytes = img is not None and pa.types.is_struct(img) and img.get_field_index("bytes") >= 0
            if not has_bytes or self.label not in types or not pa.types.is_integer(types[self.label]):
                raise ValueError(f"{file}: columns {', '.join(schema.names)}; {self._expected}")

    @property
    def _expected(self) -> str:
        return f"expected a Parquet file with columns img{{bytes,path}} (or image) and {self.label} (integer)"

    def _read(self, read: Callable[..., Any], file: Path, **options: Any) -> Any:
        try:
            return read(file, **options)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{file}: cannot be read ({str(error).splitlines()[0]}); {self._expected}") from error

    def _column(self, file: Path, column: str) -> pa.ChunkedArray:
        return self._read(pq.read_table, file, columns=[column]).column(0)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names in the hub's schema metadata; numbers if there are none."""
        return self._names(self.label, NUM_CLASSES[self.dataset])

    def _names(self, column: str, count: int) -> tuple[str, ...]:
        file = self.files["train"][0]
        metadata = self._read(pq.read_schema, file).metadata or {}
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
        if column is None or any(column not in self._read(pq.read_schema, file).names for file in files):
            return {}
        coarse = np.concatenate([self._column(file, column).to_numpy().astype(np.int64) for file in files])
        names = self._names(column, NUM_SUPERCLASSES)
        return {"coarse": LabelSet.from_labels(self.labels("train"), coarse, len(self.class_names), names, files[0])}

    def identity(self) -> Fields:
        files = (*self.files["train"], *self.files["test"])
        return {"layout": f"{self.dataset} Parquet", "sha256": {f.name: hash_of_file(f) for f in files}}

    def labels(self, part: str) -> IntArray:
        labels = []
        for file in self.files[part]:
            column = self._column(file, self.label)
            if column.null_count:
                raise ValueError(f"{file}: {column.null_count} of {len(column)} labels are missing")
            labels.append(column.to_numpy().astype(np.int64))
            _check_labels(labels[-1], NUM_CLASSES[self.dataset], file)
        return np.concatenate(labels)

    def inputs(self, part: str, rows: IntArray) -> ByteArray:
        wanted = np.sort(rows)
        decoded = np.stack(list(self._decoded(part, wanted)))
        return decoded if np.array_equal(wanted, rows) else decoded[np.searchsorted(wanted, rows)]

    def _decoded(self, part: str, sorted_rows: IntArray) -> Iterator[ByteArray]:
        start = 0
        for file in self.files[part]:
            column = self._column(file, _image_column(self._read(pq.read_schema, file).names))
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
TRAIN_SPLITS = ("train", "trainval")
TEST_SPLITS = ("test", "val", "valid")
IMAGE_SIDE = Interval(ge=1, le=10_000)
"""The side lengths, in pixels, to which images may be scaled."""


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
    split: Annotated[str | None, NOT_EMPTY, "torchvision's `split` if it selects the data set, as for EMNIST"] = None,
) -> "TorchvisionSource":
    """The data set `torchvision:NAME`, from files under data.root, or downloaded with data.download=true."""
    blame = f"data set 'torchvision:{name}'"
    kind = getattr(torchvision_datasets(), name, None)
    if not inspect.isclass(kind):
        raise PluginError(f"{blame}: torchvision.datasets has no {name!r}")
    parameters = _parameters_of(kind)
    keywords: dict[str, Any] = {"split": split} if split is not None else {}
    if "download" in parameters:
        keywords["download"] = config.download
    if "train" in parameters:
        choices: dict[str, list[dict[str, Any]]] = {part: [{"train": part == "train"}] for part in PARTS}
    elif key := next((k for k in ("split", "image_set") if k in parameters and k not in keywords), ""):
        choices = {"train": [{key: split} for split in TRAIN_SPLITS], "test": [{key: split} for split in TEST_SPLITS]}
    else:
        raise PluginError(f"{blame}: it does not say which of its samples train; use data.dataset=folder or npz")
    root, parts = data_root(config), {}
    for part, options_of_part in choices.items():
        problem: Exception | None = None
        for options in options_of_part:
            try:
                parts[part] = cast(Any, kind)(str(root), **options, **keywords)
                break
            except (ValueError, TypeError, RuntimeError, OSError) as error:
                # A split that the data set does not have is a ValueError, missing files are not.
                if problem is None or (isinstance(problem, ValueError) and not isinstance(error, ValueError)):
                    problem = error
        if problem is not None and part not in parts:
            shown = in_one_line(problem).partition(" (line ")[0]
            download = "" if config.download else ", or set data.download=true"
            raise PluginError(
                f"{blame} cannot be opened in {root}: {shown}; set data.root to where its files lie{download}"
            )
    return TorchvisionSource(name, parts, size)


def _parameters_of(kind: type) -> set[str]:
    """The parameters of a class, with those of its bases to which it passes keywords on, as EMNIST does."""
    names = set[str]()
    for base in kind.__mro__:
        parameters = inspect.signature(base).parameters
        names.update(parameters)
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            break
    return names


class TorchvisionSource(Source):
    """A torchvision data set without transforms."""

    scale: float = 255

    def __init__(self, name: str, parts: dict[str, Any], size: int | None) -> None:
        self.name, self.parts, self.size = name, parts, size
        self._shapes: dict[str, set[tuple[int, ...]]] = {part: set() for part in parts}
        self._labels = {part: self._labels_of(dataset) for part, dataset in parts.items()}

    def _labels_of(self, dataset: Any) -> IntArray:
        """The labels (n,), read without decoding images if the data set stores them separately."""
        targets = next((t for name in LABEL_ATTRIBUTES if (t := getattr(dataset, name, None)) is not None), ())
        try:
            stored = np.asarray(targets)
            if stored.size != len(dataset):  # none, or more than the classes, such as QMNIST's writers
                stored = np.asarray([dataset[row][1] for row in range(len(dataset))])
            labels = stored.reshape(-1).astype(np.int64)
        except (TypeError, ValueError):
            labels = np.array([], dtype=np.int64)
        if len(labels) != len(dataset) or not len(labels) or labels.min() < 0:
            blame = f"data set 'torchvision:{self.name}'"
            raise PluginError(f"{blame}: its targets are not one class per image; it is no classification set")
        return labels

    @cached_property
    def class_names(self) -> Sequence[str]:
        """Torchvision's class names; numbers if it has none."""
        count = 1 + max(int(y.max()) for y in self._labels.values())
        names = getattr(self.parts["train"], "classes", None)
        texts = tuple(" / ".join(n) if isinstance(n, tuple) else str(n) for n in names) if names else ()
        return texts if len(texts) >= count else tuple(map(str, range(count)))

    def identity(self) -> Fields:
        labels = {part: sha256(y.tobytes()).hexdigest() for part, y in self._labels.items()}
        described: Fields = {"layout": f"torchvision {self.name}", "sha256_of_labels": labels, "size": self.size}
        # Only images that torchvision holds in memory: files of single images it checks when it downloads them.
        held = {part: getattr(dataset, "data", None) for part, dataset in self.parts.items()}
        hashes = {
            part: sha256(np.ascontiguousarray(images).data).hexdigest()
            for part, images in held.items()
            if isinstance(images, np.ndarray | Tensor)
        }
        return {**described, "sha256_of_images": hashes} if hashes else described

    def labels(self, part: str) -> IntArray:
        return self._labels[part]

    def inputs(self, part: str, rows: IntArray) -> AnyArray:
        blame, images = f"data set 'torchvision:{self.name}'", []
        for row in rows.tolist():
            image = self.parts[part][row][0]
            if not isinstance(image, Image.Image):
                raise PluginError(f"{blame}: sample {row} of {part} is {type(image).__name__}, not an image")
            if image.mode not in ("L", "RGB"):
                image = image.convert("RGB")
            if self.size is not None:
                image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
            pixels = np.asarray(image)
            images.append(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))
        shapes = self._shapes[part]
        shapes.update(image.shape for image in images)  # includes the shapes of earlier pieces
        if len(shapes) > 1:
            raise PluginError(
                f"{blame} has images of different sizes, such as {sorted(shapes)[:2]}: set data.options.size"
            )
        return np.stack(images)
