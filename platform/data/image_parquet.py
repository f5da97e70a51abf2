"""CIFAR-10, CIFAR-100 and CINIC-10 in the Parquet layout of the Hugging Face hub: images and labels in columns."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedloom.platform.data.artefact import ByteArray, Fields, IntArray, hash_of_file
from fedloom.platform.data.decode import decode_image
from fedloom.platform.data.label_sets import LabelSet
from fedloom.platform.data.source import Source

LABEL_COLUMNS = {"cifar10": "label", "cifar100": "fine_label", "cinic10": "label"}
IMAGE_COLUMNS = ("img", "image")
COARSE_COLUMNS = {"cifar100": "coarse_label"}
NUM_CLASSES = {"cifar10": 10, "cifar100": 100, "cinic10": 10}
NUM_SUPERCLASSES = 20
IMAGE_SHAPE = (32, 32)


def find_parquet(folder: Path, dataset: str) -> "ParquetSource | None":
    """The source in `folder` or in one of the hub's sub-folders below it; None if there are no files.

    Raises ValueError naming the file whose columns are not the expected ones.
    """
    for place in (folder, folder / "plain_text", folder / dataset, folder / "data"):
        files = {part: tuple(sorted(place.glob(f"{part}-*.parquet"))) for part in ("train", "test")}
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


def _decode(image: Any, file: Path, row: int) -> ByteArray:
    encoded = image["bytes"] if image else None
    if not encoded:
        raise ValueError(f"{file}: row {row} has no image; expected PNG or JPEG bytes in img")
    return decode_image(encoded, f"{file}: row {row}", IMAGE_SHAPE)


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
                yield _decode(image.as_py(), file, row)
            start += len(column)
