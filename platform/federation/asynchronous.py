"""Asynchronous rounds and over-selection: rounds on the virtual clock that do not wait for all of their clients.

at any time      clients_per_round clients are at work; a client that begins receives the newest weights
in every round   the first `arrivals` answers are averaged: events are ordered by simulated time, then by client id
                 a client that answers or is lost makes room for another of the round's cohort, which begins at once
                 with an arrival rule   the others go on and count later (FedBuff, Nguyen et al. 2022, Alg. 1;
                                        with one answer per round FedAsync, Xie, Koyejo and Gupta 2019, Alg. 1)
                 without one            the others are given up: over-selection (Bonawitz et al. 2019, Sec. 2.2)

The time that a client's work takes on its device is computed before the work is done, so the configuration and the
seeds determine the order of all events. A client is trained when the round of its answer comes, from the weights that
it received, which are kept as long as a client works from them. A checkpoint holds these weights and the clients at
work, so that a killed run resumes in the middle of the queue.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fedloom.platform.averaging.server import ARRIVAL_RULES
from fedloom.platform.averaging.staleness import arrived
from fedloom.platform.clients.assignments import AccountableTask, Assignment, client_of
from fedloom.platform.federation.selection import AT_WORK, BEGUN, HISTORY, MEMORY, Cohort, online_for_s

if TYPE_CHECKING:
    from fedloom.platform.averaging.average import Update
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.federation.training_config import Rules, TrainingConfig
    from fedloom.platform.federation.world import World
    from fedloom.platform.spaces.slices import Weights

logger = logging.getLogger(__name__)

OVER_SELECTED, STALE = "over_selected", "stale"
"""Statuses of clients whose answers the server ignores: enough others were faster, or their weights are too old."""


class Flight(NamedTuple):
    """A client at work: when it begins (round and simulated time) and ends, and whether it then answers or is lost."""

    client_id: int
    begun: int
    begun_s: float
    ends_s: float
    answers: bool


class Ended(NamedTuple):
    """The events of a round in their order, the clients that are still at work, and the time of the last event."""

    events: Sequence[Flight]
    at_work: Sequence[Flight]
    now_s: float


def next_events(
    at_work: Iterable[Flight],
    waiting: Iterable[int],
    begin: Callable[[int, float], Flight | None],
    *,
    now_s: float,
    concurrency: int,
    arrivals: int,
    more: Callable[[float, int], Sequence[int]] = lambda _time_s, _count: (),
) -> Ended:
    """The events up to the answer that ends the round, or until no client is left.

    `waiting` clients begin in this order as soon as fewer than `concurrency` are at work. `begin(client, time)` returns
    the client's flight, or None if it cannot begin; `more(time, count)` returns further clients when none waits.
    The client with the last answer is replaced in the next round, by one that receives the weights which this answer
    has changed.
    """
    queue = [(flight.ends_s, flight.client_id, flight) for flight in at_work]
    heapq.heapify(queue)
    left, events, answered = deque(waiting), list[Flight](), 0
    while True:
        while len(queue) < concurrency:
            if not left:
                left.extend(more(now_s, concurrency - len(queue)))
            if not left:
                break
            flight = begin(left.popleft(), now_s)
            if flight is not None:
                heapq.heappush(queue, (flight.ends_s, flight.client_id, flight))
        if not queue:
            break
        now_s, _, flight = heapq.heappop(queue)
        events.append(flight)
        answered += flight.answers
        if answered == arrivals:
            break
    return Ended(events, [flight for _, _, flight in sorted(queue)], now_s)


class Begun(NamedTuple):
    """A round in which clients began: its cohorts, and the run's JSON values that their tasks may depend on."""

    cohorts: Sequence[Cohort]
    data: Mapping[str, Any]

    def stored(self) -> dict[str, Any]:
        """As JSON values."""
        return {"cohorts": [_stored(cohort) for cohort in self.cohorts], "data": self.data}

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Begun:
        """The inverse of `stored`."""
        return cls([_cohort(values) for values in stored["cohorts"]], stored["data"])


BY_CLIENT = ("reasons", "epochs", "sends")
"""The fields of a `Cohort` that are keyed by client id."""


