"""Who gets which subnet: worked rounds of every heuristic, and the law that nobody gets more than it can train."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedloom.platform.methods import distribution
from fedloom.platform.methods.distribution import (
    HEURISTICS,
    Distribution,
    Served,
    count_served,
    distribute,
    dynamic,
    random,
    sandwich,
    static,
    tracking_sandwich,
)
from fedloom.platform.plugins import ComponentSpec, PluginError
from fedloom.platform.seeding import stream
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.genome import PlainGenome
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.resnet import ResnetDesign
from fedloom.platform.spaces.slices import Architecture
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.costs import CostTable, with_unsupported

S, M, L = (0,), (2,), (4,)
"""The smallest, what a random draw gives, and the largest."""
FIVE = CostTable("macs", 0.0, ((1.0, 2.0, 3.0, 4.0, 5.0),))


class Fixed:
    """A space whose random draw is always the same."""

    smallest, largest = S, L
    genome = PlainGenome((5,))

    def sample(self, _rng: np.random.Generator) -> Architecture:
        return M

    def validate(self, architecture: Architecture) -> None:
        if not (len(architecture) == 1 and 0 <= architecture[0] < 5):
            raise ValueError(f"{architecture} is outside the space")


SPACE = ElasticSpace(
    ResnetDesign(
        input_shape=(1, 8, 8),
        stem_channels=8,
        stage_widths=(16, 24),
        stage_strides=(1, 2),
        depths=(1, 2),
        expansions=(0.5, 1.0, 1.5),
    )
)


def inputs(
    round_: int = 0,
    client_ids: Sequence[int] = (2, 5, 7, 9),
    budgets: Sequence[float] | None = None,
    family: Sequence[Architecture] = (),
    served: Served | None = None,
) -> Distribution:
    limits = tuple(budgets) if budgets is not None else (inf,) * len(client_ids)
    rng = stream(1, "test", round_)
    return Distribution(Fixed(), FIVE, round_, tuple(client_ids), limits, tuple(family), served or {}, rng)


def real(budgets: Sequence[float], round_: int = 0, served: Served | None = None) -> Distribution:
    """The same for a real space of 468 subnets."""
    family = tuple(SPACE.parse(t) for t in ("smallest", "d=1,0 e=1", "largest"))
    ids, table = tuple(range(len(budgets))), SPACE.cost_table("macs")
    return Distribution(SPACE, table, round_, ids, tuple(budgets), family, served or {}, stream(1, "test", round_))


# -- worked rounds ----------------------------------------------------------------------------------------------------


def test_random_draws_one_for_each() -> None:
    assert random(inputs()) == [M, M, M, M]
    drawn = random(real([inf] * 8))
    assert len(set(drawn)) > 4, "independent"
    assert drawn == random(real([inf] * 8)), "from the round's own stream"
    assert drawn != random(real([inf] * 8, round_=1))


@pytest.mark.parametrize(
    ("round_", "expected"),
    [(0, [L, S, M, M]), (1, [M, L, S, M]), (2, [M, M, L, S]), (3, [S, M, M, L]), (4, [L, S, M, M])],
)
def test_the_sandwich_rotates_with_the_round(round_: int, expected: list[Architecture]) -> None:
    assert sandwich(inputs(round_)) == expected


def test_the_sandwich_where_only_some_can_have_the_largest() -> None:
    assert sandwich(inputs(0, budgets=[4, 4, 5, 5])) == [S, M, L, M]
    assert sandwich(inputs(3, budgets=[5, 4, 4, 4])) == [L, M, M, S]
    assert sandwich(inputs(1, budgets=[4, 4, 4, 4])) == [M, S, M, M], "nobody can have it"


def test_tracking_by_hand() -> None:
    # Client 2 never had the largest, nor did 9: the lower id gets it. Of the others 7 had the smallest least often.
    served = {"largest": {"5": 1, "7": 2}, "smallest": {"2": 0, "5": 2, "9": 1}}
    assert tracking_sandwich(inputs(served=served)) == [L, M, S, M]


def test_tracking_ties_go_to_the_lowest_id() -> None:
    assert tracking_sandwich(inputs()) == [L, S, M, M]
    # 2 is the least served with both: the largest goes first, and the smallest to the next.
    served = {"largest": {"5": 1, "7": 1, "9": 1}, "smallest": {"5": 3, "7": 1, "9": 1}}
    assert tracking_sandwich(inputs(served=served)) == [L, M, S, M]


def test_tracking_where_only_some_can_have_the_largest() -> None:
    served = {"largest": {"9": 4}, "smallest": {}}
    assert tracking_sandwich(inputs(budgets=[1, 4, 4, 5], served=served)) == [S, M, M, L]
    # Client 2 can have the smallest alone: there is nothing else to draw for it.
    assert tracking_sandwich(inputs(budgets=[1, 4, 4, 4], served={"smallest": {"2": 9}})) == [S, S, M, M]


def test_tracking_over_three_rounds_by_hand() -> None:
    served: Served = {}
    expected = {0: [L, S, M], 1: [S, L, M], 2: [S, M, L], 3: [L, M, S]}
    for round_, subnets in expected.items():
        clients = inputs(round_, (1, 2, 3), served=served)
        assert distribute(ComponentSpec("tracking_sandwich"), clients) == dict(zip((1, 2, 3), subnets, strict=True)), (
            round_
        )
        served = count_served(served, dict(zip((1, 2, 3), subnets, strict=True)), Fixed(), FIVE)
    assert served == {"largest": {"1": 2, "2": 1, "3": 1}, "smallest": {"1": 2, "2": 1, "3": 1}}


def test_two_clients_are_a_sandwich_without_filling() -> None:
    assert sandwich(inputs(0, (3, 4))) == [L, S]
    assert sandwich(inputs(0, (3,))) == [L]
    assert sandwich(inputs(0, (3,), budgets=[4])) == [S]


def test_counters_count_random_draws_too() -> None:
    before = {"largest": {"3": 1}, "smallest": {"8": 2}}
    after = count_served(before, {3: L, 4: M, 8: S, 9: L}, Fixed(), FIVE)
    assert after == {"largest": {"3": 2, "9": 1}, "smallest": {"8": 3}}
    assert before == {"largest": {"3": 1}, "smallest": {"8": 2}}, "a value, not a counter that is changed"


FAMILY = (S, (1,), (3,))


def test_static_is_the_id_modulo_the_family() -> None:
    expected = [(3,), (3,), (1,), S]  # 2, 5, 7, 9 modulo 3
    assert static(inputs(0, family=FAMILY)) == static(inputs(7, family=FAMILY)) == expected


def test_dynamic_is_the_id_plus_the_round_modulo_the_family() -> None:
    assert dynamic(inputs(0, family=FAMILY)) == [(3,), (3,), (1,), S]
    assert dynamic(inputs(1, family=FAMILY)) == [S, S, (3,), (1,)]
    assert dynamic(inputs(3, family=FAMILY)) == dynamic(inputs(0, family=FAMILY))


def test_a_member_above_the_budget_is_replaced_by_the_largest_affordable() -> None:
    assert static(inputs(budgets=[4, 3, 2, 1], family=FAMILY)) == [(3,), (1,), (1,), S]
    assert static(inputs(budgets=[1, 1, 1, 1], family=((1,), (3,)))) == [S, S, S, S], "no member is affordable"


# -- budgets ----------------------------------------------------------------------------------------------------------

COSTS = SPACE.cost_table("macs")
BUDGETS = st.lists(st.floats(COSTS.smallest, COSTS.largest * 1.1), min_size=1, max_size=6)
COUNTS = st.dictionaries(st.sampled_from([str(i) for i in range(6)]), st.integers(0, 4))


@pytest.mark.parametrize("name", sorted(HEURISTICS.known))
@given(budgets=BUDGETS, round_=st.integers(0, 50), largest=COUNTS, smallest=COUNTS)
@settings(deadline=None, max_examples=25)
def test_nobody_gets_more_than_it_can_train(
    name: str, budgets: list[float], round_: int, largest: Mapping[str, int], smallest: Mapping[str, int]
) -> None:
    served = {"largest": largest, "smallest": smallest}
    given_ = distribute(ComponentSpec(name), real(budgets, round_, served))
    assert list(given_) == list(range(len(budgets)))
    for client, architecture in given_.items():
        SPACE.validate(architecture)
        assert COSTS.cost(architecture) <= budgets[client]
    if name in ("sandwich", "tracking_sandwich") and max(budgets) >= COSTS.largest:
        assert SPACE.largest in given_.values()
    if name in ("sandwich", "tracking_sandwich") and len(budgets) > 1:
        assert SPACE.smallest in given_.values()


def test_a_small_budget_is_used_though_uniform_draws_hardly_meet_it() -> None:
    budget = float(np.quantile([COSTS.cost(a) for a in SPACE.enumerate()], 0.01))
    drawn = random(real([budget] * 40))
    assert {COSTS.cost(a) <= budget for a in drawn} == {True}
    assert len(set(drawn)) > 1, "not only the smallest"


@pytest.mark.parametrize("name", ["sandwich", "tracking_sandwich", "static"])
def test_the_smallest_subnet_is_one_of_supported_operators(name: str) -> None:
    space = build_space(SpaceConfig("cnn_digits", stem_channels=4, operators=["conv(1)", "mb(1,2)", "identity"]))
    table = with_unsupported(space.cost_table("macs"), [(3, space.smallest[3])])
    cheapest = (*space.smallest[:3], 0, *space.smallest[4:])
    assert (space.cheapest(table), table.cost(space.smallest)) == (cheapest, inf)
    budgets, rng = (table.smallest,) * 3, stream(1, "test", 0)
    family = (space.smallest,)
    subnets = distribute(ComponentSpec(name), Distribution(space, table, 0, (0, 1, 2), budgets, family, {}, rng))
    assert subnets == dict.fromkeys(range(3), cheapest)
    assert count_served({}, subnets, space, table)["smallest"] == {"0": 1, "1": 1, "2": 1}


def test_without_budgets_draws_are_the_spaces_own() -> None:
    rng = stream(1, "test", 0)
    assert random(real([inf] * 5)) == [SPACE.sample(rng) for _ in range(5)]


# -- a heuristic of one's own -----------------------------------------------------------------------------------------


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("own_rules")
    monkeypatch.setitem(sys.modules, "own_rules", module)
    return module


def test_a_heuristic_by_import_path_with_options(own_module: ModuleType) -> None:
    def all_of(distribution: Distribution, *, option: int = 0) -> list[Architecture]:
        return [(option,)] * len(distribution.client_ids)

    own_module.all_of = all_of  # type: ignore[attr-defined]
    assert distribute(ComponentSpec("own_rules:all_of"), inputs()) == dict.fromkeys((2, 5, 7, 9), S)
    assert distribute(ComponentSpec("own_rules:all_of", (("option", 2),)), inputs()) == dict.fromkeys((2, 5, 7, 9), M)


def test_an_unknown_heuristic_lists_the_known() -> None:
    known = "known are dynamic, pareto_path, random, sandwich, static, tracking_sandwich"
    with pytest.raises(ValueError, match=known) as caught:
        HEURISTICS.find("sandwhich")
    assert "did you mean 'sandwich'?" in str(caught.value)


def test_what_is_no_function_of_a_handout_is_refused(own_module: ModuleType) -> None:
    own_module.number = 3  # type: ignore[attr-defined]
    own_module.lonely = lambda: [S]  # type: ignore[attr-defined]
    with pytest.raises(PluginError, match=r"'own_rules:number' is an int, not a function of \(distribution\)"):
        HEURISTICS.find("own_rules:number")
    with pytest.raises(PluginError, match=r"'own_rules:lonely' has the wrong parameters .*give a function of"):
        HEURISTICS.find("own_rules:lonely")
    with pytest.raises(PluginError, match="'own_rules:missing' cannot be imported"):
        HEURISTICS.find("own_rules:missing")


@pytest.mark.parametrize(
    ("name", "given_", "message"),
    [
        ("forgets", [S, S, S], "gives 3 subnets to 4 clients"),
        ("outside", [S, S, S, (7,)], r"fails: ValueError: \(7,\) is outside the space"),
        ("greedy", [L, L, L, L], r"gives client 5 a subnet of 5 macs, its budget is 4: use Distribution\.draw"),
        ("numbers", 4, "gives 4: give an architecture, a tuple, to each client"),
        ("ids", [0] * 4, r"gives \[0, 0, 0, 0\]: give an architecture, a tuple, to each client"),
    ],
)
def test_a_heuristic_that_does_not_do_its_work_is_named(
    own_module: ModuleType, name: str, given_: Any, message: str
) -> None:
    setattr(own_module, name, lambda _handout: given_)
    with pytest.raises(PluginError, match=f"distribution heuristic 'own_rules:{name}' {message}") as caught:
        distribute(ComponentSpec(f"own_rules:{name}"), inputs(budgets=[5, 4, 5, 5]))
    assert "\n" not in str(caught.value)


def test_everybody_trains_the_smallest_whatever_a_budget_says(own_module: ModuleType) -> None:
    own_module.least = lambda _handout: [S] * 4  # type: ignore[attr-defined]
    assert distribute(ComponentSpec("own_rules:least"), inputs(budgets=[0.5] * 4)) == dict.fromkeys((2, 5, 7, 9), S)


def test_what_a_handout_says() -> None:
    given_ = replace(inputs(budgets=[1, 2, 3, 4]), served={"largest": {"7": 3}})
    assert [given_.affords(place, M) for place in range(4)] == [False, False, True, True]
    assert [given_.times_served("largest", place) for place in range(4)] == [0, 0, 3, 0]
    assert given_.times_served("smallest", 2) == 0
    assert distribution.FEWEST_FOR_SANDWICH == 3
