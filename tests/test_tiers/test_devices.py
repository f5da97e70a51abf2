"""Device tables: values checked on the way in, and a seeded generator."""

import dataclasses
import math
import time

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fedloom.tiers.devices import (
    COLUMNS,
    DEFAULT_PROFILE,
    EVALUATION_FACTOR,
    DeviceProfile,
    DeviceTable,
    VirtualClock,
    client_time_s,
    done_by,
    fair_rates,
    generate_device_table,
    jittered,
)


def small() -> DeviceTable:
    return DeviceTable(
        device_id=np.array([7, 3]),
        macs_per_s=np.array([2e9, 4e9]),
        down_bytes_per_s=np.array([1e6, 2e6]),
        up_bytes_per_s=np.array([5e5, 1e5]),
        availability=np.array([1.0, 0.5]),
        dropout=np.array([0.0, 0.1]),
    )


def columns(table: DeviceTable) -> dict[str, list[float]]:
    return {name: getattr(table, name).tolist() for name in COLUMNS}


def test_a_row_is_a_profile_named_after_its_device() -> None:
    assert small().profile(1) == DeviceProfile("device3", 4e9, 2e6, 1e5, 0.5, 0.1)
    assert len(small()) == 2
    for outside in (-1, 2):
        with pytest.raises(IndexError, match="outside 0 to 1"):
            small().profile(outside)


@pytest.mark.parametrize("field", ["macs_per_s", "down_bytes_per_s", "up_bytes_per_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_profile_refuses_bad_rates(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"device default: {field}={value!r} must be positive"):
        dataclasses.replace(DEFAULT_PROFILE, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["availability", "dropout"])
@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_a_profile_refuses_what_is_no_probability(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"device default: {field}={value!r} must be a probability"):
        dataclasses.replace(DEFAULT_PROFILE, **{field: value})  # type: ignore[arg-type]


def test_a_table_is_typed_and_read_only_but_leaves_the_callers_array_alone() -> None:
    mine = np.array([1, 2])
    table = dataclasses.replace(small(), macs_per_s=mine)
    assert table.macs_per_s.dtype == np.float64
    assert table.device_id.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        table.device_id[0] = 1
    mine[0] = 5


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"column dropout has shape \(3,\), but device_id has \(2,\)"):
        dataclasses.replace(small(), dropout=np.zeros(3))


def test_the_generator_is_seeded_and_grows_without_changing_what_was() -> None:
    few, many = (generate_device_table(n, np.random.default_rng(5)) for n in (10, 1000))
    assert columns(few) == {name: values[:10] for name, values in columns(many).items()}
    assert columns(few) != columns(generate_device_table(10, np.random.default_rng(6)))
    with pytest.raises(ValueError, match="num_devices=0"):
        generate_device_table(0, np.random.default_rng(0))


def test_the_generator_spreads_as_it_says() -> None:
    table = generate_device_table(40_000, np.random.default_rng(0))
    # The median of 40 000 log-normals of sigma 1 is off by about 0.6 %, a standard deviation by 0.4 %.
    for name, sigma in (("macs_per_s", 0.8), ("down_bytes_per_s", 1.0), ("up_bytes_per_s", 1.0)):
        column = getattr(table, name)
        assert np.median(column) == pytest.approx(getattr(DEFAULT_PROFILE, name), rel=0.04)
        assert np.log(column).std() == pytest.approx(sigma, rel=0.03)
    down, up, macs = (np.log(c) for c in (table.down_bytes_per_s, table.up_bytes_per_s, table.macs_per_s))
    assert np.corrcoef(down, up)[0, 1] == pytest.approx(0.7, abs=0.02)
    assert np.corrcoef(down, macs)[0, 1] == pytest.approx(0.0, abs=0.03)
    assert np.median(table.availability) == pytest.approx(0.622, abs=0.01)
    assert np.median(table.dropout) == pytest.approx(0.0474, abs=0.002)
    assert columns(table)["device_id"] == list(range(40_000))


PHONE = DeviceProfile("phone", macs_per_s=2e9, down_bytes_per_s=1e6, up_bytes_per_s=5e5)
TIMES = st.lists(st.floats(0, 1e6), max_size=20)


def test_one_client_downloads_computes_and_uploads() -> None:
    # 4 MB / 1 MB/s + 3 * 10 GMAC / 2 GMAC/s + 1 MB / 0.5 MB/s = 4 + 15 + 2.
    assert client_time_s(PHONE, macs=10e9, bytes_down=4e6, bytes_up=1e6) == 21.0
    assert client_time_s(PHONE, 10e9, 4e6, 0, EVALUATION_FACTOR) == 9.0
    assert client_time_s(PHONE, 0, 0, 0) == 0.0


@pytest.mark.parametrize("name", ["macs", "bytes_down", "bytes_up", "factor"])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_amounts_that_make_no_sense_are_refused(name: str, value: float) -> None:
    amounts = {"macs": 1.0, "bytes_down": 1.0, "bytes_up": 1.0, "factor": 1.0, name: value}
    with pytest.raises(ValueError, match=f"{name}={value!r} must be a finite number"):
        client_time_s(PHONE, **amounts)


def test_a_round_lasts_as_long_as_its_slowest_or_until_the_deadline() -> None:
    clock = VirtualClock(100.0)
    assert clock.after_round([3.0, 21.0, 9.0]) == (VirtualClock(121.0), 21.0)
    assert clock.after_round([3.0, 21.0, 9.0], deadline_s=10.0) == (VirtualClock(110.0), 10.0)
    assert clock.after_round([3.0, 9.0], deadline_s=10.0) == (VirtualClock(109.0), 9.0)
    assert clock.after_round([3.0, math.inf], deadline_s=10.0) == (VirtualClock(110.0), 10.0)
    assert clock.after_round([], deadline_s=10.0) == (clock, 0.0)
    assert clock.now_s == 100.0


def test_rounds_without_an_end_and_bad_times_are_refused() -> None:
    with pytest.raises(ValueError, match="never answers and the round has no deadline"):
        VirtualClock().after_round([1.0, math.inf])
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match=r"client time .* at position 1"):
            VirtualClock().after_round([1.0, bad])
        with pytest.raises(ValueError, match="now_s"):
            VirtualClock(bad)
    for deadline_s in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="deadline_s="):
            VirtualClock().after_round([1.0], deadline_s)


