"""What constraints keep: inside, distinct, new; short only where there is nothing left."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedloom.platform.search.base import Interval
from fedloom.platform.search.constraint import Constraint, Halves, PredictedConstraint, TableConstraint, distance
from fedloom.platform.spaces.genome import ElasticGenome, ElasticStage, PlainGenome, as_array
from fedloom.tiers.costs import CostTable

GENOME = ElasticGenome((ElasticStage(1, 3, 5),) * 4)


def rng_of(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def additive(seed: int) -> CostTable:
    """A random additive table of the 155^4 space: every block costs what its width says."""
    rng = rng_of(seed)
    blocks = rng.uniform(1e6, 9e6, size=(4, 3, 5)).cumsum(axis=2)
    rows = [[float(sum(b[i, w] for i, w in enumerate(c))) for c in GENOME.stages[0].contents] for b in blocks]
    return CostTable("macs", 3e7, tuple(map(tuple, rows)))


TABLE = additive(0)


def constraint_of(kind: str, interval: Interval) -> Constraint:
    if kind == "table":
        return TableConstraint(TABLE, interval, GENOME)
    return PredictedConstraint(TABLE.costs, GENOME, interval)


@pytest.mark.parametrize("kind", ["table", "predicted"])
@pytest.mark.parametrize("share", [0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95])
def test_one_percent_below_targets_over_the_whole_range(kind: str, share: float) -> None:
    target = TABLE.smallest + share * (TABLE.largest - TABLE.smallest)
    interval = Interval(0.99 * target, target)
    constraint = constraint_of(kind, interval)
    first = constraint.sample(60, (), rng_of(1))
    more = constraint.sample(60, set(first), rng_of(2))
    assert len({*first, *more}) == len(first) + len(more)
    everything = len(Halves(TABLE, interval))
    if kind == "table":
        assert len(first) == min(60, everything)
        assert len(more) == min(60, everything - len(first))
    else:  # climbing misses some where there are few
        assert min(60, everything) / 3 <= len(first) <= 60
        assert len(more) > 0
    assert all(interval.contains(TABLE.cost(a)) for a in [*first, *more])
    assert constraint.inside(as_array(first)).all()
    assert constraint.sample(60, set(first), rng_of(2)) == more


@pytest.mark.parametrize("kind", ["table", "predicted"])
def test_the_order_of_what_is_known_does_not_matter(kind: str) -> None:
    target = TABLE.smallest + 0.1 * (TABLE.largest - TABLE.smallest)
    constraint = constraint_of(kind, Interval(0.99 * target, target))
    known = constraint.sample(50, (), rng_of(0))
    assert constraint.sample(30, known, rng_of(1)) == constraint.sample(30, known[::-1], rng_of(1))


@pytest.mark.parametrize("kind", ["table", "predicted"])
def test_nothing_inside_is_an_empty_sample_and_names_the_nearest_cost(kind: str) -> None:
    above, below = Interval(TABLE.largest, 2 * TABLE.largest), Interval(0.0, 0.99 * TABLE.smallest)
    for interval, end in ((above, TABLE.largest), (below, TABLE.smallest)):
        constraint = constraint_of(kind, interval)
        assert constraint.sample(5, (), rng_of(0)) == []
        nearest = constraint.nearest(rng_of(0))
        assert nearest == (end if kind == "table" else pytest.approx(end, rel=0.2))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 12).map(lambda c: c / 4), min_size=1, max_size=4), min_size=1, max_size=4),
    st.sampled_from(["sum", "max"]),
    st.integers(0, 20),
    st.integers(1, 12),
)
def test_a_small_interval_is_sampled_whole(rows: list[list[float]], reduce: str, lower: int, width: int) -> None:
    table = CostTable("macs", 0.1, tuple(map(tuple, rows)), reduce)
    interval = Interval(lower / 4, (lower + width) / 4)
    inside = {a for a in product(*map(range, map(len, rows))) if interval.contains(table.cost(a))}
    found = TableConstraint(table, interval).sample(300, (), rng_of(0))
    assert len(found) == len(inside)
    assert set(found) == inside
    known = set(found[::2])
    assert set(TableConstraint(table, interval).sample(300, known, rng_of(1))) == inside - known


def test_costs_equal_the_tables_to_the_last_bit() -> None:
    rng = rng_of(3)
    table = CostTable("latency_s", 0.1, tuple(map(tuple, rng.random((9, 5)))))
    rows = rng.integers(0, 5, size=(500, 9))
    constraint = TableConstraint(table, Interval(0.0, 1.0))
    assert constraint.costs(rows).tolist() == [table.cost(row) for row in rows.tolist()]


def test_unsupported_options_are_never_inside() -> None:
    table = CostTable("macs", 0.0, ((1.0, math.inf), (2.0, 5.0)))
    constraint = TableConstraint(table, Interval(-math.inf, math.inf))
    assert sorted(constraint.sample(9, (), rng_of(0))) == [(0, 0), (0, 1)]
    assert constraint.inside(as_array([[1, 0], [0, 0]])).tolist() == [False, True]


def test_a_predicted_interval_of_a_small_space_is_sampled_whole() -> None:
    constraint = PredictedConstraint(lambda a: a.sum(axis=1) + 0.0, PlainGenome((3, 3)), Interval(1.0, 2.0))
    assert sorted(constraint.sample(9, (), rng_of(0))) == [(0, 2), (1, 1), (2, 0)]


def test_distances_by_hand() -> None:
    away = distance(np.array([0.5, 1.0, 1.5, 2.0, 4.0, math.inf, math.nan]), Interval(1.0, 2.0))
    assert away[[0, 2, 3, 4]].tolist() == [0.5, 0.0, 0.0, 2.0]
    assert 0 < away[1] < 1e-300  # the lower bound is outside
    assert away[5:].tolist() == [math.inf, math.inf]


def test_halves_number_exactly_what_lies_inside() -> None:
    table = CostTable("macs", 1.0, ((1.0, 2.0, math.inf), (0.0, 3.0), (5.0, 1.0, 2.0)))
    interval = Interval(4.5, 8.5)
    halves = Halves(table, interval)
    inside = [a for a in product(range(3), range(2), range(3)) if interval.contains(table.cost(a))]
    assert len(halves) == len(inside) > 0
    assert sorted(map(tuple, halves.rows(np.arange(len(halves))).tolist())) == inside
    assert Halves.applies(TABLE)
    assert not Halves.applies(CostTable("macs", 0.0, ((0.0,) * 9,) * 16))
    assert not Halves.applies(CostTable("activation_bytes", 0.0, ((0.0,) * 2,) * 2, "max"))
