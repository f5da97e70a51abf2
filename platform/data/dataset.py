"""A prepared data set: memory-mapped arrays, normalised on access, with a lock on the test set."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedloom.platform.data.artefact import (
    AnyArray,
    Fields,
    IntArray,
    check_blocks,
    open_arrays,
    read_manifest,
    verify_arrays,
)
from fedloom.platform.data.on_device import OnDevice
from fedloom.platform.data.source import LabelSet, read_label_sets
from fedloom.platform.data.trees import Tree, mapped

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


# -- the data set -----------------------------------------------------------------------------------------------------

MANIFEST = "dataset.json"
PARTS, VALIDATION = ("train", "test"), "validation"
# Defaults of the fields that a manifest may omit: data sets prepared before there were other kinds keep their hash.
_CONSTANT_FIELDS: Fields = {"kind": "image", "client_names": [], "scale": 1, "mean": [], "std": []}

ArrayTree = AnyArray | Mapping[str, AnyArray]
"""An array, or arrays by name, which are stored as `ARRAY.NAME`."""

Shapes = tuple[int, ...] | Mapping[str, tuple[int, ...]]
"""The shape of a sample's tensor, or of its tensors by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Inputs and labels, each one tensor or several by name, in the parts "train" and "test".

    Some data sets have a third part, "validation", whose samples belong to no client.

    Created by `Dataset.open`.
    """

    path: Path
    name: str
    hash: str
    """SHA-256 (hex) of the content and its description."""
    kind: str
    """`image`, `features`, `tokens` or `tree`."""
    input_shape: Shapes
    """The shape of one sample: (C, H, W) for images, any for features, (T,) for tokens."""
    num_classes: int
    """The number of classes; for tokens the size of the vocabulary."""
    class_names: tuple[str, ...]
    """The classes' names; for tokens the vocabulary."""
    client_names: tuple[str, ...]
    """The clients that the data set was published with, sorted; empty if there are none."""
    label_sets: Mapping[str, LabelSet]
    """Coarser classes with which the data set was published, by name."""
    scale: float
    """The pixel value that is mapped to 1.0; 1 for inputs that are not normalised."""
    mean: tuple[float, ...]
    """Per channel, of the training inputs divided by `scale`; empty for inputs that are not normalised."""
    std: tuple[float, ...]
    _normalisation: tuple[Tensor, Tensor]
    """Per channel, the factor and then the offset to subtract; stored because a client may have a single sample."""
    _arrays: dict[str, AnyArray]
    _manifest: Fields
    _guard: TestGuard
    _on_device: OnDevice | None = None

    @classmethod
    def open(cls, path: Path, guard: TestGuard | None = None) -> "Dataset":
        """Memory-maps a folder that `prepare_dataset` wrote; test samples are readable while the guard is open.

        Without a guard the test part is always readable. Raises ValueError naming the file that is missing or of
        another format or size; only `verify` checks the contents.
        """
        path = Path(path)
        manifest = read_manifest(path / MANIFEST)
        arrays = open_arrays(path, manifest)
        described = {**_CONSTANT_FIELDS, **manifest}
        inputs = _branches(arrays, "train_x")
        return cls(
            path=path,
            name=manifest["name"],
            hash=manifest["hash"],
            kind=described["kind"],
            input_shape=_shapes(inputs),
            num_classes=manifest["num_classes"],
            class_names=tuple(manifest["class_names"]),
            client_names=tuple(described["client_names"]),
            label_sets=read_label_sets(path),
            scale=described["scale"],
            mean=tuple(described["mean"]),
            std=tuple(described["std"]),
            _normalisation=_normalisation(described, inputs.ndim if isinstance(inputs, np.ndarray) else 2),
            _arrays=arrays,
            _manifest=manifest,
            _guard=guard or TestGuard(is_open=True),
        )

    def on(self, device: torch.device, most_bytes: int) -> "Dataset":
        """The same data set with its samples on `device`: parts are uploaded whole while `most_bytes` hold them all."""
        factor, shift = (of.to(device) for of in self._normalisation)
        return replace(self, _normalisation=(factor, shift), _on_device=OnDevice(device, most_bytes))

    def verify(self) -> None:
        """Reads every array; raises ValueError naming the file whose content was changed."""
        verify_arrays(self.path, self._manifest)

    def verify_blocks(self) -> None:
        """Like `verify`, in milliseconds: reads small arrays, and blocks of large ones."""
        check_blocks(self.path, self._manifest)

    @property
    def has_validation(self) -> bool:
        """Whether the data set was published with validation samples of its own."""
        return f"{VALIDATION}_x" in self._arrays

    @property
    def normalises(self) -> bool:
        """Whether inputs are stored as they were published, and normalised when they are read."""
        return bool(self.mean)

    @property
    def per_position(self) -> bool:
        """Whether every position of a sample has a label, as in texts."""
        return self.has_labels and self._array("train", "y").ndim > 1

    @property
    def has_labels(self) -> bool:
        """Whether samples, or their positions, have class labels; if not, the objective interprets the labels."""
        labels = _branches(self._arrays, "train_y")
        return isinstance(labels, np.ndarray) and labels.dtype.kind in "iu"

    def num_samples(self, part: str) -> int:
        """The number of samples of the part ("train", "test", or "validation" if there is one)."""
        labels = self._tree(part, "y")
        return len(labels if isinstance(labels, np.ndarray) else next(iter(labels.values())))

    def labels(self, part: str) -> IntArray:
        """The part's labels, (n,) or for tokens (n, T), in their stored integer type; read-only.

        Raises TestReadError for a guarded test part, ValueError for a data set without classes.
        """
        self._guard.check(part)
        if not self.has_labels:
            raise ValueError(f"{self.name} has no classes to divide it by: give data.partition=iid or natural")
        return self._array(part, "y")

    def clients(self, part: str) -> IntArray:
        """Each sample's index into `client_names` (n,), read-only.

        Raises TestReadError for a guarded test part, ValueError for a data set without natural clients.
        """
        self._guard.check(part)
        if not self.knows_clients(part):
            raise ValueError(f"{self.name} has no clients of its own; use another data.partition than natural")
        return self._array(part, "client")

    def knows_clients(self, part: str) -> bool:
        """Whether the clients of the part's samples are known."""
        return f"{part}_client" in self._arrays

    def tensors(self, part: str, indices: IntArray) -> tuple[Tree, Tree]:
        """Inputs and labels of the samples at `indices`.

        Images and features: normalised (n, C, ...), float32, and labels (n,), int64. Tokens: sequences (n, T) and
        labels (n, T), the next tokens, both int64; padding has the label -100, which torch's losses ignore. Others:
        integers as int64, booleans unchanged, and everything else as float32.
        Raises TestReadError for a guarded test part.
        """
        x, y = self.stored(part, indices)
        return self.normalised(x), y

    def stored(self, part: str, indices: IntArray) -> tuple[Tree, Tree]:
        """Inputs as stored (for images a quarter of the memory of normalised ones), and labels as in `tensors`.

        Raises TestReadError for a guarded test part.
        """
        self._guard.check(part)
        if self._on_device is None:
            return self._read(part, indices)
        return self._on_device.take(part, indices, partial(self._read, part), self.num_samples(part))

    def expect(self, wanted: Iterable[tuple[str, IntArray]]) -> None:
        """Starts reading samples, given as parts and indices, that `stored` will be asked for (`OnDevice.expect`).

        Does nothing for a data set in main memory: on a CPU, reading ahead would only compete with training.
        """
        if self._on_device is not None:
            self._on_device.expect((part, indices, partial(self._read, part)) for part, indices in wanted)

    def _read(self, part: str, indices: IntArray) -> tuple[Tree, Tree]:
        def read(kind: str, change: Callable[[AnyArray], AnyArray]) -> Tree:
            arrays = self._tree(part, kind)
            if isinstance(arrays, np.ndarray):
                return torch.from_numpy(change(arrays[indices]))
            return {name: torch.from_numpy(change(array[indices])) for name, array in arrays.items()}

        return read("x", (lambda stored: stored) if self.normalises else _as_computed), read("y", _as_computed)

    def normalised(self, stored: Tree, room: Tensor | None = None) -> Tree:
        """Stored inputs, normalised on the device that they are on; written into `room` if it is given."""
        if not self.normalises:
            return stored

        def of(tensor: Tensor) -> Tensor:
            factor, shift = (each.to(tensor.device) for each in self._normalisation)
            inputs = tensor.to(torch.float32, copy=True) if room is None else room.copy_(tensor)
            return inputs.mul_(factor).sub_(shift)

        return mapped(of, stored)

    @property
    def colours(self) -> tuple[list[float], list[float]]:
        """Per channel, the normalised values of black (stored as 0) and of white (stored as `scale`)."""
        black = [-mean / std for mean, std in zip(self.mean, self.std, strict=True)]
        return black, [low + 1 / std for low, std in zip(black, self.std, strict=True)]

    def _array(self, part: str, kind: str) -> AnyArray:
        array = self._tree(part, kind)
        assert isinstance(array, np.ndarray), "samples of several tensors are read as trees"
        return array

    def _tree(self, part: str, kind: str) -> ArrayTree:
        parts = (*PARTS, VALIDATION) if self.has_validation else PARTS
        if part not in parts:
            raise ValueError(f"part={part}: must be one of {', '.join(parts)}")
        return _branches(self._arrays, f"{part}_{kind}")


