"""The files of a report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedloom.experiments.report.pages.content import Content
from fedloom.experiments.report.pages.html import html_page
from fedloom.experiments.report.pages.latex import latex_tables
from fedloom.experiments.report.pages.markdown import markdown_page
from fedloom.platform.results.files import write_atomically


@dataclass(frozen=True)
class ReportFiles:
    """The files of a report, and the runs that it is about."""

    run_ids: tuple[str, ...]
    folder: Path
    html: Path
    markdown: Path
    plots: tuple[Path, ...]
    missing: tuple[str, ...]
    """One sentence for each part that the runs do not have (yet)."""
    latex: Path
    """The tables in LaTeX."""
    is_live: bool
    """Whether the report is of something that still runs, so that a later one says more."""


def write_content(content: Content, folder: Path, run_ids: Sequence[str]) -> ReportFiles:
    """Writes the page, the Markdown, the tables in LaTeX and the pictures, each file atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [(p.name, ending, image) for p in content.pictures for ending, image in p.drawing.images._asdict().items()]
    for name, ending, image in files:
        write_atomically(folder / f"{name}.{ending}", image, durable=False)
    html, text, latex = (folder / name for name in ("report.html", "report.md", "tables.tex"))
    write_atomically(latex, latex_tables(content.blocks).encode(), durable=False)
    write_atomically(html, html_page(content).encode(), durable=False)
    write_atomically(text, markdown_page(content).encode(), durable=False)
    plots = tuple(folder / f"{name}.{ending}" for name, ending, _ in files)
    is_live = content.refresh_s is not None
    return ReportFiles(tuple(run_ids), folder, html, text, plots, content.missing, latex, is_live)
