"""Test accuracies during training: measured for reports, after the round, and nothing else changes by a bit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.ditto import DittoConfig
from fedloom.platform.methods.fednas import FedNasConfig
from fedloom.platform.methods.fedpnas import FedPnasConfig
from fedloom.platform.methods.knn_per import KnnPerConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.silo_search import ArchitectureSearchConfig
from fedloom.platform.methods.silos import WATCHED
from fedloom.platform.methods.spider import SpiderConfig
from fedloom.platform.spaces.space_config import SpaceConfig

Make = Callable[..., RunConfig]
Run = Callable[[RunConfig], tuple[World, Any, RunState]]

CELLS = SpaceConfig("darts_s2_small", channels=4, nodes=1)
SEARCH = ArchitectureSearchConfig(start=1, every=1)
METHODS: dict[str, Callable[[], Any]] = {
    "spider": lambda: SpiderConfig(search=SEARCH),
    "fedpnas": lambda: FedPnasConfig(search=SEARCH),
    "fednas": lambda: FedNasConfig(search=ArchitectureSearchConfig("milenas", rounds=2)),
    "ditto": DittoConfig,
    "knn_per": KnnPerConfig,
}


def rows_of(memory: Any, table: str) -> list[dict[str, Any]]:
    times = ["wall_s", "overhead_s", "peak_memory_bytes", "started", "ended", "node"]
    frame = memory.table(table).drop(columns=times, errors="ignore").astype(object)
    return [dict(row) for row in frame.where(frame.notna(), None).to_dict("records")]


def configured(make: Make, name: str, test_every: int) -> RunConfig:
    method = METHODS[name]()
    method.train = replace(method.train, rounds=3, batch_size=16, test_every=test_every)
    return make(method, space=None if name in ("ditto", "knn_per") else CELLS)


@pytest.mark.parametrize("name", METHODS)
def test_to_be_watched_on_test_data_changes_nothing(silo_config: Make, run_in_memory: Run, name: str) -> None:
    _, plain, state = run_in_memory(configured(silo_config, name, 0))
    _, watched, after = run_in_memory(configured(silo_config, name, 3))
    rows = rows_of(watched, "evaluations")
    assert [r for r in rows if r["metric"] != WATCHED] == rows_of(plain, "evaluations")
    assert rows_of(watched, "clients") == rows_of(plain, "clients")
    assert after.groups.keys() == state.groups.keys()
    for group, kept in state.groups.items():
        assert all(tensor.equal(after.groups[group].tensors[n]) for n, tensor in kept.tensors.items())
    frame = pd.DataFrame([r for r in rows if r["metric"] == WATCHED])
    rounds = {"fednas": [2]}.get(name, [0, 2])
    assert sorted(frame["round"].unique()) == rounds, "and FedNAS has no architecture before its search ends"
    assert set(frame.stage) == {name}
    assert set(frame.split) == {"test"}
    final = pd.DataFrame([r for r in rows if r["stage"] == "evaluation" and r["metric"] == "accuracy"])
    last = frame[frame["round"] == 2]
    key = ["model", "client_id", "architecture", "samples", "value"]
    assert last[key].values.tolist() == final[final.split == "test"][key].values.tolist(), "the last are the final ones"


def test_training_itself_may_not_read_test_data(silo_config: Make) -> None:
    training, evaluation = build_stages(build_world(configured(silo_config, "spider", 1)))
    begun = training.begin(RunState())
    assert not any(a.reads_test for a in training.plan(begun).assignments)
    assert all(a.reads_test for a in evaluation.plan(begun).assignments)


def test_by_default_nothing_is_watched(silo_config: Make, refused: Callable[[RunConfig], str]) -> None:
    assert {METHODS[name]().train.test_every for name in METHODS} == {0}
    assert refused(configured(silo_config, "ditto", -1)) == "method.train.test_every=-1: must be 0 or more"
