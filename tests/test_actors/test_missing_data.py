"""A node without the prepared data says so in one line; no Ray needed."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.execution import SerialExecutor, SharedWeights, make_chunks
from fedloom.platform.clients.worker import Worker, WorkerSpec
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.spaces.slices import Weights


class Reads:
    """A client that reads its data."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        return ClientResult(samples=len(worker.client_data(0, "train")[1]))


@pytest.fixture
def spec(tiny_config: Callable[..., RunConfig]) -> WorkerSpec:
    return build_world(tiny_config()).spec


def test_a_worker_with_its_data_misses_nothing(spec: WorkerSpec) -> None:
    assert Worker(spec).missing_data() is None


@pytest.mark.parametrize("field", ["dataset_path", "partition_path"])
@pytest.mark.parametrize("node", ["", "host/1a2b3c4d"])
def test_a_missing_folder_is_named_with_its_node_and_what_to_do(
    spec: WorkerSpec, tmp_path: Path, field: str, node: str
) -> None:
    folder = str(tmp_path / "away")
    worker = Worker(replace(spec, node=node, **{field: folder}))  # type: ignore[arg-type]
    chunks = make_chunks([Assignment("train", 0, 0, "tier1", Reads())], 1)
    (result,) = SerialExecutor(worker).run(chunks, SharedWeights({}, "w@0"))
    (report,) = result.client_results
    assert report.status == "failed"
    assert report.error == (
        f"ValueError: node {node or os.uname().nodename} does not have {folder}: let data.cache be a folder that all "
        "nodes share, or run `fedloom prepare` for this experiment on every node"
    )
    assert report.node == (node or os.uname().nodename)
