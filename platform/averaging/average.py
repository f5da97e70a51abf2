"""The one averaging function: per scalar, the weighted mean over the updates that cover it, else the old value.

Parameters and floating-point buffers (BatchNorm statistics) are averaged with the weight of their tensor. Integer
counters keep their type and take the largest value among the contributors.
"""

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

import torch
from torch import Tensor

from fedloom.platform.spaces.slices import Region, SliceMap, Weights

MASKED = torch.int32
"""The type of masked updates: residues modulo 2^32."""
LIGHTEST, HEAVIEST = 1e-20, 1e20
"""Bounds of positive weights: sums are float32, whose positive values range from 1e-45 to 3e38."""


@dataclass(frozen=True)
class Update:
    """One client's update: what it sends, where that belongs in the shared weights, and how much it counts.

    Attributes:
        tensors: new values (not changes) by their name in the client's network, parameters and buffers.
        slices: per name the shared tensor and the region of it that the values are for; `Slice(name)` is the whole
            tensor of the same name.
        weights: per name the weight in the mean, such as the client's samples; of weight 0 was not trained and does not
            contribute. A shared tensor that no client sends keeps its value.
        unheld: the weight with which the old value of everything that the client did not hold counts; 0 in means over
            those who hold a scalar.
        factors: numbers per tensor (1 by default) whose weighted mean is known to the server rule (FedNova's local
            steps).
        masked: whether the tensors are residues modulo 2^32, which are added as they are, those of weight 0 as well.
        rows: per name the ranges of the first dimension that count, of tensors that are sent whole but count in part.
    """

    tensors: Weights
    slices: SliceMap
    weights: Mapping[str, float]
    unheld: float = 0.0
    factors: Mapping[str, float] = field(default_factory=dict)
    masked: bool = False
    rows: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def parts(self, name: str) -> Iterator[tuple[Region, Tensor]]:
        """What counts of a tensor, and where it lies in the supernet's."""
        tensor, piece = self.tensors[name], self.slices[name]
        region = piece.region if piece.region is not None else tuple((0, n) for n in tensor.shape)
        if name not in self.rows:
            yield region, tensor
            return
        first = region[0][0]
        for start, stop in self.rows[name]:
            yield ((first + start, first + stop), *region[1:]), tensor[start:stop]


@dataclass
class Coverage:
    """Summed weight and number of the updates that cover one region, and the sum of their weights times factors."""

    weight: float = 0.0
    contributors: int = 0
    weighted_factors: float = 0.0

    @property
    def factor(self) -> float:
        """The weighted mean of the updates' factors."""
        return self.weighted_factors / self.weight

    def add(self, other: "Coverage") -> None:
        """Adds the coverage by further updates."""
        self.weight += other.weight
        self.contributors += other.contributors
        self.weighted_factors += other.weighted_factors


Covered = Mapping[Region, Coverage]
"""The regions of a tensor that at least `min_contributors` updates cover; they do not overlap."""


@dataclass(frozen=True)
class Averaged:
    """A round's average: the weights, and per covered tensor the regions where they are a mean.

    Outside these regions the weights are those from before the round.
    """

    weights: dict[str, Tensor]
    coverage: Mapping[str, Covered]


