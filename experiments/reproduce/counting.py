"""Facts of a setting's configuration that are counted without training, by name, once per revision of fedloom."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from typing import Any

from fedloom.experiments.runs.overrides import ENDINGS
from fedloom.experiments.runs.presets import CONF
from fedloom.platform.data.config import machine_cache
from fedloom.platform.plugins import Shipped, is_import_path
from fedloom.platform.results.files import write_atomically
from fedloom.platform.runs.source_code import source_hash

Facts = Callable[[Sequence[str]], Mapping[str, Any]]
"""Counts the facts of a configuration given as overrides `key=value`; a fact is a number, or numbers by place."""

_HERE = "fedloom.experiments.reproduce.facts"
FACTS: Mapping[str, Facts] = Shipped(
    {
        "space": f"{_HERE}:space_facts",
        "family": f"{_HERE}:family_facts",
        "partition": f"{_HERE}:partition_facts",
        "training": f"{_HERE}:training_facts",
        "work": f"{_HERE}:work_facts",
        "searches": f"{_HERE}:search_facts",
        "elastic_round": f"{_HERE}:elastic_round_facts",
        "accounts": f"{_HERE}:accounts",
    }
)
"""The functions that an item's `count: {from: NAME}` may name; imported on first use, because that takes seconds."""
OF_DATA = ("partition", "training", "work")
"""Facts that are counted on clients' data, which must be present unless `SIZES` has a stand-in for it."""

SIZES: Mapping[str, tuple[int, int, int]] = {
    "cifar10": (50_000, 10_000, 10),
    "cifar100": (50_000, 10_000, 100),
    "cinic10": (90_000, 90_000, 10),
}
"""Training samples, test samples and classes of data sets of 3 x 32 x 32 images, for which black images stand in."""


def facts_of(name: str, overrides: Sequence[str]) -> Mapping[str, Any]:
    """The facts of a configuration, counted once per revision of fedloom; with the user's own code or data, every time.

    They are cached in the folder `described` of FEDLOOM_CACHE, by default ~/.cache/fedloom.
    """
    if any(_may_differ(override) for override in overrides):
        return FACTS[name](overrides)
    key = sha256(f"{_revision()} {name} {json.dumps(list(overrides))}".encode()).hexdigest()[:32]
    file = machine_cache() / "described" / f"{key}.json"
    try:
        facts: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        facts = json.loads(json.dumps(FACTS[name](overrides)))
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(facts).encode(), durable=False)
        except OSError:
            pass  # if the cache is not writable, the facts are counted again next time
    return facts


def _may_differ(override: str) -> bool:
    """Whether it names the user's own code, presets or data, or a latency, which differs between measurements."""
    key, _, value = override.partition("=")
    is_own = is_import_path(value) or value.endswith(ENDINGS) or key.lstrip("+").startswith("data.options")
    return is_own or "latency_s" in value


@cache
def _revision() -> str:
    """A hash of what decides a count: fedloom's source and its presets."""
    digest = sha256(source_hash().encode())
    for file in sorted([*CONF.parent.rglob("*.py"), *CONF.rglob("*.yaml")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def fact(facts: Mapping[str, Any], name: str) -> Mapping[str, float]:
    """The numbers of a fact by place; ValueError for an unknown fact, with the known ones, and for one without numbers.

    The places of a list are tier1, tier2, ..., those of a mapping its keys; a single number has the place "".
    """
    value: Any = facts
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            known = ", ".join(value) if isinstance(value, Mapping) else "none below it"
            raise ValueError(f"there is no fact {name!r}: at {part!r} there are {known}")
        value = value[part]
    by_place: Mapping[Any, Any] = {"": value}
    if isinstance(value, Mapping):
        by_place = value
    elif isinstance(value, list | tuple):
        by_place = {f"tier{number}": each for number, each in enumerate(value, 1)}
    if any(not isinstance(number, int | float) for number in by_place.values()):
        parts = f": name one of its parts, {', '.join(value)}" if isinstance(value, Mapping) else ""
        raise ValueError(f"the fact {name!r} is neither a number nor numbers by place{parts}")
    return {str(place): float(number) for place, number in by_place.items()}
