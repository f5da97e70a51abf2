"""A cluster with token authentication, as a person would start it: a job is submitted, runs, and leaves its rows."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from fedloom.actors.address import LOOPBACK_SWITCH
from fedloom.platform.results.tables import read_table

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
FEDLOOM = str(Path(sys.executable).with_name("fedloom"))

TINY = [
    "space.stem_channels=8",
    "data.num_clients=8",
    "tiers.count=2",
    "tiers.paths=1000",
    "executor.actors=1",
    "method.train.rounds=1",
    "method.train.epochs=1",
    "method.train.clients_per_round=4",
    "method.search.population=4",
    "method.search.offspring=2",
    "method.search.budget=6",
    "method.finetune.rounds=1",
    "method.finetune.epochs=1",
    "method.finetune.clients_per_round=2",
    "method.rand_init.rounds=0",
    "method.rand_init.clients_per_round=2",
]


@dataclass(frozen=True)
class Cluster:
    """Where the cluster is, and the environment of somebody who may use it."""

    gcs: str
    dashboard: str
    environment: dict[str, str]
    token: str = field(repr=False)

    def with_token(self, file: Path) -> dict[str, str]:
        """The environment of somebody who holds another token."""
        return {**self.environment, "RAY_AUTH_TOKEN_PATH": str(file)}


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def start_command(ports: list[int], temporary: Path) -> list[str]:
    gcs, dashboard, client, agent, agent_grpc, environments, objects, manager, metrics, *workers = ports
    return [
        *(RAY, "start", "--head", "--block", "--disable-usage-stats", "--node-ip-address=127.0.0.1"),
        *(f"--port={gcs}", f"--temp-dir={temporary}", "--num-cpus=2", "--object-store-memory=200000000"),
        *("--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
        *(f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}"),
        *(f"--ray-client-server-port={client}", f"--runtime-env-agent-port={environments}"),
        *(f"--object-manager-port={objects}", f"--node-manager-port={manager}", f"--metrics-export-port={metrics}"),
        f"--worker-port-list={','.join(map(str, workers))}",
    ]


def wait_for_dashboard(address: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float = 90.0) -> None:
    """Returns when the dashboard answers, be it with a refusal."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        assert process.poll() is None, f"ray start ended: {log.read_text()[-2000:]}"
        try:
            urllib.request.urlopen(address, timeout=2).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"no dashboard at {address}")


def end_cluster(process: subprocess.Popen[bytes]) -> None:
    """Ends `ray start` and what it started, by process id: other clusters on this machine are not ours."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    _, alive = psutil.wait_procs(family, timeout=15)
    for left in alive:
        left.kill()
    psutil.wait_procs(alive, timeout=5)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    token_file = folder / "token"
    token = secrets.token_hex(32)
    token_file.write_text(token)
    token_file.chmod(0o600)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # The cluster is on the loopback interface, and Ray's clients look for it there only if told so.
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file), LOOPBACK_SWITCH: "0"}
    # Ray's sockets lie in it, and their paths are limited to about a hundred characters.
    temporary = Path(tempfile.mkdtemp(prefix="fl", dir="/tmp"))
    ports = free_ports(9 + 24)
    log = folder / "ray.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            start_command(ports, temporary),
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{ports[1]}"
    try:
        wait_for_dashboard(address, process, log)
        yield Cluster(f"127.0.0.1:{ports[0]}", address, environment, token)
    finally:
        end_cluster(process)
        shutil.rmtree(temporary, ignore_errors=True)


def submit(cluster: Cluster, environment: dict[str, str], *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [RAY, "job", "submit", "--address", cluster.dashboard]
    command += ["--runtime-env", "experiments/runtime_env.yaml"]
    command += ["--", "fedloom", "run", "experiment=fedoras_digits", *TINY, *overrides]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


def test_a_submitted_job_runs_with_token_authentication(cluster: Cluster, tmp_path: Path) -> None:
    results = tmp_path / "results"
    job = submit(cluster, cluster.environment, f"results={results}")
    output = job.stdout + job.stderr
    assert job.returncode == 0, output[-4000:]
    assert "finished" in output
    runs = read_table(results, "runs")
    assert runs["status"].tolist() == ["done"]
    clients = read_table(results, "clients")
    assert set(clients["status"]) == {"ok"}
    assert {"supernet", "fine_tuned/tier1", "fine_tuned/tier2", "evaluation"} <= set(clients["stage"])
    assert len(read_table(results, "models")) == 4
    written = [file.read_bytes() for file in results.rglob("*") if file.is_file()]
    # Worked out before it is asserted: pytest would print both sides.
    leaks = [cluster.token.encode() in content for content in (output.encode(), *written)]
    assert not any(leaks)


@pytest.fixture
def wrong_token(tmp_path: Path) -> Path:
    file = tmp_path / "wrong"
    file.write_text(secrets.token_hex(32))
    return file


def test_a_submission_with_a_wrong_token_is_refused(cluster: Cluster, wrong_token: Path, tmp_path: Path) -> None:
    job = submit(cluster, cluster.with_token(wrong_token), f"results={tmp_path / 'results'}")
    assert job.returncode != 0
    assert "RAY_AUTH" in job.stdout + job.stderr
    assert not (tmp_path / "results").exists()


def run_directly(cluster: Cluster, environment: dict[str, str], results: Path) -> subprocess.CompletedProcess[str]:
    command = [FEDLOOM, "run", "experiment=fedoras_digits", *TINY, f"ray.address={cluster.gcs}", f"results={results}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_run_with_a_wrong_token_says_in_one_line_what_to_set(
    cluster: Cluster, wrong_token: Path, tmp_path: Path
) -> None:
    run = run_directly(cluster, cluster.with_token(wrong_token), tmp_path / "results")
    lines = [line for line in run.stderr.splitlines() if line.startswith("fedloom: ")]
    assert run.returncode == 2, run.stderr[-3000:]
    assert len(lines) == 1
    assert cluster.gcs in lines[0]
    assert "RAY_AUTH_TOKEN" in lines[0]
    assert "Traceback" not in run.stderr
    leaks = wrong_token.read_text() in run.stdout + run.stderr
    assert not leaks
    assert not (tmp_path / "results").exists()


def test_a_run_with_the_token_reaches_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    """What the next tests are compared with: the address is right, and only the token is not."""
    code = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print(ray.cluster_resources()['CPU'])"
    command = [sys.executable, "-c", code, cluster.gcs]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.split()[-1] == "2.0"


def test_a_run_without_a_token_says_in_one_line_what_to_set(cluster: Cluster, tmp_path: Path) -> None:
    environment = {n: v for n, v in cluster.environment.items() if not n.startswith("RAY_AUTH")}
    environment |= {"RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}
    run = run_directly(cluster, environment, tmp_path / "results")
    lines = [line for line in run.stderr.splitlines() if line.startswith("fedloom: ")]
    assert run.returncode == 2, run.stderr[-3000:]
    assert len(lines) == 1
    assert "RAY_AUTH_TOKEN" in lines[0]
    assert "Traceback" not in run.stderr
