"""What a method needs of a space is looked up, not computed."""

from typing import Any, Protocol

import pytest

from fedloom.platform.spaces.capabilities import lacking


class Wanted(Protocol):
    """A property and a method, as fedloom declares them."""

    def built(self) -> Any: ...

    @property
    def smallest(self) -> Any: ...


Wanted.__module__ = "fedloom.wanted"


class Space:
    """A space whose property is costly."""

    @property
    def smallest(self) -> Any:
        pytest.fail("a costly property was evaluated")


def test_a_property_counts_as_there_without_being_evaluated() -> None:
    assert lacking(Space(), Wanted) == ["built"]


def test_members_of_the_object_itself_count() -> None:
    space = Space()
    space.built = lambda: None  # type: ignore[attr-defined]
    assert lacking(space, Wanted) == []
