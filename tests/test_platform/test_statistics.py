"""Running statistics of subnets: estimated anew before every score, while what is shared stays as it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.evaluation import Score, estimate_statistics, evaluate
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.scoring import ScoreSubnet, calibration_samples, score_subnets, scored_subnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import LocalSGD, Samples
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.slices import Architecture, extract

Make = Callable[..., RunConfig]
A: Architecture = (3, 1)
B: Architecture = (0, 5)


@dataclass
class Setting:
    """A worker on a space with batch norms, and supernet tensors in which no statistic is at its beginning."""

    space: ElasticSpace
    worker: Worker
    weights: dict[str, Tensor]

    def do(self, task: ScoreSubnet | Train, weights: Mapping[str, Tensor] | None = None) -> ClientResult:
        client = None if isinstance(task, ScoreSubnet) else 3
        return task.run(self.worker, Assignment("test", 0, client, "tier1", task), weights or self.weights)


@pytest.fixture
def setting(elastic_config: Make) -> Setting:
    world = build_world(elastic_config("batch"))
    assert isinstance(world.space, ElasticSpace)
    # As the plain modules that the worker is compared with: kernels of other layouts differ in the last bit.
    worker = Worker(replace(world.spec, memory_format="contiguous"))
    return Setting(world.space, worker, disturbed(world.space.initial_weights(torch_stream(1, "test"))))


def disturbed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch_stream(2, "test")
    for name, tensor in weights.items():
        if "running" in name:
            tensor.add_(torch.rand(tensor.shape, generator=generator))
        elif "num_batches" in name:
            tensor.fill_(17)
    return weights


def measured(forward: Callable[[Tensor], Tensor], data: Samples) -> Score:
    return evaluate(forward, data, Objective())


def score(setting: Setting, architecture: Architecture) -> tuple[float | None, float | None]:
    outcome = setting.do(ScoreSubnet(Subnet(architecture), "supernet", "validation"))
    return outcome.loss, outcome.metric


# -- through the tasks ------------------------------------------------------------------------------------------------


def test_scoring_a_then_b_then_a_gives_a_the_same_score_and_touches_nothing(setting: Setting) -> None:
    before = {name: tensor.clone() for name, tensor in setting.weights.items()}
    first, other, again = score(setting, A), score(setting, B), score(setting, A)
    assert first == again
    assert first != other
    assert all(torch.equal(setting.weights[name], tensor) for name, tensor in before.items())


def test_training_in_between_does_not_change_a_score(setting: Setting) -> None:
    first = score(setting, A)
    setting.do(Train(Subnet(A), LocalSGD(epochs=1, batch_size=16, lr=0.1)))
    assert score(setting, A) == first


def test_the_score_is_that_of_the_estimated_statistics(setting: Setting) -> None:
    module = setting.space.build_subnet(A)
    module.load_state_dict(extract(setting.weights, setting.space.slices(A)))
    module.eval()
    data = setting.worker.central_data("validation")
    stale = measured(module, data)
    estimate_statistics(module, calibration_samples(setting.worker))
    fresh = measured(module, data)
    assert score(setting, A) == (fresh.loss, fresh.metric)
    assert fresh.loss != stale.loss


def test_a_search_scores_as_the_final_evaluation_does(setting: Setting) -> None:
    data = setting.worker.central_data("validation")
    scores = score_subnets(setting.worker, (A, B, A), setting.weights, "supernet@0", data, torch_stream(1, "score"))
    assert [s.loss for s in scores] == [score(setting, a)[0] for a in (A, B, A)]


def test_a_model_trained_alone_keeps_its_own_statistics(setting: Setting) -> None:
    own = disturbed(setting.space.initial_subnet_weights(A, torch_stream(5, "test")))
    kept = scored_subnet(setting.worker, Subnet(A, stand_alone=True), own)
    assert all(torch.equal(tensor, own[name]) for name, tensor in kept.state_dict().items())
    reference = setting.space.build_subnet(A)
    reference.load_state_dict(own)
    expected = measured(reference.eval(), setting.worker.central_data("validation"))
    outcome = setting.do(ScoreSubnet(Subnet(A, stand_alone=True), "alone", "validation"), own)
    assert (outcome.loss, outcome.metric) == (expected.loss, expected.metric)
    cut = scored_subnet(setting.worker, Subnet(A), setting.weights)
    slices = extract(setting.weights, setting.space.slices(A))
    changed = {n for n, t in cut.state_dict().items() if not torch.equal(t, slices[n])}
    assert changed == {n for n in slices if "running" in n or "num_batches" in n}


@pytest.mark.parametrize("norm", ["none", "group"])
def test_without_batch_norms_nothing_is_estimated(elastic_config: Make, norm: str) -> None:
    world = build_world(elastic_config(norm))
    assert isinstance(world.space, ElasticSpace)
    weights = world.space.initial_weights(torch_stream(1, "test"))
    module = scored_subnet(Worker(world.spec), Subnet(A), weights)
    slices = extract(weights, world.space.slices(A))
    assert all(torch.equal(tensor, slices[name]) for name, tensor in module.state_dict().items())


def test_calibration_samples_are_spread_and_come_without_test_data(setting: Setting) -> None:
    x, _ = setting.worker.central_data("validation").tensors()
    found = calibration_samples(setting.worker)
    assert len(found) == min(512, len(x))
    assert torch.equal(found[0], x[0])
    assert torch.equal(found[-1], x[-1])


def test_without_validation_data_a_subnet_cannot_be_scored(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setting.worker, "central_data", lambda *_: [])
    with pytest.raises(ValueError, match=r"estimated from: raise data\.validation_share"):
        calibration_samples(setting.worker)


# -- the estimate itself ----------------------------------------------------------------------------------------------


def two_norms() -> nn.Sequential:
    generator = torch_stream(3, "test")
    module = nn.Sequential(
        nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 1, bias=False), nn.BatchNorm2d(2)
    )
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.1)
    return module


def moments(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per channel the mean, and the variances that normalise (over n) and that are kept (over n - 1)."""
    channels = y.transpose(0, 1).flatten(1)
    return channels.mean(1), channels.var(1, correction=0), channels.var(1, correction=1)


