"""What was counted of a configuration, so that saying it again needs neither torch nor a count."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedloom.experiments.runs.overrides import ENDINGS
from fedloom.experiments.runs.presets import CONF
from fedloom.platform.data.config import machine_cache
from fedloom.platform.plugins import is_import_path
from fedloom.platform.results.files import write_atomically
from fedloom.platform.runs.sources import source_hash

MEASURED = "latency_s"
"""Figures that differ from one measurement to the next."""


def described(
    overrides: Sequence[str], describe: Callable[[Sequence[str]], dict[str, Any]], what: str = "describe"
) -> dict[str, Any]:
    """What `describe` says of overrides, once for every revision of fedloom; of the user's own code every time.

    `what` tells apart what different functions say. All of it is kept in the folder `described` of the cache
    (FEDLOOM_CACHE, or ~/.cache/fedloom).
    """
    if any(_may_differ(override) for override in overrides):
        return describe(overrides)
    file = _folder() / f"{_key(overrides, what)}.json"
    try:
        known: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        known = json.loads(json.dumps(describe(overrides)))
        _keep(file, known)
    return known


def _may_differ(override: str) -> bool:
    value = override.partition("=")[2]
    return is_import_path(value) or value.endswith(ENDINGS) or MEASURED in value


def _folder() -> Path:
    return machine_cache() / "described"


def _key(overrides: Sequence[str], what: str) -> str:
    return sha256(f"{_revision()} {what} {json.dumps(list(overrides))}".encode()).hexdigest()[:32]


@cache
def _revision() -> str:
    """A hash of fedloom's source and of its presets."""
    digest = sha256(source_hash().encode())
    for file in sorted(CONF.rglob("*.yaml")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _keep(file: Path, facts: dict[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(facts).encode(), durable=False)
    except OSError:
        pass  # without a place to keep it, it is counted again
