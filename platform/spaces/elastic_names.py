"""Parsing of subnets of elastic spaces: `smallest`, `0-31-154-2`, `d=1,0,2,1 e=.14`."""

import math
import re
from collections.abc import Sequence
from typing import Protocol

from fedloom.platform.spaces.genome import ElasticGenome
from fedloom.platform.spaces.slices import Architecture

_FIELDS = re.compile(r"\s*d\s*=\s*([\d\s,]+?)\s+e\s*=\s*([\d\s.,]+?)\s*")


class NamedSubnets(Protocol):
    """The members of an elastic space that parsing needs."""

    name: str

    @property
    def genome(self) -> ElasticGenome: ...

    @property
    def smallest(self) -> Architecture: ...

    @property
    def largest(self) -> Architecture: ...

    def of_contents(self, contents: tuple[tuple[int, ...], ...]) -> Architecture: ...

    def validate(self, architecture: Architecture) -> None: ...

    def label(self, architecture: Architecture) -> str: ...


def parse_subnet(space: NamedSubnets, known: Sequence[float], text: str) -> Architecture:
    """Parses a subnet (see `ElasticSpace.parse`); `known` are the space's expansions."""
    named = {"smallest": space.smallest, "largest": space.largest}
    if text in named:
        return named[text]
    try:
        if match := _FIELDS.fullmatch(text):
            depths, expansions = [int(d) for d in match[1].split(",")], [float(e) for e in match[2].split(",")]
        else:
            architecture = tuple(int(choice) for choice in text.split("-"))
    except ValueError:
        raise ValueError(
            f"{text!r} is no subnet: give smallest, largest, options such as "
            f"{'-'.join(map(str, space.largest))}, or depths and expansions such as {space.label(space.smallest)!r}"
        ) from None
    if match:
        return _spelt(space, known, text, depths, expansions)
    space.validate(architecture)
    return architecture


def _spelt(
    space: NamedSubnets, known: Sequence[float], text: str, depths: list[int], expansions: list[float]
) -> Architecture:
    stages = space.genome.stages
    if len(depths) != len(stages):
        raise ValueError(f"{text!r}: {len(depths)} depths, {space.name} has {len(stages)} stages: give one per stage")
    for number, (depth, stage) in enumerate(zip(depths, stages, strict=True), start=1):
        if not 0 <= depth <= stage.most - stage.fewest:
            raise ValueError(f"{text!r}: depth {depth} of stage {number}: allowed are 0 to {stage.most - stage.fewest}")
    blocks = [stage.fewest + depth for stage, depth in zip(stages, depths, strict=True)]
    if len(expansions) not in (1, sum(blocks)):
        raise ValueError(f"{text!r}: {len(expansions)} expansions for {sum(blocks)} kept blocks: give one, or one each")
    widths = iter([_width(known, text, e) for e in (expansions * sum(blocks))[: sum(blocks)]])
    return space.of_contents(tuple(tuple(next(widths) for _ in range(n)) for n in blocks))


def _width(known: Sequence[float], text: str, expansion: float) -> int:
    for index, value in enumerate(known):
        if math.isclose(value, expansion, rel_tol=1e-5):  # a label has six digits
            return index
    allowed = ", ".join(f"{e:g}" for e in known)
    raise ValueError(f"{text!r}: expansion {expansion:g}: allowed are {allowed}")
