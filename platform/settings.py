"""Settings: allowed ranges and choices, declared with the fields they belong to, and their checks.

Fields of configurations and keyword parameters of functions chosen by name declare them in their types:

    lr: Annotated[float, Range(above=0), "the clients' learning rate"] = 0.1
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fedloom.platform.plugins import ComponentSpec, Registry, an, nearest
from fedloom.platform.words import shown

LARGEST_WHOLE = 2**63 - 1
"""The largest whole number of any setting: tables and torch hold integers of 64 bits."""
LARGEST_FLOAT = 3e38
"""The largest other number, whatever its sign: networks compute with floats of 32 bits."""
NAME_BYTES, PATH_BYTES = 255, 3000
"""What file systems allow a name, and what is left of the 4096 bytes of a path for the files below a folder."""


@dataclass(frozen=True)
class Range:
    """The allowed numbers: from `least` or `above` (excluded) to `most` or `below` (excluded).

    Every number of a list must be inside. NaN is never allowed, infinity only if `infinite`, no whole number of more
    than 64 bits, and no other number beyond `LARGEST_FLOAT`.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    infinite: bool = False

    def holds(self, value: float) -> bool:
        """Whether a number is allowed."""
        if isinstance(value, int):  # before anything is asked that would convert it to a float
            if abs(value) > LARGEST_WHOLE:
                return False
        elif math.isnan(value) or (abs(value) > LARGEST_FLOAT and not self.infinite):
            return False
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if not self.infinite:
            return self._finite
        return "a number" if self._finite == "finite" else f"{self._finite}, or infinity"

    @property
    def _finite(self) -> str:
        least, above, most, below = (None if v is None else _written(v) for v in self._bounds)
        upper = [f"at most {most}"] if most is not None else [f"below {below}"] if below is not None else []
        if above is not None:
            return " and ".join([f"above {above}", *upper]) if upper else f"greater than {above}"
        if least is None:
            return upper[0] if upper else "finite"
        if most is not None:
            return f"between {least} and {most}"
        if upper:
            return f"{least} or more and {upper[0]}"
        return f"{least} or more" if self.least == 0 else f"at least {least}"

    @property
    def _bounds(self) -> tuple[float | None, ...]:
        return self.least, self.above, self.most, self.below