def _stored(cohort: Cohort) -> dict[str, Any]:
    by_client = {name: {str(c): value for c, value in getattr(cohort, name).items()} for name in BY_CLIENT}
    probability = None if math.isnan(cohort.probability) else cohort.probability
    return {"client_ids": list(cohort.client_ids), "probability": probability, "reason": cohort.reason, **by_client}


def _cohort(stored: Mapping[str, Any]) -> Cohort:
    reasons, epochs, sends = ({int(c): value for c, value in stored[name].items()} for name in BY_CLIENT)
    probability = math.nan if stored["probability"] is None else stored["probability"]
    return Cohort(tuple(stored["client_ids"]), probability, stored["reason"], reasons, {}, epochs, sends)


@dataclass(frozen=True)
class Answers:
    """The part of a plan for a round that ends with its first answers.

    Attributes:
        now_s: the simulated time at which the round ends.
        concurrency: the number of clients at work at any time.
        data: the JSON values of the stage after the round.
        answering: the clients whose answers count.
        begun: the rounds whose weights clients still work from after this round.
        ahead: work of later rounds that can already be executed, as it depends on no future event.
        counted: converts an answer's update into the one that the server averages.
    """

    now_s: float
    data: Mapping[str, Any]
    concurrency: int
    answering: Collection[int] = ()
    begun: Collection[int] = ()
    ahead: Sequence[Assignment] = ()
    counted: Callable[[Assignment, Update], Update] | None = None


