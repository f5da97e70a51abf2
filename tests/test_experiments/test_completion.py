"""Pressing Tab completes commands, keys, presets and runs, in every shell that is installed here."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from fedloom.experiments.arguments import COMMANDS
from fedloom.experiments.completion import all_words, script
from tools.screens import PseudoTerminal

SHELL_FILES = {"bash": "fedloom.bash", "zsh": "_fedloom", "fish": "fedloom.fish"}
TYPED = [
    ("fedloom repro", "fedloom reproduce"),
    ("fedloom run experiment=fedavg_lor", "fedloom run experiment=fedavg_lora_gpt_shakespeare_small"),
    (
        "fedloom run seed=2 method.train.ser",
        "fedloom run seed=2 method.train.server=",
    ),
    ("fedloom run method.train.server=fedyo", "fedloom run method.train.server=fedyogi"),
    ("fedloom report 2026", "fedloom report 20260101-000000-mine-abcdef"),
    ("fedloom resume --take", "fedloom resume --take-over"),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts of all shells, and a run."""
    folder, words = tmp_path_factory.mktemp("shell"), all_words()
    for shell, name in SHELL_FILES.items():
        (folder / name).write_text(script(shell, words))
    (folder / "results" / "artifacts" / "20260101-000000-mine-abcdef" / "models").mkdir(parents=True)
    return folder


def test_every_command_and_key_is_there() -> None:
    words = all_words()
    assert set(words.options) == set(COMMANDS)
    assert {"run", "ablate", "keys", "demo"} <= set(words.overriding)
    assert words.values["method.finetune.server"][:2] == ("replace", "fedavgm")
    assert "fedoras_digits" in words.values["experiment"]
    assert "results" in words.values


@pytest.mark.parametrize(("typed", "expected"), TYPED)
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_tab_completes_in_a_real_shell(
    scripts: Path, shell: str, typed: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    monkeypatch.chdir(scripts)
    start = f"PS1='ready> '; source ./{SHELL_FILES['bash']}\n"
    if shell == "zsh":
        start = f"PS1='ready> '; autoload -U compinit && compinit -u -D; source ./{SHELL_FILES['zsh']}\n"
    options = ["--norc", "--noprofile"] if shell == "bash" else ["-f"]
    with PseudoTerminal([program, *options, "-i"], 160, 30) as screen:
        screen.type(start.encode())
        screen.read_until("ready> ")
        screen.type(typed.encode() + b"\t")
        begun_s = time.monotonic()
        screen.read_until(f"ready> {expected}", timeout_s=20)
        assert time.monotonic() - begun_s < 5, "nothing of Python is started"


@pytest.mark.parametrize(("typed", "expected"), TYPED)
def test_fish_knows_the_same(scripts: Path, typed: str, expected: str) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    command = ["fish", "--no-config", "-c", f"source {SHELL_FILES['fish']}; complete -C '{typed}'"]
    done = subprocess.run(command, cwd=scripts, capture_output=True, text=True, check=True)
    assert expected.rpartition(" ")[2] in [line.partition("\t")[0] for line in done.stdout.splitlines()]
