"""The status file: what it says while a run lives, and after it died."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedloom.platform.results import status as status_module
from fedloom.platform.results.lock import process_of
from fedloom.platform.results.status import Heartbeat, StatusFile, read_status


def rewritten(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


def test_a_running_run_is_described(tmp_path: Path) -> None:
    path = tmp_path / "artifacts" / "r1" / "status.json"
    file = StatusFile(path)
    file.write(stage="train", round=3, rounds_total=10, message="on the way")
    file.write(round=0)
    status = read_status(path)
    assert (status.state, status.stage, status.round, status.rounds_total) == ("running", "train", 0, 10)
    assert (status.pid, status.message) == (os.getpid(), "on the way")
    assert abs(status.heartbeat - time.time()) < 5
    assert [entry.name for entry in path.parent.iterdir()] == ["status.json"]


def test_a_resumed_run_stays_where_it_was_until_it_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    StatusFile(path).write(stage="train", round=3, rounds_total=10, message="on the way")
    resumed = StatusFile(path)
    resumed.write(message="starting workers")
    status = read_status(path)
    assert (status.stage, status.round, status.rounds_total, status.message) == ("train", 3, 10, "starting workers")
    resumed.write(stage="search", round=0, rounds_total=4)
    assert read_status(path).stage == "search"
    path.write_text("damaged")
    StatusFile(path).write()
    assert (read_status(path).stage, read_status(path).rounds_total) == ("", 0)


def test_an_ended_run_keeps_its_state_whatever_its_age(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    for state in ("done", "failed", "interrupted"):
        StatusFile(path).write(state, message="why")  # type: ignore[arg-type]
        rewritten(path, heartbeat=0.0, pid=ended_process())
        assert read_status(path).state == state


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def test_stalled_and_dead_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    StatusFile(path).write()
    rewritten(path, heartbeat=time.time() - 50)
    assert read_status(path).state == "running"
    assert read_status(path, stalled_after_s=40).state == "stalled"
    rewritten(path, heartbeat=time.time() - 70)
    assert read_status(path).state == "stalled"
    gone = ended_process()
    rewritten(path, heartbeat=time.time(), pid=gone)
    assert read_status(path).state == "dead"
    rewritten(path, place="elsewhere")  # process ids of another host mean nothing here
    assert read_status(path).state == "running"
    rewritten(path, heartbeat=time.time() + 7200)  # a clock was set back
    assert read_status(path).state == "stalled"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_killed_process_that_nobody_waited_for_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    StatusFile(path).write()
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    rewritten(path, pid=process.pid, started=process_of(process.pid).started)  # type: ignore[union-attr]
    assert read_status(path).state == "running"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert read_status(path).state == "dead"
    process.communicate()


def test_heartbeats_are_written_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(status_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(status_module.time, "time", lambda: 1000.0 + now[0])
    path = tmp_path / "status.json"
    file = StatusFile(path)
    file.write(round=1)
    beats = []
    for now[0] in (100.5, 100.9, 101.0, 101.5, 102.5):
        file.beat()
        beats.append(read_status(path).heartbeat)
    assert beats == [1100.0, 1100.0, 1101.0, 1101.0, 1102.5]
    now[0] = 102.6
    file.write(round=2)  # never held back
    assert read_status(path).round == 2


def test_reading_never_meets_half_a_file_nor_writes(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    code = (
        "import sys; from pathlib import Path; from fedloom.platform.results.status import StatusFile\n"
        "file = StatusFile(Path(sys.argv[1]))\n"
        "for i in range(400): file.write(round=i, message='x' * i)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
    reads = 0
    while writer.poll() is None:
        if path.exists():
            status = read_status(path)
            assert status.message == "x" * status.round
            reads += 1
    assert writer.returncode == 0
    assert reads > 10
    assert read_status(path).state == "dead"


def test_files_that_tell_nothing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    with pytest.raises(ValueError, match="there is no status file"):
        read_status(path)
    for content in ("", "[]", "{}", '{"state": "running"}', "1"):
        path.write_text(content)
        with pytest.raises(ValueError, match="is not a status file"):
            read_status(path)
    StatusFile(path).write()
    with pytest.raises(ValueError, match="unknown state 'paused'"):
        read_status(rewritten(path, state="paused"))


def test_a_full_disk_does_not_end_the_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[int] = []

    def beat() -> None:
        beats.append(1)
        raise OSError(28, "No space left on device")

    status = StatusFile(tmp_path / "status.json")
    monkeypatch.setattr(status, "beat", beat)
    heartbeat = Heartbeat(status, every_s=0.01)
    deadline = time.monotonic() + 5
    while len(beats) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    heartbeat.stop()
    assert len(beats) >= 3
