"""Selection rules: the choice of a round's clients.

A rule is a function of a `Choice` that returns a `Cohort`, or only the clients' ids. It may use the server's history of
earlier participants.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from operator import index
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedloom.platform.averaging.processors import with_share
from fedloom.platform.clients.assignments import SERVER, Assignment
from fedloom.platform.clients.trainer import Train
from fedloom.platform.plugins import ComponentSpec, PluginError, Registry, Shipped, blaming, check_keys, declares
from fedloom.platform.seeding import stream
from fedloom.tiers.devices import DEFAULT_PROFILE, DeviceProfile, fair_rates, jittered

if TYPE_CHECKING:
    from fedloom.platform.clients.assignments import ClientResult, Task
    from fedloom.platform.federation.world import World

HISTORY, MEMORY = "history", "selection"
"""JSON values of the current stage: its clients' history, and what its selection rule remembers."""
AT_WORK, BEGUN = "at_work", "begun"
"""JSON values of asynchronous rounds: the clients at work, and the rounds in which they began."""
FEW = 4
"""Number of clients on which a rule is tested if rounds take all clients."""
DRAWS_PER_CLIENT = 50
"""Draws per wanted client, after which a cohort stays incomplete because too few devices are available."""


# -- the server's history of clients -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientRecord:
    """A client's history, taken from its results.

    Attributes:
        participations: the number of rounds in which it was selected.
        answers: the number of these rounds with status `ok`.
        last_round: the last round in which it was selected.
        loss: the mean training loss of its last answer.
        loss_norm: the root mean square of its samples' losses, if the stage asks for it (`loss_norms`).
        samples: the number of training samples of its last answer.
        simulated_s: the simulated seconds of its last answer.
        macs: the forward MACs of its last answer.
        bytes_down: the bytes that it then received.
        answered: the round of its last answer.
    """

    participations: int = 0
    answers: int = 0
    last_round: int = -1
    loss: float | None = None
    loss_norm: float | None = None
    samples: int = 0
    simulated_s: float = 0.0
    macs: float = 0.0
    bytes_down: int = 0
    answered: int = -1


History = Mapping[int, ClientRecord]
"""Records by client id, only of clients that have taken part."""

_FIELDS = tuple(f.name for f in fields(ClientRecord))


def recorded(values: Mapping[str, list[Any]], round_: int, results: Iterable[ClientResult]) -> dict[str, list[Any]]:
    """The history's JSON values after a round; only the records of its clients change."""
    after = dict(values)
    for result in results:
        if result.client_id is None:
            continue
        key = str(result.client_id)
        before = unpacked({key: after[key]})[result.client_id] if key in after else ClientRecord()
        record = replace(before, participations=before.participations + 1, last_round=round_)
        if result.status == "ok":
            record = replace(
                record,
                answers=record.answers + 1,
                loss=result.loss,
                loss_norm=result.loss_norm,
                samples=result.samples,
                simulated_s=result.simulated_s,
                macs=result.macs,
                bytes_down=result.bytes_down,
                answered=round_,
            )
        after |= packed({result.client_id: record})
    return after


def packed(history: History) -> dict[str, list[Any]]:
    """The history as JSON values, one list per client."""
    return {str(client): list(asdict(record).values()) for client, record in history.items()}


def unpacked(values: Mapping[str, list[Any]]) -> dict[int, ClientRecord]:
    """The inverse of `packed`; also reads older records that lack the last fields."""
    return {int(client): ClientRecord(**dict(zip(_FIELDS, row, strict=False))) for client, row in values.items()}


