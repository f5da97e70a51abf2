"""How silos train in perFedAvg and Ditto: one step in literal numbers, and whole rounds beside slow references."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.clients.assignments import Assignment, ClientResult, Measurement, Task
from fedloom.platform.clients.local_rules import LocalRule
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import LocalSGD, Optimizer, batch_indices
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.training_config import rules_of
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.ditto import DittoConfig, DittoTrainingConfig, TrainDitto
from fedloom.platform.methods.per_fedavg import MetaStep, PerFedAvgConfig, PerFedAvgTrainingConfig, TrainMeta
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.silos import Personal, ScoreOwn, SiloTrainingConfig, endless_batches, unpacked
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.slices import Weights, bytes_of

Make = Callable[..., RunConfig]
Run = Callable[[RunConfig], tuple[World, Any, RunState]]
Data = tuple[Tensor, Tensor]

ONLY = (0, 0, 0)
"""The space's first architecture, which the methods take if none is given."""

SUBNET = Subnet(ONLY, stand_alone=True)
LOCAL = LocalSGD(epochs=1, batch_size=12, lr=0.05, momentum=0.9, clip_norm=5.0)
RULES = rules_of(SiloTrainingConfig(), "method.train")


@dataclass(frozen=True)
class Federation:
    """Three silos, a small network that all of them train, and its first weights."""

    world: World
    worker: Worker
    weights: dict[str, Tensor]

    def do(self, task: Task, state: Weights | None = None, round_: int = 0, client_id: int = 0) -> ClientResult:
        """One piece of a silo's work, with a copy of its state, as the executor hands it in."""
        own = None if state is None else {name: tensor.detach().clone() for name, tensor in state.items()}
        assignment = Assignment("train", round_, client_id, "tier1", task, state=own)
        with self.worker.data.reading_test():
            return task.run(self.worker, assignment, self.weights)

    def module(self) -> nn.Module:
        """A network of its own with the shared weights."""
        module = self.world.space.build_subnet(ONLY)
        module.load_state_dict(self.weights)
        return module.train()

    def data(self, split: str = "train", client_id: int = 0) -> Data:
        """A silo's samples."""
        with self.worker.data.reading_test():
            return self.worker.client_data(client_id, split)

    def stream(self, purpose: str, round_: int = 0, client_id: int = 0) -> torch.Generator:
        """A stream of a silo's work."""
        return torch_stream(self.world.spec.training_seed, purpose, "train", round_, client_id)


@pytest.fixture
def make_config(silo_config: Make) -> Make:
    return partial(silo_config, train_samples=150)


@pytest.fixture
def federation(make_config: Make) -> Federation:
    world = build_world(make_config(DittoConfig()))
    return Federation(world, Worker(world.spec), world.space.initial_subnet_weights(ONLY, torch_stream(1, "first")))


def values(outcome: ClientResult) -> dict[tuple[str, str], float]:
    return {(m.model, m.metric): m.value for m in outcome.measurements}


def sent(outcome: ClientResult) -> dict[str, Tensor]:
    assert outcome.update is not None
    return dict(outcome.update.tensors)


def own(outcome: ClientResult) -> Personal:
    assert outcome.state is not None
    return unpacked(outcome.state)


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [n for n, t in left.items() if not torch.equal(t, right[n])] == []


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=1e-4, atol=1e-5, msg=name)


# -- perFedAvg --------------------------------------------------------------------------------------------------------


@dataclass
class Slope:
    """Logits (0, w x) of two classes; remembers w whenever it is asked."""

    w: nn.Parameter
    seen: list[float]

    def __call__(self, x: Tensor) -> Tensor:
        self.seen.append(self.w.item())
        return torch.cat([torch.zeros_like(x), self.w * x], dim=1)


ONE_BATCH = (torch.tensor([[2.0]]), torch.tensor([1]))
ANOTHER = (torch.tensor([[1.0]]), torch.tensor([0]))


def meta_step(local: LocalSGD, inner_lr: float, w: float = 0.0) -> tuple[Slope, Callable[[], None]]:
    slope = Slope(nn.Parameter(torch.tensor([w])), [])

    def forever() -> Iterator[Data]:
        while True:
            yield ANOTHER

    step = MetaStep(Optimizer(local, {"w": slope.w}), slope, forever(), inner_lr, Objective())

    def once() -> None:
        F.cross_entropy(slope(ONE_BATCH[0]), ONE_BATCH[1]).backward()  # type: ignore[no-untyped-call]
        step.step()

    return slope, once


