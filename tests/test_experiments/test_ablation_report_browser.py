"""An ablation's page in a headless browser without network: its figures are there, and nothing goes wrong."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedloom.experiments.report.ablation import write_ablation_report
from fedloom.experiments.report.content import Block, Content
from fedloom.experiments.report.pages import html_page
from tools.generated_ablation import Fates, write_planned

CHECK = """<script>addEventListener("load", () => {
  const images = [...document.images];
  const loaded = images.filter(image => image.complete && image.naturalWidth > 0).length;
  document.body.dataset.images = `${loaded} of ${images.length} wide ${Math.max(...images.map(i => i.naturalWidth))}`;
});</script></body>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of an ablation of which a trial failed and others are still to come."""
    root = tmp_path_factory.mktemp("results")
    arguments = ["ablation=comm_budget", "experiment=fedoras_digits"]
    ablation = write_planned(root, arguments, Fates(failed=[1], waiting=[17]), rounds=10, candidates=4)
    return write_ablation_report(root, ablation.ablation_id).html


def browse(browser: str, page: Path, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--virtual-time-budget=5000",
        "--enable-logging=stderr",
        "--v=0",
        *options,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=180)


def console_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What the page left on the browser's console: errors of scripts, refused loads, broken markup."""
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_the_page_is_drawn_without_errors(
    browser: str, page: Path, tmp_path: Path, colours: Callable[[bytes], int]
) -> None:
    picture = tmp_path / "page.png"
    size = "--window-size=1280,3000"
    done = browse(browser, page, tmp_path / "profile", f"--screenshot={picture}", size)
    assert console_lines(done) == []
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape == (3000, 1280, 3)
    assert colours(picture.read_bytes()) > 200
    # The bars' and lines' blue and vermilion: the figures are on the picture, not only their frames.
    for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
        assert (pixels == colour).all(axis=2).sum() > 500


def test_all_figures_are_loaded_from_the_page_itself(browser: str, page: Path, tmp_path: Path) -> None:
    source = page.read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)', source)
    checked = tmp_path / "checked.html"
    # The page forbids scripts: the copy that counts its images allows this one.
    allowed = source.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    assert allowed != source
    checked.write_text(allowed.replace("</body>", CHECK))
    done = browse(browser, checked, tmp_path / "profile", "--dump-dom")
    assert console_lines(done) == []
    found = re.search(r'data-images="(\d+) of (\d+) wide (\d+)"', done.stdout)
    assert found is not None
    loaded, images, widest = map(int, found.groups())
    assert loaded == images == 2
    assert widest > 600


def test_a_wide_table_fits_a_page_of_1300_pixels(browser: str, tmp_path: Path) -> None:
    heads = ("setting", *["accuracy"] * 12)
    block = Block("t", (), heads, (("fedoras_digits, alpha=0.1", *["1.20 GB ± 340 MB"] * 12),), labels=1)
    source = html_page(Content("t", (), (), (block,), ()))
    cut = "[...document.querySelectorAll('.scroll')].filter(s => s.scrollWidth > s.clientWidth).length"
    script = f"document.body.dataset.cut = {cut}"
    page = tmp_path / "page.html"
    page.write_text(
        source.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'").replace(
            "</body>", f"<script>{script}</script></body>"
        )
    )
    done = browse(browser, page, tmp_path / "profile", "--dump-dom", "--window-size=1300,900")
    assert 'data-cut="0"' in done.stdout


def test_what_goes_wrong_on_a_page_is_seen(browser: str, page: Path, tmp_path: Path) -> None:
    """The tests above could pass because nothing is ever written: a page that loads from outside must show."""
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace("</body>", '<img src="https://example.org/a.png"></body>'))
    assert console_lines(browse(browser, broken, tmp_path / "profile", "--dump-dom"))
