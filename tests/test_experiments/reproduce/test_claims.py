"""The states of claims, by literal numbers: every kind of check, the worst state of all spots, seeds and pairs."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from fedloom.experiments.report.content import Block
from fedloom.experiments.reproduce.board import Entry, claims_block
from fedloom.experiments.reproduce.claims import Verdict, in_the_paper, verdict, verdicts
from fedloom.experiments.reproduce.items import Claim, Combined, Item, Quantity, Scale, Spot
from fedloom.experiments.reproduce.measure import Measured, combined
from fedloom.experiments.reproduce.outcome import Outcome

SEEDS = (1, 2, 3)


def item(
    published: Mapping[str, Mapping[Spot, float]] | None = None,
    *,
    claims: tuple[Claim, ...] = (),
    regimes: Mapping[str, Claim] | None = None,
) -> Item:
    names = {"a": {}, "b": {}, **(published or {})}
    quantities = {}
    for name, values in names.items():
        by_setting: dict[str, dict[str, float]] = {"elsewhere": {}}
        for (setting, place), value in values.items():
            by_setting.setdefault(setting, {})[place] = value
        quantities[name] = Quantity(published=by_setting)
    scales = {"small": Scale("fedavg_digits", {"s": {}}, SEEDS)}
    return Item("x/tab1", "", "", "", ("x/tab1",), scales, quantities, claims, regimes=regimes or {})


def seen(values: Mapping[Spot, Any], *, is_exact: bool = False) -> Measured:
    """A quantity; a list is one value per seed."""
    by_spot = {s: v if isinstance(v, dict) else dict(zip(SEEDS, v, strict=False)) for s, v in values.items()}
    return Measured(by_spot, is_exact)


def judged(
    check: Mapping[str, Any], measured: Mapping[str, Measured], settings: tuple[str, ...] = ("s",), **of_item: Any
) -> Verdict:
    return verdict(Claim(text="it is so", **check), measured, item(**of_item), settings)


def source(**two: Any) -> Combined:
    combination = Quantity(**two).source
    assert isinstance(combination, Combined)
    return combination


A, B = {("s", "t"): [0.90, 0.91, 0.92]}, {("s", "t"): [0.80, 0.82, 0.81]}
GREATER = {"greater": {"of": "a", "than": "b"}}


@pytest.mark.parametrize(
    ("check", "state"),
    [
        (GREATER, "shown"),
        ({"greater": {"of": "b", "than": "a"}}, "contradicted"),
        ({"less": {"of": "b", "than": "a"}}, "shown"),
        ({"less": {"of": "b", "than": "a", "by": 0.05}}, "shown"),
        ({"less": {"of": "b", "than": "a", "by": 0.2}}, "contradicted"),
        ({"greater": {"of": "a", "than": "b", "by": 0.1}}, "not shown"),
        ({"at_least": {"of": "a", "value": 0.8}}, "shown"),
        ({"at_least": {"of": "a", "value": 0.91}}, "not shown"),
        ({"at_least": {"of": "a", "value": 0.99}}, "contradicted"),
        ({"at_most": {"of": "a", "value": 0.99}}, "shown"),
        ({"band": {"of": "a", "target": 0.9, "tolerance": 0.05}}, "shown"),
        ({"band": {"of": "a", "target": 0.9, "tolerance": "6 %"}}, "shown"),
        ({"band": {"of": "a", "target": 0.9, "tolerance": "2 %"}}, "not shown"),
        ({"band": {"of": "a", "target": 0.5, "tolerance": 0.05}}, "contradicted"),
        ({"close": {"of": "a", "to": "b", "within": 0.2}}, "shown"),
        ({"close": {"of": "a", "to": "b", "within": 0.1}}, "not shown"),
        ({"close": {"of": "a", "to": "b", "within": 0.01}}, "contradicted"),
        ({"all": [GREATER, {"at_least": {"of": "a", "value": 0.8}}]}, "shown"),
        ({"all": [GREATER, {"at_least": {"of": "a", "value": 0.99}}]}, "contradicted"),
    ],
)
def test_each_kind_of_check(check: Mapping[str, Any], state: str) -> None:
    """a is .91 +- .025, b .81 +- .025, their paired difference .1 +- .025 (Student's t of 2 degrees: 4.30)."""
    assert judged(check, {"a": seen(A), "b": seen(B)}).state == state


def test_pairs_are_those_of_equal_seeds() -> None:
    """Seeds that vary far more than the two differ: only the paired interval is narrow."""
    a, b = seen({("s", "t"): {1: 0.5, 2: 0.7, 3: 0.9}}), seen({("s", "t"): {3: 0.88, 1: 0.48, 2: 0.68, 9: 1.0}})
    (finding,) = judged(GREATER, {"a": a, "b": b}).findings
    assert finding.interval is not None
    assert (finding.state, finding.interval.seeds) == ("shown", 3)
    assert finding.interval.mean == pytest.approx(0.02)


def test_one_seed_shows_nothing_and_says_so() -> None:
    found = judged(GREATER, {"a": seen({("s", "t"): [0.9]}), "b": seen({("s", "t"): [0.1]})})
    assert (found.state, found.reason) == ("not shown", "s, t; one or two seeds have no interval")


def test_what_was_counted_needs_no_seeds() -> None:
    exact = seen({("s", "t"): [120.0]}, is_exact=True)
    assert judged({"band": {"of": "a", "target": 120.9, "tolerance": "2 %"}}, {"a": exact}).state == "shown"
    assert judged({"greater": {"of": "a", "than": "b"}}, {"a": exact, "b": exact}).state == "not shown"


def test_rounding_neither_shows_nor_contradicts_a_claim() -> None:
    """The sum of three .1 is more than .3, the mean of .9, .8, .7 less that of .8, .7, .6 less than .1."""
    a, b = seen({("s", "t"): [0.1, 0.1, 0.1]}), seen({("s", "t"): [0.3, 0.3, 0.3]})
    assert judged({"at_most": {"of": "a", "value": 0.1}}, {"a": a}).state == "shown"
    assert judged({"at_least": {"of": "a", "value": 0.1}}, {"a": a}).state == "shown"
    tripled = seen({("s", "t"): [0.1 + 0.2, 0.1 + 0.2, 0.1 + 0.2]})
    assert judged(GREATER, {"a": tripled, "b": b}).reason == "s, t; no difference"
    pairs = {"a": seen({("s", "t"): [0.9, 0.8, 0.7]}), "b": seen({("s", "t"): [0.8, 0.7, 0.6]})}
    assert judged({"greater": {"of": "a", "than": "b", "by": 0.1}}, pairs).state == "shown"
    assert judged({"less": {"of": "a", "than": "b", "by": -0.1}}, pairs).state == "shown"
    exact = seen({("s", "t"): [100 * 0.07]}, is_exact=True)
    assert judged({"at_most": {"of": "a", "value": 7}}, {"a": exact}).state == "shown"


@pytest.mark.parametrize("is_exact", [True, False])
def test_zero_is_at_most_and_at_least_zero_but_no_difference(is_exact: bool) -> None:
    zeros = seen({("s", "t"): [0.0, 0.0, 0.0]}, is_exact=is_exact)
    for bound in ("at_most", "at_least"):
        assert judged({bound: {"of": "a", "value": 0}}, {"a": zeros}).state == "shown"
    for side in ("greater", "less"):
        assert judged({side: {"of": "a", "than": "b"}}, {"a": zeros, "b": zeros}).reason == "s, t; no difference"
    rising = {"of": "a", "along": "settings", "order": ["s", "r"]}
    both = seen({("s", "t"): [0.0, 0.0, 0.0], ("r", "t"): [0.0, 0.0, 0.0]}, is_exact=is_exact)
    assert judged({"monotone": rising}, {"a": both}).state == "not shown"


def test_a_claim_has_the_worst_state_of_all_its_spots() -> None:
    a = seen({("s", "t1"): [3, 3.1, 3.2], ("s", "t2"): [1, 1.1, 1.2], ("r", "t1"): [3, 3.1, 3.2]})
    b = seen({("s", "t1"): [2, 2.1, 2.2], ("s", "t2"): [2, 2.1, 2.2], ("r", "t1"): [2, 2.1, 2.2]})
    found = judged(GREATER, {"a": a, "b": b}, ("s", "r"))
    assert (found.state, found.reason) == ("contradicted", "1 of 3: s, t2; it is -1")
    only = {"greater": {"of": "a", "than": "b", "settings": ["r"]}}
    assert judged(only, {"a": a, "b": b}, ("s", "r")).state == "shown"
    places = {"greater": {"of": "a", "than": "b", "places": ["t1"]}}
    assert judged(places, {"a": a, "b": b}, ("s", "r")).state == "shown"


def test_a_part_that_was_not_run_keeps_a_claim_from_being_shown() -> None:
    a, b = seen(A), seen(B)
    found = judged(GREATER, {"a": a, "b": b}, ("s", "later"))
    assert (found.state, found.reason) == ("not shown", "1 of 2: later; not measured")
    assert judged(GREATER, {"a": a, "b": seen({})}).state == "not run"
    assert judged(GREATER, {}).state == "not run"
    assert judged({"greater": {"of": "b", "than": "a"}}, {"a": a, "b": b}, ("s", "later")).state == "contradicted"


def test_a_place_that_only_one_side_has_is_a_gap_on_either_side() -> None:
    a = seen({("s", "t1"): [3, 3.1, 3.2]})
    b = seen({("s", "t1"): [2, 2.1, 2.2], ("s", "t2"): [5, 5.1, 5.2]})
    for check in (GREATER, {"less": {"of": "b", "than": "a"}}):
        found = judged(check, {"a": a, "b": b})
        assert (found.state, found.reason) == ("not shown", "1 of 2: s, t2; not measured")
    single = seen({("s", ""): [1, 1.1, 1.2]})
    assert judged(GREATER, {"a": a, "b": single}).state == "shown"


def test_settings_and_places_are_compared_by_naming_them() -> None:
    a = seen({("max", "big"): [3, 3.1, 3.2], ("max", "small"): [2, 2.1, 2.2], ("over", "big"): [1, 1.1, 1.2],
              ("over", "small"): [1, 1.1, 1.2]})  # fmt: skip
    by_setting = {"greater": {"of": {"of": "a", "setting": "max"}, "than": {"of": "a", "setting": "over"}}}
    found = judged(by_setting, {"a": a}, ("max", "over"))
    assert (found.state, [f.spot for f in found.findings]) == ("shown", [("", "big"), ("", "small")])
    by_place = {"greater": {"of": {"of": "a", "place": "big"}, "than": {"of": "a", "place": "small"}}}
    assert judged(by_place, {"a": a}, ("max", "over")).state == "not shown"  # over: no difference
    assert judged(by_place, {"a": a}, ("max",)).state == "shown"


def test_monotone_takes_every_step() -> None:
    a = seen({("s", "x"): [1, 1.1, 1.2], ("s", "y"): [2, 2.1, 2.2], ("s", "z"): [3, 3.1, 3.2]})
    rising = {"of": "a", "along": "places", "order": ["x", "y", "z"]}
    assert judged({"monotone": rising}, {"a": a}).state == "shown"
    assert judged({"monotone": {**rising, "direction": "decreasing"}}, {"a": a}).state == "contradicted"
    assert judged({"monotone": {**rising, "order": ["x", "z", "y"]}}, {"a": a}).state == "contradicted"
    assert judged({"monotone": {**rising, "order": ["x", "w"]}}, {"a": a}).state == "not run"
    turned = seen({(place, "s"): values for (_, place), values in a.values.items()})
    along = {"monotone": {**rising, "along": "settings"}}
    assert judged(along, {"a": turned}, ("x", "y", "z")).state == "shown"
    beside = seen({**turned.values, ("aside", "r"): [1, 1.1, 1.2]})  # a place of a setting that is not in the order
    assert judged(along, {"a": beside}, ("x", "y", "z", "aside")).state == "shown"


def test_a_band_around_each_published_number() -> None:
    check = {"band": {"of": "a", "target": "published", "tolerance": 0.05}}
    published = {"a": {("s", "t"): 0.9}}
    assert judged(check, {"a": seen(A)}, published=published).state == "shown"
    assert judged(check, {"a": seen(A)}).state == "not run"


def test_ratios_and_differences_pair_seeds_and_exact_values() -> None:
    a, b = seen({("s", "t"): {1: 6.0, 2: 8.0}}), seen({("s", "t"): {2: 2.0, 3: 1.0}})
    both = {"a": a, "b": b}
    assert combined(source(ratio=["a", "b"]), both).values == {("s", "t"): {2: 4.0}}
    assert combined(source(difference=["a", "b"]), both).values == {("s", "t"): {2: 6.0}}
    exact = replace(seen({("s", "t"): {1: 2.0}}), is_exact=True)
    assert combined(source(ratio=["a", "b"]), {"a": a, "b": exact}).values == {("s", "t"): {1: 3.0, 2: 4.0}}
    against_one = source(difference=["a", {"of": "a", "setting": "s"}])
    assert combined(against_one, {"a": a}).values == {("s", "t"): {1: 0.0, 2: 0.0}}


def test_a_rank_correlation_is_over_the_places_of_a_setting_seed_by_seed() -> None:
    places = ("t1", "t2", "t3", "t4")
    a = seen({("s", place): {1: float(i), 2: float(i)} for i, place in enumerate(places)})
    b = seen({("s", place): {1: v, 3: v} for place, v in zip(places, (1.0, 3.0, 2.0, 4.0), strict=True)})
    # Of the six pairs five are in order, one is not; the seed that only one of both has is left out.
    tau = combined(source(tau=["a", "b"]), {"a": a, "b": b}).values
    assert tau == {("s", ""): {1: pytest.approx(4 / 6)}}
    two = seen({spot: values for spot, values in a.values.items() if spot[1] in ("t1", "t2")})
    assert combined(source(tau=["a", "a"]), {"a": two}).values == {}


def test_a_place_among_several_contradicts_a_claim_as_clearly_as_one_alone_would() -> None:
    """At t2 the difference is -.57 +- .52, t = 4.7 of two degrees: p = .021 alone, .042 as one of two places."""
    a = seen({("s", "t1"): [3, 3.1, 3.2], ("s", "t2"): [1.6, 1.5, 1.2]})
    b = seen({spot: [2.0, 2.0, 2.0] for spot in a.values})
    alone = {"greater": {"of": "a", "than": "b", "places": ["t2"]}}
    assert judged(alone, {"a": a, "b": b}).state == "contradicted"
    both = judged(GREATER, {"a": a, "b": b})
    assert (both.state, both.reason) == (
        "not shown",
        "contradicted at one place (p = 0.021), but not after correction for 2 places",
    )
    places = [f"t{i}" for i in range(3, 61)]
    among_60 = {
        name: replace(known, values={**known.values, **{("s", place): known.values["s", "t1"] for place in places}})
        for name, known in (("a", a), ("b", b))
    }
    assert judged(GREATER, among_60).reason.startswith(
        "contradicted at one place (p = 0.021), but not after correction"
    )


def claims(*made: Mapping[str, Any], needs: tuple[str, ...] = ()) -> tuple[Claim, ...]:
    return tuple(Claim(text="it is so", needs=needs, **check) for check in made)


def test_the_claims_of_an_item_are_several_tests() -> None:
    """One-sided p of .00002, .0071 and .0228: t of 157.6, 8.3 and 4.5 by two degrees of freedom.

    By Holm's rule they are compared with .025 / 3, .025 / 2 and .025, and all hold; beside a fourth claim, which varies
    around 0, with .025 / 4, .025 / 3 and .025 / 2, and the third falls.
    """
    values = {"x": [0.90, 0.91, 0.92], "y": [0.6, 0.7, 0.9], "z": [0.45, 0.6, 0.95], "w": [-1.0, 0.0, 1.5]}
    a = seen({("s", place): of_place for place, of_place in values.items()})
    at = [{"at_least": {"of": {"of": "a", "place": place}, "value": 0}} for place in values]
    _, found = verdicts(item(claims=claims(*at[:3])), "small", {"a": a}, ("s",), SEEDS)
    assert [v.p for v in found] == pytest.approx([0.0000201, 0.00708, 0.0228], rel=0.01)
    assert [v.state for v in found] == ["shown", "shown", "shown"]
    _, found = verdicts(item(claims=claims(*at)), "small", {"a": a}, ("s",), SEEDS)
    assert [v.state for v in found] == ["shown", "shown", "not shown", "not shown"]
    assert found[2].reason == "shown alone (p = 0.023), but not after correction for 4 claims"


@pytest.mark.parametrize(
    ("least", "state"), [(0.8, "shown"), (0.91, "regime not reached"), (0.99, "regime not reached")]
)
def test_a_claim_is_judged_where_its_regime_was_reached(least: float, state: str) -> None:
    regime = Claim(text="The one is large.", at_least={"of": "a", "value": least})
    of_regime = item(regimes={"large": regime}, claims=claims(GREATER, needs=("large",)))
    (reached,), (found,) = verdicts(of_regime, "small", {"a": seen(A), "b": seen(B)}, ("s",), SEEDS)
    assert (found.state, found.regime) == (state, "reached" if state == "shown" else "not reached")
    assert (reached.state == "shown") == (state == "shown")
    assert found.reason.startswith("" if state == "shown" else "The one is large.")
    of_c = Claim(text="x", at_least={"of": "c", "value": 0})
    elsewhere = item({"c": {}}, regimes={"large": of_c}, claims=claims(GREATER, needs=("large",)))
    _, (unknown,) = verdicts(elsewhere, "small", {"a": seen(A), "b": seen(B)}, ("s",), SEEDS)
    assert (unknown.state, unknown.reason) == ("not run", "its regime was not measured")
    _, (not_run,) = verdicts(of_regime, "small", {}, ("s",), SEEDS)
    assert not_run.state == "not run"


def test_a_seed_without_a_finite_value_is_a_gap_and_not_dropped() -> None:
    a, b = seen({("s", "t"): [0.90, 0.91, 0.92, math.nan]}), seen({("s", "t"): [0.80, 0.82, 0.81, 0.80]})
    a.values["s", "t"][4] = math.nan  # type: ignore[index]
    of_claim = Claim(text="it is so", **GREATER)
    assert verdict(of_claim, {"a": a, "b": b}, item(), ("s",), (1, 2, 3)).state == "shown"
    found = verdict(of_claim, {"a": a, "b": b}, item(), ("s",), (1, 2, 3, 4))
    assert (found.state, found.reason) == ("not shown", "s, t; 3 of 4 seeds have a value")


def board_of(item: Item, measured: Mapping[str, Mapping[str, Measured]]) -> Block:
    """The claims of an item at the scales at which it was measured."""
    outcomes = {
        scale: Outcome(item, scale, True, (), tuple(verdicts(item, scale, values, ("s",), SEEDS)[1]))
        for scale, values in measured.items()
    }
    return claims_block([Entry(item, outcomes)], "x")


def test_claims_of_one_text_have_their_own_states_on_the_board() -> None:
    bounds = ({"at_least": {"of": "a", "value": 0.8}}, {"at_least": {"of": "a", "value": 0.99}})
    block = board_of(item(claims=claims(*bounds)), {"small": {"a": seen(A)}})
    assert [row[3] for row in block.rows] == ["shown", "contradicted"]


def test_regimes_and_reasons_that_differ_between_scales_name_theirs_on_the_board() -> None:
    regime = Claim(text="The one is large.", at_least={"of": "a", "value": 0.85})
    both = item(regimes={"large": regime}, claims=claims(GREATER, needs=("large",)))
    both = replace(both, scales={"paper": both.scales["small"], **both.scales})
    reached, lacking = {"a": seen(A), "b": seen(A)}, {"a": seen(B), "b": seen(A)}
    (row,) = board_of(both, {"paper": lacking, "small": reached}).rows
    assert row[4] == "paper scale: not reached; small scale: reached"
    assert row[6] == "paper scale: The one is large. s, t; it is 0.7852 to 0.8348; small scale: s, t; no difference"
    (row,) = board_of(both, {"paper": reached, "small": reached}).rows
    assert row[4:] == ("reached", "not published", "s, t; no difference")


def test_the_published_numbers_are_judged_as_well() -> None:
    claim = Claim(text="x", **GREATER)
    assert in_the_paper(claim, item({"a": {("s", "t"): 2.0}, "b": {("s", "t"): 1.0}})) == "shown"
    assert in_the_paper(claim, item({"a": {("s", "t"): 1.0}, "b": {("s", "t"): 2.0}})) == "contradicted"
    assert in_the_paper(claim, item({"a": {("s", "t"): 1.0}})) == "not published"
