"""The contract that every searcher keeps, its winner and its front."""

import json
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fedloom.platform.search.base import Architecture, Interval, Scored, Searcher, pareto_front, winner
from fedloom.platform.search.config import SearchConfig, SearchProblem
from fedloom.platform.search.generations import GenerationSearch, RandomSearch
from fedloom.platform.search.registry import build_searcher
from fedloom.platform.settings import check_settings
from fedloom.platform.spaces.genome import PlainGenome
from fedloom.tiers.costs import CostTable

ROWS = tuple(tuple(float((7 * d + 13 * o * o) % 41) for o in range(9)) for d in range(16))
LARGE = CostTable("macs", 100.0, ROWS)
TIER = Interval(350.0, 420.0)
VALUES = np.random.Generator(np.random.PCG64(5)).normal(size=(16, 9))


def separable(architecture: Architecture) -> float:
    """A synthetic metric: the sum of one value per (decision, option)."""
    return float(sum(VALUES[i, o] for i, o in enumerate(architecture)))


def tell_truth(searcher: Searcher, candidates: list[Architecture]) -> None:
    searcher.tell(candidates, [separable(a) for a in candidates], [-separable(a) for a in candidates])


def run(searcher: Searcher, generations: int | None = None) -> list[list[Architecture]]:
    asked: list[list[Architecture]] = []
    while generations is None or len(asked) < generations:
        candidates = searcher.ask()
        if not candidates:
            break
        tell_truth(searcher, candidates)
        asked.append(candidates)
    return asked


def problem(
    config: SearchConfig, table: CostTable = LARGE, interval: Interval = TIER, seed: int = 0, budget: int | None = None
) -> SearchProblem:
    """The search of a table's options, each a gene; of the configured budget unless another is given."""
    options = tuple(len(row) for row in table.options)
    return SearchProblem(options, PlainGenome(options), table, interval, seed, budget or config.budget, config)


def distinct(history: list[Scored]) -> set[Architecture]:
    return {s.architecture for s in history}


