"""One owner per run: who is kept out, who takes over, and that no clock decides."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedloom.platform.results import lock as owner_module
from fedloom.platform.results.lock import (
    FILE,
    Lease,
    LeaseObject,
    OwnedError,
    OwnershipLostError,
    check_unowned,
    one_at_a_time,
    owned,
    this_place,
)
from fedloom.platform.results.store import Target, open_target

HOLD = """
import sys, time
from pathlib import Path
from fedloom.platform.results.lock import owned
with owned(Path(sys.argv[1]), "run r1", "results", Path(sys.argv[1])):
    print("owned", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_module, "PATIENCE_S", 0.5)
    monkeypatch.setattr(owner_module, "BEAT_S", 0.05)
    monkeypatch.setattr(owner_module, "SETTLE_S", 0.05)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "owned\n"
    yield process
    process.kill()
    process.wait()


def take(folder: Path, results: str | None = None) -> Any:
    return owned(folder, "run r1", results or str(folder), folder.parent if results else folder)


def lease(folder: Path, **changes: Any) -> None:
    """Leaves a lease of a process of another machine, or changes the one there."""
    path = folder / FILE
    other = {"token": "t", "host": "far", "place": "elsewhere", "pid": 7, "started": 1, "count": 0, "number": 99}
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)  # in place, as an owner does
    os.pwrite(descriptor, json.dumps({**other, **changes}).encode().ljust(512), 0)
    os.close(descriptor)


