"""A cluster with token authentication, as a person would start it: a job is submitted, runs, and leaves its rows."""

import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedloom.platform.results.tables import read_table

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("no_ray_cluster")]

ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
FEDLOOM = str(Path(sys.executable).with_name("fedloom"))

TINY = [
    "space.stem_channels=8",
    "data.num_clients=8",
    "tiers.count=2",
    "tiers.paths=1000",
    "executor.kind=serial",
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


def submit(cluster: Any, environment: dict[str, str], *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [RAY, "job", "submit", "--address", cluster.dashboard]
    command += ["--runtime-env", "experiments/runtime_env.yaml"]
    command += ["--", "fedloom", "run", "experiment=fedoras_digits", *TINY, *overrides]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


def test_a_submitted_job_runs_with_token_authentication(cluster: Any, tmp_path: Path) -> None:
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


def test_a_submission_with_a_wrong_token_is_refused(cluster: Any, wrong_token: Path, tmp_path: Path) -> None:
    job = submit(cluster, cluster.with_token(wrong_token), f"results={tmp_path / 'results'}")
    assert job.returncode != 0
    assert "RAY_AUTH" in job.stdout + job.stderr
    assert not (tmp_path / "results").exists()


def run_directly(cluster: Any, environment: dict[str, str], results: Path) -> subprocess.CompletedProcess[str]:
    on_ray = ["executor.kind=ray", "executor.actors=1", f"ray.address={cluster.gcs}"]
    tiny = [override for override in TINY if not override.startswith("executor.kind=")]
    command = [FEDLOOM, "run", "experiment=fedoras_digits", *tiny, *on_ray, f"results={results}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_run_with_a_wrong_token_says_in_one_line_what_to_set(cluster: Any, wrong_token: Path, tmp_path: Path) -> None:
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


def test_a_run_with_the_token_reaches_the_cluster(cluster: Any, tmp_path: Path) -> None:
    """What the next tests are compared with: the address is right, and only the token is not."""
    code = (
        "import sys\nfrom fedloom.actors.address import stay_on_loopback\nstay_on_loopback(sys.argv[1])\n"
        "import ray\nray.init(address=sys.argv[1], log_to_driver=False)\nprint(ray.cluster_resources()['CPU'])"
    )
    command = [sys.executable, "-c", code, cluster.gcs]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.split()[-1] == "2.0"


def test_a_run_without_a_token_says_in_one_line_what_to_set(cluster: Any, tmp_path: Path) -> None:
    environment = {n: v for n, v in cluster.environment.items() if not n.startswith("RAY_AUTH")}
    environment |= {"RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}
    run = run_directly(cluster, environment, tmp_path / "results")
    lines = [line for line in run.stderr.splitlines() if line.startswith("fedloom: ")]
    assert run.returncode == 2, run.stderr[-3000:]
    assert len(lines) == 1
    assert "RAY_AUTH_TOKEN" in lines[0]
    assert "Traceback" not in run.stderr
