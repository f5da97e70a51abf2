"""The FedAvg training round and its data types: the state between rounds, a round's plan, and its update.

All functions are pure, so a run can be stored and resumed after any round. `method.py` declares what else belongs to a
method besides its training stages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from fedloom.platform.averaging.aggregators import MEAN, KeptUpdates
from fedloom.platform.averaging.server import ServerRound
from fedloom.platform.clients.assignments import Assignment, Evaluation, client_of, evaluations_of
from fedloom.platform.clients.local_rules import STATE
from fedloom.platform.data.augment import check_augmentation, tried_samples
from fedloom.platform.federation.processing import Processing, Server
from fedloom.platform.federation.selection import (
    AT_WORK,
    BEGUN,
    HISTORY,
    MEMORY,
    Selection,
    as_asked,
    for_client,
    for_server,
    simulated_devices,
)
from fedloom.platform.federation.stopping import Judgement, latest_score
from fedloom.platform.federation.training_config import (
    Rules,
    TrainingConfig,
    augmentation_of,
    check_cohort,
    cohort_size,
    local_sgd,
)
from fedloom.platform.federation.training_warnings import UNANSWERED, TrainingWarnings
from fedloom.platform.plugins import PluginError, answered
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.slices import TensorGroup, Weights, bytes_of
from fedloom.tiers.devices import TRAINING_FACTOR

if TYPE_CHECKING:
    from fedloom.platform.averaging.aggregators import Sums
    from fedloom.platform.averaging.processors import Processors
    from fedloom.platform.clients.assignments import ClientResult, Task
    from fedloom.platform.clients.training import LocalSGD
    from fedloom.platform.federation.asynchronous import Answers, Asynchronous
    from fedloom.platform.federation.selection import Cohort
    from fedloom.platform.federation.world import World

logger = logging.getLogger(__name__)

# -- the state of a run ------------------------------------------------------------------------------------------------

SUPERNET = "supernet"
"""Name of the tensor group that holds a supernet's shared weights."""
CLIENT = "client-"
"""Prefix of the names of client states, followed by the client's id."""
RECEIVED = "received-"
"""Name prefix of the tensor groups that clients received in an earlier round and still work from."""
BEST = "best-"
"""Name prefix of the copies of tensor groups and JSON values that are taken at a stage's best evaluation."""
JUDGEMENT = "judgement"
"""Name of the JSON value that holds the current stage's `Judgement`, if the stage may end early."""
STAGES_OWN = (HISTORY, MEMORY, UNANSWERED, JUDGEMENT, AT_WORK, BEGUN)
"""Names of the JSON values of the current stage, which neither its method nor its processors use."""


@dataclass(frozen=True)
class RunState:
    """The state of a run: the next round of the current stage, all tensors, and all other values.

    Attributes:
        stage: index of the current stage; equal to the number of stages when the run is finished.
        round: the next round of that stage, from 0.
        groups: the tensor groups by name (the supernet, each tier's model, client states).
        data: JSON values by name.
        simulated_s: the virtual clock in seconds.
    """

    stage: int = 0
    round: int = 0
    groups: Mapping[str, TensorGroup] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    simulated_s: float = 0.0

    def with_group(self, name: str, tensors: Weights) -> RunState:
        """The state with one tensor group replaced and its version incremented."""
        version = self.groups[name].version + 1 if name in self.groups else 0
        return replace(self, groups={**self.groups, name: TensorGroup(tensors, version)})

    def without_groups(self, *names: str) -> RunState:
        """The state without these tensor groups."""
        return replace(self, groups={name: group for name, group in self.groups.items() if name not in names})

    def with_data(self, name: str, value: Any) -> RunState:
        """The state with one JSON value replaced."""
        return replace(self, data={**self.data, name: value})

    def without_data(self, *names: str) -> RunState:
        """The state without these JSON values."""
        return replace(self, data={name: value for name, value in self.data.items() if name not in names})

    def without_client_tensors(self, prefix: str) -> RunState:
        """The state without client tensors whose names have this prefix; groups left empty are removed."""
        state = self
        for name, group in self.groups.items():
            left = {n: t for n, t in group.tensors.items() if not n.startswith(prefix)}
            if name.startswith(CLIENT) and len(left) < len(group.tensors):
                state = state.with_group(name, left) if left else state.without_groups(name)
        return state

    def client_state(self, client_id: int) -> Weights | None:
        """The client's saved state for its next assignment; None if it has none."""
        group = self.groups.get(f"{CLIENT}{client_id}")
        return None if group is None else group.tensors

    def weights(self, name: str) -> Weights:
        """The tensors of a group."""
        return self.groups[name].tensors

    def version(self, name: str) -> str:
        """A string that changes whenever the tensor group does."""
        return f"{name}@{self.groups[name].version}"


