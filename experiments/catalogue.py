"""`fedloom keys` and `fedloom plugins`: every configuration key, and all code that can be chosen by name."""

import inspect
import math
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
from fedloom.platform.averaging.attacks import ATTACKS
from fedloom.platform.averaging.processors import PROCESSORS
from fedloom.platform.averaging.server import ARRIVAL_RULES, SERVER_RULES
from fedloom.platform.averaging.weighting import WEIGHTING_RULES
from fedloom.platform.clients.local_rules import LOCAL_RULES
from fedloom.platform.clients.objectives import OBJECTIVES
from fedloom.platform.clients.optimizers import LOCAL_OPTIMIZERS
from fedloom.platform.data.augment import AUGMENTATIONS
from fedloom.platform.data.registry import DATASETS, TORCHVISION
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.selection import SELECTION_RULES
from fedloom.platform.federation.tiers import BUDGETS
from fedloom.platform.methods.distribution import HEURISTICS
from fedloom.platform.methods.registry import METHODS
from fedloom.platform.methods.shares import SHARES_RULES
from fedloom.platform.plugins import Registry, nearest
from fedloom.platform.search.predictors import PREDICTORS
from fedloom.platform.search.registry import SEARCHERS
from fedloom.platform.settings import Setting, options_of, settings_of, written
from fedloom.platform.spaces.registry import NETWORKS, SPACES

MOST_NARROW, LONGEST_LINE = 40, 120

REGISTRIES: tuple[Registry[Any], ...] = (
    DATASETS,
    AUGMENTATIONS,
    OBJECTIVES,
    SPACES,
    NETWORKS,
    BUDGETS,
    SELECTION_RULES,
    LOCAL_RULES,
    LOCAL_OPTIMIZERS,
    WEIGHTING_RULES,
    SERVER_RULES,
    AGGREGATORS,
    ARRIVAL_RULES,
    PROCESSORS,
    ATTACKS,
    HEURISTICS,
    SHARES_RULES,
    SEARCHERS,
    PREDICTORS,
)
"""The registries of all components that can be chosen by name, except methods."""


# -- keys -------------------------------------------------------------------------------------------------------------


def known_keys(words: Sequence[str]) -> list[Setting]:
    """The settings whose keys start with one of the given words; all settings if no such word is given.

    Words of the form key=value choose a preset or a method, or change values. The options of plug-ins that are chosen
    by name are included. Raises ValueError for a word that no key starts with.
    """
    config = compose_config([word for word in words if "=" in word])
    settings = [*_with_options(config)]
    keys = [setting.key for setting in settings]
    prefixes = [word.rstrip(".") for word in words if "=" not in word]
    for prefix in prefixes:
        if _begins(prefix, "ablation"):
            raise ValueError("ablation.* are keys of an ablation, not of a run: docs/how-to/ablations.md lists them")
        if not any(_begins(key, prefix) for key in keys):
            groups = sorted({key.rpartition(".")[0] for key in keys if "." in key} | set(keys))
            raise ValueError(
                f"no configuration key begins with {prefix!r} (method {config.method.name}){meant(prefix, groups)}"
            )
    return [s for s in settings if not prefixes or any(_begins(s.key, prefix) for prefix in prefixes)]


def _begins(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}.")


def _with_options(config: RunConfig) -> Iterator[Setting]:
    """All settings; a mapping `options` is followed by the options of the plug-ins that are chosen by name."""
    settings = [*settings_of(config)]
    options: dict[str, list[Setting]] = {s.key.rpartition(".")[0]: [] for s in settings if s.key.endswith(".options")}
    for setting in settings:
        component = setting.component
        registry = next((each for each in REGISTRIES if each.kind == component), None)
        groups = [group for group in options if setting.key.startswith(f"{group}.")]
        if registry is not None and groups and setting.default is not None:
            group = max(groups, key=len)
            for name in setting.default if isinstance(setting.default, list) else [setting.default]:
                options[group] += options_of(registry, name, f"{group}.options")
    for setting in settings:
        yield setting
        group, _, name = setting.key.rpartition(".")
        if name == "options":
            yield from {option.key: option for option in options[group]}.values()


