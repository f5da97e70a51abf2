"""FedMask: masks, steps and majorities in literal numbers, two rounds with their bytes, what is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.platform.clients.training import LocalSGD, Optimizer
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.fedmask import (
    FedMaskConfig,
    FedMaskTrainingConfig,
    Mask,
    MaskSteps,
    fresh_mask,
    majority_of,
)
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.silos import unpacked
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.slices import bytes_of
from fedloom.platform.spaces.space_config import SpaceConfig

Make = Callable[..., RunConfig]
SPACE = SpaceConfig("cnn_width", input_shape=[1, 8, 8], stage_widths=[4, 8], widths=[1.0], norm="batch")
TRAIN = FedMaskTrainingConfig(rounds=2, batch_size=12, lr=3.0, clip_norm=0.0, use_validation=False, kept=0.5)
WEIGHTS = {"0.weight": 36, "4.weight": 288, "9.weight": 80}
"""The masked weights, and how many each has."""


@pytest.fixture
def mask_config(silo_config: Make) -> Make:
    """Makes runs of 3 silos; keywords are of the training."""

    def make(**train: Any) -> RunConfig:
        return silo_config(FedMaskConfig(train=replace(TRAIN, **train)), space=SPACE)

    return make


def values(*rows: float) -> Tensor:
    return torch.tensor(rows)


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_scores_take_the_masks_gradient_straight_through() -> None:
    frozen, parameter = {"w": values(2.0, -1.0, 4.0)}, nn.Parameter(torch.zeros(3))
    mask = Mask({"w": values(0.01, 0.01, 0.01)}, {"w": torch.tensor([True, True, False])})
    local = LocalSGD(1, 1, lr=0.1, momentum=0.5)
    steps = MaskSteps(Optimizer(local, {"w": parameter}), frozen, mask, local)
    assert parameter.tolist() == [2.0, -1.0, 0.0], "the third is not kept"

    def step(*gradient: float) -> None:
        parameter.grad = values(*gradient)
        steps.step()

    step(0.5, 0.25, 1.0)  # times w: 1, -.25, and nothing for the third
    assert mask.scores["w"].tolist() == pytest.approx([0.01 - 0.1, 0.01 + 0.025, 0.01])
    assert parameter.tolist() == [0.0, -1.0, 0.0]
    step(-1.0, 0.0, 0.0)  # -2 + .5 * 1 = -1.5, and half of the second's -.25
    assert mask.scores["w"].tolist() == pytest.approx([-0.09 + 0.15, 0.035 + 0.0125, 0.01])
    assert parameter.tolist() == [2.0, -1.0, 0.0]
    assert parameter.grad is None


def test_scores_of_weights_that_no_batch_reaches_stay() -> None:
    frozen = {"reached": values(2.0), "behind a zero operator": values(3.0)}
    parameters = {name: nn.Parameter(torch.zeros(1)) for name in frozen}
    mask, local = fresh_mask(frozen, 0.01), LocalSGD(1, 1, lr=0.1)
    steps = MaskSteps(Optimizer(local, parameters), frozen, mask, local)
    parameters["reached"].grad = values(0.5)
    steps.step()
    assert [mask.scores[name].item() for name in frozen] == pytest.approx([0.01 - 0.1, 0.01])
    assert [parameter.item() for parameter in parameters.values()] == [0.0, 3.0]


def test_a_silo_keeps_the_highest_scores_and_what_the_server_confirms() -> None:
    mask = Mask({"w": values(0.5, -0.2, 0.5, -0.9, 0.5)}, {"w": torch.ones(5, dtype=torch.bool)})
    pruned = mask.pruned(0.4)
    assert pruned.keeps["w"].tolist() == [True, False, True, False, False], "of equal ones the first"
    assert pruned.bits("w").tolist() == [True, False, True, False, False]
    assert mask.pruned(0.01).keeps["w"].sum() == 1
    majority = torch.tensor([1, 1, 0, 0, -1], dtype=torch.int8)
    after = mask.confirmed({"w": majority}, 0.01)
    assert after.scores["w"].tolist() == pytest.approx([0.5, 0.01, -0.01, -0.9, 0.5])
    assert fresh_mask({"w": values(3.0, -3.0)}, 0.02).scores["w"].tolist() == pytest.approx([0.02, 0.02])


def test_bits_are_counted_where_at_least_two_silos_keep_a_weight() -> None:
    # Of four silos that keep a weight 4, 3, 2, 2, 1 and no times, 2, 1, 1, 0, 1 and none use it.
    bits, keeps = values(2, 1, 1, 0, 1, 0) / 4, values(4, 3, 2, 2, 1, 0) / 4
    assert majority_of(bits, keeps, 4).tolist() == [1, 0, 1, 0, -1, -1]


# -- rounds -----------------------------------------------------------------------------------------------------------


def test_two_rounds_send_bits_and_leave_the_network_as_it_is(mask_config: Make, run_in_memory: Any) -> None:
    world, memory, _ = run_in_memory(mask_config())
    drawn = torch_stream(world.config.seed_for("initialisation"), "supernet")
    frozen = world.space.initial_subnet_weights((0,), drawn)
    states = [memory.state(i) for i in range(2)]
    for after in states:
        shared = after.weights("supernet")
        assert all(torch.equal(shared[name], tensor) for name, tensor in frozen.items())
        silos = [dict(after.groups[f"client-{c}"].tensors) for c in range(3)]
        for name, size in WEIGHTS.items():
            keeps = torch.stack([silo[f"keeps/{name}"] for silo in silos])
            assert keeps.flatten(1).sum(dim=1).tolist() == [size / 2] * 3
            bits = torch.stack([silo[f"scores/{name}"] >= 0 for silo in silos]) & keeps
            votes, holders = bits.sum(dim=0), keeps.sum(dim=0)
            expected = torch.where(holders >= 2, (2 * votes >= holders).long(), -1)
            assert torch.equal(shared[f"majority/{name}"].long(), expected)
            for silo, used in zip(silos, bits, strict=True):
                assert torch.equal(unpacked(silo).weights[name], frozen[name] * used)
    first, second = ([dict(s.groups[f"client-{c}"].tensors) for c in range(3)] for s in states)
    assert all(torch.equal(a["keeps/4.weight"], b["keeps/4.weight"]) for a, b in zip(first, second, strict=True))
    assert any(not torch.equal(a["scores/4.weight"], b["scores/4.weight"]) for a, b in zip(first, second, strict=True))
    rows = memory.table("clients")
    trained = rows[rows.stage == "fedmask"].groupby("round")
    masked, kept = sum(WEIGHTS.values()), sum(WEIGHTS.values()) // 2
    traffic = {i: (set(of_round.bytes_down), set(of_round.bytes_up)) for i, of_round in trained}
    assert traffic == {0: ({bytes_of(frozen)}, {-(-masked // 8) - (-kept // 8)}), 1: ({-(-kept // 8)}, {-(-kept // 8)})}
    evaluated = memory.table("evaluations")
    assert set(evaluated.model) == {"personal"}
    assert len(evaluated[(evaluated.split == "test") & (evaluated.metric == "accuracy")]) == 3


def test_a_silo_goes_on_from_its_scores_the_servers_bits_and_its_own_statistics(mask_config: Make) -> None:
    world = build_world(mask_config(lr=1e-30, score=0.25))  # no score moves in training
    stage, worker = build_stages(world)[0], Worker(world.spec)
    state = stage.begin(RunState())
    assignment, shared = stage.plan(state).assignments[0], dict(state.weights("supernet"))
    first = assignment.task.run(worker, assignment, shared)
    assert first.state is not None
    assert first.state["scores/4.weight"].unique().tolist() == [0.25]
    shared["majority/4.weight"] = torch.zeros_like(shared["majority/4.weight"])
    again = replace(assignment, state={name: tensor.clone() for name, tensor in first.state.items()})
    second = again.task.run(worker, again, shared)
    assert second.state is not None
    assert second.state["scores/4.weight"].unique().tolist() == [-0.25]
    assert second.state["scores/9.weight"].unique().tolist() == [0.25]
    assert not unpacked(second.state).weights["4.weight"].any()
    assert first.state is not None
    batches = [unpacked(r.state).weights["1.num_batches_tracked"].item() for r in (first, second) if r.state]
    assert batches == [first.steps, 2 * first.steps]


def test_chosen_layers_are_masked_and_the_others_stay(mask_config: Make, run_in_memory: Any) -> None:
    _, memory, state = run_in_memory(mask_config(masked=["9."], evaluate_every=1))
    silo = dict(state.groups["client-0"].tensors)
    assert [name for name in silo if name.startswith("scores/")] == ["scores/9.weight"]
    assert torch.equal(unpacked(silo).weights["4.weight"], state.weights("supernet")["4.weight"])
    rows = memory.table("evaluations")
    assert len(rows[(rows.split == "validation") & (rows.metric == "accuracy")]) == 2 * 3


def test_what_it_cannot_do_is_refused_in_one_line(mask_config: Make, refused: Callable[[RunConfig], str]) -> None:
    rest = "fedmask's server takes the majority of the silos' bits; use"
    assert refused(mask_config(local_rule="fedprox")) == f"method.train.local_rule=fedprox: {rest} sgd"
    assert refused(mask_config(server="fedadam")) == f"method.train.server=fedadam: {rest} replace"
    assert refused(mask_config(weighting="fedavg")) == f"method.train.weighting=fedavg: {rest} plain"
    assert refused(mask_config(masked=["head"])) == (
        "method.train.masked: no weight of cnn_width of two or more dimensions begins with 'head': they are 0.weight, "
        "4.weight, 9.weight"
    )
    assert refused(mask_config(min_contributors=2)) == f"method.train.min_contributors=2: {rest} 1"
    assert refused(mask_config(kept=0.0)) == "method.train.kept=0.0: must be above 0 and at most 1"
