"""Genomes: drawing, mutation and crossover of architectures, and their features for predictors.

An architecture is one option per decision. If a decision combines several choices (the depth of a stage and the width
of each of its blocks), drawing, mutation and crossover work on these choices, its genes.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedloom.tiers.costs import CostTable

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ABSENT = -1
"""The gene of a block that the architecture does not have."""


class Genome(Protocol):
    """Vectorised variation of architectures, integer arrays (n, decisions)."""

    def __hash__(self) -> int: ...

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        """Random architectures, uniform over the choices of each gene."""
        ...

    def mutate(self, architectures: Ints, probability: float, rng: np.random.Generator) -> Ints:
        """Every gene changes with the given probability to another of its choices, uniformly."""
        ...

    def cross(self, mothers: Ints, fathers: Ints, rng: np.random.Generator) -> Ints:
        """One child per pair, with every gene from either parent with probability 1/2."""
        ...

    def one_hot(self, architectures: Ints) -> Floats:
        """Features (n, features) in {0, 1}, one per choice of each gene; all zero for an absent gene."""
        ...


def _moved(genes: Ints, choices: Ints, probability: float, rng: np.random.Generator) -> Ints:
    # A step of 1..choices-1 modulo choices reaches each other choice with equal probability.
    steps = rng.integers(1, np.maximum(choices, 2), size=genes.shape)
    moves = (rng.random(genes.shape) < probability) & (choices > 1)
    moved: Ints = np.where(moves, (genes + steps) % choices, genes)
    return moved


def _one_hot(genes: Ints, choices: Ints) -> Floats:
    columns = [genes[:, [i]] == np.arange(n) for i, n in enumerate(choices)]
    return np.concatenate(columns, axis=1).astype(np.float64)


@dataclass(frozen=True)
class PlainGenome:
    """Every decision is one gene (operator-choice spaces)."""

    options: tuple[int, ...]

    @cached_property
    def _choices(self) -> Ints:
        return np.array(self.options, dtype=np.int64)

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        return rng.integers(0, self._choices, size=(count, len(self.options)))

    def mutate(self, architectures: Ints, probability: float, rng: np.random.Generator) -> Ints:
        return _moved(architectures, self._choices, probability, rng)

    def cross(self, mothers: Ints, fathers: Ints, rng: np.random.Generator) -> Ints:
        return np.where(rng.random(mothers.shape) < 0.5, mothers, fathers)

    def one_hot(self, architectures: Ints) -> Floats:
        return _one_hot(architectures, self._choices)


def draw_supported(genome: Genome, table: CostTable, count: int, rng: np.random.Generator) -> Ints:
    """Random architectures of supported options alone; those of the genome if the table has no infinite cost."""
    supported = table.supported
    if [*map(len, supported)] == [*map(len, table.options)]:
        return genome.draw(count, rng)
    drawn = PlainGenome(tuple(map(len, supported))).draw(count, rng)
    return np.stack([np.array(options)[drawn[:, i]] for i, options in enumerate(supported)], axis=1)


@dataclass(frozen=True)
class ElasticStage:
    """The choices of one stage: the number of kept blocks, and for each kept block one of `widths` widths.

    Options enumerate all combinations, shallow ones first, widths in lexicographic order.
    """

    fewest: int
    most: int
    widths: int

    @cached_property
    def contents(self) -> tuple[tuple[int, ...], ...]:
        """Per option, the width index of each kept block."""
        depths = range(self.fewest, self.most + 1)
        return tuple(w for blocks in depths for w in itertools.product(range(self.widths), repeat=blocks))

    @cached_property
    def option_of(self) -> dict[tuple[int, ...], int]:
        """The option of a stage's width indices."""
        return {content: option for option, content in enumerate(self.contents)}

    def widest(self, blocks: int) -> tuple[int, ...]:
        """The width indices of this many blocks, all at their widest."""
        return (self.widths - 1,) * blocks

    def distinct(self, widths: int) -> int:
        """The number of distinct contents if only `widths` of the widths are distinct."""
        return sum(widths**blocks for blocks in range(self.fewest, self.most + 1))

    def options(self, genes: Ints) -> Ints:
        """Options (n,) of genes (n, 1 + most): the number of shallower options plus the widths as a base-w number."""
        depth = genes[:, 0] + self.fewest
        shallower = np.array([sum(self.widths**k for k in range(self.fewest, d)) for d in range(self.most + 1)])
        places = depth[:, None] - 1 - np.arange(self.most)
        digits = np.where(places >= 0, genes[:, 1:] * self.widths ** np.maximum(places, 0), 0)
        options: Ints = shallower[depth] + digits.sum(axis=1)
        return options


@dataclass(frozen=True)
class CoupledStage(ElasticStage):
    """A stage whose number of blocks decides the width of all of them (CompOFA, Sahni et al. 2021, Sec. 3.2).

    `width_of` holds the width index for each number of blocks, ascending; the genes of widths have no effect.
    """

    width_of: tuple[int, ...]

    @cached_property
    def contents(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(self.widest, range(self.fewest, self.most + 1)))

    def widest(self, blocks: int) -> tuple[int, ...]:
        return (self.width_of[blocks - self.fewest],) * blocks

    def distinct(self, widths: int) -> int:
        del widths
        return len(self.contents)

    def options(self, genes: Ints) -> Ints:
        return genes[:, 0]


