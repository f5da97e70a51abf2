"""The installed command, as a person calls it, refuses in one line."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "experiment=fedoras_digits", "data.alpha=0"], "data.alpha=0: must be greater than 0"),
        (["describe", "space=cnn_cifr"], "did you mean 'cnn_cifar'?"),
        (["prepare", "dataset=cifar10"], "cifar10 not found under"),
    ],
)
def test_the_installed_command_refuses_in_one_line(
    tmp_path: Path, the_line: Callable[[str], str], arguments: list[str], expected: str
) -> None:
    command = [str(Path(sys.executable).with_name("fedloom")), *arguments]
    environment = {**os.environ, "FEDLOOM_DATA": str(tmp_path / "nothing")}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2, done.stderr
    assert expected in the_line(done.stderr)
    assert not list(tmp_path.iterdir())
