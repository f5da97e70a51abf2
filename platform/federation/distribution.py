"""Distribution heuristics: which client of a round gets which subnet (SuperFed, Sec. 2.3; Tab. 2)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from fedloom.platform.plugins import Chosen, PluginError, Slot, blaming, is_import_path
from fedloom.platform.search.base import Interval
from fedloom.platform.search.constraint import TableConstraint
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.slices import Architecture
from fedloom.tiers.costs import CostTable

FEWEST_FOR_SANDWICH = 3
"""One client for the smallest, one for the largest, and one for the rest of the space."""
DRAWS = 64
"""Uniform draws before a client with a small budget gets a subnet drawn among the affordable ones directly."""

Served = Mapping[str, Mapping[str, int]]
"""How often each client had the largest and the smallest subnet so far: `{"largest": {"3": 2}, "smallest": {...}}`."""


@dataclass(frozen=True)
class Handout:
    """A round's clients, and what they can be given.

    Attributes:
        round: the round, from 0.
        client_ids: the round's clients in ascending order; a heuristic answers in this order.
        budgets: the greatest cost of a subnet per client, in the table's unit; infinite without tier awareness.
        family: the configured fixed family, in its order.
        served: how often each client had the largest and the smallest subnet in earlier rounds.
        rng: the round's own stream.
    """

    space: SearchSpace
    table: CostTable
    round: int
    client_ids: tuple[int, ...]
    budgets: tuple[float, ...]
    family: tuple[Architecture, ...]
    served: Served
    rng: np.random.Generator

    def affords(self, place: int, architecture: Architecture) -> bool:
        """Whether the client at this place can train the subnet."""
        return self.table.cost(architecture) <= self.budgets[place]

    def draw(self, place: int) -> Architecture:
        """A random subnet that the client can train: uniform over depths and widths, if such draws are affordable.

        Where hardly any is, uniform among the affordable ones.
        """
        for _ in range(DRAWS):
            architecture = self.space.sample(self.rng)
            if self.affords(place, architecture):
                return architecture
        affordable = TableConstraint(self.table, Interval(-inf, self.budgets[place]), self.space.genome)
        found = affordable.sample(1, (), self.rng)
        return found[0] if found else self.space.smallest

    def times_served(self, which: str, place: int) -> int:
        """How often the client had the `largest` or `smallest` subnet."""
        return self.served.get(which, {}).get(str(self.client_ids[place]), 0)


Heuristic = Callable[[Handout], Sequence[Architecture]]
"""One subnet per client of the round, in the order of `client_ids`."""


def random(handout: Handout) -> list[Architecture]:
    """Every client an independent random subnet."""
    return [handout.draw(place) for place in range(len(handout.client_ids))]


def _sandwich(handout: Handout, largest_first: Sequence[int], smallest_first: Sequence[int]) -> list[Architecture]:
    """The largest and the smallest to the first place of each order that can have them, the rest random."""
    space, given = handout.space, dict[int, Architecture]()
    able = [place for place in largest_first if handout.affords(place, space.largest)]
    if able:
        given[able[0]] = space.largest
    left = [place for place in smallest_first if place not in given]
    if left:
        given[left[0]] = space.smallest
    return [given[p] if p in given else handout.draw(p) for p in range(len(handout.client_ids))]


def sandwich(handout: Handout) -> list[Architecture]:
    """One smallest, one largest, the rest random; the places rotate with the round."""
    number = len(handout.client_ids)
    rotated = [(handout.round + i) % number for i in range(number)]
    return _sandwich(handout, rotated, rotated)


def tracking_sandwich(handout: Handout) -> list[Architecture]:
    """The largest to who had it least often, the smallest to who had that least often of the others; ties by id."""
    places = range(len(handout.client_ids))
    by_largest = sorted(places, key=lambda p: handout.times_served("largest", p))
    by_smallest = sorted(places, key=lambda p: handout.times_served("smallest", p))
    return _sandwich(handout, by_largest, by_smallest)


def _member(handout: Handout, place: int, index: int) -> Architecture:
    """The family's member, or the largest one that the client affords instead."""
    member = handout.family[index % len(handout.family)]
    if handout.affords(place, member):
        return member
    affordable = [a for a in handout.family if handout.affords(place, a)]
    return max(affordable, key=handout.table.cost, default=handout.space.smallest)


def static(handout: Handout) -> list[Architecture]:
    """Always the same member of the family for a client: its id modulo the family's size."""
    return [_member(handout, place, client) for place, client in enumerate(handout.client_ids)]


def dynamic(handout: Handout) -> list[Architecture]:
    """Another member of the family in every round: id plus round, modulo the family's size."""
    return [_member(handout, place, client + handout.round) for place, client in enumerate(handout.client_ids)]


HEURISTICS: Slot[Heuristic] = Slot(
    "distribution heuristic",
    {
        "random": random,
        "sandwich": sandwich,
        "tracking_sandwich": tracking_sandwich,
        "static": static,
        "dynamic": dynamic,
    },
    ("handout",),
)
NEED_A_FAMILY = ("static", "dynamic")
SANDWICHES = ("sandwich", "tracking_sandwich")


def distribute(rule: Chosen, handout: Handout) -> dict[int, Architecture]:
    """The subnet of every client of the round.

    Raises ValueError if a heuristic of the user's own does not give each client one that it can train.
    """
    blame = f"distribution heuristic {rule.name!r}"
    with blaming("distribution heuristic", rule.name):
        given = [tuple(architecture) for architecture in HEURISTICS.make(rule)(handout)]
    if len(given) != len(handout.client_ids):
        raise PluginError(f"{blame} gives {len(given)} subnets to {len(handout.client_ids)} clients")
    for place, architecture in enumerate(given):
        if is_import_path(rule.name):
            with blaming("distribution heuristic", rule.name):
                handout.space.validate(architecture)
        # The smallest subnet is never above a budget: every client can train it.
        if architecture != handout.space.smallest and not handout.affords(place, architecture):
            raise PluginError(
                f"{blame} gives client {handout.client_ids[place]} a subnet of "
                f"{handout.table.cost(architecture):.6g} {handout.table.measure}, its budget is "
                f"{handout.budgets[place]:.6g}: use Handout.draw or Handout.affords"
            )
    return dict(zip(handout.client_ids, given, strict=True))


def count_served(served: Served, given: Mapping[int, Architecture], space: SearchSpace) -> dict[str, dict[str, int]]:
    """The counters after a round; a random draw that happened to be the largest or the smallest counts, too."""
    counted = {which: dict(served.get(which, {})) for which in ("largest", "smallest")}
    for client_id, architecture in given.items():
        for which, extreme in (("largest", space.largest), ("smallest", space.smallest)):
            if architecture == extreme:
                counted[which][str(client_id)] = counted[which].get(str(client_id), 0) + 1
    return counted
