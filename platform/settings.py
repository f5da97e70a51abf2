"""Settings: the values that fields of configurations and options of components may have, and their checks.

Type annotations declare them, and pydantic checks them. Numbers have bounds from annotated_types, words are a Literal,
other texts are marked with a `Text`, and a plain string among the marks is the setting's help:

    lr: Annotated[float, POSITIVE, "the clients' learning rate"] = 0.1
    betas: Annotated[list[Annotated[float, PART]] | None, "one per tier; null: none"] = None

Only the driver checks values: workers, which unpickle configurations, do not import pydantic.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Interval

from fedloom.platform.plugins import (
    ComponentSpec,
    Registry,
    an,
    is_import_path,
    keyword_options,
    nearest,
    positional_defaults,
)
from fedloom.platform.words import shown

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import CoreSchema, ErrorDetails

T = TypeVar("T")

LARGEST_WHOLE = 2**63 - 1
"""The largest whole number of any setting: tables and torch hold integers of 64 bits."""
LARGEST_FLOAT = 3e38
"""The largest absolute value of other numbers: networks compute with 32-bit floats."""
NAME_BYTES, PATH_BYTES = 255, 3000
"""The most bytes of a name, and of a folder's path: the rest of a path's 4096 bytes is for the files in the folder."""

POSITIVE = Interval(gt=0)
ZERO_OR_MORE = Interval(ge=0)
ONE_OR_MORE = Interval(ge=1)
SHARE = Interval(gt=0, le=1)
PART = Interval(ge=0, le=1)
BELOW_ONE = Interval(ge=0, lt=1)
UP_TO_A_THOUSAND, UP_TO_A_MILLION = Interval(ge=1, le=1000), Interval(ge=1, le=1_000_000)


class Infinite:
    """Marks a float that may be infinite."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], "CoreSchema"]) -> "CoreSchema":
        return {**handler(source), "allow_inf_nan": True}

    def __str__(self) -> str:
        return "or infinity"


@dataclass(frozen=True)
class Text:
    """Marks a text for which `holds` must be true; `meaning` says in words what the text must be."""

    meaning: str
    holds: Callable[[str], bool]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], "CoreSchema"]) -> "CoreSchema":
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, text: str | None) -> str | None:
        if text is not None and not self.holds(text):
            raise ValueError(self.meaning)
        return text

    def __str__(self) -> str:
        return self.meaning


@dataclass(frozen=True)
class ComponentName:
    """Marks the name of a built-in component, or `module:name`; `kind` is its registry's, such as `server rule`."""

    kind: str

    def __str__(self) -> str:
        return f"the name of {an(self.kind)}, or module:name"


def is_path(text: str) -> bool:
    """Whether a text is a path, or a URL, that file systems can hold."""
    whole = text.encode(errors="surrogatepass")
    fits = len(whole) <= PATH_BYTES and all(len(name) <= NAME_BYTES for name in whole.split(b"/"))
    return bool(text.strip()) and "\0" not in text and fits


NOT_EMPTY = Text("a text of at least one character", lambda text: bool(text.strip()))
PATH = Text(f"a path of at most {PATH_BYTES} bytes, each name in it of at most {NAME_BYTES}", is_path)


class UnknownKeyError(ValueError):
    """A configuration has no such key."""

    def __init__(self, key: str, known: Sequence[str]) -> None:
        super().__init__(f"unknown configuration key {key!r}{nearest(key, [*known])}")
        self.key, self.known = key, known


