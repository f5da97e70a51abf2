"""Functions that count facts of a configuration without training: of its space, a family, a dry run, a whole run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import pandas as pd

from fedloom.experiments.analysis.rounds import communication
from fedloom.experiments.analysis.tables import load
from fedloom.experiments.reproduce.counting import SIZES
from fedloom.experiments.runs.configuration import compose_config
from fedloom.experiments.runs.describe import describe
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.arrays import Arrays
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.federated import size_variation
from fedloom.platform.data.sources import PUBLISHED
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.forecast import kind_of, macs_left
from fedloom.platform.federation.method import Stage
from fedloom.platform.federation.tiers import measure_costs, split_into_tiers
from fedloom.platform.federation.world import World
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.tier_search import TierSearchConfig
from fedloom.platform.methods.transfer import TransferConfig
from fedloom.platform.runs.dry_run import DryStage, is_countable
from fedloom.platform.runs.run import make_serial, planned_stages, planned_world, start_run
from fedloom.platform.search.base import Interval, winner
from fedloom.platform.search.config import SearchProblem
from fedloom.platform.search.registry import build_searcher
from fedloom.platform.seeding import stream
from fedloom.platform.settings import ONE_OR_MORE
from fedloom.platform.spaces.registry import build_space
from fedloom.tiers.devices import TRAINING_FACTOR

DATASET = "data.dataset="
MEASURES = ("rounds", "clients", "bytes_down", "bytes_up", "macs")
FEW_ROUNDS = 5
"""Rounds whose assignments tell the mean of all of a stage's."""
LANDSCAPES = 8
"""Synthetic landscapes that each tier's search is tried on."""


def space_facts(overrides: Sequence[str]) -> dict[str, Any]:
    """What `fedloom describe` says of the space and its tiers, and the number of models per tier.

    Source: FedorAS, App. E.4, Tab. 8.
    """
    facts = describe([o for o in overrides if not o.startswith("seed=")])
    models = [share * facts["architectures"] for share in facts["share_of_models"]]
    return {**facts, "models_per_tier": models}


def family_facts(overrides: Sequence[str]) -> dict[str, Any]:
    """Of each subnet of `method.family`, by its name there: macs, parameters, bytes (of all that is sent of it).

    Source: SuperFed, Tab. 4.
    """
    config = compose_config(overrides)
    space = build_space(config.space)
    tables = {"macs": measure_costs(config.tiers, space).macs}
    tables |= {name: space.cost_table(name) for name in ("parameters", "bytes")}
    family: Sequence[str] = getattr(config.method, "family", ())
    parsed = {text: space.parse(text) for text in family}
    return {name: {text: table.cost(a) for text, a in parsed.items()} for name, table in tables.items()}


def partition_facts(overrides: Sequence[str]) -> dict[str, Any]:
    """How unequal the clients' training data are: label_variation and size_variation, as in the table `runs`.

    Source: SPIDER, Fig. 4 and 5.
    """
    with TemporaryDirectory(prefix="fedloom-counted-") as folder:
        data = planned_world(compose_config(_without_content(overrides, folder))).data
        return {"label_variation": data.label_variation(), "size_variation": size_variation(data.sizes("train"))}


def training_facts(overrides: Sequence[str]) -> dict[str, Any]:
    """The costs of a dry run: rounds, clients (tasks), bytes_down, bytes_up, bytes and macs, each by kind of stage.

    Also macs_per_client and bytes_per_client (of one task), and by_stage with the same by whole stage. MACs are of
    forward passes. Stages that depend on what was trained are not counted. CIFAR and CINIC are stood in for.
    """
    with TemporaryDirectory(prefix="fedloom-counted-") as folder:
        places = [f"results={folder}/results", "dry_run=true", "executor.kind=serial"]
        start_run(compose_config([*_without_content(overrides, folder), *places]), make_serial)
        stages = communication(load(Path(folder) / "results", tables=["rounds"]))
    return {**_costs(stages, "kind"), "by_stage": _costs(stages, "stage")}


def _costs(stages: pd.DataFrame, by: str) -> dict[str, Any]:
    sums = stages.groupby(by, sort=False)[list(MEASURES)].sum().astype("float64")
    sums["bytes"] = sums["bytes_down"] + sums["bytes_up"]
    for name in ("bytes", "macs"):
        sums[f"{name}_per_client"] = sums[name] / sums["clients"]
    return {str(name): {str(k): float(v) for k, v in sums[name].items()} for name in sums.columns}


