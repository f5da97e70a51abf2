"""DepthFL and its spaces: who trains what, the loss by hand, rounds by a reference in float64, limits, refusals."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.clients.local_rules import gradients_at
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.config import ObjectiveConfig, RunConfig, TiersConfig
from fedloom.platform.federation.training_config import PrivacyConfig, TrainingConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.depthfl import DepthFLConfig, WithExits, loss_of_exits, ramped_up
from fedloom.platform.methods.registry import build_stages, check_space
from fedloom.platform.methods.scalefl import ScaleFLConfig
from fedloom.platform.methods.splitmix import SplitMixConfig
from fedloom.platform.plugins import PluginError
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.depth import DepthNetwork, DepthSpace, ResnetDepthDesign
from fedloom.platform.spaces.registry import build_space, try_exits
from fedloom.platform.spaces.space_config import SpaceConfig

Make = Callable[..., RunConfig]
SPACE = SpaceConfig(
    "cnn_depth",
    input_shape=[1, 8, 8],
    stage_widths=[4, 6, 8],
    stage_layers=[1, 1, 2],
    stage_strides=[1, 2, 1],
    norm="none",
)
LOCAL = LocalSGD(epochs=1, batch_size=1000, lr=0.1)


@pytest.fixture
def depth_config(tiny_config: Make) -> Make:
    """Makes runs of 8 clients in 3 tiers, one per depth; `train` changes the training, keywords the method."""

    def make(train: dict[str, Any] | None = None, **method: Any) -> RunConfig:
        space, more = replace(SPACE, **method.pop("space", {})), method.pop("more", {})
        training = TrainingConfig(rounds=2, clients_per_round=5, batch_size=1000, evaluate_every=2, momentum=0.0)
        training.weighting = "plain"
        config = DepthFLConfig(train=replace(training, **(train or {})), **method)
        tiers = TiersConfig(count=3, clients=[0, 0, 0, 1, 1, 1, 2, 2], upper_bounds=[3000.0, 7000.0, 25000.0])
        return tiny_config(method=config, space=space, tiers=tiers, **more)

    return make


def at(client_id: int, round_: int = 0) -> Assignment:
    return Assignment("supernet", round_, client_id, "tier3", None)  # type: ignore[arg-type]


# -- spaces -----------------------------------------------------------------------------------------------------------


def test_a_subnet_is_the_first_blocks_and_their_exits() -> None:
    space = build_space(SPACE)
    assert space.num_architectures == 3
    names = [set(space.slices((depth,))) for depth in range(3)]
    assert names[0] < names[1] < names[2]
    assert {n.split(".")[1] for n in names[1]} == {"0", "1"}
    assert all(piece.region is None for piece in space.slices((1,)).values())
    # 3x3 convolutions of 1 to 4 channels at 8x8, 4 to 6 and 6 to 8 to 8 at 4x4; an exit of ten classes after each.
    first, second, third = 64 * 9 * 4 + 40, 16 * 9 * 24 + 60, 16 * 9 * (48 + 64) + 80
    assert [space.cost_table("macs").cost((i,)) for i in range(3)] == [first, first + second, first + second + third]
    assert space.parse("blocks=2") == (1,)
    assert space.label((1,)) == "blocks=2"
    with pytest.raises(ValueError, match="'blocks=4' is no architecture of cnn_depth: known are blocks=1, "):
        space.parse("blocks=4")


def test_resnets_exits_follow_its_four_stages() -> None:
    space = DepthSpace(ResnetDepthDesign())
    # The largest is ResNet-18 (11 173 962 with its classifier) with exits of 64, 128 and 256 channels besides.
    exits = sum(c * 10 + 10 for c in (64, 128, 256))
    assert space.cost_table("parameters").cost((3,)) == 11_173_962 + exits
    assert space.design.block_channels == (64, 128, 256, 512)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_supernet_computes_what_the_subnet_computes(depth: int) -> None:
    space = build_space(replace(SPACE, norm="batch"))
    weights = space.initial_weights(torch_stream(1, "test"))
    supernet, subnet = space.build_supernet().eval(), space.build_subnet((depth,)).eval()
    supernet.load_state_dict(weights)
    subnet.load_state_dict({name: weights[piece.source] for name, piece in space.slices((depth,)).items()})
    x = torch.randn((5, 1, 8, 8), generator=torch_stream(2, "test"))
    logits = list[Tensor]()
    outputs = subnet(x, logits)
    assert len(logits) == depth + 1
    torch.testing.assert_close(outputs, sum(logits) / (depth + 1))
    torch.testing.assert_close(supernet(x, (depth,)), outputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage_widths": []}, r"space.stage_widths=\[\]: give the channels of at least one block"),
        ({"stage_layers": [1, 2]}, r"space.stage_layers=\[1, 2\]: give one number for each of the 3 blocks"),
        ({"norm": "group"}, r"space.stage_widths=\[4, 6, 8\]: with norm=group, give multiples of 8"),
        ({"norm": "layer"}, "space.norm='layer': allowed are none, batch, group"),
        ({"input_shape": [64]}, r"space cnn_depth takes images \(C, H, W\), given \[64\]"),
        ({"widths": [0.5, 1.0]}, "space cnn_depth has no widths"),
    ],
)
def test_impossible_networks_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_space(replace(SPACE, **change))


# -- the loss ---------------------------------------------------------------------------------------------------------


def test_the_loss_of_three_exits_by_hand() -> None:
    exits = [torch.tensor([[math.log(p), math.log(1 - p)]], requires_grad=True) for p in (0.5, 0.2, 0.9)]

    def kl(p: float, q: float) -> float:
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

    losses = -(math.log(0.5) + math.log(0.2) + math.log(0.9))
    # Every exit learns from the two others: KL(teacher || pupil), halved.
    pairs = kl(0.2, 0.5) + kl(0.9, 0.5) + kl(0.5, 0.2) + kl(0.9, 0.2) + kl(0.5, 0.9) + kl(0.2, 0.9)
    target, objective = torch.tensor([0]), Objective()
    assert float(loss_of_exits(objective, exits, target, 0.0).detach()) == pytest.approx(losses, rel=1e-6)
    taught = loss_of_exits(objective, exits, target, 0.3)
    assert float(taught.detach()) == pytest.approx(losses + 0.3 / 2 * pairs, rel=1e-6)
    taught.backward()  # type: ignore[no-untyped-call]
    # Its own target, and .15 of each teacher's, which is not trained by this: (p - 1) + .15 (2 p - .2 - .9).
    assert exits[0].grad is not None
    assert float(exits[0].grad[0, 0]) == pytest.approx(-0.5 + 0.15 * (1.0 - 1.1), rel=1e-5)
    assert float(loss_of_exits(objective, exits[:1], target, 0.3).detach()) == pytest.approx(-math.log(0.5))


def test_distillation_rises_over_a_share_of_the_rounds() -> None:
    config = DepthFLConfig(distillation=2.0, ramp_up=0.3, train=TrainingConfig(rounds=100))
    values = [ramped_up(config, t) for t in (0, 15, 30, 99)]
    assert values == pytest.approx([2 * math.exp(-5), 2 * math.exp(-1.25), 2.0, 2.0])
    assert ramped_up(replace(config, ramp_up=0.0), 0) == 2.0


# -- rounds -----------------------------------------------------------------------------------------------------------


def test_a_tier_trains_and_gets_the_depth_that_it_affords(depth_config: Make, run_in_memory: Any) -> None:
    world, memory, _ = run_in_memory(depth_config())
    trained = [row for r in memory.records for t, row in r.rows if t == "clients" and row["stage"] == "supernet"]
    size = world.space.cost_table("bytes").cost
    for row in trained:
        depth = int(row["tier"].removeprefix("tier")) - 1
        assert (row["architecture"], row["bytes_down"], row["bytes_up"]) == (str(depth), size((depth,)), size((depth,)))
    models = [model for record in memory.records for _, model in record.models]
    assert [(m.name, m.architecture) for m in models] == [(f"tier{i + 1}-depthfl", str(i)) for i in range(3)]


@pytest.mark.parametrize("weighting", ["plain", "fedavg"])
def test_two_rounds_are_those_of_a_reference_in_float64(depth_config: Make, run_in_memory: Any, weighting: str) -> None:
    """One full batch per client: gradients of the sum over exits, means over the holders of a tensor.

    Clients have different numbers of samples; running statistics are averaged like the block that they belong to.
    """
    data = DataConfig(num_clients=8, train_samples=320, test_samples=80, partition="dirichlet_classes", alpha=1.0)
    space = {"norm": "batch"}
    config = depth_config({"weighting": weighting}, distillation=1.5, ramp_up=1.0, space=space, more={"data": data})
    world, memory, _ = run_in_memory(config)
    assert len(set(world.data.sizes("train").tolist())) > 4
    states = [r.state for r in memory.records if r.state is not None and r.state.stage == 0]
    rows = [row for r in memory.records for t, row in r.rows if t == "clients" and row["stage"] == "supernet"]
    worker = Worker(world.spec)
    begun = build_stages(world)[0].begin(replace(states[0], groups={}))
    weights = {name: tensor.double() for name, tensor in begun.weights("supernet").items()}
    for round_ in range(2):
        factor = 1.5 * math.exp(-5 * (1 - round_ / 2) ** 2)
        total = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        count = dict.fromkeys(weights, 0.0)
        for row in (r for r in rows if r["round"] == round_):
            depth = int(row["tier"].removeprefix("tier"))
            x, y = worker.client_data(row["client_id"], "train")
            for name, tensor in trained_in_float64(world.space, depth, weights, x, y, factor).items():
                weight = float(len(y)) if weighting == "fedavg" else 1.0
                total[name] += weight * tensor
                count[name] += weight
        weights = {name: total[name] / count[name] if count[name] else weights[name] for name in weights}
        ours = next(s for s in states if s.round == round_ + 1).weights("supernet")
        for name, tensor in weights.items():
            if "tracked" not in name:
                torch.testing.assert_close(ours[name].double(), tensor, rtol=1e-4, atol=1e-6, msg=name)


def trained_in_float64(
    space: SearchSpace, depth: int, weights: dict[str, Tensor], x: Tensor, y: Tensor, factor: float
) -> dict[str, Tensor]:
    """A client's tensors after one step of rate .1 on all of its samples."""
    network = space.build_subnet((depth - 1,)).double().train()
    network.load_state_dict({name: weights[name] for name in network.state_dict()})
    assert isinstance(network, DepthNetwork)
    logits = list[Tensor]()
    network(x.double(), logits)
    loss = torch.zeros((), dtype=torch.float64)
    for i, own in enumerate(logits):
        loss = loss + F.cross_entropy(own, y)
        for j, other in enumerate(logits):
            if j != i:
                soft = F.kl_div(own.log_softmax(1), other.softmax(1).detach(), reduction="batchmean")
                loss = loss + factor / (depth - 1) * soft
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: tensor.double() for name, tensor in network.named_buffers()}
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.detach() - 0.1 * parameter.grad
    return found


