"""Rows to be written, and what is read back of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fedloom.platform.results.tables import read_table
from fedloom.platform.results.writer import RunWriter


@pytest.fixture(scope="session")
def add_rounds() -> Callable[..., dict[str, int]]:
    """Adds rounds with clients and commits each; gives the position after the last."""

    def add(writer: RunWriter, start: int, stop: int, clients: int = 3) -> dict[str, Any]:
        for number in range(start, stop):
            writer.add("rounds", stage="train", round=number, loss=number / 7)
            for client in range(clients):
                writer.add("clients", stage="train", round=number, client_id=client)
            position = writer.commit()
        return position

    return add


@pytest.fixture(scope="session")
def rounds() -> Callable[[Path], list[int]]:
    """Reads the numbers of the rounds of run r1 in a folder of results."""

    def read(root: Path) -> list[int]:
        return [int(number) for number in read_table(root, "rounds", run_id="r1")["round"]]

    return read


@pytest.fixture(scope="session")
def rows_of_parts() -> Callable[[Path, str], list[int]]:
    """Counts the rows of each file of a table."""

    def count(root: Path, table: str) -> list[int]:
        return [pq.read_metadata(path).num_rows for path in sorted(root.glob(f"{table}/*/*/*.parquet"))]

    return count
