"""Figures of many settings on several sheets, each of which can still be read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.report.parts.picture import Picture

MOST_SETTINGS = 12
"""Settings in a figure: small multiples of more are too long to be compared, and lines of more are a tangle."""


@dataclass(frozen=True)
class Sheet:
    """Some of the settings, and which of all they are: from number `first` of `total`, counted from 1."""

    settings: Sequence[Setting]
    number: int
    first: int
    total: int

    def labelled(self, picture: Picture) -> Picture:
        """The picture with the sheet in its name and caption; as it is where one sheet holds all settings."""
        if len(self.settings) == self.total:
            return picture
        name = picture.name if self.number == 1 else f"{picture.name}-{self.number}"
        of_all = f"Settings {self.first} to {self.first + len(self.settings) - 1} of {self.total}."
        return replace(picture, name=name, caption=f"{picture.caption} {of_all}")


def sheets(settings: Sequence[Setting]) -> Iterator[Sheet]:
    """The settings in their order, at most `MOST_SETTINGS` per sheet."""
    for number, begin in enumerate(range(0, len(settings), MOST_SETTINGS), 1):
        yield Sheet(settings[begin : begin + MOST_SETTINGS], number, begin + 1, len(settings))
