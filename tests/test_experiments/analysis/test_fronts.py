"""Fronts and their hypervolumes."""

from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st

from fedloom.experiments import analysis
from fedloom.experiments.analysis.tiers import front_of


def add_candidates(runs: Any, run_id: str, points: list[tuple[int, float]]) -> None:
    writer = runs.begin(run_id, 1)
    for i, (macs, metric) in enumerate(points):
        place = {"stage": "search/tier1", "round": 0, "tier": "tier1", "generation": 0, "architecture": str(i)}
        writer.add("candidates", **place, macs=macs, parameters=1, metric=metric, feasible=metric > 0, on_front=False)
    writer.close()


def test_hypervolumes_are_shares_of_one_box(runs: Any) -> None:
    add_candidates(runs, "r1", [(10, 0.5), (20, 0.9), (20, 0.4), (5, -1.0)])
    add_candidates(runs, "r2", [(15, 0.7), (40, 0.05)])
    tables = analysis.load(runs.root)
    first, second = analysis.hypervolume(tables, reference=(30, 0.1)).to_dict("records")
    # Scaled: (0, 0.5) and (0.5, 0) dominate 0.5 + 0.5 - 0.25; (0.25, 0.25) dominates 0.75 ** 2.
    assert (first["run_id"], first["tier"], first["points"]) == ("r1", "tier1", 2)
    assert first["hypervolume"] == pytest.approx(0.75)
    assert second["hypervolume"] == pytest.approx(0.5625)
    assert (first["ideal_macs"], first["ideal_metric"]) == (10, 0.9)
    assert (second["reference_macs"], second["reference_metric"]) == (30, 0.1)
    with pytest.raises(ValueError, match=r"must be worse than the best of tier1, \(10, 0.9\)"):
        analysis.hypervolume(tables, reference=(30, 0.95))


def test_the_reference_is_a_tenth_of_the_range_beyond_the_worst_of_the_fronts(runs: Any) -> None:
    add_candidates(runs, "r1", [(10, 0.5), (20, 0.9), (90, 0.2)])
    add_candidates(runs, "r2", [(15, 0.7)])
    first, second = analysis.hypervolume(analysis.load(runs.root)).to_dict("records")
    assert (first["reference_macs"], first["reference_metric"]) == (pytest.approx(21), pytest.approx(0.46))
    # In units of the box: (0, 10/11), (10/11, 0), and (5/11, 5/11).
    assert first["hypervolume"] == pytest.approx((11 + 11 - 1) / 121)
    assert second["hypervolume"] == pytest.approx(36 / 121)
    (alone,) = analysis.hypervolume(analysis.load(runs.root, ["r2"])).to_dict("records")
    assert alone["hypervolume"] == pytest.approx(1.0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20))
def test_fronts_are_what_nothing_else_beats(points: list[tuple[int, int]]) -> None:
    def beats(one: tuple[int, int], other: tuple[int, int]) -> bool:
        return one != other and one[0] <= other[0] and one[1] >= other[1]

    expected = sorted({p for p in points if not any(beats(q, p) for q in points)})
    found = front_of(pd.DataFrame(points, columns=["macs", "metric"]))
    assert [tuple(map(int, point)) for point in found] == expected
