"""What the site shows beside its pages: tables that the code knows, the pages of the project, and linked source files.

A line `<!-- fill: NAME ... -->` of a page becomes what `FILLS[NAME]` says, so that it can never go stale. A link that
leaves `docs/` leads to the reference of that module, or to a page with the file.
"""

import argparse
import ast
import importlib
import inspect
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from posixpath import normpath, relpath
from textwrap import dedent
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from fedloom.experiments.arguments import COMMANDS, build_parser
from fedloom.experiments.catalogue import known_code, known_keys
from fedloom.experiments.runs.presets import CONF, of_method
from fedloom.platform.federation.method import Method
from fedloom.platform.methods.registry import METHODS
from fedloom.platform.results.tables import COLUMNS, PARTITION, ROWS, unit_of
from fedloom.platform.settings import Setting, settings_of, written

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PROJECT = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
}
"""Pages of the repository that are pages of the site, too."""
HOME = {"README.md": "index.md"}
SHIM = "https://unpkg.com/iframe-worker/shim"
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```$)", re.S | re.M)
COLOURS, TABLE = re.compile(r"\x1b\[[\d;]*m"), re.compile(r"<table[^>]*>")
"""What a terminal is told about colours, and how pandas begins a table."""
ENDS_WITH = {
    "shared": "one model for all clients",
    "tiers": "a model per tier",
    "subnets": "any subnet of a supernet",
    "silos": "a model per client",
}
OF_ALL = ("fednas", "global_nas")
"""Methods for silos that search with all clients for the one network of them all."""


# -- what pages are filled with ---------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def header(file: Path) -> str:
    """The comment with which a preset begins."""
    lines = file.read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("# ") and "@package" not in line)
    end = next(i for i, line in enumerate(lines[begin:], begin) if not line.startswith("#"))
    return " ".join(line.removeprefix("# ") for line in lines[begin:end])


def doc_of(method: Method) -> str:
    """The docstring of a method's file: what it is and whose, and the paper's box."""
    return inspect.getdoc(inspect.getmodule(method.config)) or ""


def plain(text: str) -> str:
    """A text of the code, without what Markdown would read into it."""
    return escape(text, quote=False).replace("*", r"\*")


def settings_list(settings: Iterable[Setting]) -> str:
    """The keys as `fedloom keys` prints them."""
    return "\n\n".join(f"`{s.key}={written(s.default)}` {plain(str(s))}\n:   {plain(s.help) or '–'}" for s in settings)


def fill_methods() -> str:
    rows = []
    for name, method in METHODS.items():
        first = doc_of(method).partition("\n")[0]
        rows.append([f"[`{name}`]({name}.md)", first, ENDS_WITH["shared" if name in OF_ALL else method.kind]])
    return table(["method", "what it is", "a run ends with"], rows)


def fill_method(name: str) -> str:
    """The docstring of a method's file; a paragraph with indented lines is the paper's box, or a part of it."""
    first, *paragraphs = doc_of(METHODS[name]).split("\n\n")
    boxes = (f"```text\n{dedent(each)}\n```" if "\n  " in f"\n{each}" else each for each in paragraphs)
    return "\n\n".join([first, *boxes])


def fill_settings(name: str) -> str:
    presets = table(
        ["preset", "what it is"], ([f"`{p}`", header(CONF / "experiment" / f"{p}.yaml")] for p in of_method(name))
    )
    usual = {} if name == "fedavg" else {s.key: s.default for s in settings_of(METHODS["fedavg"].config(), "method.")}
    keys = [
        s
        for s in settings_of(METHODS[name].config(), "method.")
        if s.key != "method.name" and (s.key not in usual or s.default != usual[s.key])
    ]
    beside = (
        "" if name == "fedavg" else " Keys and defaults of [FedAvg](fedavg.md#keys) that are the same are left out."
    )
    module = f"fedloom.platform.methods.{name}"
    source = (ROOT / "platform" / "methods" / f"{name}.py").read_text()
    code = f'??? note "The file: {module}"\n\n' + "\n".join(
        f"    {line}".rstrip() for line in f"```python\n{source}```".splitlines()
    )
    return (
        f"## Presets\n\n{presets}\n\n## Keys\n\n`fedloom keys method method={name}` prints them.{beside}\n\n"
        f"{settings_list(keys)}\n\n## Code {{ data-search-exclude }}\n\n{code}"
    )


def fill_keys() -> str:
    groups: dict[str, list[Setting]] = {}
    for setting in known_keys(["method=fedavg"]):
        group = setting.key.partition(".")[0] if "." in setting.key else "general"
        groups.setdefault(group, []).append(setting)
    groups["method"] = [s for s in groups["method"] if s.key.startswith("method.train.")]
    return "\n\n".join(f"## {group}\n\n{settings_list(settings)}" for group, settings in groups.items())


def fill_tables() -> str:
    parts = []
    for name, columns in COLUMNS.items():
        described = {**PARTITION, **columns}
        rows = ([f"`{c}`", column.kind, unit_of(c), plain(column.meaning)] for c, column in described.items())
        row = f"{ROWS[name][0].upper()}{ROWS[name][1:]}."
        parts.append(f"### {name}\n\n{row}\n\n{table(['column', 'type', 'unit', 'meaning'], rows)}")
    return "\n\n".join(parts)


def fill_plugins() -> str:
    parts = []
    for point in known_code([]):
        rows = (
            [
                f"`{code.name}`",
                plain(code.text),
                ", ".join(f"`{o.key.rpartition('.')[2]}={written(o.default)}`" for o in code.options),
            ]
            for code in point.built_in
        )
        keys = ", ".join(f"`{key}`" for key in point.keys)
        kind = point.kind[0].upper() + point.kind[1:]
        parts.append(
            f"## {kind}\n\n{keys}. [Your own](../extend/{point.kind.replace(' ', '-')}.md) is {point.form}.\n\n"
            + table(["name", "what it is", "options"], rows)
        )
    return "\n\n".join(parts)


def fill_usage() -> str:
    parser = build_parser(dict.fromkeys(COMMANDS, lambda _: 0))
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    parts = []
    for name, command in commands.choices.items():
        text = re.sub(r"\n(Presets|Ablations): .*", "", command.format_help(), flags=re.S)
        parts.append(f"### fedloom {name}\n\n```text\n{text.strip()}\n```")
    return "\n\n".join(parts)


def fill_pages(folder: str) -> str:
    """The pages of a folder by their titles."""
    titles = ((title_of(f"{folder}/{page.name}"), page.name) for page in (DOCS / folder).glob("*.md"))
    return "\n".join(
        f"- [{title}]({name})" for title, name in sorted(titles, key=lambda each: each[0].lower()) if name != "index.md"
    )


def fill_exports(package: str) -> str:
    """The names that a package exports, each from the module that it is imported from."""
    module = importlib.import_module(package)
    imports = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module for node in imports for alias in node.names}
    return "\n\n".join(
        f"::: {homes.get(name, package)}.{name}\n    options:\n      show_root_full_path: false"
        for name in module.__all__
    )


FILLS: dict[str, Callable[..., str]] = {
    name.removeprefix("fill_"): function for name, function in globals().copy().items() if name.startswith("fill_")
}


def filled(text: str) -> str:
    """A page with its tables."""

    def fill(match: re.Match[str]) -> str:
        name, *arguments = match[1].split()
        return FILLS[name](*arguments)

    return re.sub(r"^<!-- fill: (.*) -->$", fill, text, flags=re.M)


# -- links that leave docs/, the project's pages, notebooks -----------------------------------------------------------


def origin(src_uri: str) -> str:
    """Where a page lies in the repository, from which its links are meant."""
    return next((file for file, uri in PROJECT.items() if uri == src_uri), f"docs/{src_uri}")


def documented() -> dict[str, str]:
    """The page of every module that the reference documents as a whole."""
    return {
        module: page.relative_to(DOCS).as_posix()
        for page in sorted((DOCS / "reference").rglob("*.md"))
        for module in re.findall(r"^::: (fedloom[\w.]*)$", page.read_text(), re.M)
    }


MODULES = documented()


def page_of(file: str) -> str:
    """The page of the site that shows a file of the repository, with an anchor; empty if none does."""
    module = "fedloom." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if module in MODULES:
        return f"{MODULES[module]}#{module}"
    if file in PROJECT or file in HOME:
        return {**PROJECT, **HOME}[file]
    if file.startswith("docs/"):
        return file.removeprefix("docs/").replace(".ipynb", ".md")
    return f"source/{file}.md" if (ROOT / file).is_file() else ""


def relinked(text: str, src_uri: str) -> str:
    """The page with links that leave `docs/` leading to pages of the site."""
    at = os.path.dirname(origin(src_uri))

    def link(match: re.Match[str]) -> str:
        title, target = match[1], match[2]
        path, _, anchor = target.partition("#")
        file = normpath(f"{at}/{path}") if at else normpath(path)
        if "://" in target or not path or (file.startswith("docs/") and origin(src_uri).startswith("docs/")):
            return match[0].replace(".ipynb", ".md") if "://" not in target else match[0]
        page = page_of(file)
        if not page:
            return title
        page, _, module = page.partition("#")
        anchor = "" if file in HOME else anchor or module
        return f"[{title}]({relpath(page, os.path.dirname(src_uri) or '.')}{'#' + anchor if anchor else ''})"

    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in CODE.split(text))


def linked_files() -> set[str]:
    """Files of the repository, beside its pages, that a page links."""
    linked = set()
    for page in [*DOCS.rglob("*.md"), *(ROOT / name for name in PROJECT)]:
        for _, target in LINK.findall(CODE.sub("", page.read_text())):
            file = os.path.normpath(os.path.join(os.path.relpath(page.parent, ROOT), target.partition("#")[0]))
            if "://" not in target and page_of(file).startswith("source/"):
                linked.add(file)
    return linked


def shown(file: str) -> str:
    """A page with a file."""
    language = {".py": "python", ".yaml": "yaml"}.get(Path(file).suffix, "text")
    return (
        f"---\nsearch:\n  exclude: true\n---\n\n# {file}\n\n```{language}\n{(ROOT / file).read_text().rstrip()}\n```\n"
    )


def notebook(file: Path) -> str:
    """An executed notebook as a page: texts, code, and what the cells printed and drew."""
    parts = []
    for cell in json.loads(file.read_text())["cells"]:
        text = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            data: dict[str, Any] = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                parts.append(f'<img alt="" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">')
            elif "text/html" in data:
                parts.append(f'<div class="output">{TABLE.sub("<table>", "".join(data["text/html"]))}</div>')
            elif printed := COLOURS.sub("", "".join(data["text/plain"])).rstrip():
                parts.append(f"```text\n{printed}\n```")
    return "\n\n".join(parts) + f"\n\n[The notebook]({file.name})\n"


# -- what MkDocs calls ------------------------------------------------------------------------------------------------


def _expanded(entry: Any, taken: set[str]) -> list[Any]:
    if isinstance(entry, dict):
        ((title, below),) = entry.items()
        if isinstance(below, str) and not below.endswith("*"):
            return [entry]
        children = [new for each in ([below] if isinstance(below, str) else below) for new in _expanded(each, taken)]
        return [{title: children}] if children else []
    if not entry.endswith("/*"):
        return [entry]
    folder = entry.removesuffix("/*")
    pages = [page.relative_to(DOCS).as_posix() for page in (DOCS / folder).glob("*.md")]
    pages += [f"{folder}/{page.stem}.md" for page in (DOCS / folder).glob("*.ipynb")]
    pages += [uri for uri in PROJECT.values() if uri.startswith(f"{folder}/")]
    return sorted((page for page in pages if page not in taken), key=lambda page: title_of(page).lower())


def title_of(uri: str) -> str:
    """What a page is called in the navigation, by which it is sorted."""
    file = ROOT / origin(uri)
    text = file.read_text() if file.exists() else notebook(file.with_suffix(".ipynb"))
    return re.search(r"^# (.*)$", text, re.M)[1]  # type: ignore[index]  # a page has a title


def _pages(entry: Any) -> Iterable[str]:
    for below in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from _pages(below)
    if isinstance(entry, str):
        yield entry


def on_startup(**_: Any) -> None:
    """Links the sources as mkdocstrings reads them: it skips folders without an `__init__.py`, as `platform/` is."""
    top = ROOT / "build" / "api" / "fedloom"
    shutil.rmtree(top, ignore_errors=True)
    (top / "platform").mkdir(parents=True)
    (top / "platform" / "__init__.py").touch()
    for folder in ("actors", "experiments", "tiers"):
        (top / folder).symlink_to(ROOT / folder)
    (top / "__init__.py").symlink_to(ROOT / "experiments" / "fedloom" / "__init__.py")
    for each in (ROOT / "platform").iterdir():
        (top / "platform" / each.name).symlink_to(each)


def on_config(config: MkDocsConfig) -> None:
    """`FOLDER/*` in the navigation means all pages of the folder that are not named, by their titles."""
    taken = set(_pages(config.nav))
    config.nav = [new for entry in config.nav or [] for new in _expanded(entry, taken)]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages of the project, the notebooks, and the files that pages link."""
    new = {uri: (ROOT / file).read_text() for file, uri in PROJECT.items()}
    new |= {f"source/{file}.md": shown(file) for file in linked_files()}
    new |= {f"notebooks/{file.stem}.md": notebook(file) for file in (DOCS / "notebooks").glob("*.ipynb")}
    for uri, text in new.items():
        files.append(File.generated(config, uri, content=text))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Fills a page, and leads its links to where the site has what they mean."""
    text = filled(markdown).replace("```console\n", "```bash\n")  # whose lines have no prompt
    return text if page.file.src_uri.startswith("source/") else relinked(text, page.file.src_uri)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Leads to our copy of what makes the search work in pages that are opened as files."""
    return output.replace(SHIM, f"{relpath('.', os.path.dirname(page.url) or '.')}/vendor/iframe-worker/shim.js")


def on_post_template(output: str, **_: Any) -> str:
    """The same for the page that a server shows where there is none."""
    return output.replace(SHIM, "/vendor/iframe-worker/shim.js")
