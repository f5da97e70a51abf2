"""Settings: groups of runs whose configurations differ only in seeds and in where and how they are computed.

All reports, tables, figures and comparisons use this definition of a setting, and the means with 95 % confidence
intervals over its seeds: runs that repeat a seed count as one sample, their mean.
"""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.tables import Tables, configuration, kind_of, name_of, natural
from fedloom.platform.plugins import called

DATA_PLACES = ("data.root", "data.cache", "data.download")

FREE = (
    "name", "tags", "seed", "seeds", "results", "reuse_supernet", "tensorboard", "tracking", "executor", "ray",
    "checkpoint", *DATA_PLACES
)  # fmt: skip
"""Keys and key prefixes that do not affect what is trained: names, seeds, and where and how it is computed."""

PRECISION = "executor.precision"
"""The key below `FREE` that affects more than the last bits of a result."""

NOT_SET = "(not set)"
"""Value of a key that the configuration of a run does not have, for instance because its version is older."""

MOST_KEYS = 4
"""Maximum number of differences in the name of a setting."""

LONGEST_VALUE = 32
"""Maximum number of characters of a value in the name of a setting."""


@dataclass(frozen=True)
class Setting:
    """Runs of one experiment that differ only in seeds.

    Attributes:
        name: the experiment, and what distinguishes the setting from the experiment's others: the name that its runs
            were given, or the keys and values in which it differs.
        run_ids: the runs, in the order in which they were requested.
        seeds: all seeds of each of these runs, as JSON text.
        kind: what its method produces, one of the constants of `tables`, such as `TIERS`.
        config: the configuration of the first run.
        differences: the values of the dotted keys in which the experiment's settings differ; empty for one setting.
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
        """Number of distinct seeds; runs that repeat a seed are not a further sample."""
        return len(set(self.seeds))

    @property
    def repeats_seeds(self) -> bool:
        """Whether some of its runs have the same seeds."""
        return self.num_seeds < len(self.run_ids)

    @property
    def is_alone(self) -> bool:
        """Whether it is the only setting of its experiment, and therefore has the experiment's name."""
        return self.name == self.experiment

    def rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The rows of its runs, with the column `seeds`."""
        rows = frame[frame["run_id"].isin(self.run_ids)]
        seeds_by_run = dict(zip(self.run_ids, self.seeds, strict=True))
        return rows.assign(**{SEEDS: rows["run_id"].map(seeds_by_run).astype(object)})


def settings_of(tables: Tables) -> list[Setting]:
    """Groups the runs by configuration, in the order in which they were requested.

    A setting is named after its experiment, followed by the keys that differ if the experiment has several settings.
    """
    experiments = {p.run_id: p.experiment for p in tables.paths}
    values = {run_id: essential(configuration(tables, run_id)) for run_id in experiments}
    # Runs without a stored configuration may differ in any key, so that each is its own setting.
    unlike = {r: experiment if values[r] else f"{experiment}/{r}" for r, experiment in experiments.items()}
    groups = alike(values, unlike)
    of_experiment: dict[str, list[list[str]]] = {}
    for group in groups:
        of_experiment.setdefault(experiments[group[0]], []).append(group)
    settings = (s for name, alike_runs in of_experiment.items() for s in _settings(tables, name, alike_runs, values))
    by_first = {setting.run_ids[0]: setting for setting in settings}
    return [by_first[group[0]] for group in groups]


def _settings(
    tables: Tables, experiment: str, groups: Sequence[list[str]], values: Mapping[str, Mapping[str, Any]]
) -> Iterator[Setting]:
    """The settings of one experiment."""
    firsts = [group[0] for group in groups]
    keys = differing([values[run_id] for run_id in firsts])
    names = names_apart([values[run_id] for run_id in firsts], firsts, experiment)
    given_names: list[str | None] = [_given_name(tables, group) for group in groups] if len(groups) > 1 else [None]
    names = [
        f"{experiment}, {given_name}" if given_name is not None and given_names.count(given_name) == 1 else name
        for name, given_name in zip(names, given_names, strict=True)
    ]
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


def _given_name(tables: Tables, group: Sequence[str]) -> str | None:
    """The name that all runs of a setting share; None if they have none or different ones."""
    names = {name_of(tables, run_id) for run_id in group}
    return names.pop() if len(names) == 1 else None


def alike(values: Mapping[str, Mapping[str, Any]], kinds: Mapping[str, str] | None = None) -> list[list[str]]:
    """Groups runs with equal values (and equal `kinds`), in the order of each group's first run."""
    groups: dict[str, list[str]] = {}
    for run_id, config in values.items():
        key = json.dumps([kinds[run_id] if kinds else None, sorted(config.items())], default=str)
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
    """The dotted keys and values that affect what is trained: all except those in `FREE` and `ignore`."""
    known = {key: value for key, value in flat(config) if not _is_below(key, ignore)}
    return {key: value for key, value in known.items() if key == PRECISION or not _is_below(key, FREE)}


