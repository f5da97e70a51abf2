"""`fedloom tables`: the columns of the result tables, with their types, units and meanings."""

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from fedloom.experiments.terminal import console, write_json
from fedloom.platform.plugins import nearest
from fedloom.platform.results.columns import ABOUT, OF_EVERY_TABLE, TEXTS, unit_of
from fedloom.platform.results.tables import TABLES

KINDS = {"int64": "int", "double": "float", "string": "text", "bool": "bool", "timestamp[us, tz=UTC]": "time (UTC)"}
NARROWEST = 30
"""Characters of a meaning's line, however narrow the terminal is."""


def described_tables(names: Sequence[str]) -> list[dict[str, Any]]:
    """Each named table (all, if none is named) with what a row is and its columns; ValueError for an unknown table."""
    for name in names:
        if name not in TABLES:
            raise ValueError(f"there is no table {name!r}{nearest(name, list(TABLES))}; there are {', '.join(TABLES)}")
    return [
        {"table": table, "about": ABOUT[table], "columns": _columns(table)}
        for table in TABLES
        if table in names or not names
    ]


def _columns(table: str) -> list[dict[str, str]]:
    kinds = dict.fromkeys(OF_EVERY_TABLE, "text") | {field.name: KINDS[str(field.type)] for field in TABLES[table]}
    texts = {**OF_EVERY_TABLE, **TEXTS[table]}
    return [
        {"column": name, "type": kind, "unit": unit_of(name), "meaning": texts[name]} for name, kind in kinds.items()
    ]


def show_tables(tables: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """Prints a line per column, or one JSON object."""
    if as_json:
        write_json({"tables": list(tables)})
        return
    screen = console()
    for table in tables:
        screen.print(f"{table['table']}: {table['about']}", style="bold")
        heads = ("column", "type", "unit")
        widths = [max(len(head), *(len(row[head]) for row in table["columns"])) for head in heads]
        for row in table["columns"]:
            start = "  " + "  ".join(row[head].ljust(width) for head, width in zip(heads, widths, strict=True))
            first, *rest = wrap(row["meaning"], max(NARROWEST, screen.width - len(start) - 2))
            for line in (f"{start}  {first}", *(f"{' ' * len(start)}  {line}" for line in rest)):
                screen.print(line)
        screen.print()
