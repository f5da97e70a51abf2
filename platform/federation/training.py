"""The federated training stage: select clients, assign tasks, average updates, apply the server rule.

Methods differ in its slots: the initial weights, the selection rule, the clients' tasks with their local rule and
weighting, the server rule, and the method's own processing of a round.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedloom.platform.averaging.server import SERVER_RULES, ServerRound, ServerRule, serve
from fedloom.platform.clients.assignments import AccountableTask
from fedloom.platform.clients.local_rules import STATE, local_rule, place_of
from fedloom.platform.clients.trainer import Train
from fedloom.platform.federation.history import packed, unpacked, with_results
from fedloom.platform.federation.planning import (
    TRAINING,
    assign,
    choose_cohort,
    expected_macs,
    for_server,
    in_plan_order,
)
from fedloom.platform.federation.selection import selection_traits
from fedloom.platform.federation.stage import (
    KeptModel,
    Plan,
    PostRoundEvaluation,
    RoundResult,
    RoundUpdate,
    Stage,
    evaluation_rows,
)
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.training_config import (
    SPENT,
    Rules,
    TrainingConfig,
    checked_augmentation,
    cohort_size,
    learning_rate,
    local_sgd,
)
from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.slices import Weights

if TYPE_CHECKING:
    from fedloom.platform.averaging.average import Averaged
    from fedloom.platform.clients.assignments import Task
    from fedloom.platform.clients.training import LocalSGD
    from fedloom.platform.federation.privacy import PrivateRounds
    from fedloom.platform.federation.selection import Cohort
    from fedloom.platform.federation.world import World

logger = logging.getLogger(__name__)

SUPERNET = "supernet"
"""The bag that holds the shared weights of a supernet."""

HISTORY = "history"
"""The JSON value that holds the history of the current stage's clients."""
MEMORY = "selection"
"""The JSON value that holds what the current stage's selection rule has left to itself."""

UNANSWERED = "unanswered"
"""The JSON value that counts the rounds of the current stage in which no update arrived."""

SETTLED, CHANCES, FAR = 5, 1.5, 0.4
"""Rounds after which a model is expected to know more than 1.5 times chance, if its clients' are better by .4."""


@dataclass(frozen=True)
class Round:
    """A training round after client selection, the input for assigning tasks.

    Attributes:
        stage: the stage's name; random streams depend on it and on `index`.
        index: the round, from 0.
        state: the state before the round.
        client_ids: the round's clients in plan order: by tier, then by id.
        local: the clients' SGD in this round.
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
class Tasks:
    """One task per client of a round in plan order, and the schedules' values for the round's row."""

    tasks: Sequence[Task]
    schedules: Mapping[str, float] = field(default_factory=dict)


Assign = Callable[[Round], Tasks]
"""Assigns tasks to the round's clients."""

Initial = Callable[[RunState], Weights | None]
"""Returns a stage's initial weights; None skips the stage because there is nothing to train."""


def fresh_supernet(world: World) -> Initial:
    """Random initial weights of the space's supernet."""
    return from_generator(world, world.space.initial_weights, SUPERNET)


def from_generator(world: World, draw: Callable[[torch.Generator], Weights], *places: str) -> Initial:
    """Weights drawn from the run's initialisation stream for these ids."""
    seed = world.config.seed_for("initialisation")
    return lambda _state: draw(torch_stream(seed, *places))


def to_all(make: Callable[[Round], Task]) -> Assign:
    """Assigns the same task to every client of the round."""

    def give(round_: Round) -> Tasks:
        return Tasks([make(round_)] * len(round_.client_ids))

    return give


def as_asked(task: Task, cohort: Cohort, client_id: int) -> Task:
    """The client's task with what the selection rule asks of this client; ValueError if it cannot be asked for that."""
    epochs, sends = cohort.epochs.get(client_id), cohort.sends.get(client_id)
    if epochs is None and sends is None:
        return task
    if not isinstance(task, Train):
        raise ValueError(
            f"selection rule {cohort.reason} gives clients epochs or shares of their own, which this method's clients "
            "do not take: choose another selection rule"
        )
    local = task.local if epochs is None else replace(task.local, epochs=epochs)
    return replace(task, local=local, sends=task.sends if sends is None else sends)


