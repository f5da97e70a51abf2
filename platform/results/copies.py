"""The copy of a run at a URL: sent while the run is at work, and fetched to be read or resumed.

A run works in a local folder. At its checkpoints, when nothing in that folder changes, what is new is held and sent in
the background, in an order in which the copy can be resumed from at every moment.

Which of two copies goes further the checkpoint decides, from which a resumed run starts, so that no copy is replaced by
one of a smaller place in the plan. Of two at the same place it is the one that was taken up or, by one owner, written
more often. Each of these only grows as the run goes on; the clocks of the machines are never asked.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple
from uuid import uuid4

from fedloom.platform.results.files import (
    Stamp,
    as_stored,
    check_writable,
    from_json,
    read_file,
    stamp_of,
    unsealed,
    without_number,
)
from fedloom.platform.results.lock import OwnedError, Ownership, OwnershipLostError, check_unowned, unowned
from fedloom.platform.results.manifest import FILE as MANIFEST, Seals, decoded, either, encoded, manifest_path
from fedloom.platform.results.paths import (
    ABLATIONS,
    ARTIFACTS,
    NAMES,
    NO_NAMES,
    STATE_FILE,
    Names,
    RunPaths,
    parse_names,
)
from fedloom.platform.results.store import (
    RemoteFile,
    Target,
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
_CONNECTIONS = 8
_PASSES = 5
_MOST_ALONE = 32
"""The number of runs whose folders are listed one by one."""
# Object stores have times in whole seconds: `fetch` cannot distinguish two contents of equal size within one second.
_LEAST_PAUSE_S = 1.1

_SENT_IN_ORDER = (
    *(".parquet", "/journal-", ".safetensors", "/models/"),
    *(f"/{STATE_FILE}", f"/{MANIFEST}", "/origin.json", "/status.json"),
)


def rank(name: str) -> tuple[int, str]:
    """Sort key of a run's files, given their names relative to the results: files come after those they refer to.

    A checkpoint refers to rows and tensors, a card to tensors; the manifest lists all, and the status comes last.
    """
    plain = without_number(name)
    return next((place for place, part in enumerate(_SENT_IN_ORDER) if part in plain), 0), name


def is_rows(name: str) -> bool:
    """Whether the file holds rows: a part of a table, or a journal."""
    return name.endswith(".parquet") or "/journal-" in name


def is_tensors(name: str) -> bool:
    """Whether the file holds tensors of a checkpoint or a model."""
    return name.endswith(".safetensors")


# -- which of two copies goes further ----------------------------------------------------------------------------------


class Standing(NamedTuple):
    """How far a copy of a run is: the greater one goes further.

    `stage` and `round` are the checkpoint's, `taken` and `written` the status's (see `Status`); -1 for a file that is
    missing or damaged, because the checkpoint is what a resumed run starts from.
    """

    stage: int = -1
    round: int = -1
    taken: int = -1
    written: int = -1


def standing_of(status: bytes | None, state: bytes | None) -> Standing:
    """How far a copy with these files is."""
    found = Standing()
    try:
        data = unsealed(state or b"", Path(STATE_FILE))["data"]
        found = found._replace(stage=int(data["stage"]), round=int(data["round"]))
    except (ValueError, KeyError, TypeError, OverflowError):
        pass
    try:
        values = from_json(status or b"", "status.json")
        return found._replace(taken=int(values.get("taken", 0)), written=int(values.get("written", 0)))
    except (ValueError, TypeError, AttributeError, OverflowError):
        return found


def stays(target: Target, root: Path, run_id: str, files: Mapping[str, RemoteFile], *, owned: bool = False) -> bool:
    """Whether a run's local files must stay: it is at work here, or they are at least as far as the listed ones.

    `owned` is a run that this process owns, which therefore no other one is running.
    """
    status, state = (f"{ARTIFACTS}/{run_id}/{name}" for name in ("status.json", f"checkpoint/{STATE_FILE}"))
    path, saved = root / status, as_stored(root / state)
    if not path.exists() and not saved.exists():
        return False
    if not owned and _is_owned(root, run_id):
        return True
    if status in files and is_same(path, files[status]):
        return False
    there = max((n for n in files if without_number(n) == state), key=lambda n: (len(n), n), default=state)
    there = state if state in files else there
    here = standing_of(_content(path), _content(saved))
    return here >= standing_of(_read(target, status, files), _read(target, there, files))


def _is_owned(root: Path, run_id: str) -> bool:
    try:
        check_unowned(root / ARTIFACTS / run_id, f"run {run_id}")
    except OwnedError:
        return True
    return False


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


def _read(target: Target, name: str, files: Mapping[str, RemoteFile]) -> bytes | None:
    try:
        return target.read(name) if name in files else None
    except FileNotFoundError:  # taken away since it was listed
        return None


_CONNECTIONS = 8
_PASSES = 5
_MOST_ALONE = 32
"""The number of runs whose folders are listed one by one."""


# -- fetching ----------------------------------------------------------------------------------------------------------


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
    with nullcontext(True) if owned else unowned(root / ARTIFACTS / run_id) as is_free:
        if not is_free or _stamps(root, run_id) != before:  # it was taken up, or fetched: to be compared anew
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
    return [stamp_of(as_stored(folder / name)) for name in ("status.json", MANIFEST, f"checkpoint/{STATE_FILE}")]


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


logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
_TRIES = 100
_TRY_AGAIN_S = 0.01
# Object stores have times in whole seconds: `fetch` cannot distinguish two contents of equal size within one second.
_LEAST_PAUSE_S = 1.1


# -- sending -----------------------------------------------------------------------------------------------------------


class MirrorError(OSError):
    """The copy of a run is incomplete; the run's local files are complete."""