@given(rounds=st.lists(TIMES, max_size=6))
def test_time_adds_up_and_never_runs_back(rounds: list[list[float]]) -> None:
    clock, total_s = VirtualClock(), 0.0
    for times in rounds:
        before = clock
        clock, round_s = clock.after_round(times)
        total_s += round_s
        assert clock.now_s >= before.now_s
    assert clock.now_s == total_s


def test_real_time_does_not_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden() -> float:
        raise AssertionError("simulated time read the real clock")

    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, forbidden)
    assert VirtualClock().after_round([client_time_s(PHONE, 2e9, 0, 0)])[1] == 3.0
    monkeypatch.undo()


# -- a round's devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "link", "expected"),
    [
        ([10.0, 1.0, 4.0], 9.0, [4.0, 1.0, 4.0]),  # 3 each; the slow one leaves 2, which the others share
        ([10.0, 1.0, 4.0], 12.0, [7.0, 1.0, 4.0]),
        ([10.0, 1.0, 4.0], 100.0, [10.0, 1.0, 4.0]),
        ([5.0, 5.0], 4.0, [2.0, 2.0]),
        ([], 4.0, []),
    ],
)
def test_a_link_is_shared_fairly(most: list[float], link: float, expected: list[float]) -> None:
    assert fair_rates(most, link) == expected


@given(st.lists(st.floats(0.01, 1e9), min_size=1, max_size=20), st.floats(0.01, 1e9))
def test_fair_shares_use_the_link_and_favour_nobody(most: list[float], link: float) -> None:
    rates = fair_rates(most, link)
    assert all(0 < rate <= limit for rate, limit in zip(rates, most, strict=True))
    assert sum(rates) == pytest.approx(min(link, sum(most)))
    limited = [rate for rate, limit in zip(rates, most, strict=True) if rate < limit]
    assert max(rates) <= min(limited, default=math.inf) * (1 + 1e-9)  # who gets less than it can take gets the most


def fluid_times_s(transfers: list[tuple[float, float]], link: float) -> list[float]:
    """When transfers (bytes, most bytes per second) that begin together end on a link that is shared anew each time."""
    left, now_s, ends_s = dict(enumerate(amount for amount, _ in transfers)), 0.0, [0.0] * len(transfers)
    while left:
        rates = dict(zip(left, fair_rates([transfers[i][1] for i in left], link), strict=True))
        passes_s, ended = min((left[i] / rates[i], i) for i in left)
        now_s += passes_s
        left = {i: left[i] - rates[i] * passes_s for i in left if i != ended}
        ends_s[ended] = now_s
    return ends_s


@given(st.lists(st.tuples(st.floats(1.0, 1e3), st.floats(1.0, 1e3)), min_size=1, max_size=6), st.floats(1.0, 1e3))
def test_shares_for_a_whole_round_are_no_faster_than_a_fluid_link(
    transfers: list[tuple[float, float]], link: float
) -> None:
    rates = fair_rates([most for _, most in transfers], link)
    for (amount, _), rate, fluid_s in zip(transfers, rates, fluid_times_s(transfers, link), strict=True):
        assert fluid_s <= amount / rate * (1 + 1e-6) + 1e-9


def test_a_fluid_link_by_hand() -> None:
    """10 and 20 bytes on 2 bytes/s: 1 each for 10 s, then 2 for 5 s; with fixed shares the second takes 20 s."""
    assert fluid_times_s([(10.0, 9.0), (20.0, 9.0)], 2.0) == [10.0, 15.0]


def test_jitter_scales_compute_and_link() -> None:
    phone = DeviceProfile("phone", 8.0, 4.0, 2.0, 0.9, 0.1)
    many = [jittered(phone, 0.5, np.random.default_rng(i)) for i in range(2000)]
    compute = np.log([p.macs_per_s / 8.0 for p in many])
    link = np.log([p.down_bytes_per_s / 4.0 for p in many])
    assert np.allclose(link, np.log([p.up_bytes_per_s / 2.0 for p in many]))
    for factors in (compute, link):
        assert (np.median(factors), np.std(factors)) == pytest.approx((0.0, 0.5), abs=0.03)
    assert abs(np.corrcoef(compute, link)[0, 1]) < 0.1
    assert {(p.name, p.availability, p.dropout) for p in many} == {("phone", 0.9, 0.1)}


@pytest.mark.parametrize(
    ("until_s", "expected"),
    [
        (0.0, (0.0, 0.0, 0.0)),
        (1.5, (0.5, 0.0, 0.0)),
        (3.0, (1.0, 0.0, 0.0)),
        (4.0, (1.0, 0.25, 0.0)),
        (8.0, (1.0, 1.0, 0.5)),
        (99.0, (1.0, 1.0, 1.0)),
    ],
)
def test_what_a_device_has_done_by_a_time(until_s: float, expected: tuple[float, float, float]) -> None:
    phone = DeviceProfile("phone", macs_per_s=5.0, down_bytes_per_s=10.0, up_bytes_per_s=2.0)
    assert done_by(phone, 20.0, 30.0, 4.0, until_s) == expected  # 3 s down, 4 s of compute, 2 s up
