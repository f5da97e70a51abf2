"""Device tables: values checked on the way in, files that round-trip exactly, and a seeded generator."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from fedloom.tiers.devices import (
    COLUMNS,
    DEFAULT_PROFILE,
    DeviceProfile,
    DeviceTable,
    generate_device_table,
    read_device_table,
    write_device_table,
)

SUFFIXES = (".parquet", ".csv")


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


def write_raw(path: Path, **changes: list[object] | None) -> Path:
    """The small table as a file, with columns replaced, added, or (None) dropped."""
    merged: dict[str, object] = {**columns(small()), **changes}
    table = pa.table({name: values for name, values in merged.items() if values is not None})
    if path.suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    else:
        pyarrow.parquet.write_table(table, path)
    return path


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


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_table_comes_back_exactly(tmp_path: Path, suffix: str) -> None:
    table = generate_device_table(200, np.random.default_rng(3))
    path = tmp_path / f"devices{suffix}"
    write_device_table(path, small())
    write_device_table(path, table)
    assert columns(read_device_table(path)) == columns(table)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "devices.parquet"
    write_device_table(path, small())

    def full(table: object, stream: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", full)
    with pytest.raises(OSError, match="no space"):
        write_device_table(path, generate_device_table(5, np.random.default_rng(0)))
    assert columns(read_device_table(path)) == columns(small())
    assert [p.name for p in tmp_path.iterdir()] == ["devices.parquet"]


def test_other_columns_are_ignored_and_whole_numbers_taken(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "devices.csv", model=["a", "b"], macs_per_s=[2, 4], availability=[1, 0])
    assert columns(read_device_table(path)) == {
        **columns(small()),
        "macs_per_s": [2.0, 4.0],
        "availability": [1.0, 0.0],
    }


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"up_bytes_per_s": None}, "column up_bytes_per_s is missing; a device table has device_id, macs_per_s"),
        ({"dropout": None, "availability": None}, "column availability, dropout is missing"),
        ({"macs_per_s": [1.0, -2.0]}, "column macs_per_s, row 1: -2 must be positive and finite"),
        ({"down_bytes_per_s": [0, 1]}, "column down_bytes_per_s, row 0: 0 must be positive and finite"),
        ({"up_bytes_per_s": [1.0, math.inf]}, "column up_bytes_per_s, row 1: inf must be positive"),
        ({"availability": [1.0, 1.5]}, "column availability, row 1: 1.5 must be a probability"),
        ({"dropout": [-0.5, 0.0]}, "column dropout, row 0: -0.5 must be a probability"),
        ({"macs_per_s": ["fast", "slow"]}, "column macs_per_s must hold numbers, not string"),
        ({"macs_per_s": [1.0, None]}, "column macs_per_s has 1 empty values"),
        ({"device_id": [4, 4]}, "column device_id has the same id twice"),
        ({"device_id": [0.5, 1.5]}, "column device_id must be a list of whole numbers"),
        ({name: [] for name in COLUMNS}, "column device_id"),
    ],
)
def test_a_bad_column_is_named_with_its_file(
    tmp_path: Path, suffix: str, changes: dict[str, list[object] | None], message: str
) -> None:
    path = write_raw(tmp_path / f"bad{suffix}", **changes)
    with pytest.raises(ValueError, match="bad") as error:
        read_device_table(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00\x01,\xff\n\xff,\xff\n", b"PAR1 garbage PAR1", b"a,b\n1,2\n3\n"]
)
def test_a_damaged_file_is_one_line(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"damaged{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged") as error:
        read_device_table(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_a_truncated_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "cut.parquet"
    write_device_table(path, generate_device_table(500, np.random.default_rng(0)))
    whole = path.read_bytes()
    for share in (0.2, 0.5, 0.99):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(ValueError, match="cannot be read as a device table") as error:
            read_device_table(path)
        assert "\n" not in str(error.value)


def test_a_missing_file_and_another_kind_of_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.parquet: there is no such file"):
        read_device_table(tmp_path / "none.parquet")
    with pytest.raises(ValueError, match=r"devices\.txt: a device table is a \.parquet or a \.csv file"):
        read_device_table(tmp_path / "devices.txt")
    with pytest.raises(ValueError, match=r"devices\.txt"):
        write_device_table(tmp_path / "devices.txt", small())


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
