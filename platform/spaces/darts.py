"""The space of DARTS cells: all normal cells share one architecture, all reduction cells another (SPIDER, App. B.2).

A decision is an edge of a cell type, an option one of its operators; each cell has its own weights for them.
Supernet, subspace and stand-alone subnet are the same class, `DartsNetwork`, and name their tensors alike
(`cells.<cell>.edges.<edge>.ops.<option>.*`); they differ only in which operators they hold.
"""

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial, reduce
from types import MappingProxyType
from typing import ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedloom.platform.spaces.base import FixedSpace, SearchSpace, measure_of, once
from fedloom.platform.spaces.operator_choice import (
    Part,
    SummedOperatorSpace,
    as_subspace,
    cost_of_parts,
    outputs_of,
)
from fedloom.platform.spaces.slices import Architecture, Subspace
from fedloom.platform.spaces.space_config import spaces_of

# -- operators (Liu et al. 2019), and those of the spaces of RobustDARTS (Zela et al. 2020) ---------------------------
# Each maps (N, c, H, W) to (N, c, H/stride, W/stride) with a stride of 1 or 2. No operator changes its input in place,
# because all edges from a node read the same tensor; a `State` computes once the ReLU that several of them need. Norms
# have no scale and shift during a search (`affine`).


def strided(x_NCHW: Tensor, stride: int) -> Tensor:
    """A view of every stride-th row and column."""
    return x_NCHW if stride == 1 else x_NCHW[:, :, ::stride, ::stride]


class ReluFirst(nn.Module, ABC):
    """A module that begins with a ReLU, which modules with the same input can share: `after_relu(relu(x))`."""

    relu: nn.Module

    @abstractmethod
    def after_relu(self, x: Tensor) -> Tensor:
        """What comes after the ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        return self.after_relu(self.relu(x))


class State:
    """A tensor that many modules read, and its ReLU, computed once for all of them and only if one needs it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    @cached_property
    def positive(self) -> Tensor:
        """The tensor's ReLU."""
        return torch.relu(self.x)

    def through(self, module: nn.Module) -> Tensor:
        """A module's output; on the meta device, where costs are counted, every module computes its own ReLU."""
        if isinstance(module, ReluFirst) and not self.x.is_meta:
            return module.after_relu(self.positive)
        y: Tensor = module(self.x)
        return y


class ReluConvNorm(ReluFirst):
    """ReLU, 1x1 convolution, BatchNorm: (N, c_in, H, W) -> (N, c_out, H, W)."""

    def __init__(self, in_channels: int, out_channels: int, affine: bool) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.conv = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.norm = nn.BatchNorm2d(out_channels, affine=affine)

    def after_relu(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x))
        return y


