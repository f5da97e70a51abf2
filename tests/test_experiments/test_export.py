"""Exported files: they score what the run recorded, in a process that knows nothing of fedloom."""

import hashlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from fedloom.experiments.cli import main
from fedloom.experiments.export import export as exporting
from fedloom.experiments.export import selection
from fedloom.experiments.export.comparison import Agreement, Comparison, check_agreement, compare
from fedloom.experiments.export.export import export
from fedloom.experiments.export.selection import Wanted, check_wanted, target_label
from fedloom.platform.clients.execution import SerialExecutor
from fedloom.platform.clients.scoring import scored_subnet
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.building import build_world
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.federation.world import World
from fedloom.platform.methods.elastic.superfednas import ElasticTrainingConfig, SuperFedNASConfig
from fedloom.platform.methods.stages.tier_search import TierSearchConfig
from fedloom.platform.methods.tiered.fedoras import FedorASConfig, SupernetConfig
from fedloom.platform.results.paths import RunPaths, list_runs
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import start_run
from fedloom.platform.search.targets import TargetSearchConfig
from fedloom.platform.spaces.slices import parse_architecture
from fedloom.platform.spaces.space_config import SpaceConfig

ALL = ("safetensors", "pt2", "onnx")
MIDDLE = "d=0,1 e=.5"

SCORE = """
import json, sys
import numpy as np, onnxruntime, safetensors.torch, torch
torch.set_num_threads(1)

def correct(forward, x, y):
    size = 256 if y.ndim == 1 else 32
    return sum(int((forward(x[i:i + size]).argmax(1) == y[i:i + size]).sum()) for i in range(0, len(x), size))

answers = []
for stem, arrays in json.loads(sys.argv[1]):
    card, saved = json.load(open(stem + ".json")), np.load(arrays)
    x, y, how = saved["x"], saved["y"], card["preprocessing"]
    if how["kind"] == "image":
        mean, std = (np.array(how[key], dtype=np.float32).reshape(-1, 1, 1) for key in ("mean", "std"))
        assert np.allclose((saved["raw"] / np.float32(how["scale"]) - mean) / std, x, atol=1e-5)
    assert str(x.dtype) == card["input"]["dtype"]
    program = torch.export.load(stem + ".pt2").module()
    session = onnxruntime.InferenceSession(stem + ".onnx", providers=["CPUExecutionProvider"])
    forwards = {
        "pt2": lambda a: program(torch.from_numpy(a)).detach().numpy(),
        "onnx": lambda a: session.run([card["output"]["name"]], {card["input"]["name"]: a})[0],
    }
    shapes = {name: list(t.shape) for name, t in safetensors.torch.load_file(stem + ".safetensors").items()}
    counts = {kind: correct(forward, x, y) for kind, forward in forwards.items()}
    alone = {kind: len(forward(x[:1])) for kind, forward in forwards.items()}
    assert session.get_inputs()[0].shape == card["input"]["shape"]
    answers.append({"counts": counts, "targets": int((y != -100).sum()), "alone": alone, "shapes": shapes})
assert "fedloom" not in sys.modules and "ray" not in sys.modules
print(json.dumps(answers))
"""


@dataclass(frozen=True)
class Run:
    """A finished run and its world."""

    paths: RunPaths
    world: World

    @property
    def results(self) -> Path:
        return self.paths.root

    def recorded(self, architecture: str, model: str, split: str = "test") -> float:
        rows = read_table(self.results, "evaluations")
        own = (rows["architecture"] == architecture) & (rows["model"] == model) & (rows["split"] == split)
        own &= rows["client_id"].isna() & (rows["metric"] == "accuracy") & (rows["stage"] == "evaluation")
        return float(rows[own]["value"].iloc[-1])


def elastic_training(rounds: int) -> ElasticTrainingConfig:
    return ElasticTrainingConfig(
        rounds=rounds, clients_per_round=3, epochs=4, batch_size=16, lr=0.3, evaluate_every=1, evaluate=["smallest"]
    )


NO_SEARCH = TargetSearchConfig(samples=0)


