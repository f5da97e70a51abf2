"""Facts of a configuration, counted without training: of its space, a dry run, a whole run, a round's costs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import accumulate
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
from fedloom.platform.data.registry import PUBLISHED
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.forecast import kind_of, macs_left
from fedloom.platform.federation.method import Stage
from fedloom.platform.federation.tiers import measure_costs, split_into_tiers
from fedloom.platform.federation.training_config import TrainingConfig, cohort_size
from fedloom.platform.federation.world import World
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.fedoras import FedorASConfig
from fedloom.platform.methods.fedoras_sampling import communication_limit, path_sampler, sample_subspace
from fedloom.platform.methods.superfednas import SuperFedNASConfig
from fedloom.platform.methods.tier_models import WidthConfig
from fedloom.platform.methods.tier_search import TierSearchConfig
from fedloom.platform.methods.transfer import TransferConfig
from fedloom.platform.runs.dry_run import DryStage, is_countable
from fedloom.platform.runs.run import make_serial, planned_stages, planned_world, start_run
from fedloom.platform.search.base import Interval, winner
from fedloom.platform.search.config import SearchProblem
from fedloom.platform.search.registry import build_searcher
from fedloom.platform.seeding import stream
from fedloom.platform.settings import ONE_OR_MORE
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.genome import ElasticStage
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.space_config import stored_space
from fedloom.tiers.costs import CostTable, size_of
from fedloom.tiers.devices import TRAINING_FACTOR

DATASET = "data.dataset="
MEASURES = ("rounds", "clients", "bytes_down", "bytes_up", "macs")
FEW_ROUNDS = 5
"""First rounds of a stage whose mean work stands for that of all its rounds."""
LANDSCAPES = 8
"""Synthetic landscapes on which each tier's search is run."""


def space_facts(overrides: Sequence[str]) -> dict[str, Any]:
    """The output of `fedloom describe` for the space and its tiers, and the number of models per tier.

    Source: FedorAS, App. E.4, Tab. 8.
    """
    facts = describe([o for o in overrides if not o.startswith("seed=")])
    models = [share * facts["architectures"] for share in facts["share_of_models"]]
    return {**facts, "models_per_tier": models}


def family_facts(overrides: Sequence[str]) -> dict[str, Any]:
    """The macs, parameters and bytes (of everything sent) of each subnet of `method.family`, by its name there.

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

    Also macs_per_client and bytes_per_client (per task), and by_stage with the same figures per stage. MACs are those
    of forward passes. Stages that depend on training results are not counted. Black images replace CIFAR and CINIC.
    """
    with TemporaryDirectory(prefix="fedloom-counted-") as folder:
        settings = [f"results={folder}/results", "dry_run=true", "executor.kind=serial"]
        start_run(compose_config([*_without_content(overrides, folder), *settings]), make_serial)
        stages = communication(load(Path(folder) / "results", tables=["rounds"]))
    return {**_costs(stages, "kind"), "by_stage": _costs(stages, "stage")}


def _costs(stages: pd.DataFrame, by: str) -> dict[str, Any]:
    sums = stages.groupby(by, sort=False)[list(MEASURES)].sum().astype("float64")
    sums["bytes"] = sums["bytes_down"] + sums["bytes_up"]
    for name in ("bytes", "macs"):
        sums[f"{name}_per_client"] = sums[name] / sums["clients"]
    return {str(name): {str(k): float(v) for k, v in sums[name].items()} for name in sums.columns}


def work_facts(overrides: Sequence[str]) -> dict[str, Any]:
    """The MACs of a whole run, by kind of stage and in total (`macs`); a training step counts as three forward passes.

    Training from fresh weights is counted from the assignments of its first rounds; other stages estimate their work
    for a mid-sized network. A transfer counts as the mean of training the space's smallest and its largest network.
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

    A landscape draws a value from a normal distribution for every option of every decision; a model's metric is the sum
    of the values of its options. The space, its tiers and the search settings come from the configuration.
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
    """The configurations whose mean work stands for this one's: two for a transfer, whose network is not known yet.

    These two set no tier, as their networks belong to the lowest and the highest; clients of all tiers have equally
    much data.
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
    """Black images of 3 x 32 x 32: they have a data set's size without its content, which is enough to count costs."""
    del config
    parts = [(np.zeros((n, 3, 32, 32), dtype=np.uint8), np.arange(n) % classes) for n in (train, test)]
    return Arrays(parts[0], parts[1], mean=[0.0] * 3, std=[1.0] * 3)


