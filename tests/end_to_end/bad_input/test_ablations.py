"""Ablations that cannot be planned, begun or gone on with are refused in one line."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fedloom.experiments.ablation.plan import plan_ablation
from fedloom.experiments.store.ablations import ablation_ids, find_ablation, write_ablation
from fedloom.platform.results.lock import owned

Refuse = Callable[..., str]
Contents = Callable[[Path], dict[str, bytes]]

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
    "a list": (["- lr\n"], r"cannot be read as YAML: Cannot merge DictConfig with ListConfig"),
    "no axes": (["seeds: [1]\n"], r"ablation.axes is empty: name at least one axis"),
    "unknown axis key": ([LR.replace("train.lr", "train.lrr")], r"'method.train.lrr'.*did you mean 'method.train.lr'"),
    "wrong type": ([LR.replace("0.2", "fast")], r"method.train.lr=fast: must be a float"),
    "axis of another method": (["ablation=spider_lambda"], r"unknown configuration key 'method.train.pull'"),
    "varied twice": (
        [LR.replace("axes: {", "axes: {too: {settings: {x: {method.train.lr: 1}}}, ")],
        r"ablation.axes.lr: method.train.lr is set by another axis, too",
    ),
    "varied and fixed": ([LR, "method.train.lr=1"], r"method.train.lr=1: the ablation varies method.train.lr; change"),
    "a seed": ([LR, "seed=2"], r"seed=2: an ablation has several seeds; give ablation.seeds=\[1,2\]"),
    "an axis of seeds": (["axes: {s: {key: seed, values: [1, 2]}}\n"], r"axes.s sets seed: .*give ablation.seeds"),
    "the same seed twice": ([LR, "ablation.seeds=[1,1]"], r"ablation.seeds=\[1, 1\]: give one or more different seeds"),
    "unknown key of the ablation": (
        [LR, "ablation.sedes=[1]"],
        r"unknown configuration key 'ablation.sedes'.*'ablation.seeds'",
    ),
    "key of the ablation that cannot be read": ([LR, "ablation.seeds=[1"], r"ablation.seeds=\[1 cannot be read"),
    "method of another preset": (
        ["axes: {m: {key: method, values: [fedavg]}}\n"],
        r"experiment=fedoras_digits and method=fedavg do not go together: the preset sets method.search, which fedavg "
        r"does not have; choose a preset of fedavg .fedadagrad_digits",
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
def test_an_ablation_is_refused_in_one_line(case: str, tmp_path: Path, refusal: Refuse, serial: Sequence[str]) -> None:
    arguments, expected = ABLATION_CASES[case]
    given = ablation_arguments(tmp_path, arguments)
    before = sorted(tmp_path.iterdir())
    typed = {argument.partition("=")[0] for argument in given}  # no key may be typed with two values
    base = [o for o in (*serial, "ray.address=local") if o.partition("=")[0] not in typed]
    line = refusal("ablate", *base, f"results={tmp_path / 'results'}", *given)
    assert re.search(expected, line), case
    assert sorted(tmp_path.iterdir()) == before, "something was written"


def test_results_of_an_ablation_that_cannot_be_written(tmp_path: Path, refusal: Refuse, serial: Sequence[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "results"
    for place in (f"results={folder}", f"--results={folder}"):
        line = refusal("ablate", *serial, *ablation_arguments(tmp_path, [LR]), place)
        assert f"results folder {folder} cannot be written" in line


@pytest.fixture
def planned(tmp_path: Path, serial: Sequence[str]) -> Path:
    """A results folder with two ablations of which nothing was run."""
    results = tmp_path / "results"
    for name in ("alpha", "comm_budget"):
        plan = plan_ablation([f"ablation={name}", *serial, f"results={results}", "ablation.seeds=[1]"])
        write_ablation(results, plan)
    return results


def test_an_ablation_that_cannot_be_gone_on_with(planned: Path, refusal: Refuse, contents: Contents) -> None:
    found = [find_ablation(planned, ablation_id) for ablation_id in ablation_ids(planned)]
    alpha, budget = sorted(found, key=lambda ablation: ablation.name)
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
        assert re.search(expected, refusal("ablate", *arguments, "--results", str(planned))), arguments
        assert contents(planned) == before, "a refused command changed the results"


def test_an_ablation_that_is_at_work_or_damaged(planned: Path, refusal: Refuse) -> None:
    ablation = find_ablation(planned, ablation_ids(planned)[0])
    folder = ablation.folder(planned)
    with owned(folder, "ablation", planned, planned):
        line = refusal("ablate", "--resume", ablation.ablation_id, "--results", str(planned))
    assert f"ablation {ablation.ablation_id} is at work in process {os.getpid()} on " in line
    plan = folder / "ablation.json"
    plan.write_bytes(plan.read_bytes()[:-100])
    line = refusal("ablate", "--resume", ablation.ablation_id, "--results", str(planned))
    assert f"{plan} is damaged (it is cut short, or its hash is missing): restore it from a copy" in line
