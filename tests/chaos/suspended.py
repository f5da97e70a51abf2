"""Suspends owners of a run directly before they write: nobody else may have it, or, at a URL, only with --take-over.

    PYTHONPATH=tests python -m chaos.suspended --times 20

Each attempt resumes an interrupted run and stops the process directly before one of its replacements or deletions. On
one machine another resume is refused; then the first process goes on, or is killed and the run is resumed. At a URL a
second machine is refused, takes the run over and ends it; then the first process goes on, and has to end without
changing the copy. Nothing may tell that it was there.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from chaos.attack import arguments, attack
from chaos.interrupted import interrupted
from chaos.subjects import SHARED, run_on, undisturbed
from chaos.victims import SERIAL, TINY, Ended, called, ended, frames, same, start
from fedloom.experiments import cli
from fedloom.platform.results import lock

WRONG = ("silent", "tracebacks", "hangs", "unexplained")
MODULE = "chaos.suspended"
CHANGES = 150
"""More changes of files than a resumed run makes, so that some attempts stop nobody."""
AS_OWNER = "--as-owner"
RESULTS = re.compile(r"/(artifacts/|run_id=)(?!.*\.owner)")
"""The files of a run, without those that say who owns it."""


def as_owner(machine: str, stop_before: int, command: list[str]) -> None:
    """Is fedloom on a machine of its own, which stops before the n-th change of a local file; 0 never does."""
    changes = 0
    lock.this_place = lambda: machine
    os.environ["FEDLOOM_CACHE"] = f"{os.environ['FEDLOOM_CACHE']}-{machine}"

    def stopping(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal changes
            if RESULTS.search(str(args[-1])):
                changes += 1
                if changes == stop_before:
                    os.kill(os.getpid(), signal.SIGSTOP)
            return change(*args, **kwargs)

        return call

    for name in ("replace", "unlink"):
        setattr(os, name, stopping(getattr(os, name)))
    cli.main(command)


def is_stopped(process: subprocess.Popen[bytes], most_s: float = 120.0) -> bool:
    """Waits until a process stops itself, or ends."""
    end_s = time.monotonic() + most_s
    while time.monotonic() < end_s and process.poll() is None:
        if Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.05)
    return False


def doubled(root: Path) -> int:
    """The rounds that plain pandas reads twice."""
    return int(pd.read_parquet(root / "rounds")[["stage", "round"]].duplicated().sum())


def main() -> None:
    """Suspends as many owners as asked."""
    if sys.argv[1:2] == [AS_OWNER]:
        as_owner(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
        return
    args = arguments(__doc__)
    expected = undisturbed(run_on(SERIAL), args.folder / SHARED).outcome
    template = interrupted(args.folder / SHARED, [*TINY, *SERIAL])

    def blow(number: int, rng: random.Random) -> Counter[str]:
        place = (args.folder / "suspended" / f"attempt-{number}").absolute()
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(template.root, place / "results", ignore=shutil.ignore_patterns(".owner"))
        os.environ["FEDLOOM_CACHE"] = str(place / "cache")
        is_remote = rng.random() < 0.5
        results = ["--results", f"file://{place / 'results'}" if is_remote else str(place / "results")]
        resume = ["resume", template.run_id, *results]
        first = start([AS_OWNER, "here", str(rng.randrange(1, CHANGES)), *resume], place, "first", MODULE)
        stopped, ends, unexplained = is_stopped(first), list[Ended](), 0
        machine = "there" if is_remote else "here"
        if stopped:
            refused = called([AS_OWNER, machine, "0", *resume], place, "refused", module=MODULE)
            ends.append(refused)
            unexplained += int(refused.code != 2 or "is at work in process" not in refused.err)
            if is_remote:
                ends.append(called([AS_OWNER, machine, "0", *resume, "--take-over"], place, "second", module=MODULE))
            os.kill(first.pid, signal.SIGKILL if not is_remote and rng.random() < 0.5 else signal.SIGCONT)
        last = ended(first, place, "first", 120.0)
        unexplained += int(stopped and is_remote and "taken over" not in last.err)
        ends += [last, called([AS_OWNER, machine, "0", *resume], place, "third", module=MODULE)]
        whole = called(["verify", template.run_id, "--results", str(place / "results")], place, "verify")
        rows = same(frames(place / "results", template.run_id), expected) and not doubled(place / "results")
        counts = Counter(
            {
                "silent": int(not rows or whole.code != 0),
                "tracebacks": sum(end.has_traceback for end in ends),
                "hangs": sum(end.code == 124 for end in ends),
                "unexplained": unexplained,
                "suspended": int(stopped),
                "at a URL": int(stopped and is_remote),
                "ended before": int(not stopped),
            }
        )
        if not any(counts[what] for what in WRONG):
            shutil.rmtree(place, ignore_errors=True)
        return counts

    attack("suspended", blow, args, WRONG)


if __name__ == "__main__":
    main()
