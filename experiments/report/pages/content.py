"""What a report says, before it becomes a page or Markdown: facts, tables, pictures, and what is missing."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.experiments.report.parts.block import Block
from fedloom.experiments.report.parts.picture import Picture


@dataclass(frozen=True)
class RunFacts:
    """A run's identity: names and values, and its configuration as indented JSON."""

    run_id: str
    facts: tuple[tuple[str, str], ...]
    config: str


@dataclass(frozen=True)
class Content:
    """Everything in a report.

    `about` is the heading over the facts of the `runs`; with `refresh_s` the page loads itself again so often.
    `pictures_first` puts them above the tables, which may be long.
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
        """The pieces of the page in their order."""
        return [*pictures, *tables] if self.pictures_first else [*tables, *pictures]
