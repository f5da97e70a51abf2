"""Where runs lie, what they are called, and the models that they keep."""

import os
import re
from pathlib import Path

import pytest
import torch

from fedloom.platform.results import checkpoint as checkpoint_module
from fedloom.platform.results.checkpoint import ModelFile, list_models, load_model, save_model
from fedloom.platform.results.files import read_file
from fedloom.platform.results.paths import RunPaths, find_run, list_runs, new_run_id, run_paths
from fedloom.platform.results.tables import read_table
from fedloom.platform.results.writer import RunWriter


def test_everything_of_a_run_has_its_place(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "demo", "r1")
    places = [paths.config, paths.status, paths.checkpoint, paths.models, paths.logs]
    assert [place.relative_to(tmp_path).as_posix() for place in places] == [
        "artifacts/r1/config.json",
        "artifacts/r1/status.json",
        "artifacts/r1/checkpoint",
        "artifacts/r1/models",
        "artifacts/r1/logs",
    ]
    assert paths.table("rounds").relative_to(tmp_path).as_posix() == "rounds/experiment=demo/run_id=r1"


def test_new_ids_hold_the_whole_name_of_the_experiment_and_are_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = "superfednas_cifar10_sandwich_overlap".ljust(100, "x")
    ids = {new_run_id(tmp_path, longest) for _ in range(50)}
    assert len(ids) == 50
    assert all(re.fullmatch(rf"\d{{8}}-\d{{6}}-{longest}-[0-9a-f]{{6}}", run_id) for run_id in ids)
    assert all(run_paths(tmp_path, longest, f"{run_id}-12345").run_id for run_id in ids), "as long as a trial's id"
    for run_id in ids:
        RunWriter.create(tmp_path, "demo", run_id)
        break
    randoms = iter([b"\0\0\0", b"\0\0\0", b"\0\0\1"])
    monkeypatch.setattr(os, "urandom", lambda _: next(randoms))
    first = new_run_id(tmp_path, "demo")
    (tmp_path / "artifacts" / first).mkdir(parents=True)
    assert new_run_id(tmp_path, "demo") != first
    with pytest.raises(ValueError, match="experiment 'a/b' cannot be a file name"):
        new_run_id(tmp_path, "a/b")


def test_runs_are_found_by_id_or_its_beginning(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no run 'a' under .*; known runs: none"):
        find_run(tmp_path, "a")
    for experiment, run_id in (("x", "a1"), ("y", "a12"), ("x", "b1")):
        RunWriter.create(tmp_path, experiment, run_id)
    assert find_run(tmp_path, "b") == RunPaths(tmp_path, "x", "b1")
    assert find_run(tmp_path, "a1") == RunPaths(tmp_path, "x", "a1")  # the exact id, though another begins so
    assert find_run(tmp_path, "a12").experiment == "y"
    with pytest.raises(ValueError, match="run 'a' could be any of a1, a12: give more of its id"):
        find_run(tmp_path, "a")
    with pytest.raises(ValueError, match=r"no run 'c' under .*; known runs: a1, a12, b1"):
        find_run(tmp_path, "c")
    assert [run.run_id for run in list_runs(tmp_path)] == ["a1", "a12", "b1"]


def test_a_parameter_heavy_run_needs_no_long_names(tmp_path: Path) -> None:
    architecture = "-".join(str(i) for i in range(200))
    writer = RunWriter.create(tmp_path, "demo", new_run_id(tmp_path, "demo"))
    writer.add("candidates", architecture=architecture)
    writer.close()
    assert read_table(tmp_path, "candidates")["architecture"].tolist() == [architecture]
    assert max(len(path.name) for path in tmp_path.rglob("*")) <= 50


def test_a_model_is_kept_with_its_card(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "old", "demo", "r1")
    tensors = {"w": torch.arange(4.0), "count": torch.tensor(3)}
    model = save_model(paths, "tier-1", tensors, {"architecture": "1-2", "macs": 12})
    assert model.file == f"models/tier-1.{model.hash[:16]}.safetensors"
    assert (paths.artifacts / model.file).stat().st_size == model.size_bytes
    (tmp_path / "old").rename(tmp_path / "new")
    found, card = load_model(RunPaths(tmp_path / "new", "demo", "r1"), "tier-1")
    assert card == {"architecture": "1-2", "macs": 12}
    assert list(found) == ["w", "count"]
    assert torch.equal(found["w"], tensors["w"])
    assert torch.equal(found["count"], tensors["count"])


def test_equal_tensors_have_equal_files_in_every_run(tmp_path: Path) -> None:
    files = [
        save_model(RunPaths(tmp_path, "demo", run_id), "m", {"w": torch.ones(3)}, {"of": run_id})
        for run_id in ("a", "b")
    ]
    assert files[0] == files[1]
    assert isinstance(files[0], ModelFile)


def test_saving_again_replaces_and_a_crash_keeps_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths(tmp_path, "demo", "r1")
    save_model(paths, "m", {"w": torch.zeros(1)}, {"n": 0})
    save_model(paths, "m.best", {"w": torch.full((1,), 7.0)}, {"n": 7})
    replace, calls = os.replace, []

    def crash_on_second(source: str, target: str) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash_on_second)
        with pytest.raises(KeyboardInterrupt):
            save_model(paths, "m", {"w": torch.ones(1)}, {"n": 1})
    tensors, card = load_model(paths, "m")
    assert (tensors["w"].item(), card) == (0.0, {"n": 0})
    save_model(paths, "m", {"w": torch.ones(1)}, {"n": 1})
    tensors, card = load_model(paths, "m")
    assert (tensors["w"].item(), card) == (1.0, {"n": 1})
    assert load_model(paths, "m.best")[1] == {"n": 7}
    assert len(list(paths.models.iterdir())) == 4
    assert list_models(paths) == ["m", "m.best"]


def test_a_model_that_its_run_replaces_while_it_is_read_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path, "demo", "r1")
    model = save_model(paths, "m", {"w": torch.zeros(1)}, {"n": 0})

    def read(path: Path, *most_bytes: int) -> bytes:
        if path == paths.artifacts / model.file:
            save_model(paths, "m", {"w": torch.ones(1)}, {"n": 1})
        return read_file(path, *most_bytes)

    monkeypatch.setattr(checkpoint_module, "read_file", read)
    tensors, card = load_model(paths, "m")
    assert (tensors["w"].item(), card) == (1.0, {"n": 1})


def test_missing_and_damaged_models_are_named(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "demo", "r1")
    with pytest.raises(ValueError, match="run 'r1' has no model 'x'; its models: none"):
        load_model(paths, "x")
    model = save_model(paths, "m", {"w": torch.zeros(1)}, {})
    with pytest.raises(ValueError, match="its models: m"):
        load_model(paths, "x")
    (paths.artifacts / model.file).write_bytes(b"")
    with pytest.raises(ValueError, match=r"is damaged .its content does not have the recorded hash"):
        load_model(paths, "m")
    (paths.models / "m.json").write_text("[]")
    with pytest.raises(ValueError, match=r"m.json is damaged .it is not the card of a model"):
        load_model(paths, "m")
    with pytest.raises(ValueError, match="the card of model 'm' cannot be written as JSON"):
        save_model(paths, "m", {"w": torch.zeros(1)}, {"x": torch.ones(1)})
    with pytest.raises(ValueError, match="model 'a/b' cannot be a file name"):
        save_model(paths, "a/b", {"w": torch.zeros(1)}, {})
