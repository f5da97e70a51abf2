"""One result, wherever it runs: serial, one actor, two actors, a killed actor, a killed and resumed run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from chaos.kill import is_called, orphans
from chaos.victims import ended, start
from fedloom.actors.client import About, accept_shared_memory
from fedloom.actors.placement import groups_of_run
from fedloom.actors.pool import ActorPool
from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import InterruptedRunError
from fedloom.platform.federation.world import World
from fedloom.platform.results.lock import Process, descendants, process_of
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import Watcher, make_serial, resume_run, start_run

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

Tiny = Callable[..., RunConfig]
Same = Callable[..., None]
Run = tuple[str, str]
Serially = Callable[[RunConfig], Run]


def run_on_actors(config: RunConfig, pool: type[ActorPool] = ActorPool) -> tuple[Run, ActorPool]:
    accept_shared_memory()
    pools: list[ActorPool] = []

    def make(world: World) -> ActorPool:
        groups = groups_of_run(config.executor, world.tiers, [ray.cluster_resources()], world.num_clients)
        pools.append(pool(world.spec, groups, resident=config.executor.resident))
        return pools[0]

    return (config.results, start_run(config, make)), pools[0]


@pytest.fixture(scope="module")
def run_serially(tmp_path_factory: pytest.TempPathFactory) -> Serially:
    """The serial run of a configuration, made once however many are compared with it."""
    known: dict[str, Run] = {}

    def run(config: RunConfig) -> Run:
        # How many actors there are, and whether they are resident, is nothing to one process.
        executor = replace(config.executor, kind="serial", actors=None, resident=False)
        alike = repr(replace(config, results="", executor=executor))
        if alike not in known:
            results = str(tmp_path_factory.mktemp("serial"))
            known[alike] = (results, start_run(replace(config, results=results, executor=executor), make_serial))
        return known[alike]

    return run


@pytest.mark.parametrize(
    ("family", "actors"),
    [
        pytest.param("superfednas", 1, marks=pytest.mark.slow),
        pytest.param("fedoras", 1, marks=pytest.mark.slow),
        pytest.param("multi_stage", 2, marks=pytest.mark.slow),
    ],
    indirect=["family"],
)
def test_actors_give_the_bits_of_the_serial_executor(
    tiny: Tiny, run_serially: Serially, assert_same_run: Same, actors: int
) -> None:
    config = tiny(f"executor.actors={actors}")
    reference = run_serially(config)
    on_actors, _ = run_on_actors(config)
    assert_same_run(reference, on_actors)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["fedoras"], indirect=True)
def test_compiled_networks_give_the_same_bits_on_two_actors(
    tiny: Tiny, run_serially: Serially, assert_same_run: Same
) -> None:
    config = tiny("executor.actors=2", "executor.compile=true", "executor.stack_clients=off", "executor.chunk_size=1")
    reference = run_serially(config)
    on_actors, _ = run_on_actors(config)
    assert_same_run(reference, on_actors)
    eager = run_serially(tiny("executor.stack_clients=off", "executor.chunk_size=1"))
    clients, alone = (read_table(results, "clients", run_id=run_id) for results, run_id in (reference, eager))
    assert clients["fallback"].isna().all()
    paths, of_one = (clients["stage"].str.startswith(stage) for stage in ("supernet", "fine_tuned"))
    assert clients[paths]["loss"].equals(alone[paths]["loss"]), "a supernet is not compiled"
    assert not clients[of_one]["loss"].equals(alone[of_one]["loss"])


COMPARED = (
    *("scaffold", "feddyn", "fednova", "zerofl", "heterofl", "fjord", "fedrolex", "depthfl", "scalefl"),
    *("hetlora", "flexlora", "flora"),
    *("splitmix", "feddf", "pfedme", "fedmask", "ofa", "transformers", "secure", "private"),
    *("robust", "compressed", "personal_layers", "apfl", "fedproto", "fedbuff", "fedasync", "over_selected"),
    *("stopped", "stopped_tiers"),
)
QUICK = ("scaffold", "private", "fedbuff", "feddf", "stopped")
"""Those with the most state and arithmetic, with work of the server, with an early end; of the others a round would
show the same."""


@pytest.mark.parametrize(
    "family",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COMPARED],
    indirect=True,
)
def test_compared_methods_give_the_same_bits_on_actors_and_after_every_stop(
    tiny: Tiny, run_serially: Serially, assert_same_run: Same, empty_tables: tuple[str, ...], tmp_path: Path
) -> None:
    config = tiny("executor.actors=2")
    reference = run_serially(config)
    on_actors, _ = run_on_actors(config)
    assert_same_run(reference, on_actors, empty=empty_tables)
    serial = replace(config, results=str(tmp_path / "stopped"), executor=replace(config.executor, kind="serial"))
    seen = list[str]()
    stops = Watcher(started=lambda run_id, _: seen.append(run_id), should_stop=lambda: True)
    with suppress(InterruptedRunError):
        start_run(serial, make_serial, stops)
    for _ in range(100):
        try:
            resume_run(serial, seen[0], make_serial, stops)
        except InterruptedRunError:
            continue
        break
    assert_same_run(reference, (serial.results, seen[0]), empty=empty_tables)


TINY_TEXT = [
    *("experiment=fedoras_shakespeare", "data.dataset=ptb", "data.partition=iid", "data.num_clients=6"),
    *("data.sequence_length=9", "space.input_shape=[9]", "space.num_classes=9", "space.channels=8"),
    *("space.embedding_size=4", "tiers.upper_bounds=[4000,30000]", "ray.address=local", "executor.actors=1"),
    *("ray.object_store_memory_bytes=200000000", "method.train.rounds=2", "method.train.clients_per_round=4"),
    *("method.train.epochs=1", "method.train.evaluate_every=0", "method.search.population=4"),
    *("method.search.offspring=2", "method.search.budgets=[5,5]", "method.finetune.rounds=1"),
    *("method.finetune.clients_per_round=2", "method.rand_init.rounds=1"),
    "method.rand_init.clients_per_round=2",
]


def test_recurrent_paths_give_the_same_bits_on_actors(
    run_serially: Serially, assert_same_run: Same, tmp_path: Path
) -> None:
    (tmp_path / "ptb").mkdir()
    for part, lines in (("train", 60), ("test", 20)):
        (tmp_path / "ptb" / f"ptb.{part}.txt").write_text(" the cat sat on the mat \n a dog <unk> the cat \n" * lines)
    config = compose_config([*TINY_TEXT, f"data.root={tmp_path}", f"results={tmp_path / 'results'}"])
    on_actors, _ = run_on_actors(config)
    assert_same_run(run_serially(config), on_actors)


KERNELS = {
    "as preset": [],
    "stacked": ["executor.stack_clients=3", "executor.memory_format=contiguous"],
    "bfloat16": ["executor.stack_clients=off", "executor.precision=bfloat16"],
    "stacked bfloat16": ["executor.stack_clients=2", "executor.precision=bfloat16"],
    "bfloat16 contiguous": ["executor.precision=bfloat16", "executor.memory_format=contiguous"],
}
"""How networks compute: the laws hold under every setting, each test below has some of them."""
KERNELS["stacked bfloat16, two tasks"] = [
    *(*KERNELS["stacked bfloat16"], "tiers.tasks=[pairs,all]", "space.heads=[5,10]"),
    "data.label_sets.pairs=[0,0,1,1,2,2,3,3,4,4]",
]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["fedmn", "spider", "milenas", "fedpnas"], indirect=True)
def test_what_silos_keep_is_the_same_pooled_or_resident(
    tiny: Tiny, run_serially: Serially, assert_same_run: Same, family: str, empty_tables: tuple[str, ...]
) -> None:
    config = tiny("executor.chunk_size=1")
    reference = run_serially(config)
    for actors, resident in ((1, False), (2, False), (2, True)) if family == "spider" else ((2, False),):
        executor = replace(config.executor, actors=actors, resident=resident)
        on_actors, _ = run_on_actors(replace(config, executor=executor))
        assert_same_run(reference, on_actors, empty=empty_tables)


class KillsOneActor(ActorPool):
    """Kills an actor with SIGKILL while it works, once per stage name given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.killed: list[About] = []
        self.calls = 0

    def _collect(self, work: Any) -> None:
        self.calls += 1
        if self.calls in (2, 12):
            about = next(iter(work.running.values())).member.answered
            os.kill(about.pid, signal.SIGKILL)
            self.killed.append(about)
        super()._collect(work)


