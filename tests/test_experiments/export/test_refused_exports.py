"""Exports that cannot be are refused in one line, and nothing is written."""

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedloom.experiments.cli import main
from fedloom.experiments.export import export as exporting
from fedloom.experiments.export.export import export
from fedloom.experiments.export.selection import Wanted, choose
from fedloom.platform.clients.scoring import scored_subnet
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.ditto import DittoConfig
from fedloom.platform.methods.local_adaptation import LocalAdaptationConfig
from fedloom.platform.results.manifest import manifest_path
from fedloom.platform.results.paths import list_runs, run_paths
from fedloom.platform.runs import run as run_module
from fedloom.platform.runs.run import make_serial, start_run


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ending:
        main(["export", *arguments])
    assert ending.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("run", "words", "line"),
    [
        ("operators", ["--tier", "tier9"], "no tier 'tier9' in this run: its tiers are tier1, tier2"),
        ("operators", ["--tier", "tier1", "--model", "best"], "its models: tier1-fine_tuned, tier1-supernet_init"),
        ("operators", ["--model", "best"], "its models: tier1-fine_tuned"),
        ("operators", ["--architecture", "0-9-0"], "given 9"),
        ("operators", ["--architecture", "small"], "give smallest, largest, or an option for each of the 3 layers"),
        ("operators", ["--target", "macs=1e9"], "trained no elastic supernet: choose a run of method"),
        ("none", ["--architecture", "d=0,5 e=.5"], "depth 5 of stage 2: allowed are 0 to 1"),
        ("none", ["--architecture", "0-99"], "stage 2"),
        ("none", ["--tier", "tier1"], "did not search for tier1; it searched for: macs=200000"),
        ("none", ["--architecture", "smallest", "--formats", "tflite"], "give one or more of safetensors,pt2,onnx"),
        ("none", ["--architecture", "smallest", "--formats", ""], "give one or more of safetensors,pt2,onnx"),
        ("none", [], "give one of --tier"),
    ],
)
def test_what_there_is_not_is_refused_in_one_line(
    run: str, words: list[str], line: str, runs: Any, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--results", str(runs[run].results), "--out", str(out)]
    assert line in refused([runs[run].paths.run_id, *words, *place], capsys)
    assert not out.parent.exists()


def test_an_unknown_run_lists_those_there_are(runs: Any, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs["none"]
    line = refused(["2019", "--model", "x", "--results", str(run.results), "--out", str(out)], capsys)
    assert f"known runs: {run.paths.run_id}" in line


def test_a_run_without_a_model_says_where_it_stands(
    runs: Any, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = shutil.copytree(runs["none"].results, tmp_path / "results")
    (paths,) = list_runs(results)
    for file in [*paths.models.iterdir(), paths.checkpoint / "state.json", manifest_path(paths)]:
        file.unlink()
    for words in (["--architecture", "smallest"], ["--model", "supernet"], ["--tier", "tier1"]):
        line = refused([paths.run_id, *words, "--results", str(results), "--out", str(out)], capsys)
        assert f"run {paths.run_id} keeps no model yet (it is done" in line
    assert not out.parent.exists()


def test_a_dry_run_has_nothing_to_export(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = start_run(tiny_config(results=str(tmp_path / "dry"), dry_run=True), make_serial)
    line = refused([run_id, "--architecture", "0-1-0", "--results", str(tmp_path / "dry"), "--out", str(out)], capsys)
    assert line.endswith(f"run {run_id} was a dry run: it trained nothing that could be exported")


@pytest.mark.parametrize(
    ("method", "line"),
    [
        (DittoConfig(), r"^run r1 trained networks that stay with their silos \(method ditto\); they lie in its check"),
        (LocalAdaptationConfig(), r"^run r1 keeps no model that could be exported \(method local_adaptation\)$"),
    ],
)
def test_methods_for_silos_say_where_their_networks_are(
    method: Any, line: str, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    world: Any = SimpleNamespace(config=tiny_config(method=method))
    with pytest.raises(ValueError, match=line):
        choose(run_paths(tmp_path, "e", "r1"), world, Wanted())


def test_other_data_than_the_run_s_is_refused(runs: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs["none"]

    def other(config: RunConfig, *costs: Any) -> World:
        return build_world(replace(config, data=replace(config.data, train_samples=300)), *costs)

    monkeypatch.setattr(run_module, "build_world", other)
    with pytest.raises(ValueError, match=f"is not what run {run.paths.run_id} was trained on"):
        export(run.results, run.paths.run_id, Wanted(model="supernet"), out)
    assert not out.parent.exists()


def test_missing_packages_are_named_with_the_command(
    runs: Any, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    run = runs["none"]
    words = [run.paths.run_id, "--model", "supernet", "--results", str(run.results), "--out", str(out)]
    line = refused([*words, "--formats", "onnx"], capsys)
    assert line == "fedloom: --formats onnx needs onnxscript: pip install 'fedloom[onnx]', or leave onnx out"
    assert not out.parent.exists()


def test_a_folder_that_cannot_be_written_is_refused(
    runs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    run = runs["none"]
    words = [run.paths.run_id, "--model", "supernet", "--results", str(run.results)]
    for out, why in ((tmp_path / "file", "is not a folder"), (tmp_path / "file" / "below", "cannot be written (")):
        assert f"--out {out} {why}" in refused([*words, "--out", str(out)], capsys)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_leaves_nothing(runs: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        written.append(path)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    run = runs["none"]
    with pytest.raises(OSError, match="No space left"):
        export(run.results, run.paths.run_id, Wanted(model="supernet"), out)
    assert len(written) == 2
    assert not out.parent.exists()


def test_a_file_that_computes_something_else_is_never_written(
    runs: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, built = runs["none"], scored_subnet

    def wrong(*args: Any) -> torch.nn.Module:
        module = built(*args)
        with torch.no_grad():
            next(module.parameters()).mul_(1.01)
        return module

    monkeypatch.setattr(exporting, "scored_subnet", wrong)
    with pytest.raises(ValueError, match="outputs differ from the model's by"):
        export(run.results, run.paths.run_id, Wanted(architecture="d=0,1 e=.5"), out)
    assert not out.parent.exists()
