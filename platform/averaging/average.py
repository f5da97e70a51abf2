"""The one averaging function: per scalar, the weighted mean over the updates that cover it, else the old value.

Parameters and floating-point buffers (BatchNorm statistics) are averaged with the weight of their tensor. Types of 16
bits are summed in float32, and only the mean is rounded to them. Integer counters keep their type and take the largest
value among the contributors.
"""

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedloom.platform.spaces.slices import (
    Region,
    SliceMap,
    Weights,
    cells,
    inside,
    part_in,
    part_of,
    whole_region,
    widened,
)

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
        weights: per name the weight in the mean, such as the client's number of samples; a tensor of weight 0 was not
            trained and does not contribute. A shared tensor that no client sends keeps its value.
        unheld: the weight in the mean of the old values of all scalars that the client does not hold; 0 if a scalar's
            mean is over its holders alone.
        factors: numbers per tensor (1 by default) whose weighted mean the server rule receives (FedNova's local steps).
        masked: whether the tensors are residues modulo 2^32, which are added unweighted, including those of weight 0.
        rows: for tensors that are sent whole but count in part, per name the ranges of the first dimension that count.
    """

    tensors: Weights
    slices: SliceMap
    weights: Mapping[str, float]
    unheld: float = 0.0
    factors: Mapping[str, float] = field(default_factory=dict)
    masked: bool = False
    rows: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def parts(self, name: str) -> Iterator[tuple[Region, Tensor]]:
        """The parts of a tensor that count, each with its region of the supernet's tensor."""
        tensor, piece = self.tensors[name], self.slices[name]
        region = whole_region(tensor) if piece.region is None else piece.region
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

    @classmethod
    def of(cls, weight: float, factor: float) -> "Coverage":
        """The coverage by one update; one of weight 0, which only masked updates keep, is not a contributor."""
        return cls(weight, 1 if weight else 0, weight * factor)

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
        total = widened(tensor) * weight if tensor.dtype.is_floating_point else tensor.clone()
        # Contiguous, whatever memory format the client computed in: only such arrays are sent without a copy.
        return cls(region, total.contiguous(), {region: Coverage.of(weight, factor)})

    def include(self, region: Region) -> None:
        """Grows the box to contain the region."""
        if inside(region, self.box):
            return
        box = tuple((min(b[0], r[0]), max(b[1], r[1])) for b, r in zip(self.box, region, strict=True))
        total = self.total.new_zeros([stop - start for start, stop in box])
        part_in(total, box, self.box).copy_(self.total)
        self.box, self.total = box, total

    def add(self, region: Region, tensor: Tensor, weight: float, factor: float = 1.0) -> None:
        """Adds `weight * tensor` on the region."""
        self.include(region)
        _accumulate(part_in(self.total, self.box, region), tensor, weight)
        self.coverage.setdefault(region, Coverage()).add(Coverage.of(weight, factor))

    def merge(self, other: "TensorSum") -> None:
        """Adds the partial sum of a later chunk."""
        self.include(other.box)
        _accumulate(part_in(self.total, self.box, other.box), other.total, 1.0)
        for region, coverage in other.coverage.items():
            self.coverage.setdefault(region, Coverage()).add(coverage)

    def cells(self) -> Iterator[tuple[Region, Coverage]]:
        """Splits the box into cells such that the same regions (possibly none) cover every scalar of a cell."""
        if len(self.coverage) == 1:
            yield from self.coverage.items()
            return
        for cell in cells(self.coverage):
            covered = Coverage()
            for region, coverage in self.coverage.items():
                if inside(cell, region):
                    covered.add(coverage)
            yield cell, covered

    def finish(self, old: Tensor, fewest: int, whole_weight: float = 0.0) -> tuple[Tensor, Covered]:
        """Returns the mean where at least `fewest` updates contributed (elsewhere the old value), and those regions.

        The old value counts with the weight that a region lacks up to `whole_weight`. The sum must not be used
        afterwards: if it spans the whole tensor it becomes the result in place, because a second copy of a large
        supernet costs more than the arithmetic.
        """
        parts = [(region, coverage, coverage.contributors >= fewest) for region, coverage in self.cells()]
        reached = {region: coverage for region, coverage, enough in parts if enough}
        if not reached:
            return old, {}
        whole = self.total.shape == old.shape and self.total.dtype == old.dtype
        result = self.total if whole else old.clone()
        for region, coverage, enough in parts:
            target = part_of(result, region)
            before, total = part_of(old, region), part_in(self.total, self.box, region)
            if enough and not total.dtype.is_floating_point:
                target.copy_(total)
            elif enough and whole_weight > coverage.weight:
                torch.div(total.add(before, alpha=whole_weight - coverage.weight), whole_weight, out=target)
            elif enough:
                torch.div(total, coverage.weight, out=target)
            elif whole:
                target.copy_(before)
        return result, reached


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
    """The number of updates that were added, whatever their weights."""
    whole_weight: float = 0.0
    """The sum of the updates' `unheld`."""
    used_up: bool = False
    """Whether `finish` has turned the sums into weights."""

    @property
    def weigh_nothing(self) -> bool:
        """Whether there are updates, but all their weights are 0."""
        return self.updates > 0 and not self.tensors

    @torch.no_grad()
    def add(self, update: Update) -> None:
        """Adds one client's update; tensors of weight zero are skipped.

        Raises ValueError, before anything is added, for a weight that is missing, negative, not finite, or too small
        or too large for a float32 sum. Nothing is added, either, if memory for the sums runs out.
        """
        self._check_unused()
        check_weights(update)
        begun: dict[str, TensorSum] = {}
        further = []
        for name in update.tensors:
            weight = update.weights[name]
            if weight == 0.0 and not update.masked:
                continue
            source, factor = update.slices[name].source, update.factors.get(name, 1.0)
            for region, part in update.parts(name):
                if part.dtype == MASKED and not update.masked:
                    part = part.long()  # a counter: the largest value counts
                if (known := self.tensors.get(source) or begun.get(source)) is None:
                    begun[source] = TensorSum.of(region, part, weight, factor)
                else:
                    known.include(region)
                    further.append((known, region, part, weight, factor))
        for known, region, part, weight, factor in further:
            known.add(region, part, weight, factor)
        self.tensors |= begun
        self.updates += 1
        self.whole_weight += update.unheld

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

        For the tensors named by `singly`, which are not part of the model, one update is enough, and clients without
        them contribute no old value.

        Tensors of `old` that no update covers are returned without a copy. The sums are consumed: adding to them,
        merging or finishing them afterwards raises ValueError.
        """
        self._check_unused()
        self.used_up = True
        fewest = max(1, min_contributors)
        if self.whole_weight and self.updates >= fewest:
            fewest = 1  # clients that do not hold a scalar contribute its old value
        done = {
            name: tensor_sum.finish(old[name], 1, 0.0)
            if name in singly
            else tensor_sum.finish(old[name], fewest, self.whole_weight)
            for name, tensor_sum in self.tensors.items()
        }
        weights = {**old, **{name: tensor for name, (tensor, _) in done.items()}}
        return Averaged(weights, {name: covered for name, (_, covered) in done.items() if covered})

    def _check_unused(self) -> None:
        if self.used_up:
            raise ValueError("these sums were finished: they have become the new weights, start new ones")


def check_weights(update: Update) -> None:
    """Raises ValueError for a weight that sums cannot take.

    Called before the first tensor is added, because a partly added update cannot be removed from the sums.
    """
    weights = {"everything that is not held": update.unheld}
    for name in update.tensors:
        if name not in update.weights:
            raise ValueError(f"the weighting rule gave no weight for {name}: give one to every tensor of the update")
        weights[name] = update.weights[name]
    for name, weight in weights.items():
        if not 0.0 <= weight < math.inf:
            raise ValueError(f"the weight of {name} is {weight}: weights are finite and at least 0")
        if weight and not LIGHTEST <= weight <= HEAVIEST:
            raise ValueError(
                f"the weight of {name} is {weight}: sums of float32 need weights of 0, or of {LIGHTEST} to {HEAVIEST}"
            )


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
