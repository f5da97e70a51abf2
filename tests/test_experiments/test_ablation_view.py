"""What `fedloom ablate` says: lines where there is no terminal, a table in one, the plan, and the end."""

import json
import re
from argparse import Namespace
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedloom.experiments.ablation import command
from fedloom.experiments.ablation.launch import AblationEnd
from fedloom.experiments.ablation.view import MOST_LINES, TerminalView
from fedloom.experiments.store.ablations import Ablation, Trial
from fedloom.experiments.store.trials import End, TrialState
from fedloom.experiments.terminal import OK, of_run_end
from tools.screens import Terminal

ID = "20260101-000000-mine-abcdef"
ROUND = {"stage": "supernet", "round": 2, "rounds_total": 9, "wall_s": 1.0, "metric": 0.51234}


def make_ablation(trials: int) -> Ablation:
    planned = tuple(
        Trial(
            i, f"{ID}-{i:04d}", 1, {"lr": i / 4, "rule": "opa"}, (f"method.train.lr={i / 4}",), {"results": "results"}
        )
        for i in range(trials)
    )
    axes = {"lr": tuple(t.setting["lr"] for t in planned), "rule": ("opa",)}
    none = {"kind": "none", "stage": None}
    common: dict[str, Any] = {"reference": {}, "seeds": (1,), "figures": (), "scheduler": none, "overrides": ()}
    return Ablation(ID, "mine", "Why?", "tiny", axes, attempts=2, concurrent=None, created="", trials=planned, **common)


def states(ablation: Ablation, *names: str) -> list[TrialState]:
    """As named, the rest waiting."""
    given = [*names, *["waiting"] * (len(ablation.trials) - len(names))]
    return [
        TrialState(t, name, "why" if name != "waiting" else "") for t, name in zip(ablation.trials, given, strict=True)
    ]


def begun(ablation: Ablation, now: Sequence[TrialState]) -> tuple[TerminalView, StringIO]:
    """A view of the ablation, and what it writes."""
    view, written = TerminalView(), StringIO()
    view.console = Console(file=written, width=120, soft_wrap=True, highlight=False, color_system=None)
    view.planned(ablation, now, 2, sum(s.state != "done" for s in now))
    return view, written


def drawn(view: TerminalView, width: int = 100, height: int = 60) -> list[str]:
    """What a terminal of this size would show now."""
    return [line.plain for line in view.lines(width, height)]


# -- where there is no terminal ----------------------------------------------------------------------------------------


def test_without_a_terminal_there_is_a_line_per_beginning_and_end() -> None:
    ablation = make_ablation(3)
    view, written = begun(ablation, states(ablation, "done"))
    view.started(1)
    view.round(1, ROUND)
    view.round(1, {**ROUND, "round": 8, "loss": 1.25})
    view.ended(1, End("done"))
    view.started(2)
    view.ended(2, End("failed", "client 3 failed: no space"))
    view.close()
    lines = [re.sub(r"\d+:\d\d", "M:SS", line.rstrip()) for line in written.getvalue().splitlines()]
    assert lines == [
        f"ablation {ID}: 3 trials, 2 to run, up to 2 at once",
        "Why?",
        "trial    1  lr=0.25 rule=opa seed=1  running  M:SS",
        "trial    1  lr=0.25 rule=opa seed=1  done  supernet 9/9  loss 1.2500 metric 0.5123  M:SS",
        "trial    2  lr=0.5 rule=opa seed=1  running  M:SS",
        "trial    2  lr=0.5 rule=opa seed=1  failed  M:SS  client 3 failed: no space",
    ]


def test_a_trial_that_never_began_may_end() -> None:
    ablation = make_ablation(1)
    view, written = begun(ablation, states(ablation))
    view.ended(0, End("refused", "no such file"))
    assert written.getvalue().splitlines()[-1] == "trial    0  lr=0.0 rule=opa seed=1  refused  no such file"
    view.close()
    view.close()


def test_a_quiet_view_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    view = TerminalView(quiet=True)
    ablation = make_ablation(1)
    view.planned(ablation, states(ablation), 1, len(ablation.trials))
    view.started(0)
    view.round(0, ROUND)
    view.ended(0, End("done"))
    view.close()
    assert capsys.readouterr() == ("", "")


def test_a_view_may_be_closed_before_anything_was_planned() -> None:
    TerminalView(quiet=True).close()


# -- in a terminal -----------------------------------------------------------------------------------------------------


def test_a_terminal_has_a_line_per_trial_kept_up_to_date(terminal: Terminal) -> None:
    ablation = make_ablation(3)
    with terminal, TerminalView() as view:
        view.planned(ablation, states(ablation, "failed"), 2, 2)
        view.started(1)
        view.round(1, {**ROUND, "loss": 1.25})
        head, names, *lines = drawn(view)
        view.ended(1, End("died", "its node is gone"))
    assert re.fullmatch("─{0,9}━{10}─{20} 1/3 ended in 0:0.: 1 failed, 1 running, 1 waiting", head)
    assert names.split() == ["trial", "setting", "state", "at", "loss", "metric", "time"]
    assert [line.split() for line in (lines[0], lines[2])] == [
        ["0", "lr=0.0", "rule=opa", "seed=1", "failed"],
        ["2", "lr=0.5", "rule=opa", "seed=1", "waiting"],
    ]
    words = ["1", "lr=0.25", "rule=opa", "seed=1", "running", "supernet", "3/9", "1.2500", "0.5123"]
    assert lines[1].split()[:-1] in (words, words[:-1])
    assert names.index("metric") + len("metric") == lines[1].index("0.5123") + len("0.5123"), "figures are aligned"
    shown = [line.rstrip() for line in terminal.screen().display]
    assert "trial 1 (lr=0.25 rule=opa seed=1) died: its node is gone" in shown, "a failure appears above the view"
    assert any(re.match(r"1     lr=0.25 rule=opa seed=1 +died", line) for line in shown), "the last state stays"
    assert not any(line.startswith("trial    1") for line in shown), "no lines of a log beside the view"


