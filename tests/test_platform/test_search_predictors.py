"""Predictors that are measured honestly, and the searches that they drive."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.search.base import Interval
from fedloom.platform.search.constraint import Constraint, PredictedConstraint, TableConstraint
from fedloom.platform.search.predictors import (
    Fitted,
    fit_predictor,
    kendall_tau,
    predicted_front,
    refusal,
    search_predicted,
)
from fedloom.platform.spaces.genome import ElasticGenome, ElasticStage, Floats, Ints
from fedloom.tiers.costs import CostTable

GENOME = ElasticGenome((ElasticStage(1, 3, 5),) * 4)
NUM_FEATURES = 72
RNG = np.random.Generator(np.random.PCG64(3))
WORTH = RNG.normal(size=NUM_FEATURES)
BLOCKS = RNG.uniform(1e6, 9e6, size=(4, 3, 5)).cumsum(axis=2)
ROWS = [[float(sum(b[i, w] for i, w in enumerate(c))) for c in GENOME.stages[0].contents] for b in BLOCKS]
TABLE = CostTable("macs", 3e7, tuple(map(tuple, ROWS)))


def planted(rows: Ints) -> Floats:
    values: Floats = 10.0 + GENOME.one_hot(rows) @ WORTH
    return values


def samples(count: int, seed: int = 0) -> tuple[Ints, Floats]:
    rows = GENOME.draw(count, np.random.Generator(np.random.PCG64(seed)))
    return rows, planted(rows)


def brief(epochs: int) -> ComponentSpec:
    """The built-in predictor, trained for so many epochs."""
    return ComponentSpec("mlp", (("epochs", epochs),))


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    rows, values = samples(300)
    return fit_predictor(GENOME.one_hot(rows), values, seed=1)


def test_an_additive_function_is_learnt_and_the_report_is_honest(fitted: Fitted) -> None:
    assert (fitted.train, fitted.held_out) == (240, 60)
    assert fitted.tau > 0.9
    fresh, truth = samples(400, seed=99)
    predicted = fitted.predictor(GENOME.one_hot(fresh))
    assert kendall_tau(predicted, truth)[0] == pytest.approx(fitted.tau, abs=0.1)
    assert np.abs(predicted - truth).mean() == pytest.approx(fitted.mae, rel=0.6)


def test_noise_is_not_learnt() -> None:
    rows, _ = samples(200)
    noise = np.random.Generator(np.random.PCG64(8)).normal(size=200)
    assert abs(fit_predictor(GENOME.one_hot(rows), noise, seed=0, held_out_share=0.5).tau) < 0.25


def test_fitting_depends_on_its_stream_alone() -> None:
    rows, values = samples(60)
    features = GENOME.one_hot(rows)
    threads = torch.get_num_threads()
    before = torch.random.get_rng_state()
    first = fit_predictor(features, values, seed=1, ids=("macs", 3), fit=brief(5))
    torch.set_num_threads(2)
    second = fit_predictor(features, values, seed=1, ids=("macs", 3), fit=brief(5))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    assert (first.tau, first.mae) == (second.tau, second.mae)
    assert np.array_equal(first.predictor(features), second.predictor(features))
    assert torch.equal(before, torch.random.get_rng_state())
    assert fit_predictor(features, values, seed=1, ids=("macs", 4), fit=brief(5)).mae != first.mae


def test_constant_values_have_no_tau_and_are_refused() -> None:
    rows, _ = samples(20)
    flat = fit_predictor(GENOME.one_hot(rows), np.full(20, 3.0), seed=0, fit=brief(2))
    assert math.isnan(flat.tau)
    assert "of the metric cannot be measured, and -1 is required" in refusal(flat, -1.0, "the metric")


def test_a_poor_predictor_is_refused_in_one_line_that_says_what_to_do(fitted: Fitted) -> None:
    assert refusal(fitted, fitted.tau, "the metric") == ""
    message = refusal(fitted, 0.9999, "latency_s")
    pattern = (
        r"^the predictor of latency_s .* tau 0\.9.* 60 held-out .* required 0\.999.* more samples or lower min_tau$"
    )
    assert re.search(pattern, message)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("features", "values", "settings", "message"),
    [
        (np.zeros((9, 2)), np.zeros(9), {}, "at least 10 samples, given 9"),
        (np.zeros((12, 2)), np.zeros(11), {}, r"shapes \(12, 2\) and \(11,\)"),
        (np.zeros((12, 2)), np.full(12, np.nan), {}, "finite"),
        (np.zeros((12, 2)), np.zeros(12), {"held_out_share": 1.0}, "held_out_share is 1.0"),
    ],
)
def test_what_cannot_be_fitted_is_refused(
    features: Floats, values: Floats, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit_predictor(features, values, seed=0, **settings)


def constraint_of(kind: str, interval: Interval) -> Constraint:
    if kind == "table":
        return TableConstraint(TABLE, interval, GENOME)
    return PredictedConstraint(TABLE.costs, GENOME, interval)


@pytest.mark.parametrize("kind", ["table", "predicted"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_an_exact_score_beats_random_draws_inside_the_constraint(kind: str, share: float) -> None:
    target = TABLE.smallest + share * (TABLE.largest - TABLE.smallest)
    constraint = constraint_of(kind, Interval(0.99 * target, target))
    found = search_predicted(GENOME, planted, constraint, seed=0, name="t", generations=15)
    assert len({c.architecture for c in found}) == 10
    assert [c.metric for c in found] == sorted((c.metric for c in found), reverse=True)
    assert all(constraint.interval.contains(c.cost) for c in found)
    assert [c.cost for c in found] == pytest.approx([TABLE.cost(c.architecture) for c in found], rel=1e-12)
    rivals = TableConstraint(TABLE, constraint.interval).sample(1500, (), np.random.Generator(np.random.PCG64(1)))
    assert found[0].metric > planted(np.array(rivals)).max()
    assert search_predicted(GENOME, planted, constraint, seed=0, name="t", generations=15) == found
    assert search_predicted(GENOME, planted, constraint, seed=0, name="u", generations=1) != found


def test_a_predictor_drives_the_search(fitted: Fitted) -> None:
    target = (TABLE.smallest + TABLE.largest) / 2
    constraint = TableConstraint(TABLE, Interval(0.95 * target, target), GENOME)
    found = search_predicted(
        GENOME, lambda a: fitted.predictor(GENOME.one_hot(a)), constraint, seed=0, name="t", generations=10, keep=3
    )
    rivals = constraint.sample(1000, (), np.random.Generator(np.random.PCG64(1)))
    assert len(found) == 3
    assert planted(np.array([c.architecture for c in found])).max() > np.quantile(planted(np.array(rivals)), 0.99)


@pytest.mark.parametrize("kind", ["table", "predicted"])
def test_an_empty_constraint_names_the_interval_and_what_is_reachable(kind: str) -> None:
    constraint = constraint_of(kind, Interval(1e9, 2e9))
    with pytest.raises(
        ValueError, match=r"^big: no architecture .* \(1e\+09, 2e\+09\]; the nearest reachable cost"
    ) as e:
        search_predicted(GENOME, planted, constraint, seed=0, name="big")
    assert "\n" not in str(e.value)
    if kind == "table":
        assert f"{TABLE.largest:g}" in str(e.value)


def test_scores_that_are_not_finite_never_win() -> None:
    def partly(rows: Ints) -> Floats:
        return np.where(rows[:, 0] < 100, np.nan, planted(rows))

    found = search_predicted(
        GENOME, partly, TableConstraint(TABLE, Interval(0.0, 1e9)), seed=0, name="t", generations=3
    )
    assert len(found) == 10
    assert all(c.architecture[0] >= 100 for c in found)


def test_the_front_covers_the_range_and_nothing_on_it_is_dominated() -> None:
    front = predicted_front(GENOME, planted, TABLE, seed=0, name="front", population=40, generations=10)
    assert len(front) > 5
    costs, metrics = [c.cost for c in front], [c.metric for c in front]
    assert costs == sorted(costs)
    assert metrics == sorted(metrics)
    assert costs[0] < TABLE.smallest + 0.2 * (TABLE.largest - TABLE.smallest)
    assert metrics[-1] > samples(400, seed=5)[1].max()
    assert front == predicted_front(GENOME, planted, TABLE, seed=0, name="front", population=40, generations=10)


def test_kendall_tau_of_literal_rankings() -> None:
    assert kendall_tau([1, 2, 3, 4], [1, 2, 3, 4])[0] == 1.0
    assert kendall_tau([1, 2, 3, 4], [4, 3, 2, 1])[0] == -1.0
    tau, p_value = kendall_tau([1, 2, 3, 4], [1, 2, 4, 3])  # five pairs agree, one does not
    assert tau == pytest.approx(4 / 6)
    assert p_value == pytest.approx(8 / 24)  # of the 24 orders, 4 reach 4/6 or more, and 4 as much below
    assert math.isnan(kendall_tau([1, 1, 1], [1, 2, 3])[0])


def test_rankings_that_cannot_be_compared_are_refused() -> None:
    for a, b in (([1.0], [1.0]), ([1.0, 2.0], [1.0, 2.0, 3.0])):
        with pytest.raises(ValueError, match="same two or more models"):
            kendall_tau(a, b)
    with pytest.raises(ValueError, match="leave failed models out"):
        kendall_tau([1.0, math.nan], [1.0, 2.0])
