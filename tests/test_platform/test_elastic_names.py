"""Subnets of elastic spaces as people write and read them, and the refusal of what is none."""

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.resnet import ResnetDesign
from fedloom.platform.spaces.slices import Architecture, architecture_id

# The genome alone is quick to build: parsing needs no modules.
PUBLISHED = ElasticSpace(ResnetDesign(norm="batch"))


OPTIONS = st.tuples(*[st.integers(0, 154)] * 4)


@given(OPTIONS)
@settings(deadline=None)
def test_texts_and_contents_round_trip(architecture: Architecture) -> None:
    assert PUBLISHED.parse(PUBLISHED.label(architecture)) == architecture
    assert PUBLISHED.parse(architecture_id(architecture)) == architecture
    assert PUBLISHED.of_contents(PUBLISHED.contents(architecture)) == architecture


def test_labels_by_hand() -> None:
    assert PUBLISHED.label(PUBLISHED.smallest) == "d=0,0,0,0 e=0.1"
    assert PUBLISHED.label(PUBLISHED.largest) == "d=2,2,2,2 e=0.25"
    mixed = PUBLISHED.parse("d=1,0,0,0 e=.1,.25,.14,.14,.22")
    assert PUBLISHED.contents(mixed) == ((0, 4), (1,), (1,), (3,))
    assert PUBLISHED.label(mixed) == "d=1,0,0,0 e=0.1,0.25,0.14,0.14,0.22"
    assert PUBLISHED.parse("  d = 1, 0,0,0   e = 0.14 ") == PUBLISHED.parse("d=1,0,0,0 e=.14")


def test_expansions_that_are_no_short_decimals_round_trip() -> None:
    thirds = ElasticSpace(ResnetDesign(expansions=(1 / 3, 2 / 3)))
    assert thirds.parse(thirds.label(thirds.largest)) == thirds.largest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("d=0,0,0 e=.1", r"3 depths, resnet_elastic has 4 stages"),
        ("d=0,0,3,0 e=.1", r"depth 3 of stage 3: allowed are 0 to 2"),
        ("d=0,0,0,0 e=.3", r"expansion 0\.3: allowed are 0\.1, 0\.14, 0\.18, 0\.22, 0\.25"),
        ("d=0,0,0,0 e=.1,.14", r"2 expansions for 4 kept blocks: give one, or one each"),
        ("d=0,,0,0 e=.1", r"'d=0,,0,0 e=\.1' is no architecture of resnet_elastic"),
        ("d=0,0 1,0,0 e=.1", r"is no architecture of resnet_elastic"),
        ("d=0,0,0,0 e=.1.4", r"is no architecture of resnet_elastic"),
        ("d=0,0,0,0 e=", r"is no architecture of resnet_elastic"),
        ("d=0,0,0,-1 e=.1", r"is no architecture of resnet_elastic"),
        (
            "huge",
            r"'huge' is no architecture of resnet_elastic: give smallest, largest, options such as 154-",
        ),
        ("", r"'' is no architecture of resnet_elastic"),
        ("0-0-0-155", r"stage 4 of resnet_elastic has the options 0 to 154, given 155"),
        ("0-0-0", r"has 4 stages, given 3"),
    ],
)
def test_what_is_no_subnet_is_refused_by_its_field(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        PUBLISHED.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ((0, 0, 0), "4 stages, given 3"),
        ((0, -1, 0, 0), "stage 2 .* given -1"),
        ((0, 0, 1.0, 0), "stage 3 .* given 1.0"),
    ],
)
def test_validation_names_the_stage(architecture: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PUBLISHED.validate(architecture)
    with pytest.raises(ValueError, match=message):
        PUBLISHED.slices(architecture)
