"""Clients trained as one batch: what each computes is what it computes alone, up to rounding."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.platform.clients import stacks
from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.execution import SerialExecutor, SharedWeights, make_chunks
from fedloom.platform.clients.local_rules import LinearCorrection, LocalClient
from fedloom.platform.clients.networks import Network, Subnet
from fedloom.platform.clients.stacks import layers_stack, stacked_correction
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import LocalSGD, Samples
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.artefact import IntArray
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.federation.algorithm import RoundResult, RunState
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.loop import merge_chunks
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.spaces.base import FixedNetwork, FixedSpace
from fedloom.platform.spaces.slices import Weights
from fedloom.platform.spaces.space_config import SpaceConfig

HERE = __name__
Make = Callable[..., RunConfig]
Change = Callable[[list[Assignment]], None]


class Plain(nn.Module):
    """A network of one kind of each layer."""

    def __init__(self, norm: nn.Module, end: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.end = nn.Conv2d(1, 4, 3, padding=1), norm, end
        self.classifier = nn.Linear(4 * 16, 10)

    def forward(self, x: Tensor, _architecture: object = None) -> Tensor:
        y: Tensor = self.classifier(self.end(torch.max_pool2d(torch.relu(self.norm(self.conv(x))), 2).flatten(1)))
        return y


class Branching(Plain):
    """Its way depends on the values, which no vectorised function can follow."""

    def forward(self, x: Tensor, _architecture: object = None) -> Tensor:
        return super().forward(x) * (2.0 if self.training and float(x.detach().sum()) > 0 else 1.0)


def _network(build: Callable[[], nn.Module]) -> FixedSpace:
    return FixedSpace(FixedNetwork("plain", (1, 8, 8), build))


def groups(config: SpaceConfig) -> FixedSpace:
    return _network(lambda: Plain(nn.GroupNorm(2, 4), nn.Identity()))


def batches(config: SpaceConfig) -> FixedSpace:
    return _network(lambda: Plain(nn.BatchNorm2d(4), nn.Identity()))


def dropout(config: SpaceConfig) -> FixedSpace:
    return _network(lambda: Plain(nn.Identity(), nn.Dropout(0.3)))


def branching(config: SpaceConfig) -> FixedSpace:
    return _network(lambda: Branching(nn.Identity(), nn.Identity()))


SIZES = (5, 9, 16, 17, 24, 33)
"""Samples of the six clients, of batches of 8: full and partial ones, and a single sample that joins another batch."""


@dataclass(frozen=True)
class Done:
    """A round: its reports, what the clients sent in sum, and how many were trained in stacks."""

    result: RoundResult
    weights: Weights
    stacked: int


@pytest.fixture
def data(tmp_path: Path) -> Callable[[tuple[int, ...]], DataConfig]:
    """Images of six clients of these sizes."""

    def make(sizes: tuple[int, ...]) -> DataConfig:
        rng = np.random.default_rng(0)
        owners = np.repeat(np.arange(len(sizes)), sizes)
        x = rng.integers(0, 256, (len(owners), 1, 8, 8), dtype=np.uint8)
        arrays = {"x": x, "y": rng.integers(0, 10, len(owners)), "clients": owners}
        path = tmp_path / "data.npz"
        np.savez(path, **{f"train_{n}": a for n, a in arrays.items()}, **{f"test_{n}": a for n, a in arrays.items()})
        return DataConfig(
            "npz", options={"path": str(path)}, partition="natural", num_clients=len(sizes), validation_share=0.0,
            cache=str(tmp_path / "cache"),
        )  # fmt: skip

    return make


def unchanged(assignments: list[Assignment]) -> None:
    """Leaves a plan as it is."""


@pytest.fixture
def round_of(tiny_config: Make, data: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """One round of all clients, trained in stacks of `stack`; keywords change the training."""
    trained: list[int] = []
    real = stacks.train_stack

    def counted(stack: Any, *others: Any) -> Any:
        found = real(stack, *others)
        trained.append(len(stack.members))
        return found

    monkeypatch.setattr(stacks, "train_stack", counted)

    def go(
        space: str,
        stack: str,
        sizes: tuple[int, ...] = SIZES,
        change: Change = lambda _p: None,
        balanced: bool = False,
        **train: Any,
    ) -> Done:
        training = replace(TrainingConfig(rounds=1, clients_per_round=6, batch_size=8, lr=0.1, epochs=2), **train)
        config = tiny_config(
            method=FedAvgConfig(train=training, evaluate=False),
            tiers=TiersConfig(count=1, paths=10),
            space=SpaceConfig(f"{HERE}:{space}", input_shape=[1, 8, 8]),
            data=replace(data(sizes), balanced_classes=balanced),
        )
        world = build_world(replace(config, executor=replace(config.executor, stack_clients=stack)))
        stage = build_stages(world)[0]
        state = stage.begin(RunState())
        plan = stage.plan(state)
        assignments = list(plan.assignments)
        change(assignments)
        shared = SharedWeights(state.weights(plan.group), "v0")
        trained.clear()
        chunks = make_chunks(assignments, 6, 1, plan.stack)
        result = merge_chunks(SerialExecutor(Worker(world.spec)).run(chunks, shared), lambda: None)
        weights = stage.merge(state, plan, result).state.weights(plan.group)
        return Done(result, weights, sum(trained))

    return go


SAME = ("client_id", "status", "error", "samples", "steps", "macs", "bytes_up", "bytes_down", "parameters")


def assert_close(one: Done, other: Done) -> None:
    for name, value in one.weights.items():
        torch.testing.assert_close(other.weights[name], value, rtol=1e-5, atol=1e-6, msg=name)
    for a, b in zip(one.result.client_results, other.result.client_results, strict=True):
        for name in (
            "client_id",
            "status",
            "error",
            "samples",
            "steps",
            "macs",
            "bytes_up",
            "bytes_down",
            "parameters",
        ):
            assert getattr(a, name) == getattr(b, name), name
        if a.status == "ok":
            assert b.loss == pytest.approx(a.loss, rel=1e-4)
            assert b.metric == pytest.approx(a.metric, abs=0.03)
            assert (a.loss_norm, b.loss_norm) == (None, None) or b.loss_norm == pytest.approx(a.loss_norm, rel=1e-4)


def second(assignments: list[Assignment]) -> None:
    """Client k has made k steps of its classifier in an earlier round."""
    name = "classifier.weight"
    for k, assignment in enumerate(assignments):
        state = {f"rule/counters/optimizer/steps/{name}": torch.tensor(float(k))}
        state |= {f"rule/optimizer/{slot}/{name}": torch.full((10, 64), 0.01 * k) for slot in ("mean", "square")}
        assignments[k] = replace(assignment, state=state)


def by_size(client: LocalClient) -> LinearCorrection:
    """A pull of another strength for clients of another size."""
    return LinearCorrection(strength=0.1 * client.samples, anchors=client.received)


SETTINGS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "clipped": {"clip_norm": 0.5, "momentum": 0.5, "loss_norms": True},
    "fedprox": {"local_rule": "fedprox", "options": {"mu": 0.3}},
    "balanced": {"balanced": True},
    "strengths": {"local_rule": f"{HERE}:by_size"},
    "feddyn": {"local_rule": "feddyn", "server": "feddyn", "options": {"alpha": 0.3}},
    # The large eps keeps rounding errors of gradients near 0 from becoming whole steps.
    "adam": {"optimizer": "adam", "lr": 0.01, "local_warmup_steps": 3, "options": {"eps": 0.01}},
    "kept": {"optimizer": "adamw", "lr": 0.01, "optimizer_state": "kept", "options": {"eps": 0.01}, "change": second},
    "cosine": {"momentum": 0.9, "local_cosine_to": 0.1},
}


@pytest.mark.parametrize(("setting", "stack"), [*((setting, "3") for setting in SETTINGS), ("momentum", "6")])
def test_clients_of_unequal_sizes_train_as_if_alone(round_of: Any, stack: str, setting: str) -> None:
    train = SETTINGS[setting]
    alone, together_ = round_of("groups", "off", **train), round_of("groups", stack, **train)
    assert (alone.stacked, together_.stacked) == (0, 6)
    assert_close(alone, together_)
    for one, other in zip(alone.result.client_results, together_.result.client_results, strict=True):
        torch.testing.assert_close(other.state, one.state, rtol=1e-4, atol=1e-6)


def test_batch_norms_train_as_if_alone_and_are_stacked_by_size(round_of: Any) -> None:
    sizes = (16, 9, 16, 9, 16, 33)
    alone, together_ = round_of("batches", "off", sizes), round_of("batches", "6", sizes)
    assert together_.stacked == 5, "three of 16, two of 9"
    assert_close(alone, together_)
    assert alone.weights["norm.running_mean"].abs().sum() > 0
    assert together_.weights["norm.num_batches_tracked"] == alone.weights["norm.num_batches_tracked"] == 8


def test_corrections_of_a_stack_are_those_of_its_clients() -> None:
    draw = torch.Generator().manual_seed(1)
    shapes = {"weight": (2, 3), "bias": (2,)}
    tensors = [{n: torch.randn(s, generator=draw) for n, s in shapes.items()} for _ in range(12)]
    of_members = [LinearCorrection(tensors[k], 0.3, tensors[3 + k]) for k in range(3)]
    names = list(shapes)
    stacked = {n: torch.stack([of[n] for of in tensors[6:9]]) for n in names}
    gradients = {n: torch.stack([of[n] for of in tensors[9:]]) for n in names}
    stacked_correction(of_members)(names, list(stacked.values()), list(gradients.values()))
    for k, correct in enumerate(of_members):
        alone = {n: t.clone() for n, t in tensors[9 + k].items()}
        correct(names, list(tensors[6 + k].values()), list(alone.values()))
        for name in names:
            assert torch.equal(gradients[name][k], alone[name])


@pytest.mark.parametrize("space", ["dropout", "branching"])
def test_what_cannot_be_stacked_is_trained_one_by_one(round_of: Any, space: str) -> None:
    alone, together_ = round_of(space, "off"), round_of(space, "6")
    assert together_.stacked == 0
    for name, value in alone.weights.items():
        assert torch.equal(value, together_.weights[name]), name
    # Layers that do not stack are known in advance; a forward pass that does not is found out, and said.
    known = {r.fallback if r.fallback is None else "vmap" in r.fallback for r in together_.result.client_results}
    assert known == ({True} if space == "branching" else {None})
    assert {r.fallback for r in alone.result.client_results} == {None}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_stack_without_enough_memory_fails_by_name_and_does_not_change_the_bits(
    round_of: Any, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    def small(*_: object) -> None:
        raise error

    monkeypatch.setattr(stacks, "train_stack", small)
    reports = round_of("groups", "6").result.client_results
    assert {r.status for r in reports} == {"failed"}
    assert all("raise tiers.num_gpus, or lower the batch size or executor.stack_clients" in r.error for r in reports)


def test_of_a_diverging_client_only_its_own_row_fails(round_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, first = Dataset.stored, sum(SIZES[:2])

    def broken(self: Dataset, part: str, indices: IntArray) -> Samples:
        x, y = real(self, part, indices)
        x = x.float()
        x[(indices >= first) & (indices < first + SIZES[2])] *= 1e30
        return x, y

    monkeypatch.setattr(Dataset, "stored", broken)
    alone, together_ = round_of("groups", "off"), round_of("groups", "6")
    assert [r.status for r in together_.result.client_results] == ["ok", "ok", "failed", "ok", "ok", "ok"]
    assert "the training loss is nan" in together_.result.client_results[2].error
    assert [r.fallback for r in together_.result.client_results] == [None, None, stacks.DIVERGED, None, None, None]
    assert_close(alone, together_)


def test_a_dropped_client_takes_no_part(round_of: Any) -> None:
    def drop(assignments: list[Assignment]) -> None:
        assignments[1] = replace(assignments[1], dropped="no power")

    alone, together_ = round_of("groups", "off", change=drop), round_of("groups", "6", change=drop)
    assert (together_.stacked, together_.result.client_results[1].status) == (5, "dropped")
    assert_close(alone, together_)


@dataclass(frozen=True)
class Lazy(Train):
    """A client that trains in a way of its own: not at all."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        return ClientResult()


