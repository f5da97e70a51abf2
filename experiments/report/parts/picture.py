"""A figure on its way to the page."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Picture:
    """A figure as PNG (and PDF, where files of it are wanted), its file name without ending, and what it shows."""

    name: str
    title: str
    caption: str
    png: bytes
    pdf: bytes = b""

    def named(self, name: str) -> "Picture":
        """The same, told from those of other runs or experiments by their name."""
        return replace(self, name=f"{self.name}-{name}", title=f"{self.title}: {name}")
