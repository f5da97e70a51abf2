"""Device tables: values checked on the way in, and a seeded generator."""

import dataclasses
import math

import numpy as np
import pytest

from fedloom.tiers.devices import (
    COLUMNS,
    DEFAULT_PROFILE,
    DeviceProfile,
    DeviceTable,
    generate_device_table,
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