def images(results: Path, norm: str, search: TargetSearchConfig = NO_SEARCH) -> RunConfig:
    space = SpaceConfig("resnet_elastic_small", input_shape=[1, 8, 8], stem_channels=8, norm=norm)
    space = replace(space, stage_widths=[8, 16], stage_strides=[1, 2], depths=[1, 1])
    return RunConfig(
        experiment=f"elastic_{norm}",
        results=str(results),
        data=DataConfig(num_clients=4, train_samples=320, test_samples=300, alpha=100),
        space=space,
        tiers=TiersConfig(count=1, paths=500),
        method=SuperFedNASConfig(
            family=["smallest", MIDDLE, "largest"], train=elastic_training(6 if norm == "none" else 2), search=search
        ),
    )


def texts(results: Path, root: Path) -> RunConfig:
    (root / "ptb").mkdir(parents=True)
    for part, lines in (("train", 60), ("test", 12)):
        (root / "ptb" / f"ptb.{part}.txt").write_text(" the cat sat on the mat \n a dog <unk> the cat \n" * lines)
    return RunConfig(
        experiment="elastic_text",
        results=str(results),
        data=DataConfig("ptb", str(root), partition="iid", num_clients=3, sequence_length=6),
        space=SpaceConfig("tcn_elastic", num_classes=9, input_shape=[6], channels=8, embedding_size=8),
        tiers=TiersConfig(count=1, paths=500),
        method=SuperFedNASConfig(family=["smallest"], train=elastic_training(1), search=NO_SEARCH),
    )


def paths_of_operators(results: Path) -> RunConfig:
    short = TrainingConfig(rounds=1, clients_per_round=2, batch_size=16, lr=0.05)
    operators = ["conv(1)", "ds(3,.5)", "mb(1,2)", "identity"]
    return RunConfig(
        experiment="operators",
        results=str(results),
        data=DataConfig(num_clients=4, train_samples=320, test_samples=300),
        space=SpaceConfig("cnn_digits", stem_channels=4, stage_layers=[1, 2], operators=operators),
        tiers=TiersConfig(count=2, paths=2000, rho_high=0.5),
        method=FedorASConfig(
            train=SupernetConfig(rounds=2, clients_per_round=4, epochs=1, batch_size=16),
            search=TierSearchConfig(population=4, offspring=2, budget=6),
            finetune=short,
            rand_init=replace(short, rounds=0),
        ),
    )


def trained(config: RunConfig) -> Run:
    worlds: list[World] = []

    def serial(world: World) -> SerialExecutor:
        worlds.append(world)
        return SerialExecutor(Worker(world.spec))

    run_id = start_run(config, serial)
    (paths,) = (run for run in list_runs(Path(config.results)) if run.run_id == run_id)
    return Run(paths, worlds[0])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    search = TargetSearchConfig(macs=[200e3], predictor="none", budget=3, population=2, tolerance=0.5)
    configs = {"none": images(folder / "none", "none", search), "batch": images(folder / "batch", "batch")}
    configs |= {"text": texts(folder / "text", folder / "root"), "operators": paths_of_operators(folder / "operators")}
    return {name: trained(config) for name, config in configs.items()}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "files" / "out"


def save_test_arrays(run: Run, path: Path) -> None:
    data = run.world.data
    with data.reading_test():
        x, y = data.central("test")
    np.savez(path, x=x.numpy(), y=y.numpy(), raw=np.load(data.dataset.path / "test_x.npy"))


