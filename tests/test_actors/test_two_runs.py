"""Two runs at once on a cluster that has CPUs for one: the second says that it waits in line, and both are done."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from fedloom.experiments.runs.launch import _through_server
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import RoundProgress
from fedloom.platform.results.paths import list_runs
from fedloom.platform.results.status import read_status
from fedloom.platform.results.tables import read_table

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PATIENCE_S = 300.0
OVERRIDES = (
    "experiment=fedavg_digits",
    "data.num_clients=8",
    "tiers.paths=100",
    "method.train.rounds=1",
    "method.train.epochs=1",
    "method.train.clients_per_round=2",
    "method.train.weighting=gated:mean",
)
GATED = '''"""A weighting rule that counts all alike, once the gate is open."""

import time
from pathlib import Path


def mean(work):
    while work.samples > 10 and not Path(__file__).with_name("open").exists():  # fewer: it is tried before the run
        time.sleep(0.05)
    return dict.fromkeys(work.seen_by_tensor, 1.0)
'''


@pytest.fixture
def address() -> Iterator[str]:
    """A cluster of one CPU, whose files are kept away from other clusters'."""
    folder = tempfile.mkdtemp(prefix="fl-")  # short: the paths of sockets must not be long
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        node = {"num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            yield cluster.address
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def until(condition: Callable[[], bool], *processes: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert all(process.poll() is None for process in processes), "a run ended by itself"
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.05)


def is_at_work(results: Path) -> bool:
    """Whether a run has its actors, and trains."""
    return any(run.status.exists() and read_status(run.status).stage for run in list_runs(results))


@pytest.mark.usefixtures("no_ray_cluster")
def test_the_second_of_two_runs_says_that_it_waits_in_line_and_both_are_done(address: str, tmp_path: Path) -> None:
    (tmp_path / "gated.py").write_text(GATED)

    def start(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "fedloom.experiments.cli", "run", *OVERRIDES]
        with open(tmp_path / f"{name}.out", "w") as out:
            return subprocess.Popen(
                [*command, f"ray.address={address}", f"results={tmp_path / name}"],
                cwd=tmp_path,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
            )

    processes = [start("first")]
    try:
        until(lambda: is_at_work(tmp_path / "first"), *processes)
        processes.append(start("second"))
        until(lambda: "waiting" in (tmp_path / "second.out").read_text(), *processes)
        (tmp_path / "open").touch()
        errors = [process.communicate(timeout=PATIENCE_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], errors
    first, second = ((tmp_path / f"{name}.out").read_text() for name in ("first", "second"))
    said = re.findall(r"^.*waiting.*$", first + second, re.MULTILINE)
    assert said == [
        "waiting for other runs on this cluster: 0 of 1 CPUs are free; for up to 300 s (ray.wait_s)",
    ]
    assert second.startswith(said[0])
    assert all("\nfinished: " in out for out in (first, second))
    (one,), (other,) = (read_table(tmp_path / name, "runs").to_dict("records") for name in ("first", "second"))
    assert one["ended"] < other["started"]


class Holds:
    """Takes CPUs."""

    def ready(self) -> bool:
        return True


class LetsGo:
    """A run's view that frees the CPUs when the run says that it waits for them."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self.told: list[str] = []

    def started(self, run_id: str, supernet_of: str) -> None:
        self.told.append("started")

    def round(self, progress: RoundProgress) -> None:
        self.told.append(f"round {progress.round}")

    def waiting(self, message: str) -> None:
        self.told.append(message)
        ray.kill(self.holder)


def test_a_run_that_another_one_overtakes_after_its_driver_looked_says_so_too(
    tiny_config: Callable[..., RunConfig], ray_cluster: None
) -> None:
    holder = ray.remote(Holds).options(num_cpus=2).remote()
    ray.get(holder.ready.remote(), timeout=60)
    view = LetsGo(holder)
    end = _through_server(tiny_config(), view, None)
    assert end.kind == "done", end.message
    said = "waiting for other runs on this cluster: 0 of 2 CPUs are free; for up to 300 s (ray.wait_s)"
    assert view.told[:3] == ["started", said, "round 0"]
    assert view.told.count(said) == 1
