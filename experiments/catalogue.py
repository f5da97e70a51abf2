"""`fedloom keys` and `fedloom plugins`: every configuration key, and all code that can be chosen by name."""

import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from textwrap import wrap
from typing import Any

from rich.console import Console

import fedloom.platform.methods  # noqa: F401 - registers the built-in rules
from fedloom.experiments.runs.configuration import compose_config
from fedloom.experiments.runs.overrides import meant
from fedloom.experiments.runs.presets import DEFAULT_METHOD, PRESET
from fedloom.experiments.terminal import console, write_json
from fedloom.platform.averaging.aggregators import AGGREGATORS
from fedloom.platform.averaging.processors import PROCESSORS
from fedloom.platform.averaging.server import SERVER_RULES
from fedloom.platform.averaging.shares import SHARES_RULES
from fedloom.platform.averaging.weighting import WEIGHTING_RULES
from fedloom.platform.clients.local_rules import LOCAL_RULES
from fedloom.platform.clients.objectives import OBJECTIVES
from fedloom.platform.data.augment import AUGMENTATIONS
from fedloom.platform.data.sources import DATASETS, TORCHVISION
from fedloom.platform.federation.budgets import BUDGETS
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.distribution import HEURISTICS
from fedloom.platform.federation.selection import SELECTION_RULES
from fedloom.platform.methods.registry import METHODS
from fedloom.platform.plugins import Registry, nearest
from fedloom.platform.search.predictors import PREDICTORS
from fedloom.platform.search.registry import SEARCHERS
from fedloom.platform.settings import Setting, options_of, settings_of, written
from fedloom.platform.spaces.registry import SPACES

MOST_NARROW, LONGEST_LINE = 40, 120

REGISTRIES: tuple[Registry[Any], ...] = (
    DATASETS,
    AUGMENTATIONS,
    OBJECTIVES,
    SPACES,
    BUDGETS,
    SELECTION_RULES,
    LOCAL_RULES,
    WEIGHTING_RULES,
    SERVER_RULES,
    AGGREGATORS,
    PROCESSORS,
    HEURISTICS,
    SHARES_RULES,
    SEARCHERS,
    PREDICTORS,
)
"""All components that can be chosen by name, by what they are."""


# -- keys -------------------------------------------------------------------------------------------------------------


def known_keys(given: Sequence[str]) -> list[Setting]:
    """The settings whose keys start with one of the given words; all settings if no such word is given.

    Words of the form key=value choose a preset or a method, or change values. The options of plug-ins that are chosen
    by name are included. Raises ValueError for a word that no key starts with.
    """
    config = compose_config([word for word in given if "=" in word])
    prefixes = [word for word in given if "=" not in word]
    settings = [*_with_options(config)]
    keys = [s.key for s in settings]
    for prefix in prefixes:
        if not any(key == prefix or key.startswith(f"{prefix.rstrip('.')}.") for key in keys):
            groups = sorted({key.rpartition(".")[0] for key in keys if "." in key} | set(keys))
            raise ValueError(
                f"no configuration key begins with {prefix!r} (method {config.method.name}){meant(prefix, groups)}"
            )
    wanted = [p.rstrip(".") for p in prefixes]
    return [s for s in settings if not wanted or any(s.key == p or s.key.startswith(f"{p}.") for p in wanted)]


def _with_options(config: RunConfig) -> Iterator[Setting]:
    """All settings; a mapping `options` is followed by the options of the plug-ins that are chosen by name."""
    settings = [*settings_of(config)]
    places = [s.key.rpartition(".")[0] for s in settings if s.key.endswith(".options")]
    options: dict[str, list[Setting]] = {place: [] for place in places}
    for setting in settings:
        registry = next((each for each in REGISTRIES if each.kind == setting.component), None)
        above = [p for p in places if setting.key.startswith(f"{p}.")]
        if registry is not None and above and setting.default is not None:
            place = max(above, key=len)
            for name in setting.default if isinstance(setting.default, list) else [setting.default]:
                options[place] += options_of(registry, name, f"{place}.options")
    for setting in settings:
        yield setting
        place, _, name = setting.key.rpartition(".")
        if name == "options":
            yield from {option.key: option for option in options[place]}.values()


def whose_keys(given: Sequence[str], settings: Sequence[Setting]) -> str:
    """Whose the keys `method.*` are, and how to see another method's; empty if a method was chosen, or if none is."""
    chosen = any(word.startswith((PRESET, "method=")) for word in given)
    if chosen or not any(setting.key.startswith("method.") for setting in settings):
        return ""
    again = " ".join(["fedloom keys", *given])
    return (
        f"method.* are those of {DEFAULT_METHOD}, the default method; another's: {again} method=fedavg\n"
        f"with a preset's values: {again} {PRESET}fedavg_digits; all methods: fedloom plugins method"
    )