class _Held(NamedTuple):
    """A file of the run at a checkpoint, open if it has to be sent."""

    stamp: Stamp
    file: BinaryIO | None

    def content(self) -> bytes:
        """The whole content of a small file that is open."""
        assert self.file is not None
        content = self.file.read()
        self.file.seek(0)
        return content


class Mirror:
    """Sends a run's changes to a URL in a thread, every `interval_s` seconds and once at the end.

    The run can be resumed from the copy at any moment: a pass sends the files of one checkpoint, held open meanwhile,
    in the order of `rank`, and deletes obsolete files only after their replacements.
    """

    def __init__(
        self, target: Target, paths: RunPaths, interval_s: float = INTERVAL_S, ownership: Ownership | None = None
    ) -> None:
        """`ownership` is asked before every file whether the copy still is this process's to write."""
        self._target, self._paths, self._interval_s = target, paths, interval_s
        self._ownership = ownership or Ownership()
        self._sent: dict[str, Stamp] = {}
        self._there: set[str] | None = None
        self._failure: Exception | None = None
        self._last_s = -_LEAST_PAUSE_S
        self._waiting: dict[str, _Held] | None = None
        self._changing = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._turns, name="mirror", daemon=True)

    def start(self) -> None:
        """Starts the thread; the first pass is after one interval."""
        self.checkpoint()
        self._thread.start()

    def checkpoint(self) -> None:
        """Holds the run's files as they are for the next pass; to be called while no other thread changes them.

        Raises OwnershipLostError once the copy is another process's.
        """
        self._ownership()
        with self._changing:
            if self._waiting is None:
                self._waiting = self._held()

    def close(self) -> None:
        """Makes the last pass, after the run's last write; raises MirrorError if it fails."""
        self._closing.set()
        self._thread.join()
        time.sleep(max(0.0, self._last_s + _LEAST_PAUSE_S - time.monotonic()))
        _close(self._take() or {})  # of an earlier checkpoint
        self._try(self._held)
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

    def _take(self) -> dict[str, _Held] | None:
        with self._changing:
            held, self._waiting = self._waiting, None
            return held

    def _try(self, held: Callable[[], dict[str, _Held] | None]) -> None:
        try:
            if (files := held()) is not None:
                self.turn(files)
                self._failure = None
            else:
                self._send_status()
        except Exception as error:  # noqa: BLE001 - of a thread's unexpected error nobody would hear
            self._failure = error
            again = "" if self._closing.is_set() else ": trying again at a later checkpoint"
            logger.warning("run %s was not copied to %s (%s)%s", self._paths.run_id, self._target.url, error, again)
        self._last_s = time.monotonic()

    def _send_status(self) -> None:
        """A round may take long: whoever looks at the copy sees that the run is alive."""
        if self._there is not None and self._paths.status.exists():
            self._ownership.ask()
            name = self._paths.status.relative_to(self._paths.root).as_posix()
            self._target.write(name, read_file(self._paths.status))

    def turn(self, files: Mapping[str, _Held] | None = None) -> None:
        """Makes one pass, which updates the copy; after an OSError the next pass continues from there."""
        files = self._held() if files is None else files
        try:
            self._ownership.ask()
            if self._there is None:
                self._there = set(self._target.list(self._folders()))
            self._announce(files)
            changed = sorted((name for name, held in files.items() if held.file is not None), key=rank)
            # Obsolete row files can go before the rest; others only after state and cards no longer refer to them.
            self._send(files, [name for name in changed if is_rows(name)])
            self._forget([name for name in self._there - files.keys() if is_rows(name)])
            self._send(files, [name for name in changed if not is_rows(name)])
            self._forget(list(self._there - files.keys()))
        finally:
            _close(files)

    def _announce(self, files: Mapping[str, _Held]) -> None:
        """Replaces the manifest there by one that fits every mixture of the files there and here during the pass.

        It is there from the first pass on, because a checkpoint without a manifest is one whose manifest was lost.
        """
        name = manifest_path(self._paths).relative_to(self._paths.root).as_posix()
        if name not in files or files[name].file is None:
            return
        assert self._there is not None
        here = decoded(files[name].content(), manifest_path(self._paths))
        there = self._listed_there(name) if name in self._there else {}
        self._target.write(name, encoded(either(there, here)))

    def _listed_there(self, name: str) -> dict[str, Seals]:
        try:
            return decoded(self._target.read(name), manifest_path(self._paths))
        except ValueError:
            logger.warning("%s was damaged at %s: it is written anew", name, self._target.url)
            return {}

    def _held(self) -> dict[str, _Held]:
        """The run's files as they are; those that have changed since they were sent are opened."""
        files: dict[str, _Held] = {}
        for path in (path for folder in self._folders() for path in _files_below(self._paths.root / folder)):
            name, stamp = path.relative_to(self._paths.root).as_posix(), Stamp.of(path.stat())
            if self._sent.get(name) == stamp:
                files[name] = _Held(stamp, None)
            else:
                file = path.open("rb")  # a log may have grown, and the status may have been replaced, since `stat`
                files[name] = _Held(Stamp.of(os.fstat(file.fileno())), file)
        return files

    def _folders(self) -> list[str]:
        paths = self._paths
        return [f.relative_to(paths.root).as_posix() for f in (paths.artifacts, *(paths.table(t) for t in TABLES))]

    def _send(self, files: Mapping[str, _Held], names: Sequence[str]) -> None:
        assert self._there is not None
        for name in names:
            stamp, file = files[name]
            assert file is not None
            self._ownership.ask()
            self._target.upload(name, file, stamp.size_bytes)
            self._sent[name] = stamp
            self._there.add(name)

    def _forget(self, names: Sequence[str]) -> None:
        assert self._there is not None
        for name in sorted(names, key=rank):
            self._ownership.ask()
            self._target.delete(name)
            self._sent.pop(name, None)
            self._there.discard(name)


def _close(files: Mapping[str, _Held]) -> None:
    for held in files.values():
        if held.file is not None:
            held.file.close()


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders.sort()
        # Names that begin with a dot are temporary files.
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


@contextmanager
def mirrored(results: str, paths: RunPaths, ownership: Ownership | None = None) -> Iterator[Callable[[], None]]:
    """Sends a run to its URL within the block; gives what is to be called at its checkpoints (`Mirror.checkpoint`).

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
