"""The laws of search spaces: architectures and their costs, tensors and slices, and what the networks compute."""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.platform.averaging.average import Update, average
from fedloom.platform.averaging.conformance.law import different_bits, differing, far_apart, kind_of
from fedloom.platform.results.checkpoint import to_bytes
from fedloom.platform.spaces.base import SearchSpace, load_sent, miscounted, travelling
from fedloom.platform.spaces.capabilities import HasSubspaces, lacking, with_subspaces
from fedloom.platform.spaces.genome import as_array
from fedloom.platform.spaces.slices import (
    Architecture,
    Region,
    Slice,
    SliceMap,
    Weights,
    architecture_id,
    bytes_of,
    extract,
)

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
    unchanged = {
        "mutate with probability 0": genome.mutate(parents, 0.0, rng),
        "cross": genome.cross(parents, parents, rng),
    }
    for what, children in unchanged.items():
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
    for architecture, measure, in_table, built in miscounted(tried.space, MEASURES, tried.architectures):
        yield f"{shown(architecture)} costs {in_table:.10g} {measure} by the table, and {built:.10g} as it is built"


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


# -- tensors ----------------------------------------------------------------------------------------------------------


def seeded(seed: int) -> torch.Generator:
    """A new generator with this seed."""
    return torch.Generator().manual_seed(seed)


def fresh_weights_depend_on_the_generator_alone(tried: Tried) -> Iterator[str]:
    """The same seed gives the same bits, another seed other bits, and the global generator's state does not change."""
    before = torch.get_rng_state()
    first, again, other = (tried.space.initial_weights(seeded(seed)) for seed in (1, 1, 2))
    yield from differing(again, first)
    if not any(True for _ in differing(other, first)):
        yield "seeds 1 and 2 give the same weights"
    for architecture in tried.architectures:
        alone = [tried.space.initial_subnet_weights(architecture, seeded(1)) for _ in range(2)]
        yield from _of(architecture, differing(*alone))
    yield from different_bits("torch's global generator", torch.get_rng_state(), before)


def fresh_weights_fit_the_modules(tried: Tried) -> Iterator[str]:
    """Names, shapes and dtypes are those of the supernet's and the subnet's state, and all values are finite."""
    space = tried.space
    yield from _unfitting(space.initial_weights(seeded(1)), tried.supernet)
    for architecture, subnet in tried.subnets.items():
        weights = space.initial_subnet_weights(architecture, seeded(1))
        yield from _of(architecture, _unfitting(weights, subnet))


def _unfitting(weights: Weights, module: nn.Module) -> Iterator[str]:
    state = travelling(module)
    for name in sorted(state.keys() ^ weights.keys()):
        yield f"{name} is {'among the fresh weights' if name in weights else 'in the module'} alone"
    for name, tensor in weights.items():
        if name in state and kind_of(tensor) != kind_of(state[name]):
            yield f"{name} is {kind_of(tensor)}, in the module {kind_of(state[name])}"
        elif not bool(torch.isfinite(tensor).all()):
            yield f"{name} begins with {tensor[~torch.isfinite(tensor)][0].item()}"


def what_is_trained_are_the_parameters(tried: Tried) -> Iterator[str]:
    """`parameter_names` are the supernet's parameters without buffers; a subnet's parameters are slices of them."""
    space = tried.space
    supernet = {name for name, parameter in tried.supernet.named_parameters() if parameter.requires_grad}
    for name in sorted(supernet ^ space.parameter_names):
        yield f"{name} is {'a parameter and not named' if name in supernet else 'named and no parameter'}"
    for architecture, subnet in tried.subnets.items():
        parameters = {name for name, _ in subnet.named_parameters()}
        for name, piece in space.slices(architecture).items():
            if (name in parameters) != (piece.source in supernet):
                yield from _of(architecture, [f"{name} is a parameter in the subnet or in the supernet alone"])


# -- slices -----------------------------------------------------------------------------------------------------------


def slices_are_the_subnets_tensors(tried: Tried) -> Iterator[str]:
    """Each tensor of a subnet is a slice of the supernet with the same shape and dtype, and no two slices overlap."""
    for architecture, subnet in tried.subnets.items():
        slices, state = tried.space.slices(architecture), travelling(subnet)
        for name in sorted(slices.keys() ^ state.keys()):
            yield from _of(architecture, [f"{name} is {'no tensor of it' if name in slices else 'without a slice'}"])
        for name, part in extract(tried.weights, slices).items():
            if kind_of(part) != kind_of(state[name]):
                yield from _of(architecture, [f"{name} is {kind_of(part)} there, {kind_of(state[name])} in the module"])
        yield from _of(architecture, _overlaps(tried.weights, slices))
        if not tried.space.slices_tensors and any(piece.region is not None for piece in slices.values()):
            yield from _of(architecture, ["it holds parts of tensors, though slices_tensors says no"])


def _overlaps(weights: Weights, slices: SliceMap) -> Iterator[str]:
    by_source: dict[str, dict[str, Region]] = {}
    for name, piece in slices.items():
        by_source.setdefault(piece.source, {})[name] = piece.region_of(weights[piece.source])
    for source, regions in by_source.items():
        for (a, first), (b, second) in combinations(regions.items(), 2):
            if all(one[0] < two[1] and two[0] < one[1] for one, two in zip(first, second, strict=True)):
                yield f"{a} and {b} overlap in {source}: {first} and {second}"


