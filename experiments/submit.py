"""Submits a run or an ablation to a Ray cluster as a job: checks it locally, ships its files, follows its output."""

import asyncio
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import requests
from ray.exceptions import RayError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from fedloom.actors.cluster import SET_TOKEN
from fedloom.experiments.ablation.config import PREFIX, load_ablation_config
from fedloom.experiments.ablation.plan import plan_of
from fedloom.experiments.runs.configuration import compose_config
from fedloom.experiments.runs.overrides import read
from fedloom.experiments.runs.own_presets import is_own
from fedloom.experiments.runs.presets import PRESET
from fedloom.experiments.shipping import Shipment, plan_shipment, shipped, target_of
from fedloom.experiments.store.ablations import Trial
from fedloom.experiments.terminal import INFRASTRUCTURE, INTERRUPTED, OK
from fedloom.platform.federation.config import GENERATED
from fedloom.platform.results.store import local_root
from fedloom.platform.runs.run_files import input_files
from fedloom.platform.words import shown

Tell = Callable[[str], None]
"""Receives pieces of output, including line ends."""

ANSWER_TIMEOUT_S = 10.0
PATIENCE_S = 60.0
"""Seconds for which a cluster that answered before may fail to answer."""
RETRY_S = 2.0
ABLATION = "ablation="


