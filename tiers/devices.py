"""Simulated devices: their rates, from a table or generated, and the time that work takes on them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]

RATES = ("macs_per_s", "down_bytes_per_s", "up_bytes_per_s")
PROBABILITIES = ("availability", "dropout")
COLUMNS = ("device_id", *RATES, *PROBABILITIES)
LEAST_RATE, GREATEST_RATE = 1e-6, 1e18
"""The range of rates that a table may hold: a rate outside it is a damaged value, not a device's."""


@dataclass(frozen=True)
class DeviceProfile:
    """The rates and probabilities of one device.

    `macs_per_s` is the sustained rate in training, in multiply-accumulates per second; the link rates are in bytes per
    second, and down is towards the device. `availability` is the probability that the device can be selected in a
    round, `dropout` the probability that a selected device drops out.
    Raises ValueError for rates that are not positive and finite and for probabilities outside [0, 1].
    """

    name: str
    macs_per_s: float
    down_bytes_per_s: float
    up_bytes_per_s: float
    availability: float = 1.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        rates = (self.macs_per_s, self.down_bytes_per_s, self.up_bytes_per_s)
        for column, rate in zip(RATES, rates, strict=True):
            if not 0 < rate < math.inf:
                raise ValueError(f"device {self.name}: {column}={rate!r} must be positive and finite")
        for column, share in zip(PROBABILITIES, (self.availability, self.dropout), strict=True):
            if not 0 <= share <= 1:
                raise ValueError(f"device {self.name}: {column}={share!r} must be a probability, from 0 to 1")


DEFAULT_PROFILE = DeviceProfile("default", macs_per_s=5e9, down_bytes_per_s=2.5e6, up_bytes_per_s=7.5e5)
"""A mid-range phone: 5 GMAC/s, 20 Mbit/s down, 6 Mbit/s up (assumed; the medians of `generate_device_table`)."""


@dataclass(frozen=True, eq=False)
class DeviceTable:
    """Many devices, one array of shape (devices,) per column; the units are those of `DeviceProfile`.

    `device_id` is int64 and unique, the other columns are float64; all are read-only.
    Raises ValueError that names the column and the row of an invalid value.
    """

    device_id: npt.NDArray[np.int64]
    macs_per_s: Column
    down_bytes_per_s: Column
    up_bytes_per_s: Column
    availability: Column
    dropout: Column

    def __post_init__(self) -> None:
        for name in COLUMNS:
            column = read_only_column(name, getattr(self, name))
            object.__setattr__(self, name, column)  # a frozen dataclass allows no assignment
            if column.shape != self.device_id.shape:
                raise ValueError(f"column {name} has shape {column.shape}, but device_id has {self.device_id.shape}")
        if not len(self):
            raise ValueError("column device_id is empty: a device table needs at least one device")
        if len(np.unique(self.device_id)) != len(self):
            raise ValueError("column device_id has the same id twice: ids must be unique")
        rates = f"positive and finite, from {LEAST_RATE:g} to {GREATEST_RATE:g}"
        ranges = {"device_id": (0, np.inf, "0 or more"), **dict.fromkeys(RATES, (LEAST_RATE, GREATEST_RATE, rates))}
        for name in COLUMNS:
            least, most, allowed = ranges.get(name, (0, 1, "a probability, from 0 to 1"))
            column = getattr(self, name)
            check_rows(name, column, (column >= least) & (column <= most), allowed)

    def __len__(self) -> int:
        return len(self.device_id)

    def profile(self, i: int) -> DeviceProfile:
        """The device in row `i`, named after its id, in constant time; raises IndexError outside 0 to len - 1."""
        if not 0 <= i < len(self):
            raise IndexError(f"device row {i} is outside 0 to {len(self) - 1}")
        values = (float(getattr(self, name)[i]) for name in (*RATES, *PROBABILITIES))
        return DeviceProfile(f"device{int(self.device_id[i])}", *values)


def generate_device_table(num_devices: int, rng: np.random.Generator) -> DeviceTable:
    """Generates devices that vary as phones do, so that no download is needed; assumed values, not a measured trace.

    Rates are log-normal. Compute has the median 5 GMAC/s and sigma 0.8 (90 % within a factor of 3.7); download has the
    median 20 Mbit/s and upload 6 Mbit/s, both sigma 1.0 (a factor of 5.2), and their logarithms have the correlation
    0.7, since they share a link. Availability (median 0.62) and dropout (median 0.05) are logit-normal. For the same
    seed, a larger table begins with the devices of a smaller one. Raises ValueError for fewer than one device.
    """
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices} must be at least 1")
    z_DF = rng.standard_normal((num_devices, 5))  # one row per device, so that a larger table extends a smaller one
    link, independent = z_DF[:, 1], z_DF[:, 2]
    return DeviceTable(
        device_id=np.arange(num_devices, dtype=np.int64),
        macs_per_s=DEFAULT_PROFILE.macs_per_s * np.exp(0.8 * z_DF[:, 0]),
        down_bytes_per_s=DEFAULT_PROFILE.down_bytes_per_s * np.exp(link),
        up_bytes_per_s=DEFAULT_PROFILE.up_bytes_per_s * np.exp(0.7 * link + math.sqrt(1 - 0.7**2) * independent),
        availability=_logistic(0.5 + z_DF[:, 3]),
        dropout=_logistic(-3.0 + 0.7 * z_DF[:, 4]),
    )


