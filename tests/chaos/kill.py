"""Kills processes of a command at random moments, goes on with it, and compares the result with an undisturbed one.

    PYTHONPATH=tests python -m chaos.kill --times 100

Each attempt takes a command (mostly `run`, else `ablate`, `search`, `export` or `report`) and ends one of
its processes (driver, server, client actor, raylet, GCS, watcher) or the whole process group, by SIGKILL, SIGTERM, two
SIGINTs, or SIGSTOP followed by SIGKILL. Counts: results that differ, orphans (processes alive 30 s after the command's
end), rounds computed twice beyond the one that was being stored, tracebacks shown, and commands that could not go on.
CHAOS_SUBJECTS names the commands to take (run,ablate,...).
"""

import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from chaos.attack import arguments, attack
from chaos.progress import reached, rounds_again, safe_again
from chaos.subjects import Expected, Subject, subjects, undisturbed
from chaos.victims import Ended, called, ended, start
from fedloom.platform.results.lock import Process, descendants, is_process, process_of

ORPHANS_S = 30.0
VICTIMS = ("driver", "server", "client", "raylet", "gcs", "watcher", "group")
NAMES = {
    "server": "ray::ServerActor",
    "client": "ray::ClientActor",
    "raylet": "raylet/raylet",
    "gcs": "gcs_server",
    "watcher": "fedloom.actors.watcher",
}
BLOWS = ("kill", "term", "interrupts", "stop")
CHOSEN = [*7 * ["run"], "ablate", "search", "export", "report"]
WRONG = ("differ", "orphans", "rounds_lost", "tracebacks", "not_resumed", "hangs")


class Attempt:
    """One command that is struck once, and goes on until it is done."""

    def __init__(self, folder: Path, subject: Subject, seconds: float, rng: random.Random) -> None:
        self.folder, self.subject, self.rng = folder, subject, rng
        self.delay_s = rng.uniform(1.0, seconds)
        self.victim, self.blow = rng.choice(VICTIMS), rng.choice(BLOWS)

    def strike(self) -> tuple[Ended, set[Process]]:
        """Starts the command and strikes; gives its end and all processes that it had."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.subject.start(self.folder)
        driver = start(self.subject.first(self.folder), self.folder, "first")
        root = process_of(driver.pid) or Process(driver.pid, 0)
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
        return process == root if self.victim in ("driver", "group") else is_called(self.victim, process)

    def goes_on(self, most: int = 4) -> list[Ended]:
        """Calls the command again until it is done."""
        ends: list[Ended] = []
        while len(ends) < most and not (ends and ends[-1].code == 0):
            if ends:
                time.sleep(3.0)  # a server that still lives says so
            ends.append(called(self.subject.again(self.folder), self.folder, f"again{len(ends)}"))
        return ends


def is_called(victim: str, process: Process) -> bool:
    """Whether a process is one of `NAMES`, by its command line."""
    try:
        line = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return False
    return NAMES[victim] in line


def orphans(known: set[Process]) -> list[Process]:
    """The processes that still live after `ORPHANS_S`."""
    end_s = time.monotonic() + ORPHANS_S
    while (left := [p for p in known if is_process(*p)]) and time.monotonic() < end_s:
        time.sleep(0.5)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    return left


def counted(attempt: Attempt, expected: Expected) -> Counter[str]:
    """Strikes, goes on, and counts what came of it."""
    first, known = attempt.strike()
    left = orphans(known)
    before = reached(attempt.folder / "results")
    ends = [first] if first.code == 0 else [first, *attempt.goes_on()]
    done = ends[-1].code == 0
    identical = done and attempt.subject.alike(attempt.subject.outcome(attempt.folder, ends), expected.outcome)
    again, safe = rounds_again(before) if done else 0, safe_again(attempt.folder / "results")
    return Counter(
        {
            "differ": int(done and not identical),
            "orphans": len(left),
            "rounds_twice": again,
            "rounds_lost": max(0, again - len(before)) + safe,
            "tracebacks": int(any(end.has_traceback for end in ends)),
            "not_resumed": int(not done),
            "hangs": sum(end.code == 124 for end in ends),
            f"struck {attempt.victim} by {attempt.blow}": 1,
            attempt.subject.name: 1,
            "identical": int(identical),
        }
    )


def main() -> None:
    """Strikes as often as asked."""
    args = arguments(__doc__)
    folder = args.folder / "kill"
    known = subjects(folder)
    chosen = os.environ["CHAOS_SUBJECTS"].split(",") if "CHAOS_SUBJECTS" in os.environ else CHOSEN
    expected: dict[str, Expected] = {}

    def blow(number: int, rng: random.Random) -> Counter[str]:
        subject = known[rng.choice(chosen)]
        if subject.name not in expected:
            expected[subject.name] = undisturbed(subject, folder / subject.name)
        attempt = Attempt(folder / f"attempt-{number}", subject, expected[subject.name].seconds, rng)
        counts = counted(attempt, expected[subject.name])
        if not any(counts[what] for what in WRONG):
            shutil.rmtree(attempt.folder, ignore_errors=True)
        return counts

    attack("kill", blow, args, WRONG)


if __name__ == "__main__":
    main()
