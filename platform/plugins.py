"""Finding code by the name that a configuration gives: a built-in name or an import path."""

import importlib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

T = TypeVar("T")


def nearest(name: str, known: list[str]) -> str:
    """`did you mean X?` for the nearest known name, or an empty string."""
    match = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


def resolve(kind: str, name: str, known: Mapping[str, T]) -> T:
    """The built-in of that name, or what the import path `package.module:attribute` names.

    Raises:
        ValueError: unknown name or a path that cannot be imported; lists the known names.
    """
    if name in known:
        return known[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        allowed = ", ".join(sorted(known))
        raise ValueError(f"unknown {kind} {name!r}: known are {allowed}, or module:attribute{nearest(name, [*known])}")
    try:
        found: T = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{kind} {name!r} cannot be imported ({error}): give module:attribute") from error
    return found
