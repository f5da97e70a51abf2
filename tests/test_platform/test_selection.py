"""Client selection: uniform, distinct, cheap among a million clients; what the server remembers; rules of one's own."""

import math
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import chisquare

from fedloom.platform.clients.assignments import ClientResult
from fedloom.platform.federation.selection import (
    DRAWS_PER_CLIENT,
    SELECTION_RULES,
    Choice,
    ClientRecord,
    Cohort,
    History,
    check_selection,
    packed,
    recorded,
    select,
    unpacked,
)
from fedloom.platform.plugins import ComponentSpec, PluginError
from fedloom.platform.seeding import stream


def choice(
    eligible: np.ndarray,
    size: int,
    rng: np.random.Generator,
    available: Callable[[int], bool] | None = None,
    history: History | None = None,
) -> Choice:
    """A round in which every device can be reached, if nobody says which are available."""
    return Choice(
        round=0,
        size=size,
        eligible=eligible,
        rng=rng,
        always=available is None,
        available=available or (lambda _: True),
        history=history or {},
        num_samples=lambda client_id: 10 * client_id,
    )


def drawn(
    eligible: np.ndarray, size: int, rng: np.random.Generator, available: Callable[[int], bool] | None = None
) -> Cohort:
    return select(choice(eligible, size, rng, available), ComponentSpec("uniform"))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 10_000), unique=True, max_size=30), st.integers(0, 40), st.integers(0, 99), st.booleans()
)
def test_a_cohort_is_distinct_ascending_and_eligible(ids: list[int], size: int, seed: int, asked: bool) -> None:
    eligible = np.array(sorted(ids), dtype=np.int64)
    cohort = drawn(eligible, size, stream(seed, "test"), (lambda _: True) if asked else None)
    assert len(cohort.client_ids) == min(size, len(ids))
    assert list(cohort.client_ids) == sorted(set(cohort.client_ids))
    assert set(cohort.client_ids) <= set(ids)
    assert all(type(c) is int for c in cohort.client_ids)
    if asked:
        assert math.isnan(cohort.probability)  # it depends on how many others are available
    else:
        assert cohort.probability == (min(size, len(ids)) / len(ids) if ids else 0.0)


@pytest.mark.parametrize("asked", [False, True])
def test_over_a_thousand_rounds_all_clients_are_chosen_alike(asked: bool) -> None:
    eligible = np.arange(100, 140)
    counts = np.zeros(40)
    pairs = np.zeros((40, 40))
    for round_ in range(1000):
        rng = stream(1, "select", "train", round_)
        chosen = np.array(drawn(eligible, 10, rng, (lambda _: True) if asked else None).client_ids) - 100
        counts[chosen] += 1
        pairs[np.ix_(chosen, chosen)] += 1
    # Draws without replacement spread less than the chi-square law; scaled by 1/(1 - 10/40) they follow it.
    statistic = chisquare(counts).statistic / (1 - 10 / 40)
    assert 15 < statistic < 65  # 39 degrees of freedom: 0.01 % and 99.4 %
    expected_pair = 1000 * 10 * 9 / (40 * 39)
    off_diagonal = pairs[np.triu_indices(40, k=1)]
    assert abs(off_diagonal - expected_pair).max() < 6 * expected_pair**0.5


def test_the_chi_square_bound_would_notice_a_favoured_client() -> None:
    counts = np.full(40, 250.0)
    counts[0] += 150
    counts[1] -= 150
    assert not 15 < chisquare(counts).statistic / (1 - 10 / 40) < 65


def test_only_available_clients_are_chosen_uniformly() -> None:
    counts = np.zeros(20)
    for round_ in range(500):
        cohort = drawn(np.arange(20), 4, stream(1, "select", round_), lambda c: c % 2 == 0)
        assert len(cohort.client_ids) == 4
        assert cohort.reason == "uniform among available"
        counts[list(cohort.client_ids)] += 1
    assert counts[1::2].sum() == 0
    assert chisquare(counts[::2]).statistic / (1 - 4 / 10) < 30  # 9 degrees of freedom: 99.96 %


def test_too_few_available_clients_make_a_smaller_cohort() -> None:
    few = drawn(np.arange(50), 10, stream(1, "x"), lambda c: c in (3, 40))
    assert few.client_ids in ((3, 40), (3,), (40,))
    assert drawn(np.arange(50), 10, stream(1, "x"), lambda _: False).client_ids == ()
    assert drawn(np.arange(5), 5, stream(1, "x"), lambda c: c == 3).client_ids == (3,)


def test_nobody_is_asked_twice_and_never_too_many() -> None:
    asked: list[int] = []

    def available(client_id: int) -> bool:
        asked.append(client_id)
        return False

    drawn(np.arange(1_000_000), 10, stream(1, "x"), available)
    assert len(asked) == len(set(asked)) <= 10 * DRAWS_PER_CLIENT


