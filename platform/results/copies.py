"""The copy of a run at a URL: uploaded while the run is at work, and fetched to be read or resumed.

A run works in a local folder. At its checkpoints, when nothing in that folder changes, new files are opened and sent in
the background, in an order that keeps the copy resumable at every moment.

Of two copies, the one with the later checkpoint is ahead, because a resumed run starts from it; no copy is replaced by
one with an earlier checkpoint. With equal checkpoints, the copy whose run was taken up more often is ahead or, if that
is equal, too, the one whose status was written more often. These numbers only grow as the run goes on; clocks are not
compared.
"""

import json
import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple
from uuid import uuid4

from fedloom.platform.results.files import (
    Stamp,
    as_stored,
    check_writable,
    from_hashed_json,
    from_json,
    read_file,
    stamp_of,
    without_number,
)
from fedloom.platform.results.lock import OwnedError, Ownership, OwnershipLostError, check_unowned, unowned
from fedloom.platform.results.manifest import FILE as MANIFEST, Digests, decoded, either, encoded, manifest_path
from fedloom.platform.results.paths import (
    ABLATIONS,
    ARTIFACTS,
    NAMES,
    NO_NAMES,
    STATE_FILE,
    Names,
    RunPaths,
    is_like_an_id,
    parse_names,
)
from fedloom.platform.results.store import (
    RemoteFile,
    Target,
    check_outside,
    is_remote,
    local_root,
    open_target,
    unusable,
    without_secrets,
)
from fedloom.platform.results.tables import TABLES

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
"""Seconds between two passes over a run's files."""
# Object stores have times in whole seconds: `fetch` cannot distinguish two contents of equal size within one second.
_LEAST_PAUSE_S = 1.1
_CONNECTIONS = 8
_PASSES = 5
_MOST_ALONE = 32
"""Up to this number, runs are listed folder by folder; for more, all results are listed."""

_SENT_IN_ORDER = (
    *(".parquet", "/journal-", ".safetensors", "/models/"),
    *(f"/{STATE_FILE}", f"/{MANIFEST}", "/origin.json", "/status.json"),
)


def rank(name: str) -> tuple[int, str]:
    """Sort key of a run's files, given their names relative to the results: files come after those they refer to.

    A checkpoint refers to rows and tensors, a card to tensors; the manifest lists all, and the status comes last.
    """
    plain = without_number(name)
    return next((position for position, part in enumerate(_SENT_IN_ORDER) if part in plain), 0), name


def _is_rows(name: str) -> bool:
    return name.endswith(".parquet") or "/journal-" in name


def _run_of(name: str) -> str | None:
    """The id of the run that a file belongs to, given its name relative to the results."""
    match name.split("/"):
        case [folder, run_id, _, *_] if folder == ARTIFACTS:
            return run_id
        case [_, experiment, run, _] if experiment.startswith("experiment=") and run.startswith("run_id="):
            return run.removeprefix("run_id=")
    return None


# -- fetching ----------------------------------------------------------------------------------------------------------


