"""The laws of server rules: uncovered values stay unchanged, and a round depends on nothing but its inputs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedloom.platform.averaging.average import Averaged, Update, WeightedSums
from fedloom.platform.averaging.conformance.law import different_bits, differing, kind_of
from fedloom.platform.averaging.server import ServerRound, ServerRule, ServerStep, serve
from fedloom.platform.results.checkpoint import from_bytes, to_bytes
from fedloom.platform.spaces.slices import Region, Slice, Weights, part_of

WEIGHT, BIAS = "layer.weight", "layer.bias"
STATISTIC, COUNTER = "layer.running_mean", "layer.num_batches_tracked"
PARAMETERS = (WEIGHT, BIAS)

ROUNDS: tuple[tuple[Mapping[str, Region], ...], ...] = (
    ({WEIGHT: ((0, 2), (0, 4)), BIAS: ((0, 4),), STATISTIC: ((0, 4),), COUNTER: ()}, {WEIGHT: ((0, 1), (0, 4))}),
    ({WEIGHT: ((1, 2), (0, 2))}, {WEIGHT: ((0, 2), (1, 3)), STATISTIC: ((0, 2),)}),
    ({BIAS: ((1, 3),), COUNTER: ()},),
    ({WEIGHT: ((0, 2), (0, 3)), BIAS: ((0, 4),), STATISTIC: ((0, 4),), COUNTER: ()},),
)
"""Per round and client, the regions held: no scalar of `WEIGHT` is covered in every round, its last row in none."""

CHANGES = (1.0, 0.0, 1e-6, 1e3)
"""Standard deviations of the difference between the clients' values and the old ones."""


def first_weights() -> dict[str, Tensor]:
    """The weights before the first round."""
    generator = torch.Generator().manual_seed(0)
    floats = {name: torch.randn(shape, generator=generator) for name, shape in ((WEIGHT, (3, 4)), (BIAS, (4,)))}
    return {**floats, STATISTIC: torch.ones(4), COUNTER: torch.tensor(3)}


def averaged_in(round_: int, old: Weights, change: float = 1.0) -> Averaged:
    """The mean of the round's clients, whose values are the old ones plus `change` times standard normal noise."""
    generator, sums = torch.Generator().manual_seed(100 + round_), WeightedSums()
    for client, regions in enumerate(ROUNDS[round_ % len(ROUNDS)]):
        tensors = {}
        for name, region in regions.items():
            held = part_of(old[name], region)
            moved = torch.randn(held.shape, generator=generator) * change if held.is_floating_point() else round_ + 5
            tensors[name] = held + moved
        slices = {name: Slice(name, region) for name, region in regions.items()}
        sums.add(Update(tensors, slices, dict.fromkeys(tensors, 1.0 + client)))
    return sums.finish(old)


@dataclass(frozen=True)
class Served:
    """A round's inputs (weights, the clients' mean, the server's state) and its results."""

    round: int
    old: Weights
    averaged: Averaged
    state: Weights
    new: Weights
    state_after: Weights

    def covered(self, name: str) -> Tensor:
        """The mask of the scalars that the clients cover."""
        mask = torch.zeros_like(self.old[name], dtype=torch.bool)
        for region in self.averaged.coverage.get(name, ()):
            part_of(mask, region).fill_(True)
        return mask


def served(rule: ServerRule, round_: int, old: Weights, averaged: Averaged, state: Weights) -> Served:
    """Runs one round with the platform's `serve`."""
    rules = dict.fromkeys(PARAMETERS, ("rule", rule))
    new, state_after = serve(rules, old, averaged, state, ServerRound(round_, len(ROUNDS[0]), 10))
    return Served(round_, old, averaged, state, new, state_after)


def played(
    rule: ServerRule, rounds: Sequence[int] = range(2 * len(ROUNDS)), start: Served | None = None, change: float = 1.0
) -> Iterator[Served]:
    """Runs several rounds, from the first weights or from the end of the round `start`."""
    weights, state = (first_weights(), {}) if start is None else (start.new, start.state_after)
    for round_ in rounds:
        moment = served(rule, round_, weights, averaged_in(round_, weights, change), state)
        yield moment
        weights, state = moment.new, moment.state_after


# -- the laws ---------------------------------------------------------------------------------------------------------


def new_values_are_finite_and_of_the_old_kind(rule: ServerRule) -> Iterator[str]:
    """For zero, small and large changes the rule returns finite values of the region's shape and dtype."""
    problems: list[str] = []

    def watched(step: ServerStep) -> Tensor:
        values: object = rule(step)
        problems.extend(f"round {step.about.round}, {step.name} is {problem}" for problem in _problems(values, step))
        return values if isinstance(values, Tensor) and not problems else step.old

    for change in CHANGES:
        for _ in played(watched, change=change):
            yield from problems


