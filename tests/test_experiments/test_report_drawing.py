"""Figures are drawn by copies of the process: the same bytes, and no copy's end costs one."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from matplotlib.figure import Figure

from fedloom.experiments.report import drawing
from fedloom.experiments.report.drawing import Drawing


def figure() -> Figure:
    made = Figure(layout="constrained")
    made.subplots().plot([1, 3, 2], label="accuracy")
    return made


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the figures that are drawn in this process; copies may be made whatever other tests left behind."""
    here: list[int] = []
    me, draw = os.getpid(), drawing._draw
    monkeypatch.setattr(drawing, "_may_copy", lambda: True)
    monkeypatch.setattr(drawing, "_draw", lambda f: (here.append(1) if os.getpid() == me else None, draw(f))[1])
    return here


def test_a_copy_draws_the_same_bytes(copies: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [Drawing(figure()).images for _ in range(2)]
    assert not copies
    monkeypatch.setattr(drawing, "_may_copy", lambda: False)
    assert Drawing(figure()).images == drawn[0] == drawn[1]
    assert len(copies) == 1
    assert drawn[0].png.startswith(b"\x89PNG")
    assert drawn[0].pdf.startswith(b"%PDF")


def test_a_figure_whose_copy_was_killed_is_drawn_here(copies: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    me, draw = os.getpid(), drawing._draw
    monkeypatch.setattr(
        drawing, "_draw", lambda f: draw(f) if os.getpid() == me else os.kill(os.getpid(), signal.SIGKILL)
    )
    drawn = Drawing(figure())
    assert drawn.images.png.startswith(b"\x89PNG")
    assert drawn.images is drawn.images
    assert len(copies) == 1


def test_more_figures_than_copies_may_run(copies: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "COPIES_PER_CPU", 0)
    assert len({d.images.pdf for d in [Drawing(figure()) for _ in range(3)]}) == 1
    assert not copies


def test_a_figure_that_cannot_be_drawn_raises_here_and_says_nothing_elsewhere(
    copies: list[int], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "COPIES_PER_CPU", 0.5)
    wrong = Figure()
    wrong.text(0, 0, "$\\nonsense{$")
    drawn = Drawing(wrong)
    with pytest.raises(ValueError, match="nonsense"):
        _ = drawn.images
    later = [Drawing(figure()) for _ in range(2)]  # they wait for it, and not in vain
    assert later[0].images == later[1].images
    assert capfd.readouterr().err == ""


STRUCK = """
import os, signal, sys, time
from matplotlib.figure import Figure
from fedloom.experiments.report import drawing

def asked_to_end(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGTERM, asked_to_end)
draw, me = drawing._draw, os.getpid()
drawing._draw = lambda figure: (time.sleep(20) if os.getpid() != me else None, draw(figure))[1]
drawings = [drawing.Drawing(Figure()) for _ in range(3)]
try:
    print("begun", flush=True)
    print(len(drawings[0].images.png))
except KeyboardInterrupt:
    print("ended", flush=True)
"""


@pytest.mark.parametrize("struck", [signal.SIGTERM, signal.SIGINT])
def test_copies_end_with_an_interrupted_command_and_say_nothing(struck: signal.Signals) -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", STRUCK],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert command.stdout is not None
    assert command.stdout.readline() == "begun\n"
    os.killpg(command.pid, struck)  # as Ctrl-C and Slurm do: all of them
    out, err = command.communicate(timeout=15)
    assert (command.returncode, out, err) == (0, "ended\n", "")
    with pytest.raises(ProcessLookupError):
        os.killpg(command.pid, 0)


UNREAD = """
import time
from matplotlib.figure import Figure
from fedloom.experiments.report import drawing

drawing._draw = lambda figure: drawing.Images(bytes(10**7), b"")
drawing.COPIES_PER_CPU = 100
drawings = [drawing.Drawing(Figure()) for _ in range(3)]
print("begun", flush=True)
time.sleep(60)
"""


def test_copies_that_nobody_reads_end_with_a_killed_command() -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", UNREAD], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert command.stdout is not None
    assert command.stdout.readline() == "begun\n"
    assert len(psutil.Process(command.pid).children()) == 3
    copies = psutil.Process(command.pid).children()
    command.kill()
    command.wait()
    _, alive = psutil.wait_procs(copies, timeout=10)
    for copy in alive:
        copy.kill()
    assert not alive
