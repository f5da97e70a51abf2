"""The list of runs: ids can be copied and searched for at every width, and rounds count from 1."""

from dataclasses import replace

import pytest

from fedloom.experiments.status import ListedRun, round_of, run_lines
from fedloom.experiments.terminal import console
from fedloom.platform.results.paths import NO_NAMES, Names
from fedloom.platform.results.status import Status

RUN = "20261122-113000-superfednas_cifar10_sandwich_overlap-a1b2c3"
CAUSE = "supernet, round 3: client 3 (tier1) failed: OSError: bad [sector] on /dev/sda; try another disk"
STATUS = Status("failed", 1, "host", "supernet", 2, 60, 0.0, CAUSE)
FAILED = ListedRun(RUN, NO_NAMES, STATUS)
DONE = ListedRun(
    "20261122-b", Names("baseline", ("paper", "cifar")), replace(STATUS, state="done", round=60, message="")
)


@pytest.mark.parametrize("width", [20, 80, 110, 400, None])
@pytest.mark.parametrize("whole", [True, False])
def test_ids_and_names_are_whole_at_every_width(width: int | None, whole: bool) -> None:
    lines = run_lines([FAILED, DONE], width, whole=whole)
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["run", RUN, "20261122-b"]
    (done,) = (line for line in lines if "baseline" in line)
    assert done.split() == ["20261122-b", "baseline", "paper", "cifar", "done", "supernet", "60/60"]


def test_in_a_pipe_every_run_is_one_line_with_its_whole_message() -> None:
    heads, line = run_lines([FAILED], None, whole=False)
    assert heads.split() == ["run", "state", "stage", "round", "message"]
    assert line == f"{RUN}  failed  supernet  3/60   {CAUSE}"


def test_a_message_is_cut_to_the_terminal_below_the_run_if_there_is_no_room_beside_it() -> None:
    _, line, below = run_lines([FAILED], 80, whole=False)
    assert line == f"{RUN}  failed  supernet  3/60"
    assert below == f"    {CAUSE[:75]}…"
    assert len(below) == 80
    _, line = run_lines([FAILED], 120, whole=False)
    assert len(line) == 120
    assert line.endswith("…")
    assert run_lines([FAILED], 80, whole=True)[-1].strip() == CAUSE


def test_rounds_count_from_one() -> None:
    assert [round_of(replace(STATUS, round=r)) for r in (0, 2, 59, 60)] == ["1/60", "3/60", "60/60", "60/60"]
    assert round_of(replace(STATUS, stage="", round=0, rounds_total=0)) == ""


def test_brackets_and_colons_of_a_message_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    console().print("[red] [/red] family=[smallest,largest] :smile:")
    assert capsys.readouterr().out == "[red] [/red] family=[smallest,largest] :smile:\n"
