"""What a search space is: what it asks of a space of one's own, and what it works out by itself."""

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
from fedloom.platform.spaces.initialisation import initialise, on_meta
from fedloom.platform.spaces.measuring import cost_of, measure_of
from fedloom.platform.spaces.slices import Architecture, SliceMap, architecture_id, leading, parse_architecture
from fedloom.tiers.costs import CostTable
from fedloom.tiers.measure import MEASURES

T = TypeVar("T")


class SearchSpace(Protocol):
    """A family of architectures that share the tensors of one supernet.

    A space of your own is a class with these members. Derived from this one it has to give its name, the shape of its
    inputs, its options, and how the supernet and a subnet are built; all else is worked out from that, and can be
    overridden where more is known.
    """

    name: str
    input_shape: tuple[int, ...]
    """Shape of one sample, without the batch."""
    options: tuple[int, ...]
    """Number of options per decision."""
    input_dtype: torch.dtype = torch.float32
    """Type of the inputs: floats for images, int64 for tokens."""

    # -- networks ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def build_supernet(self) -> nn.Module:
        """The supernet module: `forward(x, architecture)`; its initial values are not used."""
        ...

    @abstractmethod
    def build_subnet(self, architecture: Architecture) -> nn.Module:
        """A stand-alone module for one architecture: `forward(x)`; its tensors are called as in the supernet."""
        ...

    @property
    def keeps_statistics(self) -> bool:
        """Whether a subnet's running statistics have to be estimated before it is scored."""
        return False

    @property
    def slices_tensors(self) -> bool:
        """Whether subnets hold parts of the supernet's tensors; if not, they run in the supernet as they are."""
        return any(piece.region is not None for piece in self.slices(self.smallest).values())

    # -- architectures ----------------------------------------------------------------------------------------------

    @property
    def num_architectures(self) -> int:
        """How many distinct architectures there are (exact)."""
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
        """What varies in a search: every decision by itself, unless the space knows better."""
        return PlainGenome(self.options)

    def validate(self, architecture: Architecture) -> None:
        """Raises ValueError naming the offending decision, if the architecture is outside the space."""
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
        """An architecture as people write it: `smallest`, `largest`, or options such as `0-3-1`.

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
        """An architecture as people read it; `parse` understands it."""
        return architecture_id(architecture)

    def meaning(self, architecture: Architecture) -> Mapping[str, Any]:
        """What the options of an architecture stand for, as JSON values, where that is more than their numbers."""
        label = self.label(architecture)
        return {} if label == architecture_id(architecture) else {"label": label}

    def figures(self) -> Mapping[str, Any]:
        """Figures of the space beside those that all spaces have, as JSON values (`fedloom describe`)."""
        return {}

    # -- tensors ----------------------------------------------------------------------------------------------------

    @property
    def parameter_names(self) -> frozenset[str]:
        """The supernet's tensors that are trained; all others are buffers, which no optimiser touches."""
        return _once(self, "facts", _facts).parameters

    def initial_weights(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh supernet tensors (parameters and buffers) drawn from the generator alone."""
        return initialise(on_meta(self.build_supernet), generator)

    def initial_subnet_weights(self, architecture: Architecture, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh tensors of one stand-alone subnet, by its own names, drawn from the generator alone."""
        self.validate(architecture)
        return initialise(on_meta(partial(self.build_subnet, architecture)), generator)

    def slices(self, architecture: Architecture) -> SliceMap:
        """Where each tensor of the stand-alone subnet lies in the supernet: the first entries of the same name."""
        self.validate(architecture)
        shapes = _once(self, "facts", _facts).shapes
        subnet = on_meta(partial(self.build_subnet, architecture)).state_dict()
        strange = [name for name in subnet if name not in shapes]
        if strange:
            raise ValueError(f"{self.name}: a subnet's tensor {strange[0]!r} is none of the supernet's")
        return {name: leading(name, tuple(t.shape), shapes[name]) for name, t in subnet.items()}

    # -- costs ------------------------------------------------------------------------------------------------------

    def cost_table(self, measure: str) -> CostTable:
        """Costs of the fixed part and of every option for one sample.

        `measure` is one of `fedloom.tiers.measure.MEASURES`, or bytes (all tensors, buffers included: what travels).
        By default an option costs what a subnet costs more with it, if all else is the first option.
        Raises ValueError for an unknown measure.
        """
        return _once(self, measure, lambda space: _table_by_differences(space, measure))

    def cheapest(self, table: CostTable) -> Architecture:
        """The architecture that costs least by this table: what every client can train."""
        return table.extreme(min)

    def common_cost(self, table: CostTable) -> float:
        """What all architectures cost at least by what they have in common; the lowest tier begins there."""
        return table.fixed


def _once(space: SearchSpace, what: str, find: Callable[[SearchSpace], T]) -> T:
    """What is found out about a space, once."""
    known: dict[str, T] = vars(space).setdefault("_found_out", {})
    if what not in known:
        known[what] = find(space)
    return known[what]


@dataclass(frozen=True)
class _Facts:
    """What is found out about a supernet once."""

    shapes: Mapping[str, tuple[int, ...]]
    parameters: frozenset[str]


def _facts(space: SearchSpace) -> _Facts:
    module = on_meta(space.build_supernet)
    shapes = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    return _Facts(shapes, frozenset(name for name, _ in module.named_parameters()))


def _table_by_differences(space: SearchSpace, measure: str) -> CostTable:
    of, device = measure_of(measure)

    def cost(architecture: Architecture) -> float:
        build = partial(space.build_subnet, architecture)
        return cost_of(build, (1, *space.input_shape), of, device, space.input_dtype)

    first = tuple(0 for _ in space.options)
    base = cost(first)
    rows = [
        [cost((*first[:decision], option, *first[decision + 1 :])) - base if option else 0.0 for option in range(count)]
        for decision, count in enumerate(space.options)
    ]
    # Options cost nothing below zero: what the cheapest of a decision saves is taken off the fixed part.
    least = [min(row) for row in rows]
    options = tuple(tuple(value - low for value in row) for row, low in zip(rows, least, strict=True))
    return CostTable(measure, base + sum(least), options, MEASURES.get(measure, "sum"))
