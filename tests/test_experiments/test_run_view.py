"""What a run looks like on terminals of several sizes, and that pipes and plain terminals get plain lines."""

import sys
from pathlib import Path

import pytest
from rich.console import ConsoleDimensions

from fedloom.experiments.show import RunView
from fedloom.experiments.terminal import rounds
from fedloom.platform.federation.loop import RoundProgress, Validated
from fedloom.platform.runs.logs import round_line
from fedloom.platform.runs.run import RunEnd
from tools.screens import PseudoTerminal, Terminal

STAGES = ["supernet", "search/tier1", "search/tier2", "evaluation"]
RUN = "20260101-000000-mine-abcdef"


def progress(stage: str, number: int, of: int, loss: float | None = 0.5, **more: object) -> RoundProgress:
    times = {"left_s": 65.0, "stage_left_s": 5.0}
    return RoundProgress(stage, number, of, loss, 0.25, 9, 10, 3_200_000, 12, 1.25, **{**times, **more})  # type: ignore[arg-type]


def a_run() -> list[RoundProgress]:
    """Four training rounds of which two were scored, searches, an evaluation."""
    return [
        progress("supernet", 0, 4, 2.25, validated=Validated(0.1, 0)),
        progress("supernet", 1, 4, validated=Validated(0.75, 2)),
        progress("supernet", 2, 4, 12345.6789),
        progress("supernet", 3, 4, validated=Validated(0.5, 4)),
        progress("search/tier1", 0, 2, None, counted="generations"),
        progress("search/tier1", 1, 2, None, counted="generations"),
        progress("search/tier2", 0, 5, None, counted="generations", stopped="nothing better for 3 generations"),
        progress("evaluation", 0, 1, validated=Validated(0.625, None), metric_of="test", left_s=0.0),
    ]


@pytest.mark.parametrize(("width", "height"), [(100, 30), (80, 24), (40, 12), (30, 6)])
def test_the_view_keeps_its_height_and_its_columns_and_no_line_is_cut(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, width: int, height: int
) -> None:
    terminal.resize(monkeypatch, width, height)
    view = rounds.Progress()
    view.stages(STAGES)
    heights, heads, ends = {len(view.lines(width, height - 1))}, set(), set()
    for each in a_run():
        view.round(each)
        lines = [line.plain for line in view.lines(width, height - 1)]
        heights.add(len(lines))
        assert max(map(len, lines)) <= width
        table = [line for line in lines if f"{each.round + 1}/{each.rounds_total} " in line and "━" not in line]
        heads |= {line for line in lines if "validation " in line and "accuracy" not in line}
        ends |= {len(line) for line in table if not line.startswith("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")}
    assert len(heights) == 1
    assert heights.pop() <= height - 1
    if height > 6:
        assert len(heads) == len(ends) == 1, "the columns stay where they are"


def test_the_screen_has_the_stages_the_latest_rounds_and_what_was_reached(terminal: Terminal) -> None:
    with terminal, RunView() as view:
        view.doing("starting Ray on this machine")
        view.stages(STAGES)
        view.started(RUN, "")
        for each in a_run()[:3]:
            view.round(each)
        view._area.refresh()  # type: ignore[union-attr]
        lines = [line.rstrip() for line in terminal.screen().display]
    assert lines[0] == f"run {RUN}"
    assert lines[1] == f"supernet         {30 * '━'}{10 * '─'} 3/4"
    assert lines[2:4] == [f"search           {40 * '─'}", f"evaluation       {40 * '─'}"]
    assert lines[5] == (
        "stage                round   clients     loss     clients' validation     down       up      time"
    )
    assert lines[6:9] == [
        "supernet               1/4      9/10   2.2500 train 0.2500              3.2 MB     12 B    1.25 s",
        "supernet               2/4      9/10   0.5000 train 0.2500     0.7500   3.2 MB     12 B    1.25 s",
        "supernet               3/4      9/10 1.23e+04 train 0.2500              3.2 MB     12 B    1.25 s",
    ]
    assert lines[13] == "supernet: validation accuracy 0.7500 after round 2"
    assert lines[14][1:].split() == ["supernet:", "round", "4", "of", "4", "0:00", "left", "1:05"]


