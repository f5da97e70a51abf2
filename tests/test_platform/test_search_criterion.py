"""Searches that rank by loss instead of accuracy: plateaus, ties, predictors, winners and what the tables record."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import make_serial, start_run
from fedloom.platform.search.base import Interval, in_unit, merit, pareto_front, winner
from fedloom.platform.search.config import SearchConfig, SearchProblem
from fedloom.platform.search.registry import SEARCHERS, build_searcher
from fedloom.platform.search.targets import (
    Sample,
    Target,
    TargetSearchConfig,
    check_target_search,
    choose,
    fit_predictors,
    macs_target,
)
from fedloom.platform.seeding import stream
from fedloom.platform.spaces.genome import PlainGenome
from fedloom.platform.spaces.slices import Architecture
from fedloom.tiers.costs import CostTable

Make = Callable[..., RunConfig]
OPTIONS = (3, 3, 3)
TABLE = CostTable("macs", 1.0, ((1.0, 2.0, 4.0),) * 3)


def losses_of(architectures: Sequence[Architecture]) -> list[float]:
    """A loss that falls with every option, while the accuracy stays on a plateau."""
    return [3.0 - 0.1 * sum(a) - 0.01 * a[0] for a in architectures]


@pytest.mark.parametrize("name", ["nsga2", "evolution", "random"])
def test_on_a_plateau_of_accuracy_the_loss_still_leads(name: str) -> None:
    def won(metric: str) -> Architecture:
        config = SearchConfig(searcher=name, population=6, offspring=6, budget=27, metric=metric)
        interval = Interval(-math.inf, math.inf)
        searcher = build_searcher(SearchProblem(OPTIONS, PlainGenome(OPTIONS), TABLE, interval, 1, 27, config))
        while asked := searcher.ask():
            losses = losses_of(asked)
            searcher.tell(asked, [merit(metric, 0.5, loss) for loss in losses], losses)
        assert len(pareto_front(searcher.history)) >= 1
        return winner(searcher.history).architecture

    assert name in SEARCHERS.known
    assert won("accuracy") == (0, 0, 0), "the same accuracy for all: the cheapest"
    assert won("loss") == (2, 2, 2)


def test_equal_losses_are_told_apart_by_accuracy_and_cost() -> None:
    cost = {(0,): 1.0, (1,): 2.0, (2,): 3.0}.__getitem__
    target = Target("macs=3", "macs", Interval(0, 3))
    samples = [Sample((0,), 0.5, 0.7), Sample((1,), 0.5, 0.9), Sample((2,), 0.6, 0.95)]
    assert choose(target, samples, cost) == samples[2]
    assert choose(target, samples, cost, "loss") == samples[1], "the smallest loss, then the accuracy"
    tied = [Sample((1,), 0.5, 0.9), Sample((0,), 0.5, 0.9)]
    assert choose(target, tied, cost, "loss") == tied[1], "then the cost"
    assert choose(target, [Sample((0,), math.inf, 0.9)], cost, "loss") is None


def test_merits_go_back_to_their_unit() -> None:
    assert (merit("accuracy", 0.7, 2.0), merit("loss", 0.7, 2.0)) == (0.7, -2.0)
    assert (in_unit("accuracy", 0.7), in_unit("loss", -2.0)) == (0.7, 2.0)


def test_predictors_learn_the_configured_metric() -> None:
    genome = PlainGenome(OPTIONS)
    drawn = [tuple(map(int, row)) for row in np.unique(genome.draw(200, stream(1, "test")), axis=0)]
    samples = [Sample(a, loss, 0.5) for a, loss in zip(drawn, losses_of(drawn), strict=True)]
    config = TargetSearchConfig(metric="loss", min_tau=0.5, epochs=60)
    by_loss = fit_predictors(genome, samples, config, seed=1)
    assert not by_loss.refused
    ends = genome.one_hot(np.array([(0, 0, 0), (2, 2, 2)]))
    small, large = by_loss.metric.predictor(ends)
    assert small < large < 0, "merits: losses with their sign changed"
    by_accuracy = fit_predictors(genome, samples, replace(config, metric="accuracy"), seed=1)
    assert "cannot be measured, and 0.5 is required" in by_accuracy.refused, "a constant accuracy cannot be ranked"


# -- bins -------------------------------------------------------------------------------------------------------------


def test_a_bin_reaches_from_its_lower_bound_and_may_end_beyond_the_largest() -> None:
    assert macs_target(8.0, 0.01, TABLE, 5.0).interval == Interval(5.0, 8.0)
    assert macs_target(20.0, 0.01, TABLE, 8.0).name == "macs=20"
    with pytest.raises(ValueError, match=r"'macs=20.0': subnets have 4 \(smallest\) to 13 \(largest\) MACs"):
        macs_target(20.0, 0.01, TABLE)
    with pytest.raises(ValueError, match=r"'macs=20.0 above 13': subnets have 4 .* choose a target in between"):
        macs_target(20.0, 0.01, TABLE, 13.0)
    with pytest.raises(ValueError, match=r"target 'macs=8.0': its lower bound is 8; give one below it"):
        macs_target(8.0, 0.01, TABLE, 8.0)


def test_bins_need_a_lower_bound_each() -> None:
    with pytest.raises(ValueError, match=r"macs_above has 1 values for 2 targets of method.search.macs: give one"):
        check_target_search(TargetSearchConfig(macs=[5.0, 8.0], macs_above=[4.0]), "method.search")


# -- whole runs -------------------------------------------------------------------------------------------------------


def tables(config: RunConfig) -> tuple[Any, Any]:
    start_run(config, make_serial)
    return read_table(config.results, "candidates"), read_table(config.results, "evaluations")


def test_a_run_by_loss_and_bins_records_accuracies_and_the_winners_of_the_loss(elastic_config: Make) -> None:
    macs = build_world(elastic_config()).macs_table
    middle = (macs.smallest + macs.largest) / 2
    bins = {"macs": [middle, 2 * macs.largest], "macs_above": [0.0, middle]}
    search = TargetSearchConfig(
        samples=20, min_tau=-1.0, population=10, generations=3, verify=3, front=2, metric="loss", **bins
    )
    candidates, evaluations = tables(elastic_config(train={"rounds": 1}, method={"search": search}))
    assert candidates.metric.between(0, 1).all(), "accuracies, not losses with their sign changed"
    for upper, lower in zip(bins["macs"], bins["macs_above"], strict=True):
        own = candidates[candidates.tier == f"macs={upper:.10g}"]
        assert own.macs.between(lower, upper, inclusive="right").all()
        assert own.loss[own.winner].item() == own.loss.min()
    names = set(evaluations.metric)
    assert "predictor_kendall_tau_loss" in names
    assert "predictor_kendall_tau_accuracy" not in names
    searched = evaluations[(evaluations.model == "searched") & (evaluations.metric == "accuracy")]
    assert set(searched.tier[searched.split == "test"]) == {f"macs={upper:.10g}" for upper in bins["macs"]}


def test_a_tier_search_by_loss_records_accuracies_and_its_winner(tiny_config: Make) -> None:
    config = tiny_config()
    config.method.search = replace(config.method.search, metric="loss")
    candidates, _ = tables(config)
    searched = candidates[candidates.stage.str.startswith("search/")]
    assert searched.metric.between(0, 1).all()
    for _, own in searched.groupby("tier", observed=True):
        assert own.loss[own.winner].item() == own.loss.min()
        assert own.on_front[own.winner].all()
