"""Label sets: coarser classes of a data set, such as the twenty superclasses of CIFAR-100."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

if TYPE_CHECKING:
    from fedloom.platform.data.artefact import IntArray


FILE = "label_sets.json"


@dataclass(frozen=True)
class LabelSet:
    """Coarser classes: `of` has the coarser class of every class of the data set, `names` their names."""

    of: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def from_labels(
        cls, fine: IntArray, coarse: IntArray, classes: int, names: Sequence[str], where: object
    ) -> LabelSet:
        """The label set of samples (n,) with both labels; ValueError unless one follows from the other."""
        pairs = np.unique(np.stack([fine, coarse]), axis=1)
        if len(pairs[0]) != len(np.unique(fine)):
            twice = int(next(c for c in pairs[0] if (pairs[0] == c).sum() > 1))
            raise ValueError(f"{where}: samples of class {twice} have different coarse labels; this is not CIFAR-100")
        if coarse.size and not (coarse.min() >= 0 and coarse.max() < len(names)):
            raise ValueError(f"{where}: coarse labels {coarse.min()}..{coarse.max()}; expected 0..{len(names) - 1}")
        of = dict(zip(pairs[0].tolist(), pairs[1].tolist(), strict=True))
        # An incomplete copy need not hold all classes.
        return cls(tuple(of.get(c, 0) for c in range(classes)), tuple(names))


def write_label_sets(folder: Path, find: Callable[[], Mapping[str, LabelSet]]) -> None:
    """Keeps a data set's label sets beside its manifest, unless they are there or it has none.

    In the manifest they would change the hash of data sets that were prepared before there were any.
    """
    if (folder / FILE).is_file() or not (found := find()):
        return
    temporary = folder / f".{FILE}.{uuid4().hex}"
    temporary.write_text(json.dumps({name: asdict(labels) for name, labels in found.items()}, ensure_ascii=False))
    temporary.replace(folder / FILE)


def read_label_sets(folder: Path) -> dict[str, LabelSet]:
    """The label sets that a prepared data set was published with; none without their file.

    Raises ValueError naming a damaged file.
    """
    file = folder / FILE
    if not file.is_file():
        return {}
    try:
        known = json.loads(file.read_text())
        return {name: LabelSet(tuple(map(int, of["of"])), tuple(of["names"])) for name, of in known.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: delete it, and prepare again") from error


def of_classes(of: Any, classes: int, key: str) -> tuple[int, ...]:
    """The coarser class of every class; ValueError naming the key unless they are 0 to k - 1, all of them used."""
    whole = isinstance(of, list) and all(isinstance(c, int) and not isinstance(c, bool) for c in of)
    if not whole or len(of) != classes:
        given = f"{len(of)} values" if whole else f"{of!r:.60}"
        raise ValueError(f"{key} has {given}: give the coarser class of each of the {classes} classes")
    found = sorted(set(of))
    if len(found) < 2 or (found[0], found[-1]) != (0, len(found) - 1):
        raise ValueError(f"{key} names the coarser classes {found}: number two or more 0, 1, ...")
    return tuple(of)