# -- rules -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cohort:
    """What a selection rule returns: the clients of a round, and the epochs and shares that it sets for single clients.

    Attributes:
        client_ids: the selected clients, ascending.
        probability: of each client's selection; NaN (null in the tables) if unknown: with limited availability it
            depends on which other clients are available, and not every registered client is checked.
        reason, reasons: why clients were selected, for the table `clients`; `reasons` overrides `reason` by client id.
        memory: JSON values, with texts as keys, that the rule receives in the next round's `Choice.memory`; they are
            part of the checkpoint. Values that are not returned again are forgotten.
        epochs: by client id, the number of passes over its data if it differs from `method.train.epochs`.
        sends: by client id, the share (above 0, at most 1) of its parameters' changes that it sends: the largest ones.
            Like `epochs` it is for clients with the task `Train`; other tasks raise ValueError.
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
        memory: the JSON values that the rule returned in its last cohort, empty in a stage's first round.
        epochs: the stage's number of passes of a client over its data.
        device: a client's simulated device.
        tiers_of, sizes_of: map client ids to tier indices and sample counts, for the properties `tiers` and `sizes`.
        population: ids of the clients that were eligible before `among` left some of them; None if all are.
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
    population: np.ndarray | None = None

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
        return replace(self, eligible=client_ids, population=self.everyone.eligible)

    @property
    def everyone(self) -> Choice:
        """The same round with the whole population, also if the rule gets a list of the few that are online."""
        return self if self.population is None else replace(self, eligible=self.population, population=None)

    def can_take_part(self, client_id: int) -> bool:
        """Whether a client is eligible, and its device available."""
        position = int(np.searchsorted(self.eligible, client_id))
        eligible = position < len(self.eligible) and int(self.eligible[position]) == client_id
        return eligible and (self.always or self.available(client_id))

    def draw_by(self, weights: np.ndarray, size: int) -> tuple[int, ...]:
        """Draws `size` distinct available clients in turn, in proportion to `weights`, one per eligible client.

        The cost grows with the number of eligible clients, but without a Python loop over all of them.
        """
        # The order of log(weight) + Gumbel noise is that of successive draws (Efraimidis and Spirakis 2006).
        with np.errstate(divide="ignore"):
            keys = np.log(weights) + self.rng.gumbel(size=len(weights))
        taken: list[int] = []
        for position in np.argsort(-keys, kind="stable"):
            if len(taken) == size or keys[position] == -math.inf:
                break
            client_id = int(self.eligible[position])
            if self.always or self.available(client_id):
                taken.append(client_id)
        return tuple(sorted(taken))

    def drawn_by(self, weights: Mapping[int, float], size: int) -> list[int]:
        """Draws `size` of these clients in turn, in proportion to their weights; clients of weight 0 come last."""
        ids = sorted(weights)
        size = min(size, len(ids))
        if not size:
            return []
        values = np.asarray([weights[c] for c in ids], dtype=float)
        values = np.maximum(values, 1e-9 * max(float(values.max()), 1e-300))
        drawn = self.rng.choice(len(ids), size=size, replace=False, p=values / values.sum())
        return sorted(ids[i] for i in drawn.tolist())

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
            position = int(self.rng.integers(population))
            if position not in seen:
                seen.add(position)
                if self.available(int(self.eligible[position])):
                    taken.append(int(self.eligible[position]))
        return tuple(sorted(taken))


SelectionRule = Callable[[Choice], Cohort | Sequence[int]]
"""Returns the round's clients; keyword parameters are options (`method.train.options.NAME`)."""

Sampling = Literal["uniform", "poisson", "all"]


