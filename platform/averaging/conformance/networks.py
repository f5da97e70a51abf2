"""The laws of search spaces, second part: tensors, the subnets' slices, and what the networks compute."""

from collections.abc import Iterable, Iterator
from itertools import combinations

import torch
from torch import Tensor, nn

from fedloom.platform.averaging.average import Update, average
from fedloom.platform.averaging.conformance.architectures import SAMPLES, Tried, shown
from fedloom.platform.averaging.conformance.law import different_bits, differing, far_apart, kind_of
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.capabilities import HasSubspaces, lacking, with_subspaces
from fedloom.platform.spaces.slices import Architecture, Region, Slice, SliceMap, Weights, extract


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
    state = module.state_dict()
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
    supernet = {name for name, _ in tried.supernet.named_parameters()}
    for name in sorted(supernet ^ space.parameter_names):
        yield f"{name} is {'a parameter and not named' if name in supernet else 'named and no parameter'}"
    for architecture, subnet in tried.subnets.items():
        own = {name for name, _ in subnet.named_parameters()}
        for name, piece in space.slices(architecture).items():
            if (name in own) != (piece.source in supernet):
                yield from _of(architecture, [f"{name} is a parameter in the subnet or in the supernet alone"])


# -- slices -----------------------------------------------------------------------------------------------------------


def slices_are_the_subnets_tensors(tried: Tried) -> Iterator[str]:
    """Each tensor of a subnet is a slice of the supernet with the same shape and dtype, and no two slices overlap."""
    for architecture, subnet in tried.subnets.items():
        slices, state = tried.space.slices(architecture), subnet.state_dict()
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
        region = piece.region or tuple((0, size) for size in weights[piece.source].shape)
        by_source.setdefault(piece.source, {})[name] = region
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
        changed = {name: tensor + place for place, (name, tensor) in enumerate(unchanged.items(), start=1)}
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
            found = _loaded(tried.space.build_subnet(architecture), cut)(tried.inputs)
            torch.manual_seed(0)
            expected = supernet(tried.inputs, architecture)
        classes = expected.shape[1] if classes is None else classes
        yield from _of(architecture, far_apart({"logits": found}, {"logits": expected}, 1e-4))
        if tuple(found.shape[:2]) != (SAMPLES, classes):
            yield from _of(architecture, [f"logits are {tuple(found.shape)}, expected ({SAMPLES}, {classes}, ...)"])
        if not bool(torch.isfinite(found).all()):
            yield from _of(architecture, [f"a logit is {found[~torch.isfinite(found)][0].item()}"])


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
        for name, tensor in supernet.state_dict().items():
            yield from _of(architecture, different_bits(name, tensor, tried.weights[name], outside[name]))


def _outside(space: SearchSpace, architecture: Architecture, weights: Weights) -> dict[str, Tensor]:
    """Per supernet tensor, the mask of the scalars that the subnet does not hold."""
    masks = {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in weights.items()}
    for piece in space.slices(architecture).values():
        piece.of(masks[piece.source]).fill_(False)
    return masks


def _loaded(module: nn.Module, weights: Weights) -> nn.Module:
    module.load_state_dict({name: tensor.clone() for name, tensor in weights.items()})
    return module.eval()


def _of(architecture: Architecture, problems: Iterable[str]) -> Iterator[str]:
    for problem in problems:
        yield f"{shown(architecture)}: {problem}"


LAWS = (
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
