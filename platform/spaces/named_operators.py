"""Spaces whose decisions choose among named operators, each with its own tensors.

Supernet, subspace and stand-alone subnet consist of the same modules with the same tensor names; they differ only in
the operators that they hold.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.initialisation import blank, initialise, on_meta
from fedloom.platform.spaces.measuring import Measure, measure_of, median_seconds
from fedloom.platform.spaces.slices import Architecture, Slice, SliceMap, Subspace
from fedloom.tiers.costs import CostTable


@dataclass(frozen=True)
class SpaceSizes:
    """Trainable parameters of the whole supernet, of its fixed part, and of its smallest and largest paths."""

    supernet: int
    fixed: int
    smallest_path: int
    largest_path: int


class NamedOperatorSpace(SearchSpace, ABC):
    """Base class of such spaces.

    Subclasses name the kind of decision, build a network of given operators, map tensors to operators, and measure the
    operators' costs.
    """

    decision_kind: ClassVar[str]
    """The word for a decision in messages, such as `edge`."""

    def __init__(
        self,
        name: str,
        input_shape: Sequence[int],
        operator_names: tuple[tuple[str, ...], ...],
        input_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.name = name
        self.input_shape = tuple(input_shape)
        self.input_dtype = input_dtype
        self.operator_names = operator_names
        self.options = tuple(map(len, operator_names))
        self._tables: dict[str, CostTable] = {}

    # -- to be overridden -------------------------------------------------------------------------------------------

    @abstractmethod
    def _network(self, kept: Subspace) -> nn.Module:
        """The network of these operators."""

    def _subnet(self, architecture: Architecture) -> nn.Module:
        """The network of one architecture, `forward(x)`."""
        return self._network(_path(architecture))

    def _label(self, decision: int) -> str:
        """A decision's readable name without its kind, such as `normal 0->2`."""
        return str(decision)

    def _known(self, decision: int) -> str:
        """The operators of a decision, for messages."""
        return ", ".join(f"{i} ({name})" for i, name in enumerate(self.operator_names[decision]))

    @abstractmethod
    def _owner(self, tensor_name: str) -> tuple[int, int] | None:
        """The (decision, option) that a supernet tensor belongs to, None for the fixed part."""

    @abstractmethod
    def _table_of(self, measure: str, of: Measure, device: str) -> CostTable:
        """The costs of the fixed part and of every operator, measured on the device."""

    # -- architectures ----------------------------------------------------------------------------------------------

    @property
    def slices_tensors(self) -> bool:
        """False: every operator has its own tensors."""
        return False

    @property
    def largest_subspace(self) -> Subspace:
        """Every operator of every decision."""
        return tuple(tuple(range(n)) for n in self.options)

    def decision_name(self, decision: int) -> str:
        """A decision with its kind, such as `edge normal 0->2`; ValueError if the decision does not exist."""
        self._check_decision(decision)
        return f"{self.decision_kind} {self._label(decision)}"

    def validate(self, architecture: Architecture) -> None:
        """Raises ValueError naming the decision, what was given and its operators."""
        self._check_length("an architecture", architecture)
        for decision, option in enumerate(architecture):
            self._check_option(decision, option)

    def validate_subspace(self, kept: Subspace) -> None:
        """Raises ValueError for unknown operators, operators out of order, and other invalid rows."""
        self._check_length("a subspace", kept)
        for decision, row in enumerate(kept):
            self._check_row(decision, row)

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
        if not (isinstance(option, (int, np.integer)) and 0 <= option < self.options[decision]):
            where = f"{self.decision_name(decision)} of {self.name}"
            raise ValueError(f"{where} has the operators {self._known(decision)}, given {option!r}")

    def _check_row(self, decision: int, row: tuple[int, ...]) -> None:
        for option in row:
            self._check_option(decision, option)
        if list(row) != sorted(set(row)):
            self._refuse_row(decision, row)

    def _refuse_row(self, decision: int, row: tuple[int, ...]) -> NoReturn:
        where = f"{self.decision_name(decision)} of {self.name}"
        raise ValueError(f"{where} must keep distinct operators in order, given {row}")

    def meaning(self, architecture: Architecture) -> Mapping[str, Any]:
        """The operator of every decision."""
        return {"operators": [names[o] for names, o in zip(self.operator_names, architecture, strict=True)]}

    def figures(self) -> Mapping[str, Any]:
        """The supernet's parameters, the number of decisions, and the operators to choose from."""
        sizes = self.num_parameters
        return {
            "parameters": {"supernet": sizes.supernet, "fixed": sizes.fixed, "largest": sizes.largest_path},
            f"{self.decision_kind}s": len(self.options),
            "operators": list(dict.fromkeys(name for names in self.operator_names for name in names)),
        }

    # -- modules ----------------------------------------------------------------------------------------------------

    def build_supernet(self) -> nn.Module:
        """The whole supernet; floating tensors are NaN until weights are loaded."""
        return self.build_subspace(self.largest_subspace)

    def build_subspace(self, kept: Subspace) -> nn.Module:
        """The supernet with only the kept operators; floating tensors are NaN until weights are loaded."""
        self.validate_subspace(kept)
        return blank(partial(self._network, kept))

    def build_subnet(self, architecture: Architecture) -> nn.Module:
        """A stand-alone module of one architecture, `forward(x)`; floating tensors are NaN until weights are loaded."""
        self.validate(architecture)
        return blank(partial(self._subnet, architecture))

    @cached_property
    def _meta_supernet(self) -> nn.Module:
        return on_meta(partial(self._network, self.largest_subspace)).eval()

    # -- tensors ----------------------------------------------------------------------------------------------------

    def initial_weights(self, generator: torch.Generator) -> dict[str, Tensor]:
        return initialise(self._meta_supernet, generator)

    def initial_subnet_weights(self, architecture: Architecture, generator: torch.Generator) -> dict[str, Tensor]:
        self.validate(architecture)
        return initialise(on_meta(partial(self._subnet, architecture)), generator)

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
        """Names of the parameters and buffers of one operator anywhere in the network; empty if it has none."""
        self._check_decision(decision)
        self._check_option(decision, option)
        return self._tensors_of.get((decision, option), ())

    def slices(self, architecture: Architecture) -> SliceMap:
        """The slice of each subnet tensor: the whole supernet tensor of the same name."""
        self.validate(architecture)
        return self._slices_of(_path(architecture))

    def subspace_slices(self, kept: Subspace) -> SliceMap:
        """The tensors of the fixed part and of the kept operators, as slices of the supernet."""
        self.validate_subspace(kept)
        return self._slices_of(kept)

    def _slices_of(self, kept: Subspace) -> SliceMap:
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

    def cost_table(self, measure: str) -> CostTable:
        """Costs of the fixed part and of every operator, for one sample; computed once.

        An operator's cost is the sum over all of its modules in the network (for peaks, the maximum). `measure` is one
        of `fedloom.tiers.measure.MEASURES`, or bytes (of all sent tensors, buffers included). Latency is measured on
        this host's CPU with one sample, operator by operator.

        Raises:
            ValueError: an unknown measure.
        """
        if measure not in self._tables:
            self._tables[measure] = self._table_of(measure, *measure_of(measure))
        return self._tables[measure]

    def latency_table(self, device: str = "cpu", *, warmup: int = 3, repeats: int = 20) -> CostTable:
        """Measures the median seconds of the fixed part and of every operator with one sample on the device."""
        return self._table_of("latency_s", median_seconds(warmup, repeats), device)


def _path(architecture: Architecture) -> Subspace:
    return tuple((int(option),) for option in architecture)
