"""What the tests of commands and reports share."""

from collections.abc import Callable, Iterator
from io import BytesIO

import pytest
from PIL import Image

from fedloom.experiments.report import drawing
from tools.screens import Terminal


@pytest.fixture(scope="session", autouse=True)
def rough_fonts() -> Iterator[None]:
    """Pictures whose fonts are embedded as matplotlib does it by default, which takes a tenth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "PDF_FONTS", 3)
        yield


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
