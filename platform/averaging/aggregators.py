"""Aggregators: how the server makes a new value of a scalar from those that clients send for it.

Of the weighted mean, the default, workers return partial sums (`WeightedSums`). Any other aggregator compares clients,
so that every single update comes to the server (`KeptUpdates`). On slices each scalar is judged among the clients that
hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.platform.averaging.average import Averaged, Coverage, Update, WeightedSums, check_weights
from fedloom.platform.data.on_device import moved
from fedloom.platform.plugins import ComponentSpec, PluginError, Registry, Shipped
from fedloom.platform.spaces.slices import Region, Weights, bytes_of, inside, part_in, part_of

MEAN = "mean"
"""The aggregator for which partial sums are enough."""


@dataclass(frozen=True)
class Cell:
    """A region of a shared tensor that the same clients hold, in plan order.

    Attributes:
        name: the shared tensor.
        values_n: what N clients send for it, of shape (N, *region).
        weights_n: the clients' weights, all above 0.
        old: the values before the round, of the region's shape.
        places: of every client, the place of its update among `updates`.
        updates: all updates of the round, for rules that compare whole clients.
    """

    name: str
    values_n: Tensor
    weights_n: Tensor
    old: Tensor
    places: tuple[int, ...]
    updates: Sequence[Update]


Aggregator = Callable[[Cell], Tensor]
"""The new values of a cell, of the region's shape."""


def mean(cell: Cell) -> Tensor:
    """The weighted mean (the default, of which no single update is kept)."""
    shares_n: Tensor = cell.weights_n / cell.weights_n.sum()
    return torch.einsum("n,n...->...", shares_n, cell.values_n)


AGGREGATORS: Registry[Aggregator] = Registry("aggregator", Shipped({MEAN: f"{__name__}:mean"}), ("cell",))


@dataclass
class KeptUpdates:
    """All updates of a chunk or a round, in plan order; `rule` is set where they are aggregated."""

    kept: list[Update] = field(default_factory=list)
    rule: ComponentSpec | None = None

    @property
    def updates(self) -> int:
        """The number of updates."""
        return len(self.kept)

    @property
    def weigh_nothing(self) -> bool:
        """Whether there are updates, and all weights of all of them are 0."""
        return bool(self.kept) and not any(any(update.weights.values()) for update in self.kept)

    @property
    def size_bytes(self) -> int:
        """The memory that the updates take."""
        return sum(bytes_of(update.tensors) for update in self.kept)

    def add(self, update: Update) -> None:
        """Keeps a copy of a client's update in main memory; ValueError for weights that are none."""
        check_weights(update)
        tensors = {name: tensor.detach() for name, tensor in update.tensors.items()}
        copies = moved(tensors, torch.device("cpu"))  # of those on a device; the others are themselves
        for name, tensor in tensors.items():
            if copies[name] is tensor:
                copies[name] = tensor.clone(memory_format=torch.contiguous_format)
        self.kept.append(replace(update, tensors=copies))

    def merge(self, other: KeptUpdates) -> None:
        """Adds the updates of the next chunk in plan order."""
        self.kept += other.kept

    @torch.no_grad()
    def finish(self, old: Weights, min_contributors: int = 1, singly: Container[str] = ()) -> Averaged:
        """The new weights, as `WeightedSums.finish`: where too few clients hold a scalar it keeps its old value.

        The tensors named by `singly` are no part of the model (such as a local rule's), and are averaged.
        """
        combine = AGGREGATORS.make(self.rule or ComponentSpec(MEAN))
        weights, coverage = dict(old), dict[str, dict[Region, Coverage]]()
        for name, pieces in self._pieces().items():
            new, covered = old[name].clone(), dict[Region, Coverage]()
            for region in _cells([piece.region for piece in pieces]):
                held = [piece for piece in pieces if inside(region, piece.region)]
                if len(held) < (1 if name in singly else max(1, min_contributors)):
                    continue
                values_n = torch.stack([part_in(piece.values, piece.region, region) for piece in held])
                target = part_of(new, region)
                if new.is_floating_point():
                    weights_n = torch.tensor([piece.weight for piece in held])
                    places = tuple(piece.update_index for piece in held)
                    cell = Cell(name, values_n, weights_n, target.clone(), places, self.kept)
                    target.copy_(mean(cell) if name in singly else self._checked(cell, combine(cell)))
                else:
                    target.copy_(values_n.amax(dim=0))  # a counter
                covered[region] = Coverage(
                    sum(piece.weight for piece in held), len(held), sum(piece.weight * piece.factor for piece in held)
                )
            weights[name] = new
            if covered:
                coverage[name] = covered
        return Averaged(weights, coverage)

    def _checked(self, cell: Cell, new: object) -> Tensor:
        shape = tuple(cell.old.shape)
        if not isinstance(new, Tensor) or tuple(new.shape) != shape or not bool(torch.isfinite(new).all()):
            what = f"a tensor of shape {tuple(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
            rule = self.rule.name if self.rule else MEAN
            raise PluginError(f"aggregator {rule!r} gives {what} for {cell.name}: give finite values of shape {shape}")
        return new

    def _pieces(self) -> dict[str, list[_Piece]]:
        """Per shared tensor what clients have trained of it, in plan order."""
        pieces = dict[str, list[_Piece]]()
        for update_index, update in enumerate(self.kept):
            for name in update.tensors:
                if weight := update.weights[name]:
                    factor = update.factors.get(name, 1.0)
                    parts = [_Piece(region, part, update_index, weight, factor) for region, part in update.parts(name)]
                    pieces.setdefault(update.slices[name].source, []).extend(parts)
        return pieces


class _Piece(NamedTuple):
    """What a client sends of a shared tensor: values of a region, by the place, weight and factor of its update."""

    region: Region
    values: Tensor
    update_index: int
    weight: float
    factor: float


Sums = WeightedSums | KeptUpdates
"""What the server keeps of a round's updates."""


def _cells(regions: Sequence[Region]) -> Iterator[Region]:
    """Cuts the regions' bounding box so that every region holds a cell as a whole or not at all."""
    edges = [sorted({e for region in regions for e in region[d]}) for d in range(len(regions[0]))]
    yield from product(*(list(pairwise(dimension)) for dimension in edges))