@dataclass(frozen=True)
class SelectionTraits:
    """What a selection rule declares with `declares`; a rule that declares nothing has the defaults.

    Attributes:
        needs_history: whether it uses the server's history, which is kept only for such rules.
        needs_loss_norm: whether clients report the root mean square of their samples' losses.
        sampling: how it samples, if every client's probability is known, as differential privacy requires; else None.
        shortens_updates: whether it lets clients send only a part of their changes (`Cohort.sends`).
        same_round: whether it relies on a round's clients being selected together, and answering in this round.
    """

    needs_history: bool = True
    needs_loss_norm: bool = False
    sampling: Sampling | None = None
    shortens_updates: bool = False
    same_round: bool = False


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
    """Selects every client independently with probability `size` / clients, as differential privacy's analysis assumes.

    A cohort may be larger than `size`, or empty. The cost grows with the cohort, not with the registered clients.
    """
    if not choice.always:
        raise ValueError("selection=poisson needs devices that are always available: else probabilities are unknown")
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

    Raises PluginError if a user's rule does not return distinct eligible clients, at most `choice.size` of them.
    """
    name, answer = rule.name, SELECTION_RULES.make(rule)(choice)
    if name in SELECTION_RULES.known and isinstance(answer, Cohort):
        return answer
    blame = f"selection rule {name!r}"
    try:
        # A rule that is a generator raises its errors only here.
        with blaming("selection rule", name, spare=TypeError):
            cohort = answer if isinstance(answer, Cohort) else Cohort(tuple(answer), reason=name)
            client_ids = tuple(sorted(index(c) for c in cohort.client_ids))
    except TypeError as error:
        raise PluginError(f"{blame} gives {answer!r:.60}: give the ids of clients, or a Cohort") from error
    if len(set(client_ids)) != len(client_ids):
        raise PluginError(f"{blame} gives a client twice: {list(client_ids)!r:.80}")
    if len(client_ids) > choice.size:
        raise PluginError(f"{blame} gives {len(client_ids)} clients for a round of {choice.size}")
    positions = np.searchsorted(choice.eligible, client_ids)
    for client, position in zip(client_ids, positions.tolist(), strict=True):
        if position >= len(choice.eligible) or choice.eligible[position] != client:
            raise PluginError(f"{blame} gives client {client}, which is not eligible in this round")
    with blaming("selection rule", name):
        _check_values(cohort, blame)
    try:
        check_keys(cohort.memory, "memory")
        memory = json.loads(json.dumps(cohort.memory))  # as the rule would get it after a resume
    except (TypeError, ValueError) as error:
        raise PluginError(f"{blame} gives a memory that JSON cannot hold: {error}") from error
    return replace(
        cohort,
        client_ids=client_ids,
        probability=float(cohort.probability),
        reason=cohort.reason or name,
        reasons={int(c): reason for c, reason in cohort.reasons.items()},
        memory=memory,
        epochs={int(c): int(epochs) for c, epochs in cohort.epochs.items()},
        sends={int(c): float(share) for c, share in cohort.sends.items()},
    )


def _check_values(cohort: Cohort, blame: str) -> None:
    """Raises PluginError for what a cohort says of its clients, if it cannot be."""

    def check(name: str, values: Iterable[Any], needed: str, holds: Callable[[Any], object]) -> None:
        for value in values:
            if not holds(value):
                raise PluginError(f"{blame} gives the {name} {value!r:.60}: give {needed}")

    number, whole = int | float | np.number, int | np.integer
    reasons, likely = (cohort.reason, *cohort.reasons.values()), [cohort.probability]
    check("reason", reasons, "a text, or one by client as `reasons`", lambda v: isinstance(v, str))
    check("probability", likely, "a number from 0 to 1", lambda v: isinstance(v, number) and not (v < 0 or v > 1))
    check("epochs", cohort.epochs.values(), "a whole number from 1", lambda v: isinstance(v, whole) and v >= 1)
    check("sends", cohort.sends.values(), "a share above 0, at most 1", lambda v: isinstance(v, number) and 0 < v <= 1)


def check_selection(rule: ComponentSpec, size: int | None) -> None:
    """Tests a rule on a few clients, without and with a history; PluginError if it fails or selects no client.

    `size` is the number of clients per round, None for all clients.
    """
    known = ClientRecord(1, 1, 0, 1.0, 1.0, 10, 1.0)
    wanted, eligible = size or FEW, np.arange(FEW if size is None else 2 * size)
    chosen, memory = 0, dict[str, Any]()
    for history in ({}, {0: known}):
        rng = np.random.default_rng(0)
        choice = Choice(len(history), wanted, eligible, rng, True, lambda _: True, history, lambda _: 10, memory)
        cohort = select(choice, rule)
        chosen, memory = chosen + len(cohort.client_ids), dict(cohort.memory)
    if not chosen:
        raise PluginError(f"selection rule {rule.name!r} gives no client, though all are available: give some")


# -- a round's clients and their assignments ---------------------------------------------------------------------------


def first_online_s(world: World, client_ids: np.ndarray, now_s: float) -> float:
    """The first simulated time from `now_s` on at which any of these clients' devices is online."""
    if world.availability is None or not len(client_ids):
        return now_s
    return world.availability.first_on_s(client_ids, now_s)


