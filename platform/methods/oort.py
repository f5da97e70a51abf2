"""Oort: guided selection by statistical and system utility (Lai et al. 2021, Alg. 1).

    utility of an explored client i
        U_i = |B_i| sqrt(mean of its squared losses), clipped at a quantile, scaled to 0 to 1
            + sqrt(0.1 log R / L_i)             R: the round from 1, L_i: the last one in which it took part
        times (T / t_i)^alpha  if its round takes t_i > T seconds
    exploitation: (1 - eps) K clients, drawn by utility among those above c times the utility of rank (1 - eps) K
    exploration:  eps K clients that never answered, drawn by speed; eps decays
    pacer:        if the utility of the last W rounds is below that of the W before, T grows

What the paper leaves open is as in the authors' code: utilities are scaled, so that they and the staleness term can be
added, and T is a quantile of the explored clients' durations, which the pacer raises. Clients that took part more than
`blacklist` times are left out, at most 30 % of the explored ones.

Where that code differs from the paper, `variant=released` follows the code:

    scale         from .999 times the least to the largest utility, which is not clipped; unexplored clients count with
                  their numbers of samples
    exploitation  (1 - eps) K rounded down, and c times the utility of the next lower rank; eps decays before the first
                  round, and is 0 once all clients are explored
    exploration   by samples, times (T / t)^alpha if slower than T: drawn from the 5 eps K clients with the most
    pacer         by the mean utility of exploited clients that answered: T grows if it changed by at most a tenth from
                  window to window, and falls if it changed by five times or more
    T             a quantile of all clients' durations, also of those that are offline
    the rest      drawn uniformly

Durations of unexplored clients are registered in the code, and estimated here from those of explored clients, so that
the cost of a selection grows with the number of eligible clients. The code's options are exploration_decay=.95,
cutoff=.7, clip=.98 and preferred=.1. On the same inputs `released` selects as the code does (total variation below .01;
the paper's variant .15 to .2).
"""

from __future__ import annotations

import math
from statistics import median
from typing import Annotated, Any, Literal

import numpy as np

from fedloom.platform.federation.selection import Choice, ClientRecord, Cohort, SelectionTraits
from fedloom.platform.plugins import declares
from fedloom.platform.settings import ONE_OR_MORE, PART, ZERO_OR_MORE

MOST_BLACKLISTED = 0.3
WINDOW = 5
"""Candidates for each client to be explored: unexplored clients, drawn uniformly or, with `released`, the best."""


Exploration = Annotated[float, PART, "Oort: eps, the share of clients that are explored in the first round"]
LeastExploration = Annotated[float, PART, "Oort: the least eps"]
Penalty = Annotated[float, ZERO_OR_MORE, "Oort: alpha, the exponent for clients slower than T"]
Preferred = Annotated[float, PART, "Oort: T at first, as a quantile of the durations; 1: no T"]


