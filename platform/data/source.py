"""Labelled data sets as preparation reads them, their coarser classes, and held-out test parts."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from fedloom.platform.data.artefact import AnyArray, Fields, IntArray
from fedloom.platform.plugins import PluginError
from fedloom.platform.seeding import stream

LABEL_SETS_FILE = "label_sets.json"


@dataclass(frozen=True)
class LabelSet:
    """Coarser classes: `of` maps every class of the data set to a coarser class, `names` names the coarser classes."""

    of: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def from_labels(
        cls, fine: IntArray, coarse: IntArray, classes: int, names: Sequence[str], where: object
    ) -> LabelSet:
        """The label set of samples (n,) with both labels; ValueError unless the fine label determines the coarse."""
        pairs = np.unique(np.stack([fine, coarse]), axis=1)
        if len(pairs[0]) != len(np.unique(fine)):
            twice = int(next(c for c in pairs[0] if (pairs[0] == c).sum() > 1))
            raise ValueError(f"{where}: samples of class {twice} have different coarse labels; this is not CIFAR-100")
        if coarse.size and not (coarse.min() >= 0 and coarse.max() < len(names)):
            raise ValueError(f"{where}: coarse labels {coarse.min()}..{coarse.max()}; expected 0..{len(names) - 1}")
        of = dict(zip(pairs[0].tolist(), pairs[1].tolist(), strict=True))
        # An incomplete copy may lack classes.
        return cls(tuple(of.get(c, 0) for c in range(classes)), tuple(names))


def write_label_sets(folder: Path, read: Callable[[], Mapping[str, LabelSet]]) -> None:
    """Writes a data set's label sets beside its manifest, unless the file exists or the data set has none.

    In the manifest they would change the hash of data sets that were prepared before label sets existed.
    """
    if (folder / LABEL_SETS_FILE).is_file() or not (label_sets := read()):
        return
    temporary = folder / f".{LABEL_SETS_FILE}.{uuid4().hex}"
    temporary.write_text(json.dumps({name: asdict(labels) for name, labels in label_sets.items()}, ensure_ascii=False))
    temporary.replace(folder / LABEL_SETS_FILE)


def read_label_sets(folder: Path) -> dict[str, LabelSet]:
    """The label sets that a prepared data set was published with; none without their file.

    Raises ValueError naming a damaged file.
    """
    file = folder / LABEL_SETS_FILE
    if not file.is_file():
        return {}
    try:
        known = json.loads(file.read_text())
        return {name: LabelSet(tuple(map(int, of["of"])), tuple(of["names"])) for name, of in known.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: delete it, and prepare again") from error


def of_classes(of: Any, classes: int, key: str) -> tuple[int, ...]:
    """The coarser class of every class; ValueError naming `key` unless they are 0 to k - 1, each of them used."""
    whole = isinstance(of, list) and all(isinstance(c, int) and not isinstance(c, bool) for c in of)
    if not whole or len(of) != classes:
        shown = f"{len(of)} values" if whole else f"{of!r:.60}"
        raise ValueError(f"{key} has {shown}: give the coarser class of each of the {classes} classes")
    coarser = sorted(set(of))
    if len(coarser) < 2 or (coarser[0], coarser[-1]) != (0, len(coarser) - 1):
        raise ValueError(f"{key} has the coarser classes {coarser}: give two or more, numbered 0, 1, ...")
    return tuple(of)


HELD_OUT_SHARE = 0.2
"""The share of samples held out as the test part of a data set without one."""


def stratified_rows(labels: IntArray, samples: int, rng: np.random.Generator) -> IntArray:
    """Sorted rows of a random sub-sample of exactly `samples`, with each class's count within one of its quota."""
    counts = np.bincount(labels)
    # The largest remainder method in integers, so that rounding cannot change the total.
    quotas, remainder = np.divmod(counts * samples, counts.sum())
    quotas[np.argsort(-remainder, kind="stable")[: samples - int(quotas.sum())]] += 1
    chosen = [rng.permutation(np.flatnonzero(labels == label))[:quota] for label, quota in enumerate(quotas.tolist())]
    return np.sort(np.concatenate(chosen))


def held_out(labels: IntArray, blame: str) -> tuple[IntArray, IntArray]:
    """Training rows and test rows (a fifth of each class), independent of the run's seed.

    Labels are (n,); for text (n, T) the sub-sample is uniform. Raises PluginError, which begins with `blame`, if there
    are too few for a test row.
    """
    count, rng = round(HELD_OUT_SHARE * len(labels)), stream(0, "held out")
    if not count:
        raise PluginError(f"{blame} has too few samples to hold a fifth out for testing ({len(labels)}): give more")
    test = stratified_rows(labels, count, rng) if labels.ndim == 1 else uniform_rows(len(labels), count, rng)
    return np.setdiff1d(np.arange(len(labels)), test), test


def uniform_rows(num_rows: int, samples: int, rng: np.random.Generator) -> IntArray:
    """Sorted rows of a uniformly random sub-sample of exactly `samples`."""
    return np.sort(rng.permutation(num_rows)[:samples])


FIRST_PIECE, PIECE_BYTES = 64, 2**26
"""Samples in the first piece, which tells the memory of a sample, and the bytes of each later piece."""


class Source(ABC):
    """A data set with one label per input, as published, in the parts "train" and "test", and maybe "validation"."""

    kind: str = "image"
    """`image` for pixels (C, H, W) as bytes, `features` for floats of any shape."""
    client_names: Sequence[str] = ()
    """The names of the data set's natural clients, in order; empty if there are none."""
    normalisation: tuple[Sequence[float], Sequence[float]] | None = None
    """Mean and standard deviation per channel of the inputs divided by `scale`; None for those of the training part."""

    has_validation: bool = False
    """Whether there is a third part, "validation", whose samples belong to no client."""

    scale: float
    """The input value that is mapped to 1.0."""

    @property
    def label_sets(self) -> Mapping[str, LabelSet]:
        """Coarser classes with which the data set is published, by name."""
        return {}

    @property
    @abstractmethod
    def class_names(self) -> Sequence[str]:
        """The names of the classes in the order of their labels."""

    @abstractmethod
    def identity(self) -> Fields:
        """The fields that determine the content, without local paths."""

    @abstractmethod
    def labels(self, part: str) -> IntArray:
        """Labels (n,) of all samples of the part."""

    @abstractmethod
    def inputs(self, part: str, rows: IntArray) -> AnyArray:
        """Inputs (len(rows), ...) of the given samples of the part."""

    def pieces(self, part: str, rows: IntArray) -> Iterator[AnyArray]:
        """The inputs of the given samples in one or more consecutive pieces, because all may not fit in memory."""
        start, size = 0, FIRST_PIECE
        while start == 0 or start < len(rows):
            piece = self.inputs(part, rows[start : start + size])
            yield piece
            start, size = start + size, max(1, PIECE_BYTES // max(1, piece[:1].nbytes))

    def clients(self, part: str) -> IntArray | None:
        """Each sample's index into `client_names` (n,); None if the clients are unknown."""
        del part
        return None
