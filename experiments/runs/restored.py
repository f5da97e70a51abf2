"""Makes a stored configuration's dataclasses directly, where no value has to be converted or refused.

OmegaConf, which does both, takes a hundred times as long, and an ablation restores the configuration of every trial.
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from fedloom.platform.federation.config import RunConfig
from fedloom.platform.settings import field_types

T = TypeVar("T")

SCALARS = (str, int, float, bool, NoneType)
SPECIAL = ("${", "???")
"""What OmegaConf does not take for a plain text."""


def restored_run(values: Mapping[str, Any], method: type) -> RunConfig | None:
    """The run's configuration with these values, whose method's keys are those of `method`.

    None if any value is not exactly of the type of its key, or if there is a key that the configuration does not have.
    """
    own = restored(method, values.get("method"))
    whole = restored(RunConfig, {**values, "method": None})
    return None if own is None or whole is None else replace(whole, method=own)


def restored(kind: type[T], values: Any) -> T | None:
    """The dataclass of this kind with these values of its fields; None as in `restored_run`."""
    types = field_types(kind)  # type: ignore[arg-type]  # classes can be hashed
    if not isinstance(values, Mapping) or not is_settled(kind) or not values.keys() <= types.keys():
        return None
    found: dict[str, Any] = {}
    for each in fields(kind):  # type: ignore[arg-type]  # dataclasses only
        if each.name not in values:
            if each.default is MISSING and each.default_factory is MISSING:
                return None
            continue
        value, wanted = values[each.name], types[each.name]
        if isinstance(wanted, type) and is_dataclass(wanted):
            found[each.name] = restored(wanted, value)
            if found[each.name] is None:
                return None
        elif not _fits(value, wanted) or _merges(each):
            return None
        else:
            found[each.name] = _plain(value)
    return kind(**found)


def is_settled(kind: type) -> bool:
    """Whether a dataclass holds exactly the values that it is made with."""
    derived = getattr(kind, "__post_init__", None) is not None
    return not derived and all(each.init for each in fields(kind))


def _merges(field: "Field[Any]") -> bool:
    """Whether the field's default is a mapping with keys, to which OmegaConf adds those of the stored one."""
    made = field.default_factory
    return made is not MISSING and isinstance(default := made(), Mapping) and bool(default)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is exactly of this type, so that OmegaConf would leave it as it is."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if kind is Any or kind in SCALARS:
        return _is_plain(value) if kind is Any else type(value) is kind and _is_plain(value)
    if (origin or kind) is list:
        return type(value) is list and all(_fits(each, *inner or (Any,)) for each in value)
    if (origin or kind) is dict:
        item = inner[1] if inner else Any
        return type(value) is dict and all(type(k) is str and _fits(v, item) for k, v in value.items())
    return False


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return _fits(value, dict[str, Any])
    if type(value) is list:
        return _fits(value, list[Any])
    return type(value) in SCALARS and not (type(value) is str and any(mark in value for mark in SPECIAL))


def _plain(value: Any) -> Any:
    """The value with lists and mappings of its own, which the stored configuration does not share."""
    if type(value) is dict:
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if type(value) is list else value