@pytest.mark.parametrize(("width", "height"), [(100, 29), (80, 23), (40, 11)])
def test_the_view_of_an_ablation_fits_and_keeps_its_height(terminal: Terminal, width: int, height: int) -> None:
    ablation = make_ablation(60)
    with terminal, TerminalView() as view:
        view.planned(ablation, states(ablation), 2, 60)
        sizes = set()
        for index in range(20):
            view.started(index)
            view.round(index, {**ROUND, "stage": "a stage with a long name", "loss": 12345.678})
            if index:
                view.ended(index - 1, End("done"))
            lines = drawn(view, width, height)
            sizes.add((len(lines), max(map(len, lines[1:])) <= width))
            assert lines[1].split()[0] == "trial"
        assert sizes == {(height, True)}


def test_of_many_trials_those_at_work_are_shown_first() -> None:
    ablation = make_ablation(MOST_LINES + 15)
    last = MOST_LINES + 14
    view, _ = begun(ablation, states(ablation, *["done"] * 20))
    view.started(last)
    view.started(30)
    *lines, more = (line.split() for line in drawn(view)[2:])
    assert more == ["and", "15", "more"]
    shown = [int(line[0]) for line in lines]
    assert len(shown) == MOST_LINES
    assert shown == sorted(shown)
    assert {30, last} <= set(shown)
    assert set(range(20)) <= set(shown), "what has ended goes before what waits"
    assert set(shown) - {last} == set(range(MOST_LINES - 1))
    view.ended(last, End("done"))
    assert str(last) in {line.split()[0] for line in drawn(view, height=8)}, "of those that ended the latest"


# -- the plan and the end ----------------------------------------------------------------------------------------------


def arguments(**changes: Any) -> Namespace:
    usual: dict[str, Any] = {"plan": False, "json": False, "resume": None, "retry_failed": None}
    return Namespace(**{**usual, "changed_plugins": False, "take_over": False, "results": Path("r"), **changes})


def test_a_plan_is_shown_and_nothing_is_started(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.run_command(make_ablation(2), arguments(plan=True)) == OK
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "trial lr rule seed",
        "0 0.0 opa 1",
        "1 0.25 opa 1",
        "2 trials of tiny; leave out --plan to run them",
    ]
    assert command.run_command(make_ablation(1), arguments(plan=True, json=True)) == OK
    assert json.loads(capsys.readouterr().out) == {
        "ablation": "mine",
        "experiment": "tiny",
        "trials": [
            {"index": 0, "seed": 1, "setting": {"lr": 0.0, "rule": "opa"}, "overrides": ["method.train.lr=0.0"]}
        ],
    }
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "names", "expected"),
    [
        ("done", ["done", "stopped"], ["finished: .* (1 done, 1 stopped); tables, figures and page: fedloom report "]),
        (
            "failed",
            ["failed", "done", "died"],
            [
                "trial 0 (lr=0.0 rule=opa seed=1) failed: why",
                "trial 2 (lr=0.5 rule=opa seed=1) died: why",
                f"ablation failed (1 failed, 1 done, 1 died); go on with: fedloom ablate --retry-failed {ID} --results",
            ],
        ),
        (
            "interrupted",
            ["done", "waiting"],
            [f"ablation interrupted (1 done, 1 waiting); go on with: fedloom ablate --resume {ID} --results"],
        ),
    ],
)
def test_the_end_says_what_to_do(
    kind: str,
    names: list[str],
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ablation = make_ablation(len(names))
    end = AblationEnd(ID, kind, tuple(states(ablation, *names)))
    monkeypatch.setattr(command, "resume_ablation", lambda *_, **__: end)
    given = arguments(resume=ID, results=tmp_path)
    assert command.run_command(ablation, given) == of_run_end(kind)
    out, err = capsys.readouterr()
    first, *rest = out.splitlines()
    assert first == f"ablation {ID}: looking at {len(names)} trials"
    said = rest if kind == "done" else [line.removeprefix("fedloom: ") for line in err.splitlines()]
    assert (err == "") == (kind == "done")
    for line, start in zip(said, expected, strict=True):
        assert re.match(re.escape(start).replace(r"\.\*", ".*"), line), line
        assert str(tmp_path) in line or line.startswith("trial ")
    assert command.run_command(ablation, arguments(resume=ID, results=tmp_path, json=True)) == of_run_end(kind)
    summary = json.loads(capsys.readouterr().out)
    assert (summary["ablation_id"], summary["status"]) == (ID, kind)
    assert [t["state"] for t in summary["trials"]] == names
    assert sum(summary["counts"].values()) == len(names)


def test_of_many_failures_the_first_ten_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ablation = make_ablation(13)
    end = AblationEnd(ID, "failed", tuple(states(ablation, *["failed"] * 13)))
    monkeypatch.setattr(command, "retry_failed", lambda *_, **__: end)
    command.run_command(ablation, arguments(retry_failed=ID, results=tmp_path))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 12
    assert lines[10] == "fedloom: and 3 more"


def test_the_view_is_closed_when_the_ablation_is_refused(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> AblationEnd:
        raise ValueError("still running")

    monkeypatch.setattr(command, "start_ablation", refuse)
    with pytest.raises(ValueError, match="still running"), terminal:
        command.run_command(make_ablation(1), arguments())
    shown = terminal.screen()
    assert [line.rstrip() for line in shown.display if line.strip()] == [f"ablation {ID}: looking at 1 trials"]
    assert not shown.cursor.hidden
