"""A device's MAC/s from measured training: the inverse of the simulated clock's `client_time_s`."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedloom.tiers.devices import TRAINING_FACTOR, Column, DeviceProfile, DeviceTable, check_rows, read_only_column

MEASURED_COLUMNS = ("device_id", "samples", "epochs", "seconds")
"""The columns of a table of measured training."""


def macs_per_s_of(macs: float, seconds: float, factor: float = TRAINING_FACTOR) -> float:
    """A device's rate in MAC/s, given the forward MACs of measured work and the seconds that it took.

    `client_time_s` of the same work at this rate, without transfers, is `seconds` again. Evaluation has
    `factor=EVALUATION_FACTOR`. Raises ValueError for amounts that are not positive and finite.
    """
    for name, amount in {"macs": macs, "seconds": seconds, "factor": factor}.items():
        if not 0 < amount < math.inf:
            raise ValueError(f"{name}={amount!r} must be positive and finite")
    return factor * macs / seconds


@dataclass(frozen=True, eq=False)
class MeasuredTraining:
    """Measured trainings of one network, one per row; a device may have several.

    `samples` are the device's training samples, `seconds` those of `epochs` passes over them, without transfers.
    Raises ValueError that names the column and the row of a value that is not positive and finite.
    """

    device_id: npt.NDArray[np.int64]
    samples: Column
    epochs: Column
    seconds: Column

    def __post_init__(self) -> None:
        for name in MEASURED_COLUMNS:
            column = read_only_column(name, getattr(self, name))
            object.__setattr__(self, name, column)  # a frozen dataclass allows no assignment
            if column.shape != self.device_id.shape or not len(column):
                raise ValueError(f"column {name} has {len(column)} values: give each column equally many, at least one")
            if name == "device_id":
                check_rows(name, column, column >= 0, "0 or more")
            else:
                check_rows(name, column, (column > 0) & (column < np.inf), "positive and finite")

    def devices(self, forward_macs: float, like: DeviceProfile) -> DeviceTable:
        """The devices, ascending by id, each with one rate from all its measurements together.

        `forward_macs` are those of the network's forward pass of one sample; links and probabilities are those of
        `like`.
        """
        ids, row = np.unique(self.device_id, return_inverse=True)
        work, seconds = (np.bincount(row, values) for values in (self.samples * self.epochs, self.seconds))
        rates = [macs_per_s_of(forward_macs * w, s) for w, s in zip(work.tolist(), seconds.tolist(), strict=True)]
        everywhere = (like.down_bytes_per_s, like.up_bytes_per_s, like.availability, like.dropout)
        return DeviceTable(ids, np.array(rates), *(np.full(len(ids), value) for value in everywhere))
