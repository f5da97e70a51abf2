"""Figures are drawn by copies of the process: the same bytes, and no copy's end costs one."""

import gc
import os
import pickle
import signal
import subprocess
import sys

import psutil
import pytest
from matplotlib.figure import Figure
from matplotlib.transforms import Affine2D, TransformNode

from fedloom.experiments.report import drawing
from fedloom.experiments.report.content import Picture
from fedloom.experiments.report.drawing import drawn


def pictures(count: int) -> list[Picture]:
    made = []
    for i in range(count):
        figure = Figure(layout="constrained")
        figure.subplots().plot([1, 3, 2], label="accuracy")
        made.append(Picture(f"p{i}", "", "", figure))
    return made


@pytest.fixture
def drawn_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the figures that are drawn in this process; copies may be made whatever other tests left behind."""
    here: list[int] = []
    me, draw = os.getpid(), drawing.draw
    monkeypatch.setattr(drawing, "_may_fork", lambda: True)
    monkeypatch.setattr(drawing, "draw", lambda f: (here.append(1) if os.getpid() == me else None, draw(f))[1])
    monkeypatch.setattr(drawing, "_asked", lambda copies, figure: copies.submit(_drawn_by_copy, figure))
    return here


def _drawn_by_copy(figure: Figure) -> drawing.Images:
    return drawing.draw(figure)


def _killed(_: Figure) -> drawing.Images:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_tooltips_name_the_values_that_have_ticks_of_their_own_and_are_at_the_ends_of_bars() -> None:
    figure = drawing.new_figure((6.0, 3.0))
    left, right = figure.subplots(1, 2)
    left.barh([-0.2, 0.8], [4.0, 1.0], height=0.36, label="down")
    drawing.quiet(left, xlabel="GB")
    left.set_yticks([0, 1], ["training", "search"])
    right.bar([0.1], [50.0], 0.3)
    drawing.quiet(right, xlabel="alpha", ylabel="accuracy (%)")
    right.set_xticks([0.0, 2.0], ["0.1", "10"])
    spots = drawing.draw(figure).spots
    assert [spot.text for spot in spots] == [
        "down\nGB: 4\ntraining",
        "down\nGB: 1\nsearch",
        "alpha: 0.1\naccuracy (%): 50",
    ]
    ends = [figure.transFigure.inverted().transform(left.transData.transform(end)) for end in ((4, -0.2), (1, 0.8))]
    assert [(spot.x, 1 - spot.y) for spot in spots[:2]] == [pytest.approx(tuple(end), abs=1e-3) for end in ends]


def test_copies_draw_the_same_bytes(drawn_here: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    by_copies = [images for _, images in drawn(pictures(5))]
    assert not drawn_here
    monkeypatch.setattr(drawing, "_may_fork", lambda: False)
    assert {*by_copies} == {images for _, images in drawn(pictures(1))}
    assert len(drawn_here) == 1
    assert by_copies[0].png.startswith(b"\x89PNG")
    assert by_copies[0].pdf.startswith(b"%PDF")


def test_what_depends_on_a_transform_is_found_in_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of another process could be those of other transforms, whose texts would then stand elsewhere."""
    monkeypatch.setattr(TransformNode, "__setstate__", drawing.restore_transform)
    base = Affine2D()
    whole = base + Affine2D().scale(2.0)
    assert whole.transform((1.0, 1.0)).tolist() == [2.0, 2.0]
    copied, copy_of_base = pickle.loads(pickle.dumps((whole, base)))
    assert id(copied) in copy_of_base._parents
    copy_of_base.translate(1.0, 0.0)
    assert copied.transform((1.0, 1.0)).tolist() == [4.0, 2.0]
    del copied
    gc.collect()
    assert not copy_of_base._parents


def test_figures_whose_copies_were_killed_are_drawn_here(
    drawn_here: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "_asked", lambda copies, figure: copies.submit(_killed, figure))
    found = drawn(pictures(2))
    assert [picture.name for picture, _ in found] == ["p0", "p1"]
    assert all(images.png.startswith(b"\x89PNG") for _, images in found)
    assert len(drawn_here) == 2


def test_a_figure_that_cannot_be_drawn_raises_and_says_nothing_elsewhere(
    drawn_here: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = Figure()
    wrong.text(0, 0, "$\\nonsense{$")
    with pytest.raises(ValueError, match="nonsense"):
        drawn([Picture("wrong", "", "", wrong), *pictures(2)])
    assert capfd.readouterr().err == ""


SLOW = """
import os, signal, sys, time
from matplotlib.figure import Figure
from matplotlib.transforms import Affine2D, TransformNode
from fedloom.experiments.report import drawing
from fedloom.experiments.report.content import Picture

def asked_to_end(*_):
    raise KeyboardInterrupt

def slow(figure):
    print("begun", flush=True)
    time.sleep(20)

signal.signal(signal.SIGTERM, asked_to_end)
drawing.draw = slow
try:
    drawing.drawn([Picture("p", "", "", Figure())])
except KeyboardInterrupt:
    print("ended", flush=True)
"""


@pytest.mark.parametrize("struck", [signal.SIGTERM, signal.SIGINT])
def test_copies_end_with_an_interrupted_command_and_say_nothing(struck: signal.Signals) -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", SLOW],
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


def test_copies_end_with_a_killed_command() -> None:
    command = subprocess.Popen([sys.executable, "-c", SLOW], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert command.stdout is not None
    assert command.stdout.readline() == "begun\n"
    copies = psutil.Process(command.pid).children()
    assert copies
    command.kill()
    command.wait()
    _, alive = psutil.wait_procs(copies, timeout=10)
    for copy in alive:
        copy.kill()
    assert not alive
