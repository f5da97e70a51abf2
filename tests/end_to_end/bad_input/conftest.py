"""The command line called as a person calls it, and what a refusal must be: one line, exit code 2, nothing written."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fedloom.actors.address import LOOPBACK_SWITCH
from fedloom.experiments.cli import main

Call = Callable[..., int]
Refuse = Callable[..., str]

SERIAL = ["experiment=fedoras_digits", "executor.kind=serial", "tiers.paths=1000", "space.stem_channels=8"]

QUICK = [
    *SERIAL,
    "data.num_clients=8",
    "data.train_samples=320",
    "tiers.count=2",
    "method.train.rounds=2",
    "method.train.epochs=1",
    "method.train.clients_per_round=4",
    "method.train.evaluate_every=0",
    "method.search.population=4",
    "method.search.offspring=2",
    "method.search.budget=6",
    "method.finetune.rounds=1",
    "method.finetune.clients_per_round=2",
    "method.rand_init.rounds=0",
    "method.rand_init.clients_per_round=2",
]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOOPBACK_SWITCH, "0")  # so that what the command line sets is undone
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)


@pytest.fixture(scope="session")
def serial() -> Sequence[str]:
    """An experiment that is run in this process."""
    return SERIAL


@pytest.fixture(scope="session")
def quick() -> Sequence[str]:
    """The same, small enough to be run to its end."""
    return QUICK


@pytest.fixture(scope="session")
def call() -> Call:
    """Calls `fedloom ARGUMENTS` and gives the exit code."""

    def exit_code(*arguments: str) -> int:
        with pytest.raises(SystemExit) as ending:
            main(arguments)
        assert isinstance(ending.value.code, int)
        return ending.value.code

    return exit_code


@pytest.fixture(scope="session")
def the_line() -> Callable[[str], str]:
    """Gives the one line of a refusal from what was written to the standard error output."""

    def only_line(error_output: str) -> str:
        lines = [line for line in error_output.splitlines() if line.strip()]
        assert len(lines) == 1, error_output
        assert lines[0].startswith("fedloom: ")
        assert len(lines[0]) < 800
        return lines[0]

    return only_line


@pytest.fixture
def refusal(call: Call, the_line: Callable[[str], str], capfd: pytest.CaptureFixture[str]) -> Refuse:
    """Calls `fedloom ARGUMENTS`, which must be refused; gives the line."""

    def refused_line(*arguments: str) -> str:
        capfd.readouterr()  # what was written before is no part of the refusal
        code = call(*arguments)
        line = the_line(capfd.readouterr().err)
        assert code == 2
        return line

    return refused_line


@pytest.fixture
def refused(tmp_path: Path, refusal: Refuse) -> Refuse:
    """Calls `fedloom run ARGUMENTS`, which must be refused before anything is written; gives the line."""

    def run(*arguments: str, preset: Sequence[str] = SERIAL) -> str:
        results = tmp_path / "results"
        typed = {argument.partition("=")[0] for argument in arguments}  # no key may be typed with two values
        base = [o for o in (*preset, f"results={results}") if o.partition("=")[0] not in typed]
        line = refusal("run", *base, *arguments)
        assert not results.exists(), sorted(results.rglob("*"))
        return line

    return run


@pytest.fixture(scope="session")
def contents() -> Callable[[Path], dict[str, bytes]]:
    """Gives all files of a folder but its owner's number, to be compared with what they are later."""

    def read(folder: Path) -> dict[str, bytes]:
        files = [f for f in sorted(folder.rglob("*")) if f.is_file() and not f.name.startswith(".owner~")]
        return {str(f.relative_to(folder)): f.read_bytes() for f in files}

    return read
