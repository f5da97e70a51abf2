"""A figure on its way to the page."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Picture:
    """A figure as PNG (and PDF, where files of it are wanted), its file name without ending, and what it shows."""

    name: str
    title: str
    caption: str
    png: bytes
    pdf: bytes = b""