def _problems(values: object, step: ServerStep) -> Iterator[str]:
    if not isinstance(values, Tensor):
        yield f"{values!r}, expected a tensor of new values"
    elif (values.shape, values.dtype) != (step.old.shape, step.old.dtype):
        yield f"{kind_of(values)}, expected {kind_of(step.old)}"
    elif not bool(torch.isfinite(values).all()):
        wrong = ~torch.isfinite(values)
        yield f"{values[wrong][0].item()} for a change of {step.change[wrong][0].item():.6g}"


def what_nobody_trained_keeps_its_bits(rule: ServerRule) -> Iterator[str]:
    """Uncovered scalars and their server state change in no round, whatever the momentum."""
    for moment in played(rule):
        for name in PARAMETERS:
            yield from _in(moment, different_bits(name, moment.new[name], moment.old[name], ~moment.covered(name)))
        for slot, tensor in moment.state_after.items():
            uncovered = ~moment.covered(_tensor_of(slot))
            before = moment.state.get(slot)
            if before is not None:
                yield from _in(moment, different_bits(slot, tensor, before, uncovered))
            elif bool(uncovered.any()):
                first = torch.full_like(tensor, tensor[uncovered][0].item())
                yield from _in(moment, different_bits(slot, tensor, first, uncovered))


def buffers_are_the_clients_mean(rule: ServerRule) -> Iterator[str]:
    """Running statistics and counters are averaged; the server rule neither changes them nor keeps state for them."""
    for moment in played(rule):
        for name in (STATISTIC, COUNTER):
            yield from _in(moment, different_bits(name, moment.new[name], moment.averaged.weights[name]))
        for slot in moment.state_after:
            if _tensor_of(slot) not in PARAMETERS:
                yield f"it keeps {slot}, which is of no parameter"


def what_goes_in_is_only_read(rule: ServerRule) -> Iterator[str]:
    """A round does not change its inputs: the old weights, the mean and the previous state."""
    weights: Weights = first_weights()
    state: Weights = {}
    for round_ in range(len(ROUNDS)):
        averaged = averaged_in(round_, weights)
        inputs = {"old": weights, "mean": averaged.weights, "kept": state}
        copies = {what: {name: t.clone() for name, t in group.items()} for what, group in inputs.items()}
        moment = served(rule, round_, weights, averaged, state)
        for what, group in inputs.items():
            for problem in differing(group, copies[what]):
                yield f"round {round_}, {what} {problem}"
        weights, state = moment.new, moment.state_after


def the_same_round_gives_the_same_bits(rule: ServerRule) -> Iterator[str]:
    """A round repeated with tensors and regions in another order gives the same weights and state."""
    for moment in played(rule):
        turned = {name: dict(reversed([*covered.items()])) for name, covered in moment.averaged.coverage.items()}
        averaged = replace(moment.averaged, coverage=dict(reversed(turned.items())))
        again = served(rule, moment.round, moment.old, averaged, moment.state)
        yield from _in(moment, differing(again.new, moment.new))
        yield from _in(moment, differing(again.state_after, moment.state_after))


def a_checkpoint_in_between_changes_nothing(rule: ServerRule) -> Iterator[str]:
    """State and weights survive a checkpoint unchanged, and rounds resumed from it give the same results."""
    whole = [*played(rule)]
    for moment in whole[:-1]:
        weights, state = (from_bytes(to_bytes(t), Path("checkpoint")) for t in (moment.new, moment.state_after))
        yield from _in(moment, differing(state, moment.state_after))
        start = replace(moment, new=weights, state_after=state)
        for resumed in played(rule, range(moment.round + 1, len(whole)), start):
            yield from _in(resumed, differing(resumed.new, whole[resumed.round].new))
            yield from _in(resumed, differing(resumed.state_after, whole[resumed.round].state_after))


def no_change_is_no_step(rule: ServerRule) -> Iterator[str]:
    """In the first round, with no state yet, a mean equal to the old weights leaves them unchanged."""
    old = first_weights()
    averaged = averaged_in(0, old, change=0.0)
    same = replace(averaged, weights={**averaged.weights, **{name: old[name].clone() for name in PARAMETERS}})
    moment = served(rule, 0, old, same, {})
    for name in PARAMETERS:
        yield from different_bits(name, moment.new[name], old[name])


def _in(moment: Served, problems: Iterator[str]) -> Iterator[str]:
    for problem in problems:
        yield f"round {moment.round}, {problem}"


def _tensor_of(slot: str) -> str:
    """The tensor that a state's key `SLOT/TENSOR` belongs to."""
    return next(name for name in first_weights() if slot.endswith(f"/{name}"))


LAWS = (
    new_values_are_finite_and_of_the_old_kind,
    what_nobody_trained_keeps_its_bits,
    buffers_are_the_clients_mean,
    what_goes_in_is_only_read,
    the_same_round_gives_the_same_bits,
    a_checkpoint_in_between_changes_nothing,
    no_change_is_no_step,
)
