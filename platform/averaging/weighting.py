"""Weighting rules: how much each tensor of a client's update counts. Every rule is a few lines."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real

from fedloom.platform.plugins import Chosen, PluginError, Slot, is_import_path


@dataclass(frozen=True)
class Work:
    """What a client did to the tensors that it returns.

    Attributes:
        samples: size of the client's training set, n_k.
        seen_samples: samples trained on in the round (epochs * n_k), each with one path.
        seen_by_tensor: of these, the samples that went through each returned tensor.
        share: the client's share in this round, set by the server (1 unless a rule such as MaxNet says otherwise).
    """

    samples: int
    seen_samples: int
    seen_by_tensor: Mapping[str, int]
    share: float = 1.0


WeightingRule = Callable[[Work], Mapping[str, float]]
"""One weight per returned tensor: finite, 0 or more; 0 says that the tensor was not trained."""


def fedavg(work: Work) -> dict[str, float]:
    """Every tensor weighs the client's samples n_k (McMahan et al. 2017)."""
    return dict.fromkeys(work.seen_by_tensor, float(work.samples))


def plain(work: Work) -> dict[str, float]:
    """Every client's tensors weigh the same."""
    return dict.fromkeys(work.seen_by_tensor, 1.0)


def opa(work: Work) -> dict[str, float]:
    """Operators weigh the samples that went through them, fixed layers all samples seen (FedorAS, Eq. 5)."""
    return {name: float(seen) for name, seen in work.seen_by_tensor.items()}


WEIGHTING_RULES: Slot[WeightingRule] = Slot("weighting rule", {"fedavg": fedavg, "plain": plain, "opa": opa}, ("work",))
FEDAVG = Chosen("fedavg")


def weighting_rule(choice: Chosen) -> WeightingRule:
    """The chosen rule; PluginError for one that is not there, or whose answer is no weight per tensor."""
    rule = WEIGHTING_RULES.make(choice)
    if not is_import_path(choice.name):
        return rule

    def checked(work: Work) -> Mapping[str, float]:
        return _checked(rule(work), work, choice.name)

    return checked


def _checked(weights: Mapping[str, float], work: Work, name: str) -> Mapping[str, float]:
    blame = f"weighting rule {name!r}"
    if not isinstance(weights, Mapping):
        raise PluginError(f"{blame} gives {type(weights).__name__}: give a dictionary of one weight per tensor")
    for tensor in work.seen_by_tensor:
        if tensor not in weights:
            raise PluginError(f"{blame} gives no weight for {tensor}: give one to every tensor of work.seen_by_tensor")
        weight = weights[tensor]
        if not isinstance(weight, Real) or not 0 <= weight < math.inf:
            raise PluginError(f"{blame} gives {tensor} the weight {weight!r}: weights are finite numbers of at least 0")
    return weights
