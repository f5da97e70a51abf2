"""Searches by gradients: a step of MiLeNAS beside slow references, SPIDER's silos, and FedNAS, which averages all."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.averaging.average import Update, WeightedSums
from fedloom.platform.clients.assignments import Assignment, ClientResult, Task
from fedloom.platform.clients.networks import Network
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.training import LocalSGD, Optimizer, batch_indices
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import Plan, RoundResult, RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.training_config import rules_of
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.fednas import FedNasConfig, TrainMixed
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.silo_search import (
    ArchitectureSearchConfig,
    Milenas,
    MixedStep,
    Perturbation,
    by_magnitude,
    first_alphas,
    is_decided,
    searcher_of,
)
from fedloom.platform.methods.silos import (
    ALPHAS,
    Personal,
    SiloTrainingConfig,
    absent_of,
    endless_batches,
    softmax,
    unpacked,
)
from fedloom.platform.methods.spider import SpiderConfig, SpiderTrainingConfig, TrainSpider
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.darts import DartsSpace
from fedloom.platform.spaces.slices import Slice, Weights, bytes_of, parse_subspace, subspace_id
from fedloom.platform.spaces.space_config import SpaceConfig

Make = Callable[..., RunConfig]
Run = Callable[[RunConfig], tuple[World, Any, RunState]]
Data = tuple[Tensor, Tensor]

LOCAL = LocalSGD(epochs=1, batch_size=8, lr=0.05, momentum=0.9, clip_norm=5.0)
RULES = rules_of(SiloTrainingConfig(), "method.train")


@dataclass(frozen=True)
class Federation:
    """Three silos, a small supernet, and its first weights."""

    world: World
    worker: Worker
    weights: Weights

    @property
    def space(self) -> DartsSpace:
        assert isinstance(self.world.space, DartsSpace)
        return self.world.space

    def do(self, task: Task, state: Weights | None = None, round_: int = 0, client_id: int | None = 0) -> ClientResult:
        """One piece of a silo's (or the server's) work, with a copy of its state, as the executor hands it in."""
        own = None if state is None else {name: tensor.detach().clone() for name, tensor in state.items()}
        return task.run(self.worker, Assignment("train", round_, client_id, "tier1", task, state=own), self.weights)


@pytest.fixture
def make_config(silo_config: Make) -> Make:
    return partial(silo_config, space=SpaceConfig("darts_s2_small", channels=4, nodes=1))


@pytest.fixture
def federation(make_config: Make) -> Federation:
    world = build_world(make_config(SpiderConfig()))
    return Federation(world, Worker(world.spec), world.space.initial_weights(torch_stream(1, "first")))


def sent(outcome: ClientResult) -> dict[str, Tensor]:
    """Copies of what is sent: it may lie in the worker's module until that is used again."""
    assert outcome.update is not None
    return {name: tensor.detach().clone() for name, tensor in outcome.update.tensors.items()}


def own(outcome: ClientResult) -> Personal:
    assert outcome.state is not None
    return unpacked(outcome.state)


def silo_samples(clients: pd.DataFrame, stage: str, client_id: int = 0) -> list[int]:
    found: list[int] = clients[(clients.stage == stage) & (clients.client_id == client_id)].samples.tolist()
    return found


# -- gradients (MiLeNAS) ----------------------------------------------------------------------------------------------


def planted(forward: Callable[[Tensor], Tensor]) -> Network:
    return Network(nn.Identity(), forward, {}, 0.0, subspace="planted", remaining=((0, 1),))


def forever(x: Tensor, y: Tensor) -> Any:
    while True:
        yield x, y


def test_a_mixed_step_in_literal_numbers() -> None:
    w, alphas = nn.Parameter(torch.tensor([2.0])), torch.zeros(1, 2, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x), softmax(alphas, absent_of(alphas, ((0, 1),)))[0, 1] * w * x], dim=1)

    one, up, down = torch.ones(1, 1), torch.tensor([1]), torch.tensor([0])
    sgd, search = Optimizer(LocalSGD(1, 1, lr=0.2), {"w": w}), Milenas(False, 0.1, validation_weight=0.5)
    step = MixedStep(sgd, alphas, planted(forward), forever(one, down), search, Objective())
    F.cross_entropy(forward(one), up).backward()  # type: ignore[no-untyped-call]
    step.step()
    # p = .5, so that the logit is 1. By p: -2 sigmoid(-1) on training, 2 sigmoid(1) on validation; p by alpha: +-.25.
    # alpha_1 = -.1 (-.13447071 + .5 * .36552929); w by training data alone: 2 + .2 * .5 * sigmoid(-1).
    assert alphas.tolist() == [pytest.approx([0.004829393, -0.004829393], abs=1e-7)]
    assert w.item() == pytest.approx(2.02689414)
    assert alphas.grad is None
    assert w.grad is None


