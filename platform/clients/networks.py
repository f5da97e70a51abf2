"""The network that a client trains or scores: a part of the worker's supernet, or a subnet of its own.

A `Described` network is what travels in a task; on a worker it becomes a `Network` in one of the worker's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from torch import Tensor, nn

from fedloom.platform.spaces.slices import Architecture, Slice, SliceMap, Subspace, architecture_id

if TYPE_CHECKING:
    from fedloom.platform.clients.assignments import Assignment
    from fedloom.platform.clients.training import Trained
    from fedloom.platform.clients.worker import Worker


@dataclass(frozen=True)
class Network:
    """A network in one of the worker's modules, which are re-used: it is loaded before each use.

    Attributes:
        forward: logits of a batch.
        slices: its tensors, and where they lie in a bag of weights.
        macs: of one sample, forward.
        architecture, subspace: what it is, as it stands in the tables, if it is one or the other.
        kept: the options of a searched network, None for a fixed one.
        passes: forward and backward passes per batch of training.
    """

    module: nn.Module
    forward: Callable[[Tensor], Tensor]
    slices: SliceMap
    macs: float
    architecture: str | None = None
    subspace: str | None = None
    kept: Subspace | None = None
    passes: int = 1

    @property
    def name(self) -> str:
        """What it is, as measurements call it."""
        return self.architecture or self.subspace or ""

    def parameters(self, worker: Worker) -> int:
        """How many scalars of it are trained."""
        tensors = worker.tensors_of(self.module)
        return sum(tensors[name].numel() for name in self.slices if tensors[name].requires_grad)

    def macs_of(self, figures: Trained) -> float:
        """Forward, over all samples that training saw."""
        return self.macs * figures.seen_samples

    def seen(self, figures: Trained) -> Mapping[str, int]:
        """Of the samples that training saw, those that went through each tensor."""
        return dict.fromkeys(self.slices, figures.seen_samples)


@dataclass(frozen=True)
class Account:
    """What training a network would cost, counted without training: MACs (forward), bytes of its tensors, parameters.

    `architecture` and `subspace` as of `Network`.
    """

    macs: float
    size_bytes: float
    parameters: int
    architecture: str | None = None
    subspace: str | None = None


class Described(Protocol):
    """Which network a client trains or scores: plain data from which a worker makes it."""

    def on(self, worker: Worker, assignment: Assignment) -> Network:
        """The network as one of the worker's modules has it."""
        ...


class Countable(Described, Protocol):
    """A network of which it is known beforehand what its training costs."""

    def account(self, worker: Worker, assignment: Assignment, batches: Sequence[int]) -> Account:
        """What training on batches of these sizes costs."""
        ...


@dataclass(frozen=True)
class Subnet:
    """A subnet of the supernet, trained in its slices or, if `stand_alone`, with tensors of its own."""

    architecture: Architecture
    stand_alone: bool = False

    def on(self, worker: Worker, assignment: Assignment | None = None) -> Network:
        """See `Described.on`; the same for every assignment."""
        del assignment
        module = worker.subnet(self.architecture)
        return Network(
            module,
            lambda x: cast(Tensor, module(x)),
            subnet_slices(worker, self.architecture, self.stand_alone),
            worker.spec.macs_table.cost(self.architecture),
            architecture=architecture_id(self.architecture),
        )

    def account(self, worker: Worker, assignment: Assignment, batches: Sequence[int]) -> Account:
        """See `Countable.account`."""
        del assignment
        size, parameters = (worker.space.cost_table(m).cost(self.architecture) for m in ("bytes", "parameters"))
        macs = worker.spec.macs_table.cost(self.architecture) * sum(batches)
        return Account(macs, size, int(parameters), architecture=architecture_id(self.architecture))


def subnet_slices(worker: Worker, architecture: Architecture, stand_alone: bool) -> SliceMap:
    """Where the subnet's tensors lie in the shared weights: in the supernet's, or under their own names."""
    if not stand_alone:
        return worker.space.slices(architecture)
    return {name: Slice(name) for name in worker.tensors_of(worker.subnet(architecture))}
