"""A figure with its words, for the page."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol


class Images(NamedTuple):
    """A figure as PNG, for the page, and as PDF, for papers."""

    png: bytes
    pdf: bytes


class Drawn(Protocol):
    """What delivers a figure's images, now or when it has drawn them."""

    @property
    def images(self) -> Images: ...


@dataclass(frozen=True)
class Picture:
    """A figure, drawn or being drawn, its file name without suffix, its title and its caption."""

    name: str
    title: str
    caption: str
    drawing: Drawn

    def named(self, name: str) -> "Picture":
        """A copy with the name of its run or experiment in file name and title."""
        return replace(self, name=f"{self.name}-{name}", title=f"{self.title}: {name}")
