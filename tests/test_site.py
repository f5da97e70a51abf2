"""The site of the pages: it builds, loads nothing from elsewhere, and documents every public name."""

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from types import ModuleType

import pytest

import fedloom
from fedloom.experiments import analysis
from fedloom.experiments.runs.presets import experiments
from fedloom.platform.methods.registry import METHODS
from fedloom.platform.results.tables import COLUMNS
from tools.pages import ALL_BLOCKS, PLUGINS, ROOT

PYTHON = "fedloom.experiments.python."


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does: a broken link, a missing page or a missing name is an error."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    run = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def text_of(page: Path) -> str:
    """What a page says, without its marks."""
    return unescape(re.sub(r"<[^>]+>", "", page.read_text()))


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    """Links may lead elsewhere; scripts, styles, fonts and pictures may not."""
    loaded = re.compile(r"<(?:script|img|iframe)[^>]*\ssrc=\"?(https?:|//)|<link[^>]*\shref=\"?(https?:|//)")
    pages = [*site.rglob("*.html")]
    assert len(pages) > 100
    assert [page for page in pages if loaded.search(page.read_text())] == []
    styles = [*site.rglob("*.css")]
    assert [style for style in styles if re.search(r"(url\(|@import )[\"']?(https?:|//)", style.read_text())] == []
    assert (site / "vendor" / "iframe-worker" / "shim.js").exists()


def public_names() -> Iterator[str]:
    """What users import: `fedloom`, the analysis, and what the pages' and the plug-ins' code takes from fedloom."""
    yield from (f"fedloom.{name}" for name in fedloom.__all__)
    yield from (f"fedloom.experiments.analysis.{name}" for name in analysis.__all__)
    code = [file.read_text() for file in PLUGINS.glob("*.py")]
    code += [block.text for block in ALL_BLOCKS if block.language == "python"]
    for node in (node for text in code for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedloom."):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def home(name: str) -> str:
    """Where what a name means is defined, as the reference calls it."""
    module, _, last = name.rpartition(".")
    thing = getattr(importlib.import_module(module), last, None)
    if isinstance(thing, ModuleType):
        return thing.__name__
    return f"{getattr(thing, '__module__', module)}.{getattr(thing, '__qualname__', last)}"


def test_every_public_name_has_a_page(site: Path) -> None:
    pages = (site / "reference").rglob("*.html")
    anchors = {anchor for page in pages for anchor in re.findall(r' id="?(fedloom[\w.]*)', page.read_text())}
    names = {*public_names()}
    assert len(names) > 100
    # Constants do not know where they are defined.
    exported = {a.rpartition(".")[2] for a in anchors if a.startswith(("fedloom.experiments.analysis.", PYTHON))}
    missing = {name for name in names if not {name, home(name)} & anchors}
    assert [name for name in sorted(missing) if name.rpartition(".")[2] not in exported] == []


def test_generated_pages_list_everything(site: Path) -> None:
    methods = "".join(text_of(site / "methods" / f"{name}.html") for name in METHODS)
    assert [name for name in experiments() if name not in methods] == []
    tables = text_of(site / "reference" / "tables.html")
    assert [name for columns in COLUMNS.values() for name in columns if name not in tables] == []
    assert "method.train.local_warmup_steps=0" in text_of(site / "reference" / "keys.html")


def test_the_search_finds_words_of_pages(site: Path) -> None:
    docs = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    places = {doc["location"].partition("#")[0] for doc in docs if "staleness" in doc["text"]}
    assert "how-to/asynchronous.html" in places
    assert not any(place.startswith("source/") for place in places)
