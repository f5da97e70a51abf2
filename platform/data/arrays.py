"""Data sets as arrays: the return value of a user's own data set function, and `.npz` files of NumPy."""

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import sha256
from numbers import Real
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from fedloom.platform.data.artefact import AnyArray, Fields, IntArray
from fedloom.platform.data.dataset import ArrayTree
from fedloom.platform.data.source import Source, held_out
from fedloom.platform.data.tokens import IGNORED_LABEL, TokenPart, TokenSource
from fedloom.platform.plugins import PluginError, blaming

CHUNK_BYTES = 1 << 26
COLOURS = (1, 3, 4)
"""Numbers of channels that distinguish the channel dimension of an image from height and width."""


@dataclass(frozen=True, eq=False)
class Arrays:
    """A data set as arrays, in memory or memory-mapped.

    Attributes:
        train: (x, y), or (x, y, clients).
            x: images as bytes (n, H, W), (n, C, H, W) or (n, H, W, C); numbers (n, channels, ...); tokens (n, T); or
                several arrays (n, ...) by name, which a network gets as they are: integers as int64, booleans, others
                as float32.
            y: labels (n,) from 0; for tokens the token to be predicted at every position (n, T), -100 for padding; or
                whatever your own objective takes, as one or more arrays (n, ...) by name.
            clients: the name or number of each sample's client (n,), for `data.partition=natural`.
        test: as `train`; by default a fifth of the training samples, independent of the run's seed.
        class_names: names of the classes, or the vocabulary of tokens; by default numbers, for labels by name 0 and 1.
        mean, std: per channel, for the normalisation of the inputs divided by `scale`; by default those of the
            training samples.
        scale: the input value that is mapped to 1.0; by default 255 for bytes and 1 otherwise.
    """

    train: Sequence[Any]
    test: Sequence[Any] | None = None
    class_names: Sequence[str] | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    scale: float | None = None


@dataclass(frozen=True, eq=False)
class _Part:
    x: ArrayTree
    y: ArrayTree
    clients: AnyArray | None

    @property
    def arrays(self) -> dict[str, AnyArray]:
        """All arrays of inputs and labels by the names under which they are stored, without the part's prefix."""
        return {**named("x", self.x), **named("y", self.y)}

    @property
    def labels(self) -> AnyArray | None:
        """The classes of the samples (n,), or of their positions (n, T); None if there are none."""
        if isinstance(self.y, np.ndarray) and self.y.dtype.kind in "iu" and self.y.ndim in (1, 2):
            return self.y
        return None

    def at(self, rows: IntArray) -> "_Part":
        """The samples at these rows."""
        x, y = (a[rows] if isinstance(a, np.ndarray) else {n: b[rows] for n, b in a.items()} for a in (self.x, self.y))
        return _Part(x, y, None if self.clients is None else self.clients[rows])


def named(kind: str, tree: ArrayTree) -> dict[str, AnyArray]:
    """The arrays of a tree by the names under which they are stored."""
    return {kind: tree} if isinstance(tree, np.ndarray) else {f"{kind}.{name}": a for name, a in tree.items()}


def source_of(returned: Any, name: str) -> "Source | TokenSource | TreeArrays":
    """The source made from the return value of a data set function; PluginError with the name and the problem.

    `returned` is `Arrays`, a mapping with the same fields, or a source.
    """
    blame = f"data set {name!r}"
    with blaming("data set", name):
        if isinstance(returned, Mapping):
            known = [f.name for f in fields(Arrays)]
            unknown = [key for key in returned if key not in known]
            if unknown or "train" not in returned:
                problem = f"has no {unknown[0]!r}" if unknown else "lacks 'train'"
                raise PluginError(f"{blame} returns a mapping that {problem}: its keys are {', '.join(known)}")
            returned = Arrays(**returned)
        if isinstance(returned, Source | TokenSource):
            return returned
        if not isinstance(returned, Arrays):
            raise PluginError(f"{blame} returns {type(returned).__name__}: give Arrays of fedloom.platform.data.arrays")
        return _checked(returned, blame)


