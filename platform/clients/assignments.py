"""Assignments, tasks and their results: plain data, independent of where the work is executed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from fedloom.tiers.devices import DEFAULT_PROFILE, TRAINING_FACTOR, DeviceProfile

if TYPE_CHECKING:
    import torch

    from fedloom.platform.averaging.average import Update
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.spaces.slices import Weights

SERVER = "server"
"""The tier name of work that the server does on its own data."""

CONFUSION, PARAGRAPH = "confusion", "paragraph"
"""Metrics of the final evaluation with a `detail`: how often a class was taken for another, the loss of what a text
model wrote."""

ClientState: TypeAlias = "Mapping[str, torch.Tensor]"
"""A client's state between rounds, an explicit input and output of its tasks."""


class TaskError(ValueError):
    """A client's result cannot be used; the message becomes the error in its row."""


@dataclass(frozen=True)
class Measurement:
    """One measured value: a row of `evaluations` or a candidate's score; costs have no `split`.

    `detail` says in words what is measured, where the metric has a value for each of several things.
    """

    model: str
    architecture: str
    split: str | None
    metric: str
    value: float
    samples: int
    detail: str | None = None


def _column(meaning: str, default: object = None, *, of_time: bool = False) -> Any:
    return field(default=default, metadata={"meaning": meaning, "of_time": of_time})


@dataclass(frozen=True, kw_only=True)
class ClientResult:
    """What became of one assignment: the client's row of the table `clients`, and what the server gets beside it.

    A task fills in what its work was; where it ran, how long it took and how it ended follow from its execution. The
    fields with a meaning are the table's columns, in its order, with the Arrow type of their annotation; those
    `of_time` depend on time and machine. What is left out is null or 0.

    Attributes:
        macs: may be fractional (means over sampled paths); the row's are whole.
        bytes_down, bytes_up: the simulated clock takes them from here.
        update: what the client sends to be averaged; None if it sends nothing, as in a final score.
        measurements: rows of `evaluations`, such as scores on validation or (in final scores) test data.
        state: the client's tensors by name for `Assignment.state` of its next task in this stage, and of the final
            score of silos; None leaves them as they are. They stay with the run, are part of the checkpoint, and are
            neither averaged nor counted in bytes.
        clock_factor: simulated cost of one counted MAC: forward MACs are counted, and training also runs backward
            passes.
        gpu_software: the GPU with its driver, CUDA and cuDNN, for the column `gpus` of the table `runs`.
        forward_macs: the part of `macs` in passes without a backward pass (such as a search's scores during training).
    """

    client_id: int | None = _column("the client, from 0")
    tier: str = _column("the client's tier", "")
    attacker: bool = _column("whether it is one of the attackers (attack.share)", False)
    architecture: str | None = _column("architecture as its options, such as 3-1-8-0")
    subspace: str | None = _column("the options of each decision that the client received")
    samples: int = _column("training samples, each counted once, or samples that were scored", 0)
    steps: int = _column("optimiser steps", 0)
    macs: float = _column("forward passes of its work", 0.0)
    parameters: int | None = _column("parameters of what it received")
    bytes_down: int = _column("what was sent to it", 0)
    bytes_up: int = _column("what it sent", 0)
    loss: float | None = _column("mean loss over its steps, or over the samples that were scored")
    metric: float | None = _column(
        "accuracy of its own network on its own training batches (batch norms by batch statistics), while it trains, "
        "so that it is no measure of the averaged model; or over the samples that were scored"
    )
    wall_s: float | None = _column("real time of its work here", of_time=True)
    overhead_s: float = _column("real time that fedloom spent around its work", 0.0, of_time=True)
    simulated_s: float = _column(
        "time on its simulated device; if that dropped out: how long the server waited for it", 0.0
    )
    peak_memory_bytes: int | None = _column("largest memory of its work", of_time=True)
    status: str = _column(
        "ok, failed, dropped (the device dropped out or went offline), timed_out (after the deadline), over_selected "
        "(others were faster) or stale (too old)",
        "ok",
    )
    error: str = _column("the cause, unless it is ok", "")
    traceback: str | None = _column("where it failed in the code", of_time=True)
    selection_reason: str = _column("why it was selected", "")
    selection_probability: float = _column("probability with which it was selected; null where this is not known", 1.0)
    device: str = _column("cpu or cuda", "", of_time=True)
    gpu: str | None = _column("the GPU's model; null on a CPU", of_time=True)
    threads: int = _column("torch's threads", 1)
    attempts: int = _column("how often its work was begun", 1, of_time=True)
    node: str = _column("where its work ran: host, and on a cluster the node", "", of_time=True)
    loss_norm: float | None = _column(
        "root mean square of its samples' losses, if method.train.loss_norms or the selection rule asks for it"
    )
    fallback: str | None = _column(
        "why it was not trained as planned, in a stack or by a compiled network, so that rounding differs; else null"
    )
    start_round: int | None = _column(
        "the round whose weights it received; null where every round waits for its clients"
    )
    staleness: int | None = _column("rounds that ended while it worked, if answers may be that old; else null")
    ended_s: float | None = _column(
        "simulated time of the run at which it answered or was lost; null where every round waits for its clients"
    )
    update: Update | None = None
    measurements: tuple[Measurement, ...] = ()
    state: ClientState | None = None
    gpu_software: str | None = None
    clock_factor: float = TRAINING_FACTOR
    forward_macs: float = 0.0

    def row(self, stage: str, round_: int) -> dict[str, Any]:
        """The client's row of the table `clients`; NaN becomes null."""
        values = {name: getattr(self, name) for name in RESULT_COLUMNS}
        figures = {n: None if isinstance(v, float) and math.isnan(v) else v for n, v in values.items()}
        return {"stage": stage, "round": round_, **figures, "macs": int(self.macs)}


