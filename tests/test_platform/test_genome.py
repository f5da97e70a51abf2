"""Laws of genomes: what drawing, mutation, crossover and features may and may not do."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import chisquare

from fedloom.platform.spaces.genome import (
    ABSENT,
    ElasticGenome,
    ElasticStage,
    Genome,
    PlainGenome,
    as_array,
    elastic_stage,
)

RESNET = ElasticGenome((ElasticStage(1, 3, 5),) * 4)
stages = st.tuples(st.integers(1, 2), st.integers(0, 2), st.integers(1, 4), st.booleans()).map(
    lambda s: elastic_stage(s[0], s[0] + s[1], s[2], coupled=s[3])
)
genomes = st.lists(stages, min_size=1, max_size=3).map(lambda s: ElasticGenome(tuple(s)))


def rng_of(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def test_the_paper_space_has_155_options_per_stage_shallow_ones_first() -> None:
    stage = RESNET.stages[0]
    assert len(stage.contents) == 5 + 5**2 + 5**3 == 155
    assert stage.contents[:6] == ((0,), (1,), (2,), (3,), (4,), (0, 0))
    assert stage.option_of[(4, 4, 4)] == 154
    assert RESNET.genes(as_array([[0, 5, 30, 154]])).tolist() == [
        [0, 0, ABSENT, ABSENT, 1, 0, 0, ABSENT, 2, 0, 0, 0, 2, 4, 4, 4]
    ]
    assert RESNET.one_hot(as_array([[0, 5, 30, 154]])).shape == (1, 4 * (3 + 3 * 5))


@settings(max_examples=40)
@given(genomes)
def test_genes_and_architectures_are_inverse(genome: ElasticGenome) -> None:
    most = max(len(s.contents) for s in genome.stages)
    rows = np.stack([np.arange(most) % len(s.contents) for s in genome.stages], axis=1)
    genes = genome.genes(rows)
    assert np.array_equal(genome.architectures(genes), rows)
    # The same by the slow way, one stage at a time.
    for row, gene in zip(rows.tolist(), genes.tolist(), strict=True):
        for option, stage, start in zip(row, genome.stages, _starts(genome), strict=True):
            depth = gene[start] + stage.fewest
            widths = tuple(gene[start + 1 : start + 1 + stage.most])
            assert stage.option_of[widths[:depth]] == option
            assert set(widths[depth:]) <= {ABSENT}


def _starts(genome: ElasticGenome) -> list[int]:
    return [0, *itertools.accumulate(1 + s.most for s in genome.stages[:-1])]


@settings(max_examples=40)
@given(genomes, st.integers(0, 99))
def test_children_are_architectures_with_genes_of_their_parents(genome: ElasticGenome, seed: int) -> None:
    rng = rng_of(seed)
    mothers, fathers = genome.draw(30, rng), genome.draw(30, rng)
    children = genome.cross(mothers, fathers, rng)
    a, b, c = genome.genes(mothers), genome.genes(fathers), genome.genes(children)
    assert ((c == a) | (c == b) | (c == ABSENT)).all()
    options = [len(s.contents) for s in genome.stages]
    for rows in (mothers, children, genome.mutate(mothers, 0.5, rng)):
        assert (rows >= 0).all()
        assert (rows < options).all()


def test_crossover_never_invents_a_plain_gene_and_takes_both_parents_equally() -> None:
    genome, rng = PlainGenome((9,) * 6), rng_of(0)
    a, b = genome.draw(4000, rng), genome.draw(4000, rng)
    child = genome.cross(a, b, rng)
    assert ((child == a) | (child == b)).all()
    differ = a != b
    assert abs((child == a)[differ].mean() - 0.5) < 0.02  # five standard deviations


def test_a_depth_that_only_one_parent_has_brings_that_parents_widths() -> None:
    genome = ElasticGenome((ElasticStage(1, 2, 3),))
    shallow, deep = as_array([[1]] * 200), as_array([[genome.stages[0].option_of[(2, 0)]]] * 200)
    children = {genome.stages[0].contents[o] for o in genome.cross(shallow, deep, rng_of(0))[:, 0]}
    assert children == {(1,), (2,), (1, 0), (2, 0)}


@pytest.mark.parametrize("genome", [PlainGenome((7,) * 5), RESNET])
@pytest.mark.parametrize("probability", [0.1, 0.4])
def test_every_gene_moves_at_the_rate(genome: Genome, probability: float) -> None:
    rng = rng_of(1)
    before = genome.draw(20_000, rng)
    after = genome.mutate(before, probability, rng)
    if isinstance(genome, ElasticGenome):
        before, after = genome.genes(before), genome.genes(after)
    both = (before != ABSENT) & (after != ABSENT)
    rates = [(before != after)[both[:, i], i].mean() for i in range(before.shape[1])]
    assert np.allclose(rates, probability, atol=0.025)
    assert not np.array_equal(before, after)


def test_no_probability_moves_nothing_and_a_gene_without_choice_stays() -> None:
    rows = RESNET.draw(50, rng_of(2))
    assert np.array_equal(RESNET.mutate(rows, 0.0, rng_of(3)), rows)
    single = PlainGenome((1, 2)).mutate(as_array([[0, 0]]), 1.0, rng_of(0))
    assert single.tolist() == [[0, 1]]


def test_draws_are_uniform_over_the_choices_of_each_gene() -> None:
    genes = RESNET.genes(RESNET.draw(6000, rng_of(4)))
    for gene, choices in enumerate([3, 5, 5, 5] * 4):
        column = genes[:, gene]
        counts = np.bincount(column[column != ABSENT], minlength=choices)
        assert len(counts) == choices
        assert chisquare(counts).pvalue > 1e-4
    counts = np.bincount(PlainGenome((7,)).draw(7000, rng_of(5))[:, 0])
    assert len(counts) == 7
    assert chisquare(counts).pvalue > 1e-4


@settings(max_examples=30)
@given(genomes, st.integers(0, 99))
def test_features_tell_architectures_apart_and_have_one_per_present_gene(genome: ElasticGenome, seed: int) -> None:
    rows = np.unique(genome.draw(40, rng_of(seed)), axis=0)
    features = genome.one_hot(rows)
    assert np.array_equal(features.sum(axis=1), (genome.genes(rows) != ABSENT).sum(axis=1))
    assert set(np.unique(features)) <= {0.0, 1.0}
    assert len(np.unique(features, axis=0)) == len(rows)


def test_plain_features_by_hand() -> None:
    assert PlainGenome((2, 3)).one_hot(as_array([[1, 0], [0, 2]])).tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]
