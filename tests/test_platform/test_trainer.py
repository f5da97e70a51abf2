"""The clients' training on a real (tiny) federation: what travels, what is counted, and what stays untouched."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.platform.averaging.average import WeightedSums
from fedloom.platform.averaging.weighting import Work
from fedloom.platform.clients import trainer
from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.execution import SharedWeights, run_assignment
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.scoring import ScoreSubnet, ScoreSubnets
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods import fedoras
from fedloom.platform.methods.fedoras import Paths
from fedloom.platform.methods.silos import validation_use
from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.operator_choice import OperatorChoiceSpace
from fedloom.platform.spaces.slices import (
    Architecture,
    architecture_id,
    bytes_of,
    extract,
    parse_architecture,
    subspace_id,
)
from fedloom.platform.spaces.space_config import SpaceConfig

LOCAL = LocalSGD(epochs=2, batch_size=16, lr=0.05, momentum=0.9)
KEPT = ((0, 3), (1, 2), (0, 1, 2, 3))
OPA = ComponentSpec("opa")


class Setting:
    """A worker with weights that its supernet has."""

    def __init__(self, world: World) -> None:
        assert isinstance(world.space, OperatorChoiceSpace)
        self.world, self.space = world, world.space
        self.worker = Worker(world.spec)
        self.weights = world.space.initial_weights(torch_stream(1, "test"))

    def do(self, task: Any, client_id: int | None = 3, round_: int = 0, worker: Worker | None = None) -> ClientResult:
        assignment = Assignment("train", round_, client_id, "tier1", task)
        outcome: ClientResult = task.run(worker or self.worker, assignment, self.weights)
        return outcome

    def train(self, kept: Any = KEPT, budget: float = math.inf, local: LocalSGD = LOCAL) -> Train:
        return Train(Paths(kept, budget), local, OPA)


@pytest.fixture
def setting(tiny_config: Callable[..., RunConfig]) -> Setting:
    return Setting(build_world(tiny_config()))


# -- names ------------------------------------------------------------------------------------------------------------


def test_architectures_and_subspaces_as_text() -> None:
    assert architecture_id((3, 1, 8, 0)) == "3-1-8-0"
    assert parse_architecture("3-1-12-0") == (3, 1, 12, 0)
    assert subspace_id(((0, 1), (8,), (2, 10))) == "0,1/8/2,10"


def test_a_client_that_trains_on_its_validation_data_too_is_counted_with_it(setting: Setting) -> None:
    task = Train(Paths(((0,), (2,), (3,)), math.inf), LOCAL, validation="trained")
    counted = task.account(setting.worker, Assignment("train", 0, 3, "tier1", task))
    ran, data = setting.do(task), setting.world.data
    assert counted.samples == ran.samples == data.size(3, "train") + data.size(3, "validation")
    assert data.size(3, "validation") > 0
    assert (counted.steps, counted.macs, counted.bytes_up) == (ran.steps, ran.macs, ran.bytes_up)


# -- what travels -----------------------------------------------------------------------------------------------------


def norm(channels: int) -> int:
    """Bytes of a BatchNorm: weight, bias, mean and variance in float32, and an int64 counter."""
    return 4 * 4 * channels + 8


FIXED = (
    (4 * 9 * 4 + norm(4))  # stem, 3x3, 1 -> 4
    + (4 * 9 * 4 + norm(4)) + (4 * 6 * 4 + norm(6)) + (4 * 6 * 4 * 4 + norm(6))  # reduction 4 -> 6
    + (6 * 9 * 4 + norm(6)) + (6 * 9 * 4 + norm(9)) + (6 * 9 * 4 * 4 + norm(9))  # reduction 6 -> 9
    + (9 * 10 + 10) * 4  # classifier
)  # fmt: skip


def conv1(c: int) -> int:
    return c * c * 4 + norm(c)


def ds3_half(c: int) -> int:
    m = c // 2
    return m * (c // m) * 9 * 4 + norm(m) + m * c * 4 + norm(c)


def mb1_2(c: int) -> int:
    m = 2 * c
    return c * m * 4 + norm(m) + 2 * (m * m + m) * 4 + m * c * 4 + norm(c)


def test_a_subspaces_bytes_by_hand(setting: Setting) -> None:
    outcome = setting.do(setting.train())
    # Layer 0 (4 channels) keeps conv and identity, layer 1 (6) keeps ds and mb, layer 2 (6) all four.
    expected = FIXED + conv1(4) + ds3_half(6) + mb1_2(6) + conv1(6) + ds3_half(6) + mb1_2(6)
    assert (outcome.bytes_down, outcome.bytes_up) == (expected, expected)
    assert outcome.subspace == "0,3/1,2/0,1,2,3"


def test_the_bytes_are_those_of_the_tensors_handed_over(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[int] = []
    load = Worker.load

    def spy(self: Worker, module: Any, weights: Any, slices: Any) -> Any:
        received.append(bytes_of(extract(weights, slices)))
        return load(self, module, weights, slices)

    monkeypatch.setattr(Worker, "load", spy)
    for task in (setting.train(), Train(Subnet((0, 2, 3)), LOCAL)):
        outcome = setting.do(task)
        assert outcome.update is not None
        assert outcome.bytes_down == received[-1]
        assert outcome.bytes_up == bytes_of(outcome.update.tensors)


def test_a_subnets_bytes_by_hand(setting: Setting) -> None:
    outcome = setting.do(Train(Subnet((0, 2, 3)), LOCAL))
    assert outcome.bytes_down == outcome.bytes_up == FIXED + conv1(4) + mb1_2(6)
    scored = setting.do(ScoreSubnet(Subnet((0, 2, 3)), "m", "validation"))
    assert (scored.bytes_down, scored.bytes_up) == (FIXED + conv1(4) + mb1_2(6), 0)


# -- what is counted --------------------------------------------------------------------------------------------------


class Spies:
    """Records every path that is drawn, and the work that the weighting rule is told of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[Architecture] = []
        self.work: list[Work] = []
        sampler_of, rule_of = fedoras.path_sampler, trainer.weighting_rule

        def path_sampler(*arguments: Any) -> Any:
            sampler = sampler_of(*arguments)
            spies = self

            class Recording:
                def sample(self, rng: np.random.Generator) -> Architecture:
                    path = sampler.sample(rng)
                    spies.paths.append(path)
                    return path

            return Recording()

        def weighting_rule(choice: ComponentSpec) -> Callable[[Work], Any]:
            return lambda work: self.work.append(work) or rule_of(choice)(work)  # type: ignore[func-returns-value]

        monkeypatch.setattr(fedoras, "path_sampler", path_sampler)
        monkeypatch.setattr(trainer, "weighting_rule", weighting_rule)