def _branches(arrays: Mapping[str, AnyArray], array: str) -> ArrayTree:
    if array in arrays:
        return arrays[array]
    return {name.removeprefix(f"{array}."): a for name, a in arrays.items() if name.startswith(f"{array}.")}


def _shapes(inputs: ArrayTree) -> Shapes:
    if isinstance(inputs, np.ndarray):
        return inputs.shape[1:]
    return {name: array.shape[1:] for name, array in inputs.items()}


def _as_computed(stored: AnyArray) -> AnyArray:
    """The array in the type that networks and losses take: bool, int64 or float32."""
    return stored if stored.dtype == np.bool_ else stored.astype(np.int64 if stored.dtype.kind in "iu" else np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class StoredSamples:
    """Samples of a part in a fixed order, read and normalised only on access, because they may not fit in memory.

    `label_map` (classes,) maps each label to the one that replaces it, if the labels are another task's.
    """

    dataset: Dataset
    part: str
    indices: IntArray
    label_map: Tensor | None = None

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def per_position(self) -> bool:
        """Whether every position of a sample has a label, as in texts."""
        return self.dataset.per_position

    @property
    def labels(self) -> Tensor:
        """The labels (n,) of all samples, int64 and in main memory; not for texts, which have as many as inputs."""
        labels = torch.from_numpy(_as_computed(self.dataset.labels(self.part)[self.indices]))
        return labels if self.label_map is None else self.label_map.cpu()[labels]

    def tensors(self, rows: slice | IntArray = slice(None)) -> tuple[Tree, Tree]:
        """Inputs and labels of these samples, by default of all; returns and raises like `Dataset.tensors`."""
        x, y = self.dataset.tensors(self.part, self.indices[rows])
        label_map = self.label_map
        return x, y if label_map is None else mapped(lambda labels: label_map[labels], y)


def _normalisation(described: Fields, dimensions: int) -> tuple[Tensor, Tensor]:
    """The factor and offset per channel by which ((x / scale) - mean) / std becomes x * factor - offset."""
    per_channel = (-1,) + (1,) * (dimensions - 2)
    std, mean = (torch.tensor(described[name]).view(per_channel) for name in ("std", "mean"))
    return 1 / (described["scale"] * std), mean / std