def test_clients_of_all_depths_report_losses_of_one_scale(depth_config: Make) -> None:
    """What they minimise is a sum over exits; selection by loss compares clients."""
    world = build_world(depth_config())
    worker, weights = Worker(world.spec), world.space.initial_weights(torch_stream(3, "test"))
    losses = [Train(WithExits(Subnet((d,)), 1.0), LOCAL).run(worker, at(6), weights).loss for d in range(3)]
    module = world.space.build_subnet((2,)).train()
    module.load_state_dict({name: weights[name] for name in module.state_dict()})
    x, y = worker.client_data(6, "train")
    assert losses[2] == pytest.approx(float(F.cross_entropy(module(x), y).detach()), rel=1e-5)
    assert all(loss is not None and 2.0 < loss < 2.6 for loss in losses)


def test_scaffolds_gradient_is_that_of_what_is_trained(depth_config: Make) -> None:
    world = build_world(depth_config())
    worker, weights = Worker(world.spec), world.space.initial_weights(torch_stream(3, "test"))
    network, data = WithExits(Subnet((2,)), 1.0).on(worker, at(6)), worker.client_data(6, "train")
    for parameter in network.module.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)  # of a client that failed
    found = gradients_at(worker, at(6), network, weights, data, LOCAL)
    stepped = trained_in_float64(world.space, 3, {n: t.double() for n, t in weights.items()}, *data, 1.0)
    for name, gradient in found.items():
        expected = (weights[name].double() - stepped[name]) / 0.1
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-3, atol=1e-5, msg=name)


