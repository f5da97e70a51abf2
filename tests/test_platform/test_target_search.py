"""SuperFedNAS's search: targets, winners, predictors that are refused, and what an elastic space's tiers begin at."""

import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.experiments.runs.search import Trained, search_trained, show
from fedloom.platform.clients.execution import SerialExecutor
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.tiers import split_into_tiers
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods import target_search
from fedloom.platform.methods.distribution import Distribution, random
from fedloom.platform.methods.superfednas import SEARCHED
from fedloom.platform.methods.target_search import FINALISTS, SampleStage, VerifyStage, search_supernet, targets_of
from fedloom.platform.results.checkpoint import load_model
from fedloom.platform.results.paths import find_run
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import make_serial, start_run
from fedloom.platform.search.base import Interval
from fedloom.platform.search.predictors import Fitted
from fedloom.platform.search.targets import (
    Predictors,
    Sample,
    Target,
    TargetSearchConfig,
    check_reachable,
    choose,
    draw_samples,
    latency_target,
    macs_target,
)
from fedloom.platform.seeding import stream
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.resnet import ResnetDesign
from fedloom.platform.spaces.slices import parse_architecture

Make = Callable[..., RunConfig]

SMALL = ElasticSpace(
    ResnetDesign("small", stem_channels=16, stage_widths=(32, 64), stage_strides=(2, 2), depths=(1, 1))
)
SEARCH = TargetSearchConfig(samples=30, min_tau=-1.0, population=10, generations=3, verify=3)


TRAINED = {"rounds": 3, "epochs": 6, "lr": 0.1}
ONE_ROUND = {"rounds": 1, "evaluate_every": 0}
"""Enough for subnets to differ."""


def run(config: RunConfig) -> Path:
    start_run(config, make_serial)
    return Path(config.results)


# -- whole runs -------------------------------------------------------------------------------------------------------


def test_every_tier_gets_a_winner_that_was_verified(elastic_config: Make) -> None:
    config = elastic_config(norm="batch", method={"search": SEARCH}, train=TRAINED)
    results = run(config)
    candidates = read_table(results, "candidates")
    world = build_world(config)
    assert (candidates.tier == "samples").sum() == 30
    assert not candidates.winner[candidates.tier == "samples"].any()
    for tier in world.tiers:
        own = candidates[candidates.tier == tier.name]
        assert len(own) == 3
        assert own.macs.between(tier.lower, tier.upper, inclusive="right").all()
        won = own[own.winner]
        assert len(won) == 1
        assert won.metric.item() == own.metric.max()
        for _, one in own.iterrows():
            beaten = (own.metric >= one.metric) & (own.macs <= one.macs)
            beaten &= (own.metric > one.metric) | (own.macs < one.macs)
            assert one.on_front == (not beaten.any())
    evaluations = read_table(results, "evaluations")
    searched = evaluations[(evaluations.model == SEARCHED) & (evaluations.metric == "accuracy")]
    assert sorted(set(searched.tier)) == ["tier1", "tier2"]
    assert "predictor_kendall_tau_accuracy" in set(evaluations.metric)


