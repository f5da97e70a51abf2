"""Suspends owners of a run between asking whether they still own it and writing; others take over, and both go on.

    PYTHONPATH=tests python -m chaos.suspended --times 20

Each attempt resumes an interrupted run without locks, as if on a machine of its own, and stops the process directly
before one of its replacements or deletions. Another machine takes the run over and ends it, or is killed on the way;
then the first process goes on, and the run is resumed until it is done. Nothing may tell that it was there.
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
from chaos.victims import SERIAL, TINY, called, ended, frames, same, start
from fedloom.experiments import cli
from fedloom.platform.results import lock as owner

WRONG = ("silent", "tracebacks", "hangs", "unexplained")
MODULE = "chaos.suspended"
CHANGES = 150
"""More changes of files than a resumed run makes, so that some attempts stop nobody."""
AS_OWNER = "--as-owner"
RESULTS = re.compile(r"/(artifacts/|run_id=)(?!.*\.owner)")
"""The files of a run, without those that say who owns it."""


def as_owner(machine: str, stop_before: int, command: list[str]) -> None:
    """Is fedloom on a machine without locks, which stops before the n-th change of a file; 0 never does."""
    changes, apart = 0, {"_locked": lambda _: True, "this_place": lambda: machine, "PATIENCE_S": 0.5, "BEAT_S": 0.1}
    for name, value in apart.items():
        setattr(owner, name, value)

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
        shutil.copytree(template.root, place / "results")
        results = ["--results", str(place / "results")]
        resume = ["resume", template.run_id, *results]
        first = start([AS_OWNER, "here", str(rng.randrange(1, CHANGES)), *resume], place, "first", MODULE)
        stopped = is_stopped(first)
        ends = []
        if stopped:
            second = start([AS_OWNER, "there", "0", *resume], place, "second", MODULE)
            if rng.random() < 0.5:  # killed after so many rounds, if there are that many left
                rounds = rng.randrange(1, 8)
                while second.poll() is None and (place / "second.out").read_text().count("train accuracy") < rounds:
                    time.sleep(0.02)
                second.kill()
            else:
                ends.append(ended(second, place, "second"))
            second.wait()
            os.kill(first.pid, signal.SIGCONT)
        taken = ended(first, place, "first", 60.0)
        ends += [taken, called([AS_OWNER, "third", "0", *resume], place, "third", module=MODULE)]
        whole = called(["verify", template.run_id, *results], place, "verify")
        rows = same(frames(place / "results", template.run_id), expected) and not doubled(place / "results")
        counts = Counter(
            {
                "silent": int(not rows or whole.code != 0),
                "tracebacks": sum(end.has_traceback for end in ends),
                "hangs": sum(end.code == 124 for end in ends),
                "unexplained": int(stopped and "taken over" not in taken.err),
                "suspended": int(stopped),
                "ended before": int(not stopped),
            }
        )
        if not any(counts[what] for what in WRONG):
            shutil.rmtree(place, ignore_errors=True)
        return counts

    attack("suspended", blow, args, WRONG)


if __name__ == "__main__":
    main()
