"""The interface of search spaces, with default implementations, and the costs of single modules."""

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.platform.spaces.genome import Genome, PlainGenome
from fedloom.platform.spaces.initialisation import emptied, initialise, on_meta
from fedloom.platform.spaces.slices import (
    Architecture,
    SliceMap,
    architecture_id,
    bytes_of,
    leading,
    parse_architecture,
)
from fedloom.tiers.costs import CostTable
from fedloom.tiers.measure import MEASURES, activation_bytes_of, latency_s_of, macs_of, parameters_of

# -- costs of single modules on one sample ----------------------------------------------------------------------------

Measure = Callable[[nn.Module, Tensor], float]
"""Returns the cost of a module on one sample."""


def measure_of(measure: str) -> tuple[Measure, str]:
    """The function of a measure, and the device that it needs; ValueError for an unknown measure."""
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
            return lambda module, x: latency_s_of(module, x).median_s, "cpu"
    raise ValueError(f"unknown measure {measure!r}: known are {', '.join(MEASURES)}, bytes")


def cost_of(
    build: Callable[[], nn.Module],
    input_shape: tuple[int, ...],
    of: Measure,
    device: str,
    input_dtype: torch.dtype = torch.float32,
) -> float:
    """A module's cost on an input of zeros; the global generators' states do not change."""
    torch_device = torch.device(device)
    with torch.random.fork_rng(devices=[torch_device] if torch_device.type == "cuda" else []):
        return float(of(ready(build, device), torch.zeros(input_shape, device=torch_device, dtype=input_dtype)))


def zeros_on(device: str, x: Tensor) -> Tensor:
    """Zeros of the shape and type of a tensor of the meta device."""
    return x if device == "meta" else torch.zeros(x.shape, dtype=x.dtype, device=device)


def ready(build: Callable[[], nn.Module], device: str) -> nn.Module:
    """A module for measurement; initialised unless on the meta device, because kernels may be slower with NaN."""
    module = on_meta(build).eval()
    if device == "meta":
        return module
    weights = initialise(module, torch.Generator().manual_seed(0))
    emptied(module, device).load_state_dict(weights)
    return module


# -- spaces -----------------------------------------------------------------------------------------------------------

T = TypeVar("T")