def test_a_poor_predictor_ends_without_winners_and_with_everything_else(
    elastic_config: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        results = run(elastic_config(method={"search": replace(SEARCH, min_tau=1.0)}))
    evaluations = read_table(results, "evaluations")
    assert read_table(results, "runs").status.tolist() == ["done"]
    assert SEARCHED not in set(evaluations.model)
    assert (evaluations.metric == "predictor_kendall_tau_accuracy").sum() == 1
    assert ((evaluations.stage == "evaluation") & (evaluations.split == "test")).any()
    why = r"no subnet was searched.*(below the required 1: |cannot be measured, and 1 is required: )"
    assert any(re.search(why, r.message) for r in caplog.records)


def test_without_predictors_every_candidate_is_scored(elastic_config: Make) -> None:
    search = replace(SEARCH, samples=0, predictor="none", budget=6)
    results = run(elastic_config(method={"search": search}, train=ONE_ROUND))
    candidates = read_table(results, "candidates")
    assert candidates.groupby("tier", observed=True).size().to_dict() == {"tier1": 6, "tier2": 6}
    assert candidates.metric.notna().all()


def test_a_space_of_fewer_subnets_than_a_predictor_needs_is_refused_before_training(
    elastic_config: Make, refused: Callable[[RunConfig], str]
) -> None:
    config = elastic_config(method={"search": SEARCH}, tiers=TiersConfig(count=1))
    config.space = replace(config.space, depths=[0, 0])
    assert refused(config) == (
        "method.search.predictor=mlp: space resnet_elastic_small has 4 subnets, and predictors need at least 10 "
        "samples: use predictor=none, which measures them all, or samples=0 to leave the search out"
    )


def test_one_subnet_per_target_can_be_scored_without_predictors(elastic_config: Make) -> None:
    search = replace(SEARCH, samples=0, predictor="none", budget=1)
    results = run(elastic_config(method={"search": search}, train=ONE_ROUND))
    assert read_table(results, "candidates").winner.tolist() == [True, True]


def test_new_targets_need_no_training_and_are_refused_below_tau(elastic_config: Make) -> None:
    config = elastic_config(norm="batch", train=TRAINED)
    results = run(config)
    paths = find_run(results, read_table(results, "runs").run_id.iloc[0])
    weights, _ = load_model(paths, "supernet")
    before = {name: tensor.clone() for name, tensor in weights.items()}
    world = build_world(config)
    executor = SerialExecutor(Worker(world.spec))
    middle = (world.macs_table.smallest + world.macs_table.largest) / 2
    wanted = replace(SEARCH, macs=[middle, world.macs_table.largest], tolerance=0.2)
    found = search_supernet(world, wanted, weights, (), executor)
    assert [f.target for f in found] == [f"macs={middle:.10g}", f"macs={world.macs_table.largest:.10g}"]
    assert all(0.8 * t < f.macs <= t for f, t in zip(found, wanted.macs, strict=True))
    assert all(0 <= f.metric <= 1 and math.isfinite(f.loss) for f in found)
    assert all(np.array_equal(before[n], weights[n]) for n in before)
    with pytest.raises(ValueError, match=r"below the required 1: measure more samples or lower min_tau$"):
        search_supernet(world, replace(wanted, min_tau=1.0), weights, (), executor)
    with pytest.raises(ValueError, match=r"no subnet has macs in .* raise .*`fedloom search`: --tolerance\)$"):
        search_supernet(world, replace(wanted, tolerance=1e-9), weights, (), executor)
    with pytest.raises(ValueError, match=r"^1 of 1 samples could be scored, and predictors need 10$"):
        search_supernet(world, wanted, weights, [Sample(found[0].architecture, 1.0, 0.5)], executor)


@pytest.mark.parametrize(
    ("settings", "used"),
    [
        ({"predictor": "ridge:ridge", "options": {"strength": 0.5}}, ("ridge:ridge", {"strength": 0.5})),
        ({"predictor": "mlp"}, ("mlp", {})),
        ({"predictor": "fitness"}, ("mlp", {})),
    ],
)
def test_new_targets_are_searched_with_the_runs_predictor_and_all_that_it_measured(
    settings: dict[str, Any], used: tuple[str, dict[str, float]], elastic_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, dict[str, float], int]] = []

    def search(_world: World, config: TargetSearchConfig, _weights: object, samples: tuple[Sample, ...], _: Any) -> Any:
        asked.append((config.predictor, config.options, len(samples)))
        return []

    monkeypatch.setattr("fedloom.experiments.runs.search.search_supernet", search)
    world = build_world(elastic_config())
    measured = tuple(Sample(a, 1.0, 0.5) for a in world.space.enumerate())
    search_trained(Trained("a run", world, TargetSearchConfig(**settings), {}, measured), [1e5], [])
    assert asked == [(*used, 36)], "200 samples were asked for; the space has 36 subnets"


