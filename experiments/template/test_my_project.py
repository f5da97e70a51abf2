"""Tests of this project: run `pytest` in its folder."""

from pathlib import Path
from typing import Any

from my_data import SENSORS, STATES, machines

import fedloom as fl
from fedloom.platform.averaging.conformance import check_server_rule
from fedloom.platform.data.config import DataConfig

PRESET = "my_preset.yaml"


def test_every_machine_has_readings_of_all_states() -> None:
    arrays = machines(DataConfig(), machines=3, readings=50)
    x, state, machine = arrays.train
    assert x.shape == (150, SENSORS)
    assert len({*zip(machine.tolist(), state.tolist(), strict=True)}) == 3 * STATES


def test_the_rule_obeys_the_laws_of_server_rules() -> None:
    check_server_rule("my_method:shrinking", {"server_lr": 0.5})


def test_the_preset_learns(tmp_path: Path) -> None:
    run = fl.run(PRESET, results=tmp_path, quiet=True)
    test = run.evaluations.query("split == 'test' and metric == 'accuracy' and client_id.isna()")
    assert test.value.min() > 0.8


def test_without_shorter_steps_it_is_fedavg(tmp_path: Path) -> None:
    def accuracies(**training: Any) -> list[float]:
        run = fl.run(PRESET, results=tmp_path, quiet=True, method={"train": {"rounds": 2, **training}})
        return run.evaluations.value.tolist()

    assert accuracies(options={"decay": False}) == accuracies(server="replace")
