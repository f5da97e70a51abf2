"""The scoreboard as one page: claims with their states, figures with published and measured points, and numbers."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedloom.experiments.report.content import Block, Content, Picture
from fedloom.experiments.report.pages import ReportFiles, write_content
from fedloom.experiments.reproduce.board import (
    Entry,
    claims_block,
    list_block,
    missing_sentences,
    papers,
    summary_block,
)
from fedloom.experiments.reproduce.figures import picture
from fedloom.experiments.reproduce.schema import SCALES
from fedloom.experiments.reproduce.table import Outcome, number_blocks
from fedloom.platform.results.store import output_folder


def write_page(found: Sequence[Entry], results: Path, out: Path) -> ReportFiles:
    """Writes report.html, report.md, tables.tex and the figures into the folder."""
    folder = output_folder(results, out, "reports/scoreboard")
    return write_content(content(found), folder, ())


def content(found: Sequence[Entry]) -> Content:
    """The page: what is shown, of which paper, and by which numbers."""
    measured = [outcome for entry in found for outcome in _measured(entry)]
    return Content(
        title="What the papers claim, and what is shown here",
        runs=(),
        missing=tuple(missing_sentences(found)),
        blocks=(
            summary_block(found),
            *(block for paper in papers(found) if (block := claims_block(found, paper)).rows),
            *_numbers(measured),
            list_block(found),
        ),
        pictures=_pictures(measured),
    )


def _measured(entry: Entry) -> list[Outcome]:
    """The outcomes with at least one measured number."""
    outcomes = [entry.outcomes[scale] for scale in SCALES if scale in entry.outcomes]
    return [outcome for outcome in outcomes if any(row.measured is not None for row in outcome.rows)]


def _numbers(measured: Sequence[Outcome]) -> Iterator[Block]:
    for outcome in measured:
        yield from number_blocks(outcome)


def _pictures(measured: Sequence[Outcome]) -> Iterator[Picture]:
    for outcome in measured:
        drawn = picture(outcome)
        if drawn is not None:
            yield drawn
