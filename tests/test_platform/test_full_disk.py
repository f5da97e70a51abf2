"""A full disk leaves either no run, or one that continues to the same end once there is room."""

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedloom.experiments.runs.configuration import stored_config
from fedloom.experiments.verify import verified
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.results.paths import list_runs
from fedloom.platform.runs.logs import close_log, log_to
from fedloom.platform.runs.run import make_serial, resume_run, start_run

WRITES = ("write", "pwrite", "mkdir")


class Disk:
    """Takes so many more changes, and is full then: every further one fails, as long as it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.root, self.left, self.done = root, -1, 0
        for name, place in (("replace", 1), ("mkdir", 0), ("write", None), ("pwrite", None)):
            monkeypatch.setattr(os, name, self._guarded(getattr(os, name), place))

    def _guarded(self, real: Callable[..., Any], place: int | None) -> Callable[..., Any]:
        def guarded(*args: Any, **options: Any) -> Any:
            path = os.fspath(args[place]) if place is not None else os.readlink(f"/proc/self/fd/{args[0]}")
            if str(path).startswith(str(self.root)):
                self.done += 1
                if self.left == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                self.left -= 1
            return real(*args, **options)

        return guarded

    @contextmanager
    def full_after(self, changes: int) -> Iterator[None]:
        self.left = changes
        yield
        self.left = -1


def test_a_full_disk_leaves_no_run_or_one_that_ends_the_same(
    elastic_config_in: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stable_rows: Any,
    assert_same_rows: Any,
) -> None:
    whole = elastic_config_in(tmp_path / "whole", train={"epochs": 1, "batch_size": 64})
    disk = Disk(monkeypatch, tmp_path)
    run_id = start_run(whole, make_serial)
    expected, changes = stable_rows(tmp_path / "whole", run_id), disk.done
    assert changes > 60
    begun = 0
    # The owner's lease, renewed by the clock and given up last, may be left unwritten without an error.
    for moment in range(0, changes - 3, 4):
        config = replace(whole, results=str(tmp_path / f"full-{moment}"))
        with disk.full_after(moment), pytest.raises(OSError, match="No space left"):
            start_run(config, make_serial)
        runs = list_runs(Path(config.results))
        assert [p.run_id for p in runs] == [p.name for p in Path(config.results).glob("artifacts/*")]
        for paths in runs:
            begun += 1
            assert verified(paths).whole
            resume_run(stored_config(config.results, paths.run_id)[1], paths.run_id, make_serial)
            assert_same_rows(stable_rows(Path(config.results), paths.run_id), expected)
    assert begun > 5


def test_a_log_that_cannot_be_written_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    handler = log_to(tmp_path / "logs" / "server.log")
    for _ in range(3):
        logging.getLogger("fedloom.platform.runs").warning("something")
    close_log(handler)
    assert capsys.readouterr().err.count("server.log cannot be written (Not a directory)") == 1
