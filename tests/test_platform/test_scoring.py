"""Scores of subnets on a real (tiny) federation: they depend on the weights alone, and test data is locked."""

import math
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import nn

from fedloom.platform.clients import scoring
from fedloom.platform.clients.assignments import Assignment, ClientResult, Task
from fedloom.platform.clients.evaluation import estimate_statistics, evaluate
from fedloom.platform.clients.networks import AVERAGED, Subnet
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.scoring import ScoreSubnet, ScoreSubnets
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.dataset import TestReadError
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.fedoras import Paths
from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.operator_choice import Beginnings, OperatorChoiceSpace, PathNetwork
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import Architecture, extract
from fedloom.platform.spaces.space_config import SpaceConfig

LOCAL = LocalSGD(epochs=2, batch_size=16, lr=0.05, momentum=0.9)


class Setting:
    """A worker with weights that its supernet has."""

    def __init__(self, world: World) -> None:
        assert isinstance(world.space, OperatorChoiceSpace)
        self.world, self.space = world, world.space
        self.worker = Worker(world.spec)
        self.weights = world.space.initial_weights(torch_stream(1, "test"))

    def do(self, task: Task, client_id: int | None = 3, worker: Worker | None = None) -> ClientResult:
        return task.run(worker or self.worker, Assignment("train", 0, client_id, "tier1", task), self.weights)


@pytest.fixture
def setting(tiny_config: Callable[..., RunConfig]) -> Setting:
    return Setting(build_world(tiny_config()))


def values(outcome: ClientResult) -> list[float]:
    return [m.value for m in outcome.measurements]


def test_scoring_a_then_b_then_a_gives_a_the_same_score(setting: Setting) -> None:
    a, b = ((0, 1, 2),), ((2, 2, 2),)
    first = values(setting.do(ScoreSubnets(a, "v0"), client_id=None))
    assert values(setting.do(ScoreSubnets(b, "v0"), client_id=None)) != first
    assert values(setting.do(ScoreSubnets(a, "v0"), client_id=None)) == first
    assert values(setting.do(ScoreSubnets(a + b, "v0"), client_id=None))[:2] == first
    # Training overwrites the worker's module: the next scoring must load the weights again.
    setting.do(Train(Paths(((0, 1, 2, 3),) * 3, math.inf), LOCAL))
    assert values(setting.do(ScoreSubnets(a, "v0"), client_id=None)) == first


def test_a_new_version_of_the_weights_is_loaded(setting: Setting) -> None:
    first = values(setting.do(ScoreSubnets(((0, 1, 2),), "v0"), client_id=None))
    setting.weights = setting.space.initial_weights(torch_stream(2, "test"))
    assert values(setting.do(ScoreSubnets(((0, 1, 2),), "v1"), client_id=None)) != first


def test_a_path_scores_as_its_stand_alone_subnet(setting: Setting) -> None:
    for architecture in ((0, 1, 2), (3, 3, 3), (2, 0, 1)):
        path = setting.do(ScoreSubnets((architecture,), "v0"), client_id=None)
        subnet = setting.do(ScoreSubnet(Subnet(architecture), "m", "validation"), client_id=None)
        assert values(path) == pytest.approx(values(subnet), rel=1e-5)


def test_paths_that_begin_alike_score_as_alone_and_compute_their_beginning_once(setting: Setting) -> None:
    paths = ((2, 0, 1), (0, 1, 2), (2, 0, 3), (0, 1, 3), (2, 0, 1))
    alone = [
        value
        for path in paths
        for value in values(setting.do(ScoreSubnets((path,), "v0", statistics=AVERAGED), client_id=None))
    ]
    calls: list[int] = []
    supernet = cast(PathNetwork, setting.worker.supernet)
    for place, layer in enumerate(supernet.layers):
        layer.register_forward_hook(lambda _layer, _inputs, _y, place=place: calls.append(place))
    assert values(setting.do(ScoreSubnets(paths, "v0", statistics=AVERAGED), client_id=None)) == alone
    batches = calls.count(0) // 2
    assert [calls.count(place) for place in range(3)] == [2 * batches, 2 * batches, 4 * batches]


