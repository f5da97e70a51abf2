"""Training cost of k models: one supernet for all, or iFedAvg, which trains each alone (SuperFedNAS, Fig. 6)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.frames import communication
from fedloom.experiments.analysis.kinds import SUBNETS
from fedloom.experiments.analysis.labels import Labels
from fedloom.experiments.analysis.seeds import SEEDS
from fedloom.experiments.analysis.settings import Setting, flat, settings_of
from fedloom.experiments.analysis.tables import Tables

HEURISTIC_KEYS = ("distribution", "shares", "shrinking", "travels", "evaluate", "evaluate_every")
"""Keys of `method.train` that only a supernet has: a comparison on equal terms may differ in them."""


@dataclass(frozen=True)
class Cost:
    """Cost of training, summed over all clients: bytes received and sent, and MACs."""

    size_bytes: float
    macs: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.size_bytes + other.size_bytes, self.macs + other.macs)


@dataclass(frozen=True)
class Member:
    """A subnet that was trained alone, and the cost of its training."""

    architecture: str
    label: str
    cost: Cost
    is_largest: bool
    """Whether it is the largest subnet of the space."""


@dataclass(frozen=True)
class Step:
    """The cost of iFedAvg for the first k members, and its ratio to the supernet's cost."""

    k: int
    member: Member
    total: Cost
    communication_ratio: float
    compute_ratio: float


@dataclass(frozen=True)
class CostComparison:
    """The cost of training a supernet compared with training a family one by one, as means over the setting's seeds.

    `largest` is the most expensive member alone, as a step (FedAvg on the largest subnet). `differences` lists the
    configuration keys in which the two were not trained on equal terms, with both values.
    """

    supernet: str
    separately: str
    dataset: str
    supernet_cost: Cost
    steps: tuple[Step, ...]
    largest: Step
    differences: tuple[str, ...]


def cost_comparisons(tables: Tables, labels: Labels) -> list[CostComparison]:
    """Compares every supernet setting with every setting that trained members alone, on the same data set and space.

    Members are in the order of the configured family. Stages that did not run all their rounds are left out, and so
    are the search, which trains nothing, and the final evaluation.
    """
    settings = [s for s in settings_of(tables) if s.kind == SUBNETS]
    stages = _complete(communication(tables), settings)
    costs = {s.name: _stage_costs(s.rows(stages)) for s in settings}
    supernets = [s for s in settings if "supernet" in costs[s.name]]
    separate = [s for s in settings if any(name.startswith("alone/") for name in costs[s.name])]
    return [
        _compare(one, other, costs[one.name]["supernet"], _members(other, costs[other.name], labels))
        for one, other in product(supernets, separate)
        if _same(one, other, ("data", "dataset")) and _same(one, other, ("space",))
    ]


def _same(one: Setting, other: Setting, path: Sequence[str]) -> bool:
    first: Any = one.config
    second: Any = other.config
    for key in path:
        first, second = first[key], second[key]
    return bool(first == second)


def _complete(stages: pd.DataFrame, settings: Iterable[Setting]) -> pd.DataFrame:
    """The stages that trained for all configured rounds."""
    wanted = {run_id: s.config["method"]["train"]["rounds"] for s in settings for run_id in s.run_ids}
    rounds = stages["run_id"].map(wanted)
    return stages[(stages["rounds"] >= rounds).fillna(False) & stages["kind"].isin(["supernet", "alone"])]


def _stage_costs(stages: pd.DataFrame) -> dict[str, Cost]:
    """Mean cost over seeds by stage, in the stages' order."""
    sums = stages.assign(both=stages["bytes_down"] + stages["bytes_up"])
    per_seed = sums.groupby(["stage", SEEDS], sort=False)[["both", "macs"]].mean()
    means = per_seed.groupby("stage", sort=False).mean()
    return {str(stage): Cost(float(row["both"]), float(row["macs"])) for stage, row in means.iterrows()}


def _members(setting: Setting, costs: dict[str, Cost], labels: Labels) -> list[Member]:
    run_id = setting.run_ids[0]
    names = {stage: stage.removeprefix("alone/") for stage in costs if stage.startswith("alone/")}
    return [
        Member(name, labels.of(run_id, name), costs[stage], labels.is_largest(run_id, name))
        for stage, name in names.items()
    ]


def _compare(one: Setting, other: Setting, supernet: Cost, members: Sequence[Member]) -> CostComparison:
    totals = list(accumulate(m.cost for m in members))
    steps = tuple(_step(k, m, total, supernet) for k, (m, total) in enumerate(zip(members, totals, strict=True), 1))
    largest = max(members, key=lambda m: m.cost.macs)
    return CostComparison(
        supernet=one.name,
        separately=other.name,
        dataset=str(one.config["data"]["dataset"]),
        supernet_cost=supernet,
        steps=steps,
        largest=_step(1, largest, largest.cost, supernet),
        differences=tuple(_differences(one, other)),
    )


def _step(k: int, member: Member, total: Cost, supernet: Cost) -> Step:
    return Step(k, member, total, total.size_bytes / supernet.size_bytes, total.macs / supernet.macs)


def _differences(one: Setting, other: Setting) -> Iterable[str]:
    """Differing keys of data and training with both values, the supernet's first."""
    first, second = dict(flat(one.config)), dict(flat(other.config))
    for key in sorted({*first, *second}):
        part = key.removeprefix("method.train.").split(".")[0]
        terms = key.startswith("data.") or (key.startswith("method.train.") and part not in HEURISTIC_KEYS)
        if terms and key not in ("data.root", "data.cache", "data.download") and first.get(key) != second.get(key):
            yield f"{key} ({first.get(key)} and {second.get(key)})"
