"""Selection rules: the choice of a round's clients.

A rule is a function of a `Choice` that returns a `Cohort`, or only the clients' ids. It may use the server's history of
earlier participants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, Literal

import numpy as np

from fedloom.platform.federation.history import ClientRecord, History
from fedloom.platform.plugins import ComponentSpec, PluginError, Registry, Shipped, blaming, declares
from fedloom.tiers.devices import DEFAULT_PROFILE, DeviceProfile

FEW = 4
"""Clients that a rule is tried on where a round has all of them."""
DRAWS_PER_CLIENT = 50
"""Draws per wanted client before a cohort stays incomplete because too few devices are available."""


@dataclass(frozen=True)
class Cohort:
    """What a selection rule returns: who takes part in a round, and what it asks of single ones.

    Attributes:
        client_ids: the selected clients, ascending.
        probability: with which each was selected; NaN (null in the tables) if it is unknown: with limited availability
            it depends on which other clients are available, and not every registered client is checked.
        reason, reasons: why, for the table `clients`; `reasons` overrides `reason` for single clients.
        memory: JSON values for the rule itself, which finds them in the next round's `Choice.memory`; they are part of
            the checkpoint. What is not returned again is forgotten.
        epochs: for single clients another number of passes over their data than `method.train.epochs`.
        sends: for single clients the share, above 0 and at most 1, of their parameters' changes that they send, the
            largest ones. It and `epochs` are for clients that do the task `Train`; others are refused.
    """

    client_ids: tuple[int, ...]
    probability: float = math.nan
    reason: str = ""
    reasons: Mapping[int, str] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)
    epochs: Mapping[int, int] = field(default_factory=dict)
    sends: Mapping[int, float] = field(default_factory=dict)

    def reason_of(self, client_id: int) -> str:
        """The reason of a client's selection."""
        return self.reasons.get(client_id, self.reason)


@dataclass(frozen=True)
class Choice:
    """A selection rule's input: a round whose clients are to be chosen.

    Attributes:
        round: the round, from 0.
        size: the number of clients of a full round.
        eligible: ids of the clients that may take part, ascending; may be very long, so avoid loops over it.
        rng: the round's random stream.
        always: whether every device is always available.
        available: whether a client's device is available in this round.
        history: the server's history of earlier participants in this stage.
        num_samples: a client's number of training samples.
        memory: the JSON values that the rule left in its last cohort, empty in a stage's first round.
        epochs: the passes of a client over its data that the stage asks for.
        device: a client's simulated device.
        tiers_of, sizes_of: find `tiers` and `sizes`, which are as long as `eligible`.
    """

    round: int
    size: int
    eligible: np.ndarray
    rng: np.random.Generator
    always: bool
    available: Callable[[int], bool]
    history: History
    num_samples: Callable[[int], int]
    memory: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 1
    device: Callable[[int], DeviceProfile] = lambda _client_id: DEFAULT_PROFILE
    tiers_of: Callable[[np.ndarray], np.ndarray] = lambda client_ids: np.zeros(len(client_ids), dtype=int)
    sizes_of: Callable[[np.ndarray], np.ndarray] = lambda client_ids: np.ones(len(client_ids))

    @property
    def tiers(self) -> np.ndarray:
        """The index of every eligible client's tier."""
        return self.tiers_of(self.eligible)

    @property
    def sizes(self) -> np.ndarray:
        """Every eligible client's number of training samples."""
        return self.sizes_of(self.eligible)

    def among(self, client_ids: np.ndarray) -> Choice:
        """The same round with only these clients, in ascending order."""
        return replace(self, eligible=client_ids)

    def can_take_part(self, client_id: int) -> bool:
        """Whether a client is eligible, and its device available."""
        place = int(np.searchsorted(self.eligible, client_id))
        eligible = place < len(self.eligible) and int(self.eligible[place]) == client_id
        return eligible and (self.always or self.available(client_id))

    def draw_by(self, weights: np.ndarray, size: int) -> tuple[int, ...]:
        """Draws `size` distinct available clients, one after the other in proportion to the weights (as `eligible`).

        The cost grows with the number of eligible clients, not with Python's loops over them.
        """
        # The order of log(weight) + Gumbel noise is that of successive draws (Efraimidis and Spirakis 2006).
        with np.errstate(divide="ignore"):
            keys = np.log(weights) + self.rng.gumbel(size=len(weights))
        taken: list[int] = []
        for place in np.argsort(-keys, kind="stable"):
            if len(taken) == size or keys[place] == -math.inf:
                break
            client_id = int(self.eligible[place])
            if self.always or self.available(client_id):
                taken.append(client_id)
        return tuple(sorted(taken))

    def drawn_by(self, weights: Mapping[int, float], size: int) -> list[int]:
        """Draws `size` of these clients, one after the other in proportion to their weights; those of 0 come last."""
        ids = sorted(weights)
        size = min(size, len(ids))
        if not size:
            return []
        values = np.asarray([weights[c] for c in ids], dtype=float)
        values = np.maximum(values, 1e-9 * max(float(values.max()), 1e-300))
        found = self.rng.choice(len(ids), size=size, replace=False, p=values / values.sum())
        return sorted(ids[i] for i in found.tolist())

    def record(self, client_id: int) -> ClientRecord:
        """A client's record in the history, an empty one if it has never taken part."""
        return self.history.get(client_id, ClientRecord())

    def draw(self, size: int) -> tuple[int, ...]:
        """Draws `size` distinct available clients uniformly (fewer if fewer are available), in ascending order.

        The cost grows with `size`, not with the number of eligible clients.
        """
        population = len(self.eligible)
        wanted = min(size, population)
        if self.always:
            # NumPy uses Floyd's method here, without a permutation of all registered clients.
            chosen = self.rng.choice(population, size=wanted, replace=False, shuffle=False) if wanted else ()
            return tuple(sorted(int(self.eligible[i]) for i in chosen))
        seen: set[int] = set()
        taken: list[int] = []
        for _ in range(DRAWS_PER_CLIENT * wanted):
            if len(taken) == wanted or len(seen) == population:
                break
            place = int(self.rng.integers(population))
            if place not in seen:
                seen.add(place)
                if self.available(int(self.eligible[place])):
                    taken.append(int(self.eligible[place]))
        return tuple(sorted(taken))


