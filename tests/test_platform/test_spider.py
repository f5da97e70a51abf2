"""SPIDER: the pull towards the shared weights, what stays with a silo, and whole runs on small cells."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedloom.platform.clients.assignments import Assignment, own_copy
from fedloom.platform.clients.local_rules import pull_towards
from fedloom.platform.clients.networks import MixedNetwork
from fedloom.platform.clients.trainer import client_samples, train_network
from fedloom.platform.clients.training import LocalSGD, Optimizer
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.training_config import rules_of
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.silo_search import ArchitectureSearchConfig, Perturbation, is_decided, with_row
from fedloom.platform.methods.silos import Personal, resumed, unpacked
from fedloom.platform.methods.spider import (
    SHARED_MOMENTUM,
    GainConfig,
    SpiderConfig,
    SpiderTrainingConfig,
    TrainSpider,
    stages,
)
from fedloom.platform.results.checkpoint import load_checkpoint
from fedloom.platform.results.paths import find_run
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import make_serial, start_run
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.darts import DartsSpace
from fedloom.platform.spaces.slices import Weights, subspace_id
from fedloom.platform.spaces.space_config import SpaceConfig
from tests.test_platform.test_spaces_operator_choice import tensors_of

Make = Callable[..., RunConfig]

LOCAL = LocalSGD(epochs=1, batch_size=16, lr=0.05, momentum=0.9, clip_norm=5.0)
RULES = rules_of(SpiderTrainingConfig(), "method.train")


@pytest.fixture
def spider_config(tiny_config: Make) -> Callable[..., RunConfig]:
    def make(search: dict[str, object] | None = None, gains: GainConfig | None = None, **train: object) -> RunConfig:
        values = {"rounds": 6, "batch_size": 16, "evaluate_every": 1, **train}
        searching = {"start": 1, "every": 1, **(search or {})}
        config = tiny_config(
            space=SpaceConfig("darts_s2_small", channels=4),
            tiers=TiersConfig(count=1, paths=100),
            method=SpiderConfig(
                train=SpiderTrainingConfig(**values),  # type: ignore[arg-type]
                search=ArchitectureSearchConfig(**searching),  # type: ignore[arg-type]
                gains=gains or GainConfig(),
            ),
        )
        return replace(config, data=replace(config.data, num_clients=3, train_samples=120, validation_share=0.25))

    return make


def run(config: RunConfig) -> tuple[Path, str]:
    run_id = start_run(config, make_serial)
    return Path(config.results), run_id


def shared_weights(world: World) -> dict[str, Tensor]:
    return world.space.initial_weights(torch_stream(1, "supernet"))


def one_round(
    world: World, weights: dict[str, Tensor], pull: float, state: dict[str, Tensor] | None = None
) -> Personal:
    task = TrainSpider(LOCAL, pull, Perturbation(turns=0), RULES)
    outcome = task.run(Worker(world.spec), Assignment("spider", 0, 0, "tier1", task, state=state), weights)
    assert outcome.state is not None
    return unpacked(outcome.state)


# -- what Alg. 1 leaves open -------------------------------------------------------------------------------------------


def test_the_supernets_momentum_is_fresh_or_stays_with_the_silo(spider_config: Make) -> None:
    world = build_world(spider_config())
    weights, worker = shared_weights(world), Worker(world.spec)

    def second_round(keep: bool) -> tuple[Weights, Weights]:
        task = TrainSpider(LOCAL, 0.0, Perturbation(turns=0), RULES, keep_momentum=keep)
        first = task.run(worker, Assignment("spider", 0, 0, "tier1", task), weights)
        assert first.state is not None
        state = own_copy(first.state)
        second = task.run(worker, Assignment("spider", 1, 0, "tier1", task, state=own_copy(state)), weights)
        assert second.update is not None
        return second.update.tensors, {n.removeprefix(SHARED_MOMENTUM): state[n] for n in state if SHARED_MOMENTUM in n}

    def by_hand(momentum: Weights) -> Weights:
        given = Assignment("spider", 1, 0, "tier1", TrainSpider(LOCAL, 0.0, Perturbation(turns=0), RULES))
        network, data = MixedNetwork().on(worker), client_samples(worker, given)
        return train_network(worker, given, network, weights, data, LOCAL, resumed(own_copy(momentum))).copied().tensors

    (fresh, nothing), (kept, momentum) = second_round(False), second_round(True)
    assert (len(nothing), len(momentum)) == (0, len(world.space.parameter_names))
    expected = by_hand({}), by_hand(momentum)
    assert all(torch.equal(fresh[name], expected[0][name]) for name in weights)
    assert all(torch.equal(kept[name], expected[1][name]) for name in weights)
    assert any(not torch.equal(kept[name], fresh[name]) for name in weights)


def test_a_silos_own_network_starts_from_the_shared_weights_or_from_its_own(spider_config: Make) -> None:
    world = build_world(spider_config())
    weights = shared_weights(world)
    first = next(name for name in sorted(world.space.parameter_names) if weights[name].dim() > 1)

    def started(silo: int, own_start: bool) -> Tensor:
        task = TrainSpider(replace(LOCAL, lr=1e-9), 0.0, Perturbation(turns=0), RULES, own_start=own_start)
        outcome = task.run(Worker(world.spec), Assignment("spider", 0, silo, "tier1", task), weights)
        assert outcome.update is not None
        assert outcome.state is not None
        assert torch.allclose(outcome.update.tensors[first], weights[first], atol=1e-5)
        return unpacked(outcome.state).weights[first]

    assert torch.allclose(started(0, own_start=False), weights[first], atol=1e-5)
    own = [started(silo, own_start=True) for silo in (0, 1, 0)]
    assert torch.equal(own[0], own[2])
    assert not torch.allclose(own[0], own[1], atol=1e-3)
    assert not torch.allclose(own[0], weights[first], atol=1e-3)


# -- the pull ---------------------------------------------------------------------------------------------------------


def test_the_pull_adds_its_gradient_with_literal_numbers() -> None:
    parameter = nn.Parameter(torch.tensor([3.0, 1.0]))
    pull = pull_towards(0.2, {"w": torch.tensor([1.0, 2.0])})
    optimizer = Optimizer(LocalSGD(epochs=1, batch_size=1, lr=0.5), {"w": parameter}, pull)
    parameter.grad = torch.tensor([1.0, 0.0])
    optimizer.step()
    # 3 - .5 (1 + .2 (3 - 1)) and 1 - .5 (0 + .2 (1 - 2))
    assert parameter.detach().tolist() == pytest.approx([2.3, 1.1])


def test_a_silo_without_a_pull_is_alone_bit_for_bit(spider_config: Make) -> None:
    world = build_world(spider_config())
    weights = shared_weights(world)
    space = world.space
    assert isinstance(space, DartsSpace)
    begin = Personal(dict(weights), {}, space.largest_subspace).packed()
    other = {n: t + 1.0 if t.is_floating_point() else t for n, t in weights.items()}
    alone, beside = one_round(world, weights, 0.0, begin), one_round(world, other, 0.0, begin)
    assert all(torch.equal(alone.weights[n], beside.weights[n]) for n in alone.weights)
    pulled, elsewhere = one_round(world, weights, 0.5, begin), one_round(world, other, 0.5, begin)
    assert not all(torch.equal(pulled.weights[n], elsewhere.weights[n]) for n in pulled.weights)


def test_only_the_operators_that_are_kept_are_pulled_and_kept(spider_config: Make) -> None:
    world = build_world(spider_config())
    space = world.space
    assert isinstance(space, DartsSpace)
    weights = shared_weights(world)
    kept = with_row(space.largest_subspace, 0, (0,))
    names = space.subspace_slices(kept)
    state = Personal({n: weights[n] for n in names}, {}, kept).packed()
    after = one_round(world, weights, 0.5, state)
    assert set(after.weights) == set(names)
    assert after.remaining == kept
    assert set(after.momentum) <= set(names)
    assert not set(tensors_of(space, (0, 1))) & set(after.weights)


# -- what crosses the boundary ----------------------------------------------------------------------------------------


def test_the_server_receives_the_shared_model_and_nothing_of_the_silos_own(spider_config: Make) -> None:
    world = build_world(spider_config())
    weights = shared_weights(world)
    task = TrainSpider(LOCAL, 0.1, Perturbation(turns=99), RULES, scored=True)
    outcome = task.run(Worker(world.spec), Assignment("spider", 0, 0, "tier1", task), weights)
    assert outcome.update is not None
    assert outcome.state is not None
    own = unpacked(outcome.state)
    assert outcome.update.tensors.keys() == weights.keys()
    for name, tensor in outcome.update.tensors.items():
        mine = own.weights.get(name)
        if mine is not None and tensor.is_floating_point():
            assert tensor.data_ptr() != mine.data_ptr()
    moved = [
        n for n, t in own.weights.items() if n.endswith("weight") and not torch.equal(t, outcome.update.tensors[n])
    ]
    assert moved, "the silo's own model is another one"
    size = sum(t.numel() * t.element_size() for t in weights.values())
    assert (outcome.bytes_down, outcome.bytes_up) == (size, size)


def test_a_state_survives_being_packed() -> None:
    personal = Personal({"a": torch.ones(2)}, {"a": torch.zeros(2)}, ((0, 1), (1,), (), (0,)))
    back = unpacked(personal.packed())
    assert back.remaining == personal.remaining
    assert back.weights["a"].tolist() == [1.0, 1.0]
    assert back.momentum["a"].tolist() == [0.0, 0.0]
    assert [len(back.remaining[decision]) > 1 for decision in range(4)] == [True, False, False, False]
    assert not is_decided(back.remaining)
    assert is_decided(with_row(back.remaining, 0, (1,)))


# -- whole runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs_before() -> dict[int, tuple[Path, str]]:
    """The runs so far, by their rounds: several tests read the same one."""
    return {}


@pytest.fixture
def eight_rounds(spider_config: Make, runs_before: dict[int, tuple[Path, str]]) -> tuple[Path, str]:
    """The results and the id of a run of eight rounds, of which all but the first search."""
    if 8 not in runs_before:
        runs_before[8] = run(spider_config(rounds=8))
    return runs_before[8]


def test_every_silo_ends_with_a_valid_architecture_of_its_own(eight_rounds: tuple[Path, str]) -> None:
    results, run_id = eight_rounds
    clients = read_table(results, "clients", run_id=run_id)
    trained = clients[clients.stage == "spider"]
    assert trained.groupby("round").size().tolist() == [3] * 8
    sixth = trained[trained["round"] == 5].set_index("client_id").subspace
    assert not sixth.str.contains(",").any(), "two nodes have five edges per cell; six rounds of which five search"
    groups = load_checkpoint(find_run(results, run_id).checkpoint).groups
    for client in range(3):
        kept = unpacked(groups[f"client-{client}"].tensors).remaining
        assert all(len(row) == 1 for row in kept)
        assert subspace_id(kept) == sixth[client], "what was found stays"
    rows = read_table(results, "evaluations", run_id=run_id)
    test = rows[(rows.split == "test") & (rows.metric == "accuracy")]
    assert sorted(test.client_id) == [0, 1, 2]
    assert test.value.between(0, 1).all()
    assert read_table(results, "rounds", run_id=run_id).clients_failed.sum() == 0


def test_validation_data_joins_when_nothing_is_left_to_decide(eight_rounds: tuple[Path, str]) -> None:
    results, run_id = eight_rounds
    clients = read_table(results, "clients", run_id=run_id)
    samples = clients[(clients.stage == "spider") & (clients.client_id == 0)].sort_values("round").samples.tolist()
    world_sizes = {samples[0], samples[-1]}
    assert samples == sorted(samples)
    assert len(world_sizes) == 2
    assert samples[4] == samples[0], "the last edges are decided at the beginning of round 5"
    assert samples[5] == samples[-1]


def test_what_cannot_run_is_refused_and_unsearched_edges_are_counted(
    spider_config: Make, tiny_config: Make, caplog: pytest.LogCaptureFixture
) -> None:
    config = spider_config({"every": 3})
    with caplog.at_level(logging.WARNING):
        stages(config.method, build_world(config))
    assert "8 of 10 edges will not be searched before the last round" in caplog.text
    without = replace(config, data=replace(config.data, validation_share=0.0))
    with pytest.raises(ValueError, match=r"validation_share=0 leaves a silo without validation samples"):
        stages(without.method, build_world(without))
    with pytest.raises(ValueError, match=r"^spider cannot use space cnn_digits, .*; choose space.name=darts_s2, "):
        stages(SpiderConfig(), build_world(tiny_config()))


def test_the_three_phases_keep_what_is_needed_and_drop_what_is_useless(spider_config: Make) -> None:
    config = spider_config({"start": 4}, rounds=11, lr=0.05, evaluate_every=0)
    space = replace(config.space, operators=["noise", "sep_conv_3x3"])
    config = replace(config, space=space, data=replace(config.data, train_samples=300, alpha=1000.0))
    results, run_id = run(config)
    clients = read_table(results, "clients", run_id=run_id)
    found: list[str] = []
    for _, rows in clients[clients.stage == "spider"].groupby("client_id"):
        by_round = rows.sort_values("round").subspace.tolist()
        assert by_round[:4] == ["/".join(["0,1"] * 10)] * 4, "first everything is kept"
        undecided_edges = [text.count(",") for text in by_round]
        assert undecided_edges == [10, 10, 10, 10, 8, 6, 4, 2, 0, 0, 0], "then an edge of each cell per round, of ten"
        assert by_round[8] == by_round[9] == by_round[10], "and what was found stays"
        found += by_round[-1].split("/")
    assert len(found) == 30
    # One in fifty searches without any signal would keep 21 convolutions of 30; over seeds it is 16 to 26.
    assert found.count("1") >= 20, f"{found}: noise is of no use, convolutions are"
