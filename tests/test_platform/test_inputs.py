"""A run's data and input files: recorded, kept, and the same for all that goes on with it."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import nn

from fedloom.experiments.runs.search import load_trained
from fedloom.experiments.verify import Verified, verified
from fedloom.platform.federation.config import BudgetConfig, RunConfig, TiersConfig
from fedloom.platform.federation.loop import InterruptedRunError
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.results.manifest import Manifest, problems
from fedloom.platform.results.paths import RunPaths, list_runs
from fedloom.platform.results.tables import TABLES, read_table
from fedloom.platform.results.writer import TableParts
from fedloom.platform.runs.run import Watcher, make_serial, resume_run, start_run, stored_world
from fedloom.platform.runs.run_files import begun_with, check_alike, input_files
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.device_files import write_device_table
from fedloom.tiers.devices import generate_device_table

Make = Callable[..., RunConfig]


@pytest.fixture(autouse=True)
def originals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a stored run's data is looked for, wherever it was when the run began."""
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))


@pytest.fixture
def tiny_config(tiny_config: Make) -> Make:
    """Runs of FedAvg: what is compared is the same for every method."""
    train = TrainingConfig(rounds=2, clients_per_round=3, batch_size=16)
    return partial(tiny_config, method=FedAvgConfig(architecture="0-1-2", train=train, evaluate=False))


def write_data(file: Path, add: int = 0) -> None:
    """Some digits as an .npz file; `add` changes their pixels."""
    digits = load_digits()
    x, y = digits.images[:500].astype(np.uint8) + np.uint8(add), digits.target[:500]
    file.parent.mkdir(exist_ok=True)
    np.savez(file, train_x=x[:400], train_y=y[:400], test_x=x[400:], test_y=y[400:])


def write_table(file: Path, seed: int = 1) -> None:
    write_device_table(file, generate_device_table(10, np.random.default_rng(seed)))


def on_npz(config: RunConfig, root: Path) -> RunConfig:
    write_data(root / "digits.npz")
    data = replace(config.data, dataset="npz", options={"path": "digits.npz"}, root=str(root))
    return replace(config, data=replace(data, train_samples=None, test_samples=None))


def interrupted(config: RunConfig) -> RunPaths:
    with pytest.raises(InterruptedRunError):
        start_run(config, make_serial, Watcher(should_stop=lambda: True))
    (paths,) = list_runs(Path(config.results))
    return paths


def contents(config: RunConfig) -> dict[Path, bytes]:
    return {
        p: p.read_bytes() for p in Path(config.results).rglob("*") if p.is_file() and not p.name.startswith(".owner")
    }


def refused(config: RunConfig, paths: RunPaths) -> str:
    """Why a run is not resumed; nothing of it has changed."""
    before = contents(config)
    with pytest.raises(ValueError, match=paths.run_id) as error:
        resume_run(config, paths.run_id, make_serial)
    assert contents(config) == before
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("how", ["rewritten", "another root"])
def test_a_run_is_not_resumed_on_other_data(how: str, tiny_config: Make, tmp_path: Path) -> None:
    config = on_npz(tiny_config(), tmp_path / "data")
    paths = interrupted(config)
    assert verified(paths) == Verified(paths.run_id, ())
    other = config
    if how == "rewritten":
        write_data(tmp_path / "data" / "digits.npz", add=1)
    else:
        write_data(tmp_path / "elsewhere" / "digits.npz", add=1)
        other = replace(config, data=replace(config.data, root=str(tmp_path / "elsewhere")))
    assert f"the data of npz is not what run {paths.run_id} was trained on" in refused(other, paths)
    assert verified(paths).whole == (how == "another root"), "verify looks where the run looked"
    if how == "rewritten":
        (tmp_path / "data" / "digits.npz").unlink()
        (remark,) = verified(paths).remarks
        assert remark == "its data was not compared: data set 'npz': digits.npz not found; set data.options.path"
    write_data(tmp_path / "elsewhere" / "digits.npz")  # the same data at another place
    resume_run(replace(config, data=replace(config.data, root=str(tmp_path / "elsewhere"))), paths.run_id, make_serial)


def test_a_supernet_is_not_searched_on_other_data(elastic_config: Make, tmp_path: Path) -> None:
    config = on_npz(elastic_config(train={"rounds": 1}), tmp_path / "data")
    run_id = start_run(config, make_serial)
    assert load_trained(Path(config.results), run_id).run_id == run_id
    write_data(tmp_path / "data" / "digits.npz", add=1)
    with pytest.raises(ValueError, match=f"the data of npz is not what run {run_id} was trained on"):
        load_trained(Path(config.results), run_id)


def with_table(config: RunConfig, file: Path) -> RunConfig:
    write_table(file)
    return replace(config, tiers=replace(config.tiers, device_table=str(file)))


def test_a_changed_device_table_is_refused_and_its_copy_restores_it(tiny_config: Make, tmp_path: Path) -> None:
    file = tmp_path / "devices.csv"
    config = with_table(tiny_config(), file)
    paths = interrupted(config)
    (copy,) = (paths.artifacts / "inputs").iterdir()
    assert copy.name.endswith("-devices.csv")
    assert str(copy.relative_to(paths.root)) in (paths.artifacts / "manifest.json").read_text()
    write_table(file, seed=2)
    what = f"{file}, with which run {paths.run_id} began, has changed since then"
    line = f"{what}: restore it from {copy}, or start a new run"
    assert refused(config, paths) == line
    assert verified(paths).problems == (line,)
    file.unlink()
    line = line.replace("has changed since then", "is not there")
    assert refused(config, paths) == line
    assert verified(paths) == Verified(paths.run_id, (), (line,)), "a run may be looked at elsewhere"
    file.write_bytes(copy.read_bytes())
    resume_run(config, paths.run_id, make_serial)
    assert problems(paths) == []
    copy.write_bytes(b"changed")
    assert len(problems(paths)) == 1