def test_no_eligible_client_is_no_cohort() -> None:
    for available in (None, lambda _: True):
        assert drawn(np.empty(0, dtype=np.int64), 3, stream(1, "x"), available).client_ids == ()


@pytest.mark.parametrize("asked", [False, True])
def test_a_million_registered_clients_cost_no_more_than_a_hundred(asked: bool) -> None:
    def fastest_s(eligible: np.ndarray) -> float:
        times = []
        for seed in range(40):
            rng = stream(seed, "x")
            started = time.perf_counter()
            drawn(eligible, 10, rng, (lambda _: True) if asked else None)
            times.append(time.perf_counter() - started)
        return min(times)

    # A permutation of a million takes a thousand times as long as this bound allows.
    assert fastest_s(np.arange(1_000_000)) < 20 * fastest_s(np.arange(100)) + 1e-3


# -- all of them ------------------------------------------------------------------------------------------------------


def test_all_are_those_that_are_available() -> None:
    everybody = select(choice(np.array([2, 5, 9]), 3, stream(1, "x")), ComponentSpec("all"))
    assert everybody == Cohort((2, 5, 9), 1.0, "all")
    some = select(choice(np.array([2, 5, 9]), 3, stream(1, "x"), lambda c: c != 5), ComponentSpec("all"))
    assert (some.client_ids, some.reason) == ((2, 9), "all that are available")
    assert math.isnan(some.probability)


# -- what is remembered -----------------------------------------------------------------------------------------------


def report(client_id: int | None, status: str = "ok", **figures: Any) -> ClientResult:
    return ClientResult(client_id=client_id, tier="tier1", status=status, **figures)


def test_the_history_holds_those_that_took_part() -> None:
    first = [
        report(3, loss=2.0, loss_norm=2.5, samples=40, simulated_s=7.0),
        report(5, "failed"),
        report(None, loss=9.0),
    ]
    history = unpacked(recorded({}, 0, first))
    assert history == {3: ClientRecord(1, 1, 0, 2.0, 2.5, 40, 7.0, answered=0), 5: ClientRecord(1, 0, 0)}
    # Who does not answer is remembered as asked; what it said before stays.
    later = [report(3, "timed_out", loss=1.0, samples=1), report(5, loss=0.5, samples=8)]
    again = unpacked(recorded(packed(history), 4, later))
    assert again == {
        3: ClientRecord(2, 1, 4, 2.0, 2.5, 40, 7.0, answered=0),
        5: ClientRecord(2, 1, 4, 0.5, None, 8, 0.0, answered=4),
    }
    assert history[3].participations == 1, "a value, not a record that is changed"
    assert unpacked(packed(again)) == again


# -- a rule of one's own ----------------------------------------------------------------------------------------------


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("own_selection")
    monkeypatch.setitem(sys.modules, "own_selection", module)
    return module


def test_a_rule_of_ones_own_sees_the_history_and_has_options(own_module: ModuleType) -> None:
    def lossy(choice: Choice, *, least: float = 0.0) -> Cohort:
        losses = {c: choice.record(c).loss or 0.0 for c in choice.draw(len(choice.eligible))}
        chosen = tuple(c for c, loss in losses.items() if loss >= least)
        return Cohort(chosen, reason="lossy", reasons={c: f"loss {losses[c]:g}" for c in chosen[:1]})

    own_module.lossy = lossy  # type: ignore[attr-defined]
    history = {2: ClientRecord(loss=1.5), 4: ClientRecord(loss=3.0)}
    about = choice(np.arange(6), 6, stream(1, "x"), history=history)
    cohort = select(about, ComponentSpec("own_selection:lossy", (("least", 1.0),)))
    assert cohort.client_ids == (2, 4)
    assert [cohort.reason_of(c) for c in cohort.client_ids] == ["loss 1.5", "lossy"]
    assert math.isnan(cohort.probability)
    assert len(select(about, ComponentSpec("own_selection:lossy")).client_ids) == 6


def test_ids_alone_are_a_cohort(own_module: ModuleType) -> None:
    own_module.last = lambda choice: choice.eligible[::-1][: choice.size]  # type: ignore[attr-defined]
    cohort = select(choice(np.array([1, 4, 6]), 2, stream(1, "x")), ComponentSpec("own_selection:last"))
    assert (cohort.client_ids, cohort.reason) == ((4, 6), "own_selection:last"), "in ascending order"
    assert all(type(c) is int for c in cohort.client_ids)


