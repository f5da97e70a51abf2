"""Dry runs: the rounds of a run with their assignments and figures, without training (`dry_run=true`).

Communication and compute are arithmetic on the assignments, so a dry run's rows hold what the real run's would, over
thousands of rounds in seconds. Weights stay empty; losses and metrics are missing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from fedloom.platform.clients.assignments import Assignment, Outcome
from fedloom.platform.clients.execution import (
    Chunk,
    ChunkResult,
    SerialExecutor,
    SharedWeights,
)
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.stage import Merged, Plan, RoundResult, Stage
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.world import World
from fedloom.platform.results.bag import Bag
from fedloom.platform.spaces.slices import Weights


class AccountableTask(Protocol):
    """A task whose figures are known before it is done."""

    def account(self, worker: Worker, assignment: Assignment) -> Outcome:
        """What `run` would report, without an update, a loss or a metric."""
        ...


@dataclass(frozen=True)
class Accounted:
    """A task that is counted instead of done."""

    task: AccountableTask

    def run(self, worker: Worker, assignment: Assignment, _weights: Weights) -> Outcome:
        """The figures alone."""
        return self.task.account(worker, assignment)


class DryExecutor(SerialExecutor):
    """Counts every assignment in this process."""

    def run(self, chunks: Sequence[Chunk], weights: SharedWeights) -> Iterator[ChunkResult]:
        """See `Executor.run`."""
        return super().run([replace(chunk, assignments=_accounted(chunk.assignments)) for chunk in chunks], weights)


def _accounted(assignments: Sequence[Assignment]) -> tuple[Assignment, ...]:
    return tuple(replace(a, task=Accounted(cast(AccountableTask, a.task))) for a in assignments)


class DryStage(Stage):
    """A stage whose weights are left out, and with them the server's own scoring."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.name = stage, stage.name

    def begin(self, state: RunState) -> RunState:
        """The stage's beginning, with empty bags."""
        begun = self.stage.begin(state)
        return replace(begun, bags={name: Bag({}, bag.version) for name, bag in begun.bags.items()})

    def rounds_left(self, state: RunState) -> int:
        """The stage's own."""
        return self.stage.rounds_left(state)

    def plan(self, state: RunState) -> Plan:
        """The clients' part of the plan."""
        plan = self.stage.plan(state)
        return replace(plan, assignments=[a for a in plan.assignments if a.client_id is not None])

    def merge(self, state: RunState, plan: Plan, result: RoundResult) -> Merged:
        """See `Stage.merge`; nothing is measured afterwards."""
        return replace(self.stage.merge(state, plan, result), review=None)

    def end(self, state: RunState) -> Merged:
        """The state at the end; no models."""
        return Merged(state)


def dry_stages(stages: Sequence[Stage]) -> list[Stage]:
    """The stages whose assignments do not depend on what was learnt before: training from fresh weights.

    Raises ValueError if there is none.
    """
    dry: list[Stage] = [DryStage(stage) for stage in stages if stage.countable]
    if not dry:
        raise ValueError("dry_run=true: this method has no stage that can be counted without training")
    return dry


def dry_executor(world: World) -> DryExecutor:
    """The executor of a dry run, whatever executor is configured."""
    return DryExecutor(Worker(world.spec))
