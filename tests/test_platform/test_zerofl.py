"""ZeroFL: sparse gradients by hand, dense limits, what is sent and counted, and what is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.averaging.average import Update
from fedloom.platform.averaging.processors import Message, Payload, Sparsify, Traffic, kept_of, saved_by
from fedloom.platform.clients.assignments import Assignment, TaskError
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.training_config import PrivacyConfig, TrainingConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.zerofl import Sparse, ZeroFLConfig, largest, sparsely
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.rnn import SigmoidLinear
from fedloom.platform.spaces.slices import Slice
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.platform.spaces.transformer import Patches

Make = Callable[..., RunConfig]
LOCAL = LocalSGD(epochs=2, batch_size=16, lr=0.1)
ARCHITECTURE = (0, 1, 2)


# -- sparse layers by hand ---------------------------------------------------------------------------------------------


def test_the_largest_values_stay() -> None:
    values = torch.tensor([[0.5, -3.0], [2.0, 0.0]])
    assert largest(values, 0.5).tolist() == [[0.0, -3.0], [2.0, 0.0]]
    assert largest(values, 0.01).tolist() == [[0.0, -3.0], [0.0, 0.0]], "at least one"
    assert largest(values, 1.0) is values


def test_a_sparse_linear_layer_by_hand() -> None:
    layer = sparse(nn.Linear(2, 2), 0.5)
    weights = {"weight": torch.tensor([[1.0, -4.0], [3.0, 2.0]]), "bias": torch.tensor([0.5, 0.0])}
    tensors = {name: t.requires_grad_() for name, t in weights.items()}
    x = torch.tensor([[1.0, 2.0], [-5.0, 0.1]], requires_grad=True)
    outputs = torch.func.functional_call(layer, tensors, (x,))
    # Weights (0, -4), (3, 0) make the outputs; the activations 2 and -5 make the weights' gradient.
    assert outputs.tolist() == [[-7.5, 3.0], [pytest.approx(0.1), -15.0]]
    (outputs * torch.tensor([[1.0, 10.0], [100.0, 0.0]])).sum().backward()
    assert tensors["weight"].grad is not None
    assert tensors["weight"].grad.tolist() == [[-500.0, 2.0], [0.0, 20.0]]
    assert tensors["bias"].grad is not None
    assert tensors["bias"].grad.tolist() == [101.0, 10.0]
    assert x.grad is not None
    assert x.grad.tolist() == [[30.0, -4.0], [0.0, -400.0]]


def sparse(layer: nn.Module, share: float) -> nn.Module:
    module = sparsely(lambda: nn.Sequential(layer.to("meta")), share)
    part = module[0]  # type: ignore[index]
    assert isinstance(part, nn.Module)
    return part


@pytest.mark.parametrize("groups", [1, 2])
def test_a_sparse_convolution_is_dense_ones_with_masked_factors(groups: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(4, 4 // groups, 3, 3, generator=generator), torch.randn(4, generator=generator)
    x, upstream = torch.randn(2, 4, 6, 6, generator=generator), torch.randn(2, 4, 3, 3, generator=generator)
    layer = sparse(nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=groups), 0.3)
    tensors = {"weight": weight.clone().requires_grad_(), "bias": bias.clone().requires_grad_()}
    ours = x.clone().requires_grad_()
    outputs = torch.func.functional_call(layer, tensors, (ours,))
    outputs.backward(upstream)

    def dense(inputs: Tensor, factors: Tensor) -> Tensor:
        return F.conv2d(inputs, factors, bias, 2, 1, 1, groups)

    torch.testing.assert_close(outputs, dense(x, largest(weight, 0.3)))
    (by_input,) = torch.autograd.grad(dense(a := x.clone().requires_grad_(), largest(weight, 0.3)), a, upstream)
    (by_weight,) = torch.autograd.grad(dense(largest(x, 0.3), b := weight.clone().requires_grad_()), b, upstream)
    torch.testing.assert_close(ours.grad, by_input)
    torch.testing.assert_close(tensors["weight"].grad, by_weight)
    torch.testing.assert_close(tensors["bias"].grad, upstream.sum(dim=(0, 2, 3)))


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    "layer",
    [
        SigmoidLinear(6, 5),
        Patches(3, 5, 2),
        nn.Conv2d(3, 4, (2, 3), padding="same", dilation=(1, 2)),
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_with_full_shares_a_layer_computes_all_that_it_computes_alone(layer: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in layer.named_parameters()}
    tensors = {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}
    inputs = [torch.randn(2, 3, 6, 6, generator=generator).requires_grad_(), *tensors.values()]
    expected = torch.func.functional_call(layer, tensors, (inputs[0],))
    ours = torch.func.functional_call(sparse(copy.deepcopy(layer), 1.0), tensors, (inputs[0],))
    torch.testing.assert_close(ours, expected)
    upstream = torch.randn(expected.shape, generator=generator)
    by_hand, by_torch = (torch.autograd.grad(outputs, inputs, upstream) for outputs in (ours, expected))
    torch.testing.assert_close(by_hand, by_torch)


def test_a_layer_that_does_not_multiply_by_its_weight_is_named() -> None:
    class Centred(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight - self.weight.mean())

    tensors = {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}
    with pytest.raises(TaskError, match="zerofl: a layer Centred does not multiply by its weight as it is"):
        torch.func.functional_call(sparse(Centred(2, 2), 0.5), tensors, (torch.ones(1, 2),))


# -- clients -----------------------------------------------------------------------------------------------------------


class Attentive(nn.Module):
    """A user's network of a constant layer, attention and a classifier."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.constant, self.head = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, num_classes)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.constant(x.flatten(1, 2))
        y: Tensor = self.head(self.attention(rows, rows, rows)[0].mean(dim=1))
        return y


