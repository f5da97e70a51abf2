"""The subnets of elastic supernets: readable labels, cost and quality of each, and the cost of training k of them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import TYPE_CHECKING

import pandas as pd

from fedloom.experiments.analysis.architectures import space_of
from fedloom.experiments.analysis.rounds import communication
from fedloom.experiments.analysis.settings import SEEDS, Estimate, Setting, estimate_by_seed, flat, settings_of
from fedloom.experiments.analysis.tables import (
    ALONE,
    SUBNETS,
    Tables,
    configuration,
    runs_of_kind,
    where,
)

if TYPE_CHECKING:
    from fedloom.platform.spaces.elastic import ElasticSpace


@dataclass(frozen=True)
class Labels:
    """Labels of subnets for runs whose stored configuration defines an elastic space; other runs keep the ids."""

    spaces: Mapping[str, "ElasticSpace"]

    def of(self, run_id: str, architecture: str) -> str:
        """The subnet's label, or its id if it has none."""
        space = self.spaces.get(run_id)
        if space is None:
            return architecture
        try:
            return space.label(space.parse(architecture))
        except ValueError:
            return architecture  # written with another version of the space

    def is_largest(self, run_id: str, architecture: str) -> bool:
        """Whether this is the largest subnet of the run's space; False if the space is unknown."""
        space = self.spaces.get(run_id)
        return space is not None and architecture == "-".join(map(str, space.largest))


def labels_of(tables: Tables) -> Labels:
    """The labels of the runs' spaces, without spaces that this version cannot build."""
    runs = runs_of_kind(tables, SUBNETS)
    if not runs:
        return Labels({})
    from fedloom.platform.spaces.elastic import ElasticSpace

    spaces = {run_id: space_of(configuration(tables, run_id)) for run_id in runs}
    return Labels({run_id: space for run_id, space in spaces.items() if isinstance(space, ElasticSpace)})


SUPERNET, SEARCHED = "supernet", "searched"

SAMPLES, FRONT = "samples", "front"
"""Values of `tier` in the table `candidates` that are not targets: training samples of predictors, NSGA-II's front."""

COSTS = ("macs", "parameters")
QUALITIES = ("accuracy", "perplexity", "loss")
MEASURED = (*COSTS, *(f"{split}_{quality}" for split in ("validation", "test") for quality in QUALITIES))


@dataclass(frozen=True)
class Subnet:
    """One subnet, or the winners of one target, over the seeds of a setting.

    `target` is empty except for winners of a search; `architecture` is None if the runs found different ones.
    `values` holds an estimate, or None, for macs, parameters, and SPLIT_accuracy, SPLIT_perplexity and SPLIT_loss with
    the splits validation and test.
    """

    model: str
    target: str
    architecture: str | None
    label: str
    values: dict[str, Estimate | None]


@dataclass(frozen=True)
class Predictor:
    """A predictor on held-out subnets over the seeds of a setting; `measure` is accuracy, loss or latency_s."""

    measure: str
    kendall_tau: Estimate | None
    mean_absolute_error: Estimate | None
    held_out: Estimate | None


@dataclass(frozen=True)
class SubnetSummary:
    """The subnets of one setting, in the order of their evaluation, and its predictors."""

    setting: Setting
    subnets: tuple[Subnet, ...]
    predictors: tuple[Predictor, ...]


def subnets(tables: Tables, labels: Labels) -> pd.DataFrame:
    """One row per (run, model, target, architecture) of a SuperFedNAS run's final evaluation.

    Columns: experiment, run_id, model (supernet: a subnet of the family; searched: a target's winner; alone: trained
    without a supernet), target, architecture, label, macs, parameters, and per split accuracy, perplexity (text data)
    and loss on all of the server's data. Unknown values are null.
    """
    models, runs = (SUPERNET, SEARCHED, ALONE), runs_of_kind(tables, SUBNETS)
    rows = where(tables.evaluations, stage="evaluation", run_id=runs, model=models)
    rows = rows[rows["client_id"].isna()]
    metric = rows["metric"].astype(object)  # pandas 3.0 cannot add a column of text to one that has no text at all
    names = metric.where(rows["split"].isna(), rows["split"].astype(object) + "_" + metric)
    target = rows["tier"].astype(object).where(rows["model"] == SEARCHED, "")
    rows = rows.assign(name=names, target=target)
    key = ["experiment", "run_id", "model", "target", "architecture"]
    table = rows.pivot_table(index=key, columns="name", values="value", aggfunc="last", sort=False)
    values = table.reindex(columns=list(MEASURED[len(COSTS) :])).astype("float64").reset_index()
    values = values.rename_axis(columns=None).astype(dict.fromkeys(key, object))
    # Pivoting sorts the rows by key; this restores the order of the evaluation.
    wide = rows[key].drop_duplicates().astype(object).merge(values, on=key, how="left")
    wide = wide.merge(architecture_costs(tables), on=["run_id", "architecture"], how="left")
    label = [labels.of(str(r), str(a)) for r, a in zip(wide["run_id"], wide["architecture"], strict=True)]
    wide = wide[[*key, *MEASURED]].astype(dict.fromkeys(COSTS, "float64"))
    return wide.assign(label=pd.Series(label, wide.index, dtype=object))