@declares(SelectionTraits(needs_loss_norm=True, same_round=True))
def oort(
    choice: Choice,
    *,
    variant: Annotated[Literal["paper", "released"], "Oort: as in the paper, or as its released code does"] = "paper",
    exploration: Exploration = 0.9,
    exploration_decay: Annotated[float, PART, "Oort: the factor of eps per round"] = 0.98,
    least_exploration: LeastExploration = 0.2,
    penalty: Penalty = 2.0,
    cutoff: Annotated[
        float, PART, "Oort: c, the share of the last rank's utility above which clients are drawn"
    ] = 0.95,
    clip: Annotated[float, PART, "Oort: the quantile at which utilities are clipped"] = 0.95,
    preferred: Preferred = 0.3,
    pacer: Annotated[float, PART, "Oort: what the pacer adds to T's quantile"] = 0.05,
    window: Annotated[int, ONE_OR_MORE, "Oort: W, the pacer's window in rounds"] = 20,
    blacklist: Annotated[
        int | None, ONE_OR_MORE, "Oort: participations after which a client rests; null: never"
    ] = None,
) -> Cohort:
    """The cohort, with each client's reason; the pacer's quantile and sums of utility are kept between rounds."""
    released = variant == "released"
    explored = {c: r for c, r in choice.history.items() if r.answers and r.loss_norm is not None}
    memory = (_paced_as_released if released else _paced)(choice, explored, preferred, pacer, window)
    resting: set[int] = set()
    if blacklist is not None:
        often = [c for c, record in explored.items() if record.participations > blacklist]
        often.sort(key=lambda c: (-explored[c].participations, c))
        resting = set(often[: int(MOST_BLACKLISTED * len(explored))])
    ready = [c for c in explored if c not in resting and choice.can_take_part(c)]
    fresh_s = _estimated_s(choice.everyone, explored) if released else {}
    durations_s = [*(r.simulated_s for r in explored.values()), *fresh_s.values()]
    no_limit = memory["quantile"] >= 1 or not durations_s
    longest_s = math.inf if no_limit else _quantile(durations_s, memory["quantile"])
    utilities = utilities_of(choice, {c: explored[c] for c in ready}, longest_s, penalty, clip, released=released)
    share = max(least_exploration, exploration * exploration_decay ** (choice.round + released))
    if released:
        share = 0.0 if memory["all_explored"] else share
        exploited = _by_utility(choice, utilities, int((1 - share) * choice.size), cutoff, reference=0)
        fresh = _by_samples(choice, fresh_s, choice.size - len(exploited), longest_s, penalty)
        memory["all_explored"] = memory["all_explored"] or not fresh_s
    else:
        kept = math.ceil((1 - share) * choice.size)
        if kept == choice.size and share > 0:  # so few would never explore: one of them does at times
            kept -= choice.rng.random() < share * choice.size
        exploited = _by_utility(choice, utilities, kept, cutoff)
        fresh = _by_speed(choice, set(explored), choice.size - len(exploited))
    if len(exploited) + len(fresh) < choice.size:  # nobody is left to be explored
        rest = {c: 1.0 if released else u for c, u in utilities.items() if c not in exploited}
        exploited += _by_utility(choice, rest, choice.size - len(exploited) - len(fresh), 0.0)
    memory["exploited"] = sorted(exploited)
    reasons = {c: f"utility {utilities[c]:.4g}" for c in exploited} | dict.fromkeys(fresh, "explored")
    return Cohort(tuple(sorted([*exploited, *fresh])), reason="oort", reasons=reasons, memory=memory)


def statistical_utility(record: ClientRecord) -> float:
    """|B_i| sqrt(1 / |B_i| sum of loss^2) of a client's last answer."""
    return record.samples * (record.loss_norm or 0.0)


def utilities_of(
    choice: Choice,
    ready: dict[int, ClientRecord],
    longest_s: float,
    penalty: float,
    clip: float,
    *,
    released: bool = False,
) -> dict[int, float]:
    """The utility of every client that is ready; `longest_s` is T."""
    if not ready:
        return {}
    raw = {c: statistical_utility(record) for c, record in ready.items()}
    if released:
        unexplored = choice.sizes[~_answered(choice)].tolist()
        known = [u for u in (*raw.values(), *unexplored) if u > 0] or [1.0]
        most, least = _quantile(known, clip), 0.999 * min(known)
        scale = max(max(known) - least, 1e-4)
    else:
        most, least = _quantile(raw.values(), clip), min(raw.values())
        scale = max(most - least, 1e-12)
    utilities = {}
    for client_id, record in ready.items():
        scaled = (min(raw[client_id], most) - least) / scale
        last = max(0, record.answered) if released else record.last_round  # older histories do not have `answered`
        value = scaled + math.sqrt(0.1 * math.log(choice.round + 1) / (last + 1))
        slow = record.simulated_s > longest_s
        utilities[client_id] = value * (longest_s / record.simulated_s) ** penalty if slow else value
    return utilities


def _answered(choice: Choice) -> np.ndarray:
    """Which of the eligible clients are explored."""
    return np.isin(choice.eligible, [c for c, r in choice.history.items() if r.answers and r.loss_norm is not None])


