"""What was counted of a configuration, kept, so that counting it again takes neither torch nor time."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
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
    values = [override.partition("=")[2] for override in overrides]
    if any(is_import_path(value) or value.endswith(ENDINGS) or MEASURED in value for value in values):
        return describe(overrides)
    key = sha256(f"{_revision()} {what} {json.dumps(list(overrides))}".encode()).hexdigest()[:32]
    file = machine_cache() / "described" / f"{key}.json"
    try:
        facts: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        facts = json.loads(json.dumps(describe(overrides)))
        with suppress(OSError):  # without a place to keep it, it is counted again
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(facts).encode(), durable=False)
    return facts


@cache
def _revision() -> str:
    """A hash of fedloom's source and of its presets."""
    digest = sha256(source_hash().encode())
    for file in sorted(CONF.rglob("*.yaml")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
