"""The laws of aggregators: what a round's result may depend on, and how far attackers may move it.

Some rules cannot obey a law; their tests skip it by name:

    attackers leave the result among the honest values    `mean`, for which one attacker is enough; `rfa` with its three
        iterations, after which attackers a million away, 20 % of the clients, still move the result by a thousand
    equal updates are the result, scaled weights scale the result    `norm_bound`, if changes are longer than the bound,
        which is an absolute length
    the order of the clients does not matter    `bulyan` with f of 1 or 2: its last choice is between two clients of
        equal score, each the other's only neighbour, and takes the first in plan order
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedloom.platform.averaging.aggregators import Aggregator, aggregated, attackers_among
from fedloom.platform.averaging.average import Averaged, Update
from fedloom.platform.averaging.conformance.law import differing, far_apart
from fedloom.platform.spaces.slices import Region, Slice, Weights, part_of

WHOLE, SLICED, COUNTER, NOBODY = "layer.weight", "layer.slices", "layer.num_batches_tracked", "layer.nobody"
SHAPES: Mapping[str, tuple[int, ...]] = {WHOLE: (4, 3), SLICED: (6,), NOBODY: (2,)}
REGIONS: tuple[Region, ...] = (((0, 4),), ((2, 6),), ((0, 6),))
"""The regions of `SLICED` that clients hold in turn."""

CLIENTS = 25
"""Clients per round, enough for rules that tolerate many attackers; some scalars of `SLICED` have only 16 holders."""
DEVIATION = 0.01
"""Standard deviation of the honest clients' changes."""
FAR = 1e6
"""What attackers add to a scalar."""


@dataclass(frozen=True)
class Judged:
    """A rule under test, its name in messages, and the share of attackers that it must withstand."""

    rule: Aggregator
    name: str
    withstands: float

    def averaged(self, updates: Sequence[Update], old: Weights | None = None, fewest: int = 1) -> Averaged:
        """The result of a round with these updates; scalars with fewer than `fewest` holders keep their values."""
        return aggregated(updates, (self.name, self.rule), old_weights() if old is None else old, fewest)

    def result(self, updates: Sequence[Update], old: Weights | None = None) -> Weights:
        """The new weights after a round."""
        return self.averaged(updates, old).weights


def old_weights() -> dict[str, Tensor]:
    """The weights before the round."""
    generator = torch.Generator().manual_seed(0)
    old = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {**old, COUNTER: torch.tensor(3)}


def sent(client: int, regions: Mapping[str, Region], weight: float | None = None) -> Update:
    """A client's update of these regions: the old values plus its own change."""
    generator, old = torch.Generator().manual_seed(1 + client), old_weights()
    tensors = {}
    for name, region in regions.items():
        held = part_of(old[name], region)
        change = DEVIATION * torch.randn(held.shape, generator=generator) if held.is_floating_point() else 1 + client
        tensors[name] = held + change
    slices = {name: Slice(name, region) for name, region in regions.items()}
    return Update(tensors, slices, dict.fromkeys(tensors, 1.0 + client % 3 if weight is None else weight))


def cohort() -> list[Update]:
    """The round's updates: every client holds `WHOLE` and a counter, and one of three regions of `SLICED`."""
    return [sent(i, {WHOLE: ((0, 4), (0, 3)), SLICED: REGIONS[i % 3], COUNTER: ()}) for i in range(CLIENTS)]


def sending(update: Update, weights: Weights) -> Update:
    """The update with its values replaced by its slices of these weights."""
    held = {name: update.slices[name].of(tensor) for name, tensor in weights.items() if name in update.tensors}
    return replace(update, tensors={**update.tensors, **held})


def moved(update: Update, move: Callable[[Tensor], Tensor]) -> Update:
    """The update with `move` applied to its floating-point tensors."""
    return replace(update, tensors=each_float(update.tensors, move))