class FactorisedReduction(ReluFirst):
    """Halves the sides without losing a pixel: (N, c_in, H, W) -> (N, c_out, H/2, W/2), H, W and c_out even.

    ReLU, two 1x1 convolutions of stride 2 to half the channels each, the second shifted by one pixel, BatchNorm.
    """

    def __init__(self, in_channels: int, out_channels: int, affine: bool) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(in_channels, out_channels // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(in_channels, out_channels // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(out_channels, affine=affine)

    def after_relu(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self._halves(x) if x.is_meta else self._halved(x))
        return y

    def _halves(self, x: Tensor) -> Tensor:
        return torch.cat([self.even(x), self.odd(x[:, :, 1:, 1:])], dim=1)

    def _halved(self, x: Tensor) -> Tensor:
        """Both convolutions as one 2x2 convolution padded with zeros: four times faster, as it reads the image once."""
        even, odd = functional.pad(self.even.weight, (0, 1, 0, 1)), functional.pad(self.odd.weight, (1, 0, 1, 0))
        return functional.conv2d(x, torch.cat([even, odd]), stride=2)


class ReluSequence(nn.Sequential, ReluFirst):
    """Modules one after the other, the first of which is a ReLU."""

    def after_relu(self, x: Tensor) -> Tensor:
        for part in itertools.islice(self, 1, None):
            x = part(x)
        return x


class Zero(nn.Module):
    """No connection: zeros, through which no gradient flows back."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(strided(x, self.stride))


class Noise(Zero):
    """Standard normal noise independent of the input, in training and in evaluation (space S4 of Zela et al. 2020).

    It is drawn from torch's global generator, like dropout.
    """

    draws_randomly = True

    def forward(self, x: Tensor) -> Tensor:
        return torch.randn_like(strided(x, self.stride))


def _depthwise(
    channels: int, kernel: int, stride: int, dilation: int, affine: bool, *, first: bool = True
) -> list[nn.Module]:
    padding = dilation * (kernel - 1) // 2
    return [
        nn.ReLU(inplace=not first),
        nn.Conv2d(channels, channels, kernel, stride, padding, dilation, groups=channels, bias=False),
        nn.Conv2d(channels, channels, 1, bias=False),
        nn.BatchNorm2d(channels, affine=affine),
    ]


def _separable(kernel: int) -> "Build":
    """Twice ReLU, depthwise, 1x1, BatchNorm; the first depthwise convolution has the stride."""
    return lambda c, stride, affine: ReluSequence(
        *_depthwise(c, kernel, stride, 1, affine), *_depthwise(c, kernel, 1, 1, affine, first=False)
    )


def _dilated(kernel: int) -> "Build":
    """ReLU, depthwise with dilation 2, 1x1, BatchNorm."""
    return lambda c, stride, affine: ReluSequence(*_depthwise(c, kernel, stride, 2, affine))


def _pool(pool: Callable[[int], nn.Module]) -> "Build":
    """3x3 pooling with the stride, BatchNorm."""
    return lambda c, stride, affine: nn.Sequential(pool(stride), nn.BatchNorm2d(c, affine=affine))


Build = Callable[[int, int, bool], nn.Module]
"""An operator's module, from channels, stride and affine."""

OPERATORS: Mapping[str, Build] = MappingProxyType(
    {
        "none": lambda _c, stride, _affine: Zero(stride),
        "noise": lambda _c, stride, _affine: Noise(stride),
        "max_pool_3x3": _pool(lambda stride: nn.MaxPool2d(3, stride, padding=1)),
        "avg_pool_3x3": _pool(lambda stride: nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)),
        "skip_connect": lambda c, stride, affine: nn.Identity() if stride == 1 else FactorisedReduction(c, c, affine),
        "sep_conv_3x3": _separable(3),
        "sep_conv_5x5": _separable(5),
        "dil_conv_3x3": _dilated(3),
        "dil_conv_5x5": _dilated(5),
    }
)
"""The operators by their names in the papers."""


# -- networks: the kept operators of every edge, all with weight 1; an edge without any is pruned ---------------------

CELL_TYPES: Final = ("normal", "reduction")
"""The decisions of a space are the edges of the normal cell, then those of the reduction cell."""

Edge = tuple[int, int]
"""Source and target node; 0 and 1 are the cell's inputs (outputs of the two previous cells), the others its nodes."""


