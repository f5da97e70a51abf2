"""Divides figures of many settings into several readable sheets."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.report.parts.picture import Picture

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
