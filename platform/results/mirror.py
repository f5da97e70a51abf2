"""Mirrors a run's local files to another filesystem, from which it can be resumed."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fedloom.platform.results.fence import number_of, plain
from fedloom.platform.results.files import Stamp
from fedloom.platform.results.manifest import Seals, decoded, either, encoded, manifest_path
from fedloom.platform.results.order import is_rows, rank
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.results.tables import TABLES
from fedloom.platform.results.target import Target, is_remote, open_target

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
_TRIES = 100
_TRY_AGAIN_S = 0.01
# Object stores have times in whole seconds: `fetch` cannot distinguish two contents of equal size within one second.
_LEAST_PAUSE_S = 1.1


class MirrorError(OSError):
    """The copy of a run is incomplete; the run's local files are complete."""


class Mirror:
    """Copies a run's changes in a thread, every `interval_s` seconds and once at the end.

    The run can be resumed from the copy at any moment: a pass copies the files of one instant, held open meanwhile, in
    the order of `rank`, and deletes obsolete files only after their replacements.
    """

    def __init__(
        self,
        target: Target,
        paths: RunPaths,
        interval_s: float = INTERVAL_S,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` is called before every change there; it raises an error if the run is no longer ours to write."""
        self._target, self._paths, self._interval_s, self._check = target, paths, interval_s, check
        self._sent: dict[str, Stamp] = {}
        self._there: set[str] | None = None
        self._failure: Exception | None = None
        self._last_s = -_LEAST_PAUSE_S
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._turns, name="mirror", daemon=True)

    def start(self) -> None:
        """Starts the thread; the first pass is after one interval."""
        self._thread.start()

    def close(self) -> None:
        """Makes the last pass, after the run's last write; raises MirrorError if it fails."""
        self._closing.set()
        self._thread.join()
        if self._failure is not None:
            raise MirrorError(
                f"run {self._paths.run_id} could not be copied to {self._target.url} ({self._failure}); "
                f"all of it is in {self._paths.root}: resume it on this machine, or copy that folder"
            ) from self._failure

    def _turns(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._try()
        time.sleep(max(0.0, self._last_s + _LEAST_PAUSE_S - time.monotonic()))
        self._try()

    def _try(self) -> None:
        try:
            self.turn()
            self._failure = None
        except Exception as error:  # noqa: BLE001 - of a thread's unexpected error nobody would hear
            self._failure = error
            again = "" if self._closing.is_set() else f": trying again in {self._interval_s:g} s"
            logger.warning("run %s was not copied to %s (%s)%s", self._paths.run_id, self._target.url, error, again)
        self._last_s = time.monotonic()

    def turn(self) -> None:
        """Makes one pass, which updates the copy; after an OSError the next pass continues from there."""
        self._check()
        if self._there is None:
            self._there = set(self._target.list(self._folders()))
        with ExitStack() as held:
            files = self._hold(held)
            self._announce(files)
            changed = sorted((name for name, file in files.items() if file.is_new), key=rank)
            # Obsolete row files can go before the rest; others only after state and cards no longer refer to them.
            self._send(files, [name for name in changed if is_rows(name)])
            self._forget([name for name in self._there - files.keys() if is_rows(name)])
            self._send(files, [name for name in changed if not is_rows(name)])
            self._forget(list(self._there - files.keys()))

    def _announce(self, files: Mapping[str, "_Held"]) -> None:
        """Replaces the manifest there by one that fits every mixture of the files there and here during the pass.

        It is there from the first pass on, because a checkpoint without a manifest is one whose manifest was lost.
        """
        name = manifest_path(self._paths).relative_to(self._paths.root).as_posix()
        if name not in files or files[name].file is None:
            return
        assert self._there is not None
        here = decoded(files[name].content(), manifest_path(self._paths))
        listed = max((n for n in self._there if plain(n) == plain(name)), key=number_of, default="")
        there = self._listed_there(listed) if listed else {}
        self._check()
        self._target.write(name, encoded(either(there, here)))

    def _listed_there(self, name: str) -> dict[str, Seals]:
        try:
            return decoded(self._target.read(name), manifest_path(self._paths))
        except ValueError:
            logger.warning("%s was damaged at %s: it is written anew", name, self._target.url)
            return {}

    def _hold(self, held: ExitStack) -> dict[str, "_Held"]:
        """The run's files of one instant; changed ones are opened.

        Files are only replaced or appended to. If all have the same names and inodes before and after opening, at most
        lines were appended in between, to open files.
        """
        for _ in range(_TRIES):
            with ExitStack() as opened:
                before = self._scan()
                try:
                    files = {name: self._open(opened, name, stamp) for name, stamp in before.items()}
                except FileNotFoundError:
                    continue
                after = self._scan()
                if _inodes(before) == _inodes(after) and all(f.is_new or after[n] == f.stamp for n, f in files.items()):
                    held.push(opened.pop_all())
                    return files
            time.sleep(_TRY_AGAIN_S)
        raise OSError("its files change faster than they can be opened")

    def _open(self, opened: ExitStack, name: str, stamp: Stamp) -> "_Held":
        if self._sent.get(name) == stamp:
            return _Held(stamp, None)
        file = opened.enter_context((self._paths.root / name).open("rb"))
        return _Held(Stamp.of(os.fstat(file.fileno())), file)

    def _scan(self) -> dict[str, Stamp]:
        found = {}
        for folder in self._folders():
            for path in _files_below(self._paths.root / folder):
                try:
                    found[path.relative_to(self._paths.root).as_posix()] = Stamp.of(path.stat())
                except FileNotFoundError:
                    continue
        return found

    def _folders(self) -> list[str]:
        paths = self._paths
        return [f.relative_to(paths.root).as_posix() for f in (paths.artifacts, *(paths.table(t) for t in TABLES))]

    def _send(self, files: Mapping[str, "_Held"], names: list[str]) -> None:
        assert self._there is not None
        for name in names:
            stamp, file = files[name]
            assert file is not None
            self._check()
            self._target.upload(name, file, stamp.size_bytes)
            self._sent[name] = stamp
            self._there.add(name)

    def _forget(self, names: list[str]) -> None:
        assert self._there is not None
        for name in sorted(names, key=rank):
            self._check()
            self._target.delete(name)
            self._sent.pop(name, None)
            self._there.discard(name)


class _Held(NamedTuple):
    """A file of the run, open if it has to be copied."""

    stamp: Stamp
    file: BinaryIO | None

    @property
    def is_new(self) -> bool:
        return self.file is not None

    def content(self) -> bytes:
        """The whole content of a small file that is open."""
        assert self.file is not None
        content = self.file.read()
        self.file.seek(0)
        return content


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders.sort()
        # Names that begin with a dot are temporary files.
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def _inodes(files: Mapping[str, Stamp]) -> dict[str, int]:
    return {name: stamp.inode for name, stamp in files.items()}


@contextmanager
def mirrored(results: str, paths: RunPaths, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Mirrors a run within the block if results are at a URL; does nothing for a local path.

    The last pass is at the end, also of a failed run. Raises MirrorError if it fails; if the run itself failed, its
    error is raised and the mirror's is logged.
    """
    if not is_remote(results):
        yield
        return
    mirror = Mirror(open_target(results), paths, INTERVAL_S, check)
    mirror.start()
    try:
        yield
    except BaseException:
        _close_logging(mirror)
        raise
    mirror.close()


def _close_logging(mirror: Mirror) -> None:
    try:
        mirror.close()
    except MirrorError as error:
        logger.error("%s", error)


def mirror_run(results: str, paths: RunPaths) -> None:
    """Updates the copy of a run that is not being written; raises a one-line MirrorError."""
    with mirrored(results, paths):
        pass
