"""What goes wrong on purpose: clients that raise, kill their actor or sleep for ever, and somebody presses Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ray import cloudpickle

from fedloom.actors.placement import ActorGroup
from fedloom.actors.pool import ActorPool
from fedloom.platform.averaging.average import Update
from fedloom.platform.clients.assignments import Assignment, ClientResult, Task
from fedloom.platform.clients.execution import (
    Chunk,
    ChunkResult,
    Executor,
    SerialExecutor,
    SharedWeights,
    make_chunks,
)
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.config import ExecutorConfig, FailuresConfig, RunConfig
from fedloom.platform.federation.loop import RunFailedError, merge_chunks
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.results.paths import list_runs
from fedloom.platform.results.status import read_status
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import start_run
from fedloom.platform.spaces.slices import Slice, Weights

pytestmark = pytest.mark.ray

# The workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

Config = Callable[..., RunConfig]
CLIENT_TIMEOUT_S = 2.0
GROUP = ActorGroup("clients", 1, 1.0, 0.0)
OLD = {"w": torch.zeros(3)}
PLACES = {"w": Slice("w")}


@dataclass(frozen=True)
class Raises:
    """A client whose own code fails."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        raise LookupError("the battery is gone")


@dataclass(frozen=True)
class KillsItsActor:
    """A client that takes its whole process with it, every time."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


@dataclass(frozen=True)
class SleepsForEver:
    """A client that never answers."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        while True:
            time.sleep(1)


@dataclass(frozen=True)
class Adds:
    """A client that returns its own value."""

    value: float

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        update = Update({"w": torch.full((3,), self.value)}, PLACES, {"w": 1.0})
        return ClientResult(update=update, samples=1, loss=self.value)


@dataclass(frozen=True)
class Sabotage:
    """Puts another task in the place of the second client's in round 0 of the first stage."""

    executor: Executor
    task: Callable[[Task], Task]

    def run(self, chunks: Sequence[Chunk], weights: SharedWeights) -> Iterator[ChunkResult]:
        return self.executor.run([self._changed(i, chunk) for i, chunk in enumerate(chunks)], weights)

    def _changed(self, index: int, chunk: Chunk) -> Chunk:
        first = chunk.assignments[0]
        if index != 1 or first.stage != "supernet" or first.round != 0:
            return chunk
        changed = replace(first, task=self.task(first.task))
        return replace(chunk, assignments=(changed, *chunk.assignments[1:]))

    def close(self) -> None:
        self.executor.close()


def run_with(config: RunConfig, task: Callable[[Task], Task], serial: bool = False) -> str:
    """Runs the configuration with one sabotaged client."""

    def make(world: World) -> Sabotage:
        if serial:
            return Sabotage(SerialExecutor(Worker(world.spec)), task)
        failures = config.executor.failures
        return Sabotage(ActorPool(world.spec, [GROUP], actor_attempts=failures.actor_attempts), task)

    return start_run(config, make)


def failing(tiny_config: Config, policy: str, **failures: Any) -> RunConfig:
    return tiny_config(executor=ExecutorConfig(failures=FailuresConfig(policy=policy, **failures)))


def first_round(config: RunConfig) -> Any:
    rows = read_table(Path(config.results), "clients")
    return rows[(rows["stage"] == "supernet") & (rows["round"] == 0)]


# -- a client that raises ----------------------------------------------------------------------------------------------


def test_policy_tolerate_leaves_the_client_out_and_gives_what_serial_gives(
    tiny_config: Config, ray_cluster: None, assert_same_run: Callable[..., None]
) -> None:
    config = failing(tiny_config, "tolerate", max_share=0.25)
    on_actors = run_with(config, lambda _: Raises())
    rows = first_round(config)
    assert sorted(rows["status"]) == ["failed", "ok", "ok", "ok"]
    row = rows[rows["status"] == "failed"].iloc[0]
    assert re.fullmatch(r"LookupError: the battery is gone \(line \d+ of test_failures\.py\)", row["error"])
    assert row["traceback"].startswith("Traceback"), "it came over from the actor"
    assert row["traceback"].endswith("LookupError: the battery is gone")
    serial = run_with(config, lambda _: Raises(), serial=True)
    rounds = read_table(Path(config.results), "rounds", run_id=on_actors)
    assert rounds["clients_failed"].tolist()[:2] == [1, 0]
    assert rounds["clients_ok"].tolist()[:2] == [3, 4]
    assert read_table(Path(config.results), "runs")["status"].tolist() == ["done", "done"]
    assert_same_run((config.results, serial), (config.results, on_actors))


# -- a client that kills its actor -------------------------------------------------------------------------------------


