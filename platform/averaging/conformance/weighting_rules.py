"""The laws of weighting rules: properties of the weighted mean under any weighting."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real

import torch
from torch import Tensor

from fedloom.platform.averaging.average import Update, WeightedSums, average
from fedloom.platform.averaging.conformance.law import differing, far_apart
from fedloom.platform.averaging.weighting import WeightingRule, Work, weights_of
from fedloom.platform.spaces.slices import Region, Slice, extract

FIXED, STATISTIC, COUNTER = "fixed.weight", "fixed.running_mean", "fixed.num_batches_tracked"
SLICED, LONE, NOBODY = "layers.0.ops.1.weight", "layers.0.ops.2.weight", "layers.0.ops.3.weight"

SHAPES: Mapping[str, tuple[int, ...]] = {FIXED: (3, 2), STATISTIC: (3,), COUNTER: (), SLICED: (3, 3), LONE: (2,)}
REGIONS: tuple[Region, ...] = (((0, 2), (0, 2)), ((0, 3), (0, 1)), ((0, 1), (0, 3)), ((0, 2), (0, 2)))
"""Per client its region of `SLICED`: the regions overlap, and no client holds the whole tensor."""


def cohort() -> tuple[Work, ...]:
    """The work of four clients: all trained the fixed part, some `SLICED`, one `LONE`, and none holds `NOBODY`."""
    fixed = (FIXED, STATISTIC, COUNTER)
    return (
        Work(10, 20, {**dict.fromkeys(fixed, 20), SLICED: 12, LONE: 0}),
        Work(30, 60, {**dict.fromkeys(fixed, 60), SLICED: 4}),
        Work(60, 120, {**dict.fromkeys(fixed, 120), SLICED: 0, LONE: 120}),
        Work(2500, 2500, {**dict.fromkeys(fixed, 2500), SLICED: 2500}),
    )


def old_weights() -> dict[str, Tensor]:
    """The supernet's weights before the round."""
    old = {name: torch.linspace(-1, 1, math.prod(shape)).reshape(shape) for name, shape in SHAPES.items()}
    return {**old, COUNTER: torch.tensor(3), NOBODY: torch.tensor([math.pi, -0.0])}


def updated(
    rule: WeightingRule, work: Work, client: int, value: float | None = None, region: Region | None = None
) -> Update:
    """A client's update: its own random values, or `value` everywhere; for `SLICED`, only its region.

    The weights are computed as in the client trainer: share times the rule's weight.
    """
    held = REGIONS[client] if region is None else region
    slices = {name: Slice(name, held if name == SLICED else None) for name in work.seen_by_tensor}
    tensors = {
        name: _own_values(piece, client) if value is None else torch.full_like(piece, value)
        for name, piece in extract(old_weights(), slices).items()
    }
    return Update(tensors, slices, *weights_of(rule, work))


def _own_values(like: Tensor, client: int) -> Tensor:
    if not like.is_floating_point():
        return torch.full_like(like, 5 + client)
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(client))


def all_updated(rule: WeightingRule, value: float | None = None) -> list[Update]:
    """The cohort's updates in plan order."""
    return [updated(rule, work, client, value) for client, work in enumerate(cohort())]


# -- the weights ------------------------------------------------------------------------------------------------------


def weights_are_finite_and_at_least_0(rule: WeightingRule) -> Iterator[str]:
    """Every tensor that a client returns gets one weight, a finite number of at least 0."""
    for work in cohort():
        weights = rule(work)
        if not isinstance(weights, Mapping):
            yield f"it gives {weights!r}, not one weight per tensor"
            return
        for name in work.seen_by_tensor:
            if name not in weights:
                yield f"{name} has no weight"
            elif not (isinstance(weights[name], Real) and 0 <= weights[name] < math.inf):
                yield f"{name} has the weight {weights[name]!r}"


def weights_depend_on_the_work_alone(rule: WeightingRule) -> Iterator[str]:
    """The same work gets the same weights, in whatever order the clients are weighted."""
    first = [dict(rule(work)) for work in cohort()]
    again = [dict(rule(work)) for work in reversed(cohort())][::-1]
    for work, before, after in zip(cohort(), first, again, strict=True):
        yield from _different_weights(f"of {work.samples} samples", before, after)


def the_order_of_the_tensors_does_not_matter(rule: WeightingRule) -> Iterator[str]:
    """A tensor's weight does not depend on its position among the returned tensors."""
    for work in cohort():
        turned = replace(work, seen_by_tensor=dict(reversed([*work.seen_by_tensor.items()])))
        yield from _different_weights("named last to first", rule(work), rule(turned))


def the_work_is_only_read(rule: WeightingRule) -> Iterator[str]:
    """The rule does not change its input."""
    for work, before in zip(cohort(), cohort(), strict=True):
        rule(work)
        yield from _different_weights("after the call", before.seen_by_tensor, work.seen_by_tensor)