def each_float(tensors: Weights, move: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The tensors, with `move` applied to the floating-point ones."""
    return {name: move(tensor) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


# -- the laws ---------------------------------------------------------------------------------------------------------


def new_values_are_finite_and_of_the_old_kind(judged: Judged) -> Iterator[str]:
    """With many clients, every region that they hold gets finite new values, even if no client has changed it."""
    for updates in (cohort(), [sending(update, old_weights()) for update in cohort()]):
        averaged = judged.averaged(updates)
        for name in (WHOLE, SLICED):
            if name not in averaged.coverage:
                yield f"{name} keeps its old values, although {CLIENTS} clients hold it"


def the_same_round_gives_the_same_bits(judged: Judged) -> Iterator[str]:
    """The rule draws no random numbers, keeps no state, and does not change its inputs."""
    updates, old = cohort(), old_weights()
    first = judged.result(updates, old)
    yield from differing(judged.result(updates, old), first)
    yield from differing(old, old_weights())
    for update, before in zip(updates, cohort(), strict=True):
        yield from differing(update.tensors, before.tensors)


def the_order_of_the_clients_does_not_matter(judged: Judged) -> Iterator[str]:
    """Clients in another order give the same result, up to rounding."""
    expected = judged.result(cohort())
    for step in (7, -1):
        yield from far_apart(judged.result([cohort()[i * step % CLIENTS] for i in range(1, CLIENTS + 1)]), expected)


def equal_updates_are_the_result(judged: Judged) -> Iterator[str]:
    """If all clients send the same values, these are the new values, whatever the clients' weights."""
    old = old_weights()
    equal = {WHOLE: old[WHOLE] + 1, SLICED: old[SLICED] - 1}
    new = judged.result([sending(update, equal) for update in cohort()])
    yield from far_apart(new, {**old, **equal, COUNTER: torch.tensor(3 + CLIENTS)})


def shifted_weights_shift_the_result(judged: Judged) -> Iterator[str]:
    """A constant added to the old weights and to all that clients send is added to the result."""
    shifted = judged.result([moved(u, lambda t: t + 1) for u in cohort()], each_float(old_weights(), lambda t: t + 1))
    yield from far_apart(shifted, each_float(judged.result(cohort()), lambda t: t + 1))


def scaled_weights_scale_the_result(judged: Judged) -> Iterator[str]:
    """Scaling the old weights and all that clients send by 16 scales the result by 16: the rule has no fixed scale."""
    scaled = judged.result([moved(u, lambda t: 16 * t) for u in cohort()], each_float(old_weights(), lambda t: 16 * t))
    yield from far_apart(scaled, each_float(judged.result(cohort()), lambda t: 16 * t))


def attackers_leave_the_result_among_the_honest_values(judged: Judged) -> Iterator[str]:
    """The share of attackers that the rule must withstand moves no scalar out of the honest clients' range.

    Attackers send the same or opposite values, for all scalars or for one, and are spread over the plan. (With a share
    of 0 there are no attackers: the result must then lie in the range of what clients send.)
    """
    attackers = {7 * i % CLIENTS for i in range(attackers_among(CLIENTS, judged.withstands))}
    honest = [sent(i, {WHOLE: ((0, 4), (0, 3))}) for i in range(CLIENTS)]
    values_n = torch.stack([update.tensors[WHOLE] for i, update in enumerate(honest) if i not in attackers])
    low, high = values_n.amin(dim=0), values_n.amax(dim=0)
    one = torch.zeros_like(low)
    one[1, 2] = FAR
    attacks: Mapping[str, Callable[[int], Tensor]] = {
        "all scalars": lambda _: torch.full_like(low, FAR),
        "all scalars, to both sides": lambda i: torch.full_like(low, FAR if i % 2 else -FAR),
        "one scalar": lambda _: -one,
    }
    for what, change in attacks.items():
        updates = [
            replace(update, tensors={WHOLE: update.tensors[WHOLE] + change(i)}) if i in attackers else update
            for i, update in enumerate(honest)
        ]
        new = judged.result(updates)[WHOLE]
        outside = ((new < low - 1e-6) | (new > high + 1e-6)).nonzero().tolist()
        for index in map(tuple, outside[:1]):
            yield (
                f"{len(attackers)} of {CLIENTS} clients that attack {what} move {WHOLE}{[*index]} to {new[index]:.6g}, "
                f"and the others' values are {low[index]:.6g} to {high[index]:.6g}"
            )


def clients_without_weight_do_not_count(judged: Judged) -> Iterator[str]:
    """A client that has trained nothing, and so has weight 0, changes no bit of the result."""
    silent = [moved(sent(90 + i, {WHOLE: ((0, 4), (0, 3)), SLICED: ((0, 6),)}, 0.0), lambda t: t + FAR) for i in (0, 1)]
    yield from differing(judged.result([silent[0], *cohort(), silent[1]]), judged.result(cohort()))


def what_too_few_hold_keeps_its_bits(judged: Judged) -> Iterator[str]:
    """Scalars that nobody holds, or fewer clients than `min_contributors`, keep their old values bit for bit."""
    new = judged.averaged(cohort(), fewest=CLIENTS).weights
    fewer = {SLICED: torch.cat([new[SLICED][:2], new[SLICED][4:]]), NOBODY: new[NOBODY]}
    old = old_weights()
    yield from differing(fewer, {SLICED: torch.cat([old[SLICED][:2], old[SLICED][4:]]), NOBODY: old[NOBODY]})


def disjoint_slices_are_judged_apart(judged: Judged) -> Iterator[str]:
    """Clients that share no scalar with other clients get the same result as without those."""
    left = [sent(i, {SLICED: ((0, 3),)}) for i in range(CLIENTS)]
    right = [sent(i, {SLICED: ((3, 6),)}) for i in range(CLIENTS, 2 * CLIENTS)]
    together, alone = judged.result([*left, *right])[SLICED], [judged.result(side)[SLICED] for side in (left, right)]
    yield from differing({SLICED: together}, {SLICED: torch.cat([alone[0][:3], alone[1][3:]])})


LAWS = (
    new_values_are_finite_and_of_the_old_kind,
    the_same_round_gives_the_same_bits,
    the_order_of_the_clients_does_not_matter,
    equal_updates_are_the_result,
    shifted_weights_shift_the_result,
    scaled_weights_scale_the_result,
    attackers_leave_the_result_among_the_honest_values,
    clients_without_weight_do_not_count,
    what_too_few_hold_keeps_its_bits,
    disjoint_slices_are_judged_apart,
)
