"""A run's view in a terminal, of fixed height: stages as bars, the latest rounds, accuracy so far and time left.

The view depends only on the reported progress and on the terminal's size; `LiveArea` draws it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.text import Text

from fedloom.experiments.terminal.live import spinner
from fedloom.platform.runs.logs import as_bytes, as_time

if TYPE_CHECKING:
    # Showing a run needs no torch, which this imports.
    from fedloom.platform.federation.loop import RoundProgress

ROUNDS = 6
"""Number of latest rounds that are shown, if the terminal is high enough."""
WIDEST = 100
BAR = 40
"""Width of the longest bar in columns."""
NAME, STATE = 16, 24
"""Widths of a stage's name and of its state in columns."""


@dataclass(frozen=True)
class Column:
    """A column of the table of rounds; if not all fit, those of the lowest `rank` are kept."""

    head: str
    width: int
    rank: int
    cell: "Callable[[RoundProgress], str]"


def _decimals(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if abs(value) < 100 else f"{value:.3g}"


def _round(p: "RoundProgress") -> str:
    return f"{p.round + 1}/{p.rounds_total}"


def _validated(p: "RoundProgress") -> str:
    """The validation accuracy after this round; empty for a score of weights from before the round."""
    is_after = p.validated is not None and p.validated.rounds in (None, p.round + 1)
    return _decimals(p.validated.accuracy) if is_after and p.validated is not None else ""


COLUMNS = (
    Column("stage", NAME, 5, lambda p: p.stage),
    Column("round", 9, 1, _round),
    Column("clients", 9, 7, lambda p: f"{p.clients_ok}/{p.clients_planned}" if p.clients_planned else ""),
    Column("loss", 8, 3, lambda p: _decimals(p.loss)),
    Column("clients'", 12, 6, lambda p: "" if p.metric is None else f"{p.metric_of} {p.metric:.4f}"),
    Column("validation", 10, 2, _validated),
    Column("down", 8, 8, lambda p: as_bytes(p.bytes_down) if p.bytes_down else ""),
    Column("up", 8, 9, lambda p: as_bytes(p.bytes_up) if p.bytes_up else ""),
    Column("time", 9, 4, lambda p: f"{p.wall_s:.2f} s" if p.wall_s < 60 else as_time(p.wall_s)),
)


def fitting(width: int) -> list[Column]:
    """The columns that fit into `width` characters, in the order of the table."""
    chosen: list[Column] = []
    for column in sorted(COLUMNS, key=lambda column: column.rank):
        if sum(c.width + 1 for c in [*chosen, column]) > width:
            break
        chosen.append(column)
    return [column for column in COLUMNS if column in chosen]


@dataclass
class Kind:
    """Stages that share a bar, such as `search/tier1` and `search/tier2`; `shares` is the finished share of each."""

    name: str
    shares: dict[str, float] = field(default_factory=dict)
    latest: "RoundProgress | None" = None
    began_s: float | None = None
    took_s: float = 0.0

    @property
    def is_done(self) -> bool:
        return min(self.shares.values()) >= 1.0

    def line(self, width: int) -> Text:
        """Name, bar and state, in columns of fixed width."""
        name_width = min(NAME, width // 3)
        state_width = min(STATE, width // 3)
        bar = min(BAR, width - name_width - state_width - 2)
        filled = round(bar * sum(self.shares.values()) / len(self.shares))
        style = "green" if self.is_done else "cyan"
        return Text.assemble(
            cut(self.name, name_width).ljust(name_width + 1),
            ("━" * filled, style),
            ("─" * (bar - filled), "bright_black"),
            " ",
            cut(self._state(), state_width),
        )

    def _state(self) -> str:
        if self.is_done:
            took = f" in {as_time(self.took_s)}" if self.took_s else ""
            return f"done{took}"
        if self.latest is None:
            return ""
        parts = [_round(self.latest)]
        if self.latest.counted != "rounds":
            parts.append(self.latest.counted)
        if len(self.shares) > 1:
            number = [*self.shares].index(self.latest.stage) + 1
            parts.insert(0, f"{number} of {len(self.shares)}:")
        return " ".join(parts)


def cut(text: str, width: int) -> str:
    """The text, cut to this width with an ellipsis."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


class Progress:
    """The reported progress of a run, and its view; updated by one thread and drawn by another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began_s = time.monotonic()
        self._kinds: list[Kind] = []
        self._of: dict[str, Kind] = {}
        self._rounds: deque[RoundProgress] = deque(maxlen=ROUNDS)
        self._scores: list[tuple[int | None, float]] = []
        self._doing, self._doing_s = "", self._began_s
        self._latest_s = self._began_s
        self._ended = ""

    @property
    def has_begun(self) -> bool:
        """Whether there is more to show than what is being started."""
        return bool(self._kinds)

    def doing(self, what: str) -> None:
        """Sets what is being started, which is shown until the first round."""
        with self._lock:
            self._doing, self._doing_s = what, time.monotonic()

    def stages(self, names: Sequence[str]) -> None:
        """Adds the run's stages, in order."""
        with self._lock:
            for name in names:
                self._add(name)

    def _add(self, stage: str) -> None:
        name = stage.partition("/")[0]
        kind = next((kind for kind in self._kinds if kind.name == name), None)
        if kind is None:
            kind = Kind(name)
            self._kinds.append(kind)
        kind.shares[stage] = 0.0
        self._of[stage] = kind

    def round(self, progress: "RoundProgress") -> None:
        """Records a finished round; the stages before its own are done."""
        with self._lock:
            now_s = time.monotonic()
            if progress.stage not in self._of:
                self._add(progress.stage)
            if not self._rounds or self._rounds[-1].stage != progress.stage:
                self._scores.clear()
            for name, kind in self._of.items():
                if name == progress.stage:
                    break
                kind.shares[name] = 1.0
            kind = self._of[progress.stage]
            ends = progress.stopped or progress.round + 1 >= progress.rounds_total
            kind.shares[progress.stage] = 1.0 if ends else (progress.round + 1) / progress.rounds_total
            kind.latest = progress
            kind.took_s += now_s - self._latest_s if self._rounds else progress.wall_s
            self._latest_s = now_s
            self._rounds.append(progress)
            if progress.validated is not None:
                self._scores.append((progress.validated.rounds, progress.validated.accuracy))

    def ended(self, kind: str) -> None:
        """Records how the run ended, which the last line shows from now on."""
        with self._lock:
            self._ended = kind
            if kind == "done":
                for each in self._kinds:
                    each.shares = dict.fromkeys(each.shares, 1.0)

    def lines(self, width: int, height: int) -> list[Text]:
        """The view's lines; once the stages are known, their number depends only on the terminal's size."""
        with self._lock:
            width = min(width, WIDEST)
            if not self._kinds:
                return [self._status(width)]
            bars = self._bars(max(1, height - 2), width)
            rows = max(0, min(ROUNDS, height - len(bars) - 3))  # with the head of the table and two lines below
            spare = height - len(bars) - rows - 3
            blank = [Text("")] if spare >= 2 else []
            table = self._table(rows, width) if rows else []
            below = (
                [Text(self._accuracy(width)), self._status(width)] if height > len(bars) + 1 else [self._status(width)]
            )
            return [*bars, *blank, *table, *blank, *below]

    def _bars(self, most: int, width: int) -> list[Text]:
        """A line per kind of stage; if not all fit, those around the one at work."""
        at_work = next((i for i, kind in enumerate(self._kinds) if not kind.is_done), len(self._kinds) - 1)
        most = min(most, max(3, most // 2))
        first = max(0, min(at_work - 1, len(self._kinds) - most))
        return [kind.line(width) for kind in self._kinds[first : first + most]]

    def _table(self, rows: int, width: int) -> list[Text]:
        columns, rounds = fitting(width), list(self._rounds)[-rows:]
        # A stage's name is aligned to the left, figures to the right.
        lines = [
            Text(" ".join(cell.ljust(c.width) if c.head == "stage" else cell.rjust(c.width) for c, cell in cells))
            for cells in (
                [(c, c.head) for c in columns],
                *([(c, cut(c.cell(p), c.width)) for c in columns] for p in rounds),
            )
        ]
        lines[0].stylize("dim")
        return [*lines, *(Text("") for _ in range(rows - len(rounds)))]

    def _accuracy(self, width: int) -> str:
        if not self._rounds:
            return ""
        last = self._rounds[-1]
        of_rounds = [(rounds, value) for rounds, value in self._scores if rounds]
        text = "" if last.metric is None else f"clients' {last.metric_of} accuracy {last.metric:.4f}"
        if of_rounds:
            (at, now), (best_at, best) = of_rounds[-1], max(of_rounds, key=lambda score: score[1])
            top = f", best {best:.4f} after {best_at}" if best_at != at else ""
            text = f"validation accuracy {now:.4f} after round {at}{top}"
        elif self._scores:
            rounds, value = self._scores[-1]
            text = f"validation accuracy {value:.4f}{' before round 1' if rounds == 0 else ''}"
        of_stage = f"{last.stage}: {text}" if text else ""
        return of_stage if len(of_stage) <= width else cut(text, width)

    def _status(self, width: int) -> Text:
        now_s = time.monotonic()
        elapsed = as_time(now_s - self._began_s)
        if self._ended:
            return Text(f"{self._ended} after {elapsed}")
        width -= len(" ^C")  # otherwise the terminal's echo of Ctrl-C would begin a line
        times, what = elapsed, self._doing
        if self._rounds:
            last, what = self._rounds[-1], self._at_work()
            left = "left at most" if last.may_end_early else "left"
            since_s = now_s - self._latest_s
            if last.left_s is not None:
                times += f"  {left} {as_time(max(0.0, last.left_s - since_s))}"
            elif last.stage_left_s:
                times += f"  {left} {as_time(max(0.0, last.stage_left_s - since_s))} in this stage"
        elif now_s - self._doing_s < now_s - self._began_s - 1:
            what += f" ({as_time(now_s - self._doing_s)})"
        room = width - len(times) - 3
        return Text.assemble((spinner(), "cyan"), " ", cut(what, room).ljust(room), " ", (times, "bold"))

    def _at_work(self) -> str:
        """The round that is computed now, or the next stage."""
        last = self._rounds[-1]
        kind = self._of[last.stage]
        if kind.shares[last.stage] < 1.0:
            return f"{last.stage}: {last.counted.removesuffix('s')} {last.round + 2} of {last.rounds_total}"
        names = [*self._of]
        after = names[names.index(last.stage) + 1 :]
        return after[0] if after else "writing the results"
