"""The shares of a round: literal values of beta_t, and the laws of MaxNet's weights."""

import itertools
import sys
from dataclasses import replace
from math import pi
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, strategies as st

from fedloom.platform.methods.shares import (
    Shares,
    SharesConfig,
    Sharing,
    beta,
    maxnet,
    overlap,
    shares_of,
)
from fedloom.platform.plugins import ComponentSpec, PluginError
from fedloom.platform.settings import check_settings

COSINE = SharesConfig(beta_0=0.9, decay="cosine", decay_share=0.8)
LINEAR = replace(COSINE, decay="linear")
CONSTANT = replace(COSINE, decay="constant")


def sharing(*is_largest: bool, round_: int = 0, config: SharesConfig = COSINE) -> Sharing:
    return Sharing(config, round_, 1500, is_largest)


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
    found = maxnet(sharing(False, False, True, False, False, config=CONSTANT))
    assert found.values == pytest.approx([0.025, 0.025, 0.9, 0.025, 0.025])
    assert found.schedules == {"beta": 0.9}


def test_after_the_decay_maxnet_is_overlap() -> None:
    found = maxnet(sharing(*([False] * 3), True, *([False] * 4), round_=1200))
    assert found.values == [0.125] * 8
    assert found.schedules == {"beta": 0.125}


@pytest.mark.parametrize("others", [1, 2, 12])
def test_after_the_decay_all_count_alike_however_many_they_are(others: int) -> None:
    assert maxnet(sharing(True, *[False] * others, round_=1200)).values == pytest.approx(
        [1 / (others + 1)] * (others + 1)
    )


def test_of_several_largest_the_first_in_plan_order_counts() -> None:
    assert maxnet(sharing(False, True, True)).values == pytest.approx([0.05, 0.9, 0.05])


def test_where_nobody_has_the_largest_all_count_alike() -> None:
    found = maxnet(sharing(False, False, False, round_=600))
    assert found.values == [1.0, 1.0, 1.0]
    assert found.schedules["beta"] == pytest.approx((0.9 + 1 / 3) / 2), "the schedule goes on all the same"


def test_a_client_alone_counts_whole() -> None:
    assert maxnet(sharing(True)).values == [1.0]
    assert maxnet(sharing()).values == []


def test_overlap_weighs_all_alike_and_has_no_schedule() -> None:
    assert overlap(sharing(False, True, False)) == Shares([1.0, 1.0, 1.0])


@given(
    st.lists(st.booleans(), min_size=2, max_size=20).filter(any),
    st.integers(0, 1499),
    st.sampled_from(["constant", "linear", "cosine"]),
    st.floats(0.01, 1.0),
    st.floats(0.01, 1.0),
)
def test_maxnets_shares_are_a_distribution(
    is_largest: list[bool], round_: int, decay: str, beta_0: float, decay_share: float
) -> None:
    config = SharesConfig("maxnet", beta_0, decay, decay_share)
    found = maxnet(sharing(*is_largest, round_=round_, config=config))
    assert sum(found.values) == pytest.approx(1.0)
    assert min(found.values) >= 0
    others = [v for i, v in enumerate(found.values) if i != is_largest.index(True)]
    assert len(set(others)) == 1
    assert found.values[is_largest.index(True)] == found.schedules["beta"]


# -- names and refusals -----------------------------------------------------------------------------------------------


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("own_shares")
    monkeypatch.setitem(sys.modules, "own_shares", module)
    return module


def test_a_rule_by_import_path_with_options(own_module: ModuleType) -> None:
    def one(sharing: Sharing, *, place: int = 0) -> Shares:
        return Shares([float(i == place) for i in range(len(sharing.is_largest))])

    own_module.one = one  # type: ignore[attr-defined]
    assert shares_of(ComponentSpec("own_shares:one"), sharing(False, True)).values == [1.0, 0.0]
    assert shares_of(ComponentSpec("own_shares:one", (("place", 1),)), sharing(False, True)).values == [0.0, 1.0]


def test_rules_are_found_by_name() -> None:
    assert shares_of(ComponentSpec("overlap"), sharing(True, False)) == overlap(sharing(True, False))
    assert shares_of(ComponentSpec("maxnet"), sharing(True, False)) == maxnet(sharing(True, False))
    with pytest.raises(PluginError, match="unknown shares rule 'maxnett': known are maxnet, overlap, or module:name"):
        shares_of(ComponentSpec("maxnett"), sharing(True))


@pytest.mark.parametrize(
    ("name", "given_", "message"),
    [
        ("bare", [1.0, 1.0], r"gives list: give a fedloom\.platform\.methods\.shares\.Shares"),
        ("few", Shares([1.0]), "gives 1 shares to 2 clients: give one per client"),
        ("negative", Shares([1.0, -0.5]), r"gives the share -0\.5: shares are finite numbers of at least 0"),
        ("endless", Shares([1.0, float("inf")]), "gives the share inf"),
        ("undefined", Shares([float("nan"), 1.0]), "gives the share nan"),
        ("text", Shares(["1", "1"]), "gives the share '1'"),  # type: ignore[list-item]
        ("nothing", Shares(None), "gives None shares to 2 clients: give one per client"),  # type: ignore[arg-type]
        ("words", Shares([1.0, 1.0], {"beta": "b"}), "gives the schedule beta the value 'b': give numbers"),  # type: ignore[dict-item]
    ],
)
def test_a_rule_that_gives_no_shares_is_named(own_module: ModuleType, name: str, given_: Any, message: str) -> None:
    setattr(own_module, name, lambda _sharing: given_)
    with pytest.raises(PluginError, match=f"^shares rule 'own_shares:{name}' {message}") as caught:
        shares_of(ComponentSpec(f"own_shares:{name}"), sharing(True, False))
    assert "\n" not in str(caught.value)


def test_what_is_no_function_of_a_sharing_is_refused(own_module: ModuleType) -> None:
    own_module.number = 3  # type: ignore[attr-defined]
    with pytest.raises(PluginError, match=r"'own_shares:number' is an int, not a function of \(sharing\)"):
        shares_of(ComponentSpec("own_shares:number"), sharing(True))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(COSINE, beta_0=0.0), r"^train\.shares\.beta_0=0\.0: must be above 0 and at most 1$"),
        (replace(COSINE, beta_0=1.1), r"^train\.shares\.beta_0=1\.1: must be above 0 and at most 1$"),
        (replace(COSINE, beta_0=float("nan")), r"^train\.shares\.beta_0=nan: must be above 0 and at most 1$"),
        (replace(COSINE, decay_share=0.0), r"^train\.shares\.decay_share=0\.0: must be above 0 and at most 1$"),
        (replace(COSINE, decay_share=1.5), r"^train\.shares\.decay_share=1\.5: must be above 0 and at most 1$"),
        (replace(COSINE, decay="step"), r"^train\.shares\.decay=step: must be one of constant, linear, cosine$"),
    ],
)
def test_values_out_of_range_are_refused(config: SharesConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_settings(config, "train.shares.")


def test_good_values_pass() -> None:
    for config in (COSINE, LINEAR, CONSTANT, SharesConfig(), replace(COSINE, beta_0=1.0, decay_share=1.0)):
        check_settings(config, "train.shares.")
