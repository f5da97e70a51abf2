"""Processes identified beyond doubt: a number alone is used again, with its time of start it is not."""

import os
import platform
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LOOK_S = 0.2


class Process(NamedTuple):
    """A process of this machine: its number, and when it started, in clock ticks since the machine did."""

    pid: int
    started: int


def this_place() -> str:
    """Identifies this machine since its start, and the container: process numbers are comparable only within it."""
    try:
        return f"{_BOOT_ID.read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return platform.node()


def started_ticks(pid: int) -> int | None:
    """When a process started; None if it has ended, or waits to be collected; 0 on systems that do not tell."""
    if not Path("/proc/self/stat").exists():
        return 0 if _answers(pid) else None
    stat = _stat(pid)
    return None if stat is None or stat.state in {"Z", "X"} else stat.started


def this_process() -> Process:
    """The process that asks."""
    return Process(os.getpid(), started_ticks(os.getpid()) or 0)


def is_process(pid: int, started: int) -> bool:
    """Whether the process that started then still exists."""
    return started_ticks(pid) == started


def children(parents: Collection[Process]) -> set[Process]:
    """The direct children of these processes."""
    numbers = {parent.pid for parent in parents}
    return {process for process, parent in _parents().items() if parent in numbers}


def descendants(roots: Collection[Process]) -> set[Process]:
    """The living processes among these, and all that they, and their children, have started and still own."""
    parents = _parents()
    found = {root for root in roots if root in parents}
    new = set(found)
    while new:
        numbers = {process.pid for process in new}
        new = {process for process, parent in parents.items() if parent in numbers} - found
        found |= new
    return found


def end_all(processes: Collection[Process], grace_s: float) -> list[Process]:
    """Waits until these processes have ended, kills those that have not after `grace_s`, and returns these."""
    end_s = time.monotonic() + grace_s
    while (left := [p for p in processes if is_process(*p)]) and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
    for process in left:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)
    return left


class _Stat(NamedTuple):
    state: str
    parent: int
    started: int


def _stat(pid: int) -> _Stat | None:
    try:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return _Stat(values[0], int(values[1]), int(values[19]))


def _parents() -> dict[Process, int]:
    """All processes with the number of their parent; none on systems that do not tell."""
    found = {}
    with suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            if name.isdigit() and (stat := _stat(int(name))) is not None and stat.state not in {"Z", "X"}:
                found[Process(int(name), stat.started)] = stat.parent
    return found


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
