"""Bad input: one clear line that says what to do, exit code 2, and nothing left behind."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedloom.actors.address import LOOPBACK_SWITCH
from fedloom.experiments.ablation.plan import plan_ablation
from fedloom.experiments.cli import main
from fedloom.experiments.store.ablations import list_ablations, write_ablation
from fedloom.platform.results.paths import find_run, list_runs
from fedloom.platform.results.status import StatusFile
from fedloom.platform.results.tables import read_table

Refuse = Callable[..., str]

SERIAL = ["experiment=fedoras_digits", "executor.kind=serial", "tiers.paths=1000", "space.stem_channels=8"]

QUICK = [
    *SERIAL,
    "data.num_clients=8",
    "tiers.count=2",
    "method.train.rounds=2",
    "method.train.epochs=1",
    "method.train.clients_per_round=4",
    "method.train.evaluate_every=0",
    "method.search.population=4",
    "method.search.offspring=2",
    "method.search.budget=6",
    "method.finetune.rounds=1",
    "method.finetune.clients_per_round=2",
    "method.rand_init.rounds=0",
    "method.rand_init.clients_per_round=2",
]


def call(*arguments: str) -> int:
    """The exit code of the command line."""
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    assert isinstance(ending.value.code, int)
    return ending.value.code


def the_line(error_output: str) -> str:
    """The one line of a refusal."""
    lines = [line for line in error_output.splitlines() if line.strip()]
    assert len(lines) == 1, error_output
    assert lines[0].startswith("fedloom: ")
    assert len(lines[0]) < 600
    return lines[0]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOOPBACK_SWITCH, "0")  # so that what the command line sets is undone
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)


@pytest.fixture
def refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Refuse:
    """Runs `fedloom run ARGUMENTS`, which must be refused; gives the line."""

    def run(*arguments: str, preset: Sequence[str] = SERIAL) -> str:
        results = tmp_path / "results"
        code = call("run", *preset, f"results={results}", *arguments)
        line = the_line(capfd.readouterr().err)
        assert code == 2
        assert not results.exists(), sorted(results.rglob("*"))
        return line

    return run


CASES = {
    "unknown key": (["method.train.weigting=opa"], r"'method.train.weigting'.*did you mean 'method.train.weighting'"),
    "unknown section": (["exekutor.kind=serial"], r"'exekutor.kind'.*did you mean 'executor.kind'"),
    "added unknown key": (["+data.alfa=1"], r"'data.alfa'.*did you mean 'data.alpha'"),
    "no value": (["data.alpha"], r"'data.alpha' is not of the form key=value"),
    "wrong type": (["data.alpha=much"], r"data.alpha.*much"),
    "unknown preset": (["experiment=fedoras_digit"], r"fedoras_digit: no such preset.*'fedoras_digits'.*there are"),
    "unknown method": (["method=fedors"], r"method=fedors.*'fedoras'.*fedavg"),
    "unknown data set": (
        ["data.dataset=cifar11"],
        r"data.dataset: unknown data set 'cifar11': known are .*did you mean 'cifar10'",
    ),
    "alpha of 0": (["data.alpha=0"], r"data.alpha=0.0: must be greater than 0"),
    "negative alpha": (["data.alpha=-1"], r"data.alpha=-1.0: must be greater than 0"),
    "too many clients": (
        ["data.num_clients=8", "method.train.clients_per_round=9"],
        r"method.train.clients_per_round=9: must be between 1 and the 8 clients",
    ),
    "no client in a round": (
        ["method.finetune.clients_per_round=0"],
        r"clients_per_round=0: must be at least 1, or null",
    ),
    "more clients than samples": (["data.num_clients=5000"], r"num_clients"),
    "tier below the smallest path": (
        ["tiers.count=2", "tiers.upper_bounds=[1.5,1000]"],
        r"first tier's bound 1.5 is below the smallest model's cost \d+",
    ),
    "tiers that do not increase": (["tiers.upper_bounds=[9e9,8e9]"], r"strictly increasing"),
    "shares that do not sum to 1": (["tiers.shares=[.5,.2,.2,.2]"], r"sum to 1.1, but must sum to 1"),
    "wrong number of shares": (["tiers.shares=[.5,.5]"], r"tiers.shares has 2 values for 4 tiers"),
    "tiny communication budget": (
        ["method.train.communication.value=0.0001"],
        r"communication budget of 4.111 parameters is below one operator per layer, which takes \d+",
    ),
    "communication budget in bytes": (
        ["method.train.communication.unit=bytes", "method.train.communication.value=100"],
        r"communication budget of 100 bytes is below one operator per layer",
    ),
    "communication budget above 1": (["method.train.communication.value=1.5"], r"above 0 and at most 1, given 1.5"),
    "unknown communication unit": (
        ["method.train.communication.unit=kilo"],
        r"communication.unit=kilo: must be one of fraction, parameters, bytes",
    ),
    "unknown weighting rule": (["method.train.weighting=opaa"], r"unknown weighting rule 'opaa'.*did you mean 'opa'"),
    "weighting plug-in that is not there": (["method.finetune.weighting=nowhere:rule"], r"nowhere:rule.*imported"),
    "unknown searcher": (["method.search.searcher=nsga3"], r"unknown searcher 'nsga3'.*nsga2, random"),
    "unknown path sampler": (
        ["method.train.paths=gredy"],
        r"method.train.paths=gredy: must be one of greedy, rejection; did you mean 'greedy'",
    ),
    "unknown space": (["space.name=cnn_digit"], r"unknown space 'cnn_digit'.*did you mean 'cnn_digits'"),
    "space that does not fit": (["space.name=cnn_cifar"], r"cnn_cifar takes \(3, 32, 32\).*digits has \(1, 8, 8\)"),
    "unknown schedule": (
        ["method.train.schedule=linear"],
        r"method.train.schedule=linear: must be one of fixed, cosine, step, steps",
    ),
    "unknown scoring": (
        ["method.search.scoring=mixed"],
        r"method.search.scoring=mixed: must be one of central, federated",
    ),
    "unknown policy": (["executor.failures.policy=ignore"], r"policy=ignore: must be one of stop, retry, tolerate"),
    "impossible share of failures": (["executor.failures.max_share=2"], r"max_share=2.0: must be between 0 and 1"),
    "no time for a client": (["executor.client_timeout_s=0"], r"client_timeout_s=0.0: must be greater than 0"),
    "unknown executor": (["executor.kind=mpi"], r"executor.kind=mpi: must be one of ray, serial"),
    "fraction that does not divide a GPU": (["tiers.num_gpus=[.3,.3,.3,.3]"], r"num_gpus=0.3.*1/k.*0.333"),
    "resident clients in chunks": (
        ["executor.resident=true", "executor.chunk_size=2"],
        r"executor.chunk_size=2: resident clients take chunks of 1",
    ),
    "negative learning rate": (["method.train.lr=-1"], r"method.train.lr=-1.0: must be greater than 0"),
}


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
    "no subnet": (["method.family=[huge]"], r"'huge' is no subnet: give smallest, largest, options such as"),
    "named twice": (["method.family=[smallest,smallest]"], r"'smallest' is named twice"),
    "beta_0 of 0": (["method.train.shares.beta_0=0"], r"shares.beta_0=0.0: must be above 0 and at most 1"),
    "beta_0 above 1": (["method.train.shares.beta_0=1.1"], r"shares.beta_0=1.1: must be above 0 and at most 1"),
    "decay share of 0": (["method.train.shares.decay_share=0"], r"decay_share=0.0: must be above 0 and at most 1"),
    "decay share above 1": (["method.train.shares.decay_share=1.5"], r"decay_share=1.5: must be above 0 and at most 1"),
    "unknown decay": (["method.train.shares.decay=exp"], r"shares.decay=exp: must be one of constant, linear, cosine"),
    "unknown rule": (["method.train.shares.rule=maxnt"], r"unknown shares rule 'maxnt'.*maxnet.*overlap.*'maxnet'"),
    "two clients with a sandwich": (
        ["method.train.clients_per_round=2"],
        r"clients_per_round=2: tracking_sandwich needs at least 3",
    ),
    "unknown heuristic": (
        ["method.train.distribution.heuristic=sandwitch"],
        r"unknown distribution heuristic 'sandwitch': known are dynamic, random, sandwich, static, tracking_sandwich.*"
        r"did you mean 'sandwich'",
    ),
    "heuristic that is not there": (["method.train.distribution.heuristic=nowhere:rule"], r"nowhere:rule.*imported"),
    "family heuristic without a family": (
        ["method.train.distribution.heuristic=static", "method.family=[]"],
        r"heuristic=static hands out a fixed family: give method.family",
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
        r"method.search.predictor: unknown predictor 'gp': known are mlp, none, or module:name",
    ),
    "tolerance": (["method.search.tolerance=0"], r"tolerance=0.0: must be above 0 and below 1"),
    "too few samples": (
        ["method.search.samples=5"],
        r"samples=5: predictors need at least 10; 0 switches",
    ),
    "targets without a search": (["method.search.samples=0", "method.search.front=4"], r"but targets are given"),
    "population of one": (["method.search.population=1"], r"method.search.population=1: must be at least 2"),
    "no parents": (["method.search.parents=0"], r"method.search.parents=0.0: must be above 0 and at most 1"),
    "mutation above 1": (["method.search.mutation=2"], r"method.search.mutation=2.0: must be between 0 and 1"),
    "no hidden units": (["method.search.hidden=0"], r"method.search.hidden=0: must be at least 1"),
    "impossible tau": (["method.search.min_tau=2"], r"min_tau=2.0: must be between -1 and 1"),
    "front without predictors": (
        ["method.search.predictor=none", "method.search.front=3"],
        r"front=3: the whole front is searched with predictors",
    ),
    "budgets that nobody looks at": (
        ["method.train.distribution.tier_aware=true", "method.train.travels=supernet"],
        r"tier_aware=true: where all clients get the same model no budget is looked at",
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


SILOS = ["experiment=spider_digits", "executor.kind=serial", "tiers.paths=1000"]
FIXED = ["executor.kind=serial", "data.num_clients=4", "tiers.count=1", "tiers.paths=1000"]

SILO_CASES = {
    "no validation data to search with": (
        [*SILOS, "data.validation_share=0"],
        r"data.validation_share=0 leaves a silo without validation samples to search with: raise it",
    ),
    "no operator without parameters": (
        [*SILOS, "method.search.prune_edges=true", "space.operators=[sep_conv_3x3,dil_conv_3x3]"],
        r"prune_edges needs an operator without parameters .* the space has dil_conv_3x3, sep_conv_3x3: add one",
    ),
    "pruning by gradients": (
        [*SILOS, "method.search.prune_edges=true", "method.search.kind=milenas"],
        r"prune_edges: edges are pruned by perturbation, not by milenas",
    ),
    "unknown operator": (
        [*SILOS, "space.operators=[skip_connect,conv]"],
        r"edge normal 0->2: unknown operator 'conv': known are none, noise",
    ),
    "unknown searcher": (
        [*SILOS, "method.search.kind=darts"],
        r"search.kind=darts: must be one of perturbation, milenas",
    ),
    "tau of 0": ([*SILOS, "method.search.every=0"], r"method.search.every=0: must be at least 1"),
    "negative lambda": ([*SILOS, "method.train.pull=-1"], r"method.train.pull=-1.0: must be 0 or more"),
    "lambda that is no number": ([*SILOS, "method.train.pull=nan"], r"method.train.pull=nan: must be 0"),
    "no round": ([*SILOS, "method.train.rounds=0"], r"method.train.rounds=0: must be at least 1"),
    "space without cells": (
        [*SILOS, "space.name=cnn_digits"],
        r"spider cannot use space cnn_digits, which has no .* and . more; choose space.name=darts_s2, or one of your "
        r"own like this",
    ),
    "gains of one silo": (
        [*SILOS, "method.gains.epochs=1", "method.gains.clients=1"],
        r"gains.clients=1: must be",
    ),
    "unsupported operators": (
        [*SILOS, "tiers.unsupported=[sep_conv_3x3]"],
        r"tiers.unsupported: silos train every operator of their space",
    ),
    "start of gains": ([*SILOS, "method.gains.start=mine"], r"method.gains.start=mine: must be one of shared, own"),
    "too large shares": (
        [*SILOS, "data.test_share=0.8"],
        r"data.validation_share=0.25 and data.test_share=0.8: must sum to less than 1",
    ),
    "images of odd sides": ([*SILOS, "space.input_shape=[1,7,7]"], r"sides that two reductions can halve"),
    "dry run": ([*SILOS, "dry_run=true"], r"dry_run=true: this method has no stage that can be counted"),
    "base of all cells": (
        ["method=fedpnas", "space.name=darts_s2_small", *FIXED, "method.base_cells=3"],
        r"method.base_cells=3: must leave a base and an own part of the 3 cells, 1 to 2",
    ),
    "global search by gradients": (
        ["method=global_nas", "space.name=darts_s2_small", *FIXED, "method.search.kind=milenas"],
        r"method.search.kind=milenas: global_nas searches by perturbation",
    ),
    "text for an architecture": (
        ["method=ditto", *FIXED, "method.architecture=abc"],
        r"method.architecture: 'abc' is no architecture of cnn_digits: give smallest, largest, or an option for each "
        r"of the 5",
    ),
    "unknown option": (["method=ditto", *FIXED, "method.architecture=9-0-0"], r"cnn_digits"),
    "no adaptation": (["method=local_adaptation", *FIXED, "method.adapt.epochs=0"], r"method.adapt.epochs=0"),
    "no inner step": (["method=per_fedavg", *FIXED, "method.train.local_factor=0"], r"local_factor=0.0: must be great"),
    "no neighbours": (["method=knn_per", *FIXED, "method.neighbours=0"], r"method.neighbours=0"),
    "more pre-training than training": (
        ["method=fedmn", "space.name=darts_s2_small", *FIXED, "method.train.rounds=4"],
        r"pretraining_rounds=500: must be between 0 and method.train.rounds",
    ),
    "modules of a fixed network": (
        ["method=fedmn", "space.name=resnet18_small", "space.input_shape=[1,8,8]", *FIXED],
        r"fedmn cannot use space resnet18_small, which has no .*; choose space.name=resnet18_modular",
    ),
}


@pytest.mark.parametrize("case", SILO_CASES)
def test_a_run_of_silos_is_refused_at_start_in_one_line(case: str, refused: Refuse) -> None:
    arguments, expected = SILO_CASES[case]
    assert re.search(expected, refused(preset=arguments)), case


@pytest.mark.parametrize("case", CASES)
def test_is_refused_at_start_in_one_line(case: str, refused: Refuse) -> None:
    arguments, expected = CASES[case]
    assert re.search(expected, refused(*arguments)), case


def test_a_budget_that_only_bad_rounds_make_impossible_is_refused_at_start(refused: Refuse) -> None:
    """What fits on a good day but not in the worst round of the trace must not stop a run in the middle."""
    line = refused("method.train.communication.value=0.03", "tiers.budget.kind=schedule", "tiers.budget.factors=[1,0]")
    assert "factors[1]=0" in line


def test_too_many_actors_are_refused_before_anything_is_written(refused: Refuse) -> None:
    line = refused("ray.address=local", "ray.num_cpus=1", "executor.actors=7", "executor.kind=ray")
    assert "7 client actors" in line
    assert "the cluster has 1" in line


# -- ablations ---------------------------------------------------------------------------------------------------------

LR = "axes: {lr: {key: method.train.lr, values: [0.1, 0.2]}}\nseeds: [1]\n"
"""An ablation of one's own, as the cases below change it."""