def test_what_matters_stays_when_the_rounds_have_gone(terminal: Terminal) -> None:
    with terminal, RunView() as view:
        view.stages(STAGES)
        view.started(RUN, "one")
        for each in a_run():
            view.round(each)
        view.end(RunEnd(RUN, "interrupted"), "results")
    screen = terminal.screen()
    lines = [line.rstrip() for line in screen.display]
    assert lines[:3] == [
        f"run {RUN}",
        "reuses the supernet of run one: its configuration is the same up to there",
        "search/tier2 ends after round 1: nothing better for 3 generations",
    ]
    assert lines[3] == f"supernet         {40 * '━'} done in 0:01"
    assert any(line.startswith("interrupted after 0:0") for line in lines)
    assert not screen.cursor.hidden


def test_a_refused_run_leaves_nothing_but_the_refusal(terminal: Terminal) -> None:
    def refused() -> None:
        with terminal, RunView() as view:
            view.doing("loading torch and the configuration")
            raise ValueError("no such preset")

    with pytest.raises(ValueError, match="no such preset"):
        refused()
    screen = terminal.screen()
    assert "loading torch" in terminal.getvalue()
    assert not "".join(screen.display).strip()
    assert not screen.cursor.hidden


def test_a_smaller_window_is_drawn_anew_with_what_was_printed(terminal: Terminal) -> None:
    with terminal, RunView() as view:
        view.stages(STAGES)
        view.started(RUN, "")
        view.round(a_run()[0])
        view._area.refresh()  # type: ignore[union-attr]
        # The smaller terminal folds what it has shown: nothing is where it was.
        terminal.width, terminal.height = view.console.size = ConsoleDimensions(60, 20)
        assert not terminal.screen().display[0].startswith("run ")
        view._area.refresh()  # type: ignore[union-attr]
        lines = [line.rstrip() for line in terminal.screen().display]
    assert lines[0] == f"run {RUN}"
    assert lines[1].startswith("supernet         ━")
    assert lines.count("stage                round     loss validation      time") == 1
    assert max(map(len, lines)) <= 60


@pytest.mark.parametrize("plain", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"LINES": "5"}])
def test_who_asks_for_plain_lines_gets_a_line_per_round(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, plain: dict[str, str]
) -> None:
    for name, value in plain.items():
        monkeypatch.setenv(name, value)
    with terminal, RunView() as view:
        view.doing("starting Ray on this machine")
        view.stages(STAGES)
        view.started(RUN, "")
        for each in a_run():
            view.round(each)
    assert terminal.getvalue().splitlines() == [
        "starting Ray on this machine",
        f"run {RUN}",
        *map(round_line, a_run()),
    ]


def test_a_pipe_gets_a_line_per_round_and_nothing_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with RunView() as view:
        view.doing("starting Ray on this machine")
        view.stages(STAGES)
        view.started(RUN, "")
        for each in a_run():
            view.round(each)
    assert capsys.readouterr() == ("".join(f"{line}\n" for line in [f"run {RUN}", *map(round_line, a_run())]), "")


def command(folder: Path, *changes: str) -> list[str]:
    preset = [
        "experiment=fedavg_digits",
        "executor.kind=serial",
        "method.train.clients_per_round=2",
        f"results={folder}",
    ]
    return [sys.executable, "-m", "fedloom.experiments", "run", *preset, *changes]


def test_a_run_in_a_real_terminal_says_at_once_what_it_does_and_ends_cleanly_on_ctrl_c(tmp_path: Path) -> None:
    # A key without effect is a warning.
    with PseudoTerminal(command(tmp_path, "stop.metric=loss", "method.train.rounds=100000"), 80, 24) as run:
        run.read_until("loading torch")
        run.read_until("fedavg: round ")
        run.resize(60, 23)
        run.read_until("round     loss validation")  # without the columns that do not fit
        run.type(b"\x03")
        assert run.wait() == 130
        lines = run.lines()
    assert not run.screen.cursor.hidden
    assert lines[0].startswith("run ")
    assert lines[1].startswith("fedloom: stop.metric=loss has no effect"), "a warning appears above the view"
    assert len([line for line in lines if line.startswith("fedavg  ") and "─" in line]) == 1, "the view is there once"
    (ended,) = [i for i, line in enumerate(lines) if line.startswith("interrupted after")]
    assert lines[ended + 1].startswith("fedloom: run interrupted: the round in progress was not")
    assert run.written.endswith(b"\r\n")