def score_elsewhere(stems: list[tuple[Path, Path]]) -> list[dict[str, Any]]:
    pairs = json.dumps([(str(stem), str(arrays)) for stem, arrays in stems])
    done = subprocess.run([sys.executable, "-c", SCORE, pairs], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


@pytest.mark.slow
def test_files_alone_score_what_the_run_recorded(runs: dict[str, Run], out: Path, tmp_path: Path) -> None:
    wanted = [
        ("none", Wanted(architecture=MIDDLE), "supernet"),
        ("batch", Wanted(architecture=MIDDLE), "supernet"),
        ("text", Wanted(architecture="smallest"), "supernet"),
        ("operators", Wanted(tier="tier1"), "fine_tuned"),
    ]
    stems, expected, cards = [], [], []
    for number, (name, what, model) in enumerate(wanted):
        run, arrays = runs[name], tmp_path / f"{number}.npz"
        card = export(run.results, run.paths.run_id[:20], what, out / str(number), ALL).card
        save_test_arrays(run, arrays)
        stems.append((out / str(number) / card["name"], arrays))
        expected.append(run.recorded(card["architecture"]["id"], model))
        cards.append(card)
        for kind in ALL:
            # Where the exporting machine keeps its sources is nobody's business, and would change the hashes.
            content = (out / str(number) / f"{card['name']}.{kind}").read_bytes()
            assert str(Path(exporting.__file__).parents[2]).encode() not in content
    for answer, value, card, (name, _, _) in zip(score_elsewhere(stems), expected, cards, wanted, strict=True):
        assert {kind: count / answer["targets"] for kind, count in answer["counts"].items()} == {
            "pt2": value,
            "onnx": value,
        }
        assert [row["value"] for row in card["recorded"] if (row["split"], row["metric"]) == ("test", "accuracy")] == [
            value
        ]
        assert answer["alone"] == {"pt2": 1, "onnx": 1}
        space, choices = runs[name].world.space, tuple(card["architecture"]["choices"])
        module = space.build_subnet(choices)
        assert answer["shapes"] == {key: list(t.shape) for key, t in module.state_dict().items()}
    assert min(expected[:2]) > 0.2, "a model that knows nothing would hide what is wrong"


def test_the_card_says_what_the_files_are(runs: dict[str, Run], out: Path) -> None:
    run = runs["batch"]
    exported = export(run.results, run.paths.run_id, Wanted(architecture=MIDDLE), out)
    card = json.loads((out / f"{exported.card['name']}.json").read_text())
    assert card == exported.card
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in exported.files.values())
    for file in card["files"].values():
        content = (out / file["file"]).read_bytes()
        assert (hashlib.sha256(content).hexdigest(), len(content)) == (file["sha256"], file["size_bytes"])
    assert card["architecture"]["depths"] == [1, 2]
    assert card["architecture"]["expansions"] == [[0.5], [0.5, 0.5]]
    assert card["architecture"]["label"] == "d=0,1 e=0.5"
    assert card["input"] == {
        "name": "x",
        "shape": ["batch", 1, 8, 8],
        "trained_shape": [1, 8, 8],
        "dtype": "float32",
    }
    assert card["class_names"] == [str(digit) for digit in range(10)]
    assert card["preprocessing"]["scale"] == 16
    module = run.world.space.build_subnet(tuple(card["architecture"]["choices"]))
    assert card["parameters"] == sum(p.numel() for p in module.parameters())
    assert card["run_id"] == run.paths.run_id
    assert card["latency"]["median_s"] > 0
    assert card["latency"]["threads"] == 1
    # What is measured on the files now is what the run measured, running statistics estimated anew.
    assert card["measured"]["value"] == run.recorded(card["architecture"]["id"], "supernet", "validation")
    assert card["checks"]["pt2"]["max_abs_difference"] <= 1e-4
    assert card["checks"]["pt2"]["argmax_changed"] == 0
    assert card["checks"]["pt2"]["samples"] == 32


def test_files_are_the_same_whenever_they_are_written(runs: dict[str, Run], tmp_path: Path) -> None:
    run = runs["none"]
    kinds = ("safetensors", "pt2")
    cards = [export(run.results, run.paths.run_id, Wanted(model="supernet"), tmp_path / d, kinds).card for d in "ab"]
    assert cards[0]["files"] == cards[1]["files"]


def test_a_tier_s_other_model_is_named(runs: dict[str, Run], out: Path) -> None:
    run = runs["operators"]
    exported = export(run.results, run.paths.run_id, Wanted(tier="tier2", model="supernet_init"), out, ["safetensors"])
    assert exported.card["name"] == "tier2-supernet_init"
    named = export(run.results, run.paths.run_id, Wanted(model="tier2-supernet_init"), out, ["safetensors"])
    assert named.card["files"] == exported.card["files"]
    (score,) = (r for r in named.card["recorded"] if (r["split"], r["metric"]) == ("test", "accuracy"))
    assert score["value"] == run.recorded(named.card["architecture"]["id"], "supernet_init")


def test_any_path_of_a_checkpointed_supernet_can_be_cut(runs: dict[str, Run], out: Path) -> None:
    run = runs["operators"]
    card = export(run.results, run.paths.run_id, Wanted(architecture="2-1-0"), out, ["safetensors"]).card
    assert card["source"] == "checkpoint"
    assert card["architecture"]["operators"] == ["mb(1,2)", "ds(3,0.5)", "conv(1)"]