def test_one_block_is_fedavg(depth_config: Make) -> None:
    world = build_world(depth_config(space={"norm": "batch"}))
    worker, local = Worker(world.spec), replace(LOCAL, batch_size=16, momentum=0.9)
    weights = world.space.initial_weights(torch_stream(3, "test"))
    ours = Train(WithExits(Subnet((0,)), 1.0), local).run(worker, at(6), weights).update
    theirs = Train(Subnet((0,)), local).run(worker, at(6), weights).update
    assert ours is not None
    assert theirs is not None
    assert set(ours.tensors) == set(theirs.tensors)
    for name, tensor in theirs.tensors.items():
        assert torch.equal(ours.tensors[name], tensor), name


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_counted_without_training_is_what_training_counts(depth_config: Make, precision: str) -> None:
    config = depth_config(space={"norm": "batch"})
    world = build_world(replace(config, executor=replace(config.executor, precision=precision)))
    worker, weights = Worker(world.spec), world.space.initial_weights(torch_stream(3, "test"))
    task = Train(WithExits(Subnet((2,)), 1.0), replace(LOCAL, batch_size=16, epochs=2))
    given = replace(at(6), task=task)
    ran, counted = task.run(worker, given, weights), task.account(worker, given)
    for figure in ("macs", "bytes_down", "bytes_up", "steps", "samples", "parameters", "architecture"):
        assert getattr(ran, figure) == getattr(counted, figure), figure


