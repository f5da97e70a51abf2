"""Nothing reads a test index before the final evaluation: by watching, by force, and by changing the data."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedloom.platform.clients.execution import Chunk, ChunkResult, SerialExecutor, SharedWeights
from fedloom.platform.clients.scoring import ScoreSubnet, ScoreSubnets
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.dataset import Dataset, TestReadError
from fedloom.platform.data.partition import Partition
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import RunFailedError
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods import fedoras, tier_search
from fedloom.platform.results.checkpoint import load_checkpoint
from fedloom.platform.results.paths import RunPaths, list_runs
from fedloom.platform.results.tables import TABLES, TIME_COLUMNS
from fedloom.platform.runs.run import make_serial, start_run

Make = Callable[..., RunConfig]


def federated(make: Make, results: Path | None = None) -> RunConfig:
    """A run whose search asks the clients, too, and whose training is watched on validation data."""
    config = make() if results is None else make(results=str(results))
    config.method.search = replace(config.method.search, scoring="federated")
    config.method.finetune.evaluate_every = 1
    return config


# -- by watching ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("test_share", [None, 0.2])
def test_test_data_is_read_in_the_final_evaluation_alone(
    tiny_config: Make, monkeypatch: pytest.MonkeyPatch, test_share: float | None
) -> None:
    reads: list[tuple[str, str]] = []
    stage = ["before the run"]

    class Watched(SerialExecutor):
        def run(self, chunks: Sequence[Chunk], weights: SharedWeights) -> Iterator[ChunkResult]:
            for chunk in chunks:
                stage[0] = chunk.assignments[0].stage
                yield from super().run([chunk], weights)
                stage[0] = "between rounds"

    def watch(owner: type, method: str) -> None:
        original = getattr(owner, method)

        def spy(self: Any, which: str, kind: str) -> Any:
            # Where every access to samples, labels and indices ends up; an offset or a length says nothing of them.
            reads.append((which, stage[0]))
            return original(self, which, kind)

        monkeypatch.setattr(owner, method, spy)

    config = federated(tiny_config)
    config.data.test_share = test_share
    build_world(config)  # the partition's test shares are drawn in preparation, once
    watch(Dataset, "_tree")
    watch(Partition, "_array")
    lengths = Dataset.num_samples
    monkeypatch.setattr(Dataset, "num_samples", lambda self, part: (lengths(self, part), reads.pop())[0])
    start_run(config, lambda world: Watched(Worker(world.spec)))
    stages = {where for which, where in reads if which == "test"}
    assert stages == {"evaluation"}
    seen = {where for which, where in reads if which == "validation"}
    assert {"supernet", "search/tier1", "search/tier2"} <= seen, "the watch sees what is read"


# -- by force ---------------------------------------------------------------------------------------------------------


def refused(config: RunConfig) -> str:
    with pytest.raises(RunFailedError) as caught:
        start_run(config, make_serial)
    return str(caught.value)


def on_test(task: Any) -> Any:
    """The same task on another split than the stage meant."""
    return lambda *arguments, **named: task(*arguments, **{**named, "split": "test"})


def test_a_search_that_reads_test_data_fails(tiny_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_search, "ScoreSubnets", on_test(ScoreSubnets))
    message = refused(tiny_config())
    assert message.startswith("search/tier1, round 1: the server's own work failed: TestReadError")


def test_a_federated_search_that_reads_test_data_fails(tiny_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_search, "ScoreSubnets", on_test(ScoreSubnets))
    config = federated(tiny_config)
    config.method.search.compare_with_central = False
    message = refused(config)
    assert message.startswith("search/tier1, round 1: client ")
    assert "TestReadError" in message


def test_watching_the_training_on_test_data_fails(tiny_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedoras, "ScoreSubnets", on_test(ScoreSubnets))
    assert "TestReadError" in refused(tiny_config())
    monkeypatch.undo()
    monkeypatch.setattr(fedoras, "ScoreSubnet", lambda subnet, model, _split: ScoreSubnet(subnet, model, "test"))
    config = federated(tiny_config)
    assert "TestReadError" in refused(config)


def test_training_on_test_data_fails(tiny_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    client_data = Worker.client_data
    monkeypatch.setattr(Worker, "client_data", lambda self, client_id, _split: client_data(self, client_id, "test"))
    assert "TestReadError" in refused(tiny_config())


def test_the_evaluation_leaves_the_lock_closed(tiny_config: Make) -> None:
    workers: list[Worker] = []

    def make(world: World) -> SerialExecutor:
        workers.append(Worker(world.spec))
        return SerialExecutor(workers[0])

    start_run(tiny_config(), make)
    for read in (lambda: workers[0].central_data("test"), lambda: workers[0].client_data(0, "test")):
        with pytest.raises(TestReadError):
            read()


# -- by changing the data ---------------------------------------------------------------------------------------------


def rows(paths: RunPaths, table: str) -> list[dict[str, Any]]:
    frame = pd.read_parquet(paths.table(table)).drop(columns=list(TIME_COLUMNS[table]), errors="ignore")
    values = frame.astype(object).where(frame.notna(), None)
    return [{k: v for k, v in row.items() if k not in ("file", "hash")} for row in values.to_dict("records")]


def is_of_the_test_set(row: dict[str, Any], table: str) -> bool:
    if table == "evaluations":
        return bool(row["split"] == "test")
    return table in ("rounds", "clients") and row["stage"] == "evaluation"


def measured_on_test(paths: RunPaths, of_clients: bool | None = None) -> list[float]:
    """What was measured on test data, by everybody, or by the clients or the server alone."""
    measured = [r for r in rows(paths, "evaluations") if r["split"] == "test"]
    chosen = [r["value"] for r in measured if of_clients in (None, r["client_id"] is not None)]
    assert chosen
    return chosen


def runs_that_differ_on_test_data_alone(folder: Path) -> tuple[RunPaths, RunPaths]:
    """The runs in `first` and `second`, whose other rows and whose models are the same to the bit."""
    (one,), (two,) = list_runs(folder / "first"), list_runs(folder / "second")
    for table in TABLES:
        if table == "runs":
            continue
        left, right = rows(one, table), rows(two, table)
        assert [r for r in left if not is_of_the_test_set(r, table)] == [
            r for r in right if not is_of_the_test_set(r, table)
        ]
    groups = [load_checkpoint(paths.checkpoint).groups for paths in (one, two)]
    assert groups[0].keys() == groups[1].keys() != set()
    for name, group in groups[0].items():
        for tensor_name, tensor in group.tensors.items():
            assert tensor.equal(groups[1][name].tensors[tensor_name])
    return one, two


@pytest.fixture
def unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed data is refused when a run starts; these tests are about what would happen then."""
    monkeypatch.setattr("fedloom.platform.data.dataset.check_blocks", lambda *_: None)


