"""Aggregators: how the server computes a scalar's new value from the values that clients send.

For the weighted mean, the default, workers return partial sums (`WeightedSums`). Every other aggregator compares
clients, so the server needs every single update (`KeptUpdates`). On slices, each scalar is aggregated over the clients
that hold it; a rule that compares whole updates compares two of them over the scalars that both hold.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, NamedTuple

import torch
from annotated_types import Interval
from torch import Tensor

from fedloom.platform.averaging.average import Averaged, Coverage, Update, WeightedSums, check_weights
from fedloom.platform.data.on_device import moved
from fedloom.platform.plugins import ComponentSpec, PluginError, Registry, Shipped
from fedloom.platform.spaces.slices import Region, Weights, bytes_of, cells, inside, part_in, part_of, widened

MEAN = "mean"
"""The aggregator for which partial sums are enough."""


@dataclass(frozen=True)
class Cell:
    """A region of a shared tensor that the same clients hold, in plan order.

    Attributes:
        name: the shared tensor.
        values_n: what N clients send for it, of shape (N, *region), in float32 instead of types of 16 bits.
        weights_n: the clients' weights, all above 0.
        old: the values before the round, of the region's shape.
        places: per client, the index of its update in `updates`.
        updates: all updates of the round, for rules that compare whole clients.
        comparison: the updates' distances and norms, computed when a rule asks for them.
    """

    name: str
    values_n: Tensor
    weights_n: Tensor
    old: Tensor
    places: tuple[int, ...]
    updates: Sequence[Update]
    comparison: Comparison

    @property
    def distances_nn(self) -> Tensor:
        """Squared distances between the cell's clients, (N, N) in float64.

        Each is over all scalars of the model that both clients hold, divided by their number.
        """
        places = torch.tensor(self.places)
        pairs = (places[:, None], places)
        squares_nn, sizes_nn, _ = self.comparison.sums
        return squares_nn[pairs] / sizes_nn[pairs]

    @property
    def norms_n(self) -> Tensor:
        """The norms of the clients' changes over all scalars of the model that they hold, (N,) in float64."""
        return self.comparison.sums[2][torch.tensor(self.places)].sqrt()


Aggregator = Callable[[Cell], Tensor | None]
"""The new values of a cell, of the region's shape; None if too few clients hold it, so that the old values stay."""


ByzantineShare = Annotated[
    float, Interval(ge=0, lt=0.5), "trimmed_mean, krum, ...: the largest share of attackers to tolerate"
]


def attackers_among(clients: int, byzantine_share: float) -> int:
    """The largest number of attackers among `clients` that does not exceed the share `byzantine_share`."""
    return int(byzantine_share * clients + 1e-9)  # 0.29 * 100 is 28.999999999999996


def mean(cell: Cell) -> Tensor:
    """The weighted mean (the default, for which no single updates are kept)."""
    shares_n: Tensor = cell.weights_n / cell.weights_n.sum()
    return torch.einsum("n,n...->...", shares_n, cell.values_n)


_AVERAGING = "fedloom.platform.averaging"
AGGREGATORS: Registry[Aggregator] = Registry(
    "aggregator",
    Shipped(
        {
            MEAN: f"{__name__}:mean",
            "median": f"{_AVERAGING}.median:median",
            "trimmed_mean": f"{_AVERAGING}.median:trimmed_mean",
            "krum": f"{_AVERAGING}.krum:krum",
            "multi_krum": f"{_AVERAGING}.krum:multi_krum",
            "bulyan": f"{_AVERAGING}.krum:bulyan",
            "rfa": f"{_AVERAGING}.geometric_median:rfa",
            "norm_bound": f"{_AVERAGING}.norm_bound:norm_bound",
        }
    ),
    ("cell",),
)


@dataclass
class KeptUpdates:
    """All updates of a chunk or a round, in plan order; `rule`, the aggregator, is set where they are aggregated."""

    kept: list[Update] = field(default_factory=list)
    rule: ComponentSpec | None = None

    @property
    def updates(self) -> int:
        """The number of updates."""
        return len(self.kept)

    @property
    def weigh_nothing(self) -> bool:
        """Whether there are updates, but all their weights are 0."""
        return bool(self.kept) and not any(any(update.weights.values()) for update in self.kept)

    @property
    def size_bytes(self) -> int:
        """The memory that the updates take, in bytes."""
        return sum(bytes_of(update.tensors) for update in self.kept)

    def add(self, update: Update) -> None:
        """Keeps a copy of a client's update in main memory; raises ValueError for invalid weights."""
        check_weights(update)
        tensors = {name: tensor.detach() for name, tensor in update.tensors.items()}
        copies = moved(tensors, torch.device("cpu"))  # copies those on a device, but returns CPU tensors themselves
        for name, tensor in tensors.items():
            if copies[name] is tensor:
                copies[name] = tensor.clone(memory_format=torch.contiguous_format)
        self.kept.append(replace(update, tensors=copies))

    def merge(self, other: KeptUpdates) -> None:
        """Adds the updates of the next chunk in plan order."""
        self.kept += other.kept

    def finish(self, old: Weights, min_contributors: int = 1, singly: Container[str] = ()) -> Averaged:
        """The new weights, as in `WeightedSums.finish`: a scalar that too few clients hold keeps its old value.

        The tensors named by `singly` are not part of the model (such as a local rule's), and are averaged.
        """
        rule = self.rule or ComponentSpec(MEAN)
        return aggregated(self.kept, (rule.name, AGGREGATORS.make(rule)), old, min_contributors, singly)


