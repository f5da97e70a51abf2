"""A small slice of every attack on what actors/README.md promises."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def attack(name: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Runs an attack; it must find nothing."""
    command = [sys.executable, "-m", f"fedloom.experiments.chaos.{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=500)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def test_two_resumes_at_once(tmp_path: Path) -> None:
    figures = attack("twice", tmp_path, "--times", "1")
    assert figures["one went on"] >= 1


def test_damaged_files(tmp_path: Path) -> None:
    figures = attack("corrupt", tmp_path, "--times", "8")
    assert figures["refused"] >= 2
    again = attack("corrupt", tmp_path, "--times", "8")
    assert again == figures  # continued where it ended


def test_configurations(tmp_path: Path) -> None:
    figures = attack("fuzz", tmp_path, "--times", "30")
    assert figures["refused"] > 10
    assert figures["accepted"] > 0


def test_full_disks(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("file systems cannot be made here")
    figures = attack("disk", tmp_path, "--times", "2")
    assert figures["times"] == 2


def test_load(tmp_path: Path) -> None:
    figures = attack("load", tmp_path, "--clients", "300", "--rounds", "25")
    assert figures["status"]["dropped"] > 0
    assert figures["status"]["timed_out"] > 0


@pytest.mark.ray
def test_killed_processes(tmp_path: Path) -> None:
    figures = attack("kill", tmp_path, "--times", "1")
    assert figures["identical"] == 1