def test_a_latency_is_measured_where_a_target_asks_for_it(elastic_config: Make) -> None:
    config = elastic_config(
        norm="batch",
        train=TRAINED,
        method={"search": replace(SEARCH, latency_s=[10.0], tolerance=0.999999999, front=3)},
    )
    results = run(config)
    evaluations = read_table(results, "evaluations")
    seconds = evaluations[(evaluations.metric == "latency_s") & (evaluations.tier == "samples")]
    assert len(seconds) == 30
    assert (seconds.value > 0).all()
    assert (evaluations.metric == "latency_spread_s").sum() >= 30
    assert (read_table(results, "candidates").tier == "front").sum() == 3


# -- parts ------------------------------------------------------------------------------------------------------------


def test_targets_are_read_and_refused() -> None:
    table = SMALL.cost_table("macs")
    target = macs_target(4e6, 0.01, table)
    assert (target.name, target.measure, target.interval) == ("macs=4000000", "macs", Interval(3.96e6, 4e6))
    assert latency_target(0.02, 0.1).interval.lower == pytest.approx(0.018)
    with pytest.raises(ValueError, match=r"smallest.* to .* \(largest\) MACs; choose a target in between"):
        macs_target(1e12, 0.01, table)


def test_samples_hold_both_ends_and_are_distinct() -> None:
    table = SMALL.cost_table("macs")
    samples = draw_samples(SMALL.genome, table, 40, seed=3)
    assert len(set(samples)) == len(samples) == 40
    costs = [table.cost(a) for a in samples]
    assert (min(costs), max(costs)) == (table.smallest, table.largest)
    assert samples == draw_samples(SMALL.genome, table, 40, seed=3)
    assert samples != draw_samples(SMALL.genome, table, 40, seed=4)