ABLATION_CASES = {
    "no ablation": (["executor.threads=1"], r"give one ablation=NAME \(or a YAML file of your own\)"),
    "unknown ablation": (
        ["ablation=beta_shedule"],
        r"no such ablation; did you mean 'beta_schedule'.*there are alpha, ",
    ),
    "no such file": (["ablation=nowhere/mine.yaml"], r"ablation=nowhere/mine.yaml: there is no such file"),
    "not YAML": (["axes: [1, 2\n"], r"mine.yaml cannot be read as YAML: expected ',' or '\]'"),
    "a list": (["- lr\n"], r"mine.yaml: Cannot merge DictConfig with ListConfig"),
    "no axes": (["seeds: [1]\n"], r"ablation.axes is empty: name at least one axis"),
    "unknown axis key": ([LR.replace("train.lr", "train.lrr")], r"'method.train.lrr'.*did you mean 'method.train.lr'"),
    "wrong type": ([LR.replace("0.2", "fast")], r"method.train.lr: Value 'fast' of type 'str' could not be converted"),
    "axis of another method": (["ablation=spider_lambda"], r"unknown configuration key 'method.train.pull'"),
    "varied twice": (
        [LR.replace("axes: {", "axes: {too: {settings: {x: {method.train.lr: 1}}}, ")],
        r"ablation.axes.lr: method.train.lr is set by another axis, too",
    ),
    "varied and fixed": ([LR, "method.train.lr=1"], r"method.train.lr=1: the ablation varies method.train.lr; change"),
    "a seed": ([LR, "seed=2"], r"seed=2: an ablation has several seeds; give ablation.seeds=\[1,2\]"),
    "an axis of seeds": (["axes: {s: {key: seed, values: [1, 2]}}\n"], r"axes.s sets seed: .*give ablation.seeds"),
    "the same seed twice": ([LR, "ablation.seeds=[1,1]"], r"ablation.seeds=\[1, 1\]: give one or more different seeds"),
    "unknown key of the ablation": ([LR, "ablation.sedes=[1]"], r"unknown key 'sedes'; did you mean 'seeds'"),
    "key of the ablation that cannot be read": ([LR, "ablation.seeds=[1"], r"ablation.seeds=\[1 cannot be read"),
    "method of another preset": (
        ["axes: {m: {key: method, values: [fedavg]}}\n"],
        r"experiment=fedoras_digits and method=fedavg do not go together: the preset sets method.search, which fedavg "
        r"does not have; choose a preset of fedavg .fedadam_digits",
    ),
    "too many trials": (
        [LR, "ablation.search.kind=random", "ablation.search.samples=20000"],
        r"has 20000 trials: 10000 at most; take fewer values",
    ),
    "a trial that cannot begin": (
        ["axes: {clients: {key: data.num_clients, values: [20, 4]}}\nseeds: [1]\n"],
        r"trial 1 \(clients=4 seed=1\): method.train.clients_per_round=10: must be between 1 and the 4 clients",
    ),
    "a trial that does not fit": (
        [LR, "executor.kind=ray", "executor.actors=3", "ray.address=local", "ray.num_cpus=2"],
        r"trial 0 \(lr=0.1 seed=1\): 3 client actors need 3 CPUs at once, the cluster has 2: 1 CPUs are missing; lower",
    ),
    "one trial of several that does not fit": (
        [
            "axes: {threads: {key: executor.threads, values: [1, 3]}}\nseeds: [1]\n",
            "ray.address=local",
            "ray.num_cpus=2",
        ],
        r"trial 1 \(threads=3 seed=1\): 1 client actors need 3 CPUs at once, the cluster has 2: 1 CPUs are missing",
    ),
}