@dataclass
class TensorSum:
    """Weighted sum over the updates of one supernet tensor, stored on the bounding box of their regions."""

    box: Region
    total: Tensor
    coverage: dict[Region, Coverage] = field(default_factory=dict)

    @classmethod
    def of(cls, region: Region, tensor: Tensor, weight: float, factor: float = 1.0) -> "TensorSum":
        """Starts a sum with the first update's region."""
        # Faster than zeros plus an addition: newly allocated memory is written once, not twice.
        total = tensor * weight if tensor.dtype.is_floating_point else tensor.clone()
        # In one memory format whatever the client computed in: only such arrays travel without a copy.
        total = total.contiguous()
        return cls(region, total, {region: _coverage(weight, factor)})

    def include(self, region: Region) -> None:
        """Grows the box to contain the region."""
        if region == self.box or all(b[0] <= r[0] and r[1] <= b[1] for b, r in zip(self.box, region, strict=True)):
            return
        box = tuple((min(b[0], r[0]), max(b[1], r[1])) for b, r in zip(self.box, region, strict=True))
        total, self.total, inner = self.total.new_zeros([stop - start for start, stop in box]), self.total, self.box
        part_in(total, box, inner).copy_(self.total)
        self.box, self.total = box, total

    def view(self, region: Region) -> Tensor:
        """The sum on a region inside the box, as a view."""
        return part_in(self.total, self.box, region)

    def add(self, region: Region, tensor: Tensor, weight: float, factor: float = 1.0) -> None:
        """Adds `weight * tensor` on the region."""
        self.include(region)
        _accumulate(self.view(region), tensor, weight)
        self.coverage.setdefault(region, Coverage()).add(_coverage(weight, factor))

    def merge(self, other: "TensorSum") -> None:
        """Adds the partial sum of a later chunk."""
        self.include(other.box)
        _accumulate(self.view(other.box), other.total, 1.0)
        for region, coverage in other.coverage.items():
            self.coverage.setdefault(region, Coverage()).add(coverage)

    def cells(self) -> Iterator[tuple[Region, Coverage]]:
        """Splits the box into cells such that the same regions (possibly none) cover every scalar of a cell."""
        if len(self.coverage) == 1:
            yield from self.coverage.items()
            return
        edges = [sorted({e for region in self.coverage for e in region[d]}) for d in range(len(self.box))]
        for cell in product(*(list(pairwise(dimension)) for dimension in edges)):
            covered = Coverage()
            for region, coverage in self.coverage.items():
                if inside(cell, region):
                    covered.add(coverage)
            yield cell, covered

    def finish(self, old: Tensor, fewest: int, whole_weight: float = 0.0) -> tuple[Tensor, Covered]:
        """Returns the mean where at least `fewest` updates contributed (elsewhere the old value), and those regions.

        Up to `whole_weight` the old value counts for updates that do not cover a region. The sum must not be used
        afterwards: if it spans the whole tensor it becomes the result in place, because a second copy of a large
        supernet costs more than the arithmetic.
        """
        cells = [(region, coverage, coverage.contributors >= fewest) for region, coverage in self.cells()]
        reached = {region: coverage for region, coverage, enough in cells if enough}
        if not reached:
            return old, {}
        whole = self.total.shape == old.shape and self.total.dtype == old.dtype
        result = self.total if whole else old.clone()
        for region, coverage, enough in cells:
            target = part_of(result, region)
            if enough:
                _write_mean(target, self.view(region), coverage.weight, part_of(old, region), whole_weight)
            elif whole:
                target.copy_(part_of(old, region))
        return result, reached


def _coverage(weight: float, factor: float) -> Coverage:
    """That of one update; one of weight 0, which only masked updates have, contributes nothing."""
    return Coverage(weight, 1 if weight else 0, weight * factor)


def part_of(tensor: Tensor, region: Region) -> Tensor:
    """A view of a region of a full tensor."""
    return tensor[tuple(slice(start, stop) for start, stop in region)]


def part_in(tensor: Tensor, box: Region, region: Region) -> Tensor:
    """A view of a region of a tensor that is stored on the box."""
    if region == box:
        return tensor
    return tensor[tuple(slice(r[0] - b[0], r[1] - b[0]) for b, r in zip(box, region, strict=True))]


def inside(cell: Region, region: Region) -> bool:
    """Whether a region holds a cell as a whole."""
    return all(r[0] <= c[0] and c[1] <= r[1] for c, r in zip(cell, region, strict=True))


def _accumulate(total: Tensor, tensor: Tensor, weight: float) -> None:
    if total.dtype.is_floating_point:
        total.add_(tensor, alpha=weight)
    elif total.dtype == MASKED:
        total.add_(tensor)
    else:
        torch.maximum(total, tensor, out=total)