def test_samples_through_the_operators_add_up_in_every_layer(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    spies = Spies(monkeypatch)
    outcome = setting.do(setting.train())
    samples = setting.world.data.size(3, "train")
    batches = [16, 16, samples - 32] * 2  # 36 samples, two epochs
    assert (outcome.samples, outcome.steps, samples) == (36, 6, 36)
    assert len(spies.paths) == 6
    expected: Counter[tuple[int, int]] = Counter()
    for path, size in zip(spies.paths, batches, strict=True):
        for layer, option in enumerate(path):
            expected[layer, option] += size
    (work,) = spies.work
    assert (work.samples, work.seen_samples) == (36, 72)
    for layer in range(3):
        assert sum(n for (where, _), n in expected.items() if where == layer) == 72
    for name, seen in work.seen_by_tensor.items():
        owner = setting.space.owner_of[name]
        assert seen == (72 if owner is None else expected[owner])
    assert set(work.seen_by_tensor) == set(setting.space.subspace_slices(KEPT))
    macs = sum(setting.world.macs_table.cost(p) * n for p, n in zip(spies.paths, batches, strict=True))
    assert outcome.macs == macs


def test_every_path_lies_in_the_subspace_and_in_the_budget(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    spies = Spies(monkeypatch)
    budget = setting.world.cost_table.cost((0, 1, 3))
    for round_ in range(10):
        setting.do(setting.train(budget=budget), round_=round_)
    assert len(set(spies.paths)) > 1
    for path in spies.paths:
        assert all(option in kept for option, kept in zip(path, KEPT, strict=True))
        assert setting.world.cost_table.cost(path) <= budget


def test_every_client_and_round_draws_its_own_paths(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    spies = Spies(monkeypatch)
    for client_id, round_ in ((3, 0), (4, 0), (3, 1), (3, 0)):
        setting.do(setting.train(kept=((0, 1, 2, 3),) * 3), client_id=client_id, round_=round_)
    first, other_client, other_round, again = (spies.paths[i : i + 6] for i in range(0, 24, 6))
    assert first == again
    assert len({tuple(first), tuple(other_client), tuple(other_round)}) == 3


def test_operators_that_no_batch_went_through_come_back_bit_for_bit(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    spies = Spies(monkeypatch)
    local = LocalSGD(epochs=1, batch_size=36, lr=0.1, momentum=0.9, weight_decay=0.1)
    outcome = setting.do(setting.train(local=local))
    ((*path,),) = spies.paths
    assert outcome.update is not None
    moved: set[Any] = set()
    stayed: set[Any] = set()
    for name, tensor in outcome.update.tensors.items():
        owner = setting.space.owner_of[name]
        same = torch.equal(tensor.detach(), setting.weights[name])
        (stayed if same else moved).add(owner)
        if owner is not None and path[owner[0]] != owner[1]:
            assert same, name
            assert outcome.update.weights[name] == 0.0
        else:
            assert outcome.update.weights[name] == 36.0
    assert None in moved
    assert stayed - moved
    assert {o for o in moved if o} == {(layer, option) for layer, option in enumerate(path) if option != 3}


def test_counters_and_statistics_follow_their_operator(setting: Setting) -> None:
    outcome = setting.do(setting.train(kept=((0,), (2,), (1,))))
    assert outcome.update is not None
    counters = {n: t for n, t in outcome.update.tensors.items() if n.endswith("num_batches_tracked")}
    assert counters
    assert {(t.dtype, t.item()) for t in counters.values()} == {(torch.int64, 6)}
    assert all((t >= 0).all() for n, t in outcome.update.tensors.items() if n.endswith("running_var"))


# -- nothing leaks ----------------------------------------------------------------------------------------------------


def tensors_of(outcome: ClientResult) -> dict[str, Tensor]:
    assert outcome.update is not None
    return {name: tensor.detach().clone() for name, tensor in outcome.update.tensors.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_training_and_scoring_leave_the_shared_weights_alone(setting: Setting) -> None:
    before = {name: tensor.clone() for name, tensor in setting.weights.items()}
    for task in (
        setting.train(),
        Train(Subnet((0, 1, 2)), LOCAL),
        ScoreSubnets(((0, 1, 2), (1, 1, 1)), "v0"),
        ScoreSubnet(Subnet((0, 1, 2)), "m", "validation"),
    ):
        setting.do(task)
    assert same(before, setting.weights)


@pytest.mark.parametrize("kind", ["paths", "subnet"])
def test_a_clients_result_does_not_depend_on_what_the_worker_did_before(setting: Setting, kind: str) -> None:
    task = setting.train() if kind == "paths" else Train(Subnet((0, 2, 3)), LOCAL)
    fresh = tensors_of(setting.do(task))
    setting.do(setting.train(kept=((0, 1, 2, 3),) * 3), client_id=5)
    setting.do(Train(Subnet((0, 2, 3)), LOCAL), client_id=6, round_=4)
    setting.do(ScoreSubnets(((0, 1, 2),), "v0"))
    torch.manual_seed(99)
    torch.rand(3)
    assert same(fresh, tensors_of(setting.do(task)))
    assert same(fresh, tensors_of(setting.do(task, worker=Worker(setting.world.spec))))
    assert not same(fresh, tensors_of(setting.do(task, round_=1)))
    assert not same(fresh, tensors_of(setting.do(task, client_id=4)))


def test_a_client_that_is_asked_to_scores_what_it_trained(setting: Setting) -> None:
    task = Train(Subnet((0, 2, 3)), LOCAL)
    assert setting.do(task).measurements == ()
    both = replace(task, validation=validation_use(trained=True, scored=True))
    assert setting.do(both).measurements == (), "it trained on that data"
    outcome = setting.do(replace(task, validation="scored"))
    # With the statistics that it has measured in training, as a model of its own has.
    trained = {**setting.weights, **tensors_of(outcome)}
    setting.weights = {n: trained[piece.source] for n, piece in setting.world.space.slices((0, 2, 3)).items()}
    again = setting.do(ScoreSubnet(Subnet((0, 2, 3), stand_alone=True), "global", "validation"))
    assert outcome.measurements == again.measurements
    assert [m.metric for m in again.measurements] == ["loss", "accuracy"]


# -- results that must not be used ------------------------------------------------------------------------------------


def failed_row(setting: Setting, task: Any) -> str:
    sums = WeightedSums()
    shared = SharedWeights(setting.weights, "v0")
    report = run_assignment(setting.worker, Assignment("train", 0, 3, "tier1", task), shared, sums)
    assert report.status == "failed"
    assert sums.tensors == {}
    assert "\n" not in report.error
    return report.error


def test_a_diverged_training_is_a_failed_row(setting: Setting) -> None:
    error = failed_row(setting, setting.train(local=replace(LOCAL, lr=1e30)))
    assert error.startswith("the training loss is nan") or "not finite" in error


def test_weights_that_are_nan_are_a_failed_row(setting: Setting) -> None:
    setting.weights["fixed.classifier.bias"] = torch.full((10,), math.nan)
    assert failed_row(setting, setting.train()) == ("the training loss is nan: the update was left out of the average")


def test_a_failed_client_does_not_spoil_the_next_one(setting: Setting) -> None:
    expected = tensors_of(setting.do(setting.train(), worker=Worker(setting.world.spec)))
    failed_row(setting, setting.train(local=replace(LOCAL, lr=1e30)))
    assert same(expected, tensors_of(setting.do(setting.train())))


# -- OPA and FedAvg ---------------------------------------------------------------------------------------------------


def average_of(setting: Setting, rule: str, sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """One round of clients with different numbers of samples."""
    sums = WeightedSums()
    client_data = Worker.client_data
    with monkeypatch.context() as patch:
        for client_id, size in enumerate(sizes):

            def some(self: Worker, client: int, split: str, size: int = size) -> tuple[Tensor, Tensor]:
                x, y = client_data(self, client, split)
                return x[:size], y[:size]

            patch.setattr(Worker, "client_data", some)
            kept = setting.space.largest_subspace
            outcome = setting.do(Train(Paths(kept, math.inf), LOCAL, ComponentSpec(rule)), client_id=client_id)
            assert outcome.update is not None
            assert outcome.samples == size
            sums.add(outcome.update)
    return sums.finish(setting.weights, min_contributors=2).weights


def test_opa_with_every_operator_always_chosen_is_fedavg(
    tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One operator per layer: whatever path is drawn, all samples go through it.
    space = SpaceConfig("cnn_digits", stem_channels=4, stage_layers=[1, 2], operators=["mb(1,2)"])
    config = tiny_config(space=space)
    config.tiers.count = 1
    setting = Setting(build_world(config))
    sizes = (36, 12, 20, 5)
    opa = average_of(setting, "opa", sizes, monkeypatch)
    fedavg = average_of(setting, "fedavg", sizes, monkeypatch)
    plain = average_of(setting, "plain", sizes, monkeypatch)
    for name in opa:
        torch.testing.assert_close(opa[name], fedavg[name], rtol=1e-5, atol=1e-6)
    assert any(not torch.allclose(opa[n].float(), plain[n].float(), rtol=1e-3) for n in opa)
    assert any(not torch.equal(opa[n], setting.weights[n]) for n in opa)