def ablation_arguments(tmp_path: Path, arguments: Sequence[str]) -> list[str]:
    """The arguments, the text of an ablation among them written to a file."""
    file = tmp_path / "mine.yaml"
    written = [a for a in arguments if "\n" in a]
    if written:
        file.write_text(written[0])
    return [f"ablation={file}" if "\n" in a else a for a in arguments]


@pytest.mark.parametrize("case", ABLATION_CASES)
def test_an_ablation_is_refused_in_one_line(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments, expected = ABLATION_CASES[case]
    given = ablation_arguments(tmp_path, arguments)
    before = sorted(tmp_path.iterdir())
    code = call("ablate", *SERIAL, "ray.address=local", f"results={tmp_path / 'results'}", *given)
    assert re.search(expected, the_line(capfd.readouterr().err)), case
    assert code == 2
    assert sorted(tmp_path.iterdir()) == before, "something was written"


def test_results_of_an_ablation_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "results"
    for place in (f"results={folder}", f"--results={folder}"):
        assert call("ablate", *SERIAL, *ablation_arguments(tmp_path, [LR]), place) == 2
        assert f"results folder {folder} cannot be written" in the_line(capfd.readouterr().err)


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    """A results folder with two ablations of which nothing was run."""
    results = tmp_path / "results"
    for name in ("alpha", "comm_budget"):
        plan = plan_ablation([f"ablation={name}", *SERIAL, f"results={results}", "ablation.seeds=[1]"])
        write_ablation(results, plan)
    return results


def test_an_ablation_that_cannot_be_gone_on_with(planned: Path, capfd: pytest.CaptureFixture[str]) -> None:
    alpha, budget = sorted(list_ablations(planned), key=lambda ablation: ablation.name)
    refusals = [
        (["--resume", "2099"], rf"no ablation '2099' under .*known ablations: .*{alpha.ablation_id}"),
        (["--retry-failed", "2099"], r"no ablation '2099'"),
        (["--resume", "20"], r"ablation '20' could be any of .*: give more of its id"),
        (["--resume", alpha.ablation_id, "data.alpha=2"], r"data.alpha cannot change on resume.*executor.actors"),
        (["--resume", alpha.ablation_id, "ablation.seeds=[3]"], r"ablation.seeds cannot change on resume"),
        (["--resume", alpha.ablation_id, "executor.kind=mpi"], r"executor.kind=mpi: must be one of ray, serial"),
        (
            ["--resume", budget.ablation_id, "ray.address=local", "executor.threads=3"],
            r"executor.threads cannot change on resume",
        ),
        (
            ["--resume", budget.ablation_id, "ray.address=local", "executor.kind=ray", "executor.actors=999"],
            r"trial 0 \(budget=1.0 averaging=opa seed=1\): 999 client actors need 999 CPUs at once",
        ),
        (["--retry-failed", alpha.ablation_id], r"no trial of .* has failed: --resume runs those"),
    ]
    before = contents(planned)
    for arguments, expected in refusals:
        code = call("ablate", *arguments, "--results", str(planned))
        assert re.search(expected, the_line(capfd.readouterr().err)), arguments
        assert code == 2
        assert contents(planned) == before, "a refused command changed the results"


def test_an_ablation_that_is_at_work_or_damaged(planned: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ablation = list_ablations(planned)[0]
    folder = ablation.folder(planned)
    StatusFile(folder / "status.json").write("running")
    assert call("ablate", "--resume", ablation.ablation_id, "--results", str(planned)) == 2
    line = the_line(capfd.readouterr().err)
    assert f"ablation {ablation.ablation_id} is still running (process {os.getpid()} on " in line
    plan = folder / "ablation.json"
    plan.write_bytes(plan.read_bytes()[:-100])
    assert call("ablate", "--resume", ablation.ablation_id, "--results", str(planned)) == 2
    assert f"{plan} is not the plan of an ablation: restore it from a copy" in the_line(capfd.readouterr().err)


# -- data --------------------------------------------------------------------------------------------------------------

CIFAR = ["experiment=fedoras_cifar10", "executor.kind=serial", "tiers.paths=1000"]


def foreign_folder(tmp_path: Path, write: Callable[[Path], None]) -> Path:
    folder = tmp_path / "data" / "cifar10"
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        write(folder / f"{part}-00000-of-00001.parquet")
    return folder.parent


def write_rubbish(file: Path) -> None:
    file.write_bytes(b"PAR1 this is not a Parquet file PAR1")


def write_foreign(file: Path) -> None:
    pq.write_table(pa.table({"text": ["to be", "or not to be"], "label": [0, 1]}), file)


def write_broken_images(file: Path) -> None:
    images = pa.array(
        [{"bytes": b"no image", "path": "a.png"}] * 200, pa.struct({"bytes": pa.binary(), "path": "string"})
    )
    pq.write_table(pa.table({"img": images, "label": [i % 10 for i in range(200)]}), file)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (write_rubbish, r"parquet: cannot be read"),
        (write_foreign, r"parquet: columns text, label; expected"),
        (write_broken_images, r"parquet: row \d+ is not an image"),
    ],
)
def test_a_corrupt_or_foreign_data_file_is_named(
    tmp_path: Path,
    refused: Refuse,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path], None],
    expected: str,
) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(foreign_folder(tmp_path, write)))
    cache = tmp_path / "cache"
    monkeypatch.setenv("FEDLOOM_CACHE", str(cache))
    assert re.search(expected, refused(preset=CIFAR))
    assert not list(cache.rglob("*.npy")), "half a data set was left in the cache"


