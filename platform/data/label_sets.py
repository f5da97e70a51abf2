"""Label sets: coarser classes of a data set, such as the twenty superclasses of CIFAR-100."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fedloom.platform.data.artefact import Fields, IntArray


@dataclass(frozen=True)
class LabelSet:
    """Coarser classes: `of` has the coarser class of every class of the data set, `names` their names."""

    of: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def from_labels(cls, fine: IntArray, coarse: IntArray, names: Sequence[str], where: object) -> LabelSet:
        """The label set of samples (n,) with both labels; ValueError unless one follows from the other."""
        pairs = np.unique(np.stack([fine, coarse]), axis=1)
        if len(pairs[0]) != len(np.unique(fine)):
            twice = int(next(c for c in pairs[0] if (pairs[0] == c).sum() > 1))
            raise ValueError(f"{where}: samples of class {twice} have different coarse labels; this is not CIFAR-100")
        if coarse.size and not (coarse.min() >= 0 and coarse.max() < len(names)):
            raise ValueError(f"{where}: coarse labels {coarse.min()}..{coarse.max()}; expected 0..{len(names) - 1}")
        of = dict(zip(pairs[0].tolist(), pairs[1].tolist(), strict=True))
        # A sub-sample need not hold all classes; those that are absent have no samples to be labelled.
        return cls(tuple(of.get(c, 0) for c in range(1 + max(of, default=-1))), tuple(names))

    def fields(self) -> Fields:
        """As JSON values."""
        return {"of": list(self.of), "names": list(self.names)}


def of_classes(of: Any, classes: int, key: str) -> tuple[int, ...]:
    """The coarser class of every class; ValueError naming the key unless they are 0 to k - 1, all of them used."""
    whole = isinstance(of, list) and all(isinstance(c, int) and not isinstance(c, bool) for c in of)
    if not whole or len(of) != classes:
        given = f"{len(of)} values" if whole else f"{of!r:.60}"
        raise ValueError(f"{key} has {given}: give the coarser class of each of the {classes} classes")
    if sorted(set(of)) != list(range(1 + max(of))) or max(of) < 1:
        raise ValueError(f"{key} names the coarser classes {sorted(set(of))}: number them 0, 1, ... without gaps")
    return tuple(of)