def check_results(results: str) -> Path:
    """The local folder for results that will be written, after checking that it and the URL are writable.

    Raises a one-line ValueError for an unknown scheme, an unreachable bucket, missing credentials or permissions, and
    for a folder inside what another results folder stores.
    """
    root = local_root(results)
    check_outside(root)
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

    `ablations` also downloads the ablations; do not use it while one is running, because only its driver may write
    them. Only changed files are downloaded, each atomically; without `tensors`, none of checkpoints and models, which
    reading tables does not need. A run is not changed if another process owns it on this machine, even since the
    download began, or if its local files are ahead of the remote ones; `owned` is the id of a run that this process
    owns. A local path is returned at once. Raises a one-line ValueError if the URL is unreachable.
    """
    root = local_root(results)
    if not is_remote(results):
        return root
    target = open_target(str(results))
    try:
        target.check_reachable(writable=False)
        _Fetch(target, root, tensors, owned).runs(run_ids)
        if ablations:
            _fetch_newer(target, root, ABLATIONS)
    except OSError as error:
        raise unusable(str(results), error) from error
    return root


def fetch_folder(results: str | Path, relative: str) -> Path:
    """Downloads the newer files of one folder of the results; returns its local path."""
    root = local_root(results)
    if is_remote(results):
        try:
            _fetch_newer(open_target(str(results)), root, relative)
        except OSError as error:
            raise unusable(str(results), error) from error
    return root / relative


def _fetch_newer(target: Target, root: Path, folder: str) -> None:
    newer: dict[str, RemoteFile] = {}
    for name, file in target.list([folder]).items():
        path = root / name
        if not path.exists() or path.stat().st_mtime_ns < file.mtime_ns:
            newer[name] = file
    with _downloaded(target, root, newer) as temporaries:
        for name, temporary in temporaries.items():
            os.replace(temporary, root / name)


@contextmanager
def _downloaded(target: Target, root: Path, files: Mapping[str, RemoteFile]) -> Iterator[dict[str, Path]]:
    """Downloads files in parallel to temporary ones, which the caller renames in the order of the yielded names.

    Those that it leaves are deleted at the end of the block, also after an error. Files that were deleted or replaced
    since they were listed are left out. After a crash a fetch can be repeated.
    """
    temporaries = {name: (root / name).with_name(f".{Path(name).name}.{uuid4().hex[:12]}.tmp") for name in files}

    def is_downloaded(name: str) -> bool:
        temporary, file = temporaries[name], files[name]
        temporary.parent.mkdir(parents=True, exist_ok=True)
        try:
            size_bytes = target.download(name, temporary)
            # The remote file's time identifies the version of the copy.
            os.utime(temporary, ns=(file.mtime_ns, file.mtime_ns))
        except FileNotFoundError:  # deleted there, or here by a run that was taken up and has tidied its folders
            return False
        return size_bytes == file.size_bytes

    try:
        with ThreadPoolExecutor(_CONNECTIONS) as threads:
            arrived = [*threads.map(is_downloaded, files)]
        yield {name: temporaries[name] for name, is_whole in zip(files, arrived, strict=True) if is_whole}
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)


def _is_same(path: Path, file: RemoteFile) -> bool:
    """Whether the local file is the downloaded copy of a remote one: it has the same size and time."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return False
    return stat.st_size == file.size_bytes and stat.st_mtime_ns == file.mtime_ns


class _Progress(NamedTuple):
    """How far a copy of a run is; the greater one is ahead.

    `stage` and `round` are the checkpoint's, `taken` and `written` the status's (see `Status`); -1 for a file that is
    missing or damaged. The checkpoint comes first, because a resumed run starts from it.
    """

    stage: int = -1
    round: int = -1
    taken: int = -1
    written: int = -1

    @classmethod
    def of(cls, status: bytes | None, state: bytes | None) -> "_Progress":
        """The progress of a copy with these files."""
        progress = cls()
        try:
            data = from_hashed_json(state or b"", Path(STATE_FILE))["data"]
            progress = progress._replace(stage=int(data["stage"]), round=int(data["round"]))
        except (ValueError, KeyError, TypeError, OverflowError):
            pass
        try:
            values = from_json(status or b"", "status.json")
            return progress._replace(taken=int(values.get("taken", 0)), written=int(values.get("written", 0)))
        except (ValueError, TypeError, AttributeError, OverflowError):
            return progress


