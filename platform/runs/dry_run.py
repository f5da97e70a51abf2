"""Dry runs: a run's rounds with their assignments and costs, without training (`dry_run=true`).

Communication and compute are computed from the assignments, so a dry run's rows equal those of the real run, for
thousands of rounds in seconds. Weights are empty; losses and metrics are missing.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard, cast

from fedloom.platform.clients.assignments import AccountableTask, Assignment, ClientResult
from fedloom.platform.clients.execution import Chunk, ChunkResult, SerialExecutor, SharedWeights
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import Plan, RoundResult, RoundUpdate, RunState, TrainingStage
from fedloom.platform.federation.forecast import macs_left
from fedloom.platform.federation.method import Stage
from fedloom.platform.federation.selection import selection_traits
from fedloom.platform.spaces.slices import TensorGroup, Weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Accounted:
    """A task that is counted instead of executed."""

    task: AccountableTask

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Returns only the costs."""
        del weights
        return self.account(worker, assignment)

    def account(self, worker: Worker, assignment: Assignment) -> ClientResult:
        """The costs."""
        return self.task.account(worker, assignment)


class DryExecutor(SerialExecutor):
    """Counts every assignment in this process instead of executing it."""

    def run(self, chunks: Sequence[Chunk], weights: SharedWeights) -> Iterator[ChunkResult]:
        counted = []
        for chunk in chunks:
            assignments = (replace(a, task=Accounted(cast(AccountableTask, a.task))) for a in chunk.assignments)
            counted.append(replace(chunk, assignments=tuple(assignments)))
        return super().run(counted, weights)


class DryStage(Stage):
    """A stage without weights and without the server's scoring."""

    def __init__(self, stage: TrainingStage) -> None:
        self.stage, self.name = stage, stage.name

    def begin(self, state: RunState) -> RunState:
        """The stage's initial state, with empty tensor groups."""
        begun = self.stage.begin(state)
        return replace(begun, groups={name: TensorGroup({}, group.version) for name, group in begun.groups.items()})

    def rounds_left(self, state: RunState) -> int:
        return self.stage.rounds_left(state)

    def macs_left(self, state: RunState) -> float | None:
        return macs_left(self.stage, state)

    def plan(self, state: RunState) -> Plan:
        """The clients' assignments of the plan, whose updates are empty."""
        plan = self.stage.plan(state)
        clients = [a for a in plan.assignments if a.client_id is not None]
        return replace(plan, assignments=clients, processors=(), keeps_updates=False)

    def merge(self, state: RunState, plan: Plan, result: RoundResult) -> RoundUpdate:
        """The stage's merge without an evaluation."""
        return replace(self.stage.merge(state, plan, result), evaluation=None, judge=None)

    def end(self, state: RunState) -> RoundUpdate:
        """The final state, without models."""
        return RoundUpdate(self.stage.without_its_own(state))


def dry_stages(stages: Sequence[Stage]) -> list[Stage]:
    """The stages whose assignments do not depend on training results: training from fresh weights.

    Raises ValueError if there is none, and for secure sums, which mask weights. Warns of a selection rule that may
    choose by losses, which a dry run does not have.
    """
    dry = [DryStage(stage) for stage in stages if is_countable(stage)]
    if not dry:
        raise ValueError("dry_run=true: this method has no stage that can be counted without training")
    for config, key in ((stage.stage.processing.config, stage.stage.rules.key) for stage in dry):
        if config.privacy.secure:
            raise ValueError(
                f"dry_run=true: {key}.privacy.secure=true masks weights, and there are none: leave one out"
            )
    for rule in dict.fromkeys(stage.stage.rules.selection.name for stage in dry):
        if selection_traits(rule).needs_history:
            logger.warning(
                "dry_run=true: selection=%s may choose by clients' losses, which are not known without training: other "
                "clients take part than in the run",
                rule,
            )
    return [*dry]


def is_countable(stage: Stage) -> TypeGuard[TrainingStage]:
    """Whether a stage starts from fresh weights, and all clients' tasks can count their costs.

    Tasks are those of its first plan; a stage whose later tasks depend on training says so (`TrainingStage.countable`).
    """
    if not isinstance(stage, TrainingStage) or not stage.countable:
        return False
    try:
        state = stage.begin(RunState())
    except KeyError:  # it starts from the result of an earlier stage
        return False
    if stage.rounds_left(state) <= 0:
        return False
    return all(isinstance(a.task, AccountableTask) for a in stage.plan(state).assignments if a.client_id is not None)
