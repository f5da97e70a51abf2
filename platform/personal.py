"""What a silo keeps to itself between rounds: its own weights, their momentum, the operators left to it (SPIDER)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.platform.spaces.base import Weights
from fedloom.platform.spaces.operator_choice import Subspace

KEPT = "kept"
WEIGHTS = "weights/"
MOMENTUM = "momentum/"


@dataclass(frozen=True)
class Personal:
    """A client's local model; nothing of it is ever sent.

    Attributes:
        weights: tensors of the operators that are kept, by the supernet's names.
        momentum: SGD's buffers of those that have one.
        kept: the operators of every edge; one each when the search has ended.
    """

    weights: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor]
    kept: Subspace

    def packed(self) -> dict[str, Tensor]:
        """The state as a bag of tensors."""
        width = max((max(row, default=-1) for row in self.kept), default=-1) + 1
        mask = torch.zeros((len(self.kept), width), dtype=torch.bool)
        for decision, row in enumerate(self.kept):
            mask[decision, list(row)] = True
        own = {f"{WEIGHTS}{name}": tensor for name, tensor in self.weights.items()}
        return {KEPT: mask, **own, **{f"{MOMENTUM}{name}": tensor for name, tensor in self.momentum.items()}}


def unpacked(state: Weights) -> Personal:
    """The inverse of `Personal.packed`."""
    kept = tuple(tuple(row.nonzero().flatten().tolist()) for row in state[KEPT])
    return Personal(_under(state, WEIGHTS), _under(state, MOMENTUM), kept)


def _under(state: Weights, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def is_decided(kept: Subspace) -> bool:
    """Whether the search has ended: no edge has a choice left."""
    return all(len(row) <= 1 for row in kept)


def undecided(kept: Subspace, decisions: Sequence[int]) -> list[int]:
    """The decisions among these that still have more than one operator."""
    return [decision for decision in decisions if len(kept[decision]) > 1]


def with_row(kept: Subspace, decision: int, row: tuple[int, ...]) -> Subspace:
    """The subspace with other operators for one decision."""
    return (*kept[:decision], row, *kept[decision + 1 :])
