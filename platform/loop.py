"""The loop that owns the world: plans, executes, merges, writes rows and checkpoints, round by round."""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from fedloom.platform.averaging import WeightedSums
from fedloom.platform.config import CheckpointConfig, ExecutorConfig, FailuresConfig
from fedloom.platform.execution import ChunkResult, Executor, Report, SharedWeights, make_chunks
from fedloom.platform.results.checkpoint import Saved, save_checkpoint
from fedloom.platform.results.models import save_model
from fedloom.platform.results.status import StatusFile
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.stage import KeptModel, Merged, Plan, RoundResult, Stage
from fedloom.platform.state import RunState
from fedloom.tiers.clock import VirtualClock


class RunFailedError(RuntimeError):
    """The run cannot go on: clients failed beyond what the policy allows, or the server's own work failed."""


class InterruptedRunError(RuntimeError):
    """The run was asked to stop; its checkpoint holds every finished round."""


@dataclass(frozen=True)
class RoundProgress:
    """What a watcher is told about a finished round (it is safe on disk by then)."""

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


class Loop:
    """Runs stages over a state until all are done."""

    def __init__(
        self,
        stages: Sequence[Stage],
        executor: Executor,
        writer: RunWriter,
        status: StatusFile,
        *,
        execution: ExecutorConfig,
        checkpoint: CheckpointConfig,
        deadline_s: float | None,
        saved: Saved | None = None,
        watch: Callable[[RoundProgress], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.stages, self.executor, self.writer, self.status = stages, executor, writer, status
        self.execution, self.checkpoint, self.deadline_s = execution, checkpoint, deadline_s
        self.saved = saved
        self.watch, self.should_stop = watch, should_stop

    def run(self, state: RunState) -> RunState:
        """From any state to the end of the last stage."""
        while state.stage < len(self.stages):
            stage = self.stages[state.stage]
            if state.round == 0:
                state = stage.begin(state)
            while left := stage.rounds_left(state):
                state = self._round(stage, state, left)
            ended = stage.end(state)
            self._keep(stage, state.round, ended)
            state = replace(ended.state, stage=state.stage + 1, round=0)
            self._save(state)
        return state

    def _round(self, stage: Stage, state: RunState, left: int) -> RunState:
        started = time.perf_counter()
        self.status.write(stage=stage.name, round=state.round, rounds_total=state.round + left)
        plan = stage.plan(state)
        result = self._execute(plan, state)
        clients = [r for r in result.reports if r.client_id is not None]
        for report in clients:
            self.writer.add("clients", **client_row(stage.name, state.round, report))
        self._check_failures(stage.name, state.round, result.reports)
        merged = stage.merge(state, plan, result)
        times_s = [r.simulated_s for r in clients]
        clock, simulated_s = VirtualClock(state.simulated_s).after_round(times_s, self.deadline_s)
        self._keep(stage, state.round, merged)
        row = round_row(stage.name, state.round, clients, plan, time.perf_counter() - started, simulated_s)
        self.writer.add("rounds", **row)
        after = replace(merged.state, round=state.round + 1, simulated_s=clock.now_s)
        self._save(after)
        self._tell(stage.name, state.round, left, row)
        return after

    def _execute(self, plan: Plan, state: RunState) -> RoundResult:
        failures = self.execution.failures
        attempts = failures.attempts if failures.policy == "retry" else 1
        chunks = make_chunks(plan.assignments, plan.chunk_size or self.execution.chunk_size, attempts)
        weights = SharedWeights(state.weights(plan.bag), state.version(plan.bag))
        return merge_chunks(self.executor.run(chunks, weights), self.status.beat)

    def _check_failures(self, stage: str, round_: int, reports: Sequence[Report]) -> None:
        failed = [r for r in reports if r.status == "failed" or (r.status == "timed_out" and r.simulated_s == 0.0)]
        if not failed:
            return
        clients = [r for r in reports if r.client_id is not None]
        server = next((r for r in failed if r.client_id is None), None)
        if server is None and allowed(self.execution.failures, len(failed), len(clients)):
            return
        self.writer.commit()
        first = server or failed[0]
        who = "the server's own work" if first.client_id is None else f"client {first.client_id} ({first.tier})"
        policy = self.execution.failures
        raise RunFailedError(
            f"{stage}, round {round_}: {who} failed: {first.error} [{len(failed)} of {len(reports)} failed; policy "
            f"{policy.policy}, at most {policy.max_share:.0%}; their rows and tracebacks are in the table clients]"
        )

    def _keep(self, stage: Stage, round_: int, merged: Merged) -> None:
        place = {"stage": stage.name, "round": round_}
        for model in merged.models:
            self.writer.add("models", **place, **self._store(model))
        for table, row in merged.rows:
            self.writer.add(table, **without_nan({**place, **row}))

    def _store(self, model: KeptModel) -> dict[str, Any]:
        card = {
            "tier": model.tier,
            "architecture": model.architecture,
            "macs": int(model.macs),
            "parameters": model.parameters,
        }
        file = save_model(self.writer.paths, model.name, model.tensors, card)
        return {**card, "file": file.file, "hash": file.hash}

    def _save(self, state: RunState) -> None:
        position = self.writer.commit()
        finished = state.stage == len(self.stages)
        if state.round % self.checkpoint.every and not finished:
            return
        data = {
            "stage": state.stage,
            "round": state.round,
            "simulated_s": state.simulated_s,
            "data": state.data,
            "position": position,
        }
        self.saved = save_checkpoint(self.writer.paths.checkpoint, state.bags, data, self.saved)

    def _tell(self, stage: str, round_: int, left: int, row: dict[str, Any]) -> None:
        names = ("loss", "metric", "clients_ok", "clients_planned", "bytes_down", "bytes_up", "wall_s")
        values = {name: row.get(name) for name in names}
        self.watch(RoundProgress(stage=stage, round=round_, rounds_total=round_ + left, **values))  # type: ignore[arg-type]
        if self.should_stop():
            raise InterruptedRunError(f"stopped after round {round_} of {stage}")


def restored_state(checkpoint_data: dict[str, Any], bags: dict[str, Any]) -> RunState:
    """The state that `Loop` saved."""
    names = ("stage", "round", "simulated_s", "data")
    return RunState(bags=bags, **{name: checkpoint_data[name] for name in names})


def merge_chunks(results: Iterable[ChunkResult], beat: Callable[[], None] = lambda: None) -> RoundResult:
    """Adds the chunks' sums in plan order and puts their reports one after the other."""
    sums = WeightedSums()
    reports: list[Report] = []
    for result in results:
        sums.merge(result.sums)
        reports += result.reports
        beat()
    return RoundResult(sums, reports)


def allowed(failures: FailuresConfig, failed: int, planned: int) -> bool:
    """Whether a round with this many failed clients counts."""
    return failures.policy != "stop" and failed <= failures.max_share * planned


def without_nan(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with undefined numbers as missing values."""
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}


def client_row(stage: str, round_: int, report: Report) -> dict[str, Any]:
    """A planned client's one row of the table `clients`."""
    figures = {name: getattr(report, name) for name in CLIENT_COLUMNS}
    return {"stage": stage, "round": round_, **figures, "macs": int(report.macs)}


CLIENT_COLUMNS = tuple(f.name for f in fields(Report) if f.name not in ("measurements", "state", "macs"))
"""The columns of `clients` that a report holds as they are."""


def round_row(
    stage: str, round_: int, clients: Sequence[Report], plan: Plan, wall_s: float, simulated_s: float
) -> dict[str, Any]:
    """A round's row: sums over its clients, and means weighted by their samples."""
    ok = [r for r in clients if r.status == "ok"]
    return {
        "stage": stage,
        "round": round_,
        "clients_planned": len(clients),
        "clients_ok": len(ok),
        "clients_failed": sum(r.status == "failed" for r in clients),
        "loss": _mean([(r.loss, r.samples) for r in ok]),
        "metric": _mean([(r.metric, r.samples) for r in ok]),
        "bytes_down": sum(r.bytes_down for r in clients),
        "bytes_up": sum(r.bytes_up for r in clients),
        "macs": int(sum(r.macs for r in clients)),
        "wall_s": wall_s,
        "simulated_s": simulated_s,
        "beta": plan.schedules.get("beta"),
        "lr": plan.schedules.get("lr"),
        "schedules": json.dumps(dict(plan.schedules), sort_keys=True),
    }


def _mean(values: Sequence[tuple[float | None, int]]) -> float | None:
    known = [(value, samples) for value, samples in values if value is not None and samples]
    total = sum(samples for _, samples in known)
    return sum(value * samples for value, samples in known) / total if total else None
