"""The interface of search spaces with default implementations, measurements of modules, and fixed and sliced spaces."""

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.platform.spaces.genome import Genome, PlainGenome
from fedloom.platform.spaces.initialisation import blank, emptied, initialise, on_meta
from fedloom.platform.spaces.slices import (
    Architecture,
    SlicedSupernet,
    SliceMap,
    architecture_id,
    bytes_of,
    leading,
    parse_architecture,
)
from fedloom.tiers.costs import CostTable
from fedloom.tiers.measure import MEASURES, activation_bytes_of, latency_s_of, macs_of, one_of, parameters_of

# -- the tensors of a module that are exchanged -----------------------------------------------------------------------


def travelling(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that server and clients exchange, by name: trainable parameters and persistent buffers."""
    state = module.state_dict(keep_vars=True)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}  # a shared one appears once
    return trained | {name: buffer for name, buffer in module.named_buffers() if name in state}


def load_sent(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Loads copies of exchanged tensors into a module, whose constants stay; RuntimeError if the names differ."""
    sent = travelling(module)
    constants = {name: tensor for name, tensor in module.state_dict().items() if name not in sent}
    module.load_state_dict({**constants, **{name: tensor.clone() for name, tensor in weights.items()}})


def in_float32(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Runs a recurrent layer in float32: autocast would run cuDNN's in float16, whatever dtype it is set to.

    Without loss scaling, gradients in float16 would underflow. Source: ATen/cudnn/AutocastRNN.cpp.
    """
    with torch.autocast("cuda" if x.is_cuda else "cpu", enabled=False):
        return layer(x.float() if x.dtype in (torch.bfloat16, torch.float16) else x)


# -- costs of single modules on one sample ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """One kind of cost: `of(module, x)` computes it for a module on `device`."""

    name: str
    of: Callable[[nn.Module, Tensor], float]
    device: str = "meta"

    def cost(self, build: Callable[[], nn.Module], x: Tensor) -> float:
        """The module's cost on zeros like `x`, a meta tensor; leaves the global generators unchanged.

        An identity costs nothing, because its input is already in memory.
        """
        with torch.random.fork_rng(devices=[]):
            module = on_meta(build).eval()
            if isinstance(module, nn.Identity):
                return 0.0
            if self.device == "meta":
                return float(self.of(module, x))
            # Initialised, because kernels may be slower with NaN.
            weights = initialise(module, torch.Generator().manual_seed(0))
            emptied(module, self.device).load_state_dict(weights)
            return float(self.of(module, zeros_on(self.device, x)))

    def join(self, costs: Iterable[float]) -> float:
        """The total cost of several parts: their sum, or the maximum for peak measures."""
        return float(max(costs) if self.is_of_peaks else sum(costs))

    @property
    def is_of_peaks(self) -> bool:
        """Whether the largest part counts instead of the sum."""
        return self._reduce == "max"

    def table(self, fixed: float, options: Iterable[Sequence[float]]) -> CostTable:
        """A cost table with the given costs of the fixed part and of every option."""
        return CostTable(self.name, fixed, tuple(map(tuple, options)), self._reduce)

    @property
    def _reduce(self) -> str:
        return MEASURES.get(self.name, "sum")


def zeros_on(device: str, x: Tensor) -> Tensor:
    """Zeros on `device` with the shape and dtype of the meta tensor `x`."""
    return x if device == "meta" else torch.zeros(x.shape, dtype=x.dtype, device=device)


def miscounted(
    space: "SearchSpace", measures: Iterable[str], architectures: Sequence[Architecture]
) -> Iterator[tuple[Architecture, str, float, float]]:
    """The architectures whose built module does not cost what the table says: measure, the table's and the built cost.

    Costs are equal to a millionth.
    """
    for measure, architecture in itertools.product(measures, architectures):
        in_table = space.cost_table(measure).cost(architecture)
        built = measure_of(measure).cost(partial(space.build_subnet, architecture), samples_of(space))
        if not math.isclose(in_table, built, rel_tol=1e-6):
            yield architecture, measure, in_table, built


def measure_of(name: str) -> Measure:
    """The measure of this name; ValueError for an unknown one."""
    match name:
        case "macs":
            return Measure(name, macs_of)
        case "parameters":
            return Measure(name, lambda module, _x: parameters_of(module))
        case "bytes":
            return Measure(name, lambda module, _x: bytes_of(travelling(module)))
        case "activation_bytes":
            return Measure(name, activation_bytes_of)
        case "latency_s":
            return Measure(name, lambda module, x: latency_s_of(module, one_of(x, "cpu")).median_s, "cpu")
    raise ValueError(f"unknown measure {name!r}: known are {', '.join(MEASURES)}, bytes")


# -- spaces -----------------------------------------------------------------------------------------------------------

T = TypeVar("T")
SLICES_CACHED = 64
"""The number of architectures whose slices a space caches."""


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
    """Whether its image networks run faster in the channels-last memory format, on most machines."""
    stacks: bool = True
    """Whether clients' subnets may be computed as one batch, if torch can vectorise their layers."""
    _decision_kind: str = "decision"
    """The word for a decision in messages."""

    # -- networks ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def build_supernet(self) -> nn.Module:
        """The supernet module: `forward(x, architecture)`; its initial values are not used."""
        ...

    @abstractmethod
    def build_subnet(self, architecture: Architecture) -> nn.Module:
        """A stand-alone module of one architecture: `forward(x)`; its tensor names are those of the supernet."""
        ...

    def largest_network(self, seed: int) -> nn.Module:
        """The stand-alone module of the largest architecture, with initial weights drawn from this seed."""
        module = self.build_subnet(self.largest)
        module.load_state_dict(self.initial_subnet_weights(self.largest, torch.Generator().manual_seed(seed)))
        return module

    @property
    def keeps_statistics(self) -> bool:
        """Whether a subnet's running statistics must be estimated before it is scored; by default those of slices."""

        def compute(space: SearchSpace) -> bool:
            # What a batch norm sees differs between subnets of different widths.
            return any(name.endswith("running_mean") for name in supernet_shapes(space)) and space.slices_tensors

        return once(self, "keeps_statistics", compute)

    @property
    def constants_hash(self) -> str:
        """SHA-256 (hex) of the constants, tensors never trained or sent that every process builds; empty if none."""
        return ""

    @property
    def slices_tensors(self) -> bool:
        """Whether subnets hold parts of tensors; if not, the supernet module can run them directly."""
        return any(piece.region is not None for piece in self.slices(self.smallest).values())

    # -- a space that depends on the data -----------------------------------------------------------------------------

    def fitted(self, config: Any, dataset: Any) -> tuple["SearchSpace", Any]:
        """The space and its configuration, with open values filled in from the data set; by default unchanged."""
        del dataset
        return self, config

    def tried(self, x: Any, y: Any) -> Any:
        """Outputs for a batch of the data, to try the objective on; None if arbitrary logits will do.

        `y` is None for an objective of the user's own, which may take outputs of any shape.
        """
        del x, y
        return None

    # -- architectures ----------------------------------------------------------------------------------------------

    @property
    def num_architectures(self) -> int:
        """The exact number of distinct architectures."""
        return math.prod(self.options)

    @property
    def smallest(self) -> Architecture:
        """The architecture with the fewest MACs in every decision; every device that supports it can train it."""
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
        self._check_length("an architecture", architecture)
        for decision, option in enumerate(architecture):
            self._check_option(decision, option)

    def _check_length(self, what: str, decisions: Sequence[object]) -> None:
        if len(decisions) != len(self.options):
            needed = f"{len(self.options)} {self._decision_kind}s"
            raise ValueError(f"{what} of {self.name} has {needed}, given {len(decisions)}")

    def _check_option(self, decision: int, option: int) -> None:
        if not (isinstance(option, (int, np.integer)) and 0 <= option < self.options[decision]):
            what, choices = self._decision_name(decision), self._choices(decision)
            raise ValueError(f"{what} of {self.name} has the {choices}, given {option!r}")

    def _decision_name(self, decision: int) -> str:
        """A decision's name in messages."""
        return f"{self._decision_kind} {decision}"

    def _choices(self, decision: int) -> str:
        return f"options 0 to {self.options[decision] - 1}"

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
            raise ValueError(
                f"{text!r} is no architecture of {self.name}: give smallest, largest, {self._examples()}"
            ) from None
        self.validate(architecture)
        return architecture

    def _examples(self) -> str:
        example = architecture_id((0,) * len(self.options))
        return f"or an option for each of the {len(self.options)} {self._decision_kind}s, such as {example}"

    def label(self, architecture: Architecture) -> str:
        """A readable name of an architecture, which `parse` accepts."""
        return architecture_id(architecture)

    def meaning(self, architecture: Architecture) -> Mapping[str, Any]:
        """What an architecture's options stand for, as JSON values; empty if the label is just their indices."""
        label = self.label(architecture)
        return {} if label == architecture_id(architecture) else {"label": label}

    def figures(self) -> Mapping[str, Any]:
        """Further properties of the space for `fedloom describe`, as JSON values."""
        return {}

    # -- tensors ----------------------------------------------------------------------------------------------------

    @property
    def parameter_names(self) -> frozenset[str]:
        """The names of the supernet's trained tensors; all others are buffers."""
        return once(self, "parameter_names", lambda _: frozenset(n for n, _ in self._meta_supernet.named_parameters()))

    @property
    def _meta_supernet(self) -> nn.Module:
        """The supernet on the meta device: names and shapes of its tensors."""
        return once(self, "supernet", lambda _: on_meta(self.build_supernet).eval())

    def initial_weights(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial supernet tensors (parameters and buffers), drawn only from the generator."""
        return initialise(self._meta_supernet, generator)

    def initial_subnet_weights(self, architecture: Architecture, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial tensors of one stand-alone subnet by their names, drawn only from the generator."""
        self.validate(architecture)
        return initialise(on_meta(partial(self.build_subnet, architecture)), generator)

    def slices(self, architecture: Architecture) -> SliceMap:
        """The slice of each subnet tensor; by default the leading entries of the supernet tensor of the same name."""
        self.validate(architecture)
        cached = once(self, "slices", lambda _: lru_cache(SLICES_CACHED)(self._leading_slices))
        return dict(cached(tuple(architecture)))

    def _leading_slices(self, architecture: Architecture) -> SliceMap:
        shapes = supernet_shapes(self)
        subnet = on_meta(partial(self.build_subnet, architecture)).state_dict()
        strange = [name for name in subnet if name not in shapes]
        if strange:
            raise ValueError(f"{self.name}: a subnet has the tensor {strange[0]!r}, which the supernet lacks")
        return {name: leading(name, tuple(t.shape), shapes[name]) for name, t in subnet.items()}

    # -- costs ------------------------------------------------------------------------------------------------------

    def cost_table(self, measure: str) -> CostTable:
        """Costs of the fixed part and of every option for one sample; computed once, but for latencies.

        `measure` is one of `fedloom.tiers.measure.MEASURES`, or bytes (of all sent tensors, buffers included). Latency
        is measured on this host's CPU, part by part and in every call. Raises ValueError for an unknown measure.
        """
        if measure == "latency_s":
            return self._table_of(measure_of(measure))
        return once(self, measure, lambda _: self._table_of(measure_of(measure)))

    def _table_of(self, measure: Measure) -> CostTable:
        """Measures the cost table; by default an option costs the difference that it makes to a subnet, or its peak."""
        x = samples_of(self)

        def cost(architecture: Architecture) -> float:
            return measure.cost(partial(self.build_subnet, architecture), x)

        first = (0,) * len(self.options)
        base = cost(first)
        costs = [
            [cost((*first[:d], option, *first[d + 1 :])) if option else base for option in range(count)]
            for d, count in enumerate(self.options)
        ]
        if measure.is_of_peaks:
            least_peak = min(map(min, costs))
            return measure.table(least_peak, [[v if v > least_peak else 0.0 for v in row] for row in costs])
        rows = [[value - base for value in row] for row in costs]
        # Options must not have negative costs: the cost of each decision's cheapest option is moved to the fixed part.
        least = [min(row) for row in rows]
        options = [[value - low for value in row] for row, low in zip(rows, least, strict=True)]
        return measure.table(base + sum(least), options)

    def cheapest(self, table: CostTable) -> Architecture:
        """The architecture with the lowest cost by this table, which every client can train."""
        return table.extreme(min)

    def common_cost(self, table: CostTable) -> float:
        """The cost of the part that all architectures share; the lower bound of the lowest tier."""
        return table.fixed


def once(space: SearchSpace, what: str, compute: Callable[[SearchSpace], T]) -> T:
    """Computes a property of a space at the first call and caches it on the space under the name `what`."""
    known: dict[str, T] = vars(space).setdefault("_computed", {})
    if what not in known:
        known[what] = compute(space)
    return known[what]


def supernet_shapes(space: SearchSpace) -> Mapping[str, tuple[int, ...]]:
    """The shapes of a supernet's tensors, buffers included, in state-dict order."""

    def compute(space: SearchSpace) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(t.shape) for name, t in space._meta_supernet.state_dict().items()}

    return once(space, "shapes", compute)


def supernet_tensors(space: SearchSpace) -> Mapping[str, Tensor]:
    """The supernet's tensors that server and clients exchange, on the meta device."""
    return once(space, "tensors", lambda s: travelling(s._meta_supernet))


def samples_of(space: SearchSpace, count: int = 1) -> Tensor:
    """A batch of samples on the meta device."""
    return torch.zeros((count, *space.input_shape), dtype=space.input_dtype, device="meta")


# -- fixed networks, which are trained without a search ---------------------------------------------------------------


class FixedDesign(Protocol):
    """A network's name, input shape and construction."""

    @property
    def name(self) -> str: ...

    @property
    def input_shape(self) -> tuple[int, ...]: ...

    def build(self) -> nn.Module:
        """The network, called as `forward(x)`."""
        ...


@dataclass(frozen=True)
class FixedNetwork:
    """A network of the user's own: `build()` makes the module, which is called as `forward(x)`."""

    name: str
    input_shape: tuple[int, ...]
    build: Callable[[], nn.Module]


class FixedSpace(SearchSpace):
    """A network as a space of one architecture, `(0,)`."""

    def __init__(self, design: FixedDesign) -> None:
        self.design = design
        self.name = design.name
        self.input_shape = tuple(design.input_shape)
        self.options = (1,)

    def validate(self, architecture: Architecture) -> None:
        """Raises ValueError for anything but the one architecture."""
        if tuple(architecture) != (0,):
            raise ValueError(f"{self.name} has one architecture, (0,), given {architecture}")

    def build_supernet(self) -> nn.Module:
        """The network, called with `(x, architecture)`; floating tensors are NaN until weights are loaded."""
        network = blank(self.design.build)
        network.register_forward_pre_hook(lambda _network, inputs: inputs[:1])
        return network

    def build_subnet(self, architecture: Architecture) -> nn.Module:
        """The same network, `forward(x)`; floating tensors are NaN until weights are loaded."""
        self.validate(architecture)
        return blank(self.design.build)


# -- subnets that are leading slices of the largest network -----------------------------------------------------------


class SlicedSpace(SearchSpace):
    """A space whose options are in ascending order of their size; a subclass builds the network of an architecture."""

    @abstractmethod
    def _network(self, architecture: Architecture) -> nn.Module:
        """The network, `forward(x)`, with its modules' default initialisation."""

    @property
    def slices_tensors(self) -> bool:
        return True

    @property
    def smallest(self) -> Architecture:
        return (0,) * len(self.options)

    @property
    def largest(self) -> Architecture:
        """The supernet itself."""
        return tuple(n - 1 for n in self.options)

    def cheapest(self, table: CostTable) -> Architecture:
        """The smallest subnet, which is the cheapest by every measure."""
        del table
        return self.smallest

    def common_cost(self, table: CostTable) -> float:
        """The cost of the smallest subnet, because no part of it can be left out."""
        return table.cost(self.smallest)

    def parse(self, text: str) -> Architecture:
        """Parses an architecture, or the label of one in spaces of one decision; ValueError if the space lacks it."""
        known = {self.label((i,)): (i,) for i in range(self.options[0])} if len(self.options) == 1 else {}
        if text in known:
            return known[text]
        if known and "=" in text:
            raise ValueError(f"{text!r} is no architecture of {self.name}: known are {', '.join(known)}")
        return super().parse(text)

    def build_supernet(self) -> nn.Module:
        """The largest network, `forward(x, architecture)`, whose subnets use views of its leading channels.

        Floating tensors are NaN until weights are loaded.
        """

        def network(architecture: Architecture) -> nn.Module:
            return on_meta(partial(self._network, architecture))

        return blank(lambda: SlicedSupernet(network(self.largest), self.slices, network))

    def build_subnet(self, architecture: Architecture) -> nn.Module:
        """A stand-alone subnet, `forward(x)`; floating tensors are NaN until weights are loaded."""
        self.validate(architecture)
        return blank(partial(self._network, architecture))


class LeadingSpace(SlicedSpace):
    """One decision: how many leading channels, or ranks, of every layer a subnet keeps."""

    @abstractmethod
    def rolled(self, weights: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """The weights of an equivalent network, with all channels rolled `step` places to the front."""