def read_only_column(name: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    """A table's column as a read-only array, `device_id` as int64 and others as float64; ValueError if invalid."""
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in ("iu" if name == "device_id" else "iuf"):
        kind = "whole numbers" if name == "device_id" else "numbers"
        raise ValueError(f"column {name} must be a list of {kind}, not {array.dtype} of shape {array.shape}")
    if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"column {name} has {array.max()}: give whole numbers of at most 63 bits")
    column = array.astype(np.int64 if name == "device_id" else np.float64, copy=False).view()
    column.setflags(write=False)
    return column


def check_rows(name: str, column: npt.NDArray[Any], valid: npt.NDArray[np.bool_], allowed: str) -> None:
    """Raises ValueError that names the first row of a column that is not valid."""
    if not valid.all():
        row = int(np.argmin(valid))
        raise ValueError(f"column {name}, row {row}: {column[row]:g} must be {allowed}")


def _logistic(x: Column) -> Column:
    return 1 / (1 + np.exp(-x))


# -- simulated time, which does not depend on the hardware of the simulation ------------------------------------------

TRAINING_FACTOR = 3.0
"""Cost of a training step in forward passes: one forward pass, and two for the gradients of inputs and of weights."""
EVALUATION_FACTOR = 1.0
"""Cost of an evaluation step in forward passes."""


def client_time_s(
    profile: DeviceProfile, macs: float, bytes_down: float, bytes_up: float, factor: float = TRAINING_FACTOR
) -> float:
    """Simulated seconds of one client's work: download, then compute, then upload.

    The time is bytes_down / down_bytes_per_s + factor * macs / macs_per_s + bytes_up / up_bytes_per_s, where `macs`
    counts the *forward* passes of all samples. Evaluation has `factor=EVALUATION_FACTOR`. Raises ValueError for an
    amount that is negative or not finite.
    """
    amounts = {"macs": macs, "bytes_down": bytes_down, "bytes_up": bytes_up, "factor": factor}
    for name, amount in amounts.items():
        if not 0 <= amount < math.inf:
            raise ValueError(f"{name}={amount!r} must be a finite number that is not negative")
    down_s = bytes_down / profile.down_bytes_per_s
    compute_s = factor * macs / profile.macs_per_s
    return down_s + compute_s + bytes_up / profile.up_bytes_per_s


def jittered(profile: DeviceProfile, sigma: float, rng: np.random.Generator) -> DeviceProfile:
    """The device in one round: its compute and its link, each times a log-normal factor of median 1 and this sigma."""
    compute, link = np.exp(sigma * rng.standard_normal(2)).tolist()
    return replace(
        profile,
        macs_per_s=profile.macs_per_s * compute,
        down_bytes_per_s=profile.down_bytes_per_s * link,
        up_bytes_per_s=profile.up_bytes_per_s * link,
    )


def fair_rates(most_bytes_per_s: Sequence[float], link_bytes_per_s: float) -> list[float]:
    """Max-min fair shares of a link by transfers that can take at most these rates, by progressive filling.

    No transfer gets more than it can take; what slow ones leave is shared equally by the others (Bertsekas and Gallager
    1992, Sec. 6.5).
    """
    rates, left = [0.0] * len(most_bytes_per_s), link_bytes_per_s
    for served, i in enumerate(sorted(range(len(rates)), key=lambda i: most_bytes_per_s[i])):
        rates[i] = min(most_bytes_per_s[i], left / (len(rates) - served))
        left -= rates[i]
    return rates


def done_by(
    profile: DeviceProfile, macs: float, bytes_down: float, bytes_up: float, until_s: float, factor: float = 1.0
) -> tuple[float, float, float]:
    """The shares of the download, the computation and the upload that a client has done after `until_s` seconds.

    The amounts are those of `client_time_s`.
    """
    shares, left_s = [], until_s
    for phase in ((0.0, bytes_down, 0.0), (macs, 0.0, 0.0), (0.0, 0.0, bytes_up)):
        phase_s = client_time_s(profile, *phase, factor=factor)
        shares.append(1.0 if phase_s <= left_s else left_s / phase_s)
        left_s = max(0.0, left_s - phase_s)
    return shares[0], shares[1], shares[2]


@dataclass(frozen=True)
class VirtualClock:
    """Simulated seconds since the start of the run; immutable, stored in checkpoints and independent of real time."""

    now_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.now_s < math.inf:
            raise ValueError(f"now_s={self.now_s!r} must be a finite number that is not negative")

    def after_round(
        self, client_times_s: Sequence[float], deadline_s: float | None = None
    ) -> tuple["VirtualClock", float]:
        """The clock after a synchronous round, and the duration of the round in seconds.

        The round lasts as long as its slowest client, but at most until the deadline. A client that never answers has
        an infinite time, which requires a deadline. A round without clients takes 0 s.
        Raises ValueError for a negative or undefined time, a deadline that is not positive, or an infinite round.
        """
        if deadline_s is not None and not deadline_s > 0:
            raise ValueError(f"deadline_s={deadline_s!r} must be above 0, or None for no deadline")
        for position, time_s in enumerate(client_times_s):
            if not time_s >= 0:
                raise ValueError(f"client time {time_s!r} s at position {position} must not be negative or undefined")
        round_s = float(max(client_times_s, default=0.0))
        if deadline_s is not None:
            round_s = min(round_s, float(deadline_s))
        if math.isinf(round_s):
            raise ValueError("a client never answers and the round has no deadline: set deadline_s")
        return VirtualClock(self.now_s + round_s), round_s
