"""A writer that is killed at any moment loses no committed round and leaves a data set that can be read."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import pyarrow.parquet as pq

from fedloom.platform.results.manifest import problems
from fedloom.platform.results.writer import RunWriter

CLIENTS = 5
ROWS_PER_FILE = 500

# The first process imports once and forks a writer for every line it is sent: a kill costs no new interpreter.
PROGRAM = f"""
import json, os, sys
from pathlib import Path
import pyarrow as pa
from fedloom.platform.results.writer import RunWriter
os.fsync = lambda descriptor: None  # a kill, unlike a power failure, loses nothing that was written; and it is slow
assert not {{"torch", "pandas"}} & set(sys.modules), "a writer needs neither"
pa.array([1])  # loads what pyarrow loads late, once for all writers

def tell(what, value):
    os.write(1, (json.dumps([what, value]) + "\\n").encode())  # short: whole or not at all

def write_rounds(root, position):
    writer = RunWriter.resume(Path(root), "demo", "r1", position, 0.002, {ROWS_PER_FILE})
    number = position.get("rounds", 0)
    while True:
        writer.add("rounds", stage="train", round=number, loss=float("nan"))
        for client in range({CLIENTS}):
            writer.add("clients", stage="train", round=number, client_id=client)
        tell("position", writer.commit())
        number += 1

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        try:
            write_rounds(*json.loads(line))
        finally:
            os._exit(1)
    tell("pid", pid)
    tell("status", os.waitpid(pid, 0)[1])
"""


class Killer:
    """Starts writers and kills them."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    def run_until_killed(
        self, root: Path, position: dict[str, int], rounds: int, delay_s: float
    ) -> tuple[dict[str, int], int]:
        """The position of the last round reported as committed, and how many were reported."""
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps([str(root), position]) + "\n").encode())
        self.process.stdin.flush()
        told: dict[str, list[Any]] = {"pid": [], "position": [], "status": []}
        while not told["pid"] or len(told["position"]) < rounds:
            self._hear(told)
            assert not told["status"], "the writer ended by itself"
        time.sleep(delay_s)
        os.kill(told["pid"][0], signal.SIGKILL)
        while not told["status"]:
            self._hear(told)
        assert told["status"] == [signal.SIGKILL], "the writer ended by itself"
        return ([position, *told["position"]])[-1], len(told["position"])

    def _hear(self, told: dict[str, list[Any]]) -> None:
        assert self.process.stdout is not None
        what, value = json.loads(self.process.stdout.readline())
        told[what].append(value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)  # a failed assertion must not leave a writer behind
        self.process.communicate()


def column(root: Path, table: str, name: str) -> list[int]:
    values: list[int] = pq.read_table(root / table)[name].to_pylist()
    return values


def check_restored(root: Path, position: dict[str, int]) -> None:
    expected = list(range(position.get("rounds", 0)))
    assert column(root, "rounds", "round") == expected
    assert column(root, "clients", "round") == [number for number in expected for _ in range(CLIENTS)]
    assert column(root, "clients", "client_id") == list(range(CLIENTS)) * len(expected)
    assert not [path for path in root.rglob("*") if path.name.startswith((".", "journal"))]


def test_100_kills_lose_no_committed_round(tmp_path: Path) -> None:
    rng = random.Random(1)
    writer = RunWriter.create(tmp_path, "demo", "r1")
    writer.manifest.begin()
    writer.close()
    position: dict[str, int] = {}
    killed_while_restoring = 0
    with Killer() as killer:
        for _ in range(100):
            # Without a reported round to wait for, the kill often meets the restoration itself.
            wanted = rng.choice([0, 0, 1, 2, 3])
            position, reported = killer.run_until_killed(tmp_path, position, wanted, rng.random() * 0.01)
            killed_while_restoring += reported == 0
            assert problems(writer.paths) == []
            seen = column(tmp_path, "rounds", "round")  # what a reader finds right after the kill
            assert seen == list(range(len(seen)))
            if rng.random() < 0.1:  # else the next writer restores
                RunWriter.resume(tmp_path, "demo", "r1", position, rows_per_file=ROWS_PER_FILE)
                check_restored(tmp_path, position)
    RunWriter.resume(tmp_path, "demo", "r1", position, rows_per_file=ROWS_PER_FILE).close()
    check_restored(tmp_path, position)
    assert position["rounds"] > 100
    assert killed_while_restoring > 5
