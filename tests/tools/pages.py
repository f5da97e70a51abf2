"""The pages: the READMEs and docs/, and the blocks of code in them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PLUGINS = ROOT / "tests" / "plugins"
READMES = [
    ROOT / "README.md",
    *(ROOT / part / "README.md" for part in ("platform", "tiers", "actors", "experiments")),
    *sorted(DOCS.rglob("*.md")),
]
SHOWN = re.compile(
    r"(\[`tests/plugins/(\w+\.py)`\]\(\.\./\.\./tests/plugins/\2\), )(\d+)( lines.*?\n```python\n)(.*?)(```)", re.S
)
"""A file of tests/plugins as a page shows it."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the file and line in which it begins.

    `needs` is what the line above it says that its commands need, such as a cluster.
    """

    language: str
    text: str
    place: str
    needs: str = ""


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    text = page.read_text()
    for match in re.finditer(r"(?:^\*Needs ([\w ]+)\.\*\n\n)?^```(\w*)\n(.*?)^```$", text, re.S | re.M):
        line = text[: match.start(3)].count("\n") + 1
        yield Block(match[2], match[3], f"{page.relative_to(ROOT)}:{line}", match[1] or "")


ALL_BLOCKS = [block for page in READMES for block in blocks(page)]


def with_files(text: str) -> str:
    """A page's text with the files of tests/plugins as they are."""

    def shown(match: re.Match[str]) -> str:
        code = (PLUGINS / match[2]).read_text()
        return f"{match[1]}{len(code.splitlines())}{match[4]}{code}{match[6]}"

    return SHOWN.sub(shown, text)