RESULT_COLUMNS: Mapping[str, Field[Any]] = {f.name: f for f in fields(ClientResult) if "meaning" in f.metadata}
"""The columns of the table `clients` beside stage and round, from which its schema and description are made."""


class Task(Protocol):
    """Work that a worker executes for a client (or for the server, on the server's data)."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Executes the task; raises TaskError if the result must not be used."""
        ...


@runtime_checkable
class AccountableTask(Task, Protocol):
    """A task whose costs can be counted without executing it."""

    def account(self, worker: Worker, assignment: Assignment) -> ClientResult:
        """The result of `run` without an update, a loss or a metric."""
        ...


@dataclass(frozen=True)
class Assignment:
    """One planned task; for a client (`client_id` is not None) it becomes exactly one row."""

    stage: str
    round: int
    client_id: int | None
    tier: str
    task: Task
    profile: DeviceProfile = DEFAULT_PROFILE
    deadline_s: float | None = None
    offline_s: float | None = None
    """Simulated seconds from its start to when the device goes offline, and its work is lost; None: never."""
    dropped: str = ""
    """Why the simulated device drops out of the round; empty if it does not."""
    selection_probability: float = 1.0
    selection_reason: str = ""
    attacker: bool = False
    """Whether the client is one of the attackers."""
    reads_test: bool = False
    state: ClientState | None = None
    train_samples: int = 0
    """The client's training samples, by which executors guess how long its work takes."""
    reads: str | None = None
    """The tensor group that it received in an earlier round; None: the round's own."""
    staleness: int | None = None
    """Rounds that have ended since, if that may be any."""
    ended_s: float | None = None
    """When it answers or is lost, where that decides who is waited for."""
    ignored: tuple[str, str, float] | None = None
    """The status of a client that works for nothing, why, and after which simulated seconds it is told to stop."""
    expected_macs: float = 0.0
    """MACs that the plan expects of work that cannot be counted; a training step is three times its forward pass."""

    @property
    def is_done(self) -> bool:
        """Whether its work is done: the simulated device does not drop out, and its answer counts."""
        return not self.dropped and self.ignored is None


def own_copy(state: ClientState) -> dict[str, torch.Tensor]:
    """A copy of a client's state in main memory.

    Within one process tensors are passed by reference: a task's in-place changes, and modules re-used for the next
    client, must not affect the checkpoint or a second attempt.
    """
    import torch  # the tables' schemas follow from this module, and need no torch

    from fedloom.platform.data.on_device import moved

    copies = moved(state, torch.device("cpu"))
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in copies.items()}


def client_of(assignment: Assignment) -> int:
    """The client id of a client's assignment."""
    assert assignment.client_id is not None, "training is a client's work"
    return assignment.client_id


def places_of(assignment: Assignment) -> tuple[str | int, ...]:
    """Stage, round and client: the key of every random stream of a client's task."""
    return (assignment.stage, assignment.round, client_of(assignment))


@dataclass(frozen=True)
class Evaluation:
    """A row of the table `evaluations`; `round` is another than the one that ends, where that is not None."""

    model: str
    tier: str
    architecture: str
    client_id: int | None
    split: str | None
    metric: str
    value: float
    samples: int
    detail: str | None
    round: int | None = None


def evaluations_of(
    results: Iterable[ClientResult], tier: str | None = None, round_: int | None = None
) -> list[Evaluation]:
    """All measured values of these results; `tier` is the model's tier, by default the client's."""
    return [
        Evaluation(
            model=m.model,
            tier=result.tier if tier is None else tier,
            architecture=m.architecture,
            client_id=result.client_id,
            split=m.split,
            metric=m.metric,
            value=m.value,
            samples=m.samples,
            detail=m.detail,
            round=round_,
        )
        for result in results
        for m in result.measurements
    ]
