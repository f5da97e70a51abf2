"""Kills processes of a run at random moments, resumes it, and compares the result with an undisturbed run.

    python -m fedloom.experiments.chaos.kill --times 100

Each attempt ends one process (driver, server, client actor, raylet, GCS, watcher) or the whole process group, by
SIGKILL, SIGTERM, two SIGINTs, or SIGSTOP followed by SIGKILL. Counts: tables that differ, orphans (processes alive 30 s
after the run's end), rounds done twice beyond the one in progress, tracebacks shown, and runs that could not resume.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fedloom.experiments.chaos.attack import arguments, attack
from fedloom.experiments.chaos.victims import RAY, SERIAL, TINY, Ended, called, ended, frames, reference, same, start
from fedloom.platform.results.processes import Process, descendants, is_process, started_ticks

ORPHANS_S = 30.0
VICTIMS = ("driver", "server", "client", "raylet", "gcs", "watcher", "group")
NAMES = {"server": "ray::ServerActor", "client": "ray::ClientActor", "raylet": "raylet/raylet", "gcs": "gcs_server"}
BLOWS = ("kill", "term", "interrupts", "stop")
WRONG = ("differ", "orphans", "rounds_lost", "tracebacks", "not_resumed", "hangs")


class Attempt:
    """One run that is struck once, and resumed until it is done."""

    def __init__(self, folder: Path, overrides: Sequence[str], seconds: float, rng: random.Random) -> None:
        self.folder, self.overrides, self.rng = folder, overrides, rng
        self.results = folder / "results"
        self.delay_s = rng.uniform(1.0, seconds)
        self.victim, self.blow = rng.choice(VICTIMS), rng.choice(BLOWS)

    def strike(self) -> tuple[Ended, set[Process]]:
        """Starts the run and strikes; gives its end and all processes that it had."""
        shutil.rmtree(self.folder, ignore_errors=True)
        driver = start(["run", *self.overrides, f"results={self.results}"], self.folder, "first")
        root = Process(driver.pid, started_ticks(driver.pid) or 0)
        known: set[Process] = set()
        end_s = time.monotonic() + self.delay_s
        while driver.poll() is None and time.monotonic() < end_s:
            known |= descendants([root])
            time.sleep(0.2)
        if driver.poll() is None:
            known |= descendants([root])
            self._strike(driver, root, known)
        return ended(driver, self.folder, "first", 120.0), known

    def _strike(self, driver: subprocess.Popen[bytes], root: Process, known: set[Process]) -> None:
        targets = [p.pid for p in known if is_process(*p) and self._is_victim(p, root)] or [driver.pid]
        number = targets[self.rng.randrange(len(targets))]
        send = os.killpg if self.victim == "group" else os.kill
        first, pause_s, second = {
            "kill": (signal.SIGKILL, 0.0, None),
            "term": (signal.SIGTERM, 0.0, None),
            "interrupts": (signal.SIGINT, 0.5, signal.SIGINT),
            "stop": (signal.SIGSTOP, 3.0, signal.SIGKILL),
        }[self.blow]
        with suppress(ProcessLookupError):
            send(number, first)
            time.sleep(pause_s)
            if second is not None:
                send(number, second)

    def _is_victim(self, process: Process, root: Process) -> bool:
        if self.victim in ("driver", "group"):
            return process == root
        try:
            line = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            return False
        return NAMES.get(self.victim, "fedloom.actors.watcher") in line

    def resumed(self, run_id: str, most: int = 4) -> list[Ended]:
        """Resumes until the run is done; a run that never began is started again."""
        ends: list[Ended] = []
        executor = [o for o in self.overrides if o.startswith(("executor.", "ray."))]
        again = ["resume", run_id, "--results", str(self.results), *executor]
        command = again if run_id else ["run", *self.overrides, f"results={self.results}"]
        while len(ends) < most and not (ends and ends[-1].code == 0):
            if ends:
                time.sleep(3.0)  # a server that still lives says so
            ends.append(called(command, self.folder, f"again{len(ends)}"))
        return ends


def orphans(known: set[Process]) -> list[Process]:
    """The processes that still live after `ORPHANS_S`."""
    end_s = time.monotonic() + ORPHANS_S
    while (left := [p for p in known if is_process(*p)]) and time.monotonic() < end_s:
        time.sleep(0.5)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    return left


def main() -> None:
    """Strikes as often as asked."""
    args = arguments(__doc__)
    overrides = [*TINY, *(SERIAL if os.environ.get("CHAOS_EXECUTOR") == "serial" else RAY)]
    expected, seconds, rounds = reference(args.folder / "kill", overrides)

    def blow(number: int, rng: random.Random) -> Counter[str]:
        attempt = Attempt(args.folder / "kill" / f"attempt-{number}", overrides, seconds, rng)
        first, known = attempt.strike()
        left = orphans(known)
        runs = sorted(p.name for p in (attempt.results / "artifacts").glob("*"))
        run_id = runs[0] if runs else ""
        ends = [] if first.code == 0 else attempt.resumed(run_id)
        run_id = run_id or (ends[-1].run_id if ends else "")
        done = first.code == 0 or (bool(ends) and ends[-1].code == 0)
        identical = done and same(frames(attempt.results, run_id), expected)
        told = first.rounds + sum(end.rounds for end in ends)
        counts = Counter(
            {
                "differ": int(done and not identical),
                "orphans": len(left),
                "rounds_twice": max(0, told - rounds),
                "rounds_lost": max(0, told - rounds - 1),
                "tracebacks": int(any(end.has_traceback for end in (first, *ends))),
                "not_resumed": int(not done),
                "hangs": sum(end.code == 124 for end in (first, *ends)),
                f"struck {attempt.victim} by {attempt.blow}": 1,
                "identical": int(identical),
            }
        )
        if not any(counts[what] for what in WRONG):
            shutil.rmtree(attempt.folder, ignore_errors=True)
        return counts

    attack("kill", blow, args, WRONG)


if __name__ == "__main__":
    main()
