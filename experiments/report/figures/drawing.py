"""Drawing of figures beside the other work of a report: a figure's PNG and PDF take a second and wait for nothing."""

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import ClassVar

from matplotlib.figure import Figure

from fedloom.experiments.report.figures.style import pdf, png
from fedloom.experiments.report.parts.picture import Images

COPIES_PER_CPU = 2
PATIENCE_S = 60.0
"""Seconds after which a figure that nobody delivered is drawn here."""


class Drawing:
    """A figure that is being drawn by a copy of this process, or will be drawn here when it is asked for."""

    _running: ClassVar[deque["Drawing"]] = deque()

    def __init__(self, figure: Figure) -> None:
        self._figure = figure
        self._answer = _in_copy(lambda: _draw(figure), self._unread()) if _may_copy() else None
        if self._answer is not None:
            # Only so many copies at a time: the oldest is waited for, its answer kept.
            self._running.append(self)
            while len(self._running) > COPIES_PER_CPU * len(os.sched_getaffinity(0)):
                _ = self._running.popleft()._delivered

    @classmethod
    def _unread(cls) -> list[Connection]:
        return [drawing._answer for drawing in cls._running if drawing._answer is not None]

    @cached_property
    def images(self) -> Images:
        """The PNG and the PDF, the same bytes wherever they are drawn."""
        return self._delivered or _draw(self._figure)

    @cached_property
    def _delivered(self) -> Images | None:
        return None if self._answer is None else _delivered(self._answer)


def _draw(figure: Figure) -> Images:
    page = png(figure)
    figure.set_layout_engine("none")  # its parts are in their places now; finding these takes half of the time
    return Images(page, pdf(figure))


def _may_copy() -> bool:
    """Whether a fork is safe: Linux, no other Python thread, and no Ray, whose threads do not survive it."""
    return hasattr(os, "sched_getaffinity") and threading.active_count() == 1 and "ray" not in sys.modules


def _in_copy(work: Callable[[], Images], unread: list[Connection]) -> Connection | None:
    """Where the images will arrive; None if the system has no room for another process."""
    context = get_context("fork")
    answer, question = context.Pipe(duplex=False)
    copy = context.Process(target=_send, args=(work, question, [answer, *unread]), daemon=True)
    # What interrupts the command is its own business: a copy has no line to say, and ends with it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        copy.start()
    except OSError:
        answer.close()
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        question.close()
    return answer


def _send(work: Callable[[], Images], question: Connection, inherited: list[Connection]) -> None:
    for end in inherited:  # or copies would wait for each other to read, once the command that reads is dead
        end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    with suppress(Exception):  # it happens again, and is told, where the figure is drawn instead
        question.send(work())


def _delivered(answer: Connection) -> Images | None:
    """What a copy sends; None if it died or is stuck, so that the figure is drawn, or fails, in this process."""
    with answer:
        try:
            found: Images | None = answer.recv() if answer.poll(PATIENCE_S) else None
        except (EOFError, OSError):  # it died before it sent anything, or while it did
            return None
        return found