def choose_cohort(
    world: World,
    stage: str,
    round_: int,
    eligible: np.ndarray,
    size: int,
    rule: ComponentSpec,
    history: History,
    memory: Mapping[str, Any] | None = None,
    epochs: int = 1,
    *,
    now_s: float = 0.0,
    busy: Collection[int] = (),
    draw: int = 0,
) -> Cohort:
    """The cohort that a selection rule chooses among the clients that are online at `now_s` and not `busy`.

    All draws depend only on the selection seed, stage, round and client, and on `draw`, the draw's number in the round.
    """
    places = (stage, round_, draw) if draw else (stage, round_)
    seed, availability = world.config.seed_for("selection"), world.availability

    def available(client_id: int) -> bool:
        if client_id in busy or (availability is not None and not availability.is_on(client_id, now_s)):
            return False
        share = world.profile(client_id).availability
        return share == 1.0 or bool(stream(seed, "available", stage, round_, client_id).random() < share)

    choice = Choice(
        round=round_,
        size=size,
        eligible=eligible,
        rng=stream(seed, "select", *places),
        always=not busy
        and availability is None
        and world.devices is None
        and all(p.availability == 1.0 for p in world.profiles),
        available=available,
        history=history,
        num_samples=lambda client_id: world.data.size(client_id, "train"),
        memory=memory or {},
        epochs=epochs,
        device=world.profile,
        tiers_of=lambda client_ids: world.tier_of_client[client_ids],
        sizes_of=lambda client_ids: world.data.sizes("train")[client_ids],
    )
    cohort = select(choice, rule)
    if (availability is None and not busy) or len(cohort.client_ids) >= min(size, len(eligible) - len(busy)):
        return cohort
    # If few clients are online and free, draws among all clients find too few of them: the rule gets a list of them.
    free = np.setdiff1d(eligible, [*busy]) if busy else eligible
    listed = choice.among(free if availability is None else availability.on_of(free, now_s))
    return select(replace(listed, rng=stream(seed, "select", *places)), rule)


def simulated_devices(
    world: World, stage: str, round_: int, client_ids: Sequence[int], at_work: int | None = None
) -> list[DeviceProfile]:
    """The clients' devices in a round, with the round's jitter and with their shares of the server's link.

    The shares assume that all of the round's clients transfer all the time: each client's time is then known without
    the others', as a deadline requires, and no shorter than if the link were shared anew whenever a transfer ends.
    If clients of other rounds transfer as well, each of the `at_work` clients has an equal share.
    """
    devices, profiles = world.config.devices, [world.profile(c) for c in client_ids]
    if devices.jitter:
        seed = world.config.seed_for("selection")
        rngs = (stream(seed, "jitter", stage, round_, c) for c in client_ids)
        profiles = [jittered(p, devices.jitter, rng) for p, rng in zip(profiles, rngs, strict=True)]
    link = devices.server_bytes_per_s
    if link is None:
        return profiles
    if at_work is not None:
        least = link / at_work
        return [
            replace(
                p,
                down_bytes_per_s=min(p.down_bytes_per_s, least),
                up_bytes_per_s=min(p.up_bytes_per_s, least),
            )
            for p in profiles
        ]
    down = fair_rates([p.down_bytes_per_s for p in profiles], link)
    up = fair_rates([p.up_bytes_per_s for p in profiles], link)
    return [replace(p, down_bytes_per_s=d, up_bytes_per_s=u) for p, d, u in zip(profiles, down, up, strict=True)]


def for_client(
    world: World,
    stage: str,
    round_: int,
    cohort: Cohort,
    client_id: int,
    task: Task,
    expected_macs: float = 0.0,
    *,
    profile: DeviceProfile | None = None,
    starts_s: float | None = None,
) -> Assignment:
    """One client's assignment, with its simulated device, whether this drops out, and when it goes offline.

    `profile` is its device in this round (see `simulated_devices`), by default without jitter and link shares.
    `starts_s` is the simulated time at which it starts; None for work during which devices do not go offline.
    """
    profile = world.profile(client_id) if profile is None else profile
    dropped = ""
    if profile.dropout > 0:
        draw = stream(world.config.seed_for("selection"), "dropout", stage, round_, client_id).random()
        if draw < profile.dropout:
            dropped = f"the simulated device dropped out (probability {profile.dropout:g})"
    return Assignment(
        stage=stage,
        round=round_,
        client_id=client_id,
        tier=world.tier(client_id).name,
        task=task,
        profile=profile,
        deadline_s=world.config.devices.deadline_s,
        offline_s=online_for_s(world, client_id, starts_s),
        dropped=dropped,
        selection_probability=cohort.probability,
        selection_reason=cohort.reason_of(client_id),
        attacker=world.attacks(client_id),
        train_samples=world.data.size(client_id, "train"),
        expected_macs=expected_macs,
    )


