"""Several tasks in one run: the label set of each tier's clients (FedorAS, App. H)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedloom.platform.data.source import LabelSet, of_classes
from fedloom.platform.spaces.capabilities import with_tasks
from fedloom.tiers.costs import CostTable, with_unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fedloom.platform.data.config import DataConfig
    from fedloom.platform.data.dataset import Dataset
    from fedloom.platform.federation.config import RunConfig
    from fedloom.platform.spaces.base import SearchSpace


ALL = "all"
"""The name of the data set's own classes."""
MOST_NAMED = 3
"""Largest number of classes whose names are joined into one."""


@dataclass(frozen=True)
class Tasks:
    """The tasks of a run: their names, and the index of each tier's task; without names all tiers share one task."""

    names: tuple[str, ...] = ()
    of_tier: tuple[int, ...] = ()
    labels: tuple[LabelSet, ...] = ()
    """The label set of each task."""

    def of_same(self, tier: int, tier_of_client: np.ndarray) -> np.ndarray:
        """The ids of the clients of a tier and above that have its task, ascending."""
        able = tier_of_client >= tier
        if self.names:
            able &= np.asarray(self.of_tier)[tier_of_client] == self.of_tier[tier]
        return np.flatnonzero(able)

    def table(self, table: CostTable, tier: int) -> CostTable:
        """The costs for the clients of a tier: other tasks' classifiers cost infinity."""
        if not self.names:
            return table
        last, task_of_tier = len(table.options) - 1, self.of_tier[tier]
        return with_unsupported(table, [(last, task) for task in range(len(self.names)) if task != task_of_tier])


def tasks_of(config: RunConfig, space: SearchSpace, dataset: Dataset, tiers: int) -> Tasks:
    """The tasks of `tiers.tasks`; ValueError if tiers, label sets and the space's classifiers do not fit together."""
    names = task_names(config, tiers)
    of_tiers, heads = config.tiers.tasks, config.space.heads
    known = label_sets(dataset, config.data)
    if of_tiers is None:
        return Tasks()
    unknown = next((name for name in of_tiers if name not in known), None)
    if unknown is not None:
        raise ValueError(
            f"tiers.tasks: {config.data.dataset} has no label set {unknown!r}: known are {', '.join(known)}; "
            "data.label_sets.NAME=[...] adds one"
        )
    with_tasks(space, "tiers.tasks")
    classes = [len(known[name].names) for name in names]
    if heads != classes:
        what = ", ".join(f"{count} ({name})" for name, count in zip(names, classes, strict=True))
        raise ValueError(
            f"space.heads={'null' if heads is None else heads}: tasks have {what} classes; set space.heads={classes}"
        )
    return Tasks(names, tuple(names.index(name) for name in of_tiers), tuple(known[name] for name in names))


def task_names(config: RunConfig, tiers: int) -> tuple[str, ...]:
    """The names of `tiers.tasks`, each once; ValueError if they do not fit the tiers, or for heads without tasks."""
    of_tiers, heads = config.tiers.tasks, config.space.heads
    if of_tiers is None:
        if heads is not None:
            raise ValueError(f"space.heads={heads} is for several tasks: give each tier's task in tiers.tasks")
        return ()
    if len(of_tiers) != tiers:
        raise ValueError(f"tiers.tasks has {len(of_tiers)} values for {tiers} tiers: give one per tier")
    return tuple(dict.fromkeys(of_tiers))


def label_sets(dataset: Dataset, config: DataConfig) -> Mapping[str, LabelSet]:
    """The data set's label sets by name: all of its classes, its own coarser ones, and those of `data.label_sets`.

    Raises ValueError for an entry of `data.label_sets` whose name is taken, or that does not list one class for each
    class of the data set.
    """
    classes = dataset.num_classes
    known = {ALL: LabelSet(tuple(range(classes)), dataset.class_names), **dataset.label_sets}
    for name, of in config.label_sets.items():
        key = f"data.label_sets.{name}"
        if name in known:
            raise ValueError(f"{key}: {config.dataset} already has label sets named {', '.join(known)}; choose another")
        known[name] = LabelSet(of_classes(of, classes, key), _names(name, of, dataset.class_names))
    return known


def _names(name: str, of: Sequence[int], classes: Sequence[str]) -> tuple[str, ...]:
    """Names of coarser classes: the joined names, such as `0 + 1`, or if too many the label set's name and a number."""
    joined = [[c for c, label in zip(classes, of, strict=True) if label == coarse] for coarse in range(1 + max(of))]
    return tuple(" + ".join(of_one) if len(of_one) <= MOST_NAMED else f"{name} {k}" for k, of_one in enumerate(joined))
