"""The comparison of an exported file's outputs with the model's: only rounding is forgiven."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.experiments.export.formats import Agreement, Comparison, check_agreement, compare
from fedloom.platform.clients.objectives import LastPosition, Objective


def test_differences_are_counted_by_hand() -> None:
    x, y = torch.tensor([[1.0, 0.0], [0.0, 3.0], [2.0, 1.0]]), torch.tensor([0, 1, 1])

    def shifted(x: Tensor) -> Tensor:
        return x + torch.tensor([0.0, 1.5])

    found = compare(lambda x: x, {"same": lambda x: x.clone(), "shifted": shifted}, (x, y), Objective())
    assert (found.correct, found.targets, found.samples) == (2, 3, 3)
    assert found.agreements["same"] == Agreement(0.0, 3.0, 0, 3, 3)
    assert found.agreements["shifted"] == Agreement(1.5, 3.0, 2, 3, 3)


def test_padding_does_not_count() -> None:
    logits = torch.tensor([[[1.0, 1.0], [0.0, 0.0]]])  # one text, two tokens to choose from, two positions
    y = torch.tensor([[0, -100]])
    found = compare(lambda x: x, {"other": lambda x: x.flip(1)}, (logits, y), Objective())
    assert (found.correct, found.targets, found.samples) == (1, 1, 1)
    assert found.agreements["other"] == Agreement(1.0, 1.0, 1, 1, 1)


def test_the_score_is_that_of_the_objective_and_files_agree_at_all_positions() -> None:
    logits = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [1.0, 1.0]]])
    y = torch.tensor([[0, 0], [0, 1]])
    compared = compare(lambda x: x, {"same": lambda x: x.clone()}, (logits, y), LastPosition())
    assert (compared.correct, compared.targets, compared.samples) == (1, 2, 2)
    assert compared.agreements["same"] == Agreement(0.0, 1.0, 0, 4, 2)


def test_a_number_per_sample_predicts_no_class() -> None:
    values, y = torch.tensor([1.0, -2.0]), torch.tensor([1, 0])
    agreement = Agreement()
    agreement.add(values, values + 0.5, y)
    assert agreement == Agreement(0.5, 2.0, 0, 2, 2)


def test_labels_by_name_are_the_objectives_alone() -> None:
    class Near(Objective):
        def metric_sum(self, outputs: Any, targets: Any) -> Tensor:
            return ((outputs - targets["value"]).abs() < targets["radius"]).all(dim=1).sum()

        def counted(self, outputs: Any, targets: Any) -> int:
            return len(outputs)

    x, y = torch.tensor([[1.0, 0.0], [0.0, 3.0]]), {"value": torch.zeros(2, 2), "radius": torch.full((2, 1), 2.0)}
    found = compare(lambda x: x, {"other": lambda x: x.flip(1)}, (x, y), Near())
    assert (found.correct, found.targets, found.samples) == (1, 2, 2)
    assert found.agreements["other"] == Agreement(3.0, 3.0, 0, 0, 2)


def test_a_difference_that_is_no_number_is_not_forgotten() -> None:
    x, y = torch.ones(300, 2), torch.zeros(300, dtype=torch.int64)
    calls: Iterator[float] = iter([float("nan"), 0.0])
    found = compare(lambda x: x, {"nan": lambda x: x + next(calls)}, (x, y), Objective())
    assert np.isnan(found.agreements["nan"].max_abs_difference)
    with pytest.raises(ValueError, match="differ from the model's by nan"):
        check_agreement(found)


@pytest.mark.parametrize(
    ("found", "agrees"),
    [
        (Agreement(1e-4, 0.5, 0, 10, 10), True),
        (Agreement(1.1e-4, 0.5, 0, 10, 10), False),
        (Agreement(1.1e-4, 2.0, 0, 10, 10), True),  # of outputs up to 2
        (Agreement(0.0, 0.5, 1, 999, 999), False),
        (Agreement(0.0, 0.5, 1, 1000, 1000), True),
    ],
)
def test_only_rounding_is_forgiven(found: Agreement, agrees: bool) -> None:
    comparison = Comparison(1, 1, 1, {"pt2": found})
    if agrees:
        check_agreement(comparison)
    else:
        with pytest.raises(ValueError, match="nothing was written"):
            check_agreement(comparison)