# -- what a setting may be ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A field of a configuration or an option of a component.

    Attributes:
        key: its dotted key.
        type: its annotation.
        default: its value.
        owner: the component that it is an option of, such as `local rule fedprox`; empty for a field.
    """

    key: str
    type: Any
    default: Any = None
    owner: str = ""

    @property
    def marks(self) -> list[Any]:
        """The metadata of its annotation, at any depth."""
        return [*_marks(self.type)]

    @property
    def help(self) -> str:
        """Its help text."""
        text = next((mark for mark in self.marks if isinstance(mark, str)), "")
        return f"{self.owner}: {text}" if self.owner else text

    @property
    def component(self) -> str | None:
        """The kind of component that it names; None if it does not name one."""
        return next((mark.kind for mark in self.marks if isinstance(mark, ComponentName)), None)

    @property
    def choices(self) -> list[str]:
        """The words of its Literal; empty if it has none."""
        literals = [each for each in _alternatives(self.type) if get_origin(each) is Literal]
        return [str(word) for literal in literals for word in get_args(literal)]

    @property
    def is_group(self) -> bool:
        """Whether it may have keys of its own, as `first: Phase | None` may."""
        return any(map(is_dataclass, _alternatives(self.type)))

    @property
    def kind(self) -> str:
        """Its type in words, such as `float or null`."""
        return _type_text(self.type)

    @property
    def allowed(self) -> str:
        """The bounds of its numbers, or what its text must be; empty if its type says it all.

        The bounds hold for every number of a list.
        """
        marks = self.marks
        bounds = {n: b for n in ("ge", "gt", "le", "lt") for m in marks if (b := getattr(m, n, None)) is not None}
        least, above, most, below = (
            None if (bound := bounds.get(name)) is None else bound if isinstance(bound, int) else f"{bound:g}"
            for name in ("ge", "gt", "le", "lt")
        )
        upper = f"at most {most}" if most is not None else f"below {below}" if below is not None else ""
        if above is not None:
            words = f"above {above} and {upper}" if upper else f"greater than {above}"
        elif least is None:
            words = upper
        elif most is not None:
            words = f"between {least} and {most}"
        else:
            words = " and ".join(
                filter(None, [f"{least} or more" if upper or least == 0 else f"at least {least}", upper])
            )
        others = [str(mark) for mark in marks if isinstance(mark, Text | ComponentName | Infinite)]
        words = words or ("a number" if any(isinstance(mark, Infinite) for mark in marks) else "")
        return ", ".join(filter(None, [words, *others]))

    def __str__(self) -> str:
        return f"{self.kind}; {self.allowed}" if self.allowed else self.kind


def settings_of(config: Any, prefix: str = "") -> Iterator[Setting]:
    """Every setting of a configuration with its value, including nested ones, in the order of the fields."""
    for name, annotation in _hints(type(config)).items():  # type: ignore[arg-type]  # classes can be hashed
        value = getattr(config, name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from settings_of(value, f"{prefix}{name}.")
        else:
            yield Setting(f"{prefix}{name}", annotation, value)


@cache
def _hints(config: type) -> dict[str, Any]:
    hints = get_type_hints(config, include_extras=True)
    return {each.name: hints[each.name] for each in fields(config)}


def _marks(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        for mark in annotation.__metadata__:  # the protocol's own mark, because isinstance is slow for protocols
            yield from mark if hasattr(mark, "__is_annotated_types_grouped_metadata__") else (mark,)
    for inner in get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]:
        yield from _marks(inner)


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _alternatives(annotation: Any) -> list[Any]:
    """The members of a union, or the annotation itself, without marks."""
    annotation = _bare(annotation)
    return [*map(_bare, get_args(annotation))] if _is_union(annotation) else [annotation]


def _type_text(annotation: Any) -> str:
    annotation = _bare(annotation)
    origin, inner = get_origin(annotation), get_args(annotation)
    if _is_union(annotation):
        return " or ".join(map(_type_text, inner))
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type_text, inner))}]"
    words = {str: "text", bool: "true or false", Any: "any", NoneType: "null"}
    return words.get(annotation) or str(getattr(annotation, "__name__", annotation))


def written(value: Any) -> str:
    """Formats a value as on the command line."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{k}:{written(v)}' for k, v in value.items())}}}"
    return str(value)


# -- checks ------------------------------------------------------------------------------------------------------------


OUT_OF_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number", "value_error")
"""Pydantic's error types for values of the right type."""
CHOOSERS = ("name", "kind", "dataset", "rule", "heuristic")
"""The keys that choose what a group of keys configures."""


def validated(kind: type[T], values: Any, prefix: str = "") -> T:
    """A configuration of this class with the given values by field name; other fields have their defaults.

    `prefix` precedes its keys in messages. Raises ValueError with one line for the first value that is not allowed, and
    UnknownKeyError for a key that it does not have.
    """
    from pydantic import ValidationError

    try:
        (config,) = _adapter(kind).validate_python((values,))  # type: ignore[arg-type]  # classes can be hashed
    except ValidationError as error:
        raise _refusal(kind, error.errors()[0], prefix) from error
    _check_numbers(kind, values, config, prefix, ())
    return config  # type: ignore[no-any-return]