# -- the costs of rounds, without data --------------------------------------------------------------------------------

SUBSPACES, TRAINED, PATHS, MODELS = 1000, 30, 20, 20_000
"""Subspaces drawn per tier, those whose paths are counted, paths drawn per subspace, and models drawn from the space.

Means of sizes are exact to 0.2 %, those of MACs and of models to 1 or 2 %.
"""
WEIGHT_BYTES = 4
BOTH_WAYS = 2
"""A client returns everything that it receives."""


Likelihood = Callable[[ElasticStage, tuple[int, ...]], float]
"""The probability that a random subnet has these widths in a stage."""


def accounts(overrides: Sequence[str]) -> Mapping[str, Any]:
    """The costs of the configured method: `width_accounts` for a width-based method, `fedoras_accounts` for FedorAS."""
    method = compose_config(overrides).method
    return width_accounts(overrides) if isinstance(method, WidthConfig) else fedoras_accounts(overrides)


def width_accounts(overrides: Sequence[str]) -> Mapping[str, Any]:
    """The costs of a width-based method, whose clients receive and return the widest network of their tier.

    sent_parameters (to a client per round, the mean over clients), supernet_parameters, and supernet_bytes (received
    and sent by all clients in all rounds), without the batch-norm statistics that clients measure at the end.

    Source: FedorAS, Tab. 17.
    """
    config = compose_config(overrides)
    method: WidthConfig = config.method
    space = _space(json.dumps(asdict(config.space)))
    costs = measure_costs(config.tiers, space)
    tiers, sizes = split_into_tiers(config, space, costs.budget), space.cost_table("parameters")
    widest = []
    for tier in tiers:
        affordable = [width for width in space.enumerate() if costs.budget.cost(width) <= tier.upper]
        if not affordable:
            measure = costs.budget.measure
            raise ValueError(f"no width costs at most {tier.upper:.6g} {measure}: raise the tier's upper bound")
        widest.append(max(affordable, key=costs.budget.cost))
    sent = float(np.average([sizes.cost(width) for width in widest], weights=config.tiers.shares))
    return {
        "sent_parameters": sent,
        "supernet_parameters": sizes.cost(space.largest),
        "supernet_bytes": _bytes(method.train, sent, config.data.num_clients),
    }


def fedoras_accounts(overrides: Sequence[str]) -> Mapping[str, Any]:
    """The costs of FedorAS' stages 1 (supernet training) and 3 (fine-tuning).

    sent_parameters (to a client per round, the mean over clients), supernet_parameters, macs_per_sample (forward) and
    macs_per_round (of all epochs, per sample that a client has), supernet_bytes (received and sent by all clients in
    all rounds), model_parameters and finetune_bytes (of a random model of each tier), and their means over tiers.

    Source: FedorAS, Tab. 12, 17 and 18.
    """
    config = compose_config(overrides)
    method: FedorASConfig = config.method
    space = _space(json.dumps(asdict(config.space)))
    costs = measure_costs(config.tiers, space)
    tiers, sizes = split_into_tiers(config, space, costs.budget), space.cost_table("parameters")
    table, limit = communication_limit(space, method.train.communication.unit, method.train.communication.value)
    by_tier = []  # parameters that a client receives in a round, and MACs of the paths that it trains, per sample
    for tier in tiers:
        rng = stream(0, "accounting", tier.name)
        subspaces = [sample_subspace(table, limit, rng, costs.budget, tier.upper) for _ in range(SUBSPACES)]
        samplers = [path_sampler(method.train.paths, costs.budget, s, tier.upper) for s in subspaces[:TRAINED]]
        paths = np.array([sampler.sample(rng) for sampler in samplers for _ in range(PATHS)])
        sent_in_tier = np.mean([size_of(sizes, subspace) for subspace in subspaces])
        by_tier.append((sent_in_tier, costs.macs.costs(paths).mean()))
    sent, macs = (float(mean) for mean in np.average(by_tier, axis=0, weights=config.tiers.shares))
    drawn = space.genome.draw(MODELS, stream(0, "accounting"))
    drawn_costs, drawn_sizes = costs.budget.costs(drawn), sizes.costs(drawn)
    models = [float(drawn_sizes[(drawn_costs > t.lower) & (drawn_costs <= t.upper)].mean()) for t in tiers]
    finetune = [_bytes(method.finetune, size, config.data.num_clients) for size in models]
    return {
        "sent_parameters": sent,
        "supernet_parameters": sizes.fixed + sum(map(sum, sizes.options)),
        "macs_per_sample": macs,
        "macs_per_round": macs * method.train.epochs,
        "supernet_bytes": _bytes(method.train, sent, config.data.num_clients),
        "model_parameters": models,
        "finetune_bytes": finetune,
        "mean_model_parameters": sum(models) / len(models),
        "mean_finetune_bytes": sum(finetune) / len(finetune),
    }


