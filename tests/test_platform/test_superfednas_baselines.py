"""SuperFedNAS's baselines: the whole supernet travels and is shrunk on the clients, or each member is trained alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.scoring import ScoreSubnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.superfednas import DistributionConfig, Shrinking, ShrinkingConfig, group_of
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.slices import Slice, architecture_id, bytes_of

Make = Callable[..., RunConfig]


def space_of(world: World) -> ElasticSpace:
    assert isinstance(world.space, ElasticSpace)
    return world.space


# -- the whole supernet travels ---------------------------------------------------------------------------------------


def test_the_whole_supernet_travels_and_widths_shrink_later(elastic_config: Make, results_of: Any) -> None:
    train = {"rounds": 4, "travels": "supernet", "shrinking": ShrinkingConfig(2, 0.5), "evaluate_every": 0}
    config = elastic_config("batch", train=train)
    results = results_of(config)
    world = results.world
    rows, space = results.clients("supernet"), space_of(world)
    assert set(rows["bytes_down"]) == set(rows["bytes_up"]) == {space.cost_table("bytes").cost(space.largest)}
    assert set(rows["parameters"]) == {space.cost_table("parameters").cost(space.largest)}
    assert set(rows["architecture"]) == {None}
    # Two subnets per batch cost at most twice the largest and at least twice the smallest.
    per_sample = rows["macs"] / (rows["samples"] * 2 * 2)
    assert per_sample.max() < world.macs_table.largest
    assert per_sample.min() > world.macs_table.smallest
    stage = build_stages(world)[0]
    state = stage.begin(RunState())
    networks = [stage.plan(replace(state, round=r)).assignments[0].task.network for r in range(4)]  # type: ignore[attr-defined]
    assert networks == [Shrinking(2, True)] * 2 + [Shrinking(2, False)] * 2


@pytest.mark.parametrize("widest", [True, False])
def test_shrinking_adds_up_the_gradients_of_the_drawn_subnets(elastic_config: Make, widest: bool) -> None:
    world = build_world(elastic_config())
    space, worker = space_of(world), Worker(world.spec)
    weights = space.initial_weights(torch_stream(1, "test"))
    local = LocalSGD(epochs=1, batch_size=1000, lr=0.5)
    network = Shrinking(subnets_per_batch=3, widest=widest)
    task = Train(network, local)
    assignment = Assignment("supernet", 0, 3, "tier1", task)
    outcome = task.run(worker, assignment, weights)
    assert outcome.update is not None
    x, y = Worker(world.spec).client_data(3, "train")
    module = space.build_supernet()
    module.load_state_dict(weights)
    module.train()
    draws = network._draws(worker, assignment)
    for _ in range(3):
        torch.nn.functional.cross_entropy(module(x, next(draws)), y).backward()  # type: ignore[no-untyped-call]
    for name, parameter in module.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        expected = weights[name] - 0.5 * gradient
        torch.testing.assert_close(outcome.update.tensors[name], expected, rtol=1e-4, atol=1e-5, msg=name)
    assert outcome.steps == 1
    assert outcome.update.slices["stem.0.weight"] == Slice("stem.0.weight")


# -- each member of the family alone ----------------------------------------------------------------------------------


def test_members_are_trained_separately_from_fresh_weights_of_their_own(elastic_config: Make, results_of: Any) -> None:
    family = ["smallest", "d=1,0 e=1", "largest"]
    config = elastic_config("batch", method={"separately": True, "family": family}, train={"clients_per_round": 2})
    results = results_of(config)
    world = results.world
    space = space_of(world)
    members = [space.parse(text) for text in family]
    names = [f"alone/{architecture_id(m)}" for m in members]
    assert list(dict.fromkeys(results["rounds"].sort_values("stage")["stage"])) == sorted([*names, "evaluation"])
    for member, name in zip(members, names, strict=True):
        rows = results.clients(name)
        assert len(rows) == 4
        assert set(rows["bytes_up"]) == {space.cost_table("bytes").cost(member)}
    models = results["models"].set_index("architecture")
    assert set(models.index) == {architecture_id(m) for m in members}
    evaluations = results["evaluations"]
    final = evaluations[evaluations["stage"] == "evaluation"]
    assert set(final["model"]) == {"alone"}
    assert set(final["architecture"]) == {architecture_id(m) for m in members}


def test_a_member_alone_is_fedavg(elastic_config: Make, begun: Any) -> None:
    config = elastic_config(method={"separately": True, "family": ["d=1,0 e=1"]})
    world, stepper = build_world(config), begun(config)
    member = world.space.parse("d=1,0 e=1")
    group = group_of(member)
    before = dict(stepper.state.weights(group))
    assert bytes_of(before) == space_of(world).cost_table("bytes").cost(member)
    stepper.step()
    tensors: list[tuple[int, dict[str, Tensor]]] = []
    for assignment in stepper.plans[0].assignments:
        if assignment.client_id is not None:
            outcome = assignment.task.run(Worker(world.spec), assignment, before)
            assert outcome.update is not None
            tensors.append((outcome.samples, dict(outcome.update.tensors)))
    total = sum(n for n, _ in tensors)
    for name, tensor in stepper.state.weights(group).items():
        by_hand = sum(n * own[name].double() for n, own in tensors) / total
        torch.testing.assert_close(tensor.double(), by_hand, rtol=1e-5, atol=1e-6, msg=name)


def test_the_server_scores_the_member_itself(elastic_config: Make, begun: Any) -> None:
    stepper = begun(elastic_config(method={"separately": True}), number=1)
    stepper.step()
    (score,) = [a.task for a in stepper.plans[0].assignments if a.client_id is None]
    largest = stepper.stage.world.space.largest
    assert score == ScoreSubnet(Subnet(largest, stand_alone=True), "alone", "validation")
    assert all(r.status == "ok" for r in stepper.results[0].client_results)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_space_without_depths_cannot_be_shrunk(elastic_config: Make, tiny_config: Make) -> None:
    config = replace(elastic_config(train={"travels": "supernet"}), space=tiny_config().space)
    with pytest.raises(ValueError, match=r"travels=supernet cannot use space cnn_digits, .* sample_depth"):
        build_stages(build_world(config))
    config.method.train.shrinking.depth_share = 0.0
    assert build_stages(build_world(config)), "then no depths are drawn"


def test_operators_that_devices_lack_are_refused_as_every_client_may_get_them(
    elastic_config: Make, tiny_config: Make, refused: Callable[[RunConfig], str]
) -> None:
    tiers = replace(tiny_config().tiers, unsupported=["mb(1,2)"])
    config = replace(elastic_config(), space=tiny_config().space, tiers=tiers)
    assert refused(config) == (
        "tiers.unsupported: superfednas gives clients any operator of the space; set "
        "method.train.distribution.tier_aware=true, or remove unsupported ones from space.operators"
    )
    config.method.train.distribution = DistributionConfig(tier_aware=True)
    assert build_stages(build_world(config)), "then nobody gets what it cannot afford"
