"""Networks of DARTS cells (Liu et al. 2019; SPIDER, App. B.2): their design, cells and operators.

The operators of a network are a subspace: the kept ones per edge, all with weight 1; an edge without any is pruned.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, Final

import torch
from torch import Tensor, nn

from fedloom.platform.spaces.darts_operators import OPERATORS, FactorisedReduction, ReluConvNorm, State, strided
from fedloom.platform.spaces.slices import Architecture, Subspace

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
        _check_operators(self)

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


def _check_operators(design: DartsDesign) -> None:
    per_edge = sum(not isinstance(row, str) for row in design.operators)
    decisions = 2 * len(design.edges)
    if per_edge not in (0, len(design.operators)) or (per_edge and per_edge != decisions):
        raise ValueError(
            f"space {design.name}: operators are names for every edge, or one tuple of names for each of the "
            f"{decisions} edges, given {per_edge} tuples and {len(design.operators) - per_edge} names"
        )
    for decision, names in enumerate(design.operator_names):
        edge = f"space {design.name}: edge {design.edge_name(decision)}"
        if not names or len(set(names)) != len(names):
            raise ValueError(f"{edge} needs at least one operator and each once, given {', '.join(names) or 'none'}")
        for name in names:
            if name not in OPERATORS:
                raise ValueError(f"{edge}: unknown operator {name!r}: known are {', '.join(OPERATORS)}")


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

    @property
    def held(self) -> tuple[int, ...]:
        """The option indices of the operators in this module."""
        return tuple(map(int, self.ops))

    def forward(self, state: State, options: Sequence[int], mix: Tensor | None = None) -> Tensor:
        """The sum of the operators' outputs, each times its entry of `mix` (one per option) if given."""
        outputs = [state.through(self._operator(option)) for option in options]
        if mix is not None:
            outputs = [y * mix[option] for option, y in zip(options, outputs, strict=True)]
        return reduce(torch.add, outputs)

    def _operator(self, option: int) -> nn.Module:
        key = str(option)
        if key not in self.ops:
            held = ", ".join(f"{o} ({self.names[o]})" for o in self.held) or "nothing"
            name = self.names[option] if 0 <= option < len(self.names) else "unknown"
            raise ValueError(f"edge {self.edge} holds {held}, not {option} ({name})")
        return self.ops[key]


class Cell(nn.Module):
    """`forward(before, last, kept)`: the concatenation of the nodes, (N, nodes * channels, H', W')."""

    def __init__(self, plan: CellPlan, edges: Sequence[SearchableEdge], nodes: int, affine: bool) -> None:
        super().__init__()
        before, last = plan.in_channels
        preprocess = FactorisedReduction if plan.halve_first else ReluConvNorm
        self.reduction, self.nodes = plan.reduction, nodes
        self.preprocess0: nn.Module = preprocess(before, plan.channels, affine)
        self.preprocess1 = ReluConvNorm(last, plan.channels, affine)
        self.edges = nn.ModuleList(edges)

    def forward(self, before: State, last: State, kept: Subspace, mix: Tensor | None = None) -> State:
        states = [State(before.through(self.preprocess0)), State(last.through(self.preprocess1))]
        mixes = itertools.repeat(None, len(kept)) if mix is None else mix
        rows = zip(self.edges, kept, mixes, strict=True)
        for _ in range(self.nodes):
            incoming = zip(states, itertools.islice(rows, len(states)), strict=True)
            terms = [edge(state, options, row) for state, (edge, options, row) in incoming if options]
            states.append(State(reduce(torch.add, terms) if terms else self._nothing(states[0].x)))
        return State(torch.cat([_with_dense_gradient(state.x) for state in states[2:]], dim=1))

    def _nothing(self, x: Tensor) -> Tensor:
        """The value of a node whose edges are all pruned."""
        return torch.zeros_like(strided(x, 2 if self.reduction else 1))


def _with_dense_gradient(x: Tensor) -> Tensor:
    """The tensor; the gradient of a concatenation, a view with gaps, would send the norms before it a slow way."""
    if x.requires_grad:
        last = x.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if last else torch.contiguous_format
        x.register_hook(lambda gradient: gradient.contiguous(memory_format=layout))  # type: ignore[no-untyped-call]
    return x


class DartsNetwork(nn.Module):
    """Stem, cells and classifier: `forward(x_NCHW, kept)` returns logits (N, classes).

    `kept` is a subspace of the network's operators, or an architecture; by default all of them are used. `mix`
    (decisions, options) are weights of the operators, by default 1 (MiLeNAS's softmax). The first `base_cells` cells
    always use all of their operators (FedPNAS's shared base).
    The active operators are an argument, not state of the module.
    """

    def __init__(self, design: DartsDesign, kept: Subspace) -> None:
        super().__init__()
        width = design.stem_multiplier * design.channels
        plans = plan_cells(design)
        self.design, self.plans, self.held = design, plans, kept
        self.stem = nn.Sequential(
            nn.Conv2d(design.input_shape[0], width, 3, design.stem_stride, padding=1, bias=False), nn.BatchNorm2d(width)
        )
        self.cells = nn.ModuleList(
            Cell(plan, _edges(design, plan, kept), design.nodes, design.affine) for plan in plans
        )
        self.head = nn.Linear(design.nodes * plans[-1].channels, design.num_classes)

    def forward(
        self,
        x: Tensor,
        kept: Subspace | Architecture | None = None,
        mix: Tensor | None = None,
        base_cells: int = 0,
    ) -> Tensor:
        """Raises ValueError naming the edge if `kept` has an operator that the network does not hold."""
        used = self.held if kept is None else as_subspace(kept)
        by_type, all_held = _of_types(self.design, used), _of_types(self.design, self.held)
        mixes = (None, None) if mix is None else torch.chunk(mix, 2)
        before = last = State(self.stem(x))
        for index, (plan, cell) in enumerate(zip(self.plans, self.cells, strict=True)):
            rows = (all_held if index < base_cells else by_type)[plan.reduction]
            before, last = last, cell(before, last, rows, mixes[plan.reduction])
        y: Tensor = self.head(last.x.mean(dim=(2, 3)))
        return y


def as_subspace(kept: Subspace | Architecture) -> Subspace:
    """An architecture as the subspace of its operators; a subspace is returned unchanged."""
    return tuple(tuple(row) if isinstance(row, (tuple, list)) else (int(row),) for row in kept)


def _of_types(design: DartsDesign, kept: Subspace) -> tuple[Subspace, Subspace]:
    edges = len(design.edges)
    if len(kept) != 2 * edges:
        raise ValueError(f"{design.name} has {2 * edges} edges ({edges} per cell type), given {len(kept)}")
    return kept[:edges], kept[edges:]


def _edges(design: DartsDesign, plan: CellPlan, kept: Subspace) -> list[SearchableEdge]:
    first = len(design.edges) if plan.reduction else 0
    found = []
    for decision, (source, _node) in enumerate(design.edges, start=first):
        names = design.operator_names[decision]
        ops = {
            option: OPERATORS[names[option]](plan.channels, plan.stride(source), design.affine)
            for option in kept[decision]
        }
        found.append(SearchableEdge(design.edge_name(decision), names, ops))
    return found
