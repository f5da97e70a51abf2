"""How silos make a shared model their own in kNN-Per and local adaptation; which data they use; what is refused."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.clients.assignments import Assignment, ClientResult, Task, TaskError
from fedloom.platform.clients.evaluation import evaluate
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.training import LocalSGD, Optimizer, batch_indices, train_locally
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods import knn_per
from fedloom.platform.methods.ditto import DittoConfig, DittoTrainingConfig
from fedloom.platform.methods.fedmask import FedMaskConfig
from fedloom.platform.methods.knn_per import KnnPerConfig, ScoreNearest, best_share, nearest_labels, score_of
from fedloom.platform.methods.local_adaptation import LocalAdaptationConfig
from fedloom.platform.methods.per_fedavg import InnerStepsConfig, PerFedAvgConfig, PerFedAvgTrainingConfig
from fedloom.platform.methods.pfedme import PFedMeConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.silos import AdaptAndScore, AdaptationConfig, ScoreShared, SiloTrainingConfig
from fedloom.platform.seeding import torch_stream

Make = Callable[..., RunConfig]
Run = Callable[[RunConfig], tuple[World, Any, RunState]]
Refused = Callable[[RunConfig], str]
Data = tuple[Tensor, Tensor]

ONLY = (0, 0, 0)
"""The space's first architecture, which the methods take if none is given."""

SUBNET = Subnet(ONLY, stand_alone=True)
LOCAL = LocalSGD(epochs=1, batch_size=12, lr=0.05, momentum=0.9, clip_norm=5.0)


@dataclass(frozen=True)
class Federation:
    """Three silos, a small network that all of them share, and its first weights."""

    world: World
    worker: Worker
    weights: dict[str, Tensor]

    def do(self, task: Task, client_id: int = 0) -> ClientResult:
        """One piece of a silo's work."""
        with self.worker.data.reading_test():
            return task.run(self.worker, Assignment("train", 0, client_id, "tier1", task), self.weights)

    def module(self) -> nn.Module:
        """A network of its own with the shared weights."""
        module = self.world.space.build_subnet(ONLY)
        module.load_state_dict(self.weights)
        return module.train()

    def data(self, split: str = "train", client_id: int = 0) -> Data:
        """A silo's samples."""
        with self.worker.data.reading_test():
            return self.worker.client_data(client_id, split)


@pytest.fixture
def make_config(silo_config: Make) -> Make:
    return partial(silo_config, train_samples=150)


@pytest.fixture
def federation(make_config: Make) -> Federation:
    return first_of(make_config(DittoConfig()))


def first_of(config: RunConfig) -> Federation:
    """A federation before its first round."""
    world = build_world(config)
    return Federation(world, Worker(world.spec), world.space.initial_subnet_weights(ONLY, torch_stream(1, "first")))


