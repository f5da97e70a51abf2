"""Results at a URL: downloads them for reading, and uploads single folders."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal, NamedTuple
from uuid import uuid4

from fedloom.platform.results.copies import is_same, stays
from fedloom.platform.results.fence import newest
from fedloom.platform.results.files import Stamp, check_writable, stamp_of
from fedloom.platform.results.manifest import FILE as MANIFEST
from fedloom.platform.results.names import ARTIFACTS, NAMES, NO_NAMES, Names, parse_names
from fedloom.platform.results.order import is_tensors, rank
from fedloom.platform.results.owner import OwnedError, check_unowned, one_at_a_time
from fedloom.platform.results.paths import STATE_FILE, RunPaths
from fedloom.platform.results.tables import TABLES
from fedloom.platform.results.target import (
    RemoteFile,
    Target,
    is_remote,
    local_root,
    open_target,
    unusable,
    without_secrets,
)

ABLATIONS = "ablations"
"""The folder of results that belong to no single run."""
_CONNECTIONS = 8
_PASSES = 5
_MOST_ALONE = 32
"""The number of runs whose folders are listed one by one."""


def check_results(results: str) -> Path:
    """The local folder for results that will be written, after checking that it and the URL are writable.

    Raises a one-line ValueError for an unknown scheme, an unreachable bucket, missing credentials or permissions.
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
    results: str | Path,
    run_ids: Sequence[str] | None = None,
    *,
    tensors: bool = True,
    ablations: bool = False,
    owned: str | None = None,
) -> Path:
    """Downloads runs (with these ids, prefixes of ids, names or tags, or all) and returns the local results folder.

    `ablations` downloads these, too; do not use it while one is running, because only its driver may write them. Only
    changed files are downloaded, each atomically; without `tensors`, none of checkpoints and models, which reading
    tables does not need. A run that another process owns on this machine, also one that it took up during the download,
    or whose local files go further than the remote ones, is not changed; `owned` is the id of a run that this process
    owns. A local path is returned at once. Raises a one-line ValueError if the URL is unreachable.
    """
    root = local_root(results)
    if not is_remote(results):
        return root
    target = open_target(str(results))
    try:
        target.check_reachable(writable=False)
        _fetch_runs(_Fetched(target, root, tensors, owned), run_ids)
        if ablations:
            _fetch_newer(target, root, target.list([ABLATIONS]))
    except OSError as error:
        raise unusable(str(results), error) from error
    return root


def fetch_folder(results: str | Path, relative: str) -> Path:
    """Downloads the newer files of one folder of the results; returns its local path."""
    root = local_root(results)
    if is_remote(results):
        target = open_target(str(results))
        try:
            _fetch_newer(target, root, target.list([relative]))
        except OSError as error:
            raise unusable(str(results), error) from error
    return root / relative


def mirror_folder(results: str | Path, relative: str) -> None:
    """Uploads one folder of the local results: files that are missing at the URL, differ in size, or are newer here.

    Deletes nothing. Does nothing for a local path. Raises a one-line OSError if the upload fails.
    """
    if not is_remote(results):
        return
    root = local_root(results)
    try:
        _send_newer(open_target(str(results)), root, relative)
    except OSError as error:
        there = without_secrets(str(results))
        raise OSError(f"{root / relative} could not be copied to {there} ({error}): copy it yourself") from error


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


class _Fetched(NamedTuple):
    """Where runs are fetched from and to, with their tensors or without; `owned` is a run of this process's own."""

    target: Target
    root: Path
    tensors: bool
    owned: str | None


Outcome = Literal["left", "same", "changed"]
"""What was done to a run: it stays as it is here, it is the same, or it has to be looked at again."""


def _fetch_runs(fetched: _Fetched, run_ids: Sequence[str] | None) -> None:
    """Repeats until no file changes in between, because a run that continues elsewhere replaces and deletes files."""
    target = fetched.target
    left: set[str] = set()
    names: dict[str, Names] = {}
    for _ in range(_PASSES):
        there = _by_run(target.list(_places(target, run_ids)))
        meant = there if run_ids is None else _meant(target, there, run_ids, names)
        outcomes = {run_id: _fetch_run(fetched, run_id, there[run_id]) for run_id in meant if run_id not in left}
        left |= {run_id for run_id, outcome in outcomes.items() if outcome == "left"}
        if "changed" not in outcomes.values():
            return


def _places(target: Target, given: Sequence[str] | None) -> Sequence[str]:
    """The folders in which the files of these runs lie: their own if they are few, else all of the results.

    A listing takes a request per thousand files, and there may be thousands of runs.
    """
    if given is None:
        return ("",)
    ids = [run_id for run_id in target.folders(ARTIFACTS) if run_id.startswith(tuple(given))]
    # Runs without artefacts are among all files only, and so are those that are meant by a name or a tag.
    if len(ids) > _MOST_ALONE or not all(any(run_id.startswith(word) for run_id in ids) for word in given):
        return ("",)
    try:
        return [place for run_id in ids for place in _places_of(target, run_id)]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return ("",)  # killed before its configuration was written, or damaged


def _places_of(target: Target, run_id: str) -> list[str]:
    experiment = json.loads(target.read(f"{ARTIFACTS}/{run_id}/config.json"))["experiment"]
    here = RunPaths(Path(), experiment, run_id)
    return [place.as_posix() for place in (here.artifacts, *(here.table(table) for table in TABLES))]


