"""`fedloom submit` to a real cluster: small shipments, the job's own exit code, tokens, and Ctrl-C."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedloom.experiments.shipping import MIB
from fedloom.platform.results.tables import read_table

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("no_ray_cluster")]

FEDLOOM = str(Path(sys.executable).with_name("fedloom"))

TINY = [
    "experiment=fedoras_digits",
    "space.stem_channels=8",
    "data.num_clients=8",
    "tiers.count=2",
    "tiers.paths=1000",
    "executor.actors=1",
    "method.train.rounds=1",
    "method.train.epochs=1",
    "method.train.clients_per_round=4",
    "method.train.weighting=my_rules:mine",
    "method.search.population=4",
    "method.search.offspring=2",
    "method.search.budget=6",
    "method.finetune.rounds=1",
    "method.finetune.epochs=1",
    "method.finetune.clients_per_round=2",
    "method.rand_init.rounds=0",
    "method.rand_init.clients_per_round=2",
]

# Every process that uses the rule writes down where its fedloom comes from.
MY_RULES = '''"""A user's own weighting rule."""

import os
import sys
import time
from pathlib import Path

from fedloom.platform.averaging.weighting import opa


def witness(moment):
    files = [m.__file__ for n, m in sys.modules.items() if n.startswith("fedloom.") and getattr(m, "__file__", None)]
    files.append(sys.modules["__main__"].__file__)
    Path(os.environ["WITNESS"], f"{moment}-{os.getpid()}").write_text("\\n".join(files))


def mine(work):
    witness("used")
    if work.samples < 10:  # tried on something tiny, before the run
        return opa(work)
    if "FAIL" in os.environ:
        raise RuntimeError("the battery is gone")
    time.sleep(float(os.environ.get("SLEEP_S", "0")))
    return opa(work)