def work_facts(overrides: Sequence[str]) -> dict[str, Any]:
    """The MACs of a whole run, by kind of stage and in total (`macs`); a training step counts as three passes.

    Training from fresh weights is counted from the assignments of its first rounds; the other stages say what they
    expect of a middling network. A transfer is counted as training of the space's smallest and largest network.
    """
    with TemporaryDirectory(prefix="fedloom-counted-") as folder:
        configs = _counted(compose_config(_without_content(overrides, folder)))
        by_kind: dict[str, float] = {}
        for world in map(planned_world, configs):
            for stage in planned_stages(world):
                macs = _work(world, stage) / len(configs)
                by_kind[kind_of(stage)] = by_kind.get(kind_of(stage), 0.0) + macs
    return {"macs": sum(by_kind.values()), "by_kind": by_kind}


def search_facts(overrides: Sequence[str]) -> dict[str, Any]:
    """What the configured search finds on synthetic landscapes: `winners`, the mean metric of each tier's winners.

    A landscape gives every option of every decision a value from a normal distribution; a model's metric is their sum.
    The space, its tiers and the searches' settings are the configuration's.
    """
    config = compose_config(overrides)
    search: TierSearchConfig = config.method.search
    space = build_space(config.space)
    table = measure_costs(config.tiers, space).budget
    means = []
    for tier in split_into_tiers(config, space, table):
        goal, total = Interval(tier.lower, tier.upper), 0.0
        for seed in range(LANDSCAPES):
            rng = stream(seed, "landscape")
            values = [rng.normal(size=options) for options in space.options]
            searcher = build_searcher(
                SearchProblem(space.options, space.genome, table, goal, seed, search.budget, search)
            )
            while candidates := searcher.ask():
                metrics = [float(sum(v[o] for v, o in zip(values, a, strict=True))) for a in candidates]
                searcher.tell(candidates, metrics, [-metric for metric in metrics])
            total += winner(searcher.history).metric
        means.append(total / LANDSCAPES)
    return {"winners": means}


def _counted(config: RunConfig) -> list[RunConfig]:
    """The configurations whose mean work is that of this one: a transfer's network is known when it begins.

    They ask for no tier, as the ends are of the lowest and the highest; clients of all tiers have as much data.
    """
    method = config.method
    if not isinstance(method, TransferConfig):
        return [config]
    train = replace(method.train, rounds=method.head.rounds + method.train.rounds)
    ends = (FedAvgConfig(architecture=end, train=train) for end in ("smallest", "largest"))
    return [replace(config, method=end) for end in ends]


def _work(world: World, stage: Stage) -> float:
    if not is_countable(stage):
        return macs_left(stage, RunState()) or 0.0
    dry = DryStage(stage)
    state, worker = dry.begin(RunState()), Worker(world.spec)
    rounds = min(FEW_ROUNDS, dry.rounds_left(state))
    plans = [dry.plan(replace(state, round=number)) for number in range(rounds)]
    tasks: Any = [(a.task, a) for plan in plans for a in plan.assignments]
    macs = sum(task.account(worker, assignment).macs for task, assignment in tasks)
    return float(macs) * TRAINING_FACTOR * dry.rounds_left(state) / rounds


def _without_content(overrides: Sequence[str], folder: str) -> list[str]:
    """The overrides with a stand-in for image data, prepared in the folder."""
    dataset = compose_config(overrides).data.dataset
    if dataset not in SIZES:
        return [*overrides]
    train, test, classes = SIZES[dataset]
    coarse = (PUBLISHED[dataset].coarse or {}).items()
    return [
        *(override for override in overrides if not override.startswith(DATASET)),
        f"{DATASET}{images.__module__}:{images.__name__}",
        f"data.options={{train:{train},test:{test},classes:{classes}}}",
        *(f"data.label_sets.{name}={[c * count // classes for c in range(classes)]}" for name, count in coarse),
        f"data.cache={folder}/cache",
    ]


def images(
    config: DataConfig,
    *,
    train: Annotated[int, ONE_OR_MORE, "training samples"],
    test: Annotated[int, ONE_OR_MORE, "test samples"],
    classes: Annotated[int, ONE_OR_MORE, "classes, of equal sizes"],
) -> Arrays:
    """Black images of 3 x 32 x 32: a data set's size without its content, so that costs are counted without it."""
    del config
    parts = [(np.zeros((n, 3, 32, 32), dtype=np.uint8), np.arange(n) % classes) for n in (train, test)]
    return Arrays(parts[0], parts[1], mean=[0.0] * 3, std=[1.0] * 3)
