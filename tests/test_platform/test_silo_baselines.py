"""Personalised baselines: one step in literal numbers, whole rounds beside slow references, and what is refused."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.clients.execution import Assignment, Measurement, Outcome, Task
from fedloom.platform.clients.training import SGD, LocalSGD, batch_indices, train_locally
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.personalised import (
    AdaptationConfig,
    DittoConfig,
    DittoTrainingConfig,
    KnnPerConfig,
    LocalAdaptationConfig,
    PerFedAvgConfig,
    PerFedAvgTrainingConfig,
)
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.silo_stage import SiloStage, SiloTrainingConfig
from fedloom.platform.seeding import torch_stream
from fedloom.platform.silos import knn_per
from fedloom.platform.silos.batches import endless_batches
from fedloom.platform.silos.ditto import TrainDitto
from fedloom.platform.silos.fedavg import TrainShared
from fedloom.platform.silos.knn_per import ScoreNearest, best_share, nearest_labels, score_of
from fedloom.platform.silos.per_fedavg import MetaStep, TrainMeta
from fedloom.platform.silos.scoring import AdaptAndScore, ScoreOwn, ScoreShared
from fedloom.platform.silos.state import Personal, unpacked
from fedloom.platform.spaces.slices import Weights, bytes_of

Make = Callable[..., RunConfig]
Run = Callable[[RunConfig], tuple[World, Any, RunState]]
Refused = Callable[[RunConfig], str]
Data = tuple[Tensor, Tensor]

ONLY = (0, 0, 0)
"""The space's first architecture, which the methods take if none is given."""

LOCAL = LocalSGD(epochs=1, batch_size=12, lr=0.05, momentum=0.9, clip_norm=5.0)


@dataclass(frozen=True)
class Federation:
    """Three silos, a small network that all of them train, and its first weights."""

    world: World
    worker: Worker
    weights: dict[str, Tensor]

    def do(self, task: Task, state: Weights | None = None, round_: int = 0, client_id: int = 0) -> Outcome:
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


def values(outcome: Outcome) -> dict[tuple[str, str], float]:
    return {(m.model, m.metric): m.value for m in outcome.measurements}


def sent(outcome: Outcome) -> dict[str, Tensor]:
    assert outcome.update is not None
    return dict(outcome.update.tensors)


def own(outcome: Outcome) -> Personal:
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

    step = MetaStep(SGD(local, [slope.w]), slope, forever(), inner_lr)

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


def test_a_round_of_per_fedavg_is_first_order_maml_and_counts_two_batches_per_step(federation: Federation) -> None:
    outcome = federation.do(TrainMeta(ONLY, LOCAL, inner_lr=0.1, joined=False))
    data = federation.data()
    batches = batches_of(data, federation.stream("batches"))
    endless = endless_batches(data, LOCAL, federation.stream("meta_batches"))
    module = federation.module()
    meta_by_hand(module, data, batches, [next(endless) for _ in batches], 0.1)
    assert_close(sent(outcome), {**dict(module.named_parameters()), **dict(module.named_buffers())})
    assert len(batches) >= 3
    per_sample = federation.world.macs_table.cost(ONLY)
    assert outcome.macs == pytest.approx(2 * per_sample * len(data[1]))
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
    free = own(federation.do(TrainDitto(ONLY, local, 0.0, joined=False), state))
    pulled = own(federation.do(TrainDitto(ONLY, local, 0.5, joined=False), state))
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
    task, hand = TrainDitto(ONLY, LOCAL, 0.3, joined=False), DittoByHand(federation.module(), 0.3)
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
        task = TrainDitto(ONLY, LOCAL, pull)
        first = [there.do(task, begin) for there in (federation, other)]
        states[pull] = [own(there.do(task, o.state, 1)) for there, o in zip((federation, other), first, strict=True)]
    assert_same(dict(states[0.0][0].weights), dict(states[0.0][1].weights))
    assert_same(dict(states[0.0][0].momentum), dict(states[0.0][1].momentum))
    assert not torch.equal(
        states[0.5][0].weights["fixed.classifier.bias"], states[0.5][1].weights["fixed.classifier.bias"]
    )


