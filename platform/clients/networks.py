"""The network that a client trains or scores: a part of the worker's supernet, or a stand-alone subnet.

A task holds a `Described` network; on a worker it becomes a `Network`, loaded into one of the worker's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch import Tensor, nn

from fedloom.platform.clients.assignments import TaskError
from fedloom.platform.spaces.slices import (
    Architecture,
    Slice,
    SliceMap,
    Subspace,
    architecture_id,
    parse_architecture,
    parse_subspace,
    subspace_id,
)
from fedloom.tiers.costs import size_of

ESTIMATED, AVERAGED = "estimated", "averaged"
"""Where a slice's running statistics come from: estimated for it on unlabelled samples, or averaged over clients."""

if TYPE_CHECKING:
    from fedloom.platform.clients.assignments import Assignment
    from fedloom.platform.clients.training import Loss, Outputs, Samples, Trained
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.spaces.base import SearchSpace
    from fedloom.platform.spaces.capabilities import SumsOptions


@dataclass(frozen=True)
class Network:
    """A network in one of the worker's modules; because modules are re-used, its weights are loaded before each use.

    Attributes:
        forward: returns the outputs of a batch.
        slices: its tensors by name, as slices of the weights that are loaded.
        macs: MACs of the forward pass of one sample.
        architecture, subspace: its id in the tables, if it is an architecture or a subspace.
        remaining: the options of a searched network, None for a fixed one.
        passes: forward and backward passes per training batch.
        loss: the loss of a pass on its outputs and targets if it is not the objective's, such as one of distillation.
        compilable: whether it keeps its architecture for many rounds and `forward` is its module.
    """

    module: nn.Module
    forward: Callable[[Any], Outputs]
    slices: SliceMap
    macs: float
    architecture: str | None = None
    subspace: str | None = None
    remaining: Subspace | None = None
    passes: int = 1
    loss: Loss | None = None
    compilable: bool = False

    @property
    def name(self) -> str:
        """Its id in measurements."""
        return self.architecture or self.subspace or ""

    @property
    def choices(self) -> Architecture | Subspace | None:
        """The options of its architecture or subspace, if it is one."""
        if self.architecture is not None:
            return parse_architecture(self.architecture)
        return None if self.subspace is None else parse_subspace(self.subspace)

    def parameters(self, worker: Worker) -> int:
        """The number of trained scalars."""
        tensors = worker.tensors_of(self.module)
        return sum(tensors[name].numel() for name in self.slices if tensors[name].requires_grad)

    def macs_of(self, figures: Trained) -> float:
        """MACs of the forward passes over all samples seen in training."""
        return self.macs * figures.seen_samples

    def seen(self, figures: Trained) -> Mapping[str, int]:
        """Per tensor, the number of samples seen in training that went through it."""
        return dict.fromkeys(self.slices, figures.seen_samples)


@dataclass(frozen=True)
class DrawingNetwork(Network):
    """A network that draws another part of itself for every pass, and counts the forward MACs of the parts it draws."""

    spent_macs: list[float] = field(default_factory=lambda: [0.0])

    def macs_of(self, figures: Trained) -> float:
        """Forward MACs of all passes so far."""
        del figures
        return self.spent_macs[0]


@dataclass(frozen=True)
class Account:
    """The cost of training a network, counted without training: forward MACs, bytes of its tensors, parameters.

    `architecture` and `subspace` are those of `Network`.
    """

    macs: float
    size_bytes: float
    parameters: int
    architecture: str | None = None
    subspace: str | None = None


class Described(Protocol):
    """Plain data from which a worker makes the network that a client trains or scores."""

    def on(self, worker: Worker, assignment: Assignment) -> Network:
        """The network in one of the worker's modules."""
        ...


class Countable(Described, Protocol):
    """A network whose training cost is known in advance."""

    def account(self, worker: Worker, assignment: Assignment, batches: Sequence[int]) -> Account:
        """The cost of training on batches of these sizes."""
        ...

    def held(self, space: SearchSpace) -> SliceMap:
        """The slices of the shared weights that the client receives and sends."""
        ...