class SearchSpace(Protocol):
    """A family of architectures that share the tensors of one supernet.

    A user's own space is a class with these members. A subclass must define its name, input shape and options, and
    build the supernet and subnets; all other members have default implementations, which it can override.
    """

    name: str
    input_shape: tuple[int, ...]
    """Shape of one sample, without the batch."""
    options: tuple[int, ...]
    """Number of options per decision."""
    input_dtype: torch.dtype = torch.float32
    """Dtype of the inputs: floats for images, int64 for tokens."""
    channels_last: bool = False
    """Whether its networks of images compute faster with the channels last, on most machines."""

    # -- networks ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def build_supernet(self) -> nn.Module:
        """The supernet module: `forward(x, architecture)`; its initial values are not used."""
        ...

    @abstractmethod
    def build_subnet(self, architecture: Architecture) -> nn.Module:
        """A stand-alone module of one architecture: `forward(x)`; its tensor names are those of the supernet."""
        ...

    @property
    def keeps_statistics(self) -> bool:
        """Whether a subnet's running statistics must be estimated before it is scored."""
        return False

    @property
    def slices_tensors(self) -> bool:
        """Whether subnets hold parts of tensors; if not, the supernet module can run them directly."""
        return any(piece.region is not None for piece in self.slices(self.smallest).values())

    # -- architectures ----------------------------------------------------------------------------------------------

    @property
    def num_architectures(self) -> int:
        """The exact number of distinct architectures."""
        return math.prod(self.options)

    @property
    def smallest(self) -> Architecture:
        """The architecture that every device can train: the fewest MACs in every decision."""
        return self.cheapest(self.cost_table("macs"))

    @property
    def largest(self) -> Architecture:
        """The architecture with the most MACs in every decision."""
        return self.cost_table("macs").extreme(max)

    @property
    def genome(self) -> Genome:
        """The genes that a search varies; by default one per decision."""
        return PlainGenome(self.options)

    def validate(self, architecture: Architecture) -> None:
        """Raises ValueError naming the invalid decision if the architecture is outside the space."""
        if len(architecture) != len(self.options):
            raise ValueError(
                f"an architecture of {self.name} has {len(self.options)} decisions, given {len(architecture)}"
            )
        for decision, option in enumerate(architecture):
            if not (isinstance(option, (int, np.integer)) and 0 <= option < self.options[decision]):
                raise ValueError(
                    f"decision {decision} of {self.name} has the options 0 to {self.options[decision] - 1}, "
                    f"given {option!r}"
                )

    def sample(self, rng: np.random.Generator) -> Architecture:
        """A uniformly drawn architecture."""
        return tuple(rng.integers(0, self.options).tolist())

    def enumerate(self) -> Iterator[Architecture]:
        """All architectures in lexicographic order."""
        return itertools.product(*map(range, self.options))

    def parse(self, text: str) -> Architecture:
        """Parses an architecture: `smallest`, `largest`, or options such as `0-3-1`.

        Raises ValueError naming the decision that is outside the space.
        """
        if text in ("smallest", "largest"):
            return self.smallest if text == "smallest" else self.largest
        try:
            architecture = parse_architecture(text)
        except ValueError:
            example = architecture_id(tuple(0 for _ in self.options))
            raise ValueError(
                f"{text!r} is no architecture of {self.name}: give smallest, largest, or an option for each of the "
                f"{len(self.options)} decisions, such as {example}"
            ) from None
        self.validate(architecture)
        return architecture

    def label(self, architecture: Architecture) -> str:
        """A readable name of an architecture, which `parse` accepts."""
        return architecture_id(architecture)

    def meaning(self, architecture: Architecture) -> Mapping[str, Any]:
        """A description of an architecture's options as JSON values, if it says more than their numbers."""
        label = self.label(architecture)
        return {} if label == architecture_id(architecture) else {"label": label}

    def figures(self) -> Mapping[str, Any]:
        """Further properties of the space for `fedloom describe`, as JSON values."""
        return {}

    # -- tensors ----------------------------------------------------------------------------------------------------

    @property
    def parameter_names(self) -> frozenset[str]:
        """The names of the supernet's trained tensors; all others are buffers."""
        return once(self, "facts", _facts).parameters

    def initial_weights(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial supernet tensors (parameters and buffers), drawn only from the generator."""
        return initialise(on_meta(self.build_supernet), generator)

    def initial_subnet_weights(self, architecture: Architecture, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial tensors of one stand-alone subnet by their names, drawn only from the generator."""
        self.validate(architecture)
        return initialise(on_meta(partial(self.build_subnet, architecture)), generator)

    def slices(self, architecture: Architecture) -> SliceMap:
        """The slice of each subnet tensor; by default the leading entries of the supernet tensor of the same name."""
        self.validate(architecture)
        shapes = supernet_shapes(self)
        subnet = on_meta(partial(self.build_subnet, architecture)).state_dict()
        strange = [name for name in subnet if name not in shapes]
        if strange:
            raise ValueError(f"{self.name}: a subnet's tensor {strange[0]!r} is none of the supernet's")
        return {name: leading(name, tuple(t.shape), shapes[name]) for name, t in subnet.items()}

    # -- costs ------------------------------------------------------------------------------------------------------

    def cost_table(self, measure: str) -> CostTable:
        """Costs of the fixed part and of every option for one sample; computed once.

        `measure` is one of `fedloom.tiers.measure.MEASURES`, or bytes (of all sent tensors, buffers included). Latency
        is measured on this host's CPU, part by part. Raises ValueError for an unknown measure.
        """
        return once(self, measure, lambda space: space._table_of(measure, *measure_of(measure)))

    def _table_of(self, measure: str, of: Measure, device: str) -> CostTable:
        """The costs as measured on the device; by default an option's is the difference that it makes to a subnet."""
        return _table_by_differences(self, measure, of, device)

    def cheapest(self, table: CostTable) -> Architecture:
        """The architecture with the lowest cost by this table, which every client can train."""
        return table.extreme(min)

    def common_cost(self, table: CostTable) -> float:
        """The cost of the part that all architectures share; the lower bound of the lowest tier."""
        return table.fixed


def once(space: SearchSpace, what: str, find: Callable[[SearchSpace], T]) -> T:
    """A property of a space, found at the first call and then kept with it."""
    known: dict[str, T] = vars(space).setdefault("_found_out", {})
    if what not in known:
        known[what] = find(space)
    return known[what]


def supernet_shapes(space: SearchSpace) -> Mapping[str, tuple[int, ...]]:
    """The shapes of a supernet's tensors, buffers included."""
    return once(space, "facts", _facts).shapes


@dataclass(frozen=True)
class _Facts:
    """Cached properties of a supernet."""

    shapes: Mapping[str, tuple[int, ...]]
    parameters: frozenset[str]


def _facts(space: SearchSpace) -> _Facts:
    module = on_meta(space.build_supernet)
    shapes = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    return _Facts(shapes, frozenset(name for name, _ in module.named_parameters()))


def _table_by_differences(space: SearchSpace, measure: str, of: Measure, device: str) -> CostTable:
    def cost(architecture: Architecture) -> float:
        build = partial(space.build_subnet, architecture)
        return cost_of(build, (1, *space.input_shape), of, device, space.input_dtype)

    first = tuple(0 for _ in space.options)
    base = cost(first)
    rows = [
        [cost((*first[:decision], option, *first[decision + 1 :])) - base if option else 0.0 for option in range(count)]
        for decision, count in enumerate(space.options)
    ]
    # Options must not have negative costs: the cost of each decision's cheapest option is moved to the fixed part.
    least = [min(row) for row in rows]
    options = tuple(tuple(value - low for value in row) for row, low in zip(rows, least, strict=True))
    return CostTable(measure, base + sum(least), options, MEASURES.get(measure, "sum"))
