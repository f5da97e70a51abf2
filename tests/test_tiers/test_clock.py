"""Simulated time: the arithmetic of one client, the slowest of a round, and no influence of real time."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.tiers.clock import EVALUATION_FACTOR, VirtualClock, client_time_s
from fedloom.tiers.devices import DeviceProfile

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
