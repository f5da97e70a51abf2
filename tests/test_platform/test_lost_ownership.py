"""A run whose copy at a URL another process has taken over writes nothing more there; one that cannot ask goes on."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import RoundProgress
from fedloom.platform.results import copies
from fedloom.platform.results.copies import MirrorError
from fedloom.platform.results.lock import FILE
from fedloom.platform.results.paths import list_runs
from fedloom.platform.results.status import read_status
from fedloom.platform.results.store import Target, local_root
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import Watcher, make_serial, run_to_end, start_run

OTHER = {"token": "t", "host": "far", "place": "elsewhere", "pid": 7, "started": 1}


def contents(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
    }


def test_who_is_taken_over_at_work_ends_and_changes_nothing_there(
    elastic_config: Callable[..., RunConfig], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "INTERVAL_S", 0.02)
    bucket, before = tmp_path / "bucket" / "results", dict[str, str]()

    def overtaken(progress: RoundProgress) -> None:
        if progress.round == 1 and not before:
            (path,) = bucket.glob(f"artifacts/*/{FILE}")
            path.write_text(json.dumps(OTHER))
            before.update(contents(bucket))

    end = run_to_end(elastic_config(results=url), make_serial, Watcher(round=overtaken))
    assert (end.kind, "taken over" in end.message, "process 7 on far" in end.message) == ("infrastructure", True, True)
    changed = {name for name, found in contents(bucket).items() if before.get(name) != found}
    assert len(changed) <= 1, "the file that was just being sent"
    (run,) = list_runs(local_root(url))
    assert read_status(run.status).state in ("failed", "done")


def break_reading(monkeypatch: pytest.MonkeyPatch, failures: list[int]) -> None:
    """Lets the next `failures[0]` requests for a lease fail."""
    read = Target.read

    def failing(self: Target, name: str) -> bytes:
        if name.endswith(FILE) and failures[0]:
            failures[0] -= 1
            raise OSError("AWS Error NETWORK_CONNECTION: curlCode: 28, Timeout was reached")
        return read(self, name)

    monkeypatch.setattr(Target, "read", failing)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return f"file://{tmp_path}/bucket/results"


def test_a_lease_that_cannot_be_read_for_a_moment_ends_no_run(
    elastic_config: Callable[..., RunConfig], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [0]
    break_reading(monkeypatch, failures)

    def fail(progress: RoundProgress) -> None:
        failures[0] = 3 if progress.round == 0 else 0

    start_run(elastic_config(results=url), make_serial, Watcher(round=fail))
    assert read_table(tmp_path / "bucket" / "results", "runs")["status"].tolist() == ["done"]


def test_without_the_lease_nothing_is_copied_but_the_run_is_done_here(
    elastic_config: Callable[..., RunConfig], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [0]
    break_reading(monkeypatch, failures)

    def fail(_: RoundProgress) -> None:
        failures[0] = 10**6

    with pytest.raises(MirrorError, match="Timeout was reached"):
        start_run(elastic_config(results=url), make_serial, Watcher(round=fail))
    assert "done" in read_table(local_root(url), "runs")["status"].tolist()