@dataclass(frozen=True)
class DartsDesign:
    """A network of DARTS cells with a choice of operators on every edge (SPIDER).

    `input_shape` is (C, H, W); `channels` are those of a node before the first reduction, each reduction doubles them;
    `nodes` is the number of intermediate nodes of a cell; the stem has `stem_multiplier` times `channels` output
    channels and the stride `stem_stride`. `operators` are the names for every edge, or one tuple of names per decision.
    `affine` gives the norms of the cells scale and shift.

    Raises:
        ValueError: a size that cannot be built, or operators that are unknown, repeated or not one tuple per edge.
    """

    name: str
    input_shape: tuple[int, int, int] = (3, 32, 32)
    num_classes: int = 10
    cells: int = 8
    channels: int = 16
    nodes: int = 4
    stem_multiplier: int = 3
    operators: tuple[str, ...] | tuple[tuple[str, ...], ...] = ("skip_connect", "sep_conv_3x3")
    affine: bool = False
    stem_stride: int = 1
    fewest_cells: ClassVar[int] = 3

    def __post_init__(self) -> None:
        for field in ("num_classes", "cells", "channels", "nodes", "stem_multiplier", "stem_stride"):
            least = self.fewest_cells if field == "cells" else 1
            if getattr(self, field) < least:
                raise ValueError(f"space {self.name}: {field} must be at least {least}, given {getattr(self, field)}")
        factor = 4 * self.stem_stride
        if len(self.input_shape) != 3 or min(self.input_shape) < 1 or any(n % factor for n in self.input_shape[1:]):
            raise ValueError(
                f"space {self.name} takes images (C, H, W) with sides that two reductions can halve, multiples of "
                f"{factor}, given {tuple(self.input_shape)}"
            )
        per_edge = sum(not isinstance(row, str) for row in self.operators)
        decisions = 2 * len(self.edges)
        if per_edge not in (0, len(self.operators)) or (per_edge and per_edge != decisions):
            raise ValueError(
                f"space {self.name}: operators are names for every edge, or one tuple of names for each of the "
                f"{decisions} edges, given {per_edge} tuples and {len(self.operators) - per_edge} names"
            )
        for decision, names in enumerate(self.operator_names):
            edge = f"space {self.name}: edge {self.edge_name(decision)}"
            if not names or len(set(names)) != len(names):
                shown = ", ".join(names) or "none"
                raise ValueError(f"{edge} needs at least one operator and each once, given {shown}")
            for name in names:
                if name not in OPERATORS:
                    raise ValueError(f"{edge}: unknown operator {name!r}: known are {', '.join(OPERATORS)}")

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The edges of one cell, from every input and earlier node to each node, sorted by target node."""
        return tuple((source, node) for node in range(2, self.nodes + 2) for source in range(node))

    @property
    def operator_names(self) -> tuple[tuple[str, ...], ...]:
        """The operators of every decision."""
        rows = [row for row in self.operators if not isinstance(row, str)]
        if rows:
            return tuple(map(tuple, rows))
        return (tuple(map(str, self.operators)),) * (2 * len(self.edges))

    def edge_name(self, decision: int) -> str:
        """A decision's readable name, such as `normal 0->2`."""
        cell_type, edge = divmod(decision, len(self.edges))
        source, node = self.edges[edge]
        return f"{CELL_TYPES[cell_type]} {source}->{node}"


@dataclass(frozen=True)
class CellPlan:
    """One cell of a network: its type, its channels, and the height and width of its inputs.

    `halve_first` is set after a reduction, when the input from the cell before the last is still twice as large.
    """

    reduction: bool
    halve_first: bool
    in_channels: tuple[int, int]
    channels: int
    size: tuple[int, int]

    def stride(self, source: int) -> int:
        """The stride of the edges from a node: in a reduction cell 2 for the cell's inputs, otherwise 1."""
        return 2 if self.reduction and source < 2 else 1

    def state_shape(self, source: int) -> tuple[int, int, int, int]:
        """The input shape of an edge from this node, for one sample."""
        halving = 2 if self.reduction and source >= 2 else 1
        return 1, self.channels, self.size[0] // halving, self.size[1] // halving