@dataclass(frozen=True)
class Subnet:
    """A subnet, trained in its slices of the supernet or, if `stand_alone`, with tensors of its own.

    `statistics` says whether a slice is scored with running statistics `estimated` for it, or with the `averaged` ones.
    """

    architecture: Architecture
    stand_alone: bool = False
    statistics: str = ESTIMATED

    def on(self, worker: Worker, assignment: Assignment | None = None) -> Network:
        """The network; it does not depend on the assignment."""
        del assignment
        module = worker.subnet(self.architecture)
        slices = worker.space.slices(self.architecture)
        if self.stand_alone:
            slices = {name: Slice(name) for name in worker.tensors_of(module) if name in slices}
        return Network(
            module,
            module,
            slices,
            worker.spec.macs_table.cost(self.architecture),
            architecture=architecture_id(self.architecture),
            compilable=self.stand_alone,
        )

    def account(self, worker: Worker, assignment: Assignment, batches: Sequence[int]) -> Account:
        del assignment
        size, parameters = (worker.space.cost_table(m).cost(self.architecture) for m in ("bytes", "parameters"))
        macs = worker.spec.macs_table.cost(self.architecture) * sum(batches)
        return Account(macs, size, int(parameters), architecture=architecture_id(self.architecture))

    def held(self, space: SearchSpace) -> SliceMap:
        slices = space.slices(self.architecture)
        return {name: Slice(name) for name in slices} if self.stand_alone else slices


@dataclass(frozen=True)
class MixedNetwork:
    """The operators of a subspace (None: all), summed with weight 1 or with the weights that `mix` returns."""

    subspace: Subspace | None = None
    mix: Callable[[], Tensor] | None = field(default=None, compare=False)

    def on(self, worker: Worker, assignment: Assignment | None = None) -> Network:
        """The network; it does not depend on the assignment."""
        del assignment
        module, mix = worker.supernet, self.mix
        space, subspace = self._in(worker.space)
        return Network(
            module,
            lambda x: cast(Tensor, module(x, subspace, None if mix is None else mix())),
            space.subspace_slices(subspace),
            size_of(worker.spec.macs_table, subspace),
            subspace=subspace_id(subspace),
            remaining=subspace,
        )

    def account(self, worker: Worker, assignment: Assignment, batches: Sequence[int]) -> Account:
        del assignment
        _, subspace = self._in(worker.space)
        size, parameters = (size_of(worker.space.cost_table(m), subspace) for m in ("bytes", "parameters"))
        macs = size_of(worker.spec.macs_table, subspace) * sum(batches)
        return Account(macs, size, int(parameters), subspace=subspace_id(subspace))

    def held(self, space: SearchSpace) -> SliceMap:
        """The tensors of the fixed part and of the operators."""
        summing, subspace = self._in(space)
        return summing.subspace_slices(subspace)

    def _in(self, space: SearchSpace) -> tuple[SumsOptions, Subspace]:
        """The space as one whose layers can sum operators, and the subspace."""
        from fedloom.platform.spaces.capabilities import summing_options  # imports all spaces, which few networks need

        summing = summing_options(space, "this network")
        return summing, summing.largest_subspace if self.subspace is None else self.subspace


@dataclass(frozen=True)
class OfSubnet:
    """Base of networks that train a subnet's tensors in another way, at the subnet's cost; override `on`."""

    subnet: Subnet

    def account(self, worker: Worker, assignment: Assignment, batches: Sequence[int]) -> Account:
        """The subnet's cost."""
        return self.subnet.account(worker, assignment, batches)

    def held(self, space: SearchSpace) -> SliceMap:
        """The subnet's slices."""
        return self.subnet.held(space)


def in_task(worker: Worker, data: Samples, network: Network) -> Samples:
    """The samples with their labels mapped to the classes of the network's task."""
    choices = network.choices if worker.spec.label_sets else None
    return data if choices is None else worker.in_task(data, choices)


def rows_of_classes(
    module: nn.Module, tensors: Mapping[str, Tensor], outputs: Collection[int], classes: Tensor
) -> dict[str, tuple[tuple[int, int], ...]]:
    """Ranges of these classes' rows, per parameter of the classifier: the last layer with a row count in `outputs`."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    classifier: list[str] = []
    for part in module.modules():
        trained = [parameter for parameter in part.parameters(recurse=False) if id(parameter) in names]
        if trained and all(len(parameter) in outputs for parameter in trained):
            classifier = [names[id(parameter)] for parameter in trained]
    if not classifier:
        raise TaskError("no layer has as many rows as there are classes: set objective.options.in_mean=false")
    present = set(classes.tolist())
    starts, ends = sorted(present - {c + 1 for c in present}), sorted({c + 1 for c in present} - present)
    return dict.fromkeys(classifier, tuple(zip(starts, ends, strict=True)))
