"""The plan of an ablation as a file that is written once and never changed, except that a search adds trials."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedloom.platform.results.files import (
    check_name,
    from_hashed_json,
    hashed_json,
    irregular,
    is_hashed,
    is_irregular,
    read_file,
    write_atomically,
)
from fedloom.platform.results.paths import find_named, list_runs

FOLDER = "ablations"
PLAN = "ablation.json"
VERSION = 4
"""Plans carry their own hash from version 3 on, because trials that have not begun are run as the plan says.

Plans of version 1 hold every trial's whole configuration instead of its differences from the first trial's.
"""
FIRST_HASHED = 3

FIGURES = (
    "macs_by_axis",
    "stages_by_axis",
    "tiers_by_axis",
    "metric_by_axis",
    "metric_by_axes",
    "time_by_axis",
    "bytes_by_axis",
    "fronts",
)
"""The allowed `figures` of an ablation, which the report draws."""

FRAME_COLUMNS = frozenset(
    {
        *("trial", "seed", "seeds", "experiment", "run_id", "model", "models", "final_model", "tier", "subnet"),
        *("architecture", "accuracy", "least_accuracy", "validation_accuracy", "client_accuracy", "worst_client"),
        *("loss", "macs", "total_macs", "parameters", "total_bytes", "simulated_s", "wall_s", "epsilon"),
        *("n", "mean", "half_width", "values", "stage", "kind", "series", "metric", "rounds_done", "step"),
        *("phase", "simulated_h", "megabytes", "group", "shown"),
    }
)
"""The columns that the frames of `analysis` have beside those of the axes, which therefore are no names of axes."""


def trial_id(ablation_id: str, index: int) -> str:
    """The run id of a trial, by its place in the plan."""
    return f"{ablation_id}-{index:04d}"


@dataclass(frozen=True)
class Trial:
    """One run of an ablation.

    Attributes:
        index: its index in the plan, from 0.
        run_id: fixed when the ablation is planned, so that no trial runs twice.
        setting: the value, or the name of the setting, by axis.
        overrides: overrides in addition to those of the ablation, as `key=value`; without the seed.
        config: the whole resolved configuration.
    """

    index: int
    run_id: str
    seed: int
    setting: Mapping[str, Any]
    overrides: tuple[str, ...]
    config: Mapping[str, Any]

    @property
    def experiment(self) -> str:
        """The experiment to which the run's rows belong."""
        return check_name("experiment", str(self.config["experiment"]))

    def label(self) -> str:
        """The setting and seed as short text."""
        return " ".join([*(f"{k}={short(v)}" for k, v in self.setting.items()), f"seed={self.seed}"])


@dataclass(frozen=True)
class Ablation:
    """A planned ablation.

    Attributes:
        ablation_id: name of its folder and prefix of the trials' run ids.
        name: name of the preset or file, such as beta_schedule.
        title: the question that it answers.
        experiment: the preset that it varies.
        axes: the values of each axis in order (for a random search, the drawn values).
        reference: the experiment's own value of each axis, if it is among the axis' values.
        figures: names of the report's figures.
        scheduler: the fields of `SchedulerConfig`.
        overrides: overrides of all trials, as `key=value`.
        search: for a Bayesian search, the fields of `SearchConfig` and its `axes`; `trials` are those suggested so far.
    """

    ablation_id: str
    name: str
    title: str
    experiment: str
    axes: Mapping[str, tuple[Any, ...]]
    reference: Mapping[str, Any]
    seeds: tuple[int, ...]
    figures: tuple[str, ...]
    scheduler: Mapping[str, Any]
    overrides: tuple[str, ...]
    attempts: int
    concurrent: int | None
    created: str
    trials: tuple[Trial, ...] = field(default_factory=tuple)
    search: Mapping[str, Any] = field(default_factory=dict)

    @property
    def points_left(self) -> int:
        """The number of points that a Bayesian search has not suggested yet; 0 without one."""
        return int(self.search["samples"]) - len(self.trials) // len(self.seeds) if self.search else 0

    def folder(self, root: Path) -> Path:
        """The folder of its files."""
        return root / FOLDER / self.ablation_id


def short(value: Any) -> str:
    """A value as short text: a string unchanged, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def axis_value(value: Any) -> Any:
    """The value of an axis in the frames: numbers, booleans and strings unchanged, all else as JSON text."""
    return value if isinstance(value, str | int | float) else short(value)


def new_ablation_id(root: Path, name: str) -> str:
    """A new id that is unused under `root`: UTC time, the ablation's name, and a random suffix."""
    check_name("ablation", name)
    while True:
        ablation_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{name}-{os.urandom(3).hex()}"
        if not (root / FOLDER / ablation_id).exists():
            return ablation_id


def write_ablation(root: Path, ablation: Ablation, *, replaces: bool = False) -> None:
    """Writes the plan atomically; FileExistsError if one exists, unless a continuing search `replaces` it.

    Raises ValueError like `check_no_link`.
    """
    folder = ablation.folder(root)
    check_no_link(folder)
    folder.mkdir(parents=True, exist_ok=True)  # exists if an earlier process was killed before it wrote the plan
    if (folder / PLAN).exists() and not replaces:
        raise FileExistsError(f"{folder / PLAN} is there: plans are written once")
    base = ablation.trials[0].config if ablation.trials else {}
    trials = []
    for trial in ablation.trials:
        trials.append({**vars(trial), "differences": list(_differences(base, trial.config))})
        del trials[-1]["config"]
    values = {"version": VERSION, **vars(ablation), "base": base, "trials": trials}
    write_atomically(folder / PLAN, hashed_json(values))


