"""Misspelt keys, presets and methods, found before torch is loaded: whoever mistypes waits for no import."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cache

from fedloom.experiments.runs.presets import CONF, DEFAULT_METHOD, PRESET, experiments, method_in
from fedloom.platform.plugins import is_import_path, nearest
from fedloom.platform.words import shown

METHOD = "method="
FREE = ("options", "cost_weights", "label_sets")
"""Mappings of the configuration that accept arbitrary keys."""
ENDINGS = (".yaml", ".yml")
"""Endings of presets of the user's own."""
TRUTH = ("true", "false", "yes", "no", "y", "n", "on", "off", "0", "1", "null")
"""How a value that is true or false is given; Hydra takes any other number for true."""
MOST_NAMES = 8
KEYS = CONF / "keys.txt"
"""All keys of the configuration, of a method's with `method(NAME)` for `method`; a test keeps the file up to date."""


def check_spelling(overrides: Sequence[str]) -> None:
    """Raises ValueError for a preset, a method or a key that does not exist; one with code of the user's own passes."""
    given = [(key.lstrip("+"), value) for key, _, value in (unquoted(o).partition("=") for o in overrides)]
    for key, value in given:
        if problem := _not_there(key, value):
            raise ValueError(problem)
    chosen = [(f"{key}=", value) for key, value in given if f"{key}=" in (PRESET, METHOD)]
    if any(is_own(value) for _, value in chosen):
        return
    method = next((value for key, value in reversed(chosen) if key == METHOD), None)
    known = keys_of(method or next((method_in(value) for _, value in reversed(chosen)), DEFAULT_METHOD))
    for key, value in given:
        head, _, last = key.rpartition(".")
        key = head if last.isdigit() else key  # an entry of a list
        inside = free_part(key) or key
        if value and key and inside not in known and f"{key}=" not in (PRESET, METHOD) and not key.startswith("~"):
            raise ValueError(unknown(inside, known))
        if (
            known.get(key, "").startswith("true or false")
            and "${" not in value
            and value.strip(" '\"").lower() not in TRUTH
        ):
            raise ValueError(f"{key}={shown(value)}: must be {known[key]}")


def check_given_once(overrides: Sequence[str]) -> None:
    """Raises ValueError for a key that was typed with two values, of which only one could count.

    What fedloom itself adds to a command line, such as an ablation's overrides, is no matter of this check.
    """
    known: dict[str, str] = {}
    for override in overrides:
        key, equals, value = unquoted(override).lstrip("+").partition("=")
        if equals and known.setdefault(key, value) != value:
            raise ValueError(f"{key} was given twice, as {shown(known[key])} and as {shown(value)}: give one of them")


@cache
def is_own(value: str) -> bool:
    """Whether a value names code or a preset of the user's own."""
    return is_import_path(value) or value.endswith(ENDINGS)


def keys_of(method: str) -> dict[str, str]:
    """The keys of a configuration with a built-in method and what their values are, sections included."""
    own = f"method({method})."
    lines = [line.partition(": ") for line in KEYS.read_text().splitlines()]
    keys = {k.replace(own, "method.", 1): kind for k, _, kind in lines if k.startswith(own) or "(" not in k}
    sections = {".".join(parts[:n]) for parts in (key.split(".") for key in keys) for n in range(1, len(parts))}
    return keys | dict.fromkeys(sorted(sections), "")


@cache
def methods() -> list[str]:
    """The names of the built-in methods."""
    lines = [line for line in KEYS.read_text().splitlines() if line.startswith("method(")]
    return list(dict.fromkeys(line.removeprefix("method(").partition(")")[0] for line in lines))


def _not_there(key: str, value: str) -> str:
    """That there is no such preset or method, and which there are; empty for other keys, and if there is."""
    own = value.endswith(ENDINGS) if f"{key}=" == PRESET else is_import_path(value)
    for choice, kind, there in (("experiment", "preset", experiments), ("method", "method", methods)):
        if key == choice and value not in there() and not own:
            return f"{key}={shown(value)}: no such {kind}{nearest(value, there())}; there are {_some(value, there())}"
    return ""


def unknown(key: str, known: Iterable[str]) -> str:
    """That there is no such key, and which one may have been meant."""
    return f"unknown configuration key {key!r}{nearest(key, [*known]) or '; fedloom keys lists all'}"


def unquoted(override: str) -> str:
    """Removes the quotes that a shell or an ablation leaves around the name of a preset or a method."""
    key, _, value = override.partition("=")
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    return f"{key}={value[1:-1]}" if quoted and f"{key}=" in (PRESET, METHOD) else override


def free_part(key: str) -> str:
    """The mapping in a key that takes keys of the user's own, as it is called; empty if there is none."""
    parts = key.split(".")
    places = [place for place, part in enumerate(parts) if part in FREE]
    return ".".join(parts[: places[0] + 1]) if places else ""


def _some(given: str, names: list[str]) -> str:
    """All names, or the most similar ones if there are more than `MOST_NAMES`."""
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    like = sorted(get_close_matches(given, names, n=MOST_NAMES, cutoff=0.0))
    return f"{', '.join(like)} and {len(names) - len(like)} more (fedloom run --help lists all)"