@pytest.mark.parametrize("name", ["nsga2", "random", "evolution"])
class TestSearcher:
    """The contract of `Searcher`."""

    def searcher(
        self, name: str, table: CostTable = LARGE, interval: Interval = TIER, seed: int = 3, budget: int = 150
    ) -> Searcher:
        config = SearchConfig(searcher=name, population=32, offspring=16, budget=budget)
        return build_searcher(problem(config, table, interval, seed))

    def test_exactly_the_budget_of_valid_distinct_models(self, name: str) -> None:
        searcher = self.searcher(name, budget=150)
        asked = run(searcher)
        history = searcher.history
        assert (len(history), len(distinct(history))) == (150, 150)
        assert all(TIER.contains(LARGE.cost(s.architecture)) for s in history)
        assert all(type(o) is int and 0 <= o < 9 for s in history for o in s.architecture)
        assert [s.cost for s in history] == [LARGE.cost(s.architecture) for s in history]
        assert [s.generation for s in history] == [g for g, batch in enumerate(asked) for _ in batch]
        assert (reason(searcher), searcher.ask()) == ("budget", [])

    def test_a_budget_smaller_than_a_generation(self, name: str) -> None:
        searcher = self.searcher(name, budget=5)
        assert [len(batch) for batch in run(searcher)] == [5]
        assert reason(searcher) == "budget"

    @pytest.mark.parametrize("decisions", [1, 2, 4])
    def test_a_small_tier_is_searched_whole_and_ends(self, name: str, decisions: int) -> None:
        table = CostTable("macs", 0.0, ((0.0, 1.0, 2.0),) * decisions)
        interval = Interval(0.0, 2.0 * decisions - 1)
        searcher = self.searcher(name, table, interval)
        run(searcher)
        inside = {a for a in product(range(3), repeat=decisions) if 0 < sum(a) < 2 * decisions}
        assert distinct(searcher.history) == inside
        assert len(searcher.history) == len(inside)
        assert reason(searcher) == "exhausted"

    def test_one_model_and_none(self, name: str) -> None:
        table = CostTable("macs", 0.0, ((1.0, float("inf")), (2.0, 5.0)))
        single = self.searcher(name, table, Interval(6.0, 7.0))
        assert single.ask() == []  # (0, 1) costs 6, which lies just outside
        assert (reason(single), single.history) == ("exhausted", [])
        single = self.searcher(name, table, Interval(5.0, 6.0))
        assert run(single) == [[(0, 1)]]
        assert reason(single) == "exhausted"

    def test_a_tier_of_exactly_the_budget(self, name: str) -> None:
        table = CostTable("macs", 0.0, ((0.0, 1.0, 2.0),) * 4)
        searcher = self.searcher(name, table, Interval(-1.0, 8.0), budget=81)
        run(searcher)
        assert (len(distinct(searcher.history)), reason(searcher)) == (81, "budget")

    def test_asking_again_changes_nothing(self, name: str) -> None:
        searcher, other = self.searcher(name), self.searcher(name)
        assert searcher.ask() == searcher.ask()
        assert run(searcher) == run(other)

    def test_the_seed_decides(self, name: str) -> None:
        assert run(self.searcher(name, seed=1)) == run(self.searcher(name, seed=1))
        assert self.searcher(name, seed=1).ask() != self.searcher(name, seed=2).ask()

    def test_failed_models_count_and_never_win(self, name: str) -> None:
        searcher = self.searcher(name)
        while candidates := searcher.ask():
            metrics = [math.nan if a[0] % 2 else separable(a) for a in candidates]
            searcher.tell(candidates, metrics, [math.inf if math.isnan(m) else 0.0 for m in metrics])
        history = searcher.history
        failed = {s.architecture for s in history if not s.feasible}
        assert len(history) == len(distinct(history)) == 150
        assert failed == {s.architecture for s in history if s.architecture[0] % 2}
        assert failed
        assert not failed & {s.architecture for s in [winner(history), *pareto_front(history)]}

    def test_a_search_of_failures_ends(self, name: str) -> None:
        searcher = self.searcher(name)
        while candidates := searcher.ask():
            searcher.tell(candidates, [math.nan] * len(candidates), [math.nan] * len(candidates))
        assert (len(distinct(searcher.history)), reason(searcher)) == (150, "budget")
        assert pareto_front(searcher.history) == []
        with pytest.raises(ValueError, match="no feasible model"):
            winner(searcher.history)
        restored = self.searcher(name)
        restored.restore(json.loads(json.dumps(searcher.state(), allow_nan=False)))
        assert restored.state() == searcher.state()

    def test_an_infinite_metric_is_a_failure(self, name: str) -> None:
        searcher = self.searcher(name)
        candidates = searcher.ask()
        searcher.tell(candidates, [math.inf, -math.inf] + [0.0] * (len(candidates) - 2), [0.0] * len(candidates))
        assert [s.feasible for s in searcher.history[:3]] == [False, False, True]

    def test_resuming_twice_is_as_if_never_stopped(self, name: str) -> None:
        whole = self.searcher(name)
        asked = run(whole)
        first = self.searcher(name)
        run(first, 2)
        second = self.searcher(name)
        second.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
        assert run(second, 2) == asked[2:4]
        assert second.ask() == asked[4]  # stopped between ask and tell
        third = self.searcher(name)
        third.restore(json.loads(json.dumps(second.state(), allow_nan=False)))
        assert third.history == second.history
        assert run(third) == asked[4:]
        assert third.history == whole.history
        assert third.state() == whole.state()
        assert reason(third) == "budget"
        # The generator itself stands at the same place.
        assert generator_state(third) == generator_state(whole)

    def test_an_exhausted_search_is_restored_as_exhausted(self, name: str) -> None:
        table = CostTable("macs", 0.0, ((0.0, 1.0, 2.0),) * 2)
        searcher = self.searcher(name, table, Interval(-1.0, 4.0))
        run(searcher)
        restored = self.searcher(name, table, Interval(-1.0, 4.0))
        restored.restore(searcher.state())
        assert reason(restored) == "exhausted"
        assert restored.state() == searcher.state()

    def test_a_foreign_or_changed_state_is_refused(self, name: str) -> None:
        searcher = self.searcher(name)
        run(searcher, 2)
        with pytest.raises(ValueError, match="seed 3 -> 4"):
            self.searcher(name, seed=4).restore(searcher.state())
        dearer = CostTable("macs", 101.0, ROWS)
        with pytest.raises(ValueError, match=r"costs .* -> "):
            self.searcher(name, dearer).restore(searcher.state())
        state = searcher.state()
        state["generations"][1]["architectures"][0][0] += 1
        with pytest.raises(ValueError, match=r"generation 1 .* does not replay"):
            self.searcher(name).restore(state)
        with pytest.raises(ValueError, match="format 0"):
            self.searcher(name).restore({**searcher.state(), "format": 0})

    def test_tell_takes_what_was_asked_only(self, name: str) -> None:
        searcher = self.searcher(name)
        with pytest.raises(ValueError, match="last asked"):
            searcher.tell([(0,) * 16], [0.0], [0.0])
        candidates = searcher.ask()
        with pytest.raises(ValueError, match="last asked"):
            searcher.tell(candidates[1:], [0.0] * (len(candidates) - 1), [0.0] * (len(candidates) - 1))
        with pytest.raises(ValueError, match="one metric and one loss"):
            searcher.tell(candidates, [0.0], [0.0])
        tell_truth(searcher, candidates)
        with pytest.raises(ValueError, match="last asked"):
            tell_truth(searcher, candidates)

    def test_the_global_generator_is_left_alone(self, name: str) -> None:
        before = np.random.get_state(legacy=False)  # noqa: NPY002
        run(self.searcher(name))
        after = np.random.get_state(legacy=False)  # noqa: NPY002
        assert np.array_equal(before["state"]["key"], after["state"]["key"])
        assert before["state"]["pos"] == after["state"]["pos"]

    def test_peaks_can_bound_a_tier(self, name: str) -> None:
        table = CostTable("activation_bytes", 3.0, ROWS, reduce="max")
        searcher = self.searcher(name, table, Interval(20.0, 36.0))
        run(searcher)
        assert len(distinct(searcher.history)) == 150
        assert all(20 < s.cost <= 36 for s in searcher.history)


