"""Cost tables: literal numbers, and laws for combinations and unsupported options."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fedloom.tiers.costs import CostTable, combine, with_unsupported

MACS = CostTable("macs", 10.0, ((1.0, 5.0), (0.0, 2.0, 7.0)))
PARAMETERS = CostTable("parameters", 3.0, ((4.0, 0.5), (0.0, 1.0, 1.0)))
PEAK = CostTable("activation_bytes", 6.0, ((1.0, 8.0), (0.0, 2.0, 7.0)), reduce="max")


def test_costs_add_up_and_peaks_do_not() -> None:
    assert MACS.cost((1, 2)) == 22
    assert (MACS.smallest, MACS.largest) == (11, 22)
    assert PEAK.cost((0, 1)) == 6
    assert PEAK.cost((0, 2)) == 7
    assert PEAK.cost((1, 2)) == 8


@pytest.mark.parametrize("table", [MACS, PEAK])
def test_many_costs_equal_one_at_a_time(table: CostTable) -> None:
    paths = np.array([(a, b) for a in range(2) for b in range(3)])
    assert table.costs(paths).tolist() == [table.cost(path) for path in paths.tolist()]


def test_combine_weighs_and_names() -> None:
    both = combine([MACS, PARAMETERS], [2, 0.5])
    assert both == CostTable("2*macs+0.5*parameters", 21.5, ((4.0, 10.25), (0.0, 4.5, 14.5)))
    assert combine([MACS], [1], "energy").measure == "energy"


@given(st.lists(st.floats(0, 100), min_size=2, max_size=2), st.tuples(st.integers(0, 1), st.integers(0, 2)))
def test_cost_of_a_combination_is_the_combination_of_costs(weights: list[float], path: tuple[int, int]) -> None:
    combined = combine([MACS, PARAMETERS], weights)
    expected = weights[0] * MACS.cost(path) + weights[1] * PARAMETERS.cost(path)
    assert combined.cost(path) == pytest.approx(expected)


def test_an_unsupported_operator_stays_unsupported_under_any_weight() -> None:
    limited = with_unsupported(MACS, [(0, 1), (1, 2)])
    assert limited.options == ((1.0, math.inf), (0.0, 2.0, math.inf))
    assert limited.cost((1, 0)) == math.inf
    assert limited.largest == 13
    assert combine([limited, PARAMETERS], [0, 1]).options == ((4.0, math.inf), (0.0, 1.0, math.inf))


@pytest.mark.parametrize("pair", [(2, 0), (0, 2), (-1, 0), (0, -1)])
def test_unsupported_pairs_outside_the_table_are_named(pair: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"\(-?\d, -?\d\) is not in the macs table"):
        with_unsupported(MACS, [pair])


def test_a_decision_needs_a_supported_option() -> None:
    with pytest.raises(ValueError, match="decision 0 is left without a supported option"):
        with_unsupported(MACS, [(0, 0), (0, 1)])


@pytest.mark.parametrize(
    ("tables", "weights", "message"),
    [
        ([], [], "0 tables and 0 weights"),
        ([MACS], [1, 2], "1 tables and 2 weights"),
        ([MACS, PEAK], [1, 1], "activation_bytes is joined by max"),
        ([MACS, CostTable("x", 0, ((1.0,),))], [1, 1], "different spaces"),
        ([MACS], [-1], "given -1"),
        ([MACS], [math.inf], "given inf"),
    ],
)
def test_what_does_not_combine(tables: list[CostTable], weights: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        combine(tables, weights)
