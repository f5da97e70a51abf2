"""Tiny federations for the tests of SuperFedNAS and of silos, and runs that write nothing."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest
import torch

from fedloom.platform.clients.execution import SerialExecutor
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.loop import Loop
from fedloom.platform.federation.recorder import Record, Recorder
from fedloom.platform.federation.stage import Stage
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.elastic.superfednas import ElasticTrainingConfig, SuperFedNASConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.results.status import StatusFile
from fedloom.platform.search.targets import TargetSearchConfig
from fedloom.platform.spaces.space_config import SpaceConfig


@pytest.fixture
def elastic_config(tiny_config: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    """Makes configurations of 8 clients in 2 tiers on a space of 36 subnets, not searched.

    `norm`, `method` (a dict) and `train` (a dict) change parts; other keywords replace fields of RunConfig.
    """

    def make(
        norm: str = "none", method: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **changes: Any
    ) -> RunConfig:
        space = SpaceConfig(
            "resnet_elastic_small",
            input_shape=[1, 8, 8],
            stem_channels=8,
            stage_widths=[8, 16],
            stage_strides=[2, 2],
            depths=[1, 1],
            expansions=[1.0, 2.0],
            norm=norm,
        )
        training = ElasticTrainingConfig(rounds=2, clients_per_round=4, epochs=2, batch_size=16, evaluate_every=2)
        chosen = SuperFedNASConfig(train=replace(training, **(train or {})), search=TargetSearchConfig(samples=0))
        tiers = TiersConfig(count=2, paths=2000, rho_high=0.5)
        return tiny_config(**{"space": space, "tiers": tiers, "method": replace(chosen, **(method or {})), **changes})

    return make


@pytest.fixture
def silo_config(tiny_config: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    """Makes configurations of a method on 3 silos in one tier, with validation data; other keywords are of the data."""

    def make(method: object, *, space: SpaceConfig | None = None, **data: Any) -> RunConfig:
        changes = {} if space is None else {"space": space}
        config = tiny_config(tiers=TiersConfig(count=1, paths=100), method=method, **changes)
        values = {"num_clients": 3, "train_samples": 120, "validation_share": 0.25, **data}
        return replace(config, data=replace(config.data, **values))

    return make


class Memory:
    """Keeps what a recorder would write: many short runs, and none has to wait for the disk."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def submit(self, record: Record) -> None:
        self.records.append(record)

    def start(self) -> None:
        """Nothing waits."""

    def wait(self) -> None:
        """Nothing waits."""

    def table(self, name: str) -> pd.DataFrame:
        """The rows of a table."""
        return pd.DataFrame([row for record in self.records for table, row in record.rows if table == name])

    def state(self, round_: int) -> RunState:
        """The state after a round of the first stage."""
        state = self.records[round_].state
        assert state is not None
        return state


def _run_stages(world: World, stages: Sequence[Stage], state: RunState) -> tuple[Memory, RunState]:
    memory = Memory()
    loop = Loop(
        stages,
        SerialExecutor(Worker(world.spec)),
        cast(Recorder, memory),
        cast(StatusFile, SimpleNamespace(write=lambda **_: None, beat=lambda: None)),
        execution=world.config.executor,
        checkpoint=world.config.checkpoint,
        deadline_s=None,
    )
    return memory, loop.run(state)


@pytest.fixture
def run_stages() -> Callable[[World, Sequence[Stage], RunState], tuple[Memory, RunState]]:
    """Runs stages from a state; gives what would have been written, in memory, and the last state."""
    return _run_stages


@pytest.fixture
def run_in_memory() -> Callable[[RunConfig], tuple[World, Memory, RunState]]:
    """Runs a configuration from the beginning; gives its world, too."""

    def run(config: RunConfig) -> tuple[World, Memory, RunState]:
        world = build_world(config)
        return world, *_run_stages(world, build_stages(world), RunState())

    return run


@pytest.fixture
def refused() -> Callable[[RunConfig], str]:
    """The whole message with which a configuration is refused."""

    def refuse(config: RunConfig) -> str:
        with pytest.raises(ValueError) as caught:  # noqa: PT011  # the whole message is compared
            build_stages(build_world(config))
        return str(caught.value)

    return refuse


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
