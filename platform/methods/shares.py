"""Shares: factors by which the server scales the clients' weights in a round (overlap, MaxNet).

MaxNet gives beta_t to the client with the largest subnet. SuperFed (Sec. 2.4) and the authors' code share 1 - beta_t
among the other clients, as here; SuperFedNAS' supplement gives 1 - beta_t to *each* of them, so that beta_t = .9 would
weigh the largest subnet 9 times instead of 9 (|S| - 1) times as much as another.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from numbers import Real
from typing import Annotated, Literal

from fedloom.platform.plugins import ComponentSpec, PluginError, Registry, is_import_path
from fedloom.platform.settings import SHARE, ComponentName


@dataclass
class SharesConfig:
    """How the server weights the clients of a round against each other."""

    rule: Annotated[
        str, ComponentName("shares rule"), "overlap (all equal), maxnet (the largest subnet's client beta_t)"
    ] = "maxnet"
    beta_0: Annotated[float, SHARE, "maxnet: beta in the first round; it decays to 1 / (clients of a round)"] = 0.9
    decay: Annotated[Literal["constant", "linear", "cosine"], "maxnet: how beta decays"] = "cosine"
    decay_share: Annotated[float, SHARE, "maxnet: the share of all rounds over which it decays"] = 0.8


@dataclass(frozen=True)
class Sharing:
    """A shares rule's input: one round.

    Attributes:
        round: the round's number, from 0 to `rounds` - 1.
        is_largest: per client among which the round is shared, in plan order, whether it holds the largest subnet of
            the space; in rounds that end with their first answers, those that answer.
    """

    config: SharesConfig
    round: int
    rounds: int
    is_largest: tuple[bool, ...]


@dataclass(frozen=True)
class Shares:
    """One share per client in plan order, and the values of the rule's schedules for the round's row."""

    values: Sequence[float]
    schedules: Mapping[str, float] = field(default_factory=dict)


SharesRule = Callable[[Sharing], Shares]


def beta(config: SharesConfig, round_: int, rounds: int, clients: int) -> float:
    """beta_t: decays from beta_0 to 1 / clients over the first `decay_share` of the rounds, then stays constant.

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
    """Equal shares: a scalar is averaged over the clients whose subnets hold it."""
    return Shares([1.0] * len(sharing.is_largest))


def maxnet(sharing: Sharing) -> Shares:
    """beta_t for the client with the largest subnet; the others share 1 - beta_t: (1 - beta_t) / (|S| - 1) for each.

    If several clients hold the largest subnet, the first in plan order gets beta_t. If none does, or the round has one
    client, all shares are equal.
    """
    number = len(sharing.is_largest)
    beta_t = beta(sharing.config, sharing.round, sharing.rounds, max(number, 1))
    if number < 2 or not any(sharing.is_largest):
        return Shares([1.0] * number, {"beta": beta_t})
    values = [(1 - beta_t) / (number - 1)] * number
    values[sharing.is_largest.index(True)] = beta_t
    return Shares(values, {"beta": beta_t})


SHARES_RULES: Registry[SharesRule] = Registry("shares rule", {"overlap": overlap, "maxnet": maxnet}, ("sharing",))


def shares_of(rule: ComponentSpec, sharing: Sharing) -> Shares:
    """The shares of a round; PluginError for a user's rule that does not return one valid share per client."""
    shares = SHARES_RULES.make(rule)(sharing)
    if is_import_path(rule.name):
        _check(shares, len(sharing.is_largest), f"shares rule {rule.name!r}")
    return shares


def _check(shares: Shares, clients: int, blame: str) -> None:
    if not isinstance(shares, Shares):
        raise PluginError(f"{blame} gives {type(shares).__name__}: give a fedloom.platform.methods.shares.Shares")
    if not isinstance(shares.values, Sized) or len(shares.values) != clients:
        number = len(shares.values) if isinstance(shares.values, Sized) else repr(shares.values)[:60]
        raise PluginError(f"{blame} gives {number} shares to {clients} clients: give one per client")
    for value in shares.values:
        if not (isinstance(value, Real) and 0 <= value < math.inf):
            raise PluginError(f"{blame} gives the share {value!r}: shares are finite numbers of at least 0")
    for name, value in shares.schedules.items() if isinstance(shares.schedules, Mapping) else [("schedules", None)]:
        if not isinstance(value, int | float):
            raise PluginError(f"{blame} gives the schedule {name} the value {value!r:.60}: give numbers by their names")


def check_shares(rule: ComponentSpec, config: SharesConfig, clients: int) -> None:
    """Tries a rule of the user's own on rounds with and without the largest subnet; PluginError if it does not work."""
    if is_import_path(rule.name):
        for largest in (True, False):
            shares_of(rule, Sharing(config, 0, 2, (largest, *[False] * (clients - 1))))
