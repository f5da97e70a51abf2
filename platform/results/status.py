"""The status file of a run: running, stalled, dead, failed, interrupted or done.

It is for people: what a run has done follows from its tables and its checkpoint (see `is_done` in `tables`).
"""

import json
import logging
import platform
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from fedloom.platform.results.files import MOST_NOTE_BYTES, read_json, typed, write_atomically
from fedloom.platform.results.lock import is_process, process_of, this_place, this_process

logger = logging.getLogger(__name__)

WrittenState = Literal["running", "done", "failed", "interrupted"]
State = Literal["running", "done", "failed", "interrupted", "stalled", "dead"]

BEAT_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Status:
    """The status of a run.

    A run whose file says running is "dead" if its process no longer exists on this machine, and "stalled" if its
    heartbeat (seconds since 1970) is old. `started` and `place` identify the process (see `lock`). `taken` counts the
    processes that have taken the run up, `written` how often any of them wrote its status: they tell which of two
    copies of a run is later, without a clock. `cluster` is the address of the Ray cluster where `fedloom attach` finds
    the run, empty if the run ends with its command. `left_s` is the time in seconds that the run was expected to take
    after its last round, negative if unknown. Status files of earlier versions lack all of these.
    """

    state: State
    pid: int
    host: str
    stage: str
    round: int
    rounds_total: int
    heartbeat: float
    message: str
    started: float = 0.0
    place: str = ""
    taken: int = 0
    written: int = 0
    cluster: str = ""
    left_s: float = -1.0

    @property
    def round_shown(self) -> int:
        """The round in progress, or the last one, counted from 1 as in everything that people read."""
        return min(self.round + 1, self.rounds_total)


class StatusFile:
    """Writes the status of the current process's run; thread-safe.

    A resumed run keeps the stage and round of its file until others are written, because a run that is done writes no
    more of them.
    """

    def __init__(self, path: Path, cluster: str = "") -> None:
        """`cluster` is the one of `Status`."""
        self._path = path
        self._lock = threading.Lock()
        try:
            last = read_status(path)
        except ValueError:  # a new run, or a damaged file, which is replaced
            last = Status("running", 0, "", "", 0, 0, 0.0, "")
        pid, started = this_process()
        of_process = {
            "pid": pid,
            "host": platform.node(),
            "started": started,
            "place": this_place(),
            "cluster": cluster,
        }
        self._status = replace(last, state="running", message="", taken=last.taken + 1, **of_process)  # type: ignore[arg-type]
        self._next_beat_s = 0.0

    def write(
        self,
        state: WrittenState = "running",
        *,
        stage: str | None = None,
        round: int | None = None,
        rounds_total: int | None = None,
        message: str | None = None,
        left_s: float | None = None,
    ) -> None:
        """Writes the status at once; arguments that are None keep their previous value."""
        told: dict[str, Any] = {"stage": stage, "round": round, "rounds_total": rounds_total}
        values = {**told, "message": message, "left_s": left_s}
        changes = {name: value for name, value in values.items() if value is not None}
        with self._lock:
            self._status = replace(self._status, state=state, **changes)
            if state == "done":
                self._status = replace(self._status, round=self._status.rounds_total)
            self._write()

    def beat(self) -> None:
        """Renews the heartbeat, at most once per second."""
        if time.monotonic() >= self._next_beat_s:
            with self._lock:
                self._write()

    def _write(self) -> None:
        self._next_beat_s = time.monotonic() + BEAT_INTERVAL_S
        self._status = replace(self._status, heartbeat=time.time(), written=self._status.written + 1)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Not durable, because the process does not survive a power failure either.
        write_atomically(self._path, json.dumps(asdict(self._status)).encode(), durable=False)


class Heartbeat:
    """Renews the heartbeat in a thread, so that a run with a long round does not look stalled."""

    def __init__(self, status: StatusFile, every_s: float = 5.0) -> None:
        self._status, self._every_s = status, every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stopped.wait(self._every_s):
            # A full disk must not end the thread, so that heartbeats continue once there is space.
            with suppress(OSError):
                self._status.beat()

    def stop(self) -> None:
        """Ends the thread, after which the final status can be written."""
        self._stopped.set()
        self._thread.join()


def read_status(path: Path, stalled_after_s: float = 60.0) -> Status:
    """The current status of a run; read-only.

    Raises ValueError if there is no status file or it is damaged.
    """
    try:
        status = typed(Status, read_json(path, MOST_NOTE_BYTES))
    except FileNotFoundError as error:
        raise ValueError(f"there is no status file {path}: the run has not started, or its folder was moved") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a status file: move it away; resuming the run writes a new one") from error
    if status.state not in get_args(WrittenState):
        raise ValueError(f"{path} has the unknown state {status.state!r}: it was written by another version")
    if status.state != "running":
        return status
    if not status.place:  # an earlier version wrote it
        is_dead = status.host == platform.node() and process_of(status.pid) is None
    else:
        is_dead = status.place == this_place() and not is_process(status.pid, status.started)
    if is_dead:
        return replace(status, state="dead")
    is_stalled = abs(time.time() - status.heartbeat) > stalled_after_s
    return replace(status, state="stalled") if is_stalled else status


def says_done(path: Path) -> bool:
    """Whether a status file says that its run is done; a damaged or missing one does not."""
    try:
        return read_status(path).state == "done"
    except ValueError:
        return False
