"""What a method is written against: its declaration, its stages, the state between rounds, and federated training.

A method is a list of stages. A stage is a set of pure functions of the run's state: in every round it makes a plan, the
plan's tasks are executed wherever the clients are, and their results are merged into the next state. Most methods need
no stage of their own: `TrainingStage` is the round of FedAvg (select, send slices, train, average, evaluate), and a
method fills in the initial weights and what a client does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from fedloom.platform.averaging.aggregators import MEAN, KeptUpdates
from fedloom.platform.averaging.server import SERVER_RULES, ServerRound, ServerRule, serve
from fedloom.platform.clients.assignments import SERVER, Assignment
from fedloom.platform.clients.local_rules import STATE, local_rule, place_of
from fedloom.platform.clients.trainer import Train
from fedloom.platform.federation.history import recorded, unpacked
from fedloom.platform.federation.processing import Processing
from fedloom.platform.federation.selection import Choice, Cohort, select, selection_traits
from fedloom.platform.federation.state import (
    CLIENT as CLIENT,
    HISTORY as HISTORY,
    MEMORY as MEMORY,
    SUPERNET as SUPERNET,
    KeptModel as KeptModel,
    Plan as Plan,
    PostRoundEvaluation as PostRoundEvaluation,
    RoundResult as RoundResult,
    RoundUpdate as RoundUpdate,
    Row as Row,
    RunState as RunState,
    Stage as Stage,
    evaluation_rows as evaluation_rows,
)
from fedloom.platform.federation.training_config import (
    Rules,
    TrainingConfig,
    checked_augmentation,
    cohort_size,
    local_sgd,
)
from fedloom.platform.federation.warnings import UNANSWERED, RoundWarnings
from fedloom.platform.federation.world import expected_macs
from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.spaces.slices import Weights, bytes_of
from fedloom.tiers.devices import TRAINING_FACTOR

if TYPE_CHECKING:
    from fedloom.platform.averaging.average import Averaged
    from fedloom.platform.averaging.processors import ServerContext
    from fedloom.platform.clients.assignments import Task
    from fedloom.platform.clients.training import LocalSGD
    from fedloom.platform.federation.history import History
    from fedloom.platform.federation.world import World
    from fedloom.platform.spaces.base import SearchSpace

logger = logging.getLogger(__name__)

# -- the declaration of a method ---------------------------------------------------------------------------------------

Kind = Literal["tiers", "subnets", "silos", "shared"]
"""The final models of a run: one per tier, subnets of an elastic supernet, one per client, or one for all."""
Own = Literal["nothing", "model", "cells"]
"""The personal state that every silo keeps between rounds: nothing, a model, or the cells after a shared base."""


@dataclass(frozen=True)
class SharedTraining:
    """The first `stages` of a method, which runs can share if they differ only in later parts.

    `later` names the parts of the method's configuration that these stages do not depend on.
    """

    later: tuple[str, ...]
    stages: int = 1


def nothing_shared(_config: Any) -> SharedTraining | None:
    """No training is shared: every run trains its own model."""
    return None


@dataclass(frozen=True)
class Method:
    """A method that a configuration can name.

    Attributes:
        config: a dataclass with a field `name`, whose fields are the keys `method.*`.
        stages: makes the stages from a configuration and a world; ValueError for invalid settings.
        kind: the kind of its final models, used by reports and exports.
        lacks: the tables that its runs leave empty.
        own: for cross-silo methods, each silo's personal state.
        searchable: whether its runs store a supernet that `fedloom search` can search for new targets.
        shared_training: the training that runs of a configuration can share; None if there is none.
        needs: given a space and the method's name, raises ValueError if it cannot use the space; asked before data is
            prepared, which may take minutes.
        tasks: whether tiers may have different tasks (`tiers.tasks`).
    """

    config: type
    stages: Callable[[Any, World], list[Stage]]
    kind: Kind
    lacks: tuple[str, ...] = ()
    own: Own = "nothing"
    searchable: Callable[[Any], bool] = lambda _config: False
    shared_training: Callable[[Any], SharedTraining | None] = nothing_shared
    needs: Callable[[SearchSpace, str], object] | None = None
    tasks: bool = False

    def traits(self, config: Any) -> Mapping[str, Any]:
        """The properties of the method that a run records, as JSON values."""
        searchable = self.searchable(config)
        return {"kind": self.kind, "lacks": list(self.lacks), "own": self.own, "searchable": searchable}


# -- the plan of a round ----------------------------------------------------------------------------------------------


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
) -> Cohort:
    """The cohort chosen by a selection rule; all draws depend only on the selection seed, stage, round and client."""
    seed = world.config.seed_for("selection")

    def available(client_id: int) -> bool:
        draw = stream(seed, "available", stage, round_, client_id).random()
        return bool(draw < world.profile(client_id).availability)

    choice = Choice(
        round=round_,
        size=size,
        eligible=eligible,
        rng=stream(seed, "select", stage, round_),
        always=world.devices is None and all(p.availability == 1.0 for p in world.profiles),
        available=available,
        history=history,
        num_samples=lambda client_id: world.data.size(client_id, "train"),
        memory=memory or {},
        epochs=epochs,
        device=world.profile,
        tiers_of=lambda client_ids: world.tier_of_client[client_ids],
        sizes_of=lambda client_ids: world.data.sizes("train")[client_ids],
    )
    return select(choice, rule)


def for_client(
    world: World, stage: str, round_: int, cohort: Cohort, client_id: int, task: Task, expected_macs: float = 0.0
) -> Assignment:
    """One client's assignment, with its simulated device and whether that drops out of the round."""
    profile = world.profile(client_id)
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
        dropped=dropped,
        selection_probability=cohort.probability,
        selection_reason=cohort.reason_of(client_id),
        train_samples=world.data.size(client_id, "train"),
        expected_macs=expected_macs,
    )