@dataclass(frozen=True)
class Submission:
    """The arguments of `fedloom submit`.

    `address` is the URL of the cluster's dashboard; `include` names the user's files to ship; `environment` holds the
    variables of the job and its workers.
    """

    address: str
    overrides: tuple[str, ...]
    include: tuple[Path, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    wait: bool = True


@dataclass(frozen=True)
class JobEnd:
    """The state of a job: its status in Ray, and the exit code of this command."""

    job_id: str
    status: str
    exit_code: int
    shipped_bytes: int
    message: str = ""


def submit(submission: Submission, tell: Tell) -> JobEnd:
    """Ships and starts the job, passes its output to `tell`, and returns how it ended.

    Raises:
        ValueError: a local check fails, before any file is sent.
        ConnectionError: the cluster does not answer or does not accept the token.
        OSError: the cluster rejects the job, or stops answering before the job ends.
    """
    address = check_address(submission.address)
    job = prepare(submission.overrides, submission.include)
    tell(f"shipping {job.shipment.summary()}\n")
    client = connect(address)
    job_id, size_bytes = _send(client, job, submission.environment), job.shipment.size_bytes
    try:
        tell(f"job {job_id} submitted to {address}\n")
        if not submission.wait:
            return JobEnd(job_id, "PENDING", OK, size_bytes, commands(address, job_id))
        details = Follower(client, job_id, tell).follow()
    except KeyboardInterrupt:
        message = f"job {job_id} is left running: {commands(address, job_id)}"
        return JobEnd(job_id, "RUNNING", INTERRUPTED, size_bytes, message)
    return JobEnd(job_id, details.status.value, exit_code(details), size_bytes, _message(job_id, details))


def commands(address: str, job_id: str) -> str:
    """The commands with which the user follows or stops the job."""
    return (
        f"follow it with `ray job logs --address {address} --follow {job_id}`, "
        f"end it with `ray job stop --address {address} {job_id}`"
    )


@dataclass(frozen=True)
class PreparedJob:
    """The shell command and the files of a checked job."""

    entry_point: str
    shipment: Shipment


def prepare(overrides: Sequence[str], include: Sequence[Path]) -> PreparedJob:
    """Checks the overrides of a run or an ablation and collects the files of its job.

    Raises ValueError with one line for overrides that the job would reject, and for results in the job's own folder,
    which is deleted after the job.
    """
    command, sent = "run", list(overrides)
    trials: tuple[Trial, ...] = ()
    ablation_name = next((o.removeprefix(ABLATION) for o in overrides if o.startswith(ABLATION)), None)
    if ablation_name is None:
        composed = list(overrides)
    else:
        command = "ablate"
        name, ablation = load_ablation_config(ablation_name, [o for o in overrides if o.startswith(PREFIX)])
        rest = [o for o in overrides if not o.startswith((PREFIX, ABLATION))]
        composed = [*ablation.overrides, *rest]  # in this order in the job
        if ablation.search.kind != "bayesian":  # whose points the cluster's Optuna suggests
            trials = plan_of(name, ablation, rest, named=f"{ABLATION}{ablation_name}", ablation_id=name).trials
        if ablation_name.endswith((".yaml", ".yml")):  # ships the definition; the job finds it in its folder
            file = Path(ablation_name)
            include = [*include, file]
            sent = [f"{ABLATION}{target_of(file)}" if o == f"{ABLATION}{ablation_name}" else o for o in overrides]
    config = compose_config(composed)
    local_root(config.results)  # refuses a URL that holds a secret, which would be on the job's command line
    if "://" not in config.results and not Path(config.results).is_absolute():
        raise ValueError(
            f"results={config.results} would lie in the job's temporary folder and be lost with it: give an absolute "
            "path on a disk that all of the cluster's machines share, or a URL, such as results=/shared/results or "
            "results=s3://bucket/results"
        )
    if config.ray.address != "auto":
        raise ValueError(f"ray.address={config.ray.address}: a job runs on the cluster of --address; leave this out")
    shipment = plan_shipment(include)
    for values, texts in [(asdict(config), composed), *((trial.config, trial.overrides) for trial in trials)]:
        _check_shipped(values, texts, shipment)
    return PreparedJob(entry_point(command, sent), shipment)


def _check_shipped(config: Mapping[str, Any], overrides: Sequence[str], shipment: Shipment) -> None:
    """Raises ValueError for a preset or an input file that the job would look for in its folder in vain."""
    targets = {file.target for file in shipment.files}
    tables = {config["tiers"]["device_table"], config["devices"]["availability_table"]} - {None, GENERATED}
    named = [f"{PRESET}{override.value}" for override in map(read, overrides) if override.key == "experiment"]
    presets = [override.removeprefix(PRESET) for override in named if is_own(override)]
    for text in [*presets, *sorted(map(str, {*tables, *input_files(config)}))]:
        path = os.path.normpath(os.path.expanduser(text))
        if not os.path.isabs(path) and PurePosixPath(path) not in targets:
            raise ValueError(f"{text} is not shipped: add --include {text}, in the folder that holds it or above")


def entry_point(command: str, overrides: Sequence[str]) -> str:
    """The job's shell command; it runs in the job's folder, which holds the shipped `fedloom/`."""
    return shlex.join(["python", "-m", "fedloom.experiments.cli", command, *overrides])


def parse_environment(texts: Sequence[str]) -> dict[str, str]:
    """Parses `NAME=VALUE`, or `NAME` for a variable of this process, whose value then shows in no list of processes.

    Raises ValueError for other texts, for a `NAME` that is not set here, and for the cluster's token, because other
    users can read a job's variables.
    """
    environment = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name.isidentifier():
            raise ValueError(f"--env {shown(name)}: give NAME=VALUE, such as FEDLOOM_DATA=/shared/data, or NAME")
        if name.startswith("RAY_AUTH"):
            raise ValueError(f"--env {name}: the cluster knows its token, and a job's variables can be read by others")
        if not equals and name not in os.environ:
            raise ValueError(f"--env {name}: {name} is not set here: set it, or give NAME=VALUE")
        environment[name] = value if equals else os.environ[name]
    return environment


def check_address(address: str) -> str:
    """Returns the URL of a dashboard without a trailing slash; raises ValueError for any other text."""
    parts = urlsplit(address)
    if "@" in parts.netloc:
        raise ValueError("--address holds a user or password: give http://HOST:8265, and the token in RAY_AUTH_TOKEN")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--address {address}: give the URL of the cluster's dashboard, such as http://HOST:8265")
    return address.rstrip("/")


def connect(address: str) -> JobSubmissionClient:
    """Connects to the cluster's job server; raises ConnectionError that says what to do if it does not answer."""
    try:
        # Ray's client sets no timeout and would wait minutes for an address that drops packets.
        requests.get(f"{address}/api/version", timeout=ANSWER_TIMEOUT_S)
        with _this_address(address):
            return JobSubmissionClient(address)
    except RayError as error:
        raise ConnectionError(f"the cluster at {address} does not accept the token: {SET_TOKEN}") from error
    except requests.RequestException as error:
        raise ConnectionError(
            f"no answer from {address}: is the cluster's dashboard there (port 8265), and can this machine reach it?"
        ) from error
    except (RuntimeError, ValueError, KeyError, ConnectionError) as error:
        raise ConnectionError(f"{address} answers, but not as Ray's dashboard: give http://HOST:8265") from error


@contextmanager
def _this_address(address: str) -> Iterator[None]:
    """Makes Ray's client use this address in the block, since it otherwise prefers RAY_ADDRESS to its argument."""
    name = "RAY_API_SERVER_ADDRESS"
    before = os.environ.get(name)
    os.environ[name] = address
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _send(client: JobSubmissionClient, job: PreparedJob, environment: Mapping[str, str]) -> str:
    with shipped(job.shipment) as folder:
        # No pip or uv environment: the job uses the cluster's installed torch and Ray.
        runtime_env: dict[str, Any] = {"working_dir": str(folder), "env_vars": dict(environment)}
        try:
            return str(client.submit_job(entrypoint=job.entry_point, runtime_env=runtime_env))
        except RuntimeError as error:
            raise OSError(f"the cluster does not take the job: {_first_line(str(error))}") from error


class Follower:
    """Passes on the output of a job exactly once, reconnecting as often as necessary."""

    def __init__(self, client: JobSubmissionClient, job_id: str, tell: Tell) -> None:
        self._client, self._job_id, self._tell = client, job_id, tell
        self._told = 0

    def follow(self) -> JobDetails:
        """Passes on the output until the job ends, and retries a broken connection for up to `PATIENCE_S`.

        Raises OSError if the cluster still does not answer.
        """
        failing_since: float | None = None
        while True:
            try:
                asyncio.run(self._tell_output())
                details = self._client.get_job_info(self._job_id)
                failing_since = None
                if details.status.is_terminal():
                    return details
            except (OSError, RuntimeError, RayError, aiohttp.ClientError) as error:
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > PATIENCE_S:
                    raise OSError(f"job {self._job_id} cannot be followed: {_first_line(str(error))}") from error
            time.sleep(RETRY_S)

    async def _tell_output(self) -> None:
        # Every connection starts with the first line of the output, so that known text is skipped.
        seen = 0
        async for text in self._client.tail_job_logs(self._job_id):
            known = max(self._told - seen, 0)
            seen += len(text)
            if known < len(text):
                self._told = seen
                self._tell(text[known:])


def exit_code(details: JobDetails) -> int:
    """The job's own exit code; INFRASTRUCTURE if its command did not run to its end."""
    code = details.driver_exit_code
    if details.status == JobStatus.SUCCEEDED:
        return OK
    if details.status == JobStatus.STOPPED:
        return INTERRUPTED
    if not code:
        return INFRASTRUCTURE
    return code if code > 0 else 128 - code  # a signal, encoded as in shells


def _message(job_id: str, details: JobDetails) -> str:
    if details.status == JobStatus.SUCCEEDED:
        return ""
    if details.status == JobStatus.STOPPED:
        return f"job {job_id} was stopped"
    if details.driver_exit_code:
        return f"job {job_id} failed with exit code {exit_code(details)}"
    return f"job {job_id} was not run to its end: {_first_line(details.message or 'the cluster gives no reason')}"


def _first_line(text: str) -> str:
    return next((" ".join(line.split())[:300] for line in text.splitlines() if line.strip()), "no reason given")
