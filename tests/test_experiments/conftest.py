"""What the tests of commands and reports share."""

import os
import shutil
from collections.abc import Callable, Iterator
from io import BytesIO

import pytest
from PIL import Image

from fedloom.experiments.report import drawing, pages
from tools.screens import Terminal

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INSTALL = "no browser was found for the tests of pages: apt-get install chromium, or name one in FEDLOOM_BROWSER"


@pytest.fixture(scope="session", autouse=True)
def rough_fonts() -> Iterator[None]:
    """Pictures whose fonts are embedded as matplotlib does it by default, which takes a tenth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "PDF_FONTS", 3)
        yield


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports whose pictures are empty files: drawing them takes most of a report's time."""
    monkeypatch.setattr(pages, "drawn", lambda pictures: [(p, drawing.Images(b"", b"")) for p in pictures])


@pytest.fixture(scope="session")
def colours() -> Callable[[bytes], int]:
    """Counts the colours of an image: one that shows nothing has few."""

    def count(image: bytes) -> int:
        with Image.open(BytesIO(image)) as picture:
            return len(picture.convert("RGB").getcolors(picture.width * picture.height))

    return count


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 100 columns and 30 lines, which is standard output in its `with` block."""
    written = Terminal()
    written.resize(monkeypatch, 100, 30)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return written


@pytest.fixture(scope="session")
def browser() -> str:
    """The browser's program; without one the test is skipped, but not where everything must be tested."""
    given = os.environ.get("FEDLOOM_BROWSER")
    found = next((path for name in ([given] if given else BROWSERS) if (path := shutil.which(name))), None)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(INSTALL)
        pytest.skip(INSTALL)
    return found