def check_settings(config: Any, prefix: str = "") -> None:
    """Raises ValueError naming the first setting of a configuration that is not allowed."""
    kind: Any = type(config)
    sections = {n: v for n, t in _hints(kind).items() if t is Any and is_dataclass(v := getattr(config, n))}
    validated(kind, {**asdict(config), **dict.fromkeys(sections)}, prefix)
    for name, section in sections.items():
        check_settings(section, f"{prefix}{name}.")


@cache
def _adapter(kind: type) -> "TypeAdapter[Any]":
    from pydantic import ConfigDict, TypeAdapter

    config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # name=2024
        arbitrary_types_allowed=True,  # in the options of a user's own components
        regex_engine="python-re",
    )
    # A standard dataclass takes the pydantic configuration of the type around it, and cannot have its own.
    return TypeAdapter(tuple[kind], config=config)  # type: ignore[valid-type]


def _refusal(kind: type, error: "ErrorDetails", prefix: str) -> ValueError:
    """The error in one line: what was given, and what is allowed."""
    path, value = error["loc"][1:], error["input"]
    if path[-1:] == ("[key]",):  # a mapping's type says what its keys may be
        path = path[:-2]
    setting = _setting(kind, path, prefix)
    group = _not_null(setting.type)
    if error["type"] == "unexpected_keyword_argument":
        inside = f"{setting.key}." if len(path) > 1 else prefix
        return UnknownKeyError(f"{inside}{path[-1]}", [f"{inside}{name}" for name in _hints(group)])
    if error["type"] == "missing":
        return ValueError(f"{setting.key} is missing: give {_noun(setting.kind)}")
    if error["type"] == "dataclass_type" and is_dataclass(group):
        key, names = setting.key, [*_hints(group)]  # type: ignore[arg-type]  # classes can be hashed
        chooser = next((name for name in names if name in CHOOSERS), None)
        some = ", ".join(f"{key}.{name}" for name in names[:4])
        advice = f"{key}.{chooser}=NAME" if chooser else f"one of them, such as {some}"
        return ValueError(f"{key}={shown(value, written)}: {key} is a group of keys; give {advice}")
    return _not_allowed(setting, value, is_of_type=error["type"] in OUT_OF_BOUNDS)


def _not_allowed(setting: Setting, value: Any, *, is_of_type: bool) -> ValueError:
    """The error of a value: what was given, and which bounds or type it must have."""
    text = written(value) if value is None or isinstance(value, bool) else str(value)
    kind, needed = setting.kind, setting.allowed
    if not is_of_type:
        needed = _noun(kind)
    else:
        if isinstance(value, int | float) and abs(value) > (LARGEST_FLOAT if "float" in kind else LARGEST_WHOLE):
            finite = f"finite and at most {LARGEST_FLOAT:g}" if "float" in kind else "a whole number of at most 64 bits"
            needed = f"{needed} and {finite}" if needed else finite
        needed = (needed or "finite") + (", or null" if kind.endswith(" or null") else "")
    close = nearest(text, setting.choices, cutoff=0.75)
    return ValueError(f"{setting.key}={shown(value, lambda _: text)}: must be {needed}{close}")


def _noun(kind: str) -> str:
    """A kind of value, as what a message asks for."""
    if kind.startswith("any"):
        return "a value"
    return kind if kind.startswith(("one of", "true or false")) else an(kind)


def _setting(kind: Any, path: Sequence[int | str], prefix: str) -> Setting:
    """The field, or the entry of a list or mapping, that pydantic means by this path; its group if it is unknown."""
    key, annotation = "", kind
    for number, name in enumerate(path, 1):
        outer = _not_null(annotation)
        origin, inner = get_origin(outer), [each for each in get_args(outer) if each is not ...]
        known = _hints(outer) if is_dataclass(outer) else {}  # type: ignore[arg-type]  # classes can be hashed
        if name in known:
            key, annotation = f"{key}.{name}", known[str(name)]
        elif origin in (dict, Mapping):
            key, annotation = f"{key}.{name}", inner[-1]
        elif origin in (list, tuple, Sequence) and Any not in inner:  # entries of any type are named by their list
            annotation = inner[min(int(name), len(inner) - 1)]
            key += f".{name}" if is_dataclass(_not_null(annotation)) else f"[{name}]"
        else:  # of several alternatives the path names the one that was tried, unless all are meant
            tried = [each for each in inner if _type_text(each) == name]
            if not tried or number == len(path):
                break
            annotation = tried[0]
    return Setting(prefix + key.removeprefix("."), annotation)


