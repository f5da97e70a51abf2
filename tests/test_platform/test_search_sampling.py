"""Drawing and enumerating inside an interval, against plain enumeration of everything."""

from collections import Counter
from itertools import islice, product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedloom.platform.search import sampling
from fedloom.platform.search.base import Architecture, Interval
from fedloom.platform.search.sampling import (
    IntervalSampler,
    sample_new,
)
from fedloom.tiers.costs import CostTable

INF = float("inf")


def all_inside(table: CostTable, interval: Interval) -> list[Architecture]:
    """The slow reference."""
    paths = product(*(range(len(row)) for row in table.options))
    return [path for path in paths if interval.contains(table.cost(path))]


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


whole_costs = st.one_of(st.integers(0, 30).map(float), st.just(INF))
tables = st.builds(
    CostTable,
    measure=st.just("macs"),
    fixed=st.integers(0, 10).map(float),
    options=st.lists(st.lists(whole_costs, min_size=1, max_size=4).map(tuple), min_size=1, max_size=5).map(tuple),
    reduce=st.sampled_from(["sum", "max"]),
)
intervals = st.tuples(st.integers(-5, 120), st.integers(1, 40)).map(lambda p: Interval(float(p[0]), float(p[0] + p[1])))
open_intervals = st.sampled_from([Interval(-INF, INF), Interval(20.0, INF), Interval(-INF, 30.0)])


@settings(max_examples=150, deadline=None)
@given(tables, st.one_of(intervals, open_intervals), st.booleans())
def test_enumeration_and_samples_agree_with_the_reference(table: CostTable, interval: Interval, crude: bool) -> None:
    expected = all_inside(table, interval)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "REJECTION_DRAWS", 1)
        if crude:  # only bounds and the normal law, as in spaces whose costs are too many to list
            patch.setattr(sampling, "MAX_DISTINCT_COSTS", 1)
        assert list(IntervalSampler(table, interval).enumerate()) == expected
        for seed in range(3):
            drawn = IntervalSampler(table, interval).sample(generator(seed))
            assert (drawn is None) == (not expected)
            assert drawn is None or drawn in expected


def test_an_interval_is_open_below_and_closed_above() -> None:
    table = CostTable("macs", 1.0, ((0.0, 1.0, 2.0),))
    assert list(IntervalSampler(table, Interval(1.0, 2.0)).enumerate()) == [(1,)]
    assert not Interval(1.0, INF).contains(INF)
    with pytest.raises(ValueError, match="lower bound must be below"):
        Interval(2.0, 2.0)


def test_fractional_costs_are_judged_by_the_table_alone() -> None:
    # 0.1 + 0.2 + 0.3 depends on the order of addition: only the table's own order counts.
    table = CostTable("latency_s", 0.0, ((0.1, 0.7), (0.2, 0.7), (0.3, 0.7)))
    upper = table.cost((0, 0, 0))
    assert list(IntervalSampler(table, Interval(0.0, upper)).enumerate()) == [(0, 0, 0)]
    assert IntervalSampler(table, Interval(np.nextafter(upper, 0.0), upper)).sample(generator()) == (0, 0, 0)
    assert IntervalSampler(table, Interval(0.0, np.nextafter(upper, 0.0))).sample(generator()) is None


def large_table(decisions: int = 16) -> CostTable:
    rng = generator(7)
    rows = [tuple(float(c) for c in rng.integers(1_000, 10_000_000, size=9)) for _ in range(decisions)]
    return CostTable("macs", 18e6, tuple(rows))


@pytest.mark.parametrize(("share", "width"), [(0.0, 1e-3), (0.02, 1e-3), (0.5, 1e-6), (0.98, 1e-3)])
def test_narrow_intervals_of_a_large_space_are_found(share: float, width: float) -> None:
    """About 2e15 architectures; the interval is a tiny part of their range, wider where they are sparse."""
    table = large_table()
    extent = table.largest - table.smallest
    lower = table.smallest - 1 + share * extent
    sampler, rng = IntervalSampler(table, Interval(lower, lower + width * extent)), generator()
    drawn = [sampler.sample(rng) for _ in range(5)]
    assert all(a is not None and lower < table.cost(a) <= lower + width * extent for a in drawn)