class Asynchronous:
    """Plans the rounds of a training stage that end with their first answers.

    `received` returns the name of the tensor group that clients received in an earlier round.
    """

    def __init__(
        self,
        world: World,
        config: TrainingConfig,
        rules: Rules,
        population: int,
        concurrency: int,
        received: Callable[[int], str],
    ) -> None:
        """Raises ValueError for rules that need all clients' answers, or answers trained from the same weights."""
        check_rules(config, rules, population, concurrency)
        self.world, self.concurrency, self.key, self.received = world, concurrency, rules.key, received
        self.goes_on, self.max_staleness = config.asynchronous is not None, config.max_staleness
        self.arrivals = config.arrivals or concurrency
        self.rule = None
        if config.asynchronous is not None:
            chosen = rules.more["asynchronous"]
            self.rule = (chosen.name, ARRIVAL_RULES.make(chosen))
        self._begun = dict[int, Mapping[int, Assignment]]()
        self._worker: Worker | None = None
        self._had_few = False

    @property
    def most_versions(self) -> int:
        """Largest number of older weights kept beside the newest, each as large as the model."""
        most = self.concurrency - 1 if self.goes_on else 0
        return most if self.max_staleness is None else min(most, self.max_staleness + 1)

    def wanted(self, data: Mapping[str, Any], round_: int) -> tuple[int, frozenset[int], bool]:
        """The size of a round's cohort, the clients that cannot be in it, and whether any client is at work."""
        at_work, stale = self._at_work(data, round_)
        free = self.concurrency - len(at_work)
        busy = frozenset(f.client_id for f in (*at_work, *stale))
        return free + (self.arrivals - 1 if self.goes_on else 0), busy, bool(at_work)

    def _at_work(self, data: Mapping[str, Any], round_: int) -> tuple[list[Flight], list[Flight]]:
        """The clients at work, and those told to stop because the weights that they received are too old."""
        flights = [Flight(*values) for values in data.get(AT_WORK, [])]
        oldest = -1 if self.max_staleness is None else round_ - self.max_staleness
        return [f for f in flights if f.begun >= oldest], [f for f in flights if f.begun < oldest]

    def plan(
        self,
        round_: int,
        now_s: float,
        data: Mapping[str, Any],
        cohort: Cohort,
        draw: Callable[[float, int, Collection[int], int], Cohort],
        assignments: Callable[[int, int, Cohort, Mapping[str, Any]], Mapping[int, Assignment]],
    ) -> tuple[list[Assignment], Answers]:
        """The round's events as assignments in plan order, and its `Answers`.

        `draw(time, count, busy, number)` draws a further cohort of clients that are not busy when the first one does
        not suffice; `number` counts the round's cohorts from 0. `assignments(round, number, cohort, data)` makes the
        assignments of one of them; it is called again after a resume, and must then return the same.
        """
        at_work, stale = self._at_work(data, round_)
        begun = {int(number): Begun.of(stored) for number, stored in data.get(BEGUN, {}).items()}
        method_data = {name: value for name, value in data.items() if name not in (AT_WORK, BEGUN, HISTORY, MEMORY)}
        self._begun = {number: made for number, made in self._begun.items() if number in begun}
        cohorts, taken = [cohort], {*(f.client_id for f in (*at_work, *stale)), *cohort.client_ids}
        begun[round_] = Begun(cohorts, method_data)
        for begun_in, (of_round, values) in begun.items():
            if begun_in not in self._begun:
                made = dict[int, Assignment]()
                for number, each in enumerate(of_round):
                    made |= assignments(begun_in, number, each, values)
                self._begun[begun_in] = made

        def more(time_s: float, count: int) -> Sequence[int]:
            if not self.goes_on:
                return ()
            number = len(cohorts)
            drawn = draw(time_s, count, taken, number)
            if drawn.client_ids:
                cohorts.append(drawn)
                taken.update(drawn.client_ids)
                self._begun[round_] = {**self._begun[round_], **assignments(round_, number, drawn, method_data)}
            return drawn.client_ids

        def begin(client_id: int, time_s: float) -> Flight | None:
            availability = self.world.availability
            if availability is not None and not availability.is_on(client_id, time_s):
                return None
            takes_s, answers = self._takes(self._from(round_, client_id, time_s))
            return Flight(client_id, round_, time_s, time_s + takes_s, answers)

        ended = next_events(
            *(at_work, cohort.client_ids, begin),
            now_s=now_s,
            concurrency=self.concurrency,
            arrivals=self.arrivals,
            more=more,
        )
        self._warn_of_few(round_, sum(flight.answers for flight in ended.events))
        why_stale = f"what it received is over {self.max_staleness} rounds old (max_staleness)"
        lost = {f.client_id: f._replace(ends_s=now_s) for f in stale}
        events = {f.client_id: f for f in (*lost.values(), *ended.events)}
        ignored = {f.client_id: (STALE, why_stale, now_s - f.begun_s) for f in stale}
        working = ended.at_work
        if not self.goes_on:
            why = f"{self.arrivals} others had answered after {ended.now_s - now_s:.6g} s"
            ignored |= {f.client_id: (OVER_SELECTED, why, math.inf) for f in working}
            events |= {f.client_id: f._replace(ends_s=ended.now_s) for f in working}
            working = []
        planned = []
        for client_id in self.world.in_plan_order(events):
            flight = events[client_id]
            assignment = self._of(flight, round_)
            if self.goes_on:
                assignment = replace(assignment, staleness=round_ - flight.begun)
            planned.append(replace(assignment, ended_s=flight.ends_s, ignored=ignored.get(client_id)))
        alive = sorted({f.begun for f in working})
        after = {AT_WORK: [list(f) for f in working], BEGUN: {str(n): begun[n].stored() for n in alive}}
        ahead = [self._of(f, round_) for f in working if f.answers]
        answering = frozenset(flight.client_id for flight in ended.events if flight.answers)
        return planned, Answers(ended.now_s, after if self.goes_on else {}, self.concurrency, answering, alive, ahead)

    def _warn_of_few(self, round_: int, answers: int) -> None:
        if answers < self.arrivals and not self._had_few:
            self._had_few = True
            logger.warning(
                "%s: round %d ends with %d answers instead of %d, because no other client can begin and answer; "
                "warned once: see the column clients_ok of the table rounds",
                *(self.key, round_ + 1, answers, self.arrivals),
            )

    def counted(
        self,
        old: Weights,
        received: Mapping[str | None, Weights],
        parameters: Container[str],
        shares: Mapping[int, float],
    ) -> Callable[[Assignment, Update], Update]:
        """Returns a function that converts an update into the one that the server averages.

        `old` are the server's weights, `received` those that clients received, by tensor group (None: this round's);
        `parameters` are the names of the trained tensors, `shares` the clients' shares by id (default 1).
        """
        rule = self.rule
        assert rule is not None, "clients that are not waited for send nothing"

        def counted(assignment: Assignment, update: Update) -> Update:
            assert assignment.staleness is not None, "it was planned here"
            counts = arrived(update, rule, old, received[assignment.reads], assignment.staleness, parameters)
            share = shares.get(client_of(assignment), 1.0)
            weights = {name: share * weight for name, weight in counts.weights.items()}
            return replace(counts, weights=weights, unheld=share * counts.unheld)

        return counted

    def _of(self, flight: Flight, round_: int) -> Assignment:
        assignment = self._from(flight.begun, flight.client_id, flight.begun_s)
        if flight.begun == round_:
            return assignment
        return replace(assignment, reads=self.received(flight.begun))

    def _from(self, round_: int, client_id: int, begun_s: float) -> Assignment:
        """The assignment of a client that begins in a round, at a simulated time."""
        return replace(self._begun[round_][client_id], offline_s=online_for_s(self.world, client_id, begun_s))

    def _takes(self, assignment: Assignment) -> tuple[float, bool]:
        """The simulated seconds of a client's work, and whether it then answers."""
        from fedloom.platform.clients.execution import expected_s  # only runs need it
        from fedloom.platform.clients.worker import Worker

        if not isinstance(assignment.task, AccountableTask):
            raise ValueError(
                f"{self.key}.arrivals, .asynchronous: the cost of {type(assignment.task).__name__} is unknown "
                "before it is done, and so is the order of the answers; use another method, or leave both out"
            )
        if self._worker is None:
            self._worker = Worker(replace(self.world.spec, device="cpu"))
        takes_s = expected_s(self._worker, assignment)
        deadline_s = math.inf if assignment.deadline_s is None else assignment.deadline_s
        if assignment.dropped:
            return (takes_s if assignment.deadline_s is None else deadline_s), False
        # Nothing tells the server that a device has gone offline: it waits for the device.
        gone = assignment.offline_s is not None and assignment.offline_s < min(takes_s, deadline_s)
        return min(takes_s, deadline_s), not gone and takes_s <= deadline_s