SelectionRule = Callable[[Choice], Cohort | Sequence[int]]
"""Returns the round's clients; keyword parameters are options (`method.train.options.NAME`)."""

Sampling = Literal["uniform", "poisson", "all"]


@dataclass(frozen=True)
class SelectionTraits:
    """What a selection rule declares with `declares`; a rule that declares nothing has the defaults.

    Attributes:
        needs_history: whether it uses the server's history, which is kept for such rules alone.
        needs_loss_norm: whether clients report the root mean square of their samples' losses.
        sampling: how it samples clients, where every client's probability is known (differential privacy needs it).
        shortens_updates: whether it lets clients send a part of their changes (`Cohort.sends`).
    """

    needs_history: bool = True
    needs_loss_norm: bool = False
    sampling: Sampling | None = None
    shortens_updates: bool = False


@declares(SelectionTraits(needs_history=False, sampling="uniform"))
def uniform(choice: Choice) -> Cohort:
    """Selects clients uniformly at random (McMahan et al. 2017)."""
    client_ids = choice.draw(choice.size)
    if not choice.always:
        return Cohort(client_ids, math.nan, "uniform among available")
    population = len(choice.eligible)
    return Cohort(client_ids, min(choice.size, population) / population if population else 0.0, "uniform")


@declares(SelectionTraits(needs_history=False, sampling="all"))
def all_available(choice: Choice) -> Cohort:
    """Selects all eligible clients that are available."""
    if choice.always:
        return Cohort(tuple(int(c) for c in choice.eligible), 1.0, "all")
    return Cohort(
        tuple(int(c) for c in choice.eligible if choice.available(int(c))), math.nan, "all that are available"
    )


@declares(SelectionTraits(needs_history=False, sampling="poisson"))
def poisson(choice: Choice) -> Cohort:
    """Selects every client independently with probability `size` / clients, as differential privacy's analysis asks.

    A cohort may be larger than `size`, or empty. The cost grows with the cohort, not with the registered clients.
    """
    if not choice.always:
        raise ValueError("selection=poisson needs devices that are always available, or no probability is known")
    population = len(choice.eligible)
    if not population:
        return Cohort(())
    probability = min(1.0, choice.size / population)
    return Cohort(choice.draw(int(choice.rng.binomial(population, probability))), probability, "poisson")


SELECTION_RULES: Registry[SelectionRule] = Registry(
    "selection rule", Shipped({"uniform": uniform, "poisson": poisson, "all": all_available}), ("choice",)
)


def selection_traits(name: str) -> SelectionTraits:
    """What the selection rule of that name declares."""
    return SELECTION_RULES.traits_of(name, SelectionTraits())


def select(choice: Choice, rule: ComponentSpec) -> Cohort:
    """The cohort that a rule chooses.

    Raises PluginError for a user's rule that does not return distinct eligible clients, at most `choice.size`.
    """
    given = SELECTION_RULES.make(rule)(choice)
    if rule.name in SELECTION_RULES.known and isinstance(given, Cohort):
        return given
    return _checked(given, choice, rule.name)


def _checked(given: Cohort | Sequence[int], choice: Choice, name: str) -> Cohort:
    blame = f"selection rule {name!r}"
    try:
        # A generator's own errors come only now.
        with blaming("selection rule", name, spare=TypeError):
            cohort = given if isinstance(given, Cohort) else Cohort(tuple(given), reason=name)
            client_ids = tuple(sorted(index(c) for c in cohort.client_ids))
    except TypeError as error:
        raise PluginError(f"{blame} gives {given!r:.60}: give the ids of clients, or a Cohort") from error
    if len(set(client_ids)) != len(client_ids):
        raise PluginError(f"{blame} gives a client twice: {list(client_ids)!r:.80}")
    if len(client_ids) > choice.size:
        raise PluginError(f"{blame} gives {len(client_ids)} clients for a round of {choice.size}")
    places = np.searchsorted(choice.eligible, client_ids)
    for client, place in zip(client_ids, places.tolist(), strict=True):
        if place >= len(choice.eligible) or choice.eligible[place] != client:
            raise PluginError(f"{blame} gives client {client}, which is not eligible in this round")
    return replace(cohort, client_ids=client_ids, reason=cohort.reason or name)


def check_selection(rule: ComponentSpec, size: int | None) -> None:
    """Tests a rule on a few clients, without and with a history; PluginError if it fails or selects no client.

    `size` is the number of clients per round, None for all clients.
    """
    known = ClientRecord(1, 1, 0, 1.0, 1.0, 10, 1.0)
    wanted, eligible = size or FEW, np.arange(FEW if size is None else 2 * size)
    chosen = 0
    for history in ({}, {0: known}):
        rng = np.random.default_rng(0)
        choice = Choice(len(history), wanted, eligible, rng, True, lambda _: True, history, lambda _: 10)
        chosen += len(select(choice, rule).client_ids)
    if not chosen:
        raise PluginError(f"selection rule {rule.name!r} gives no client, though all are available: give some")