def test_operators_that_an_edge_has_not_have_no_weight_and_no_gradient() -> None:
    alphas = torch.tensor([[math.log(3.0), 5.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    mix = softmax(alphas, absent_of(alphas, ((0, 2), (0, 1, 2))))
    assert mix.tolist() == [pytest.approx([0.75, 0.0, 0.25]), pytest.approx([1 / 3] * 3)]
    mix[0, 0].backward()  # type: ignore[no-untyped-call]
    assert alphas.grad is not None
    assert alphas.grad.tolist() == [pytest.approx([0.1875, 0.0, -0.1875]), [0.0] * 3]


def test_the_largest_that_an_edge_has_is_chosen_and_the_first_of_equals() -> None:
    alphas = torch.tensor([[1.0, 9.0, 2.0], [0.5, 0.5, 0.5], [0.0, 1.0, 1.0], [7.0, 0.0, 0.0], [1.0, 2.0, 3.0]])
    kept = ((0, 2), (0, 1, 2), (0, 1, 2), (1,), ())
    assert by_magnitude(alphas, kept) == ((2,), (0,), (1,), (1,), ())


def test_the_useful_operators_parameter_grows_and_it_is_chosen() -> None:
    x = torch.randn((64, 2), generator=torch_stream(2, "test"))
    y = (x[:, 1] > 0).long()
    alphas, w = torch.zeros(1, 2, requires_grad=True), nn.Parameter(torch.tensor([1.0]))

    def forward(x_B: Tensor) -> Tensor:
        logit = w * (softmax(alphas, absent_of(alphas, ((0, 1),)))[0] * x_B).sum(dim=1, keepdim=True)
        return torch.cat([-logit, logit], dim=1)

    sgd, search = Optimizer(LocalSGD(1, 64, 0.01), {"w": w}), Milenas(False, 1.0)
    step = MixedStep(sgd, alphas, planted(forward), forever(x, y), search, Objective())
    values = []
    for _ in range(10):
        F.cross_entropy(forward(x), y).backward()  # type: ignore[no-untyped-call]
        step.step()
        values.append(alphas[0, 1].item())
    assert values == sorted(values)
    assert values[-1] > 1.0 > 0.0 > alphas[0, 0].item()
    assert by_magnitude(alphas, ((0, 1),)) == ((1,),)


def batches_of(data: Data, generator: torch.Generator) -> list[Data]:
    x, y = data
    return [(x[i], y[i]) for i in batch_indices(len(y), LOCAL.batch_size, LOCAL.epochs, generator)]


def mixed_by_hand(federation: Federation, search: Milenas) -> tuple[nn.Module, Tensor]:
    worker, places = federation.worker, ("train", 0, 0)
    seed = worker.spec.training_seed
    module = federation.space.build_supernet().train()
    module.load_state_dict({n: federation.weights[n] for n in module.state_dict()})
    alphas, parameters = first_alphas(federation.space), list(module.parameters())
    optimizer = torch.optim.SGD(parameters, lr=LOCAL.lr, momentum=LOCAL.momentum)
    second = torch_stream(seed, "architecture", *places)
    validation = endless_batches(worker.client_data(0, "validation"), LOCAL, second)
    for x, y in batches_of(worker.client_data(0, "train"), torch_stream(seed, "batches", *places)):
        alphas.requires_grad_()
        loss = F.cross_entropy(module(x, None, alphas.softmax(dim=1)), y)
        on_training, *of_weights = torch.autograd.grad(loss, [alphas, *parameters])
        x2, y2 = next(validation)
        loss = F.cross_entropy(module(x2, None, alphas.softmax(dim=1)), y2)
        (on_validation,) = torch.autograd.grad(loss, [alphas])
        alphas = (alphas - search.lr * (on_training + search.validation_weight * on_validation)).detach()
        for parameter, gradient in zip(parameters, of_weights, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(parameters, LOCAL.clip_norm)
        optimizer.step()
    return module, alphas


def test_a_round_of_gradients_is_that_of_a_slow_reference(federation: Federation) -> None:
    search = Milenas(ends=False, lr=0.1, validation_weight=0.5)
    module, alphas = mixed_by_hand(federation, search)
    begun = {**federation.weights, ALPHAS: first_alphas(federation.space)}
    there = replace(federation, weights=begun)
    averaged = sent(there.do(TrainMixed(federation.space.largest_subspace, LOCAL, search, RULES)))
    alone = own(federation.do(TrainSpider(LOCAL, 0.0, search, RULES)))
    assert alone.alphas is not None
    for found, head in ((averaged[ALPHAS], averaged["head.bias"]), (alone.alphas, alone.weights["head.bias"])):
        torch.testing.assert_close(found.detach(), alphas, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(head, module.get_parameter("head.bias").detach(), rtol=1e-3, atol=1e-4)
    assert alphas.abs().max() > 1e-3
    assert torch.equal(begun[ALPHAS], first_alphas(federation.space)), "what was received stays as it is"


def test_architecture_parameters_of_a_silo_stay_with_it_until_its_edges_are_decided(federation: Federation) -> None:
    first = federation.do(TrainSpider(LOCAL, 0.1, Milenas(ends=False, lr=0.5), RULES))
    assert sent(first).keys() == federation.weights.keys()
    begun = own(first)
    assert begun.alphas is not None
    assert begun.remaining == federation.space.largest_subspace
    second = federation.do(TrainSpider(LOCAL, 0.1, Milenas(ends=True), RULES), first.state, round_=1)
    ended = own(second)
    assert ended.alphas is None
    assert ended.remaining == by_magnitude(begun.alphas, begun.remaining)
    assert set(ended.weights) == set(federation.space.subspace_slices(ended.remaining))
    assert second.subspace == subspace_id(ended.remaining)


def test_a_run_of_spider_by_gradients_ends_decided(make_config: Make, run_in_memory: Run) -> None:
    train = SpiderTrainingConfig(rounds=3, batch_size=16, evaluate_every=1)
    world, memory, state = run_in_memory(
        make_config(SpiderConfig(train=train, search=ArchitectureSearchConfig("milenas", rounds=2)))
    )
    assert isinstance(world.space, DartsSpace)
    for client_id in range(3):
        groups = [memory.state(r).groups[f"client-{client_id}"].tensors for r in range(3)]
        assert [ALPHAS in group for group in groups] == [True, True, False]
        kept = unpacked(groups[-1]).remaining
        world.space.validate_subspace(kept)
        assert [len(row) for row in kept] == [1] * 4
        train_size, validation_size = (world.data.size(client_id, s) for s in ("train", "validation"))
        expected = [train_size, train_size, train_size + validation_size]
        assert silo_samples(memory.table("clients"), "spider", client_id) == expected
    assert ALPHAS not in state.weights("supernet")
    scored = memory.table("evaluations").query("split == 'validation' and metric == 'accuracy'")
    assert scored.groupby("round").size().to_dict() == {0: 3, 1: 3}, "not once the data has joined the training data"


def test_the_search_of_a_round() -> None:
    def due(start: int, every: int, rounds: int) -> list[int]:
        config = ArchitectureSearchConfig(start=start, every=every, statistics="running")
        searchers = [searcher_of(config, r, batch_size=8) for r in range(rounds)]
        assert all(searcher == replace(searchers[0], turns=searcher.turns) for searcher in searchers)
        turns = [0, *(cast(Perturbation, searcher).turns for searcher in searchers)]
        return [r for r in range(rounds) if turns[r + 1] == turns[r] + 1]

    assert due(30, 20, 101) == [40, 60, 80, 100], "Alg. 2: t >= t_s, and t a multiple of tau"
    assert due(3, 4, 20) == [4, 8, 12, 16]
    assert due(0, 4, 9) == [0, 4, 8]
    assert due(8, 4, 13) == [8, 12]
    gradients = ArchitectureSearchConfig("milenas", rounds=2, lr=0.3, validation_weight=0.7)
    assert [searcher_of(gradients, r, 8) for r in range(4)] == [Milenas(r >= 2, 0.3, 0.7) for r in range(4)]


# -- FedNAS -----------------------------------------------------------------------------------------------------------


def fednas_config(make: Make, **train: object) -> RunConfig:
    values: dict[str, Any] = {"rounds": 3, "batch_size": 16, **train}
    search = ArchitectureSearchConfig("milenas", rounds=2, lr=0.2)
    return make(FedNasConfig(train=SiloTrainingConfig(**values), search=search))


def test_architecture_parameters_are_averaged_by_samples(make_config: Make) -> None:
    config = fednas_config(make_config)
    stage = build_stages(build_world(config))[0]
    begun = stage.begin(RunState())
    assert torch.equal(begun.weights("supernet")[ALPHAS], torch.zeros(4, 2))
    sums = WeightedSums()
    for value, samples in ((4.0, 1.0), (-8.0, 3.0)):
        tensors = {ALPHAS: torch.full((4, 2), value), "head.bias": torch.full((10,), value)}
        sums.add(Update(tensors, {n: Slice(n) for n in tensors}, dict.fromkeys(tensors, samples)))
    merged = stage.merge(begun, Plan([], "supernet"), RoundResult(sums, [])).state.weights("supernet")
    # (1 * 4 - 3 * 8) / 4
    assert torch.equal(merged[ALPHAS], torch.full((4, 2), -5.0))
    assert torch.equal(merged["head.bias"], torch.full((10,), -5.0))


def test_a_silo_sends_its_architecture_parameters_with_the_weight_of_its_samples(federation: Federation) -> None:
    there = replace(federation, weights={**federation.weights, ALPHAS: first_alphas(federation.space)})
    outcome = there.do(TrainMixed(federation.space.largest_subspace, LOCAL, Milenas(False), RULES))
    assert outcome.update is not None
    assert sent(outcome).keys() == there.weights.keys()
    assert set(outcome.update.weights.values()) == {float(federation.world.data.size(0, "train"))}
    assert outcome.bytes_up == outcome.bytes_down == bytes_of(there.weights)
    assert not sent(outcome)[ALPHAS].requires_grad
    assert outcome.state is None


def test_a_run_of_fednas_chooses_after_the_last_round_of_its_search(make_config: Make, run_in_memory: Run) -> None:
    world, memory, state = run_in_memory(fednas_config(make_config))
    assert isinstance(world.space, DartsSpace)
    before, chosen = memory.state(0), memory.state(1)
    assert before.weights("supernet").keys() == {*world.space.initial_weights(torch_stream(1, "x")), ALPHAS}
    assert before.weights("supernet")[ALPHAS].abs().min() > 0
    kept = parse_subspace(chosen.data["kept"])
    assert is_decided(kept)
    world.space.validate_subspace(kept)
    assert chosen.weights("supernet").keys() == set(world.space.subspace_slices(kept))
    assert state.data["kept"] == chosen.data["kept"]
    train_size, validation_size = (world.data.size(0, s) for s in ("train", "validation"))
    assert silo_samples(memory.table("clients"), "fednas") == [train_size, train_size, train_size + validation_size]
    clients = memory.table("clients")
    named = clients[clients.stage == "fednas"].groupby("round").subspace.unique().apply(list).tolist()
    assert named == [[subspace_id(world.space.largest_subspace)]] * 2 + [[subspace_id(kept)]]
    assert not any(name.startswith("client-") for name in state.groups)


def test_the_round_of_fednas_is_the_average_of_its_silos(make_config: Make, run_in_memory: Run) -> None:
    config = fednas_config(make_config, rounds=2)
    config.method.search.rounds = 2
    world, memory, _ = run_in_memory(config)
    stage = build_stages(world)[0]
    begun = stage.begin(RunState())
    worker, weights = Worker(world.spec), begun.weights("supernet")
    outcomes = [a.task.run(worker, a, weights) for a in stage.plan(begun).assignments]
    total = sum(o.samples for o in outcomes)
    mean = torch.stack([sent(o)[ALPHAS] * o.samples / total for o in outcomes]).sum(dim=0)
    torch.testing.assert_close(memory.state(0).weights("supernet")[ALPHAS], mean)
    assert is_decided(parse_subspace(memory.state(1).data["kept"])), "the end of the training ends the search, too"
