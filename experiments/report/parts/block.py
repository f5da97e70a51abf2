"""A table as text, for the page, LaTeX or the terminal."""

from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

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

    With `stacked` intervals are below their means, and values below each other, where both do not fit on a line. A row
    whose first cell is `apart` is separated from the rows above it.
    """
    caption = Text("\n".join(block.text), style="dim")
    table = Table(title=Text(block.title), caption=caption, box=box.SIMPLE_HEAD)
    table.title_justify = table.caption_justify = "left"
    table.show_edge, table.padding = False, (0, 1, 0, 0)
    rows = [[*row[: block.labels], *(_stacked(t) if stacked else t for t in row[block.labels :])] for row in block.rows]
    for i, head in enumerate(block.heads):
        table.add_column(Text(head), justify="left" if i < block.labels else "right", no_wrap=True)
    for row in rows:
        if row[0] == apart:
            table.add_section()
        table.add_row(*map(Text, row))
    # Nothing is cut, neither ids nor numbers: a table may be wider than the terminal, which folds its lines.
    table.width = Console(width=WIDEST).measure(table).maximum
    return table


def _stacked(text: str) -> str:
    return text.replace(" ± ", "\n± ").replace(", ", "\n")
