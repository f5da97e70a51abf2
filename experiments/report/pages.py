"""The files of a report: HTML page, Markdown, LaTeX tables, and images."""

import base64
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import chain
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from fedloom.experiments.report.content import Block, Content, Picture
from fedloom.experiments.report.drawing import Images, drawn
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
    """Whether a run of the report is still running, so that a later report says more."""

    def _repr_html_(self) -> str:
        """The page for a notebook, in an iframe that keeps its styles separate."""
        page = escape(self.html.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0"></iframe>'


def write_content(content: Content, folder: Path, run_ids: Sequence[str]) -> ReportFiles:
    """Writes the page, the Markdown, the tables in LaTeX and the pictures, each file atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = drawn(content.pictures)
    html, text, latex = (folder / name for name in ("report.html", "report.md", "tables.tex"))
    plots = {
        folder / f"{picture.name}.{kind}": image
        for picture, images in pictures
        for kind, image in (("png", images.png), ("pdf", images.pdf))
    }
    pages = {
        latex: latex_tables(content.blocks),
        html: html_page(content, pictures),
        text: markdown_page(content, [picture for picture, _ in pictures]),
    }
    for path, data in {**plots, **{path: page.encode() for path, page in pages.items()}}.items():
        write_atomically(path, data, durable=False)
    is_live = content.refresh_s is not None
    return ReportFiles(tuple(run_ids), folder, html, text, tuple(plots), content.missing, latex, is_live)


def html_page(content: Content, pictures: Sequence[tuple[Picture, Images]] = ()) -> str:
    """The report as one self-contained HTML page; all text is escaped."""
    png_of = {picture.name: base64.b64encode(images.png).decode("ascii") for picture, images in pictures}
    spots_of = {picture.name: json.dumps(images.spots, ensure_ascii=False) for picture, images in pictures}
    script = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")
    # The page's content security policy names the script by its hash, so that the browser runs no other.
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return _html_template().render(
        content=content,
        pictures=[picture for picture, _ in pictures],
        png_of=png_of,
        spots_of=spots_of,
        script=Markup(script),
        script_hash=hashed,
    )


@cache
def _html_template() -> Template:
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["unbroken"] = _unbroken
    return templates.get_template("page.html.jinja")


def _unbroken(text: str) -> str:
    """The text of a number with line breaks allowed only before its interval and between values."""
    return (
        text.replace(" ", "\N{NO-BREAK SPACE}")
        .replace("\N{NO-BREAK SPACE}±", " ±")
        .replace(",\N{NO-BREAK SPACE}", ", ")
    )


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], labels: int = 2) -> str:
    """A Markdown table; the first `labels` columns are left-aligned, the others right-aligned."""
    lines = [_line(heads), _line([":--" if i < labels else "--:" for i in range(len(heads))])]
    return "\n".join([*lines, *(_line(row) for row in rows)]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ").strip() for c in cells) + " |"


def markdown_page(content: Content, pictures: Sequence[Picture] = ()) -> str:
    """The report as Markdown that links to the PNG files of its pictures."""
    parts = [f"# {content.title}", *(f"> {sentence}" for sentence in content.missing)]
    tables = [[f"## {b.title}", *b.text, markdown(b.heads, b.rows, b.labels).rstrip()] for b in content.blocks]
    images = [[f"## {p.title}", f"![{p.title}]({p.name}.png)", p.caption] for p in pictures]
    parts += chain(*images, *tables) if content.pictures_first else chain(*tables, *images)
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
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "₀": r"$_0$",
    "λ": r"$\lambda$",  # Unicode calls it LAMDA
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
