"""Shares of a round: how much the server lets each client count beside what its own work weighs (overlap, MaxNet)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fedloom.platform.plugins import resolve

DECAYS = ("constant", "linear", "cosine")


@dataclass
class SharesConfig:
    """How the clients of a round are weighed against each other.

    `rule` is overlap (all alike), maxnet (the largest subnet's client beta_t, the others the rest), or module:function.
    beta decays from `beta_0` to 1 / (clients of a round) over `decay_share` of all rounds: constant, linear or cosine.
    """

    rule: str = "maxnet"
    beta_0: float = 0.9
    decay: str = "cosine"
    decay_share: float = 0.8


@dataclass(frozen=True)
class Sharing:
    """A round to be shared out.

    Attributes:
        round: the round, from 0, of `rounds`.
        clients: how many clients a full round has.
        is_largest: per client of this round, in plan order, whether it holds the largest subnet of the space.
    """

    config: SharesConfig
    round: int
    rounds: int
    clients: int
    is_largest: tuple[bool, ...]


@dataclass(frozen=True)
class Shares:
    """One share per client in plan order, and the schedules' values for the round's row."""

    values: Sequence[float]
    schedules: Mapping[str, float] = field(default_factory=dict)


SharesRule = Callable[[Sharing], Shares]


def beta(config: SharesConfig, round_: int, rounds: int, clients: int) -> float:
    """beta_t: from beta_0 down to 1 / clients over the first `decay_share` of the rounds, then constant.

    Source: SuperFed, Sec. 2.4. The decay ends in round T_d = decay_share * rounds.
    """
    last = 1 / clients
    if config.decay == "constant":
        return config.beta_0
    decay_rounds = config.decay_share * rounds
    if round_ >= decay_rounds:
        return last
    progress = round_ / decay_rounds
    left = 1 - progress if config.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return last + (config.beta_0 - last) * left


def overlap(sharing: Sharing) -> Shares:
    """All clients alike: a scalar is averaged over the clients whose subnets hold it."""
    return Shares([1.0] * len(sharing.is_largest))


def maxnet(sharing: Sharing) -> Shares:
    """beta_t for the client with the largest subnet, (1 - beta_t) / (|S| - 1) for each of the others.

    Where several hold it the first in plan order counts as the one; where nobody does, or a client is alone, all count
    alike: there is nothing to weigh the others against.
    """
    number = len(sharing.is_largest)
    beta_t = beta(sharing.config, sharing.round, sharing.rounds, sharing.clients)
    if number < 2 or not any(sharing.is_largest):
        return Shares([1.0] * number, {"beta": beta_t})
    values = [(1 - beta_t) / (number - 1)] * number
    values[sharing.is_largest.index(True)] = beta_t
    return Shares(values, {"beta": beta_t})


RULES: Mapping[str, SharesRule] = {"overlap": overlap, "maxnet": maxnet}


def shares_rule(name: str) -> SharesRule:
    """The rule of that name, or a user's own by import path `module:function`; ValueError lists the known ones."""
    found = resolve("shares rule", name, RULES)
    if not callable(found):
        raise ValueError(f"shares rule {name!r} is not a function of a Sharing")
    return found


def check_shares(config: SharesConfig, key: str) -> None:
    """Raises ValueError for values out of range; `key` is the configuration key."""
    if not 0 < config.beta_0 <= 1:
        raise ValueError(f"{key}.beta_0={config.beta_0}: must be above 0 and at most 1")
    if not 0 < config.decay_share <= 1:
        raise ValueError(f"{key}.decay_share={config.decay_share}: must be above 0 and at most 1")
    if config.decay not in DECAYS:
        raise ValueError(f"{key}.decay={config.decay!r}: allowed are {', '.join(DECAYS)}")
    try:
        shares_rule(config.rule)
    except ValueError as error:
        raise ValueError(f"{key}.rule: {error}") from error
