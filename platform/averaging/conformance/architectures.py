"""The laws of search spaces, first part: architectures, their variation, and their costs."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.platform.results.checkpoint import to_bytes
from fedloom.platform.spaces.base import SearchSpace, cost_of, measure_of
from fedloom.platform.spaces.capabilities import lacking
from fedloom.platform.spaces.genome import as_array
from fedloom.platform.spaces.slices import Architecture, architecture_id, bytes_of, extract

MEASURES = ("macs", "parameters", "bytes")
SAMPLES = 4
DRAWN, LISTED, NAMED = 2, 50, 4
"""The numbers of architectures drawn and enumerated, and of missing members named in a message."""


@dataclass(frozen=True)
class Tried:
    """A space, and the architectures, modules and inputs that its laws are tested on.

    `num_classes` is None if the expected number of classes is unknown.
    """

    space: SearchSpace
    num_classes: int | None = None

    @cached_property
    def architectures(self) -> Sequence[Architecture]:
        """The smallest, the largest, and a few random architectures."""
        rng = np.random.default_rng(0)
        drawn = [self.space.sample(rng) for _ in range(DRAWN)]
        return [*dict.fromkeys((self.space.smallest, self.space.largest, *drawn))]

    @cached_property
    def supernet(self) -> nn.Module:
        """The supernet's module; only the names, shapes and dtypes of its tensors are used, not their values."""
        return self.space.build_supernet()

    @cached_property
    def subnets(self) -> Mapping[Architecture, nn.Module]:
        """The subnet's module per architecture; used like `supernet`."""
        return {architecture: self.space.build_subnet(architecture) for architecture in self.architectures}

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Supernet tensors whose statistics, scales and biases differ from their initial values."""
        generator = torch.Generator().manual_seed(1)
        weights = self.space.initial_weights(generator)
        for tensor in weights.values():
            if tensor.is_floating_point() and tensor.dim() == 1:
                tensor.add_(torch.rand(tensor.shape, generator=generator), alpha=0.5)
        return weights

    @cached_property
    def inputs(self) -> Tensor:
        """A batch of standard normal inputs, or of the tokens 0 and 1."""
        generator = torch.Generator().manual_seed(2)
        shape = (SAMPLES, *self.space.input_shape)
        if self.space.input_dtype.is_floating_point:
            return torch.randn(shape, generator=generator, dtype=self.space.input_dtype)
        return torch.randint(0, 2, shape, generator=generator, dtype=self.space.input_dtype)


def shown(architecture: Architecture) -> str:
    """An architecture as shown in messages."""
    return f"architecture {architecture_id(architecture)}"


# -- architectures ----------------------------------------------------------------------------------------------------


def it_has_the_members_of_a_space(tried: Tried) -> Iterator[str]:
    """The space has every member of `SearchSpace`, and every decision has at least one option."""
    missing = lacking(tried.space, SearchSpace)
    if missing:
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        yield f"{type(tried.space).__name__} has no {', '.join(missing[:NAMED])}{more}"
    elif not tried.space.options or min(tried.space.options) < 1:
        yield f"options are {tried.space.options}, expected one or more per decision"


def architectures_are_valid_and_others_are_refused(tried: Tried) -> Iterator[str]:
    """The space's architectures pass `validate`; another length or an option out of range raises ValueError."""
    space = tried.space
    for architecture in tried.architectures:
        space.validate(architecture)
        if not all(type(option) is int for option in architecture):
            yield f"{architecture!r} holds {[type(o).__name__ for o in architecture]}, expected plain whole numbers"
    inside = space.smallest
    beyond = [(*inside[:d], n, *inside[d + 1 :]) for d, n in enumerate(space.options)]
    for outside in (*beyond, (-1, *inside[1:]), inside[:-1], (*inside, 0)):
        if not _refused(space, outside):
            yield f"{outside!r} passes, though the numbers of options are {space.options}"


def _refused(space: SearchSpace, architecture: Architecture) -> bool:
    try:
        space.validate(architecture)
    except ValueError:
        return True
    return False


def drawing_depends_on_the_generator_alone(tried: Tried) -> Iterator[str]:
    """The same seed draws the same architectures, from the space and from its genome."""
    space = tried.space
    for name, draw in (
        ("sample", lambda rng: [space.sample(rng) for _ in range(8)]),
        ("genome.draw", lambda rng: space.genome.draw(8, rng).tolist()),
    ):
        first, again = draw(np.random.default_rng(3)), draw(np.random.default_rng(3))
        if first != again:
            yield f"{name} gives {first[0]}, and then {again[0]}"


def architectures_are_counted(tried: Tried) -> Iterator[str]:
    """`enumerate` yields valid architectures, each once and in order, at most as many as there are combinations."""
    space, combinations = tried.space, math.prod(tried.space.options)
    listed = [*itertools.islice(space.enumerate(), LISTED)]
    for architecture in listed:
        space.validate(architecture)
    if listed != sorted(set(listed)) or len(listed) != min(LISTED, combinations):
        yield f"the first {len(listed)} of {combinations} are out of order, or some are missing: {listed[:3]}"
    if not 1 <= space.num_architectures <= combinations:
        yield f"num_architectures is {space.num_architectures}, with {combinations} combinations of options"