def reference(module: nn.Sequential, batches: list[Tensor]) -> dict[str, Tensor]:
    """Batch by batch through the layers; the second norm sees what the first one makes of the batch's own moments."""
    state = {n: t.double() for n, t in module.state_dict().items()}
    kept: dict[str, list[Tensor]] = {f"{i}.running_{m}": [] for i in (1, 4) for m in ("mean", "var")}
    for x in batches:
        y = x.double()
        for convolution, norm in ((0, 1), (3, 4)):
            y = F.conv2d(y, state[f"{convolution}.weight"])
            mean, biased, unbiased = moments(y)
            kept[f"{norm}.running_mean"].append(mean)
            kept[f"{norm}.running_var"].append(unbiased)
            y = (y - mean[:, None, None]) / (biased[:, None, None] + 1e-5).sqrt()
            y = F.relu(y * state[f"{norm}.weight"][:, None, None] + state[f"{norm}.bias"][:, None, None])
    return {name: torch.stack(values).mean(0) for name, values in kept.items()}


@pytest.mark.parametrize(("samples", "batches"), [(24, 3), (20, 3), (5, 1), (9, 2)])
def test_statistics_are_the_mean_over_batches(samples: int, batches: int) -> None:
    module = two_norms().eval()
    x = torch.randn((samples, 2, 6, 6), generator=torch_stream(4, "test"))
    expected = reference(module, [x[first::batches] for first in range(batches)])
    parameters = {n: p.clone() for n, p in module.named_parameters()}
    estimate_statistics(module, x, batch_size=8)
    state = module.state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name].double(), tensor, rtol=1e-5, atol=1e-6, msg=name)
    assert all(torch.equal(p, parameters[n]) for n, p in module.named_parameters())
    assert not any(part.training for part in module.modules())
    assert [module[i].momentum for i in (1, 4)] == [0.1, 0.1]


def test_samples_that_come_client_by_client_show_their_whole_variance() -> None:
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1)).eval()
    with torch.no_grad():
        module[0].weight.fill_(1.0)
    clients = torch.arange(4.0).repeat_interleave(128)[:, None]  # four clients, each with a value of its own
    estimate_statistics(module, clients)
    assert module[1].running_mean.item() == pytest.approx(1.5)
    assert module[1].running_var.item() == pytest.approx(1.25, rel=0.02)


def test_one_sample_more_than_the_batches_hold_is_no_batch_of_its_own() -> None:
    # Where the map is a single pixel, a batch of one has no variance: torch refuses it.
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
    estimate_statistics(module, torch.randn((9, 3), generator=torch_stream(4, "test")), batch_size=8)
    assert bool(module.state_dict()["1.running_var"].isfinite().all())


def test_an_estimate_does_not_remember_the_one_before() -> None:
    module = two_norms().eval()
    x, other = (torch.randn((16, 2, 6, 6), generator=torch_stream(i, "test")) for i in (4, 5))
    estimate_statistics(module, x, batch_size=8)
    first = {n: t.clone() for n, t in module.state_dict().items()}
    estimate_statistics(module, other, batch_size=8)
    estimate_statistics(module, x, batch_size=8)
    assert all(torch.equal(t, first[n]) for n, t in module.state_dict().items())


def test_after_an_error_a_module_is_as_it_was_before() -> None:
    """A worker uses a supernet's module again, for other clients."""
    module = two_norms().eval()
    norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
    before = [norm.momentum for norm in norms]

    def fails(_x: Tensor) -> None:
        raise ValueError("out of memory, say")

    with pytest.raises(ValueError, match="say"):
        estimate_statistics(module, torch.zeros((16, 2, 6, 6)), forward=fails)
    assert [(norm.momentum, norm.training) for norm in norms] == [(momentum, False) for momentum in before]


def test_dropout_stays_off_while_statistics_are_estimated() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3)).eval()
    x = torch.randn((8, 3), generator=torch_stream(4, "test"))
    estimate_statistics(module, x)
    torch.testing.assert_close(module[1].running_mean, x.mean(0))
