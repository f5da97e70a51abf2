"""Values as texts that Hydra reads back."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings, strategies as st

from fedloom.experiments.runs.overrides import override_text

WORDS = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True).filter(
    lambda w: w not in ("null", "true", "false", "inf", "nan")
)
TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12) | st.from_regex(
    r"""[a-z ="'\\,:{}\[\]$#~+*/.\-]{0,10}""", fullmatch=True
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS | WORDS
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(WORDS, v, max_size=3), max_leaves=6)


@settings(max_examples=80, deadline=None)
@given(VALUES)
@example("null")
@example("True")
@example("inf")
@example("1e-3")
@example("12")
@example("")
@example("é, a=b")
@example('C:\\data\\"x"\\')
@example([math.inf, -math.inf, 1e-7, 1e16, -0.001, -3])
@example({"a": {"b": [None, True, "x y"]}, "c": []})
@example({"a:b": 1, " x=(1), [y] {z}\\": 2, "1a": 3, "a.b/c-1": 4})
def test_a_value_survives_being_an_override(value: Any) -> None:
    override = OverridesParser.create().parse_override(f"key={override_text(value)}")
    assert plain(override.value()) == value
    assert repr(plain(override.value())) == repr(value), "of the same kind, too"


def test_numbers_are_names_of_a_mapping() -> None:
    assert override_text({7: "a", 0.5: "b", True: "c"}) == "{7:a,0.5:b,True:c}"


@pytest.mark.parametrize("name", ["1", "1.5", "true", "null", "", "é", 'a"b', None])
def test_a_name_that_would_be_read_as_another_is_refused(name: str | None) -> None:
    with pytest.raises(
        ValueError, match="cannot be a name inside a mapping: give a word of plain letters that is not a number"
    ):
        override_text({"outer": {name: 1}})


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, str):
        return str(value)
    return [plain(v) for v in value] if isinstance(value, Sequence) else value


def test_overrides_can_be_read() -> None:
    assert override_text("opa") == "opa"
    assert override_text("mine.rules/x-1") == "mine.rules/x-1"
    assert override_text("a b") == '"a b"'
    assert override_text([1, None, True, 0.001, -2]) == "[1,null,true,0.001,-2]"
    assert override_text({"a": {"b": "x=1"}}) == '{a:{b:"x=1"}}'
    assert override_text(math.nan) == "nan"