# -- what is refused --------------------------------------------------------------------------------------------------


def test_other_spaces_and_poor_tiers_are_refused(depth_config: Make, tiny_config: Make) -> None:
    with pytest.raises(
        ValueError,
        match="depthfl cannot use space cnn_digits, which has no num_exits; choose space",
    ):
        check_space(DepthFLConfig(), build_world(tiny_config()).space)
    world = build_world(depth_config())
    poor = replace(world, tiers=tuple(replace(t, lower=t.lower / 4, upper=t.upper / 4) for t in world.tiers))
    with pytest.raises(ValueError, match=r"tier1 may spend 750 macs, the smallest network costs 2344: raise its upper"):
        build_stages(poor)


SCALED = replace(SPACE, name="cnn_scaled", widths=[0.5, 0.75, 1.0])
SPLIT = SpaceConfig("cnn_split", input_shape=[1, 8, 8], stage_widths=[4, 8], widths=[0.5, 1.0])


@pytest.mark.parametrize(("kind", "space"), [(DepthFLConfig, SPACE), (ScaleFLConfig, SCALED), (SplitMixConfig, SPLIT)])
def test_rows_of_several_classifiers_are_not_left_out_of_the_mean(
    tiny_config: Make, refused: Callable[[RunConfig], str], kind: type[Any], space: SpaceConfig
) -> None:
    method = kind(train=TrainingConfig(clients_per_round=3))
    config = tiny_config(method=method, space=space, tiers=TiersConfig(count=1, paths=100))
    said = refused(replace(config, objective=ObjectiveConfig("masked_classes")))
    assert said.startswith(
        f"objective.name=masked_classes: {method.name}'s networks have several classifiers, and only"
    )
    build_stages(build_world(replace(config, objective=ObjectiveConfig("masked_classes", {"in_mean": False}))))


def test_measured_statistics_would_not_be_private(depth_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config = depth_config({"privacy": PrivacyConfig(clip=1.0, noise=1.0)})
    build_stages(build_world(config))
    monkeypatch.setattr(DepthSpace, "keeps_statistics", True)
    with pytest.raises(ValueError, match="depthfl's clients measure batch norms without noise or masks at"):
        build_stages(build_world(config))


class Silent(DepthNetwork):
    def forward(self, x: Tensor, of_exits: list[Tensor] | None = None) -> Tensor:
        return super().forward(x)


class FirstAlone(DepthNetwork):
    def forward(self, x: Tensor, of_exits: list[Tensor] | None = None) -> Tensor:
        logits: list[Tensor] = [] if of_exits is None else of_exits
        super().forward(x, logits)
        return logits[0]


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (
            Silent,
            "'mine:build': the subnet of architecture 0 appends the logits of 0 exits to the list, num_exits",
        ),
        (FirstAlone, "'mine:build': the subnet of architecture 2 returns neither the mean of its exits' logits nor"),
    ],
)
def test_a_users_space_that_does_not_show_its_exits_is_refused(
    network: type[DepthNetwork], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = build_space(SPACE)
    assert isinstance(space, DepthSpace)
    try_exits(space, SPACE)
    monkeypatch.setattr("fedloom.platform.spaces.depth.DepthNetwork", network)
    with pytest.raises(PluginError, match=message):
        try_exits(space, replace(SPACE, name="mine:build"))
