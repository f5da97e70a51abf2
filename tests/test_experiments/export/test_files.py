"""Exported files: they score what the run recorded, in a process that knows nothing of fedloom."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from fedloom.experiments.cli import main
from fedloom.experiments.export import export as exporting
from fedloom.experiments.export.export import export
from fedloom.experiments.export.formats import encode
from fedloom.experiments.export.selection import Wanted
from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.runs.run import make_serial, start_run
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


@pytest.mark.filterwarnings("error")
def test_weights_with_the_channels_last_are_exported_without_a_warning() -> None:
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).eval()
    x = torch.randn(2, 3, 8, 8)
    forward = encode(module, x, ["pt2"])["pt2"].forward
    torch.testing.assert_close(forward(x), module(x))


def test_safetensors_hold_networks_with_shared_layers_and_buffers_that_are_not_stored() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
            self.tied.weight = self.layer.weight
            self.twice = nn.Sequential(self.layer, self.tied, self.layer)
            self.layer.register_buffer("shift", torch.arange(4.0), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.twice(x) + self.layer.shift

    module, x = Shared().eval(), torch.randn(2, 4)
    assert torch.equal(encode(module, x, ["safetensors"])["safetensors"].forward(x), module(x))


def save_test_arrays(run: Any, path: Path) -> None:
    data = run.world.data
    with data.reading_test():
        x, y = data.central("test").tensors()
    np.savez(path, x=x.numpy(), y=y.numpy(), raw=np.load(data.dataset.path / "test_x.npy"))


def score_elsewhere(stems: list[tuple[Path, Path]]) -> list[dict[str, Any]]:
    pairs = json.dumps([(str(stem), str(arrays)) for stem, arrays in stems])
    done = subprocess.run([sys.executable, "-c", SCORE, pairs], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


@pytest.mark.slow
def test_files_alone_score_what_the_run_recorded(
    runs: Any, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", runs["text"].world.config.data.root)  # a stored folder is not used
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


def test_the_card_says_what_the_files_are(runs: Any, out: Path) -> None:
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


def test_a_network_of_several_inputs_takes_them_by_their_names(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "plugins"))
    training = TrainingConfig(rounds=1, clients_per_round=2, batch_size=16)
    config = RunConfig(
        experiment="parts",
        results=str(tmp_path),
        data=DataConfig("hidden_parts:hidden", num_clients=4, partition="iid"),
        space=SpaceConfig("module", build="hidden_parts:reader"),
        tiers=TiersConfig(count=1),
        method=FedAvgConfig(train=training),
    )
    run_id = start_run(config, make_serial)
    exported = export(tmp_path, run_id, Wanted(), out, ALL)
    card = exported.card
    assert "input" not in card
    shapes = {each["name"]: (each["shape"], each["dtype"]) for each in card["inputs"]}
    assert shapes == {"rows": (["batch", 8, 8], "float32"), "seen": (["batch", 8], "bool")}
    assert {kind: check["argmax_changed"] for kind, check in card["checks"].items()} == dict.fromkeys(ALL, 0)
    x = {"rows": torch.rand(3, 8, 8), "seen": torch.rand(3, 8) < 0.5}
    outputs = torch.export.load(exported.files["pt2"]).module()(**x)
    assert {name: tensor.shape for name, tensor in outputs.items()} == {"logits": (3, 10), "hidden": (3, 8, 32)}
    session = onnxruntime.InferenceSession(exported.files["onnx"], providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {name: tensor.numpy() for name, tensor in x.items()})
    torch.testing.assert_close(torch.from_numpy(logits), outputs["logits"], rtol=1e-4, atol=1e-5)


def test_files_are_the_same_whenever_they_are_written(runs: Any, tmp_path: Path) -> None:
    run = runs["none"]
    kinds = ("safetensors", "pt2")
    cards = [export(run.results, run.paths.run_id, Wanted(model="supernet"), tmp_path / d, kinds).card for d in "ab"]
    assert cards[0]["files"] == cards[1]["files"]


def test_a_tier_s_other_model_is_named(runs: Any, out: Path) -> None:
    run = runs["operators"]
    exported = export(run.results, run.paths.run_id, Wanted(tier="tier2", model="supernet_init"), out, ["safetensors"])
    assert exported.card["name"] == "tier2-supernet_init"
    named = export(run.results, run.paths.run_id, Wanted(model="tier2-supernet_init"), out, ["safetensors"])
    assert named.card["files"] == exported.card["files"]
    (score,) = (r for r in named.card["recorded"] if (r["split"], r["metric"]) == ("test", "accuracy"))
    assert score["value"] == run.recorded(named.card["architecture"]["id"], "supernet_init")


def test_the_page_loads_the_files_that_fedoras_writes(runs: Any, out: Path) -> None:
    run = runs["operators"]
    exported = export(run.results, run.paths.run_id, Wanted(tier="tier1"), out, ["safetensors"])
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "export.md").read_text()
    assert f"{exported.files['safetensors'].stem}.pt2" in page


def test_any_path_of_a_checkpointed_supernet_can_be_cut(runs: Any, out: Path) -> None:
    run = runs["operators"]
    card = export(run.results, run.paths.run_id, Wanted(architecture="2-1-0"), out, ["safetensors"]).card
    assert card["source"] == "checkpoint"
    assert card["architecture"]["operators"] == ["mb(1,2)", "ds(3,0.5)", "conv(1)"]


def test_the_json_of_the_command_is_the_card(runs: Any, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.slow
def test_recurrent_networks_are_exported_for_the_length_of_their_texts(
    runs: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file has been compared with the run's model; programs and ONNX have a step per token."""
    run = runs["recurrent"]
    monkeypatch.setenv("FEDLOOM_DATA", run.world.config.data.root)  # a stored folder is not used
    card = export(run.results, run.paths.run_id, Wanted(model="fedavg"), out, ["safetensors", "pt2", "onnx"]).card
    assert {kind: file.get("length") for kind, file in card["files"].items()} == {
        "safetensors": None,
        "pt2": 6,
        "onnx": 6,
    }