def _checked(arrays: Arrays, blame: str) -> "Source | TokenSource | TreeArrays":
    train = _part(arrays.train, f"{blame}: train")
    if arrays.test is None:
        train, test = _held_out(train, blame)
    else:
        test = _part(arrays.test, f"{blame}: test")
    if (held := _described(test)) != (wanted := _described(train)):
        raise PluginError(f"{blame}: train holds {wanted} per sample, test {held}; they must be alike")
    parts = {"train": train, "test": test}
    content = _Content(parts, _class_names(arrays, (train, test), blame), *_clients(parts, blame))
    if isinstance(train.x, Mapping) or train.labels is None:
        if arrays.scale is not None or arrays.mean is not None or arrays.std is not None:
            raise PluginError(f"{blame} gives scale, mean or std, which are for one array: normalise several yourself")
        return TreeArrays(content)
    if train.labels.ndim == 2:
        return TokenArrays(content)
    scale = arrays.scale if arrays.scale is not None else 255 if train.x.dtype == np.uint8 else 1
    if not isinstance(scale, Real) or not 0 < scale < math.inf:
        raise PluginError(f"{blame}: scale={scale!r:.60}: give a finite number greater than 0")
    scale = scale.item() if isinstance(scale, np.generic) else scale  # the manifest is JSON, without NumPy's types
    return LabelledArrays(content, scale, _normalisation(arrays, train, blame))


def _part(pair: Any, blame: str) -> _Part:
    if not isinstance(pair, Sequence) or len(pair) not in (2, 3):
        raise PluginError(f"{blame} is {type(pair).__name__}: give (inputs, labels) or (inputs, labels, clients)")
    x, y = (_tree(tree, blame) for tree in pair[:2])
    rest = [np.asarray(array) for array in pair[2:]]
    arrays = {**named("inputs", x), **named("labels", y), **dict(zip(["clients"], rest, strict=False))}
    for what, array in arrays.items():
        if not array.shape:
            raise PluginError(f"{blame} {what} are {array.dtype} (): give numbers (n, ...)")
    samples = len(next(iter(arrays.values())))
    for what, array in arrays.items():
        if len(array) != samples:
            raise PluginError(f"{blame} has {samples} inputs and {len(array)} {what}: one for each")
    if not samples:
        raise PluginError(f"{blame} has no samples")
    clients = rest[0] if rest else None
    if clients is not None:
        if clients.dtype == object and all(isinstance(name, str) for name in clients.reshape(-1)):  # pandas' columns
            clients = clients.astype(str)
        if clients.ndim != 1 or clients.dtype.kind not in "iuUS":
            kind = f"{clients.dtype} {clients.shape}"
            raise PluginError(f"{blame} clients are {kind}: give a name or a whole number for each")
    part = _Part(x, y, clients)
    if isinstance(y, np.ndarray) and part.labels is None:
        raise PluginError(
            f"{blame} labels are {y.dtype} {y.shape}: give whole numbers, one per sample or per token, or, for an "
            "objective of your own, other labels by name"
        )
    if isinstance(x, np.ndarray) and part.labels is not None:
        return _Part(_inputs(x, part.labels, blame), y, clients)
    for what, array in part.arrays.items():
        if array.dtype.kind not in "iufb":
            raise PluginError(f"{blame} {what} is {array.dtype}: give numbers")
        if array.dtype.kind == "f" and not all(np.isfinite(chunk).all() for chunk in _chunks(array)):
            raise PluginError(f"{blame} {what} holds NaN or infinity")
    return part


def _tree(arrays: Any, blame: str) -> ArrayTree:
    """The given arrays as NumPy arrays, by name if they are named."""
    if not isinstance(arrays, Mapping):
        return np.asarray(arrays)
    wrong = [name for name in arrays if not (isinstance(name, str) and name.isidentifier())]
    if wrong or not arrays:
        raise PluginError(f"{blame} names arrays {[*arrays]!r:.80}: give one or more names of letters, digits and _")
    return {name: np.asarray(array) for name, array in arrays.items()}


def _described(part: _Part) -> str:
    return ", ".join(f"{name} {a.dtype if name != 'y' else 'labels'} {a.shape[1:]}" for name, a in part.arrays.items())


def _inputs(x: AnyArray, y: AnyArray, blame: str) -> AnyArray:
    if y.ndim == 2:
        if x.dtype.kind not in "iu" or x.shape != y.shape:
            raise PluginError(f"{blame} tokens are {x.dtype} {x.shape} for labels {y.shape}: give whole numbers alike")
        return x
    if x.ndim < 2 or x.dtype.kind not in "iufb":
        raise PluginError(f"{blame} inputs are {x.dtype} {x.shape}: give numbers (n, ...)")
    if x.dtype == np.uint8 and x.ndim == 3:
        return x[:, None]
    if x.dtype == np.uint8 and x.ndim == 4:
        return x.transpose(0, 3, 1, 2) if x.shape[1] not in COLOURS and x.shape[3] in COLOURS else x
    if not all(np.isfinite(chunk).all() for chunk in _chunks(x)):
        raise PluginError(f"{blame} inputs hold NaN or infinity")
    return x if x.dtype == np.float32 else x.astype(np.float32)


