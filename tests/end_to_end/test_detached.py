"""A run that goes on without its command: it is found again, ends with the same bits, and leaves no process behind."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from fedloom.actors.server import NAMESPACE, UNWATCHED_S, ServerActor
from fedloom.experiments.cli import main
from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.results.paths import list_runs
from fedloom.platform.results.status import StatusFile, read_status
from fedloom.platform.runs.run import make_serial, start_run

pytestmark = pytest.mark.ray

PATIENCE_S = 120.0
TINY = (
    "experiment=fedavg_digits",
    "data.num_clients=8",
    "tiers.paths=100",
    "method.train.rounds=2",
    "method.train.epochs=1",
    "method.train.clients_per_round=2",
    "method.train.weighting=gated:mean",
)
GATED = '''"""A weighting rule that counts all alike, once the gate is open."""

import os
import time
from pathlib import Path


def mean(work):
    here = Path(__file__).parent
    while work.samples > 10 and not (here / "open").exists():  # fewer: it is tried before the run
        (here / f"{os.getpid()}.pid").touch()
        time.sleep(0.05)
    return dict.fromkeys(work.seen_by_tensor, 1.0)
'''


def until(condition: Callable[[], Any]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.05)


def servers() -> list[str]:
    return [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE]


@pytest.fixture
def project(tmp_path: Path, ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder beside a running cluster, on which no server is left."""
    (tmp_path / "gated.py").write_text(GATED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("gated", None)
    for name in servers():
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))


def fedloom(*arguments: str) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-m", "fedloom.experiments.cli", *arguments], subprocess.PIPE
    return subprocess.Popen(command, env={**os.environ, "PYTHONUNBUFFERED": "1"}, stdout=pipe, stderr=pipe, text=True)


def test_a_run_whose_driver_was_killed_is_watched_again_and_ends_with_the_same_bits(
    project: Path, assert_same_run: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    address, results = ray.get_runtime_context().gcs_address, Path("results")
    driver = fedloom("run", *TINY, f"ray.address={address}", "ray.detached=true", "executor.actors=1")
    try:
        until(lambda: driver.poll() is not None or [*project.glob("*.pid")])
    finally:
        driver.kill()
    assert driver.wait() == -9, driver.communicate()
    (run,) = list_runs(results)
    with pytest.raises(SystemExit):
        main(["status"])
    assert f"running  fedavg  1/2    on Ray at {address}: fedloom attach watches it" in capsys.readouterr().out
    watcher = fedloom("attach", run.run_id, "--address", address)
    (first,) = project.glob("*.pid")
    os.kill(int(first.stem), 9)  # a client actor, which is replaced without the driver, too
    until(lambda: len([*project.glob("*.pid")]) == 2)
    (project / "open").touch()
    serial = start_run(compose_config([*TINY, "results=serial", "executor.kind=serial"]), make_serial)
    out, errors = watcher.communicate(timeout=PATIENCE_S)
    assert watcher.returncode == 0, errors
    assert out.startswith(f"run {run.run_id}\nfedavg                1/2")
    assert f"\nfinished: {run.run_id}" in out
    assert_same_run((results, run.run_id), ("serial", serial), empty=("candidates",))
    until(lambda: not servers())


def test_a_server_that_nobody_asks_any_more_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    server, now = ServerActor.__new__(ServerActor), [100.0]
    asked_until_s = 130.0

    def passes(seconds: float) -> None:
        now[0] += seconds
        if now[0] <= asked_until_s:
            server._asked_s = now[0]

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", passes)
    monkeypatch.setattr("ray.actor.exit_actor", lambda: None)
    server.leave()
    assert now[0] == asked_until_s + UNWATCHED_S


def ends(*arguments: str) -> Any:
    with pytest.raises(SystemExit) as ending:
        main(list(arguments))
    return ending.value.code


def test_what_cannot_be_detached_or_watched_is_refused_in_one_line(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert ends("run", *TINY, "ray.detached=true", "ray.address=local") == 2
    assert "needs a cluster that outlives this command" in capsys.readouterr().err
    assert ends("ablate", "ablation=alpha", *TINY, "ray.detached=true") == 2
    assert "ray.detached=true is for fedloom run" in capsys.readouterr().err
    assert not servers()
    (project / "open").touch()
    run_id = start_run(compose_config([*TINY, "executor.kind=serial"]), make_serial)
    assert ends("attach", run_id, "--address", "local") == 0
    assert f"\nfinished: {run_id}" in capsys.readouterr().out
    (run,) = list_runs(Path("results"))
    StatusFile(run.status, "127.0.0.1:1").write()
    assert ends("attach", run_id, "--address", "local") == 2
    assert "give its address, --address HOST:PORT (it began on 127.0.0.1:1)" in capsys.readouterr().err
    assert read_status(run.status).state == "running"
