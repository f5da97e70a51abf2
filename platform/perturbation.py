"""Perturbation-based selection: an operator is worth what the accuracy loses without it (SPIDER; Wang et al. 2021)."""

import math
from collections.abc import Callable

from torch import Tensor

from fedloom.platform.personal import with_row
from fedloom.platform.spaces.operator_choice import Subspace
from fedloom.platform.training import Score, evaluate

Forward = Callable[[Tensor, Subspace], Tensor]


def masked_scores(forward: Forward, kept: Subspace, decision: int, data: tuple[Tensor, Tensor]) -> dict[int, Score]:
    """For every operator of an edge the validation score of the network without it."""

    def without(option: int) -> Score:
        rest = with_row(kept, decision, tuple(o for o in kept[decision] if o != option))
        return evaluate(lambda x: forward(x, rest), data)

    return {option: without(option) for option in kept[decision]}


def most_missed(scores: dict[int, Score]) -> int:
    """The operator whose removal hurts most: the lowest masked accuracy, then the largest masked loss, then the first.

    SPIDER's listing says highest; its prose, the method that it cites and the authors' code say lowest.
    """

    def pain(option: int) -> tuple[float, float, int]:
        score = scores[option]
        # A network that breaks down without the operator has no finite loss: nothing could hurt more.
        return score.metric, -score.loss if math.isfinite(score.loss) else -math.inf, option

    return min(scores, key=pain)
