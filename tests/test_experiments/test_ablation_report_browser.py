"""An ablation's page in a headless browser without network: its figures are there, and nothing goes wrong."""

import json
import re
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedloom.experiments.report.ablation import write_ablation_report
from fedloom.experiments.report.content import Block, Content, Picture
from fedloom.experiments.report.drawing import draw, new_figure
from fedloom.experiments.report.pages import html_page
from tools.generated_ablation import Fates, write_planned

CHECK = """addEventListener("load", () => {
  const images = [...document.images];
  const loaded = images.filter(image => image.complete && image.naturalWidth > 0).length;
  document.body.dataset.images = `${loaded} of ${images.length} wide ${Math.max(...images.map(i => i.naturalWidth))}`;
});"""


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


def with_script(source: str, script: str) -> str:
    """The page with another script, which its policy forbids: that of the copy allows all."""
    allowed = re.sub("script-src 'sha256-[^']+'", "script-src 'unsafe-inline'", source)
    assert allowed != source
    return allowed.replace("</body>", f"<script>{script}</script></body>")


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
    checked.write_text(with_script(source, CHECK))
    done = browse(browser, checked, tmp_path / "profile", "--dump-dom")
    assert console_lines(done) == []
    found = re.search(r'data-images="(\d+) of (\d+) wide (\d+)"', done.stdout)
    assert found is not None
    loaded, images, widest = map(int, found.groups())
    assert loaded == images == 4
    assert widest > 600


def test_a_wide_table_fits_a_page_of_1300_pixels(browser: str, tmp_path: Path) -> None:
    heads = ("setting", *["accuracy"] * 12)
    block = Block("t", (), heads, (("fedoras_digits, alpha=0.1", *["1.20 GB ± 340 MB"] * 12),), labels=1)
    source = html_page(Content("t", (), (), (block,), ()))
    cut = "[...document.querySelectorAll('.scroll')].filter(s => s.scrollWidth > s.clientWidth).length"
    script = f"document.body.dataset.cut = {cut}"
    page = tmp_path / "page.html"
    page.write_text(with_script(source, script))
    done = browse(browser, page, tmp_path / "profile", "--dump-dom", "--window-size=1300,900")
    assert 'data-cut="0"' in done.stdout


ROWS = [
    ("b", "1.20 GB"),
    ("a10", "83 s"),
    ("a9", "–"),
    ("c", "950 MB ± 1 GB"),
    ("d", "-3.0"),
    ("e", "12 min"),
    ("g", "12,345 ± 1,000"),
    *[("f", "1e-05")] * 2,
]


def test_tables_are_sorted_and_filtered_by_keyboard(browser: str, tmp_path: Path) -> None:
    source = html_page(Content("t", (), (), (Block("t", (), ("name", "value"), tuple(ROWS), labels=1),), ()))
    script = """
    const rows = () => [...document.querySelectorAll("tbody tr:not([hidden])")].map(row => row.cells[0].textContent);
    const buttons = document.querySelectorAll("th button"), told = {};
    const press = (name, button) => {
      button.focus(); document.activeElement.click();
      told[name] = [rows().join(" "), button.parentElement.ariaSort];
    };
    press("up", buttons[1]); press("down", buttons[1]); press("names", buttons[0]);
    const field = document.querySelector("input[type=search]");
    field.value = "A mb"; field.dispatchEvent(new Event("input"));
    told.none = [rows().join(" "), document.querySelector("output").textContent];
    field.value = "c mb"; field.dispatchEvent(new Event("input"));
    told.one = [rows().join(" "), field.getAttribute("aria-label")];
    document.body.dataset.told = JSON.stringify(told);
    """
    page = tmp_path / "page.html"
    page.write_text(with_script(source, script))
    done = browse(browser, page, tmp_path / "profile", "--dump-dom")
    assert console_lines(done) == []
    assert told(done) == {
        "up": ["d f f a10 e g c b a9", "ascending"],
        "down": ["b c g e a10 f f d a9", "descending"],
        "names": ["a9 a10 b c d e f f g", "ascending"],
        "none": ["", "0 of 9 rows"],
        "one": ["c", "Filter rows: t"],
    }


def told(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    (written,) = re.findall('data-told="([^"]*)"', done.stdout)
    result: dict[str, list[str]] = json.loads(unescape(written))
    return result


def test_a_figure_says_the_values_under_the_mouse(browser: str, tmp_path: Path) -> None:
    figure = new_figure((4, 3))
    axes = figure.subplots()
    axes.errorbar([1.0], [20.0], [5.0], linestyle="none")
    axes.plot([1.0, 2.0], [20.0, 30.0], marker="o", label="rule=<b>")
    axes.set_xlabel("rounds")
    axes.set_ylabel("accuracy (%)")
    picture = Picture("p", "t", "c", figure)
    source = html_page(Content("t", (), (), (), ()), [(picture, draw(figure))])
    script = """addEventListener("load", () => {
    const image = document.images[0], box = image.getBoundingClientRect(), tip = document.querySelector("#tip");
    const [[x, y]] = JSON.parse(image.dataset.spots), pad = parseFloat(getComputedStyle(image).paddingLeft);
    const at = (dx, dy) => {
      const clientX = box.left + pad + x * (box.width - 2 * pad) + dx;
      const clientY = box.top + pad + y * (box.height - 2 * pad) + dy;
      image.dispatchEvent(new PointerEvent("pointermove", {clientX, clientY}));
      return tip.hidden ? "" : tip.textContent;
    };
    document.body.dataset.told = JSON.stringify({near: [at(3, -3)], far: [at(40, -40)]});
    });"""
    page = tmp_path / "page.html"
    page.write_text(with_script(source, script))
    done = browse(browser, page, tmp_path / "profile", "--dump-dom")
    assert console_lines(done) == []
    near = "rule=<b>\nrounds: 1\naccuracy (%): 20\n95 % interval: 15 to 25"
    assert told(done) == {"near": [near], "far": [""]}


def test_what_goes_wrong_on_a_page_is_seen(browser: str, page: Path, tmp_path: Path) -> None:
    """The tests above could pass because nothing is ever written: a page that loads from outside must show."""
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace("</body>", '<img src="https://example.org/a.png"></body>'))
    assert console_lines(browse(browser, broken, tmp_path / "profile", "--dump-dom"))
