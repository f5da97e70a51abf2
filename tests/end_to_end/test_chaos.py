"""A small slice of every attack on what docs/concepts/promises.md promises."""

import json
import os
import random
import shutil
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from chaos.attack import attack as run_attack
from chaos.interrupted import interrupted
from chaos.progress import reached, rounds_again, safe_again
from chaos.victims import SERIAL, TINY, called

pytestmark = pytest.mark.slow

TESTS = str(Path(__file__).resolve().parents[1])


def attack(name: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Runs an attack; it must find nothing."""
    command = [sys.executable, "-m", f"chaos.{name}", *arguments]
    path = os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=500)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the attacks that are compared with the same undisturbed run."""
    return tmp_path_factory.mktemp("chaos")


def test_an_attack_continues_where_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    struck: list[int] = []

    def blow(number: int, rng: random.Random) -> Counter[str]:
        struck.append(number)
        return Counter({"wrong": int(number == 3), f"drawn {rng.randrange(1000)}": 1})

    codes = []
    for times in (2, 5, 5):
        args = Namespace(folder=tmp_path, seed=1, times=times, seconds=None)
        with pytest.raises(SystemExit) as ended:
            run_attack("blows", blow, args, ("wrong",))
        codes.append(ended.value.code)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert struck == [0, 1, 2, 3, 4]
    assert codes == [0, 1, 1]
    assert lines[1] == lines[2]
    assert (lines[2]["times"], lines[2]["wrong"]) == (5, 1)


def test_two_resumes_at_once(shared: Path) -> None:
    figures = attack("twice", shared, "--times", "1")
    assert figures["one went on"] >= 1


def test_suspended_owners(shared: Path) -> None:
    figures = attack("suspended", shared, "--times", "1")
    assert figures["suspended"] == 1


def test_exchanged_files(shared: Path) -> None:
    figures = attack("exchanged", shared, "--times", "2")
    assert figures["refused"] == 2


def test_damaged_files(shared: Path) -> None:
    figures = attack("corrupt", shared, "--times", "4")
    assert figures["refused"] >= 1


def test_a_strangers_folder(shared: Path) -> None:
    figures = attack("stranger", shared, "--times", "5")
    assert figures["refused"] + figures["done"] == 5 * 9


def test_configurations(tmp_path: Path) -> None:
    figures = attack("fuzz", tmp_path, "--times", "12")
    assert figures["refused"] > 3
    assert figures["accepted"] > 0


def test_full_disks(shared: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("file systems cannot be made here")
    figures = attack("disk", shared, "--times", "1")
    assert figures["times"] == 1


def test_load_which_is_continued_by_the_next_call(tmp_path: Path) -> None:
    few = ("--clients", "60", "--rounds", "5")
    begun = attack("load", tmp_path, *few, "--seconds", "0.01")
    assert (begun["rounds"], begun["planned"]) == (1, 20)
    figures = attack("load", tmp_path, *few)
    assert (figures["rounds"], figures["missing"], figures["missing_rounds"]) == (6, 0, 0)
    assert min(figures["status"][fate] for fate in ("ok", "dropped", "timed_out")) > 0


@pytest.mark.parametrize(("every", "again", "safe"), [(1, (0, 1), 0), (5, (3, 4), 3)])
def test_rounds_that_are_computed_again_are_counted(
    every: int, again: tuple[int, ...], safe: int, tmp_path: Path
) -> None:
    """The run is killed in its fourth round: with a checkpoint every five rounds the first three are computed again."""
    template = interrupted(tmp_path, [*TINY, *SERIAL, f"checkpoint.every={every}"])
    before = reached(template.root)
    assert [each.safe for each in before] == [3]
    assert called(["resume", template.run_id, "--results", str(template.root)], tmp_path, "again").code == 0
    assert rounds_again(before) in again
    assert safe_again(template.root) == safe


def test_changed_inputs(tmp_path: Path) -> None:
    figures = attack("inputs", tmp_path, "--times", "3")
    assert figures["refused"] + figures["identical"] == 3


def test_killed_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Ray are killed in test_bitwise.py and test_failures.py; `make chaos` also kills the other commands."""
    monkeypatch.setenv("CHAOS_EXECUTOR", "serial")
    monkeypatch.setenv("CHAOS_SUBJECTS", "run")
    figures = attack("kill", tmp_path, "--times", "1")
    assert figures["identical"] == 1