def test_another_process_is_kept_out_and_told_who_has_it(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    said = f"run r1 is at work in process {holder.pid} on .*: stop that one first"
    with pytest.raises(OwnedError, match=said), take(tmp_path):
        pytest.fail("two owners")
    with pytest.raises(OwnedError, match=said):
        check_unowned(tmp_path, "run r1")


def test_who_is_killed_owns_nothing(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    assert json.loads((tmp_path / FILE).read_bytes())["pid"] == holder.pid  # it could not say that it ended
    check_unowned(tmp_path, "run r1")
    with take(tmp_path) as check:
        check()
    assert not (tmp_path / FILE).read_bytes().strip()


def test_a_suspended_process_still_owns(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    os.kill(holder.pid, 19)
    with pytest.raises(OwnedError, match=str(holder.pid)), take(tmp_path):
        pytest.fail("two owners")


def test_without_locks_the_process_in_the_lease_decides(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_module, "_locked", lambda _: True)
    with pytest.raises(OwnedError, match=str(holder.pid)), take(tmp_path):
        pytest.fail("two owners")
    holder.kill()
    holder.wait()
    with take(tmp_path):
        pass


def test_a_number_that_another_process_has_now_keeps_nobody_out(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_module, "_locked", lambda _: True)
    lease(tmp_path, place=this_place(), pid=holder.pid, started=1)
    with take(tmp_path):
        pass


@pytest.mark.parametrize("jump_s", [-7200.0, 0.0, 7200.0])
def test_a_lease_of_another_machine_is_watched_and_no_clock_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, jump_s: float
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + jump_s)
    lease(tmp_path)
    with take(tmp_path):  # nobody raises the count
        pass
    assert "run r1 was last at work in process 7 on far, which did not end it: watching for 0.5 s" in caplog.text
    lease(tmp_path)
    with counting(tmp_path), pytest.raises(OwnedError, match="process 7 on far"), take(tmp_path):
        pytest.fail("two owners")


@contextmanager
def counting(folder: Path) -> Iterator[None]:
    """Another machine that raises the count of its lease."""
    over = threading.Event()

    def count() -> None:
        for number in itertools.count(1):
            lease(folder, count=number)
            if over.wait(0.02):
                return

    thread = threading.Thread(target=count)
    thread.start()
    yield
    over.set()
    thread.join()


def test_who_was_taken_over_may_not_write_and_does_not_take_back(tmp_path: Path) -> None:
    with take(tmp_path) as check:
        lease(tmp_path)
        with pytest.raises(OwnershipLostError, match="run r1 was taken over by process 7 on far"):
            check()
        time.sleep(0.2)
        assert json.loads((tmp_path / FILE).read_bytes())["host"] == "far"
    assert json.loads((tmp_path / FILE).read_bytes())["host"] == "far"


def test_who_knows_that_it_was_taken_over_does_not_forget_it(tmp_path: Path) -> None:
    with take(tmp_path) as check:
        lease(tmp_path)
        with pytest.raises(OwnershipLostError):
            check()
        (tmp_path / FILE).write_bytes(b"{damaged")
        with pytest.raises(OwnershipLostError, match="process 7 on far"):
            check()


def test_a_lease_that_is_gone_is_lost_and_one_that_cannot_be_read_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, there = tmp_path / "here" / "r1", tmp_path / "there" / "r1"
    folder.mkdir(parents=True)
    read = Target.read

    def unreachable(self: Target, name: str) -> bytes:
        raise OSError("no route")

    with take(folder, f"file://{tmp_path}/there") as check:
        monkeypatch.setattr(Target, "read", unreachable)
        check()
        with pytest.raises(OSError, match="no route"):
            check(surely=True)
        lease(there)
        time.sleep(0.3)
        assert json.loads((there / FILE).read_bytes())["host"] == "far", "it is not renewed over what is not known"
        (there / FILE).unlink()  # before it can be read again, by the thread that renews it, too
        monkeypatch.setattr(Target, "read", read)
        with pytest.raises(OwnershipLostError, match="another process, which has ended since"):
            check(surely=True)
    assert not (there / FILE).exists()


def test_a_lease_out_of_reach_is_not_asked_for_before_every_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = tmp_path / "here" / "r1", list[str]()
    folder.mkdir(parents=True)

    def unreachable(self: Target, name: str) -> bytes:
        asked.append(threading.current_thread().name)
        raise OSError("no route")

    with take(folder, f"file://{tmp_path}/there") as check:
        monkeypatch.setattr("fedloom.platform.results.lock.FAR_FACTOR", 1000.0)
        monkeypatch.setattr(Target, "read", unreachable)
        for _ in range(50):
            check()
        assert asked.count(threading.current_thread().name) <= 5  # each would wait until the network gives up


def test_a_damaged_lease_keeps_nobody_out(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b'{"token": "t", "ho')
    check_unowned(tmp_path, "run r1")
    with take(tmp_path) as check:
        check()


def test_leases_written_at_the_same_moment_do_not_meet(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def write(name: str) -> None:
        kept = LeaseObject(open_target(f"file://{tmp_path}"), "r1")
        try:
            for count in range(100):
                kept.write(Lease(name, "h", "p", 1, 1, count))
                assert kept.read() is not None
        except BaseException as error:  # noqa: BLE001 - told to the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("a", "b", "c")]
    for step in [t.start for t in threads] + [t.join for t in threads]:
        step()
    assert errors == []
    assert [path.name for path in (tmp_path / "r1").iterdir()] == [FILE]


def test_the_copy_at_a_url_has_an_owner_too(tmp_path: Path) -> None:
    """Two machines with one URL: each has a folder of its own, and only the URL in common."""
    url = f"file://{tmp_path}/there"
    folders = [tmp_path / name / "r1" for name in ("here", "far")]
    for folder in folders:
        folder.mkdir(parents=True)
    there = tmp_path / "there" / "r1"
    with take(folders[0], url) as check:
        check()
        assert json.loads((there / FILE).read_bytes())["pid"] == os.getpid()
    assert not (there / FILE).exists()
    there.mkdir(exist_ok=True)
    lease(there)
    with counting(there), pytest.raises(OwnedError, match="process 7 on far"), take(folders[1], url):
        pytest.fail("two owners")
    with take(folders[1], url):
        pass


def test_of_two_that_claim_at_the_same_moment_the_later_writer_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_module, "_locked", lambda _: True)
    sleep = time.sleep

    def meanwhile(seconds: float) -> None:
        lease(tmp_path)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", meanwhile)
    with pytest.raises(OwnedError, match="far"), take(tmp_path):
        pytest.fail("two owners")


def test_blocks_with_one_path_run_one_after_the_other(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        with one_at_a_time(tmp_path / "lock"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(5)]
    run: list[Callable[[], None]] = [t.start for t in threads] + [t.join for t in threads]
    for step in run:
        step()
    assert most == [1] * 5