@lru_cache(maxsize=2)
def _space(config: str) -> SearchSpace:
    """The space of a configuration in JSON; cached, because its cost tables take a second and settings share them."""
    return build_space(stored_space(json.loads(config)))


def _bytes(stage: TrainingConfig, parameters: float, num_clients: int) -> float:
    """Bytes received and sent in a stage whose clients all receive and return this number of parameters per round."""
    return 2.0 * WEIGHT_BYTES * parameters * stage.rounds * cohort_size(stage, num_clients)


def elastic_round_facts(overrides: Sequence[str]) -> Mapping[str, Any]:
    """The costs of one training round by training scheme, and of training k members of the family separately.

    `communication` is in bytes, up and down, of all clients, `compute` in forward MACs of all clients for one sample
    each; both have the places MaxNet, single-stage, multi-stage, FedAvg smallest and FedAvg largest. Random subnets
    count with their exact mean cost over the space, which the mean over many rounds approaches. `family` has the same
    two for the k most expensive members of the family, each trained alone, with the places k = 1, 2, ...

    Source: SuperFed, App. G, Fig. 6; SuperFedNAS, Sec. 3.2, Fig. 3.
    """
    config = compose_config(overrides)
    space, method = build_space(config.space), config.method
    assert isinstance(space, ElasticSpace), "an item counts subnets of elastic spaces only"
    assert isinstance(method, SuperFedNASConfig), "an item counts rounds of SuperFedNAS only"
    family, clients = [*map(space.parse, method.family)], cohort_size(method.train, config.data.num_clients)
    macs, sizes = space.cost_table("macs"), space.cost_table("bytes")
    compute, communication = _of_a_round(space, macs, clients, 1), _of_a_round(space, sizes, clients, BOTH_WAYS)
    # The whole supernet travels, and every batch is passed through several subnets (progressive shrinking).
    shrinking = method.train.shrinking
    widest, any_one = _mean(space, macs, _widest), _mean(space, macs, _uniform)
    drawn = shrinking.depth_share * widest + (1 - shrinking.depth_share) * any_one
    compute["multi-stage"] = clients * shrinking.subnets_per_batch * drawn
    communication["multi-stage"] = communication["FedAvg largest"]
    alone = {
        name: _up_to_k([factor * table.cost(member) for member in family])
        for name, table, factor in (("compute", macs, clients), ("communication", sizes, BOTH_WAYS * clients))
    }
    return {"compute": compute, "communication": communication, "family": alone}


def _of_a_round(space: ElasticSpace, table: CostTable, clients: int, ways: int) -> dict[str, float]:
    """Mean cost of a round of all clients; MaxNet gives one of them the largest and one the smallest subnet."""
    any_one, smallest, largest = _mean(space, table, _uniform), table.cost(space.smallest), table.cost(space.largest)
    return {
        "MaxNet": ways * (largest + smallest + (clients - 2) * any_one),
        "single-stage": ways * clients * any_one,
        "FedAvg smallest": ways * clients * smallest,
        "FedAvg largest": ways * clients * largest,
    }


def _mean(space: ElasticSpace, table: CostTable, likelihood: Likelihood) -> float:
    """The exact mean cost of a random subnet: stages are independent, and their costs are summed."""
    return table.fixed + sum(
        likelihood(stage, widths) * cost
        for stage, costs in zip(space.genome.stages, table.options, strict=True)
        for widths, cost in zip(stage.contents, costs, strict=True)
    )


def _uniform(stage: ElasticStage, widths: tuple[int, ...]) -> float:
    """Depths and widths are uniform and independent."""
    return _any_depth(stage) / float(stage.widths) ** len(widths)


def _widest(stage: ElasticStage, widths: tuple[int, ...]) -> float:
    """The depth is uniform, and every block has its full width."""
    return _any_depth(stage) if all(width == stage.widths - 1 for width in widths) else 0.0


def _any_depth(stage: ElasticStage) -> float:
    return 1 / (stage.most - stage.fewest + 1)


def _up_to_k(costs: Sequence[float]) -> dict[str, float]:
    """The sum of the k highest costs, by k."""
    return {str(k): total for k, total in enumerate(accumulate(sorted(costs, reverse=True)), 1)}
