"""Spaces whose decisions choose among named operators, each with its own tensors.

Supernet, subspace and stand-alone subnet consist of the same modules with the same tensor names; they differ only in
the operators that they hold.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import takewhile
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.platform.spaces.base import Measure, SearchSpace, samples_of, zeros_on
from fedloom.platform.spaces.initialisation import blank
from fedloom.platform.spaces.slices import Architecture, Slice, SliceMap, Subspace
from fedloom.tiers.costs import CostTable, size_of
from fedloom.tiers.measure import shapes_only


@dataclass(frozen=True)
class SpaceSizes:
    """Trainable parameters of the whole supernet, of its fixed part, and of its largest path."""

    supernet: int
    fixed: int
    largest_path: int


class NamedOperatorSpace(SearchSpace, ABC):
    """Base class of spaces whose decisions choose among named operators.

    Subclasses name the kind of decision, build a network of given operators, map tensors to operators, and measure the
    operators' costs.
    """

    _tensor_of_operator: re.Pattern[str]
    """Matches the names of operators' tensors; its groups are the numbers passed to `_owner`."""

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

    # -- to be overridden -------------------------------------------------------------------------------------------

    @abstractmethod
    def _network(self, subspace: Subspace) -> nn.Module:
        """The network with the operators of a subspace."""

    def _subnet(self, architecture: Architecture) -> nn.Module:
        """The network of one architecture, `forward(x)`."""
        return self._network(_path(architecture))

    def _owner(self, *numbers: int) -> tuple[int, int]:
        """The (decision, option) of a tensor, by the numbers in its name."""
        decision, option = numbers
        return decision, option

    @abstractmethod
    def _table_of(self, measure: Measure) -> CostTable:
        """Costs of the fixed part and of every operator: the sum over all of its modules (for peaks, the maximum)."""

    # -- architectures ----------------------------------------------------------------------------------------------

    @property
    def slices_tensors(self) -> bool:
        """False: every operator has its own tensors."""
        return False

    @property
    def largest_subspace(self) -> Subspace:
        """Every operator of every decision."""
        return tuple(tuple(range(n)) for n in self.options)

    def validate_subspace(self, subspace: Subspace) -> None:
        """Raises ValueError for unknown operators, operators out of order, and other invalid rows."""
        self._check_length("a subspace", subspace)
        for decision, row in enumerate(subspace):
            self._check_row(decision, row)

    def _check_row(self, decision: int, row: tuple[int, ...]) -> None:
        where = f"{self._decision_name(decision)} of {self.name}"
        if not isinstance(row, tuple):
            raise ValueError(f"{where} must be a tuple of operators, given {row!r}")
        for option in row:
            self._check_option(decision, option)
        if list(row) != sorted(set(row)):
            raise ValueError(f"{where} must keep distinct operators in order, given {row}")

    def _choices(self, decision: int) -> str:
        return "operators " + ", ".join(f"{i} ({name})" for i, name in enumerate(self.operator_names[decision]))

    def meaning(self, architecture: Architecture) -> Mapping[str, Any]:
        """The operator of every decision."""
        return {"operators": [names[o] for names, o in zip(self.operator_names, architecture, strict=True)]}

    def figures(self) -> Mapping[str, Any]:
        """The supernet's parameters, the number of decisions, and the operators to choose from."""
        sizes = self.num_parameters
        return {
            "parameters": {"supernet": sizes.supernet, "fixed": sizes.fixed, "largest": sizes.largest_path},
            f"{self._decision_kind}s": len(self.options),
            "operators": list(dict.fromkeys(name for names in self.operator_names for name in names)),
        }

    # -- networks, whose floating tensors are NaN until weights are loaded --------------------------------------------

    def build_supernet(self) -> nn.Module:
        return self.build_subspace(self.largest_subspace)

    def build_subspace(self, subspace: Subspace) -> nn.Module:
        """The supernet with only the kept operators."""
        self.validate_subspace(subspace)
        return blank(partial(self._network, subspace))

    def build_subnet(self, architecture: Architecture) -> nn.Module:
        self.validate(architecture)
        return blank(partial(self._subnet, architecture))

    # -- tensors ----------------------------------------------------------------------------------------------------

    @cached_property
    def owner_of(self) -> Mapping[str, tuple[int, int] | None]:
        """The (decision, option) that each supernet tensor belongs to, None for the fixed part; in state-dict order."""
        matches = {name: self._tensor_of_operator.match(name) for name in self._meta_supernet.state_dict()}
        return MappingProxyType({n: self._owner(*map(int, m.groups())) if m else None for n, m in matches.items()})

    @cached_property
    def _slices_by_owner(self) -> Mapping[tuple[int, int] | None, SliceMap]:
        slices: dict[tuple[int, int] | None, dict[str, Slice]] = {}
        for name, owner in self.owner_of.items():
            slices.setdefault(owner, {})[name] = Slice(name)
        return slices

    def slices(self, architecture: Architecture) -> SliceMap:
        """The slice of each subnet tensor: the whole supernet tensor of the same name."""
        self.validate(architecture)
        return self._slices_of(_path(architecture))

    def subspace_slices(self, subspace: Subspace) -> SliceMap:
        """The tensors of the fixed part and of the kept operators, as slices of the supernet."""
        self.validate_subspace(subspace)
        return self._slices_of(subspace)

    def _slices_of(self, subspace: Subspace) -> SliceMap:
        owners = (None, *((decision, option) for decision, row in enumerate(subspace) for option in row))
        return {name: piece for owner in owners for name, piece in self._slices_by_owner.get(owner, {}).items()}

    # -- costs ------------------------------------------------------------------------------------------------------

    @property
    def num_parameters(self) -> SpaceSizes:
        """Trainable parameters of the supernet, its fixed part, and its largest architecture."""
        table = self.cost_table("parameters")
        supernet = size_of(table, self.largest_subspace)
        return SpaceSizes(int(supernet), int(table.fixed), int(table.largest))


