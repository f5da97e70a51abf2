"""A silo's personal state between rounds: its weights, their momentum, and its remaining operators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.platform.spaces.capabilities import HasSubspaces
from fedloom.platform.spaces.slices import Subspace, Weights

KEPT = "kept"
ALPHAS = "alphas"
WEIGHTS = "weights/"
MOMENTUM = "momentum/"


@dataclass(frozen=True)
class Personal:
    """A silo's personal model, which is never sent.

    Attributes:
        weights: its tensors by their names in the shared model.
        momentum: SGD's momentum buffers by parameter, where there is one.
        kept: the remaining operators of every edge (one each after a search); empty for a fixed architecture.
        alphas: the architecture parameters (decisions, options) during a search by gradients.
    """

    weights: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor]
    kept: Subspace = ()
    alphas: Tensor | None = None

    def packed(self) -> dict[str, Tensor]:
        """The state as named tensors."""
        width = max((max(row, default=-1) for row in self.kept), default=-1) + 1
        mask = torch.zeros((len(self.kept), width), dtype=torch.bool)
        for decision, row in enumerate(self.kept):
            mask[decision, list(row)] = True
        own = {f"{WEIGHTS}{name}": tensor for name, tensor in self.weights.items()}
        momentum = {f"{MOMENTUM}{name}": tensor for name, tensor in self.momentum.items()}
        return {KEPT: mask, **own, **momentum, **({} if self.alphas is None else {ALPHAS: self.alphas})}


def unpacked(state: Weights) -> Personal:
    """The inverse of `Personal.packed`."""
    kept = tuple(tuple(row.nonzero().flatten().tolist()) for row in state[KEPT])
    return Personal(under(state, WEIGHTS), under(state, MOMENTUM), kept, state.get(ALPHAS))


def begun(state: Weights | None, weights: Weights, kept: Subspace = ()) -> Personal:
    """A silo's state; before its first round it has the shared weights and the operators `kept`."""
    return Personal(dict(weights), {}, kept) if state is None else unpacked(state)


def under(state: Weights, prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def is_decided(kept: Subspace) -> bool:
    """Whether every edge has at most one operator."""
    return all(len(row) <= 1 for row in kept)


def undecided(kept: Subspace, decisions: Sequence[int]) -> list[int]:
    """Those of the decisions that still have more than one operator."""
    return [decision for decision in decisions if len(kept[decision]) > 1]


def with_row(kept: Subspace, decision: int, row: tuple[int, ...]) -> Subspace:
    """The subspace with the operators of one decision replaced."""
    return (*kept[:decision], row, *kept[decision + 1 :])


def restricted(space: HasSubspaces, silo: Personal, kept: Subspace) -> Personal:
    """The silo's model without the tensors of removed operators."""
    slices = space.subspace_slices(kept)

    def of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if name in slices}

    return Personal(of(silo.weights), of(silo.momentum), kept)


@dataclass(frozen=True)
class Searched:
    """A silo's model after a search step, and the forward MACs of the step."""

    silo: Personal
    macs: float = 0.0