def whose_keys(words: Sequence[str], settings: Sequence[Setting]) -> str:
    """A hint on which method has the keys `method.*`; empty if a method or preset was chosen, or none is listed."""
    chosen = any(each.startswith((PRESET, "method=")) for each in words)
    if chosen or not any(setting.key.startswith("method.") for setting in settings):
        return ""
    again = " ".join(["fedloom keys", *words])
    return (
        f"method.* are those of {DEFAULT_METHOD}, the default method; for another: {again} method=fedavg\n"
        f"with a preset's values: {again} {PRESET}fedavg_digits; all methods: fedloom plugins method"
    )


def show_keys(settings: Sequence[Setting], *, as_json: bool, whose: str = "") -> None:
    """Prints the hint `whose` and one line per key with its meaning below, or one JSON object."""
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
    # JSON has no infinity.
    default = written(setting.default) if setting.default == math.inf else setting.default
    values = {"key": setting.key, "type": setting.kind, "default": default}
    return {**values, "allowed": setting.allowed or None, "help": setting.help}


# -- plug-ins ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Code:
    """A built-in plug-in: its name, a description, and its options."""

    name: str
    text: str
    options: tuple[Setting, ...] = ()


@dataclass(frozen=True)
class PluginPoint:
    """What can be chosen by name: its kind, the keys that choose it, the form of user code, and the built-ins."""

    kind: str
    keys: tuple[str, ...]
    form: str
    built_in: tuple[Code, ...]

    def has(self, word: str) -> bool:
        """Whether the kind, a key or the name of a built-in contains the word."""
        texts = (text.replace("_", " ") for text in (self.kind, *self.keys))
        in_text = any(word.lower().replace("_", " ") in text for text in texts)
        return in_text or any(word.lower() in code.name.lower() for code in self.built_in)


def known_code(words: Sequence[str]) -> list[PluginPoint]:
    """The plug-in points whose kind, keys or built-in names contain one of these words; all if no word is given.

    Raises ValueError for a word that no plug-in point contains.
    """
    methods = [Code(name, _first_line(sys.modules[m.config.__module__])) for name, m in METHODS.items()]
    form = "a fedloom.platform.federation.method.Method"
    settings = [*settings_of(RunConfig())]
    settings += (setting for method in METHODS.values() for setting in settings_of(method.config(), "method."))
    chosen_by = [(setting.component, setting.key) for setting in settings]
    points = [PluginPoint("method", ("method",), form, tuple(methods)), *(_point(r, chosen_by) for r in REGISTRIES)]
    for word in words:
        if not any(point.has(word) for point in points):
            kinds = [point.kind for point in points]
            raise ValueError(
                f"no kind, key or name contains {word!r}{nearest(word, kinds)}; the kinds are {', '.join(kinds)}"
            )
    return [point for point in points if not words or any(point.has(word) for word in words)]


def _point(registry: Registry[Any], chosen_by: Sequence[tuple[str | None, str]]) -> PluginPoint:
    keys = dict.fromkeys(key for component, key in chosen_by if component == registry.kind)
    built_in = []
    for name, code in registry.known.items():
        # A partial function is documented by its last argument if that is a dataclass (a space's design), or else by
        # the function that it wraps.
        while hasattr(code, "func"):
            code = type(code.args[-1]) if code.args and is_dataclass(code.args[-1]) else code.func
        built_in.append(Code(name, _first_line(code), tuple(options_of(registry, name, "options"))))
    if registry is DATASETS:
        built_in.append(Code(f"{TORCHVISION}NAME", "Any classification set of torchvision, such as FashionMNIST."))
    return PluginPoint(registry.kind, tuple(keys), registry.form, tuple(built_in))


def _first_line(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def show_code(points: Sequence[PluginPoint], *, as_json: bool) -> None:
    """Prints the keys, the required form of user code and the built-ins of plug-in points, or one JSON object."""
    if as_json:
        points_json = []
        for point in points:
            built_in = [
                {"name": code.name, "text": code.text, "options": [*map(_as_json, code.options)]}
                for code in point.built_in
            ]
            points_json.append({"kind": point.kind, "keys": list(point.keys), "own": point.form, "built_in": built_in})
        write_json({"places": points_json})
        return
    screen = console()
    for point in points:
        screen.print(f"{point.kind}: {', '.join(f'{key}=NAME' for key in point.keys)}", style="bold", markup=False)
        _below(screen, f"your own code (module:name): {point.form}")
        for code in point.built_in:
            screen.print(f"  {code.name:<22} {code.text}", markup=False)
            for option in code.options:
                screen.print(f"    {option.key.rpartition('.')[2]}={written(option.default)}  ({option})", markup=False)
        screen.print()
