"""The installed command, as a person calls it, refuses in one line; what other commands refuse."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


def test_the_installed_command_refuses_in_one_line(tmp_path: Path, the_line: Callable[[str], str]) -> None:
    command = [str(Path(sys.executable).with_name("fedloom")), "run", "experiment=fedoras_digits", "data.alpha=0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "data.alpha=0: must be greater than 0" in the_line(done.stderr)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["describe", "space=cnn_cifr"], "did you mean 'cnn_cifar'?"),
        (["prepare", "dataset=cifar10"], "cifar10 not found under"),
    ],
)
def test_other_commands_refuse_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str], arguments: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "nothing"))
    assert expected in refusal(*arguments)
    assert not list(tmp_path.iterdir())
