"""The plan of an ablation on disk, written once and never changed."""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedloom.platform.results.files import check_name, write_atomically

logger = logging.getLogger(__name__)

FOLDER = "ablations"
PLAN = "ablation.json"
VERSION = 1

FIGURES = ("macs_by_axis", "stages_by_axis", "tiers_by_axis", "metric_by_axis")
"""What an ablation may name as its `figures`; the report draws them."""


@dataclass(frozen=True)
class Trial:
    """One run of an ablation.

    Attributes:
        index: its place in the plan, from 0.
        run_id: fixed when the ablation was planned, so that no trial is ever run twice.
        setting: by axis the value, or the name of the setting, as people read it.
        overrides: what differs from the ablation's common overrides, as `key=value`; without the seed.
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
        """The experiment under which the run's rows are."""
        return str(self.config["experiment"])

    def label(self) -> str:
        """The setting and seed in a few words."""
        return " ".join([*(f"{k}={short(v)}" for k, v in self.setting.items()), f"seed={self.seed}"])


@dataclass(frozen=True)
class Ablation:
    """A planned ablation.

    Attributes:
        ablation_id: its folder's name; the trials' run ids begin with it.
        name: of the preset or file, such as beta_schedule.
        title: the question that it answers.
        experiment: the preset that it varies.
        axes: by name the values in their order (of a random search those that were drawn).
        reference: by axis the value that the experiment has by itself, where it is among the axis' values.
        figures: names of the report's figures.
        scheduler: as in `SchedulerConfig`.
        overrides: what holds for all trials, as `key=value`.
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

    def folder(self, root: Path) -> Path:
        """Where its files lie."""
        return root / FOLDER / self.ablation_id


def short(value: Any) -> str:
    """A value as people read it."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def new_ablation_id(root: Path, name: str) -> str:
    """An id that nothing under `root` uses; short enough to begin run ids of 40 characters."""
    check_name("ablation", name)
    while True:
        found = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{name[:12]}-{os.urandom(3).hex()}"
        if not (root / FOLDER / found).exists():
            return found


def write_ablation(root: Path, ablation: Ablation) -> None:
    """Writes the plan, whole or not at all."""
    folder = ablation.folder(root)
    folder.mkdir(parents=True)
    write_atomically(folder / PLAN, json.dumps({"version": VERSION, **asdict(ablation)}, indent=1).encode())


def read_ablation(folder: Path) -> Ablation:
    """The plan in a folder; ValueError for a missing or damaged one."""
    path = folder / PLAN
    try:
        values = json.loads(path.read_bytes())
        if values.pop("version") > VERSION:
            raise ValueError(f"{path} was written by a newer version of fedloom: read it with that version")
        trials = tuple(Trial(**{**t, "overrides": tuple(t["overrides"])}) for t in values.pop("trials"))
        axes = {name: tuple(found) for name, found in values.pop("axes").items()}
        lists: dict[str, Any] = {name: tuple(values.pop(name)) for name in ("seeds", "figures", "overrides")}
        return Ablation(**values, **lists, axes=axes, trials=trials)
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not the plan of an ablation: restore it from a copy") from error


def list_ablations(root: Path) -> list[Ablation]:
    """All ablations under a results folder, by id; one whose plan cannot be read is warned of and left out."""
    found = []
    for path in sorted((root / FOLDER).glob(f"*/{PLAN}")):
        try:
            found.append(read_ablation(path.parent))
        except ValueError as error:
            logger.warning("%s", error)
    return found


def find_ablation(root: Path, given: str) -> Ablation:
    """The ablation of this id, or the only one whose id begins so; ValueError listing what there is."""
    names = sorted(path.parent.name for path in (root / FOLDER).glob(f"*/{PLAN}"))
    matching = [n for n in names if n == given] or [n for n in names if n.startswith(given)]
    if len(matching) == 1:
        return read_ablation(root / FOLDER / matching[0])
    if not matching:
        known = ", ".join(names[-10:]) or "none"
        raise ValueError(f"no ablation {given!r} under {root}; known ablations: {known}")
    raise ValueError(f"ablation {given!r} could be any of {', '.join(matching[-10:])}: give more of its id")


def is_ablation(root: Path, given: str) -> bool:
    """Whether an ablation of this id, or one that begins so, is there."""
    return any(path.parent.name.startswith(given) for path in (root / FOLDER).glob(f"*/{PLAN}"))
