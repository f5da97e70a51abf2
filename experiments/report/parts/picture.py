"""A figure as image data, for the page."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Picture:
    """A figure as PNG (and PDF, if a file is wanted), its file name without suffix, its title and its caption."""

    name: str
    title: str
    caption: str
    png: bytes
    pdf: bytes = b""

    def named(self, name: str) -> "Picture":
        """A copy with the name of its run or experiment in file name and title."""
        return replace(self, name=f"{self.name}-{name}", title=f"{self.title}: {name}")
