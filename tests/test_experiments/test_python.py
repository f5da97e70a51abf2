"""`import fedloom as fl`: the runs, the errors and the bits of the command line, as Python values."""

import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedloom as fl
from fedloom.experiments.cli import main
from fedloom.experiments.python import _composed, overrides_of

TRAIN = {"rounds": 2, "clients_per_round": 3, "epochs": 1, "batch_size": 16, "evaluate_every": 0}
TINY: dict[str, Any] = {
    "data": {"num_clients": 8, "train_samples": 320, "test_samples": 80},
    "method": {"train": TRAIN},
    "executor.kind": "serial",
}


def on_the_command_line(folder: Path, experiment: str, changes: dict[str, Any]) -> Any:
    """The exit code of `fedloom run`."""
    with pytest.raises(SystemExit) as ended:
        main(["run", f"experiment={experiment}", *overrides_of(changes), f"results={folder}"])
    return ended.value.code


def test_what_a_run_was_composed_of_composes_it_again() -> None:
    for changes in ({}, {"experiment": "custom"}):
        given = {"method": "fedavg", **TINY, "method.train.rounds": 3, **changes}
        with _composed(None, given) as (_, config), _composed(None, asdict(config)) as (_, again):
            assert again == config


def test_importing_fedloom_imports_neither_torch_nor_ray() -> None:
    code = "import sys, fedloom; assert 'run' in dir(fedloom); assert not {'torch', 'ray', 'pandas'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="module 'fedloom' has no attribute 'runs'"):
        fl.runs  # noqa: B018


def test_a_run_has_the_bits_of_the_command_and_its_files_as_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds: list[int] = []
    run = fl.run(
        "heterofl_digits", **TINY, seed=3, results=tmp_path, quiet=True, on_round=lambda done: rounds.append(done.round)
    )
    assert capsys.readouterr().out == ""
    assert on_the_command_line(tmp_path, "heterofl_digits", {**TINY, "seed": 3}) == 0
    assert rounds[:2] == [0, 1]
    (second,) = (each for each in fl.load(tmp_path) if each != run)
    assert (run.status, second.status) == ("done", "done")
    assert [each.id for each in fl.load(tmp_path, second.id)] == [second.id]
    assert run.config["seeds"] == second.config["seeds"]
    assert [len(run.rounds), len(run.clients)] == [len(second.rounds), len(second.clients)]
    assert run.evaluations["value"].equals(second.evaluations["value"])
    small, large = run.model("tier1"), run.model("tier4")
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in large.parameters())
    (file,) = (tmp_path / "artifacts" / second.id / "models").glob("tier1-*.safetensors")
    stored, weights = load_file(file), small.state_dict()
    assert stored.keys() == weights.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in stored.items())
    assert not small.training
    other = fl.run("heterofl_digits", **{**TINY, "data.alpha": 0.1}, seed=3, results=tmp_path, quiet=True)
    assert {*fl.compare("data.alpha", tmp_path, [run.id, other.id])["value"]} == {"0.1", "1.0"}
    with pytest.raises(ValueError, match=r"no tier 'tier9' in this run: its tiers are tier1, "):
        run.model("tier9")
    with pytest.raises(ValueError, match=r"keeps several models: choose one by model: tier1-"):
        run.model()


