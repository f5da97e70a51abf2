"""A federation small enough to be run many times, and what two runs are compared by."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from fedloom.experiments.config import compose_config
from fedloom.platform.config import RunConfig
from fedloom.platform.results.checkpoint import load_checkpoint
from fedloom.platform.results.paths import find_run
from fedloom.platform.results.tables import TABLES, TIME_COLUMNS, read_table

TINY = [
    "experiment=fedoras_digits",
    "ray.address=local",
    "ray.object_store_memory_bytes=200000000",
    "space.stem_channels=8",
    "tiers.count=2",
    "tiers.paths=2000",
    "executor.chunk_size=2",
    "method.train.rounds=3",
    "method.train.epochs=2",
    "method.train.clients_per_round=6",
    "method.train.evaluate_every=2",
    "method.search.population=8",
    "method.search.offspring=6",
    "method.search.budget=18",
    "method.finetune.rounds=2",
    "method.finetune.epochs=1",
    "method.rand_init.rounds=2",
    "method.rand_init.epochs=1",
]


TINY_ELASTIC = [
    "experiment=superfednas_digits",
    "ray.address=local",
    "ray.object_store_memory_bytes=200000000",
    "space.stage_widths=[16,24]",
    "space.stage_strides=[2,2]",
    "space.depths=[1,1]",
    "space.expansions=[0.5,1.0,1.5]",
    "space.norm=batch",
    "tiers.count=2",
    "tiers.paths=2000",
    "executor.chunk_size=2",
    "method.train.rounds=4",
    "method.train.epochs=1",
    "method.train.clients_per_round=6",
    "method.train.evaluate_every=2",
    "method.train.distribution.tier_aware=true",
    "method.search.samples=20",
    "method.search.min_tau=-1",
    "method.search.population=10",
    "method.search.generations=3",
]

TINY_SPIDER = [
    "experiment=spider_digits",
    "ray.address=local",
    "ray.object_store_memory_bytes=200000000",
    "data.train_samples=200",
    "data.num_clients=4",
    "space.channels=4",
    "tiers.paths=100",
    "method.train.rounds=4",
    "method.train.evaluate_every=1",
]
TINY_SEARCH = ["method.search.start=1", "method.search.every=1"]

TINY_SILOS = [
    "data.dataset=digits",
    "data.alpha=0.2",
    "data.validation_share=0.25",
    "tiers.count=1",
    "method.train.batch_size=16",
    *(o for o in TINY_SPIDER if "experiment" not in o),
]

TINY_RUNS = {
    "spider": [*TINY_SPIDER, *TINY_SEARCH, "method.gains.epochs=1", "method.gains.clients=2"],
    "milenas": [*TINY_SPIDER, "method.search.kind=milenas", "method.search.rounds=2"],
    "fedpnas": ["method=fedpnas", "space.name=darts_s2_small", *TINY_SILOS, *TINY_SEARCH],
    "fedmn": ["method=fedmn", "space.name=darts_s2_small", *TINY_SILOS, "method.train.pretraining_rounds=1"],
    "fedoras": TINY,
    "superfednas": TINY_ELASTIC,
    "multi_stage": [
        *(o for o in TINY_ELASTIC if "tier_aware" not in o),
        "method.train.travels=supernet",
        "method.train.shrinking.subnets_per_batch=2",
    ],
}


@pytest.fixture
def family(request: pytest.FixtureRequest) -> str:
    """Which of `TINY_RUNS` is run."""
    return str(getattr(request, "param", "fedoras"))


@pytest.fixture
def empty_tables(family: str) -> tuple[str, ...]:
    """The tables that a family's runs write nothing to."""
    return () if family in ("fedoras", "superfednas", "multi_stage") else ("candidates", "models")


@pytest.fixture
def tiny_overrides(family: str) -> list[str]:
    """The command line of `tiny`, without its results folder."""
    return list(TINY_RUNS[family])


@pytest.fixture
def tiny(tmp_path: Path, tiny_overrides: list[str]) -> Callable[..., RunConfig]:
    """A configuration with all stages of a method in a few seconds; overrides may follow."""

    def make(*overrides: str) -> RunConfig:
        return compose_config([*tiny_overrides, f"results={tmp_path / 'results'}", *overrides])

    return make


Rows = dict[str, pd.DataFrame]


@pytest.fixture(scope="session")
def rows_of() -> Callable[[Path, str], Rows]:
    """All tables of a run without what measures real time, and without its name."""

    def read(results: Path, run_id: str) -> Rows:
        tables = {}
        for table in TABLES:
            frame = read_table(results, table, run_id=run_id)
            aside = {"run_id", "experiment", *TIME_COLUMNS[table]} | ({"config"} if table == "runs" else set())
            tables[table] = frame.drop(columns=[c for c in frame.columns if c in aside])
        return tables

    return read


@pytest.fixture(scope="session")
def assert_same_run(rows_of: Callable[[Path, str], Rows]) -> Callable[..., None]:
    """Two runs have the same rows and the same final weights, bit for bit."""

    def check(results: Path, first: str, second: str, empty: tuple[str, ...] = ()) -> None:
        a, b = rows_of(results, first), rows_of(results, second)
        for table in TABLES:
            assert (len(a[table]) > 0) != (table in empty), f"table {table} has {len(a[table])} rows"
            pd.testing.assert_frame_equal(a[table], b[table], check_exact=True, obj=table)
        bags = [load_checkpoint(find_run(results, run).checkpoint).bags for run in (first, second)]
        assert bags[0].keys() == bags[1].keys()
        for name in bags[0]:
            for tensor, value in bags[0][name].tensors.items():
                other = bags[1][name].tensors[tensor]
                assert value.numpy().tobytes() == other.numpy().tobytes(), f"{name}: {tensor} differs"

    return check
