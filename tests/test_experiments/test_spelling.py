"""Misspelt keys and names are found without loading torch."""

import subprocess
import sys

import pytest

from fedloom.experiments.runs.configuration import compose_config
from fedloom.experiments.runs.presets import experiments, method_in
from fedloom.experiments.runs.spelling import check_spelling, keys_of, methods
from fedloom.platform.methods.registry import METHODS
from fedloom.platform.settings import settings_of

PICKED = ("experiment", "method")
MISTYPED = """
import sys
from fedloom.experiments.cli import main
try:
    main(sys.argv[1:])
finally:
    print("torch" in sys.modules)
"""


def test_every_method_and_all_of_its_keys_are_known() -> None:
    assert sorted(methods()) == sorted(METHODS)
    for name in METHODS:
        settings = {setting.key for setting in settings_of(compose_config([f"method={name}"]))}
        assert settings <= set(keys_of(name))


def test_keys_of_a_preset_s_method_pass() -> None:
    for preset in experiments():
        check_spelling(
            [f"experiment={preset}", *(f"{key}=1" for key in keys_of(method_in(preset)) if key not in PICKED)]
        )
    check_spelling(["+space.options.depth=1", "+method.train.options.mu=2", "data.options.path=x"])


def test_code_and_presets_of_one_s_own_may_bring_other_keys() -> None:
    check_spelling(["method=mine:METHOD", "method.mine=1"])
    check_spelling(["experiment=./mine.yaml", "method.mine=1"])
    with pytest.raises(ValueError, match=r"unknown configuration key 'method\.mine'"):
        check_spelling(["method=fedavg", "method.mine=1"])


@pytest.mark.parametrize("command", ["run", "describe", "prepare", "ablate"])
@pytest.mark.parametrize("mistake", ["experiment=fedoras_digitz", "method=fedavvg", "data.alfa=3"])
def test_a_typo_is_told_before_torch_is_loaded(command: str, mistake: str) -> None:
    given = ["ablation=beta_schedule"] if command == "ablate" else []
    done = subprocess.run(
        [sys.executable, "-c", MISTYPED, command, *given, mistake], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr
    assert "did you mean" in done.stderr


def test_a_number_is_neither_true_nor_false() -> None:
    check_spelling(["space.stage_widths.0=8", "dry_run='true'", "experiment=fedavg_digits", "experiment=spider_digits"])
    check_spelling(["executor.resident=1", "dry_run=False", "tensorboard=${dry_run}", "space.tied=null"])
    with pytest.raises(ValueError, match=r"^executor\.resident=2: must be true or false$"):
        check_spelling(["executor.resident=2"])
