"""Additive cost tables: what a path through a space costs, from one number per (decision, option)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class CostTable:
    """Cost of the fixed part and of every option of every decision.

    `reduce` is "sum" for additive measures (macs, parameters, latency_s) and "max" for peaks (activation_bytes).
    An option that a device does not support costs infinity.
    """

    measure: str
    fixed: float
    options: tuple[tuple[float, ...], ...]
    reduce: str = "sum"

    @cached_property
    def cheapest(self) -> tuple[float, ...]:
        """The cheapest option's cost per decision."""
        return tuple(min(row) for row in self.options)

    def join(self, a: float, b: float) -> float:
        """Two parts' cost together."""
        return a + b if self.reduce == "sum" else max(a, b)

    def cost(self, architecture: Sequence[int]) -> float:
        """Cost of one architecture."""
        total = self.fixed
        for row, choice in zip(self.options, architecture, strict=True):
            total = self.join(total, row[choice])
        return total

    def costs(self, architectures: np.ndarray) -> np.ndarray:
        """Costs of many architectures, an integer array of shape (paths, decisions)."""
        per_decision = np.stack([np.asarray(row)[architectures[:, i]] for i, row in enumerate(self.options)])
        total: np.ndarray = per_decision.sum(axis=0) + self.fixed
        if self.reduce == "max":
            total = np.maximum(per_decision.max(axis=0), self.fixed)
        return total

    @property
    def smallest(self) -> float:
        """Cost of the cheapest architecture."""
        return self.cost([row.index(min(row)) for row in self.options])

    @property
    def largest(self) -> float:
        """Cost of the most expensive architecture."""
        return self.cost([row.index(max(row)) for row in self.options])
