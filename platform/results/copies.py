"""Which of two copies of a run goes further, the one here or the one at a URL.

The checkpoint decides, from which a resumed run starts, so that no copy is replaced by one of a smaller place in the
plan. Of two at the same place it is the one that was taken up or, by one owner, written more often. Each of these only
grows as the run goes on; the clocks of the machines are never asked.
"""

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fedloom.platform.results.fence import newest, number_of, plain
from fedloom.platform.results.files import from_json, read_file
from fedloom.platform.results.paths import STATE_FILE
from fedloom.platform.results.sealed import unsealed
from fedloom.platform.results.status import read_status
from fedloom.platform.results.target import RemoteFile, Target


class Standing(NamedTuple):
    """How far a copy of a run is: the greater one goes further.

    `stage` and `round` are the checkpoint's, -1 without one that can be read; `taken` and `written` the status's (see
    `Status`); `ended` tells copies of earlier versions apart, whose status does not count.
    """

    stage: int
    round: int
    taken: int
    written: int
    ended: int


NOT_BEGUN = Standing(-1, -1, -1, -1, -1)


def stays(target: Target, root: Path, run_id: str, files: Mapping[str, RemoteFile], *, owned: bool = False) -> bool:
    """Whether a run's local files must stay: it is running here, or they are at least as far as the listed ones.

    `owned` is a run that this process owns, which therefore no other one is running. A status that is damaged or gone
    counts as the oldest, since the checkpoint is what a resumed run starts from.
    """
    status, state = (f"artifacts/{run_id}/{name}" for name in ("status.json", f"checkpoint/{STATE_FILE}"))
    path, saved = root / status, newest(root / state)
    if not path.exists() and not saved.exists():
        return False
    if not owned and _is_at_work(path):
        return True
    if status in files and is_same(path, files[status]):
        return False
    there = max((name for name in files if plain(name) == state), key=number_of, default=state)
    here = standing_of(_content(path), _content(saved))
    return here >= standing_of(_read(target, status, files), _read(target, there, files))


def _is_at_work(path: Path) -> bool:
    try:
        here = read_status(path)
    except (ValueError, FileNotFoundError):
        return False
    return here.state in ("running", "stalled") and here.host == platform.node()


def _content(path: Path) -> bytes | None:
    try:
        return read_file(path)
    except (FileNotFoundError, ValueError):
        return None


def is_same(path: Path, file: RemoteFile) -> bool:
    """Whether the local file is the downloaded copy of a remote one, whose time it has."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return False
    return stat.st_size == file.size_bytes and stat.st_mtime_ns == file.mtime_ns


def standing_of(status: bytes | None, state: bytes | None) -> Standing:
    """How far a copy with these files is."""
    place = _place(state)
    try:
        values = from_json(status or b"", "status.json")
        ended = {"running": 0, "done": 2}.get(values["state"], 1)
        return Standing(*place, int(values.get("taken", 0)), int(values.get("written", 0)), ended)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return NOT_BEGUN._replace(stage=place[0], round=place[1])


def _place(state: bytes | None) -> tuple[int, int]:
    # A damaged checkpoint cannot be resumed from: any whole one goes further.
    try:
        data = unsealed(state or b"", Path(STATE_FILE))["data"]
        return int(data["stage"]), int(data["round"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return NOT_BEGUN.stage, NOT_BEGUN.round


def _read(target: Target, name: str, files: Mapping[str, RemoteFile]) -> bytes | None:
    try:
        return target.read(name) if name in files else None
    except FileNotFoundError:  # taken away since it was listed
        return None
