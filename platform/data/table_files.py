"""Data sets in tables: CSV, Parquet and Arrow files, and what Hugging Face's `save_to_disk` writes (by pyarrow)."""

import io
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from PIL import Image

from fedloom.platform.data.artefact import AnyArray, Fields, IntArray, hash_of_file
from fedloom.platform.data.dataset import PARTS
from fedloom.platform.data.image_files import decode_image, size_or_hash
from fedloom.platform.data.source import HELD_OUT_SHARE, Source, held_out
from fedloom.platform.plugins import PluginError
from fedloom.platform.settings import NOT_EMPTY, ONE_OR_MORE
from fedloom.platform.words import shown

ENDINGS = (".csv", ".parquet", ".arrow")
ROWS = 1024
"""Rows read at a time: a few dozen megabytes of small photographs."""
INPUT_COLUMNS = Annotated[
    list[Annotated[str, NOT_EMPTY]] | None,
    "input columns; null: the images, or all but the label and client columns and the index of a pandas table",
]
SHAPE = Annotated[list[Annotated[int, ONE_OR_MORE]] | None, "the shape of a row's numbers; null: as in the columns"]
BLAME = "data set 'table':"


# -- files ------------------------------------------------------------------------------------------------------------


def find_files(path: Path) -> dict[str, tuple[Path, ...]]:
    """The files of each part; the only part is "" if there is no test part and a fifth is to be held out.

    Raises PluginError if there are none.
    """
    tables = _tables(path)
    parts = {p: _tables(path / p) or tuple(f for f in tables if f.name.startswith(p)) for p in PARTS}
    parts = parts if all(parts.values()) else {"": parts["train"] or tables}
    if not all(parts.values()):
        raise PluginError(
            f"{BLAME} {path} is no table and has none: data.options.path is a file ({', '.join(ENDINGS)}), or a folder "
            "of such files, optionally named train* and test*, or in folders train/ and test/"
        )
    return parts


def _tables(path: Path) -> tuple[Path, ...]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    # `cache-*` is what Hugging Face keeps beside a saved data set.
    return tuple(f for f in files if f.suffix in ENDINGS and f.is_file() and not f.name.startswith((".", "cache-")))


def batches(
    file: Path, columns: Sequence[str] | None = None, types: Mapping[str, Any] | None = None
) -> Iterator[pa.RecordBatch]:
    """All or some columns of a file, in batches of rows; PluginError if it cannot be read.

    `types` are the types of a CSV file's columns, because those inferred from its beginning may not fit the rest.
    """
    with _reading(file):
        if file.suffix == ".csv":
            convert = pyarrow.csv.ConvertOptions(include_columns=columns or [], column_types=types or {})
            yield from pyarrow.csv.open_csv(file, convert_options=convert)
        elif file.suffix == ".parquet":
            for batch in pq.ParquetFile(file).iter_batches(ROWS, columns=columns):
                yield batch if columns is None else batch.select(columns)  # in this order
        else:
            with pa.memory_map(str(file)) as mapped:
                for batch in pa.ipc.open_stream(mapped):
                    yield batch if columns is None else batch.select(columns)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        problem = str(error).splitlines()[0]
        place = re.match(r"In CSV column #(\d+): ", problem)  # counted from 0
        if place:
            problem = f"column {pyarrow.csv.open_csv(file).schema.names[int(place[1])]}: {problem[place.end() :]}"
        raise PluginError(
            f"{BLAME} {file} cannot be read ({problem}); data.options.x names columns of numbers, or one of images"
        ) from error


