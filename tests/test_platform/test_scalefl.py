"""ScaleFL and its spaces: the levels, the loss by hand, rounds by a reference in float64, one level, refusals."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.scalefl import Scaled, ScaleFLConfig
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.depth import DepthNetwork
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import extract
from fedloom.platform.spaces.space_config import SpaceConfig

Make = Callable[..., RunConfig]
SPACE = SpaceConfig(
    "cnn_scaled",
    input_shape=[1, 8, 8],
    stage_widths=[4, 6, 8],
    stage_layers=[1, 1, 2],
    stage_strides=[1, 2, 1],
    widths=[0.5, 0.75, 1.0],
    norm="batch",
)


@pytest.fixture
def scaled_config(tiny_config: Make) -> Make:
    """Makes runs of 8 clients in 3 tiers, one per level; keywords change the method."""

    def make(**method: Any) -> RunConfig:
        space = replace(SPACE, **method.pop("space", {}))
        training = TrainingConfig(rounds=2, clients_per_round=5, batch_size=1000, momentum=0.0, weighting="plain")
        config = ScaleFLConfig(train=replace(training, evaluate_every=2), **method)
        tiers = TiersConfig(count=3, clients=[0, 0, 0, 1, 1, 1, 2, 2], upper_bounds=[3000.0, 7000.0, 30000.0])
        return tiny_config(method=config, space=space, tiers=tiers)

    return make


def test_fewer_blocks_are_narrower() -> None:
    space = build_space(SPACE)
    assert [space.label((i,)) for i in range(3)] == ["blocks=1 p=0.5", "blocks=2 p=0.75", "blocks=3 p=1"]
    assert space.parse("blocks=2 p=0.75") == (1,)
    shapes = {name: tuple(t.shape) for name, t in space.build_subnet((1,)).state_dict().items()}
    # .75 of 4 and 6 channels, the latter rounded up.
    assert shapes["blocks.0.0.weight"] == (3, 1, 3, 3)
    assert shapes["blocks.1.0.weight"] == (5, 3, 3, 3)
    assert shapes["exits.1.2.weight"] == (10, 5)
    assert space.slices((1,))["blocks.1.0.weight"].region == ((0, 5), (0, 3), (0, 3), (0, 3))
    first = 64 * 9 * 2 + 20
    assert space.cost_table("macs").cost((0,)) == first
    assert space.cost_table("macs").cost((1,)) == 64 * 9 * 3 + 30 + 16 * 9 * 15 + 50


@pytest.mark.parametrize(
    "config",
    [
        SPACE,
        replace(SPACE, norm="group", stage_widths=[16, 24, 32]),
        SpaceConfig("resnet_scaled", input_shape=[1, 8, 8], stem_channels=8),
        SpaceConfig("vit_scaled", input_shape=[1, 8, 8], patch_size=4, embedding_size=16, attention_heads=4),
        SpaceConfig("gpt_scaled", input_shape=[5], num_classes=7, embedding_size=8, attention_heads=4),
    ],
    ids=lambda config: f"{config.name}-{config.norm}",
)
def test_the_supernet_computes_what_the_subnet_computes_and_classifies_by_its_last_exit(config: SpaceConfig) -> None:
    space = build_space(config)
    weights = space.initial_weights(torch_stream(1, "test"))
    supernet = space.build_supernet().eval()
    supernet.load_state_dict(weights)
    x = torch.randint(7, (2, 5)) if config.name == "gpt_scaled" else torch.randn((2, 1, 8, 8))
    costs = [space.cost_table("parameters").cost((i,)) for i in range(space.options[0])]
    assert costs == sorted(set(costs))
    for level in range(space.options[0]):
        subnet = space.build_subnet((level,)).eval()
        subnet.load_state_dict(extract(weights, space.slices((level,))))
        exits = list[Tensor]()
        outputs = subnet(x, exits)
        assert len(exits) == level + 1
        assert torch.equal(outputs, exits[-1])
        torch.testing.assert_close(supernet(x, (level,)), outputs)


def test_the_loss_of_three_exits_by_hand() -> None:
    exits = [torch.tensor([[2 * math.log(p), 2 * math.log(1 - p)]], requires_grad=True) for p in (0.5, 0.2, 0.9)]
    # Divided by T = 2 the outputs are p; by 1 they are p^2 : (1 - p)^2.
    hard = [-math.log(p**2 / (p**2 + (1 - p) ** 2)) for p in (0.5, 0.2, 0.9)]
    soft = [0.9 * math.log(0.9 / p) + 0.1 * math.log(0.1 / (1 - p)) for p in (0.5, 0.2)]
    network = Scaled(Subnet((2,)), 0.3, 2.0)
    target, objective = torch.tensor([0]), Objective()
    loss = network.loss_of(objective, exits, target)
    expected = (hard[0] + 1.2 * soft[0] + 2 * (hard[1] + 1.2 * soft[1]) + 3 * hard[2]) / 6
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    loss.backward()  # type: ignore[no-untyped-call]
    assert exits[0].grad is not None
    assert exits[2].grad is not None
    # The first: (p - 1) of its target, and g T (p - .9) of the last, at p = .5; the last learns from its target alone.
    assert float(exits[0].grad[0, 0]) == pytest.approx((0.5 - 1 + 0.6 * (0.5 - 0.9)) / 6, rel=1e-5)
    assert float(exits[2].grad[0, 0]) == pytest.approx(3 * (0.81 / 0.82 - 1) / 6, rel=1e-4)
    untaught = replace(network, distillation=0.0).loss_of(objective, exits, target)
    assert float(untaught.detach()) == pytest.approx((hard[0] + 2 * hard[1] + 3 * hard[2]) / 6, rel=1e-6)


def test_two_rounds_are_those_of_a_reference_in_float64(scaled_config: Make, run_in_memory: Any) -> None:
    """One full batch per client, the first round without distillation; means over the holders of a scalar."""
    config = scaled_config(distillation=1.5, temperature=2.0, distil_after=0.5)
    world, memory, _ = run_in_memory(config)
    states = [r.state for r in memory.records if r.state is not None and r.state.stage == 0]
    rows = [row for r in memory.records for t, row in r.rows if t == "clients" and row["stage"] == "supernet"]
    worker = Worker(world.spec)
    begun = build_stages(world)[0].begin(replace(states[0], groups={}))
    weights = {name: tensor.double() for name, tensor in begun.weights("supernet").items()}
    for round_ in range(2):
        total = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        count = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        for row in (r for r in rows if r["round"] == round_):
            level = int(row["tier"].removeprefix("tier")) - 1
            assert row["architecture"] == str(level)
            data = worker.client_data(row["client_id"], "train")
            for name, tensor in trained_in_float64(world.space, level, weights, *data, 1.5 * round_).items():
                part = tuple(slice(0, n) for n in tensor.shape)
                total[name][part] += tensor
                count[name][part] += 1
        weights = {n: torch.where(count[n] > 0, total[n] / count[n].clamp_min(1), weights[n]) for n in weights}
        ours = next(s for s in states if s.round == round_ + 1).weights("supernet")
        for name, tensor in weights.items():
            if "tracked" not in name:
                torch.testing.assert_close(ours[name].double(), tensor, rtol=1e-4, atol=1e-6, msg=name)
    models = [model for record in memory.records for _, model in record.models]
    assert [(m.name, m.architecture) for m in models] == [(f"tier{i + 1}-scalefl", str(i)) for i in range(3)]


def trained_in_float64(
    space: SearchSpace, level: int, weights: dict[str, Tensor], x: Tensor, y: Tensor, factor: float
) -> dict[str, Tensor]:
    """A client's tensors after one step of rate .1 on all of its samples, with temperature 2."""
    network = space.build_subnet((level,)).double().train()
    network.load_state_dict(extract(weights, space.slices((level,))))
    assert isinstance(network, DepthNetwork)
    logits = list[Tensor]()
    network(x.double(), logits)
    loss = torch.zeros((), dtype=torch.float64)
    for depth, each in enumerate(logits, start=1):
        loss = loss + depth * F.cross_entropy(each, y)
        if depth <= level:
            target = (logits[-1] / 2).softmax(1).detach()
            loss = loss + depth * factor * 4 * F.kl_div((each / 2).log_softmax(1), target, reduction="batchmean")
    (loss / sum(range(1, level + 2))).backward()  # type: ignore[no-untyped-call]
    after = {name: tensor.double() for name, tensor in network.named_buffers()}
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None
        after[name] = parameter.detach() - 0.1 * parameter.grad
    return after


