"""Searches by silos and by the server: gradients, perturbation, pruning, and what of it all travels."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.averaging.average import Update, WeightedSums
from fedloom.platform.clients.execution import Assignment, Outcome, Task
from fedloom.platform.clients.training import SGD, LocalSGD, Score, batch_indices
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.stage import Plan, RoundResult
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.federated_nas import FedNasConfig, FedNasStage, FedPnasConfig, GlobalNasConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.silo_stage import SiloTrainingConfig
from fedloom.platform.methods.spider import SpiderConfig, SpiderTrainingConfig
from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.silos import fedpnas
from fedloom.platform.silos import network as network_module
from fedloom.platform.silos.batches import endless_batches
from fedloom.platform.silos.federated_nas import DecideCentrally, TrainMixed
from fedloom.platform.silos.fedpnas import TrainSplit
from fedloom.platform.silos.network import Network
from fedloom.platform.silos.perturbation import (
    by_pain,
    crowded_nodes,
    decide,
    is_settled,
    most_missed,
    search_steps,
)
from fedloom.platform.silos.search import (
    ArchitectureSearchConfig,
    Milenas,
    MixedStep,
    Perturbation,
    by_magnitude,
    first_alphas,
    searcher_of,
    softmax,
)
from fedloom.platform.silos.spider import TrainSpider
from fedloom.platform.silos.state import ALPHAS, Personal, is_decided, unpacked, with_row
from fedloom.platform.spaces.darts import DARTS_S2, DARTS_S2_SMALL, DartsSpace
from fedloom.platform.spaces.slices import Slice, Subspace, Weights, bytes_of, parse_subspace, subspace_id
from fedloom.platform.spaces.space_config import SpaceConfig

Make = Callable[..., RunConfig]
Run = Callable[[RunConfig], tuple[World, Any, RunState]]
Refused = Callable[[RunConfig], str]
Data = tuple[Tensor, Tensor]

LOCAL = LocalSGD(epochs=1, batch_size=8, lr=0.05, momentum=0.9, clip_norm=5.0)
NO_SEARCH = Perturbation(due=False)


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

    def do(self, task: Task, state: Weights | None = None, round_: int = 0, client_id: int | None = 0) -> Outcome:
        """One piece of a silo's (or the server's) work, with a copy of its state, as the executor hands it in."""
        own = None if state is None else {name: tensor.detach().clone() for name, tensor in state.items()}
        return task.run(self.worker, Assignment("train", round_, client_id, "tier1", task, state=own), self.weights)


@pytest.fixture
def make_config(silo_config: Make) -> Make:
    return partial(silo_config, space=SpaceConfig("darts_s2_small", channels=4))


@pytest.fixture
def federation(make_config: Make) -> Federation:
    world = build_world(make_config(SpiderConfig()))
    return Federation(world, Worker(world.spec), world.space.initial_weights(torch_stream(1, "first")))


def sent(outcome: Outcome) -> Mapping[str, Tensor]:
    assert outcome.update is not None
    return outcome.update.tensors


def own(outcome: Outcome) -> Personal:
    assert outcome.state is not None
    return unpacked(outcome.state)


def silo_samples(clients: pd.DataFrame, stage: str, client_id: int = 0) -> list[int]:
    found: list[int] = clients[(clients.stage == stage) & (clients.client_id == client_id)].samples.tolist()
    return found


def assert_nothing_of_its_own_is_sent(outcome: Outcome, state: Personal) -> None:
    update = sent(outcome)
    same = [n for n, t in update.items() if n in state.weights and t.is_floating_point() and t.numel() > 1]
    assert [n for n in same if torch.equal(update[n], state.weights[n])] == []
    mine = {t.data_ptr() for t in (*state.weights.values(), *state.momentum.values()) if t.numel()}
    assert mine.isdisjoint(t.data_ptr() for t in update.values())


# -- gradients (MiLeNAS) ----------------------------------------------------------------------------------------------


def planted(forward: Callable[[Tensor], Tensor]) -> Network:
    return Network(nn.Identity(), forward, {}, 0.0, 0, "planted", ((0, 1),))


def forever(x: Tensor, y: Tensor) -> Any:
    while True:
        yield x, y


def test_a_mixed_step_in_literal_numbers() -> None:
    w, alphas = nn.Parameter(torch.tensor([2.0])), torch.zeros(1, 2, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x), softmax(alphas, ((0, 1),))[0, 1] * w * x], dim=1)

    one, up, down = torch.ones(1, 1), torch.tensor([1]), torch.tensor([0])
    sgd = SGD(LocalSGD(1, 1, lr=0.2), [w])
    step = MixedStep(sgd, alphas, planted(forward), forever(one, down), Milenas(False, 0.1, validation_weight=0.5))
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
    mix = softmax(alphas, ((0, 2), (0, 1, 2)))
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
        logit = w * (softmax(alphas, ((0, 1),))[0] * x_B).sum(dim=1, keepdim=True)
        return torch.cat([-logit, logit], dim=1)

    step = MixedStep(SGD(LocalSGD(1, 64, 0.01), [w]), alphas, planted(forward), forever(x, y), Milenas(False, 1.0))
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
    averaged = sent(there.do(TrainMixed(federation.space.largest_subspace, LOCAL, search)))
    alone = own(federation.do(TrainSpider(LOCAL, 0.0, search)))
    assert alone.alphas is not None
    for found, head in ((averaged[ALPHAS], averaged["head.bias"]), (alone.alphas, alone.weights["head.bias"])):
        torch.testing.assert_close(found.detach(), alphas, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(head, module.get_parameter("head.bias").detach(), rtol=1e-3, atol=1e-4)
    assert alphas.abs().max() > 1e-3
    assert torch.equal(begun[ALPHAS], first_alphas(federation.space)), "what was received stays as it is"


def test_architecture_parameters_of_a_silo_stay_with_it_until_its_edges_are_decided(federation: Federation) -> None:
    first = federation.do(TrainSpider(LOCAL, 0.1, Milenas(ends=False, lr=0.5)))
    assert sent(first).keys() == federation.weights.keys()
    begun = own(first)
    assert begun.alphas is not None
    assert begun.kept == federation.space.largest_subspace
    second = federation.do(TrainSpider(LOCAL, 0.1, Milenas(ends=True)), first.state, round_=1)
    ended = own(second)
    assert ended.alphas is None
    assert ended.kept == by_magnitude(begun.alphas, begun.kept)
    assert set(ended.weights) == set(federation.space.subspace_slices(ended.kept))
    assert second.subspace == subspace_id(ended.kept)


def test_a_run_of_spider_by_gradients_ends_decided(make_config: Make, run_in_memory: Run) -> None:
    train = SpiderTrainingConfig(rounds=3, batch_size=16, evaluate_every=1)
    world, memory, state = run_in_memory(
        make_config(SpiderConfig(train=train, search=ArchitectureSearchConfig("milenas", rounds=2)))
    )
    assert isinstance(world.space, DartsSpace)
    for client_id in range(3):
        bags = [memory.state(r).bags[f"client-{client_id}"].tensors for r in range(3)]
        assert [ALPHAS in bag for bag in bags] == [True, True, False]
        kept = unpacked(bags[-1]).kept
        world.space.validate_subspace(kept)
        assert [len(row) for row in kept] == [1] * 10
        train_size, validation_size = (world.data.size(client_id, s) for s in ("train", "validation"))
        expected = [train_size, train_size, train_size + validation_size]
        assert silo_samples(memory.table("clients"), "spider", client_id) == expected
    assert ALPHAS not in state.weights("supernet")
    scored = memory.table("evaluations").query("split == 'validation' and metric == 'accuracy'")
    assert scored.groupby("round").size().to_dict() == {0: 3, 1: 3}, "not once the data has joined the training data"


def test_the_search_of_a_round() -> None:
    config = ArchitectureSearchConfig(start=3, every=4)
    due = [r for r in range(20) if cast(Perturbation, searcher_of(config, r)).due]
    assert due == [3, 7, 11, 15, 19]
    gradients = ArchitectureSearchConfig("milenas", rounds=2, lr=0.3, validation_weight=0.7)
    assert [searcher_of(gradients, r) for r in range(4)] == [Milenas(r >= 2, 0.3, 0.7) for r in range(4)]


# -- FedNAS -----------------------------------------------------------------------------------------------------------


def fednas_config(make: Make, **train: object) -> RunConfig:
    values: dict[str, Any] = {"rounds": 3, "batch_size": 16, **train}
    search = ArchitectureSearchConfig("milenas", rounds=2, lr=0.2)
    return make(FedNasConfig(train=SiloTrainingConfig(**values), search=search))


def test_architecture_parameters_are_averaged_by_samples(make_config: Make) -> None:
    config = fednas_config(make_config)
    stage = cast(FedNasStage, build_stages(build_world(config))[0])
    begun = stage.begin(RunState())
    assert torch.equal(begun.weights("supernet")[ALPHAS], torch.zeros(10, 2))
    sums = WeightedSums()
    for value, samples in ((4.0, 1.0), (-8.0, 3.0)):
        tensors = {ALPHAS: torch.full((10, 2), value), "head.bias": torch.full((10,), value)}
        sums.add(Update(tensors, {n: Slice(n) for n in tensors}, dict.fromkeys(tensors, samples)))
    merged = stage.merge(begun, Plan([], "supernet"), RoundResult(sums, [])).state.weights("supernet")
    # (1 * 4 - 3 * 8) / 4
    assert torch.equal(merged[ALPHAS], torch.full((10, 2), -5.0))
    assert torch.equal(merged["head.bias"], torch.full((10,), -5.0))


def test_a_silo_sends_its_architecture_parameters_with_the_weight_of_its_samples(federation: Federation) -> None:
    there = replace(federation, weights={**federation.weights, ALPHAS: first_alphas(federation.space)})
    outcome = there.do(TrainMixed(federation.space.largest_subspace, LOCAL, Milenas(False)))
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
    assert not any(name.startswith("client-") for name in state.bags)


def test_the_round_of_fednas_is_the_average_of_its_silos(make_config: Make, run_in_memory: Run) -> None:
    config = fednas_config(make_config, rounds=2)
    config.method.search.rounds = 2
    world, memory, _ = run_in_memory(config)
    stage = cast(FedNasStage, build_stages(world)[0])
    begun = stage.begin(RunState())
    worker, weights = Worker(world.spec), begun.weights("supernet")
    outcomes = [a.task.run(worker, a, weights) for a in stage.plan(begun).assignments]
    total = sum(o.samples for o in outcomes)
    mean = torch.stack([sent(o)[ALPHAS] * o.samples / total for o in outcomes]).sum(dim=0)
    torch.testing.assert_close(memory.state(0).weights("supernet")[ALPHAS], mean)
    assert is_decided(parse_subspace(memory.state(1).data["kept"])), "the end of the training ends the search, too"


# -- the server searches ----------------------------------------------------------------------------------------------


def test_a_decision_of_the_server_holds_for_all_from_the_next_round_on(make_config: Make, run_in_memory: Run) -> None:
    train = SiloTrainingConfig(rounds=8, batch_size=16, evaluate_every=1)
    world, memory, _ = run_in_memory(
        make_config(GlobalNasConfig(train=train, search=ArchitectureSearchConfig(start=1, every=1)))
    )
    space = cast(DartsSpace, world.space)
    clients = memory.table("clients")
    trained = clients[clients.stage == "global_nas"]
    at_the_beginning = [subspace_id(space.largest_subspace), *(memory.state(r).data["kept"] for r in range(7))]
    assert trained.groupby("round").subspace.unique().apply(list).tolist() == [[kept] for kept in at_the_beginning]
    left = [sum(len(row) > 1 for row in parse_subspace(kept)) for kept in at_the_beginning]
    assert left == [10, 10, 8, 6, 4, 2, 0, 0]
    for round_ in range(8):
        kept = parse_subspace(memory.state(round_).data["kept"])
        assert memory.state(round_).weights("supernet").keys() == set(space.subspace_slices(kept))
    train_size, validation_size = (world.data.size(0, s) for s in ("train", "validation"))
    assert silo_samples(memory.table("clients"), "global_nas") == [train_size] * 6 + [train_size + validation_size] * 2
    rows = memory.table("evaluations")
    assert set(rows[rows.split == "validation"]["round"]) == set(range(6))
    assert set(rows.model) == {"global"}
    assert rows[rows.split == "test"].stage.unique().tolist() == ["evaluation"]


def test_the_server_decides_on_validation_data_with_the_weights_that_the_round_began_with(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    central_data = Worker.central_data

    def spy(worker: Worker, split: str, share: float = 1.0) -> Data:
        asked.append(split)
        return central_data(worker, split, share)

    monkeypatch.setattr(Worker, "central_data", spy)
    kept = federation.space.largest_subspace
    outcome = federation.do(DecideCentrally(kept), client_id=None)
    assert asked == ["validation"]
    assert outcome.update is None
    assert outcome.samples == sum(federation.world.data.sizes("validation"))
    found = parse_subspace(outcome.subspace or "")
    assert [sum(len(found[d]) == 1 for d in federation.space.decisions(t)) for t in ("normal", "reduction")] == [1, 1]
    assert found == decided_by_hand(federation, kept)
    looked_at = federation.worker.tensors_of(federation.worker.supernet)
    assert [n for n, t in federation.weights.items() if not torch.equal(looked_at[n], t)] == [], "statistics, too"


def decided_by_hand(federation: Federation, kept: Subspace) -> Subspace:
    """The operators without which a network in evaluation mode is worst, on the same edges."""
    worker, space = federation.worker, federation.space
    module = space.build_supernet().eval()
    module.load_state_dict({n: federation.weights[n] for n in module.state_dict()})
    x, y = worker.central_data("validation")
    rng = stream(worker.spec.training_seed, "edges", "train", 0, "server")
    for cell_type in ("normal", "reduction"):
        decision = space.decisions(cell_type)[int(rng.integers(5))]
        pain = []
        for option in (0, 1):
            logits = module(x, with_row(kept, decision, (1 - option,)))
            accuracy = (logits.argmax(dim=1) == y).double().mean().item()
            pain.append((accuracy, -F.cross_entropy(logits, y).item(), option))
        kept = with_row(kept, decision, (min(pain)[2],))
    return kept


# -- FedPNAS ----------------------------------------------------------------------------------------------------------


def split_task(due: bool = False) -> TrainSplit:
    return TrainSplit(LOCAL, Perturbation(due), base_cells=1)


def test_a_silo_of_fedpnas_sends_the_base_alone(federation: Federation) -> None:
    base = set(federation.space.base_tensors(1))
    assert {"stem.0.weight", "cells.0.preprocess1.conv.weight"} <= base
    assert "head.bias" not in base
    first = federation.do(split_task())
    second = federation.do(split_task(due=True), first.state, round_=1)
    for outcome in (first, second):
        assert outcome.update is not None
        assert sent(outcome).keys() == base
        assert outcome.update.weights.keys() == outcome.update.slices.keys() == base
        assert outcome.bytes_up == outcome.bytes_down == bytes_of({n: federation.weights[n] for n in base})
        assert base.isdisjoint(own(outcome).weights)
        assert base.isdisjoint(own(outcome).momentum)
        mine = {t.data_ptr() for t in own(outcome).weights.values()}
        assert mine.isdisjoint(t.data_ptr() for t in sent(outcome).values())
    after = own(second)
    assert set(after.weights) == set(federation.space.subspace_slices(after.kept)) - base
    assert sum(len(row) == 1 for row in after.kept) == 2


def test_all_silos_begin_a_round_with_the_same_base_and_their_own_rest(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {c: federation.do(split_task(), client_id=c).state for c in range(3)}
    begun: list[dict[str, Tensor]] = []

    def spy(worker: Worker, assignment: Assignment, network: Network, weights: Weights, *rest: Any, **more: Any) -> Any:
        begun.append({name: tensor.clone() for name, tensor in weights.items()})
        return network_module.train_network(worker, assignment, network, weights, *rest, **more)

    monkeypatch.setattr(fedpnas, "train_network", spy)
    for client_id, state in states.items():
        federation.do(split_task(), state, round_=1, client_id=client_id)
        assert state is not None
        for name, tensor in begun[client_id].items():
            is_base = name in federation.space.base_tensors(1)
            assert torch.equal(tensor, federation.weights[name] if is_base else unpacked(state).weights[name])
    assert not torch.equal(begun[0]["head.bias"], begun[1]["head.bias"])


def test_a_run_of_fedpnas_ends_with_an_architecture_of_its_own_for_every_silo(
    make_config: Make, run_in_memory: Run
) -> None:
    train = SiloTrainingConfig(rounds=7, batch_size=16, evaluate_every=1)
    config = make_config(FedPnasConfig(train=train, search=ArchitectureSearchConfig(start=1, every=1)))
    world, memory, state = run_in_memory(config)
    space = cast(DartsSpace, world.space)
    kept = [unpacked(state.bags[f"client-{c}"].tensors).kept for c in range(3)]
    for found in kept:
        space.validate_subspace(found)
        assert [len(row) for row in found] == [1] * 10
    heads = {tuple(unpacked(state.bags[f"client-{c}"].tensors).weights["head.bias"].tolist()) for c in range(3)}
    assert len(heads) == 3
    first = world.space.initial_weights(torch_stream(world.config.seed_for("initialisation"), "supernet"))
    shared, base = state.weights("supernet"), set(space.base_tensors(1))
    assert [n for n in shared if n not in base and not torch.equal(shared[n], first[n])] == []
    assert not torch.equal(shared["stem.0.weight"], first["stem.0.weight"])
    train_size, validation_size = (world.data.size(0, s) for s in ("train", "validation"))
    assert silo_samples(memory.table("clients"), "fedpnas") == [train_size] * 5 + [train_size + validation_size] * 2
    rows = memory.table("evaluations")
    assert set(rows[rows.split == "validation"]["round"]) == set(range(5))
    test = rows[rows.metric == "parameters"]
    expected = [space.cost_of_cells("parameters", found, 1) for found in kept]
    assert test.sort_values("client_id").value.tolist() == expected


# -- perturbation and pruning -----------------------------------------------------------------------------------------

S2 = DartsSpace(DARTS_S2)
SAMPLES = (torch.arange(1600.0)[:, None], torch.ones(1600, dtype=torch.long))
DECIDED: Subspace = ((1,),) * 28
INCOMING = {2: [0, 1], 3: [2, 3, 4], 4: [5, 6, 7, 8], 5: [9, 10, 11, 12, 13]}
"""The edges into each node of a cell of four."""


def worths(seed: int = 3) -> np.ndarray:
    """What each operator of each edge is worth in correct samples, all different."""
    return np.random.default_rng(seed).permutation(np.arange(1, 57)).reshape(28, 2)


def planted_forward(worth: np.ndarray) -> Callable[[Tensor, Subspace], Tensor]:
    """Right on as many samples as the kept operators are worth together."""

    def forward(x: Tensor, kept: Subspace) -> Tensor:
        right = sum(int(worth[d, o]) for d, row in enumerate(kept) for o in row)
        logit = torch.where(x < right, 1.0, -1.0)
        return torch.cat([-logit, logit], dim=1)

    return forward


def test_crowded_nodes_of_cells_of_four_nodes() -> None:
    assert crowded_nodes(S2, DECIDED, "normal") == {n: INCOMING[n] for n in (3, 4, 5)}
    assert crowded_nodes(S2, DECIDED, "reduction") == {n: [14 + e for e in INCOMING[n]] for n in (3, 4, 5)}
    pruned = DECIDED
    for edge in (2, 5, 6, 9):
        pruned = with_row(pruned, edge, ())
    assert crowded_nodes(S2, pruned, "normal") == {5: [10, 11, 12, 13]}


def test_the_search_is_settled_when_edges_are_decided_and_nodes_pruned() -> None:
    assert not is_settled(S2, S2.largest_subspace, prune_edges=False)
    assert not is_settled(S2, with_row(DECIDED, 27, (0, 1)), prune_edges=False)
    assert is_settled(S2, DECIDED, prune_edges=False)
    assert not is_settled(S2, DECIDED, prune_edges=True)
    pruned = DECIDED
    for edges in (INCOMING[n] for n in (3, 4, 5)):
        for edge in edges[2:]:
            pruned = with_row(with_row(pruned, edge, ()), 14 + edge, ())
    assert is_settled(S2, pruned, prune_edges=True)
    assert not is_settled(S2, with_row(pruned, 14 + 13, (0,)), prune_edges=True)


def test_how_many_steps_a_search_takes() -> None:
    assert search_steps(S2, prune_edges=False) == 14
    assert search_steps(S2, prune_edges=True) == 17
    small = DartsSpace(DARTS_S2_SMALL)
    assert (search_steps(small, prune_edges=False), search_steps(small, prune_edges=True)) == (5, 6)


def test_s2_is_searched_in_14_steps_and_pruned_in_3_more() -> None:
    worth, kept, rng = worths(), S2.largest_subspace, np.random.default_rng(1)
    forward = planted_forward(worth)
    order: list[int] = []
    for step in range(1, 15):
        before = kept
        kept = decide(S2, forward, kept, SAMPLES, rng, prune_edges=True)
        changed = [d for d in range(28) if kept[d] != before[d]]
        assert [d // 14 for d in changed] == [0, 1], "one edge of each cell type"
        assert all(kept[d] == (int(worth[d].argmax()),) for d in changed)
        assert sum(len(row) == 1 for row in kept) == 2 * step, "nothing is pruned while edges are left"
        order += changed
    assert sorted(order) == list(range(28))
    assert order != sorted(order), "edges are drawn"
    for step in range(1, 4):
        assert not is_settled(S2, kept, prune_edges=True)
        kept = decide(S2, forward, kept, SAMPLES, rng, prune_edges=True)
        assert [len(crowded_nodes(S2, kept, t)) for t in ("normal", "reduction")] == [3 - step] * 2
    assert is_settled(S2, kept, prune_edges=True)
    best = worth.max(axis=1)
    for first in (0, 14):
        for edges in INCOMING.values():
            two = sorted(edges, key=lambda e: -best[first + e])[:2]
            assert [e for e in edges if kept[first + e]] == sorted(two), "the two that are missed most"
    assert decide(S2, forward, kept, SAMPLES, rng, prune_edges=True) == kept, "nothing is left"


def test_without_pruning_a_decided_network_stays_as_it_is() -> None:
    rng = np.random.default_rng(1)
    assert decide(S2, planted_forward(worths()), DECIDED, SAMPLES, rng, prune_edges=False) == DECIDED


def test_a_cell_type_that_is_decided_waits_for_the_other() -> None:
    kept: Subspace = ((1,),) * 14 + ((0, 1),) + ((1,),) * 13
    after = decide(S2, planted_forward(worths()), kept, SAMPLES, np.random.default_rng(1), prune_edges=True)
    assert after[:14] == kept[:14], "nodes are pruned only after all edges are decided, those of both types"
    assert len(after[14]) == 1


def test_a_network_that_breaks_down_without_an_operator_misses_it_most() -> None:
    nan = float("nan")
    assert by_pain({0: Score(0.5, 0.4, 9), 1: Score(nan, 0.4, 9), 2: Score(0.5, 0.3, 9)})[0] == 1
    # Of NaN the first class is predicted, which a silo may have more of than its network gets right.
    assert most_missed({0: Score(0.5, 0.4, 9), 1: Score(nan, 0.6, 9)}) == 1
    assert most_missed({0: Score(math.inf, 0.4, 9), 1: Score(nan, 0.4, 9)}) == 0, "the first of equals"
    worth, kept = worths(), with_row(DECIDED, 5, (0, 1))
    planted_ = planted_forward(worth)

    def forward(x: Tensor, rest: Subspace) -> Tensor:
        y = planted_(x, rest)
        return y * math.nan if 0 not in rest[5] else y

    after = decide(
        S2, forward, kept, (SAMPLES[0], torch.zeros_like(SAMPLES[1])), np.random.default_rng(1), prune_edges=False
    )
    assert after[5] == (0,)


def test_a_pruned_edge_and_its_tensors_are_gone(federation: Federation) -> None:
    space = federation.space
    kept: Subspace = ((1,),) * 10
    state = Personal({n: federation.weights[n] for n in space.subspace_slices(kept)}, {}, kept).packed()
    task = TrainSpider(LOCAL, 0.1, Perturbation(due=True, prune_edges=True))
    outcome = federation.do(task, state)
    after = own(outcome)
    assert [sum(not row for row in after.kept[first : first + 5]) for first in (0, 5)] == [1, 1]
    assert set(after.weights) == set(space.subspace_slices(after.kept))
    assert set(after.momentum) <= set(after.weights)
    joined = sum(federation.world.data.size(0, s) for s in ("train", "validation"))
    assert outcome.samples == joined, "nothing is left to be searched"
    not_yet = federation.do(TrainSpider(LOCAL, 0.1, Perturbation(due=False, prune_edges=True)), state)
    assert not_yet.samples == federation.world.data.size(0, "train")
    assert own(not_yet).kept == kept


# -- what crosses the boundary ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("search", [Perturbation(due=True), Milenas(ends=False, lr=0.1)])
def test_nothing_of_a_silos_own_is_in_an_update_of_spider(federation: Federation, search: Any) -> None:
    first = federation.do(TrainSpider(LOCAL, 0.1, search))
    second = federation.do(TrainSpider(LOCAL, 0.1, search), first.state, round_=1)
    assert sent(second).keys() == federation.weights.keys()
    assert_nothing_of_its_own_is_sent(second, own(second))
    alone = federation.do(TrainSpider(LOCAL, 0.0, NO_SEARCH), round_=1)
    assert all(torch.equal(t, sent(alone)[n]) for n, t in sent(second).items()), "whatever the silo's own model is"


# -- what is refused, and what is warned of ---------------------------------------------------------------------------

METHODS: dict[str, Callable[..., Any]] = {
    "spider": SpiderConfig,
    "global_nas": GlobalNasConfig,
    "fedpnas": FedPnasConfig,
}


@pytest.mark.parametrize("method", [SpiderConfig, GlobalNasConfig, FedNasConfig, FedPnasConfig])
def test_a_search_without_validation_data_is_refused(
    make_config: Make, method: Callable[..., Any], refused: Refused
) -> None:
    assert refused(make_config(method(), validation_share=0.0)) == (
        "data.validation_share=0 leaves a silo without validation samples to search with: raise it, or give each silo "
        "more samples"
    )


def test_searches_that_cannot_run_are_refused_in_one_line(make_config: Make, refused: Refused) -> None:
    def spider(**search: Any) -> RunConfig:
        return make_config(SpiderConfig(search=ArchitectureSearchConfig(**search)))

    assert refused(spider(kind="x")) == "method.search.kind='x': allowed are perturbation, milenas"
    assert refused(spider(kind="milenas", prune_edges=True)) == (
        "method.search.prune_edges: edges are pruned by perturbation, not by milenas; leave it out"
    )
    for name, value in {"every": 0, "start": -1, "rounds": 0, "lr": 0.0, "validation_weight": -0.5}.items():
        assert refused(spider(**{name: value})) == (
            "method.search: every and rounds must be at least 1, start and validation_weight 0 or more, lr above 0"
        )
    pruning = spider(prune_edges=True)
    pruning.space.operators = ["sep_conv_3x3", "dil_conv_3x3"]
    assert refused(pruning) == (
        "method.search.prune_edges needs an operator without parameters (none, noise, skip_connect, max_pool_3x3, "
        "avg_pool_3x3), and the space has dil_conv_3x3, sep_conv_3x3: add one to space.operators, or leave it out"
    )
    for config in (GlobalNasConfig, FedPnasConfig):
        name = config().name
        assert refused(make_config(config(search=ArchitectureSearchConfig("milenas")))) == (
            f"method.search.kind='milenas': {name} searches by perturbation"
        )
    assert refused(make_config(FedNasConfig(search=ArchitectureSearchConfig()))) == (
        "method.search.kind='perturbation': fednas searches by milenas"
    )
    for base_cells in (0, 3, -1):
        assert refused(make_config(FedPnasConfig(base_cells=base_cells))) == (
            f"method.base_cells={base_cells}: must leave a base and an own part of the 3 cells, 1 to 2"
        )
    assert refused(make_config(SpiderConfig(train=SpiderTrainingConfig(pull=-1.0)))) == (
        "method.train.pull=-1.0: must be 0 (every silo alone) or more"
    )


def warned(config: RunConfig, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        build_stages(build_world(config))
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("fedloom")]
    # Three cells with a base of one leave no normal cell to the silos: said once, here expected.
    return [message for message in messages if "own part has no normal cell" not in message]


@pytest.mark.parametrize(("name", "enough"), [("spider", 7), ("fedpnas", 7), ("global_nas", 8)])
def test_edges_that_will_not_be_searched_are_counted(
    make_config: Make, caplog: pytest.LogCaptureFixture, name: str, enough: int
) -> None:
    def config(rounds: int, **search: Any) -> RunConfig:
        found = METHODS[name](search=ArchitectureSearchConfig(start=1, every=1, **search))
        found.train.rounds = rounds
        return make_config(found)

    assert warned(config(enough), caplog) == []
    assert warned(config(enough - 1), caplog) == [
        "2 of 10 edges will not be searched before the last round: lower method.search.start or "
        "method.search.every, or train for more rounds"
    ]
    assert warned(config(enough, prune_edges=True), caplog) == [
        "not all edges will be pruned before the last round: that takes 6 search rounds, there are 5"
    ]
    assert warned(config(enough + 1, prune_edges=True), caplog) == []


def test_a_search_by_gradients_that_does_not_end_is_warned_of(
    make_config: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def config(rounds: int, search_rounds: int) -> RunConfig:
        search = ArchitectureSearchConfig("milenas", rounds=search_rounds)
        return make_config(SpiderConfig(train=SpiderTrainingConfig(rounds=rounds), search=search))

    assert warned(config(7, 5), caplog) == []
    for rounds in (6, 5, 4):
        assert warned(config(rounds, 5), caplog) == [
            "none of the 10 edges will be decided before the last round: lower method.search.rounds (5), or train for "
            "more than 6 rounds"
        ]


def test_a_base_that_leaves_no_normal_cell_to_the_silos_is_warned_of(
    make_config: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        build_stages(build_world(make_config(FedPnasConfig())))
    assert "the silos' own part has no normal cell" in caplog.text