def _path(architecture: Architecture) -> Subspace:
    return tuple((int(option),) for option in architecture)


def operator_held(operators: nn.ModuleDict, option: int, where: str, names: Sequence[str] = ()) -> nn.Module:
    """The operator with this option index among the held ones; ValueError if it is not held."""
    if str(option) in operators:
        return operators[str(option)]

    def shown(option: int) -> str:
        return f"{option} ({names[option]})" if 0 <= option < len(names) else str(option)

    held = ", ".join(shown(int(key)) for key in operators) or "nothing"
    raise ValueError(f"{where} holds {held}, not {shown(option)}")


def outputs_of(
    operators: nn.ModuleDict,
    options: Sequence[int],
    through: Callable[[nn.Module], Tensor],
    mix: Tensor | None,
    where: str,
    names: Sequence[str] = (),
) -> list[Tensor]:
    """The output of `through` for each of these operators, times its entry of `mix` (one per option) if given."""
    outputs = [through(operator_held(operators, option, where, names)) for option in options]
    return outputs if mix is None else [y * mix[option] for option, y in zip(options, outputs, strict=True)]


# -- one operator per layer: a path through a fixed skeleton with searchable layers (FedorAS) -------------------------
# Tensors are named `fixed.*` and `layers.<layer>.ops.<operator>.*`.


@dataclass(frozen=True)
class Candidate:
    """An operator of a layer: `build()` makes its module, which maps the layer's input to its output."""

    name: str
    build: Callable[[], nn.Module]


class SearchableLayer(nn.Module):
    """Some or all candidate operators of one layer, by option index."""

    def __init__(self, layer: int, candidates: Sequence[Candidate], options: Sequence[int]) -> None:
        super().__init__()
        self.layer = layer
        self.ops = nn.ModuleDict({str(option): candidates[option].build() for option in options})

    def forward(self, x: Tensor, option: int) -> Tensor:
        y: Tensor = operator_held(self.ops, option, f"layer {self.layer}")(x)
        return y


