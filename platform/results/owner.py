"""One owner per run or ablation: a lock for the life of a process, and a lease that other machines can watch.

A folder's file `.owner` is locked (`flock`) by its owner, and holds the owner's lease: which process it is, and a count
that it raises every few seconds. The operating system frees the lock when the process ends in any way. Where the file
system has no locks, and at URLs, the lease decides: on this machine by the process that it names, of another machine
by whether its count rises while it is watched. Clocks are never compared, so that setting one changes nothing.

A lease that cannot be read says nothing about who has it: one failed request to a URL ends no run. The owner raises its
count only over its own lease, so that it never takes back what another has taken over.
"""

import fcntl
import json
import logging
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from fedloom.platform.results.files import from_json, opened, typed
from fedloom.platform.results.processes import is_process, this_place, this_process
from fedloom.platform.results.target import Target, is_remote, open_target

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


class Check(Protocol):
    """Asks whether the process still is the owner, to be called before writing."""

    def __call__(self, *, surely: bool = False) -> None:
        """Raises OwnershipLostError once another process has taken over.

        `surely` raises OSError where that cannot be known, for what can be tried again later.
        """
        ...


@dataclass(frozen=True)
class Lease:
    """Who owns a folder; `place` is that of `this_place`."""

    token: str
    host: str
    place: str
    pid: int
    started: int
    count: int = 0

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

    def close(self) -> None:
        """Frees the lock."""
        ...


class LeaseFile:
    """The lease of a folder, in a file of fixed size that is renewed in place, also on a full disk."""

    settle_s = 0.0

    def __init__(self, folder: Path) -> None:
        self.beat_s, self.patience_s = BEAT_S, PATIENCE_S
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

    def close(self) -> None:
        """Frees the lock; the file stays."""
        os.close(self._descriptor)


class LeaseObject:
    """The lease of a folder at a URL, which has no locks."""

    def __init__(self, target: Target, folder: str) -> None:
        self.beat_s, self.patience_s, self.settle_s = FAR_FACTOR * BEAT_S, FAR_FACTOR * PATIENCE_S, SETTLE_S
        self._target, self._name = target, f"{folder}/{FILE}"

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

    def close(self) -> None:
        """Does nothing."""


class Owner:
    """The ownership of one folder by this process; `owned` makes it."""

    def __init__(self, kept: Kept, what: str, *, fresh: bool = False) -> None:
        """Raises OwnedError, naming the owner, if another process has it; nobody else can know a `fresh` folder."""
        self._kept, self._what, self._fresh, self._released = kept, what, fresh, False
        self._lost, self._ask_again_s = "", 0.0
        self._lease = Lease(uuid4().hex, platform.node()[:64], this_place(), *this_process())
        self._claim()
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
            there = self._lease if self._lost else self._read()
        except OSError:
            # Whoever asks before each write must not wait for the network each time that it is out of reach.
            self._ask_again_s = time.monotonic() + self._kept.beat_s
            if surely:
                raise
            return
        # Once lost it stays so: the new owner's lease may be out of reach later, or gone.
        if there is None or there.token != self._lease.token:
            by = there or "another process, which has ended since,"
            self._lost = f"{self._what} was taken over by {by} while this process did not answer"
        if self._lost:
            raise OwnershipLostError(self._lost)

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

    def _claim(self) -> None:
        if not self._kept.lock():
            raise OwnedError(_refusal(self._what, _whole(self._kept)))
        found = _whole(self._kept)
        if found is not None and _lives(self._what, self._kept, found):
            raise OwnedError(_refusal(self._what, found))
        self._kept.write(self._lease)
        if not self._fresh:
            time.sleep(self._kept.settle_s)
        # Where there are no locks, two processes can come this far at once: the one that wrote last has it.
        if (there := _whole(self._kept)) is None or there.token != self._lease.token:
            raise OwnedError(_refusal(self._what, there))

    def _beats(self) -> None:
        while not self._over.wait(self._kept.beat_s):
            with suppress(OSError, OwnershipLostError):
                with suppress(DamagedLeaseError):  # its own, cut short: it is written anew
                    self.check(surely=True)
                self._lease = replace(self._lease, count=self._lease.count + 1)
                self._kept.write(self._lease)


@contextmanager
def owned(folder: Path, what: str, results: str | Path, root: Path, *, fresh: bool = False) -> Iterator[Check]:
    """Owns a folder of the results in `root`, and its copy at their URL, for the duration of the block.

    Gives a function that raises OwnershipLostError once another process has taken over, to be called before writing.
    Raises OwnedError, a one-line ValueError that says who has it; an owner on another machine that ended without saying
    so is watched for up to a minute. `fresh` is a folder that was made just now.
    """
    with ExitStack() as held:
        near = LeaseFile(folder)
        held.callback(near.close)
        with one_at_a_time(folder):  # not while a fetch replaces its files
            owners = [Owner(near, what, fresh=fresh)]
        held.callback(owners[0].release)
        if is_remote(results):
            far = LeaseObject(open_target(str(results)), folder.relative_to(root).as_posix())
            owners.append(Owner(far, what, fresh=fresh))
            held.callback(owners[1].release)

        def check(*, surely: bool = False) -> None:
            for owner in owners:
                owner.check(surely=surely)

        yield check


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
