"""The main loop: plans, executes and merges each round, and writes its rows and checkpoint."""

import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from fedloom.platform.averaging.aggregators import KeptUpdates, Sums
from fedloom.platform.averaging.average import Update, WeightedSums
from fedloom.platform.clients.assignments import Assignment, ClientResult, Evaluation
from fedloom.platform.clients.device import DeviceLostError
from fedloom.platform.clients.execution import Chunk, ChunkResult, Executor, SharedWeights, make_chunks
from fedloom.platform.federation.algorithm import (
    CLIENT,
    Plan,
    PostRoundEvaluation,
    PostRoundWork,
    RoundResult,
    RoundUpdate,
    Row,
    RunState,
)
from fedloom.platform.federation.config import CheckpointConfig, ExecutorConfig
from fedloom.platform.federation.forecast import Forecast, Left
from fedloom.platform.federation.method import Stage
from fedloom.platform.federation.recorder import Record, Recorder
from fedloom.platform.federation.stopping import latest_score
from fedloom.platform.plugins import NOT_CAUGHT, answered, in_one_line, place_in_own, raised_by_own
from fedloom.platform.results.status import StatusFile
from fedloom.tiers.devices import VirtualClock

logger = logging.getLogger(__name__)


class RunFailedError(RuntimeError):
    """The run cannot continue: more clients failed than the policy allows, or the server's work failed."""


class InterruptedRunError(RuntimeError):
    """The run was stopped on request; its checkpoint holds every finished round."""


DIVERGED = "the training diverged"
"""How the message of a failed run begins if a resume would fail again."""
_NOT_FINITE = re.compile(r"training loss is (nan|-?inf)|is not finite")
AHEAD_PER_LANE = 4
"""Clients per actor that are trained in one call, including those of later rounds, if rounds have few answers."""
AT_ONCE = "the round in progress was not finished and is lost"
"""The message of a run that a KeyboardInterrupt ended; the exception itself has none."""


@dataclass(frozen=True)
class Validated:
    """A stage's mean accuracy on validation data.

    `rounds` is the number of rounds after which it was measured; None in a stage that trains nothing.
    """

    accuracy: float
    rounds: int | None


@dataclass(frozen=True)
class RoundProgress:
    """A finished round as reported to `watch`, after it is safely on disk.

    `metric` is the clients' accuracy on the split `metric_of` of their data; in training stages it is that of their own
    networks on their training batches during training, which says little about the averaged model.
    `validated` is None unless the stage was scored on validation data. `left_s` and `stage_left_s` estimate the
    remaining seconds of the run and of the stage; None if unknown. `counted` is the plural noun for the stage's rounds.
    `stopped` says why the stage ends before its last round, if it does; `may_end_early` says whether this stage or a
    later one still may, so that the estimates are upper bounds.
    """

    stage: str
    round: int
    rounds_total: int
    loss: float | None
    metric: float | None
    clients_ok: int
    clients_planned: int
    bytes_down: int
    bytes_up: int
    wall_s: float
    metric_of: str = "train"
    validated: Validated | None = None
    left_s: float | None = None
    stage_left_s: float | None = None
    counted: str = "rounds"
    stopped: str | None = None
    may_end_early: bool = False