def test_a_meta_step_takes_the_gradient_after_the_inner_step_from_the_weights_before_it() -> None:
    slope, once = meta_step(LocalSGD(1, 1, lr=0.1), inner_lr=0.5)
    once()
    # -2 sigmoid(-0) = -1, so that w' = .5; there the gradient is sigmoid(.5) = .6224593, and w = 0 - .1 * .6224593
    assert slope.seen == [0.0, 0.5]
    assert slope.w.item() == pytest.approx(-0.06224593)
    assert slope.w.grad is None


def test_momentum_and_clipping_belong_to_the_outer_step() -> None:
    slope, once = meta_step(LocalSGD(1, 1, lr=1.0, momentum=0.5, clip_norm=0.25), inner_lr=0.5)
    once()
    # The inner gradient of -1 is not clipped: w' = .5. The outer one of .6224593 is: w = -.25.
    assert slope.seen == [0.0, 0.5]
    assert slope.w.item() == pytest.approx(-0.25, abs=1e-5)
    once()
    # -2 sigmoid(.5) = -1.2449187 leads to w' = -.25 + .6224593; then sigmoid(.3724593) is clipped, too, and half of
    # the first step's .25 comes on top: no momentum has got into the inner step.
    assert slope.seen[2:] == pytest.approx([-0.25, 0.3724593], abs=1e-5)
    assert slope.w.item() == pytest.approx(-0.25 - (0.25 + 0.5 * 0.25), abs=1e-5)


def test_a_meta_step_puts_the_weights_back_to_the_bit() -> None:
    for w in (0.1, 1e-3, 7.3, -123.456):
        slope, once = meta_step(LocalSGD(1, 1, lr=0.0), inner_lr=0.7, w=w)
        before = slope.w.detach().clone()
        once()
        assert slope.seen[0] != slope.seen[1]
        assert torch.equal(slope.w.detach(), before)


def meta_by_hand(module: nn.Module, data: Data, batches: list[Data], other: list[Data], inner_lr: float) -> None:
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(parameters, lr=LOCAL.lr, momentum=LOCAL.momentum)
    for (x, y), (x2, y2) in zip(batches, other, strict=True):
        inner = torch.autograd.grad(F.cross_entropy(module(x), y), parameters)
        before = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p, g in zip(parameters, inner, strict=True):
                p.sub_(g, alpha=inner_lr)
        outer = torch.autograd.grad(F.cross_entropy(module(x2), y2), parameters)
        with torch.no_grad():
            for p, value, g in zip(parameters, before, outer, strict=True):
                p.copy_(value)
                p.grad = g.clone()
        nn.utils.clip_grad_norm_(parameters, LOCAL.clip_norm)
        optimizer.step()


def batches_of(data: Data, generator: torch.Generator, local: LocalSGD = LOCAL) -> list[Data]:
    x, y = data
    return [(x[i], y[i]) for i in batch_indices(len(y), local.batch_size, local.epochs, generator)]


