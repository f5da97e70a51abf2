"""Search by perturbation: which operator is missed most, what a step decides, and which edges are pruned."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedloom.platform.clients.evaluation import Score, evaluate
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.methods.silo_search import (
    ScoreOf,
    by_importance,
    crowded_nodes,
    decide,
    is_settled,
    masked_scores,
    search_steps,
    with_row,
)
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.darts import DARTS_S2, DARTS_S2_SMALL, DartsSpace
from fedloom.platform.spaces.slices import Subspace

Data = tuple[Tensor, Tensor]

S2 = DartsSpace(DARTS_S2)
SAMPLES = (torch.arange(1600.0)[:, None], torch.ones(1600, dtype=torch.long))
DECIDED: Subspace = ((1,),) * 28
INCOMING = {2: [0, 1], 3: [2, 3, 4], 4: [5, 6, 7, 8], 5: [9, 10, 11, 12, 13]}
"""The edges into each node of a cell of four."""


def worths(seed: int = 3) -> np.ndarray:
    """What each operator of each edge is worth in correct samples, all different."""
    return np.random.default_rng(seed).permutation(np.arange(1, 57)).reshape(28, 2)


def planted_forward(worth: np.ndarray) -> Callable[[Tensor, Subspace], Tensor]:
    """Right on as many samples as the kept operators are worth together."""

    def forward(x: Tensor, kept: Subspace) -> Tensor:
        right = sum(int(worth[d, o]) for d, row in enumerate(kept) for o in row)
        logit = torch.where(x < right, 1.0, -1.0)
        return torch.cat([-logit, logit], dim=1)

    return forward


def scorer(forward: Callable[[Tensor, Subspace], Tensor], data: Data = SAMPLES) -> ScoreOf:
    """Scores on these samples the network that a forward pass gives for what is kept."""
    return lambda kept: evaluate(lambda x: forward(x, kept), data, Objective())


# -- what is missed most ----------------------------------------------------------------------------------------------


def test_the_operator_that_is_missed_most_stays() -> None:
    scores = {0: Score(0.5, 0.9, 10), 1: Score(0.9, 0.4, 10), 2: Score(0.7, 0.6, 10)}
    assert by_importance(scores)[0] == 1
    assert by_importance({0: Score(0.5, 0.4, 10), 1: Score(0.9, 0.4, 10)})[0] == 1, "then the largest loss"
    assert by_importance({0: Score(0.5, 0.4, 10), 1: Score(float("nan"), 0.4, 10)})[0] == 1
    assert by_importance({0: Score(0.5, 0.4, 10), 1: Score(0.5, 0.4, 10)})[0] == 0


def test_a_planted_operator_is_kept_and_a_useless_one_dropped() -> None:
    x = torch.randn((64, 2), generator=torch_stream(2, "test"))
    y = (x[:, 0] > 0).long()

    def forward(x_B: Tensor, kept: tuple[tuple[int, ...], ...]) -> Tensor:
        needed = x_B[:, :1] * 4.0 if 1 in kept[0] else torch.zeros(len(x_B), 1)
        noise = x_B[:, 1:] * 0.1 if 0 in kept[0] else torch.zeros(len(x_B), 1)
        return torch.cat([-needed - noise, needed + noise], dim=1)

    scores = masked_scores(scorer(forward, (x, y)), ((0, 1),), 0)
    assert by_importance(scores)[0] == 1
    assert scores[0].metric > 0.95 > scores[1].metric


# -- steps of the search ----------------------------------------------------------------------------------------------


def test_crowded_nodes_of_cells_of_four_nodes() -> None:
    assert crowded_nodes(S2, DECIDED, "normal") == {n: INCOMING[n] for n in (3, 4, 5)}
    assert crowded_nodes(S2, DECIDED, "reduction") == {n: [14 + e for e in INCOMING[n]] for n in (3, 4, 5)}
    pruned = DECIDED
    for edge in (2, 5, 6, 9):
        pruned = with_row(pruned, edge, ())
    assert crowded_nodes(S2, pruned, "normal") == {5: [10, 11, 12, 13]}


def test_the_search_is_settled_when_edges_are_decided_and_nodes_pruned() -> None:
    assert not is_settled(S2, S2.largest_subspace, prune_edges=False)
    assert not is_settled(S2, with_row(DECIDED, 27, (0, 1)), prune_edges=False)
    assert is_settled(S2, DECIDED, prune_edges=False)
    assert not is_settled(S2, DECIDED, prune_edges=True)
    pruned = DECIDED
    for edges in (INCOMING[n] for n in (3, 4, 5)):
        for edge in edges[2:]:
            pruned = with_row(with_row(pruned, edge, ()), 14 + edge, ())
    assert is_settled(S2, pruned, prune_edges=True)
    assert not is_settled(S2, with_row(pruned, 14 + 13, (0,)), prune_edges=True)


def test_how_many_steps_a_search_takes() -> None:
    assert search_steps(S2, prune_edges=False) == 14
    assert search_steps(S2, prune_edges=True) == 17
    small = DartsSpace(DARTS_S2_SMALL)
    assert (search_steps(small, prune_edges=False), search_steps(small, prune_edges=True)) == (5, 6)


def test_s2_is_searched_in_14_steps_and_pruned_in_3_more() -> None:
    worth, kept, rng = worths(), S2.largest_subspace, np.random.default_rng(1)
    score = scorer(planted_forward(worth))
    order: list[int] = []
    for step in range(1, 15):
        before = kept
        kept = decide(S2, score, kept, rng, prune_edges=True)
        changed = [d for d in range(28) if kept[d] != before[d]]
        assert [d // 14 for d in changed] == [0, 1], "one edge of each cell type"
        assert all(kept[d] == (int(worth[d].argmax()),) for d in changed)
        assert sum(len(row) == 1 for row in kept) == 2 * step, "nothing is pruned while edges are left"
        order += changed
    assert sorted(order) == list(range(28))
    assert order != sorted(order), "edges are drawn"
    for step in range(1, 4):
        assert not is_settled(S2, kept, prune_edges=True)
        kept = decide(S2, score, kept, rng, prune_edges=True)
        assert [len(crowded_nodes(S2, kept, t)) for t in ("normal", "reduction")] == [3 - step] * 2
    assert is_settled(S2, kept, prune_edges=True)
    best = worth.max(axis=1)
    for first in (0, 14):
        for edges in INCOMING.values():
            two = sorted(edges, key=lambda e: -best[first + e])[:2]
            assert [e for e in edges if kept[first + e]] == sorted(two), "the two that are missed most"
    assert decide(S2, score, kept, rng, prune_edges=True) == kept, "nothing is left"


def test_without_pruning_a_decided_network_stays_as_it_is() -> None:
    rng = np.random.default_rng(1)
    assert decide(S2, scorer(planted_forward(worths())), DECIDED, rng, prune_edges=False) == DECIDED


def test_a_cell_type_that_is_decided_waits_for_the_other() -> None:
    kept: Subspace = ((1,),) * 14 + ((0, 1),) + ((1,),) * 13
    after = decide(S2, scorer(planted_forward(worths())), kept, np.random.default_rng(1), prune_edges=True)
    assert after[:14] == kept[:14], "nodes are pruned only after all edges are decided, those of both types"
    assert len(after[14]) == 1


def test_a_network_that_breaks_down_without_an_operator_misses_it_most() -> None:
    nan = float("nan")
    assert by_importance({0: Score(0.5, 0.4, 9), 1: Score(nan, 0.4, 9), 2: Score(0.5, 0.3, 9)})[0] == 1
    # Of NaN the first class is predicted, which a silo may have more of than its network gets right.
    assert by_importance({0: Score(0.5, 0.4, 9), 1: Score(nan, 0.6, 9)})[0] == 1
    assert by_importance({0: Score(math.inf, 0.4, 9), 1: Score(nan, 0.4, 9)})[0] == 0, "the first of equals"
    worth, kept = worths(), with_row(DECIDED, 5, (0, 1))
    planted_ = planted_forward(worth)

    def forward(x: Tensor, rest: Subspace) -> Tensor:
        y = planted_(x, rest)
        return y * math.nan if 0 not in rest[5] else y

    score = scorer(forward, (SAMPLES[0], torch.zeros_like(SAMPLES[1])))
    after = decide(S2, score, kept, np.random.default_rng(1), prune_edges=False)
    assert after[5] == (0,)
