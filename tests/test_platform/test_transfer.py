"""Transfer: what is taken from the other run, what the head's clients train and send, and what is refused."""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.algorithm import Plan, RunState, TrainingStage
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.training_config import PrivacyConfig, TrainingConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.transfer import OnlyHead, TrainHead, TransferConfig, source_of
from fedloom.platform.results.checkpoint import load_checkpoint, load_model
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import make_serial, start_run
from fedloom.platform.spaces.space_config import SpaceConfig

Make = Callable[..., RunConfig]
HEAD = ("fixed.classifier.bias", "fixed.classifier.weight")
TRAIN = TrainingConfig(rounds=2, clients_per_round=3, batch_size=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of results, and of a task with four of the ten digits."""
    made = tmp_path_factory.mktemp("transfer")
    digits = load_digits()
    few = digits.target < 4
    np.savez(made / "four.npz", x=digits.images[few].astype(np.uint8)[:, None] * 15, y=digits.target[few])
    return made


@pytest.fixture(scope="module")
def kept(folder: Path, tiny_config_in: Make, results_of: Any) -> Any:
    """A finished run on ten digits."""
    return results_of(tiny_config_in(folder, method=FedAvgConfig(architecture="0-1-2", train=TRAIN)))


@pytest.fixture
def transfer(folder: Path, kept: Any, tiny_config_in: Make) -> Make:
    """Makes runs on four digits that begin with the finished run's model."""
    data = DataConfig("npz", num_clients=8, options={"path": str(folder / "four.npz")})

    def make(**changes: Any) -> RunConfig:
        run = tiny_config_in(folder, data=data)
        space = replace(run.space, num_classes=4, **changes.pop("space", {}))
        method = TransferConfig(**{"start_from": kept.paths.run_id, "head": TRAIN, "train": TRAIN, **changes})
        return replace(run, experiment="transferred", space=space, method=method)

    return make


def test_what_fits_is_taken_and_the_classifier_is_fresh(transfer: Make, kept: Any) -> None:
    source = source_of(transfer().method, build_world(transfer()))
    theirs, _ = load_model(kept.paths, "fedavg")
    assert source.subnet == Subnet((0, 1, 2), stand_alone=True)
    assert tuple(sorted(source.fresh)) == HEAD
    assert set(source.weights) == set(theirs)
    for name, tensor in source.weights.items():
        assert (name in HEAD) or torch.equal(tensor, theirs[name]), name
    assert source.weights[HEAD[1]].shape[0] == 4
    again = source_of(transfer().method, build_world(transfer()))
    assert torch.equal(again.weights[HEAD[1]], source.weights[HEAD[1]])


def test_from_scratch_only_the_architecture_is_taken(transfer: Make, kept: Any) -> None:
    config = transfer(from_scratch=True, head=replace(TRAIN, rounds=0))
    source = source_of(config.method, build_world(config))
    theirs, _ = load_model(kept.paths, "fedavg")
    assert source.subnet == Subnet((0, 1, 2), stand_alone=True)
    assert {*source.fresh} == {*source.weights} == {*theirs}
    for name in (n for n in theirs if n.endswith("conv.weight")):
        assert not torch.equal(source.weights[name], theirs[name]), name
    rounds = read_table(Path(config.results), "rounds", run_id=ran(config).run_id)
    assert rounds["stage"].tolist() == ["transferred"] * 2 + ["evaluation"]
    other = transfer(from_scratch=True, head=replace(TRAIN, rounds=0), space={"stem_channels": 8})
    with pytest.raises(ValueError, match=r"does not fit space cnn_digits: fixed.stem.conv.weight is .* there"):
        source_of(other.method, build_world(other))


def ran(config: RunConfig) -> RunPaths:
    return RunPaths(Path(config.results), config.experiment, start_run(config, make_serial))


def test_the_head_is_trained_alone_then_everything(transfer: Make, kept: Any) -> None:
    paths = ran(transfer())
    rounds, clients = (read_table(paths.root, table, run_id=paths.run_id) for table in ("rounds", "clients"))
    assert rounds["stage"].tolist() == ["head"] * 2 + ["transferred"] * 2 + ["evaluation"]
    size = build_world(transfer()).space.cost_table("bytes").cost((0, 1, 2))
    classifier = 4 * sum(t.numel() for n, t in load_model(paths, "transferred")[0].items() if n in HEAD)
    head, whole = clients[clients["stage"] == "head"], clients[clients["stage"] == "transferred"]
    assert (set(head["bytes_down"]), set(head["bytes_up"])) == ({size}, {classifier})
    assert (set(whole["bytes_down"]), set(whole["bytes_up"])) == ({size}, {size})
    stopped = ran(transfer(train=replace(TRAIN, rounds=0)))
    theirs, ours = load_model(kept.paths, "fedavg")[0], load_model(stopped, "transferred")[0]
    fresh = source_of(transfer().method, build_world(transfer())).weights
    for name, tensor in ours.items():
        if name in HEAD:
            assert not torch.equal(tensor, fresh[name]), name
        else:
            assert torch.equal(tensor, theirs[name]), f"{name}: norms and all, as they were"
    after = load_checkpoint(paths.checkpoint).groups["transferred"].tensors
    assert any(not torch.equal(after[name], theirs[name]) for name in theirs if name not in HEAD)


def test_equal_versions_of_what_is_sent_have_equal_content(transfer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stages send one group: workers keep what they hold while its version stays the same."""
    sent: dict[str, Any] = {}
    plan = TrainingStage.plan

    def seen(self: TrainingStage, state: RunState) -> Plan:
        planned = plan(self, state)
        held = sent.setdefault(state.version(planned.group), state.weights(planned.group))
        assert all(torch.equal(tensor, held[name]) for name, tensor in state.weights(planned.group).items())
        return planned

    monkeypatch.setattr(TrainingStage, "plan", seen)
    train = replace(TRAIN, processors=["uniform"], options={"bits": 8, "direction": "down"})
    ran(transfer(head=replace(train, rounds=1, evaluate_every=0), train=replace(train, evaluate_every=0)))
    assert len(sent) == 3


def with_constants(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    layers = {"flat": nn.Flatten(), "body": nn.Linear(math.prod(input_shape), 6).requires_grad_(False)}
    return nn.Sequential(OrderedDict({**layers, "head": nn.Linear(6, num_classes)}))


def test_the_head_is_trained_on_a_body_of_constants(folder: Path, tiny_config_in: Make, results_of: Any) -> None:
    space = SpaceConfig("module", build=f"{__name__}:with_constants", input_shape=[1, 8, 8])
    parts: dict[str, Any] = {"space": space, "tiers": TiersConfig(count=1, paths=100)}
    own = folder / "constants"
    run_id = results_of(tiny_config_in(own, method=FedAvgConfig(train=TRAIN), **parts)).paths.run_id
    parts |= {"space": replace(space, num_classes=4), "experiment": "transferred"}
    data = DataConfig("npz", num_clients=8, options={"path": str(folder / "four.npz")})
    paths = ran(
        tiny_config_in(own, data=data, method=TransferConfig(start_from=run_id, head=TRAIN, train=TRAIN), **parts)
    )
    clients = read_table(own, "clients", run_id=paths.run_id)
    assert set(clients[clients["stage"] == "head"]["status"]) == {"ok"}


def test_a_step_of_the_head_by_hand(transfer: Make) -> None:
    """The gradient of a linear layer on features that are computed as in evaluation."""
    world = build_world(transfer())
    worker, source = Worker(world.spec), source_of(transfer().method, world)
    network = OnlyHead(source.subnet, source.fresh)
    task = TrainHead(network, LocalSGD(epochs=1, batch_size=1000, lr=0.1))
    given = Assignment("head", 0, 3, "tier1", task)
    outcome = task.run(worker, given, source.weights)
    module = world.space.build_subnet((0, 1, 2)).eval()
    module.load_state_dict(dict(source.weights))
    x, y = worker.client_data(3, "train")
    F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
    assert outcome.update is not None
    assert tuple(sorted(outcome.update.tensors)) == HEAD
    for name, parameter in module.named_parameters():
        if name in HEAD:
            assert parameter.grad is not None
            stepped = source.weights[name] - 0.1 * parameter.grad
            torch.testing.assert_close(outcome.update.tensors[name].detach(), stepped, rtol=1e-4, atol=1e-6)
    counted = task.account(worker, given)
    for figure in ("macs", "bytes_down", "bytes_up", "steps", "samples", "parameters", "architecture"):
        assert getattr(outcome, figure) == getattr(counted, figure), figure


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start_from": None}, "method.start_from: give the run whose model is to be transferred"),
        ({"start_from": "nowhere"}, "nowhere"),
        ({"model": "tier1"}, "has no model 'tier1'; its models: fedavg"),
        (
            {"space": {"stem_channels": 8}},
            "does not fit space cnn_digits: fixed.stem.conv.weight is .* there",
        ),
        (
            {"architecture": "0-1-3"},
            "method.architecture=0-1-3: model fedavg of run .* has architecture 0-1-2; only supernets",
        ),
        ({"head": replace(TRAIN, privacy=PrivacyConfig(clip=1.0))}, "method.head.privacy.clip: noise would be added"),
        ({"tier": 3}, "method.tier=3: there are 2 tiers"),
        ({"from_scratch": True}, "method.head.rounds=2: from scratch there are no trained tensors .*; give 0"),
        ({"head": replace(TRAIN, server="fedadam")}, "method.head trains a part of the network: use local_rule=sgd"),
    ],
)
def test_what_cannot_be_transferred_is_refused(transfer: Make, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_stages(build_world(transfer(**changes)))


def test_the_same_task_has_no_fresh_head(folder: Path, kept: Any, tiny_config_in: Make) -> None:
    method = TransferConfig(start_from=kept.paths.run_id, head=TRAIN, train=TRAIN)
    run = replace(tiny_config_in(folder), method=method)
    with pytest.raises(ValueError, match=r"method.head.rounds=2: all tensors of the model of .* fit, .*; give 0"):
        build_stages(build_world(run))
    build_stages(build_world(replace(run, method=replace(method, head=replace(TRAIN, rounds=0)))))