def _written(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


@dataclass(frozen=True)
class OneOf:
    """The allowed names."""

    names: tuple[str, ...]

    def holds(self, text: str) -> bool:
        """Whether a name is allowed."""
        return text in self.names

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"


@dataclass(frozen=True)
class CountOr:
    """A whole number of at least 1, or one of these words."""

    words: tuple[str, ...]

    def holds(self, text: str) -> bool:
        """Whether a text is allowed."""
        return text in self.words or (text.isascii() and text.isdigit() and int(text[:9]) >= 1 and len(text) < 7)

    def __str__(self) -> str:
        return f"{', '.join(self.words)}, or a whole number from 1 to 999999"


@dataclass(frozen=True)
class Text:
    """Any text that is not empty."""

    def holds(self, text: str) -> bool:
        """Whether a text is allowed."""
        return bool(text.strip())

    def __str__(self) -> str:
        return "a text of at least one character"


@dataclass(frozen=True)
class FilePath:
    """A path, or a URL, that file systems can hold."""

    def holds(self, text: str) -> bool:
        """Whether a path is allowed."""
        whole = text.encode(errors="surrogatepass")
        fits = len(whole) <= PATH_BYTES and all(len(name) <= NAME_BYTES for name in whole.split(b"/"))
        return bool(text.strip()) and "\0" not in text and fits

    def __str__(self) -> str:
        return f"a path of at most {PATH_BYTES} bytes, each name in it of at most {NAME_BYTES}"


@dataclass(frozen=True)
class ComponentName:
    """The name of built-in code, or the import path of a user's own; `kind` is its kind, such as `server rule`."""

    kind: str

    def holds(self, text: str) -> bool:
        """Whether a text can be such a name; which names there are is known to the code's registry."""
        return bool(text.strip())

    def __str__(self) -> str:
        return f"the name of {an(self.kind)}, or module:name"


Allowed = Range | OneOf | CountOr | Text | FilePath | ComponentName
"""What can be said of the values of a setting."""

NOT_EMPTY, PATH = Text(), FilePath()
POSITIVE = Range(above=0)
ZERO_OR_MORE = Range(least=0)
ONE_OR_MORE = Range(least=1)
SHARE = Range(above=0, most=1)
PART = Range(least=0, most=1)
BELOW_ONE = Range(least=0, below=1)
UP_TO_A_THOUSAND, UP_TO_A_MILLION = Range(least=1, most=1000), Range(least=1, most=1_000_000)

TRUE_OR_FALSE, A_CHOICE = "true or false", "one of "
PHRASES = (TRUE_OR_FALSE, A_CHOICE)
"""How types are called that need no article."""


@dataclass(frozen=True)
class Setting:
    """One setting; `allowed` is None if its type is the only restriction."""

    key: str
    kind: str
    default: Any
    allowed: Allowed | None = None
    help: str = ""
    several: bool | None = None
    """Whether its values are lists or mappings; None if both they and single values are."""
    type: Any = None


def settings_of(config: Any, prefix: str = "") -> Iterator[Setting]:
    """Every setting of a configuration, including nested ones, by its dotted key in the order of the fields."""
    for name, known in _fields(type(config)).items():  # type: ignore[arg-type]  # classes can be hashed
        value = getattr(config, name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from settings_of(value, f"{prefix}{name}.")
        else:
            yield replace(known, key=f"{prefix}{name}", default=value)


def described(key: str, annotation: Any, default: Any) -> Setting:
    """A setting from its annotation."""
    kind, marks = _taken_apart(annotation)
    allowed = next((m for m in marks if isinstance(m, Allowed)), None)
    text = next((m for m in marks if isinstance(m, str)), "")
    return Setting(key, _type_name(kind), default, allowed, text, _is_several(kind), kind)


def _is_several(kind: Any) -> bool | None:
    kinds = [k for k in _alternatives(kind) if k is not NoneType]
    found = {(get_origin(k) or k) in (list, tuple, dict) for k in kinds if k is not Any}
    return found.pop() if len(found) == 1 and Any not in kinds else None


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def check_settings(config: Any, prefix: str = "") -> None:
    """Raises ValueError naming the first setting that is out of its range, or a number that is not finite.

    Options of code that is chosen by name are left to `chosen`: their ranges stand beside that code.
    """
    for setting in settings_of(config, prefix):
        given = setting.default
        is_other = setting.several is not None and isinstance(given, list | tuple | Mapping) != setting.several
        # Hydra takes any other value for a list (key=${other.key}), and lists of lists for lists of anything.
        if given is not None and (is_other or not _holds_its_items(setting, given)):
            raise ValueError(f"{setting.key}={shown(given)}: must be {_noun(setting.kind)}")
        if not (isinstance(setting.default, Mapping) and setting.allowed is None):
            check_value(setting, setting.default)


def _holds_its_items(setting: Setting, given: Any) -> bool:
    """Whether what is in a list, or in a mapping, is of the types that belong there."""
    kinds = [k for k in _alternatives(setting.type) if get_origin(k) in (list, dict)]
    if not kinds or not isinstance(given, list | Mapping):
        return True
    return any(_is_of(given, kind) for kind in kinds)


def check_value(setting: Setting, value: Any) -> None:
    """Raises ValueError if the value is not allowed for this setting; null is allowed where its type says so."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            check_value(replace(setting, key=f"{setting.key}.{name}"), each)
        return
    for each in _scalars(value):
        allowed = setting.allowed
        if isinstance(each, int | float) and not isinstance(each, bool):
            allowed = allowed if isinstance(allowed, Range) else Range()
            if not allowed.holds(each):
                raise ValueError(f"{setting.key}={shown(value)}: must be {_limits(allowed, each)}{_or_null(setting)}")
        elif isinstance(each, str) and not (allowed is None or isinstance(allowed, Range) or allowed.holds(each)):
            close = nearest(each, [*allowed.names], cutoff=0.75) if isinstance(allowed, OneOf) else ""
            raise ValueError(f"{setting.key}={shown(value)}: must be {allowed}{_or_null(setting)}{close}")


def _scalars(value: Any) -> Iterator[Any]:
    """The numbers and texts of a value, however its lists and mappings are nested."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for each in value:
            yield from _scalars(each)
    else:
        yield value


def _limits(allowed: Range, given: float) -> str:
    """What a number must be, with the limit of all numbers if it is that alone which the given one exceeds."""
    is_whole, plain = isinstance(given, int), str(allowed)
    largest = LARGEST_WHOLE if is_whole else LARGEST_FLOAT
    if not abs(given) > largest or not allowed.holds(largest if given > 0 else -largest):
        return plain
    endless = "a whole number of at most 64 bits" if is_whole else "finite"
    limit = f"at most {LARGEST_FLOAT:g}" if not is_whole and not math.isinf(given) else endless
    return limit if plain == "finite" else f"{plain} and {limit}"


def _or_null(setting: Setting) -> str:
    return ", or null" if setting.kind.endswith(" or null") else ""


def converted(setting: Setting, annotation: Any, value: Any) -> Any:
    """A value given for a keyword of this annotation, converted to its type: ints are accepted as floats.

    Raises ValueError for another type, or a value out of range.
    """
    kind, _ = _taken_apart(annotation)
    allowed = _alternatives(kind)
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < sys.float_info.max else math.inf
    if not any(_is_of(value, k) for k in allowed):
        raise ValueError(f"{setting.key}={shown(value, repr)}: must be {_noun(setting.kind)}")
    check_value(setting, value)
    return value


def _noun(kind: str) -> str:
    """A type with its article, if it takes one."""
    return kind if kind.startswith(PHRASES) else an(kind)


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value, as a configuration holds it, has this type; every value has one that cannot be looked at."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in inner
    plain = origin or kind
    if plain in (Any, object) or not isinstance(plain, type):
        return True
    if plain is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, bool) and plain is not bool:
        return False
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    item_kinds = inner[-1:] if plain in (list, dict) else ()
    return isinstance(value, plain) and all(_is_of(item, k) for k in item_kinds for item in items)


@cache
def _fields(config: type) -> Mapping[str, Setting]:
    """The fields of a configuration as settings without values: every trial of an ablation is checked by them."""
    hints = get_type_hints(config, include_extras=True)
    return {field.name: described(field.name, hints[field.name], None) for field in fields(config)}


@cache
def field_types(config: type) -> Mapping[str, Any]:
    """The types of a configuration's fields, without ranges and meanings."""
    hints = get_type_hints(config)
    return {field.name: hints[field.name] for field in fields(config)}


def _taken_apart(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(annotation) is Annotated:
        kind, *marks = get_args(annotation)
        return kind, tuple(marks)
    return annotation, ()


def _type_name(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " or ".join("null" if k is NoneType else _type_name(k) for k in get_args(kind))
    if get_origin(kind) in (list, dict):
        inner = ", ".join(_type_name(k) for k in get_args(kind))
        return f"{get_origin(kind).__name__}[{inner}]" if inner else str(get_origin(kind).__name__)
    if get_origin(kind) is Literal:
        return f"{A_CHOICE}{', '.join(map(str, get_args(kind)))}"
    names = {str: "text", bool: TRUE_OR_FALSE, Any: "any", int: "int", float: "float"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def component_specs(
    registries: Sequence[tuple[Registry[Any], str]], options: Mapping[str, Any], key: str
) -> list[ComponentSpec]:
    """The choice of each registry with its options; `key` is the configuration key of the options.

    Raises ValueError for an unknown choice, an option that no choice has, a missing option, and a value of the wrong
    type or out of range.
    """
    found = []
    known: dict[str, str] = {}
    for registry, name in registries:
        own = dict(_options(registry, name, options, key))
        known |= dict.fromkeys(registry.options_of(name), f"{registry.kind} {name}")
        found.append(ComponentSpec(name, tuple(sorted(own.items()))))
    for option in options:
        if option not in known:
            choices = ", ".join(f"{registry.kind} {name}" for registry, name in registries)
            there = f"the options are {', '.join(known)}" if known else "they have no options"
            raise ValueError(f"{key}.{option}: not an option of {choices}; {there}{nearest(option, [*known])}")
    return found


def _options(registry: Registry[Any], name: str, given: Mapping[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    for parameter in registry.options_of(name).values():
        annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
        setting = described(f"{key}.{parameter.name}", annotation, parameter.default)
        if parameter.name in given:
            try:
                value = converted(setting, annotation, given[parameter.name])
            except ValueError as error:
                raise ValueError(f"{error} (an option of {registry.kind} {name})") from error
            yield parameter.name, value
        elif parameter.default is parameter.empty:
            raise ValueError(f"{setting.key} is missing: {registry.kind} {name} needs it, {_noun(setting.kind)}")