@dataclass(frozen=True)
class _Fetch:
    """A download of runs; `owned` is the id of a run that this process owns."""

    target: Target
    root: Path
    tensors: bool
    owned: str | None

    def runs(self, words: Sequence[str] | None) -> None:
        """Downloads the runs that the words mean (see `fetch`).

        Repeats this until no file changes in between, because a run that continues elsewhere replaces and deletes
        files.
        """
        unchanged: set[str] = set()
        names: dict[str, Names] = {}
        for _ in range(_PASSES):
            listed: dict[str, dict[str, RemoteFile]] = {}
            for name, file in self.target.list(self._folders(words)).items():
                if (run_id := _run_of(name)) is not None:
                    listed.setdefault(run_id, {})[name] = file
            run_ids = listed if words is None else self._meant(listed, words, names)
            outcomes = {run_id: self._run(run_id, listed[run_id]) for run_id in run_ids if run_id not in unchanged}
            unchanged |= {run_id for run_id, outcome in outcomes.items() if outcome == "local"}
            if "changed" not in outcomes.values():
                return

    def _folders(self, words: Sequence[str] | None) -> Sequence[str]:
        """The folders to list for these runs: their own if the runs are few, else the whole results folder.

        A listing takes a request per thousand files, and there may be thousands of runs.
        """
        everything = ("",)
        if words is None:
            return everything
        run_ids = [run_id for run_id in self.target.folders(ARTIFACTS) if run_id.startswith(tuple(words))]
        # Runs without artefacts, or given by a name or a tag, are only found among all files.
        are_ids = all(
            word in run_ids or (is_like_an_id(word) and any(run_id.startswith(word) for run_id in run_ids))
            for word in words
        )
        if len(run_ids) > _MOST_ALONE or not are_ids:
            return everything
        folders: list[str] = []
        try:
            for run_id in run_ids:
                experiment = json.loads(self.target.read(f"{ARTIFACTS}/{run_id}/config.json"))["experiment"]
                paths = RunPaths(Path(), experiment, run_id)
                folders += [folder.as_posix() for folder in (paths.artifacts, *map(paths.table, TABLES))]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return everything  # killed before its configuration was written, or damaged
        return folders

    def _meant(
        self, listed: Mapping[str, Mapping[str, RemoteFile]], words: Sequence[str], names: dict[str, Names]
    ) -> list[str]:
        """The runs whose ids begin with a word, and those with a name or tag that is no id; `names` is a cache."""
        others = [word for word in words if word not in listed and not is_like_an_id(word)]
        for run_id, files in listed.items() if others else ():
            if run_id not in names:
                content = self._read(f"{ARTIFACTS}/{run_id}/{NAMES}", files)
                names[run_id] = NO_NAMES if content is None else parse_names(content)
        return [
            run_id
            for run_id in listed
            if run_id.startswith(tuple(words)) or any(names[run_id].has(word) for word in others)
        ]

    def _run(self, run_id: str, files: Mapping[str, RemoteFile]) -> Literal["local", "same", "changed"]:
        """Updates the local copy of a run to the listed files, unless it is taken up here while they are downloaded.

        Returns "local" if the local files stay, "same" if they are equal, "changed" if both must be compared again.
        """
        root, before = self.root, self._stamps(run_id)
        if self._is_local_ahead(run_id, files):
            return "local"
        wanted = {
            name: files[name]
            for name in sorted(files, key=rank)
            if (self.tensors or not name.endswith(".safetensors")) and not _is_same(root / name, files[name])
        }
        if not wanted and not self._deleted(run_id, files):
            return "same"
        with (
            _downloaded(self.target, root, wanted) as temporaries,
            nullcontext(True) if run_id == self.owned else unowned(root / ARTIFACTS / run_id) as is_free,
        ):
            if not is_free or self._stamps(run_id) != before:  # it was taken up, or fetched, meanwhile
                return "changed"
            for name, temporary in temporaries.items():
                os.replace(temporary, root / name)
            for path in self._deleted(run_id, files):
                path.unlink(missing_ok=True)
        return "changed"

    def _is_local_ahead(self, run_id: str, files: Mapping[str, RemoteFile]) -> bool:
        """Whether a run's local files must stay: the run is at work here, or they are no less far than the listed."""
        status, state = (f"{ARTIFACTS}/{run_id}/{name}" for name in ("status.json", f"checkpoint/{STATE_FILE}"))
        status_file, state_file = self.root / status, as_stored(self.root / state)
        if not status_file.exists() and not state_file.exists():
            return False
        if run_id != self.owned:
            try:
                check_unowned(self.root / ARTIFACTS / run_id, f"run {run_id}")
            except OwnedError:
                return True
        if status in files and _is_same(status_file, files[status]):
            return False
        if state not in files:  # an earlier revision may have written it under the number of an owner
            numbered = (name for name in files if without_number(name) == state)
            state = max(numbered, key=lambda name: (len(name), name), default=state)
        here = _Progress.of(_content(status_file), _content(state_file))
        return here >= _Progress.of(self._read(status, files), self._read(state, files))

    def _read(self, name: str, files: Mapping[str, RemoteFile]) -> bytes | None:
        try:
            return self.target.read(name) if name in files else None
        except FileNotFoundError:  # deleted since it was listed
            return None

    def _deleted(self, run_id: str, files: Mapping[str, RemoteFile]) -> list[Path]:
        """The local files of a run that are not at the URL any more."""
        local = [*(self.root / ARTIFACTS / run_id).rglob("*"), *self.root.glob(f"*/experiment=*/run_id={run_id}/*")]
        return [
            path
            for path in local
            if path.is_file() and not path.name.startswith(".") and path.relative_to(self.root).as_posix() not in files
        ]

    def _stamps(self, run_id: str) -> list[Stamp | None]:
        """Identifies the local state of a run: every owner and every fetch replaces one of these files."""
        folder = self.root / ARTIFACTS / run_id
        return [stamp_of(as_stored(folder / name)) for name in ("status.json", MANIFEST, f"checkpoint/{STATE_FILE}")]


def _content(path: Path) -> bytes | None:
    try:
        return read_file(path)
    except (FileNotFoundError, ValueError):
        return None


# -- sending -----------------------------------------------------------------------------------------------------------


class MirrorError(OSError):
    """The copy of a run is incomplete; the run's local files are complete."""