def _meant(
    target: Target, there: Mapping[str, Mapping[str, RemoteFile]], given: Sequence[str], known: dict[str, Names]
) -> list[str]:
    """The runs whose ids begin with a word, and those with a name or tag that begins no id; reads names only once."""
    others = [word for word in given if not any(run_id.startswith(word) for run_id in there)]
    for run_id, files in there.items() if others else ():
        name = f"{ARTIFACTS}/{run_id}/{NAMES}"
        if run_id not in known:
            known[run_id] = _names_there(target, name) if name in files else NO_NAMES
    return [
        run_id for run_id in there if run_id.startswith(tuple(given)) or any(known[run_id].has(word) for word in others)
    ]


def _names_there(target: Target, name: str) -> Names:
    try:
        return parse_names(target.read(name))
    except FileNotFoundError:  # taken away since it was listed
        return NO_NAMES


def _by_run(files: Mapping[str, RemoteFile]) -> dict[str, dict[str, RemoteFile]]:
    runs: dict[str, dict[str, RemoteFile]] = {}
    for name, file in files.items():
        if (run_id := run_of(name)) is not None:
            runs.setdefault(run_id, {})[name] = file
    return runs


def run_of(name: str) -> str | None:
    """The id of the run that a file belongs to, given its name relative to the results."""
    match name.split("/"):
        case [folder, run_id, _, *_] if folder == ARTIFACTS:
            return run_id
        case [_, experiment, run, _] if experiment.startswith("experiment=") and run.startswith("run_id="):
            return run.removeprefix("run_id=")
    return None


def _fetch_run(fetched: _Fetched, run_id: str, files: Mapping[str, RemoteFile]) -> Outcome:
    """Updates the local copy of a run to the listed files, unless it is taken up here while they are downloaded."""
    target, root, owned = fetched.target, fetched.root, run_id == fetched.owned
    before = _stamps(root, run_id)
    if stays(target, root, run_id, files, owned=owned):
        return "left"
    wanted = [
        _Wanted(name, file)
        for name, file in sorted(files.items(), key=lambda item: rank(item[0]))
        if (fetched.tensors or not is_tensors(name)) and not is_same(root / name, file)
    ]
    if not wanted and not _gone(root, run_id, files):
        return "same"
    arrived = _downloaded(target, root, wanted)
    with _nobody_taking(root, run_id):
        if not owned and _is_owned(root, run_id):
            _discard(arrived)
            return "left"
        if _stamps(root, run_id) != before:  # it was taken up, or fetched, and left again: to be compared anew
            _discard(arrived)
            return "changed"
        _publish(zip(arrived, wanted, strict=True), root)
        for path in _gone(root, run_id, files):
            path.unlink(missing_ok=True)
    return "changed"


def _gone(root: Path, run_id: str, files: Mapping[str, RemoteFile]) -> list[Path]:
    """The local files of a run that are not at the URL any more."""
    here = [*(root / ARTIFACTS / run_id).rglob("*"), *root.glob(f"*/experiment=*/run_id={run_id}/*")]
    return [
        p for p in here if p.is_file() and not p.name.startswith(".") and p.relative_to(root).as_posix() not in files
    ]


def _stamps(root: Path, run_id: str) -> list[Stamp | None]:
    """Identifies the local state of a run: every owner and every fetch replaces one of these files."""
    folder = root / ARTIFACTS / run_id
    return [stamp_of(newest(folder / name)) for name in ("status.json", MANIFEST, f"checkpoint/{STATE_FILE}")]


def _nobody_taking(root: Path, run_id: str) -> AbstractContextManager[None]:
    """Within the block no process takes the run up on this machine; a run without a folder has no owner."""
    folder = root / ARTIFACTS / run_id
    return one_at_a_time(folder) if folder.is_dir() else nullcontext()


def _is_owned(root: Path, run_id: str) -> bool:
    try:
        check_unowned(root / ARTIFACTS / run_id, f"run {run_id}")
    except OwnedError:
        return True
    return False


def _fetch_newer(target: Target, root: Path, files: Mapping[str, RemoteFile]) -> None:
    def is_newer(name: str, file: RemoteFile) -> bool:
        path = root / name
        return not path.exists() or path.stat().st_mtime_ns < file.mtime_ns

    wanted = [_Wanted(name, file) for name, file in files.items() if is_newer(name, file)]
    _publish(zip(_downloaded(target, root, wanted), wanted, strict=True), root)


def _downloaded(target: Target, root: Path, wanted: Sequence[_Wanted]) -> list[Path | None]:
    """The temporary files, downloaded in parallel, to be renamed in order; after a crash a fetch can be repeated."""
    if not wanted:
        return []
    with ThreadPoolExecutor(min(_CONNECTIONS, len(wanted))) as threads:
        return list(threads.map(lambda one: _arrive(target, root, one), wanted))


def _arrive(target: Target, root: Path, wanted: _Wanted) -> Path | None:
    """The downloaded temporary file; None if the file was deleted or replaced since it was listed."""
    path = root / wanted.name
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:12]}.tmp")
    try:
        size_bytes = target.download(wanted.name, temporary)
    except FileNotFoundError:
        size_bytes = -1
    if size_bytes != wanted.file.size_bytes:
        temporary.unlink(missing_ok=True)
        return None
    # The remote file's time identifies the version of the copy.
    os.utime(temporary, ns=(wanted.file.mtime_ns, wanted.file.mtime_ns))
    return temporary


def _publish(arrived: Iterable[tuple[Path | None, _Wanted]], root: Path) -> None:
    for temporary, wanted in arrived:
        if temporary is not None:
            os.replace(temporary, root / wanted.name)


def _discard(arrived: Iterable[Path | None]) -> None:
    for temporary in arrived:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


__all__ = [
    "check_results",
    "fetch",
    "fetch_folder",
    "is_remote",
    "local_root",
    "mirror_folder",
]
