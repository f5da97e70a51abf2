"""The content of a report, independent of its format: tables, figures, facts, and missing parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fedloom.experiments.analysis.settings import Setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDEST = 10_000


@dataclass(frozen=True)
class Block:
    """A table with its title, introductory sentences, heads and cells; the first `labels` columns are text."""

    title: str
    text: tuple[str, ...]
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 2


def rich_block(block: Block, *, stacked: bool = True, apart: str | None = None) -> Table:
    """The block as a table for the terminal, with its sentences below.

    With `stacked`, intervals go below their means, and values below each other. A row whose first cell is `apart` is
    separated from the rows above it.
    """
    caption = Text("\n".join(block.text), style="dim")
    table = _Fitting(title=Text(block.title), caption=caption, box=box.SIMPLE_HEAD)
    table.title_justify = table.caption_justify = "left"
    table.show_edge, table.padding = False, (0, 1, 0, 0)
    rows = [[*row[: block.labels], *(_stacked(t) if stacked else t for t in row[block.labels :])] for row in block.rows]
    for i, head in enumerate(block.heads):
        table.add_column(Text(head), justify="left" if i < block.labels else "right", no_wrap=True)
    for row in rows:
        if row[0] == apart:
            table.add_section()
        table.add_row(*map(Text, row))
    # Ids and numbers are never truncated: a table may be wider than the terminal, which then wraps its lines.
    table.width = Console(width=WIDEST).measure(table).maximum
    return table


class _Fitting(Table):
    """A table without space between its columns if it would be wider than the terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if console.is_terminal and self.width is not None and self.width > console.width:
            self.padding = 0
            self.width = Console(width=WIDEST).measure(self).maximum
        yield from super().__rich_console__(console, options)


def _stacked(text: str) -> str:
    return text.replace(" ± ", "\n± ").replace(", ", "\n")


@dataclass(frozen=True)
class Picture:
    """A figure with its file name without suffix, its title and its caption."""

    name: str
    title: str
    caption: str
    figure: Figure

    def named(self, name: str) -> Picture:
        """A copy with the name of its run or experiment in file name and title."""
        return replace(self, name=f"{self.name}-{name}", title=f"{self.title}: {name}")


REFRESH_S = 30
"""Seconds between two reloads of a page while one of its runs is running."""


@dataclass(frozen=True)
class RunFacts:
    """A run's identity: names and values, and its configuration as indented JSON."""

    run_id: str
    facts: tuple[tuple[str, str], ...]
    config: str


@dataclass(frozen=True)
class Content:
    """All parts of a report.

    `about` is the heading of the facts of the `runs`; `refresh_s` is the reload interval of the page in seconds, None
    for no reload. `pictures_first` puts the pictures above the tables, which may be long. `pictures` may be an iterator
    that makes each picture while earlier ones are drawn.
    """

    title: str
    runs: tuple[RunFacts, ...]
    missing: tuple[str, ...]
    blocks: tuple[Block, ...]
    pictures: Iterable[Picture] = ()
    about: str = "Runs"
    refresh_s: int | None = None
    pictures_first: bool = False


MOST_SETTINGS = 12
"""Maximum number of settings in a figure; with more, panels or lines cannot be compared."""


@dataclass(frozen=True)
class Sheet:
    """A part of the settings; `first` is the number of its first setting among `total`, counted from 1."""

    settings: Sequence[Setting]
    number: int
    first: int
    total: int

    def labelled(self, picture: Picture) -> Picture:
        """The picture with the sheet in its name and caption; unchanged if one sheet holds all settings."""
        if len(self.settings) == self.total:
            return picture
        name = picture.name if self.number == 1 else f"{picture.name}-{self.number}"
        of_all = f"Settings {self.first} to {self.first + len(self.settings) - 1} of {self.total}."
        return replace(picture, name=name, caption=f"{picture.caption} {of_all}")


def sheets(settings: Sequence[Setting]) -> Iterator[Sheet]:
    """Divides the settings, in order, into sheets of at most `MOST_SETTINGS`."""
    for number, begin in enumerate(range(0, len(settings), MOST_SETTINGS), 1):
        yield Sheet(settings[begin : begin + MOST_SETTINGS], number, begin + 1, len(settings))
