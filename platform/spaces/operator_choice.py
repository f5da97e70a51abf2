"""Operator-choice spaces (FedorAS): a fixed skeleton with searchable layers, a path picks one operator per layer.

Supernet, subspace and stand-alone subnet are made of the same modules and name their tensors alike
(`fixed.*`, `layers.<layer>.ops.<operator>.*`); they differ only in which operators they hold.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.platform.spaces.base import Architecture, Slice, SliceMap, bytes_of
from fedloom.platform.spaces.initialisation import blank, initialise, on_meta
from fedloom.tiers.costs import CostTable
from fedloom.tiers.measure import MEASURES, Latency, activation_bytes_of, latency_s_of, macs_of

Subspace = tuple[tuple[int, ...], ...]
"""The operators held per layer: sorted option indices."""

T = TypeVar("T")


@dataclass(frozen=True)
class Candidate:
    """An operator in its layer: `build()` makes its module, which maps the layer's input to the layer's output."""

    name: str
    build: Callable[[], nn.Module]


@dataclass(frozen=True)
class SpaceSizes:
    """Trainable parameters of the whole supernet, of its fixed part, and of its smallest and largest paths."""

    supernet: int
    fixed: int
    smallest_path: int
    largest_path: int


class SearchableLayer(nn.Module):
    """Some or all candidate operators of one layer, by option index."""

    def __init__(self, layer: int, candidates: Sequence[Candidate], kept: Sequence[int]) -> None:
        super().__init__()
        self.layer = layer
        self.ops = nn.ModuleDict({str(option): candidates[option].build() for option in kept})

    def forward(self, x: Tensor, option: int) -> Tensor:
        key = str(option)
        if key not in self.ops:
            raise ValueError(f"layer {self.layer} holds the operators {', '.join(self.ops)}, not {option}")
        y: Tensor = self.ops[key](x)
        return y


class PathNetwork(nn.Module):
    """A skeleton and its searchable layers: `forward(x, architecture)`.

    `fixed` is called as `fixed(x, layers)` with one function per searchable layer, in order.
    """

    def __init__(self, fixed: nn.Module, layers: Sequence[SearchableLayer]) -> None:
        super().__init__()
        self.fixed = fixed
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, architecture: Architecture) -> Tensor:
        pairs = zip(self.layers, architecture, strict=True)
        y: Tensor = self.fixed(x, [partial(layer, option=option) for layer, option in pairs])
        return y


class StandAloneNetwork(PathNetwork):
    """A path network that holds one operator per layer: `forward(x)`."""

    def __init__(self, fixed: nn.Module, layers: Sequence[SearchableLayer], architecture: Architecture) -> None:
        super().__init__(fixed, layers)
        self.architecture = architecture

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # the path is part of what it is
        return super().forward(x, self.architecture)


class _FixedPart(nn.Module):
    """The skeleton alone: the layers' outputs are given, whatever their inputs."""

    def __init__(self, fixed: nn.Module, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.fixed = fixed
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fixed(x, [lambda _x, y=y: y for y in self.outputs])
        return y


class OperatorChoiceSpace:
    """A search space of paths; see `fedloom.platform.spaces.base.SearchSpace` for the protocol.

    `layers` holds the candidates of each searchable layer; `build_fixed()` makes the skeleton, a module called as
    `fixed(x, layers)`. All candidates of a layer must give the same output shape.
    """

    def __init__(
        self,
        *,
        name: str,
        input_shape: Sequence[int],
        layers: Sequence[Sequence[Candidate]],
        build_fixed: Callable[[], nn.Module],
        input_dtype: torch.dtype = torch.float32,
    ) -> None:
        for layer, candidates in enumerate(layers):
            if not candidates:
                raise ValueError(f"layer {layer} of {name} has no operator: give it at least one")
        self.name = name
        self.input_shape = tuple(input_shape)
        self.input_dtype = input_dtype
        self.candidates = tuple(tuple(row) for row in layers)
        self.build_fixed = build_fixed
        self.options = tuple(len(row) for row in self.candidates)
        self.operator_names = tuple(tuple(c.name for c in row) for row in self.candidates)
        self._tables: dict[str, CostTable] = {}

    # -- architectures ----------------------------------------------------------------------------------------------

    @property
    def num_architectures(self) -> int:
        """How many paths there are (exact)."""
        return math.prod(self.options)

    @property
    def largest_subspace(self) -> Subspace:
        """Every operator of every layer."""
        return tuple(tuple(range(n)) for n in self.options)

    def validate(self, architecture: Architecture) -> None:
        """Raises ValueError naming the layer, what was given and the allowed range."""
        self._check_length("an architecture", architecture)
        for layer, option in enumerate(architecture):
            self._check_option(layer, option)

    def validate_subspace(self, kept: Subspace) -> None:
        """Raises ValueError if a layer keeps nothing, an unknown operator, or operators out of order."""
        self._check_length("a subspace", kept)
        for layer, row in enumerate(kept):
            if not row or list(row) != sorted(set(row)):
                raise ValueError(f"layer {layer} of {self.name} must keep distinct operators in order, given {row}")
            for option in row:
                self._check_option(layer, option)

    def _check_length(self, what: str, value: Sequence[object]) -> None:
        if len(value) != len(self.options):
            raise ValueError(f"{what} of {self.name} has {len(self.options)} layers, given {len(value)}")

    def _check_option(self, layer: int, option: int) -> None:
        if not (isinstance(option, (int, np.integer)) and 0 <= option < self.options[layer]):
            raise ValueError(
                f"layer {layer} of {self.name} has the operators 0 to {self.options[layer] - 1} "
                f"({', '.join(self.operator_names[layer])}), given {option!r}"
            )

    def sample(self, rng: np.random.Generator) -> Architecture:
        """A uniformly drawn path."""
        return tuple(rng.integers(0, self.options).tolist())

    def enumerate(self) -> Iterator[Architecture]:
        """All paths in lexicographic order."""
        return itertools.product(*map(range, self.options))

    # -- modules ----------------------------------------------------------------------------------------------------

    def _layers(self, kept: Subspace) -> list[SearchableLayer]:
        return [SearchableLayer(i, *pair) for i, pair in enumerate(zip(self.candidates, kept, strict=True))]

    def _path_network(self, kept: Subspace) -> nn.Module:
        return PathNetwork(self.build_fixed(), self._layers(kept))

    def _stand_alone(self, architecture: Architecture) -> nn.Module:
        kept = tuple((option,) for option in architecture)
        return StandAloneNetwork(self.build_fixed(), self._layers(kept), architecture)

    def build_supernet(self) -> nn.Module:
        """The whole supernet, `forward(x, architecture)`; floating tensors are NaN until weights are loaded."""
        return self.build_subspace(self.largest_subspace)

    def build_subspace(self, kept: Subspace) -> nn.Module:
        """The supernet without the operators that are not kept; floating tensors are NaN until loaded."""
        self.validate_subspace(kept)
        return blank(partial(self._path_network, kept))

    def build_subnet(self, architecture: Architecture) -> nn.Module:
        """One path as a module of its own, `forward(x)`; floating tensors are NaN until weights are loaded."""
        self.validate(architecture)
        return blank(partial(self._stand_alone, architecture))

    @cached_property
    def _meta_supernet(self) -> nn.Module:
        return on_meta(partial(self._path_network, self.largest_subspace)).eval()

    # -- tensors ----------------------------------------------------------------------------------------------------

    def initial_weights(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh supernet tensors drawn from the generator alone."""
        return initialise(self._meta_supernet, generator)

    def initial_subnet_weights(self, architecture: Architecture, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh tensors of one stand-alone subnet drawn from the generator alone."""
        self.validate(architecture)
        return initialise(on_meta(partial(self._stand_alone, architecture)), generator)

    @cached_property
    def owner_of(self) -> Mapping[str, tuple[int, int] | None]:
        """The (layer, option) that each supernet tensor belongs to, None for the fixed part; in state-dict order."""
        return MappingProxyType({name: _owner(name) for name in self._meta_supernet.state_dict()})

    @cached_property
    def _tensors_of(self) -> Mapping[tuple[int, int] | None, tuple[str, ...]]:
        names: dict[tuple[int, int] | None, list[str]] = {None: []}
        for name, owner in self.owner_of.items():
            names.setdefault(owner, []).append(name)
        return {owner: tuple(group) for owner, group in names.items()}

    @property
    def fixed_tensors(self) -> tuple[str, ...]:
        """Names of the parameters and buffers that every path uses."""
        return self._tensors_of[None]

    def operator_tensors(self, layer: int, option: int) -> tuple[str, ...]:
        """Names of the parameters and buffers of one operator, empty for one without."""
        self._check_option(layer, option)
        return self._tensors_of.get((layer, option), ())

    @cached_property
    def _slice_of(self) -> Mapping[str, Slice]:
        return {name: Slice(name) for name in self.owner_of}

    def slices(self, architecture: Architecture) -> SliceMap:
        """Where each tensor of the stand-alone subnet lies in the supernet: whole tensors, under the same names."""
        self.validate(architecture)
        return self._slices_of([(layer, option) for layer, option in enumerate(architecture)])

    def subspace_slices(self, kept: Subspace) -> SliceMap:
        """The tensors of the fixed part and of the kept operators, as slices of the supernet."""
        self.validate_subspace(kept)
        return self._slices_of([(layer, option) for layer, row in enumerate(kept) for option in row])

    def _slices_of(self, operators: Sequence[tuple[int, int]]) -> SliceMap:
        groups = [self.fixed_tensors, *(self._tensors_of.get(owner, ()) for owner in operators)]
        return {name: self._slice_of[name] for group in groups for name in group}

    # -- costs ------------------------------------------------------------------------------------------------------

    @property
    def num_parameters(self) -> SpaceSizes:
        """Trainable parameters of the supernet, its fixed part, its smallest and its largest path."""
        table = self.parameters_table()
        supernet = table.fixed + sum(map(sum, table.options))
        return SpaceSizes(int(supernet), int(table.fixed), int(table.smallest), int(table.largest))

    def parameters_table(self) -> CostTable:
        """Trainable parameters of the fixed part and of each operator."""
        return self.cost_table("parameters")

    def bytes_table(self) -> CostTable:
        """Bytes of all tensors, buffers included, of the fixed part and of each operator: what travels."""
        return self.cost_table("bytes")

    def _sizes_table(self, measure: str, sizes: Mapping[str, int]) -> CostTable:
        totals = {owner: sum(sizes.get(name, 0) for name in names) for owner, names in self._tensors_of.items()}
        rows = [[totals.get((layer, option), 0) for option in range(n)] for layer, n in enumerate(self.options)]
        return _table(measure, totals[None], rows)

    def cost_table(self, measure: str) -> CostTable:
        """Costs of the fixed part and of every operator for one sample; computed once.

        `measure` is one of `fedloom.tiers.measure.MEASURES`; latency is measured here and now on one CPU sample.

        Raises:
            ValueError: an unknown measure.
        """
        if measure not in self._tables:
            self._tables[measure] = self._measured(measure)
        return self._tables[measure]

    def _measured(self, measure: str) -> CostTable:
        match measure:
            case "macs":
                return _table(measure, *self._over_parts("meta", macs_of, 0))
            case "parameters":
                parameters = self._meta_supernet.named_parameters()
                return self._sizes_table(measure, {n: p.numel() for n, p in parameters if p.requires_grad})
            case "activation_bytes":
                return _table(measure, *self._over_parts("meta", activation_bytes_of, 0))
            case "latency_s":
                return self.latency_table()
            case "bytes":
                tensors = self._meta_supernet.state_dict()
                return self._sizes_table(measure, {n: bytes_of({n: t}) for n, t in tensors.items()})
        raise ValueError(f"unknown measure {measure!r}: known are {', '.join(MEASURES)}, bytes")

    def latency_table(self, device: str = "cpu", *, warmup: int = 3, repeats: int = 20) -> CostTable:
        """Median seconds of the fixed part and of every operator on one sample, measured now on the device."""
        fixed, rows = self.latencies(device, warmup=warmup, repeats=repeats)
        return _table("latency_s", fixed.median_s, [[latency.median_s for latency in row] for row in rows])

    def latencies(
        self, device: str = "cpu", *, warmup: int = 3, repeats: int = 20
    ) -> tuple[Latency, list[list[Latency]]]:
        """Measured latency of the fixed part and of each operator of each layer, with its spread."""
        return self._over_parts(device, partial(latency_s_of, warmup=warmup, repeats=repeats), Latency(0.0, 0.0, 0))

    def _over_parts(
        self, device: str, measure: Callable[[nn.Module, Tensor], T], nothing: T
    ) -> tuple[T, list[list[T]]]:
        """The measure of the fixed part and of each operator; `nothing` for an identity, which does no work."""
        sample = torch.zeros((1, *self.input_shape), dtype=self.input_dtype, device=device)
        ends = [(torch.zeros_like(x, device=device), torch.zeros_like(y, device=device)) for x, y in self._layer_ends]

        def of_candidate(candidate: Candidate, x: Tensor) -> T:
            module = _on_device(candidate.build, device)
            return nothing if isinstance(module, nn.Identity) else measure(module, x)

        outputs = [y for _, y in ends]
        fixed = measure(_on_device(lambda: _FixedPart(self.build_fixed(), outputs), device), sample)
        pairs = zip(self.candidates, ends, strict=True)
        return fixed, [[of_candidate(candidate, x) for candidate in row] for row, (x, _) in pairs]

    @cached_property
    def _layer_ends(self) -> list[tuple[Tensor, Tensor]]:
        """Input and output of each layer for one sample, on the meta device."""
        ends: dict[int, tuple[Tensor, Tensor]] = {}
        net = self._meta_supernet

        def through(layer: int, x: Tensor) -> Tensor:
            ys = [net.layers[layer](x, option) for option in range(self.options[layer])]  # type: ignore[index, operator]
            for name, y in zip(self.operator_names[layer], ys, strict=True):
                if y.shape != ys[0].shape:
                    raise ValueError(
                        f"layer {layer} of {self.name}: {name} gives the shape {tuple(y.shape)}, "
                        f"{self.operator_names[layer][0]} gives {tuple(ys[0].shape)}; all must give the same"
                    )
            ends[layer] = (x, ys[0])
            first: Tensor = ys[0]
            return first

        sample = torch.zeros((1, *self.input_shape), dtype=self.input_dtype, device="meta")
        with torch.no_grad():
            net.fixed(sample, [partial(through, layer) for layer in range(len(self.options))])  # type: ignore[operator]
        return [ends[layer] for layer in range(len(self.options))]


_OWNED = re.compile(r"layers\.(\d+)\.ops\.(\d+)\.")


def _owner(tensor_name: str) -> tuple[int, int] | None:
    match = _OWNED.match(tensor_name)
    return None if match is None else (int(match[1]), int(match[2]))


def _table(measure: str, fixed: float, rows: Sequence[Sequence[float]]) -> CostTable:
    return CostTable(measure, float(fixed), tuple(tuple(map(float, row)) for row in rows), MEASURES.get(measure, "sum"))


def _on_device(build: Callable[[], nn.Module], device: str) -> nn.Module:
    """A module to be measured; with values where it really runs, since NaN may take another path through a kernel."""
    module = on_meta(build).eval()
    if device == "meta":
        return module
    weights = initialise(module, torch.Generator().manual_seed(0))
    module.to_empty(device=device).load_state_dict(weights)
    return module
