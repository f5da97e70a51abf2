"""Submission without a cluster: what is refused, the job's command, following its output, and what its end means."""

import re
import shlex
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus

from fedloom.experiments import submit as module
from fedloom.experiments.cli import main
from fedloom.experiments.submit import (
    Follower,
    check_address,
    connect,
    entry_point,
    exit_code,
    parse_environment,
    prepare,
)

RUN = ["experiment=fedoras_digits", "results=/shared/results"]


def test_the_entry_point_survives_the_shell() -> None:
    overrides = ['space.operators=["conv(1)", "ds(3,.5)"]', "results=/a b/$HOME;'x'"]
    command = entry_point("run", overrides)
    assert shlex.split(command) == ["python", "-m", "fedloom.experiments.cli", "run", *overrides]


def test_a_run_is_prepared_with_its_overrides() -> None:
    job = prepare(RUN, [])
    assert job.entry_point == "python -m fedloom.experiments.cli run experiment=fedoras_digits results=/shared/results"
    assert job.shipment.size_bytes > 500_000


def test_results_at_a_url_are_accepted() -> None:
    assert "results=s3://bucket/r" in prepare([RUN[0], "results=s3://bucket/r"], []).entry_point


def test_an_ablation_is_checked_and_submitted_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = prepare(["ablation=alpha", *RUN, "ablation.seeds=[1,2]"], [])
    assert job.entry_point.startswith("python -m fedloom.experiments.cli ablate ablation=alpha experiment=")
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "mine" / "rates.yaml"
    own.parent.mkdir()
    own.write_text("axes:\n  rate: {key: method.train.lr, values: [0.1, 0.2]}\n")
    job = prepare([f"ablation={own}", *RUN], [])
    assert "ablation=mine/rates.yaml" in job.entry_point
    assert "mine/rates.yaml" in {str(file.target) for file in job.shipment.files}


def test_what_is_checked_is_what_the_job_composes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    axes = "axes:\n  rate: {key: method.train.lr, values: [0.1, 0.2]}\n"
    (tmp_path / "shared.yaml").write_text(f"overrides: [results=/shared/r]\n{axes}")
    (tmp_path / "own.yaml").write_text(f"overrides: [results=out]\n{axes}")
    with pytest.raises(ValueError, match=r"results=out would lie"):
        prepare(["ablation=shared.yaml", RUN[0], "results=out"], [])
    assert "results=/shared/results" in prepare(["ablation=own.yaml", *RUN], []).entry_point


def test_every_trial_of_an_ablation_is_checked_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text("client,tier\n")
    (tmp_path / "mine.yaml").write_text("defaults: [fedoras_digits]")
    own = tmp_path / "own.yaml"
    for axis, given, message in [
        ("key: tiers.device_table, values: [table.csv]", RUN, r"^table\.csv is not shipped"),
        ("key: experiment, values: [fedoras_digits, ./mine.yaml]", RUN[1:], r"^\./mine\.yaml is not shipped"),
        ("key: method.train.lr, values: [0.1, fast]", RUN, r"lr=fast"),
    ]:
        own.write_text(f"axes: {{a: {{{axis}}}}}\n")
        with pytest.raises(ValueError, match=message):
            prepare([f"ablation={own}", *given], [])


