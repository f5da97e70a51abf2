"""Device tables in files: they round-trip exactly, and what is damaged is refused in a line."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from fedloom.tiers import device_files
from fedloom.tiers.device_files import read_device_table, write_device_table
from fedloom.tiers.devices import COLUMNS, DeviceTable, generate_device_table

SUFFIXES = (".parquet", ".csv")


def small() -> DeviceTable:
    ids, availability = np.array([7, 3]), np.array([1.0, 0.5])
    rates = (np.array(each) for each in ([2e9, 4e9], [1e6, 2e6], [5e5, 1e5]))
    return DeviceTable(ids, *rates, availability, np.array([0.0, 0.1]))


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

    def full(*_table: object, **_options: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", full)
    with pytest.raises(OSError, match="no space"):
        write_device_table(path, generate_device_table(5, np.random.default_rng(0)))
    assert columns(read_device_table(path)) == columns(small())
    assert [p.name for p in tmp_path.iterdir()] == ["devices.parquet"]


def test_whole_numbers_are_taken(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "devices.csv", macs_per_s=[2, 4], availability=[1, 0])
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
        (
            {"macs_per_s": [1.0, 1e19]},
            "column macs_per_s, row 1: 1e+19 must be positive and finite, from 1e-06",
        ),
        ({"up_bytes_per_s": [1e-300, 1.0]}, "column up_bytes_per_s, row 0: 1e-300 must be positive and finite"),
        (
            {"model": ["a", "b"], "maker": ["c", "d"]},
            "column 'model', 'maker' is unknown; a device table has",
        ),
        ({"device_id": [-1, 4]}, "column device_id, row 0: -1 must be 0 or more"),
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


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_column_that_is_there_twice_is_refused(tmp_path: Path, suffix: str) -> None:
    table = pa.table([*columns(small()).values(), [1.0, 2.0]], names=[*COLUMNS, "dropout"])
    path = tmp_path / f"twice{suffix}"
    if suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    else:
        pyarrow.parquet.write_table(table, path)
    with pytest.raises(ValueError, match=r"column dropout is there twice; a device table has device_id"):
        read_device_table(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_is_too_large_names_the_limit(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"large{suffix}"
    write_device_table(path, generate_device_table(50, np.random.default_rng(0)))
    with monkeypatch.context() as fewer:
        fewer.setattr(device_files, "MOST_ROWS", 49)
        with pytest.raises(ValueError, match=r"large\.\w+: has 50 rows; a device table has at most 49"):
            read_device_table(path)
    monkeypatch.setattr(device_files, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match=r"large\.\w+: has \d+ bytes; a device table has at most 1000"):
        read_device_table(path)


def test_a_changed_page_is_seen_by_its_checksum(tmp_path: Path) -> None:
    """A bit of a number that makes another number in its range, which nothing else could tell."""
    path = tmp_path / "flipped.parquet"
    table = generate_device_table(100, np.random.default_rng(0))
    write_device_table(path, table)
    content, number = path.read_bytes(), table.availability[42].tobytes()
    assert content.count(number) == 1
    path.write_bytes(content.replace(number, bytes([number[0] ^ 1]) + number[1:]))
    with pytest.raises(ValueError, match=r"flipped.parquet: cannot be read as a device table \(.*checksum"):
        read_device_table(path)


FLIPS = 400
FLIPPING = """
import json, sys
from pathlib import Path
import numpy as np, pyarrow as pa
from fedloom.tiers.device_files import read_device_table, write_device_table
from fedloom.tiers.devices import COLUMNS, GREATEST_RATE, LEAST_RATE, PROBABILITIES, RATES, generate_device_table

path, checksums, flips = Path(sys.argv[1]), sys.argv[2] == "True", int(sys.argv[3])
rng = np.random.default_rng(11)
table = generate_device_table(200, rng)
write_device_table(path, table)
if path.suffix == ".parquet" and not checksums:
    pa.parquet.write_table(pa.table({name: getattr(table, name) for name in COLUMNS}), path)
whole, refused, taken = path.read_bytes(), [], 0
for flip in range(flips):
    # Every second one in the last part, where the footer of a Parquet file is.
    at = int(rng.integers(len(whole))) if flip % 2 else len(whole) - 1 - int(rng.integers(3000))
    content = bytearray(whole)
    content[at] ^= int(rng.integers(1, 256))
    path.write_bytes(content)
    try:
        read = read_device_table(path)
    except ValueError as error:
        refused.append(str(error))
        continue
    taken += 1
    assert len(set(read.device_id.tolist())) == len(read) <= 400, at
    assert all(((getattr(read, n) >= LEAST_RATE) & (getattr(read, n) <= GREATEST_RATE)).all() for n in RATES), at
    assert all(((getattr(read, n) >= 0) & (getattr(read, n) <= 1)).all() for n in PROBABILITIES), at
print(json.dumps({"refused": refused, "taken": taken, "most_bytes": pa.default_memory_pool().max_memory()}))
"""


@pytest.mark.parametrize(("suffix", "checksums"), [(".csv", False), (".parquet", True), (".parquet", False)])
def test_flipped_bytes_are_refused_or_do_no_harm(tmp_path: Path, suffix: str, checksums: bool) -> None:
    """In a process of its own, as what reads a damaged file may crash, or never end."""
    command = [sys.executable, "-c", FLIPPING, str(tmp_path / f"d{suffix}"), str(checksums), str(FLIPS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found["refused"]) + found["taken"] == FLIPS
    assert all("\n" not in line and len(line) < 600 for line in found["refused"])
    assert len(found["refused"]) > FLIPS // 10
    assert found["most_bytes"] < 1 << 27