def elastic_stage(fewest: int, most: int, *widths: int, coupled: bool) -> ElasticStage:
    """A stage whose blocks have these numbers of choices, one per kind of width, the last kind varying fastest.

    If `coupled`, the fewest blocks have the narrowest width, the most the widest, others as evenly between as possible.
    """
    if not coupled:
        return ElasticStage(fewest, most, math.prod(widths))
    extra, width_of = most - fewest, [0] * (most - fewest + 1)
    for number in widths:
        shares = [depth * (number - 1) // extra if extra else number - 1 for depth in range(extra + 1)]
        width_of = [index * number + share for index, share in zip(width_of, shares, strict=True)]
    return CoupledStage(fewest, most, math.prod(widths), tuple(width_of))


@dataclass(frozen=True)
class ElasticGenome:
    """One decision per stage; its genes are the depth and the width of each block (SuperFedNAS, OFA)."""

    stages: tuple[ElasticStage, ...]

    @cached_property
    def _choices(self) -> Ints:
        per_stage = [[s.most - s.fewest + 1, *[s.widths] * s.most] for s in self.stages]
        return np.array([n for genes in per_stage for n in genes], dtype=np.int64)

    @cached_property
    def _tables(self) -> list[Ints]:
        """Per stage, the genes of every option (options, 1 + most)."""
        return [
            np.array([[len(c) - s.fewest, *c, *[ABSENT] * (s.most - len(c))] for c in s.contents], dtype=np.int64)
            for s in self.stages
        ]

    def genes(self, architectures: Ints) -> Ints:
        """Genes (n, genes): per stage the depth's index and the blocks' width indices, `ABSENT` beyond the depth."""
        return np.concatenate([table[architectures[:, i]] for i, table in enumerate(self._tables)], axis=1)

    def architectures(self, genes: Ints) -> Ints:
        """The inverse of `genes`; the widths of blocks beyond the depth are ignored."""
        columns, start = [], 0
        for stage in self.stages:
            part = genes[:, start : start + 1 + stage.most]
            columns.append(stage.options(part))
            start += 1 + stage.most
        return np.stack(columns, axis=1)

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        """Depths and widths are uniform and independent, as in the authors' code."""
        return self.architectures(rng.integers(0, self._choices, size=(count, len(self._choices))))

    def draw_near_largest(self, fewer_blocks: int, widths: Sequence[int], rng: np.random.Generator) -> Ints:
        """One random architecture: stages lack at most `fewer_blocks` blocks, with width indices from `widths`."""
        lows: list[int] = []
        highs: list[int] = []
        for stage in self.stages:
            extra = stage.most - stage.fewest
            lows += [max(0, extra - fewer_blocks), *[0] * stage.most]
            highs += [extra + 1, *[len(widths)] * stage.most]
        drawn, start = rng.integers(lows, highs, size=(1, len(highs))), 0
        for stage in self.stages:
            part = slice(start + 1, start + 1 + stage.most)
            drawn[:, part] = np.asarray(widths)[drawn[:, part]]
            start += 1 + stage.most
        return self.architectures(drawn)

    def mutate(self, architectures: Ints, probability: float, rng: np.random.Generator) -> Ints:
        """Absent blocks get random widths, which deeper children use."""
        genes = self.genes(architectures)
        awake = np.where(genes == ABSENT, rng.integers(0, self._choices, size=genes.shape), genes)
        return self.architectures(_moved(awake, self._choices, probability, rng))

    def cross(self, mothers: Ints, fathers: Ints, rng: np.random.Generator) -> Ints:
        """A width that only one parent has is taken from it."""
        a, b = self.genes(mothers), self.genes(fathers)
        either = np.where(rng.random(a.shape) < 0.5, a, b)
        known = np.where(either == ABSENT, np.maximum(a, b), either)
        drawn = rng.integers(0, self._choices, size=known.shape)
        return self.architectures(np.where(known == ABSENT, drawn, known))

    def neighbours(self, architecture: Sequence[int]) -> Ints:
        """The subnets (n, decisions) that differ in at most one gene; a deeper stage's new blocks are the narrowest."""
        genes = np.maximum(self.genes(as_array([architecture])), 0)
        changes = [(gene, choice) for gene, most in enumerate(self._choices) for choice in range(most)]
        rows = np.repeat(genes, len(changes), axis=0)
        for row, (gene, choice) in zip(rows, changes, strict=True):
            row[gene] = choice
        return self.architectures(rows)

    def one_hot(self, architectures: Ints) -> Floats:
        return _one_hot(self.genes(architectures), self._choices)


def as_array(architectures: Sequence[Sequence[int]]) -> Ints:
    """Architectures as an integer array (n, decisions)."""
    return np.array(architectures, dtype=np.int64).reshape(len(architectures), -1)
