"""Selection without a model of the clients: power of choice, round robin, and quotas per tier."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np

from fedloom.platform.federation.selection import Choice, Cohort, SelectionTraits
from fedloom.platform.plugins import declares
from fedloom.platform.settings import ONE_OR_MORE, ZERO_OR_MORE


def power_of_choice(
    choice: Choice,
    *,
    candidates: Annotated[int, ONE_OR_MORE, "power of choice: d, the number of clients drawn to choose from"] = 20,
    by_samples: Annotated[bool, "power of choice: draw by numbers of samples; false: uniformly"] = True,
) -> Cohort:
    """The clients with the largest losses of d drawn ones (Cho et al. 2020, rpow-d: losses of the last participation).

    The paper draws clients by their share of the samples. Clients that never took part come first, as their loss is
    unknown; equal losses are in random order. Drawing by samples reads the sizes of all registered clients.
    """
    wanted = max(candidates, choice.size)
    drawn = choice.draw_by(choice.sizes, wanted) if by_samples else choice.draw(wanted)

    def loss(client_id: int) -> float:
        known = choice.record(client_id).loss
        return math.inf if known is None else known

    ranks = dict(zip(drawn, choice.rng.permutation(len(drawn)).tolist(), strict=True))
    taken = sorted(drawn, key=lambda c: (-loss(c), ranks[c]))[: choice.size]
    reasons = {c: "unknown loss" if loss(c) == math.inf else f"loss {loss(c):.4g}" for c in taken}
    return Cohort(tuple(sorted(taken)), reason="power of choice", reasons=reasons)


@declares(SelectionTraits(needs_history=False))
def round_robin(choice: Choice) -> Cohort:
    """All clients in turn: each round continues where the last one ended; unavailable clients are passed over."""
    population, next_id = len(choice.eligible), int(choice.memory.get("next", 0))
    # An id, not a position: if few devices are online, a rule chooses from a list of these.
    first = int(np.searchsorted(choice.eligible, next_id)) % max(1, population)
    taken: list[int] = []
    looked = 0
    while looked < population and len(taken) < choice.size:
        client_id = int(choice.eligible[(first + looked) % population])
        looked += 1
        if choice.always or choice.available(client_id):
            taken.append(client_id)
    if looked < population:
        next_id = int(choice.eligible[(first + looked) % population])
    return Cohort(tuple(sorted(taken)), reason="round robin", memory={"next": next_id})


@declares(SelectionTraits(needs_history=False, same_round=True))
def tier_quota(
    choice: Choice,
    *,
    quota: Annotated[
        list[Annotated[int, ZERO_OR_MORE]] | None,
        "clients of each tier per round, lowest tier first; null: as even as possible",
    ] = None,
) -> Cohort:
    """A fixed number of clients of every tier, drawn uniformly within it; fewer if a tier has fewer.

    Without a quota, the tiers with eligible clients share the round; with fewer clients than tiers, they take turns.
    """
    tiers: list[int] = np.unique(choice.tiers).tolist()
    if quota is not None and (len(quota) < max(tiers, default=-1) + 1 or sum(quota) > choice.size):
        raise ValueError(
            f"quota={quota}: give one number for each of the {max(tiers) + 1} tiers, {choice.size} clients per round "
            "in all"
        )
    each, more = divmod(choice.size, max(1, len(tiers)))
    first = 0 if each else choice.round * more
    even = {tier: each + ((index - first) % len(tiers) < more) for index, tier in enumerate(tiers)}
    sizes = even if quota is None else {tier: quota[tier] for tier in tiers}
    taken: list[int] = []
    for tier, wanted in sizes.items():
        taken += choice.among(np.asarray(choice.eligible)[choice.tiers == tier]).draw(wanted)
    return Cohort(tuple(sorted(taken)), reason="quota of the tier")