def test_the_json_of_the_command_is_the_card(
    runs: dict[str, Run], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs["none"]
    words = [run.paths.run_id, "--architecture", "smallest", "--out", str(out), "--results", str(run.results)]
    with pytest.raises(SystemExit) as ending:
        main(["export", "--json", *words, "--formats", "safetensors"])
    assert ending.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    card = json.loads(lines[0])
    paths = card.pop("paths")
    assert json.loads(Path(paths["json"]).read_text()) == card
    with pytest.raises(SystemExit):
        main(["export", *words, "--formats", "pt2"])
    # The earlier format is gone: the card of the name no longer speaks of it.
    assert not Path(paths["safetensors"]).exists()


# -- which model ------------------------------------------------------------------------------------------------------


def test_a_target_is_what_the_run_searched_for_it(runs: dict[str, Run], out: Path) -> None:
    run = runs["none"]
    rows = read_table(run.results, "evaluations")
    (found,) = rows[rows["model"] == "searched"]["architecture"].unique()
    card = export(run.results, run.paths.run_id, Wanted(target="macs=2e5"), out, ["safetensors"]).card
    assert (card["architecture"]["id"], card["name"]) == (found, "macs-200000")
    assert 100e3 < card["macs"] <= 200e3
    assert {row["model"] for row in card["recorded"]} >= {"searched"}
    with pytest.raises(ValueError, match=r"subnets have 112288 \(smallest\) to 287392 \(largest\) MACs"):
        export(run.results, run.paths.run_id, Wanted(target="macs=3e6"), out)


def test_a_target_that_the_run_did_not_search_for_is_searched_now(runs: dict[str, Run], out: Path) -> None:
    run = runs["none"]
    card = export(run.results, run.paths.run_id, Wanted(target="macs=2.5e5"), out, ["safetensors"]).card
    assert card["name"] == "macs-250000"
    assert 125e3 < card["macs"] <= 250e3


def test_a_tier_is_what_the_run_searched_for_it(
    runs: dict[str, Run], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs["none"]
    rows = pd.DataFrame({"model": ["searched", "searched", "supernet"], "tier": ["macs=1e+09", "tier1", "tier1"]})
    rows["architecture"] = ["0-0", "1-0", "0-1"]
    monkeypatch.setattr(selection, "read_table", lambda *_args, **_kwargs: rows)
    for wanted, text in ((Wanted(tier="tier1"), "1-0"), (Wanted(target="macs=1e9"), "0-0")):
        assert selection.choose(run.paths, run.world, wanted).architecture == parse_architecture(text)


@pytest.mark.parametrize(
    ("text", "label"), [("macs=1e+09", "macs=1000000000"), (" latency_s = 0.050", "latency_s=0.05")]
)
def test_a_target_is_read_as_the_tables_write_it(text: str, label: str) -> None:
    assert target_label(text) == label


@pytest.mark.parametrize("text", ["macs", "macs=", "macs=many", ""])
def test_a_target_without_a_limit_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="such as macs=1e9"):
        target_label(text)


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(),
        Wanted(tier="a", target="macs=1"),
        Wanted(architecture="smallest", model="supernet"),
        Wanted(target="macs=1", model="supernet"),
        Wanted(tier="a", architecture="smallest", model="x"),
    ],
)
def test_one_model_is_exported(wanted: Wanted) -> None:
    with pytest.raises(ValueError, match="give one of --tier"):
        check_wanted(wanted)


# -- what is refused --------------------------------------------------------------------------------------------------


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
        ("operators", ["--architecture", "small"], "give smallest, largest, or an option for each of the 3 decisions"),
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
    run: str, words: list[str], line: str, runs: dict[str, Run], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--results", str(runs[run].results), "--out", str(out)]
    assert line in refused([runs[run].paths.run_id, *words, *place], capsys)
    assert not out.parent.exists()