def mirror_folder(results: str | Path, relative: str) -> None:
    """Uploads one folder of the local results: files that are missing at the URL, differ in size, or are newer here.

    Deletes nothing. Does nothing for a local path. Raises a one-line OSError if the upload fails.
    """
    if not is_remote(results):
        return
    root = local_root(results)
    try:
        target = open_target(str(results))
        remote_files = target.list([relative])
        paths = [path for path in (root / relative).rglob("*") if path.is_file() and not path.name.startswith(".")]
        for name in sorted((path.relative_to(root).as_posix() for path in paths), key=rank):
            remote = remote_files.get(name)
            with open(root / name, "rb") as file:
                stat = os.fstat(file.fileno())
                if remote is None or remote.size_bytes != stat.st_size or remote.mtime_ns < stat.st_mtime_ns:
                    target.upload(name, file, stat.st_size)
    except OSError as error:
        url = without_secrets(str(results))
        raise OSError(f"{root / relative} could not be copied to {url} ({error}): copy it yourself") from error


class _RunFile(NamedTuple):
    """A file of the run at a checkpoint; if it has to be sent, it is open, or has its path.

    A checkpoint may have more tensors than a process may have open files. Those beyond are opened when they are sent;
    their names say their content, so that no other file takes their place.
    """

    stamp: Stamp
    file: BinaryIO | None = None
    path: Path | None = None

    @property
    def has_changed(self) -> bool:
        """Whether it has to be sent."""
        return self.file is not None or self.path is not None