class Beginnings:
    """Caches the last path's layer outputs for a batch, so that the next path reuses those of their common prefix.

    An output is computed again if its tensor was changed in place meanwhile.
    """

    def __init__(self) -> None:
        self._path: Architecture = ()
        self._outputs: list[tuple[Tensor, int]] = []

    def begin(self, architecture: Architecture) -> None:
        """Starts a path: forgets the outputs beyond its common prefix with the last one."""
        pairs = zip(self._path, architecture, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._path = architecture
        del self._outputs[same:]

    def layer(self, position: int, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The output of the path's layer at this position, computed only if it is not cached."""
        if position < len(self._outputs):
            y, version = self._outputs[position]
            if y._version == version:
                return y
            del self._outputs[position:]
        y = layer(x)
        if position == len(self._outputs):
            self._outputs.append((y, y._version))
        return y


class PathNetwork(nn.Module):
    """A skeleton and its searchable layers: `forward(x, architecture)`.

    `fixed` is called as `fixed(x, layers)` with one function per searchable layer, in order.
    """

    def __init__(self, fixed: nn.Module, layers: Sequence[SearchableLayer]) -> None:
        super().__init__()
        self.fixed = fixed
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, architecture: Architecture, known: Beginnings | None = None) -> Tensor:
        """Successive paths with the same batch and `known` compute a common prefix only once."""
        pairs = zip(self.layers, architecture, strict=True)
        layers: list[Callable[[Tensor], Tensor]] = [partial(layer, option=option) for layer, option in pairs]
        if known is not None:
            known.begin(architecture)
            layers = [partial(known.layer, position, layer) for position, layer in enumerate(layers)]
        y: Tensor = self.fixed(x, layers)
        return y

    def beginnings(self) -> Beginnings:
        """A cache to pass to `forward` with every path on the same batch."""
        return Beginnings()


class StandAloneNetwork(PathNetwork):
    """A path network that holds one operator per layer: `forward(x)`."""

    def __init__(self, fixed: nn.Module, layers: Sequence[SearchableLayer], architecture: Architecture) -> None:
        super().__init__(fixed, layers)
        self.architecture = architecture

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # the path is fixed
        return super().forward(x, self.architecture)


class _FixedPart(nn.Module):
    """Only the skeleton: the layers return given outputs."""

    def __init__(self, fixed: nn.Module, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.fixed = fixed
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fixed(x, [lambda _x, y=y: y for y in self.outputs])
        return y


class OperatorChoiceSpace(NamedOperatorSpace):
    """A search space of paths; see `fedloom.platform.spaces.base.SearchSpace` for the interface.

    `layers` holds the candidates of each searchable layer; `build_fixed()` makes the skeleton, a module called as
    `fixed(x, layers)`. All candidates of a layer must have the same output shape. Networks of more than one path are
    called as `forward(x, architecture)`.

    With `tasks`, the candidates of the last layer are classifiers, one for each task: an architecture's last option
    says which task it is for, and a client of one task neither receives nor trains the others' classifiers.
    """

    _decision_kind = "layer"
    _tensor_of_operator = re.compile(r"layers\.(\d+)\.ops\.(\d+)\.")
    channels_last = True

    def __init__(
        self,
        *,
        name: str,
        input_shape: Sequence[int],
        layers: Sequence[Sequence[Candidate]],
        build_fixed: Callable[[], nn.Module],
        input_dtype: torch.dtype = torch.float32,
        tasks: bool = False,
    ) -> None:
        for layer, candidates in enumerate(layers):
            if not candidates:
                raise ValueError(f"layer {layer} of {name} has no operator: give it at least one")
        self.candidates = tuple(tuple(row) for row in layers)
        self.build_fixed = build_fixed
        self.num_tasks = len(layers[-1]) if tasks else 1
        super().__init__(name, input_shape, tuple(tuple(c.name for c in row) for row in self.candidates), input_dtype)

    def _choices(self, decision: int) -> str:
        names = self.operator_names[decision]
        return f"operators 0 to {len(names) - 1} ({', '.join(names)})"

    def _check_row(self, decision: int, row: tuple[int, ...]) -> None:
        super()._check_row(decision, row)
        if not row:  # no path would be left
            where = f"{self._decision_name(decision)} of {self.name}"
            raise ValueError(f"{where} must keep distinct operators in order, given {row}")

    def task_of(self, options: Sequence[int] | Subspace) -> int:
        """The task of an architecture, or of a subspace that holds one task's classifier."""
        last = options[-1]
        return int(last[0] if isinstance(last, tuple) else last) if self.num_tasks > 1 else 0

    def _layers(self, subspace: Subspace) -> list[SearchableLayer]:
        return [SearchableLayer(i, *pair) for i, pair in enumerate(zip(self.candidates, subspace, strict=True))]

    @cached_property
    def keeps_statistics(self) -> bool:
        """Whether it has batch norms: their inputs depend on the path, so that statistics over all paths fit none."""
        return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in self._meta_supernet.modules())

    def _network(self, subspace: Subspace) -> nn.Module:
        return PathNetwork(self.build_fixed(), self._layers(subspace))

    def _subnet(self, architecture: Architecture) -> nn.Module:
        return StandAloneNetwork(self.build_fixed(), self._layers(_path(architecture)), architecture)

    def _table_of(self, measure: Measure) -> CostTable:
        ends = self._layer_ends
        outputs = [zeros_on(measure.device, y) for _, y in ends]
        fixed = measure.cost(lambda: _FixedPart(self.build_fixed(), outputs), samples_of(self))
        pairs = zip(self.candidates, ends, strict=True)
        return measure.table(fixed, [[measure.cost(c.build, x) for c in row] for row, (x, _) in pairs])

    @cached_property
    def _layer_ends(self) -> list[tuple[Tensor, Tensor]]:
        """Input and output of each layer for one sample, on the meta device."""
        ends: dict[int, tuple[Tensor, Tensor]] = {}
        net = self._meta_supernet

        def through(layer: int, x: Tensor) -> Tensor:
            ys = [net.layers[layer](x, option) for option in range(self.options[layer])]  # type: ignore[index, operator]
            for name, y in zip(self.operator_names[layer], ys, strict=True):
                of_tasks = self.num_tasks > 1 and layer == len(self.options) - 1
                if y.shape != ys[0].shape and not of_tasks:
                    raise ValueError(
                        f"layer {layer} of {self.name}: {name} gives the shape {tuple(y.shape)}, "
                        f"{self.operator_names[layer][0]} gives {tuple(ys[0].shape)}; all must give the same"
                    )
            ends[layer] = (x, ys[0])
            first: Tensor = ys[0]
            return first

        with torch.no_grad(), shapes_only():
            net.fixed(samples_of(self), [partial(through, layer) for layer in range(len(self.options))])  # type: ignore[operator]
        return [ends[layer] for layer in range(len(self.options))]


# -- any subset of a decision's operators, whose outputs are summed ---------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A module of an operator, and its input shape for one sample.

    Parts with the same `kind` and shape have the same cost and are measured once.
    """

    kind: tuple[object, ...]
    input_shape: tuple[int, ...]
    build: Callable[[], nn.Module] = field(compare=False)


def cost_of_parts(measure: Measure) -> Callable[[Part], float]:
    """A function from a part to its cost by one measure; equal parts are measured once."""
    return cache(lambda part: measure.cost(part.build, torch.zeros(part.input_shape, device="meta")))


class SummedOperatorSpace(NamedOperatorSpace):
    """A space whose networks are called as `forward(x, subspace=None, mix=None)`.

    `subspace` (or an architecture) selects the operators, by default all that the network holds; `mix` (decisions,
    options) are their weights, by default 1. Subclasses define the modules of each operator.
    """

    sums_options = True
    channels_last = True

    @abstractmethod
    def _parts(self, decision: int, option: int) -> Sequence[Part]:
        """All modules of an operator in the network."""

    def figures(self) -> Mapping[str, Any]:
        """The figures of named operators, and the cost of the whole supernet with all options."""
        tables = (self.cost_table(measure) for measure in ("macs", "bytes"))
        macs, state_bytes = (int(size_of(table, self.largest_subspace)) for table in tables)
        return {**super().figures(), "macs": {"supernet": macs}, "state_bytes": state_bytes}

    def _table_of(self, measure: Measure) -> CostTable:
        cost = cost_of_parts(measure)
        fixed = measure.cost(partial(self._network, ((),) * len(self.options)), samples_of(self))
        options = [
            [measure.join(map(cost, self._parts(decision, option))) for option in range(n)]
            for decision, n in enumerate(self.options)
        ]
        return measure.table(fixed, options)


def as_subspace(operators: Subspace | Architecture) -> Subspace:
    """An architecture as the subspace of its operators; a subspace is returned unchanged."""
    return tuple(tuple(row) if isinstance(row, (tuple, list)) else (int(row),) for row in operators)
