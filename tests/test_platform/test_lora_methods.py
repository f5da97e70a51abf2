"""HetLoRA, FlexLoRA, FLoRA: rounds in literal numbers and by a dense reference, bytes, limits, refusals."""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.platform.averaging.average import Update, WeightedSums
from fedloom.platform.clients.assignments import Assignment, places_of
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import AttackConfig, RunConfig, TiersConfig
from fedloom.platform.federation.training_config import PrivacyConfig, TrainingConfig
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.flexlora import FlexLoRAConfig, empty_products, redistributed, with_products
from fedloom.platform.methods.flora import FLoRAConfig, merged, with_fresh_adapters
from fedloom.platform.methods.heterofl import HeteroFLConfig
from fedloom.platform.methods.hetlora import HetLoRAConfig, Pruning, cut, padded, pruned, weighed_by_norms
from fedloom.platform.methods.registry import build_stages, check_space
from fedloom.platform.methods.tier_models import WidthConfig
from fedloom.platform.runs.dry_run import is_countable
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.capabilities import Pair
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import Slice, leading
from fedloom.platform.spaces.space_config import LoraConfig, SpaceConfig

Make = Callable[..., RunConfig]
METHODS = (HetLoRAConfig, FlexLoRAConfig, FLoRAConfig)
PAIR = Pair("up", "down", "merged")
INS, OUTS = 64, 12