def test_the_single_largest_architecture_is_found() -> None:
    table = large_table()
    drawn = IntervalSampler(table, Interval(table.largest - 1, table.largest)).sample(generator())
    assert drawn is not None
    assert table.cost(drawn) == table.largest


def test_sampling_does_not_run_for_ever() -> None:
    # Hitting an interval between two floats is a subset-sum problem in a space of 2e15.
    rng = generator(3)
    table = CostTable("latency_s", 0.0, tuple(tuple(row) for row in rng.random((16, 9)).tolist()))
    middle = (table.smallest + table.largest) / 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "MAX_NODES", 2_000)
        with pytest.raises(ValueError, match="widen the interval"):
            IntervalSampler(table, Interval(middle, float(np.nextafter(middle, 9.0)))).sample(rng)


@pytest.mark.parametrize("rejection", [0, 256])
def test_draws_are_uniform(rejection: int) -> None:
    """Chi-square over 2 000 draws; the pruned search counts completions, so it is uniform too."""
    table = CostTable("macs", 0.0, ((0.0, 1.0, 1.0, 5.0), (0.0, 2.0, 7.0), (0.0, 3.0, 3.0)))
    interval = Interval(2.0, 6.0)
    inside = all_inside(table, interval)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "REJECTION_DRAWS", rejection)
        sampler, rng = IntervalSampler(table, interval), generator(1)
        counts = Counter(sampler.sample(rng) for _ in range(2000))
    expected = 2000 / len(inside)
    chi_square = sum((counts[a] - expected) ** 2 / expected for a in inside)
    assert len(inside) == 15
    assert chi_square < 36.1  # the 0.999 quantile at 14 degrees of freedom


def test_the_normal_law_stands_in_for_counts() -> None:
    """Without the exact counts draws stay close to uniform: no model five times as frequent as it should be."""
    table = CostTable("macs", 0.0, ((0.0, 1.0, 2.0),) * 6)
    interval = Interval(2.0, 4.0)
    inside = all_inside(table, interval)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "REJECTION_DRAWS", 0)
        patch.setattr(sampling, "MAX_DISTINCT_COSTS", 1)
        sampler, rng = IntervalSampler(table, interval), generator(1)
        counts = Counter(sampler.sample(rng) for _ in range(6000))
    assert set(counts) == set(inside)
    assert max(counts.values()) < 5 * 6000 / len(inside)
    assert min(counts.values()) > 6000 / len(inside) / 5


def test_the_same_generator_draws_the_same() -> None:
    table, interval = large_table(), Interval(60e6, 61e6)
    first, second = generator(5), generator(5)
    assert IntervalSampler(table, interval).sample(first) == IntervalSampler(table, interval).sample(second)
    assert first.bit_generator.state == second.bit_generator.state


def test_enumeration_stops_at_its_limit() -> None:
    table = large_table()
    interval = Interval(table.smallest - 1, table.largest)
    assert len(list(IntervalSampler(table, interval).enumerate(10))) == 10
    assert list(islice(IntervalSampler(table, interval).enumerate(), 2)) == [(0,) * 16, (0,) * 15 + (1,)]
    assert list(IntervalSampler(table, interval).enumerate(0)) == []


def test_new_samples_are_new_and_run_out_exactly() -> None:
    table = CostTable("macs", 0.0, ((0.0, 1.0, 2.0),) * 3)
    sampler = IntervalSampler(table, Interval(-1.0, 6.0))
    rng = generator()
    known = set(sample_new(sampler, 20, (), rng))
    rest = sample_new(sampler, 20, known, rng)
    assert (len(known), len(rest)) == (20, 7)
    assert known | set(rest) == set(product(range(3), repeat=3))
    assert sample_new(sampler, 5, known | set(rest), rng) == []
