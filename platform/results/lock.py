"""One owner per run or ablation: a lock that ends with its process and, for results at a URL, one lease object.

An owner holds the lock of the folder's file `.owner` for as long as its process lives (`flock`, by `filelock`): the
system releases it however the process ends, and a suspended process keeps it. So a dead owner blocks nothing on one
machine, nor on a disk that several share. At a URL, which has no locks, the object `.owner` is the lease: whoever finds
one there is refused, unless its owner has ended on this very machine, or the user says that it has (`--take-over`).
"""

import json
import os
import platform
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
from filelock import FileLock, Timeout

from fedloom.platform.results.files import MOST_NOTE_BYTES, content_hash, from_json, opened, read_file, typed
from fedloom.platform.results.store import Target, is_remote, open_target

FILE = ".owner"
WAIT_S = 1.0
"""Seconds to wait for a lock: a fetch holds one while it replaces files."""
SETTLE_S = 1.0
"""Seconds after which a lease is read again, in case another machine wrote its own at the same moment."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class OwnedError(ValueError):
    """Another process owns the run or ablation."""


class OwnershipLostError(RuntimeError):
    """Another process has taken over the copy at the URL, which this one must not write any more."""


# -- processes ---------------------------------------------------------------------------------------------------------


class Process(NamedTuple):
    """A process of this machine: its number, which the system re-uses, and its start time in seconds since the boot."""

    pid: int
    started: float


def this_place() -> str:
    """Identifies this boot of the machine and the container: process numbers are comparable only within both."""
    try:
        return f"{_BOOT_ID.read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return platform.node()


def this_process() -> Process:
    """The current process."""
    return Process(os.getpid(), _started_s(os.getpid()))


def _started_s(pid: int) -> float:
    """When a process started, in seconds since the boot: psutil's time since 1970 shifts when the clock is adjusted."""
    try:
        # Bytes, because the kernel cuts a process's name after 15 of them, which may be within a character.
        ticks = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
        return ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):  # it has ended, or this is not Linux
        return float(psutil.Process(pid).create_time())


def process_of(pid: int) -> Process | None:
    """The process with this number; None if it has ended, even if it is still a zombie."""
    try:
        process = psutil.Process(pid)
        is_over = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return None if is_over else Process(pid, _started_s(pid))
    except (psutil.Error, ValueError, OverflowError):
        return None


def is_process(pid: int, started: float) -> bool:
    """Whether the process with this number and start time still exists."""
    return process_of(pid) == Process(pid, started)


def children(parents: Collection[Process]) -> set[Process]:
    """The direct children of these processes."""
    numbers = {parent.pid for parent in parents}
    return {process for process, parent in _parents().items() if parent in numbers}


def descendants(roots: Collection[Process]) -> set[Process]:
    """The living processes among these, and all of their descendants that have not been re-parented."""
    parents = _parents()
    processes = new = {root for root in roots if is_process(*root)}
    while new:
        numbers = {process.pid for process in new}
        new = {process for process, parent in parents.items() if parent in numbers} - processes
        processes = processes | new
    return processes


def end_all(processes: Collection[Process], grace_s: float) -> list[Process]:
    """Waits for these processes to end, kills those that have not after `grace_s`, and returns the killed ones."""
    end_s = time.monotonic() + grace_s
    while (left := [p for p in processes if is_process(*p)]) and time.monotonic() < end_s:
        time.sleep(0.2)
    for process in left:
        with suppress(psutil.Error):
            psutil.Process(process.pid).kill()
    return left


