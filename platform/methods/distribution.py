"""Distribution heuristics: the assignment of subnets to a round's clients (SuperFed, Sec. 2.3; Tab. 2)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Annotated

import annotated_types
import numpy as np

from fedloom.platform.plugins import ComponentSpec, PluginError, Registry, blaming, is_import_path
from fedloom.platform.search.base import Interval
from fedloom.platform.search.constraint import TableConstraint
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.slices import Architecture
from fedloom.tiers.costs import CostTable

FEWEST_FOR_SANDWICH = 3
"""The smallest cohort: a client each for the smallest, the largest and a random subnet."""
DRAWS = 64
"""Uniform draws from the space before a subnet is drawn directly from those within a client's budget."""

Served = Mapping[str, Mapping[str, int]]
"""Per client, how often it got the largest and the smallest subnet: `{"largest": {"3": 2}, "smallest": {...}}`."""


@dataclass(frozen=True)
class Distribution:
    """A heuristic's input: a round's clients, their budgets and the subnets.

    Attributes:
        round: the round, from 0.
        client_ids: the round's clients in ascending order, the order of a heuristic's result.
        budgets: the largest cost of a subnet per client, in the table's unit; infinite without tier awareness.
        family: the configured fixed family, in its order.
        served: how often each client got the largest and the smallest subnet in earlier rounds.
        rng: the cohort's random stream, which is the round's but for the further cohorts of a round that does not wait.
    """

    space: SearchSpace
    table: CostTable
    round: int
    client_ids: tuple[int, ...]
    budgets: tuple[float, ...]
    family: tuple[Architecture, ...]
    served: Served
    rng: np.random.Generator

    @property
    def smallest(self) -> Architecture:
        """The subnet that every client can train."""
        return smallest_supported(self.space, self.table)

    def affords(self, index: int, architecture: Architecture) -> bool:
        """Whether the subnet is within the budget of the client `client_ids[index]`."""
        return self.table.cost(architecture) <= self.budgets[index]

    def draw(self, index: int) -> Architecture:
        """A random subnet within the client's budget, drawn from the whole space by rejection.

        After `DRAWS` rejections it is drawn directly from the subnets within the budget.
        """
        for _ in range(DRAWS):
            architecture = self.space.sample(self.rng)
            if self.affords(index, architecture):
                return architecture
        affordable = TableConstraint(self.table, Interval(-inf, self.budgets[index]), self.space.genome)
        drawn = affordable.sample(1, (), self.rng)
        return drawn[0] if drawn else self.smallest

    def times_served(self, which: str, index: int) -> int:
        """How often the client got the `largest` or `smallest` subnet."""
        return self.served.get(which, {}).get(str(self.client_ids[index]), 0)


def smallest_supported(space: SearchSpace, table: CostTable) -> Architecture:
    """The space's smallest subnet, or the cheapest one if that has operators that devices do not support."""
    return space.smallest if table.cost(space.smallest) < inf else space.cheapest(table)


Heuristic = Callable[[Distribution], Sequence[Architecture]]
"""Returns one subnet per client of the round, in the order of `client_ids`."""


def random(distribution: Distribution) -> list[Architecture]:
    """Gives every client an independent random subnet."""
    return [distribution.draw(index) for index in range(len(distribution.client_ids))]


def _sandwich(
    distribution: Distribution,
    largest_first: Sequence[int],
    smallest_first: Sequence[int],
    draw: Callable[[int], Architecture] | None = None,
) -> list[Architecture]:
    """Gives the largest and the smallest subnet to the first client in each order that can train it.

    Every other client gets the subnet that `draw` returns for it, by default a random one.
    """
    space, subnet_of, draw = distribution.space, dict[int, Architecture](), draw or distribution.draw
    able = [index for index in largest_first if distribution.affords(index, space.largest)]
    if able:
        subnet_of[able[0]] = space.largest
    left = [index for index in smallest_first if index not in subnet_of]
    if left:
        subnet_of[left[0]] = distribution.smallest
    return [subnet_of[p] if p in subnet_of else draw(p) for p in range(len(distribution.client_ids))]


def sandwich(distribution: Distribution) -> list[Architecture]:
    """Gives one client the smallest, one the largest, the rest random subnets; rotates over the clients by round."""
    number = len(distribution.client_ids)
    rotated = [(distribution.round + i) % number for i in range(number)]
    return _sandwich(distribution, rotated, rotated)


def tracking_sandwich(distribution: Distribution) -> list[Architecture]:
    """Like `sandwich`, but each extreme goes to the client that got it least often so far; ties are broken by id."""
    return _sandwich(distribution, *_least_served(distribution))


def _least_served(distribution: Distribution) -> tuple[list[int], list[int]]:
    """The clients' indices, sorted by how often they got the largest subnet, and by how often the smallest."""
    indices = range(len(distribution.client_ids))
    by_largest = sorted(indices, key=lambda p: distribution.times_served("largest", p))
    by_smallest = sorted(indices, key=lambda p: distribution.times_served("smallest", p))
    return by_largest, by_smallest


