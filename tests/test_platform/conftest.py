"""Tiny federations for the tests of SuperFedNAS and of silos, and runs that write nothing."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest
import torch

from fedloom.platform.clients.execution import SerialExecutor, SharedWeights, make_chunks
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import Plan, RoundResult, RoundUpdate, RunState
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.loop import Loop, merge_chunks
from fedloom.platform.federation.method import Stage
from fedloom.platform.federation.recorder import Record, Recorder
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.superfednas import ElasticTrainingConfig, SuperFedNASConfig
from fedloom.platform.results.paths import list_runs
from fedloom.platform.results.status import StatusFile
from fedloom.platform.results.tables import TABLES, TIME_COLUMNS, read_table
from fedloom.platform.runs.run import make_serial, start_run
from fedloom.platform.search.targets import TargetSearchConfig
from fedloom.platform.spaces.space_config import SpaceConfig

Rows = dict[str, pd.DataFrame]


@pytest.fixture(scope="session")
def elastic_config_in(tiny_config_in: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    """Makes configurations of 8 clients in 2 tiers on a space of 36 subnets, not searched, with results in a folder.

    `norm`, `method` (a dict) and `train` (a dict) change parts; other keywords replace fields of RunConfig.
    """

    def make(
        results: Path | str,
        /,
        norm: str = "none",
        method: dict[str, Any] | None = None,
        train: dict[str, Any] | None = None,
        **changes: Any,
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
        parts = {"space": space, "tiers": tiers, "method": replace(chosen, **(method or {}))}
        return tiny_config_in(results, **{**parts, **changes})

    return make


@pytest.fixture
def elastic_config(tmp_path: Path, elastic_config_in: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    """Makes the same configurations with results in this test's own folder."""
    return partial(elastic_config_in, tmp_path / "results")


@pytest.fixture
def silo_config(tiny_config: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    """Makes configurations of a method on 3 silos in one tier, with validation data; other keywords are of the data."""

    def make(method: object, *, space: SpaceConfig | None = None, **data: Any) -> RunConfig:
        changes = {} if space is None else {"space": space}
        config = tiny_config(tiers=TiersConfig(count=1, paths=100), method=method, **changes)
        values = {"num_clients": 3, "train_samples": 72, "validation_share": 0.25, **data}
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


@pytest.fixture(scope="session")
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
def train_in_memory() -> Callable[[RunConfig], Memory]:
    """Runs the first stage of a configuration alone."""

    def train(config: RunConfig) -> Memory:
        world = build_world(config)
        return _run_stages(world, build_stages(world)[:1], RunState())[0]

    return train


class Results:
    """A run of a configuration, written to disk, and its tables."""

    def __init__(self, config: RunConfig) -> None:
        start_run(config, make_serial)
        self.world = build_world(config)
        (self.paths,) = list_runs(Path(config.results))

    def __getitem__(self, table: str) -> pd.DataFrame:
        frame = pd.read_parquet(self.paths.table(table))
        return frame.astype(object).where(frame.notna(), None)

    def clients(self, stage: str) -> pd.DataFrame:
        """The rows of a stage's clients."""
        frame = self["clients"]
        return frame[frame["stage"] == stage]


@pytest.fixture(scope="session")
def results_of() -> Callable[[RunConfig], Results]:
    """Runs a configuration of which there is no run yet, and gives what it left."""
    return Results


class Stepper:
    """Runs a stage round by round, as the loop does, and remembers what came of it."""

    def __init__(self, world: World, stage: Stage, state: RunState) -> None:
        self.stage, self.state = stage, replace(stage.begin(state), round=0)
        self.executor = SerialExecutor(Worker(world.spec))
        self.plans: list[Plan] = []
        self.results: list[RoundResult] = []
        self.merged: list[RoundUpdate] = []

    def step(self) -> None:
        """One round."""
        plan = self.stage.plan(self.state)
        weights = SharedWeights(self.state.weights(plan.group), self.state.version(plan.group))
        result = merge_chunks(self.executor.run(make_chunks(plan.assignments, 2), weights))
        merged = self.stage.merge(self.state, plan, result)
        self.state = replace(merged.state, round=self.state.round + 1)
        self.plans.append(plan)
        self.results.append(result)
        self.merged.append(merged)

    def finish(self) -> RoundUpdate:
        """The rounds that are left, and the stage's end."""
        while self.stage.rounds_left(self.state) > 0:
            self.step()
        return self.stage.end(self.state)


@pytest.fixture
def step_through() -> Callable[[World, Stage, RunState], Stepper]:
    """Begins a stage from a state, to be run round by round."""
    return Stepper


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


@pytest.fixture
def begun(step_through: Any) -> Callable[..., Any]:
    """Begins a stage of a configuration, the first if no other is asked for."""

    def begin(config: RunConfig, number: int = 0) -> Any:
        world = build_world(config)
        return step_through(world, build_stages(world)[number], RunState())

    return begin


@pytest.fixture(scope="session")
def stable_rows() -> Callable[[Path, str], Rows]:
    """Reads a run's tables without what depends on when and where it ran, and in how many sittings."""

    def read(root: Path, run_id: str) -> Rows:
        apart = {"experiment", "run_id", "config", "ablation", "trial", "setting"}
        frames = {t: read_table(root, t, run_id=run_id) for t in TABLES}
        return {t: f.drop(columns=[c for c in f if c in TIME_COLUMNS[t] or c in apart]) for t, f in frames.items()}

    return read


@pytest.fixture(scope="session")
def assert_same_rows() -> Callable[[Rows, Rows], None]:
    """Two runs have the same rows."""

    def check(one: Rows, other: Rows) -> None:
        for table in TABLES:
            pd.testing.assert_frame_equal(one[table], other[table])
        assert len(one["clients"]) >= 8

    return check