def values(outcome: ClientResult) -> dict[tuple[str, str], float]:
    return {(m.model, m.metric): m.value for m in outcome.measurements}


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


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 45), st.sampled_from([0.25, 1.0, 4.0]))
def test_nearest_labels_are_those_of_a_loop(seed: int, samples: int, k: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    features, queries = rng.normal(size=(samples, 3)), rng.normal(size=(30, 3))
    labels = rng.integers(0, 4, samples).tolist()
    found = nearest_labels(torch.tensor(queries), torch.tensor(features), torch.tensor(labels), 4, k, scale)
    np.testing.assert_allclose(found.numpy(), nearest_by_hand(queries, features, labels, 4, k, scale), atol=1e-9)
    assert found.sum(dim=1).tolist() == pytest.approx([1.0] * 30)


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
    there = misled(first_of(make_config(DittoConfig(), alpha=0.2)))
    found = values(there.do(ScoreNearest(SUBNET, neighbours=5)))
    assert found["global", "accuracy"] == 0.0
    assert found["personal", "neighbour_share"] > 0.5
    assert found["personal", "accuracy"] > 0.5


def test_a_share_of_0_is_the_shared_model(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knn_per, "best_share", lambda *_: 0.0)
    found = values(federation.do(ScoreNearest(SUBNET)))
    shared = values(federation.do(ScoreShared(SUBNET)))
    for metric in ("accuracy", "loss", "macs", "parameters"):
        assert found["personal", metric] == found["global", metric] == pytest.approx(shared["global", metric])
    assert found["global", "accuracy"] == shared["global", "accuracy"]


@pytest.mark.parametrize("joined", [True, False])
def test_neighbours_are_found_by_what_enters_the_classifier(federation: Federation, joined: bool) -> None:
    outcome = federation.do(ScoreNearest(SUBNET, neighbours=3, use_validation=joined))
    splits = ("train", "validation") if joined else ("train",)
    seen = sum(len(federation.data(split)[1]) for split in ("train", "validation", "test"))
    assert outcome.macs == federation.world.macs_table.cost(ONLY) * seen, "its store, what it is tuned on, and the test"

    def features(split: str) -> Tensor:
        headless = federation.module().eval()
        headless.fixed.classifier = nn.Identity()  # type: ignore[union-attr]
        x: Tensor = headless(federation.data(split)[0])
        return x.detach()

    store = torch.cat([features(split) for split in splits]).double().numpy()
    labels = torch.cat([federation.data(split)[1] for split in splits]).tolist()
    module = federation.module().eval()

    def mixture(split: str) -> tuple[Tensor, Tensor, Tensor]:
        x, y = federation.data(split)
        near = nearest_by_hand(features(split).double().numpy(), store, labels, 10, 3, 1.0)
        return torch.tensor(near), module(x).detach().double().softmax(dim=1), y

    def left_out() -> float:
        rest = [np.delete(np.arange(len(labels)), i) for i in range(len(labels))]
        near = [
            nearest_by_hand(store[[i]], store[rest[i]], [labels[j] for j in rest[i]], 10, 3, 1.0)[0]
            for i in range(len(labels))
        ]
        predicted = torch.cat([mixture(split)[1] for split in splits])
        return best_share(torch.tensor(np.array(near)), predicted, torch.tensor(labels))

    share = left_out() if joined else best_share(*mixture("validation"))
    others = (best_share(*mixture("train")), best_share(*mixture("test")))
    assert joined or share not in others, "the data tell the splits apart"
    near, predicted, y = mixture("test")
    score = score_of(share * near + (1 - share) * predicted, y)
    assert values(outcome)["personal", "neighbour_share"] == share
    assert values(outcome)["personal", "accuracy"] == score.metric
    assert values(outcome)["personal", "loss"] == pytest.approx(score.loss)


@pytest.mark.parametrize("joined", [True, False])
def test_a_run_of_knn_per_trains_on_what_the_weight_is_chosen_on_only_by_cross_validation(
    make_config: Make, joined: bool, run_in_memory: Run
) -> None:
    train = SiloTrainingConfig(rounds=2, batch_size=12, use_validation=joined)
    config = make_config(KnnPerConfig(train=train))
    world, memory, _ = run_in_memory(config)
    clients = memory.table("clients")
    trained = clients[clients.stage == "knn_per"]
    sizes = world.data.sizes("train") + (world.data.sizes("validation") if joined else 0)
    for client_id, samples in enumerate(sizes.tolist()):
        assert trained[trained.client_id == client_id].samples.tolist() == [samples] * 2
    rows = memory.table("evaluations")
    shares = rows[rows.metric == "neighbour_share"]
    assert sorted(shares.client_id) == [0, 1, 2]
    assert shares.value.isin(knn_per.SHARES).all()


# -- local adaptation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("joined", [True, False])
def test_adaptation_is_local_training_between_two_scores(federation: Federation, joined: bool) -> None:
    outcome = federation.do(AdaptAndScore(SUBNET, LOCAL, use_validation=joined))
    x, y = federation.data()
    if joined:
        more = federation.data("validation")
        x, y = torch.cat([x, more[0]]), torch.cat([y, more[1]])
    module = federation.module()
    sgd = Optimizer(LOCAL, dict(module.named_parameters()))
    generator = torch_stream(federation.world.spec.training_seed, "batches", "train", 0, 0)
    train_locally(module, sgd, (x, y), LOCAL, generator, objective=Objective())
    before, after = (accuracy(m, federation.data("test")) for m in (federation.module(), module))
    assert values(outcome)["global", "accuracy"] == before
    assert values(outcome)["personal", "accuracy"] == after
    assert before != after
    assert outcome.steps == -(-len(y) // LOCAL.batch_size)
    assert outcome.update is None
    assert outcome.state is None


def test_a_network_that_its_last_step_breaks_is_not_scored(federation: Federation) -> None:
    one_step = replace(LOCAL, batch_size=1000, lr=float("inf"), clip_norm=0.0)
    with pytest.raises(TaskError, match=r"^the trained network is not finite \(first in "):
        federation.do(AdaptAndScore(SUBNET, one_step))


def accuracy(module: nn.Module, data: Data) -> float:
    correct: int = (module.eval()(data[0]).argmax(dim=1) == data[1]).sum().item()
    return correct / len(data[1])


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_per_fedavg_adapts_by_the_plain_steps_that_it_was_trained_for(make_config: Make, steps: int) -> None:
    config = make_config(PerFedAvgConfig(adapt=InnerStepsConfig(steps=steps)))
    config.method.train = replace(
        config.method.train, lr=0.02, batch_size=12, weight_decay=0.1, clip_norm=0.1, local_factor=3.0
    )
    federation = first_of(config)
    task = build_stages(federation.world)[1].plan(RunState()).assignments[0].task
    outcome = federation.do(task)
    x, y = (torch.cat(pair) for pair in zip(federation.data(), federation.data("validation"), strict=True))
    module = federation.module()
    stream = torch_stream(federation.worker.spec.training_seed, "batches", "train", 0, 0)
    for index in islice(batch_indices(len(y), 12, steps, stream), steps):
        gradients = torch.autograd.grad(F.cross_entropy(module(x[index]), y[index]), list(module.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter -= 0.06 * gradient
    assert outcome.steps == steps
    assert values(outcome)["personal", "accuracy"] == accuracy(module, federation.data("test"))
    score = evaluate(module.eval(), federation.data("test"), Objective())
    assert values(outcome)["personal", "loss"] == pytest.approx(score.loss, rel=1e-3)


@pytest.mark.parametrize(
    "method",
    [
        LocalAdaptationConfig(adapt=AdaptationConfig(epochs=1, lr=0.05)),
        PerFedAvgConfig(adapt=InnerStepsConfig(steps=2, lr=0.05)),
    ],
)
def test_the_shared_model_is_scored_before_and_the_adapted_one_after(
    make_config: Make, method: Any, run_in_memory: Run
) -> None:
    config = make_config(method)
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
    assert set(state.groups) == {"supernet"}, "nothing stays with a silo"


# -- which data, when -------------------------------------------------------------------------------------------------

METHODS: dict[str, Callable[[], Any]] = {
    "local_adaptation": LocalAdaptationConfig,
    "ditto": DittoConfig,
    "per_fedavg": PerFedAvgConfig,
    "pfedme": PFedMeConfig,
    "fedmask": FedMaskConfig,
    "knn_per": KnnPerConfig,
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
    model = "personal" if name in ("ditto", "pfedme", "fedmask") else "global"
    assert set(scored.model) == (set() if use_validation else {model})


# -- what is refused --------------------------------------------------------------------------------------------------


def test_settings_that_cannot_run_are_refused_in_one_line(make_config: Make, refused: Refused) -> None:
    def said(method: Any, **data: Any) -> str:
        return refused(make_config(method, **data))

    assert said(DittoConfig(train=DittoTrainingConfig(pull=-0.1))) == "method.train.pull=-0.1: must be 0 or more"
    assert said(DittoConfig(train=DittoTrainingConfig(rounds=-1))) == "method.train.rounds=-1: must be at least 1"
    for name, method, adapt in (
        ("epochs", LocalAdaptationConfig, AdaptationConfig),
        ("steps", PerFedAvgConfig, InnerStepsConfig),
    ):
        none = said(method(adapt=adapt(**{name: 0})))  # type: ignore[operator]
        assert none == f"method.adapt.{name}=0: must be between 1 and 100000"
        assert said(method(adapt=adapt(lr=0.0))) == "method.adapt.lr=0.0: must be greater than 0, or null"  # type: ignore[operator]
    assert (
        said(PerFedAvgConfig(train=PerFedAvgTrainingConfig(local_factor=0.0)))
        == "method.train.local_factor=0.0: must be greater than 0"
    )
    assert said(KnnPerConfig(neighbours=0)) == "method.neighbours=0: must be between 1 and 1000000"
    assert said(KnnPerConfig(scale=0.0)) == "method.scale=0.0: must be greater than 0"
    assert (
        said(KnnPerConfig(train=SiloTrainingConfig(use_validation=False)), validation_share=0.0)
        == "data.validation_share=0 leaves a silo without validation samples to choose the mixing weight with: "
        "raise it, or give each silo more samples"
    )
    assert (
        said(DittoConfig(architecture="1-2-9"))
        == "method.architecture: layer 2 of cnn_digits has the operators 0 to 3 "
        "(conv(1), ds(3,0.5), mb(1,2), identity), given 9"
    )


def test_the_baselines_without_a_search_do_without_validation_data(make_config: Make) -> None:
    for method in METHODS.values():
        assert build_stages(build_world(make_config(method(), validation_share=0.0)))
