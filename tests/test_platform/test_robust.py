"""Aggregators that resist attackers: rounds by hand, a slow reference on slices, limits, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fedloom.platform.averaging.aggregators import KeptUpdates, _gram
from fedloom.platform.averaging.average import Update
from fedloom.platform.federation.training_config import TrainingConfig, check_cohort, rules_of
from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.spaces.slices import Slice

Numbers = Sequence[float]


def rule(name: str, **options: float) -> ComponentSpec:
    return ComponentSpec(name, tuple(options.items()))


def whole(values: Numbers, weight: float = 1.0) -> Update:
    """What a client sends that holds all of a tensor."""
    return Update({"w": torch.tensor(values)}, {"w": Slice("w")}, {"w": weight})


def new(choice: ComponentSpec, updates: Sequence[Update], old: Tensor, fewest: int = 1) -> Tensor:
    return KeptUpdates([*updates], choice).finish({"w": old}, fewest).weights["w"]


FIVE = (4.0, 1.0, 4.5, 2.0, 100.0)
"""Squared distances of 4: .25, 4, 9; of 2: 1, 4, 6.25; of 4.5: .25, 6.25, 12.25; of 1: 1, 9, 12.25."""
SEVEN = (1.0, 2.0, 4.0, 4.5, 5.0, 6.0, 100.0)
"""Krum chooses 4.5 (four neighbours: 9), 4 (three: 9), 2 (two: 10, as 5 has), 5 (one: 1), and 1 (25, as 6 has)."""


@pytest.mark.parametrize(
    ("choice", "values", "expected"),
    [
        (rule("median"), FIVE, 4.0),
        (rule("median"), FIVE[:4], 3.0),  # (2 + 4) / 2
        (rule("trimmed_mean"), FIVE, 3.5),  # (2 + 4 + 4.5) / 3
        (rule("trimmed_mean", byzantine_share=0.4), FIVE, 4.0),
        (rule("krum"), FIVE, 4.0),  # f = 1, two neighbours: 4.25; 2 has 5, 4.5 has 6.5
        (rule("multi_krum"), FIVE, 3.0),  # of 4 and 2
        (rule("bulyan", byzantine_share=0.15), SEVEN, 4.5),  # of 4, 4.5 and 5, around 4
        (rule("rfa", iterations=1), (0.0, 1.0, 5.0), 16 / 11),  # around 2: (0/2 + 1/1 + 5/3) / (1/2 + 1 + 1/3)
        (rule("rfa", iterations=2), (0.0, 1.0, 5.0), (11 / 5 + 55 / 39) / (11 / 16 + 11 / 5 + 11 / 39)),
    ],
    ids=lambda value: value.name if isinstance(value, ComponentSpec) else None,
)
def test_two_rounds_by_hand(choice: ComponentSpec, values: Numbers, expected: float) -> None:
    """In the second round every client sends what it sent, mirrored at the weights it has received."""
    first = new(choice, [whole([value]) for value in values], torch.tensor([9.0]))
    torch.testing.assert_close(first, torch.tensor([expected]))
    second = new(choice, [whole([float(first) - value]) for value in values], first)
    torch.testing.assert_close(second, torch.tensor([0.0]), atol=1e-6, rtol=0)


def test_bulyan_averages_the_closest_values_where_some_are_equally_close() -> None:
    """Krum chooses -1, -1, 0, .5 and 1; around 0 the closest three are 0, .5 and one of those at a distance of 1."""
    values = (-1.0, -1.0, 0.0, 0.5, 1.0, 50.0, -60.0)
    found = new(rule("bulyan", byzantine_share=0.15), [whole([value]) for value in values], torch.zeros(1))
    torch.testing.assert_close(found, torch.tensor([-0.5 / 3]))


def test_distances_are_the_same_in_both_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    updates = [Update({"w": torch.randn(500, generator=generator)}, {"w": Slice("w")}, {"w": 1.0}) for _ in range(10)]
    gram_nn = _gram([update.tensors["w"] for update in updates], torch.zeros(500))
    assert torch.equal(gram_nn, gram_nn.T)


def test_two_rounds_of_bounded_norms_by_hand() -> None:
    choice = rule("norm_bound", bound=1.0)
    first = new(choice, [whole([3.0, 4.0]), whole([0.0, 0.5], weight=3.0)], torch.zeros(2))
    torch.testing.assert_close(first, torch.tensor([0.15, 0.575]))  # (.6, .8) / 4 + 3 (0, .5) / 4
    second = new(choice, [whole([0.15, 2.575]), whole([0.15, 0.575])], first)
    torch.testing.assert_close(second, torch.tensor([0.15, 1.075]))  # half of (0, 1)


def test_weights_of_the_geometric_median_are_the_clients() -> None:
    updates = [whole([0.0], 2.0), whole([1.0]), whole([5.0])]  # around 1.5: 2 / 1.5, 1 / .5, 1 / 3.5
    expected = (2 + 5 / 3.5) / (2 / 1.5 + 2 + 1 / 3.5)
    torch.testing.assert_close(new(rule("rfa", iterations=1), updates, torch.zeros(1)), torch.tensor([expected]))


# -- slices ------------------------------------------------------------------------------------------------------------


def test_updates_are_compared_over_what_both_hold() -> None:
    """Of three that hold the first scalar, two agree in it; where these two alone hold one, too few are left."""
    old = torch.full((2,), 9.0)
    first = Update({"w": torch.tensor([1.0])}, {"w": Slice("w", ((0, 1),))}, {"w": 1.0})
    chosen = new(rule("krum", byzantine_share=0.0), [whole([1.5, 0.0]), first, whole([3.5, 0.5])], old)
    # f = 0, one neighbour: .25 of the first two; the third is (4 + .25) / 2 from the first, and 6.25 from the second
    assert chosen.tolist() == [1.5, 9.0]


held = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=9)
CHOICES = {
    "median": rule("median"),
    "trimmed_mean": rule("trimmed_mean", byzantine_share=0.3),
    "krum": rule("krum", byzantine_share=0.25),
    "multi_krum": rule("multi_krum", byzantine_share=0.25),
    "bulyan": rule("bulyan", byzantine_share=0.15),
    "rfa": rule("rfa", iterations=2),
    "norm_bound": rule("norm_bound", bound=1.0),
}


@pytest.mark.parametrize("name", CHOICES)
@settings(deadline=None, max_examples=25)
@given(regions=held, seed=st.integers(0, 1000))
def test_every_scalar_is_judged_among_those_who_hold_it(name: str, regions: list[tuple[int, int]], seed: int) -> None:
    """Scalar by scalar, distance by distance, in Python's floats."""
    generator = torch.Generator().manual_seed(seed)
    old, starts = torch.randn(7, generator=generator), [(start, min(7, start + length)) for start, length in regions]
    values = [old[start:stop] + torch.randn(stop - start, generator=generator) for start, stop in starts]
    weights = torch.rand(len(starts), generator=generator).add(0.5).tolist()
    updates = [
        Update({"w": value}, {"w": Slice("w", ((start, stop),))}, {"w": weight})
        for value, (start, stop), weight in zip(values, starts, weights, strict=True)
    ]
    maps = [dict(zip(range(*bounds), map(float, v), strict=True)) for bounds, v in zip(starts, values, strict=True)]
    before = old.tolist()
    slow = [reference(name, maps, weights, before, scalar) for scalar in range(7)]
    torch.testing.assert_close(new(CHOICES[name], updates, old), torch.tensor(slow), rtol=1e-4, atol=1e-5)