@pytest.mark.parametrize(
    ("name", "given_", "message"),
    [
        ("twice", [4, 4], r"gives a client twice: \[4, 4\]"),
        ("crowd", [1, 4, 6], "gives 3 clients for a round of 2"),
        ("stranger", [5], "gives client 5, which is not eligible in this round"),
        ("beyond", [99], "gives client 99, which is not eligible in this round"),
        ("nothing", None, "gives None: give the ids of clients, or a Cohort"),
        ("names", ["a"], r"gives \['a'\]: give the ids of clients, or a Cohort"),
        ("fractions", [1.0, 4.5], r"gives \[1.0, 4.5\]: give the ids of clients, or a Cohort"),
        ("late", (1 // zero for zero in (1, 0)), "fails: ZeroDivisionError: integer division or modulo by zero"),
        ("reasoned", Cohort((4,), reason=cast(Any, {4: "new"})), "gives the reason {4: 'new'}: give a text, or one by"),
        ("likely", Cohort((4,), 7.0), "gives the probability 7.0: give a number from 0 to 1"),
        ("idle", Cohort((4,), epochs={4: 0}), "gives the epochs 0: give a whole number from 1"),
        ("generous", Cohort((4,), sends={4: 2.0}), "gives the sends 2.0: give a share above 0, at most 1"),
    ],
)
def test_a_rule_that_gives_no_cohort_is_named(own_module: ModuleType, name: str, given_: Any, message: str) -> None:
    setattr(own_module, name, lambda _choice: given_)
    with pytest.raises(PluginError, match=f"^selection rule 'own_selection:{name}' {message}") as caught:
        select(choice(np.array([1, 4, 6]), 2, stream(1, "x")), ComponentSpec(f"own_selection:{name}"))
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_in_a_cohort_are_plain_ones_as_a_checkpoint_holds_them(own_module: ModuleType) -> None:
    own_module.arrays = (
        lambda choice: Cohort(  # type: ignore[attr-defined]
            choice.eligible[:2],
            np.float32(0.25),
            reasons={np.int64(1): "first"},
            epochs={np.int64(1): np.int64(2)},
            sends={np.int64(1): np.float32(0.5)},
        )
    )
    cohort = select(choice(np.array([1, 4]), 2, stream(1, "x")), ComponentSpec("own_selection:arrays"))
    values = [cohort.probability, *cohort.reasons, *cohort.epochs, *cohort.epochs.values(), *cohort.sends.values()]
    assert [(type(value), value) for value in values] == [(float, 0.25), *[(int, 1)] * 2, (int, 2), (float, 0.5)]


def test_a_memory_is_what_a_resumed_run_reads_from_the_start(own_module: ModuleType) -> None:
    own_module.pairs = lambda choice: Cohort(choice.draw(2), memory={"last": (1, 2)})  # type: ignore[attr-defined]
    about = choice(np.arange(6), 2, stream(1, "x"))
    assert select(about, ComponentSpec("own_selection:pairs")).memory == {"last": [1, 2]}
    counted = {7: 1}
    own_module.counts = lambda choice: Cohort(choice.draw(2), memory={"n": counted})  # type: ignore[attr-defined]
    own_module.sums = lambda choice: Cohort(choice.draw(2), memory={"n": np.int64(3)})  # type: ignore[attr-defined]
    with pytest.raises(
        PluginError, match=r"counts' gives a memory that JSON cannot hold: memory\['n'\] has the key 7: give a text"
    ):
        check_selection(ComponentSpec("own_selection:counts"), 2)
    with pytest.raises(PluginError, match=r"sums' gives a memory that JSON cannot hold: Object of type int64 is not"):
        check_selection(ComponentSpec("own_selection:sums"), 2)


def test_a_rule_is_tried_before_anything_is_written(own_module: ModuleType) -> None:
    own_module.lazy = lambda choice: choice.history[0].loss  # type: ignore[attr-defined]
    with pytest.raises(PluginError, match="'own_selection:lazy' fails: KeyError: 0"):
        check_selection(ComponentSpec("own_selection:lazy"), 3)
    own_module.nobody = lambda _choice: []  # type: ignore[attr-defined]
    own_module.crowd = lambda choice: choice.eligible[: choice.size + 1]  # type: ignore[attr-defined]
    own_module.everybody = lambda choice: choice.eligible  # type: ignore[attr-defined]
    with pytest.raises(
        PluginError, match="'own_selection:nobody' gives no client, though all are available: give some"
    ):
        check_selection(ComponentSpec("own_selection:nobody"), 3)
    with pytest.raises(PluginError, match="'own_selection:crowd' gives 4 clients for a round of 3"):
        check_selection(ComponentSpec("own_selection:crowd"), 3)
    check_selection(ComponentSpec("own_selection:everybody"), None)
    with pytest.raises(PluginError, match=r"unknown selection rule 'unifrom': known are all, oort, .*'uniform'"):
        SELECTION_RULES.find("unifrom")