class Loop:
    """Runs stages over a state until all are done."""

    def __init__(
        self,
        stages: Sequence[Stage],
        executor: Executor,
        recorder: Recorder,
        status: StatusFile,
        *,
        execution: ExecutorConfig,
        checkpoint: CheckpointConfig,
        deadline_s: float | None,
        watch: Callable[[RoundProgress], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
        ending: Callable[[RunState], None] = lambda _: None,
    ) -> None:
        """`ending` is called with the last state of every stage, before any later state is saved."""
        self.stages, self.executor, self.recorder, self.status = stages, executor, recorder, status
        self.execution, self.checkpoint, self.deadline_s = execution, checkpoint, deadline_s
        self.watch, self.should_stop, self.ending = watch, should_stop, ending
        self._unsaved: RunState | None = None
        self._forecast = Forecast(stages)
        self._has_fallen_back = False
        self._left_s = -1.0
        self._ahead = dict[tuple[str, int, int | None], ChunkResult]()

    def run(self, state: RunState) -> RunState:
        """Runs from any state to the end of the last stage; all results are on disk when it returns.

        Raises RunFailedError or InterruptedRunError. In both cases, and on KeyboardInterrupt, the checkpoint then holds
        every finished round.
        """
        try:
            return self._run(state)
        except (RunFailedError, KeyboardInterrupt):
            self._save_unsaved()
            raise

    def _run(self, state: RunState) -> RunState:
        while state.stage < len(self.stages):
            stage = self.stages[state.stage]
            if state.round == 0:
                with stage_work(stage.name, 0):
                    state = answered("the stage's begin", stage.begin(state), RunState)
            while True:
                with stage_work(stage.name, state.round):
                    left = answered("the stage's rounds_left", stage.rounds_left(state), int)
                if left <= 0:
                    break
                state = self._round(stage, state, left)
            with stage_work(stage.name, None):
                ended = answered("the stage's end", stage.end(state), RoundUpdate)
            self._ahead.clear()
            names, first = {"stage": stage.name, "round": state.round}, partial(self.ending, state)
            state = replace(ended.state, stage=state.stage + 1, round=0)
            self.recorder.submit(Record(rows_of(ended, names), [(names, m) for m in ended.models], state, first))
            self._unsaved = None
        self.recorder.wait()
        return state

    def _round(self, stage: Stage, state: RunState, left: int) -> RunState:
        started = time.perf_counter()
        self.status.write(stage=stage.name, round=state.round, rounds_total=state.round + left, left_s=self._left_s)
        with stage_work(stage.name, state.round):
            self._forecast.begins(state)
            plan = checked_plan(answered("the stage's plan", stage.plan(state), Plan), state)
        result = self._execute(plan, state)
        clients = [
            r if a.ended_s is None else replace(r, start_round=a.round, staleness=a.staleness, ended_s=a.ended_s)
            for r, a in zip(result.client_results, plan.assignments, strict=True)
            if r.client_id is not None
        ]
        client_rows: list[Row] = [("clients", r.row(stage.name, state.round)) for r in clients]
        at_work = 0 if plan.answers is None else plan.answers.concurrency
        self._check_failures(stage.name, state.round, result.client_results, client_rows, at_work)
        self._warn_of_fallback(stage.name, state.round, clients)
        with stage_work(stage.name, state.round):
            merged = answered("the stage's merge", stage.merge(state, plan, result), RoundUpdate)
        with_states = merged.state
        for client in clients:
            if client.state is not None:
                with_states = with_states.with_group(f"{CLIENT}{client.client_id}", client.state)
        merged = replace(merged, state=with_states)
        if merged.work is not None:
            merged = self._worked(stage, merged, merged.work)
        if merged.evaluation is not None:
            merged = self._evaluated(stage, merged, merged.evaluation)
        stopped = ""
        if merged.judge is not None:
            with stage_work(stage.name, state.round):
                judged, stopped = merged.judge(merged.state, merged.evaluations)
            merged = replace(merged, state=judged)
        with stage_work(stage.name, state.round):
            times_s = [r.simulated_s for r in clients]
            # A final evaluation waits for all clients: its assignments have no deadline.
            deadline_s = self.deadline_s if any(a.deadline_s is not None for a in plan.assignments) else None
            starts_s = state.simulated_s if plan.starts_s is None else plan.starts_s
            if plan.answers is None:
                clock, simulated_s = VirtualClock(starts_s).after_round(times_s, deadline_s)
                simulated_s += starts_s - state.simulated_s
            else:
                clock = VirtualClock(plan.answers.now_s)
                simulated_s = clock.now_s - state.simulated_s
        row = round_row(stage.name, state.round, clients, plan, time.perf_counter() - started, simulated_s)
        row["stopped"] = stopped or None
        after = replace(merged.state, round=state.round + 1, simulated_s=clock.now_s)
        stop = self.should_stop()
        save = stop or after.round % self.checkpoint.every == 0
        # Until these rows are on disk the previous checkpoint stays: resuming from a later one would duplicate rows.
        self._unsaved = None
        progress, names = self._progress(row, clients, merged, after, left), {"stage": stage.name, "round": state.round}
        rows = [*client_rows, ("rounds", row), *rows_of(merged, names)]
        models = [(names, model) for model in merged.models]
        gpus, then = gpus_of(result.client_results), lambda: self.watch(progress)
        self.recorder.submit(Record(rows, models, after if save else None, then=then, gpus=gpus))
        self._unsaved = None if save else after
        if stop:
            self.recorder.wait()
            raise InterruptedRunError(f"stopped after round {state.round + 1} of {stage.name}")
        return after

    def _warn_of_fallback(self, stage: str, round_: int, clients: Sequence[ClientResult]) -> None:
        """Warns once of clients that were not trained in a stack or compiled as planned; the table names all."""
        alone = [result for result in clients if result.fallback]
        if alone and not self._has_fallen_back:
            self._has_fallen_back = True
            logger.warning(
                "%s, round %d: %d of %d clients were not stacked or not compiled as planned, which is slower and "
                "changes rounding; the first is client %s: %s (all are in the column fallback of clients; to turn both "
                "off, set executor.stack_clients=off and executor.compile=off)",
                *(stage, round_ + 1, len(alone), len(clients), alone[0].client_id, alone[0].fallback),
            )

    def _progress(
        self, row: Mapping[str, Any], clients: Sequence[ClientResult], merged: RoundUpdate, after: RunState, left: int
    ) -> RoundProgress:
        with stage_work(row["stage"], row["round"]):
            self._forecast.finished(after, row["wall_s"])
            to_come = self._forecast.left(0 if row["stopped"] else left - 1)
        to_end = self.stages[after.stage + (left == 1 or row["stopped"] is not None) :]
        if not self._forecast.is_known and to_come.run_s != 0:
            to_come = Left(None, None)
        self._left_s = -1.0 if to_come.run_s is None else to_come.run_s
        return RoundProgress(
            **{f.name: row[f.name] for f in fields(RoundProgress) if f.name in row},
            rounds_total=row["round"] + left,
            metric_of=split_of(clients),
            validated=validated(merged.evaluations, row["round"], trained=any(result.steps for result in clients)),
            left_s=to_come.run_s,
            stage_left_s=to_come.stage_s,
            # A user's stage need not derive from Stage.
            counted=getattr(self.stages[after.stage], "counted", "rounds"),
            may_end_early=any(getattr(s, "may_end_early", False) for s in to_end),
        )

    def _worked(self, stage: Stage, merged: RoundUpdate, work: PostRoundWork) -> RoundUpdate:
        """Executes the server's further work and adds its result to the round's update."""
        result = self._after_round(stage, merged, work.plan)
        with stage_work(stage.name, merged.state.round):
            more = answered("the stage's merge", work.merge(merged.state, result), RoundUpdate)
        return replace(
            more,
            rows=[*merged.rows, *more.rows],
            models=[*merged.models, *more.models],
            evaluation=more.evaluation or merged.evaluation,
            evaluations=[*merged.evaluations, *more.evaluations],
            judge=merged.judge,
        )

    def _evaluated(self, stage: Stage, merged: RoundUpdate, evaluation: PostRoundEvaluation) -> RoundUpdate:
        """Executes the round's evaluation and adds its measurements to the round's update."""
        result = self._after_round(stage, merged, evaluation.plan)
        with stage_work(stage.name, merged.state.round):
            return replace(merged, evaluations=[*merged.evaluations, *evaluation.evaluations(result)])

    def _after_round(self, stage: Stage, merged: RoundUpdate, planned: Plan) -> RoundResult:
        """Executes a plan on a round's new state and returns its results."""
        with stage_work(stage.name, merged.state.round):
            plan = checked_plan(planned, merged.state)
        result = self._execute(plan, merged.state)
        self._check_failures(stage.name, merged.state.round, result.client_results, ())
        return result

    def _save_unsaved(self) -> None:
        """Checkpoints the last finished round if it has not been saved yet because of `checkpoint.every`."""
        if self._unsaved is not None:
            self.recorder.submit(Record((), (), self._unsaved))
            self.recorder.wait()
            self._unsaved = None

    def _execute(self, plan: Plan, state: RunState) -> RoundResult:
        failures = self.execution.failures
        attempts = failures.attempts if failures.policy == "retry" else 1
        size = plan.chunk_size or self.execution.chunk_size
        assignments = _with_states(plan.assignments, state)
        try:
            if plan.answers is not None and plan.answers.counted is not None:
                return self._answered(replace(plan, assignments=assignments), state, attempts, plan.answers.counted)
            chunks = make_chunks(assignments, size, attempts, plan.stack, plan.keeps_updates)
            results = self.executor.run(*_reading(chunks, plan, state))
            self.recorder.start()
            together = self.execution.sum_chunks or 1
            return merge_chunks(results, self.status.beat, keeps_updates=plan.keeps_updates, together=together)
        except DeviceLostError as error:
            raise RunFailedError(
                f"the device of this process fails ({error}): resume the run in a new process"
            ) from error

    def _answered(
        self, plan: Plan, state: RunState, attempts: int, counted: Callable[[Assignment, Update], Update]
    ) -> RoundResult:
        """`_execute` for answers that start from the weights of several rounds; each answer is its own chunk.

        With several actors, work of later rounds is executed ahead; its result is the same as in its own round.
        """
        assert plan.answers is not None, "it has answers"
        for a in plan.assignments:
            if a.ignored is not None:
                self._ahead.pop(_work(a), None)  # executed ahead in vain
        todo = [a for a in plan.assignments if a.client_id is None or _work(a) not in self._ahead]
        ahead = [a for a in _with_states(plan.answers.ahead, state) if _work(a) not in self._ahead]
        lanes = self.executor.lanes
        most = max(0, AHEAD_PER_LANE * lanes - len(todo) - len(self._ahead))
        more = ahead[:most] if todo and lanes > 1 else []
        chunks = [chunk for a in (*todo, *more) for chunk in make_chunks([a], 1, attempts, keeps_updates=True)]
        results = iter(self.executor.run(*_reading(chunks, plan, state)))
        self.recorder.start()
        sums: Sums = KeptUpdates() if plan.keeps_updates else WeightedSums()
        client_results = list[ClientResult]()
        for a in plan.assignments:
            known = None if a.client_id is None else self._ahead.pop(_work(a), None)
            result = next(results) if known is None else known
            self.status.beat()
            client_results += result.client_results
            for update in result.sums.kept if isinstance(result.sums, KeptUpdates) else ():
                with stage_work(a.stage, state.round):
                    sums.add(counted(a, update))
        self._ahead |= {_work(a): result for a, result in zip(more, results, strict=True)}
        return RoundResult(sums, client_results)

    def _check_failures(
        self, stage: str, round_: int, results: Sequence[ClientResult], rows: Sequence[Row], at_work: int = 0
    ) -> None:
        """Raises RunFailedError if the server's work failed or too many clients, of the round's or of `at_work`."""
        failed = [r for r in results if counts_as_failed(r)]
        if not failed:
            return
        clients = [r for r in results if r.client_id is not None]
        server = next((r for r in failed if r.client_id is None), None)
        policy = self.execution.failures
        tolerated = policy.max_share * max(len(clients), at_work) if policy.policy == "tolerate" else 0
        if server is None and len(failed) <= tolerated:
            return
        # The checkpoint comes first, because it covers all rows written before it.
        self._save_unsaved()
        # The failed round's rows are written for inspection; a resumed run replaces them.
        self.recorder.submit(Record(rows, gpus=gpus_of(results)))
        self.recorder.wait()
        if server is not None:
            raise RunFailedError(f"{stage}, round {round_ + 1}: the server's own work failed: {server.error}")
        first = failed[0]
        if all(result.error and _NOT_FINITE.search(result.error) for result in failed):
            raise RunFailedError(
                f"{DIVERGED} in {stage}, round {round_ + 1}: loss or weights of {len(failed)} of {len(clients)} "
                "clients are not finite, and would be again after a resume: start a new run with a lower learning rate "
                "(lr), or with clipped gradients (clip_norm)"
            )
        limit = f", at most {policy.max_share:.0%}" if policy.policy == "tolerate" else ""
        raise RunFailedError(
            f"{stage}, round {round_ + 1}: client {first.client_id} ({first.tier}) failed: {first.error} "
            f"[{len(failed)} of {len(clients)} clients failed; policy {policy.policy}{limit}; "
            "their rows and tracebacks are in the table clients]"
        )


@contextmanager
def stage_work(stage: str, round_: int | None) -> Iterator[None]:
    """Turns errors of a stage and of a user's code into a RunFailedError; other errors are fedloom's own bugs.

    `round_` counts from 0; None is the stage's end.
    """
    where = f"{stage}, at its end" if round_ is None else f"{stage}, round {round_ + 1}"
    try:
        yield
    except ValueError as error:
        logger.info("the server's work failed", exc_info=True)
        line = place_in_own(error) if raised_by_own(error) else ""
        raise RunFailedError(f"{where}: {error}{line}") from error
    except NOT_CAUGHT:
        raise
    except BaseException as error:
        if not place_in_own(error):
            raise
        logger.info("the user's own code failed", exc_info=True)
        raise RunFailedError(f"{where}: {in_one_line(error)}") from error


def checked_plan(plan: Plan, state: RunState) -> Plan:
    """Returns the plan; ValueError if it holds anything but assignments, or names a missing tensor group."""
    other = next((a for a in plan.assignments if not isinstance(a, Assignment)), None)
    if other is not None:
        raise ValueError(f"the stage's plan has {other!r:.60} among its assignments: give Assignments")
    if plan.group not in state.groups:
        raise ValueError(
            f"the stage's plan names the tensor group {plan.group!r:.60}; there are {', '.join(state.groups)}"
        )
    return plan


def _with_states(assignments: Sequence[Assignment], state: RunState) -> Sequence[Assignment]:
    """The assignments with the clients' saved states, unless the stage has already set one."""
    if not any(name.startswith(CLIENT) for name in state.groups):
        return assignments
    return [
        replace(a, state=state.client_state(a.client_id)) if a.client_id is not None and a.state is None else a
        for a in assignments
    ]


def _reading(chunks: Sequence[Chunk], plan: Plan, state: RunState) -> tuple[list[Chunk], SharedWeights]:
    """The chunks with the versions of the weights that they read, where these are not the plan's; and all weights."""
    groups = {chunk.assignments[0].reads for chunk in chunks}
    versions = {group: state.version(group) for group in groups if group is not None}
    older = {version: state.weights(group) for group, version in versions.items()}
    read = [replace(chunk, version=versions.get(chunk.assignments[0].reads or "")) for chunk in chunks]
    return read, SharedWeights(state.weights(plan.group), state.version(plan.group), older)


def _work(assignment: Assignment) -> tuple[str, int, int | None]:
    """The key of a client's work, which is unique because a client begins at most once in a round."""
    return assignment.stage, assignment.round, assignment.client_id


def counts_as_failed(result: ClientResult) -> bool:
    """Whether the failure policy counts this client: it failed, or exceeded the real-time limit.

    A client over `executor.client_timeout_s` has no simulated time. A client that only missed the simulated deadline
    has one, and does not count as failed.
    """
    return result.status == "failed" or (result.status == "timed_out" and result.simulated_s == 0.0)


def gpus_of(results: Iterable[ClientResult]) -> frozenset[str]:
    """The GPUs that the work was done on, with their software."""
    return frozenset(r.gpu_software for r in results if r.gpu_software is not None)


def rows_of(merged: RoundUpdate, names: Mapping[str, Any]) -> list[Row]:
    """An update's rows with stage and round added, its evaluations first; NaN becomes None."""
    measured = [{**vars(e), "round": names["round"] if e.round is None else e.round} for e in merged.evaluations]
    rows: list[Row] = [*(("evaluations", row) for row in measured), *merged.rows]
    return [
        (table, {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in {**names, **row}.items()})
        for table, row in rows
    ]


def split_of(clients: Sequence[ClientResult]) -> str:
    """The split that the clients' loss and metric were measured on: `train` if any client trained."""
    if any(result.steps for result in clients):
        return "train"
    splits = (m.split for result in clients for m in result.measurements if m.split)
    return next(splits, "train")


def validated(evaluations: Sequence[Evaluation], round_: int, *, trained: bool = True) -> Validated | None:
    """The mean of the latest accuracies on validation data: the server's if any, otherwise the clients'."""
    score = latest_score(evaluations, round_, "accuracy")
    if score is None or math.isnan(score.value):
        return None
    return Validated(score.value, score.rounds if trained else None)


def merge_chunks(
    results: Iterable[ChunkResult],
    beat: Callable[[], None] = lambda: None,
    *,
    keeps_updates: bool = False,
    together: int = 1,
) -> RoundResult:
    """Adds the chunks' sums in plan order, or collects their updates, and concatenates their results.

    Sums are added within groups of `together` consecutive chunks, then across groups; an executor may already have
    added those of a group.
    """
    sums: Sums = KeptUpdates() if keeps_updates else WeightedSums()
    part = WeightedSums()
    client_results: list[ClientResult] = []
    for number, result in enumerate(results, 1):
        if isinstance(sums, KeptUpdates) and isinstance(result.sums, KeptUpdates):
            sums.merge(result.sums)
        elif isinstance(sums, WeightedSums) and isinstance(result.sums, WeightedSums):
            (sums if together == 1 else part).merge(result.sums)  # a chunk that failed as a whole has empty sums
            if together > 1 and number % together == 0:
                sums.merge(part)
                part = WeightedSums()
        client_results += result.client_results
        beat()
    if isinstance(sums, WeightedSums):
        sums.merge(part)
    return RoundResult(sums, client_results)


def round_row(
    stage: str, round_: int, clients: Sequence[ClientResult], plan: Plan, wall_s: float, simulated_s: float
) -> dict[str, Any]:
    """A round's row of the table `rounds`: sums over its clients, and means weighted by their samples."""
    ok = [r for r in clients if r.status == "ok"]
    return {
        "stage": stage,
        "round": round_,
        "clients_planned": len(clients),
        "clients_ok": len(ok),
        "clients_failed": sum(counts_as_failed(r) for r in clients),
        "loss": _mean([(r.loss, r.samples) for r in ok]),
        "metric": _mean([(r.metric, r.samples) for r in ok]),
        "bytes_down": sum(r.bytes_down for r in clients),
        "bytes_up": sum(r.bytes_up for r in clients),
        "macs": int(sum(r.macs for r in clients)),
        "wall_s": wall_s,
        "simulated_s": simulated_s,
        **{name: plan.schedules.get(name) for name in ("beta", "lr", "epsilon")},
        "schedules": json.dumps(dict(plan.schedules), sort_keys=True),
    }


def _mean(values: Sequence[tuple[float | None, int]]) -> float | None:
    known = [(value, samples) for value, samples in values if value is not None and samples]
    total = sum(samples for _, samples in known)
    return sum(value * samples for value, samples in known) / total if total else None