def reason(searcher: Searcher) -> str:
    assert isinstance(searcher, GenerationSearch)
    return searcher.reason


def generator_state(searcher: Searcher) -> object:
    assert isinstance(searcher, GenerationSearch)
    proposer = searcher._proposer
    assert proposer is not None
    return proposer.rng.bit_generator.state  # type: ignore[attr-defined]


def test_settings_out_of_range_are_refused() -> None:
    def build(**changes: object) -> Searcher:
        config = SearchConfig(**changes)  # type: ignore[arg-type]
        check_settings(config, "method.search.")
        return build_searcher(problem(config))

    with pytest.raises(ValueError, match="unknown searcher 'nsga3': known are evolution, nsga2, random, or "):
        build(searcher="nsga3")
    for changes in ({"population": 1}, {"offspring": 0}, {"mutation": 1.5}, {"budget": 0}, {"validation_share": 0.0}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            build(**changes)
    for changes in ({"population": 1}, {"mutation": -0.1}, {"parents": 0.0}, {"parents": 1.5}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            build(searcher="evolution", **changes)
    with pytest.raises(ValueError, match="do not fit the cost table"):
        RandomSearch(replace(problem(SearchConfig()), options=(9,) * 15))
    assert len(run(build_searcher(problem(SearchConfig(), budget=10)))[0]) == 10


# --- winner and front


def scored(architecture: Architecture, metric: float, cost: float) -> Scored:
    return Scored(architecture, metric, 0.0, cost, 0, math.isfinite(metric))


def test_the_winner_is_the_best_then_the_cheapest_then_the_first() -> None:
    history = [scored((3,), 0.5, 1.0), scored((2,), 0.9, 3.0), scored((1,), 0.9, 2.0), scored((0,), 0.9, 2.0)]
    assert winner(history).architecture == (0,)
    assert winner(history[:3]).architecture == (1,)
    assert winner([*history, scored((9,), math.nan, 0.0)]).architecture == (0,)


models = st.tuples(st.integers(0, 9), st.one_of(st.just(math.nan), st.integers(0, 4).map(float)), st.integers(0, 4))


@given(st.lists(models, max_size=20))
def test_the_front_is_what_nothing_dominates(entries: list[tuple[int, float, int]]) -> None:
    history = [scored((index, option), m, float(c)) for index, (option, m, c) in enumerate(entries)]
    sound = [s for s in history if s.feasible]

    def dominated(s: Scored) -> bool:
        return any(
            t.metric >= s.metric and t.cost <= s.cost and (t.metric > s.metric or t.cost < s.cost) for t in sound
        )

    front = pareto_front(history)
    assert sorted(s.architecture for s in front) == sorted(s.architecture for s in sound if not dominated(s))
    assert [s.cost for s in front] == sorted(s.cost for s in front)
