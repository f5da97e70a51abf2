"""Results named by a URL: brought to this machine where they are read, and single folders of them sent there."""

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from fedloom.platform.results.files import check_writable
from fedloom.platform.results.order import is_tensors, rank
from fedloom.platform.results.status import read_status
from fedloom.platform.results.target import RemoteFile, Target, is_remote, local_root, open_target, unusable

ABLATIONS = "ablations"
"""What is no run's own."""
_CONNECTIONS = 8
_PASSES = 5


def check_results(results: str) -> Path:
    """The local folder of results that are about to be written, after checking that they can be, at the URL too.

    Raises ValueError in one line for an unknown scheme, an unreachable bucket, missing credentials or rights.
    """
    root = local_root(results)
    check_writable(root)
    if is_remote(results):
        target = open_target(results)
        try:
            target.check_reachable(writable=True)
        except OSError as error:
            raise unusable(results, error) from error
    return root


def fetch(
    results: str | Path, run_ids: Sequence[str] | None = None, *, tensors: bool = True, ablations: bool = False
) -> Path:
    """Brings runs (of these ids or beginnings of ids, or all) here; returns the local results folder.

    With `ablations` those, too; not where one is at work, whose driver alone writes them. Only what has changed, each
    file whole; without `tensors`, neither checkpoints' nor models' tensors, which reading tables does not need. A run
    that is at work on this machine, or got further here than what was sent, is left as it is. A local path is returned
    at once. Raises ValueError in one line if the URL cannot be reached.
    """
    root = local_root(results)
    if not is_remote(results):
        return root
    target = open_target(str(results))
    try:
        target.check_reachable(writable=False)
        _fetch_runs(target, root, run_ids, tensors)
        if ablations:
            _fetch_newer(target, root, target.list([ABLATIONS]))
    except OSError as error:
        raise unusable(str(results), error) from error
    return root


def fetch_folder(results: str | Path, relative: str) -> Path:
    """Brings one folder below the results here, files that are newer there than here; returns its local place."""
    root = local_root(results)
    if is_remote(results):
        target = open_target(str(results))
        try:
            _fetch_newer(target, root, target.list([relative]))
        except OSError as error:
            raise unusable(str(results), error) from error
    return root / relative


def mirror_folder(results: str | Path, relative: str) -> None:
    """Sends one folder of the local results to the URL: files that are missing there, of another size, or newer here.

    Nothing is deleted there. Does nothing for a local path. Raises OSError in one line if the URL refuses.
    """
    if not is_remote(results):
        return
    root = local_root(results)
    try:
        _send_newer(open_target(str(results)), root, relative)
    except OSError as error:
        raise OSError(f"{root / relative} could not be copied to {results} ({error}): copy it yourself") from error


def _send_newer(target: Target, root: Path, relative: str) -> None:
    there = target.list([relative])
    files = [p for p in (root / relative).rglob("*") if p.is_file() and not p.name.startswith(".")]
    names = [p.relative_to(root).as_posix() for p in files]
    for name in sorted(names, key=rank):
        known = there.get(name)
        with open(root / name, "rb") as file:
            stat = os.fstat(file.fileno())
            if known is None or known.size_bytes != stat.st_size or known.mtime_ns < stat.st_mtime_ns:
                target.upload(name, file, stat.st_size)


class _Wanted(NamedTuple):
    name: str
    file: RemoteFile


def _fetch_runs(target: Target, root: Path, run_ids: Sequence[str] | None, tensors: bool) -> None:
    """Repeats until nothing has changed meanwhile: a run that goes on elsewhere replaces and deletes its files."""
    settled: dict[str, bool] = {}
    for _ in range(_PASSES):
        busy = False
        for run_id, files in _by_run(target.list()).items():
            if run_ids is not None and not any(run_id.startswith(given) for given in run_ids):
                continue
            if run_id not in settled:
                settled[run_id] = _stays(target, root, run_id, files)
            if not settled[run_id]:
                busy |= _fetch_run(target, root, run_id, files, tensors)
        if not busy:
            return