class Mirror:
    """Sends a run's changes to a URL in a thread, every `interval_s` seconds and once at the end.

    The run can be resumed from the copy at any moment: a pass sends the files of one checkpoint, held open meanwhile,
    in the order of `rank`, and deletes obsolete files only after their replacements.
    """

    def __init__(
        self, target: Target, paths: RunPaths, interval_s: float = INTERVAL_S, ownership: Ownership | None = None
    ) -> None:
        """Before every file, `ownership` is asked whether this process may still write the copy."""
        self._target, self._paths, self._interval_s = target, paths, interval_s
        self._ownership = ownership or Ownership()
        folders = (paths.artifacts, *map(paths.table, TABLES))
        self._folders = [folder.relative_to(paths.root).as_posix() for folder in folders]
        self._sent: dict[str, Stamp] = {}
        self._remote_names: set[str] | None = None
        self._failure: Exception | None = None
        self._last_s = -_LEAST_PAUSE_S
        self._waiting: dict[str, _RunFile] | None = None
        self._changing = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._turns, name="mirror", daemon=True)

    def start(self) -> None:
        """Starts the thread; the first pass is after one interval."""
        self.checkpoint()
        self._thread.start()

    def checkpoint(self) -> None:
        """Opens the run's files as they are for the next pass; to be called while no other thread changes them.

        Raises OwnershipLostError once another process owns the copy.
        """
        self._ownership()
        with self._changing:
            if self._waiting is None:
                self._waiting = self._opened()

    def close(self) -> None:
        """Makes the last pass, after the run's last write; raises MirrorError if it fails."""
        self._closing.set()
        self._thread.join()
        time.sleep(max(0.0, self._last_s + _LEAST_PAUSE_S - time.monotonic()))
        _close(self._take() or {})  # the files of an earlier checkpoint
        self._try(self._opened)
        if isinstance(self._failure, OwnershipLostError):
            raise self._failure
        if self._failure is not None:
            raise MirrorError(
                f"run {self._paths.run_id} could not be copied to {self._target.url} ({self._failure}); "
                f"all of it is in {self._paths.root}: resume it on this machine, or copy that folder"
            ) from self._failure

    def _turns(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._try(self._take)

    def _take(self) -> dict[str, _RunFile] | None:
        with self._changing:
            files, self._waiting = self._waiting, None
            return files

    def _try(self, next_files: Callable[[], dict[str, _RunFile] | None]) -> None:
        try:
            if (files := next_files()) is not None:
                self.turn(files)
                self._failure = None
            elif self._remote_names is not None and self._paths.status.exists():
                # A round may take long: the status shows readers of the copy that the run is alive.
                self._ownership.ask()
                self._target.write(self._name(self._paths.status), read_file(self._paths.status))
        except Exception as error:  # noqa: BLE001 - of a thread's unexpected error nobody would hear
            self._failure = error
            again = "" if self._closing.is_set() else ": trying again at a later checkpoint"
            logger.warning("run %s was not copied to %s (%s)%s", self._paths.run_id, self._target.url, error, again)
        self._last_s = time.monotonic()

    def turn(self, files: Mapping[str, _RunFile] | None = None) -> None:
        """Makes one pass, which updates the copy; after an OSError the next pass continues from there."""
        files = self._opened() if files is None else files
        try:
            self._ownership.ask()
            if self._remote_names is None:
                self._remote_names = set(self._target.list(self._folders))
            self._announce(files, self._remote_names)
            changed = sorted((name for name, file in files.items() if file.has_changed), key=rank)
            # Obsolete row files can go before the rest; others only after state and cards no longer refer to them.
            self._send(files, [name for name in changed if _is_rows(name)], self._remote_names)
            self._delete([name for name in self._remote_names - files.keys() if _is_rows(name)], self._remote_names)
            self._send(files, [name for name in changed if not _is_rows(name)], self._remote_names)
            self._delete([*(self._remote_names - files.keys())], self._remote_names)
        finally:
            _close(files)

    def _announce(self, files: Mapping[str, _RunFile], remote_names: set[str]) -> None:
        """Replaces the remote manifest by one that fits every mixture of the remote and local files during the pass.

        It is written from the first pass on, because a checkpoint without a manifest counts as having lost it.
        """
        path = manifest_path(self._paths)
        name = self._name(path)
        if name not in files or (file := files[name].file) is None:
            return
        here, there = decoded(file.read(), path), dict[str, Digests]()
        file.seek(0)
        if name in remote_names:
            try:
                there = decoded(self._target.read(name), path)
            except ValueError:
                logger.warning("%s was damaged at %s: it is written anew", name, self._target.url)
        self._target.write(name, encoded(either(there, here)))

    def _opened(self) -> dict[str, _RunFile]:
        """The run's files as they are; those that have changed since they were sent are opened, as far as they may."""
        files: dict[str, _RunFile] = {}
        # The files of one checkpoint are sent while those of the next are open; half of the limit is the run's own.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
        for folder in self._folders:
            for parent, _, names in os.walk(self._paths.root / folder):
                # Names that begin with a dot are temporary files.
                for path in (Path(parent, name) for name in names if not name.startswith(".")):
                    name, stamp = self._name(path), Stamp.of(path.stat())
                    if self._sent.get(name) == stamp:
                        files[name] = _RunFile(stamp)
                    elif path.suffix == ".safetensors" and len(files) >= most:
                        files[name] = _RunFile(stamp, path=path)
                    else:
                        file = path.open("rb")
                        # Since `stat`, a log may have grown, and the status may have been replaced.
                        files[name] = _RunFile(Stamp.of(os.fstat(file.fileno())), file)
        return files

    def _send(self, files: Mapping[str, _RunFile], names: Sequence[str], remote_names: set[str]) -> None:
        for name in names:
            stamp, file, path = files[name]
            self._ownership.ask()
            if path is not None:  # of a checkpoint that has been replaced since it may be gone, which ends this pass
                with path.open("rb") as tensors:
                    self._target.upload(name, tensors, stamp.size_bytes)
            elif file is not None:
                self._target.upload(name, file, stamp.size_bytes)
            self._sent[name] = stamp
            remote_names.add(name)

    def _delete(self, names: Sequence[str], remote_names: set[str]) -> None:
        for name in sorted(names, key=rank):
            self._ownership.ask()
            self._target.delete(name)
            self._sent.pop(name, None)
            remote_names.discard(name)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._paths.root).as_posix()


def _close(files: Mapping[str, _RunFile]) -> None:
    for each in files.values():
        if each.file is not None:
            each.file.close()


@contextmanager
def mirrored(results: str, paths: RunPaths, ownership: Ownership | None = None) -> Iterator[Callable[[], None]]:
    """Sends a run to its URL within the block; yields the function to call at its checkpoints (`Mirror.checkpoint`).

    Does nothing for a local path. The last pass is at the end, also of a failed run. Raises MirrorError if it fails; if
    the run itself failed, its error is raised and the mirror's is logged.
    """
    if not is_remote(results):
        yield ownership or Ownership()
        return
    mirror = Mirror(open_target(results), paths, INTERVAL_S, ownership)
    mirror.start()
    try:
        yield mirror.checkpoint
    except BaseException:
        try:
            mirror.close()
        except (MirrorError, OwnershipLostError) as error:
            logger.error("%s", error)
        raise
    mirror.close()


def mirror_run(results: str, paths: RunPaths, ownership: Ownership | None = None) -> None:
    """Updates the copy of a run that is not being written; raises a one-line MirrorError."""
    with mirrored(results, paths, ownership):
        pass
