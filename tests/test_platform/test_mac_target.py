"""A limit on the MACs of what a search finds: it is kept, exactly, and takes away nothing else."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.platform.clients.evaluation import Score
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import World
from fedloom.platform.methods.fednas import FedNasConfig
from fedloom.platform.methods.fedpnas import FedPnasConfig
from fedloom.platform.methods.global_nas import GlobalNasConfig
from fedloom.platform.methods.silo_search import (
    ArchitectureSearchConfig,
    MacTarget,
    by_magnitude,
    decide,
    is_decided,
    with_row,
)
from fedloom.platform.methods.silos import SiloTrainingConfig
from fedloom.platform.methods.spider import SpiderConfig, SpiderTrainingConfig
from fedloom.platform.spaces.darts import DartsSpace
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import Subspace
from fedloom.platform.spaces.space_config import SpaceConfig

Make = Callable[..., RunConfig]
Run = Callable[[RunConfig], tuple[World, Any, RunState]]

SMALL = SpaceConfig("darts_s2_small", channels=4)


@pytest.fixture(scope="module")
def space() -> DartsSpace:
    built = build_space(SMALL)
    assert isinstance(built, DartsSpace)
    return built


def macs(space: DartsSpace, kept: Subspace, base_cells: int = 0) -> float:
    return space.cost_of_cells("macs", kept, base_cells)


@pytest.mark.parametrize("base_cells", [0, 1])
def test_the_cheapest_and_the_allowed_are_those_of_all_architectures(space: DartsSpace, base_cells: int) -> None:
    kept = with_row(with_row(space.largest_subspace, 0, (1,)), 7, ())
    every = [tuple((o,) if row else () for o, row in zip(c, kept, strict=True)) for c in chosen_of(kept)]
    least = min(macs(space, a, base_cells) for a in every)
    target = MacTarget.of(space, least + 3000, base_cells)
    assert target.least(kept) == least
    for decision, row in enumerate(kept):
        fits = {a[decision] for a in every if macs(space, a, base_cells) <= target.most}
        assert {(option,) for option in target.allowed(kept, decision)} == fits - {()} or not row


def chosen_of(kept: Subspace) -> list[tuple[int, ...]]:
    return list(itertools.product(*(row or (0,) for row in kept)))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 2.0])
def test_the_most_probable_architecture_within_the_target_is_found_exactly(space: DartsSpace, share: float) -> None:
    everything = space.largest_subspace
    every = [tuple((o,) for o in choice) for choice in chosen_of(everything)]
    costs = {a: macs(space, a) for a in every}
    low, high = min(costs.values()), max(costs.values())
    target = MacTarget.of(space, low + share * (high - low))
    for seed in range(3):
        alphas = torch.randn((10, 2), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        weights = alphas.log_softmax(dim=1)
        within = [a for a in every if costs[a] <= target.most]
        best = max(within, key=lambda a: sum(float(weights[d, o]) for d, (o,) in enumerate(a)))
        assert target.most_probable(alphas, everything) == best
        assert share <= 1 or best == by_magnitude(alphas, everything), "a target that binds nothing changes nothing"


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_a_search_by_perturbation_ends_within_the_target(space: DartsSpace, share: float) -> None:
    everything, wanted = space.largest_subspace, np.random.default_rng(5).random((10, 2))
    costs = [macs(space, tuple((o,) for o in (option,) * 10)) for option in (0, 1)]
    target = MacTarget.of(space, costs[0] + share * (costs[1] - costs[0]))

    def score(rest: Subspace) -> Score:
        """Convolutions, the costlier operators, are wanted on most edges."""
        return Score(1.0, sum(wanted[d, o] + o for d, row in enumerate(rest) for o in row), 1)

    kept, free, rng, same = everything, everything, np.random.default_rng(1), np.random.default_rng(1)
    for _ in range(5):
        kept = decide(space, score, kept, rng, prune_edges=False, target=target)
        free = decide(space, score, free, same, prune_edges=False)
        assert target.least(kept) <= target.most
    assert is_decided(kept)
    assert macs(space, kept) <= target.most
    assert (kept == free) == (macs(space, free) <= target.most)
    assert macs(space, free) == costs[1]


def least_of(space: DartsSpace, base_cells: int = 0) -> float:
    return MacTarget.of(space, 1.0, base_cells).least(space.largest_subspace)


METHODS: dict[str, Callable[[ArchitectureSearchConfig], Any]] = {
    "spider": lambda s: SpiderConfig(train=SpiderTrainingConfig(rounds=7, batch_size=16), search=s),
    "fedpnas": lambda s: FedPnasConfig(train=SiloTrainingConfig(rounds=7, batch_size=16), search=s),
    "global_nas": lambda s: GlobalNasConfig(train=SiloTrainingConfig(rounds=8, batch_size=16), search=s),
    "fednas": lambda s: FedNasConfig(train=SiloTrainingConfig(rounds=4, batch_size=16), search=s),
}


@pytest.mark.parametrize("name", METHODS)
def test_what_a_run_ends_with_is_within_the_target(
    silo_config: Make, run_in_memory: Run, space: DartsSpace, name: str
) -> None:
    most = least_of(space, 1 if name == "fedpnas" else 0) + 2000
    kind = {"kind": "milenas", "rounds": 2} if name == "fednas" else {"start": 1, "every": 1}
    search = ArchitectureSearchConfig(max_macs=most, **kind)  # type: ignore[arg-type]
    _, memory, _ = run_in_memory(silo_config(METHODS[name](search), space=SMALL))
    rows = memory.table("evaluations")
    found = rows[(rows.stage == "evaluation") & (rows.metric == "macs")]
    assert len(found) == 3
    assert found.value.max() <= most


def test_targets_that_cannot_be_kept_are_refused(
    silo_config: Make, space: DartsSpace, refused: Callable[[RunConfig], str]
) -> None:
    def said(name: str, **search: Any) -> str:
        return refused(silo_config(METHODS[name](ArchitectureSearchConfig(**search)), space=SMALL))

    early = {"start": 1, "every": 1}
    assert said("spider", max_macs=1000.0, **early) == (
        f"method.search.max_macs=1000: the smallest architecture of darts_s2_small has {least_of(space):g}; raise it, "
        "or lower space.channels or space.cells"
    )
    base = f"{least_of(space, 1):g}, with 1 cells as a base that keeps all operators; raise it"
    assert base in said("fedpnas", max_macs=least_of(space, 1) - 1, **early)
    assert said("spider", max_macs=1e9, start=3, every=1) == (
        "method.search.max_macs: 4 of 10 edges keep all operators until the last round, whatever MACs they have; "
        "search earlier or more often, or train for more rounds"
    )
    assert said("spider", max_macs=0.0, **early) == "method.search.max_macs=0.0: must be greater than 0, or null"
