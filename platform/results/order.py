"""The order in which a run's files are copied, so that a run can be resumed from a partial copy."""

import re
from typing import NamedTuple

from fedloom.platform.results.fence import plain

_JOURNAL = re.compile(r"artifacts/[^/]+/journal-[0-9]+\.jsonl")


class Rank(NamedTuple):
    """Sort key of a run's files: files come after those that they refer to."""

    stage: int
    name: str


PARTS, RUN_ROW, JOURNALS, TENSORS, CARDS, STATE, MANIFEST, STATUS = range(8)
"""A checkpoint refers to rows and tensors, a card to tensors; the manifest lists all, and the status comes last."""


def rank(name: str) -> Rank:
    """The sort key of a file, given its name relative to the results."""
    return Rank(_stage(name), name)


def _stage(name: str) -> int:
    name = plain(name)
    if is_tensors(name):
        return TENSORS
    if name.endswith(".parquet"):
        return RUN_ROW if name.startswith("runs/") else PARTS
    if not name.startswith("artifacts/"):
        return STATE
    if _JOURNAL.fullmatch(name):
        return JOURNALS
    if "/models/" in name:
        return CARDS
    if name.endswith("/checkpoint/state.json"):
        return STATE
    if name.endswith("/manifest.json"):
        return MANIFEST
    return STATUS if name.endswith("/status.json") else PARTS


def is_rows(name: str) -> bool:
    """Whether the file holds rows: a part of a table, or a journal."""
    return name.endswith(".parquet") or _JOURNAL.fullmatch(plain(name)) is not None


def is_tensors(name: str) -> bool:
    """Whether the file holds tensors of a checkpoint or a model."""
    return name.endswith(".safetensors")