def pareto_path(
    distribution: Distribution,
    *,
    limits: Annotated[int, annotated_types.Interval(ge=2, le=1000), "number of MAC limits, each giving a subnet"] = 60,
) -> list[Architecture]:
    """Like `tracking_sandwich`, but the rest get random members of DeepFedNAS' Pareto path of the fittest subnets."""
    from fedloom.platform.search.fitness import path_of_the_fittest  # not needed by the other heuristics

    path = path_of_the_fittest(distribution.space, limits)

    def draw(index: int) -> Architecture:
        affordable = [a for a in path if distribution.affords(index, a)]
        return affordable[distribution.rng.integers(len(affordable))] if affordable else distribution.smallest

    return _sandwich(distribution, *_least_served(distribution), draw)


def _member(distribution: Distribution, index: int, number: int) -> Architecture:
    """The family member with this number, modulo the family's size; if over budget, the costliest member within it."""
    member = distribution.family[number % len(distribution.family)]
    if distribution.affords(index, member):
        return member
    affordable = [a for a in distribution.family if distribution.affords(index, a)]
    return max(affordable, key=distribution.table.cost, default=distribution.smallest)


def static(distribution: Distribution) -> list[Architecture]:
    """Gives a client the same member of the family in all rounds: its id modulo the family's size."""
    return [_member(distribution, index, client) for index, client in enumerate(distribution.client_ids)]


def dynamic(distribution: Distribution) -> list[Architecture]:
    """Gives a client another member of the family in every round: id plus round, modulo the family's size."""
    return [
        _member(distribution, index, client + distribution.round)
        for index, client in enumerate(distribution.client_ids)
    ]


HEURISTICS: Registry[Heuristic] = Registry(
    "distribution heuristic",
    {
        "random": random,
        "sandwich": sandwich,
        "tracking_sandwich": tracking_sandwich,
        "pareto_path": pareto_path,
        "static": static,
        "dynamic": dynamic,
    },
    ("distribution",),
)
NEED_A_FAMILY = ("static", "dynamic")
INDEPENDENT = ("random", *NEED_A_FAMILY)
"""Heuristics by which a client's subnet does not depend on who else takes part."""
SANDWICHES = ("sandwich", "tracking_sandwich", "pareto_path")


def distribute(rule: ComponentSpec, distribution: Distribution) -> dict[int, Architecture]:
    """The subnet of every client of the round.

    Raises PluginError, a ValueError, if a user's heuristic does not give each client one within its budget.
    """
    blame = f"distribution heuristic {rule.name!r}"
    answer = HEURISTICS.make(rule)(distribution)
    try:
        with blaming("distribution heuristic", rule.name, spare=TypeError):
            subnets = [tuple(architecture) for architecture in answer]
    except TypeError as error:
        raise PluginError(f"{blame} gives {answer!r:.60}: give an architecture, a tuple, to each client") from error
    if len(subnets) != len(distribution.client_ids):
        raise PluginError(f"{blame} gives {len(subnets)} subnets to {len(distribution.client_ids)} clients")
    for index, architecture in enumerate(subnets):
        if is_import_path(rule.name):
            with blaming("distribution heuristic", rule.name):
                distribution.space.validate(architecture)
        # Every client can train the smallest subnet, whatever its budget.
        if architecture != distribution.smallest and not distribution.affords(index, architecture):
            raise PluginError(
                f"{blame} gives client {distribution.client_ids[index]} a subnet of "
                f"{distribution.table.cost(architecture):.6g} {distribution.table.measure}, its budget is "
                f"{distribution.budgets[index]:.6g}: use Distribution.draw or Distribution.affords"
            )
    return dict(zip(distribution.client_ids, subnets, strict=True))


def check_heuristic(rule: ComponentSpec, distribution: Distribution) -> None:
    """Tests a user's heuristic on a first round and a later one; PluginError if it fails."""
    if is_import_path(rule.name):
        subnets = distribute(rule, distribution)
        distribute(
            rule,
            replace(distribution, round=1, served=count_served({}, subnets, distribution.space, distribution.table)),
        )


def count_served(
    served: Served, subnets: Mapping[int, Architecture], space: SearchSpace, table: CostTable
) -> dict[str, dict[str, int]]:
    """The counters after a round; the largest and the smallest also count if they were drawn at random."""
    counted = {which: dict(served.get(which, {})) for which in ("largest", "smallest")}
    extremes = {"largest": space.largest, "smallest": smallest_supported(space, table)}
    for client_id, architecture in subnets.items():
        for which, extreme in extremes.items():
            if architecture == extreme:
                counted[which][str(client_id)] = counted[which].get(str(client_id), 0) + 1
    return counted