def test_an_error_after_a_round_interrupts_the_run_and_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fl.run("fedavg_digits", **TINY, results=tmp_path, quiet=True, on_round=lambda done: done.round / 0)
    (run,) = fl.load(tmp_path)
    assert (run.status, len(run.rounds)) == ("interrupted", 1)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"data": {"alhpa": 0.1}}, ValueError),
        ({"method.train.lr": -1}, ValueError),
        ({"method": "fedpox"}, ValueError),
        ({**TINY, "method.train.clients_per_round": 9}, ValueError),
        ({**TINY, "method.train.lr": 1e30}, fl.RunFailedError),
    ],
    ids=lambda value: "" if isinstance(value, type) else "-".join(value)[-30:],
)
def test_errors_are_the_lines_of_the_command(
    changes: dict[str, Any], error: type[Exception], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = on_the_command_line(tmp_path / "command", "fedavg_digits", changes)
    assert (code == 2) is (error is ValueError)
    line = capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(error) as raised:
        fl.run("fedavg_digits", **changes, results=tmp_path / "python", quiet=True)
    assert f"fedloom: {raised.value}" == line
    assert (tmp_path / "python").exists() is (error is not ValueError)


def test_values_of_python_are_those_of_the_command_line() -> None:
    values = {"data": {"alpha": np.float32(0.5), "options": {}}, "seeds.data": np.int64(3), "tags": ("a", "b c")}
    assert overrides_of(values) == ["data.alpha=0.5", "data.options={}", "seeds.data=3", 'tags=[a,"b c"]']
    assert overrides_of({"experiment": Path("mine.yaml"), "dry_run": True, "name": None}) == [
        "experiment=mine.yaml",
        "dry_run=true",
        "name=null",
    ]
    with pytest.raises(
        ValueError, match=r"^data.alpha=\{1\}: give a number, text, .* a network or a data set of one's own$"
    ):
        fl.run("fedavg_digits", data={"alpha": {1}})


def test_a_started_run_is_watched_stopped_and_tells_how_it_failed(tmp_path: Path) -> None:
    long = {**TINY, "method": {"train": {**TRAIN, "rounds": 9999}}, "results": tmp_path}
    run = fl.start("fedavg_digits", **long)
    failing = fl.start("fedavg_digits", **long, **{"method.train.lr": 1e30})
    progress = run.progress
    assert (progress.state, progress.stage, progress.rounds_total) == ("running", "fedavg", 9999)
    assert 0 <= progress.fraction < 0.5
    with pytest.raises(TimeoutError, match=rf"^run {run.id} is still running after 0.01 s$"):
        run.wait(0.01)
    while run.progress.left_s is None:
        time.sleep(0.05)
    progress = run.progress
    assert progress.left_s is not None
    assert progress.left_s > 1
    assert run.stop().status == "interrupted"
    with pytest.raises(fl.RunFailedError, match=r"^run failed: the training diverged"):
        failing.wait()
    with pytest.raises(ValueError, match=r"^unknown configuration key 'sed'; did you mean 'seed'\?$"):
        fl.start("fedavg_digits", sed=1)


@pytest.mark.usefixtures("undrawn")
def test_an_ablation_has_the_bits_of_its_runs_and_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"none": {}, "prox": {"method": {"train": {"local_rule": "fedprox", "options": {"mu": 1.0}}}}}
    over = {"data.alpha": [0.1, 10.0], "rule": settings}
    ablation = fl.ablate("fedavg_digits", over, seeds=[2], **TINY, results=tmp_path)
    assert len(capsys.readouterr().out.splitlines()) == 9, "the plan, and the start and the end of each trial"
    changes = {**TINY, **settings["prox"], "method.train.rounds": 2, "data.alpha": 10.0}
    alone = fl.run("fedavg_digits", **_merged(changes), seed=2, results=tmp_path, quiet=True)
    assert ablation.runs[-1].config["method"] == alone.config["method"]
    assert ablation.runs[-1].evaluations["value"].equals(alone.evaluations["value"])
    compared = ablation.compare()
    assert compared[["alpha", "rule", "n"]].values.tolist() == [
        [alpha, rule, 1] for alpha in (0.1, 10.0) for rule in ("none", "prox")
    ]
    assert compared["mean"].tolist() == ablation.table["accuracy"].tolist()
    assert ablation.compare("rule")["n"].tolist() == [1, 1], "a seed counts once"
    assert ablation.report().html.is_file()
    with pytest.raises(ValueError, match=r"has no axis 'alhpa'; its axes are alpha, rule$"):
        ablation.compare("alhpa")
    with pytest.raises(ValueError, match=r"^there is no measure 'acuracy' in the frame; .* accuracy, loss"):
        ablation.compare(measure="acuracy")


def _merged(changes: dict[str, Any]) -> dict[str, Any]:
    train = {**TRAIN, **changes["method"]["train"]}
    return {**changes, "method": {"train": train}}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"over": {"data.alhpa": [1]}}, r"unknown configuration key 'data.alhpa'; did you mean 'data.alpha'\?$"),
        ({"over": {"data.alpha": 1}}, r"^over={'data.alpha': 1}: give a list of values, or a dictionary of named se"),
        ({"over": {"method.lr": [1], "data.lr": [2]}}, "two of these keys have the same ending: vary named settings$"),
        ({"over": {"data.alpha": {"uniform": [1, 2]}}}, "a range is for ablation.search.kind=random"),
        ({"over": {"method.architecture": {"uniform": [1, 2]}}}, r"axes\.method_architecture: a range is for"),
        ({"over": {"experiment": ["a", "b"]}}, "axes.experiment: tables of results have a column 'experiment'"),
        ({"ablation": "alpah"}, "^ablation=alpah: no such ablation; did you mean 'alpha'"),
        ({"ablation": "alpha", "over": {"data.alpha": [1]}}, "^give either over= or ablation=alpha"),
        ({"ablation": {"search": {}}}, "^give what is varied: over="),
        ({"over": {"data.alpha": [1]}, "seed": 3}, "^seed=3: an ablation has several seeds"),
        ({"over": {"data.alpha": [1]}, "seeds": [1, 1]}, r"^ablation.seeds=\[1, 1\]: give one or more different"),
    ],
    ids=["key", "number", "alike", "range", "renamed", "column", "preset", "both", "neither", "seed", "twice"],
)
def test_an_ablation_that_cannot_be_is_refused(changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=line):
        fl.ablate("fedavg_digits", **{**TINY, **changes}, results=tmp_path / "results", quiet=True)
    assert not (tmp_path / "results").exists()


def test_an_ablation_that_fails_says_what_goes_on_with_it(tmp_path: Path) -> None:
    line = (
        r"^trial 0 \(lr=1e\+30 seed=1\) failed: the training diverged.*; ablation failed \(1 failed\); go on with: fed"
    )
    with pytest.raises(fl.RunFailedError, match=line):
        fl.ablate("fedavg_digits", {"method.train.lr": [1e30]}, seeds=[1], **TINY, results=tmp_path, quiet=True)