def for_server(stage: str, round_: int, task: Task, *, reads_test: bool = False) -> Assignment:
    """An assignment of the server, on its own data."""
    return Assignment(stage, round_, None, SERVER, task, reads_test=reads_test)


# -- federated training -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """A training round after client selection, the input for assigning tasks.

    Attributes:
        stage: the stage's name; random streams depend on it and on `index`.
        index: the round, from 0.
        state: the state before the round.
        client_ids: the round's clients in plan order: by tier, then by id.
        local: the clients' local training in this round: the hyper-parameters of its SGD, and its local rule.
        rules: selection, local rule, weighting and server rule of the stage.
        scored: whether clients score their models on validation data after training, if their task supports it.
    """

    world: World
    stage: str
    index: int
    state: RunState
    client_ids: tuple[int, ...]
    local: LocalSGD
    rules: Rules
    scored: bool


@dataclass(frozen=True)
class RoundTasks:
    """One task per client of a round in plan order, and the schedules' values for the round's row."""

    tasks: Sequence[Task]
    schedules: Mapping[str, float] = field(default_factory=dict)


TasksOfRound = Callable[[Round], RoundTasks]
"""What the clients of a round do."""

Initial = Callable[[RunState], Weights | None]
"""Returns a stage's initial weights; None skips the stage because there is nothing to train."""


def fresh_supernet(world: World) -> Initial:
    """Random initial weights of the space's supernet."""
    return from_generator(world, world.space.initial_weights, SUPERNET)


def from_generator(world: World, draw: Callable[[torch.Generator], Weights], *places: str) -> Initial:
    """Weights drawn from the run's initialisation stream for these ids."""
    seed = world.config.seed_for("initialisation")
    return lambda _state: draw(torch_stream(seed, *places))


def to_all(make: Callable[[Round], Task]) -> TasksOfRound:
    """Assigns the same task to every client of the round."""

    def give(round_: Round) -> RoundTasks:
        return RoundTasks([make(round_)] * len(round_.client_ids))

    return give


