"""Weighting rules: the weight of each tensor of a client's update in the mean."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real

from fedloom.platform.plugins import ComponentSpec, PluginError, Registry, declares, is_import_path


@dataclass(frozen=True)
class Work:
    """A weighting rule's input: how much a client trained the tensors that it returns.

    Attributes:
        samples: size of the client's training set, n_k.
        seen_samples: samples trained on in the round (epochs * n_k), each through one path.
        seen_by_tensor: per returned tensor, how many of `seen_samples` went through it.
        share: the client's share in this round, set by the server (1 unless a rule such as MaxNet changes it).
    """

    samples: int
    seen_samples: int
    seen_by_tensor: Mapping[str, int]
    share: float = 1.0


WeightingRule = Callable[[Work], Mapping[str, float]]
"""Returns one weight per returned tensor: finite and at least 0; 0 means that the tensor was not trained."""


@dataclass(frozen=True)
class WeightingTraits:
    """What a weighting rule declares with `declares`; a rule that declares nothing has the defaults.

    Attributes:
        at_most_one: whether no weight is above 1, which bounds a client's influence (differential privacy needs it).
        weighs_unheld: whether scalars that a client does not hold count with their old values (`Whole`).
    """

    at_most_one: bool = False
    weighs_unheld: bool = False


def fedavg(work: Work) -> dict[str, float]:
    """Weights every tensor by the client's number of samples n_k (McMahan et al. 2017)."""
    return dict.fromkeys(work.seen_by_tensor, float(work.samples))


class Whole(dict[str, float]):
    """The weights of a rule that averages whole supernets: what a client does not hold counts with its old value."""

    def __init__(self, weights: Mapping[str, float], unheld: float) -> None:
        super().__init__(weights)
        self.unheld = unheld
        """The weight of the old values of all scalars that the client did not hold."""


@declares(WeightingTraits(weighs_unheld=True))
def fedavg_whole(work: Work) -> Whole:
    """FedAvg of whole supernets: scalars that a client does not hold count with their old values and the weight n_k.

    This dilutes updates. Every client contributes to every scalar, so `min_contributors` requires only that many
    updates in all. Source: the naive baseline of FedorAS, Fig. 10.
    """
    return Whole(fedavg(work), float(work.samples))


@declares(WeightingTraits(at_most_one=True))
def plain(work: Work) -> dict[str, float]:
    """Weights all clients' tensors equally."""
    return dict.fromkeys(work.seen_by_tensor, 1.0)


def opa(work: Work) -> dict[str, float]:
    """Weights operators by the samples that went through them, fixed layers by all seen samples (FedorAS, Eq. 5)."""
    return {name: float(seen) for name, seen in work.seen_by_tensor.items()}


WEIGHTING_RULES: Registry[WeightingRule] = Registry(
    "weighting rule", {"fedavg": fedavg, "fedavg_whole": fedavg_whole, "plain": plain, "opa": opa}, ("work",)
)
FEDAVG = ComponentSpec("fedavg")


def weighting_traits(name: str) -> WeightingTraits:
    """What the weighting rule of that name declares."""
    return WEIGHTING_RULES.traits_of(name, WeightingTraits())


def weighting_rule(choice: ComponentSpec) -> WeightingRule:
    """The chosen rule; PluginError if it does not exist, or when a user's rule does not return a weight per tensor."""
    rule, blame = WEIGHTING_RULES.make(choice), f"weighting rule {choice.name!r}"

    def checked(work: Work) -> Mapping[str, float]:
        weights = rule(work)
        if not isinstance(weights, Mapping):
            raise PluginError(f"{blame} gives {type(weights).__name__}: give a dictionary of one weight per tensor")
        for name in work.seen_by_tensor:
            if name not in weights:
                raise PluginError(
                    f"{blame} gives no weight for {name}: give one to every tensor of work.seen_by_tensor"
                )
            weight = weights[name]
            if not isinstance(weight, Real) or not 0 <= weight < math.inf:
                raise PluginError(
                    f"{blame} gives {name} the weight {weight!r}: weights are finite numbers of at least 0"
                )
        return weights

    return checked if is_import_path(choice.name) else rule


def weights_of(rule: WeightingRule, work: Work) -> tuple[dict[str, float], float]:
    """The weights of an update's tensors, times the client's share, and the weight of what the client does not hold."""
    weights = rule(work)
    unheld = weights.unheld if isinstance(weights, Whole) else 0.0
    return {name: work.share * weight for name, weight in weights.items()}, work.share * unheld
