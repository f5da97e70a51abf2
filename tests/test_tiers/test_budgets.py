"""Budgets per round: constant, scheduled, or by a drawn state, always a share in (0, 1]."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fedloom.tiers.budgets import (
    DEFAULT_STATES,
    Budget,
    ScheduleBudget,
    StaticBudget,
    TraceBudget,
    make_budget,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_a_static_budget_never_changes() -> None:
    assert [StaticBudget().factor(t, rng(t)) for t in range(3)] == [1.0, 1.0, 1.0]
    assert StaticBudget(0.5).factor(7, rng()) == 0.5


def test_a_schedule_repeats() -> None:
    budget = ScheduleBudget((1.0, 0.5, 0.25))
    assert [budget.factor(t, rng()) for t in range(7)] == [1.0, 0.5, 0.25, 1.0, 0.5, 0.25, 1.0]
    with pytest.raises(ValueError, match="round=-1"):
        budget.factor(-1, rng())


def test_the_default_states_are_idle_busy_and_low_battery() -> None:
    assert {state.name: state.factor for state in DEFAULT_STATES} == {"idle": 1.0, "busy": 0.5, "low_battery": 0.25}
    assert sum(state.probability for state in DEFAULT_STATES) == pytest.approx(1)


def test_states_are_drawn_with_their_probabilities() -> None:
    budget, generator = TraceBudget(), rng()
    drawn = [budget.factor(0, generator) for _ in range(20_000)]
    shares = {state.factor: drawn.count(state.factor) / len(drawn) for state in DEFAULT_STATES}
    # Standard deviation at most sqrt(.25 / 20000) = 0.0035.
    assert shares == pytest.approx({1.0: 0.6, 0.5: 0.3, 0.25: 0.1}, abs=0.015)
    assert set(drawn) == set(shares)


def test_a_draw_depends_on_the_generator_alone_and_takes_one_number() -> None:
    budget = TraceBudget()
    assert [budget.factor(t, rng(4)) for t in range(5)] == [budget.factor(0, rng(4))] * 5
    used, plain = rng(9), rng(9)
    budget.factor(0, used)
    plain.random()
    assert used.random() == plain.random()


def test_a_state_without_probability_is_never_drawn() -> None:
    budget = TraceBudget((("off", 0.1, 0.0), ("on", 1.0, 1.0), ("never", 0.2, 0.0)))
    assert {budget.draw(rng(seed)).name for seed in range(50)} == {"on"}


@given(seed=st.integers(0, 2**32), parts=st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_a_draw_follows_the_slow_reference(seed: int, parts: list[int]) -> None:
    states = tuple((f"s{i}", 1 / (i + 1), part / sum(parts)) for i, part in enumerate(parts))
    point = rng(seed).random()
    expected = next((i for i in range(len(parts)) if point < sum(parts[: i + 1]) / sum(parts)), len(parts) - 1)
    assert TraceBudget(states).draw(rng(seed)).name in {f"s{expected}"}


@given(
    budget=st.one_of(
        st.floats(0.01, 1).map(StaticBudget),
        st.lists(st.floats(0.01, 1), min_size=1).map(lambda shares: ScheduleBudget(tuple(shares))),
        st.just(TraceBudget()),
    ),
    round=st.integers(0, 10**6),
    seed=st.integers(0, 1000),
)
def test_every_budget_is_a_share_and_repeats_from_the_same_generator(budget: Budget, round: int, seed: int) -> None:
    share = budget.factor(round, rng(seed))
    assert 0 < share <= 1
    assert share == budget.factor(round, rng(seed))


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, math.nan])
def test_shares_that_make_no_sense_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"share=.* above 0 and at most 1"):
        StaticBudget(share)
    with pytest.raises(ValueError, match=r"factors\[1\]=.* above 0 and at most 1"):
        ScheduleBudget((1.0, share))
    with pytest.raises(ValueError, match=r"state busy: factor=.* above 0 and at most 1"):
        TraceBudget((("busy", share, 1.0),))


def test_states_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"probabilities sum to 0\.9"):
        TraceBudget((("idle", 1.0, 0.5), ("busy", 0.5, 0.4)))
    with pytest.raises(ValueError, match=r"state busy: probability=-0\.5"):
        TraceBudget((("idle", 1.0, 1.5 - 0.5), ("busy", 0.5, -0.5), ("low", 0.5, 0.5)))
    with pytest.raises(ValueError, match="no states"):
        TraceBudget(())
    with pytest.raises(ValueError, match="no factors"):
        ScheduleBudget(())


def test_budgets_are_made_from_plain_values() -> None:
    assert make_budget() == StaticBudget(1.0)
    assert make_budget("static", share=0.5) == StaticBudget(0.5)
    assert make_budget("schedule", factors=[1, 0.5]) == ScheduleBudget((1.0, 0.5))
    assert make_budget("trace") == TraceBudget()
    rows = [["idle", 1, 0.75], ["busy", 0.5, 0.25]]
    assert make_budget("trace", states=rows) == TraceBudget((("idle", 1.0, 0.75), ("busy", 0.5, 0.25)))  # type: ignore[arg-type]


def test_a_wrong_kind_or_option_is_named() -> None:
    with pytest.raises(ValueError, match=r"'scedule' is unknown: .* trace; did you mean 'schedule'\?"):
        make_budget("scedule")
    with pytest.raises(ValueError, match="static budget takes no factors"):
        make_budget("static", factors=[1.0])
    with pytest.raises(ValueError, match="trace budget takes no share"):
        make_budget("trace", share=0.5)
    with pytest.raises(ValueError, match="no factors"):
        make_budget("schedule")
    with pytest.raises(ValueError, match="no states"):
        make_budget("trace", states=[])
    with pytest.raises(ValueError, match="three values: name, factor, probability"):
        make_budget("trace", states=[("idle", 1.0)])  # type: ignore[list-item]
