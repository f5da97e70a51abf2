"""Checks that exported files compute the same as the run's own model, before any file is written."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.experiments.export.formats import Forward
from fedloom.platform.clients.objectives import IGNORED

LARGEST_DIFFERENCE = 1e-4
"""Allowed difference of two outputs, relative to the largest output if that is above 1, else absolute.

Sums in another order differ by less.
"""
LARGEST_CHANGED_SHARE = 1e-3
"""Allowed share of predicted classes that differ, since two logits may be nearly equal."""
BATCH_SIZE = 256


@dataclass(frozen=True)
class Agreement:
    """The differences between a file's outputs and the model's, over all compared samples."""

    max_abs_difference: float
    largest_output: float
    argmax_changed: int
    targets: int
    samples: int


@dataclass(frozen=True)
class Comparison:
    """The number of the model's correct predictions, and the agreement of each file with the model."""

    correct: int
    targets: int
    samples: int
    agreements: Mapping[str, Agreement]


class _Tally:
    """Accumulates the differences of one file."""

    def __init__(self) -> None:
        self.difference, self.largest, self.changed, self.targets, self.samples = 0.0, 0.0, 0, 0, 0

    def add(self, expected: Tensor, found: Tensor, counts: Tensor) -> None:
        # Python's max may drop NaN; torch's max keeps it.
        difference = float((found - expected).abs().max()) if found.shape == expected.shape else math.nan
        self.difference = difference if math.isnan(difference) else max(self.difference, difference)
        self.largest = max(self.largest, float(expected.abs().max()))
        self.changed += int(((found.argmax(dim=1) != expected.argmax(dim=1)) & counts).sum())
        self.targets += int(counts.sum())
        self.samples += len(expected)

    def agreement(self) -> Agreement:
        return Agreement(self.difference, self.largest, self.changed, self.targets, self.samples)


@torch.no_grad()
def compare(reference: Forward, files: Mapping[str, Forward], data: tuple[Tensor, Tensor]) -> Comparison:
    """Runs the model and its files on all samples, with the batch size with which runs score models.

    `data` holds inputs of shape (n, ...) and labels of shape (n,) or (n, T); padding does not count.
    """
    x, y = data
    size = BATCH_SIZE if y.dim() == 1 else BATCH_SIZE // 8
    tallies = {name: _Tally() for name in files}
    correct = targets = 0
    for x_B, y_B in zip(torch.split(x, size), torch.split(y, size), strict=True):
        logits, counts = reference(x_B), y_B != IGNORED
        correct += int((logits.argmax(dim=1) == y_B).sum())
        targets += int(counts.sum())
        for name, forward in files.items():
            tallies[name].add(logits, forward(x_B), counts)
    return Comparison(correct, targets, len(y), {name: tally.agreement() for name, tally in tallies.items()})


def check_agreement(comparison: Comparison) -> None:
    """Raises ValueError for a file whose outputs differ from the model's by more than rounding errors."""
    for name, found in comparison.agreements.items():
        allowed = LARGEST_DIFFERENCE * max(1.0, found.largest_output)
        if not found.max_abs_difference <= allowed:  # true for NaN as well
            raise ValueError(
                f"the {name} file's outputs differ from the model's by {found.max_abs_difference:.3g} (allowed is "
                f"{allowed:.3g}): nothing was written; export other --formats and report this"
            )
        if found.argmax_changed > LARGEST_CHANGED_SHARE * found.targets:
            raise ValueError(
                f"the {name} file predicts another class for {found.argmax_changed} of {found.targets} targets: "
                "nothing was written; export other --formats and report this"
            )


__all__ = ["Agreement", "Comparison", "check_agreement", "compare"]