@dataclass
class WeightedSums:
    """Partial weighted sums of a chunk's updates, in supernet coordinates."""

    tensors: dict[str, TensorSum] = field(default_factory=dict)
    updates: int = 0
    """The number of updates that were added, whatever they weigh."""
    whole_weight: float = 0.0
    """The sum of the updates' `unheld`."""
    used_up: bool = False
    """Whether `finish` has turned the sums into weights."""

    @property
    def weigh_nothing(self) -> bool:
        """Whether there are updates, and all weights of all of them are 0."""
        return self.updates > 0 and not self.tensors

    @torch.no_grad()
    def add(self, update: Update) -> None:
        """Adds one client's update; tensors of weight zero are skipped.

        Raises ValueError, before anything is added, for a weight that is missing, negative, not finite, or too small
        or too large for a float32 sum.
        """
        self._check_unused()
        check_weights(update)
        self.updates += 1
        self.whole_weight += update.unheld
        for name in update.tensors:
            weight = update.weights[name]
            if weight == 0.0 and not update.masked:
                continue
            source, factor = update.slices[name].source, update.factors.get(name, 1.0)
            for region, part in update.parts(name):
                if part.dtype == MASKED and not update.masked:
                    part = part.long()  # a counter, of which the largest counts
                if source in self.tensors:
                    self.tensors[source].add(region, part, weight, factor)
                else:
                    self.tensors[source] = TensorSum.of(region, part, weight, factor)

    @torch.no_grad()
    def merge(self, other: "WeightedSums") -> None:
        """Adds the partial sums of the next chunk in plan order; `other` is not changed (it may be shared memory)."""
        self._check_unused()
        other._check_unused()
        self.updates += other.updates
        self.whole_weight += other.whole_weight
        for name, tensor_sum in other.tensors.items():
            if name in self.tensors:
                self.tensors[name].merge(tensor_sum)
            else:
                coverage = {region: replace(c) for region, c in tensor_sum.coverage.items()}
                self.tensors[name] = TensorSum(tensor_sum.box, tensor_sum.total.clone(), coverage)

    @torch.no_grad()
    def finish(self, old: Weights, min_contributors: int = 1, singly: Container[str] = ()) -> Averaged:
        """Returns the new weights: scalars covered by fewer than `min_contributors` updates keep their old value.

        For the tensors named by `singly`, which are no part of the model, one update is enough.

        Tensors of `old` that no update covers are returned without a copy. The sums are consumed: adding to them,
        merging or finishing them afterwards raises ValueError.
        """
        self._check_unused()
        self.used_up = True
        fewest = max(1, min_contributors)
        if self.whole_weight and self.updates >= fewest:
            fewest = 1  # who does not hold a scalar contributes its old value
        done = {
            name: own.finish(old[name], 1 if name in singly else fewest, self.whole_weight)
            for name, own in self.tensors.items()
        }
        weights = {**old, **{name: tensor for name, (tensor, _) in done.items()}}
        return Averaged(weights, {name: covered for name, (_, covered) in done.items() if covered})

    def _check_unused(self) -> None:
        if self.used_up:
            raise ValueError("these sums were finished: they have become the new weights, start new ones")


def check_weights(update: Update) -> None:
    """Raises ValueError for a weight that sums cannot take.

    It is asked before the first tensor is added, because a partly added update cannot be removed from the sums.
    """
    _check_weight("everything that is not held", update.unheld)
    for name in update.tensors:
        if name not in update.weights:
            raise ValueError(f"the weighting rule gave no weight for {name}: give one to every tensor of the update")
        _check_weight(name, update.weights[name])


def _check_weight(name: str, weight: float) -> None:
    if not 0.0 <= weight < math.inf:
        raise ValueError(f"the weight of {name} is {weight}: weights are finite and at least 0")
    if weight and not LIGHTEST <= weight <= HEAVIEST:
        raise ValueError(
            f"the weight of {name} is {weight}: sums of float32 need weights of 0, or of {LIGHTEST} to {HEAVIEST}"
        )


def _write_mean(target: Tensor, total: Tensor, weight: float, old: Tensor, whole_weight: float) -> None:
    if not total.dtype.is_floating_point:
        target.copy_(total)
    elif whole_weight > weight:
        torch.div(total.add(old, alpha=whole_weight - weight), whole_weight, out=target)
    else:
        torch.div(total, weight, out=target)


def average(old: Weights, updates: Iterable[Update], min_contributors: int = 1) -> dict[str, Tensor]:
    """Averages updates into the supernet; their weights decide the rule (FedAvg; OPA, FedorAS Eq. 5; overlap; MaxNet).

    Args:
        old: the supernet's tensors before the round.
        updates: the clients' updates in plan order; the order fixes the floating-point result.
        min_contributors: scalars covered by fewer updates of positive weight keep their old value exactly.
    """
    sums = WeightedSums()
    for update in updates:
        sums.add(update)
    return sums.finish(old, min_contributors).weights


@torch.no_grad()
def first_not_finite(tensors: Weights) -> str | None:
    """The name of the first floating-point tensor with a NaN or infinite value, None if all are finite."""
    # One reduction per tensor and one device synchronisation in all: a sum is finite only if all of its entries are. A
    # sum of finite entries that overflows also means that training diverged.
    sums = {name: tensor.sum() for name, tensor in tensors.items() if tensor.is_floating_point()}
    if not sums:
        return None
    found = list(sums.values())
    if len({each.dtype for each in found}) > 1:
        found = [each.double() for each in found]
    if math.isfinite(torch.stack(found).sum().item()):
        return None
    # The sum over all tensors may overflow while each tensor's own is finite.
    return next((name for name, each in sums.items() if not math.isfinite(each.item())), None)