@dataclass(frozen=True)
class Slots:
    """The parts of a training stage that a method provides.

    Attributes:
        initial: the initial weights of the bag.
        assign: assigns tasks to the round's clients.
        eligible: ids of the clients that may be selected; by default all.
        score: the server's tasks that score the current weights every `evaluate_every` rounds and after the last.
        beside: further tasks of the server in a round, in parallel to the clients.
        after: the method's update of the state after averaging, given the round's plan and result.
        keep: the models that are stored when the stage ends.
        macs: MACs of a sample's forward pass that clients are expected to train; by default the space's middle.
        parameters: the names of the bag's trained tensors; by default the space's parameters.
        tier: the tier whose model is trained, for rows of `evaluations`.
        data: JSON values added to the initial state.
    """

    initial: Initial
    assign: Assign
    eligible: np.ndarray | None = None
    score: Callable[[RunState], Sequence[Task]] = lambda _state: ()
    beside: Callable[[RunState], Sequence[Task]] = lambda _state: ()
    after: Callable[[RunState, Plan, RoundResult], RunState] = lambda state, _plan, _result: state
    keep: Callable[[RunState], Sequence[KeptModel]] = lambda _state: ()
    macs: Callable[[RunState], float] | None = None
    parameters: frozenset[str] | None = None
    tier: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