# -- the source -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Which columns hold the inputs, the labels and the clients.

    `size` scales images to size x size, `grey` gives them one channel, `shape` is the shape of a row's numbers.
    """

    x: Sequence[str]
    y: str
    client: str | None
    size: int | None
    grey: bool
    shape: Sequence[int] | None


class TableSource(Source):
    """Rows of tables, in the order of the files' names; created by `find_table`.

    Images are encoded in one column, or in files that it names by paths relative to the table. Numbers are in one or
    more columns, or in a single column of vectors or matrices.
    """

    class_names: Sequence[str] = ()
    scale: float = 1

    def __init__(
        self, files: Mapping[str, tuple[Path, ...]], layout: Layout, schema: pa.Schema, shared: Collection[str]
    ) -> None:
        self.files, self.layout = files, layout
        holds = schema.field(layout.x[0]).type
        is_alone = len(layout.x) == 1
        self._names_files = is_alone and _holds(holds, TEXTS)
        if self._names_files or (is_alone and (_holds(holds, BYTES) or _is_image(holds))):
            self.scale = 255
        else:
            self.kind = "features"
        ineffective, contents = (("shape",), "images") if self.kind == "image" else (("size", "grey"), "numbers")
        for key in ineffective:
            if getattr(layout, key) and key not in shared:
                raise PluginError(f"{BLAME} data.options.{key} has no effect on columns of {contents}: leave it out")
        self.class_names, self._labels = self._codes(layout.y, _published_names(schema, layout.y))
        self._clients: dict[str, IntArray] = {}
        if layout.client is not None:
            self.client_names, self._clients = self._codes(layout.client)
        self._rows = {part: (part, np.arange(len(self._labels[part]))) for part in files}
        if "" in files:
            rows_of_parts = held_out(self._labels[""], f"{BLAME} {files[''][0]}")
            self._rows = {p: ("", rows) for p, rows in zip(PARTS, rows_of_parts, strict=True)}
        for part, (of_files, rows) in self._rows.items():
            if not len(rows):
                raise PluginError(f"{BLAME} {files[of_files][0]} has no rows for {part}: give more")

    def identity(self) -> Fields:
        hashes = {f"{part}/{file.name}": hash_of_file(file) for part, files in self.files.items() for file in files}
        held = HELD_OUT_SHARE if "" in self.files else 0
        fields: Fields = {"layout": "table", "sha256": hashes, **asdict(self.layout), "held_out": held}
        if self._names_files:
            digest = sha256()
            for part in self.files:
                for file, batch in self._batches(part):
                    for name in batch.column(0).to_pylist():
                        content = size_or_hash(file.parent, name, _image_file(file, name).stat().st_size)
                        digest.update(f"{name}\t{content}\n".encode())
            fields["sha256_of_names_and_sizes"] = digest.hexdigest()
        return fields

    def labels(self, part: str) -> IntArray:
        files, rows = self._rows[part]
        return self._labels[files][rows]

    def clients(self, part: str) -> IntArray | None:
        files, rows = self._rows[part]
        return self._clients[files][rows] if self._clients else None

    def inputs(self, part: str, rows: IntArray) -> AnyArray:
        ascending, places = np.unique(rows, return_inverse=True)
        return np.concatenate([*self.pieces(part, ascending)])[places]

    def pieces(self, part: str, rows: IntArray) -> Iterator[AnyArray]:
        """Like `Source.pieces`, for ascending rows: each file is read once, from beginning to end."""
        files, rows_of_part = self._rows[part]
        wanted, start, first = rows_of_part[rows], 0, None
        for file, batch in self._batches(files):
            here = wanted[slice(*np.searchsorted(wanted, [start, start + len(batch)]))] - start
            start += len(batch)
            if not len(here):
                continue
            taken = batch.take(pa.array(here))
            if self.kind == "image":
                x = self._images(file, taken, None if first is None else first.shape[2:])
            else:
                x = self._numbers(file, taken)
            first = x if first is None else first
            if x.shape[1:] != first.shape[1:]:
                raise PluginError(f"{BLAME} {file} has row shapes {first.shape[1:]} and {x.shape[1:]}: give one shape")
            yield x

    def _batches(self, part: str) -> Iterator[tuple[Path, pa.RecordBatch]]:
        types = dict.fromkeys(self.layout.x, pa.string() if self._names_files else pa.float32())
        return ((file, batch) for file in self.files[part] for batch in batches(file, self.layout.x, types))

    def _images(self, file: Path, batch: pa.RecordBatch, shape: tuple[int, int] | None) -> AnyArray:
        """Images (n, C, H, W); if they are not scaled, all must have `shape` or, without it, the size of the first."""
        size, images = self.layout.size, list[AnyArray]()
        for value in batch.column(0).to_pylist():
            held = value if isinstance(value, dict) else {"path": value} if self._names_files else {"bytes": value}
            name = held.get("path")
            encoded = held.get("bytes") or _image_file(file, name).read_bytes()
            where = f"{BLAME} {name or 'an image'} of {file}"
            shape = shape or ((size, size) if size else _size(encoded, where))
            images.append(decode_image(encoded, where, shape, grey=self.layout.grey, resized=size is not None))
        return np.stack(images)

    def _numbers(self, file: Path, batch: pa.RecordBatch) -> AnyArray:
        columns = [_stacked(file, name, column) for name, column in zip(batch.schema.names, batch.columns, strict=True)]
        x = columns[0] if len(columns) == 1 and columns[0].ndim > 1 else np.column_stack(columns)
        if self.layout.shape is None:
            return x
        if x[0].size != math.prod(self.layout.shape):
            raise PluginError(f"{BLAME} a row of {file} has {x[0].size} numbers: data.options.shape must have as many")
        return x.reshape(-1, *self.layout.shape)

    def _codes(self, name: str, known: Sequence[str] | None = None) -> tuple[Sequence[str], dict[str, IntArray]]:
        """The sorted distinct values of a column, as texts, and per part each row's index into them.

        If the names are `known`, the column holds these indices as whole numbers.
        """
        columns = {part: self._texts(part, name) for part in self.files}
        values = {text for column in columns.values() for text in column.dictionary.to_pylist()}
        numbers = all(re.fullmatch(r"-?\d+", text) for text in values)
        order = sorted(sorted(values), key=int if numbers else str) if known is None else [*map(str, range(len(known)))]
        if unknown := sorted(values - {*order}):
            raise PluginError(f"{BLAME} column {name} holds {unknown[0]}: its classes are 0 to {len(order) - 1}")
        index = {text: i for i, text in enumerate(order)}
        return known or order, {
            part: np.array([index[text] for text in column.dictionary.to_pylist()], np.int64)[column.indices.to_numpy()]
            for part, column in columns.items()
        }

    def _texts(self, part: str, name: str) -> pa.DictionaryArray:
        """A column of texts or whole numbers, dictionary-encoded as texts."""
        pieces = []
        for file in self.files[part]:
            for batch in batches(file, [name], {name: pa.string()}):
                values = batch.column(0)
                if pa.types.is_floating(values.type) or pa.types.is_nested(values.type):
                    raise PluginError(
                        f"{BLAME} column {name} of {file} holds {values.type}: give texts or whole numbers"
                    )
                pieces.append(values.cast(pa.string()))
                if values.null_count or pc.any(pc.equal(pieces[-1], "")).as_py():
                    raise PluginError(f"{BLAME} column {name} of {file} lacks values: give one for every row")
        return pa.chunked_array(pieces, pa.string()).combine_chunks().dictionary_encode()


LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
# pandas and Polars write the large types.
TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)


def _stacked(file: Path, name: str, column: pa.Array) -> AnyArray:
    """The numbers (n, ...) of a column of numbers, vectors or matrices."""
    shape, where = [len(column)], f"{BLAME} column {name} of {file}"
    column = column.storage if isinstance(column, pa.ExtensionArray) else column
    while any(is_list(column.type) for is_list in LISTS):
        lengths = pc.unique(pc.list_value_length(column)).to_pylist()
        if len(lengths) != 1 or not lengths[0]:
            raise PluginError(f"{where} holds vectors of {len(lengths)} lengths, or empty ones: all rows must be alike")
        shape.append(lengths[0])
        column = pc.list_flatten(column)
    if not any(is_number(column.type) for is_number in NUMBERS):
        raise PluginError(f"{where} holds {column.type}: data.options.x names columns of numbers, or one of images")
    values: AnyArray = column.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    if not np.isfinite(values).all():  # missing values are NaN
        raise PluginError(
            f"{where} lacks values, or has infinite ones: fill them in, or leave it out of data.options.x"
        )
    return values.reshape(shape)


def _holds(holds: pa.DataType, kinds: Sequence[Callable[[pa.DataType], bool]]) -> bool:
    """Whether a column holds values of one of these kinds, written out or as indices into distinct values."""
    values = holds.value_type if pa.types.is_dictionary(holds) else holds
    return any(is_kind(values) for is_kind in kinds)


def _is_image(holds: pa.DataType) -> bool:
    """Whether a column holds Hugging Face's images, {bytes, path}."""
    return bool(pa.types.is_struct(holds) and holds.get_field_index("bytes") >= 0)


