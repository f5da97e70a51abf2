"""When devices are online: literal intervals, laws of every source, the daily rhythm, and damaged tables."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fedloom.tiers.availability import DAY_S, Availability, DailyAvailability, Intervals, TraceAvailability
from fedloom.tiers.device_files import read_intervals

HOUR_S = 3600.0


def trace(*rows: tuple[int, float, float]) -> Intervals:
    ids, on_s, off_s = zip(*rows, strict=True)
    return Intervals(np.array(ids), np.array(on_s, dtype=float), np.array(off_s, dtype=float))


SMALL = trace((3, 5, 6), (1, 10, 20), (1, 0, 5), (1, 25, 30), (8, 0, 30), (1, 20, 22))
"""Device 1 is online from 0 to 5, 10 to 22, and 25 to 35, which is 5 again; device 8 always."""


def answers(source: Availability, i: int, t_s: float) -> tuple[bool, float, float]:
    return source.is_on(i, t_s), source.on_at(i, t_s), source.off_at(i, t_s)


@pytest.mark.parametrize(
    ("device", "t_s", "expected"),
    [
        (0, 0.0, (True, 0.0, 5.0)),
        (0, 5.0, (False, 10.0, 5.0)),
        (0, 12.0, (True, 12.0, 22.0)),  # intervals that touch are one
        (0, 24.0, (False, 25.0, 24.0)),
        (0, 29.0, (True, 29.0, 35.0)),  # across the end of the period
        (0, 30.0, (True, 30.0, 35.0)),
        (0, 35.0, (False, 40.0, 35.0)),
        (0, 3012.0, (True, 3012.0, 3022.0)),
        (1, 0.0, (False, 5.0, 0.0)),
        (1, 6.0, (False, 35.0, 6.0)),
        (2, 1e9, (True, 1e9, math.inf)),
    ],
)
def test_a_trace_is_on_line_in_its_intervals_and_repeats(
    device: int, t_s: float, expected: tuple[bool, float, float]
) -> None:
    assert answers(TraceAvailability(SMALL, np.array([1, 3, 8]), 30.0), device, t_s) == expected


def test_a_trace_repeats_after_whole_days_so_that_hours_stay() -> None:
    nightly = TraceAvailability(trace((0, 1 * HOUR_S, 5 * HOUR_S), (0, DAY_S, DAY_S + HOUR_S)), np.array([0, 0]))
    assert nightly.period_s == 2 * DAY_S
    assert nightly.on_at(1, 2 * DAY_S) == 2 * DAY_S + HOUR_S


@st.composite
def traces(draw: st.DrawFn) -> tuple[TraceAvailability, int]:
    """Random sources of up to four devices, with times of halves so that ends meet and wrap."""
    period = draw(st.integers(4, 40))
    rows: list[tuple[int, float, float]] = []
    devices = draw(st.integers(1, 4))
    for device in range(devices):
        most = draw(st.integers(1, 4))
        ends = sorted(draw(st.sets(st.integers(0, 2 * period), min_size=2, max_size=2 * most)))
        rows += [(device, a / 2, b / 2) for a, b in zip(ends[::2], ends[1::2], strict=False)]
    return TraceAvailability(trace(*draw(st.permutations(rows))), np.arange(devices), float(period)), devices


SOURCES = st.one_of(
    traces(),
    st.tuples(
        st.builds(
            DailyAvailability,
            st.integers(0, 2**63 - 1),
            st.floats(0.001, 0.999),
            st.sampled_from([60.0, 1000.0, DAY_S]),
        ),
        st.integers(1, 4),
    ),
)


@given(SOURCES, st.floats(0, 1e7))
def test_every_source_obeys_the_laws(case: tuple[Availability, int], t_s: float) -> None:
    """The device is on from when it is said to be until it is said to go off, and at no time before or after."""
    source, devices = case
    on_s, off_s = source.intervals(np.arange(devices), t_s)
    for i in range(devices):
        begins_s, ends_s = source.on_at(i, t_s), source.off_at(i, t_s)
        assert (begins_s, source.interval(i, t_s)) == (max(on_s[i], t_s), (on_s[i], off_s[i]))  # alone as among others
        assert source.is_on(i, begins_s)
        assert source.is_on(i, t_s) == (begins_s == t_s) == (ends_s > t_s)
        lasts_s = source.off_at(i, begins_s)
        assert lasts_s > begins_s
        if math.isfinite(lasts_s):
            assert not source.is_on(i, lasts_s)
            assert source.off_at(i, np.nextafter(lasts_s, 0.0)) == lasts_s
        if begins_s > t_s:
            assert not source.is_on(i, np.nextafter(begins_s, 0.0))
            assert source.on_at(i, (t_s + begins_s) / 2) == begins_s
    everyone = np.arange(devices)
    assert source.on_of(everyone, t_s).tolist() == [i for i in range(devices) if source.is_on(i, t_s)]
    assert source.first_on_s(everyone, t_s) == min(source.on_at(i, t_s) for i in range(devices))


def test_nobody_is_never_on_line() -> None:
    assert DailyAvailability(1).first_on_s(np.array([], dtype=np.int64), 3.0) == math.inf
    assert DailyAvailability(1).on_of(np.array([], dtype=np.int64), 3.0).tolist() == []


def test_a_generated_day_has_its_rhythm() -> None:
    """Shares of 20 000 devices: 1 - E(1 - s)^2 at midnight and E s^2 at noon, with E s = .35, Var s = .1225 * 5/48."""
    source, everyone = DailyAvailability(1), np.arange(20_000)
    online = [len(source.on_of(everyone, day * DAY_S + hour * HOUR_S)) / 20_000 for day in (0, 9) for hour in range(24)]
    assert online[0] == pytest.approx(0.1353, abs=0.01)
    assert online[12] == pytest.approx(0.5647, abs=0.01)
    assert online[36] == pytest.approx(online[12], abs=0.01)
    assert np.mean(online) == pytest.approx(0.35, abs=0.005)


def test_days_differ_around_a_device_s_hour() -> None:
    source, hours_by_device = DailyAvailability(1, day_s=24.0), []
    for device in range(50):
        t_s, middles = 0.0, []
        for _ in range(10):
            on_s, t_s = source.interval(device, t_s)
            middles.append((on_s + t_s) / 2)
        assert 24.0 - 2.0 < min(np.diff(middles)) < max(np.diff(middles)) < 24.0 + 2.0
        hours_by_device.append(middles[0] % 24.0)
    assert min(hours_by_device) < 6.0
    assert max(hours_by_device) > 18.0


def test_generated_intervals_stay_what_they_are() -> None:
    """Literal values: a change would change every run with generated availability."""
    assert DailyAvailability(1).interval(0, 0.0) == pytest.approx((19613.621382668778, 65855.20698055666), rel=1e-15)
    other = DailyAvailability(2**63 - 1, 0.5, 100.0).interval(10**8, 5e6)
    assert other == pytest.approx((5000021.371233501, 5000090.240578839), rel=1e-15)


@pytest.mark.parametrize(("share", "day_s"), [(0.0, 1.0), (1.0, 1.0), (math.nan, 1.0), (0.5, 0.0), (0.5, math.inf)])
def test_a_day_has_a_share_and_a_length(share: float, day_s: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        DailyAvailability(1, share, day_s)


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("1,0,5\n1,4,6", "rows 0 and 1: device 1 is online from 0 to 5 s and from 4 s"),
        ("1,4,6\n2,0,1\n1,0,5", "rows 2 and 0: device 1 is online from 0 to 5 s and from 4 s"),
        ("1,5,5", "column off_s, row 0: 5 must be after the row's on_s"),
        ("1,-1,5", "column on_s, row 0: -1 must be from 0 to 1e+12 s"),
        ("1,0,5\n1,6,inf", "column off_s, row 1: inf must be from 0 to 1e+12 s"),
        ("1,0,5\n1,nan,7", "column on_s"),
        ("-1,0,5", "column device_id, row 0: -1 must be 0 or more"),
        ("1.5,0,5", "column device_id must be a list of whole numbers"),
        ("1,0,", "column off_s must hold numbers, not null"),
        ("1,0,5\n1,,7", "column on_s has 1 empty values"),
        ("1,soon,5", "column on_s must hold numbers, not string"),
        ("", "column device_id"),
    ],
)
def test_a_bad_table_is_one_line(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "intervals.csv"
    path.write_text(f"device_id,on_s,off_s\n{lines}\n")
    with pytest.raises(ValueError, match="intervals") as error:
        read_intervals(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_table_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "intervals.csv"
    path.write_text("device_id,on_s\n1,2\n")
    with pytest.raises(ValueError, match="column off_s is missing; an availability table has device_id, on_s, off_s"):
        read_intervals(path)


def test_a_trace_fits_its_period_and_its_devices() -> None:
    with pytest.raises(ValueError, match="device 1 is online until 30 s, after the period of 20 s: give a period of"):
        TraceAvailability(trace((1, 0, 5), (1, 20, 30)), np.array([1]), 20.0)
    with pytest.raises(ValueError, match="device 4 has no interval: give each of 2 clients' devices one"):
        TraceAvailability(SMALL, np.array([1, 4]))
