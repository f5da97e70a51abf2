"""Elastic supernets that cannot be trained or searched as asked are refused at the start, in one line."""

import re
from collections.abc import Callable

import pytest

Refuse = Callable[..., str]

ELASTIC = ["experiment=superfednas_digits", "executor.kind=serial", "tiers.paths=1000"]

ELASTIC_CASES = {
    "depth outside the space": (
        ['method.family=["d=0,3,0 e=.5"]'],
        r"method.family: 'd=0,3,0 e=.5': depth 3 of stage 2: allowed are 0 to 2",
    ),
    "expansion outside the space": (
        ['method.family=["d=0,0,0 e=.3"]'],
        r"method.family: .*expansion 0.3: allowed are 0.25, 0.5, 0.75, 1",
    ),
    "number of stages": (['method.family=["d=0,0 e=.5"]'], r"2 depths, resnet_elastic_small has 3 stages"),
    "no subnet": (
        ["method.family=[huge]"],
        r"'huge' is no architecture of resnet_elastic_small: give smallest, largest, options such as",
    ),
    "named twice": (["method.family=[smallest,smallest]"], r"'smallest' is named twice"),
    "beta_0 of 0": (["method.train.shares.beta_0=0"], r"shares.beta_0=0: must be above 0 and at most 1"),
    "beta_0 above 1": (["method.train.shares.beta_0=1.1"], r"shares.beta_0=1.1: must be above 0 and at most 1"),
    "decay share of 0": (["method.train.shares.decay_share=0"], r"decay_share=0: must be above 0 and at most 1"),
    "decay share above 1": (["method.train.shares.decay_share=1.5"], r"decay_share=1.5: must be above 0 and at most 1"),
    "unknown decay": (["method.train.shares.decay=exp"], r"shares.decay=exp: must be one of constant, linear, cosine"),
    "unknown rule": (["method.train.shares.rule=maxnt"], r"unknown shares rule 'maxnt'.*maxnet.*overlap.*'maxnet'"),
    "two clients with a sandwich": (
        ["method.train.clients_per_round=2"],
        r"clients_per_round=2: tracking_sandwich needs at least 3",
    ),
    "unknown heuristic": (
        ["method.train.distribution.heuristic=sandwitch"],
        r"unknown distribution heuristic 'sandwitch': known are dynamic, pareto_path, random, sandwich, static, "
        r"tracking_sandwich.*did you mean 'sandwich'",
    ),
    "heuristic that is not there": (["method.train.distribution.heuristic=nowhere:rule"], r"nowhere:rule.*imported"),
    "family heuristic without a family": (
        ["method.train.distribution.heuristic=static", "method.family=[]"],
        r"heuristic=static hands out a fixed family: give method.family",
    ),
    "more contributors than a tier has clients": (
        ["experiment=fedoras_digits", "method.finetune.clients_per_round=20", "method.finetune.min_contributors=12"],
        r"method.finetune.min_contributors=12: only 10 clients take part in a round of fine_tuned/tier4, so that",
    ),
    "nothing to train alone": (["method.separately=true", "method.family=[]"], r"method.family, which is empty"),
    "target below the smallest": (
        ["method.search.macs=[1000]"],
        r"macs=1000.0': subnets have 549504 \(smallest\) to 6051456 \(largest\) MACs",
    ),
    "target above the largest": (["method.search.macs=[1e9]"], r"subnets have 549504 .* choose a target in between"),
    "target between subnets": (["method.search.macs=[6e5]"], r"no subnet has macs in .* the nearest has about"),
    "unknown predictor": (
        ["method.search.predictor=gp"],
        r"method.search.predictor: unknown predictor 'gp': known are fitness, mlp, none, or module:name",
    ),
    "tolerance": (["method.search.tolerance=0"], r"tolerance=0: must be above 0 and below 1"),
    "too few samples": (
        ["method.search.samples=5"],
        r"samples=5: predictors need at least 10; 0 switches",
    ),
    "targets without a search": (["method.search.samples=0", "method.search.front=4"], r"but targets are given"),
    "population of one": (["method.search.population=1"], r"method.search.population=1: must be between 2 and 1000000"),
    "no parents": (["method.search.parents=0"], r"method.search.parents=0: must be above 0 and at most 1"),
    "mutation above 1": (["method.search.mutation=2"], r"method.search.mutation=2: must be between 0 and 1"),
    "no hidden units": (["method.search.hidden=0"], r"method.search.hidden=0: must be between 1 and 65536"),
    "impossible tau": (["method.search.min_tau=2"], r"min_tau=2: must be between -1 and 1"),
    "front without predictors": (
        ["method.search.predictor=none", "method.search.front=3"],
        r"front=3: the whole front is searched with predictors",
    ),
    "budgets that nobody looks at": (
        ["method.train.distribution.tier_aware=true", "method.train.travels=supernet"],
        r"tier_aware=true: budgets are ignored where all clients get the same model",
    ),
    "tier below the smallest subnet": (
        ["tiers.upper_bounds=[500000,7000000]"],
        r"first tier's bound 500000 is below the smallest model's cost 549504",
    ),
    "no stages": (
        ["space.stage_widths=[]", "space.stage_strides=[]", "space.depths=[]"],
        r"space.stage_widths is empty: give the channels of at least one stage",
    ),
    "unknown norm": (["space.norm=layer"], r"space.norm='layer': allowed are none, batch, group"),
    "unknown travels": (["method.train.travels=all"], r"travels=all: must be one of slices, supernet"),
    "field of another space": (["space.stage_layers=[1,1]"], r"resnet_elastic_small has no stage_layers; it has"),
    "space without elasticity": (["space.name=cnn_digits"], r"has no stage_widths"),
    "no validation data": (["data.validation_share=0"], r"validation_share=0 leaves no validation samples to search"),
    "negative rounds": (["method.train.rounds=-1"], r"method.train.rounds=-1: must be 0 or more"),
}


@pytest.mark.parametrize("case", ELASTIC_CASES)
def test_an_elastic_run_is_refused_at_start_in_one_line(case: str, refused: Refuse) -> None:
    arguments, expected = ELASTIC_CASES[case]
    assert re.search(expected, refused(*arguments, preset=ELASTIC)), case
