"""A client actor whose GPU has no room for the weights that a chunk's clients read, on processors alone."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
import torch

from fedloom.actors.client import ClientActor, to_arrays
from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.execution import Chunk
from fedloom.platform.spaces.slices import Weights


class Idle:
    """A task that does nothing."""

    def run(self, _worker: object, _assignment: Assignment, _weights: Weights) -> ClientResult:
        return ClientResult()


def test_weights_that_do_not_fit_are_failed_rows_and_not_a_dead_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def uploaded(weights: Weights) -> Weights:
        seen.append(actor._weights)
        if len(seen) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return weights

    monkeypatch.setattr(ray, "get", lambda _reference: to_arrays({"w": torch.zeros(2)}))
    worker = SimpleNamespace(
        device=torch.device("cpu"), node="n", spec=SimpleNamespace(threads=1), uploaded=uploaded, data=None
    )
    actor = ClientActor.__new__(ClientActor)
    actor.worker, actor._weights, actor._at = cast(Any, worker), None, None
    gone = Assignment("train", 0, 1, "tier1", Idle(), dropped="the device is gone")
    chunk = Chunk("tier1", (Assignment("train", 0, 0, "tier1", Idle()), gone), stack=2)

    def statuses(version: str) -> list[str]:
        return [result.status for result in actor.run_chunk(chunk, [cast(Any, None)], version).client_results]

    one_by_one = Chunk("tier1", chunk.assignments)
    assert [r.status for r in actor.run_chunk(one_by_one, [cast(Any, None)], "v1").client_results] == ["ok", "dropped"]
    failed, dropped = actor.run_chunk(chunk, [cast(Any, None)], "v2").client_results
    assert (failed.status, dropped.status) == ("failed", "dropped")
    assert failed.error.startswith("the client needs more than its share of the GPU's memory: raise tiers.num_gpus")
    assert seen == [None, None], "the weights before are let go of first"
    chunk = one_by_one
    assert statuses("v2") == ["ok", "dropped"], "and the next chunk tries again"
