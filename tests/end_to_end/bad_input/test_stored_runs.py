"""Runs that are unknown, damaged or to be resumed with another value are refused, and stay as they are."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fedloom.platform.results.lock import owned
from fedloom.platform.results.manifest import Manifest
from fedloom.platform.results.paths import list_runs
from fedloom.platform.results.tables import TABLES
from fedloom.platform.results.writer import TableParts

Refuse = Callable[..., str]


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, own_cache: Path, call: Callable[..., int], quick: Sequence[str]
) -> Path:
    """A results folder with one small finished run."""
    results = tmp_path_factory.mktemp("finished") / "results"
    assert call("run", "--json", *quick, f"results={results}") == 0
    return results


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "copied"))


@pytest.fixture
def resume_refused(refusal: Refuse, contents: Callable[[Path], dict[str, bytes]]) -> Refuse:
    """Calls `fedloom resume` for the run in a folder, or another one, with ARGUMENTS; gives the line."""

    def resume(results: Path, *arguments: str, run: str = "") -> str:
        before = contents(results)
        line = refusal("resume", run or list_runs(results)[0].run_id, *arguments, "--results", str(results))
        assert contents(results) == before, "a refused resume changed the results"
        return line

    return resume


def test_resuming_with_another_value_is_refused(finished: Path, resume_refused: Refuse) -> None:
    line = resume_refused(finished, "data.alpha=2")
    assert "data.alpha cannot change on resume" in line
    assert "executor.actors" in line


def test_a_configuration_edited_after_the_checkpoint_is_refused(copied: Path, resume_refused: Refuse) -> None:
    file = list_runs(copied)[0].config
    config = json.loads(file.read_text())
    config["data"]["alpha"] = 2.0
    file.write_text(json.dumps(config))
    assert f"{file} is not what its run wrote" in resume_refused(copied)
    Manifest(list_runs(copied)[0]).begin()  # by whoever edited it
    line = resume_refused(copied)
    assert "another configuration" in line
    assert "data.alpha 1.0 -> 2.0" in line


def test_a_stored_configuration_that_is_gone_or_damaged(copied: Path, resume_refused: Refuse) -> None:
    file = list_runs(copied)[0].config
    file.write_text(file.read_text()[:100])
    assert str(file) in resume_refused(copied)
    file.unlink()
    assert str(file) in resume_refused(copied)


@pytest.mark.parametrize("damage", ["tensors cut short", "tensors missing", "state cut short", "a bit flipped"])
def test_a_damaged_checkpoint_is_refused(copied: Path, resume_refused: Refuse, damage: str) -> None:
    paths = list_runs(copied)[0]
    row = TableParts(paths.table("runs"), TABLES["runs"], 1, Manifest.of_run(paths))
    row.replace([{**row.read_last().to_pylist()[0], "status": "interrupted"}])  # of a run that is done nothing is read
    folder = paths.checkpoint
    state, tensors = folder / "state.json", sorted(folder.glob("supernet-*.safetensors"))[0]
    content = tensors.read_bytes()
    if damage == "tensors cut short":
        tensors.write_bytes(content[:-10])
    elif damage == "tensors missing":
        tensors.unlink()
    elif damage == "a bit flipped":
        tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        state.write_bytes(state.read_bytes()[:-20])
    line = resume_refused(copied)
    assert f"{(state if damage == 'state cut short' else tensors).name} is damaged" in line
    assert "start a new run" in line


@pytest.mark.parametrize("content", ["", '{"state": "don', "[]"])
def test_a_damaged_status_does_not_keep_a_run_from_being_resumed(
    copied: Path, refusal: Refuse, call: Callable[..., int], content: str
) -> None:
    (paths,) = list_runs(copied)
    paths.status.write_text(content)
    with owned(paths.artifacts, f"run {paths.run_id}", copied, copied):
        assert "is at work in" in refusal("resume", paths.run_id, "--results", str(copied))
    assert call("resume", paths.run_id, "--results", str(copied)) == 0
    assert json.loads(paths.status.read_text())["state"] == "done"


def test_an_unknown_run(finished: Path, resume_refused: Refuse, refusal: Refuse) -> None:
    known = list_runs(finished)[0].run_id
    line = resume_refused(finished, run="20990101-nobody")
    assert "no run '20990101-nobody'" in line
    assert known in line
    for command in ("report", "status"):
        assert "no run '20990101-nobody'" in refusal(command, "20990101-nobody", "--results", str(finished))


@pytest.mark.parametrize(
    "command",
    [("search", "--macs", "1e5"), ("export", "--tier", "tier1"), ("report",), ("resume",)],
    ids=lambda command: command[0],
)
def test_every_command_refuses_a_run_with_a_changed_file(
    copied: Path, refusal: Refuse, call: Callable[..., int], capfd: pytest.CaptureFixture[str], command: Sequence[str]
) -> None:
    (run,) = list_runs(copied)
    costs = run.artifacts / "costs.json"
    content = bytearray(costs.read_bytes())
    content[len(content) // 2] ^= 1
    costs.write_bytes(content)
    name, *more = command
    line = refusal(name, run.run_id, *more, "--results", str(copied))
    assert "costs.json is not what its run wrote: expected " in line
    assert ", found " in line
    assert call("verify", run.run_id, "--results", str(copied)) == 2
    assert "costs.json is not what its run wrote: expected " in capfd.readouterr().out
