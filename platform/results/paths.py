"""The paths of a run in the results folder, and how runs are named and found."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedloom.platform.results.files import MOST_NOTE_BYTES, check_name, from_json, is_name, read_file, write_atomically

ARTIFACTS = "artifacts"
"""The folder of all runs' artefacts under a results folder."""
ABLATIONS = "ablations"
"""The folder of results that belong to no single run."""
SUPERNETS = "supernets"
NAMES = "names.json"
"""The file of a run's name and tags."""
STATE_FILE = "state.json"
"""The file in a checkpoint's folder that names its other files."""
LONGEST_RUN_ID = 140
"""Time, up to 100 characters of an experiment's or an ablation's name, random suffix and trial number."""
_EXPERIMENT, _RUN = "experiment=", "run_id="
_DATED = re.compile(r"\d{8}-\d{6}")
_LIKE_AN_ID = re.compile(r"\d{8}-(\d{0,6}|\d{6}-.*)")
"""What could begin a dated run id, such as 20261122-113000-."""


@dataclass(frozen=True, slots=True)
class Names:
    """A run's name, None if it has none, and its tags."""

    name: str | None = None
    tags: tuple[str, ...] = ()

    def has(self, word: str) -> bool:
        """Whether the word is its name or one of its tags."""
        return word == self.name or word in self.tags

    def __str__(self) -> str:
        tags = f"the tags {', '.join(self.tags)}" if self.tags else "no tags"
        return f"{'no name' if self.name is None else f'the name {self.name}'} and {tags}"

    def columns(self) -> dict[str, str | None]:
        """The columns of the run's row in the table `runs`."""
        return {"name": self.name, "tags": json.dumps(self.tags) if self.tags else None}


NO_NAMES = Names()


def check_names(name: str | None, tags: Sequence[str]) -> None:
    """Raises ValueError for a name or a tag that could be mistaken for a path, an option or an id."""
    for kind, words in (("name", [name] if name is not None else []), ("tag", tags)):
        for word in words:
            check_name(kind, word)
            if is_like_an_id(word):
                raise ValueError(f"{kind} {word!r} is like the beginning of a run's id: begin it with a letter")


def is_like_an_id(word: str) -> bool:
    """Whether the word could begin a dated run id, and so is no name or tag, which would hide that run."""
    return _LIKE_AN_ID.fullmatch(word) is not None


def write_names(artifacts: Path, names: Names) -> None:
    """Replaces the names of the run with this folder of artefacts."""
    path = artifacts / NAMES
    if names == NO_NAMES:
        path.unlink(missing_ok=True)
    elif names != read_names(artifacts):
        write_atomically(path, json.dumps(asdict(names)).encode())


def read_names(artifacts: Path) -> Names:
    """The names of the run with this folder of artefacts; a damaged file counts as none."""
    try:
        return parse_names(read_file(artifacts / NAMES, MOST_NOTE_BYTES))
    except (OSError, ValueError):
        return NO_NAMES


def parse_names(content: bytes) -> Names:
    """The names in the content of a file; damaged content counts as none, because names only help to find a run."""
    try:
        values = from_json(content, NAMES)
        name, tags = values["name"], tuple(values["tags"])
    except (ValueError, KeyError, TypeError):
        return NO_NAMES
    is_whole = isinstance(name, str | None) and all(isinstance(tag, str) for tag in tags)
    return Names(name, tags) if is_whole else NO_NAMES


def named_runs(root: Path) -> dict[str, Names]:
    """The names of all runs under a results folder that have any, by run id."""
    return {path.parent.name: read_names(path.parent) for path in (root / ARTIFACTS).glob(f"*/{NAMES}")}


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The paths of one run; its files store no absolute paths, so the results folder can be moved."""

    root: Path
    experiment: str
    run_id: str

    @property
    def artifacts(self) -> Path:
        """The folder of all files of this run but its tables."""
        return self.root / ARTIFACTS / self.run_id

    @property
    def config(self) -> Path:
        return self.artifacts / "config.json"

    @property
    def status(self) -> Path:
        return self.artifacts / "status.json"

    @property
    def checkpoint(self) -> Path:
        return self.artifacts / "checkpoint"

    @property
    def models(self) -> Path:
        return self.artifacts / "models"

    @property
    def logs(self) -> Path:
        return self.artifacts / "logs"

    def table(self, table: str) -> Path:
        """The folder of this run's rows of one table."""
        return self.root / table / f"{_EXPERIMENT}{self.experiment}" / f"{_RUN}{self.run_id}"

    def tables(self) -> list[Path]:
        """The folders of this run's rows, one for each table that has any."""
        return sorted(self.root.glob(f"*/{_EXPERIMENT}{self.experiment}/{_RUN}{self.run_id}"))


def run_paths(root: Path, experiment: str, run_id: str) -> RunPaths:
    """The paths of a run; ValueError if experiment or run id cannot be a file name."""
    check_name("experiment", experiment)
    check_name("run id", run_id, LONGEST_RUN_ID)
    return RunPaths(Path(root), experiment, run_id)