def architecture_costs(tables: Tables) -> pd.DataFrame:
    """MACs and parameters per (run, architecture), from the evaluations, else the kept models, else the candidates."""
    key, costs = ["run_id", "architecture"], [*COSTS]
    rows = tables.evaluations[tables.evaluations["metric"].isin(costs)].dropna(subset=key)
    rows = rows.drop_duplicates([*key, "metric"], keep="last").astype(dict.fromkeys([*key, "metric"], object))
    wide = rows.pivot(index=key, columns="metric", values="value").reindex(columns=costs).reset_index()
    others = [f[[*key, *costs]].astype(dict.fromkeys(costs, "Float64")) for f in (tables.models, tables.candidates)]
    both = pd.concat([f.astype(object) for f in (wide, *others)], ignore_index=True).dropna(subset=key)
    return both.groupby(key, sort=False)[costs].first().reset_index()


def subnet_summaries(tables: Tables, labels: Labels) -> list[SubnetSummary]:
    """One summary per setting, with means and intervals over its seeds; settings without subnets are left out."""
    frame = subnets(tables, labels)
    rows_of = [(setting, setting.rows(frame)) for setting in settings_of(tables)]
    return [
        SubnetSummary(setting, tuple(_subnets(rows)), tuple(_predictors(setting.rows(tables.evaluations))))
        for setting, rows in rows_of
        if len(rows)
    ]


def _subnets(rows: pd.DataFrame) -> Iterable[Subnet]:
    # Winners are grouped by target, because seeds may find different ones; members of the family by architecture.
    target = rows["target"].where(rows["model"] == SEARCHED, rows["architecture"])
    for (model, _), group in rows.groupby([rows["model"], target], sort=False):
        names = list(dict.fromkeys(group["architecture"]))
        same = len(names) == 1
        label = str(group["label"].iloc[0]) if same else "differs"
        values = {name: estimate_by_seed(group[name], group[SEEDS]) for name in MEASURED}
        yield Subnet(str(model), str(group["target"].iloc[0]), str(names[0]) if same else None, label, values)


def _predictors(evaluations: pd.DataFrame) -> Iterable[Predictor]:
    groups = where(evaluations, model="predictor").groupby("metric", sort=False)
    values = {str(name): estimate_by_seed(group["value"], group[SEEDS]) for name, group in groups}
    for measure in ("accuracy", "loss", "latency_s"):
        if f"predictor_kendall_tau_{measure}" in values:
            figures = (values.get(f"predictor_{name}_{measure}") for name in ("kendall_tau", "mae", "held_out"))
            yield Predictor(measure, *figures)


def scored(tables: Tables) -> pd.DataFrame:
    """One row per subnet that the search of a SuperFedNAS run scored on validation data.

    Columns: experiment, run_id, tier (samples, front, or the target), architecture, macs, metric, on_front, is_winner.
    """
    rows = where(tables.candidates, run_id=runs_of_kind(tables, SUBNETS))
    rows = rows[rows["feasible"].fillna(False)].dropna(subset=["metric", "macs"])
    key = ["run_id", "tier", "architecture"]
    winners = set(where(tables.evaluations, model=SEARCHED)[key].itertuples(index=False, name=None))
    won = pd.Series([name in winners for name in rows[key].itertuples(index=False, name=None)], rows.index, dtype=bool)
    columns = ["experiment", *key, "macs", "metric"]
    front = rows["on_front"].fillna(False).astype(bool)
    return rows[columns].astype({"macs": "float64"}).assign(on_front=front, is_winner=won)


def targets_of(tables: Tables, run_id: str) -> list[str]:
    """The targets of the run's configuration, as named in the tables; its tiers if it names no targets."""
    config = configuration(tables, run_id)
    search = config["method"].get("search", {})
    unfitted = search.get("predictor") in ("none", "fitness")  # they measure no samples
    if config["method"].get("separately") or (search.get("samples", 0) == 0 and not unfitted):
        return []
    named = [f"{m}={float(v):.10g}" for m in ("macs", "latency_s") for v in search.get(m, [])]
    if named:
        return named
    recorded = tables.runs.loc[tables.runs["run_id"] == run_id, "tiers"].dropna()
    return [str(tier["tier"]) for text in recorded for tier in json.loads(text)]


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
    # The stages that trained for all configured rounds.
    wanted = {run_id: s.config["method"]["train"]["rounds"] for s in settings for run_id in s.run_ids}
    stages = communication(tables)
    is_whole = (stages["rounds"] >= stages["run_id"].map(wanted)).fillna(False)
    stages = stages[is_whole & stages["kind"].isin(["supernet", "alone"])]
    costs = {s.name: _stage_costs(s.rows(stages)) for s in settings}
    supernets = [s for s in settings if "supernet" in costs[s.name]]
    separate = [s for s in settings if any(name.startswith("alone/") for name in costs[s.name])]
    return [
        _compare(one, other, costs[one.name]["supernet"], _members(other, costs[other.name], labels))
        for one, other in product(supernets, separate)
        if one.config["data"]["dataset"] == other.config["data"]["dataset"]
        and one.config["space"] == other.config["space"]
    ]


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
