"""Spaces in which any subset of the operators of a decision may be kept, none of them included.

The outputs of a decision's kept operators are added up. Supernet, subspace and stand-alone subnet are one class of
module and name their tensors alike; they differ only in which operators they hold.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.platform.spaces.base import Architecture, Slice, SliceMap, bytes_of
from fedloom.platform.spaces.darts_network import as_subspace
from fedloom.platform.spaces.initialisation import blank, initialise, on_meta
from fedloom.platform.spaces.operator_choice import SpaceSizes, Subspace
from fedloom.tiers.costs import CostTable
from fedloom.tiers.measure import MEASURES, activation_bytes_of, latency_s_of, macs_of, parameters_of

Measure = Callable[[nn.Module, Tensor], float]
"""The cost of a module on one sample."""


@dataclass(frozen=True)
class Part:
    """A module that an operator is made of, and the shape that it reads for one sample.

    Parts with the same `kind` and shape cost the same and are measured once.
    """

    kind: tuple[object, ...]
    input_shape: tuple[int, ...]
    build: Callable[[], nn.Module] = field(compare=False)


class KeptSpace(ABC):
    """What such spaces share; see `fedloom.platform.spaces.base.SearchSpace` for the protocol.

    A space says how its decisions are called, builds a network that keeps given operators, and knows which operator a
    tensor belongs to and which modules an operator is made of.
    """

    decision_kind: ClassVar[str]
    """What a decision is called in messages, such as `edge`."""

    def __init__(self, name: str, input_shape: Sequence[int], operator_names: tuple[tuple[str, ...], ...]) -> None:
        self.name = name
        self.input_shape = tuple(input_shape)
        self.input_dtype = torch.float32
        self.operator_names = operator_names
        self.options = tuple(map(len, operator_names))
        self._tables: dict[str, CostTable] = {}

    # -- what a space says of itself --------------------------------------------------------------------------------

    @abstractmethod
    def _network(self, kept: Subspace) -> nn.Module:
        """The network that holds these operators: `forward(x, kept=None, mix=None)`."""

    @abstractmethod
    def _label(self, decision: int) -> str:
        """A decision as people read it, without its kind, such as `normal 0->2`."""

    @abstractmethod
    def _owner(self, tensor_name: str) -> tuple[int, int] | None:
        """The (decision, option) that a supernet tensor belongs to, None for the fixed part."""

    @abstractmethod
    def _parts(self, decision: int, option: int) -> Sequence[Part]:
        """The modules of an operator, wherever in the network they are."""

    # -- architectures ----------------------------------------------------------------------------------------------

    @property
    def num_architectures(self) -> int:
        """How many choices of one operator per decision there are (exact)."""
        return math.prod(self.options)

    @property
    def largest_subspace(self) -> Subspace:
        """Every operator of every decision."""
        return tuple(tuple(range(n)) for n in self.options)

    def decision_name(self, decision: int) -> str:
        """A decision with its kind, such as `edge normal 0->2`; ValueError if there is none of that number."""
        self._check_decision(decision)
        return f"{self.decision_kind} {self._label(decision)}"

    def validate(self, architecture: Architecture) -> None:
        """Raises ValueError naming the decision, what was given and its operators."""
        self._check_length("an architecture", architecture)
        for decision, option in enumerate(architecture):
            self._check_option(decision, option)

    def validate_subspace(self, kept: Subspace) -> None:
        """Raises ValueError for unknown operators, or operators out of order; a decision may keep none at all."""
        self._check_length("a subspace", kept)
        for decision, row in enumerate(kept):
            where = f"{self.decision_name(decision)} of {self.name}"
            if not isinstance(row, tuple):
                raise ValueError(f"{where} keeps a tuple of operators, given {row!r}")
            for option in row:
                self._check_option(decision, option)
            if list(row) != sorted(set(row)):
                raise ValueError(f"{where} must keep distinct operators in order, given {row}")

    def _check_decision(self, decision: int) -> None:
        if not 0 <= decision < len(self.options):
            raise ValueError(
                f"{self.name} has the {self.decision_kind}s 0 to {len(self.options) - 1}, given {decision}"
            )

    def _check_length(self, what: str, value: Sequence[object]) -> None:
        if len(value) != len(self.options):
            kinds = f"{self.decision_kind}s"
            raise ValueError(f"{what} of {self.name} has {len(self.options)} {kinds}, given {len(value)}")

    def _check_option(self, decision: int, option: int) -> None:
        names = self.operator_names[decision]
        if not (isinstance(option, (int, np.integer)) and 0 <= option < len(names)):
            known = ", ".join(f"{i} ({name})" for i, name in enumerate(names))
            raise ValueError(
                f"{self.decision_name(decision)} of {self.name} has the operators {known}, given {option!r}"
            )

    def sample(self, rng: np.random.Generator) -> Architecture:
        """A uniformly drawn architecture."""
        return tuple(rng.integers(0, self.options).tolist())

    def enumerate(self) -> Iterator[Architecture]:
        """All architectures in lexicographic order."""
        return itertools.product(*map(range, self.options))

    # -- modules ----------------------------------------------------------------------------------------------------

    def build_supernet(self) -> nn.Module:
        """The whole supernet, `forward(x, kept, mix)`; floating tensors are NaN until weights are loaded.

        `kept` is a subspace or an architecture, everything if not given; `mix` (decisions, options) are weights of the
        operators, 1 if not given.
        """
        return self.build_subspace(self.largest_subspace)

    def build_subspace(self, kept: Subspace) -> nn.Module:
        """The supernet without the operators that are not kept; floating tensors are NaN until loaded."""
        self.validate_subspace(kept)
        return blank(partial(self._network, kept))

    def build_subnet(self, architecture: Architecture) -> nn.Module:
        """One architecture as a module of its own, `forward(x)`; floating tensors are NaN until weights are loaded."""
        self.validate(architecture)
        return self.build_subspace(as_subspace(architecture))

    @cached_property
    def _meta_supernet(self) -> nn.Module:
        return on_meta(partial(self._network, self.largest_subspace)).eval()

    # -- tensors ----------------------------------------------------------------------------------------------------

    def initial_weights(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh supernet tensors drawn from the generator alone."""
        return initialise(self._meta_supernet, generator)

    def initial_subnet_weights(self, architecture: Architecture, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh tensors of one stand-alone subnet drawn from the generator alone."""
        self.validate(architecture)
        return initialise(on_meta(partial(self._network, as_subspace(architecture))), generator)

    @cached_property
    def owner_of(self) -> Mapping[str, tuple[int, int] | None]:
        """The (decision, option) that each supernet tensor belongs to, None for the fixed part; in state-dict order."""
        return MappingProxyType({name: self._owner(name) for name in self._meta_supernet.state_dict()})

    @cached_property
    def _tensors_of(self) -> Mapping[tuple[int, int] | None, tuple[str, ...]]:
        names: dict[tuple[int, int] | None, list[str]] = {None: []}
        for name, owner in self.owner_of.items():
            names.setdefault(owner, []).append(name)
        return {owner: tuple(group) for owner, group in names.items()}

    @property
    def fixed_tensors(self) -> tuple[str, ...]:
        """Names of the parameters and buffers of the fixed part, which every network has."""
        return self._tensors_of[None]

    def operator_tensors(self, decision: int, option: int) -> tuple[str, ...]:
        """Names of the parameters and buffers of one operator, wherever it is, empty for one without."""
        self._check_decision(decision)
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
        """Trainable parameters of the fixed part and of each operator."""
        return self.cost_table("parameters")

    def bytes_table(self) -> CostTable:
        """Bytes of all tensors, buffers included, of the fixed part and of each operator: what travels."""
        return self.cost_table("bytes")

    def cost_table(self, measure: str) -> CostTable:
        """Costs of the fixed part and of every operator, for one sample; computed once.

        An operator's cost is that of all its modules in the network together (of a peak, the largest). `measure` is one
        of `fedloom.tiers.measure.MEASURES`, or bytes (all tensors, buffers included: what travels). Latency is measured
        here and now on one CPU sample, operator by operator.

        Raises:
            ValueError: an unknown measure.
        """
        if measure not in self._tables:
            self._tables[measure] = self._table_of(measure, *measure_of(measure))
        return self._tables[measure]

    def latency_table(self, device: str = "cpu", *, warmup: int = 3, repeats: int = 20) -> CostTable:
        """Median seconds of a network without operators and of every operator, measured now on the device."""
        return self._table_of("latency_s", _seconds(warmup, repeats), device)

    def _table_of(self, measure: str, of: Measure, device: str) -> CostTable:
        join = sum if MEASURES.get(measure, "sum") == "sum" else max
        cost = PartCosts(of, device)
        rows = tuple(
            tuple(float(join(map(cost, self._parts(decision, option)))) for option in range(n))
            for decision, n in enumerate(self.options)
        )
        fixed = cost_of(partial(self._network, ((),) * len(self.options)), (1, *self.input_shape), of, device)
        return CostTable(measure, fixed, rows, MEASURES.get(measure, "sum"))


class PartCosts:
    """The cost of a part under one measure; equal parts are measured once."""

    def __init__(self, of: Measure, device: str) -> None:
        self.of, self.device = of, device
        self._known: dict[Part, float] = {}

    def __call__(self, part: Part) -> float:
        if part not in self._known:
            # An identity does no work; what it reads is in memory already.
            idle = isinstance(on_meta(part.build), nn.Identity)
            self._known[part] = 0.0 if idle else cost_of(part.build, part.input_shape, self.of, self.device)
        return self._known[part]


def measure_of(measure: str) -> tuple[Measure, str]:
    """How a measure is taken of a module, and the device on which; ValueError for an unknown one."""
    match measure:
        case "macs":
            return macs_of, "meta"
        case "parameters":
            return lambda module, _x: parameters_of(module), "meta"
        case "bytes":
            return lambda module, _x: bytes_of(module.state_dict()), "meta"
        case "activation_bytes":
            return activation_bytes_of, "meta"
        case "latency_s":
            return _seconds(warmup=3, repeats=20), "cpu"
    raise ValueError(f"unknown measure {measure!r}: known are {', '.join(MEASURES)}, bytes")


def _seconds(warmup: int, repeats: int) -> Measure:
    return lambda module, x: latency_s_of(module, x, warmup=warmup, repeats=repeats).median_s


def cost_of(build: Callable[[], nn.Module], input_shape: tuple[int, ...], of: Measure, device: str) -> float:
    """A module's cost on an input of zeros; no global generator moves, though noise draws when it is timed."""
    place = torch.device(device)
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        return float(of(_ready(build, device), torch.zeros(input_shape, device=place)))


def _ready(build: Callable[[], nn.Module], device: str) -> nn.Module:
    """A module to be measured; with values where it really runs, since NaN may take another path through a kernel."""
    module = on_meta(build).eval()
    if device == "meta":
        return module
    weights = initialise(module, torch.Generator().manual_seed(0))
    module.to_empty(device=device).load_state_dict(weights)
    return module
