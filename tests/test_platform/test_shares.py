"""The shares of a round: literal values of beta_t, and the laws of MaxNet's weights."""

import itertools
import sys
from dataclasses import replace
from math import pi
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.platform.averaging.shares import (
    DECAYS,
    Shares,
    SharesConfig,
    Sharing,
    beta,
    check_shares,
    maxnet,
    overlap,
    shares_rule,
)

COSINE = SharesConfig(beta_0=0.9, decay="cosine", decay_share=0.8)
LINEAR = replace(COSINE, decay="linear")
CONSTANT = replace(COSINE, decay="constant")


def sharing(*is_largest: bool, round_: int = 0, config: SharesConfig = COSINE, clients: int = 8) -> Sharing:
    return Sharing(config, round_, 1500, clients, is_largest)


# -- beta_t: 8 clients, 1500 rounds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "by_round"),
    [
        # T_d = 1200; cos(pi/3) = 1/2 in round 400, cos(pi/2) = 0 in round 600.
        (COSINE, {0: 0.9, 400: 0.70625, 600: 0.5125, 800: 0.31875, 1200: 0.125, 1499: 0.125}),
        (LINEAR, {0: 0.9, 300: 0.70625, 600: 0.5125, 900: 0.31875, 1200: 0.125, 1499: 0.125}),
        (CONSTANT, {0: 0.9, 600: 0.9, 1200: 0.9, 1499: 0.9}),
        # T_d = 750.
        (replace(COSINE, decay_share=0.5), {0: 0.9, 250: 0.70625, 375: 0.5125, 750: 0.125, 1499: 0.125}),
        (replace(LINEAR, decay_share=0.5), {0: 0.9, 375: 0.5125, 750: 0.125, 1499: 0.125}),
        (replace(CONSTANT, decay_share=0.5), {0: 0.9, 750: 0.9, 1499: 0.9}),
        (replace(COSINE, beta_0=0.5), {0: 0.5, 600: 0.3125, 1200: 0.125}),
    ],
)
def test_beta_by_hand(config: SharesConfig, by_round: dict[int, float]) -> None:
    assert {t: beta(config, t, 1500, 8) for t in by_round} == pytest.approx(by_round, abs=1e-12)


@pytest.mark.parametrize("config", [COSINE, LINEAR])
def test_beta_falls_until_the_decay_ends_and_then_stays(config: SharesConfig) -> None:
    values = [beta(config, t, 1500, 8) for t in range(1500)]
    assert all(a > b for a, b in itertools.pairwise(values[:1201]))
    assert values[1199] > 1 / 8
    assert set(values[1200:]) == {1 / 8}


def test_cosine_is_slow_at_first_and_linear_is_not() -> None:
    assert beta(COSINE, 12, 1500, 8) == pytest.approx(0.9 - 0.775 * (pi * 0.01) ** 2 / 4, abs=1e-6)
    assert beta(LINEAR, 12, 1500, 8) == pytest.approx(0.9 - 0.775 * 0.01)


def test_a_decay_over_all_rounds() -> None:
    config = replace(LINEAR, decay_share=1.0)
    assert [beta(config, t, 4, 2) for t in range(4)] == pytest.approx([0.9, 0.8, 0.7, 0.6])


# -- the rules --------------------------------------------------------------------------------------------------------


def test_maxnet_by_hand() -> None:
    found = maxnet(sharing(False, False, True, False, False))
    assert found.values == pytest.approx([0.025, 0.025, 0.9, 0.025, 0.025])
    assert found.schedules == {"beta": 0.9}


def test_after_the_decay_maxnet_is_overlap() -> None:
    found = maxnet(sharing(*([False] * 3), True, *([False] * 4), round_=1200))
    assert found.values == [0.125] * 8
    assert found.schedules == {"beta": 0.125}


def test_of_several_largest_the_first_in_plan_order_counts() -> None:
    assert maxnet(sharing(False, True, True)).values == pytest.approx([0.05, 0.9, 0.05])


def test_where_nobody_has_the_largest_all_count_alike() -> None:
    found = maxnet(sharing(False, False, False, round_=600))
    assert found.values == [1.0, 1.0, 1.0]
    assert found.schedules["beta"] == pytest.approx(0.5125), "the schedule goes on all the same"


def test_a_client_alone_counts_whole() -> None:
    assert maxnet(sharing(True)).values == [1.0]
    assert maxnet(sharing()).values == []


def test_overlap_weighs_all_alike_and_has_no_schedule() -> None:
    assert overlap(sharing(False, True, False)) == Shares([1.0, 1.0, 1.0])


@given(
    st.lists(st.booleans(), min_size=2, max_size=20).filter(any),
    st.integers(0, 1499),
    st.sampled_from(DECAYS),
    st.floats(0.01, 1.0),
    st.floats(0.01, 1.0),
)
def test_maxnets_shares_are_a_distribution(
    is_largest: list[bool], round_: int, decay: str, beta_0: float, decay_share: float
) -> None:
    config = SharesConfig("maxnet", beta_0, decay, decay_share)
    found = maxnet(sharing(*is_largest, round_=round_, config=config, clients=len(is_largest)))
    assert sum(found.values) == pytest.approx(1.0)
    assert min(found.values) >= 0
    others = [v for i, v in enumerate(found.values) if i != is_largest.index(True)]
    assert len(set(others)) == 1
    assert found.values[is_largest.index(True)] == found.schedules["beta"]


# -- names and refusals -----------------------------------------------------------------------------------------------


def test_a_rule_by_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("own_shares")
    module.first = lambda s: Shares([1.0, *[0.0] * (len(s.is_largest) - 1)])  # type: ignore[attr-defined]
    module.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_shares", module)
    assert shares_rule("own_shares:first")(sharing(False, True)).values == [1.0, 0.0]
    with pytest.raises(ValueError, match="'own_shares:number' is not a function of a Sharing"):
        shares_rule("own_shares:number")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(COSINE, beta_0=0.0), r"^train\.shares\.beta_0=0\.0: must be above 0 and at most 1$"),
        (replace(COSINE, beta_0=1.1), r"^train\.shares\.beta_0=1\.1: must be above 0 and at most 1$"),
        (replace(COSINE, beta_0=float("nan")), r"beta_0=nan"),
        (replace(COSINE, decay_share=0.0), r"^train\.shares\.decay_share=0\.0: must be above 0 and at most 1$"),
        (replace(COSINE, decay_share=1.5), r"^train\.shares\.decay_share=1\.5: must be above 0 and at most 1$"),
        (replace(COSINE, decay="step"), r"^train\.shares\.decay='step': allowed are constant, linear, cosine$"),
        (replace(COSINE, rule="maxnett"), r"^train\.shares\.rule: unknown shares rule .* known are maxnet, overlap"),
    ],
)
def test_values_out_of_range_are_refused(config: SharesConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_shares(config, "train.shares")


def test_good_values_pass() -> None:
    for config in (COSINE, LINEAR, CONSTANT, SharesConfig(), replace(COSINE, beta_0=1.0, decay_share=1.0)):
        check_shares(config, "train.shares")
