"""One owner per run: who is kept out, who goes on after whom, and that no clock decides."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedloom.platform.results import lock as lock_module
from fedloom.platform.results.lock import (
    FILE,
    OwnedError,
    OwnershipLostError,
    check_unowned,
    one_at_a_time,
    owned,
    process_of,
    this_place,
    unowned,
)
from fedloom.platform.results.store import Target

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
    monkeypatch.setattr(lock_module, "WAIT_S", 0.1)
    monkeypatch.setattr(lock_module, "SETTLE_S", 0.02)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "owned\n"
    yield process
    process.kill()
    process.wait()


def take(folder: Path, results: str | None = None, **options: Any) -> Any:
    return owned(folder, "run r1", results or str(folder), folder.parent if results else folder, **options)


# -- on one machine ----------------------------------------------------------------------------------------------------


def test_another_process_is_kept_out_and_told_who_has_it(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    said = f"run r1 is at work in process {holder.pid} on .*: stop that one first"
    with pytest.raises(OwnedError, match=said), take(tmp_path):
        pytest.fail("two owners")
    with pytest.raises(OwnedError, match=said), take(tmp_path, take_over=True):
        pytest.fail("two owners: nobody takes a run over from a process that lives")
    with pytest.raises(OwnedError, match=said):
        check_unowned(tmp_path, "run r1")
    with unowned(tmp_path) as is_free:
        assert not is_free


def test_who_is_killed_owns_nothing(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    assert json.loads((tmp_path / FILE).read_bytes())["pid"] == holder.pid  # it could not say that it ended
    check_unowned(tmp_path, "run r1")
    with take(tmp_path), pytest.raises(OwnedError, match=str(os.getpid())):
        check_unowned(tmp_path, "run r1")


def test_a_suspended_process_still_owns(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    os.kill(holder.pid, 19)
    with pytest.raises(OwnedError, match=str(holder.pid)), take(tmp_path):
        pytest.fail("two owners")


@pytest.mark.parametrize("left", [b'{"token": "t", "ho', b"", b'{"token": "t", "host": "far", "pid": 7}'.ljust(512)])
def test_what_is_in_the_file_keeps_nobody_out(tmp_path: Path, left: bytes) -> None:
    (tmp_path / FILE).write_bytes(left)
    check_unowned(tmp_path, "run r1")
    with take(tmp_path) as ownership:
        ownership()


def test_a_full_disk_keeps_nobody_from_owning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lock_module, "opened", full)
    with take(tmp_path), pytest.raises(OwnedError, match="another process"):
        check_unowned(tmp_path, "run r1")


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


# -- at a URL ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/there"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The folder of the run on this machine."""
    folder = tmp_path / "here" / "r1"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """The folder of its copy."""
    folder = tmp_path / "there" / "r1"
    folder.mkdir(parents=True)
    return folder


def lease(there: Path, **changes: Any) -> None:
    """Leaves the lease of a process of another machine."""
    other = {"token": "t", "host": "far", "place": "elsewhere", "pid": 7, "started": 1}
    (there / FILE).write_text(json.dumps({**other, **changes}))


def test_the_copy_at_a_url_has_an_owner_too(url: str, here: Path, there: Path) -> None:
    """Two machines with one URL: each has a folder of its own, and only the URL in common."""
    far = here.parent.parent / "far" / "r1"
    far.mkdir(parents=True)
    with take(here, url) as ownership:
        ownership.ask()
        assert json.loads((there / FILE).read_bytes())["pid"] == os.getpid()
        with pytest.raises(OwnedError, match=f"at work in process {os.getpid()} on .*--take-over"), take(far, url):
            pytest.fail("two owners")
    assert not (there / FILE).exists()
    with take(far, url):
        pass


@pytest.mark.parametrize("jump_s", [-7200.0, 0.0, 7200.0])
def test_a_lease_of_another_machine_is_replaced_only_when_the_user_says_so(
    url: str, here: Path, there: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    lease(there)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + jump_s)
    with pytest.raises(OwnedError, match=r"process 7 on far, says file://.*--take-over"), take(here, url):
        pytest.fail("two owners")
    assert json.loads((there / FILE).read_bytes())["host"] == "far"
    with take(here, url, take_over=True) as ownership:
        ownership.ask()


def test_a_lease_of_a_process_that_ended_on_this_machine_keeps_nobody_out(
    url: str, here: Path, there: Path, holder: subprocess.Popen[str]
) -> None:
    process = process_of(holder.pid)
    assert process is not None
    lease(there, place=this_place(), pid=holder.pid, started=process.started)
    with pytest.raises(OwnedError, match=str(holder.pid)), take(here, url):
        pytest.fail("two owners")
    lease(there, place=this_place(), pid=holder.pid, started=process.started - 100)  # its number is another's now
    with take(here, url):
        pass
    lease(there, place=this_place(), pid=holder.pid, started=process.started)
    holder.kill()
    holder.wait()
    with take(here, url):
        pass


def test_an_ended_owners_empty_file_that_was_copied_to_a_url_keeps_nobody_out(
    url: str, here: Path, there: Path
) -> None:
    with take(here):
        pass
    shutil.copy(here / FILE, there / FILE)
    with take(here, url) as ownership:
        ownership.ask()


def test_a_lease_that_could_not_be_deleted_keeps_its_own_process_not_out(
    url: str, here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(self: Target, name: str) -> None:
        raise OSError("no route")

    with monkeypatch.context() as patch, take(here, url):
        patch.setattr(Target, "delete", unreachable)
    assert (there / FILE).exists()
    with take(here, url) as ownership:
        ownership.ask()
    assert not (there / FILE).exists()


@pytest.mark.parametrize("left", [b'{"token": "t", "ho', b"[]"])
def test_a_damaged_lease_is_replaced_only_when_the_user_says_so(url: str, here: Path, there: Path, left: bytes) -> None:
    (there / FILE).write_bytes(left)
    with pytest.raises(OwnedError, match="another process"), take(here, url):
        pytest.fail("two owners")
    with take(here, url, take_over=True):
        pass


def test_who_was_taken_over_knows_it_for_good_and_takes_nothing_back(url: str, here: Path, there: Path) -> None:
    with take(here, url) as ownership:
        lease(there)
        ownership()  # asks nobody
        with pytest.raises(OwnershipLostError, match=r"run r1 was taken over at file://.* by process 7 on far"):
            ownership.ask()
        (there / FILE).unlink()
        for still in (ownership, ownership.ask):
            with pytest.raises(OwnershipLostError, match="process 7 on far"):
                still()
        lease(there)
    assert json.loads((there / FILE).read_bytes())["host"] == "far"


def test_a_lease_that_is_gone_is_lost_and_one_that_cannot_be_read_is_not(
    url: str, here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(self: Target, name: str) -> bytes:
        raise OSError("no route")

    with take(here, url) as ownership:
        with monkeypatch.context() as patch:
            patch.setattr(Target, "read", unreachable)
            with pytest.raises(OSError, match="no route"):
                ownership.ask()
        ownership()
        ownership.ask()
        (there / FILE).unlink()
        with pytest.raises(OwnershipLostError, match="another process"):
            ownership.ask()
    assert not (there / FILE).exists()


def test_of_two_that_claim_at_the_same_moment_the_later_writer_has_it(
    url: str, here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = time.sleep

    def meanwhile(seconds: float) -> None:
        lease(there)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", meanwhile)
    with pytest.raises(OwnedError, match="far"), take(here, url):
        pytest.fail("two owners")