@pytest.mark.parametrize(
    ("family", "resident", "kernels"),
    [
        ("spider", True, "as preset"),
        ("fedoras", False, "stacked bfloat16, two tasks"),
        pytest.param("scaffold", False, "stacked", marks=pytest.mark.slow),
        pytest.param("fedasync", False, "bfloat16", marks=pytest.mark.slow),
        pytest.param("superfednas", False, "bfloat16", marks=pytest.mark.slow),
        pytest.param("spider", False, "bfloat16 contiguous", marks=pytest.mark.slow),
    ],
    indirect=["family"],
)
def test_a_killed_actor_changes_nothing(
    tiny: Tiny,
    run_serially: Serially,
    assert_same_run: Same,
    caplog: pytest.LogCaptureFixture,
    empty_tables: tuple[str, ...],
    resident: bool,
    kernels: str,
) -> None:
    config = tiny("executor.actors=2", *KERNELS[kernels])
    reference = run_serially(config)
    config = replace(config, executor=replace(config.executor, resident=resident))
    killed, pool = run_on_actors(config, KillsOneActor)
    assert isinstance(pool, KillsOneActor)
    assert len(pool.killed) == 2
    assert sum("a client actor on" in r.message for r in caplog.records) >= 2
    assert_same_run(reference, killed, empty=empty_tables)


