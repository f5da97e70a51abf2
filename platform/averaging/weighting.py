"""Weighting rules: how much each tensor of a client's update counts. Every rule is a few lines."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedloom.platform.plugins import resolve


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


def fedavg(work: Work) -> dict[str, float]:
    """Every tensor weighs the client's samples n_k (McMahan et al., 2017)."""
    return dict.fromkeys(work.seen_by_tensor, float(work.samples))


def plain(work: Work) -> dict[str, float]:
    """Every client's tensors weigh the same."""
    return dict.fromkeys(work.seen_by_tensor, 1.0)


def opa(work: Work) -> dict[str, float]:
    """Operators weigh the samples that went through them, fixed layers all samples seen (FedorAS, Eq. 5)."""
    return {name: float(seen) for name, seen in work.seen_by_tensor.items()}


RULES: Mapping[str, WeightingRule] = {"fedavg": fedavg, "plain": plain, "opa": opa}


def weighting_rule(name: str) -> WeightingRule:
    """The rule of that name, or a user's own by import path `module:function`; ValueError lists the known ones."""
    return resolve("weighting rule", name, RULES)
