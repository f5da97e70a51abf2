"""executor.compile: what a compiled network learns, who is compiled, and what is said of those who are not."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.platform.clients.execution import ChunkResult, SerialExecutor, SharedWeights, make_chunks
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.registry import build_stages

Round = Callable[..., tuple[ChunkResult, Worker]]


@pytest.fixture
def one_round(tiny_config: Callable[..., RunConfig]) -> Round:
    """The updates' sums of a round of all 8 clients of FedAvg under `executor` settings, and the worker."""

    def run(
        build: Callable[[nn.Module], nn.Module] = lambda m: m, partition: Any = "dirichlet_classes", **executor: Any
    ) -> tuple[ChunkResult, Worker]:
        train = TrainingConfig(rounds=1, clients_per_round=8, batch_size=15, epochs=2, augment="crop_flip")
        config = tiny_config(method=FedAvgConfig(train=train))
        config = replace(config, data=replace(config.data, partition=partition))
        world = build_world(replace(config, executor=replace(config.executor, **{"stack_clients": "off", **executor})))
        stage = build_stages(world)[0]
        state = stage.begin(RunState())
        plan, worker = stage.plan(state), Worker(world.spec)
        own = worker.space.build_subnet
        worker.space.build_subnet = lambda architecture: build(own(architecture))  # type: ignore[method-assign]
        clients = [a for a in plan.assignments if a.client_id is not None]
        shared = SharedWeights(state.weights(plan.group), "v")
        (result,) = SerialExecutor(worker).run(make_chunks(clients, 100, stack=plan.stack)[:1], shared)
        del worker.space.build_subnet  # type: ignore[attr-defined]
        return result, worker

    return run


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_compiled_network_learns_the_same_up_to_rounding_from_the_same_batches(
    one_round: Round, precision: str
) -> None:
    """Clients have 36 samples on average: batches of 15, which are compiled, and last ones of other sizes."""
    eager, _ = one_round(precision=precision)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled, worker = one_round(precision=precision, compile=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "whatever the sizes of the last batches"
    assert [list(sizes) for sizes in worker._compiled.values()] == [[15]]
    tolerance = 1e-5 if precision == "float32" else 0.04  # fused layers round to bfloat16 less often
    assert len({r.samples % 15 for r in eager.client_results}) > 2
    for alone, ours in zip(eager.client_results, compiled.client_results, strict=True):
        assert (ours.status, ours.fallback) == ("ok", None), ours.traceback
        assert ours.loss == pytest.approx(alone.loss, rel=tolerance)
    again, _ = one_round(precision=precision, compile=True)
    assert [r.loss for r in again.client_results] == [r.loss for r in compiled.client_results]
    assert any(r.loss != e.loss for r, e in zip(again.client_results, eager.client_results, strict=True))


def test_a_network_that_draws_random_numbers_is_not_compiled_and_keeps_its_stream(one_round: Round) -> None:
    def dropping(module: nn.Module) -> nn.Module:
        module.register_forward_hook(lambda *of: nn.functional.dropout(of[2], 0.5))
        module.dropout = nn.Dropout(0.5)
        return module

    plain, _ = one_round(dropping)
    compiled, _ = one_round(dropping, compile=True)
    reason = "not compiled: its layers would draw different random numbers"
    assert {r.fallback for r in compiled.client_results} == {reason}
    assert {r.fallback for r in plain.client_results} == {None}
    assert [r.loss for r in compiled.client_results] == [r.loss for r in plain.client_results]


def test_a_network_that_cannot_be_compiled_is_tried_once_and_counted(
    one_round: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fails(module: nn.Module, x_B: Tensor) -> Any:
        tried.append(tuple(x_B.shape))
        raise RuntimeError("no compiler\nis found")

    monkeypatch.setattr("fedloom.platform.clients.worker.compiled", fails)
    result, _ = one_round(compile=True)
    assert tried == [(15, 1, 8, 8)]
    (reason,) = {r.fallback for r in result.client_results}
    assert (reason or "").startswith("not compiled: RuntimeError: no compiler is found")
    assert [r.loss for r in result.client_results] == [r.loss for r in one_round()[0].client_results]
    tried.clear()
    stacked, _ = one_round(partition="iid", compile=True, stack_clients="8")
    assert (tried, {r.fallback for r in stacked.client_results}) == ([], {None}), "stacks are not compiled"


@pytest.mark.parametrize(("method", "why"), [("fedavg", "trained as stacks"), ("fedoras", "not whole")])
def test_where_nothing_is_compiled_or_stacked_a_warning_says_so_once(
    tiny_config: Callable[..., RunConfig], caplog: pytest.LogCaptureFixture, method: str, why: str
) -> None:
    config = tiny_config(
        **{} if method == "fedoras" else {"method": FedAvgConfig(train=TrainingConfig(clients_per_round=8))}
    )
    executor = replace(config.executor, compile=True, stack_clients="4")
    stage = build_stages(build_world(replace(config, executor=executor)))[0]
    state = stage.begin(RunState())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            stage.plan(state)
    assert [why in text for text in caplog.messages if "executor.compile=true has no effect" in text] == [True]
    stacks = [text for text in caplog.messages if "executor.stack_clients=4 has no effect on these clients" in text]
    assert len(stacks) == (method == "fedoras")