def test_what_ditto_sends_is_what_fedavg_sends_and_nothing_of_the_silos_own(federation: Federation) -> None:
    state = Personal(elsewhere(federation.weights), {}).packed()
    outcome = federation.do(TrainDitto(ONLY, LOCAL, 0.3), state)
    alone = federation.do(TrainShared(ONLY, LOCAL))
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
    bags = state.bags
    heads = [unpacked(bags[f"client-{c}"].tensors).weights["fixed.classifier.bias"].tolist() for c in range(3)]
    shared = bags["supernet"].tensors
    assert len({tuple(h) for h in [*heads, shared["fixed.classifier.bias"].tolist()]}) == 4
    rows = memory.table("evaluations")
    assert set(rows.model) == {"personal"}
    assert sorted(rows[(rows.split == "test") & (rows.metric == "accuracy")].client_id) == [0, 1, 2]
    there = Federation(world, Worker(world.spec), dict(shared))
    for client_id in range(3):
        scored = there.do(ScoreOwn(ONLY), dict(bags[f"client-{client_id}"].tensors), client_id=client_id)
        row = rows[(rows.split == "test") & (rows.metric == "accuracy") & (rows.client_id == client_id)]
        assert row.value.tolist() == [values(scored)["personal", "accuracy"]]


# -- kNN-Per ----------------------------------------------------------------------------------------------------------


def nearest_by_hand(
    queries: np.ndarray, features: np.ndarray, labels: list[int], classes: int, k: int, scale: float
) -> np.ndarray:
    rows = []
    for query in queries:
        distances = [float(np.sqrt(((query - feature) ** 2).sum())) for feature in features]
        near = sorted(range(len(features)), key=lambda i: distances[i])[:k]
        sigma = scale * sum(distances[i] for i in near) / len(near)
        shares = np.zeros(classes)
        for i in near:
            shares[labels[i]] += np.exp(-distances[i] / sigma)
        rows.append(shares / shares.sum())
    return np.array(rows)


def test_nearest_labels_in_literal_numbers() -> None:
    features = torch.tensor([[1.0], [3.0], [100.0]])
    found = nearest_labels(torch.tensor([[0.0]]), features, torch.tensor([2, 0, 1]), 3, neighbours=2, scale=1.0)
    # Distances 1 and 3, sigma 2: exp(-.5) and exp(-1.5), as e : 1.
    assert found.tolist() == [pytest.approx([1 / (1 + np.e), 0.0, np.e / (1 + np.e)])]
    half = nearest_labels(torch.tensor([[0.0]]), features, torch.tensor([2, 0, 1]), 3, neighbours=2, scale=0.5)
    assert half.tolist() == [pytest.approx([1 / (1 + np.e**2), 0.0, np.e**2 / (1 + np.e**2)])]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 45), st.sampled_from([0.25, 1.0, 4.0]))
