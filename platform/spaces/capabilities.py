"""Further interfaces of spaces that some methods need, and checks that a space has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, cast

from torch import Tensor

from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.slices import Architecture, SliceMap, Subspace, Weights

if TYPE_CHECKING:
    from fedloom.platform.spaces.elastic import ElasticDesign
    from fedloom.platform.spaces.genome import ElasticGenome


SHOWN = 3
"""The number of missing members named in an error message."""


class HasSubspaces(SearchSpace, Protocol):
    """Options have tensors of their own, so that a part of the supernet can be sent that holds some of them."""

    @property
    def owner_of(self) -> Mapping[str, tuple[int, int] | None]:
        """The (decision, option) that each supernet tensor belongs to, None for the fixed part."""
        ...

    @property
    def largest_subspace(self) -> Subspace:
        """Every option of every decision."""
        ...

    def subspace_slices(self, subspace: Subspace) -> SliceMap:
        """The tensors of the fixed part and of the kept options, as slices of the supernet."""
        ...


class HasTasks(HasSubspaces, Protocol):
    """The last decision chooses the classifier of one of several tasks."""

    num_tasks: int

    def task_of(self, options: Architecture | Subspace) -> int:
        """The task of an architecture, or of a subspace that holds one task's classifier."""
        ...


class SumsOptions(HasSubspaces, Protocol):
    """Any options of a decision may be kept, none included, and are added up: `forward(x, kept, mix)`."""

    sums_options: bool

    @property
    def operator_names(self) -> tuple[tuple[str, ...], ...]:
        """The options' names per decision."""
        ...


class HasCells(SumsOptions, Protocol):
    """Decisions are the edges of cells, the same in all cells of a type: `forward(x, kept, mix, base_cells)`."""

    @property
    def num_cells(self) -> int:
        """The number of cells of the network."""
        ...

    def cell_type(self, cell: int) -> str:
        """The type of a cell."""
        ...

    def decisions(self, cell_type: str) -> range:
        """The decisions of a cell type."""
        ...

    def edges(self, cell_type: str) -> tuple[tuple[int, int], ...]:
        """(source, node) per decision of a cell type."""
        ...

    def base_tensors(self, base_cells: int) -> tuple[str, ...]:
        """Names of the tensors before the first cell and of the first `base_cells` cells."""
        ...

    def cost_of_cells(self, measure: str, subspace: Subspace, base_cells: int) -> float:
        """Cost of a network whose first `base_cells` cells keep everything and whose others keep `subspace`."""
        ...


class HasDepths(SearchSpace, Protocol):
    """Subnets differ in depth and width."""

    def sample_depth(self, rng: Any) -> Architecture:
        """A subnet of random depth and full width."""
        ...


class HasExits(SearchSpace, Protocol):
    """Subnets are the first blocks of a network, each with an exit: `forward(x, of_exits)` appends their logits.

    A subnet's module is called with a list, to which it appends the logits (N, classes) of every exit, the shallowest
    first; it returns the logits that it classifies by, the mean over exits or the last exit's.
    """

    def num_exits(self, architecture: Architecture) -> int:
        """The number of exits of a subnet."""
        ...


class HasAdapters(SearchSpace, Protocol):
    """One decision, the rank r of adapters: layers add `adapter_scale` B A x, with B (out, r) and A (r, in)."""

    ranks: tuple[int, ...]
    """The rank of every option, ascending."""
    adapter_scale: float

    @property
    def pairs(self) -> Sequence["Pair"]:
        """The names of every layer's tensors."""
        ...


class Pair(NamedTuple):
    """The names of a layer's B (out, r), A (r, in), and sum of merged products (out, in), which is optional."""

    up: str
    down: str
    merged: str


class HasBases(SearchSpace, Protocol):
    """Subnets mix base nets, whose tensors are called bases.NUMBER.NAME: `forward(x, of_bases)` appends their logits.

    A subnet's module is called with a list, to which it appends the logits (N, classes) of every base net in order; it
    returns their mean.
    """

    def num_bases(self, architecture: Architecture) -> int:
        """The number of base nets of a subnet."""
        ...


class HasBlocks(SearchSpace, Protocol):
    """Subnets keep a number of blocks per stage, each of one of several widths."""

    design: "ElasticDesign"

    @property
    def genome(self) -> "ElasticGenome":
        """Depths and widths per stage."""
        ...

    @property
    def stage_inputs(self) -> Sequence[Tensor]:
        """The input of each stage for one sample, and the last stage's output, on the meta device."""
        ...


class HasSortedChannels(HasBlocks, Protocol):
    """Subnets keep a number of blocks per stage, and of each the leading channels, which can be sorted."""

    def with_sorted_channels(self, weights: Weights) -> dict[str, Tensor]:
        """The same network with the channels of every block in descending order of their weights' L1 norm."""
        ...


Offered = TypeVar("Offered", bound=SearchSpace, covariant=True)


@dataclass(frozen=True)
class Need(Generic[Offered]):
    """An interface that a method needs; called with a space and the name of who needs it, returns the space so typed.

    Calling it raises ValueError naming missing members, and built-in spaces that have them (`such_as`).
    """

    protocol: type
    such_as: str

    def __call__(self, space: SearchSpace, who: str) -> Offered:
        missing = lacking(space, self.protocol)
        if missing:
            needed = (self.protocol.__doc__ or "").partition(":")[0].partition(".")[0].strip()
            # The last members distinguish this kind of space from simpler ones.
            more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
            raise ValueError(
                f"{who} cannot use space {space.name}, which has no {', '.join(missing[-SHOWN:])}{more}; choose "
                f"space.name={self.such_as}, or one of your own like this: {needed[:1].lower()}{needed[1:]}"
            )
        return cast(Offered, space)


with_subspaces: Need[HasSubspaces] = Need(HasSubspaces, "cnn_cifar")
with_tasks: Need[HasTasks] = Need(HasTasks, "cnn_cifar")
summing_options: Need[SumsOptions] = Need(SumsOptions, "resnet18_modular or darts_s2")
with_cells: Need[HasCells] = Need(HasCells, "darts_s2")
with_depths: Need[HasDepths] = Need(HasDepths, "resnet_elastic")
with_exits: Need[HasExits] = Need(HasExits, "cnn_depth, resnet_depth, cnn_scaled or resnet_scaled")
with_bases: Need[HasBases] = Need(HasBases, "cnn_split or resnet_split")
with_adapters: Need[HasAdapters] = Need(HasAdapters, "gpt_width space.lora.ranks=[4,8,16]")
with_blocks: Need[HasBlocks] = Need(HasBlocks, "resnet_elastic")
with_sorted_channels: Need[HasSortedChannels] = Need(HasSortedChannels, "resnet_elastic")


def lacking(space: object, what: type) -> list[str]:
    """The public members of a protocol that an object does not have."""
    # The class first, because the value of a property may be costly: `smallest` measures every option.
    return [name for name in _members(what) if not hasattr(type(space), name) and not hasattr(space, name)]


@cache
def _members(what: type) -> list[str]:
    names: dict[str, None] = {}
    for kind in reversed(what.__mro__):
        if kind.__module__.startswith("fedloom."):
            names |= dict.fromkeys(name for name in (*vars(kind), *vars(kind).get("__annotations__", {})))
    return [name for name in names if not name.startswith("_")]
