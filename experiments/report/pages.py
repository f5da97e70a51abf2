"""The files of a report: HTML page, Markdown, LaTeX tables, and images."""

import base64
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from fedloom.experiments.report.content import Block, Content, Picture, RunFacts
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


_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --soft: #5c5c5c; --line: #d9d9d9; --back: #ffffff; --card: #f6f6f4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --soft: #a8a8a8; --line: #3c3c3c; --back: #161616; --card: #202020; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 2rem 1.25rem 4rem; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 1rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0 0 .5rem; overflow-wrap: anywhere; } p { margin: .4rem 0; max-width: 60rem; }
p, figcaption { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: .6rem 0; }
th, td { padding: .35rem .5rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th { vertical-align: bottom; font-weight: 600; } thead th { border-bottom: 2px solid var(--soft); }
.text { text-align: left; white-space: normal; overflow-wrap: break-word; max-width: 32rem; }
.run { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 1rem; margin: 1rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; font-size: .9rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; margin-top: .8rem; } pre { overflow-x: auto; font-size: .8rem; }
.missing { border-left: 4px solid #d55e00; padding: .1rem 0 .1rem 1rem; margin: 1rem 0; }
figure { margin: 1rem 0; } figcaption { font-size: .9rem; max-width: 60rem; }
img { display: block; max-width: 100%; height: auto; background: #ffffff; border-radius: 6px; padding: .5rem; }
"""


# The page loads no external resources, and this policy makes the browser enforce it.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def html_page(content: Content) -> str:
    """The whole page; all text is escaped."""
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        *([f'<meta http-equiv="refresh" content="{content.refresh_s}">'] if content.refresh_s else []),
        f"<title>{escape(content.title)}</title>",
        f"<style>{_STYLE}</style>",
        "</head>",
        "<body>",
        f"<h1>{escape(content.title)}</h1>",
        *_missing((*content.missing, *_again(content))),
        *content.ordered([_table(b) for b in content.blocks], [_figure(p) for p in content.pictures]),
        *([f"<h2>{escape(content.about)}</h2>"] if content.runs else []),
        *(_run(run) for run in content.runs),
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _again(content: Content) -> list[str]:
    return [f"This page loads itself again every {content.refresh_s} s."] if content.refresh_s else []


def _missing(missing: Sequence[str]) -> list[str]:
    if not missing:
        return []
    return ['<div class="missing">', *(f"<p>{escape(sentence)}</p>" for sentence in missing), "</div>"]


def _table(block: Block) -> str:
    def cell(tag: str, text: str, column: int) -> str:
        kind = ' class="text"' if column < block.labels else ""
        scope = ' scope="col"' if tag == "th" else ""
        shown = escape(text)
        if tag == "td" and not kind:
            # A narrow page breaks a number before its interval and between values, and nowhere else.
            shown = shown.replace(" ", "&nbsp;").replace("&nbsp;±", " ±").replace(",&nbsp;", ", ")
        return f"<{tag}{kind}{scope}>{shown}</{tag}>"

    head = "".join(cell("th", text, i) for i, text in enumerate(block.heads))
    rows = ("<tr>" + "".join(cell("td", text, i) for i, text in enumerate(row)) + "</tr>" for row in block.rows)
    lines = [
        "<section>",
        f"<h2>{escape(block.title)}</h2>",
        *(f"<p>{escape(sentence)}</p>" for sentence in block.text),
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>',
        *rows,
        "</tbody></table></div>",
        "</section>",
    ]
    return "\n".join(lines)


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.drawing.images.png).decode("ascii")
    return (
        f"<section>\n<h2>{escape(picture.title)}</h2>\n<figure>\n"
        f'<img alt="{escape(picture.title)}" src="data:image/png;base64,{data}">\n'
        f"<figcaption>{escape(picture.caption)}</figcaption>\n</figure>\n</section>"
    )


def _run(run: RunFacts) -> str:
    facts = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in run.facts)
    return (
        f'<div class="run">\n<h3>{escape(run.run_id)}</h3>\n<dl>\n{facts}\n</dl>\n'
        f"<details><summary>Configuration</summary><pre>{escape(run.config)}</pre></details>\n</div>"
    )


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


LONG = 35
"""Maximum number of rows of a table on one page; longer tables break over pages."""


WIDE = 60
"""Maximum number of characters in a column of text without line breaks."""


HEAD = (
    "% Tables of a fedloom report: \\input this file, or copy a table.\n"
    "% It needs \\usepackage[T1]{fontenc} and \\usepackage{booktabs,longtable} in the preamble.\n"
)


_SIGNS = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": r"$-$",
    "–": "--",
    "…": r"\dots{}",
    "\n": " ",
}


_LAST_OF_LATIN_1 = "\u00ff"


def escaped(text: str) -> str:
    """Escapes special characters for LaTeX; Greek letters become mathematics, characters unknown to pdflatex "?"."""
    return "".join(_SIGNS[c] if c in _SIGNS else _letter(c) for c in text)


def _letter(sign: str) -> str:
    if sign <= _LAST_OF_LATIN_1:
        return sign if sign.isprintable() else " "
    kind, _, rest = unicodedata.name(sign, "").partition(" SMALL LETTER ")
    return f"$\\{rest.lower()}$" if kind == "GREEK" and rest.isalpha() and rest != "OMICRON" else "?"


def latex_tables(blocks: Sequence[Block]) -> str:
    """One LaTeX table per block, in order."""
    return "\n".join([HEAD, *(latex_table(block) for block in blocks)])


def latex_table(block: Block) -> str:
    """The block as a booktabs table with its title and sentences as caption; long tables break over pages."""
    head = _latex_line([f"\\textbf{{{escaped(text.strip())}}}" if text.strip() else "" for text in block.heads])
    rows = "\n".join(_latex_line([_cell(text, i >= block.labels) for i, text in enumerate(row)]) for row in block.rows)
    caption = f"\\caption{{{escaped(' '.join([f'{block.title}.', *block.text]))}}}"
    columns = "".join(_column(block, i) for i in range(len(block.heads)))
    if len(block.rows) > LONG:
        top = f"\\toprule\n{head}\n\\midrule"
        ruled = f"{top}\n\\endfirsthead\n{top}\n\\endhead\n\\bottomrule\n\\endfoot"
        begin = f"\\begingroup\\footnotesize\n\\begin{{longtable}}{{{columns}}}\n{caption}\\\\"
        return f"{begin}\n{ruled}\n{rows}\n\\end{{longtable}}\n\\endgroup\n"
    begin = f"\\begin{{table}}\n\\centering\\footnotesize\n{caption}\n\\begin{{tabular}}{{{columns}}}"
    return f"{begin}\n\\toprule\n{head}\n\\midrule\n{rows}\n\\bottomrule\n\\end{{tabular}}\n\\end{{table}}\n"


def _cell(text: str, number: bool) -> str:
    """An escaped cell; in columns of numbers, a hyphen before a digit becomes a minus sign."""
    return escaped(re.sub(r"(^|\s)-(?=\d)", r"\1−", text) if number else text)


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _column(block: Block, index: int) -> str:
    if index >= block.labels:
        return "r"
    longest = max((len(row[index]) for row in block.rows), default=0)
    return r"p{0.35\linewidth}" if longest > WIDE else "l"