def test_a_missing_data_set_says_where_it_was_looked_for(
    tmp_path: Path, refused: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "nothing"))
    line = refused(preset=CIFAR)
    assert f"cifar10 not found under {tmp_path / 'nothing'}" in line
    assert "FEDLOOM_DATA" in line


@pytest.mark.parametrize("place", ["below a file", "in /proc"])
def test_a_results_folder_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str], place: str) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = {"below a file": str(tmp_path / "file" / "results"), "in /proc": "/proc/fedloom-results"}[place]
    assert call("run", *SERIAL, f"results={folder}") == 2
    assert f"results folder {folder} cannot be written" in the_line(capfd.readouterr().err)


# -- runs that are there -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, own_cache: Path) -> Path:
    """A results folder with one small finished run."""
    results = tmp_path_factory.mktemp("finished") / "results"
    assert call("run", "--json", *QUICK, f"results={results}") == 0
    return results


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "copied"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def resume_refused(results: Path, capfd: pytest.CaptureFixture[str], *arguments: str, run: str = "") -> str:
    capfd.readouterr()
    before = contents(results)
    code = call("resume", run or list_runs(results)[0].run_id, *arguments, "--results", str(results))
    line = the_line(capfd.readouterr().err)
    assert code == 2
    assert contents(results) == before, "a refused resume changed the results"
    return line