@pytest.mark.parametrize("predicted", ["macs", "latency_s"])
def test_only_supported_operators_are_sampled_and_chosen(
    predicted: str, tiny_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "mb(1,2)"
    world = build_world(tiny_config(tiers=TiersConfig(count=1, paths=200, unsupported=[name])))
    banned = np.array([operator == name for names in world.space.operator_names for operator in names])  # type: ignore[attr-defined]
    assert banned.any()
    largest = world.cost_table.largest
    with pytest.raises(ValueError, match=f"to {largest:.10g} \\(largest\\) MACs"):
        targets_of(world, TargetSearchConfig(macs=[world.macs_table.largest]))
    targets = {"macs": [largest]} if predicted == "macs" else {"latency_s": [1.0]}
    config = TargetSearchConfig(**targets, samples=8, tolerance=1.0, predictor="fitness", front=4, verify=4)  # type: ignore[arg-type]
    # What is unsupported would win.
    metric = Fitted(lambda features: features @ banned, 1.0, 0.0, 2, 8)
    latency = Fitted(lambda features: 0.5 + 0 * features[:, 0], 1.0, 0.0, 2, 8)
    monkeypatch.setattr(target_search, "fitness_predictors", lambda _space: Predictors(metric, latency))
    samples = SampleStage(world, config, []).architectures
    found = VerifyStage(world, config, targets_of(world, config)).begin(RunState()).data[FINALISTS]["found"]
    chosen = [parse_architecture(name) for names in found.values() for name in names]
    assert (len(samples), len(found), len(chosen) >= 5) == (8, 2, True)
    assert all(world.cost_table.cost(a) < math.inf for a in (*samples, *chosen))


def test_the_winner_is_the_most_accurate_that_meets_its_target() -> None:
    cost = {(0,): 1.0, (1,): 2.0, (2,): 3.0}.__getitem__
    slow, fast = Sample((0,), 0.5, 0.9, latency_s=0.03), Sample((1,), 0.6, 0.8, latency_s=0.01)
    failed = Sample((2,), math.nan, 0.95, latency_s=0.01)
    latency = Target("latency_s=0.02", "latency_s", Interval(0.018, 0.02))
    assert choose(latency, [slow, fast, failed], cost) == fast
    assert choose(latency, [slow], cost) is None, "a subnet that misses its target has not won it"
    macs = Target("macs=3", "macs", Interval(0, 3))
    assert choose(macs, [slow, fast, failed], cost) == slow
    tied = [Sample((1,), 0.5, 0.9), Sample((0,), 0.5, 0.9), Sample((2,), 0.4, 0.9)]
    assert choose(macs, tied, cost) == tied[2], "then the smaller loss"
    assert choose(macs, tied[:2], cost) == tied[1], "then the smaller cost"
    assert choose(macs, [failed], cost) is None


@pytest.mark.parametrize(
    ("latency_s", "why"),
    [
        (0.03, "all measured latencies are above this target: raise method.search.tolerance or .verify"),
        (None, "no subnet was found for this target, or none could be scored"),
    ],
)
def test_a_latency_without_a_winner_says_why(
    latency_s: float | None, why: str, elastic_config: Make, caplog: pytest.LogCaptureFixture
) -> None:
    stage = VerifyStage(build_world(elastic_config()), SEARCH, [latency_target(0.02, 0.1)])
    found = {} if latency_s is None else {"0-0": 0.9}
    measured = {name: {"loss": 0.5, "accuracy": 0.9, "latency_s": latency_s} for name in found}
    value = {"found": {"latency_s=0.02": found}, "fit": {}, "measured": measured, "refused": ""}
    stage.end(RunState().with_data(FINALISTS, value).with_data("samples", {}))
    assert caplog.messages == [f"latency_s=0.02: {why}"]


def test_show_names_both_causes_of_a_latency_without_a_winner(
    elastic_config: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = Trained("a run", build_world(elastic_config()), replace(SEARCH, tolerance=0.1), {}, ())
    show(trained, [], 1, as_json=False)
    assert " ".join(capsys.readouterr().out.split()).endswith(
        "targets without a subnet: 1 of 1; no predicted latency is at most 10 % below the target, or all measured ones "
        "are above it: raise --tolerance"
    )


def test_a_tier_without_a_subnet_says_what_to_change() -> None:
    table = SMALL.cost_table("macs")
    target = Target("tier1", "budget", Interval(0, table.smallest - 1), table)
    with pytest.raises(ValueError, match=r"so tier1 has none: use fewer tiers, give tiers.upper_bounds, or"):
        check_reachable(target, SMALL.genome, seed=1)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_lowest_tier_can_train_the_smallest_subnet(elastic_config: Make, count: int) -> None:
    config = elastic_config(tiers=TiersConfig(count=count, paths=2000, rho_high=0.5))
    space = ElasticSpace(ResnetDesign())
    tiers = split_into_tiers(config, space, space.cost_table("macs"))
    assert len(tiers) == count
    assert tiers[0].upper > space.cost_table("macs").cost(space.smallest)


def test_budgets_never_fall_below_the_smallest_subnet(elastic_config: Make) -> None:
    world: World = build_world(elastic_config())
    space = world.space
    assert isinstance(space, ElasticSpace)
    budgets = tuple(world.training_budget(c, "supernet", 0) for c in range(8))
    distribution = Distribution(space, world.cost_table, 0, tuple(range(8)), budgets, (), {}, stream(1, "test"))
    for client, architecture in enumerate(random(distribution)):
        assert world.cost_table.cost(architecture) <= world.tier(client).upper


def test_widths_that_round_to_the_same_channels_count_once() -> None:
    assert ElasticSpace(ResnetDesign()).num_architectures == 577_200_625
    narrow = ElasticSpace(ResnetDesign(width_multiplier=0.25))
    channels = [len({narrow.design.mid_channels(s, w) for w in range(5)}) for s in range(4)]  # type: ignore[attr-defined]
    assert channels == [2, 3, 5, 5]
    assert narrow.num_architectures == math.prod(n + n**2 + n**3 for n in channels)