def _parents() -> dict[Process, int]:
    """All processes with the number of their parent."""
    parents = {}
    for process in psutil.process_iter(["pid", "ppid", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE:
            with suppress(psutil.Error):  # it has just ended
                parents[Process(process.info["pid"], _started_s(process.info["pid"]))] = process.info["ppid"]
    return parents


# -- who owns a folder -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lease:
    """The owner of a folder: a process (see `Process`) and its machine, identified by `place` (see `this_place`).

    `token` identifies the local folder, because one process may own the copies of one run in two folders.
    """

    token: str
    host: str
    place: str
    pid: int
    started: float

    @classmethod
    def own(cls, folder: Path) -> "Lease":
        """The lease of the current process for this local folder."""
        token = content_hash(str(folder.resolve()).encode())
        return cls(token, platform.node()[:64], this_place(), *this_process())

    @property
    def is_over(self) -> bool:
        """Whether its process is known to have ended; False for a process of another machine."""
        return self.place == this_place() and not is_process(self.pid, self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def encoded(self) -> bytes:
        """The content of the file `.owner`."""
        return json.dumps(asdict(self)).encode()


def _decoded(content: bytes) -> Lease | None:
    """The lease in the content of a file; None for a damaged one."""
    try:
        return typed(Lease, from_json(content, FILE))
    except (ValueError, TypeError, KeyError):
        return None


class RemoteLease:
    """The ownership of a folder at a URL by this process."""

    def __init__(
        self, target: Target, folder: str, what: str, own: Lease, *, fresh: bool = False, take_over: bool = False
    ) -> None:
        """Raises OwnedError naming the owner if another process has the lease; a `fresh` folder is not checked.

        No other process can know a folder that was just made. `take_over` replaces the lease, whoever has it. `own` is
        that of the local folder, whose lock this process holds: where it is found, it could not be deleted earlier.
        """
        self._target, self._name, self._what = target, f"{folder}/{FILE}", what
        self._own, self.lost = own, ""
        # An empty file came with a copied folder, whose owner had ended (see `owned`).
        if not fresh and not take_over and (content := self._read()):
            other = _decoded(content)
            if other is None or not (other == own or other.is_over):
                raise OwnedError(self._refusal(other))
        self._target.write(self._name, self._own.encoded())
        if not fresh:
            time.sleep(SETTLE_S)
            if (content := self._read()) != self._own.encoded():
                raise OwnedError(self._refusal(_decoded(content or b"")))

    def ask(self) -> None:
        """Raises OwnershipLostError if another process has taken over, and OSError if this cannot be found out now."""
        if not self.lost and (content := self._read()) != self._own.encoded():
            by = _decoded(content or b"") or "another process"
            self.lost = f"{self._what} was taken over at {self._target.url} by {by}: nothing is written there any more"
        if self.lost:  # for good, even if the new owner ends and removes its lease
            raise OwnershipLostError(self.lost)

    def release(self) -> None:
        """Ends the ownership."""
        with suppress(OSError, OwnershipLostError):
            self.ask()
            self._target.delete(self._name)

    def _read(self) -> bytes | None:
        try:
            return self._target.read(self._name)
        except FileNotFoundError:
            return None

    def _refusal(self, other: Lease | None) -> str:
        return (
            f"{self._what} is at work in {other or 'another process'}, says {self._target.url}: stop that one first; "
            "if it has ended without saying so, --take-over goes on with its work"
        )


class Ownership:
    """This process's ownership of a results folder and, if the results are at a URL, of the copy there."""

    def __init__(self, lease: RemoteLease | None = None) -> None:
        self._lease = lease

    def __call__(self) -> None:
        """Raises OwnershipLostError if a take-over is already known; makes no request."""
        if self._lease is not None and self._lease.lost:
            raise OwnershipLostError(self._lease.lost)

    def ask(self) -> None:
        """Asks at the URL whether another process has taken over (see `RemoteLease.ask`)."""
        if self._lease is not None:
            self._lease.ask()


@contextmanager
def owned(
    folder: Path, what: str, results: str | Path, root: Path, *, fresh: bool = False, take_over: bool = False
) -> Iterator[Ownership]:
    """Owns a folder of the results in `root`, and its copy if they are at a URL, for the duration of the block.

    Raises OwnedError, a one-line ValueError naming the owner. `fresh` says that the folder was just made; `take_over`
    replaces the lease at a URL.
    """
    with ExitStack() as held:
        held.enter_context(_locked(folder, what, WAIT_S))
        own = Lease.own(folder)
        _say(folder, own.encoded())
        held.callback(_say, folder, b"")
        lease = None
        if is_remote(results):
            name = folder.relative_to(root).as_posix()
            lease = RemoteLease(open_target(str(results)), name, what, own, fresh=fresh, take_over=take_over)
            held.callback(lease.release)
        yield Ownership(lease)


def check_unowned(folder: Path, what: str) -> None:
    """Raises OwnedError if a process of this machine, or of another one that shares the disk, owns the folder."""
    if (folder / FILE).exists():
        with _locked(folder, what, 0):
            pass


@contextmanager
def unowned(folder: Path) -> Iterator[bool]:
    """Yields whether no other process owns the folder; if so, none can take it up within the block."""
    try:
        with _locked(folder, "", 0) if folder.is_dir() else ExitStack():
            yield True
    except OwnedError:
        yield False


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Lets only one process at a time into such a block for this folder; the others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock", thread_local=False):
        yield


@contextmanager
def _locked(folder: Path, what: str, wait_s: float) -> Iterator[None]:
    path = folder / FILE
    lock = FileLock(path, timeout=wait_s, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        try:
            owner = _decoded(read_file(path, MOST_NOTE_BYTES))
        except (OSError, ValueError):
            owner = None
        raise OwnedError(
            f"{what} is at work in {owner or 'another process'}: stop that one first, or let it end"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _say(folder: Path, content: bytes) -> None:
    """Writes the owner into the locked file, in place: only processes that are refused read it."""
    with suppress(OSError), os.fdopen(opened(folder / FILE, os.O_WRONLY), "wb") as file:  # a full disk
        file.write(content)
        file.truncate()
