"""Nested values as their differences from others that hardly differ, such as the configurations of an ablation."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Difference = tuple[Sequence[str], Any]
"""The names that lead to a value, and the value."""


def differences(base: Any, values: Any) -> list[Difference]:
    """The differences of JSON values from `base`, down to the mappings that do not have the same names."""
    return list(_differences(base, values, ()))


def _differences(base: Any, values: Any, place: tuple[str, ...]) -> Iterator[Difference]:
    if isinstance(base, Mapping) and isinstance(values, Mapping) and [*base] == [*values]:
        for name, value in values.items():
            yield from _differences(base[name], value, (*place, name))
    elif not _same(base, values):
        yield place, values


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same text in JSON, which tells 1, 1.0 and true apart."""
    if type(one) is not type(other):
        return False
    if isinstance(one, str | int | None):
        return bool(one == other)
    return json.dumps(one) == json.dumps(other)


def with_differences(base: Any, found: Sequence[Difference]) -> Any:
    """The values with these differences from `base`; they share with it all that does not differ."""
    for place, value in found:
        base = _with(base, place, value)
    return base


def _with(base: Any, place: Sequence[str], value: Any) -> Any:
    if not place:
        return value
    return {**base, place[0]: _with(base[place[0]], place[1:], value)}