def _published_names(schema: pa.Schema, column: str) -> list[str] | None:
    """The class names that Hugging Face's `ClassLabel` gives a column; None if it is not one."""
    try:
        return [*map(str, json.loads(schema.metadata[b"huggingface"])["info"]["features"][column]["names"])]
    except (KeyError, TypeError, ValueError):
        return None


def _index_columns(schema: pa.Schema) -> set[str]:
    """The columns that hold the index of a pandas table, which often tells the labels of sorted rows.

    pandas names them in the metadata of Parquet files; its CSV files have a first column without a name.
    """
    described = (schema.pandas_metadata or {}).get("index_columns", [])
    unnamed = {name for name in schema.names if not name or name.startswith("__index_level_")}
    return unnamed | {name for name in described if isinstance(name, str)}


def _image_file(table: Path, name: str | None) -> Path:
    file = table.parent / (name or "")
    if not file.is_file():
        raise PluginError(
            f"{BLAME} {table} names the image {shown(name)}, which {table.parent} does not have; set data.options.x "
            "to other columns; texts need a data set of your own"
        )
    return file


def _size(encoded: bytes, where: str) -> tuple[int, int]:
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return image.height, image.width
    except (OSError, SyntaxError, ValueError) as error:
        raise PluginError(f"{where} is not an image ({error})") from error


