"""Tables as LaTeX with booktabs, for papers."""

import re
import unicodedata
from collections.abc import Sequence

from fedloom.experiments.report.parts.block import Block

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
    head = _line([f"\\textbf{{{escaped(text.strip())}}}" if text.strip() else "" for text in block.heads])
    rows = "\n".join(_line([_cell(text, i >= block.labels) for i, text in enumerate(row)]) for row in block.rows)
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


def _line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _column(block: Block, index: int) -> str:
    if index >= block.labels:
        return "r"
    longest = max((len(row[index]) for row in block.rows), default=0)
    return r"p{0.35\linewidth}" if longest > WIDE else "l"