# -- a round -----------------------------------------------------------------------------------------------------------

Row = tuple[str, Mapping[str, Any]]
"""A table's name and the row's columns; the loop adds stage and round."""


@dataclass(frozen=True)
class Plan:
    """A round's assignments, and the name of the tensor group whose weights they receive."""

    assignments: Sequence[Assignment]
    group: str
    schedules: Mapping[str, float] = field(default_factory=dict)
    """The schedules' values in this round, such as lr and beta."""
    chunk_size: int | None = None
    """Assignments per chunk if the stage overrides the configuration."""
    stack: int = 1
    """Largest number of a chunk's clients that are trained as one batch."""
    memory: Mapping[str, Any] | None = None
    """JSON values that the selection rule stores for its next round."""
    processors: Processors = ()
    """The round's processors; the server undoes them in reverse order."""
    keeps_updates: bool = False
    """Whether the server receives each client's update instead of sums, for aggregators that compare clients."""
    answers: Answers | None = None
    """The round's first answers; None if the server waits for all clients."""
    starts_s: float | None = None
    """Simulated time at which the round starts, after waiting for an online device; None: at once."""


@dataclass(frozen=True)
class RoundResult:
    """A round's results: the updates' weighted sums (or the updates), and one result per assignment in plan order."""

    sums: Sums
    client_results: Sequence[ClientResult]


@dataclass(frozen=True)
class KeptModel:
    """A model to be stored with the results."""

    name: str
    tier: str
    architecture: str
    macs: float
    parameters: int
    tensors: Weights


@dataclass(frozen=True)
class PostRoundEvaluation:
    """A plan that scores a round's new state before the round ends, and the evaluations made from its results."""

    plan: Plan
    evaluations: Callable[[RoundResult], Sequence[Evaluation]]


@dataclass(frozen=True)
class PostRoundWork:
    """The server's work on a round's new state before the round ends, such as training on its own data.

    `merge` makes the round's final state from the new state and the results of the plan's tasks.
    """

    plan: Plan
    merge: Callable[[RunState, RoundResult], RoundUpdate]


Judge = Callable[[RunState, Sequence[Evaluation]], tuple[RunState, str]]
"""Maps a round's final state and evaluations to the state with its judgement, and why the stage ends ("" if not)."""


@dataclass(frozen=True)
class RoundUpdate:
    """The state after a round (or at a stage's end), with evaluations, further rows, and the models to store.

    `work` runs before `evaluation`, and the update that its `merge` returns is added to this one; `judge` runs last.
    """

    state: RunState
    rows: Sequence[Row] = ()
    models: Sequence[KeptModel] = ()
    evaluation: PostRoundEvaluation | None = None
    evaluations: Sequence[Evaluation] = ()
    work: PostRoundWork | None = None
    judge: Judge | None = None


# -- federated training -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """A training round after client selection, the input for assigning tasks.

    Attributes:
        stage: the stage's name; random streams depend on it and on `index`.
        index: the round, from 0; the cohort's number if the cohort is simulated.
        state: the state before the round; its `round` is the round that a simulated cohort stands for.
        client_ids: the round's clients in plan order: by tier, then by id.
        local: the clients' local training in this round: its hyper-parameters, optimiser and local rule.
        rules: the rules of the stage.
        scored: whether clients score their models on validation data after training, if their task supports it.
        draw: how many cohorts began in the round before this one: above 0 only in rounds that do not wait for all.
    """

    world: World
    stage: str
    index: int
    state: RunState
    client_ids: tuple[int, ...]
    local: LocalSGD
    rules: Rules
    scored: bool
    draw: int = 0


class BegunRound(NamedTuple):
    """The assignments of a round's clients in plan order, the values of its schedules, and its processors."""

    assignments: Sequence[Assignment]
    schedules: Mapping[str, float]
    processors: Processors