def attentive(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    del input_shape
    return Attentive(num_classes)


def test_what_is_constant_or_read_by_others_stays_dense(tiny_config: Make, run_in_memory: Any) -> None:
    train = TrainingConfig(rounds=1, clients_per_round=2, batch_size=16)
    space = SpaceConfig("module", build=f"{__name__}:attentive", input_shape=[1, 8, 8])
    tiers = TiersConfig(count=1, paths=100)
    config = tiny_config(method=ZeroFLConfig(sparsity=0.5, train=train), space=space, tiers=tiers)
    _, memory, state = run_in_memory(config)
    assert set(memory.table("clients")["status"]) == {"ok"}
    deployed = state.weights("deployed")
    assert {name for name, weights in deployed.items() if weights.dim() == 2 and (weights == 0).any()} == {
        "head.weight"
    }


def at(task: Train) -> Assignment:
    return Assignment("zerofl", 0, 3, "tier1", task)


def test_full_shares_are_dense_training(tiny_config: Make) -> None:
    world = build_world(tiny_config())
    worker, subnet = Worker(world.spec), Subnet(ARCHITECTURE, stand_alone=True)
    weights = world.space.initial_subnet_weights(ARCHITECTURE, torch_stream(1, "test"))
    dense, full = Train(subnet, LOCAL), Train(Sparse(subnet, 1.0), LOCAL)
    a, b = (task.run(worker, at(task), weights).update for task in (dense, full))
    assert a is not None
    assert b is not None
    for name, tensor in a.tensors.items():
        torch.testing.assert_close(b.tensors[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("by", ["weight", "change"])
def test_only_a_share_of_the_changes_is_sent_and_counted(tiny_config: Make, by: str) -> None:
    world = build_world(tiny_config())
    worker, subnet = Worker(world.spec), Subnet(ARCHITECTURE, stand_alone=True)
    weights = world.space.initial_subnet_weights(ARCHITECTURE, torch_stream(1, "test"))
    task = Train(Sparse(subnet, 0.1), LOCAL, processors=(Sparsify(share=0.3, by=by),))
    outcome, counted = task.run(worker, at(task), weights), task.account(worker, at(task))
    assert outcome.update is not None
    names = [n for n, p in world.space.build_subnet(ARCHITECTURE).named_parameters()]
    total = sum(weights[n].numel() for n in names)
    changed = sum(int((outcome.update.tensors[n] != weights[n]).sum()) for n in names)
    assert 0 < changed <= kept_of(total, 0.3)
    assert outcome.bytes_up == outcome.bytes_down - saved_by(total, total - kept_of(total, 0.3))
    assert outcome.bytes_down - outcome.bytes_up == 4 * (total - kept_of(total, 0.3)) - -(-total // 8)
    for figure in ("bytes_up", "bytes_down", "macs", "steps", "parameters"):
        assert getattr(counted, figure) == getattr(outcome, figure), figure


def test_changes_where_the_weights_are_largest() -> None:
    received, trained = {"w": torch.tensor([5.0, 1.0, -3.0])}, {"w": torch.tensor([5.1, 2.9, -3.0])}
    update, whole = Update(trained, {"w": Slice("w")}, {"w": 1.0}), Payload(12, 3, 1)
    Sparsify(share=0.5, by="weight").on_client(Message(0, update, received, ("w",), Traffic(whole, whole)))
    assert trained["w"].tolist() == pytest.approx([5.1, 1.0, -3.0])


def test_a_run_without_sparsity_is_fedavg(tiny_config: Make, run_in_memory: Any) -> None:
    train = TrainingConfig(rounds=2, clients_per_round=3, batch_size=16)
    same = {"architecture": "0-1-2", "train": train}
    stages = [
        build_stages(build_world(tiny_config(method=config)))[0]
        for config in (FedAvgConfig(**same), ZeroFLConfig(sparsity=0.0, mask_ratio=1.0, **same))  # type: ignore[arg-type]
    ]
    from fedloom.platform.federation.algorithm import RunState

    a, b = (stage.plan(stage.begin(RunState())).assignments for stage in stages)
    assert [x.task for x in b] == [x.task for x in a]


def test_sparse_clients_learn_and_the_model_is_as_sparse_as_they_compute(tiny_config: Make, run_in_memory: Any) -> None:
    train = TrainingConfig(rounds=4, clients_per_round=8, batch_size=16, epochs=3, lr=0.1, evaluate_every=4)
    config = tiny_config(method=ZeroFLConfig(architecture="largest", sparsity=0.5, mask_ratio=0.2, train=train))
    _, memory, state = run_in_memory(config)
    trained, deployed = state.weights("zerofl"), state.weights("deployed")
    for name, weights in deployed.items():
        dense = trained[name]
        if dense.dim() >= 2:  # of convolutions and linear layers
            assert (weights != 0).sum() == -(-dense.numel() // 2)
            assert torch.equal(weights, largest(dense, 0.5))
        else:
            assert torch.equal(weights, dense)
    measured = [row for r in memory.records for table, row in r.rows if table == "evaluations"]
    watched, final = (
        [r["value"] for r in measured if r["split"] == "validation" and (r["stage"] == "evaluation") is last]
        for last in (False, True)
    )
    assert watched[-len(final) :] == final, "while it is trained the model is scored as it is kept"
    rows = [row for r in memory.records for table, row in r.rows if table == "rounds" and row["stage"] == "zerofl"]
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]


@pytest.mark.parametrize("rule", ["scaffold", "feddyn"])
def test_rules_that_need_whole_changes_are_refused(tiny_config: Make, rule: str) -> None:
    train = TrainingConfig(local_rule=rule, server="feddyn" if rule == "feddyn" else "replace", momentum=0.0)
    said = f"method.train.local_rule={rule} needs whole changes, but zerofl's clients send only parts: use sgd or "
    with pytest.raises(ValueError, match=f"^{said}fedprox$"):
        build_stages(build_world(tiny_config(method=ZeroFLConfig(train=train))))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"processors": ["clip"]}, "method.train.processors: clip and method=zerofl, whose clients first choose which"),
        ({"selection": "pyramidfl"}, "method.train.selection=pyramidfl says which share of their changes clients send"),
        ({"privacy": PrivacyConfig(secure=True)}, "method.train.privacy.secure=true and method=zerofl, whose clients"),
    ],
)
def test_what_must_not_follow_the_choice_of_changes_is_refused(
    tiny_config: Make, changes: dict[str, Any], said: str
) -> None:
    world = build_world(tiny_config(method=ZeroFLConfig(train=TrainingConfig(**changes), mask_ratio=0.0)))
    with pytest.raises(ValueError, match=f"^{said}"):
        build_stages(world)


def test_impossible_shares_are_refused(tiny_config: Make) -> None:
    config = tiny_config(method=ZeroFLConfig(sparsity=1.0))
    with pytest.raises(ValueError, match=r"method.sparsity=1.0: must be"):
        build_stages(build_world(config))