def as_asked(task: Task, cohort: Cohort, client_id: int) -> Task:
    """The client's task with what the selection rule asks of this client; ValueError if it cannot be asked for that."""
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
    from fedloom.platform.averaging.sparsify import with_share  # what hardly any rule needs

    return replace(task, local=local, processors=with_share(task.processors, share))


@dataclass(eq=False)
class TrainingStage(Stage):
    """Federated rounds over one tensor group: select clients, send slices, train, average, evaluate.

    Attributes:
        rules: selection, local rule, weighting and server rule, as configured (`rules_of`).
        initial: the initial weights of the tensor group.
        tasks: what the round's clients do.
        group: the name of the tensor group.
        eligible: ids of the clients that may be selected; by default all.
        score: the server's tasks that score the current weights every `evaluate_every` rounds and after the last.
        beside: further tasks of the server in a round, in parallel to the clients.
        after: the method's update of the state after averaging, given the round's plan and result.
        keep: the models that are stored when the stage ends.
        macs: MACs of a sample's forward pass that clients are expected to train; by default the space's middle.
        parameters: the names of the tensor group's trained tensors; by default the space's parameters.
        tier: the tier whose model is trained, for rows of `evaluations`.
        data: JSON values added to the initial state.
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
    score: Callable[[RunState], Sequence[Task]] = lambda _state: ()
    beside: Callable[[RunState], Sequence[Task]] = lambda _state: ()
    after: Callable[[RunState, Plan, RoundResult], RunState] = lambda state, _plan, _result: state
    keep: Callable[[RunState], Sequence[KeptModel]] = lambda _state: ()
    macs: Callable[[RunState], float] | None = None
    parameters: frozenset[str] | None = None
    tier: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.augment = checked_augmentation(self.world, self.config)
        self.local_rule = local_rule(self.rules.local)
        self.population = self.world.everyone if self.eligible is None else self.eligible
        self.server_group = f"server-{self.group}"
        self.warnings = RoundWarnings(self.world, self.name)
        self.processing = Processing(self.world, self.config, self.rules, self.name, self.population)
        if len(self.population):
            self._cohort(RunState(data={HISTORY: {}}))  # raises for wrong options before the run begins

    def begin(self, state: RunState) -> RunState:
        """Adds the initial weights, the local rule's shared tensors, and an empty history."""
        weights = self.initial(state)
        if weights is None:
            return state
        self.processing.begin(state.data)
        if self.rules.aggregator.name != MEAN:
            clients = min(cohort_size(self.config, len(self.population)), len(self.population))
            logger.warning(
                "%s: aggregator %s keeps every update of a round in the server's memory, up to %d times %.1f MB",
                *(self.name, self.rules.aggregator.name, clients, bytes_of(weights) / 1e6),
            )
        shared = {name: torch.zeros_like(weights[source]) for name, source in self._shared(weights).items()}
        begun = state.with_group(self.group, {**weights, **shared})
        for name, value in {**self.data, **({HISTORY: {}} if self._keeps_history else {})}.items():
            begun = begun.with_data(name, value)
        return begun

    def rounds_left(self, state: RunState) -> int:
        """The remaining rounds; 0 without weights or without an eligible client."""
        possible = self.group in state.groups and len(self.population) > 0
        return self.config.rounds - state.round if possible else 0

    def plan(self, state: RunState) -> Plan:
        """Selects the cohort and assigns the clients' and the server's tasks."""
        world, config, index = self.world, self.config, state.round
        cohort = self._cohort(state)
        ordered = world.in_plan_order(cohort.client_ids)
        due = self._is_due(index)
        scored = due or (config.evaluate_every > 0 and self._is_last(index))
        local = self._local_sgd(index)
        given = self.tasks(Round(world, self.name, index, state, ordered, local, self.rules, scored))
        tasks: Sequence[Task] = [as_asked(t, cohort, c) for c, t in zip(ordered, given.tasks, strict=True)]
        context = self._processing_context(state)
        tasks, processors = self.processing.begun(context, tasks, ordered)
        per_sample = config.epochs * TRAINING_FACTOR * self._macs(state)
        assignments = [
            for_client(world, self.name, index, cohort, c, task, world.data.size(c, "train") * per_sample)
            for c, task in zip(ordered, tasks, strict=True)
        ]
        beside = [*self.beside(state), *(self.score(state) if due else ())]
        assignments += [for_server(self.name, index, task) for task in beside]
        schedules = {"lr": local.lr, **given.schedules, **self.processing.schedules(context)}
        from fedloom.platform.federation.stacking import clients_per_stack  # what only runs need

        stack = clients_per_stack(world, tasks, local.batch_size)
        memory = cohort.memory or None
        keeps = self.rules.aggregator.name != MEAN
        return Plan(
            assignments, self.group, schedules, None, stack, memory=memory, processors=processors, keeps_updates=keeps
        )

    def merge(self, state: RunState, plan: Plan, result: RoundResult) -> RoundUpdate:
        """Averages the updates and applies the server rule, the history and the method's `after`.

        Raises ValueError if clients have trained and all weights of all updates are 0.
        """
        if result.sums.weigh_nothing and any(r.samples for r in result.client_results if r.status == "ok"):
            raise ValueError(
                f"all weights of all {result.sums.updates} updates are 0, so that the round trains nothing: weighting "
                f"rule {self.rules.weighting.name!r} must weigh what is trained above 0"
            )
        shared, tasks_of = self._shared(state.weights(self.group)), partial(self._tasks_anew, state)
        context, results = self._processing_context(state), result.client_results
        sums = result.sums
        if isinstance(sums, KeptUpdates):
            sums = replace(sums, rule=self.rules.aggregator)
        averaged = self.processing.averaged(context, plan.processors, sums, results, shared, tasks_of)
        after = self._served(state, plan, averaged)
        for name, value in self.processing.recorded(context).items():
            after = after.with_data(name, value)
        if self._keeps_history:
            history = recorded(state.data[HISTORY], state.round, result.client_results)
            after = after.with_data(HISTORY, history)
        if plan.memory is not None:
            after = after.with_data(MEMORY, dict(plan.memory))
        after = self.after(self.warnings.looked_at(after, result.client_results), plan, result)
        return RoundUpdate(
            after, evaluation_rows(result.client_results, self.tier), evaluation=self._last_scores(after)
        )

    def end(self, state: RunState) -> RoundUpdate:
        """Removes everything of the stage but its weights, and returns the models to be stored.

        Raises ValueError if no update has ever arrived and no stage has trained before: all weights are the initial
        ones. After others, whose results are worth having, it is a warning.
        """
        if self.group not in state.groups:
            return RoundUpdate(state)
        self.warnings.check_trained(state)
        weights = state.weights(self.group)
        # A local rule's client state belongs to these weights, and the next stage may train others.
        ended = state.without_groups(self.server_group).without_client_tensors(STATE)
        ended = ended.without_data(HISTORY, MEMORY, UNANSWERED)
        shared = self._shared(weights)
        if shared:
            ended = ended.with_group(self.group, {name: t for name, t in weights.items() if name not in shared})
        return RoundUpdate(ended, models=self.keep(ended))

    # -- parts of a round -------------------------------------------------------------------------------------------

    def _cohort(self, state: RunState) -> Cohort:
        size, rule = cohort_size(self.config, len(self.population)), self.rules.selection
        if self.config.clients_per_round is None and rule == ComponentSpec("uniform"):
            rule = ComponentSpec("all")
        history = unpacked(state.data[HISTORY]) if self._keeps_history else {}
        memory, epochs = state.data.get(MEMORY, {}), self.config.epochs
        return choose_cohort(self.world, self.name, state.round, self.population, size, rule, history, memory, epochs)

    @property
    def _keeps_history(self) -> bool:
        return selection_traits(self.rules.selection.name).needs_history

    def _processing_context(self, state: RunState) -> ServerContext:
        return self.processing.context(state.round, state.weights(self.group), state.data)

    def _local_sgd(self, index: int) -> LocalSGD:
        balanced = self.world.config.data.balanced_classes
        return local_sgd(self.config, index, self.augment, balanced=balanced, rule=self.rules.local)

    def _tasks_anew(self, state: RunState, index: int, client_ids: tuple[int, ...]) -> Sequence[Task]:
        """The tasks of a simulated cohort, which differ from those of any round, and depend on none before it."""
        start, local = replace(state, data={**state.data, **self.data}), self._local_sgd(0)
        about = f"{self.name}/expected"
        return self.tasks(Round(self.world, about, index, start, client_ids, local, self.rules, False)).tasks

    def _parameters(self, weights: Weights) -> list[str]:
        known = self.world.space.parameter_names if self.parameters is None else self.parameters
        return [name for name in weights if name in known]

    def _shared(self, weights: Weights) -> dict[str, str]:
        """The names of the tensors that the local rule shares, and of the parameters to which they belong."""
        parameters = self._parameters(weights) if self.local_rule.shared else []
        return {place_of(slot, name): name for slot in self.local_rule.shared for name in parameters}

    def _served(self, state: RunState, plan: Plan, averaged: Averaged) -> RunState:
        """The state with the server rule's new weights; without one they are the average."""
        rules: dict[str, tuple[str, ServerRule]] = {}
        if self.rules.server.name != "replace":
            rule = SERVER_RULES.make(self.rules.server)
            rules = dict.fromkeys(self._parameters(averaged.weights), (self.rules.server.name, rule))
        rules |= dict.fromkeys(self._shared(averaged.weights), (self.rules.local.name, self.local_rule.merge))
        if not rules:
            return state.with_group(self.group, averaged.weights)
        cohort = sum(a.client_id is not None for a in plan.assignments)
        about = ServerRound(state.round, cohort, len(self.population))
        before = state.weights(self.server_group) if self.server_group in state.groups else {}
        weights, server_state = serve(rules, state.weights(self.group), averaged, before, about)
        served = state.with_group(self.group, weights)
        return served.with_group(self.server_group, server_state) if server_state else served

    def _is_due(self, index: int) -> bool:
        return self.config.evaluate_every > 0 and index % self.config.evaluate_every == 0

    def _is_last(self, index: int) -> bool:
        return index == self.config.rounds - 1

    def _last_scores(self, after: RunState) -> PostRoundEvaluation | None:
        """Scores the new weights after the last round, because no later round does."""
        tasks = self.score(after) if self.config.evaluate_every and self._is_last(after.round) else ()
        if not tasks:
            return None
        plan = Plan([for_server(self.name, after.round, task) for task in tasks], self.group)

        def rows(result: RoundResult) -> list[Row]:
            scores = evaluation_rows(result.client_results, self.tier)
            return [(table, {**row, "round": after.round + 1}) for table, row in scores]

        return PostRoundEvaluation(plan, rows)

    # -- the time left ----------------------------------------------------------------------------------------------

    @property
    def trains(self) -> bool:
        return True

    def macs_left(self, state: RunState) -> float:
        """Those of training the remaining rounds' clients."""
        return (self.config.rounds - state.round) * self._samples_of_a_round * TRAINING_FACTOR * self._macs(state)

    def _macs(self, state: RunState) -> float:
        """MACs of a sample's forward pass through a network of the stage, as far as they are known."""
        return expected_macs(self.world) if self.macs is None else self.macs(state)

    @cached_property
    def _samples_of_a_round(self) -> float:
        """The number of samples that pass through a round's clients, on average."""
        if not len(self.population):
            return 0.0
        clients = min(cohort_size(self.config, len(self.population)), len(self.population))
        return clients * self.config.epochs * float(self.world.data.sizes("train")[self.population].mean())
