"""Perturbation-based selection: operators and edges are ranked by the score without them (SPIDER; Wang et al. 2021)."""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from fedloom.platform.clients.training import Score
from fedloom.platform.methods.mac_target import MacTarget
from fedloom.platform.methods.personal import is_decided, undecided, with_row
from fedloom.platform.spaces.capabilities import HasCells
from fedloom.platform.spaces.darts import CELL_TYPES
from fedloom.platform.spaces.slices import Subspace

ScoreOf = Callable[[Subspace], Score]
"""Returns the validation score of the network with these operators."""

EDGES_KEPT = 2
"""Number of incoming edges per node after pruning, as in DARTS."""


def masked_scores(score: ScoreOf, kept: Subspace, decision: int) -> dict[int, Score]:
    """Per operator of an edge, the validation score of the network without it."""

    def without(option: int) -> Score:
        return score(with_row(kept, decision, tuple(o for o in kept[decision] if o != option)))

    return {option: without(option) for option in kept[decision]}


def masked_edge_scores(score: ScoreOf, kept: Subspace, edges: Iterable[int]) -> dict[int, Score]:
    """Per edge, the validation score of the network without it."""
    return {edge: score(with_row(kept, edge, ())) for edge in edges}


def by_importance(scores: dict[int, Score]) -> list[int]:
    """Sorts by importance, the most important first: lowest masked accuracy, then largest masked loss, then index.

    Removals that give no finite loss come first.
    SPIDER's listing says highest accuracy; its text, the method that it cites and the authors' code say lowest.
    """

    def key(index: int) -> tuple[float, float, int]:
        score = scores[index]
        # A network without a finite loss predicts the first class, so its accuracy says nothing.
        return (score.metric, -score.loss, index) if math.isfinite(score.loss) else (-math.inf, -math.inf, index)

    return sorted(scores, key=key)


def most_important(scores: dict[int, Score]) -> int:
    """The operator with the largest loss of accuracy when removed."""
    return by_importance(scores)[0]


def decide(
    space: HasCells,
    score: ScoreOf,
    kept: Subspace,
    rng: np.random.Generator,
    *,
    prune_edges: bool,
    target: MacTarget | None = None,
) -> Subspace:
    """One search step: a random undecided edge of each cell type keeps only its most important operator.

    With a target, only operators with which it can still be reached. After all edges are decided, with `prune_edges`, a
    node of each cell type keeps its two most important in-edges.
    """
    prune = prune_edges and is_decided(kept)
    for cell_type in CELL_TYPES:
        if prune:
            kept = _prune_node(space, score, kept, cell_type, rng)
        else:
            kept = _decide_edge(space, score, kept, cell_type, rng, target)
    return kept


def is_settled(space: HasCells, kept: Subspace, *, prune_edges: bool) -> bool:
    """Whether the search has ended: all edges are decided and, with `prune_edges`, all nodes pruned."""
    return steps_left(space, kept, prune_edges=prune_edges) == 0


def search_steps(space: HasCells, *, prune_edges: bool) -> int:
    """The number of search steps from the whole supernet to the end of the search."""
    return steps_left(space, space.largest_subspace, prune_edges=prune_edges)


def steps_left(space: HasCells, kept: Subspace, *, prune_edges: bool) -> int:
    """The number of search steps until the search has ended."""
    steps = max(len(undecided(kept, space.decisions(t))) for t in CELL_TYPES)
    return steps + (max(len(crowded_nodes(space, kept, t)) for t in CELL_TYPES) if prune_edges else 0)


def crowded_nodes(space: HasCells, kept: Subspace, cell_type: str) -> dict[int, list[int]]:
    """The nodes of a cell type with more than `EDGES_KEPT` incoming edges, with the decisions of these edges."""
    incoming: dict[int, list[int]] = {}
    for decision, (_source, node) in zip(space.decisions(cell_type), space.edges(cell_type), strict=True):
        if kept[decision]:
            incoming.setdefault(node, []).append(decision)
    return {node: edges for node, edges in incoming.items() if len(edges) > EDGES_KEPT}


def _decide_edge(
    space: HasCells,
    score: ScoreOf,
    kept: Subspace,
    cell_type: str,
    rng: np.random.Generator,
    target: MacTarget | None,
) -> Subspace:
    left = undecided(kept, space.decisions(cell_type))
    if not left:
        return kept
    decision = _drawn(left, rng)
    allowed = kept[decision] if target is None else target.allowed(kept, decision)
    scores = masked_scores(score, kept, decision)
    return with_row(kept, decision, (most_important({option: scores[option] for option in allowed}),))


def _prune_node(space: HasCells, score: ScoreOf, kept: Subspace, cell_type: str, rng: np.random.Generator) -> Subspace:
    crowded = crowded_nodes(space, kept, cell_type)
    if not crowded:
        return kept
    edges = crowded[_drawn(sorted(crowded), rng)]
    for edge in by_importance(masked_edge_scores(score, kept, edges))[EDGES_KEPT:]:
        kept = with_row(kept, edge, ())
    return kept


def _drawn(values: Sequence[int], rng: np.random.Generator) -> int:
    return values[int(rng.integers(len(values)))]