def plan_cells(design: DartsDesign) -> tuple[CellPlan, ...]:
    """The cells in order; the reductions are at 1/3 and 2/3 of the depth, rounded down (Liu et al. 2019)."""
    plans: list[CellPlan] = []
    before, last, channels = (design.stem_multiplier * design.channels,) * 2 + (design.channels,)
    height, width = (side // design.stem_stride for side in design.input_shape[1:])
    reduced = False
    for cell in range(design.cells):
        reduction = cell in (design.cells // 3, 2 * design.cells // 3)
        channels = 2 * channels if reduction else channels
        plans.append(CellPlan(reduction, reduced, (before, last), channels, (height, width)))
        before, last, reduced = last, design.nodes * channels, reduction
        if reduction:
            height, width = height // 2, width // 2
    return tuple(plans)


class SearchableEdge(nn.Module):
    """Some or all operators of one edge, by option index; `names` are the names of all its options."""

    def __init__(self, edge: str, names: Sequence[str], ops: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.edge, self.names = edge, tuple(names)
        self.ops = nn.ModuleDict({str(option): module for option, module in ops.items()})

    def forward(self, state: State, options: Sequence[int], mix: Tensor | None = None) -> Tensor:
        """The sum of the operators' outputs, each times its entry of `mix` (one per option) if given."""
        return reduce(torch.add, outputs_of(self.ops, options, state.through, mix, f"edge {self.edge}", self.names))


class Cell(nn.Module):
    """`forward(before, last, subspace)`: the concatenation of the nodes, (N, nodes * channels, H', W')."""

    def __init__(self, plan: CellPlan, edges: Sequence[SearchableEdge], nodes: int, affine: bool) -> None:
        super().__init__()
        before, last = plan.in_channels
        preprocess = FactorisedReduction if plan.halve_first else ReluConvNorm
        self.reduction, self.nodes = plan.reduction, nodes
        self.preprocess0: nn.Module = preprocess(before, plan.channels, affine)
        self.preprocess1 = ReluConvNorm(last, plan.channels, affine)
        self.edges = nn.ModuleList(edges)

    def forward(self, before: State, last: State, subspace: Subspace, mix: Tensor | None = None) -> State:
        states = [State(before.through(self.preprocess0)), State(last.through(self.preprocess1))]
        mixes = itertools.repeat(None, len(subspace)) if mix is None else mix
        rows = zip(self.edges, subspace, mixes, strict=True)
        for _ in range(self.nodes):
            incoming = zip(states, itertools.islice(rows, len(states)), strict=True)
            terms = [edge(state, options, row) for state, (edge, options, row) in incoming if options]
            # A node whose edges are all pruned is zero.
            stride = 2 if self.reduction else 1
            states.append(State(reduce(torch.add, terms) if terms else torch.zeros_like(strided(states[0].x, stride))))
        return State(torch.cat([_with_dense_gradient(state.x) for state in states[2:]], dim=1))


def _with_dense_gradient(x: Tensor) -> Tensor:
    """The tensor with a contiguous gradient: from a concatenation it is a strided view, on which norms are slow."""
    if x.requires_grad:
        last = x.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if last else torch.contiguous_format
        x.register_hook(lambda gradient: gradient.contiguous(memory_format=layout))  # type: ignore[no-untyped-call]
    return x


class DartsNetwork(nn.Module):
    """Stem, cells and classifier: `forward(x_NCHW, subspace)` returns logits (N, classes).

    `subspace` (or an architecture) selects the operators, by default all that the network holds. `mix`
    (decisions, options) are their weights, such as MiLeNAS's softmax, by default 1. The first `base_cells` cells
    always use all of their operators (FedPNAS's shared base).
    The active operators are an argument, not state of the module.
    """

    def __init__(self, design: DartsDesign, subspace: Subspace) -> None:
        super().__init__()
        width = design.stem_multiplier * design.channels
        plans = plan_cells(design)
        self.design, self.plans, self.held = design, plans, subspace
        self.stem = nn.Sequential(
            nn.Conv2d(design.input_shape[0], width, 3, design.stem_stride, padding=1, bias=False), nn.BatchNorm2d(width)
        )
        self.cells = nn.ModuleList(
            Cell(plan, _edges(design, plan, subspace), design.nodes, design.affine) for plan in plans
        )
        self.head = nn.Linear(design.nodes * plans[-1].channels, design.num_classes)

    def forward(
        self,
        x: Tensor,
        subspace: Subspace | Architecture | None = None,
        mix: Tensor | None = None,
        base_cells: int = 0,
    ) -> Tensor:
        """Raises ValueError naming the edge if `subspace` has an operator that the network does not hold."""
        used = self.held if subspace is None else as_subspace(subspace)
        by_type, all_held = _of_types(self.design, used), _of_types(self.design, self.held)
        mixes = (None, None) if mix is None else torch.chunk(mix, 2)
        before = last = State(self.stem(x))
        for index, (plan, cell) in enumerate(zip(self.plans, self.cells, strict=True)):
            rows = (all_held if index < base_cells else by_type)[plan.reduction]
            before, last = last, cell(before, last, rows, mixes[plan.reduction])
        y: Tensor = self.head(last.x.mean(dim=(2, 3)))
        return y


def _of_types(design: DartsDesign, subspace: Subspace) -> tuple[Subspace, Subspace]:
    edges = len(design.edges)
    if len(subspace) != 2 * edges:
        raise ValueError(f"{design.name} has {2 * edges} edges ({edges} per cell type), given {len(subspace)}")
    return subspace[:edges], subspace[edges:]


def _edges(design: DartsDesign, plan: CellPlan, subspace: Subspace) -> list[SearchableEdge]:
    first = len(design.edges) if plan.reduction else 0
    edges = []
    for decision, (source, _node) in enumerate(design.edges, start=first):
        names = design.operator_names[decision]
        ops = {
            option: OPERATORS[names[option]](plan.channels, plan.stride(source), design.affine)
            for option in subspace[decision]
        }
        edges.append(SearchableEdge(design.edge_name(decision), names, ops))
    return edges


# -- the space --------------------------------------------------------------------------------------------------------

ADDITIVE_MEASURES = ("macs", "parameters", "bytes")
"""The measures that are sums over cells."""


CellCosts = tuple[tuple[float, ...], ...]
"""Costs of one cell: per edge, per operator."""


class DartsSpace(SummedOperatorSpace):
    """A search space of cells; see `fedloom.platform.spaces.base.SearchSpace` for the protocol."""

    _decision_kind = "edge"
    _tensor_of_operator = re.compile(r"cells\.(\d+)\.edges\.(\d+)\.ops\.(\d+)\.")

    def __init__(self, design: DartsDesign) -> None:
        super().__init__(design.name, design.input_shape, design.operator_names)
        self.design = design
        self.plans = plan_cells(design)

    # -- cells and edges -----------------------------------------------------------------------------------------

    @property
    def num_cells(self) -> int:
        """The number of cells of the network."""
        return self.design.cells

    def cell_type(self, cell: int) -> str:
        """`normal` or `reduction`."""
        return CELL_TYPES[self.plans[cell].reduction]

    def decisions(self, cell_type: str) -> range:
        """The decisions of a cell type, `normal` or `reduction`, in the order of `edges`."""
        if cell_type not in CELL_TYPES:
            raise ValueError(f"unknown cell type {cell_type!r}: known are {', '.join(CELL_TYPES)}")
        count = len(self.design.edges)
        first = CELL_TYPES.index(cell_type) * count
        return range(first, first + count)

    def edges(self, cell_type: str) -> tuple[Edge, ...]:
        """(source, node) per decision of a cell type; both types have the same edges."""
        self.decisions(cell_type)
        return self.design.edges

    def _decision_name(self, decision: int) -> str:
        return f"edge {self.design.edge_name(decision)}"

    def _decisions_of(self, cell: int) -> range:
        return self.decisions(self.cell_type(cell))

    # -- networks ---------------------------------------------------------------------------------------------------

    def _network(self, subspace: Subspace) -> nn.Module:
        return DartsNetwork(self.design, subspace)

    def _owner(self, *numbers: int) -> tuple[int, int]:
        cell, edge, option = numbers
        return self._decisions_of(cell)[edge], option

    def base_tensors(self, base_cells: int) -> tuple[str, ...]:
        """Names of the tensors of the stem and of the first `base_cells` cells, with all their operators.

        Raises:
            ValueError: more cells than there are, or a negative number.
        """
        self._check_base(base_cells)
        base = ("stem.", *(f"cells.{cell}." for cell in range(base_cells)))
        return tuple(name for name in self.owner_of if name.startswith(base))

    def _check_base(self, base_cells: int) -> None:
        if not 0 <= base_cells <= self.design.cells:
            raise ValueError(
                f"{self.name} has {self.design.cells} cells: base_cells={base_cells} must be from 0 to that number"
            )

    # -- costs ------------------------------------------------------------------------------------------------------

    def _parts(self, decision: int, option: int) -> Sequence[Part]:
        cells = [cell for cell in range(self.design.cells) if decision in self._decisions_of(cell)]
        return [self._part(cell, decision, option) for cell in cells]

    def _part(self, cell: int, decision: int, option: int) -> Part:
        plan, name = self.plans[cell], self.operator_names[decision][option]
        source, _node = self.design.edges[decision % len(self.design.edges)]
        stride = plan.stride(source)
        build = partial(OPERATORS[name], plan.channels, stride, self.design.affine)
        return Part((name, stride), plan.state_shape(source), build)

    def cost_of_cells(self, measure: str, subspace: Subspace, base_cells: int) -> float:
        """Cost of a network whose first `base_cells` cells keep all operators and whose other cells keep `subspace`.

        `measure` is macs (of one sample), parameters or bytes (all tensors, buffers included). With no base cells it is
        the cost of the subspace. Source: FedPNAS's shared base (Hoang & Kingsford 2021, as in SPIDER's baselines).

        Raises:
            ValueError: a measure that is not additive, a subspace outside the space, or more cells than there are.
        """
        if measure not in ADDITIVE_MEASURES:
            raise ValueError(f"{measure!r} is not counted by cells: choose one of {', '.join(ADDITIVE_MEASURES)}")
        self.validate_subspace(subspace)
        self._check_base(base_cells)
        total = self.cost_table(measure).fixed
        for cell, costs in enumerate(self._costs_by_cell(measure)):
            rows = self.largest_subspace if cell < base_cells else subspace
            decisions = self._decisions_of(cell)
            total += sum(
                row[option] for decision, row in zip(decisions, costs, strict=True) for option in rows[decision]
            )
        return total

    def _costs_by_cell(self, measure: str) -> tuple[CellCosts, ...]:
        def compute(_space: SearchSpace) -> tuple[CellCosts, ...]:
            cost = cost_of_parts(measure_of(measure))
            return tuple(
                tuple(
                    tuple(cost(self._part(cell, decision, option)) for option in range(self.options[decision]))
                    for decision in self._decisions_of(cell)
                )
                for cell in range(self.design.cells)
            )

        return once(self, f"{measure} by cell", compute)


DARTS = ("none", "max_pool_3x3", "avg_pool_3x3", "skip_connect",
         "sep_conv_3x3", "sep_conv_5x5", "dil_conv_3x3", "dil_conv_5x5")  # fmt: skip
"""The eight operators of DARTS, in the order of their option indices."""

# S1 of Zela et al. (2020), as in the authors' published code: two operators per edge, those that DARTS ranked highest.
_S1_NORMAL = (
    ("skip_connect", "dil_conv_3x3"), ("skip_connect", "dil_conv_5x5"),
    ("skip_connect", "dil_conv_5x5"), ("skip_connect", "sep_conv_3x3"), ("skip_connect", "dil_conv_3x3"),
    ("max_pool_3x3", "skip_connect"), ("skip_connect", "sep_conv_3x3"), ("skip_connect", "sep_conv_3x3"),
    ("skip_connect", "dil_conv_3x3"), ("skip_connect", "sep_conv_3x3"), ("max_pool_3x3", "skip_connect"),
    ("skip_connect", "dil_conv_3x3"), ("dil_conv_3x3", "dil_conv_5x5"), ("dil_conv_3x3", "dil_conv_5x5"),
)  # fmt: skip
_POOLS = ("max_pool_3x3", "avg_pool_3x3")
_S1_REDUCTION = (
    _POOLS, ("max_pool_3x3", "dil_conv_3x3"),
    _POOLS, _POOLS, ("skip_connect", "dil_conv_5x5"),
    _POOLS, ("max_pool_3x3", "sep_conv_3x3"), ("skip_connect", "dil_conv_3x3"), ("skip_connect", "dil_conv_5x5"),
    _POOLS, _POOLS, ("skip_connect", "dil_conv_5x5"), ("skip_connect", "dil_conv_5x5"),
    ("skip_connect", "dil_conv_5x5"),
)  # fmt: skip

DARTS_S1 = DartsDesign("darts_s1", operators=_S1_NORMAL + _S1_REDUCTION)
DARTS_S2 = DartsDesign("darts_s2")
DARTS_S3 = DartsDesign("darts_s3", operators=("none", "skip_connect", "sep_conv_3x3"))
DARTS_S4 = DartsDesign("darts_s4", operators=("noise", "sep_conv_3x3"))
DARTS_FULL = DartsDesign("darts_full", operators=DARTS)
DARTS_S2_SMALL = DartsDesign("darts_s2_small", (1, 8, 8), cells=3, channels=8, nodes=2)

# -- fixed networks of published cells: second-order DARTS (Liu et al. 2019) and FedNAS (He et al. 2020) --------------

Genotype = tuple[tuple[str, int], ...]
"""A cell as published: two pairs (operator, source) per node, in the order of the nodes."""

DARTS_V2_CELLS: tuple[Genotype, Genotype] = (
    (
        ("sep_conv_3x3", 0), ("sep_conv_3x3", 1), ("sep_conv_3x3", 0), ("sep_conv_3x3", 1),
        ("sep_conv_3x3", 1), ("skip_connect", 0), ("skip_connect", 0), ("dil_conv_3x3", 2),
    ),
    (
        ("max_pool_3x3", 0), ("max_pool_3x3", 1), ("skip_connect", 2), ("max_pool_3x3", 1),
        ("max_pool_3x3", 0), ("skip_connect", 2), ("skip_connect", 2), ("max_pool_3x3", 1),
    ),
)  # fmt: skip
"""Normal and reduction cell found by second-order DARTS on CIFAR-10 (Liu et al. 2019, Fig. 4 and 5)."""
FEDNAS_V1_CELLS: tuple[Genotype, Genotype] = (
    (
        ("sep_conv_3x3", 1), ("sep_conv_3x3", 0), ("sep_conv_3x3", 2), ("sep_conv_5x5", 0),
        ("sep_conv_3x3", 1), ("sep_conv_5x5", 3), ("dil_conv_5x5", 3), ("sep_conv_3x3", 4),
    ),
    (
        ("max_pool_3x3", 0), ("skip_connect", 1), ("max_pool_3x3", 0), ("max_pool_3x3", 2),
        ("max_pool_3x3", 0), ("dil_conv_5x5", 1), ("max_pool_3x3", 0), ("dil_conv_5x5", 2),
    ),
)  # fmt: skip
"""Normal and reduction cell found by FedNAS on CIFAR-10 (He et al. 2020, as its authors published them in FedML)."""


@dataclass(frozen=True)
class ShallowDesign(DartsDesign):
    """A design that may have only two cells, both reductions: a fixed network leaves no decision unused by it."""

    fewest_cells: ClassVar[int] = 2


@dataclass(frozen=True)
class DartsV2Design:
    """The fixed network of the cells found by DARTS (second order); for the sizes see `DartsDesign`.

    Pooling is followed by a norm, as in the search network; Liu et al. evaluate without norms.

    Raises:
        ValueError: a size that cannot be built.
    """

    name: str = "darts_v2"
    input_shape: tuple[int, int, int] = (3, 32, 32)
    num_classes: int = 10
    cells: int = 20
    channels: int = 36
    stem_stride: int = 1
    published_cells: ClassVar[tuple[Genotype, Genotype]] = DARTS_V2_CELLS
    searched: ClassVar[type[DartsDesign]] = DartsDesign

    def __post_init__(self) -> None:
        _ = self.darts

    @property
    def darts(self) -> DartsDesign:
        """The space that the network is a subspace of."""
        return self.searched(**asdict(self), operators=DARTS, affine=True)

    def build(self) -> nn.Module:
        """The network, which always uses all of its operators."""
        return DartsNetwork(self.darts, kept_by(self.darts, self.published_cells))


@dataclass(frozen=True)
class FedNasV1Design(DartsV2Design):
    """The fixed network of the cells found by FedNAS, with two or more cells."""

    name: str = "fednas_v1"
    cells: int = 2
    channels: int = 16
    published_cells: ClassVar[tuple[Genotype, Genotype]] = FEDNAS_V1_CELLS
    searched: ClassVar[type[DartsDesign]] = ShallowDesign


def kept_by(design: DartsDesign, cells: tuple[Genotype, Genotype]) -> Subspace:
    """The subspace of a published normal and reduction cell; edges that they do not name are pruned."""
    rows: list[tuple[int, ...]] = []
    for first, cell in zip((0, len(design.edges)), cells, strict=True):
        operators = {(source, 2 + i // 2): name for i, (name, source) in enumerate(cell)}
        for decision, edge in enumerate(design.edges, start=first):
            names = design.operator_names[decision]
            rows.append((names.index(operators[edge]),) if edge in operators else ())
    return tuple(rows)


DARTS_V2 = DartsV2Design()
DARTS_V2_SMALL = DartsV2Design("darts_v2_small", cells=5, channels=8)

FEDNAS_V1 = FedNasV1Design()

SPACES = {
    **spaces_of(DartsSpace, DARTS_S1, DARTS_S2, DARTS_S3, DARTS_S4, DARTS_FULL, DARTS_S2_SMALL),
    **spaces_of(FixedSpace, DARTS_V2, DARTS_V2_SMALL, FEDNAS_V1),
}