def share_of(round: int, rng: np.random.Generator, *, path: str) -> float:
    """A budget of one's own that reads a file."""
    del round, rng
    return float(Path(path).read_text())


def test_a_file_that_code_of_ones_own_is_given_is_an_input(tiny_config: Make, tmp_path: Path) -> None:
    file = tmp_path / "shares.txt"
    file.write_text("0.75")
    budget = BudgetConfig(f"{__name__}:share_of", options={"path": str(file)})
    config = tiny_config(tiers=TiersConfig(count=2, paths=2000, rho_high=0.5, budget=budget))
    paths = interrupted(config)
    file.write_text("0.5")
    assert refused(config, paths).startswith(f"{file}, with which run {paths.run_id} began, has changed since then")


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def test_the_files_that_an_index_of_weights_lists_are_inputs(tiny_config: Make, tmp_path: Path) -> None:
    index, shard = tmp_path / "model.safetensors.index.json", tmp_path / "model-00001-of-00001.safetensors"
    index.write_text(json.dumps({"weight_map": {"1.bias": shard.name}}))
    save_file({"1.bias": torch.zeros(10)}, shard)
    space = SpaceConfig("module", build=f"{__name__}:linear", weights=str(index))
    config = tiny_config(space=space, tiers=TiersConfig(count=1))
    config.method.architecture = "largest"
    paths = interrupted(config)
    assert verified(paths).whole
    save_file({"1.bias": torch.ones(10)}, shard)
    assert refused(config, paths).startswith(f"{shard}, with which run {paths.run_id} began, has changed since then")
    save_file({"1.bias": torch.zeros(10)}, shard)
    index.unlink()
    (line,) = verified(paths).remarks
    assert line.startswith(f"{index}, with which run {paths.run_id} began, is not there"), "its shard is"


def test_words_are_no_files(tiny_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("static", "cnn_digits", "digits.npz", "devices.csv"):
        (tmp_path / name).write_text("x")
    config = tiny_config(tiers=TiersConfig(device_table="devices.csv"))
    config.data.dataset, config.data.options = "npz", {"path": "digits.npz"}
    assert input_files(asdict(config)) == {"devices.csv": Path("devices.csv")}, "data has a hash of its own"


def test_a_run_of_an_earlier_version_is_compared_in_what_it_recorded(tiny_config: Make, tmp_path: Path) -> None:
    config = with_table(on_npz(tiny_config(), tmp_path / "data"), tmp_path / "devices.csv")
    paths = interrupted(config)
    manifest = Manifest.of_run(paths)
    rows = TableParts(paths.table("runs"), TABLES["runs"], 1, manifest)
    rows.replace([{**rows.read_last().to_pylist()[0], "dataset_hash": None, "inputs": None}])
    manifest.settle()
    write_table(tmp_path / "devices.csv", seed=2)
    assert stored_world(paths, config)
    assert verified(paths) == Verified(paths.run_id, ())
    write_data(tmp_path / "data" / "digits.npz", add=1)
    assert "the data of npz is not what run" in refused(config, paths)
    assert not verified(paths).whole


def test_trials_that_are_compared_begin_with_the_same_data_and_files(tiny_config: Make, tmp_path: Path) -> None:
    file, root = tmp_path / "devices.csv", tmp_path / "data"
    config = with_table(on_npz(tiny_config(), root), file)
    paths = interrupted(config)
    row = read_table(paths.root, "runs").iloc[-1]
    known = begun_with([paths])
    assert known["data.dataset=npz data.options={'path': 'digits.npz'}"] == (row["dataset_hash"], paths.run_id)
    assert known[str(file)] == (json.loads(row["inputs"])[str(file)], paths.run_id)
    assert begun_with([RunPaths(paths.root, "tiny", "another")]) == {}, "not begun"
    other = replace(config, seed=7)

    def check() -> None:
        check_alike(asdict(other), build_world(other).data, known)

    check()
    write_table(file, seed=2)
    with pytest.raises(ValueError, match=rf"devices.csv is not what run {paths.run_id} began with, so the two"):
        check()
    write_table(file)
    write_data(root / "digits.npz", add=1)
    with pytest.raises(ValueError, match=rf"data.dataset=npz data.options=.* is not what run {paths.run_id} began"):
        check()


def test_seeds_whose_images_are_turned_otherwise_are_other_data_sets(tiny_config: Make, tmp_path: Path) -> None:
    root = tmp_path / "data"
    config = on_npz(tiny_config(), root)
    config = replace(config, data=replace(config.data, rotation=45.0))
    known = begun_with([interrupted(config)])
    other = replace(config, seed=7)
    check_alike(asdict(other), build_world(other).data, known)
    write_data(root / "digits.npz", add=1)
    with pytest.raises(ValueError, match=r"data.rotation=45.0 .* seed=1 is not what run"):
        check_alike(asdict(config), build_world(config).data, known)
