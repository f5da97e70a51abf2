"""One owner per run or ablation: a lock for the life of a process, and a lease that other machines can watch.

A folder's file `.owner` is locked (`flock`) by its owner, and holds the owner's lease: which process it is, and a count
that it raises every few seconds. The operating system frees the lock when the process ends in any way. Where the file
system has no locks, and at URLs, the lease decides: on this machine by the process that it names, of another machine
by whether its count rises while it is watched. Clocks are never compared, so that setting one changes nothing.

Every owner has a higher number than all before it, kept with the folder by the name of a file that one process alone
can make, `.owner~2.claim`, and by those of the files that it writes (see `fence`). Who finds a higher one is replaced.

A lease that cannot be read says nothing about who has it: one failed request to a URL ends no run. The owner raises its
count only over its own lease, so that it never takes back what another has taken over.

"""

import fcntl
import json
import logging
import os
import platform
import signal
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol
from uuid import uuid4

from fedloom.platform.results.fence import MOST_OWNERS, Fence, number_of
from fedloom.platform.results.files import from_json, opened, typed
from fedloom.platform.results.store import Target, is_remote, open_target

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


logger = logging.getLogger(__name__)

FILE = ".owner"
BEAT_S = 5.0
PATIENCE_S = 30.0
"""Seconds for which a lease of another machine is watched before it counts as dead."""
FAR_FACTOR = 2.0
"""By how much both are longer at a URL."""
SETTLE_S = 1.0
"""Seconds after which a lease at a URL is read again, in case another machine wrote its own at the same moment."""
GAP_S = 0.2
"""Seconds after which a lease that is missing is looked for again."""
_SIZE_BYTES = 512


class OwnedError(ValueError):
    """Another process owns the run or ablation."""


class OwnershipLostError(RuntimeError):
    """Another process took over because this one did not answer; this one must not write any more."""


class DamagedLeaseError(OSError):
    """There is a lease, but it is not a whole one: it is just being renewed, or its owner was killed meanwhile."""


@dataclass(frozen=True)
class Lease:
    """Who owns a folder; `place` is that of `this_place`."""

    token: str
    host: str
    place: str
    pid: int
    started: int
    count: int = 0
    number: int = 0

    @property
    def is_here(self) -> bool:
        """Whether its process is, or was, on this machine."""
        return self.place == this_place()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Kept(Protocol):
    """Where a lease is kept."""

    beat_s: float
    patience_s: float
    settle_s: float

    def lock(self) -> bool:
        """Takes the lock, if there is one; whether no other process has it."""
        ...

    def read(self) -> Lease | None:
        """The lease; None if there is none. Raises OSError if that is not known."""
        ...

    def write(self, lease: Lease | None) -> None:
        """Replaces the lease; None removes it."""
        ...

    def numbers(self) -> list[int]:
        """The numbers of all owners that the folder has had, as far as its files tell; 0 is the first one's."""
        ...

    def claim(self, number: int, /) -> bool:
        """Takes a number for this process; whether no other process has taken it."""
        ...

    def claimed(self) -> int | None:
        """The highest number that any process has taken; None where that cannot be told."""
        ...

    def close(self) -> None:
        """Frees the lock."""
        ...


