"""What a dead driver started is ended, and nothing else."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fedloom.actors.watcher import _WATCHERS, clean, left_over, watched
from fedloom.experiments.cli import main
from fedloom.experiments.status import hint_at_leftovers
from fedloom.platform.results.lock import Process, descendants, is_process, process_of, this_place, this_process

DRIVER = """
import subprocess, sys, time
from pathlib import Path
from fedloom.actors.watcher import unwatch, watched

child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
others = [subprocess.Popen(sleep, start_new_session=True)]
with watched(Path(sys.argv[1])):
    started = subprocess.Popen([sys.executable, "-c", child + "time.sleep(600)"], start_new_session=True)
time.sleep(1)
others.append(subprocess.Popen(sleep, start_new_session=True))
print(*[p.pid for p in (started, *others)], flush=True)
if sys.argv[2] == "end":
    unwatch()
time.sleep(600)
"""


def until(condition: Callable[[], bool], most_s: float = 60.0) -> None:
    end_s = time.monotonic() + most_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.05)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], list[int]]]]:
    """Starts a driver; gives it with the numbers of what it started: within the block, before and after."""
    made: list[subprocess.Popen[str]] = []
    started: list[int] = []

    def start(how: str) -> tuple[subprocess.Popen[str], list[int]]:
        arguments = [sys.executable, "-c", DRIVER, str(tmp_path), how]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True)
        made.append(process)
        assert process.stdout is not None
        numbers = [int(number) for number in process.stdout.readline().split()]
        started.extend(numbers)
        return process, numbers

    yield start
    for process in made:
        process.kill()
        process.wait()
    for number in started:
        if process_of(number) is not None:
            os.kill(number, signal.SIGKILL)


def recorded(folder: Path) -> list[Process]:
    paths = list(folder.glob("*.json"))
    return [Process(*p) for p in json.loads(paths[0].read_text())["processes"]] if paths else []


def test_a_process_whose_name_ends_within_a_character_is_one_of_a_drivers() -> None:
    """The kernel cuts names after 15 bytes."""
    code = "import sys; open('/proc/self/comm', 'wb').write(('ä' * 8).encode()); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        try:
            assert process.pid in {child.pid for child in descendants([this_process()])}
        finally:
            process.stdin.close()


def test_what_a_killed_driver_or_one_that_has_ended_ray_started_is_ended_and_only_that(
    tmp_path: Path, driver: Callable[[str], tuple[subprocess.Popen[str], list[int]]]
) -> None:
    process, (started, before, after) = driver("stay")
    until(lambda: len(recorded(tmp_path)) == 2)  # the child, and what that one started
    found = recorded(tmp_path)
    assert started in {p.pid for p in found}
    _, (of_ray, *others) = driver("end")
    process.kill()
    process.wait()
    until(lambda: not any(is_process(*p) for p in found))
    until(lambda: process_of(of_ray) is None)
    until(lambda: not list(tmp_path.glob("*.json")))
    assert None not in [process_of(number) for number in (before, after, *others)]


def test_what_a_driver_starts_after_rays_start_has_failed_is_left_alone(tmp_path: Path) -> None:
    """Also if the watcher takes longer to start than the driver to go on."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    started: list[subprocess.Popen[bytes]] = []
    try:
        with suppress(LookupError), watched(tmp_path):
            watcher = _WATCHERS[-1]
            started.append(subprocess.Popen(sleep, start_new_session=True))
            raise LookupError
        started.append(subprocess.Popen(sleep, start_new_session=True))
        assert watcher.wait(60) == 0
        assert started[0].wait(60) == -signal.SIGKILL
        assert started[1].poll() is None
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_what_a_driver_started_before_the_watcher_knew_which_are_rays_is_in_no_record(tmp_path: Path) -> None:
    sleep = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    code = f"import subprocess, sys; s = [{sleep}, {sleep}]; print(*[p.pid for p in s], flush=True); s[0].wait()"
    arguments = [sys.executable, "-m", "fedloom.actors.watcher", str(tmp_path)]
    started: list[Process | None] = []
    try:
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            started += [process_of(int(number)) for number in process.stdout.readline().split()]
            of_driver = json.dumps([process_of(process.pid), []])
            with subprocess.Popen([*arguments, of_driver], stdin=subprocess.PIPE) as watcher:
                until(lambda: set(recorded(tmp_path)) == set(started))
                assert watcher.stdin is not None
                watcher.stdin.write(json.dumps(started[:1]).encode())
                watcher.stdin.flush()
                until(lambda: recorded(tmp_path) == started[:1])
            until(lambda: process.poll() is not None)
        assert started[0] not in left(started)
        assert started[1] in left(started)
    finally:
        for each in left(started):
            os.kill(each.pid, signal.SIGKILL)


def left(processes: Collection[Process | None]) -> list[Process]:
    return [process for process in processes if process is not None and is_process(*process)]


def test_what_is_left_after_the_watcher_was_killed_too_is_told_and_cleaned(
    tmp_path: Path,
    driver: Callable[[str], tuple[subprocess.Popen[str], list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    process, (_, before, _) = driver("stay")
    until(lambda: len(recorded(tmp_path)) == 2)
    found = recorded(tmp_path)
    assert left_over(tmp_path) == []  # its driver lives
    driver_process = process_of(process.pid) or Process(process.pid, 0)
    (watcher,) = [p for p in descendants([driver_process]) if b"-m\0fedloom.actors.watcher" in command(p.pid)]
    os.kill(watcher.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    (record,) = left_over(tmp_path)
    assert set(record.processes) == set(found)
    monkeypatch.setattr("fedloom.experiments.status.records_folder", lambda: tmp_path)
    hint_at_leftovers()
    assert "dead runs left 2 processes on this machine" in capsys.readouterr().err
    assert set(clean([record])) == set(found)
    until(lambda: not any(is_process(*p) for p in found))
    assert process_of(before) is not None
    assert left_over(tmp_path) == []
    assert not list(tmp_path.glob("*.json"))


def test_status_clean_ends_what_is_left_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedloom.experiments.status.records_folder", lambda: tmp_path)
    with subprocess.Popen(["sleep", "600"]) as left:
        content = {"place": this_place(), "driver": [2**22 + 1, 1], "processes": [process_of(left.pid)]}
        (tmp_path / "1-1.json").write_text(json.dumps(content))
        with pytest.raises(SystemExit) as end:
            main(["status", "--clean"])
        assert end.value.code == 0
        said = f"ended 1 processes that dead runs (drivers {2**22 + 1}) left behind: {left.pid}\n"
        assert capsys.readouterr().out == said
        assert left.wait(30) == -signal.SIGKILL
    with pytest.raises(SystemExit):
        main(["status", "--clean"])
    assert capsys.readouterr().out == "no processes of dead runs are left on this machine\n"


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("change", [{"place": "another machine"}, {"driver": [1]}, {"processes": None}])
def test_a_record_of_another_machine_or_a_damaged_one_ends_nothing(tmp_path: Path, change: dict[str, object]) -> None:
    own = process_of(os.getpid())
    content = {"place": this_place(), "driver": [2**22 + 1, 1], "processes": [own], **change}
    (tmp_path / "1-1.json").write_text(json.dumps(content))
    assert left_over(tmp_path) == []


def test_a_number_in_use_again_is_not_ended(tmp_path: Path) -> None:
    own = [os.getpid(), this_process().started - 100]
    (tmp_path / "1-1.json").write_text(
        json.dumps({"place": this_place(), "driver": [2**22 + 1, 1], "processes": [own]})
    )
    assert left_over(tmp_path) == []