@torch.no_grad()
def aggregated(
    updates: Sequence[Update],
    named_rule: tuple[str, Aggregator],
    old: Weights,
    min_contributors: int = 1,
    singly: Container[str] = (),
) -> Averaged:
    """The new weights of a round's updates, in plan order; see `KeptUpdates.finish`."""
    rule_name, rule = named_rule
    weights, coverage = dict(old), dict[str, dict[Region, Coverage]]()
    pieces_by_name = _pieces(updates)
    model = {name: pieces for name, pieces in pieces_by_name.items() if name not in singly}
    comparison = Comparison(model, old, len(updates))
    for name, pieces in pieces_by_name.items():
        new, covered = old[name].clone(), dict[Region, Coverage]()
        for region, held in _cells_with_pieces(pieces):
            if len(held) < min_contributors and name not in singly:
                continue
            values_n = torch.stack([part_in(piece.values, piece.region, region) for piece in held])
            target = part_of(new, region)
            if new.is_floating_point():
                values_n = widened(values_n)
                weights_n = torch.tensor([piece.weight for piece in held], dtype=values_n.dtype)
                places = tuple(piece.update_index for piece in held)
                cell = Cell(name, values_n, weights_n, widened(target.clone()), places, updates, comparison)
                combined = mean(cell) if name in singly else rule(cell)
                if combined is None:
                    continue
                target.copy_(_checked(rule_name, cell, combined))
            else:
                target.copy_(values_n.amax(dim=0))  # a counter
            covered[region] = Coverage(
                sum(piece.weight for piece in held), len(held), sum(piece.weight * piece.factor for piece in held)
            )
        weights[name] = new
        if covered:
            coverage[name] = covered
    return Averaged(weights, coverage)


def _checked(rule_name: str, cell: Cell, new: object) -> Tensor:
    shape = tuple(cell.old.shape)
    if (
        not isinstance(new, Tensor)
        or tuple(new.shape) != shape
        or not bool((torch.isfinite(new) | (new == cell.old)).all())  # a mask for attention has infinite values
    ):
        what = f"a tensor of shape {tuple(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
        raise PluginError(f"aggregator {rule_name!r} gives {what} for {cell.name}: give finite values of shape {shape}")
    return new


def _pieces(updates: Sequence[Update]) -> dict[str, list[_Piece]]:
    """Per shared tensor, the parts of it that clients trained, in plan order."""
    pieces = dict[str, list[_Piece]]()
    for update_index, update in enumerate(updates):
        for name in update.tensors:
            if weight := update.weights[name]:
                factor = update.factors.get(name, 1.0)
                parts = [_Piece(region, part, update_index, weight, factor) for region, part in update.parts(name)]
                pieces.setdefault(update.slices[name].source, []).extend(parts)
    return pieces


def _cells_with_pieces(pieces: Sequence[_Piece]) -> Iterator[tuple[Region, list[_Piece]]]:
    """The regions that the same clients hold, each with these clients' pieces; regions without holders are left out."""
    for region in cells([piece.region for piece in pieces]):
        if held := [piece for piece in pieces if inside(region, piece.region)]:
            yield region, held


class _Piece(NamedTuple):
    """A client's values for a region of a shared tensor, with the index, weight and factor of its update."""

    region: Region
    values: Tensor
    update_index: int
    weight: float
    factor: float


COLUMNS = 2**13
"""The number of scalars per update that are compared at once: for 100 updates they take 7 MB, which fits in caches."""


class Comparison:
    """The distances between a round's updates, and the norms of their changes.

    They cover all floating-point tensors of the model, including batch norm's statistics: clients can lie in any.
    """

    def __init__(self, pieces_by_name: Mapping[str, Sequence[_Piece]], old: Weights, num_updates: int) -> None:
        self._pieces_by_name, self._old, self._num_updates = pieces_by_name, old, num_updates

    @cached_property
    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Squared distances (N, N) over shared scalars, the numbers of these (N, N), squared norms (N,); float64."""
        squares_nn = torch.zeros(self._num_updates, self._num_updates, dtype=torch.float64)
        sizes_nn, norms_n = torch.zeros_like(squares_nn), torch.zeros(self._num_updates, dtype=torch.float64)
        for name, pieces in self._pieces_by_name.items():
            old = self._old[name]
            measured = old.is_floating_point() and bool(torch.isfinite(old).all())  # no counters, and no masks
            for region, held in _cells_with_pieces(pieces) if measured else ():
                places = torch.tensor([piece.update_index for piece in held])
                gram_nn = _gram([part_in(p.values, p.region, region) for p in held], part_of(old, region))
                lengths_n = gram_nn.diagonal()
                pairs = (places[:, None], places)
                squares_nn[pairs] += (lengths_n[:, None] + lengths_n - 2 * gram_nn).clamp(min=0).fill_diagonal_(0)
                sizes_nn[pairs] += part_of(old, region).numel()
                norms_n[places] += lengths_n
        return squares_nn, sizes_nn, norms_n


def _gram(values: Sequence[Tensor], old: Tensor) -> Tensor:
    """The inner products of all pairs of changes, (N, N) in float64.

    Uses changes instead of values, and float64, because a distance is a small difference of large products.
    """
    flat, before = [v.reshape(-1) for v in values], old.reshape(-1)
    gram_nn = torch.zeros(len(values), len(values), dtype=torch.float64)
    for start in range(0, len(before), COLUMNS):
        columns = slice(start, start + COLUMNS)
        changes_nc = torch.stack([v[columns] for v in flat]).double() - before[columns].double()
        gram_nn.addmm_(changes_nc, changes_nc.T)
    return (gram_nn + gram_nn.T) / 2  # the product's halves differ by rounding, which would decide between equal scores


Sums = WeightedSums | KeptUpdates
"""What the server keeps of a round's updates."""