def _is_below(key: str, prefixes: Sequence[str]) -> bool:
    """Whether the key is one of these, or below one of them."""
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys in which these configurations differ, or which only some of them have."""
    keys = sorted({key for config in configs for key in config})
    return [k for k in keys if any(c.get(k, NOT_SET) != configs[0].get(k, NOT_SET) for c in configs)]


def names_apart(configs: Sequence[Mapping[str, Any]], run_ids: Sequence[str], head: str = "") -> list[str]:
    """A name for each configuration: the head, and the "key=value" pairs that distinguish it from the others.

    Only keys that all configurations have are named, since a key that an older version lacks is no informative
    difference. If two names are still equal, the id of a run of each follows, from `run_ids`.
    """
    keys = [key for key in differing(configs) if all(key in config for config in configs)]
    known = {key for config in configs for key in config}
    brief = {key: _brief(key, known) for key in keys}
    names = [", ".join([*([head] if head else []), *_differences(config, configs, brief)]) for config in configs]
    return [
        name if names.count(name) == 1 else ", ".join([*([name] if name else []), run_id])
        for name, run_id in zip(names, run_ids, strict=True)
    ]


def _differences(values: Mapping[str, Any], others: Sequence[Mapping[str, Any]], brief: Mapping[str, str]) -> list[str]:
    """Up to `MOST_KEYS` keys with values that best distinguish this configuration, and the number of omitted keys."""
    shown = sorted(_telling(values, others, list(brief))[:MOST_KEYS])
    more = [f"and {len(brief) - len(shown)} more"] if len(brief) > len(shown) else []
    return [*(f"{brief[key]}={_short(values[key])}" for key in shown), *more]


def _telling(values: Mapping[str, Any], others: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    """The keys in greedy order: each next key separates this configuration from as many remaining others as it can."""
    ordered: list[str] = []
    left, same = list(keys), [o for o in others if o is not values]
    while left and len(ordered) < MOST_KEYS:
        best = max(left, key=lambda k: sum(o[k] != values[k] for o in same))
        left.remove(best)
        ordered.append(best)
        same = [o for o in same if o[best] == values[best]]
    return [*ordered, *left]


def _brief(key: str, known: Collection[str]) -> str:
    """The shortest suffix of a key that no other key has, since legends are narrow."""
    parts = key.split(".")
    for length in range(1, len(parts)):
        end = ".".join(parts[-length:])
        if not any(other.endswith(f".{end}") or other == end for other in known if other != key):
            return end
    return key


def _short(value: Any) -> str:
    text = called(value_text(value))
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def value_text(value: Any) -> str:
    """A configuration value as text for names and tables."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":")).replace('"', "")


# -- means over seeds -------------------------------------------------------------------------------------------------

CONFIDENCE = 0.95

FEWEST = 3
"""Minimum number of values for an interval or a test: Student's quantile is 12.7 for two values, 4.3 for three."""


@dataclass(frozen=True)
class Estimate:
    """The mean of `runs` independent values, with the interval mean ± half_width (null for fewer than `FEWEST` values).

    Runs that repeat a seed are not independent: they count as one value, their mean.
    """

    mean: float
    half_width: float | None
    runs: int
    values: tuple[float, ...]


def is_absent(value: Any) -> bool:
    """Whether a value is None, NaN or pandas' NA."""
    return bool(pd.isna(value))


def estimate(values: Iterable[Any]) -> Estimate | None:
    """Mean and 95 % interval by Student's t with n - 1 degrees of freedom; None if all values are absent."""
    known = tuple(float(v) for v in values if not is_absent(v))
    n = len(known)
    if n == 0:
        return None
    # The sum is independent of the order of the runs; rounding must not move the mean of equal values.
    mean = min(max(math.fsum(known) / n, min(known)), max(known))
    if n < FEWEST:
        return Estimate(mean, None, n, known)
    deviations = [v - mean for v in known]
    # Squares of the perplexities of diverged models would overflow. Powers of two scale without rounding.
    scale = 2.0 ** math.frexp(max(map(abs, deviations)))[1]
    variance = math.fsum((d / scale) ** 2 for d in deviations) / (n - 1)
    from scipy.special import stdtrit  # imported here, because it takes half a second and a few runs do not need it

    quantile = float(stdtrit(n - 1, 0.5 + CONFIDENCE / 2))
    return Estimate(mean, quantile * scale * math.sqrt(variance / n), n, known)


SEEDS = "seeds"
"""The column with all seeds of a row's run, as JSON text."""


def seeds_of(tables: Tables, run_id: str) -> str:
    """All seeds of a run as JSON text; the run's id if it did not record them."""
    config, recorded = configuration(tables, run_id), tables.recorded(run_id, "seeds")
    if recorded is not None:
        return json.dumps(recorded, sort_keys=True)
    if "seed" not in config:
        return json.dumps({"run_id": run_id})
    follow = {"seed": config["seed"], **{k: v for k, v in config.get("seeds", {}).items() if v is not None}}
    return json.dumps(follow, sort_keys=True)


def by_seed(rows: pd.DataFrame, measures: Sequence[str]) -> pd.DataFrame:
    """The means of the measures per distinct `seeds`, seed 9 before seed 10."""
    means = rows.groupby(SEEDS)[list(measures)].mean()
    return means.loc[sorted(means.index, key=natural)]


def estimate_by_seed(values: Iterable[Any], seeds: Iterable[str]) -> Estimate | None:
    """Mean and interval over distinct seeds; `seeds` holds the seed of each value. None if all values are absent.

    The estimate's values are in the order of the seeds, seed 9 before seed 10.
    """
    known: dict[str, list[float]] = {}
    for value, seed in zip(values, seeds, strict=True):
        if not is_absent(value):
            known.setdefault(seed, []).append(float(value))
    return estimate(math.fsum(known[seed]) / len(known[seed]) for seed in sorted(known, key=natural))


def spread(rows: pd.DataFrame, by: Sequence[str], value: str) -> pd.DataFrame:
    """Mean, min and max of a value over `seeds`, per combination of the columns `by`.

    Several rows of a run are averaged first, then the runs that repeat a seed.
    """
    per_run = rows.groupby([*by, SEEDS, "run_id"], observed=True)[value].mean()
    per_seed = per_run.groupby([*by, SEEDS], observed=True).mean()
    return per_seed.groupby(list(by), observed=True).agg(["mean", "min", "max"])
