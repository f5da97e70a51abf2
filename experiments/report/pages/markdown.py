"""The report as Markdown."""

from collections.abc import Iterable, Sequence

from fedloom.experiments.report.pages.content import Content


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], labels: int = 2) -> str:
    """A Markdown table; the first `labels` columns are left-aligned, the others right-aligned."""
    lines = [_line(heads), _line([":--" if i < labels else "--:" for i in range(len(heads))])]
    return "\n".join([*lines, *(_line(row) for row in rows)]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ").strip() for c in cells) + " |"


def markdown_page(content: Content) -> str:
    """The report as Markdown that links to the PNG files of its pictures."""
    parts = [f"# {content.title}", *(f"> {sentence}" for sentence in content.missing)]
    tables, pictures = [], []
    for block in content.blocks:
        tables += [f"## {block.title}", *block.text, markdown(block.heads, block.rows, block.labels).rstrip()]
    for picture in content.pictures:
        pictures += [f"## {picture.title}", f"![{picture.title}]({picture.name}.png)", picture.caption]
    parts += content.ordered(tables, pictures)
    parts += [f"## {content.about}"] if content.runs else []
    for run in content.runs:
        parts += [f"### {run.run_id}", markdown(("fact", "value"), run.facts).rstrip()]
    return "\n\n".join(parts) + "\n"