def test_nearest_labels_are_those_of_a_loop(seed: int, samples: int, k: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    features, queries = rng.normal(size=(samples, 3)), rng.normal(size=(30, 3))
    labels = rng.integers(0, 4, samples).tolist()
    found = nearest_labels(torch.tensor(queries), torch.tensor(features), torch.tensor(labels), 4, k, scale)
    np.testing.assert_allclose(found.numpy(), nearest_by_hand(queries, features, labels, 4, k, scale), atol=1e-9)
    assert found.sum(dim=1).tolist() == pytest.approx([1.0] * 30)


def test_neighbours_in_the_same_place_count_alike_and_fewer_samples_than_k_are_all_taken() -> None:
    same = nearest_labels(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([0, 0, 0, 1]), 2, 10, 1.0)
    assert same.tolist() == [pytest.approx([0.75, 0.25])] * 2


def test_the_share_is_the_best_and_the_smallest_of_equals() -> None:
    right, wrong = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    y = torch.tensor([1])
    assert best_share(right, wrong, y) == 0.6, "at .5 it is a draw, which goes to the first class"
    assert best_share(wrong, right, y) == 0.0
    assert best_share(right, right, y) == 0.0
    assert best_share(wrong, wrong, y) == 0.0
    near = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    predicted = torch.tensor([[0.55, 0.45], [0.3, 0.7]])
    # The first is right from .1 on, the second, of class 1, only below 2/7: .1 and .2 are equally good.
    assert best_share(near, predicted, torch.tensor([1, 1])) == 0.1
    assert best_share(near[:0], predicted[:0], torch.tensor([], dtype=torch.long)) == 0.0


def test_scores_of_probabilities_in_literal_numbers() -> None:
    score = score_of(torch.tensor([[0.25, 0.75], [0.5, 0.5]]).double(), torch.tensor([1, 1]))
    assert score.loss == pytest.approx(-(np.log(0.75) + np.log(0.5)) / 2)
    assert (score.metric, score.samples) == (0.5, 2)


def misled(federation: Federation) -> Federation:
    """The shared model is sure of a class that the silo has not."""
    _, y = federation.data("validation")
    missing = min(set(range(10)) - set(y.tolist()) - set(federation.data("test")[1].tolist()))
    bias = torch.zeros(10)
    bias[missing] = 20.0
    head = {
        "fixed.classifier.weight": torch.zeros_like(federation.weights["fixed.classifier.weight"]),
        "fixed.classifier.bias": bias,
    }
    return replace(federation, weights={**federation.weights, **head})


def test_neighbours_outvote_a_shared_model_that_is_wrong(make_config: Make) -> None:
    world = build_world(make_config(DittoConfig(), alpha=0.2))
    weights = world.space.initial_subnet_weights(ONLY, torch_stream(1, "first"))
    found = values(misled(Federation(world, Worker(world.spec), weights)).do(ScoreNearest(ONLY, neighbours=5)))
    assert found["global", "accuracy"] == 0.0
    assert found["personal", "neighbour_share"] > 0.5
    assert found["personal", "accuracy"] > 0.5


def test_a_share_of_0_is_the_shared_model(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knn_per, "best_share", lambda *_: 0.0)
    found = values(federation.do(ScoreNearest(ONLY)))
    shared = values(federation.do(ScoreShared(ONLY)))
    for metric in ("accuracy", "loss", "macs", "parameters"):
        assert found["personal", metric] == found["global", metric] == pytest.approx(shared["global", metric])
    assert found["global", "accuracy"] == shared["global", "accuracy"]


def test_neighbours_are_found_by_what_enters_the_classifier_on_training_data(federation: Federation) -> None:
    outcome = federation.do(ScoreNearest(ONLY, neighbours=3))

    def features(split: str) -> Tensor:
        headless = federation.module().eval()
        headless.fixed.classifier = nn.Identity()  # type: ignore[union-attr]
        x: Tensor = headless(federation.data(split)[0])
        return x.detach()

    store, labels = features("train").double().numpy(), federation.data()[1].tolist()
    module = federation.module().eval()

    def mixture(split: str) -> tuple[Tensor, Tensor, Tensor]:
        x, y = federation.data(split)
        near = nearest_by_hand(features(split).double().numpy(), store, labels, 10, 3, 1.0)
        return torch.tensor(near), module(x).detach().double().softmax(dim=1), y

    share = best_share(*mixture("validation"))
    assert share not in (best_share(*mixture("train")), best_share(*mixture("test"))), "the data tell the splits apart"
    near, predicted, y = mixture("test")
    score = score_of(share * near + (1 - share) * predicted, y)
    assert values(outcome)["personal", "neighbour_share"] == share
    assert values(outcome)["personal", "accuracy"] == score.metric
    assert values(outcome)["personal", "loss"] == pytest.approx(score.loss)


def test_a_run_of_knn_per_never_trains_on_validation_data(make_config: Make, run_in_memory: Run) -> None:
    train = SiloTrainingConfig(rounds=2, batch_size=12, use_validation=False)
    config = make_config(KnnPerConfig(train=train))
    world, memory, _ = run_in_memory(config)
    clients = memory.table("clients")
    trained = clients[clients.stage == "knn_per"]
    for client_id, samples in enumerate(world.data.sizes("train").tolist()):
        assert trained[trained.client_id == client_id].samples.tolist() == [samples] * 2
    rows = memory.table("evaluations")
    shares = rows[rows.metric == "neighbour_share"]
    assert sorted(shares.client_id) == [0, 1, 2]
    assert shares.value.isin(knn_per.SHARES).all()


# -- local adaptation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("joined", [True, False])
def test_adaptation_is_local_training_between_two_scores(federation: Federation, joined: bool) -> None:
    outcome = federation.do(AdaptAndScore(ONLY, LOCAL, use_validation=joined))
    x, y = federation.data()
    if joined:
        more = federation.data("validation")
        x, y = torch.cat([x, more[0]]), torch.cat([y, more[1]])
    module = federation.module()
    generator = federation.stream("batches")
    train_locally(module, list(module.parameters()), (x, y), LOCAL, generator)
    before, after = (accuracy(m, federation.data("test")) for m in (federation.module(), module))
    assert values(outcome)["global", "accuracy"] == before
    assert values(outcome)["personal", "accuracy"] == after
    assert before != after
    assert outcome.steps == -(-len(y) // LOCAL.batch_size)
    assert outcome.update is None
    assert outcome.state is None


def accuracy(module: nn.Module, data: Data) -> float:
    correct: int = (module.eval()(data[0]).argmax(dim=1) == data[1]).sum().item()
    return correct / len(data[1])


@pytest.mark.parametrize("method", [LocalAdaptationConfig, PerFedAvgConfig])
def test_the_shared_model_is_scored_before_and_the_adapted_one_after(
    make_config: Make, method: Any, run_in_memory: Run
) -> None:
    config = make_config(method(adapt=AdaptationConfig(epochs=1, lr=0.05)))
    config.method.train = replace(config.method.train, rounds=2, batch_size=12)
    world, memory, state = run_in_memory(config)
    rows = memory.table("evaluations")
    test = rows[(rows.split == "test") & (rows.metric == "accuracy")]
    assert test.groupby("client_id").model.apply(list).tolist() == [["global", "personal"]] * 3
    shared = state.weights("supernet")
    there = Federation(world, Worker(world.spec), dict(shared))
    for client_id in range(3):
        mine = test[test.client_id == client_id].set_index("model").value
        assert mine["global"] == accuracy(there.module(), there.data("test", client_id))
    assert set(state.bags) == {"supernet"}, "nothing stays with a silo"


# -- which data, when -------------------------------------------------------------------------------------------------

METHODS: dict[str, Callable[[], Any]] = {
    "local_adaptation": LocalAdaptationConfig,
    "ditto": DittoConfig,
    "per_fedavg": PerFedAvgConfig,
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("use_validation", [True, False])
def test_validation_data_is_trained_on_or_scored_on_and_never_both(
    make_config: Make, name: str, use_validation: bool, run_in_memory: Run
) -> None:
    config = make_config(METHODS[name]())
    train = replace(config.method.train, rounds=2, batch_size=12, evaluate_every=1, use_validation=use_validation)
    config.method.train = train
    world, memory, _ = run_in_memory(config)
    data = world.data
    expected = data.sizes("train") + (data.sizes("validation") if use_validation else 0)
    clients = memory.table("clients")
    for _, rows in clients[clients.stage == name].groupby("round"):
        assert rows.sort_values("client_id").samples.tolist() == expected.tolist()
    rows = memory.table("evaluations")
    scored = rows[(rows.split == "validation") & (rows.metric == "accuracy")]
    assert len(scored) == (0 if use_validation else 6)
    assert set(scored.model) == (set() if use_validation else {"personal" if name == "ditto" else "global"})


def test_a_score_on_validation_data_is_of_the_weights_that_are_sent(federation: Federation) -> None:
    for task in (TrainShared(ONLY, LOCAL, False, True), TrainMeta(ONLY, LOCAL, 0.05, False, True)):
        outcome = federation.do(task)
        module = federation.module()
        module.load_state_dict(sent(outcome))
        assert values(outcome)["global", "accuracy"] == accuracy(module, federation.data("validation"))
    outcome = federation.do(TrainDitto(ONLY, LOCAL, 0.1, False, True))
    module.load_state_dict(dict(own(outcome).weights))
    assert values(outcome)["personal", "accuracy"] == accuracy(module, federation.data("validation"))
    assert all(isinstance(m, Measurement) and m.split == "validation" for m in outcome.measurements)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_settings_that_cannot_run_are_refused_in_one_line(make_config: Make, refused: Refused) -> None:
    assert (
        refused(make_config(DittoConfig(train=DittoTrainingConfig(pull=-0.1))))
        == "method.train.pull=-0.1: must be 0 (every silo alone) or more"
    )
    for method in (LocalAdaptationConfig, PerFedAvgConfig):
        assert (
            refused(make_config(method(adapt=AdaptationConfig(epochs=0))))
            == "method.adapt.epochs=0, lr=0.01: must be at least 1, and greater than 0"
        )
    assert (
        refused(make_config(PerFedAvgConfig(train=PerFedAvgTrainingConfig(local_factor=0.0))))
        == "method.train.local_factor=0.0: must be greater than 0"
    )
    assert (
        refused(make_config(KnnPerConfig(neighbours=0)))
        == "method.neighbours=0, scale=1.0: must be at least 1, and greater than 0"
    )
    assert (
        refused(make_config(KnnPerConfig(train=SiloTrainingConfig())))
        == "method.train.use_validation: kNN-Per chooses its mixing weight on validation data; set false"
    )
    assert (
        refused(make_config(KnnPerConfig(), validation_share=0.0))
        == "data.validation_share=0 leaves a silo without validation samples to choose the mixing weight with: "
        "raise it, or give each silo more samples"
    )
    assert (
        refused(make_config(DittoConfig(architecture="1-2-9")))
        == "layer 2 of cnn_digits has the operators 0 to 3 (conv(1), ds(3,0.5), mb(1,2), identity), given 9"
    )
    assert refused(make_config(DittoConfig(train=DittoTrainingConfig(rounds=-1)))) == (
        "method.train.rounds=-1: must be at least 1, silos have no model before"
    )


def test_the_baselines_without_a_search_do_without_validation_data(make_config: Make) -> None:
    for method in METHODS.values():
        assert build_stages(build_world(make_config(method(), validation_share=0.0)))


def test_a_round_has_the_settings_that_were_given(make_config: Make) -> None:
    def task_of(method: Any) -> Any:
        method.train = replace(method.train, rounds=3, lr=0.2)
        training = cast(SiloStage, build_stages(build_world(make_config(method)))[0])
        return training.task(RunState(round=1))

    assert task_of(DittoConfig(train=DittoTrainingConfig(pull=0.7))).pull == 0.7
    meta = task_of(PerFedAvgConfig(train=PerFedAvgTrainingConfig(local_factor=3.0)))
    # Half of the cosine, down to 0 in the last round; the inner rate stays, as silos adapt with it in the end.
    assert (meta.local.lr, meta.inner_lr) == (pytest.approx(0.1), pytest.approx(0.6))