witness("imported")
'''


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: a rule of their own, and much that is not to be sent."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "my_rules.py").write_text(MY_RULES)
    (folder / "data").mkdir()
    with (folder / "data" / "images.bin").open("wb") as file:
        file.truncate(300 * MIB)
    for name in ("results/run", ".git"):
        (folder / name).mkdir(parents=True)
        (folder / name / "content").write_bytes(b"\0" * MIB)
    (folder / ".env").write_text("SECRET=1")
    return folder


def command(address: str, witnesses: Path, *more: str) -> list[str]:
    witnesses.mkdir(parents=True, exist_ok=True)
    return [FEDLOOM, "submit", "--address", address, "--include", ".", "--env", f"WITNESS={witnesses}", *more]


def start(project: Path, environment: dict[str, str], arguments: list[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(arguments, cwd=project, env=environment, stdout=pipe, stderr=pipe, text=True)


@dataclass(frozen=True)
class Submitted:
    """A submission that ended, and the folders of its job."""

    code: int
    output: str
    errors: str
    results: Path
    witnesses: Path


@pytest.fixture(scope="module")
def submitted(cluster: Any, project: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Submitted]:
    """Two jobs at the same time: one that works, on client actors, and one with a client that fails."""
    folder = tmp_path_factory.mktemp("submitted")
    more = {"works": ["--json", *TINY], "fails": ["--env", "FAIL=1", *TINY, "executor.kind=serial"]}
    # RAY_ADDRESS of another cluster does not turn a submission away from the one that was named.
    environment = {**cluster.environment, "RAY_ADDRESS": "http://127.0.0.1:1"}
    processes = {}
    for name, arguments in more.items():
        whole = command(cluster.dashboard, folder / name / "witnesses", *arguments, f"results={folder / name / 'all'}")
        processes[name] = start(project, environment, whole)
    ends = {}
    for name, process in processes.items():
        output, errors = process.communicate(timeout=240)
        ends[name] = Submitted(process.returncode, output, errors, folder / name / "all", folder / name / "witnesses")
    return ends


def own_line(stderr: str) -> str:
    """The one line in which fedloom says what is wrong."""
    lines = [line for line in stderr.splitlines() if line.startswith("fedloom: ")]
    assert len(lines) == 1, stderr[-3000:]
    assert "Traceback" not in stderr
    return lines[0]


def test_a_run_ends_with_its_rows(cluster: Any, submitted: dict[str, Submitted]) -> None:
    done = submitted["works"]
    assert done.code == 0, done.output[-2000:] + done.errors[-4000:]
    end = json.loads(done.output)
    assert end["status"] == "SUCCEEDED"
    assert end["exit_code"] == 0
    assert end["shipped_bytes"] < 5 * MIB  # with 300 MiB of data beside the rule
    assert "finished: " in done.errors
    assert read_table(done.results, "runs")["status"].tolist() == ["done"]
    assert set(read_table(done.results, "clients")["status"]) == {"ok"}
    written = [file.read_bytes() for file in done.results.rglob("*") if file.is_file()]
    # Worked out before it is asserted: pytest would print both sides.
    leaks = [cluster.token.encode() in content for content in (done.output.encode(), done.errors.encode(), *written)]
    assert not any(leaks)


def test_the_shipped_copy_is_what_runs(submitted: dict[str, Submitted]) -> None:
    """In the driver, the server and the clients, though the cluster's environment has an installed fedloom."""
    used = [file.read_text().splitlines() for file in submitted["works"].witnesses.iterdir()]
    assert len(used) >= 3
    for files in used:
        own = [file for file in files if "working_dir_files" in file]
        assert len(own) >= 10
        assert not [file for file in files if "site-packages" not in file and file not in own]


def test_a_job_with_failing_clients_ends_with_their_exit_code(submitted: dict[str, Submitted]) -> None:
    done = submitted["fails"]
    assert done.code == 3, done.output[-2000:] + done.errors[-2000:]
    assert "the battery is gone" in done.output
    assert "failed with exit code 3" in own_line(done.errors)
    assert read_table(done.results, "runs")["status"].tolist() == ["failed"]


@pytest.fixture
def environments(cluster: Any, tmp_path: Path) -> dict[str, dict[str, str]]:
    """Those of people who hold a wrong token, and who never heard of tokens."""
    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 64)
    unaware = {name: v for name, v in cluster.environment.items() if not name.startswith("RAY_AUTH")}
    return {"wrong": cluster.with_token(wrong), "unaware": unaware}


def test_without_the_token_one_line_says_what_to_set(
    cluster: Any, project: Path, tmp_path: Path, environments: dict[str, dict[str, str]]
) -> None:
    arguments = command(cluster.dashboard, tmp_path, *TINY, f"results={tmp_path / 'results'}")
    processes = {name: start(project, environment, arguments) for name, environment in environments.items()}
    for name, process in processes.items():
        output, errors = process.communicate(timeout=180)
        assert process.returncode == 2, f"{name}: {errors[-2000:]}"
        line = own_line(errors)
        assert cluster.dashboard in line
        assert "RAY_AUTH_MODE=token" in line
        assert "RAY_AUTH_TOKEN_PATH" in line
        assert "0" * 64 not in output + errors
    assert not (tmp_path / "results").exists()


@pytest.fixture
def long_job(cluster: Any, project: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A submission whose job would go on for minutes."""
    arguments = command(cluster.dashboard, tmp_path, "--env", "SLEEP_S=100", *TINY, "executor.kind=serial")
    process = start(project, cluster.environment, [*arguments, f"results={tmp_path / 'results'}"])
    yield process
    process.kill()
    process.wait()


def test_after_ctrl_c_the_job_goes_on_and_a_line_says_how_to_end_it(
    cluster: Any, long_job: subprocess.Popen[str]
) -> None:
    assert long_job.stdout is not None
    assert any(re.match(r"Running entrypoint for job", line) for line in long_job.stdout)
    long_job.send_signal(signal.SIGINT)
    _, errors = long_job.communicate(timeout=60)
    assert long_job.returncode == 130
    line = own_line(errors)
    found = re.search(r"`ray job stop --address (\S+) (\S+)`", line)
    assert found is not None, line
    assert found[1] == cluster.dashboard
    assert cluster.ask(f"jobs/{found[2]}")["status"] == "RUNNING"
    assert cluster.ask(f"jobs/{found[2]}/stop", "POST")["stopped"]


ABLATION = """axes:
  lr: {key: method.train.lr, values: [0.1, 0.03]}
seeds: [1]
"""


def test_an_ablations_trials_on_two_nodes_end_with_0(two_nodes: Any, project: Path, tmp_path: Path) -> None:
    (project / "rates.yaml").write_text(ABLATION)
    results = tmp_path / "results"
    more = ["ablation=rates.yaml", *TINY, "executor.actors=2", f"results={results}"]  # each takes a whole node
    process = start(project, two_nodes.environment, command(two_nodes.dashboard, tmp_path / "witnesses", *more))
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:] + errors[-3000:]
    assert "(2 done)" in output
    nodes = read_table(results, "clients").groupby("run_id")["node"].unique()
    assert len({node for of_run in nodes for node in of_run}) == 2, "both trials ran on one node"
