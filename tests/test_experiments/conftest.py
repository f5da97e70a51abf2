"""What the tests of commands and reports share."""

from collections.abc import Iterator

import pytest

from fedloom.experiments.report.figures import style


@pytest.fixture(scope="session", autouse=True)
def rough_fonts() -> Iterator[None]:
    """Pictures whose fonts are embedded as matplotlib does it by default, which takes a tenth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "PDF_FONTS", 3)
        yield