def _estimated_s(choice: Choice, explored: dict[int, ClientRecord]) -> dict[int, float]:
    """The estimated seconds of every unexplored client, from its samples and speed; 0 if no client is explored."""
    pace = [r.simulated_s * choice.device(c).macs_per_s / r.samples for c, r in explored.items()]
    macs, fresh = median(pace or [0.0]), ~_answered(choice)
    pairs = zip(choice.eligible[fresh].tolist(), choice.sizes[fresh].tolist(), strict=True)
    return {c: macs * samples / choice.device(c).macs_per_s for c, samples in pairs}


def _quantile(values: Any, share: float) -> float:
    ordered = sorted(values)
    return float(ordered[min(int(len(ordered) * share), len(ordered) - 1)])


def _paced(
    choice: Choice, explored: dict[int, ClientRecord], preferred: float, pacer: float, window: int
) -> dict[str, Any]:
    """The memory with the last round's utility; the quantile grows if utility falls from one window to the next."""
    sums = [*choice.memory.get("sums", [])]
    if choice.round:
        sums.append(sum(statistical_utility(explored[c]) for c in choice.memory.get("exploited", []) if c in explored))
    quantile = float(choice.memory.get("quantile", preferred))
    if len(sums) >= 2 * window and len(sums) % window == 0 and sum(sums[-2 * window : -window]) > sum(sums[-window:]):
        quantile = min(1.0, quantile + pacer)
    return {"sums": sums, "quantile": quantile}


def _paced_as_released(
    choice: Choice, explored: dict[int, ClientRecord], preferred: float, pacer: float, window: int
) -> dict[str, Any]:
    """The memory as in the released code, where the mean utilities start with that of no clients, before round 0."""
    means = [*choice.memory.get("means", [])]
    exploited = [c for c in choice.memory.get("exploited", []) if c in explored]
    answered = [c for c in exploited if explored[c].answered == choice.round - 1]
    means.append(sum(statistical_utility(explored[c]) for c in answered) / (len(answered) + 1e-4))
    quantile = float(choice.memory.get("quantile", preferred))
    if len(means) >= 2 * window and len(means) % window == 0:
        before, now = sum(means[-2 * window : -window]), sum(means[-window:])
        if abs(now - before) <= 0.1 * before:
            quantile = min(1.0, quantile + pacer)
        elif abs(now - before) >= 5 * before:
            quantile = max(pacer, quantile - pacer)
    return {"means": means, "quantile": quantile, "all_explored": bool(choice.memory.get("all_explored"))}


def _by_utility(
    choice: Choice, utilities: dict[int, float], wanted: int, cutoff: float, reference: int = -1
) -> list[int]:
    """Clients drawn by utility; the cutoff refers to the last wanted rank (`reference` -1) or the one after it (0)."""
    wanted = min(wanted, len(utilities))
    if not wanted:
        return []
    ranked = sorted(utilities, key=lambda c: (-utilities[c], c))
    least = cutoff * utilities[ranked[min(wanted + reference, len(ranked) - 1)]]
    return choice.drawn_by({c: utilities[c] for c in ranked if utilities[c] >= least}, wanted)


def _by_speed(choice: Choice, explored: set[int], wanted: int) -> list[int]:
    fresh = [c for c in choice.draw(WINDOW * wanted + len(explored)) if c not in explored]
    few = choice.rng.permutation(fresh)[: WINDOW * wanted].tolist()  # `draw` sorts by id
    return choice.drawn_by({int(c): choice.device(int(c)).macs_per_s for c in few}, wanted)


def _by_samples(choice: Choice, fresh_s: dict[int, float], wanted: int, longest_s: float, penalty: float) -> list[int]:
    samples = dict(zip(choice.eligible.tolist(), choice.sizes.tolist(), strict=True))
    rewards = {
        c: samples[c] * ((longest_s / takes_s) ** penalty if takes_s > longest_s else 1.0)
        for c, takes_s in fresh_s.items()
        if choice.can_take_part(c)
    }
    mixed = choice.rng.permutation([*rewards]).tolist()  # so that ties do not favour low ids
    best = sorted(mixed, key=lambda c: -rewards[c])[: WINDOW * wanted]
    return choice.drawn_by({c: rewards[c] for c in best}, wanted)
