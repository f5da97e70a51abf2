"""A device's rate from measured training, by hand and as the inverse of the simulated clock."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fedloom.tiers.calibration import MeasuredTraining, macs_per_s_of
from fedloom.tiers.device_files import read_device_table, read_measured_training, write_device_table
from fedloom.tiers.devices import DeviceProfile, client_time_s

LINK = DeviceProfile("", 1.0, down_bytes_per_s=20.0, up_bytes_per_s=10.0)


def test_rates_by_hand(tmp_path: Path) -> None:
    """Device 4: 3 x 1000 MACs x 200 samples in 6 s; device 9: 3 x 1000 MACs x 2 epochs of 50 samples in 1 s."""
    path = tmp_path / "phones.csv"
    path.write_text("device_id,samples,epochs,seconds\n4,100,1,2\n9,50,2,1\n4,100,1,4\n")
    table = read_measured_training(path).devices(1000.0, LINK)
    assert table.device_id.tolist() == [4, 9]
    assert table.macs_per_s.tolist() == [100_000.0, 300_000.0]
    assert table.profile(1) == DeviceProfile("device9", 300_000.0, 20.0, 10.0)
    write_device_table(tmp_path / "devices.csv", table)
    assert read_device_table(tmp_path / "devices.csv").profile(0) == table.profile(0)


@given(st.floats(1.0, 1e15), st.floats(1e-3, 1e6), st.sampled_from([1.0, 3.0]))
def test_the_clock_gives_the_measured_time_again(macs: float, seconds: float, factor: float) -> None:
    profile = DeviceProfile("", macs_per_s_of(macs, seconds, factor), 1.0, 1.0)
    assert client_time_s(profile, macs, 0.0, 0.0, factor) == pytest.approx(seconds)


@pytest.mark.parametrize(("macs", "seconds"), [(0.0, 1.0), (1.0, 0.0), (1.0, math.inf), (math.nan, 1.0)])
def test_nothing_is_calibrated_by_nothing(macs: float, seconds: float) -> None:
    with pytest.raises(ValueError, match="must be positive and finite"):
        macs_per_s_of(macs, seconds)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([1], [0.0], [1], [2.0]), "column samples, row 0: 0 must be positive and finite"),
        (([1, 2], [5, 5], [1, 1], [2.0, math.inf]), "column seconds, row 1: inf must be positive and finite"),
        (([1, -2], [5, 5], [1, 1], [2.0, 1.0]), "column device_id, row 1: -2 must be 0 or more"),
        (([1, 2], [5], [1, 1], [2.0, 1.0]), "column samples has 1 values"),
        (([], [], [], []), "column device_id"),
    ],
)
def test_a_bad_measurement_is_named(columns: tuple[list[float], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeasuredTraining(*(np.array(column) for column in columns))