@pytest.mark.usefixtures("unnoticed")
def test_another_test_set_changes_the_final_figures_and_not_one_bit_before(tiny_config: Make, tmp_path: Path) -> None:
    first = federated(tiny_config, tmp_path / "first")
    first.data.cache = str(tmp_path / "cache")
    start_run(first, make_serial)
    # The same data set under the same names; only its test samples are others now.
    second = federated(tiny_config, tmp_path / "second")
    second.data.cache = str(tmp_path / "changed")
    shutil.copytree(tmp_path / "cache", tmp_path / "changed")
    (folder,) = (tmp_path / "changed").glob("digits-*")
    for name in ("test_x", "test_y"):
        array = np.load(folder / f"{name}.npy")
        np.save(folder / f"{name}.npy", array[::-1] if name == "test_y" else 16 - array)
    start_run(second, make_serial)
    one, two = runs_that_differ_on_test_data_alone(tmp_path)
    assert measured_on_test(one) != measured_on_test(two)


@pytest.mark.usefixtures("unnoticed")
def test_other_test_samples_of_the_clients_own_change_their_figures_and_nothing_else(
    tiny_config: Make, tmp_path: Path
) -> None:
    first, second = (federated(tiny_config, tmp_path / name) for name in ("first", "second"))
    for config, cache in ((first, "cache"), (second, "changed")):
        config.data.cache, config.data.test_share = str(tmp_path / cache), 0.2
    start_run(first, make_serial)
    shutil.copytree(tmp_path / "cache", tmp_path / "changed")
    (folder,) = (tmp_path / "changed").glob("digits-*")
    (partition,) = (tmp_path / "changed" / "partitions").iterdir()
    held_out = np.load(partition / "test.npy")
    assert len(held_out)
    x = np.load(folder / "train_x.npy")
    x[held_out] = 16 - x[held_out]
    np.save(folder / "train_x.npy", x)
    start_run(second, make_serial)
    one, two = runs_that_differ_on_test_data_alone(tmp_path)
    assert measured_on_test(one, of_clients=True) != measured_on_test(two, of_clients=True)
    assert measured_on_test(one, of_clients=False) == measured_on_test(two, of_clients=False)
