"""A limit on the MACs of the architecture that a search ends with, as deployment targets demand it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedloom.platform.methods.personal import with_row
from fedloom.platform.spaces.capabilities import HasCells
from fedloom.platform.spaces.slices import Subspace


@dataclass(frozen=True)
class MacTarget:
    """The MACs of a network of cells by operator, and how many the searched architecture may have at most.

    The baselines of SuperFedNAS (Tab. 3, 5, 6) are searched once per MAC target; neither it nor their papers say how a
    target enters the search. Here it only takes away operators that would make it unreachable.

    Attributes:
        fixed: MACs outside the searched operators, those of a shared base included.
        rows: MACs per decision and option.
        most: the target.
    """

    fixed: float
    rows: tuple[tuple[float, ...], ...]
    most: float

    @classmethod
    def of(cls, space: HasCells, most: float, base_cells: int = 0) -> "MacTarget":
        """The target `most` for networks whose first `base_cells` cells keep all operators."""
        empty: Subspace = ((),) * len(space.options)
        fixed = space.cost_of_cells("macs", empty, base_cells)
        rows = tuple(
            tuple(space.cost_of_cells("macs", with_row(empty, d, (o,)), base_cells) - fixed for o in range(options))
            for d, options in enumerate(space.options)
        )
        return cls(fixed, rows, most)

    def least(self, kept: Subspace) -> float:
        """MACs of the cheapest architecture that keeps one of these operators per edge."""
        return self.fixed + sum(self._cheapest(d, row) for d, row in enumerate(kept))

    def _cheapest(self, decision: int, row: Sequence[int]) -> float:
        return min((self.rows[decision][option] for option in row), default=0.0)

    def allowed(self, kept: Subspace, decision: int) -> tuple[int, ...]:
        """The operators of an edge with which the target can be reached, whatever edges are decided next."""
        row = kept[decision]
        others = self.least(kept) - self._cheapest(decision, row)
        return tuple(option for option in row if others + self.rows[decision][option] <= self.most)

    def most_probable(self, alphas: Tensor, kept: Subspace) -> Subspace:
        """The architecture within the target with the largest product of softmax weights; ties go to fewer MACs.

        Of all partial architectures only those stay that none with as few MACs beats, so that the result is exact.
        """
        to_come = self.least(kept) - self.fixed
        partial: list[tuple[float, float, Subspace]] = [(self.fixed, 0.0, ())]
        for decision, row in enumerate(kept):
            to_come -= self._cheapest(decision, row)
            scores = _log_softmax([float(alphas[decision, option]) for option in row])
            options: list[tuple[float, float, tuple[int, ...]]] = [
                (self.rows[decision][option], score, (option,)) for option, score in zip(row, scores, strict=True)
            ]
            options = options or [(0.0, 0.0, ())]  # a pruned edge
            longer = [(macs + m, score + s, (*rows, o)) for macs, score, rows in partial for m, s, o in options]
            partial = _undominated([state for state in longer if state[0] + to_come <= self.most])
        return partial[-1][2]


def _undominated(states: list[tuple[float, float, Subspace]]) -> list[tuple[float, float, Subspace]]:
    """Those with a larger score than all states of as few MACs, from few MACs and small scores to large ones."""
    found: list[tuple[float, float, Subspace]] = []
    for state in sorted(states, key=lambda state: (state[0], -state[1])):
        if not found or state[1] > found[-1][1]:
            found.append(state)
    return found


def _log_softmax(values: Sequence[float]) -> list[float]:
    if not values:
        return []
    most = max(values)
    total = most + math.log(sum(math.exp(value - most) for value in values))
    return [value - total for value in values]