class LeaseFile:
    """The lease of a folder, in a file of fixed size that is renewed in place, also on a full disk."""

    settle_s = 0.0

    def __init__(self, folder: Path) -> None:
        self.beat_s, self.patience_s, self._folder = BEAT_S, PATIENCE_S, folder
        self._descriptor = opened(folder / FILE, os.O_RDWR | os.O_CREAT)

    def lock(self) -> bool:
        """Takes the lock, if the file system has locks."""
        return _locked(self._descriptor)

    def read(self) -> Lease | None:
        """The lease in the file."""
        content = os.pread(self._descriptor, _SIZE_BYTES, 0)
        return _decoded(content) if content.strip() else None

    def write(self, lease: Lease | None) -> None:
        """Replaces the lease in the file."""
        content = b"" if lease is None else json.dumps(asdict(lease)).encode()
        os.pwrite(self._descriptor, content.ljust(_SIZE_BYTES), 0)

    def numbers(self) -> list[int]:
        """The numbers in the names of the folder's files, also of those that take a number."""
        return [0, *(number_of(name) for _, _, names in os.walk(self._folder) for name in names)]

    def claim(self, number: int, /) -> bool:
        """Takes a number by a file that only one process can make; removes those of lower numbers."""
        try:
            os.close(os.open(self._folder / _claim_name(number), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        for name in os.listdir(self._folder):
            if _is_claim(name) and number_of(name) < number:
                (self._folder / name).unlink(missing_ok=True)
        return True

    def claimed(self) -> int:
        """The highest number that has been taken by such a file."""
        return max((number_of(name) for name in os.listdir(self._folder) if _is_claim(name)), default=0)

    def close(self) -> None:
        """Frees the lock; the file stays."""
        os.close(self._descriptor)


class LeaseObject:
    """The lease of a folder at a URL, which has no locks."""

    def __init__(self, target: Target, folder: str) -> None:
        self.beat_s, self.patience_s, self.settle_s = FAR_FACTOR * BEAT_S, FAR_FACTOR * PATIENCE_S, SETTLE_S
        self._target, self._folder, self._name = target, folder, f"{folder}/{FILE}"

    def lock(self) -> bool:
        """True."""
        return True

    def read(self) -> Lease | None:
        """The lease at the URL."""
        try:
            return _decoded(self._target.read(self._name))
        except FileNotFoundError:
            return None

    def write(self, lease: Lease | None) -> None:
        """Replaces the lease at the URL."""
        if lease is None:
            self._target.delete(self._name)
        else:
            self._target.write(self._name, json.dumps(asdict(lease)).encode())

    def numbers(self) -> list[int]:
        """The numbers in the names of the folder's files, and that of the last lease."""
        lease = _whole(self)
        named = (number_of(name.rpartition("/")[2]) for name in self._target.list([self._folder]))
        return [0 if lease is None else lease.number, *named]

    def claim(self, _number: int, /) -> bool:
        """True: at a URL two processes cannot be kept from one number, but one of them finds the other's lease."""
        return True

    def claimed(self) -> None:
        """None."""

    def close(self) -> None:
        """Does nothing."""


class Owner:
    """The ownership of one folder by this process; `owned` makes it."""

    def __init__(self, kept: Kept, what: str, *, fresh: bool = False, least: int = 0) -> None:
        """Raises OwnedError, naming the owner, if another process has it; nobody else can know a `fresh` folder.

        The owner's number is at least `least`; that of a fresh folder is 0.
        """
        self._kept, self._what, self._fresh, self._released = kept, what, fresh, False
        self._lost, self._ask_again_s = "", 0.0
        self._lease = Lease(uuid4().hex, platform.node()[:64], this_place(), *this_process())
        self._claim(least)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beats, name="owner", daemon=True)
        self._thread.start()

    def check(self, *, surely: bool = False) -> None:
        """Raises OwnershipLostError if another process has taken over, as after a suspension, and after `release`.

        `surely` raises OSError if the lease cannot be read.
        """
        if self._released:
            raise OwnershipLostError(f"{self._what} is not this process's any more")
        if not surely and time.monotonic() < self._ask_again_s:
            return
        try:
            there, claimed = (self._lease, None) if self._lost else (self._read(), self._kept.claimed())
        except OSError:
            # Whoever asks before each write must not wait for the network each time that it is out of reach.
            self._ask_again_s = time.monotonic() + self._kept.beat_s
            if surely:
                raise
            return
        # Once lost it stays so: the new owner's lease may be out of reach later, or gone.
        if not self._lost and self._is_lost(there, claimed):
            other = "another process" if there is not None else "another process, which has ended since,"
            by = there if there is not None and there.token != self._lease.token else other
            self._lost = f"{self._what} was taken over by {by} while this process did not answer"
        if self._lost:
            raise OwnershipLostError(self._lost)

    @property
    def number(self) -> int:
        """Higher than that of every process that owned the folder before."""
        return self._lease.number

    def _is_lost(self, there: Lease | None, claimed: int | None) -> bool:
        if claimed is not None and claimed > self.number:
            return True
        if there is None:
            return claimed is None
        # A lease with a lower number is one that a replaced owner was just about to write.
        return there.token != self._lease.token and there.number >= self.number

    def _read(self) -> Lease | None:
        if (there := self._kept.read()) is None:
            time.sleep(GAP_S)  # there are stores that replace a file by deleting it first
            there = self._kept.read()
        return there

    def release(self) -> None:
        """Ends the ownership."""
        self._over.set()
        self._thread.join()
        with suppress(OSError, OwnershipLostError):
            self.check(surely=True)
            self._kept.write(None)
        self._released = True

    def _claim(self, least: int) -> None:
        if not self._kept.lock():
            raise OwnedError(_refusal(self._what, _whole(self._kept)))
        found = _whole(self._kept)
        if found is not None and _lives(self._what, self._kept, found):
            raise OwnedError(_refusal(self._what, found))
        if not self._fresh:
            number = max(least, 1 + max(*self._kept.numbers(), 0 if found is None else found.number))
            while number <= MOST_OWNERS and not self._kept.claim(number):
                number += 1
            if number > MOST_OWNERS:  # only a made-up lease or name; a higher number could not be read back
                raise OwnedError(f"{self._what} says that it had {number - 1} owners: restore it from a copy")
            self._lease = replace(self._lease, number=number)
        self._kept.write(self._lease)
        if not self._fresh:
            time.sleep(self._kept.settle_s)
        # Where there are no locks, two processes can come this far at once: the one with the higher number has it, or
        # at a URL the one that wrote last.
        if self._is_lost(there := _whole(self._kept), self._kept.claimed()):
            raise OwnedError(_refusal(self._what, there))

    def _beats(self) -> None:
        while not self._over.wait(self._kept.beat_s):
            with suppress(OSError, OwnershipLostError):
                with suppress(DamagedLeaseError):  # its own, cut short: it is written anew
                    self.check(surely=True)
                self._lease = replace(self._lease, count=self._lease.count + 1)
                self._kept.write(self._lease)


class Ownership:
    """The ownership of a folder of the results by this process, and of its copy at their URL."""

    def __init__(self, owners: Sequence[Owner]) -> None:
        """The first one owns the folder on this machine."""
        self._owners = owners
        self.fence = Fence(owners[0].number, owners[0].check)

    def __call__(self, *, surely: bool = False) -> None:
        """Asks whether the process still is the owner: raises OwnershipLostError once another one has taken over.

        `surely` raises OSError where that cannot be known, for what can be tried again later.
        """
        for owner in self._owners:
            owner.check(surely=surely)


@contextmanager
def owned(folder: Path, what: str, results: str | Path, root: Path, *, fresh: bool = False) -> Iterator[Ownership]:
    """Owns a folder of the results in `root`, and its copy at their URL, for the duration of the block.

    Gives the ownership, to be asked before writing, which the fence of its files does itself.
    Raises OwnedError, a one-line ValueError that says who has it; an owner on another machine that ended without saying
    so is watched for up to a minute. `fresh` is a folder that was made just now.
    """
    with ExitStack() as held:
        near = LeaseFile(folder)
        held.callback(near.close)
        far = None
        if is_remote(results):
            far = LeaseObject(open_target(str(results)), folder.relative_to(root).as_posix())
        least = 0 if far is None or fresh else 1 + max(far.numbers())
        with one_at_a_time(folder):  # not while a fetch replaces its files
            owners = [Owner(near, what, fresh=fresh, least=least)]
        held.callback(owners[0].release)
        if far is not None:
            owners.append(Owner(far, what, fresh=fresh, least=owners[0].number))
            held.callback(owners[1].release)
        yield Ownership(owners)


def check_unowned(folder: Path, what: str) -> None:
    """Raises OwnedError if a process of this machine, or the holder of the lock, owns the folder; does not wait."""
    if not (folder / FILE).exists():
        return
    kept = LeaseFile(folder)
    try:
        free, found = kept.lock(), _whole(kept)
    finally:
        kept.close()
    if not free or (found is not None and _lives_here(found)):
        raise OwnedError(_refusal(what, found))


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Waits until no other process is in such a block with this folder, where the file system has locks."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _claim_name(number: int) -> str:
    return f"{FILE}~{number}.claim"


def _is_claim(name: str) -> bool:
    return name.startswith(f"{FILE}~")


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _decoded(content: bytes) -> Lease:
    try:
        return typed(Lease, from_json(content, FILE))
    except (ValueError, TypeError) as error:
        raise DamagedLeaseError("the lease is damaged") from error


def _whole(kept: Kept) -> Lease | None:
    """The lease; None if there is none or it is damaged, as one that a killed process left behind."""
    try:
        return kept.read()
    except DamagedLeaseError:
        return None


def _lives_here(found: Lease) -> bool:
    return found.is_here and found.pid != os.getpid() and is_process(found.pid, found.started)


def _lives(what: str, kept: Kept, found: Lease) -> bool:
    """Whether the process of a lease still is at work; one of another machine is watched."""
    if found.is_here:
        return _lives_here(found)
    logger.warning(
        "%s was last at work in %s, which did not end it: watching for %g s whether it still is",
        *(what, found, kept.patience_s),
    )
    end_s, gone = time.monotonic() + kept.patience_s, 0
    # One unreadable lease may be one that is just being renewed.
    while time.monotonic() < end_s and gone < 2:
        time.sleep(min(1.0, kept.patience_s / 10))
        now = _whole(kept)
        if now is not None and now != found:
            return True
        gone = gone + 1 if now is None else 0
    return False


def _refusal(what: str, found: Lease | None) -> str:
    return f"{what} is at work in {found or 'another process'}: stop that one first, or let it end"