def _different_weights(what: str, before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[str]:
    for name in (*before, *(name for name in after if name not in before)):
        if before.get(name) != after.get(name):
            yield f"{name} has {before.get(name)}, and {what} {after.get(name)}"


# -- the mean ---------------------------------------------------------------------------------------------------------


def the_average_is_the_weighted_mean(rule: WeightingRule) -> Iterator[str]:
    """The new weights equal those of a slow scalar-by-scalar reference in double precision."""
    old, updates = old_weights(), all_updated(rule)
    yield from far_apart(average(old, updates), reference(old, updates))


def reference(old: Mapping[str, Tensor], updates: Sequence[Update]) -> dict[str, Tensor]:
    """sum_k w_k x_k / sum_k w_k over the clients that hold a scalar with w_k > 0; for counters the maximum.

    If the rule weighs what clients do not hold, a client without the scalar counts with the scalar's old value.
    """
    new = {name: tensor.double() for name, tensor in old.items()}
    for name, tensor in old.items():
        for index in itertools.product(*map(range, tensor.shape)):
            held = [(u.weights[name], _at(u, name, index)) for u in updates if u.weights.get(name, 0) > 0]
            held_values = [(weight, value) for weight, value in held if value is not None]
            if held_values and tensor.is_floating_point():
                absent = [u.unheld for u in updates if u.weights.get(name, 0) == 0 or _at(u, name, index) is None]
                held_values += [(weight, tensor[index].item()) for weight in absent]
                total = math.fsum(weight for weight, _ in held_values)
                new[name][index] = math.fsum(weight * value for weight, value in held_values) / total
            elif held_values:
                new[name][index] = max(value for _, value in held_values)
    return new


def _at(update: Update, name: str, index: tuple[int, ...]) -> float | None:
    """The client's value of a scalar of the supernet; None if the client does not hold it."""
    if name not in update.tensors:
        return None
    region = update.slices[name].region_of(update.tensors[name])
    inside = all(start <= i < stop for i, (start, stop) in zip(index, region, strict=True))
    within = tuple(i - start for i, (start, _) in zip(index, region, strict=True))
    return update.tensors[name][within].item() if inside else None


def clients_of_the_same_work_count_alike(rule: WeightingRule) -> Iterator[str]:
    """Two clients with the same work that send 1 and 3 have the mean 2; tensors of weight 0 stay unchanged."""
    old, work = old_weights(), cohort()[0]
    mean = average(old, [updated(rule, work, 0, value) for value in (1.0, 3.0)])
    for name, weight in updated(rule, work, 0).weights.items():
        if name != COUNTER and name in work.seen_by_tensor:
            expected = 2.0 if weight > 0 else old[name].flatten()[0].item()
            actual = mean[name].flatten()[0].item()
            if not math.isclose(actual, expected, rel_tol=1e-6):
                yield f"{name} is {actual:.9g}, expected {expected:.9g}"


def the_mean_of_equal_values_is_that_value(rule: WeightingRule) -> Iterator[str]:
    """If all clients return the same value, so does the average (unless the rule weighs what clients do not hold)."""
    old, updates = old_weights(), all_updated(rule, value=7.0)
    if any(update.unheld for update in updates):
        return
    expected = {name: tensor.double() for name, tensor in old.items()}
    for update in updates:
        for name in update.tensors:
            if update.weights[name] > 0:
                update.slices[name].of(expected[name]).fill_(7.0)
    yield from far_apart(average(old, updates), expected)


def what_nobody_trained_keeps_its_bits(rule: WeightingRule) -> Iterator[str]:
    """A tensor that no client returns with a positive weight keeps its old value bit for bit."""
    old = old_weights()
    silent = [updated(rule, replace(work, share=0.0), client) for client, work in enumerate(cohort())]
    yield from differing(average(old, silent), old_weights())
    held = {name for update in all_updated(rule) for name, weight in update.weights.items() if weight > 0}
    new = average(old, all_updated(rule))
    left = [name for name in old if name not in held]
    yield from differing({name: new[name] for name in left}, {name: old_weights()[name] for name in left})


def the_order_of_arrival_does_not_matter(rule: WeightingRule) -> Iterator[str]:
    """In whatever order clients and chunks finish, sums merged in plan order have the same bits."""
    plan, chunk = range(len(cohort())), 2

    def merged(arrival: Sequence[int]) -> dict[str, Tensor]:
        arrived = {client: updated(rule, cohort()[client], client) for client in arrival}
        chunks = {start: WeightedSums() for start in sorted({client - client % chunk for client in arrival})}
        for client in plan:
            chunks[client - client % chunk].add(arrived[client])
        sums = WeightedSums()
        for part in chunks.values():
            sums.merge(part)
        return sums.finish(old_weights()).weights

    in_order = merged(plan)
    for arrival in itertools.permutations(plan):
        yield from differing(merged(arrival), in_order)


def equal_slices_are_averaged_as_by_fedavg(rule: WeightingRule) -> Iterator[str]:
    """If all clients hold the same slice, its mean equals FedAvg of stand-alone models, bit for bit."""
    old, piece = old_weights(), Slice(SLICED, REGIONS[0])
    updates = [updated(rule, work, client, region=piece.region) for client, work in enumerate(cohort())]
    alone = [replace(update, slices={name: Slice(name) for name in update.tensors}) for update in updates]
    fedavg = average({**old, SLICED: piece.of(old[SLICED])}, alone)
    expected = old[SLICED].clone()
    piece.of(expected).copy_(fedavg[SLICED])
    yield from differing(average(old, updates), {**fedavg, SLICED: expected})


LAWS = (
    weights_are_finite_and_at_least_0,
    weights_depend_on_the_work_alone,
    the_order_of_the_tensors_does_not_matter,
    the_work_is_only_read,
    the_average_is_the_weighted_mean,
    clients_of_the_same_work_count_alike,
    the_mean_of_equal_values_is_that_value,
    what_nobody_trained_keeps_its_bits,
    the_order_of_arrival_does_not_matter,
    equal_slices_are_averaged_as_by_fedavg,
)
