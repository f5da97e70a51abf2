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
"""Metrics of the final evaluation with a `detail`: the counts of a confusion matrix, and the loss of a paragraph that a
language model generates."""

ClientState: TypeAlias = "Mapping[str, torch.Tensor]"
"""A client's state between rounds, an explicit input and output of its tasks."""


class TaskError(ValueError):
    """A client's result cannot be used; the message becomes the error in its row."""


@dataclass(frozen=True)
class Measurement:
    """One measured value: a row of `evaluations` or a candidate's score; costs have no `split`.

    `detail` says in words what the value belongs to if the metric has several, such as one per pair of classes.
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
    """The result of one assignment: the client's row in the table `clients`, and what else the server receives.

    A task fills in what describes its work; the execution adds where it ran, how long it took and how it ended. Fields
    with a meaning are the table's columns, in its order, with the Arrow type of their annotation; those marked
    `of_time` depend on time and machine. Values that are not set are null or 0.

    Attributes:
        macs: may be fractional (a mean over sampled paths); the row holds whole numbers.
        bytes_down, bytes_up: the simulated clock computes its transfer times from them.
        update: what the client sends to be averaged; None if it sends nothing, as in a final score.
        measurements: rows of `evaluations`, such as scores on validation or (in final scores) test data.
        state: the client's tensors by name, which its next task in this stage and the final score of silos receive as
            `Assignment.state`; None keeps the previous ones. They stay within the run, are part of the checkpoint, and
            are neither averaged nor counted in bytes.
        clock_factor: simulated cost per counted MAC: only forward MACs are counted, but training also runs backward
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
"""The columns of the table `clients` except stage and round; its schema and description are made from them."""


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
    """Simulated seconds from the task's start until the device goes offline and its work is lost; None: never."""
    dropped: str = ""
    """Why the simulated device drops out of the round; empty if it does not."""
    selection_probability: float = 1.0
    selection_reason: str = ""
    attacker: bool = False
    """Whether the client is one of the attackers."""
    reads_test: bool = False
    state: ClientState | None = None
    train_samples: int = 0
    """The client's number of training samples, from which executors estimate how long its work takes."""
    reads: str | None = None
    """The tensor group with the weights that it received in an earlier round; None: the current round's weights."""
    staleness: int | None = None
    """Rounds that have ended since it received its weights; None if rounds are not asynchronous."""
    ended_s: float | None = None
    """Simulated time of the run (s) at which it answers or is lost; None if every round waits for its clients."""
    ignored: tuple[str, str, float] | None = None
    """If its work is discarded: the status, the reason, and the simulated seconds after which it is told to stop."""
    expected_macs: float = 0.0
    """MACs that the plan expects of a task that cannot count its costs; a training step is three forward passes."""

    @property
    def is_done(self) -> bool:
        """Whether the task is carried out: the simulated device does not drop out, and its answer is not ignored."""
        return not self.dropped and self.ignored is None


def own_copy(state: ClientState) -> dict[str, torch.Tensor]:
    """A copy of a client's state in main memory.

    Within one process tensors are passed by reference: a task's in-place changes, and modules re-used for the next
    client, must not affect the checkpoint or a second attempt.
    """
    import torch  # not at the top: the tables' schemas are made from this module, and need no torch

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
    """A row of the table `evaluations`; its `round` is the round that ends now unless another one is given."""

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
