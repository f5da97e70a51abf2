"""When simulated devices are online: intervals from a table, or generated with a daily rhythm.

All answers are pure functions of a device and a simulated time, computed on demand: only a table's intervals are kept
per device, and neither the order of the calls nor the process matters. Intervals are half-open: a device that goes
offline at `t` is off at `t`.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.tiers.devices import check_rows, read_only_column

DAY_S = 86400.0
"""The seconds of a day."""
DEFAULT_SHARE = 0.35
"""The share of a day that a generated device is online: somewhat more than eight hours (assumed)."""
INTERVAL_COLUMNS = ("device_id", "on_s", "off_s")
"""The columns of a table of intervals."""
LATEST_S = 1e12
"""The latest time of a table: thirty thousand years."""
MOST_START_JITTER = 1 / 24
"""Largest distance of a generated interval's middle from its device's usual hour, as a share of the day."""
_AT_ONCE = 1 << 16
"""Largest number of devices that are processed at once, which bounds memory."""
_BITS = (1 << 64) - 1

Times = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


class Availability(ABC):
    """When devices are online; devices are counted from 0, times are simulated seconds of 0 or more."""

    @abstractmethod
    def intervals(self, devices: Indices, t_s: float) -> tuple[Times, Times]:
        """For each of `devices`, of shape (devices,), the online interval that contains `t_s`, or else the next one.

        Returns the seconds at which the intervals begin and end; every end is after `t_s` and may be infinite.
        """

    def interval(self, i: int, t_s: float) -> tuple[float, float]:
        """`intervals` of one device."""
        on_s, off_s = self.intervals(np.array([i]), t_s)
        return float(on_s[0]), float(off_s[0])

    def is_on(self, i: int, t_s: float) -> bool:
        """Whether device `i` is online at `t_s`."""
        return self.interval(i, t_s)[0] <= t_s

    def off_at(self, i: int, t_s: float) -> float:
        """When device `i`, which is online at `t_s`, goes offline: infinity if never, `t_s` itself if it is off."""
        on_s, off_s = self.interval(i, t_s)
        return off_s if on_s <= t_s else t_s

    def on_at(self, i: int, t_s: float) -> float:
        """The first time from `t_s` at which device `i` is online: `t_s` itself if it is."""
        return max(self.interval(i, t_s)[0], t_s)

    def next_on_s(self, devices: Indices, t_s: float) -> Times:
        """`on_at` of many devices at once."""
        return np.maximum(self.intervals(devices, t_s)[0], t_s)

    def first_on_s(self, devices: Indices, t_s: float) -> float:
        """The first time from `t_s` at which any of these devices is online; infinity without devices.

        It checks devices in batches of growing size, and stops after a batch with one that is online at `t_s`.
        """
        first_s, start, size = math.inf, 0, 64
        while start < len(devices) and first_s > t_s:
            first_s = min(first_s, float(self.next_on_s(devices[start : start + size], t_s).min()))
            start, size = start + size, min(4 * size, _AT_ONCE)
        return first_s

    def on_of(self, devices: Indices, t_s: float) -> Indices:
        """Those of the devices that are online at `t_s`, in their order."""
        parts = [devices[start : start + _AT_ONCE] for start in range(0, len(devices), _AT_ONCE)]
        return np.concatenate([part[self.next_on_s(part, t_s) == t_s] for part in parts] or [devices])


# -- a table of intervals ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Intervals:
    """A trace: one row per interval in which a device is online, sorted by device and time; all arrays are read-only.

    Raises ValueError that names the column and the row, as numbered in what was passed, of an invalid value: times
    outside 0 to `LATEST_S`, an interval that does not end after it begins, or two of a device that overlap.
    """

    device_id: Indices
    on_s: Times
    off_s: Times

    def __post_init__(self) -> None:
        columns = {name: read_only_column(name, getattr(self, name)) for name in INTERVAL_COLUMNS}
        device_id, on_s, off_s = columns.values()
        if not len(device_id):
            raise ValueError("column device_id is empty: a table of intervals needs at least one")
        for name, column in columns.items():
            if len(column) != len(device_id):
                raise ValueError(f"column {name} has {len(column)} values, but device_id has {len(device_id)}")
            most, allowed = (np.inf, "0 or more") if name == "device_id" else (LATEST_S, f"from 0 to {LATEST_S:g} s")
            check_rows(name, column, (column >= 0) & (column <= most), allowed)
        check_rows("off_s", off_s, off_s > on_s, "after the row's on_s")
        order = np.lexsort((on_s, device_id))
        same = device_id[order][1:] == device_id[order][:-1]
        gaps_s = on_s[order][1:] - off_s[order][:-1]
        overlapping = np.flatnonzero(same & (gaps_s < 0))
        if len(overlapping):
            first, second = order[overlapping[0]], order[overlapping[0] + 1]
            raise ValueError(
                f"rows {first} and {second}: device {device_id[first]} is online from {on_s[first]:g} to "
                f"{off_s[first]:g} s and from {on_s[second]:g} s: a device's intervals must not overlap"
            )
        joined = same & (gaps_s == 0)
        begin, end = order[np.append(True, ~joined)], order[np.append(~joined, True)]
        for name, column in {"device_id": device_id[begin], "on_s": on_s[begin], "off_s": off_s[end]}.items():
            column.setflags(write=False)
            object.__setattr__(self, name, column)  # a frozen dataclass allows no assignment

    @property
    def whole_days_s(self) -> float:
        """The seconds of the whole days that the trace covers."""
        return DAY_S * math.ceil(float(self.off_s.max()) / DAY_S)


class TraceAvailability(Availability):
    """Devices that are online in the intervals of a trace, which repeats, as the traces of FedScale do.

    Device i has the intervals of `device_ids[i]`; several devices may share an id. An interval that ends with the
    period and one from 0 are joined.
    """

    def __init__(self, trace: Intervals, device_ids: Indices, period_s: float | None = None) -> None:
        """`period_s` is by default the whole days that the trace covers, so that it keeps the hours of the day.

        Raises ValueError for a device without an interval, and for an interval that ends after the period.
        """
        self.period_s = trace.whole_days_s if period_s is None else period_s
        on_s, off_s = trace.on_s.copy(), trace.off_s.copy()
        row = int(off_s.argmax())
        if off_s[row] > self.period_s:
            raise ValueError(
                f"device {trace.device_id[row]} is online until {off_s[row]:g} s, after the period of "
                f"{self.period_s:g} s: give a period of at least {off_s[row]:g} s"
            )
        ids, first, count = np.unique(trace.device_id, return_index=True, return_counts=True)
        position = np.minimum(np.searchsorted(ids, device_ids), len(ids) - 1)
        missing = np.flatnonzero(ids[position] != device_ids)
        if len(missing):
            raise ValueError(
                f"device {device_ids[missing[0]]} has no interval: give each of {len(device_ids)} clients' devices one"
            )
        last = first + count - 1
        wraps = (on_s[first] == 0) & (off_s[last] == self.period_s)
        off_s[last[wraps]] = np.where(count[wraps] == 1, np.inf, self.period_s + off_s[first[wraps]])
        dropped = wraps & (count > 1)  # the first intervals of these devices are now part of their last ones
        self._first, self._count = (first + dropped)[position], (count - dropped)[position]
        self._on_s, self._off_s = on_s, off_s

    def intervals(self, devices: Indices, t_s: float) -> tuple[Times, Times]:
        first, count = self._first[devices], self._count[devices]
        periods = math.floor(t_s / self.period_s)
        # How many of a period's intervals have ended: a binary search in the rows of every device.
        low, high = np.zeros_like(count), count.copy()
        while (searching := low < high).any():
            middle = (low + high) // 2
            ended = searching & (self._off_s[first + np.minimum(middle, count - 1)] <= t_s - periods * self.period_s)
            low, high = np.where(ended, middle + 1, low), np.where(searching & ~ended, middle, high)
        number = periods * count + low  # counted since time 0; an interval of the previous period may still last
        # Ends are compared exactly as they are returned, so that rounding moves no answer past an end.
        number -= self._number(number - 1, first, count)[1] > t_s
        number += self._number(number, first, count)[1] <= t_s
        return self._number(number, first, count)

    def _number(self, number: Indices, first: Indices, count: Indices) -> tuple[Times, Times]:
        """When the intervals of these numbers begin and end."""
        row, start_s = first + number % count, number // count * self.period_s
        return start_s + self._on_s[row], start_s + self._off_s[row]


# -- generated intervals -----------------------------------------------------------------------------------------------


class DailyAvailability(Availability):
    """Devices that are online once a day around an hour of their own, most of them at night; assumed, not measured.

    Phones train while they are charging, idle and on an unmetered network (Bonawitz et al. 2019). Device i has a usual
    hour, the mean of two uniform hours of the day, so that the devices' hours, time zones included, gather around the
    middle of the simulated day: midnight, if time 0 is noon. Its usual share of the day is uniform around `share`,
    within half the distance from `share` to the nearer of 0 and 1; every day's share varies around this by half as
    much, and the middle of the day's interval by an hour in 24. The mean share of time online is `share`. With .35, 4.1
    times as many devices are online at midnight (.56) as at noon (.14); Bonawitz et al. report 4.
    """

    def __init__(self, seed: int, share: float = DEFAULT_SHARE, day_s: float = DAY_S) -> None:
        """Raises ValueError for a share that is not between 0 and 1, or a day that is not positive and finite."""
        if not 0 < share < 1:
            raise ValueError(f"share={share!r} must be above 0 and below 1")
        if not 0 < day_s < math.inf:
            raise ValueError(f"day_s={day_s!r} must be positive and finite")
        self.seed, self.share, self.day_s = seed, share, day_s

    def interval(self, i: int, t_s: float) -> tuple[float, float]:
        i = int(i)  # NumPy integers would warn of the overflows that mix the bits
        today = math.floor(t_s / self.day_s - self._hour(i) + 0.5)
        on_s, off_s = self._of_day(i, today)
        if off_s <= t_s:
            on_s, off_s = self._of_day(i, today + 1)
        return float(on_s), float(off_s)

    def intervals(self, devices: Indices, t_s: float) -> tuple[Times, Times]:
        today = np.floor(t_s / self.day_s - self._hour(devices) + 0.5).astype(np.int64)
        (on_s, off_s), (next_on_s, next_off_s) = self._of_day(devices, today), self._of_day(devices, today + 1)
        return np.where(off_s > t_s, on_s, next_on_s), np.where(off_s > t_s, off_s, next_off_s)

    def _hour(self, devices: Any) -> Any:
        return (_uniform(self.seed, 0, devices) + _uniform(self.seed, 1, devices)) / 2

    def _of_day(self, devices: Any, day: Any) -> tuple[Any, Any]:
        """When the intervals of devices (one, or an array) begin and end on these days of each device.

        A device's day lasts from half a day before its hour to half a day after it, and the interval lies within it.
        """
        spread = min(self.share, 1 - self.share) / 4
        share = self.share + spread * (4 * _uniform(self.seed, 2, devices) - 2)
        share = share + spread * (2 * _uniform(self.seed, 3, devices, day) - 1)
        jitter = np.minimum(MOST_START_JITTER, 0.49 * (1 - share)) * (2 * _uniform(self.seed, 4, devices, day) - 1)
        middle = day + self._hour(devices) + jitter
        return self.day_s * (middle - share / 2), self.day_s * (middle + share / 2)


def _uniform(seed: int, draw: int, *ids: Any) -> Any:
    """A number from 0 to 1 for ids (whole numbers, or arrays of them), by chained SplitMix64 (Steele et al. 2014).

    It hashes ids instead of advancing a generator: any day of any device is computed alone, or many at once.
    """
    mixed = _mixed(seed)
    for id_ in (draw, *ids):
        mixed = _mixed(mixed ^ (id_ & _BITS if isinstance(id_, int) else id_.astype(np.uint64)))
    return (mixed >> 11) * 2.0**-53


def _mixed(x: Any) -> Any:
    x = (x + 0x9E3779B97F4A7C15) & _BITS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _BITS
    return x ^ (x >> 31)
