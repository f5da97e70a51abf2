"""Operator-choice spaces (FedorAS): a fixed skeleton with searchable layers; a path chooses one operator per layer.

Supernet, subspace and stand-alone subnet consist of the same modules with the same tensor names
(`fixed.*`, `layers.<layer>.ops.<operator>.*`); they differ only in the operators that they hold.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import takewhile
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedloom.platform.spaces.measuring import Measure, ready, zeros_on
from fedloom.platform.spaces.named_operators import NamedOperatorSpace, SpaceSizes
from fedloom.platform.spaces.slices import Architecture, Subspace
from fedloom.tiers.costs import CostTable
from fedloom.tiers.measure import MEASURES, Latency, latency_s_of, shapes_only

T = TypeVar("T")


@dataclass(frozen=True)
class Candidate:
    """An operator of a layer: `build()` makes its module, which maps the layer's input to its output."""

    name: str
    build: Callable[[], nn.Module]


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


class Beginnings:
    """What the layers of the last path gave for a batch: the next path computes only what comes after their beginning.

    A beginning is computed again if something has changed its tensor in place meanwhile.
    """

    def __init__(self) -> None:
        self._path: Architecture = ()
        self._outputs: list[tuple[Tensor, int]] = []

    def begin(self, architecture: Architecture) -> None:
        """Forgets what another path than this one has computed."""
        pairs = zip(self._path, architecture, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._path = architecture
        del self._outputs[same:]

    def layer(self, place: int, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The output of the path's layer at this place."""
        if place < len(self._outputs):
            y, version = self._outputs[place]
            if y._version == version:
                return y
            del self._outputs[place:]
        y = layer(x)
        if place == len(self._outputs):
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
        """Paths that are called one after the other with the same batch and `known` share what they begin with."""
        pairs = zip(self.layers, architecture, strict=True)
        layers: list[Callable[[Tensor], Tensor]] = [partial(layer, option=option) for layer, option in pairs]
        if known is not None:
            known.begin(architecture)
            layers = [partial(known.layer, place, layer) for place, layer in enumerate(layers)]
        y: Tensor = self.fixed(x, layers)
        return y

    def beginnings(self) -> Beginnings:
        """To be given to `forward` with every path that computes the same batch."""
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

    decision_kind = "layer"
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

    def _known(self, decision: int) -> str:
        names = self.operator_names[decision]
        return f"0 to {len(names) - 1} ({', '.join(names)})"

    def _check_row(self, decision: int, row: tuple[int, ...]) -> None:
        if not row:  # no path would be left
            self._refuse_row(decision, row)
        super()._check_row(decision, row)

    def task_of(self, options: Sequence[int] | Subspace) -> int:
        """The task of an architecture, or of a subspace that holds one task's classifier."""
        last = options[-1]
        return int(last[0] if isinstance(last, tuple) else last) if self.num_tasks > 1 else 0

    # -- modules ----------------------------------------------------------------------------------------------------

    def _layers(self, kept: Subspace) -> list[SearchableLayer]:
        return [SearchableLayer(i, *pair) for i, pair in enumerate(zip(self.candidates, kept, strict=True))]

    @cached_property
    def keeps_statistics(self) -> bool:
        """Whether it has batch norms: what reaches them depends on the path, so that averages over paths fit none."""
        return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in self._meta_supernet.modules())

    def _network(self, kept: Subspace) -> nn.Module:
        return PathNetwork(self.build_fixed(), self._layers(kept))

    def _subnet(self, architecture: Architecture) -> nn.Module:
        kept = tuple((option,) for option in architecture)
        return StandAloneNetwork(self.build_fixed(), self._layers(kept), architecture)

    def _owner(self, tensor_name: str) -> tuple[int, int] | None:
        match = _OWNED.match(tensor_name)
        return None if match is None else (int(match[1]), int(match[2]))

    # -- costs ------------------------------------------------------------------------------------------------------

    def _table_of(self, measure: str, of: Measure, device: str) -> CostTable:
        fixed, rows = self._over_parts(device, of, 0.0)
        options = tuple(tuple(map(float, row)) for row in rows)
        return CostTable(measure, float(fixed), options, MEASURES.get(measure, "sum"))

    def latencies(
        self, device: str = "cpu", *, warmup: int = 3, repeats: int = 20
    ) -> tuple[Latency, list[list[Latency]]]:
        """Measured latency of the fixed part and of each operator of each layer, with its spread."""
        return self._over_parts(device, partial(latency_s_of, warmup=warmup, repeats=repeats), Latency(0.0, 0.0, 0))

    def _over_parts(
        self, device: str, measure: Callable[[nn.Module, Tensor], T], nothing: T
    ) -> tuple[T, list[list[T]]]:
        """The costs of the fixed part and of each operator; an identity costs `nothing`."""
        sample = torch.zeros((1, *self.input_shape), dtype=self.input_dtype, device=device)
        ends = [(zeros_on(device, x), zeros_on(device, y)) for x, y in self._layer_ends]

        def of_candidate(candidate: Candidate, x: Tensor) -> T:
            module = ready(candidate.build, device)
            return nothing if isinstance(module, nn.Identity) else measure(module, x)

        outputs = [y for _, y in ends]
        fixed = measure(ready(lambda: _FixedPart(self.build_fixed(), outputs), device), sample)
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
                of_tasks = self.num_tasks > 1 and layer == len(self.options) - 1
                if y.shape != ys[0].shape and not of_tasks:
                    raise ValueError(
                        f"layer {layer} of {self.name}: {name} gives the shape {tuple(y.shape)}, "
                        f"{self.operator_names[layer][0]} gives {tuple(ys[0].shape)}; all must give the same"
                    )
            ends[layer] = (x, ys[0])
            first: Tensor = ys[0]
            return first

        sample = torch.zeros((1, *self.input_shape), dtype=self.input_dtype, device="meta")
        with torch.no_grad(), shapes_only():
            net.fixed(sample, [partial(through, layer) for layer in range(len(self.options))])  # type: ignore[operator]
        return [ends[layer] for layer in range(len(self.options))]


_OWNED = re.compile(r"layers\.(\d+)\.ops\.(\d+)\.")

__all__ = [
    "Candidate",
    "OperatorChoiceSpace",
    "PathNetwork",
    "SearchableLayer",
    "SpaceSizes",
    "StandAloneNetwork",
    "Subspace",
]