@dataclass(frozen=True)
class RoundTasks:
    """One task per client of a round in plan order, and the schedules' values for the round's row."""

    tasks: Sequence[Task]
    schedules: Mapping[str, float] = field(default_factory=dict)


TasksOfRound = Callable[[Round], RoundTasks]
"""Makes the tasks of a round's clients."""

Initial = Callable[[RunState], Weights | None]
"""Returns a stage's initial weights; None skips the stage because there is nothing to train."""


def fresh_supernet(world: World) -> Initial:
    """Random initial weights of the space's supernet."""
    return from_generator(world, world.space.initial_weights, SUPERNET)


def from_generator(world: World, draw: Callable[[torch.Generator], Weights], *places: str) -> Initial:
    """Initial weights that `draw` makes from the run's initialisation stream for `places`."""
    seed = world.config.seed_for("initialisation")
    return lambda _state: draw(torch_stream(seed, *places))


def to_all(make: Callable[[Round], Task]) -> TasksOfRound:
    """Assigns the same task to every client of the round."""
    return lambda round_: RoundTasks([make(round_)] * len(round_.client_ids))


def _unscored(_state: RunState) -> Sequence[Task]:
    """No tasks of the server: clients score their own models, or nobody does."""
    return ()


def _with_share(assignment: Assignment, shares: Mapping[int, float]) -> Assignment:
    client, task = client_of(assignment), cast(Any, assignment.task)
    return replace(assignment, task=replace(task, share=shares[client])) if client in shares else assignment


