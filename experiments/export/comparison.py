"""Whether what was exported computes what the run's own model computes: nothing is written before it does."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.experiments.export.formats import Forward
from fedloom.platform.clients.objectives import IGNORED

LARGEST_DIFFERENCE = 1e-4
"""Of two outputs, in units of the largest output but at least absolute: sums in another order differ by less."""
LARGEST_CHANGED_SHARE = 1e-3
"""Of the classes predicted: two logits may be as near to each other as that."""
BATCH_SIZE = 256


@dataclass(frozen=True)
class Agreement:
    """How far a file's outputs are from the model's, over all samples compared."""

    max_abs_difference: float
    largest_output: float
    argmax_changed: int
    targets: int
    samples: int


@dataclass(frozen=True)
class Comparison:
    """The model's own accuracy on the samples, and each file's agreement with it."""

    correct: int
    targets: int
    samples: int
    agreements: Mapping[str, Agreement]


class _Tally:
    """Adds up one file's differences."""

    def __init__(self) -> None:
        self.difference, self.largest, self.changed, self.targets, self.samples = 0.0, 0.0, 0, 0, 0

    def add(self, expected: Tensor, found: Tensor, counts: Tensor) -> None:
        # A maximum would pass over NaN where it is a number elsewhere: torch's max keeps it.
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
    """Runs the model and its files over all samples, in the batches in which runs score their models.

    Inputs (n, ...), labels (n,) or (n, T); padding does not count.
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
    """Raises ValueError for a file whose outputs differ from the model's by more than rounding does."""
    for name, found in comparison.agreements.items():
        allowed = LARGEST_DIFFERENCE * max(1.0, found.largest_output)
        if not found.max_abs_difference <= allowed:  # NaN, too
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