def _chunks(array: AnyArray) -> Iterator[AnyArray]:
    """The array in pieces of bounded memory, as it may be memory-mapped."""
    step = max(1, CHUNK_BYTES // max(1, array[:1].nbytes))
    return (array[start : start + step] for start in range(0, len(array), step))


def _held_out(part: _Part, blame: str) -> tuple[_Part, _Part]:
    labels = part.labels
    if labels is None:
        labels = np.zeros(len(next(iter(part.arrays.values()))), np.int64)
    if labels.ndim == 1 and labels.min() < 0:
        return part, part  # `_class_names` rejects invalid labels
    rest, test = held_out(labels.astype(np.int64), blame)
    return part.at(rest), part.at(test)


def _class_names(arrays: Arrays, parts: Sequence[_Part], blame: str) -> tuple[str, ...]:
    tokens = parts[0].labels is not None and parts[0].labels.ndim == 2
    # The arrays that hold classes, or the tokens of a text.
    classes = [(part, "labels", part.labels) for part in parts if part.labels is not None]
    classes += [(part, "tokens", part.x) for part in parts if tokens and isinstance(part.x, np.ndarray)]
    greatest = max((int(values.max()) for _, _, values in classes), default=1)
    if isinstance(arrays.class_names, str) or not isinstance(arrays.class_names, Iterable | None):
        raise PluginError(f"{blame}: class_names={arrays.class_names!r:.60}: give a list of names")
    names = tuple(map(str, arrays.class_names)) if arrays.class_names is not None else None
    count = len(names) if names is not None else greatest + 1
    for _, what, held in classes:
        values = held[held != IGNORED_LABEL] if tokens and what == "labels" else held
        if values.size and not (values.min() >= 0 and values.max() < count):
            raise PluginError(f"{blame} has {what} {values.min()} to {values.max()}: expected 0 to {count - 1}")
    return names if names is not None else tuple(map(str, range(count)))


def _clients(parts: Mapping[str, _Part], blame: str) -> tuple[tuple[str, ...], dict[str, IntArray]]:
    """The clients' names in order, and per part each sample's index into them."""
    known = {name: part.clients for name, part in parts.items() if part.clients is not None}
    if not known:
        return (), {}
    if "train" not in known:
        raise PluginError(f"{blame} names clients for test only: name those of train too")
    # NumPy makes float64 of int64 beside uint64, in which large numbers coincide: Python's integers are exact.
    exact = object if np.result_type(*known.values()).kind == "f" else None
    values = np.unique(np.concatenate([*known.values()], dtype=exact))
    return tuple(map(str, values.tolist())), {name: np.searchsorted(values, c) for name, c in known.items()}


def _normalisation(arrays: Arrays, train: _Part, blame: str) -> tuple[Sequence[float], Sequence[float]] | None:
    if arrays.mean is None and arrays.std is None:
        return None
    if arrays.mean is None or arrays.std is None:
        raise PluginError(f"{blame} gives one of mean and std: give both, or neither")
    mean, std = (np.atleast_1d(np.asarray(v, dtype=np.float64)) for v in (arrays.mean, arrays.std))
    channels = train.arrays["x"].shape[1]
    for name, values in (("mean", mean), ("std", std)):
        sound = np.isfinite(values).all() and (name == "mean" or (values > 0).all())
        if values.shape != (channels,) or not sound:
            raise PluginError(
                f"{blame}: {name}={values.tolist()}: give a finite number for each of {channels} channels"
            )
    return mean.tolist(), std.tolist()


@dataclass(frozen=True, eq=False)
class _Content:
    """The checked arrays of a data set; `clients_by_part` has each sample's index into the clients' names."""

    parts: Mapping[str, _Part]
    class_names: tuple[str, ...]
    client_names: tuple[str, ...]
    clients_by_part: Mapping[str, IntArray]

    def array(self, part: str, kind: str) -> AnyArray:
        """A part's inputs ("x") or labels ("y"), if they are one array."""
        return self.parts[part].arrays[kind]

    @cached_property
    def digests(self) -> Fields:
        """SHA-256 (hex) of every array's dtype, shape and content."""
        arrays = {f"{name}_{k}": a for name, part in self.parts.items() for k, a in part.arrays.items()}
        arrays |= {f"{name}_clients": clients for name, clients in self.clients_by_part.items()}
        digests: Fields = {}
        for name, array in arrays.items():
            digest = sha256(f"{array.dtype.str}{array.shape}".encode())
            for chunk in _chunks(array):
                digest.update(np.ascontiguousarray(chunk).data)
            digests[name] = digest.hexdigest()
        return digests


class LabelledArrays(Source):
    """Arrays with one label per sample, identified by their content."""

    def __init__(
        self, content: _Content, scale: float, normalisation: tuple[Sequence[float], Sequence[float]] | None
    ) -> None:
        self.content, self.scale, self.normalisation = content, scale, normalisation
        self.client_names = content.client_names
        self.kind = "image" if content.array("train", "x").dtype == np.uint8 else "features"

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.content.class_names

    def identity(self) -> Fields:
        described: Fields = {"class_names": list(self.class_names), "scale": self.scale}
        if self.normalisation is not None:
            described["mean"], described["std"] = map(list, self.normalisation)
        digests = self.content.digests
        return {"layout": "arrays", "sha256": digests, **described, "client_names": list(self.client_names)}

    def labels(self, part: str) -> IntArray:
        return self.content.array(part, "y").astype(np.int64)

    def inputs(self, part: str, rows: IntArray) -> AnyArray:
        return self.content.array(part, "x")[rows]

    def clients(self, part: str) -> IntArray | None:
        return self.content.clients_by_part.get(part)


@dataclass(frozen=True, eq=False)
class TokenArrays(TokenSource):
    """Arrays of tokens, with one label per position, identified by their content."""

    content: _Content

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return self.content.class_names

    @property
    def client_names(self) -> tuple[str, ...]:
        return self.content.client_names

    def identity(self) -> Fields:
        names: Fields = {"vocabulary": list(self.vocabulary), "client_names": list(self.client_names)}
        return {"layout": "token arrays", "sha256": self.content.digests, **names}

    def sequences(self, part: str) -> TokenPart:
        x, y = self.content.array(part, "x"), self.content.array(part, "y")
        return TokenPart(x, y, self.content.clients_by_part.get(part))


@dataclass(frozen=True, eq=False)
class TreeArrays:
    """Several arrays per sample, or labels that are not classes, identified by their content."""

    content: _Content

    def identity(self) -> Fields:
        """The fields that determine the content."""
        names: Fields = {"class_names": list(self.content.class_names), "client_names": list(self.content.client_names)}
        return {"layout": "tree", "sha256": self.content.digests, **names}


# -- one `.npz` file of NumPy -----------------------------------------------------------------------------------------

NPZ_NAMES: Mapping[str, tuple[str, ...]] = {
    "x": ("{part}_x", "x_{part}", "{part}_images"),
    "y": ("{part}_y", "y_{part}", "{part}_labels"),
    "clients": ("{part}_clients", "clients_{part}"),
}
"""The accepted names of the arrays."""
NPZ_NAMES_WITHOUT_PARTS = {"x": ("x", "images"), "y": ("y", "labels"), "clients": ("clients",)}
"""The accepted names in a file without parts."""


def read_npz(path: Path) -> Arrays:
    """Reads train_x, train_y, test_x, test_y (or x_train, ..., or x and y, of which a fifth is held out for testing).

    Arrays train_clients, test_clients and class_names are optional; train_x.NAME and the like are arrays by name.
    Nothing in the file is executed.
    Raises PluginError naming what is missing.
    """
    blame = f"data set 'npz': {path}"
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise PluginError(f"{blame} not found; set data.options.path") from None
    except (OSError, ValueError, AttributeError, EOFError, BadZipFile, zlib.error) as error:
        raise PluginError(f"{blame} is not a file of arrays ({error}); write it with numpy.savez") from error

    def tree(name: str) -> ArrayTree | None:
        by_name = {n.removeprefix(f"{name}."): array for n, array in arrays.items() if n.startswith(f"{name}.")}
        return arrays.get(name, by_name or None)

    def read_part(accepted: Mapping[str, tuple[str, ...]], part: str) -> tuple[Any, ...] | None:
        names = {what: [name.format(part=part) for name in forms] for what, forms in accepted.items()}
        x, y, clients = (next((a for n in names[what] if (a := tree(n)) is not None), None) for what in NPZ_NAMES)
        if x is None or y is None:
            return None
        # Some data sets publish labels as a column (n, 1).
        labels = y[:, 0] if isinstance(y, np.ndarray) and y.ndim == 2 and y.shape[1] == 1 else y
        return (x, labels) if clients is None else (x, labels, clients)

    train, test = (read_part(NPZ_NAMES, part) for part in ("train", "test"))
    if train is None and test is None:
        train = read_part(NPZ_NAMES_WITHOUT_PARTS, "")
    if train is None:
        raise PluginError(f"{blame} has {', '.join(arrays)[:100]}: expected train_x and train_y, or x and y")
    names = arrays.get("class_names")
    return Arrays(train, test, class_names=None if names is None else [str(n) for n in names.tolist()])
