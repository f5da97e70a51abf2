"""The report as one self-contained HTML page."""

import base64
from collections.abc import Sequence
from html import escape

from fedloom.experiments.report.pages.content import Content, RunFacts
from fedloom.experiments.report.parts.block import Block
from fedloom.experiments.report.parts.picture import Picture

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
