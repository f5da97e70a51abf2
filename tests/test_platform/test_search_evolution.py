"""What evolution does beyond the contract of searchers, and NSGA-II on the genes of stages."""

import json
import math

import numpy as np
import pytest

from fedloom.platform.search.base import Architecture, Interval, Scored, winner
from fedloom.platform.search.config import SearchConfig, SearchProblem
from fedloom.platform.search.constraint import TableConstraint
from fedloom.platform.search.generations import Evolution, EvolutionSearch, NSGA2Search, RandomSearch
from fedloom.platform.search.registry import build_searcher
from fedloom.platform.spaces.genome import ElasticGenome, ElasticStage, Floats, Genome, Ints, PlainGenome, as_array
from fedloom.tiers.costs import CostTable

GENOME = ElasticGenome((ElasticStage(1, 2, 4),) * 4)
OPTIONS = (20,) * 4
COSTS = [[1.0 + sum(1 + w for w in content) for content in stage.contents] for stage in GENOME.stages]
TABLE = CostTable("macs", 5.0, tuple(map(tuple, COSTS)))
MIDDLE = Interval(20.0, 24.0)
VALUES = np.random.Generator(np.random.PCG64(7)).normal(size=40)


def metric_of(rows: Ints) -> Floats:
    """A planted metric: additive in the genes."""
    metrics: Floats = GENOME.one_hot(rows) @ VALUES
    return metrics


def scored(architectures: list[Architecture], generation: int = 0) -> list[Scored]:
    values = metric_of(as_array(architectures)).tolist()
    return [Scored(a, v, 0.0, TABLE.cost(a), generation, True) for a, v in zip(architectures, values, strict=True)]


def evolution(seed: int = 0, genome: Genome = GENOME, **settings: float) -> Evolution:
    rng = np.random.Generator(np.random.PCG64(seed))
    return Evolution(genome, TableConstraint(TABLE, MIDDLE, genome), rng, **settings)  # type: ignore[arg-type]


def test_generations_are_new_inside_and_deterministic() -> None:
    def run() -> list[Architecture]:
        proposer = evolution(population=40)
        asked: list[Architecture] = []
        for generation in range(8):
            batch = proposer.propose(40)
            assert len(batch) == 40
            proposer.observe(scored(batch, generation))
            asked += batch
        return asked

    asked = run()
    assert len(set(asked)) == 320
    assert all(MIDDLE.contains(TABLE.cost(a)) for a in asked)
    assert asked == run()


def test_the_parents_are_the_best_quarter_of_all_that_was_seen() -> None:
    proposer = evolution(population=40)
    seen: list[Scored] = []
    for generation in range(4):
        batch = scored(proposer.propose(40), generation)
        batch[0] = Scored(batch[0].architecture, math.nan, 0.0, batch[0].cost, generation, False)
        proposer.observe(batch)
        seen += [s for s in batch if s.feasible]
        best = sorted((s.metric for s in seen), reverse=True)[:10]
        assert [s.metric for s in proposer.parents] == best


def test_half_are_mutants_and_half_crossovers() -> None:
    """With constant first genes in all parents, only a mutation can change them."""
    genome = PlainGenome((10,) * 8)
    table = CostTable("macs", 0.0, ((0.0,) * 10,) * 8)
    rng = np.random.Generator(np.random.PCG64(0))
    proposer = Evolution(genome, TableConstraint(table, Interval(-1.0, 1.0)), rng, population=400, mutation=0.9)
    drawn = [(0, 0, 0, 0, *a[4:]) for a in proposer.propose(400)]
    proposer.observe([Scored(a, 0.0, 0.0, 0.0, 0, True) for a in drawn])
    children = as_array(proposer.propose(400))
    kept = (children[:, :4] == 0).all(axis=1)
    assert not kept[:200].any() or kept[:200].mean() < 0.01
    assert kept[200:].all()
    genes = as_array([s.architecture for s in proposer.parents])[:, 4:]
    assert all(set(children[200:, 4 + i]) <= set(genes[:, i]) for i in range(4))


@pytest.mark.parametrize("seed", range(4))
def test_evolution_beats_random_search_at_equal_budget(seed: int) -> None:
    """160 000 architectures, 400 evaluations; the optimum of the interval is known by enumeration."""
    everything = np.stack(np.unravel_index(np.arange(20**4), OPTIONS), axis=1)
    inside = TableConstraint(TABLE, MIDDLE).inside(everything)
    optimum = metric_of(everything[inside]).max()
    best = []
    searches = (
        EvolutionSearch(SearchProblem(OPTIONS, GENOME, TABLE, MIDDLE, seed, 400, SearchConfig(population=50))),
        RandomSearch(SearchProblem(OPTIONS, GENOME, TABLE, MIDDLE, seed, 400, SearchConfig())),
    )
    for search in searches:
        while asked := search.ask():
            search.tell(asked, metric_of(as_array(asked)).tolist(), [0.0] * len(asked))
        best.append(winner(search.history).metric)
    assert best[0] > best[1]
    assert best[0] >= optimum - 0.05 * abs(optimum)


@pytest.mark.parametrize("name", ["evolution", "nsga2"])
def test_a_search_over_genes_replays(name: str) -> None:
    def fresh(genome: Genome = GENOME) -> EvolutionSearch | NSGA2Search:
        config = SearchConfig(searcher=name, population=30, offspring=15, budget=120)
        search = build_searcher(SearchProblem(OPTIONS, genome, TABLE, MIDDLE, 4, 120, config))
        assert isinstance(search, (EvolutionSearch, NSGA2Search))
        return search

    search = fresh()
    while asked := search.ask():
        search.tell(asked, metric_of(as_array(asked)).tolist(), [0.0] * len(asked))
    assert len({s.architecture for s in search.history}) == 120
    assert all(MIDDLE.contains(s.cost) for s in search.history)
    restored = fresh()
    restored.restore(json.loads(json.dumps(search.state(), allow_nan=False)))
    assert restored.history == search.history
    with pytest.raises(ValueError, match="genome"):
        fresh(PlainGenome(OPTIONS)).restore(search.state())


def test_states_of_nsga2_without_genes_say_nothing_of_them() -> None:
    config = SearchConfig(population=20, offspring=10)
    search = NSGA2Search(SearchProblem(OPTIONS, PlainGenome(OPTIONS), TABLE, MIDDLE, 1, 60, config))
    assert "genome" not in search.state()["identity"]
