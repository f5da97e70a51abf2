"""Searches where only some silos take part in a round: who decides when, and what those are left with who never do."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import World
from fedloom.platform.methods.fednas import FedNasConfig
from fedloom.platform.methods.fedpnas import FedPnasConfig
from fedloom.platform.methods.global_nas import GlobalNasConfig
from fedloom.platform.methods.silo_search import ArchitectureSearchConfig, steps_made, turns
from fedloom.platform.methods.silos import ALPHAS, SiloTrainingConfig, unpacked
from fedloom.platform.methods.spider import SpiderConfig, SpiderTrainingConfig
from fedloom.platform.spaces.darts import DartsSpace
from fedloom.platform.spaces.slices import parse_subspace, subspace_id
from fedloom.platform.spaces.space_config import SpaceConfig

Make = Callable[..., RunConfig]
Run = Callable[[RunConfig], tuple[World, Any, RunState]]

SMALL = SpaceConfig("darts_s2_small", channels=4, nodes=1)
SEARCH = ArchitectureSearchConfig(start=1, every=2)


def train(kind: type[SiloTrainingConfig] = SiloTrainingConfig, rounds: int = 6, clients: int = 2) -> Any:
    return kind(rounds=rounds, batch_size=16, clients_per_round=clients)


METHODS: dict[str, Callable[..., Any]] = {
    "spider": lambda **t: SpiderConfig(train=train(SpiderTrainingConfig, **t), search=SEARCH),
    "fedpnas": lambda **t: FedPnasConfig(train=train(**t), search=SEARCH),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_silo_searches_when_it_takes_part_and_makes_up_for_what_it_missed(
    silo_config: Make, run_in_memory: Run, name: str
) -> None:
    _, memory, state = run_in_memory(silo_config(METHODS[name](), space=SMALL))
    clients = memory.table("clients")
    trained = clients[clients.stage == name]
    assert trained.groupby("round").size().tolist() == [2] * 6
    late = 0
    for client_id, rows in trained.groupby("client_id"):
        steps = 0
        for round_ in sorted(rows["round"]):
            due = turns(SEARCH, round_ + 1)
            late += steps < due and round_ % 2 == 1  # no round of Alg. 2 decides: it makes up for an earlier one
            steps = min(steps + 1, due)
            kept = unpacked(memory.state(round_).groups[f"client-{client_id}"].tensors).remaining
            assert [sum(len(r) == 1 for r in part) for part in (kept[:2], kept[2:])] == [steps, steps]
    assert late > 0, "somebody missed a round"
    found = memory.table("evaluations").query("stage == 'evaluation' and metric == 'accuracy'")
    assert sorted(found.client_id) == [0, 1, 2]
    assert set(state.groups) <= {"supernet", "client-0", "client-1", "client-2"}


@pytest.mark.parametrize("name", METHODS)
def test_who_never_took_part_is_scored_with_all_operators_and_the_shared_weights(
    silo_config: Make, run_in_memory: Run, name: str
) -> None:
    world, memory, state = run_in_memory(silo_config(METHODS[name](rounds=1, clients=1), space=SMALL))
    everything = subspace_id(cast(DartsSpace, world.space).largest_subspace)
    assert len([group for group in state.groups if group.startswith("client-")]) == 1
    found = memory.table("evaluations").query("stage == 'evaluation' and metric == 'accuracy'")
    assert found.architecture.tolist() == [everything] * 3


def test_one_architecture_for_all_is_found_by_the_cohorts_together(silo_config: Make, run_in_memory: Run) -> None:
    search = ArchitectureSearchConfig("milenas", rounds=3, lr=0.2)
    _, memory, _ = run_in_memory(
        silo_config(FedNasConfig(train=train(rounds=4, clients=1), search=search), space=SMALL)
    )
    alphas = [memory.state(r).weights("supernet")[ALPHAS] for r in range(2)]
    assert not torch.equal(*alphas), "the next silo trains on with what the one before has sent"
    assert all(len(row) == 1 for row in parse_subspace(memory.state(3).data["kept"]))

    method = GlobalNasConfig(train=train(rounds=4, clients=1), search=ArchitectureSearchConfig(start=1, every=1))
    _, memory, _ = run_in_memory(silo_config(method, space=SMALL))
    assert all(len(row) == 1 for row in parse_subspace(memory.state(3).data["kept"])), "the server searches in any case"


def test_the_steps_of_a_silo_that_takes_part_now_and_then() -> None:
    paper = ArchitectureSearchConfig(start=30, every=20)
    assert steps_made(paper, 1000, 1.0) == turns(paper, 999) == len(range(40, 999, 20))
    assert steps_made(paper, 1000, 0.4) == 48, "959 rounds are enough to make up for every step"
    assert steps_made(paper, 60, 0.1) == 1
    assert steps_made(paper, 45, 0.1) == 0