@dataclass(frozen=True)
class Shallow(Subnet):
    """A network that is made in a way of its own: it has no MACs."""

    def on(self, worker: Worker, assignment: Assignment | None = None) -> Network:
        return replace(super().on(worker, assignment), macs=0.0)


@pytest.mark.parametrize("kind", ["task", "network"])
def test_a_derived_task_or_network_with_a_way_of_its_own_is_not_stacked(round_of: Any, kind: str) -> None:
    def derive(assignments: list[Assignment]) -> None:
        train = cast(Train, assignments[0].task)
        subnet = cast(Subnet, train.network)
        shallow = Train(Shallow(subnet.architecture, subnet.stand_alone), train.local)
        task = Lazy(subnet, train.local) if kind == "task" else shallow
        assignments[:] = [replace(a, task=task) for a in assignments]

    done = round_of("groups", "6", change=derive)
    assert done.stacked == 0
    assert {r.macs for r in done.result.client_results} == {0.0}


def picky(client: LocalClient) -> None:
    """A local rule that fails for one client."""
    if client.client_id == 2:
        raise ValueError("not this one")


def leaving(client: LocalClient) -> None:
    """A local rule that ends the process for one client, or tries to."""
    if client.client_id == 2:
        sys.exit(3)


@pytest.mark.parametrize(("rule", "said"), [("picky", "not this one"), ("leaving", "SystemExit")])
def test_of_a_rule_that_fails_for_one_client_only_its_row_fails(round_of: Any, rule: str, said: str) -> None:
    done = round_of("groups", "6", local_rule=f"{HERE}:{rule}")
    assert [r.status for r in done.result.client_results] == ["ok", "ok", "failed", "ok", "ok", "ok"]
    assert said in done.result.client_results[2].error


def test_a_stack_s_time_and_memory_are_in_its_rows(round_of: Any) -> None:
    reports = round_of("groups", "6").result.client_results
    assert len({r.wall_s for r in reports}) == 1, "shared out"
    assert all(r.wall_s > 0 and r.peak_memory_bytes > 0 for r in reports)


def test_only_known_layers_are_stacked() -> None:
    assert layers_stack(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(2, 2)))
    assert not layers_stack(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    assert not layers_stack(nn.LSTM(2, 2))


def test_one_client_alone_makes_no_skeleton_of_its_network(elastic_config: Make) -> None:
    """They are kept as long as the space is: one per architecture that was ever stacked."""
    world = build_world(elastic_config())
    tasks = [Train(Subnet(world.space.largest), LocalSGD(epochs=1, batch_size=4, lr=0.1))]
    kept = {*vars(world.space)["_computed"]}
    assert stacks.clients_per_stack("auto", world.space, world.macs_table, tasks, 4) == 1
    assert {*vars(world.space)["_computed"]} == kept
    assert stacks.clients_per_stack("auto", world.space, world.macs_table, tasks * 4, 4) == 2
