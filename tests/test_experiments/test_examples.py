"""The examples compute what they say."""

from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedloom.experiments.cli import main
from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.methods.fedavg import FedAvgConfig

EXAMPLES = Path(__file__).resolve().parents[2] / "experiments" / "examples"


def test_fedavg_by_hand_has_the_weights_of_the_preset_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand = SourceFileLoader("fedavg_by_hand", str(EXAMPLES / "fedavg_by_hand.py")).load_module()
    settings = ["tiers.count=1", "executor.stack_clients=off", "executor.chunk_size=10"]
    assert " ".join(settings) in (by_hand.__doc__ or "")
    preset = compose_config(["experiment=fedavg_digits"]).method
    assert isinstance(preset, FedAvgConfig)
    assert (preset.train.rounds, preset.train.epochs) == (by_hand.ROUNDS, by_hand.EPOCHS)
    monkeypatch.setattr(by_hand, "EPOCHS", 2)
    few = ["method.train.rounds=2", "method.train.epochs=2", "method.train.evaluate_every=0", "executor.kind=serial"]
    with pytest.raises(SystemExit) as ended:
        main(["run", "experiment=fedavg_digits", *settings, *few, f"results={tmp_path}", "--json"])
    assert ended.value.code == 0
    (model,) = tmp_path.glob("artifacts/*/models/*.safetensors")
    expected, weights = load_file(model), by_hand.train(2)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert 0.1 < by_hand.test_accuracy(weights) <= 1