def reference(name: str, maps: list[dict[int, float]], weights: Numbers, before: Numbers, scalar: int) -> float:
    """The new value of a scalar, of clients' values by scalar."""
    holders = [i for i, values in enumerate(maps) if scalar in values]
    values = {i: maps[i][scalar] for i in holders}
    if not holders:
        return before[scalar]
    options = dict(CHOICES[name].options)
    f = int(options.get("byzantine_share", 0) * len(holders))
    distances = {(i, j): apart(maps[i], maps[j]) for i in holders for j in holders if i != j}
    if name == "median":
        return median(values.values())
    if name == "trimmed_mean":
        left = sorted(values.values())[f : len(values) - f]
        return sum(left) / len(left)
    if name == "norm_bound":
        norms = {i: sum((v - before[k]) ** 2 for k, v in maps[i].items()) ** 0.5 for i in holders}
        changes = sum(weights[i] * min(1, 1 / norms[i]) * (values[i] - before[scalar]) for i in holders)
        return before[scalar] + changes / sum(weights[i] for i in holders)
    if name == "rfa":
        return weiszfeld(holders, values, weights, distances)
    if len(holders) < (4 if name == "bulyan" else 2) * f + 3:
        return before[scalar]
    if name == "bulyan":
        left, chosen = [*holders], list[float]()
        for _ in range(len(holders) - 2 * f):
            first = by_score(left, distances, f)[0]
            left.remove(first)
            chosen.append(values[first])
        closest = sorted(chosen, key=lambda v: (abs(v - median(chosen)), v))[: len(holders) - 4 * f]
        return sum(closest) / len(closest)
    best = by_score(holders, distances, f)[: 1 if name == "krum" else len(holders) - f - 2]
    return sum(values[i] for i in best) / len(best)


