"""SplitMix and its spaces: who trains which base nets, two rounds by plain torch, the limit of FedAvg, refusals."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import Round, RunState
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods import fedavg
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.registry import build_stages, check_space
from fedloom.platform.methods.splitmix import BaseNets, SplitMixConfig, sampled_bases
from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.spaces.capabilities import with_bases
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.platform.spaces.split import Mix

Make = Callable[..., RunConfig]
SPACE = SpaceConfig("cnn_split", input_shape=[1, 8, 8], stage_widths=[8, 16], widths=[0.25, 0.5, 1.0], norm="none")
TRAIN = TrainingConfig(rounds=2, clients_per_round=5, batch_size=1000, momentum=0.0)


@pytest.fixture
def split_config(tiny_config: Make) -> Make:
    """Makes runs of 8 clients in 3 tiers of one, two and four base nets; keywords are of the training."""

    def make(*, space: SpaceConfig = SPACE, **train: Any) -> RunConfig:
        config = SplitMixConfig(train=replace(TRAIN, **train))
        tiers = TiersConfig(count=3, clients=[0, 0, 0, 1, 1, 1, 2, 2], upper_bounds=[3200.0, 6400.0, 12800.0])
        return tiny_config(method=config, space=space, tiers=tiers)

    return make


# -- mixes ------------------------------------------------------------------------------------------------------------


def test_a_mix_of_base_nets_has_their_mean_logits() -> None:
    halves = Mix([nn.Linear(1, 2, bias=False), nn.Linear(1, 2, bias=False)])
    for base, rows in zip(halves.bases, ([1.0, 3.0], [5.0, -1.0]), strict=True):
        cast(nn.Linear, base).weight.data = torch.tensor(rows)[:, None]
    single = list[Tensor]()
    assert halves(torch.tensor([[2.0]]), single).tolist() == [[6.0, 2.0]]
    assert [each.tolist() for each in single] == [[[2.0, 6.0]], [[10.0, -2.0]]]


def test_all_parts_of_a_mix_are_in_one_mode_so_that_a_worker_can_change_it() -> None:
    module = build_space(SPACE).build_subnet((1,))
    assert {part.training for part in module.modules()} == {False}


def test_widths_are_numbers_of_base_nets() -> None:
    space = with_bases(build_space(SPACE), "test")
    assert [space.num_bases(a) for a in space.enumerate()] == [1, 2, 4]
    assert [space.label(a) for a in space.enumerate()] == ["nets=1", "nets=2", "nets=4"]
    assert space.parse("nets=2") == (1,)
    sizes = [space.cost_table("parameters").cost(a) for a in space.enumerate()]
    # A base net of 2 and 4 channels: 2 * 9 + 2, 4 * 2 * 9 + 4, 10 * 4 + 10.
    assert sizes == [146, 2 * 146, 4 * 146]
    with pytest.raises(ValueError, match=r"space.widths=\[0.4, 0.9, 1.0\]: 0.9 is no multiple of the base nets' width"):
        build_space(replace(SPACE, widths=[0.4, 0.9, 1.0]))


# -- who trains what --------------------------------------------------------------------------------------------------


def round_of(index: int, *client_ids: int) -> Round:
    return cast(Any, Round)(*[None] * 2, index, None, client_ids, *[None] * 3)


def test_the_first_base_net_goes_round_and_the_others_are_drawn() -> None:
    first = [sampled_bases(3, round_of(i, 7, 9, 11), c, 3, 1, 4)[0] for i in range(8) for c in (7, 9, 11)]
    assert all(sorted(first[i : i + 4]) == [0, 1, 2, 3] for i in range(0, 24, 4)), "every cycle has each base net once"
    assert first[:4] == stream(3, "base_cycle", 0).permutation(4).tolist()
    assert len({tuple(first[i : i + 4]) for i in range(0, 24, 4)}) > 1, "cycles are shuffled anew"
    pairs = Counter(sampled_bases(3, round_of(i, 5), 5, 1, 2, 4) for i in range(600))
    assert len(pairs) == 6
    assert all(a < b for a, b in pairs)
    assert min(pairs.values()) > 60
    assert sampled_bases(3, round_of(2, 5), 5, 1, 4, 4) == (0, 1, 2, 3)
    # Who answers has no say: the cycle goes on by the round's size.
    assert sampled_bases(3, round_of(1, 9), 9, 3, 1, 4) == sampled_bases(3, round_of(1, 9, 11), 9, 3, 1, 4)


def test_two_rounds_are_those_of_plain_torch(split_config: Make, run_in_memory: Any) -> None:
    world, memory, state = run_in_memory(split_config())
    space, worker = with_bases(world.space, "test"), Worker(world.spec)
    shared = space.initial_weights(torch_stream(world.config.seed_for("initialisation"), "supernet"))
    base = cast(Any, space.build_subnet((0,))).bases[0]
    rows = memory.table("clients")
    trained = rows[rows.stage == "supernet"]
    for index, of_round in trained.groupby("round"):
        round_, totals = round_of(index, *of_round.client_id), dict[str, Tensor]()
        weights = Counter[int]()
        for client_id in of_round.client_id:
            x, y = worker.client_data(client_id, "train")
            count = (1, 2, 4)[int(world.tier_of_client[client_id])]
            for number in sampled_bases(world.config.seed_for("training"), round_, client_id, 5, count, 4):
                names = [n for n in shared if n.startswith(f"bases.{number}.")]
                base.load_state_dict({n.split(".", 2)[2]: shared[n] for n in names})
                base.zero_grad()
                F.cross_entropy(base(x), y).backward()  # type: ignore[no-untyped-call]
                weights[number] += len(y)
                for name in names:
                    parameter = base.get_parameter(name.split(".", 2)[2])
                    after = (parameter - 0.1 * parameter.grad).detach()
                    totals[name] = totals.get(name, torch.zeros_like(after)) + len(y) * after
        shared |= {name: total / weights[int(name.split(".")[1])] for name, total in totals.items()}
    final = memory.state(1).weights("supernet")
    for name, tensor in shared.items():
        torch.testing.assert_close(final[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    costs = {f"tier{i + 1}": count for i, count in enumerate((1, 2, 4))}
    for row in trained.itertuples():
        assert row.bytes_up == row.bytes_down == 4 * 146 * costs[row.tier]
        assert row.macs == costs[row.tier] * world.macs_table.cost((0,)) * row.samples
    assert {n: len(state.weights(f"tier{i}-splitmix")) // 6 for i, n in ((1, 1), (2, 2), (3, 4))} == {1: 1, 2: 2, 4: 4}


def test_every_base_net_learns_by_its_own_loss(split_config: Make) -> None:
    world = build_world(split_config())
    worker, space = Worker(world.spec), world.space
    weights = space.initial_weights(torch_stream(5, "test"))
    results = {}
    for bases, mix in (((1,), (0,)), ((1, 3), (1,)), ((0, 1, 2, 3), (2,))):
        task = Train(BaseNets(Subnet(mix), bases), LocalSGD(epochs=1, batch_size=16, lr=0.1, momentum=0.9))
        update = task.run(worker, Assignment("supernet", 0, 7, "tier3", task), weights).update
        assert update is not None
        sent = {piece.source: update.tensors[name].clone() for name, piece in update.slices.items()}
        assert {name.split(".")[1] for name in sent} == set(map(str, bases))
        results[bases] = sent["bases.1.0.weight"]
    assert torch.equal(results[1,], results[1, 3])
    assert torch.equal(results[1,], results[0, 1, 2, 3])
    assert not torch.equal(results[1,], weights["bases.1.0.weight"])


def test_losses_are_float32_in_every_precision(split_config: Make) -> None:
    config = split_config()
    world = build_world(replace(config, executor=replace(config.executor, precision="bfloat16")))
    worker, weights = Worker(world.spec), world.space.initial_weights(torch_stream(5, "test"))
    task = Train(BaseNets(Subnet((1,)), (0, 1)), LocalSGD(epochs=1, batch_size=16, lr=0.1))
    network = task.network.on(worker, Assignment("supernet", 0, 7, "tier3", task))
    worker.load(network.module, weights, network.slices)
    assert network.loss is not None
    x, y = worker.client_data(7, "train")
    assert network.loss(Objective(), network.forward(x), y).dtype == torch.float32


# -- limits and refusals ----------------------------------------------------------------------------------------------


def test_one_base_net_is_fedavg_bit_for_bit(split_config: Make, tiny_config: Make, run_stages: Any) -> None:
    whole = replace(SPACE, widths=[1.0], norm="group")
    config = split_config(space=whole, batch_size=16, momentum=0.9)
    config = replace(config, tiers=TiersConfig(count=1), executor=replace(config.executor, stack_clients="off"))
    split = build_world(config)
    plain = build_world(replace(config, space=replace(whole, name="cnn_width"), method=FedAvgConfig()))

    def shared(world: Any, stage: Any, group: str) -> dict[str, Tensor]:
        return dict(run_stages(world, [stage], RunState())[1].weights(group))

    # Under one name, from which initial values and batches follow.
    average = fedavg.training(FedAvgConfig(train=cast(SplitMixConfig, config.method).train), plain, "supernet")
    one, fed = shared(split, build_stages(split)[0], "supernet"), shared(plain, average, "supernet")
    assert {name.removeprefix("bases.0.") for name in one} == set(fed)
    assert [name for name, tensor in one.items() if not torch.equal(tensor, fed[name.removeprefix("bases.0.")])] == []
    first = split.space.initial_weights(torch_stream(split.config.seed_for("initialisation"), "supernet"))
    assert not torch.equal(one["bases.0.0.weight"], first["bases.0.0.weight"])


def test_other_spaces_are_refused(tiny_config: Make) -> None:
    with pytest.raises(ValueError, match="splitmix cannot use space cnn_digits, which has no num_bases; choose"):
        check_space(SplitMixConfig(), build_world(tiny_config()).space)