def test_resuming_with_another_value_is_refused(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = resume_refused(finished, capfd, "data.alpha=2")
    assert "data.alpha cannot change on resume" in line
    assert "executor.actors" in line


def test_a_configuration_edited_after_the_checkpoint_is_refused(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = list_runs(copied)[0].config
    config = json.loads(file.read_text())
    config["data"]["alpha"] = 2.0
    file.write_text(json.dumps(config))
    line = resume_refused(copied, capfd)
    assert "another configuration" in line
    assert "data.alpha 1.0 -> 2.0" in line


def test_a_stored_configuration_that_is_gone_or_damaged(copied: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = list_runs(copied)[0].config
    file.write_text(file.read_text()[:100])
    assert str(file) in resume_refused(copied, capfd)
    file.unlink()
    assert str(file) in resume_refused(copied, capfd)


@pytest.mark.parametrize("damage", ["tensors cut short", "tensors missing", "state cut short", "a bit flipped"])
def test_a_damaged_checkpoint_is_refused(copied: Path, capfd: pytest.CaptureFixture[str], damage: str) -> None:
    folder = list_runs(copied)[0].checkpoint
    state, tensors = folder / "state.json", sorted(folder.glob("supernet-*.safetensors"))[0]
    content = tensors.read_bytes()
    if damage == "tensors cut short":
        tensors.write_bytes(content[:-10])
    elif damage == "tensors missing":
        tensors.unlink()
    elif damage == "a bit flipped":
        tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        state.write_bytes(state.read_bytes()[:-20])
    line = resume_refused(copied, capfd)
    assert f"{(state if damage == 'state cut short' else tensors).name} is damaged" in line
    assert "start a new run" in line


def test_an_unknown_run(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    known = list_runs(finished)[0].run_id
    line = resume_refused(finished, capfd, run="20990101-nobody")
    assert "no run '20990101-nobody'" in line
    assert known in line
    for command in ("report", "status"):
        assert call(command, "20990101-nobody", "--results", str(finished)) == 2
        assert "no run '20990101-nobody'" in the_line(capfd.readouterr().err)


# -- updates that are no numbers ---------------------------------------------------------------------------------------


def test_a_nan_update_is_a_failed_row_and_the_policy_stops_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    assert call("run", "--json", *QUICK, "method.train.lr=1e30", f"results={results}") == 3
    summary = json.loads(capfd.readouterr().out)
    assert summary["status"] == "failed"
    assert re.search(r"supernet, round 0: client \d+ \(tier\d\) failed: .*(not finite|loss is nan)", summary["message"])
    rows = read_table(results, "clients", run_id=summary["run_id"])
    failed = rows[rows["status"] == "failed"]
    assert len(rows) == 4
    assert len(failed) >= 1
    assert failed["error"].str.contains("left out of the average").all()
    assert read_table(results, "runs")["status"].tolist() == ["failed"]
    assert not (find_run(results, summary["run_id"]).checkpoint / "state.json").exists()


def test_a_nan_update_is_left_out_where_the_policy_tolerates_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    tolerate = ["executor.failures.policy=tolerate", "executor.failures.max_share=1"]
    assert call("run", "--json", *QUICK, "method.train.lr=1e30", *tolerate, f"results={results}") == 0
    run_id = json.loads(capfd.readouterr().out.splitlines()[-1])["run_id"]
    rows = read_table(results, "clients", run_id=run_id)
    assert (rows[rows["stage"] == "supernet"]["status"] == "failed").all()
    rounds = read_table(results, "rounds", run_id=run_id)
    supernet = rounds[rounds["stage"] == "supernet"]
    assert supernet["clients_failed"].tolist() == [4, 4]
    assert pd.isna(supernet["loss"]).all()
    # The first weights stayed as they were, so that everything after can still be computed.
    assert read_table(results, "evaluations", run_id=run_id)["value"].notna().any()


# -- as a person calls it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "experiment=fedoras_digits", "data.alpha=0"], "data.alpha=0.0: must be greater than 0"),
        (["describe", "space=cnn_cifr"], "did you mean 'cnn_cifar'?"),
        (["prepare", "dataset=cifar10"], "cifar10 not found under"),
    ],
)
def test_the_installed_command_refuses_in_one_line(tmp_path: Path, arguments: list[str], expected: str) -> None:
    command = [str(Path(sys.executable).with_name("fedloom")), *arguments]
    environment = {**os.environ, "FEDLOOM_DATA": str(tmp_path / "nothing")}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2, done.stderr
    assert expected in the_line(done.stderr)
    assert not list(tmp_path.iterdir())
