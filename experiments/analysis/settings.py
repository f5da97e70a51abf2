"""Which runs belong together: those of one configuration, whatever their seeds and the machine.

Every report, table, figure and comparison asks here what a setting is.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.kinds import kind_of
from fedloom.experiments.analysis.seeds import SEEDS, seeds_of
from fedloom.experiments.analysis.tables import Tables, configuration

DATA_PLACES = ("data.root", "data.cache", "data.download")
FREE = ("seed", "seeds", "results", "reuse_supernet", "tensorboard", "executor", "ray", "checkpoint", *DATA_PLACES)
"""Keys, and the beginnings of keys, that do not say what is trained: seeds, and where and how it is computed."""

NOT_SET = "(not set)"
"""Stands for the value of a key that a run's version did not know."""

MOST_KEYS = 4
"""Differences that a setting's name shows."""

LONGEST_VALUE = 32
"""Letters of a value that a setting's name shows."""


@dataclass(frozen=True)
class Setting:
    """Runs of one experiment that differ in seeds alone.

    Attributes:
        name: the experiment, and what sets the setting apart from the experiment's others.
        run_ids: in the order in which the runs were asked for.
        seeds: all seeds of each of these runs, as JSON text.
        kind: what its method ends with, one of those of `kinds`.
        config: the first run's configuration.
        differences: by dotted key the value wherever the experiment's settings differ; empty if there is only one.
    """

    name: str
    experiment: str
    run_ids: tuple[str, ...]
    seeds: tuple[str, ...]
    kind: str
    config: Mapping[str, Any]
    differences: Mapping[str, Any]

    @property
    def num_seeds(self) -> int:
        """Distinct seeds: runs that repeat one are no further sample."""
        return len(set(self.seeds))

    @property
    def repeats_seeds(self) -> bool:
        """Whether some of its runs have the same seeds."""
        return self.num_seeds < len(self.run_ids)

    @property
    def seeds_by_run(self) -> dict[str, str]:
        """By run all of its seeds."""
        return dict(zip(self.run_ids, self.seeds, strict=True))

    def rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The rows of its runs, with the column `seeds`."""
        own = frame[frame["run_id"].isin(self.run_ids)]
        return own.assign(**{SEEDS: own["run_id"].map(self.seeds_by_run).astype(object)})


def settings_of(tables: Tables) -> list[Setting]:
    """The runs by configuration, in the order in which they were asked for.

    A setting is named after its experiment; where an experiment has several, the keys in which they differ follow.
    """
    experiments = {p.run_id: p.experiment for p in tables.paths}
    values = {run_id: essential(configuration(tables, run_id)) for run_id in experiments}
    # Runs that did not get so far as to store their configuration may differ in anything.
    unlike = {r: experiment if values[r] else f"{experiment}/{r}" for r, experiment in experiments.items()}
    groups = alike(values, unlike)
    of_experiment: dict[str, list[list[str]]] = {}
    for group in groups:
        of_experiment.setdefault(experiments[group[0]], []).append(group)
    found = {s.run_ids[0]: s for e, own in of_experiment.items() for s in _settings(tables, e, own, values)}
    return [found[group[0]] for group in groups]


def _settings(
    tables: Tables, experiment: str, groups: Sequence[list[str]], values: Mapping[str, Mapping[str, Any]]
) -> Iterator[Setting]:
    """The settings of one experiment."""
    firsts = [group[0] for group in groups]
    keys = differing([values[run_id] for run_id in firsts])
    names = names_apart([values[run_id] for run_id in firsts], firsts, experiment)
    for name, group in zip(names, groups, strict=True):
        yield Setting(
            name=name,
            experiment=experiment,
            run_ids=tuple(group),
            seeds=tuple(seeds_of(tables, run_id) for run_id in group),
            kind=kind_of(tables, group[0]),
            config=configuration(tables, group[0]),
            differences={key: values[group[0]].get(key, NOT_SET) for key in keys},
        )


def alike(values: Mapping[str, Mapping[str, Any]], kinds: Mapping[str, str] | None = None) -> list[list[str]]:
    """The runs in groups of the same values (and the same of `kinds`), in the order of each group's first run."""
    groups: dict[str, list[str]] = {}
    for run_id, own in values.items():
        key = json.dumps([kinds[run_id] if kinds else None, sorted(own.items())], default=str)
        groups.setdefault(key, []).append(run_id)
    return list(groups.values())


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The configuration as dotted keys and values; lists are values."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def essential(config: Mapping[str, Any], ignore: Sequence[str] = ()) -> dict[str, Any]:
    """The dotted keys and values that say what is trained: all but the `FREE` ones, and those of `ignore`."""
    free = (*FREE, *ignore)
    return {k: v for k, v in flat(config) if not any(k == f or k.startswith(f"{f}.") for f in free)}


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys in which these configurations differ, or which only some of them have."""
    keys = sorted({key for config in configs for key in config})
    return [k for k in keys if any(c.get(k, NOT_SET) != configs[0].get(k, NOT_SET) for c in configs)]


def names_apart(configs: Sequence[Mapping[str, Any]], run_ids: Sequence[str], head: str = "") -> list[str]:
    """A name for each configuration: the head, and as "key=value" what sets it apart from the others.

    Only keys that all of them know are named: what one of two versions did not know yet tells nobody anything. Where
    that leaves two without a difference, the id of a run of each follows, from `run_ids`.
    """
    keys = [key for key in differing(configs) if all(key in config for config in configs)]
    known = {key for config in configs for key in config}
    brief = {key: _brief(key, known) for key in keys}
    names = [", ".join([*([head] if head else []), *_differences(own, configs, brief)]) for own in configs]
    return [
        name if names.count(name) == 1 else ", ".join([*([name] if name else []), run_id])
        for name, run_id in zip(names, run_ids, strict=True)
    ]


def _differences(values: Mapping[str, Any], others: Sequence[Mapping[str, Any]], brief: Mapping[str, str]) -> list[str]:
    """Some keys with their values, those first that tell this configuration from the others; and how many more."""
    shown = sorted(_telling(values, others, list(brief))[:MOST_KEYS])
    more = [f"and {len(brief) - len(shown)} more"] if len(brief) > len(shown) else []
    return [*(f"{brief[key]}={_short(values[key])}" for key in shown), *more]


def _telling(values: Mapping[str, Any], others: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    """The keys, first those that tell this configuration from the most others that are not yet told apart."""
    ordered: list[str] = []
    left, same = list(keys), [o for o in others if o is not values]
    while left and len(ordered) < MOST_KEYS:
        best = max(left, key=lambda k: sum(o[k] != values[k] for o in same))
        left.remove(best)
        ordered.append(best)
        same = [o for o in same if o[best] == values[best]]
    return [*ordered, *left]


def _brief(key: str, known: Collection[str]) -> str:
    """The end of a key that no other key has: legends are narrow."""
    parts = key.split(".")
    for length in range(1, len(parts)):
        end = ".".join(parts[-length:])
        if not any(other.endswith(f".{end}") or other == end for other in known if other != key):
            return end
    return key


def _short(value: Any) -> str:
    text = value_text(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def value_text(value: Any) -> str:
    """A configuration's value as names and tables write it."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":")).replace('"', "")
