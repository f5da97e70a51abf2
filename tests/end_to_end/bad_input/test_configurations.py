"""Configurations that cannot run are refused at the start of `fedloom run`, in one line."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

Refuse = Callable[..., str]

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
    "alpha of 0": (["data.alpha=0"], r"data.alpha=0: must be greater than 0"),
    "negative alpha": (["data.alpha=-1"], r"data.alpha=-1: must be greater than 0"),
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
    "impossible share of failures": (["executor.failures.max_share=2"], r"max_share=2: must be between 0 and 1"),
    "no time for a client": (["executor.client_timeout_s=0"], r"client_timeout_s=0: must be greater than 0"),
    "unknown executor": (["executor.kind=mpi"], r"executor.kind=mpi: must be one of ray, serial"),
    "fraction that does not divide a GPU": (["tiers.num_gpus=[.3,.3,.3,.3]"], r"num_gpus=0.3.*1/k.*0.333"),
    "resident clients in chunks": (
        ["executor.resident=true", "executor.chunk_size=2"],
        r"executor.chunk_size=2: resident clients take chunks of 1",
    ),
    "a list in a list": (["tags=[[paper]]"], r"tags\[0\]=\['paper'\]: must be a text"),
    "a mapping in a list": (["space.stage_layers=[{a: 1}]"], r"space.stage_layers\[0\]=.*: must be an int"),
    "resident clients in stacks": (
        ["executor.resident=true", "executor.stack_clients=4"],
        r"executor.stack_clients=4: resident clients are trained alone",
    ),
    "no number of clients": (["executor.stack_clients=0"], r"stack_clients=0: must be auto, off, or a whole number"),
    "unknown precision": (["executor.precision=float16"], r"precision=float16: must be one of float32, tf32, bfloat16"),
    "negative learning rate": (["method.train.lr=-1"], r"method.train.lr=-1: must be greater than 0"),
}


@pytest.mark.parametrize("case", CASES)
def test_is_refused_at_start_in_one_line(case: str, refused: Refuse) -> None:
    arguments, expected = CASES[case]
    assert re.search(expected, refused(*arguments)), case


def test_a_budget_that_only_bad_rounds_make_impossible_is_refused_at_start(refused: Refuse) -> None:
    """What fits on a good day but not in the worst round of the trace must not stop a run in the middle."""
    line = refused("method.train.communication.value=0.03", "tiers.budget.kind=schedule", "tiers.budget.factors=[1,0]")
    assert "tiers.budget.factors[1]=0: must be above 0 and at most 1" in line


def test_an_unknown_rule_is_refused_before_data_is_prepared(refused: Refuse, tmp_path: Path) -> None:
    line = refused("method.train.server=adam", f"data.cache={tmp_path / 'cache'}")
    assert "method.train.server: unknown server rule 'adam'" in line
    assert not (tmp_path / "cache").exists()


def test_a_serial_run_on_a_gpu_that_is_not_there(
    refused: Refuse, refusal: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shares = "tiers.num_gpus=[.5,.5,.5,.5]"
    assert "tiers.num_gpus=[0.5, 0.5, 0.5, 0.5] with executor.kind=serial needs a GPU" in refused(shares)
    experiment = ["ablation=init", "experiment=fedoras_digits", "executor.kind=serial", "tiers.paths=1000"]
    line = refusal("ablate", *experiment, shares, f"results={tmp_path / 'trials'}")
    assert "need 1 GPUs at once, the cluster has 0: 1 GPUs are missing; lower tiers.num_gpus" in line
    assert not (tmp_path / "trials" / "artifacts").exists()


def test_too_many_actors_are_refused_before_anything_is_written(refused: Refuse) -> None:
    line = refused("ray.address=local", "ray.num_cpus=1", "executor.actors=7", "executor.kind=ray")
    assert "7 client actors" in line
    assert "the cluster has 1" in line