def test_one_level_is_fedavg(scaled_config: Make) -> None:
    space = {"stage_widths": [4], "stage_layers": [2], "stage_strides": [1], "widths": [1.0]}
    config = scaled_config(space=space)
    worker = Worker(build_world(replace(config, tiers=TiersConfig(count=1))).spec)
    assignment = Assignment("supernet", 0, 6, "tier1", None)  # type: ignore[arg-type]
    weights = worker.space.initial_weights(torch_stream(3, "test"))
    local = LocalSGD(epochs=2, batch_size=16, lr=0.1, momentum=0.9)
    ours, theirs = (
        Train(network, local).run(worker, assignment, weights).update
        for network in (Scaled(Subnet((0,)), 1.0, 3.0), Subnet((0,)))
    )
    assert ours is not None
    assert theirs is not None
    assert set(ours.tensors) == set(theirs.tensors) == set(weights)
    for name, tensor in theirs.tensors.items():
        assert torch.equal(ours.tensors[name], tensor), name


@pytest.mark.parametrize("widths", [[0.5, 1.0], [0.75, 0.5, 1.0], [0.0, 0.5, 1.0], [0.5, 0.5, 0.5]])
def test_impossible_widths_are_refused(widths: list[float]) -> None:
    with pytest.raises(ValueError, match=r"space.widths=\[.*: give cnn_scaled a share .* for each of its 3 depths"):
        build_space(replace(SPACE, widths=widths))