def apart(first: dict[int, float], second: dict[int, float]) -> float:
    shared = first.keys() & second.keys()
    return sum((first[k] - second[k]) ** 2 for k in shared) / len(shared)


def by_score(clients: list[int], distances: dict[tuple[int, int], float], f: int) -> list[int]:
    def score(i: int) -> float:
        return sum(sorted(distances[i, j] for j in clients if j != i)[: max(1, len(clients) - f - 2)])

    return sorted(clients, key=lambda i: round(score(i), 5))  # two that are left alone have the same one


def weiszfeld(
    holders: list[int], values: dict[int, float], weights: Numbers, distances: dict[tuple[int, int], float]
) -> float:
    shares = {i: weights[i] / sum(weights[j] for j in holders) for i in holders}
    alphas = dict(shares)
    for _ in range(2):
        to = {i: sum(shares[j] * distances.get((i, j), 0.0) for j in holders) for i in holders}
        half = sum(shares[i] * to[i] for i in holders) / 2
        betas = {i: alphas[i] / max(1e-6, max(0.0, to[i] - half) ** 0.5) for i in holders}
        shares = {i: betas[i] / sum(betas.values()) for i in holders}
    return sum(shares[i] * values[i] for i in holders)


# -- laws and limits ---------------------------------------------------------------------------------------------------


def test_limits_in_which_rules_are_the_mean() -> None:
    updates, old = [whole([1.0, 2.5]), whole([4.0, -3.0]), whole([0.7, 0.1])], torch.zeros(2)
    expected = new(rule("mean"), updates, old)
    assert torch.equal(new(rule("norm_bound", bound=1e6), updates, old), expected)
    torch.testing.assert_close(new(rule("trimmed_mean", byzantine_share=0.0), updates, old), expected)
    torch.testing.assert_close(new(rule("rfa", smoothing=1e6), updates, old), expected)
    torch.testing.assert_close(new(rule("bulyan", byzantine_share=0.0), updates, old), expected)


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "krum"])
def test_the_order_of_the_clients_changes_no_bit_of_what_is_chosen_or_sorted(name: str) -> None:
    updates = [whole(row.tolist()) for row in torch.randn(11, 5, generator=torch.Generator().manual_seed(3))]
    in_order, turned = (new(CHOICES[name], each, torch.zeros(5)) for each in (updates, updates[::-1]))
    assert torch.equal(in_order, turned)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "clients", "problem"),
    [
        ({"aggregator": "krum"}, 2, "x.aggregator=krum needs more than the 2 clients of a round"),
        (
            {"aggregator": "krum", "options": {"byzantine_share": 0.4}},
            10,
            "x.aggregator=krum with x.options.byzantine_share=0.4 needs more than the 10 clients",
        ),
        (
            {"aggregator": "bulyan", "options": {"byzantine_share": 0.2}},
            10,
            "needs more than the 10 clients of a round",
        ),
        ({"aggregator": "krum", "options": {"byzantine_share": 0.5}}, 10, r"x.options.byzantine_share.*below 0.5"),
        (
            {"aggregator": "bulyan", "options": {"byzantine_share": 0.3}},
            10,
            r"x.options.byzantine_share.*below 0.25",
        ),
        ({"aggregator": "norm_bound"}, 10, r"x.options.bound"),
        ({"aggregator": "rfa", "options": {"iterations": 0}}, 10, r"x.options.iterations"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(changes: dict[str, object], clients: int, problem: str) -> None:
    config = replace(TrainingConfig(), **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=problem):
        check_cohort(rules_of(config, "x"), clients)


def test_as_many_clients_as_a_rule_needs_are_enough() -> None:
    for name, clients in {"krum": 3, "multi_krum": 3, "bulyan": 3, "median": 1, "rfa": 1}.items():
        check_cohort(rules_of(TrainingConfig(aggregator=name), "x"), clients)