REFUSED = {
    "no results": (["experiment=fedoras_digits"], r"results=results would lie.*absolute path.*s3://"),
    "relative results": (["experiment=fedoras_digits", "results=../r"], r"results=\.\./r would lie"),
    "unknown key": ([*RUN, "method.train.weigting=opa"], r"did you mean 'method\.train\.weighting'"),
    "own cluster": ([*RUN, "ray.address=local"], r"ray\.address=local: a job runs on the cluster of --address"),
    "device table": ([*RUN, "tiers.device_table=d.csv"], r"^d\.csv is not shipped: add --include d\.csv,"),
    "unknown ablation": (["ablation=alpa", *RUN], r"did you mean 'alpha'"),
    "ablation's own key": (["ablation=alpha", "ablation.attempts=0", *RUN], r"ablation\.attempts=0"),
    "ablation without results": (["ablation=alpha", "experiment=fedoras_digits"], r"results=results would lie"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_before_anything_is_sent(case: str) -> None:
    overrides, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        prepare(overrides, [])


@pytest.mark.parametrize("key", ["tiers.device_table", "devices.availability_table", "experiment"])
def test_files_that_the_job_looks_for_have_to_be_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    for folder in ("..", "."):
        Path(folder, "d.yaml").write_text("defaults: [fedoras_digits]")
    assert f"{key}=./d.yaml" in prepare([*RUN, f"{key}=./d.yaml"], [Path("d.yaml")]).entry_point
    for text in ("d.yaml", "../d.yaml"):
        with pytest.raises(ValueError, match=f"^{re.escape(text)} is not shipped: add --include {re.escape(text)}, "):
            prepare([*RUN, f"{key}={text}"], [Path("../d.yaml")] if text == "../d.yaml" else [])


def test_variables_of_the_job() -> None:
    assert parse_environment(["A=1", "B=x=y", "C="]) == {"A": "1", "B": "x=y", "C": ""}


def test_a_variable_may_be_taken_from_here_so_that_its_value_is_in_no_list_of_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEY", "abc=def")
    monkeypatch.setenv("EMPTY", "")
    assert parse_environment(["KEY", "EMPTY", "A=1"]) == {"KEY": "abc=def", "EMPTY": "", "A": "1"}


@pytest.mark.parametrize("text", ["A", "=1", "A-B=1", "", "RAY_AUTH_TOKEN=abcdef", "RAY_AUTH_TOKEN"])
def test_variables_that_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "abcdef")
    with pytest.raises(ValueError, match="--env") as error:
        parse_environment([text])
    assert "abcdef" not in str(error.value)


@pytest.mark.parametrize("address", ["localhost:8265", "ray://h:10001", "http://", "http://me:abcdef@h:8265", "auto"])
def test_addresses_that_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match=re.escape("http://HOST:8265")) as error:
        check_address(address)
    assert "abcdef" not in str(error.value)


def test_an_address_without_an_answer_ends_with_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["submit", "--address", "http://127.0.0.1:1", *RUN])
    assert ended.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) == 1
    assert lines[0].startswith("fedloom: no answer from http://127.0.0.1:1: ")


def test_a_server_that_is_no_dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(address: str) -> None:
        raise RuntimeError("Version check returned 404")

    monkeypatch.setattr(module.requests, "get", lambda *_, **__: None)
    monkeypatch.setattr(module, "JobSubmissionClient", refuses)
    with pytest.raises(ConnectionError, match="answers, but not as Ray's dashboard"):
        connect("http://h:8265")


def test_a_token_that_ray_cannot_find(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(address: str) -> None:
        raise AuthenticationError("RAY_AUTH_TOKEN_PATH is set but file cannot be opened or is empty: /nope")

    monkeypatch.setattr(module.requests, "get", lambda *_, **__: None)
    monkeypatch.setattr(module, "JobSubmissionClient", refuses)
    with pytest.raises(ConnectionError, match="http://h:8265 does not accept the token: set RAY_AUTH_MODE=token and"):
        connect("http://h:8265")


@dataclass
class Details:
    """What the cluster says of a job."""

    status: JobStatus
    driver_exit_code: int | None = None
    message: str | None = None


@pytest.mark.parametrize(
    ("details", "code"),
    [
        (Details(JobStatus.SUCCEEDED, 0), 0),
        (Details(JobStatus.FAILED, 3), 3),
        (Details(JobStatus.FAILED, -9), 137),
        (Details(JobStatus.FAILED, None, "runtime_env setup failed"), 4),
        (Details(JobStatus.STOPPED), 130),
    ],
)
def test_what_the_end_of_a_job_means(details: Any, code: int) -> None:
    assert exit_code(details) == code


@dataclass
class Cluster:
    """A job server whose connections break: each gives the output up to a place, and then fails or ends."""

    output: str = "one\ntwo\nthree\n"
    breaks: list[int | None] = field(default_factory=list)

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        end = self.breaks.pop(0)
        for start in range(0, len(self.output) if end is None else end, 3):
            yield self.output[start : start + 3]
        if end is not None:
            raise RuntimeError("WebSocket connection closed unexpectedly")

    def get_job_info(self, job_id: str) -> Details:
        return Details(JobStatus.SUCCEEDED if not self.breaks else JobStatus.RUNNING, 0)


@pytest.mark.parametrize("breaks", [[None], [4, None], [0, 8, 5, None], [None, None]])
def test_output_is_told_once_over_broken_connections(breaks: list[int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    cluster, told = Cluster(breaks=breaks), list[str]()
    client: Any = cluster
    assert Follower(client, "job", told.append).follow().status == JobStatus.SUCCEEDED
    assert "".join(told) == cluster.output


def test_a_cluster_that_stays_silent_ends_the_following(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    client: Any = Cluster(breaks=[3, 3, 3, 3])
    with pytest.raises(OSError, match="job 7 cannot be followed: WebSocket"):
        Follower(client, "7", [].append).follow()