def check_rules(config: TrainingConfig, rules: Rules, population: int, concurrency: int) -> None:
    """Raises ValueError for settings that cannot be combined with rounds that do not wait for all clients."""
    from fedloom.platform.clients.local_rules import local_rule
    from fedloom.platform.federation.selection import selection_traits

    key, rule = rules.key, config.asynchronous
    slot = f"{key}.arrivals={config.arrivals}" if rule is None else f"{key}.asynchronous={rule}"
    most = concurrency if rule is None else population
    if config.arrivals is not None and config.arrivals > most:
        at_work = "are at work in a round" if rule is None else "exist, and each begins at most once in a round"
        raise ValueError(f"{key}.arrivals={config.arrivals}: only {most} clients {at_work}; lower it")
    if rule == "fedasync" and config.arrivals != 1:
        raise ValueError(f"{slot} mixes every answer into the weights: set {key}.arrivals=1, given {config.arrivals}")
    direction = config.options.get("direction", "up")
    if rule == "fedasync" and direction != "up":
        raise ValueError(
            f"{key}.options.direction={direction}: fedasync would mix the rounding errors of what clients receive into "
            f"the weights; use up, or {key}.asynchronous=fedbuff, which adds changes"
        )
    if rule is not None and config.arrivals is None:
        raise ValueError(f"{slot} needs {key}.arrivals, the number of answers that make a round (FedBuff's K)")
    sampling = selection_traits(rules.selection.name).sampling
    if sampling in ("poisson", "all"):
        raise ValueError(
            f"{slot} and {key}.selection={rules.selection.name}: a client begins whenever another ends, so the "
            "number at work is fixed; use uniform, or a rule that selects as many clients as asked for"
        )
    if rule is not None and selection_traits(rules.selection.name).same_round:
        raise ValueError(
            f"{slot} and {key}.selection={rules.selection.name}, which needs rounds whose clients all begin and answer "
            "in it: use another selection rule"
        )
    privacy = config.privacy
    if privacy.clip is not None or privacy.noise or privacy.secure:
        raise ValueError(f"{slot} and {key}.privacy: which clients count depends on their speed; leave one out")
    if rule is not None and not local_rule(rules.local).sends_only_change:
        raise ValueError(
            f"{slot} and {key}.local_rule={rules.local.name}: what clients send besides their change fits only the "
            "weights of one round; use sgd or fedprox"
        )
    if config.min_contributors > (config.arrivals or concurrency):
        raise ValueError(
            f"{key}.min_contributors={config.min_contributors}: a round has {config.arrivals} answers "
            f"({key}.arrivals), so that nothing would ever be trained; lower it"
        )