def check_no_link(folder: Path) -> None:
    """Raises ValueError for a link, a pipe or the like among an ablation's files; opens none of them."""
    for path in (folder.parent, folder, *folder.glob("*")):
        if is_irregular(path):
            raise ValueError(irregular(path))


def read_ablation(folder: Path) -> Ablation:
    """Reads the plan in a folder; ValueError if it is missing, damaged or changed, or has a newer format.

    Also raises ValueError like `check_no_link`.
    """
    check_no_link(folder)
    path = folder / PLAN
    try:
        values = from_hashed_json(read_file(path), path, allow_plain=True)
        version = values.pop("version")
        if version > VERSION:
            raise ValueError(f"{path} was written by a newer version of fedloom: read it with that version")
        if version >= FIRST_HASHED and not is_hashed(path):
            raise ValueError(f"{path} has lost its hash: restore it from a copy")
        base = values.pop("base", {})
        trials = tuple(_read_trial(folder.name, trial, base) for trial in values.pop("trials"))
        axes = {name: tuple(axis_values) for name, axis_values in values.pop("axes").items()}
        lists: dict[str, Any] = {name: tuple(values.pop(name)) for name in ("seeds", "figures", "overrides")}
        if values["ablation_id"] != folder.name or not isinstance(values["attempts"], int):
            raise TypeError(f"the plan of {values['ablation_id']}")  # its files would be looked up elsewhere
        return Ablation(**values, **lists, axes=axes, trials=trials)
    except (OSError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not the plan of an ablation: restore it from a copy") from error


def _read_trial(ablation_id: str, stored: Mapping[str, Any], base: Mapping[str, Any]) -> Trial:
    values = {"config": base, **stored, "overrides": tuple(stored["overrides"])}
    for path, value in values.pop("differences", ()):
        values["config"] = _replaced(values["config"], path, value)
    trial = Trial(**values)
    if trial.run_id != trial_id(ablation_id, trial.index):
        raise TypeError(f"{trial.run_id} is no trial of {ablation_id}")
    return trial


def _differences(base: Any, values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The JSON values that differ from `base`, each with the path of names that leads to it.

    It descends as long as both sides are mappings with the same names.
    """
    if isinstance(base, Mapping) and isinstance(values, Mapping) and [*base] == [*values]:
        for name, value in values.items():
            yield from _differences(base[name], value, (*path, name))
    elif not _is_same(base, values):
        yield path, values


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same text in JSON, which tells 1, 1.0 and true apart."""
    if type(one) is not type(other):
        return False
    if isinstance(one, str | int | None):
        return bool(one == other)
    return json.dumps(one) == json.dumps(other)


def _replaced(base: Any, path: Sequence[str], value: Any) -> Any:
    """A copy of `base` with the value at `path` replaced; it shares everything else with `base`."""
    if not path:
        return value
    return {**base, path[0]: _replaced(base[path[0]], path[1:], value)}


def ablation_ids(root: Path, beginning: str = "") -> list[str]:
    """The ids of the ablations under a results folder that begin with this text, sorted; reads no plan."""
    try:
        names = sorted(os.listdir(root / FOLDER))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [name for name in names if name.startswith(beginning) and (root / FOLDER / name / PLAN).exists()]


def find_ablation(root: Path, word: str) -> Ablation:
    """The ablation with this id or with this unambiguous prefix of its id; otherwise ValueError with known ids."""
    names = ablation_ids(root, word)
    matching = [n for n in names if n == word] or names
    if len(matching) == 1:
        return read_ablation(root / FOLDER / matching[0])
    if not matching:
        known = ", ".join(ablation_ids(root)[-10:]) or "none"
        raise ValueError(f"no ablation {word!r} under {root}; known ablations: {known}")
    raise ValueError(f"ablation {word!r} could be any of {', '.join(matching[-10:])}: give more of its id")


def meant_ablation(root: Path, word: str) -> Ablation | None:
    """The ablation that `word` means: its id, or the beginning of its id; None if it means runs, as any name does.

    Raises ValueError if several ablations, or an ablation and runs that are not its trials, have this prefix.
    """
    beginning = ablation_ids(root, word)
    if not beginning or word in beginning:
        return read_ablation(root / FOLDER / word) if beginning else None
    if find_named(root, word):
        return None
    # The ids of an ablation's trials begin with its own id.
    ids = [run.run_id for run in list_runs(root) if run.run_id.startswith(word)]
    runs = [run_id for run_id in ids if run_id.rpartition("-")[0] not in beginning]
    if runs:
        candidates = [*(f"ablation {name}" for name in beginning), *(f"run {run_id}" for run_id in runs)]
        raise ValueError(f"{word!r} could be any of {', '.join(candidates[-10:])}: give more of the id")
    return find_ablation(root, word)
