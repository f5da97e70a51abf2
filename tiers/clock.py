"""Simulated time: the duration of a round on the simulated devices, independent of the hardware of the simulation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.tiers.devices import DeviceProfile

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
        _check_times(client_times_s, deadline_s)
        round_s = float(max(client_times_s, default=0.0))
        if deadline_s is not None:
            round_s = min(round_s, float(deadline_s))
        if math.isinf(round_s):
            raise ValueError("a client never answers and the round has no deadline: set deadline_s")
        return VirtualClock(self.now_s + round_s), round_s


def _check_times(client_times_s: Sequence[float], deadline_s: float | None) -> None:
    if deadline_s is not None and not deadline_s > 0:
        raise ValueError(f"deadline_s={deadline_s!r} must be above 0, or None for no deadline")
    for position, time_s in enumerate(client_times_s):
        if not time_s >= 0:
            raise ValueError(f"client time {time_s!r} s at position {position} must not be negative or undefined")