def test_a_round_of_per_fedavg_is_first_order_maml_and_counts_two_batches_per_step(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = federation.do(TrainMeta(SUBNET, LOCAL, inner_lr=0.1, rules=RULES, validation="unused"))
    data = federation.data()
    batches = batches_of(data, federation.stream("batches"))
    endless = endless_batches(data, LOCAL, federation.stream("meta_batches"))
    module = federation.module()
    meta_by_hand(module, data, batches, [next(endless) for _ in batches], 0.1)
    assert_close(sent(outcome), {**dict(module.named_parameters()), **dict(module.named_buffers())})
    assert len(batches) >= 3
    per_sample = federation.world.macs_table.cost(ONLY)
    assert outcome.macs == pytest.approx(2 * per_sample * len(data[1]))
    monkeypatch.setattr(LocalRule, "extra_passes", 1)
    once_more = federation.do(TrainMeta(SUBNET, LOCAL, inner_lr=0.1, rules=RULES, validation="unused"))
    assert once_more.macs == pytest.approx(3 * per_sample * len(data[1])), "a rule's own pass is not doubled"
    assert (outcome.steps, outcome.samples) == (len(batches), len(data[1]))
    assert outcome.state is None
    assert outcome.bytes_up == outcome.bytes_down == bytes_of(federation.weights)


def test_endless_batches_see_every_sample_once_before_any_comes_again() -> None:
    data = (torch.arange(8), torch.arange(8))
    batches = endless_batches(data, LocalSGD(1, 3, 0.1), torch_stream(1, "test"))
    for _ in range(3):
        epoch = [next(batches)[0].tolist() for _ in range(3)]
        assert [len(b) for b in epoch] == [3, 3, 2]
        assert sorted(i for batch in epoch for i in batch) == list(range(8))


# -- Ditto ------------------------------------------------------------------------------------------------------------


def elsewhere(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights that differ from these everywhere."""
    generator = torch_stream(7, "elsewhere")
    return {
        n: t + 0.1 * torch.rand(t.shape, generator=generator) if t.is_floating_point() else t
        for n, t in weights.items()
    }


def test_the_pull_of_ditto_is_towards_what_was_received(federation: Federation) -> None:
    local = LocalSGD(epochs=1, batch_size=1000, lr=0.05)
    mine = {**federation.weights, "fixed.classifier.bias": federation.weights["fixed.classifier.bias"] + 2.0}
    state = Personal(mine, {}).packed()
    free = own(federation.do(TrainDitto(SUBNET, local, 0.0, RULES, validation="unused"), state))
    pulled = own(federation.do(TrainDitto(SUBNET, local, 0.5, RULES, validation="unused"), state))
    # .05 * .5 * (own - received) = .05 * .5 * 2
    moved = free.weights["fixed.classifier.bias"] - pulled.weights["fixed.classifier.bias"]
    assert moved.tolist() == pytest.approx([0.05] * 10, abs=1e-6)
    assert torch.equal(free.weights["fixed.classifier.weight"], pulled.weights["fixed.classifier.weight"]), (
        "no distance, no pull"
    )


class DittoByHand:
    """The silo's own model with one optimiser for all rounds."""

    def __init__(self, module: nn.Module, pull: float) -> None:
        self.module, self.pull = module, pull
        self.optimizer = torch.optim.SGD(module.parameters(), lr=LOCAL.lr, momentum=LOCAL.momentum)

    def round(self, received: dict[str, Tensor], batches: list[Data]) -> None:
        """Local SGD, pulled towards what was received."""
        named = dict(self.module.named_parameters())
        for x, y in batches:
            far = sum(((p - received[n]) ** 2).sum() for n, p in named.items())
            loss = F.cross_entropy(self.module(x), y) + self.pull / 2 * far
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.module.parameters(), LOCAL.clip_norm)
            self.optimizer.step()


def test_the_own_model_of_ditto_goes_on_over_rounds_with_its_momentum(federation: Federation) -> None:
    task, hand = TrainDitto(SUBNET, LOCAL, 0.3, RULES, validation="unused"), DittoByHand(federation.module(), 0.3)
    state: Weights | None = None
    received = federation.weights
    for round_ in range(2):
        there = replace(federation, weights=received)
        outcome = there.do(task, state, round_)
        hand.round(received, batches_of(federation.data(), federation.stream("batches", round_)))
        state, received = outcome.state, elsewhere(received)
    assert state is not None
    found = unpacked(state)
    assert_close(dict(found.weights), {**dict(hand.module.named_parameters()), **dict(hand.module.named_buffers())})
    buffers = {n: hand.optimizer.state[p]["momentum_buffer"] for n, p in hand.module.named_parameters()}
    assert_close(dict(found.momentum), buffers)
    without = Personal(found.weights, {}).packed()
    assert not torch.equal(
        own(federation.do(task, state, 2)).weights["fixed.classifier.bias"],
        own(federation.do(task, without, 2)).weights["fixed.classifier.bias"],
    )


def test_ditto_without_a_pull_is_alone_bit_for_bit_whatever_is_received(federation: Federation) -> None:
    begin = Personal(federation.weights, {}).packed()
    other = replace(federation, weights=elsewhere(federation.weights))
    states = {}
    for pull in (0.0, 0.5):
        task = TrainDitto(SUBNET, LOCAL, pull, RULES)
        first = [there.do(task, begin) for there in (federation, other)]
        states[pull] = [own(there.do(task, o.state, 1)) for there, o in zip((federation, other), first, strict=True)]
    assert_same(dict(states[0.0][0].weights), dict(states[0.0][1].weights))
    assert_same(dict(states[0.0][0].momentum), dict(states[0.0][1].momentum))
    assert not torch.equal(
        states[0.5][0].weights["fixed.classifier.bias"], states[0.5][1].weights["fixed.classifier.bias"]
    )


def test_what_ditto_sends_is_what_fedavg_sends_and_nothing_of_the_silos_own(federation: Federation) -> None:
    state = Personal(elsewhere(federation.weights), {}).packed()
    outcome = federation.do(TrainDitto(SUBNET, LOCAL, 0.3, RULES), state)
    # By a worker of its own: what is sent may lie in a worker's module.
    alone = replace(federation, worker=Worker(federation.world.spec)).do(Train(SUBNET, LOCAL, validation="trained"))
    assert_same(sent(outcome), sent(alone))
    assert outcome.update is not None
    assert alone.update is not None
    assert outcome.update.weights == alone.update.weights
    assert outcome.bytes_up == alone.bytes_up == bytes_of(federation.weights)
    assert outcome.macs == 2 * alone.macs
    assert outcome.steps == 2 * alone.steps
    mine = own(outcome).weights
    assert sent(outcome).keys() == federation.weights.keys()
    same = [n for n, t in sent(outcome).items() if t.is_floating_point() and torch.equal(t, mine[n])]
    assert same == []
    assert {t.data_ptr() for t in sent(outcome).values()}.isdisjoint(t.data_ptr() for t in mine.values())


def test_a_run_of_ditto_keeps_a_model_per_silo_and_scores_it(make_config: Make, run_in_memory: Run) -> None:
    config = make_config(DittoConfig(train=DittoTrainingConfig(rounds=2, batch_size=12, use_validation=False)))
    config.method.train.evaluate_every = 1
    world, memory, state = run_in_memory(config)
    groups = state.groups
    heads = [unpacked(groups[f"client-{c}"].tensors).weights["fixed.classifier.bias"].tolist() for c in range(3)]
    shared = groups["supernet"].tensors
    assert len({tuple(h) for h in [*heads, shared["fixed.classifier.bias"].tolist()]}) == 4
    rows = memory.table("evaluations")
    assert set(rows.model) == {"personal"}
    assert sorted(rows[(rows.split == "test") & (rows.metric == "accuracy")].client_id) == [0, 1, 2]
    there = Federation(world, Worker(world.spec), dict(shared))
    for client_id in range(3):
        scored = there.do(ScoreOwn(SUBNET), dict(groups[f"client-{client_id}"].tensors), client_id=client_id)
        row = rows[(rows.split == "test") & (rows.metric == "accuracy") & (rows.client_id == client_id)]
        assert row.value.tolist() == [values(scored)["personal", "accuracy"]]


# -- the round's settings and scores ----------------------------------------------------------------------------------


def accuracy(module: nn.Module, data: Data) -> float:
    correct: int = (module.eval()(data[0]).argmax(dim=1) == data[1]).sum().item()
    return correct / len(data[1])


def test_a_score_on_validation_data_is_of_the_weights_that_are_sent(federation: Federation) -> None:
    for task in (Train(SUBNET, LOCAL, validation="scored"), TrainMeta(SUBNET, LOCAL, 0.05, RULES, "scored")):
        outcome = federation.do(task)
        module = federation.module()
        module.load_state_dict(sent(outcome))
        assert values(outcome)["global", "accuracy"] == accuracy(module, federation.data("validation"))
    outcome = federation.do(TrainDitto(SUBNET, LOCAL, 0.1, RULES, "scored"))
    module.load_state_dict(dict(own(outcome).weights))
    assert values(outcome)["personal", "accuracy"] == accuracy(module, federation.data("validation"))
    assert all(isinstance(m, Measurement) and m.split == "validation" for m in outcome.measurements)


def test_a_round_has_the_settings_that_were_given(make_config: Make) -> None:
    def task_of(method: Any) -> Any:
        method.train = replace(method.train, rounds=3, lr=0.2)
        training = build_stages(build_world(make_config(method)))[0]
        return training.plan(replace(training.begin(RunState()), round=1)).assignments[0].task

    assert task_of(DittoConfig(train=DittoTrainingConfig(pull=0.7))).pull == 0.7
    meta = task_of(PerFedAvgConfig(train=PerFedAvgTrainingConfig(local_factor=3.0)))
    # Half of the cosine, down to 0 in the last round; the inner rate stays, as silos adapt with it in the end.
    assert (meta.local.lr, meta.inner_lr) == (pytest.approx(0.1), pytest.approx(0.6))
