"""Assignments, tasks and reports: plain data, independent of where the work is executed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from fedloom.tiers.clock import TRAINING_FACTOR
from fedloom.tiers.devices import DEFAULT_PROFILE, DeviceProfile

if TYPE_CHECKING:
    from fedloom.platform.averaging.average import Update
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.spaces.slices import Weights

SERVER = "server"
"""The tier name of work that the server does on its own data."""

ClientState = Mapping[str, torch.Tensor]
"""A client's state between rounds, an explicit input and output of its tasks."""


class TaskError(ValueError):
    """A client's result cannot be used; the message becomes the error in its row."""


class DeviceLostError(RuntimeError):
    """The process's device fails, and with it all its further work: another process has to repeat the work."""


def check_device(error: BaseException) -> None:
    """Raises DeviceLostError for an error after which a process cannot use its device any more, or one caused by it.

    Such are CUDA's errors (a failed assertion, an illegal address, ECC); too little memory is not among them.
    """
    cause: BaseException | None = error
    while cause is not None:
        text = " ".join(map(str, cause.args))  # a user's exception may fail to say what it is
        # torch before 2.8 has no AcceleratorError and raises a RuntimeError with the same text.
        sticks = type(cause).__name__ == "AcceleratorError" or text.startswith("CUDA error:")
        is_memory = "out of memory" in text or "ALLOC_FAILED" in text
        if isinstance(cause, RuntimeError) and sticks and not is_memory:
            raise DeviceLostError(f"{type(cause).__name__}: {next(iter(text.splitlines()), '')}") from error
        cause = cause.__cause__


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


@dataclass(frozen=True)
class Outcome:
    """A task's result inside the worker, before its update is added to the chunk's sums.

    What is left out is null or 0 in the client's row of the table `clients`.

    Attributes:
        update: what the client sends to be averaged; None if it sends nothing, as in a final score.
        samples, steps: the client's samples, each counted once, and its optimiser steps.
        macs: multiply-accumulate operations of all forward passes.
        bytes_down, bytes_up: what was sent to the client, and back; the simulated clock takes them from here.
        loss, metric: means over the samples trained on, of the model that the row is about.
        architecture, subspace, parameters: what was trained, in the tables' words, and its number of trained scalars.
        measurements: rows of `evaluations`, such as scores on validation or (in final scores) test data.
        state: the client's tensors by name for `Assignment.state` of its next task in this stage, and of the final
            score of silos; None leaves them as they are. They stay with the run, are part of the checkpoint, and are
            neither averaged nor counted in bytes.
        clock_factor: simulated cost of one counted MAC: forward MACs are counted, and training also runs backward
            passes.
        forward_macs: the part of `macs` in passes without a backward pass (such as a search's scores during training).
        loss_norm: root mean square of the samples' losses, if client selection needs it.
        wall_s, peak_memory_bytes: of the work, if it was not done when the task was run.
    """

    update: Update | None = None
    samples: int = 0
    steps: int = 0
    macs: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    loss: float | None = None
    metric: float | None = None
    architecture: str | None = None
    subspace: str | None = None
    parameters: int | None = None
    measurements: tuple[Measurement, ...] = ()
    state: ClientState | None = None
    clock_factor: float = TRAINING_FACTOR
    forward_macs: float = 0.0
    loss_norm: float | None = None
    wall_s: float | None = None
    peak_memory_bytes: int | None = None


class Task(Protocol):
    """Work that a worker executes for a client (or for the server, on the server's data)."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """Executes the task; raises TaskError if the result must not be used."""
        ...


@runtime_checkable
class AccountableTask(Task, Protocol):
    """A task whose costs can be counted without executing it."""

    def account(self, worker: Worker, assignment: Assignment) -> Outcome:
        """The outcome of `run` without an update, a loss or a metric."""
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
    dropped: str = ""
    """Why the simulated device drops out of the round; empty if it does not."""
    selection_probability: float = 1.0
    selection_reason: str = ""
    reads_test: bool = False
    state: ClientState | None = None
    train_samples: int = 0
    """The client's training samples, by which executors guess how long its work takes."""
    expected_macs: float = 0.0
    """MACs that the plan expects of work that cannot be counted; a training step is three times its forward pass."""


@dataclass(frozen=True)
class Report:
    """The result of one assignment: the values of its row, its measurements and the client's new state."""

    client_id: int | None
    tier: str
    status: str
    error: str = ""
    traceback: str | None = None
    architecture: str | None = None
    subspace: str | None = None
    parameters: int | None = None
    samples: int = 0
    steps: int = 0
    macs: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    loss: float | None = None
    metric: float | None = None
    wall_s: float = 0.0
    overhead_s: float = 0.0
    simulated_s: float = 0.0
    peak_memory_bytes: int = 0
    device: str = ""
    threads: int = 1
    attempts: int = 1
    selection_probability: float = 1.0
    selection_reason: str = ""
    node: str = ""
    measurements: tuple[Measurement, ...] = ()
    state: ClientState | None = None
    loss_norm: float | None = None
    fallback: str | None = None
    """Why the client was trained alone although it was planned to be trained in a stack."""


def own_copy(state: ClientState) -> dict[str, torch.Tensor]:
    """A copy of a client's state in main memory.

    Within one process tensors are passed by reference: a task's in-place changes, and modules re-used for the next
    client, must not affect the checkpoint or a second attempt.
    """
    whole = torch.contiguous_format
    return {name: tensor.detach().cpu().clone(memory_format=whole) for name, tensor in state.items()}


def client_of(assignment: Assignment) -> int:
    """The client id of a client's assignment."""
    assert assignment.client_id is not None, "training is a client's work"
    return assignment.client_id


def places_of(assignment: Assignment) -> tuple[str | int, ...]:
    """Stage, round and client: the key of every random stream of a client's task."""
    return (assignment.stage, assignment.round, client_of(assignment))
