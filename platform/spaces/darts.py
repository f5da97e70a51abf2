"""The space of DARTS cells: all normal cells share one architecture, all reduction cells another (SPIDER, App. B.2).

A decision is an edge of a cell type, an option one of its operators; each cell has weights of its own for them.
Supernet, subspace and stand-alone subnet are the same class, `DartsNetwork`, and name their tensors alike
(`cells.<cell>.edges.<edge>.ops.<option>.*`); they differ only in which operators they hold.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.platform.spaces.base import Architecture, Slice, SliceMap, bytes_of
from fedloom.platform.spaces.darts_network import (
    CELL_TYPES,
    CellPlan,
    DartsDesign,
    DartsNetwork,
    Edge,
    as_subspace,
    plan_cells,
)
from fedloom.platform.spaces.darts_operators import OPERATORS
from fedloom.platform.spaces.initialisation import blank, initialise, on_meta
from fedloom.platform.spaces.operator_choice import SpaceSizes, Subspace
from fedloom.tiers.costs import CostTable
from fedloom.tiers.measure import MEASURES, activation_bytes_of, latency_s_of, macs_of


class DartsSpace:
    """A search space of cells; see `fedloom.platform.spaces.base.SearchSpace` for the protocol."""

    def __init__(self, design: DartsDesign) -> None:
        self.design = design
        self.name = design.name
        self.input_shape = tuple(design.input_shape)
        self.input_dtype = torch.float32
        self.operator_names = design.operator_names
        self.options = tuple(map(len, self.operator_names))
        self.plans = plan_cells(design)
        self._tables: dict[str, CostTable] = {}

    # -- architectures ----------------------------------------------------------------------------------------------

    @property
    def num_architectures(self) -> int:
        """How many choices of one operator per edge there are (exact)."""
        return math.prod(self.options)

    @property
    def largest_subspace(self) -> Subspace:
        """Every operator of every edge."""
        return tuple(tuple(range(n)) for n in self.options)

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
        """A decision as people read it, such as `normal 0->2`; ValueError if there is none of that number."""
        if not 0 <= decision < len(self.options):
            raise ValueError(f"{self.name} has the edges 0 to {len(self.options) - 1}, given {decision}")
        return self.design.edge_name(decision)

    def validate(self, architecture: Architecture) -> None:
        """Raises ValueError naming the edge, what was given and its operators."""
        self._check_length("an architecture", architecture)
        for decision, option in enumerate(architecture):
            self._check_option(decision, option)

    def validate_subspace(self, kept: Subspace) -> None:
        """Raises ValueError if an edge keeps an unknown operator, or operators out of order; none at all is allowed."""
        self._check_length("a subspace", kept)
        for decision, row in enumerate(kept):
            if not isinstance(row, tuple):
                raise ValueError(
                    f"edge {self.edge_name(decision)} of {self.name} keeps a tuple of operators, given {row!r}"
                )
            for option in row:
                self._check_option(decision, option)
            if list(row) != sorted(set(row)):
                raise ValueError(
                    f"edge {self.edge_name(decision)} of {self.name} must keep distinct operators in order, given {row}"
                )

    def _check_length(self, what: str, value: Sequence[object]) -> None:
        if len(value) != len(self.options):
            raise ValueError(f"{what} of {self.name} has {len(self.options)} edges, given {len(value)}")

    def _check_option(self, decision: int, option: int) -> None:
        names = self.operator_names[decision]
        if not (isinstance(option, (int, np.integer)) and 0 <= option < len(names)):
            known = ", ".join(f"{i} ({name})" for i, name in enumerate(names))
            raise ValueError(
                f"edge {self.edge_name(decision)} of {self.name} has the operators {known}, given {option!r}"
            )

    def sample(self, rng: np.random.Generator) -> Architecture:
        """A uniformly drawn architecture."""
        return tuple(rng.integers(0, self.options).tolist())

    def enumerate(self) -> Iterator[Architecture]:
        """All architectures in lexicographic order."""
        return itertools.product(*map(range, self.options))

    # -- modules ----------------------------------------------------------------------------------------------------

    def build_supernet(self) -> nn.Module:
        """The whole supernet, see `DartsNetwork`; floating tensors are NaN until weights are loaded."""
        return self.build_subspace(self.largest_subspace)

    def build_subspace(self, kept: Subspace) -> nn.Module:
        """The supernet without the operators that are not kept; floating tensors are NaN until loaded."""
        self.validate_subspace(kept)
        return blank(partial(DartsNetwork, self.design, kept))

    def build_subnet(self, architecture: Architecture) -> nn.Module:
        """One architecture as a module of its own, `forward(x)`; floating tensors are NaN until weights are loaded."""
        self.validate(architecture)
        return self.build_subspace(as_subspace(architecture))

    @cached_property
    def _meta_supernet(self) -> nn.Module:
        return on_meta(partial(DartsNetwork, self.design, self.largest_subspace)).eval()

    # -- tensors ----------------------------------------------------------------------------------------------------

    def initial_weights(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh supernet tensors drawn from the generator alone."""
        return initialise(self._meta_supernet, generator)

    def initial_subnet_weights(self, architecture: Architecture, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh tensors of one stand-alone subnet drawn from the generator alone."""
        self.validate(architecture)
        return initialise(on_meta(partial(DartsNetwork, self.design, as_subspace(architecture))), generator)

    @cached_property
    def owner_of(self) -> Mapping[str, tuple[int, int] | None]:
        """The (edge, option) that each supernet tensor belongs to, None for stem, preprocessing and head."""
        return MappingProxyType({name: self._owner(name) for name in self._meta_supernet.state_dict()})

    def _owner(self, tensor_name: str) -> tuple[int, int] | None:
        match = _OWNED.match(tensor_name)
        if match is None:
            return None
        cell, edge, option = map(int, match.groups())
        return self.decisions(CELL_TYPES[self.plans[cell].reduction])[edge], option

    @cached_property
    def _tensors_of(self) -> Mapping[tuple[int, int] | None, tuple[str, ...]]:
        names: dict[tuple[int, int] | None, list[str]] = {None: []}
        for name, owner in self.owner_of.items():
            names.setdefault(owner, []).append(name)
        return {owner: tuple(group) for owner, group in names.items()}

    @property
    def fixed_tensors(self) -> tuple[str, ...]:
        """Names of the parameters and buffers of stem, preprocessing and head, which every network has."""
        return self._tensors_of[None]

    def operator_tensors(self, decision: int, option: int) -> tuple[str, ...]:
        """Names of the parameters and buffers of one operator in all cells of its type, empty for one without."""
        self.edge_name(decision)
        self._check_option(decision, option)
        return self._tensors_of.get((decision, option), ())

    def slices(self, architecture: Architecture) -> SliceMap:
        """Where each tensor of the stand-alone subnet lies in the supernet: whole tensors, under the same names."""
        self.validate(architecture)
        return self.subspace_slices(as_subspace(architecture))

    def subspace_slices(self, kept: Subspace) -> SliceMap:
        """The tensors of the fixed part and of the kept operators, as slices of the supernet."""
        self.validate_subspace(kept)
        owners = [(decision, option) for decision, row in enumerate(kept) for option in row]
        groups = [self.fixed_tensors, *(self._tensors_of.get(owner, ()) for owner in owners)]
        return {name: self._slice_of[name] for group in groups for name in group}

    @cached_property
    def _slice_of(self) -> Mapping[str, Slice]:
        return {name: Slice(name) for name in self.owner_of}

    # -- costs ------------------------------------------------------------------------------------------------------

    @property
    def num_parameters(self) -> SpaceSizes:
        """Trainable parameters of the supernet, its fixed part, its smallest and its largest architecture."""
        table = self.parameters_table()
        supernet = table.fixed + sum(map(sum, table.options))
        return SpaceSizes(int(supernet), int(table.fixed), int(table.smallest), int(table.largest))

    def parameters_table(self) -> CostTable:
        """Trainable parameters of the fixed part and of each edge's operators."""
        return self.cost_table("parameters")

    def bytes_table(self) -> CostTable:
        """Bytes of all tensors, buffers included, of the fixed part and of each edge's operators: what travels."""
        return self.cost_table("bytes")

    def cost_table(self, measure: str) -> CostTable:
        """Costs of stem, preprocessing and head and of every operator, for one sample; computed once.

        An operator's cost is that of all cells of its edge's type together (of a peak, the largest). `measure` is one
        of `fedloom.tiers.measure.MEASURES`, or bytes (all tensors, buffers included: what travels). Latency is measured
        here and now on one CPU sample, operator by operator.

        Raises:
            ValueError: an unknown measure.
        """
        if measure not in self._tables:
            self._tables[measure] = self._measured(measure)
        return self._tables[measure]

    def _measured(self, measure: str) -> CostTable:
        match measure:
            case "macs":
                return self._table_of(measure, macs_of)
            case "parameters":
                return self._table_of(measure, lambda module, _x: sum(p.numel() for p in module.parameters()))
            case "bytes":
                return self._table_of(measure, lambda module, _x: bytes_of(module.state_dict()))
            case "activation_bytes":
                return self._table_of(measure, activation_bytes_of)
            case "latency_s":
                return self.latency_table()
        raise ValueError(f"unknown measure {measure!r}: known are {', '.join(MEASURES)}, bytes")

    def latency_table(self, device: str = "cpu", *, warmup: int = 3, repeats: int = 20) -> CostTable:
        """Median seconds of a network without operators and of every operator, measured now on the device."""

        def seconds(module: nn.Module, x: Tensor) -> float:
            return latency_s_of(module, x, warmup=warmup, repeats=repeats).median_s

        place = torch.device(device)
        with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):  # noise draws when it is timed
            return self._table_of("latency_s", seconds, device)

    def _table_of(self, measure: str, of: Callable[[nn.Module, Tensor], float], device: str = "meta") -> CostTable:
        """Operators are measured once per shape and stride, and joined over the cells of their type."""
        known: dict[tuple[str, int, tuple[int, ...]], float] = {}

        def cost(plan: CellPlan, source: int, name: str) -> float:
            key = (name, plan.stride(source), plan.state_shape(source))
            if key not in known:
                module = _ready(
                    partial(OPERATORS[name], plan.channels, plan.stride(source), self.design.affine), device
                )
                # An identity does no work; what it reads is in memory already.
                idle = isinstance(module, nn.Identity)
                known[key] = 0.0 if idle else float(of(module, torch.zeros(key[2], device=device)))
            return known[key]

        join = sum if MEASURES.get(measure, "sum") == "sum" else max
        rows = []
        for decision, names in enumerate(self.operator_names):
            cell_type, edge = divmod(decision, len(self.design.edges))
            plans, source = [p for p in self.plans if p.reduction == bool(cell_type)], self.design.edges[edge][0]
            rows.append(tuple(float(join([cost(plan, source, name) for plan in plans])) for name in names))
        bare = _ready(partial(DartsNetwork, self.design, ((),) * len(self.options)), device)
        fixed = of(bare, torch.zeros((1, *self.input_shape), device=device))
        return CostTable(measure, float(fixed), tuple(rows), MEASURES.get(measure, "sum"))


_OWNED = re.compile(r"cells\.(\d+)\.edges\.(\d+)\.ops\.(\d+)\.")


def _ready(build: Callable[[], nn.Module], device: str) -> nn.Module:
    """A module to be measured; with values where it really runs, since NaN may take another path through a kernel."""
    module = on_meta(build).eval()
    if device == "meta":
        return module
    weights = initialise(module, torch.Generator().manual_seed(0))
    module.to_empty(device=device).load_state_dict(weights)
    return module


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

__all__ = ["CELL_TYPES", "DartsDesign", "DartsNetwork", "DartsSpace", "Edge", "Subspace", "as_subspace"]