def _by_run(files: Mapping[str, RemoteFile]) -> dict[str, dict[str, RemoteFile]]:
    runs: dict[str, dict[str, RemoteFile]] = {}
    for name, file in files.items():
        if (run_id := run_of(name)) is not None:
            runs.setdefault(run_id, {})[name] = file
    return runs


def run_of(name: str) -> str | None:
    """The run that a file belongs to, by its name below the results."""
    match name.split("/"):
        case ["artifacts", run_id, _, *_]:
            return run_id
        case [_, experiment, run, _] if experiment.startswith("experiment=") and run.startswith("run_id="):
            return run.removeprefix("run_id=")
    return None


def _stays(target: Target, root: Path, run_id: str, files: Mapping[str, RemoteFile]) -> bool:
    """Whether what is here of a run is not to be touched: it is at work here, or got at least as far as what is there.

    A copy that came from there has the file's time of there, so that only runs of this machine are asked about.
    """
    name = f"artifacts/{run_id}/status.json"
    path = root / name
    if not path.exists():
        return False
    here = read_status(path)
    if here.state in ("running", "stalled") and here.host == platform.node():
        return True
    there = files.get(name)
    if there is not None and _is_same(path, there):
        return False
    return there is None or here.heartbeat >= _heartbeat_there(target, name)


def _heartbeat_there(target: Target, name: str) -> float:
    try:
        return float(json.loads(target.read(name))["heartbeat"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{target.url}/{name} is not a status file: delete it; resuming writes a new one") from error


def _fetch_run(target: Target, root: Path, run_id: str, files: Mapping[str, RemoteFile], tensors: bool) -> bool:
    """Makes the local copy of a run the one that was listed; returns whether anything was done."""
    wanted = [
        _Wanted(name, file)
        for name, file in sorted(files.items(), key=lambda item: rank(item[0]))
        if (tensors or not is_tensors(name)) and not _is_same(root / name, file)
    ]
    _download(target, root, wanted)
    here = [*(root / "artifacts" / run_id).rglob("*"), *root.glob(f"*/experiment=*/run_id={run_id}/*")]
    gone = [
        p for p in here if p.is_file() and not p.name.startswith(".") and p.relative_to(root).as_posix() not in files
    ]
    for path in gone:
        path.unlink(missing_ok=True)
    return bool(wanted or gone)


def _fetch_newer(target: Target, root: Path, files: Mapping[str, RemoteFile]) -> None:
    def is_newer(name: str, file: RemoteFile) -> bool:
        path = root / name
        return not path.exists() or path.stat().st_mtime_ns < file.mtime_ns

    _download(target, root, [_Wanted(name, file) for name, file in files.items() if is_newer(name, file)])


def _is_same(path: Path, file: RemoteFile) -> bool:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return False
    return stat.st_size == file.size_bytes and stat.st_mtime_ns == file.mtime_ns


def _download(target: Target, root: Path, wanted: Sequence[_Wanted]) -> None:
    """Many at a time under temporary names, then put in place in order: a crash leaves what can be fetched again."""
    if not wanted:
        return
    with ThreadPoolExecutor(min(_CONNECTIONS, len(wanted))) as threads:
        arrived = list(threads.map(lambda one: _arrive(target, root, one), wanted))
    _publish(zip(arrived, wanted, strict=True), root)


def _arrive(target: Target, root: Path, wanted: _Wanted) -> Path | None:
    """The temporary file with the content; None if it is gone or has been replaced since it was listed."""
    path = root / wanted.name
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        size_bytes = target.download(wanted.name, temporary)
    except FileNotFoundError:
        size_bytes = -1
    if size_bytes != wanted.file.size_bytes:
        temporary.unlink(missing_ok=True)
        return None
    # The time of there marks what it is a copy of.
    os.utime(temporary, ns=(wanted.file.mtime_ns, wanted.file.mtime_ns))
    return temporary


def _publish(arrived: Iterable[tuple[Path | None, _Wanted]], root: Path) -> None:
    for temporary, wanted in arrived:
        if temporary is not None:
            os.replace(temporary, root / wanted.name)


__all__ = [
    "check_results",
    "fetch",
    "fetch_folder",
    "is_remote",
    "local_root",
    "mirror_folder",
]
