"""Further interfaces of spaces that some methods need, and checks that a space has them."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch import Tensor

from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.slices import Architecture, SliceMap, Subspace

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
    first; it returns their mean.
    """

    def num_exits(self, architecture: Architecture) -> int:
        """The number of exits of a subnet."""
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
        """The input of each stage for one sample, and the last one's output, on the meta device."""
        ...


def with_subspaces(space: SearchSpace, who: str) -> HasSubspaces:
    """The space, if it has subspaces; ValueError naming missing members."""
    return cast(HasSubspaces, _offering(space, HasSubspaces, who, "cnn_cifar"))


def with_tasks(space: SearchSpace, who: str) -> HasTasks:
    """The space, if it has a classifier per task; ValueError naming missing members."""
    return cast(HasTasks, _offering(space, HasTasks, who, "cnn_cifar"))


def summing_options(space: SearchSpace, who: str) -> SumsOptions:
    """The space, if it sums any subset of a decision's options; ValueError naming missing members."""
    return cast(SumsOptions, _offering(space, SumsOptions, who, "resnet18_modular or darts_s2"))


def with_cells(space: SearchSpace, who: str) -> HasCells:
    """The space, if it consists of cells; ValueError naming missing members."""
    return cast(HasCells, _offering(space, HasCells, who, "darts_s2"))


def with_depths(space: SearchSpace, who: str) -> HasDepths:
    """The space, if its subnets differ in depth and width; ValueError naming missing members."""
    return cast(HasDepths, _offering(space, HasDepths, who, "resnet_elastic"))


def with_exits(space: SearchSpace, who: str) -> HasExits:
    """The space, if its subnets have an exit after every block; ValueError naming missing members."""
    return cast(HasExits, _offering(space, HasExits, who, "cnn_depth or resnet_depth"))


def with_blocks(space: SearchSpace, who: str) -> HasBlocks:
    """The space, if its subnets consist of blocks; ValueError naming missing members."""
    return cast(HasBlocks, _offering(space, HasBlocks, who, "resnet_elastic"))


def _offering(space: SearchSpace, what: type, who: str, such_as: str) -> Any:
    missing = lacking(space, what)
    if missing:
        needed = (what.__doc__ or "").partition(":")[0].partition(".")[0].strip()
        # The last members distinguish this kind of space from simpler ones.
        few = f"{', '.join(missing[-SHOWN:])}{f' and {len(missing) - SHOWN} more' if len(missing) > SHOWN else ''}"
        raise ValueError(
            f"{who} cannot use space {space.name}, which has no {few}; choose space.name={such_as}, or one of your own "
            f"like this: {needed[:1].lower()}{needed[1:]}"
        )
    return space


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
