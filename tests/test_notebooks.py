"""The notebooks of the documentation: short, executed as they are stored, and what they show lives in one output."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import pytest

from fedloom.experiments.terminal.notebook import NotebookOutput
from tools.notebooks import FOLDER, executed

TASKS = {
    "first_steps": ("run", "compare", "plot", "load"),
    "own_data_and_method": ("own-data", "own-method"),
}
MOST_LINES = 12


@pytest.mark.parametrize("name", TASKS)
def test_each_task_of_a_notebook_takes_at_most_twelve_lines(name: str) -> None:
    lines = dict.fromkeys(TASKS[name], 0)
    for cell in nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells:
        for tag in cell.metadata.get("tags", ()):
            lines[tag.removeprefix("task-")] += sum(bool(line.strip()) for line in cell.source.splitlines())
    assert all(0 < count <= MOST_LINES for count in lines.values()), lines


@pytest.mark.parametrize("name", TASKS)
def test_a_notebook_runs_and_shows_what_is_stored(name: str, tmp_path: Path) -> None:
    file = FOLDER / f"{name}.ipynb"
    assert file.stat().st_size < 100_000
    stored = nbformat.read(file, as_version=4)
    again = executed(file, tmp_path)
    for before, now in zip(stored.cells, again.cells, strict=True):
        assert [_shown(o) for o in before.get("outputs", ())] == [_shown(o) for o in now.get("outputs", ())], now.source
        for output in now.get("outputs", ()):
            if output["output_type"] == "display_data" and output["data"].get("text/plain", "").startswith("run "):
                _check_progress(output["data"])
    assert {p.name for p in FOLDER.glob("*.ipynb")} == {f"{name}.ipynb" for name in TASKS}


def _shown(output: Mapping[str, Any]) -> Any:
    """What an output shows, without numbers, which differ between machines, and pictures."""
    if output["output_type"] == "stream":
        return output["name"], _without_numbers(output["text"])
    texts = {kind: _without_numbers(text) for kind, text in output["data"].items() if kind.startswith("text/")}
    # How far something was when its progress was last drawn depends on the machine.
    return output["data"].get("text/plain", "").split()[:1] if output["output_type"] == "display_data" else texts


def _without_numbers(text: str) -> str:
    text = re.sub(r"\d+-\d+-(\w+)-[0-9a-f]{6}\b", r"\1", text)
    return " ".join(re.sub(r"[-+]?[\d.,:]*\d[\d.:]*(e[-+]?\d+)?( [kMGT]?B?\b)?|NaN", "#", text).split())


def _check_progress(shown: Mapping[str, str]) -> None:
    """A run's progress is text alone, its last state, without control characters."""
    assert [*shown] == ["text/plain"]
    first, *_, last = lines = shown["text/plain"].splitlines()
    assert re.fullmatch(r"run \S+", first)
    assert any(re.fullmatch(r"\S+ +━+ done in [\d:]+", line) for line in lines)
    assert re.fullmatch(r"  fedloom report \S+", last)
    assert "\x1b" not in shown["text/plain"]


def test_of_many_printed_lines_the_first_and_the_latest_are_shown() -> None:
    output = NotebookOutput()
    output.view = lambda: ["━━━"]
    print(*map(str, range(100)), sep="\n", file=output)
    assert output.text().splitlines() == ["0", "... 59 more lines", *map(str, range(60, 100)), "━━━"]
