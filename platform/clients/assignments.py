"""What is to be done, by whom, and how it ended: plain data, apart from where and how it is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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
"""What a client keeps between rounds, handed in and out explicitly."""


class TaskError(ValueError):
    """A client's work cannot be used; the message becomes the row's error."""


@dataclass(frozen=True)
class Measurement:
    """One measured value: becomes a row of `evaluations` or the score of a candidate; what costs has no `split`."""

    model: str
    architecture: str
    split: str | None
    metric: str
    value: float
    samples: int


@dataclass(frozen=True)
class Outcome:
    """What a task gives back inside the worker, before the chunk's sums take the update in."""

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
    """What one counted MAC costs on the simulated device: training goes backward, too."""
    forward_macs: float = 0.0
    """Those of `macs` that belong to passes without a way back (a search's scores beside training)."""
    loss_norm: float | None = None
    """Root mean square of the samples' losses, where selection asks for it."""


class Task(Protocol):
    """A piece of work that a worker can do for a client (or for the server, on its own data)."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """Does the work; raises TaskError if the result must not be used."""
        ...


@dataclass(frozen=True)
class Assignment:
    """One planned piece of work; for a client (`client_id`) it ends as exactly one row."""

    stage: str
    round: int
    client_id: int | None
    tier: str
    task: Task
    profile: DeviceProfile = DEFAULT_PROFILE
    deadline_s: float | None = None
    dropped: str = ""
    """Why the simulated device leaves the round without an answer; empty if it stays."""
    selection_probability: float = 1.0
    selection_reason: str = ""
    reads_test: bool = False
    state: ClientState | None = None


@dataclass(frozen=True)
class Report:
    """How one assignment ended: the figures of its row, its measurements and the client's new state."""

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


def client_of(assignment: Assignment) -> int:
    """The client that an assignment is for."""
    assert assignment.client_id is not None, "training is a client's work"
    return assignment.client_id


def places_of(assignment: Assignment) -> tuple[str | int, ...]:
    """Stage, round and client: what every stream of a client's work is derived from."""
    return (assignment.stage, assignment.round, client_of(assignment))
