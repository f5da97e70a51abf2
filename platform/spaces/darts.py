"""The space of DARTS cells: all normal cells share one architecture, all reduction cells another (SPIDER, App. B.2).

A decision is an edge of a cell type, an option one of its operators; each cell has weights of its own for them.
Supernet, subspace and stand-alone subnet are the same class, `DartsNetwork`, and name their tensors alike
(`cells.<cell>.edges.<edge>.ops.<option>.*`); they differ only in which operators they hold.
"""

import re
from collections.abc import Sequence
from functools import partial

from torch import nn

from fedloom.platform.spaces.darts_network import (
    CELL_TYPES,
    DartsDesign,
    DartsNetwork,
    Edge,
    plan_cells,
)
from fedloom.platform.spaces.darts_operators import OPERATORS
from fedloom.platform.spaces.kept import KeptSpace, Part, PartCosts
from fedloom.platform.spaces.measuring import measure_of
from fedloom.platform.spaces.slices import Subspace
from fedloom.platform.spaces.space_config import Spaces, from_design

ADDITIVE_MEASURES = ("macs", "parameters", "bytes")
"""The measures that are sums over cells."""


CellCosts = tuple[tuple[float, ...], ...]
"""Costs of one cell: per edge, per operator."""

_OWNED = re.compile(r"cells\.(\d+)\.edges\.(\d+)\.ops\.(\d+)\.")


class DartsSpace(KeptSpace):
    """A search space of cells; see `fedloom.platform.spaces.base.SearchSpace` for the protocol."""

    decision_kind = "edge"

    def __init__(self, design: DartsDesign) -> None:
        super().__init__(design.name, design.input_shape, design.operator_names)
        self.design = design
        self.plans = plan_cells(design)
        self._cell_costs: dict[str, tuple[CellCosts, ...]] = {}

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

    def edge_name(self, decision: int) -> str:
        """A decision's readable name, such as `normal 0->2`; ValueError if the decision does not exist."""
        self._check_decision(decision)
        return self._label(decision)

    def _label(self, decision: int) -> str:
        return self.design.edge_name(decision)

    def _decisions_of(self, cell: int) -> range:
        return self.decisions(CELL_TYPES[self.plans[cell].reduction])

    # -- networks ---------------------------------------------------------------------------------------------------

    def _network(self, kept: Subspace) -> nn.Module:
        return DartsNetwork(self.design, kept)

    def _owner(self, tensor_name: str) -> tuple[int, int] | None:
        match = _OWNED.match(tensor_name)
        if match is None:
            return None
        cell, edge, option = map(int, match.groups())
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
            raise ValueError(f"{self.name} has {self.design.cells} cells: base_cells={base_cells} must be 0 to that")

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

    def cost_of_cells(self, measure: str, kept: Subspace, base_cells: int) -> float:
        """Cost of a network whose first `base_cells` cells keep all operators and whose other cells keep `kept`.

        `measure` is macs (of one sample), parameters or bytes (all tensors, buffers included). With no base cells it is
        the cost of the subspace. Source: FedPNAS's shared base (Hoang & Kingsford 2021, as in SPIDER's baselines).

        Raises:
            ValueError: a measure that is not additive, a subspace outside the space, or more cells than there are.
        """
        if measure not in ADDITIVE_MEASURES:
            raise ValueError(f"{measure!r} is not counted by cells: choose one of {', '.join(ADDITIVE_MEASURES)}")
        self.validate_subspace(kept)
        self._check_base(base_cells)
        total = self.cost_table(measure).fixed
        for cell, costs in enumerate(self._costs_by_cell(measure)):
            rows = self.largest_subspace if cell < base_cells else kept
            decisions = self._decisions_of(cell)
            total += sum(
                row[option] for decision, row in zip(decisions, costs, strict=True) for option in rows[decision]
            )
        return total

    def _costs_by_cell(self, measure: str) -> tuple[CellCosts, ...]:
        if measure not in self._cell_costs:
            cost = PartCosts(*measure_of(measure))
            self._cell_costs[measure] = tuple(
                tuple(
                    tuple(cost(self._part(cell, decision, option)) for option in range(self.options[decision]))
                    for decision in self._decisions_of(cell)
                )
                for cell in range(self.design.cells)
            )
        return self._cell_costs[measure]


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

SPACES: Spaces = {
    design.name: partial(from_design, DartsSpace, design)
    for design in (DARTS_S1, DARTS_S2, DARTS_S3, DARTS_S4, DARTS_FULL, DARTS_S2_SMALL)
}