def find_table(path: Path, layout: Layout, shared: Collection[str] = ()) -> TableSource:
    """The source of a file or folder; PluginError naming a file and the column that it lacks.

    Options that are `shared` with the augmentation may be without effect here.
    """
    files = find_files(path)
    first, *others = (file for of_part in files.values() for file in of_part)
    schema = _schema(first)
    named = {key: name for key in ("y", "client") if (name := getattr(layout, key)) is not None}
    images = [field.name for field in schema if _is_image(field.type)][:1]
    others_than_x = {*named.values(), *_index_columns(schema)}
    x = layout.x or images or [name for name in schema.names if name not in others_than_x]
    for file in (first, *others):
        names = (schema if file == first else _schema(file)).names
        for key, name in [*named.items(), *(("x", name) for name in x)]:
            if name not in names:
                raise PluginError(
                    f"{BLAME} {file} has no column {name}: choose data.options.{key} of {', '.join(names):.200}"
                )
            if names.count(name) > 1:
                raise PluginError(f"{BLAME} {file} has several columns {name}: give each a name of its own")
    if not x:
        raise PluginError(f"{BLAME} {first} has no column of inputs beside {' and '.join(named.values())}")
    return TableSource(files, replace(layout, x=tuple(x)), schema, shared)


def _schema(file: Path) -> pa.Schema:
    with _reading(file):
        if file.suffix == ".parquet":
            return pq.read_schema(file)
        for batch in batches(file):
            if batch.schema.names:  # decoded here, as those of a CSV file may not be UTF-8
                return batch.schema
    raise PluginError(f"{BLAME} {file} has no rows")
