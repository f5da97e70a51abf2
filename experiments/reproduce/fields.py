"""Reads mappings of YAML strictly: a key that is unknown, missing or of another type is one line that says where."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedloom.platform.plugins import nearest
from fedloom.platform.words import shown

NUMBER = (int, float)


def read_yaml(file: Path) -> Any:
    """The content of a YAML file, by libyaml's parser where it is installed: eight times as fast, for many items."""
    return yaml.load(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


class Fields:
    """The entries of one mapping of a file; `where` names the file and the place in it."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            raise ValueError(f"{where} is {shown(values)}: give names with values")
        self.where = where
        self._values = {str(key): value for key, value in values.items()}

    @property
    def names(self) -> list[str]:
        """The keys, in the order of the file."""
        return [*self._values]

    def only(self, *allowed: str) -> "Fields":
        """Itself; ValueError for a key that is none of `allowed`."""
        for name in self._values:
            if name not in allowed:
                close = nearest(name, [*allowed])
                raise ValueError(f"{self.where}: unknown key {name!r}{close}; there are {', '.join(allowed)}")
        return self

    def has(self, name: str) -> bool:
        """Whether the key is given."""
        return name in self._values

    def inner(self, name: str) -> "Fields":
        """The mapping at a key; empty if it is not given."""
        return Fields(self._values.get(name) or {}, f"{self.where}: {name}")

    def value(self, name: str) -> Any:
        """The value at a key, as it is; ValueError if it is not given."""
        if name not in self._values:
            raise ValueError(f"{self.where}: {name} is missing")
        return self._values[name]

    def text(self, name: str, default: str | None = None) -> str:
        """A text; ValueError if there is no default and it is not given or empty."""
        if default is not None and name not in self._values:
            return default
        found = self.value(name)
        if not isinstance(found, str) or not found.strip():
            raise ValueError(f"{self.where}: {name} is {shown(found)}: give a text")
        return found.strip()

    def number(self, name: str, default: float | None = None) -> float:
        """A number; ValueError if there is no default and it is not given."""
        if default is not None and name not in self._values:
            return default
        return as_number(self.value(name), f"{self.where}: {name}")

    def one_of(self, name: str, allowed: Sequence[str], default: str | None = None) -> str:
        """One of these words."""
        found = self.text(name, default)
        if found not in allowed:
            close = nearest(found, [*allowed])
            raise ValueError(f"{self.where}: {name}={found}{close}; there are {', '.join(allowed)}")
        return found

    def one_or_more(self, name: str) -> tuple[str, ...]:
        """A text or a list of texts; empty if it is not given."""
        return (found,) if isinstance(found := self._values.get(name), str) else self.texts(name)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts or numbers, as texts; empty if it is not given."""
        return tuple(str(each) for each in self.list(name))

    def list(self, name: str) -> Sequence[Any]:
        """A list; empty if it is not given."""
        found = self._values.get(name, [])
        if not isinstance(found, list):
            raise ValueError(f"{self.where}: {name} is {shown(found)}: give a list")
        return found


def as_number(value: Any, where: str) -> float:
    """The value as a number; YAML reads 1e6 as a text, which counts as well."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{where} is {shown(value)}: give a number")
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{where} is {shown(value)}: give a number") from None


def check_known(given: Iterable[str], known: Sequence[str], what: str, where: str) -> None:
    """Raises ValueError for a name that is not known."""
    for name in given:
        if name not in known:
            close = nearest(name, [*known])
            raise ValueError(f"{where}: there is no {what} {name!r}{close}; there are {', '.join(known)}")
