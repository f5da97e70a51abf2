"""OFA and CompOFA: what opens when, coupled spaces, sorted channels, taught steps by hand, limits, refusals."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.training_config import PrivacyConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.ofa import (
    TEACHER,
    OFAConfig,
    OFATrainingConfig,
    Opened,
    OpenSubnets,
    opened_in,
)
from fedloom.platform.methods.registry import build_stages, check_space
from fedloom.platform.methods.shares import SharesConfig
from fedloom.platform.methods.superfednas import (
    DistributionConfig,
    ElasticTrainingConfig,
    ShrinkingConfig,
    SuperFedNASConfig,
)
from fedloom.platform.search.fitness import path_of_the_fittest
from fedloom.platform.search.targets import TargetSearchConfig
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.genome import elastic_stage
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import Architecture
from fedloom.platform.spaces.space_config import SpaceConfig

Make = Callable[..., RunConfig]
RESNET = SpaceConfig(
    "resnet_elastic_small",
    input_shape=[1, 8, 8],
    stem_channels=8,
    stage_widths=[16, 24],
    stage_strides=[2, 2],
    depths=[2, 1],
    expansions=[0.5, 1.0, 1.5, 2.0],
)
VIT = SpaceConfig(
    "vit_elastic",
    input_shape=[1, 8, 8],
    patch_size=4,
    embedding_size=8,
    attention_heads=4,
    blocks=[2, 1],
    head_shares=[0.25, 0.5, 1.0],
    expansions=[0.5, 1.0],
)
TCN = SpaceConfig("tcn_elastic", input_shape=[6], num_classes=5, channels=8, embedding_size=8, dropout=0.0)


def elastic(config: SpaceConfig) -> ElasticSpace:
    space = build_space(config)
    assert isinstance(space, ElasticSpace)
    return space


def at(client_id: int = 3) -> Assignment:
    return Assignment("supernet", 1, client_id, "tier1", None)  # type: ignore[arg-type]


@pytest.fixture
def ofa_config(elastic_config: Make) -> Make:
    """Makes runs on the 36 subnets of `elastic_config`, of which each stage has two depths and two widths."""

    def make(*norm: str, space: dict[str, Any] | None = None, **train: Any) -> RunConfig:
        base = {"rounds": 3, "clients_per_round": 4, "batch_size": 16, "evaluate_every": 0, "momentum": 0.0}
        training = OFATrainingConfig(full_share=0.3, depth_share=0.0)
        method = OFAConfig(train=replace(training, **{**base, **train}), search=TargetSearchConfig(samples=0))
        config = elastic_config(*norm)
        return replace(config, method=method, space=replace(config.space, **(space or {})))

    return make


# -- what opens when --------------------------------------------------------------------------------------------------


def test_depths_open_before_widths_the_larger_first() -> None:
    config = OFATrainingConfig(rounds=16)  # .375 and .3125 of them: six and five rounds
    opened = [opened_in(config, elastic(RESNET), index) for index in range(16)]
    assert opened[:6] == [Opened()] * 6
    assert opened[6:11] == [Opened(1), Opened(1), Opened(1), Opened(2), Opened(2)]
    assert opened[11:] == [Opened(2, 1), Opened(2, 1), Opened(2, 2), Opened(2, 2), Opened(2, 3)]
    coupled = replace(config, full_share=0.5, depth_share=0.0)
    opened = [opened_in(coupled, elastic(replace(RESNET, coupled=True)), index) for index in range(16)]
    assert opened == [Opened()] * 8 + [Opened(2, 3)] * 8


@pytest.mark.parametrize(
    ("config", "opened", "blocks", "widths"),
    [
        (RESNET, Opened(1), {(2, 3), (1, 2)}, {3}),
        (RESNET, Opened(2), {(1, 2, 3), (1, 2)}, {3}),
        (RESNET, Opened(2, 1), {(1, 2, 3), (1, 2)}, {2, 3}),
        # Of the pairs of 3 shares of the heads and 2 of the hidden channels those of the two largest shares of each.
        (VIT, Opened(1, 1), {(1, 2), (1,)}, {2, 3, 4, 5}),
        (VIT, Opened(1, 2), {(1, 2), (1,)}, {0, 1, 2, 3, 4, 5}),
    ],
)
def test_subnets_are_drawn_from_all_that_is_open(
    config: SpaceConfig, opened: Opened, blocks: set[tuple[int, ...]], widths: set[int], ofa_config: Make
) -> None:
    space = elastic(config)
    worker = Worker(build_world(ofa_config()).spec)
    worker.__dict__["space"] = space
    drawn = [space.contents(a) for a in islice(OpenSubnets(2, opened=opened)._draws(worker, at()), 300)]
    assert {tuple(sorted({len(contents[i]) for contents in drawn})) for i in range(2)} == blocks
    assert {width for contents in drawn for content in contents for width in content} == widths


# -- coupled spaces ---------------------------------------------------------------------------------------------------


def test_the_depth_of_a_coupled_stage_decides_its_widths() -> None:
    stage = elastic_stage(2, 4, 3, coupled=True)
    assert stage.contents == ((0, 0), (1, 1, 1), (2, 2, 2, 2))  # OFA's expansions 3, 4 and 6 with 2, 3 and 4 blocks
    assert elastic_stage(1, 3, 5, coupled=True).contents == ((0,), (2, 2), (4, 4, 4))
    assert elastic_stage(1, 2, 2, 3, coupled=True).contents == ((0,), (5, 5)), "the narrowest pair, and the widest"
    assert elastic_stage(2, 2, 3, coupled=True).contents == ((2, 2),)
    space = elastic(replace(RESNET, coupled=True))
    assert space.num_architectures == 3 * 2
    assert space.label(space.smallest) == "d=0,0 e=0.5"
    assert space.label((1, 1)) == "d=1,1 e=1,1,2,2"
    assert space.parse("d=1,1 e=1,1,2,2") == (1, 1)
    with pytest.raises(ValueError, match=r"'d=1,1 e=.5': space.coupled=true gives these depths other widths: 'd=1,1 e"):
        space.parse("d=1,1 e=.5")
    assert path_of_the_fittest(space, 4)[-1] == space.largest
    rng = np.random.default_rng(0)
    assert {space.sample(rng) for _ in range(200)} == {(a, b) for a in range(3) for b in range(2)}


# -- sorted channels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [RESNET, replace(RESNET, norm="batch"), replace(RESNET, norm="group", bias=True), VIT, TCN],
    ids=lambda config: f"{config.name}-{config.norm}",
)
def test_sorted_channels_compute_the_same(config: SpaceConfig) -> None:
    space = elastic(config)
    weights = {
        name: tensor + torch.rand(tensor.shape, generator=torch_stream(1, name))
        if tensor.is_floating_point()
        else tensor
        for name, tensor in space.initial_weights(torch_stream(2, "test")).items()
    }
    x = torch.randint(5, (3, 6)) if config is TCN else torch.randn((3, 1, 8, 8))
    module, outputs = space.build_subnet(space.largest).eval(), list[Tensor]()
    after = space.with_sorted_channels(weights)
    for values in (weights, after):
        module.load_state_dict(values)
        outputs.append(module(x))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)
    sorted_ones = {name.split(".", 3)[3] for name in weights if not torch.equal(weights[name], after[name])}
    assert sorted_ones, "they were in another order"
    assert not any(
        name.startswith(("shortcut", "norm2", "conv2.bias", "out.bias", "merge.bias")) for name in sorted_ones
    )


def test_the_most_important_channels_come_first() -> None:
    space = elastic(replace(VIT, blocks=[1, 1], attention_heads=2, embedding_size=2, mlp_ratio=1.0))
    weights = space.initial_weights(torch_stream(2, "test"))
    block = "stages.0.0."
    # Two heads of one channel, and two hidden channels. The second head weighs 7, the first 6.
    weights[f"{block}heads.weight"] = torch.tensor([[[1.0, -1], [1, 1], [1, 0]], [[2.0, 0], [0, 0], [0, -2]]])
    weights[f"{block}merge.weight"] = torch.tensor([[[0.0, 1.0]], [[3.0, 0.0]]])
    weights[f"{block}heads.bias"] = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    # The hidden channels weigh 3 + 1 and 1 + 2, and stay.
    weights[f"{block}hidden.weight"] = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    weights[f"{block}out.weight"] = torch.tensor([[0.0, 2.0], [1.0, 0.0]])
    after = space.with_sorted_channels(weights)
    assert after[f"{block}heads.bias"].tolist() == [[4, 5, 6], [1, 2, 3]]
    assert after[f"{block}merge.weight"].tolist() == [[[3, 0]], [[0, 1]]]
    assert after[f"{block}heads.weight"][0].tolist() == [[2, 0], [0, 0], [0, -2]]
    for name in ("hidden.weight", "hidden.bias", "out.weight", "merge.bias", "norm1.weight"):
        assert torch.equal(after[f"{block}{name}"], weights[f"{block}{name}"]), name


def test_the_importance_of_a_weight_normed_channel_is_its_magnitude_whatever_the_length_of_its_direction() -> None:
    space = elastic(TCN)
    weights = space.initial_weights(torch_stream(2, "test"))
    magnitude, direction, leaving = (
        weights[f"stages.0.0.{name}"] for name in ("conv1.magnitude", "conv1.direction", "conv2.direction")
    )
    leaving.fill_(1.0)
    direction /= direction.square().sum(dim=(1, 2), keepdim=True).sqrt()
    magnitude.copy_(torch.arange(len(magnitude)).view(-1, 1, 1))
    direction *= 10.0**-magnitude
    after = space.with_sorted_channels(weights)["stages.0.0.conv1.magnitude"]
    assert after.flatten().tolist() == [*range(len(magnitude))][::-1]


# -- taught subnets ---------------------------------------------------------------------------------------------------


def stepped(
    space: ElasticSpace, weights: dict[str, Tensor], drawn: list[Architecture], x: Tensor, y: Tensor, teaching: float
) -> dict[str, Tensor]:
    """The supernet after a step of rate .5 on all samples, in float64, along these subnets."""
    supernet, teacher = space.build_supernet().double().train(), space.build_subnet(space.largest).double().eval()
    supernet.load_state_dict({name: t for name, t in weights.items() if not name.startswith(TEACHER)})
    teacher.load_state_dict({name.removeprefix(TEACHER): t for name, t in weights.items() if name.startswith(TEACHER)})
    target = teacher(x.double()).softmax(1).detach()
    for architecture in drawn:
        outputs = supernet(x.double(), architecture)
        soft = F.kl_div(outputs.log_softmax(1), target, reduction="batchmean")
        (F.cross_entropy(outputs, y) + teaching * soft).backward()  # type: ignore[no-untyped-call]
    after = {name: tensor.double() for name, tensor in supernet.named_buffers()}
    for name, parameter in supernet.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        after[name] = parameter.detach() - 0.5 * gradient
    return after


def test_two_rounds_are_those_of_a_reference_in_float64(ofa_config: Make, begun: Any) -> None:
    """Round 0 trains the full network, which then teaches; channels are sorted; round 1 trains two subnets a batch."""
    config = ofa_config("batch", batch_size=1000, lr=0.5, subnets_per_batch=[1, 2], teaching=0.7, weighting="plain")
    stepper, world = begun(config), build_world(config)
    space, worker = elastic(config.space), Worker(build_world(config).spec)
    size, macs = (table.cost(space.largest) for table in (space.cost_table("bytes"), world.macs_table))
    weights = {name: tensor.double() for name, tensor in stepper.state.weights("supernet").items()}
    for round_ in range(2):
        stepper.step()
        results, assignments = stepper.results[round_].client_results, stepper.plans[round_].assignments
        parts = []
        for assignment, result in zip(assignments, results, strict=True):
            task, (x, y) = assignment.task, worker.client_data(assignment.client_id, "train")
            full = round_ == 0
            teacher = {f"{TEACHER}{n}": t for n, t in weights.items() if not n.startswith(TEACHER)} if full else {}
            drawn = [space.largest] if full else list(islice(task.network._draws(worker, assignment), 2))
            parts.append(stepped(space, {**weights, **teacher}, drawn, x, y, 0.0 if full else 0.7))
            counted = task.account(worker, assignment)
            assert (counted.macs, counted.bytes_down) == (result.macs, result.bytes_down)
            assert (result.bytes_down, result.bytes_up) == (size if full else 2 * size, size)
            assert result.forward_macs == (0 if full else macs * len(y))
            assert result.macs == sum(world.macs_table.cost(a) for a in drawn) * len(y) + result.forward_macs
        mean = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
        ours = stepper.state.weights("supernet")
        if round_ == 0:
            for name, tensor in mean.items():
                torch.testing.assert_close(ours[f"{TEACHER}{name}"].double(), tensor.double(), rtol=1e-4, atol=1e-6)
            mean = {**space.with_sorted_channels(mean), **{f"{TEACHER}{name}": t for name, t in mean.items()}}
        else:
            mean |= {name: tensor for name, tensor in weights.items() if name.startswith(TEACHER)}
        assert ours.keys() == mean.keys()
        for name, tensor in mean.items():
            if "tracked" not in name:
                torch.testing.assert_close(ours[name].double(), tensor, rtol=1e-4, atol=1e-6, msg=name)
        weights = mean
    assert not any(name.startswith(TEACHER) for name in stepper.finish().state.weights("supernet"))


# -- limits -----------------------------------------------------------------------------------------------------------


def final_weights(config: RunConfig, train_in_memory: Any) -> dict[str, Tensor]:
    return dict(train_in_memory(config).state(config.method.train.rounds - 1).weights("supernet"))


def test_the_last_phase_alone_is_superfednas_multi_stage(ofa_config: Make, train_in_memory: Any) -> None:
    config = ofa_config("batch", full_share=0.0, teaching=0.0, clip_norm=1.0)
    train = ElasticTrainingConfig(rounds=3, clients_per_round=4, epochs=1, batch_size=16, evaluate_every=0)
    train = replace(train, travels="supernet", shrinking=ShrinkingConfig(4, 0.0), epochs=config.method.train.epochs)
    theirs = SuperFedNASConfig(train=replace(train, lr=config.method.train.lr), search=TargetSearchConfig(samples=0))
    ours, expected = (final_weights(each, train_in_memory) for each in (config, replace(config, method=theirs)))
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())


def test_the_first_phase_alone_is_fedavg_of_the_largest(ofa_config: Make, train_in_memory: Any) -> None:
    config = ofa_config("batch", full_share=1.0, clip_norm=1.0)
    train = ElasticTrainingConfig(rounds=3, clients_per_round=4, batch_size=16, evaluate_every=0)
    train = replace(train, epochs=config.method.train.epochs, lr=config.method.train.lr)
    train = replace(train, distribution=DistributionConfig("static"), shares=SharesConfig("overlap"))
    theirs = SuperFedNASConfig(family=["largest"], train=train, search=TargetSearchConfig(samples=0))
    ours, expected = (final_weights(each, train_in_memory) for each in (config, replace(config, method=theirs)))
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())


# -- runs and refusals ------------------------------------------------------------------------------------------------


def test_one_client_with_all_data_is_centralised(ofa_config: Make, run_in_memory: Any) -> None:
    config = ofa_config(clients_per_round=1, rounds=12, space={"coupled": True}, lr=0.2)
    config = replace(config, data=replace(config.data, num_clients=1), tiers=replace(config.tiers, count=1))
    world, memory, _ = run_in_memory(config)
    clients, rounds = memory.table("clients"), memory.table("rounds")
    assert set(clients[clients["stage"] == "supernet"]["samples"]) == {int(world.data.sizes("train").sum())}
    losses = rounds[rounds["stage"] == "supernet"]["loss"]
    assert losses.iloc[4] < losses.iloc[0]
    assert losses.iloc[-1] < losses.iloc[5]


def test_the_teacher_gets_no_noise_of_private_training(ofa_config: Make, begun: Any) -> None:
    pytest.importorskip("dp_accounting")
    privacy = PrivacyConfig(clip=1.0, noise=1.0)
    stepper = begun(ofa_config(privacy=privacy, weighting="plain"))
    stepper.step()
    before = {name: t for name, t in stepper.state.weights("supernet").items() if name.startswith(TEACHER)}
    stepper.step()
    after = stepper.state.weights("supernet")
    assert before
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"full_share": 0.7, "depth_share": 0.6}, r"full_share=0.7 and depth_share=0.6 .* at most 1"),
        ({"full_share": 0.0}, r"method.train.teaching=1 needs method.train.full_share above 0"),
        ({"subnets_per_batch": [4]}, r"method.train.subnets_per_batch=\[4\]: give two, one for opening depths and"),
        (
            {"space": {"coupled": True}, "depth_share": 0.3},
            r"depth_share=0.3: with space.coupled=true widths open with",
        ),
        (
            {"optimizer_state": "kept"},
            r"=kept: ofa sorts channels between rounds \(sort_channels=true\), so the state",
        ),
        (
            {"server": "fedavgm"},
            r"server=fedavgm: ofa sorts channels between rounds .* so what rules keep would",
        ),
        (
            {"sort_channels": False, "local_rule": "scaffold", "options": {"option": 1}},
            r"local_rule=scaffold with these options needs the gradient of one network, but clients train another one",
        ),
        ({"processors": ["top_k"]}, r"processors: ofa sorts channels between rounds .* what top_k has not yet sent"),
        ({"asynchronous": "fedbuff", "arrivals": 2}, r"asynchronous=fedbuff: ofa sorts channels .* from older weights"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(ofa_config: Make, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build_stages(build_world(ofa_config(**change)))
    assert "\n" not in str(caught.value)


def test_other_spaces_are_refused(tiny_config: Make) -> None:
    with pytest.raises(
        ValueError, match=r"ofa cannot use space cnn_digits, which has no .*with_sorted_channels; choose"
    ):
        check_space(OFAConfig(), build_world(tiny_config()).space)