def what_is_extracted_is_inserted_again(tried: Tried) -> Iterator[str]:
    """Inserting an unchanged subnet changes nothing; a changed one changes only its own slices, bit for bit."""
    for architecture in tried.architectures:
        slices = tried.space.slices(architecture)
        unchanged = extract(tried.weights, slices)
        before = {name: tensor.clone() for name, tensor in tried.weights.items()}
        yield from _of(architecture, differing(_inserted(tried.weights, unchanged, slices), before))
        changed = {name: tensor + offset for offset, (name, tensor) in enumerate(unchanged.items(), start=1)}
        new = _inserted(tried.weights, changed, slices)
        for name, piece in slices.items():
            piece.of(before[piece.source]).copy_(changed[name])
        yield from _of(architecture, differing(new, before))
        yield from _of(architecture, differing(extract(new, slices), changed))


def _inserted(weights: Weights, tensors: Weights, slices: SliceMap) -> dict[str, Tensor]:
    return average(weights, [Update(tensors, slices, dict.fromkeys(tensors, 1.0))])


def equal_subnets_are_averaged_as_by_fedavg(tried: Tried) -> Iterator[str]:
    """If all clients hold the same subnet, its mean equals FedAvg of stand-alone models, bit for bit."""
    for architecture in tried.architectures:
        slices = tried.space.slices(architecture)
        whole = {name: Slice(name) for name in slices}
        trained = [tried.space.initial_subnet_weights(architecture, seeded(seed)) for seed in (1, 2)]
        sizes = (7.0, 30.0)
        shared, alone = (
            [Update(t, places, dict.fromkeys(t, n)) for t, n in zip(trained, sizes, strict=True)]
            for places in (slices, whole)
        )
        fedavg = average(extract(tried.weights, slices), alone)
        yield from _of(architecture, differing(extract(average(tried.weights, shared), slices), fedavg))


def subspaces_hold_their_architectures(tried: Tried) -> Iterator[str]:
    """In a space with subspaces, an architecture is the subspace of its options, and those options own its tensors."""
    if lacking(tried.space, HasSubspaces):
        return
    space = with_subspaces(tried.space, "a law")
    if set(space.subspace_slices(space.largest_subspace)) != set(tried.weights):
        yield "the largest subspace is not the supernet"
    for architecture in tried.architectures:
        slices = space.slices(architecture)
        if dict(space.subspace_slices(tuple((option,) for option in architecture))) != dict(slices):
            yield from _of(architecture, ["the subspace of its options holds other slices"])
        owned = {name for name, owner in space.owner_of.items() if owner is None or architecture[owner[0]] == owner[1]}
        for source in sorted(owned ^ {piece.source for piece in slices.values()}):
            yield from _of(architecture, [f"{source} is {'not ' if source in owned else ''}in its slices"])


# -- what is computed -------------------------------------------------------------------------------------------------


def a_subnet_computes_what_the_supernet_does(tried: Tried) -> Iterator[str]:
    """With the same weights, subnet and supernet give the same finite logits (N, classes, ...), up to rounding."""
    supernet = _loaded(tried.space.build_supernet(), tried.weights)
    classes = tried.num_classes
    for architecture in tried.architectures:
        cut = extract(tried.weights, tried.space.slices(architecture))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)  # noise and dropout draw from the global generator
            logits = _loaded(tried.space.build_subnet(architecture), cut)(tried.inputs)
            torch.manual_seed(0)
            expected = supernet(tried.inputs, architecture)
        classes = expected.shape[1] if classes is None else classes
        yield from _of(architecture, far_apart({"logits": logits}, {"logits": expected}, 1e-4))
        if tuple(logits.shape[:2]) != (SAMPLES, classes):
            yield from _of(architecture, [f"logits are {tuple(logits.shape)}, expected ({SAMPLES}, {classes}, ...)"])
        if not bool(torch.isfinite(logits).all()):
            yield from _of(architecture, [f"a logit is {logits[~torch.isfinite(logits)][0].item()}"])


def training_touches_the_slices_alone(tried: Tried) -> Iterator[str]:
    """A training step of a path through the supernet gives no gradient and changes no buffer outside its slices."""
    for architecture in tried.architectures:
        supernet = _loaded(tried.space.build_supernet(), tried.weights).train()
        outside = _outside(tried.space, architecture, tried.weights)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            supernet(tried.inputs, architecture).square().mean().backward()
        for name, parameter in supernet.named_parameters():
            strange = [] if parameter.grad is None else parameter.grad[outside[name]].abs().tolist()
            if any(strange):
                yield from _of(architecture, [f"{name} has a gradient of {max(strange):.6g} beside its slice"])
        for name, tensor in travelling(supernet).items():
            yield from _of(architecture, different_bits(name, tensor, tried.weights[name], outside[name]))


def _outside(space: SearchSpace, architecture: Architecture, weights: Weights) -> dict[str, Tensor]:
    """Per supernet tensor, the mask of the scalars that the subnet does not hold."""
    masks = {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in weights.items()}
    for piece in space.slices(architecture).values():
        piece.of(masks[piece.source]).fill_(False)
    return masks


def _loaded(module: nn.Module, weights: Weights) -> nn.Module:
    load_sent(module, weights)
    return module.eval()


def _of(architecture: Architecture, problems: Iterable[str]) -> Iterator[str]:
    for problem in problems:
        yield f"{shown(architecture)}: {problem}"


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
    fresh_weights_depend_on_the_generator_alone,
    fresh_weights_fit_the_modules,
    what_is_trained_are_the_parameters,
    slices_are_the_subnets_tensors,
    what_is_extracted_is_inserted_again,
    equal_subnets_are_averaged_as_by_fedavg,
    subspaces_hold_their_architectures,
    a_subnet_computes_what_the_supernet_does,
    training_touches_the_slices_alone,
)