@dataclass(eq=False)
class TrainingStage:
    """Federated rounds over one tensor group: select clients, send slices, train, average, evaluate.

    Attributes:
        rules: selection, local rule, weighting and server rule, as configured (`rules_of`).
        initial: the initial weights of the group.
        tasks: what the round's clients do.
        group: the name of the tensor group.
        eligible: ids of the clients that may be selected; by default all.
        score: the server's tasks that score the current weights every `evaluate_every` rounds and after the last.
        beside: further tasks of the server in a round, in parallel to the clients.
        after: the method's update of the state after averaging, given the round's plan and result.
        keep: the models that are stored when the stage ends.
        macs: expected MACs of one sample's forward pass in training; by default `World.expected_macs()`.
        parameters: the names of the group's trained tensors, which the server rule steps; by default the space's
            parameters.
        tier: the tier whose model is trained, for rows of `evaluations`.
        data: JSON values added to the initial state.
        settled: whether scores of a round's new state may end the stage: not during a search or in early phases.
        shares: in rounds that end with their first answers, given the round and the tasks of these, in plan order, the
            shares by which they are weighted against each other, and the schedules' values; None if all are 1. Tasks
            have a field `share`.
        final: maps the last state to the one that the stage leaves behind.
        countable: whether the cost of every round is known without training, for dry runs.
    """

    world: World
    config: TrainingConfig
    rules: Rules
    _: KW_ONLY
    name: str
    initial: Initial
    tasks: TasksOfRound
    group: str = SUPERNET
    eligible: np.ndarray | None = None
    score: Callable[[RunState], Sequence[Task]] = _unscored
    beside: Callable[[RunState], Sequence[Task]] = lambda _state: ()
    after: Callable[[RunState, Plan, RoundResult], RunState] = lambda state, _plan, _result: state
    keep: Callable[[RunState], Sequence[KeptModel]] = lambda _state: ()
    macs: Callable[[RunState], float] | None = None
    parameters: frozenset[str] | None = None
    tier: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    settled: Callable[[RunState], bool] = lambda _state: True
    shares: Callable[[int, Sequence[Task]], tuple[Sequence[float], Mapping[str, float]]] | None = None
    final: Callable[[RunState], RunState] = lambda state: state
    countable: bool = True
    trains = True
    counted = "rounds"

    def __post_init__(self) -> None:
        world, config, name = self.world, self.config, self.name
        self.augment = augmentation_of(world, config)
        if config.augment is not None:
            check_augmentation(self.augment, tried_samples(world.data.dataset)[0])
        self.population = world.everyone if self.eligible is None else self.eligible
        self.cohort_size = min(cohort_size(config, len(self.population)), len(self.population))
        self.server_group, self.sent_group = f"server-{self.group}", f"sent-{self.group}"
        self.server = Server(self.rules, world.space.parameter_names if self.parameters is None else self.parameters)
        self.warnings = TrainingWarnings(world, name, noise=config.privacy.noise > 0)
        self.stop = world.config.stop
        self.may_end_early = self.stop.is_set and config.evaluate_every > 0
        if self.may_end_early and self.score is _unscored and config.asynchronous is not None:
            raise ValueError(
                f"{self.rules.key}.asynchronous={config.asynchronous}: clients of {name} score their own models, and "
                "every round has the scores of other clients, so stop.* cannot end it; leave one of both out"
            )
        self.selection = Selection(
            *(world, name, self.population, self.rules.selection, config.clients_per_round, config.epochs)
        )
        self.processing = Processing(world, config, self.rules, name, self.population, self.server.parameters)
        self.keeps_updates = self.rules.aggregator.name != MEAN or self.processing.needs_updates
        if self.keeps_updates:
            self.processing.check_acts_on_updates()
        self.asynchronous: Asynchronous | None = None
        if (config.asynchronous is not None or config.arrivals is not None) and len(self.population):
            from fedloom.platform.federation.asynchronous import Asynchronous  # only such rounds need it

            self.asynchronous = Asynchronous(
                *(world, config, self.rules, len(self.population), self.cohort_size, self._received_in)
            )
        self.answers = self.cohort_size if self.asynchronous is None else self.asynchronous.arrivals
        if self.answers:
            check_cohort(self.rules, self.answers)
        if config.min_contributors > self.answers > 0:
            raise ValueError(
                f"{self.rules.key}.min_contributors={config.min_contributors}: only {self.answers} clients take part "
                f"in a round of {name}, so that nothing would ever be trained; lower it"
            )
        least = max((each.least_contributors for each in self.processing.processors), default=1)
        if config.rounds and least > self.answers > 0:
            raise ValueError(
                f"{self.rules.key}.privacy.secure=true: {self.answers} client takes part in a round of {name}, and the "
                f"sum of fewer than {least} reveals it, so that nothing would ever be trained; leave it out there"
            )
        if len(self.population):
            # Raises for wrong options before the run begins.
            self.selection.cohort(0, self.selection.begun(), self.selection.starts_s(0.0))

    def begin(self, state: RunState) -> RunState:
        """Adds the initial weights, the local rule's shared tensors, and an empty history.

        Raises ValueError for a server rule that would step none of the weights.
        """
        weights = self.initial(state)
        if weights is None:
            return state
        if weights and self.rules.server.name != "replace" and not any(n in self.server.parameters for n in weights):
            raise ValueError(
                f"{self.rules.key}.server={self.rules.server.name} steps trained tensors, and none of the stage's "
                "tensors is named as one: give their names as `parameters` of the TrainingStage, or use server=replace"
            )
        self.processing.begin(state.data)
        if self.config.rounds and not len(self.population):
            logger.warning(
                "%s: no client can take part, so that the model keeps its initial weights: see tiers.shares, or what "
                "else decides about the clients' tiers",
                self.name,
            )
        if self.keeps_updates:
            logger.warning(
                "%s: %s keeps every update of a round in the server's memory, up to %d times %.1f MB",
                *(self.name, self._keeper, self.answers, bytes_of(weights) / 1e6),
            )
        if self.asynchronous is not None and self.asynchronous.most_versions:
            logger.warning(
                "%s: up to %d older weights of %.1f MB each stay in memory and in the checkpoint, while clients work "
                "from them (max_staleness limits their number)",
                *(self.name, self.asynchronous.most_versions, bytes_of(weights) / 1e6),
            )
        shared = {name: torch.zeros_like(weights[source]) for name, source in self.server.shared(weights).items()}
        begun = state.with_group(self.group, {**weights, **shared})
        begun = replace(begun, data={**state.data, **self.data, **self.selection.begun()})
        return self.with_sent(begun, 0)

    def rounds_left(self, state: RunState) -> int:
        """The number of remaining rounds; 0 without weights or eligible clients, or once scores end the stage."""
        possible = self.group in state.groups and len(self.population) > 0 and not self._judgement(state).stopped
        return self.config.rounds - state.round if possible else 0

    def plan(self, state: RunState) -> Plan:
        """Selects the cohort and assigns the clients' and the server's tasks."""
        from fedloom.platform.clients.stacks import clients_per_stack  # only runs need it

        world, index, group = self.world, state.round, self._received_group(state)
        context = self.processing.context(index, state.weights(self.group), state.data)
        answers: Answers | None = None
        if self.asynchronous is None:
            starts_s = self.selection.starts_s(state.simulated_s)
            cohort = self.selection.cohort(index, state.data, starts_s)
            memory = cohort.memory
            begun = self._begun(state, cohort, starts_s)
            assignments = begun.assignments
        else:

            def draw(time_s: float, count: int, busy: Collection[int], number: int) -> Cohort:
                nonlocal memory
                further = self.selection.cohort(index, {**state.data, MEMORY: memory}, time_s, count, busy, number)
                memory = further.memory
                return further

            size, busy, at_work = self.asynchronous.wanted(state.data, index)
            starts_s = state.simulated_s if at_work else self.selection.starts_s(state.simulated_s)
            cohort = self.selection.cohort(index, state.data, starts_s, size, busy)
            memory = cohort.memory
            begun = self._begun(state, cohort)
            assignments, answers = self.asynchronous.plan(
                *(index, starts_s, state.data, cohort), draw, partial(self._begun_in, state, begun)
            )
            shares = dict[int, float]()
            if self.shares is not None:
                arriving = [a for a in assignments if client_of(a) in answers.answering]
                values, schedules = self.shares(index, [a.task for a in arriving]) if arriving else ((), {})
                shares = {client_of(a): share for a, share in zip(arriving, values, strict=True)}
                begun = begun._replace(schedules={**begun.schedules, **schedules})
            if self.asynchronous.rule is None:
                assignments = [_with_share(a, shares) for a in assignments]
            else:
                received = {name: state.weights(name or group) for name in (None, *self._older(state))}
                counted = self.asynchronous.counted(state.weights(self.group), received, self.server.parameters, shares)
                answers = replace(answers, counted=counted)
                # The clients that answer began in several rounds, and the server's side has to know them all.
                answering = {client_of(a): a.task for a in assignments}
                begun = begun._replace(processors=self.processing.of_clients(context, answering))
        executor, local = world.config.executor, self._local_sgd(index)
        tasks = [assignment.task for assignment in assignments]
        stacked = "off" if executor.resident or self.config.asynchronous is not None else executor.stack_clients
        stack = clients_per_stack(stacked, world.space, world.macs_table, tasks, local.batch_size)
        self.warnings.before_round(tasks, stack)
        planned = self.cohort_size if self.asynchronous is not None else len(cohort.client_ids)
        self.warnings.of_availability(self.selection, state.simulated_s, starts_s, planned)
        # If scores may end the stage, `merge` has the new weights scored: only the initial ones are scored here.
        scores_before = self._is_due(index) and not (self.may_end_early and index)
        of_server = [*self.beside(state), *(self.score(state) if scores_before else ())]
        own = None if group == self.group else self.group  # not what processors make of it on the way to clients
        return Plan(
            [*assignments, *(for_server(self.name, index, task, reads=own) for task in of_server)],
            group,
            {"lr": local.lr, **begun.schedules, **self.processing.schedules(context)},
            stack=stack,
            memory=memory,
            processors=begun.processors,
            keeps_updates=self.keeps_updates,
            answers=answers,
            starts_s=starts_s,
        )

    def _is_due(self, index: int) -> bool:
        """Whether the weights are scored before a round."""
        return self.config.evaluate_every > 0 and index % self.config.evaluate_every == 0

    def _begun(self, state: RunState, cohort: Cohort, starts_s: float | None = None, draw: int = 0) -> BegunRound:
        """The assignments of a cohort that begins in a round, in plan order; `starts_s` is its common start, if any."""
        world, config, index = self.world, self.config, state.round
        client_ids = world.in_plan_order(cohort.client_ids)
        scored = self._is_due(index) or (config.evaluate_every > 0 and index == config.rounds - 1)
        local = self._local_sgd(index)
        round_ = Round(world, self.name, index, state, client_ids, local, self.rules, scored, draw)
        round_tasks = answered("the stage's tasks", self.tasks(round_), RoundTasks)
        if len(round_tasks.tasks) != len(client_ids):
            raise ValueError(
                f"the stage's tasks are {len(round_tasks.tasks)} for {len(client_ids)} clients: give each one"
            )
        tasks: Sequence[Task] = [as_asked(t, cohort, c) for c, t in zip(client_ids, round_tasks.tasks, strict=True)]
        context = self.processing.context(index, state.weights(self.group), state.data)
        tasks, processors = self.processing.begun(context, tasks, client_ids)
        per_sample = config.epochs * TRAINING_FACTOR * self._macs(state)
        at_work = None if self.asynchronous is None else self.asynchronous.concurrency
        devices = simulated_devices(world, self.name, index, client_ids, at_work)
        assignments = [
            for_client(
                *(world, self.name, index, cohort, c, task, world.data.size(c, "train") * per_sample),
                profile=profile,
                starts_s=starts_s,
            )
            for c, task, profile in zip(client_ids, tasks, devices, strict=True)
        ]
        return BegunRound(assignments, round_tasks.schedules, processors)

    # -- rounds that do not wait for all ----------------------------------------------------------------------------

    def _begun_in(
        self, state: RunState, begun: BegunRound, index: int, draw: int, cohort: Cohort, data: Mapping[str, Any]
    ) -> dict[int, Assignment]:
        """The assignments, by client id, of a cohort that begins in round `index`: the current or an earlier one.

        `begun` holds those of the current round's first cohort.
        """
        if index == state.round and draw:
            begun = self._begun(state, cohort, draw=draw)
        elif index != state.round:
            weights = state.groups[self._received_in(index)]
            groups = {**state.groups, self.group: weights}
            begun = self._begun(replace(state, round=index, data=data, groups=groups), cohort, draw=draw)
        return {client_of(assignment): assignment for assignment in begun.assignments}

    def _received_in(self, index: int) -> str:
        """Name of the tensor group with the weights that clients received in round `index`."""
        return f"{RECEIVED}{self.group}-{index}"

    def _received_group(self, state: RunState) -> str:
        """Name of the tensor group whose weights clients receive."""
        return self.sent_group if self.sent_group in state.groups else self.group

    def _older(self, state: RunState) -> list[str]:
        """Names of the tensor groups that clients received in earlier rounds."""
        return [name for name in state.groups if name.startswith(RECEIVED)]

    def _with_received(self, after: RunState, before: RunState, answers: Answers) -> RunState:
        """The state with the received weights that clients still work from, and without those no longer needed."""
        needed = {self._received_in(begun) for begun in answers.begun}
        after = after.without_groups(*(name for name in self._older(after) if name not in needed))
        name = self._received_in(before.round)
        if name not in needed:
            return after
        # The version is that of the model, because a later stage may have the same round numbers.
        received = TensorGroup(before.weights(self._received_group(before)), before.groups[self.group].version)
        return replace(after, groups={**after.groups, name: received})

    def merge(self, state: RunState, plan: Plan, result: RoundResult) -> RoundUpdate:
        """Averages the updates, applies the server rule and the method's `after`, and updates the history.

        Raises ValueError if clients with a share have trained and all weights of all updates are 0.
        """
        sums, results = result.sums, result.client_results
        without_share = {a.client_id for a in plan.assignments if getattr(a.task, "share", 1.0) == 0}
        trained = any(r.samples and r.client_id not in without_share for r in results if r.status == "ok")
        if sums.weigh_nothing and trained:
            raise ValueError(
                f"all weights of all {sums.updates} updates are 0, so that the round trains nothing: weighting rule "
                f"{self.rules.weighting.name!r} must give what is trained a weight above 0"
            )
        if isinstance(sums, KeptUpdates):
            sums = replace(sums, rule=self.rules.aggregator)
        old = state.weights(self.group)
        context = self.processing.context(state.round, old, state.data)
        simulated = partial(self._simulated_tasks, state)
        # Updates from several rounds' weights were already converted as if trained from the server's own weights.
        counted = plan.answers is not None and plan.answers.counted is not None
        averaged = self.processing.averaged(
            *(context, plan.processors, sums, results, self.server.shared(old), simulated),
            sent=None if counted or self.sent_group not in state.groups else state.weights(self.sent_group),
        )
        recorded = self.processing.recorded(context)
        data = {
            **state.data,
            **recorded,
            **self.selection.after_round(state.round, state.data, plan.memory, results),
            **self.warnings.after_round(state.round, state.data, results),
            **({} if plan.answers is None else plan.answers.data),
        }
        before = state.weights(self.server_group) if self.server_group in state.groups else {}
        cohort = sum(a.client_id is not None and a.ignored is None for a in plan.assignments)
        about = ServerRound(state.round, cohort, len(self.population))
        weights, server_state = self.server.step(old, averaged, before, about)
        after = replace(state.with_group(self.group, weights), data=data)
        if server_state:
            after = after.with_group(self.server_group, server_state)
        if plan.answers is not None:
            after = self._with_received(after, state, plan.answers)
        after = answered("the stage's after", self.after(after, plan, result), RunState)
        for name in STAGES_OWN:
            given, left = data.get(name), after.data.get(name)
            if name in recorded or (left is not given and left != given):
                raise PluginError(f"{name!r} is a JSON value of the stage itself: use another name")
        after = self.with_sent(after, state.round + 1)
        evaluations, judge = evaluations_of(results, self.tier), self._judged if self.may_end_early else None
        return RoundUpdate(after, evaluation=self._last_scores(after), evaluations=evaluations, judge=judge)

    def end(self, state: RunState) -> RoundUpdate:
        """Removes everything of the stage but its weights (the best ones if configured); returns the models to store.

        Raises ValueError if no update has ever arrived in the run's first stage: all weights are the initial ones. In
        later stages that is a warning, because the results of earlier stages are worth having.
        """
        if self.group not in state.groups:
            return RoundUpdate(state)
        self.warnings.check_trained(state.stage, state.round, state.data)
        if self.may_end_early and JUDGEMENT not in state.data:
            logger.warning("%s: stop.* had no score on validation data to judge it by", self.name)
        state = answered("the stage's final", self.final(self._with_best(state)), RunState)
        weights = state.weights(self.group)
        ended = self.without_its_own(state)
        shared = self.server.shared(weights)
        if shared:
            ended = ended.with_group(self.group, {name: t for name, t in weights.items() if name not in shared})
        return RoundUpdate(ended, models=self.keep(ended))

    def without_its_own(self, state: RunState) -> RunState:
        """The state without what belongs to this stage: the next one has its own clients, server and judgement."""
        older = self._older(state)
        # A local rule's client state belongs to the stage's weights, and the next stage may train others.
        ended = state.without_groups(self.server_group, self.sent_group, *older).without_client_tensors(STATE)
        return ended.without_data(*STAGES_OWN)

    def with_sent(self, state: RunState, index: int) -> RunState:
        """The state with the weights that clients receive in a round, if processors change them.

        A stage that changes the weights after `merge` calls this again.
        """
        sent = self.processing.sent(self.processing.context(index, state.weights(self.group), state.data))
        if sent is None:
            return state
        # The version is that of the model, because a later stage of this group would begin with the same ones again.
        return replace(
            state, groups={**state.groups, self.sent_group: TensorGroup(sent, state.groups[self.group].version)}
        )

    # -- parts of a round -------------------------------------------------------------------------------------------

    @property
    def _keeper(self) -> str:
        """Names the component that needs each client's update, for a message."""
        aggregator = self.rules.aggregator.name
        return f"aggregator {aggregator}" if aggregator != MEAN else f"attack {self.world.config.attack.name}"

    def _local_sgd(self, index: int) -> LocalSGD:
        balanced, rules = self.world.config.data.balanced_classes, self.rules
        return local_sgd(
            self.config, index, self.augment, balanced=balanced, rule=rules.local, optimizer=rules.optimizer
        )

    def _simulated_tasks(self, state: RunState, index: int, client_ids: tuple[int, ...]) -> Sequence[Task]:
        """The tasks of a simulated cohort: they differ from those of any round and depend on no earlier round.

        Only schedules are those of the current round, such as MaxNet's beta.
        """
        start, name = replace(state, data={**state.data, **self.data}), f"{self.name}/expected"
        return self.tasks(
            Round(self.world, name, index, start, client_ids, self._local_sgd(0), self.rules, False)
        ).tasks

    def _last_scores(self, after: RunState) -> PostRoundEvaluation | None:
        """Scores the new weights if scores may end the stage, and after the last round, as no later round does."""
        rounds, every = after.round + 1, self.config.evaluate_every
        due = every > 0 and (rounds == self.config.rounds or (self.may_end_early and rounds % every == 0))
        tasks = self.score(after) if due else ()
        if not tasks:
            return None
        plan = Plan([for_server(self.name, after.round, task) for task in tasks], self.group)
        return PostRoundEvaluation(plan, lambda result: evaluations_of(result.client_results, self.tier, rounds))

    # -- an early end ------------------------------------------------------------------------------------------------

    def _judgement(self, state: RunState) -> Judgement:
        return Judgement(**state.data[JUDGEMENT]) if JUDGEMENT in state.data else Judgement()

    def _judged(self, state: RunState, evaluations: Sequence[Evaluation]) -> tuple[RunState, str]:
        """The state with the judgement after a round's evaluations, and with a copy of it if its score is the best."""
        score = latest_score(evaluations, state.round, self.stop.metric)
        if score is None or score.rounds != state.round + 1 or not self.settled(state):
            return state, ""
        judgement = self._judgement(state).after(score, self.stop)
        if self.stop.weights == "best" and judgement.rounds == score.rounds:
            best = {f"{BEST}{name}": state.groups[name] for name in self._trained_groups(state)}
            data = {f"{BEST}{name}": state.data[name] for name in self.data}
            state = replace(state, groups={**state.groups, **best}, data={**state.data, **data})
        return state.with_data(JUDGEMENT, asdict(judgement)), judgement.stopped

    def _with_best(self, state: RunState) -> RunState:
        """The state with weights, client states and JSON values restored from the best evaluation, if copied then."""
        best = {name.removeprefix(BEST): group for name, group in state.groups.items() if name.startswith(BEST)}
        data = {name.removeprefix(BEST): value for name, value in state.data.items() if name.startswith(BEST)}
        if not best:
            return state
        later = [name for name in self._trained_groups(state) if name not in best]
        state = state.without_groups(*later, *(f"{BEST}{name}" for name in best))
        state = state.without_data(*(f"{BEST}{name}" for name in data))
        for name, group in best.items():
            state = state.with_group(name, group.tensors)
        return replace(state, data={**state.data, **data})

    def _trained_groups(self, state: RunState) -> list[str]:
        """The names of the stage's weights and of the clients' states."""
        return [name for name in state.groups if name == self.group or name.startswith(CLIENT)]

    # -- the time left ----------------------------------------------------------------------------------------------

    def macs_left(self, state: RunState) -> float:
        """The MACs of training the clients of all remaining rounds."""
        if not len(self.population):
            return 0.0
        samples = self.answers * self.config.epochs * float(self.world.data.sizes("train")[self.population].mean())
        return (self.config.rounds - state.round) * samples * TRAINING_FACTOR * self._macs(state)

    def _macs(self, state: RunState) -> float:
        """Expected MACs of one sample's forward pass through a network of the stage."""
        return self.world.expected_macs() if self.macs is None else self.macs(state)
