"""Conformance: tests of the laws of federated averaging, for the user's own rules and spaces and for the built-in ones.

    def test_my_rule() -> None:
        check_weighting_rule("my_rules:halved")

or one test per law:

    @pytest.mark.parametrize("law", server_rule_laws("my_rules:slowly", {"share": 0.5}))
    def test_my_server_rule(law: Law) -> None:
        law()

    check_aggregator("closest_half:closest_half", withstands=0.3)

A broken law raises AssertionError with one line: what was checked, the law, and the numbers that disagree. The argument
is a built-in name, an import path (`module:name`), or the rule or space itself. `skip` names laws that a rule or space
breaks on purpose.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fedloom.platform.averaging.aggregators import AGGREGATORS, Aggregator
from fedloom.platform.averaging.conformance import aggregators, server_rules, spaces, weighting_rules
from fedloom.platform.averaging.conformance.aggregators import Judged
from fedloom.platform.averaging.conformance.law import Law, laws_of
from fedloom.platform.averaging.conformance.spaces import Tried
from fedloom.platform.averaging.server import SERVER_RULES, ServerRule
from fedloom.platform.averaging.weighting import WEIGHTING_RULES, WeightingRule
from fedloom.platform.plugins import Registry
from fedloom.platform.settings import component_specs
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.registry import untried_space
from fedloom.platform.spaces.space_config import SpaceConfig

__all__ = [
    "Law",
    "aggregator_laws",
    "check_aggregator",
    "check_server_rule",
    "check_space",
    "check_weighting_rule",
    "server_rule_laws",
    "space_laws",
    "weighting_rule_laws",
]

NO_OPTIONS: Mapping[str, Any] = {}


def check_weighting_rule(
    rule: str | WeightingRule, options: Mapping[str, Any] = NO_OPTIONS, *, skip: Collection[str] = ()
) -> None:
    """Raises AssertionError for the first law that a weighting rule breaks."""
    _check(weighting_rule_laws(rule, options, skip=skip))


def check_server_rule(
    rule: str | ServerRule, options: Mapping[str, Any] = NO_OPTIONS, *, skip: Collection[str] = ()
) -> None:
    """Raises AssertionError for the first law that a server rule breaks."""
    _check(server_rule_laws(rule, options, skip=skip))


def check_aggregator(
    rule: str | Aggregator,
    options: Mapping[str, Any] = NO_OPTIONS,
    *,
    withstands: float = 0.0,
    skip: Collection[str] = (),
) -> None:
    """Raises AssertionError for the first law that an aggregator breaks; see `aggregator_laws`."""
    _check(aggregator_laws(rule, options, withstands=withstands, skip=skip))


def check_space(
    space: str | SpaceConfig | SearchSpace, settings: Mapping[str, Any] = NO_OPTIONS, *, skip: Collection[str] = ()
) -> None:
    """Raises AssertionError for the first law that a space breaks; `settings` are fields of its `SpaceConfig`."""
    _check(space_laws(space, settings, skip=skip))


def weighting_rule_laws(
    rule: str | WeightingRule, options: Mapping[str, Any] = NO_OPTIONS, *, skip: Collection[str] = ()
) -> list[Law]:
    """The laws of a weighting rule as callables; ValueError for an unknown rule or law."""
    return laws_of("weighting rule", *_rule(WEIGHTING_RULES, rule, options), weighting_rules.LAWS, skip)


def server_rule_laws(
    rule: str | ServerRule, options: Mapping[str, Any] = NO_OPTIONS, *, skip: Collection[str] = ()
) -> list[Law]:
    """The laws of a server rule as callables; ValueError for an unknown rule or law."""
    return laws_of("server rule", *_rule(SERVER_RULES, rule, options), server_rules.LAWS, skip)


def aggregator_laws(
    rule: str | Aggregator,
    options: Mapping[str, Any] = NO_OPTIONS,
    *,
    withstands: float = 0.0,
    skip: Collection[str] = (),
) -> list[Law]:
    """The laws of an aggregator as callables; ValueError for an unknown rule or law.

    `withstands` is the share of attackers among the clients that must not move any scalar out of the others' range.
    """
    name, made = _rule(AGGREGATORS, rule, options)
    return laws_of("aggregator", name, Judged(made, name, withstands), aggregators.LAWS, skip)


def space_laws(
    space: str | SpaceConfig | SearchSpace, settings: Mapping[str, Any] = NO_OPTIONS, *, skip: Collection[str] = ()
) -> list[Law]:
    """The laws of a space as callables; ValueError for an unknown space or law, PluginError if the space fails."""
    if isinstance(space, str | SpaceConfig):
        config = replace(SpaceConfig(space) if isinstance(space, str) else space, **settings)
        tried = Tried(untried_space(config), config.num_classes)
        return laws_of("space", config.name, tried, spaces.LAWS, skip)
    if settings:
        raise ValueError(f"space {space.name} is built already: give its name or its SpaceConfig with settings")
    return laws_of("space", getattr(space, "name", type(space).__name__), Tried(space), spaces.LAWS, skip)


def _check(laws: list[Law]) -> None:
    for law in laws:
        law()


def _rule(
    slot: Registry[Any], rule: str | Callable[..., Any], options: Mapping[str, Any]
) -> tuple[str, Callable[..., Any]]:
    if isinstance(rule, str):
        return rule, slot.make(component_specs([(slot, rule)], options, "options")[0])
    return getattr(rule, "__name__", type(rule).__name__), partial(rule, **options)