def _not_null(annotation: Any) -> Any:
    """An annotation without marks, and without null if that leaves a single alternative."""
    others = [each for each in _alternatives(annotation) if each is not NoneType]
    return others[0] if len(others) == 1 else _bare(annotation)


def _check_numbers(kind: type, raw: Any, made: Any, prefix: str, path: tuple[int | str, ...]) -> None:
    """Raises ValueError for what pydantic lets pass: true as a number, NaN, and numbers that are too large."""
    if isinstance(raw, Mapping):  # in order, because pydantic converts the keys of mappings: "1" to 1
        inner = made.values() if isinstance(made, Mapping) else [getattr(made, str(name)) for name in raw]
        for (name, value), each in zip(raw.items(), inner, strict=False):  # if both are given, the last one stays
            _check_numbers(kind, value, each, prefix, (*path, name))
    elif isinstance(raw, list | tuple) and isinstance(made, list | tuple):
        for index, value in enumerate(raw):
            _check_numbers(kind, value, made[index], prefix, (*path, index))
    elif isinstance(made, int | float) and not isinstance(made, bool):
        whole = isinstance(made, int)
        too_large = abs(made) > (LARGEST_WHOLE if whole else LARGEST_FLOAT) and (whole or not math.isinf(made))
        if isinstance(raw, bool) or made != made or too_large:
            raise _not_allowed(_setting(kind, path, prefix), raw, is_of_type=not isinstance(raw, bool))


# -- the options of components -----------------------------------------------------------------------------------------


@cache
def options_class(function: Any) -> type:
    """A configuration class of the options of a component: its keyword-only parameters."""
    options: list[Any] = []
    for parameter in keyword_options(function).values():
        annotation = parameter.annotation
        annotation = Any if annotation is parameter.empty or isinstance(annotation, str) else annotation
        if parameter.default is parameter.empty:
            options.append((parameter.name, annotation))
        else:
            options.append((parameter.name, annotation, field(default_factory=partial(deepcopy, parameter.default))))
    return make_dataclass("Options", options, kw_only=True)


def options_of(registry: Registry[Any], name: str, key: str) -> list[Setting]:
    """The options of a component as settings, with keys below `key`; the default of a required option is ?."""
    types, owner = _hints(options_class(registry.find(name))), f"{registry.kind} {name}"
    defaults = {p.name: "?" if p.default is p.empty else p.default for p in registry.options_of(name).values()}
    return [Setting(f"{key}.{option}", types[option], default, owner) for option, default in defaults.items()]


def component_specs(
    chosen: Sequence[tuple[Registry[Any], str]], options: Mapping[str, Any], key: str
) -> list[ComponentSpec]:
    """Each chosen component with the given options that belong to it; `key` is the options' configuration key.

    Raises ValueError for an unknown component, an option that none of them has, a missing option, and a value that an
    option's annotation does not allow.
    """
    specs: list[ComponentSpec] = []
    known: dict[str, None] = {}
    for registry, name in chosen:
        names = dict.fromkeys(registry.options_of(name))
        values = {option: value for option, value in options.items() if option in names}
        try:
            made: Any = validated(options_class(registry.find(name)), values, f"{key}.")
        except ValueError as error:
            raise ValueError(f"{error} (an option of {registry.kind} {name})") from error
        specs.append(ComponentSpec(name, tuple(sorted((option, getattr(made, option)) for option in values))))
        known |= names
    for option in options:
        if option not in known:
            components = ", ".join(f"{registry.kind} {name}" for registry, name in chosen)
            there = f"the options are {', '.join(known)}" if known else "they have no options"
            for registry, name in chosen:
                if is_import_path(name) and option in positional_defaults(registry.find(name)):
                    there = f"put a * before it in the parameters of {name}: options are keyword-only"
            raise ValueError(f"{key}.{option}: not an option of {components}; {there}{nearest(option, [*known])}")
    return specs
