"""A process that ends what a dead driver started: Ray's processes do not outlive the run that they belong to.

The driver of a run with its own Ray starts a watcher, and closes the pipe to it when Ray has ended. If the driver dies
in any way, the pipe closes, too. The watcher follows Ray's processes by process id and start time, gives them a few
seconds to end by themselves, and ends the rest. It keeps a record of them, from which `fedloom status --clean` ends
those that remain if the watcher was killed as well.
"""

import json
import os
import select
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from fedloom.platform.data.config import machine_cache
from fedloom.platform.results.files import write_atomically
from fedloom.platform.results.lock import Process, children, descendants, end_all, is_process, this_place, this_process

EVERY_S = 1.0
GRACE_S = 8.0
"""Seconds after the driver's end in which its processes may end by themselves."""


class Record(NamedTuple):
    """The processes that a driver on this machine has started."""

    path: Path
    driver: Process
    processes: tuple[Process, ...]

    @property
    def is_over(self) -> bool:
        """Whether the driver has ended."""
        return not is_process(*self.driver)


def records_folder() -> Path:
    """Where the watchers of this machine's drivers keep their records."""
    return machine_cache() / "processes"


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Within the block, this process starts Ray and nothing else; afterwards a watcher knows Ray's processes.

    The watcher ends with `unwatch`, or when this process dies. Its record is in `folder`.
    """
    unwatch()
    known = [*children([this_process()])]
    arguments = [str(folder), json.dumps([this_process(), known])]
    # A session of its own, so that a signal to the driver's process group does not end it.
    process = subprocess.Popen(
        [sys.executable, "-m", "fedloom.actors.watcher", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    _WATCHERS.append(process)
    try:
        try:
            yield
        finally:  # also if Ray's start has failed, so that what this process starts later is not taken for Ray's
            assert process.stdin is not None
            ours = {each.pid for each in known} | {process.pid}
            rays = sorted(child for child in children([this_process()]) if child.pid not in ours)
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(rays).encode())
                process.stdin.flush()
    except BaseException:
        unwatch()
        raise


_WATCHERS: list[subprocess.Popen[bytes]] = []


def unwatch() -> None:
    """Tells the watcher that Ray has ended, so that it ends the processes left over; does not wait for it."""
    while _WATCHERS:
        process = _WATCHERS.pop()
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()


def watch(folder: Path, driver: Process, before: Collection[Process], pipe: int = 0) -> None:
    """Follows the driver's new children and their descendants until the pipe closes; then ends those that are left."""
    os.nice(5)
    path = folder / f"{driver.pid}-{driver.started}.json"
    roots, known, written, is_ready = set[Process](), set[Process](), set[Process](), False
    apart = {process.pid for process in (*before, this_process())}
    wait_s = 0.0  # what was said while this process started comes first
    while True:
        if select.select([pipe], [], [], wait_s)[0]:
            if not (said := os.read(pipe, 1 << 16)):
                break
            is_ready, roots = True, {Process(*child) for child in json.loads(said)}
            apart |= {root.pid for root in roots}
            later = descendants([child for child in children([driver]) if child.pid not in apart])
            known = known - later
        if not is_ready:  # until the driver says which of its children are Ray's
            roots |= {child for child in children([driver]) if child.pid not in apart}
        known = descendants(known | roots)
        if known != written:
            _write(path, driver, known)
            written = known
        wait_s = EVERY_S
    end_all(known | descendants(known), GRACE_S)
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _write(path: Path, driver: Process, processes: Collection[Process]) -> None:
    with suppress(OSError):  # without a record the watcher still ends them
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"place": this_place(), "driver": driver, "processes": sorted(processes)}
        write_atomically(path, json.dumps(content).encode(), durable=False)


def left_over(folder: Path) -> list[Record]:
    """This machine's records of drivers that have ended while their processes live; removes outdated records."""
    left = []
    for path in sorted(folder.glob("[0-9]*.json")):
        record = _read(path)
        living = [] if record is None else [p for p in record.processes if is_process(*p)]
        if record is not None and living and record.is_over:
            left.append(record._replace(processes=tuple(living)))
        elif record is None or record.is_over:
            with suppress(OSError):
                path.unlink()
    return left


def _read(path: Path) -> Record | None:
    """The record in a file; None if it is damaged, from another machine, or from before this one was started."""
    try:
        content = json.loads(path.read_bytes())
        if content["place"] != this_place():
            return None
        processes = tuple(Process(*process) for process in content["processes"])
        return Record(path, Process(*content["driver"]), processes)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def clean(records: Collection[Record]) -> list[Process]:
    """Ends the processes of these records of dead drivers; returns the processes that it has ended."""
    ended = []
    for record in records:
        ended += end_all(descendants(record.processes), grace_s=0.0)
        with suppress(OSError):
            record.path.unlink(missing_ok=True)
    return ended


if __name__ == "__main__":
    given_driver, given_before = json.loads(sys.argv[2])
    watch(Path(sys.argv[1]), Process(*given_driver), [Process(*p) for p in given_before])