def online_for_s(world: World, client_id: int, starts_s: float | None) -> float | None:
    """Seconds from `starts_s` until the client's device goes offline; None if it never does or `starts_s` is None."""
    if world.availability is None or starts_s is None:
        return None
    off_s = world.availability.off_at(client_id, starts_s)
    return None if math.isinf(off_s) else off_s - starts_s


def for_server(
    stage: str, round_: int, task: Task, *, reads_test: bool = False, reads: str | None = None
) -> Assignment:
    """An assignment of the server, on its own data; `reads` is the group of its weights, if not the plan's."""
    return Assignment(stage, round_, None, SERVER, task, reads_test=reads_test, reads=reads)


def as_asked(task: Task, cohort: Cohort, client_id: int) -> Task:
    """The client's task with the epochs and share that the rule sets for it; ValueError for tasks that take none."""
    epochs, share = cohort.epochs.get(client_id), cohort.sends.get(client_id)
    if epochs is None and share is None:
        return task
    if not isinstance(task, Train):
        raise ValueError(
            f"selection rule {cohort.reason} gives clients epochs or shares of their own, which this method's clients "
            "do not take: choose another selection rule"
        )
    local = task.local if epochs is None else replace(task.local, epochs=epochs)
    if share is None:
        return replace(task, local=local)
    return replace(task, local=local, processors=with_share(task.processors, share))


@dataclass(frozen=True)
class Selection:
    """Selects a training stage's cohorts of `size` clients (None: all) from the clients that may take part."""

    world: World
    stage: str
    population: np.ndarray
    rule: ComponentSpec
    size: int | None
    epochs: int

    @property
    def _keeps_history(self) -> bool:
        return selection_traits(self.rule.name).needs_history

    def begun(self) -> dict[str, Any]:
        """The JSON values with which a stage begins: an empty history, if the rule needs one."""
        return {HISTORY: {}} if self._keeps_history else {}

    def starts_s(self, now_s: float) -> float:
        """The simulated time at which a round can start."""
        return first_online_s(self.world, self.population, now_s)

    def cohort(
        self,
        round_: int,
        data: Mapping[str, Any],
        now_s: float,
        size: int | None = None,
        busy: Collection[int] = (),
        draw: int = 0,
    ) -> Cohort:
        """The cohort of a round, given the run's JSON values and the simulated time before it.

        `size` overrides the stage's cohort size, up to the number of clients that are not `busy`.
        """
        rule = self.rule
        if size is not None:
            size = min(size, len(self.population) - len(busy))
            if not size:  # a rule is not asked about nobody
                return Cohort((), memory=data.get(MEMORY, {}))
        else:
            size = len(self.population) if self.size is None else self.size
        if self.size is None and not busy and rule == ComponentSpec("uniform"):
            rule = ComponentSpec("all")
        return choose_cohort(
            *(self.world, self.stage, round_, self.population, size, rule),
            history=unpacked(data[HISTORY]) if self._keeps_history else {},
            memory=data.get(MEMORY, {}),
            epochs=self.epochs,
            now_s=now_s,
            busy=busy,
            draw=draw,
        )

    def after_round(
        self, round_: int, data: Mapping[str, Any], memory: Mapping[str, Any] | None, results: Sequence[ClientResult]
    ) -> dict[str, Any]:
        """The JSON values after a round: the history with its clients, and the rule's memory."""
        values: dict[str, Any] = {HISTORY: recorded(data[HISTORY], round_, results)} if self._keeps_history else {}
        if memory is not None and (memory or MEMORY in data):  # what is not returned again is forgotten
            values[MEMORY] = dict(memory)
        return values
