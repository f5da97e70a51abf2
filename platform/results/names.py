"""The name and the tags that a user gave a run, in a small file that only runs with a name or tags have."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fedloom.platform.results.files import MOST_NOTE_BYTES, check_name, from_json, read_file, write_atomically

ARTIFACTS = "artifacts"
"""The folder of all runs' artefacts under a results folder."""
NAMES = "names.json"
_LIKE_AN_ID = re.compile(r"\d{8}-(\d{0,6}|\d{6}-.*)")
"""Ids begin with the time, 20261122-113000-, and what begins an id means that run."""


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
    """Raises ValueError for a name or a tag that could not be told from a path, an option or an id."""
    for kind, words in (("name", [name] if name is not None else []), ("tag", tags)):
        for word in words:
            check_name(kind, word)
            if _LIKE_AN_ID.fullmatch(word):
                raise ValueError(f"{kind} {word!r} is like the beginning of a run's id: begin it with a letter")


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