def test_an_actor_that_dies_of_the_same_client_each_time_fails_that_client_and_policy_stop_ends_the_run(
    tiny_config: Config, ray_cluster: None
) -> None:
    config = failing(tiny_config, "stop", actor_attempts=2)
    with pytest.raises(
        RunFailedError, match=r"supernet, round 1: client \d+ \(tier\d\) failed: the client actor ended 2"
    ):
        run_with(config, lambda _: KillsItsActor())
    rows = first_round(config)
    assert sorted(rows["status"]) == ["failed", "ok", "ok", "ok"]
    row = rows[rows["status"] == "failed"].iloc[0]
    assert "the client actor ended 2 times" in row["error"]
    assert f"client {row['client_id']} ({row['tier']}, supernet round 1, KillsItsActor)" in row["error"]
    assert f"node {os.uname().nodename} (pid " in row["error"], "the node is not named"
    assert re.search(r"died|crash|SIGKILL|connection", row["error"]), "Ray's cause is not named"
    assert read_status(list_runs(Path(config.results))[0].status).state == "failed"
    assert len(read_table(Path(config.results), "rounds")) == 0


# -- a client that never answers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory, own_cache: Path) -> Iterator[ActorPool]:
    """One actor with little patience."""
    spec = build_world(small_run(tmp_path_factory.mktemp("pool"))).spec
    pool = ActorPool(spec, [GROUP], client_timeout_s=CLIENT_TIMEOUT_S)
    yield pool
    pool.close()


def small_run(folder: Path) -> RunConfig:
    from fedloom.experiments.runs.configuration import compose_config

    few = ["tiers.count=2", "tiers.paths=1000", "space.stem_channels=8", "data.num_clients=8"]
    return compose_config(["experiment=fedoras_digits", f"results={folder}", *few])


def planned(tasks: Sequence[Task]) -> list[Assignment]:
    return [Assignment("train", 3, client_id, "tier1", task) for client_id, task in enumerate(tasks)]


@pytest.mark.slow
@pytest.mark.parametrize(("chunk_size", "sleeper"), [(1, 1), (3, 0), (3, 1), (3, 2)])
def test_a_client_that_sleeps_for_ever_is_reported_and_alone_is_dropped(
    pool: ActorPool, chunk_size: int, sleeper: int, caplog: pytest.LogCaptureFixture
) -> None:
    tasks: list[Task] = [Adds(0.1 * (i + 1)) for i in range(6)]
    asleep = planned([SleepsForEver() if i == sleeper else task for i, task in enumerate(tasks)])
    chunks = make_chunks(asleep, chunk_size)
    # First without the sleeper, which also waits until the actor that replaced the last test's has started.
    awake = make_chunks(planned(tasks), chunk_size)
    without = [replace(c, assignments=tuple(a for a in c.assignments if a.client_id != sleeper)) for c in awake]
    expected = merge_chunks(pool.run([c for c in without if c.assignments], SharedWeights(OLD, "w@0")))
    started_s = time.time()
    whole = merge_chunks(pool.run(chunks, SharedWeights(OLD, "w@1")))
    gave_up_s = [r.created for r in caplog.records if "no answer within" in r.message]
    assert len(gave_up_s) == 1
    assert CLIENT_TIMEOUT_S <= gave_up_s[0] - started_s < CLIENT_TIMEOUT_S + 5
    statuses = [report.status for report in whole.client_results]
    assert statuses == ["timed_out" if i == sleeper else "ok" for i in range(6)]
    assert [report.client_id for report in whole.client_results] == list(range(6))
    assert whole.client_results[sleeper].error == "no answer within 2 s; its actor was replaced"
    (named,) = {r.message for r in caplog.records if "has been at work for" in r.message}
    since = r"[12] s, since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, on node \S+/\w{8} \(pid \d+\); the limit is 2 s"
    who = rf"client {sleeper} \(tier1, train round 4, SleepsForEver\)"
    assert re.fullmatch(f"{who} has been at work for {since}", named), "found from the log alone, before its time is up"
    assert torch.equal(whole.sums.finish(OLD).weights["w"], expected.sums.finish(OLD).weights["w"])


@pytest.mark.slow
def test_a_stack_that_hangs_is_given_up_after_twice_the_time_and_who_hangs_is_found(
    pool: ActorPool, caplog: pytest.LogCaptureFixture
) -> None:
    tasks: list[Task] = [Adds(0.1), Adds(0.2), SleepsForEver(), Adds(0.4), Adds(0.5), Adds(0.6)]
    started_s = time.time()
    (result,) = pool.run(make_chunks(planned(tasks), 1, stack=32), SharedWeights(OLD, "w@3"))
    (given_up_s,) = [r.created for r in caplog.records if "its clients are trained one by one" in r.message]
    assert 2 * CLIENT_TIMEOUT_S <= given_up_s - started_s < 2 * CLIENT_TIMEOUT_S + 5
    assert [report.status for report in result.client_results] == ["ok", "ok", "timed_out", "ok", "ok", "ok"]
    assert {report.fallback for report in result.client_results} == {"its stack exceeded the time limit"}


