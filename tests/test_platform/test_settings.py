"""Options of code that is chosen by name: their types, and how a value that does not fit is named."""

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Annotated, Any, Literal

import pytest

from fedloom.platform.averaging.server import SERVER_RULES, ServerStep
from fedloom.platform.settings import POSITIVE, Infinite, check_settings, component_specs


@dataclass
class Phase:
    """A group of keys inside an option."""

    rounds: int = 1
    shares: list[Annotated[float, POSITIVE]] = field(default_factory=list)


@dataclass
class Decay:
    """Another one."""

    rate: float = 1.0


def rule(
    _step: ServerStep,
    *,
    rate: Annotated[float, POSITIVE, "a rate"] = 1.0,
    limit: Annotated[float, Infinite()] = 1.0,
    steps: int | None = None,
    kind: Literal["mean", "median"] = "mean",
    fast: bool = False,
    levels: list[float] | None = None,
    by_name: dict[str, int] | None = None,
    by_round: dict[int, float] | None = None,
    first: Annotated[Phase | None, "a group, or none"] = None,
    phases: Annotated[list[Phase] | None, "several"] = None,
    pair: tuple[Literal["mean", "median"], Phase] = ("mean", Phase()),
    either: Phase | Decay | None = None,
    whatever: Any = None,
) -> None:
    """A rule with options of all kinds."""


@pytest.fixture(autouse=True)
def _own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("own_options")
    module.__dict__["rule"] = rule
    monkeypatch.setitem(sys.modules, "own_options", module)


def given(**options: Any) -> dict[str, Any]:
    return dict(component_specs([(SERVER_RULES, "own_options:rule")], options, "x.options")[0].options)


@pytest.mark.parametrize(
    ("option", "value", "got"),
    [
        ("rate", 2, 2.0),
        ("limit", float("inf"), float("inf")),
        ("steps", None, None),
        ("steps", 3, 3),
        ("kind", "median", "median"),
        ("fast", True, True),
        ("levels", [1, 2.5], [1, 2.5]),
        ("by_name", {"a": 1}, {"a": 1}),
        ("by_name", {1: 1}, {"1": 1}),
        ("by_round", {1: 0.5, 2: 1}, {1: 0.5, 2: 1.0}),
        ("by_round", {"1": 0.5, "2": 1}, {1: 0.5, 2: 1.0}),
        ("whatever", {"a": [1]}, {"a": [1]}),
    ],
)
def test_a_value_of_its_type_is_taken(option: str, value: Any, got: Any) -> None:
    assert given(**{option: value}) == {option: got}
    assert type(given(**{option: value})[option]) is type(got)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("rate", "two", "x.options.rate=two: must be a float"),
        ("rate", 0, "x.options.rate=0: must be greater than 0"),
        ("rate", float("nan"), "x.options.rate=nan: must be greater than 0"),
        ("limit", float("nan"), "x.options.limit=nan: must be a number, or infinity"),
        ("steps", 1.5, "x.options.steps=1.5: must be an int or null"),
        ("steps", True, "x.options.steps=true: must be an int or null"),
        ("kind", "mode", "x.options.kind=mode: must be one of mean, median"),
        ("fast", 2, "x.options.fast=2: must be true or false"),
        ("levels", [1, "a"], r"x.options.levels\[1\]=a: must be a float"),
        ("levels", "12", "x.options.levels=12: must be a list"),
        ("by_name", {"a": 1.5}, "x.options.by_name.a=1.5: must be an int"),
        ("by_round", {"1": True}, "x.options.by_round.1=true: must be a float"),
        ("by_round", {"one": 1}, r"x.options.by_round=one: must be a dict\[int, float\] or null"),
        ("first", {"rund": 1}, r"unknown .* 'x.options.first.rund'; did you mean 'x.options.first.rounds'\?"),
        ("first", {"rounds": "x"}, "x.options.first.rounds=x: must be an int"),
        ("first", {"rounds": True}, "x.options.first.rounds=true: must be an int"),
        ("first", 3, "x.options.first=3: x.options.first is a group of keys; give one of them, such as x.options.f"),
        ("phases", [{"rund": 1}], r"unknown .* 'x.options.phases.0.rund'; did you mean 'x.options.phases.0.rounds'"),
        ("phases", [{}, {"shares": [1, 0]}], r"x.options.phases.1.shares\[1\]=0: must be greater than 0"),
        ("phases", [3], "x.options.phases.0=3: x.options.phases.0 is a group of keys; .* x.options.phases.0.rounds"),
        ("pair", ["man", {}], r"x.options.pair\[0\]=man: must be one of mean, median; did you mean 'mean'\?"),
        ("pair", ["mean", {"rund": 1}], "unknown configuration key 'x.options.pair.1.rund'"),
        ("either", {"rund": 1}, "unknown configuration key 'x.options.either.rund'"),
        ("either", 3, "x.options.either=3: must be a Phase or Decay or null"),
    ],
)
def test_a_value_that_does_not_fit_names_the_option_and_whose_it_is(option: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{message}.* \(an option of server rule own_options:rule\)$"):
        given(**{option: value})


@dataclass
class Config:
    """A configuration with both kinds of mappings."""

    weights: dict[str, Annotated[float, POSITIVE]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("kind", "asked"), [(Any, "a value"), (Literal["a", "b"], "one of a, b"), (bool, "true or false"), (int, "an int")]
)
def test_an_option_that_is_missing_is_asked_for(kind: Any, asked: str) -> None:
    def needy(_step: ServerStep, *, option: Any) -> None:
        """A rule with an option that has no default."""

    needy.__annotations__["option"] = kind
    sys.modules["own_options"].__dict__["rule"] = needy
    with pytest.raises(ValueError, match=f"^x.options.option is missing: give {asked} .an option of"):
        given()


def test_a_parameter_that_is_not_keyword_only_is_no_option() -> None:
    def positional(_step: ServerStep, rate: float = 1.0) -> None:
        """A rule that lacks a star."""

    sys.modules["own_options"].__dict__["rule"] = positional
    with pytest.raises(ValueError, match=r"^x.options.rate: not an option .*; put a \* before it in the param"):
        given(rate=2.0)


def test_a_value_in_a_mapping_is_named_by_its_own_key() -> None:
    with pytest.raises(ValueError, match=r"^weights\.b=0: must be greater than 0$"):
        check_settings(Config(weights={"a": 1, "b": 0}))
    check_settings(Config(options={"a": float("inf")}))  # whether it may be is known where the option is
