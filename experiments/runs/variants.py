"""Configurations that differ in a few values: composed once, then changed value by value as Hydra changes them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, cast

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedloom.experiments.runs.configuration import (
    check_config,
    compose_config,
    composed_tree,
    defaults_tree,
    takes_any,
)
from fedloom.experiments.runs.restored import SPECIAL, is_settled
from fedloom.experiments.runs.spelling import free_part
from fedloom.platform.federation.config import RunConfig

GROUPS = ("experiment", "method")
"""Keys that select whole groups of values, which Hydra has to compose."""


class Variants:
    """The configurations of common overrides with a few changes each.

    Hydra composes the overrides once per choice of whole groups. All other changes are single values, which OmegaConf
    sets in the composed tree, as Hydra does, and which then replace those of the dataclasses. Whatever is not as simple
    (an interpolation, a key inside another one's value, a value that is refused) is composed as a whole.
    """

    def __init__(self, overrides: Sequence[str]) -> None:
        self._overrides = list(overrides)
        self._trees: dict[tuple[str, ...], _Tree | None] = {}

    def config(self, changes: Mapping[str, Any], texts: Sequence[str]) -> RunConfig:
        """What `compose_config` gives for the overrides followed by `texts`, and its errors.

        `texts` are the changes as overrides, in their order. Configurations share the parts in which they agree: do
        not change them.
        """
        config = self._changed(changes, texts)
        if config is None:
            return compose_config([*self._overrides, *texts])
        check_config(config)
        return config

    def _changed(self, changes: Mapping[str, Any], texts: Sequence[str]) -> RunConfig | None:
        values = {key: value for key, value in changes.items() if key not in GROUPS}
        if not _are_apart(values) or any(mark in text for mark in SPECIAL for text in texts):
            return None
        choices = tuple(text for key, text in zip(changes, texts, strict=True) if key in GROUPS)
        if choices not in self._trees:
            self._trees[choices] = _composed([*self._overrides, *choices])
        tree = self._trees[choices]
        return None if tree is None else tree.changed(values)


def _are_apart(keys: Iterable[str]) -> bool:
    """Whether the keys are plain dotted names, none of which lies inside another."""
    places = sorted(key.split(".") for key in keys)
    inside = any(one == other[: len(one)] for one, other in pairwise(places))
    return not inside and all(name.isidentifier() for place in places for name in place)


def _composed(overrides: Sequence[str]) -> "_Tree | None":
    """The composition of the overrides; None if single values cannot be changed in it."""
    try:
        tree = composed_tree(overrides)
        values = cast(RunConfig, OmegaConf.to_object(tree))
    except (HydraException, OmegaConfBaseException, OverflowError, RecursionError, ValueError):
        return None
    interpolated = any(SPECIAL[0] in text for text in _texts(OmegaConf.to_container(tree)))
    settled = all(is_settled(kind) for kind in _kinds(values))
    return _Tree(tree, values, overrides) if settled and not interpolated else None


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, dict | list):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _texts(value)


def _kinds(config: Any) -> Iterator[type]:
    """The dataclasses of a configuration."""
    yield type(config)
    for field in fields(config):
        if is_dataclass(value := getattr(config, field.name)):
            yield from _kinds(value)


class _Tree:
    """A composed configuration whose values can be changed one by one."""

    def __init__(self, tree: DictConfig, config: RunConfig, overrides: Sequence[str]) -> None:
        self._tree, self._config, self._overrides = tree, config, overrides
        self._scratch = deepcopy(tree)
        self._converted: dict[tuple[str, str], Any] = {}
        self._defaults: DictConfig | None = None

    def changed(self, values: Mapping[str, Any]) -> RunConfig | None:
        """The configuration with these values; None if one is refused or has no place."""
        config = self._config
        try:
            for key, value in values.items():
                # The text tells 1, 1.0 and true apart.
                name = (key, repr(value))
                if name not in self._converted:
                    self._converted[name] = self._convert(key, value)
                config = _with(config, key.split("."), self._converted[name])
        except (OmegaConfBaseException, OverflowError, _NoPlaceError):
            return None
        return config

    def _convert(self, key: str, value: Any) -> Any:
        """The value as OmegaConf holds it at this key."""
        free = bool(free_part(key))
        if free and not self._takes(key):
            raise _NoPlaceError(key)
        single = not isinstance(value, Mapping | list | tuple)
        # A single value does not depend on what stood there before, so that one copy of the tree serves all of them.
        single = single and not OmegaConf.is_config(OmegaConf.select(self._tree, key))
        tree = self._scratch if single else deepcopy(self._tree)
        OmegaConf.update(tree, key, value, merge=True, force_add=free)
        node = OmegaConf.select(tree, key)
        return OmegaConf.to_object(node) if OmegaConf.is_config(node) else node

    def _takes(self, key: str) -> bool:
        if self._defaults is None:
            self._defaults = defaults_tree(self._overrides)
        return takes_any(self._defaults, key)


class _NoPlaceError(Exception):
    """A key leads to no field of a dataclass and to no entry of a mapping."""


def _with(owner: Any, place: Sequence[str], value: Any) -> Any:
    """A copy of a dataclass or mapping with a value at this place; all that is not on the way is shared."""
    name, *rest = place
    if isinstance(owner, dict):
        return {**owner, name: _with(owner.get(name, {}), rest, value) if rest else value}
    if not is_dataclass(owner) or isinstance(owner, type) or name not in (field.name for field in fields(owner)):
        raise _NoPlaceError(name)
    return replace(owner, **{name: _with(getattr(owner, name), rest, value) if rest else value})