def test_the_longer_work_of_a_chunk_as_a_whole_is_not_a_client_that_hangs(pool: ActorPool) -> None:
    """The limit is per client: three that take less than it each may take more together."""
    chunks = make_chunks(planned([Naps(1.2)] * 3), 3)
    whole = merge_chunks(pool.run(chunks, SharedWeights(OLD, "w@2")))
    assert [report.status for report in whole.client_results] == ["ok"] * 3


@dataclass(frozen=True)
class Naps:
    """A client that takes its time."""

    seconds: float

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        time.sleep(self.seconds)
        return ClientResult(samples=1)


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


def fedloom(*arguments: str) -> list[str]:
    """The command; of a key that is given several times the last value counts."""
    once = {argument.partition("=")[0]: argument for argument in arguments}.values()
    return [sys.executable, "-m", "fedloom.experiments.cli", *once]


def wait_for_round(results: Path, round_: int, process: subprocess.Popen[bytes], timeout_s: float = 600) -> str:
    """Waits until the run under `results` is that far; returns its id."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        assert process.poll() is None, "the run ended by itself"
        for run in list_runs(results):
            try:
                if read_status(run.status).round >= round_:
                    return run.run_id
            except ValueError:
                continue
        time.sleep(0.05)
    raise AssertionError(f"no run reached round {round_}")


def family_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The driver, everything it started, and everything else in its session."""
    driver = psutil.Process(process.pid)
    family = {driver, *driver.children(recursive=True)}
    for other in psutil.process_iter():
        try:
            if os.getsid(other.pid) == process.pid:
                family.add(other)
        except (ProcessLookupError, PermissionError):
            continue
    return sorted(family, key=lambda p: p.pid)


@pytest.mark.slow
@pytest.mark.usefixtures("no_ray_cluster")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_everything_and_the_run_can_be_resumed(
    tiny_overrides: list[str], tmp_path: Path, how: signal.Signals
) -> None:
    """So does SIGTERM, by which Slurm, Kubernetes and docker stop a run."""
    results = tmp_path / "results"
    more = ["executor.actors=1", "method.train.rounds=6", "method.finetune.rounds=1", "method.rand_init.rounds=0"]
    process = subprocess.Popen(
        fedloom("run", *tiny_overrides, *more, f"results={results}"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        run_id = wait_for_round(results, 1, process)
        family = family_of(process)
        assert len(family) > 4, "Ray's processes were not found"
        pressed = time.monotonic()
        if how == signal.SIGINT:
            os.killpg(process.pid, how)  # as a terminal does: to the whole group in the foreground
        else:
            process.send_signal(how)
        _, error = process.communicate(timeout=15)
        _, left = psutil.wait_procs(family, timeout=max(0.1, 15 - (time.monotonic() - pressed)))
    finally:
        if process.poll() is None:
            for member in family_of(process):
                member.kill()
    assert process.returncode == 130
    assert not left, f"left behind: {left}"
    text = error.decode()
    assert "Traceback" not in text
    assert "***" not in text  # the head of a stack dump
    assert f"fedloom resume {run_id}" in text
    assert not list(results.rglob("*.tmp"))
    if how == signal.SIGTERM:
        return  # resumed like the other
    resume = fedloom("resume", run_id, "executor.kind=serial", "--results", str(results))
    resumed = subprocess.run(resume, capture_output=True, text=True, timeout=120)
    assert resumed.returncode == 0, resumed.stderr
    assert f"finished: {run_id}" in resumed.stdout
    rounds = read_table(results, "rounds", run_id=run_id)
    assert not rounds.duplicated(["stage", "round"]).any()
    assert read_table(results, "runs")["status"].tolist() == ["done"]
    assert not list(results.rglob("*.tmp"))


@pytest.mark.slow
@pytest.mark.usefixtures("no_ray_cluster")
def test_a_killed_driver_leaves_nothing_behind(tiny_overrides: list[str], tmp_path: Path) -> None:
    arguments = [*tiny_overrides, "executor.actors=1", f"results={tmp_path / 'results'}"]
    process = subprocess.Popen(fedloom("run", *arguments), stdout=subprocess.DEVNULL, start_new_session=True)
    family: list[psutil.Process] = []
    try:
        wait_for_round(tmp_path / "results", 1, process)
        family = family_of(process)
        assert len(family) > 4, "Ray's processes were not found"
        process.kill()
        process.wait()
        _, left = psutil.wait_procs(family, timeout=30)
        assert not left, f"left behind: {left}"
    finally:
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
