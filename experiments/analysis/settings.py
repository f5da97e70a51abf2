"""Which runs belong together: those of one configuration, whatever their seeds and the machine."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.experiments.analysis.tables import Tables, configuration

DATA_PLACES = ("data.root", "data.cache", "data.download")
FREE = ("seed", "seeds", "results", "reuse_supernet", "tensorboard", "executor", "ray", "checkpoint", *DATA_PLACES)
"""Keys, and the beginnings of keys, that do not say what is trained: seeds, and where and how it is computed."""

MOST_KEYS = 4
"""Differences that a setting's name shows."""


@dataclass(frozen=True)
class Setting:
    """Runs of one experiment that differ in seeds alone; `config` is the first run's."""

    name: str
    experiment: str
    run_ids: tuple[str, ...]
    config: Mapping[str, Any]


def settings_of(tables: Tables) -> list[Setting]:
    """The runs by configuration, in the order in which they were asked for.

    A setting is named after its experiment; where an experiment has several, the keys in which they differ follow.
    """
    groups: dict[str, list[int]] = {}
    configs = [configuration(tables, p.run_id) for p in tables.paths]
    for i, (paths, config) in enumerate(zip(tables.paths, configs, strict=True)):
        key = json.dumps([paths.experiment, sorted(essential(config).items())], default=str)
        groups.setdefault(key, []).append(i)
    firsts = [group[0] for group in groups.values()]
    found = [(tables.paths[i].experiment, essential(configs[i])) for i in firsts]
    names = _names(found, [tables.paths[i].run_id for i in firsts])
    return [
        Setting(name, tables.paths[g[0]].experiment, tuple(tables.paths[i].run_id for i in g), configs[g[0]])
        for name, g in zip(names, groups.values(), strict=True)
    ]


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The configuration as dotted keys and values; lists are values."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def essential(config: Mapping[str, Any]) -> dict[str, Any]:
    """The dotted keys and values that say what is trained: all but the `FREE` ones."""
    return {k: v for k, v in flat(config) if not any(k == f or k.startswith(f"{f}.") for f in FREE)}


def _names(found: list[tuple[str, dict[str, Any]]], run_ids: list[str]) -> list[str]:
    names = [_name(experiment, values, [v for e, v in found if e == experiment]) for experiment, values in found]
    # What one of two versions did not know yet tells nobody anything; the run's id does.
    return [name if names.count(name) == 1 else f"{name}, {run}" for name, run in zip(names, run_ids, strict=True)]


def _name(experiment: str, values: dict[str, Any], others: list[dict[str, Any]]) -> str:
    return ", ".join([experiment, *differences(values, others)])


def differences(values: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    """What sets this configuration apart from the others, as "key=value" by the keys that all of them know."""
    keys = [
        key for key in sorted(values) if all(key in o for o in others) and any(o[key] != values[key] for o in others)
    ]
    more = [f"and {len(keys) - MOST_KEYS} more"] if len(keys) > MOST_KEYS else []
    return [*(f"{_brief(key, values)}={_short(values[key])}" for key in keys[:MOST_KEYS]), *more]


def _brief(key: str, values: Mapping[str, Any]) -> str:
    """The end of a key that no other key has: legends are narrow."""
    parts = key.split(".")
    for length in range(1, len(parts)):
        end = ".".join(parts[-length:])
        if not any(other.endswith(f".{end}") or other == end for other in values if other != key):
            return end
    return key


def _short(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")).replace('"', "")