def texts_are_read_back(tried: Tried) -> Iterator[str]:
    """`parse` reads labels, ids, `smallest` and `largest`; the values for the tables are JSON."""
    space = tried.space
    texts = {"smallest": space.smallest, "largest": space.largest}
    for architecture in tried.architectures:
        texts |= {architecture_id(architecture): architecture, space.label(architecture): architecture}
        json.dumps(space.meaning(architecture))
    json.dumps(space.figures())
    for text, architecture in texts.items():
        if space.parse(text) != architecture:
            yield f"{text!r} is read as {space.parse(text)}, expected {architecture}"


def a_genomes_children_are_architectures(tried: Tried) -> Iterator[str]:
    """Mutation and crossover stay in the space; equal parents or a mutation probability of 0 change nothing."""
    genome, rng = tried.space.genome, np.random.default_rng(4)
    parents = as_array(tried.architectures)
    others = genome.draw(len(parents), rng)
    kept = {"mutate with probability 0": genome.mutate(parents, 0.0, rng), "cross": genome.cross(parents, parents, rng)}
    for what, children in kept.items():
        for child, parent in zip(children.tolist(), parents.tolist(), strict=True):
            if child != parent:
                yield f"{what} makes {child} of {parent}"
    for child in (*others, *genome.mutate(parents, 1.0, rng), *genome.cross(parents, others, rng)):
        tried.space.validate(tuple(child.tolist()))


def a_genomes_features_tell_architectures_apart(tried: Tried) -> Iterator[str]:
    """Features are 0 or 1, and two architectures have equal features if and only if they are equal."""
    drawn = tried.space.genome.draw(20, np.random.default_rng(5))
    architectures = np.concatenate([as_array(tried.architectures), drawn])
    features = tried.space.genome.one_hot(architectures)
    if not set(np.unique(features)) <= {0.0, 1.0}:
        yield f"there are the features {np.unique(features)[:5]}, expected 0 and 1"
    for a, b in itertools.combinations(range(len(architectures)), 2):
        if np.array_equal(features[a], features[b]) != np.array_equal(architectures[a], architectures[b]):
            yield f"{architectures[a].tolist()} and {architectures[b].tolist()} are told apart by one alone"


# -- costs ------------------------------------------------------------------------------------------------------------


def costs_are_those_of_the_built_subnet(tried: Tried) -> Iterator[str]:
    """The tables of MACs, parameters and bytes agree with measurements of the built module."""
    space = tried.space
    for measure, architecture in itertools.product(MEASURES, tried.architectures):
        build = partial(space.build_subnet, architecture)
        built = cost_of(build, (1, *space.input_shape), *measure_of(measure), space.input_dtype)
        found = space.cost_table(measure).cost(architecture)
        if not math.isclose(found, built, rel_tol=1e-6):
            yield f"{shown(architecture)} costs {found:.10g} {measure} by the table, and {built:.10g} as it is built"


def nothing_costs_less_than_the_smallest(tried: Tried) -> Iterator[str]:
    """By every measure `cheapest` has the lowest cost; by MACs `smallest` has the lowest and `largest` the highest."""
    space = tried.space
    for measure, architecture in itertools.product(MEASURES, tried.architectures):
        table = space.cost_table(measure)
        cost, rounding = table.cost(architecture), 1e-9 * table.largest
        bounds = {"common_cost": space.common_cost(table), "cheapest": table.cost(space.cheapest(table))}
        if measure == "macs":
            bounds |= {"smallest": table.cost(space.smallest), "-largest": -table.cost(space.largest)}
        for name, bound in bounds.items():
            if (-cost if name.startswith("-") else cost) < bound - rounding:
                yield f"{shown(architecture)} costs {cost:.10g} {measure}, {name.lstrip('-')} {abs(bound):.10g}"


def bytes_on_the_wire_are_the_tensors_bytes(tried: Tried) -> Iterator[str]:
    """A subnet's cost in bytes equals the size of its tensors, and of the values in their file."""
    for architecture in tried.architectures:
        tensors = extract(tried.weights, tried.space.slices(architecture))
        content = to_bytes(tensors)
        values = len(content) - 8 - int.from_bytes(content[:8], "little")
        cost = tried.space.cost_table("bytes").cost(architecture)
        if not cost == bytes_of(tensors) == values:
            yield f"{shown(architecture)}: the table has {cost:.10g}, the tensors {bytes_of(tensors)}, a file {values}"


LAWS = (
    it_has_the_members_of_a_space,
    architectures_are_valid_and_others_are_refused,
    drawing_depends_on_the_generator_alone,
    architectures_are_counted,
    texts_are_read_back,
    a_genomes_children_are_architectures,
    a_genomes_features_tell_architectures_apart,
    costs_are_those_of_the_built_subnet,
    nothing_costs_less_than_the_smallest,
    bytes_on_the_wire_are_the_tensors_bytes,
)