def show_keys(settings: Sequence[Setting], *, as_json: bool, whose: str = "") -> None:
    """Prints `whose`, and one line per key with its meaning below, or one JSON object."""
    if as_json:
        write_json({"keys": [_as_json(setting) for setting in settings]})
        return
    screen = console()
    if whose:
        screen.print(f"{whose}\n", markup=False)
    for setting in settings:
        screen.print(f"{setting.key}={written(setting.default)}  ({setting})", markup=False)
        if setting.help:
            _below(screen, setting.help)


def _below(screen: Console, text: str) -> None:
    for line in wrap(text, max(MOST_NARROW, min(screen.width, LONGEST_LINE)) - 4):
        screen.print(f"    {line}", markup=False)


def _as_json(setting: Setting) -> dict[str, Any]:
    values = {"key": setting.key, "type": setting.kind, "default": setting.default}
    return {**values, "allowed": setting.allowed or None, "help": setting.help}


# -- plug-ins ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Code:
    """A built-in plug-in: its name, a description, and its options."""

    name: str
    text: str
    options: tuple[Setting, ...] = ()


@dataclass(frozen=True)
class Place:
    """A plug-in point: its kind, the keys that choose the code, the required form of user code, and the built-ins."""

    kind: str
    keys: tuple[str, ...]
    own: str
    built_in: tuple[Code, ...]


def known_code(words: Sequence[str]) -> list[Place]:
    """The plug-in points whose kind, keys or built-in names contain one of these words; all if no word is given.

    Raises ValueError for a word that no plug-in point contains.
    """
    places = [_methods(), *(_place(registry) for registry in REGISTRIES)]
    for word in words:
        if not any(_is_of(place, word) for place in places):
            kinds = [place.kind for place in places]
            raise ValueError(f"nothing is chosen by {word!r}{nearest(word, kinds)}; there are {', '.join(kinds)}")
    return [place for place in places if not words or any(_is_of(place, word) for word in words)]


def _is_of(place: Place, word: str) -> bool:
    named = any(word.lower() in code.name.lower() for code in place.built_in)
    return named or any(word.lower().replace("_", " ") in text.replace("_", " ") for text in (place.kind, *place.keys))


def _methods() -> Place:
    found = tuple(Code(name, _first_line(sys.modules[method.config.__module__])) for name, method in METHODS.items())
    return Place("method", ("method",), "a fedloom.platform.federation.algorithm.Method", found)


def _place(registry: Registry[Any]) -> Place:
    keys = tuple(dict.fromkeys(s.key for s in _all_settings() if s.component == registry.kind))
    found = [Code(name, _first_line(_undressed(code)), tuple(options_of(registry, name, "options")))
             for name, code in registry.known.items()]  # fmt: skip
    if registry is DATASETS:
        found.append(Code(f"{TORCHVISION}NAME", "Any classification set of torchvision, such as FashionMNIST."))
    return Place(registry.kind, keys, registry.form, tuple(found))


def _undressed(code: Any) -> Any:
    """The object that carries the docstring: the design of a space, or the function in a partial function."""
    while hasattr(code, "func"):
        code = type(code.args[-1]) if code.args and is_dataclass(code.args[-1]) else code.func
    return code


def _all_settings() -> Iterator[Setting]:
    yield from settings_of(RunConfig())
    for method in METHODS.values():
        yield from settings_of(method.config(), "method.")


def _first_line(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def show_code(places: Sequence[Place], *, as_json: bool) -> None:
    """Prints the keys, the required form of user code and the built-ins of plug-in points, or one JSON object."""
    if as_json:
        write_json({"places": [_place_as_json(place) for place in places]})
        return
    screen = console()
    for place in places:
        screen.print(f"{place.kind}: {', '.join(f'{key}=NAME' for key in place.keys)}", style="bold", markup=False)
        _below(screen, f"module:name of your own is {place.own}")
        for code in place.built_in:
            screen.print(f"  {code.name:<22} {code.text}", markup=False)
            for option in code.options:
                screen.print(f"    {option.key.rpartition('.')[2]}={written(option.default)}  ({option})", markup=False)
        screen.print()


def _place_as_json(place: Place) -> dict[str, Any]:
    built_in = [{"name": c.name, "text": c.text, "options": [_as_json(o) for o in c.options]} for c in place.built_in]
    return {"kind": place.kind, "keys": list(place.keys), "own": place.own, "built_in": built_in}