def test_an_unknown_run_lists_those_there_are(
    runs: dict[str, Run], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs["none"]
    line = refused(["2019", "--model", "x", "--results", str(run.results), "--out", str(out)], capsys)
    assert f"known runs: {run.paths.run_id}" in line


def test_a_run_without_a_model_says_where_it_stands(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = images(tmp_path / "results", "none")
    run = trained(replace(config, method=replace(config.method, train=elastic_training(1))))
    for file in [*run.paths.models.iterdir(), run.paths.checkpoint / "state.json"]:
        file.unlink()
    for words in (["--architecture", "smallest"], ["--model", "supernet"], ["--tier", "tier1"]):
        line = refused([run.paths.run_id, *words, "--results", str(run.results), "--out", str(out)], capsys)
        assert f"run {run.paths.run_id} keeps no model yet (it is done" in line
    assert not out.parent.exists()


def test_other_data_than_the_run_s_is_refused(runs: dict[str, Run], out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs["none"]

    def other(config: RunConfig, *costs: Any) -> World:
        return build_world(replace(config, data=replace(config.data, train_samples=300)), *costs)

    monkeypatch.setattr(exporting, "build_world", other)
    with pytest.raises(ValueError, match=f"is not what run {run.paths.run_id} was trained on"):
        export(run.results, run.paths.run_id, Wanted(model="supernet"), out)
    assert not out.parent.exists()


def test_missing_packages_are_named_with_the_command(
    runs: dict[str, Run], out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    run = runs["none"]
    words = [run.paths.run_id, "--model", "supernet", "--results", str(run.results), "--out", str(out)]
    line = refused([*words, "--formats", "onnx"], capsys)
    assert line == "fedloom: --formats onnx needs onnxscript: pip install 'fedloom[onnx]', or leave onnx out"
    assert not out.parent.exists()


def test_a_folder_that_cannot_be_written_is_refused(
    runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    run = runs["none"]
    words = [run.paths.run_id, "--model", "supernet", "--results", str(run.results)]
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert "cannot be written" in refused([*words, "--out", str(out)], capsys)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_leaves_nothing(runs: dict[str, Run], out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    runs: dict[str, Run], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, built = runs["none"], scored_subnet

    def wrong(*args: Any) -> torch.nn.Module:
        module = built(*args)
        with torch.no_grad():
            next(module.parameters()).mul_(1.01)
        return module

    monkeypatch.setattr(exporting, "scored_subnet", wrong)
    with pytest.raises(ValueError, match="outputs differ from the model's by"):
        export(run.results, run.paths.run_id, Wanted(architecture=MIDDLE), out)
    assert not out.parent.exists()


# -- the comparison ---------------------------------------------------------------------------------------------------


def test_differences_are_counted_by_hand() -> None:
    x, y = torch.tensor([[1.0, 0.0], [0.0, 3.0], [2.0, 1.0]]), torch.tensor([0, 1, 1])

    def shifted(x: Tensor) -> Tensor:
        return x + torch.tensor([0.0, 1.5])

    found = compare(lambda x: x, {"same": lambda x: x.clone(), "shifted": shifted}, (x, y))
    assert (found.correct, found.targets, found.samples) == (2, 3, 3)
    assert found.agreements["same"] == Agreement(0.0, 3.0, 0, 3, 3)
    assert found.agreements["shifted"] == Agreement(1.5, 3.0, 2, 3, 3)


def test_padding_does_not_count() -> None:
    logits = torch.tensor([[[1.0, 1.0], [0.0, 0.0]]])  # one text, two tokens to choose from, two positions
    y = torch.tensor([[0, -100]])
    found = compare(lambda x: x, {"other": lambda x: x.flip(1)}, (logits, y))
    assert (found.correct, found.targets, found.samples) == (1, 1, 1)
    assert found.agreements["other"] == Agreement(1.0, 1.0, 1, 1, 1)


def test_a_difference_that_is_no_number_is_not_forgotten() -> None:
    x, y = torch.ones(300, 2), torch.zeros(300, dtype=torch.int64)
    calls: Iterator[float] = iter([float("nan"), 0.0])
    found = compare(lambda x: x, {"nan": lambda x: x + next(calls)}, (x, y))
    assert np.isnan(found.agreements["nan"].max_abs_difference)
    with pytest.raises(ValueError, match="differ from the model's by nan"):
        check_agreement(found)


@pytest.mark.parametrize(
    ("found", "agrees"),
    [
        (Agreement(1e-4, 0.5, 0, 10, 10), True),
        (Agreement(1.1e-4, 0.5, 0, 10, 10), False),
        (Agreement(1.1e-4, 2.0, 0, 10, 10), True),  # of outputs up to 2
        (Agreement(0.0, 0.5, 1, 999, 999), False),
        (Agreement(0.0, 0.5, 1, 1000, 1000), True),
    ],
)
def test_only_rounding_is_forgiven(found: Agreement, agrees: bool) -> None:
    comparison = Comparison(1, 1, 1, {"pt2": found})
    if agrees:
        check_agreement(comparison)
    else:
        with pytest.raises(ValueError, match="nothing was written"):
            check_agreement(comparison)
