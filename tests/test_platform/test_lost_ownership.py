"""A run that another process has taken over writes and deletes nothing more; one that cannot ask goes on."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedloom.experiments.verify import Verified, verified
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import Loop, RoundProgress
from fedloom.platform.results.checkpoint import run_checkpoint
from fedloom.platform.results.copies import MirrorError
from fedloom.platform.results.lock import FILE, Owner, OwnershipLostError
from fedloom.platform.results.paths import RunPaths, list_runs
from fedloom.platform.results.store import Target, local_root
from fedloom.platform.results.tables import is_done, read_table
from fedloom.platform.runs.run import Watcher, make_serial, resume_run, run_to_end, start_run

OTHER = {"token": "t", "host": "far", "place": "elsewhere", "pid": 7, "started": 1, "count": 3, "number": 1}


def contents(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
    }


def take_over(root: Path) -> dict[str, str]:
    """Another machine puts its lease where this process's was; gives what is in the folder then."""
    (path,) = root.glob(f"artifacts/*/{FILE}")
    descriptor = os.open(path, os.O_RDWR)  # in place, as an owner does
    os.pwrite(descriptor, json.dumps(OTHER).encode().ljust(512), 0)
    os.close(descriptor)
    return contents(root)


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), RuntimeError("the machine broke"), None])
def test_who_was_taken_over_writes_no_ending(
    elastic_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, ending: BaseException | None
) -> None:
    config = elastic_config()
    root, before = Path(config.results), {}
    run = Loop.run

    def overtaken(self: Loop, state: Any) -> Any:
        last = run(self, state)
        before.update(take_over(root))
        if ending is not None:
            raise ending
        return last

    monkeypatch.setattr(Loop, "run", overtaken)
    with pytest.raises(OwnershipLostError, match="was taken over by process 7 on far"):
        start_run(config, make_serial)
    assert any("journal" in name for name in before), "the rows that an ending would move"
    assert contents(root) == before


def test_who_is_taken_over_at_work_stops_there(elastic_config: Callable[..., RunConfig]) -> None:
    config = elastic_config()
    root, before = Path(config.results), {}

    class Overtaken:
        def __init__(self, world: Any) -> None:
            self.inner, self.runs = make_serial(world), 0

        def run(self, chunks: Any, weights: Any) -> Any:
            self.runs += 1
            results = list(self.inner.run(chunks, weights))
            if self.runs == 2:
                before.update(take_over(root))
            return iter(results)

        def close(self) -> None:
            self.inner.close()

    end = run_to_end(config, Overtaken, Watcher())
    assert (end.kind, "process 7 on far" in end.message) == ("infrastructure", True)
    changed = {name for name, found in contents(root).items() if before.get(name) != found}
    # The round before may have been on its way to the disk when it was taken over; no later one is.
    assert not {name for name in changed if name.startswith(("runs/", "clients/")) or name.endswith("status.json")}


LAST_CHANGES = [
    ("replace", r"checkpoint/state\.json", 2),
    ("replace", r"clients/.*/part-00000\.parquet", 2),
    ("unlink", r"journal-000001\.jsonl", 1),
]
"""A function, a file's path, and which call for such a file is the one before which an owner is suspended."""


@pytest.mark.parametrize(("function", "file", "times"), LAST_CHANGES)
def test_what_a_suspended_owner_was_about_to_change_stays_as_its_successor_wrote_it(
    elastic_config: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    function: str,
    file: str,
    times: int,
) -> None:
    """It was suspended after it had asked; another process has taken the run over and ended it before it goes on."""
    config = elastic_config()
    root, change, seen = Path(config.results), getattr(os, function), list[str]()

    def suspended(*paths: Any, **more: Any) -> Any:
        if re.search(file, str(paths[-1])):
            seen.append(str(paths[-1]))
            if len(seen) == times:
                (run,) = list_runs(root)
                resume_run(config, run.run_id, make_serial)
        return change(*paths, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, function, suspended)
        check_taken_over(config, monkeypatch, tmp_path)


@pytest.mark.parametrize("times", [4, 7, 10, 13, 30, 50])
def test_what_a_suspended_owner_does_after_it_has_asked_changes_nothing(
    elastic_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, times: int
) -> None:
    """It was suspended directly after the n-th time that it asked."""
    config, check, asked = elastic_config(), Owner.check, list[int]()

    def suspended(self: Owner, *, surely: bool = False) -> None:
        check(self, surely=surely)
        asked.append(1)
        if len(asked) == times:
            (run,) = list_runs(Path(config.results))
            resume_run(config, run.run_id, make_serial)

    with monkeypatch.context() as patch:
        patch.setattr(Owner, "check", suspended)
        check_taken_over(config, monkeypatch, tmp_path)


def check_taken_over(config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Starts a run that is taken over and ended by another process: only what that one wrote is there and read."""
    monkeypatch.setattr("fedloom.platform.results.lock._locked", lambda _: True)
    with pytest.raises(OwnershipLostError, match="was taken over by another process, which has ended since,"):
        start_run(config, make_serial)
    root = Path(config.results)
    (run,) = list_runs(root)
    assert verified(run) == Verified(run.run_id, ())
    assert is_done(run)
    assert len(pd.read_parquet(root / "rounds")) == len(read_table(root, "rounds")), "no row is read twice"
    start_run(replace(config, results=str(tmp_path / "undisturbed")), make_serial)
    for table, columns in {"rounds": ["stage", "round", "loss"], "evaluations": ["model", "value"]}.items():
        expected = read_table(tmp_path / "undisturbed", table)[columns]
        assert read_table(root, table)[columns].equals(expected)
    assert resumed_checkpoint(run) == resumed_checkpoint(list_runs(tmp_path / "undisturbed")[0])


def resumed_checkpoint(run: RunPaths) -> dict[str, Any]:
    checkpoint = run_checkpoint(run)
    sums = {name: [float(t.double().sum()) for t in bag.tensors.values()] for name, bag in checkpoint.bags.items()}
    return {"stage": checkpoint.data["stage"], "round": checkpoint.data["round"], "sums": sums}


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