class TrainingStage(Stage):
    """Trains one bag of weights with federated rounds."""

    def __init__(
        self, world: World, config: TrainingConfig, rules: Rules, slots: Slots, *, name: str, bag: str = SUPERNET
    ) -> None:
        """`rules` are the configured ones (`rules_of`); `name` is the stage's name, `bag` the name of its weights."""
        self.world, self.config, self.slots, self.name, self.bag = world, config, slots, name, bag
        self.rules = rules
        self.augment = checked_augmentation(world, config)
        self.local_rule = local_rule(self.rules.local)
        self.eligible = world.everyone if slots.eligible is None else slots.eligible
        self._has_compared = False
        self.private = self._privacy()
        if len(self.eligible):
            self._cohort(RunState(data={HISTORY: {}}))  # raises for wrong options before the run begins
        self.server_bag = f"server-{bag}"

    def _privacy(self) -> PrivateRounds | None:
        privacy = self.config.privacy
        if privacy.clip is None and not privacy.secure and not privacy.noise:
            return None
        from fedloom.platform.federation.privacy import PrivateRounds  # what only private runs need

        return PrivateRounds(self.world, self.config, self.rules, self.name, self.eligible)

    # -- the weights ------------------------------------------------------------------------------------------------

    def begin(self, state: RunState) -> RunState:
        """Adds the initial weights, the local rule's shared tensors, and an empty history."""
        weights = self.slots.initial(state)
        if weights is None:
            return state
        if SPENT in state.data and (self.private is None or not self.private.clips) and self.config.rounds:
            logger.warning("%s trains without differential privacy after stages with it: its model has none", self.name)
        shared = {
            place_of(slot, name): torch.zeros_like(weights[name])
            for slot in self.local_rule.shared
            for name in self._parameters(weights)
        }
        begun = state.with_bag(self.bag, {**weights, **shared})
        for name, value in {**self.slots.data, **({HISTORY: {}} if self._keeps_history else {})}.items():
            begun = begun.with_data(name, value)
        return begun

    def _parameters(self, weights: Weights) -> list[str]:
        known = self.world.space.parameter_names if self.slots.parameters is None else self.slots.parameters
        return [name for name in weights if name in known]

    @property
    def _keeps_history(self) -> bool:
        return selection_traits(self.rules.selection.name).needs_history

    @property
    def trains(self) -> bool:
        return True

    def rounds_left(self, state: RunState) -> int:
        """The remaining rounds; 0 without weights or without an eligible client."""
        possible = self.bag in state.bags and len(self.eligible) > 0
        return self.config.rounds - state.round if possible else 0

    def macs_left(self, state: RunState) -> float:
        """Those of training the remaining rounds' clients."""
        return (self.config.rounds - state.round) * self._samples_of_a_round * TRAINING * self._macs(state)

    def _macs(self, state: RunState) -> float:
        """MACs of a sample's forward pass through a network of the stage, as far as they are known."""
        return expected_macs(self.world) if self.slots.macs is None else self.slots.macs(state)

    @cached_property
    def _samples_of_a_round(self) -> float:
        """The number of samples that pass through a round's clients, on average."""
        if not len(self.eligible):
            return 0.0
        clients = min(cohort_size(self.config, len(self.eligible)), len(self.eligible))
        return clients * self.config.epochs * float(self.world.data.sizes("train")[self.eligible].mean())

    @property
    def countable(self) -> bool:
        """Whether it starts from fresh weights and its clients' tasks can count their costs."""
        try:
            state = self.begin(RunState())
        except KeyError:  # it starts from the result of an earlier stage
            return False
        if self.rounds_left(state) <= 0:
            return False
        assignments = self.plan(state).assignments
        return all(isinstance(a.task, AccountableTask) for a in assignments if a.client_id is not None)

    # -- a round ----------------------------------------------------------------------------------------------------

    def plan(self, state: RunState) -> Plan:
        """Selects the cohort and assigns the clients' and the server's tasks."""
        world, index = self.world, state.round
        cohort = self._cohort(state)
        ordered = tuple(in_plan_order(world, cohort.client_ids))
        local = self._local_sgd(index)
        given = self.slots.assign(
            Round(world, self.name, index, state, ordered, local, self.rules, self._is_scored(index))
        )
        tasks: Sequence[Task] = [
            as_asked(task, cohort, client_id) for client_id, task in zip(ordered, given.tasks, strict=True)
        ]
        if self.private is not None:
            tasks = self.private.tasks(tasks, ordered, index)
        per_sample = self.config.epochs * TRAINING * self._macs(state)
        assignments = [
            assign(world, self.name, index, cohort, c, task, world.data.size(c, "train") * per_sample)
            for c, task in zip(ordered, tasks, strict=True)
        ]
        beside = [*self.slots.beside(state), *(self.slots.score(state) if self._is_due(index) else ())]
        assignments += [for_server(self.name, index, task) for task in beside]
        schedules = {"lr": learning_rate(self.config, index), **given.schedules}
        if self.private is not None:
            schedules |= self.private.schedules(state)
        from fedloom.platform.federation.stacking import clients_per_stack  # what only runs need

        stack = clients_per_stack(world, tasks, local.batch_size)
        return Plan(assignments, self.bag, schedules, stack=stack, memory=cohort.memory or None)

    def _local_sgd(self, index: int) -> LocalSGD:
        return local_sgd(self.config, index, self.augment, balanced=self.world.config.data.balanced_classes)

    def _tasks_anew(self, state: RunState, index: int, client_ids: tuple[int, ...]) -> Sequence[Task]:
        """The tasks of a simulated cohort, which differ from those of any round, and depend on none before it."""
        start, local = replace(state, data={**state.data, **self.slots.data}), self._local_sgd(0)
        about = f"{self.name}/expected"
        return self.slots.assign(Round(self.world, about, index, start, client_ids, local, self.rules, False)).tasks

    def _cohort(self, state: RunState) -> Cohort:
        size = cohort_size(self.config, len(self.eligible))
        rule = self.rules.selection
        if self.config.clients_per_round is None and rule == ComponentSpec("uniform"):
            rule = ComponentSpec("all")
        history = unpacked(state.data[HISTORY]) if self._keeps_history else {}
        memory, epochs = state.data.get(MEMORY, {}), self.config.epochs
        return choose_cohort(self.world, self.name, state.round, self.eligible, size, rule, history, memory, epochs)

    def _is_due(self, index: int) -> bool:
        return self.config.evaluate_every > 0 and index % self.config.evaluate_every == 0

    def _is_last(self, index: int) -> bool:
        return index == self.config.rounds - 1

    def _is_scored(self, index: int) -> bool:
        return self._is_due(index) or (self.config.evaluate_every > 0 and self._is_last(index))

    def merge(self, state: RunState, plan: Plan, result: RoundResult) -> RoundUpdate:
        """Averages the updates and applies the server rule, the history and the method's `after`.

        Raises ValueError if clients have trained and all weights of all updates are 0.
        """
        if result.sums.weigh_nothing and any(r.samples for r in result.client_results if r.status == "ok"):
            raise ValueError(
                f"all weights of all {result.sums.updates} updates are 0, so that the round trains nothing: weighting "
                f"rule {self.rules.weighting.name!r} must weigh what is trained above 0"
            )
        weights = state.weights(self.bag)
        own = {place_of(slot, name) for slot in self.local_rule.shared for name in self._parameters(weights)}
        sums, fewest = result.sums, self.config.min_contributors
        if self.private is not None:
            sums, fewest = self.private.opened(state, self.bag, plan, result), self.private.least_contributors
        averaged = sums.finish(weights, fewest, own)
        if self.private is not None:
            averaged = self.private.averaged(state, self.bag, averaged, partial(self._tasks_anew, state))
        after = self._served(state, plan, averaged)
        if self.private is not None:
            after = self.private.recorded(state, after)
        if self._keeps_history:
            history = with_results(unpacked(state.data[HISTORY]), state.round, result.client_results)
            after = after.with_data(HISTORY, packed(history))
        if plan.memory is not None:
            after = after.with_data(MEMORY, dict(plan.memory))
        self._compare_statistics(state.round, result)
        if not any(r.status == "ok" for r in result.client_results if r.client_id is not None):
            after = self._unanswered(after, result)
        rows = evaluation_rows(result.client_results, self.slots.tier)
        after = self.slots.after(after, plan, result)
        return RoundUpdate(after, rows, evaluation=self._post_round(after))

    def _compare_statistics(self, index: int, result: RoundResult) -> None:
        """Warns once if the model is at chance with running statistics while its clients are not with their batches'.

        Clients' data are their own, and theirs alone would explain some of it, but not a model that predicts nothing
        after several rounds.
        """
        if self._has_compared or index < SETTLED or not self.world.space.keeps_statistics:
            return
        own = [(r.metric, r.samples) for r in result.client_results if r.client_id is not None and r.metric is not None]
        scores = [
            m for r in result.client_results if r.client_id is None for m in r.measurements if m.metric == "accuracy"
        ]
        samples = sum(n for _, n in own)
        if not scores or not samples:
            return
        training = sum(accuracy * n for accuracy, n in own) / samples
        validation = sum(m.value for m in scores) / len(scores)
        if validation < CHANCES / self.world.config.space.num_classes and training > validation + FAR:
            self._has_compared = True
            logger.warning(
                "%s, round %d: the clients' accuracy is %.2f, of their own networks on their own batches and with "
                "their statistics, that of the model with running statistics on validation data %.2f: the running "
                "statistics of its batch norms do not fit the clients' data; use a space without them, such as by "
                "space.norm, or less skewed data",
                *(self.name, index + 1, training, validation),
            )

    def _unanswered(self, after: RunState, result: RoundResult) -> RunState:
        """Warns of a round in which no update arrived, and counts it."""
        fates = Counter(r.status for r in result.client_results if r.client_id is not None)
        why = ", ".join(f"{count} {fate}" for fate, count in sorted(fates.items())) or "none was available"
        rounds = after.data.get(UNANSWERED, 0) + 1
        logger.warning(
            "%s, round %d: no update arrived (%s), so nothing was trained; %d such rounds so far",
            *(self.name, after.round + 1, why, rounds),
        )
        return after.with_data(UNANSWERED, rounds)

    def _served(self, state: RunState, plan: Plan, averaged: Averaged) -> RunState:
        rules = self._server_rules(averaged.weights)
        if not rules:
            return state.with_bag(self.bag, averaged.weights)
        cohort = sum(a.client_id is not None for a in plan.assignments)
        about = ServerRound(state.round, cohort, len(self.eligible))
        kept = state.weights(self.server_bag) if self.server_bag in state.bags else {}
        weights, kept = serve(rules, state.weights(self.bag), averaged, kept, about)
        served = state.with_bag(self.bag, weights)
        return served.with_bag(self.server_bag, kept) if kept else served

    def _server_rules(self, weights: Weights) -> dict[str, tuple[str, ServerRule]]:
        """The server rule per tensor; tensors without an entry are averaged."""
        found: dict[str, tuple[str, ServerRule]] = {}
        if self.rules.server.name != "replace":
            rule = SERVER_RULES.make(self.rules.server)
            found = dict.fromkeys(self._parameters(weights), (self.rules.server.name, rule))
        for slot in self.local_rule.shared:
            merge = (self.rules.local.name, self.local_rule.merge)
            found |= {place: merge for name in self._parameters(weights) if (place := place_of(slot, name)) in weights}
        return found

    def _post_round(self, after: RunState) -> PostRoundEvaluation | None:
        """Scores the new weights after the last round, because no later round does."""
        tasks = self.slots.score(after) if self.config.evaluate_every and self._is_last(after.round) else ()
        if not tasks:
            return None
        done = after.round + 1
        plan = Plan([for_server(self.name, after.round, task) for task in tasks], self.bag)

        def rows(result: RoundResult) -> list[tuple[str, Mapping[str, object]]]:
            found = evaluation_rows(result.client_results, self.slots.tier)
            return [(table, {**row, "round": done}) for table, row in found]

        return PostRoundEvaluation(plan, rows)

    def end(self, state: RunState) -> RoundUpdate:
        """Removes everything of the stage but its weights, and returns the models to be stored.

        Raises ValueError if no update has ever arrived and no stage has trained before: all weights are the initial
        ones. After others, whose results are worth having, it is a warning.
        """
        if self.bag not in state.bags:
            return RoundUpdate(state)
        if 0 < state.round == state.data.get(UNANSWERED, 0):
            untrained = (
                f"no update arrived in any of the {state.round} rounds of {self.name}, so that it trained nothing: the "
                "column error of the table clients says why; against lost or late devices lower devices.dropout, or "
                "raise devices.availability or devices.deadline_s"
            )
            if state.stage == 0:
                raise ValueError(untrained)
            logger.warning(untrained)
        own = tuple(f"{slot}/" for slot in self.local_rule.shared)
        # A local rule's client state belongs to these weights, and the next stage may train others.
        ended = state.without_bags(self.server_bag).without_client_tensors(STATE)
        ended = ended.without_data(HISTORY, MEMORY, UNANSWERED)
        if own:
            weights = {name: t for name, t in state.weights(self.bag).items() if not name.startswith(own)}
            ended = ended.with_bag(self.bag, weights)
        return RoundUpdate(ended, models=self.slots.keep(ended))