@pytest.mark.slow
def test_resident_actors_give_the_same_bits(tiny: Tiny, run_serially: Serially, assert_same_run: Same) -> None:
    changes = ["executor.chunk_size=1", "data.num_clients=4", "method.train.clients_per_round=3"]
    changes += ["method.finetune.clients_per_round=2", "method.rand_init.clients_per_round=2"]
    config = tiny(*changes)
    reference = run_serially(config)
    resident, pool = run_on_actors(replace(config, executor=replace(config.executor, actors=1, resident=True)))
    assert_same_run(reference, resident)
    assert {name for name in pool.groups if name.startswith("resident")} <= {
        *(f"resident-{i}" for i in range(4)),
        "resident-server",
    }


def fedloom(*arguments: str) -> list[str]:
    """The command; of a key that is given several times the last value counts."""
    once = {argument.partition("=")[0]: argument for argument in arguments}.values()
    return [sys.executable, "-m", "fedloom.experiments.cli", *once]


def wait_for_round(results: Path, stage: str, timeout_s: float = 600) -> str:
    """Waits until a run under `results` is at work in the stage; returns the run id."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        for file in results.glob("artifacts/*/status.json"):
            try:
                status = json.loads(file.read_text())
            except (OSError, ValueError):
                continue
            if status["stage"] == stage and status["round"] >= 1:
                return file.parent.name
        time.sleep(0.02)
    raise AssertionError(f"no run reached {stage}")


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for the driver and everything that it started."""
    parent = psutil.Process(process.pid)
    for victim in [parent, *parent.children(recursive=True)]:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "stage", "executor", "kernels"),
    [
        ("fedoras", "supernet", "executor.actors=1", "stacked"),
        ("fedoras", "fine_tuned/tier1", "executor.kind=serial", "stacked bfloat16"),
        ("superfednas", "supernet", "executor.kind=serial", "bfloat16 contiguous"),
        ("spider", "spider", "executor.kind=serial", "bfloat16"),
        ("fedbuff", "supernet", "executor.actors=2", "as preset"),
    ],
    indirect=["family"],
)
def test_a_killed_run_resumes_to_the_same_bits(
    tiny: Tiny,
    tiny_overrides: list[str],
    run_serially: Serially,
    assert_same_run: Same,
    empty_tables: tuple[str, ...],
    stage: str,
    executor: str,
    kernels: str,
) -> None:
    config = tiny(executor, *KERNELS[kernels])
    results = Path(config.results)
    reference = run_serially(config)
    arguments = [*tiny_overrides, f"results={results}", executor, *KERNELS[kernels]]
    process = subprocess.Popen(fedloom("run", *arguments), stdout=subprocess.DEVNULL)
    run_id = wait_for_round(results, stage)
    kill_all(process)
    resumed = subprocess.run(fedloom("resume", run_id, "--results", str(results)), capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(reference, (config.results, run_id), empty=empty_tables)
    rounds = read_table(results, "rounds", run_id=run_id)
    assert not rounds.duplicated(["stage", "round"]).any()


SOON_MISSED = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "2"}
"""Ray asks its nodes so often whether they are there, not for a quarter of a minute."""


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "raylet"])
def test_without_its_server_or_raylet_a_run_stops_in_one_line_and_resumes_to_the_same_bits(
    tiny: Tiny,
    tiny_overrides: list[str],
    run_serially: Serially,
    assert_same_run: Same,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    victim: str,
) -> None:
    config = tiny("executor.actors=1")
    reference = run_serially(config)
    for name, value in SOON_MISSED.items():
        monkeypatch.setenv(name, value)
    command = ["run", *tiny_overrides, "executor.actors=1", f"results={config.results}"]
    driver = start(command, tmp_path, "first")
    run_id = wait_for_round(Path(config.results), "supernet")
    family = descendants([process_of(driver.pid) or Process(driver.pid, 0)])
    (struck,) = [process for process in family if is_called(victim, process)]
    os.kill(struck.pid, signal.SIGKILL)
    end = ended(driver, tmp_path, "first", 60.0)
    assert (end.code, len(end.err.splitlines()), end.has_traceback) == (4, 1, False), end
    assert "the run's server process is gone" in end.err
    assert f"fedloom resume {run_id}" in end.err
    assert all(re.match(rf"run {run_id}$|\S+ +\d+/\d+ ", line) for line in end.out.splitlines()), end.out
    assert not orphans(family)
    resume_run(config, run_id, make_serial)
    assert_same_run(reference, (config.results, run_id))