def new_run_id(root: Path, experiment: str) -> str:
    """An unused run id: UTC time, the experiment's name, and a random suffix.

    Ids sort by time. The suffix comes from the operating system, not from a seeded stream, so that two runs of the same
    seed started in the same second differ.
    """
    check_name("experiment", experiment)
    while True:
        run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{experiment}-{os.urandom(3).hex()}"
        if not is_used(root, run_id):
            return run_id


def start_of(name: str, file: Path) -> str:
    """A text by which runs or ablations sort by their start: the id if it begins with a time, else `file`'s time."""
    if _DATED.match(name):
        return name
    try:
        return f"{datetime.fromtimestamp(file.stat().st_mtime, UTC):%Y%m%d-%H%M%S}"
    except OSError:
        return ""


def is_used(root: Path, run_id: str) -> bool:
    """Whether artefacts or rows of this run id exist."""
    return (root / ARTIFACTS / run_id).exists() or bool(runs_called(root, run_id))


def remove_run(paths: RunPaths) -> None:
    """Deletes all files of a run, including its rows in tables."""
    for folder in (paths.artifacts, *paths.tables()):
        shutil.rmtree(folder, ignore_errors=True)


def list_runs(root: Path) -> list[RunPaths]:
    """All runs that have rows under the results folder, in the order of their ids; reads only names of folders."""
    runs = {
        RunPaths(Path(root), experiment, name.removeprefix(_RUN))
        for experiment, folder in _experiments(Path(root))
        for name in _listed(folder)
        if name.startswith(_RUN) and is_name(name.removeprefix(_RUN), LONGEST_RUN_ID)
    }
    return sorted(runs, key=lambda run: run.run_id)


def runs_called(root: Path, run_id: str) -> list[RunPaths]:
    """The runs with exactly this id, one per experiment that has rows of it; looks at no other run."""
    if not is_name(run_id, LONGEST_RUN_ID):
        return []
    names = [experiment for experiment, folder in _experiments(Path(root)) if (folder / f"{_RUN}{run_id}").exists()]
    return [RunPaths(Path(root), experiment, run_id) for experiment in dict.fromkeys(names)]


def find_run(root: Path, word: str) -> RunPaths:
    """The only run that `word` means: an id, the beginning of an id, a name, or a tag.

    Raises ValueError listing the known runs if there is none, or the candidates if there are several.
    """
    matching = find_runs(root, word)
    if len(matching) > 1:
        raise ValueError(f"tag {word!r} is that of {_latest(matching)}: give the id of one of them")
    return matching[0]


def find_runs(root: Path, word: str) -> list[RunPaths]:
    """The only run whose id is `word`; else those of `find_named`; else the only run whose id begins with `word`.

    Raises ValueError like `find_run`, but not for a tag of several runs.
    """
    if not word:  # every id begins with ''; a shell variable may be unset
        raise ValueError("'' names no run: give an id, the beginning of one, a name or a tag")
    matching = runs_called(root, word)
    if len(matching) == 1:
        return matching
    if not matching and (called := find_named(root, word)):
        return called
    runs = list_runs(root)
    matching = matching or [run for run in runs if run.run_id.startswith(word)]
    if len(matching) > 1:
        raise ValueError(f"run {word!r} could be any of {_latest(matching)}: give more of its id")
    if not matching:
        raise ValueError(f"no run {word!r} under {root}; known runs: {_latest(runs)}")
    return matching


def find_named(root: Path, word: str) -> list[RunPaths]:
    """The only run of this name; else all runs with this tag, which may be none.

    Raises ValueError if several runs have the name.
    """
    if is_like_an_id(word):  # nothing has such a name, and reading all of them takes time
        return []
    names = {run_id: names for run_id, names in named_runs(root).items() if names.has(word)}
    runs = [run for run in list_runs(root) if run.run_id in names] if names else []
    called = [run for run in runs if names[run.run_id].name == word]
    if len(called) > 1:
        raise ValueError(f"{word!r} is the name of {_latest(called)}: give the id of one of them")
    return called or runs


def _experiments(root: Path) -> Iterator[tuple[str, Path]]:
    """The folders of experiments in all tables, each with the experiment's name."""
    for table in _listed(root):
        for name in _listed(root / table) if table != ARTIFACTS else ():
            if name.startswith(_EXPERIMENT) and is_name(name.removeprefix(_EXPERIMENT)):
                yield name.removeprefix(_EXPERIMENT), root / table / name


def _listed(folder: Path) -> list[str]:
    """The names in a folder, sorted; none if it is no folder."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _latest(runs: list[RunPaths], most: int = 10) -> str:
    latest = ", ".join(run.run_id for run in runs[-most:]) or "none"
    return latest + (f" and {len(runs) - most} earlier" if len(runs) > most else "")