def perceptron(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A user's network, whose weights are torch's own."""
    layers = [nn.Flatten(), nn.Linear(math.prod(input_shape), OUTS), nn.ReLU(), nn.Linear(OUTS, num_classes)]
    return nn.Sequential(OrderedDict(zip(("flat", "body", "relu", "head"), layers, strict=True)))


@pytest.fixture
def config_of(tiny_config: Make) -> Make:
    """Makes runs of 8 clients in tiers of a rank each."""

    def make(kind: type[WidthConfig], train: dict[str, Any] | None = None, **method: Any) -> RunConfig:
        ranks = method.pop("ranks", [2, 4, 6])
        lora = LoraConfig(ranks=ranks, layers=["body"], trained=["head.*"], alpha=9.0, merged=kind is FLoRAConfig)
        space = SpaceConfig("module", build=f"{__name__}:perceptron", input_shape=[1, 8, 8], lora=lora)
        macs = build_space(space).cost_table("macs")
        owners = [i * len(ranks) // 8 for i in range(8)]
        tiers = TiersConfig(count=len(ranks), clients=owners, upper_bounds=[macs.cost((i,)) for i in range(len(ranks))])
        training = TrainingConfig(**{"rounds": 2, "clients_per_round": 5, "batch_size": 16, "lr": 0.1, **(train or {})})
        return tiny_config(method=kind(train=training, **method), space=space, tiers=tiers)

    return make


def sent(up: list[list[float]], down: list[list[float]], weight: float, rank: int, **more: Tensor) -> Update:
    """What a client sends of one layer, of which the largest rank is given."""
    tensors = {"up": torch.tensor(up), "down": torch.tensor(down), **more}
    whole = {"up": (len(up), rank), "down": (rank, len(down[0]))}
    slices = {name: leading(name, tuple(t.shape), whole.get(name, tuple(t.shape))) for name, t in tensors.items()}
    return Update(tensors, slices, dict.fromkeys(tensors, weight))


def summed(old: dict[str, Tensor], *updates: Update) -> dict[str, Tensor]:
    sums = WeightedSums()
    for update in updates:
        sums.add(update)
    return sums.finish(old).weights


def trained_alone(world: World, assignment: Assignment, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a client's own B and A are after training, before anything is made of them."""
    task = assignment.task
    assert isinstance(task, Train)
    result = Train(task.network, task.local, task.weighting).run(Worker(world.spec), assignment, weights)
    assert result.update is not None
    return {name: tensor.detach().clone() for name, tensor in result.update.tensors.items()}


# -- FlexLoRA ---------------------------------------------------------------------------------------------------------


def test_flexlora_in_numbers() -> None:
    old = {"up": torch.zeros(2, 2), "down": torch.ones(2, 2)}
    first = sent([[2.0], [0.0]], [[2.0, 0.0]], 1.0, rank=2)
    second = sent([[1.0, 0.0], [0.0, 2.0]], [[0.0, 0.0], [0.0, 1.0]], 3.0, rank=2)
    start = {**old, **empty_products(old, [PAIR])}
    after = redistributed(summed(start, *(with_products(update, [PAIR]) for update in (first, second))), [PAIR])
    # (1 [[4, 0], [0, 0]] + 3 [[0, 0], [0, 2]]) / 4, whose larger singular value is 1.5.
    torch.testing.assert_close(after["up"] @ after["down"], torch.tensor([[1.0, 0.0], [0.0, 1.5]]))
    torch.testing.assert_close(after["up"][:, :1] @ after["down"][:1], torch.tensor([[0.0, 0.0], [0.0, 1.5]]))
    torch.testing.assert_close(after["down"].norm(dim=1), torch.ones(2))
    assert not after["product/down"].any(), "the next round's sum begins empty"
    again = redistributed({**after}, [PAIR])
    assert torch.equal(again["up"], after["up"]), "a round without updates leaves the adapters as they are"
    assert torch.equal(again["down"], after["down"])


@pytest.mark.parametrize("ranks", [[2, 4, 6], [3, OUTS]])
def test_flexlora_cuts_the_mean_of_products_to_every_rank(config_of: Make, step_through: Any, ranks: list[int]) -> None:
    world = build_world(config_of(FlexLoRAConfig, ranks=ranks))
    steps = step_through(world, build_stages(world)[0], RunState())
    for _ in range(2):
        before = dict(steps.state.weights("supernet"))
        steps.step()
        dense, head, total = np.zeros((OUTS, INS)), np.zeros((10, OUTS)), 0
        for assignment in steps.plans[-1].assignments:
            own, samples = trained_alone(world, assignment, before), assignment.train_samples
            dense += samples * (own["body.lora_B"].double() @ own["body.lora_A"].double()).numpy()
            head += samples * own["head.weight"].double().numpy()
            total += samples
        after = steps.state.weights("supernet")
        left, values, right = np.linalg.svd(dense / total, full_matrices=False)
        for rank in ranks:
            ours = after["body.lora_B"][:, :rank].double() @ after["body.lora_A"][:rank].double()
            best = (left[:, :rank] * values[:rank]) @ right[:rank]
            np.testing.assert_allclose(ours, best, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(after["head.weight"], head / total, rtol=1e-5, atol=1e-6)
    if ranks[-1] == OUTS:
        np.testing.assert_allclose(ours, dense / total, rtol=1e-5, atol=1e-6, err_msg="of full rank nothing is lost")


# -- HetLoRA ----------------------------------------------------------------------------------------------------------


def test_hetlora_in_numbers() -> None:
    old = {"up": torch.full((2, 2), 9.0), "down": torch.full((2, 1), 9.0), "head": torch.zeros(1)}
    # ||B A|| is 2 for the first client and 6 for the second one.
    first = sent([[2.0], [0.0]], [[1.0]], 10.0, rank=2, head=torch.tensor([1.0]))
    second = sent([[0.0, 0.0], [1.0, 2.0]], [[2.0], [2.0]], 30.0, rank=2, head=torch.tensor([2.0]))
    updates = [padded(weighed_by_norms(update, [PAIR], 1.0), [PAIR], 2) for update in (first, second)]
    after = summed(old, *updates)
    torch.testing.assert_close(after["up"], torch.tensor([[0.5, 0.0], [0.75, 1.5]]))
    torch.testing.assert_close(after["down"], torch.tensor([[(2 + 12) / 8], [12 / 8]]))
    torch.testing.assert_close(after["head"], torch.tensor([1.75])), "by samples"
    shorter = cut(second, [PAIR], 1)
    assert weighed_by_norms(shorter, [PAIR], 0.5).weights == {"up": 1.0, "down": 1.0, "head": 30.0}
    assert shorter.slices["up"] == Slice("up", ((0, 2), (0, 1)))


def test_a_rank_is_pruned_to_the_largest_that_is_not_above_its_share() -> None:
    ranks = (2, 4, 7, 8)
    assert [pruned(ranks, option, 0.5) for option in range(4)] == [None, 0, 0, 1]
    assert [pruned(ranks, option, 0.9) for option in range(4)] == [None, 0, 1, 2]
    assert [pruned(ranks, option, 1.0) for option in range(4)] == [None] * 4


def test_what_would_be_pruned_is_in_the_loss(config_of: Make) -> None:
    world = build_world(config_of(HetLoRAConfig, penalty=0.5))
    stage = build_stages(world)[0]
    plan, worker = stage.plan(stage.begin(RunState())), Worker(world.spec)
    networks = {a.tier: (a.task.network, a) for a in plan.assignments}  # type: ignore[attr-defined]
    assert type(networks["tier1"][0]).__name__ == "Subnet", "the smallest rank prunes nothing"
    pruning, assignment = networks["tier2"]
    assert isinstance(pruning, Pruning)
    network = pruning.on(worker, assignment)
    with torch.no_grad():
        for name, value in (("body.lora_B", 2.0), ("body.lora_A", 3.0)):
            worker.tensors_of(network.module)[name].fill_(value)
    logits, targets = torch.zeros(4, 10, requires_grad=True), torch.zeros(4, dtype=torch.int64)
    assert network.loss is not None
    value = network.loss(Objective(), logits, targets)
    # Rank 4 would become 2: the norms are those of 2 columns of 12 and 2 rows of 64.
    expected = math.log(10) + 0.5 * (2 * math.sqrt(24)) * (3 * math.sqrt(128))
    assert value.item() == pytest.approx(expected, rel=1e-6)


def test_a_client_whose_tail_shrinks_sends_and_gets_a_smaller_rank_from_then_on(
    config_of: Make, run_in_memory: Any
) -> None:
    train = {"rounds": 5, "clients_per_round": None}
    _, memory, _ = run_in_memory(config_of(HetLoRAConfig, train, penalty=2.0))
    clients = memory.table("clients").query("stage == 'supernet'")
    assert set(clients["status"]) == {"ok"}
    size = {i: 4 * (rank * (INS + OUTS) + 10 * OUTS + 10) for i, rank in enumerate((2, 4, 6))}
    option = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1, 6: 2, 7: 2}
    smaller, cuts = {2: 0, 1: 0}, 0
    for row in clients.itertuples():
        assert row.architecture == str(option[row.client_id])
        assert row.bytes_down == size[option[row.client_id]]
        if row.bytes_up < row.bytes_down:
            option[row.client_id], cuts = smaller[option[row.client_id]], cuts + 1
        assert row.bytes_up == size[option[row.client_id]]
    assert cuts == 5, "all but the smallest"
    assert clients.query("round == 0")["bytes_up"].equals(clients.query("round == 0")["bytes_down"]), "B was zero"


@pytest.mark.parametrize("chosen", ["attack", "selection"])
def test_clients_prune_their_ranks_under_attacks_and_when_a_rule_has_them_send_less(
    config_of: Make, run_in_memory: Any, chosen: str
) -> None:
    if chosen == "attack":
        config = config_of(HetLoRAConfig, {"rounds": 4, "clients_per_round": None}, penalty=2.0)
        config = replace(config, attack=AttackConfig(share=0.5, name="sign_flip"))
    else:
        config = config_of(HetLoRAConfig, {"rounds": 4, "selection": "pyramidfl"}, penalty=2.0)
    _, memory, _ = run_in_memory(config)
    clients = memory.table("clients").query("stage == 'supernet'")
    assert set(clients["status"]) == {"ok"}
    ranks = clients.groupby("client_id")["architecture"].nunique()
    assert (ranks > 1).any()


def test_hetlora_is_counted_and_ordered_before_it_trains_only_if_nobody_prunes(config_of: Make, refused: Any) -> None:
    for decay in (0.5, 1.0):
        assert is_countable(build_stages(build_world(config_of(HetLoRAConfig, decay=decay)))[0]) == (decay == 1)
    over_selection = refused(config_of(HetLoRAConfig, {"arrivals": 2}))
    assert over_selection.startswith("method.train.arrivals=2: how many ranks hetlora's clients send is known only")


def test_hetlora_of_one_rank_without_pruning_and_norms_is_fedavg(config_of: Make, run_in_memory: Any) -> None:
    states = []
    for config in (config_of(HetLoRAConfig, ranks=[4], norm_weights=False), config_of(HeteroFLConfig, ranks=[4])):
        _, memory, _ = run_in_memory(config)
        states.append(memory.state(1).weights("supernet"))
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


# -- FLoRA ------------------------------------------------------------------------------------------------------------


def test_flora_in_numbers() -> None:
    old = {"merged": torch.ones(1, 2), "up": torch.zeros(1, 2), "down": torch.ones(2, 2)}
    first = sent([[2.0]], [[1.0, 3.0]], 1.0, rank=2, merged=torch.ones(1, 2))
    second = sent([[1.0, 1.0]], [[0.0, 4.0], [8.0, 0.0]], 3.0, rank=2, merged=torch.ones(1, 2))
    after = summed(old, *(merged(update, [PAIR], 0.5) for update in (first, second)))
    # Stacked, A's rows of the first client times 1/4 and of the second one times 3/4.
    stack = torch.tensor([[2.0, 1.0, 1.0]]) @ torch.tensor([[0.25, 0.75], [0.0, 3.0], [6.0, 0.0]])
    torch.testing.assert_close(after["merged"], 1 + 0.5 * stack)
    torch.testing.assert_close(after["merged"], torch.tensor([[4.25, 3.25]]))
    assert torch.equal(after["up"], old["up"])


def test_floras_base_is_that_of_all_clients_products(config_of: Make, step_through: Any) -> None:
    world = build_world(config_of(FLoRAConfig))
    steps, drawn = step_through(world, build_stages(world)[0], RunState()), list[bytes]()
    expected = np.zeros((OUTS, INS))
    for round_ in range(2):
        before = dict(steps.state.weights("supernet"))
        steps.step()
        dense, total = np.zeros((OUTS, INS)), 0
        for assignment in steps.plans[-1].assignments:
            generator = torch_stream(world.spec.training_seed, "adapters", *places_of(assignment))
            fresh = with_fresh_adapters(before, assignment.task.pairs, generator)
            assert not fresh["body.lora_B"].any()
            assert 0.9 / 8 < fresh["body.lora_A"].abs().max() <= 1 / 8
            drawn.append(fresh["body.lora_A"].numpy().tobytes())
            own, samples = trained_alone(world, assignment, fresh), assignment.train_samples
            dense += samples * (own["body.lora_B"].double() @ own["body.lora_A"].double()).numpy()
            total += samples
        expected += 1.5 * dense / total
        after = steps.state.weights("supernet")
        np.testing.assert_allclose(after["body.lora_merged"], expected, rtol=1e-5, atol=1e-6, err_msg=str(round_))
        assert not after["body.lora_B"].any()
    assert len(set(drawn)) == len(drawn), "every client draws its own in every round"


def test_floras_bytes_are_adapters_up_and_missed_stacks_down(config_of: Make, run_in_memory: Any) -> None:
    _, memory, _ = run_in_memory(config_of(FLoRAConfig, {"rounds": 7, "clients_per_round": 2}))
    clients = memory.table("clients").query("stage == 'supernet'")
    assert set(clients["status"]) == {"ok"}
    head, dense = 4 * (10 * OUTS + 10), 4 * INS * OUTS
    rank_of = {f"tier{i + 1}": rank for i, rank in enumerate((2, 4, 6))}
    stacks, since = list[int](), dict[int, int]()
    caps = 0
    for round_, rows in clients.groupby("round"):
        for row in rows.itertuples():
            missed = sum(stacks[since.get(row.client_id, 0) :])
            caps += missed > dense
            assert row.bytes_down == head + min(missed, dense)
            assert row.bytes_up == head + 4 * rank_of[row.tier] * (INS + OUTS)
        stacks.append(sum(4 * rank_of[tier] * (INS + OUTS) for tier in rows["tier"]))
        since.update(dict.fromkeys(rows["client_id"], round_))
    assert caps, "after some rounds the sum itself is smaller"


# -- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", METHODS)
def test_they_learn_and_leave_a_model_per_tier(config_of: Make, run_in_memory: Any, kind: type[WidthConfig]) -> None:
    world, memory, _ = run_in_memory(
        config_of(kind, {"rounds": 8, "evaluate_every": 4, "lr": 0.3 if kind is FLoRAConfig else 0.1})
    )
    clients = memory.table("clients")
    assert set(clients["status"]) == {"ok"}
    trained = clients.query("stage == 'supernet'")
    assert trained["loss"].iloc[-5:].mean() < 0.9 * trained["loss"].iloc[:5].mean()
    models = {m.name: m.tensors for record in memory.records for _, m in record.models}
    for i, tier in enumerate(world.tiers):
        expected = {name: p.of(torch.empty(world.space.initial_weights(torch.Generator())[name].shape)).shape
                    for name, p in world.space.slices((i,)).items()}  # fmt: skip
        assert {name: t.shape for name, t in models[f"{tier.name}-{kind().name}"].items()} == expected


@pytest.mark.parametrize("kind", METHODS)
def test_what_they_cannot_use_is_refused(config_of: Make, refused: Callable[[RunConfig], str], kind: type[Any]) -> None:
    name = kind().name
    with pytest.raises(
        ValueError, match=rf"{name} cannot use space cnn_digits, which has no pairs, ranks, adapter_scale; choose space"
    ):
        check_space(kind(), build_space(SpaceConfig()))
    private = config_of(kind, {"weighting": "plain", "privacy": PrivacyConfig(clip=1.0, noise=1.0)})
    assert refused(private).startswith("method.train.privacy: ")
    if kind is HetLoRAConfig:
        sparse = config_of(kind, {"processors": ["sparsify"]})
        assert "hetlora's clients cut off ranks from what they send: set method.decay=1" in refused(sparse)
        for rule in ("fednova", "feddyn"):
            of_server = config_of(kind, {"local_rule": rule, "server": rule})
            assert refused(of_server).startswith(
                f"method.train.local_rule={rule}: its server rule would take the zeros"
            )
        bounded = refused(config_of(kind, {"aggregator": "norm_bound", "options": {"bound": 1.0}}))
        assert bounded.startswith("method.train.aggregator=norm_bound: it would take the zeros that hetlora adds to")
        whole = refused(config_of(kind, {"weighting": "fedavg_whole"}))
        assert "old values would count with samples, adapters with the norms of B A: set method.norm_weights=" in whole
    else:
        assert f"{name} " in refused(config_of(kind, {"server": "fedadam"}))
        assert f"{name} " in refused(config_of(kind, {"optimizer_state": "kept"}))
        assert "what top_k has not yet sent would not fit" in refused(config_of(kind, {"processors": ["top_k"]}))
        colluding = replace(config_of(kind), attack=AttackConfig(share=0.5, name="inner_product"))
        assert f"colluders change what is averaged, but {name} averages products" in refused(colluding)
        both_ways = config_of(kind, {"processors": ["qsgd"], "options": {"direction": "both"}})
        assert f"method.train.options.direction=both: {name}'s clients receive the adapters of" in refused(both_ways)
    late = {"asynchronous": "fedbuff", "arrivals": 2}
    if kind is HetLoRAConfig:
        build_stages(build_world(config_of(kind, late, decay=1.0)))
    else:
        assert "the adapters after every round, so answers from older weights would not fit" in refused(
            config_of(kind, late)
        )
    if kind is FlexLoRAConfig:
        bounded = config_of(kind, {"aggregator": "norm_bound", "options": {"bound": 1.0}})
        assert refused(bounded).startswith("method.train.aggregator=norm_bound: flexlora's server averages products of")
    if kind is FLoRAConfig:
        config = config_of(kind)
        without = replace(config, space=replace(config.space, lora=replace(config.space.lora, merged=False)))
        assert "a sum per layer, which the network must hold: set space.lora.merged=true" in refused(without)