def test_a_beginning_that_was_changed_in_place_is_computed_again() -> None:
    known, x = Beginnings(), torch.ones(2)
    known.begin((1, 2))
    first = known.layer(0, lambda x: x + 1, x)
    first.zero_()
    known.begin((1, 3))
    assert known.layer(0, lambda x: x + 1, x).tolist() == [2.0, 2.0]
    assert known.layer(0, lambda x: x + 9, x).tolist() == [2.0, 2.0]


def test_statistics_of_a_slice_are_estimated_once_for_all_data(
    elastic_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = build_world(elastic_config(norm="batch"))
    worker, weights = Worker(world.spec), world.space.initial_weights(torch_stream(1, "test"))
    paths = tuple(world.space.sample(stream(seed, "test")) for seed in range(3))
    estimated: list[object] = []
    estimate = scoring.estimate_statistics
    monkeypatch.setattr(scoring, "estimate_statistics", lambda m, x: (estimated.append(m), estimate(m, x)))

    def scored(worker: Worker, client_id: int, version: str) -> list[float]:
        task = ScoreSubnets(paths, version, split="train")
        return values(task.run(worker, Assignment("search", 0, client_id, "tier1", task), weights))

    first = [scored(worker, client_id, "v0") for client_id in range(3)]
    assert len(estimated) == len(paths)
    assert first == [scored(Worker(world.spec), client_id, "v0") for client_id in range(3)]
    scored(worker, 0, "v1")
    assert len(estimated) == 5 * len(paths), "of other weights they are others"


def test_more_subnets_than_are_kept_still_work(setting: Setting) -> None:
    architectures = [(i % 4, i // 4, 0) for i in range(12)]
    first = [values(setting.do(ScoreSubnet(Subnet(a), "m", "validation"))) for a in architectures]
    again = [values(setting.do(ScoreSubnet(Subnet(a), "m", "validation"))) for a in architectures]
    assert first == again


# -- the lock on the test set -----------------------------------------------------------------------------------------


def test_a_test_set_that_was_read_is_locked_again(setting: Setting) -> None:
    for client_id in (None, 3):
        task = ScoreSubnet(Subnet((0, 1, 2)), "m", "test")
        with pytest.raises(TestReadError):
            setting.do(task, client_id=client_id)
        with setting.worker.data.reading_test():
            setting.do(task, client_id=client_id)
        with pytest.raises(TestReadError):
            setting.do(task, client_id=client_id)


def test_a_share_of_the_validation_set_is_the_same_for_all_candidates(setting: Setting) -> None:
    half = [setting.do(ScoreSubnets(((0, 1, 2),), "v0", share=0.5), client_id=None) for _ in range(2)]
    assert [o.samples for o in half] == [16, 16]
    assert values(half[0]) == values(half[1])
    other = setting.do(ScoreSubnets(((0, 1, 2),), "v0", share=0.5), client_id=None, worker=Worker(setting.world.spec))
    assert values(other) == values(half[0])


# -- statistics of paths ----------------------------------------------------------------------------------------------


def trained_apart(setting: Setting) -> None:
    """Shared statistics as of other paths: they fit none."""
    generator = torch_stream(3, "test")
    for name, tensor in setting.weights.items():
        if "running" in name:
            tensor.add_(torch.rand(tensor.shape, generator=generator))


def test_a_path_is_scored_with_statistics_of_its_own_on_any_data_and_the_supernet_keeps_its(setting: Setting) -> None:
    """Those of a stand-alone module on the same inputs, bit for bit, whatever is scored beside it."""
    trained_apart(setting)
    paths = ((2, 0, 1), (0, 1, 2), (2, 0, 3))
    module = setting.worker.load_whole(setting.weights, "v0")
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    together = values(setting.do(ScoreSubnets(paths, "v0"), client_id=None))
    assert together == [v for a in paths for v in values(setting.do(ScoreSubnets((a,), "v0"), client_id=None))]
    slices = [setting.do(ScoreSubnet(Subnet(a), "m", "validation"), client_id=None) for a in paths]
    assert together == [value for of_slice in slices for value in values(of_slice)]
    averaged = values(setting.do(ScoreSubnets(paths, "v0", statistics=AVERAGED), client_id=None))
    assert averaged != together
    kept = setting.do(ScoreSubnet(Subnet(paths[0], statistics=AVERAGED), "m", "validation"), client_id=None)
    assert values(kept) == pytest.approx(averaged[:2], rel=1e-5)
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


def test_a_client_estimates_from_its_own_training_data_and_the_passes_are_counted(setting: Setting) -> None:
    trained_apart(setting)
    path = (2, 0, 1)
    task = ScoreSubnets((path,), "v0", sent_bytes=1)
    outcome = setting.do(task, client_id=3)
    module = setting.space.build_subnet(path).eval()
    module.load_state_dict(extract(setting.weights, setting.space.slices(path)))
    own, data = (setting.worker.client_data(3, split) for split in ("train", "validation"))
    estimate_statistics(module, own[0])
    assert outcome.measurements[0].value == pytest.approx(evaluate(module, data, Objective()).loss, rel=1e-5)
    cost = setting.worker.spec.macs_table.cost(path)
    assert outcome.macs == cost * (len(own[1]) + len(data[1]))
    counted = task.account(setting.worker, Assignment("search", 0, 3, "tier1", task))
    assert (counted.macs, counted.bytes_up) == (outcome.macs, outcome.bytes_up)


def test_a_diverged_path_leaves_the_others_scores_alone(setting: Setting) -> None:
    paths = ((0, 1, 2), (2, 0, 1))
    sound = values(setting.do(ScoreSubnets(paths[1:], "v0"), client_id=None))
    for name, tensor in setting.weights.items():
        if name.startswith("layers.0.ops.0.") and tensor.is_floating_point():
            tensor.fill_(math.inf)
    assert values(setting.do(ScoreSubnets(paths, "v1"), client_id=None))[2:] == sound


@pytest.mark.parametrize(("name", "keeps"), [("cnn_digits", True), ("rnn_shakespeare", False)])
def test_a_space_says_whether_paths_have_statistics(name: str, keeps: bool) -> None:
    assert build_space(SpaceConfig(name)).keeps_statistics == keeps


@pytest.mark.parametrize(("norm", "keeps"), [(nn.BatchNorm1d, True), (nn.LayerNorm, False)])
def test_slices_of_batch_norms_get_statistics_in_a_space_of_the_users_own(
    norm: Callable[[int], nn.Module], keeps: bool
) -> None:
    class Units(SearchSpace):
        name, input_shape, options = "units", (4,), (2,)

        def build_supernet(self) -> nn.Module:
            return self.build_subnet((1,))

        def build_subnet(self, architecture: Architecture) -> nn.Module:
            units = (2, 3)[architecture[0]]
            return nn.Sequential(nn.Linear(4, units), norm(units))

    assert Units().keeps_statistics == keeps


def test_an_operator_that_draws_while_it_is_scored_draws_the_same_again(tiny_config: Callable[..., RunConfig]) -> None:
    space = SpaceConfig("darts_s4", input_shape=[1, 8, 8], cells=3, channels=4, nodes=2)
    architecture = (0, 1) * 5  # of each two edges one is `noise`
    train = FedAvgConfig(architecture="-".join(map(str, architecture)))
    world = build_world(tiny_config(space=space, method=train, tiers=TiersConfig(count=1)))
    weights = world.space.initial_subnet_weights(architecture, torch_stream(1, "test"))
    worker = Worker(world.spec)
    score = ScoreSubnet(Subnet(architecture, stand_alone=True), "model", "validation")

    def loss(round: int) -> float | None:
        return score.run(worker, Assignment("evaluation", round, None, "server", score), weights).loss

    assert loss(0) == loss(0) != loss(1)
