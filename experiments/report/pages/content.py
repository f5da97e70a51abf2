"""The content of a report, independent of HTML and Markdown: facts, tables, pictures, and missing parts."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.experiments.report.parts.block import Block
from fedloom.experiments.report.parts.picture import Picture

REFRESH_S = 30
"""Seconds between two reloads of a page while a run that it is about is running."""


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
    for no reload. `pictures_first` puts the pictures above the tables, which may be long.
    """

    title: str
    runs: tuple[RunFacts, ...]
    missing: tuple[str, ...]
    blocks: tuple[Block, ...]
    pictures: tuple[Picture, ...]
    about: str = "Runs"
    refresh_s: int | None = None
    pictures_first: bool = False

    def ordered(self, tables: Sequence[str], pictures: Sequence[str]) -> list[str]:
        """The formatted tables and pictures in the order of the page."""
        return [*pictures, *tables] if self.pictures_first else [*tables, *pictures]
