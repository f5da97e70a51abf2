"""The epsilon of a run's rounds: what every round spends of differential privacy, composed by Google's accountant.

What one round of a mechanism spends is found once per process, as it takes tenths of a second and is the same in all of
them; the rounds are then composed by the accountant's own arithmetic, so that epsilon has its bits.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

Mechanism = tuple[str, float, float]
"""How clients are sampled (uniform, poisson or all), the share of the clients, and the noise multiplier z."""
Spent = tuple[tuple[Mechanism, int, int], ...]
"""Mechanisms, each with its population and its number of rounds."""
DISCRETISATION = 1e-4
"""The accountant's own interval of privacy losses."""


def accounting() -> Any:
    """Google's library; ValueError that says how to install it if it is missing."""
    try:
        import dp_accounting
    except ImportError as error:
        raise ValueError(
            "differential privacy needs Google's accountant: pip install 'fedloom[privacy]' (dp-accounting)"
        ) from error
    return dp_accounting


def with_round(spent: list[list[Any]], mechanism: Mechanism, population: int) -> list[list[Any]]:
    """What was spent, as [mechanism, population, rounds] each, after one more round."""
    found = [[*entry] for entry in spent]
    if {"uniform", "poisson"} <= {mechanism[0], *(entry[0][0] for entry in found)}:
        raise ValueError(
            "privacy: stages that sample by uniform and by poisson have no common epsilon: use one of them"
        )
    for entry in found:
        if entry[0] == list(mechanism) and entry[1] == population:
            entry[2] += 1
            return found
    return [*found, [list(mechanism), population, 1]]


def epsilon(spent: list[list[Any]], delta: float, accountant: str) -> float:
    """The epsilon of all rounds so far at this delta; infinite without noise."""
    return _epsilon(tuple((tuple(m), population, rounds) for m, population, rounds in spent), delta, accountant)


@lru_cache(maxsize=4096)
def _epsilon(spent: Spent, delta: float, accountant: str) -> float:
    if any(noise == 0 for (_, _, noise), _, _ in spent):
        return math.inf
    fixed = any(sampling == "uniform" for (sampling, _, _), _, _ in spent)
    return _by_losses(spent, delta, fixed) if accountant == "pld" else _by_divergences(spent, delta, fixed)


def _by_divergences(spent: Spent, delta: float, fixed: bool) -> float:
    library = accounting()
    orders = library.rdp.RdpAccountant().orders
    total = np.zeros_like(orders)
    for mechanism_, population, rounds in spent:
        total += rounds * _divergences(mechanism_, population, fixed)
    return float(library.rdp.compute_epsilon(orders, total, delta)[0])


@lru_cache(maxsize=256)
def _divergences(mechanism_: Mechanism, population: int, fixed: bool) -> np.ndarray:
    """The Rényi divergences of one round, at the accountant's orders."""
    library, (sampling, share, noise) = accounting(), mechanism_
    relation = library.NeighboringRelation.REPLACE_ONE if fixed else library.NeighboringRelation.ADD_OR_REMOVE_ONE
    # If one client replaces another, the sum changes by up to 2 S.
    gauss = library.GaussianDpEvent(noise / 2 if fixed else noise)
    if sampling == "uniform":
        event = library.SampledWithoutReplacementDpEvent(population, int(share), gauss)
    else:
        event = gauss if sampling == "all" else library.PoissonSampledDpEvent(share, gauss)
    found: np.ndarray = library.rdp.RdpAccountant(neighboring_relation=relation).compose(event).rdp
    return found


def _by_losses(spent: Spent, delta: float, fixed: bool) -> float:
    if fixed:
        raise ValueError("privacy.accountant=pld knows stages of selection=poisson and all, not uniform: use rdp")
    return float(_losses(spent).get_epsilon_for_delta(delta))


@lru_cache(maxsize=8)
def _losses(spent: Spent) -> Any:
    """The distribution of privacy losses of all these rounds; that of all entries but the last is found once."""
    if not spent:
        return accounting().pld.privacy_loss_distribution.identity(value_discretization_interval=DISCRETISATION)
    (sampling, share, noise), _, rounds = spent[-1]
    if sampling == "all":
        # Rounds of everybody are together one Gaussian mechanism of less noise: a new distribution after each of them.
        last = _round_losses(1.0, noise / math.sqrt(rounds))
    else:
        last = _round_losses(share, noise).self_compose(rounds)
    return _losses(spent[:-1]).compose(last)


@lru_cache(maxsize=8)
def _round_losses(share: float, noise: float) -> Any:
    return accounting().pld.privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=noise, sampling_prob=share, value_discretization_interval=DISCRETISATION
    )
