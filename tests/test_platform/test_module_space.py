"""Networks as they are: what is trained, sent and kept of them, their own weights, and samples of several tensors."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedloom.experiments.export.export import correct_by_sample
from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.averaging.aggregators import KeptUpdates
from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.clients.execution import SharedWeights, run_assignment
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.loop import InterruptedRunError
from fedloom.platform.federation.training_config import PrivacyConfig, TrainingConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.feddf import FedDFConfig
from fedloom.platform.methods.fedproto import FedProtoConfig
from fedloom.platform.methods.knn_per import KnnPerConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.superfednas import SuperFedNASConfig
from fedloom.platform.plugins import PluginError
from fedloom.platform.results.checkpoint import load_model
from fedloom.platform.results.paths import find_run, list_runs
from fedloom.platform.results.tables import is_done
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.runs.run import Watcher, make_serial, resume_run, start_run
from fedloom.platform.spaces.base import travelling
from fedloom.platform.spaces.module import ModuleSpace
from fedloom.platform.spaces.space_config import SpaceConfig

SOURCE = '''
from typing import Annotated

import numpy as np
import torch
from annotated_types import Interval
from sklearn.datasets import load_digits
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from fedloom.platform.clients.objectives import Objective
from fedloom.platform.data.arrays import Arrays


def frozen(input_shape, num_classes):
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU()).requires_grad_(False)
    return nn.Sequential(body, nn.Linear(32, num_classes))


def resting():
    body = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Dropout()).requires_grad_(False).eval()
    return nn.Sequential(body, nn.Linear(64, 10))


def file_body():
    body = nn.Linear(64, 32).requires_grad_(False)
    body.weight.data.fill_(float(open(FILE).read()))
    return nn.Sequential(nn.Flatten(), body, nn.Linear(32, 10))


class Lora(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A, self.B = nn.Parameter(torch.randn(rank, 64)), nn.Parameter(torch.zeros(10, rank))

    def forward(self, x):
        return self.base(x) + x @ self.A.T @ self.B.T


def lora():
    return nn.Sequential(nn.Flatten(), Lora(nn.Linear(64, 10)))


def sized(input_shape, num_classes, *, hidden: Annotated[int, Interval(ge=2)] = 4):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))


class ViT(nn.Module):
    def __init__(self, classes, size=16):
        super().__init__()
        self.patches = nn.Conv2d(1, size, 2, stride=2)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, size)), nn.Parameter(torch.randn(1, 17, size))
        self.layer = nn.TransformerEncoderLayer(size, 2, 32, batch_first=True)
        self.head = nn.Linear(size, classes)

    def forward(self, x):
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], dim=1)
        return self.head(self.layer(tokens + self.places)[:, 0])


def vit(input_shape, num_classes):
    torch.manual_seed(3)  # as if it were trained
    return ViT(num_classes)


def resnet(input_shape, num_classes):
    torch.manual_seed(3)
    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes)
    model.conv1 = nn.Conv2d(1, 64, 3, bias=False)
    return model


class Adapted(nn.Module):
    """Named like the layers of `peft`."""

    def __init__(self, base_layer, rank):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base_layer.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def adapted(input_shape, num_classes):
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), Adapted(nn.Linear(64, 32), 4), nn.ReLU(), Adapted(nn.Linear(32, num_classes), 4))


class Tied(nn.Module):
    """An autoencoder whose decoder is its encoder, then a classifier; with dropout and both kinds of norms."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 8, bias=False), nn.Linear(64, 8, bias=False)
        self.decoder.weight = self.encoder.weight
        self.norms = nn.Sequential(nn.BatchNorm1d(64), nn.LayerNorm(64), nn.Dropout(0.1))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.norms(self.encoder(x.flatten(1)) @ self.decoder.weight))


class Wanders(nn.Module):
    """Does another number of steps for every batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        x = x.flatten(1)
        return sum(self.layer(x) for _ in range(1 + int(x.sum().item() > 1e9)))


def short():
    return nn.Sequential(nn.Flatten(), nn.Linear(63, 10))


def thirteen(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 13))


def still():
    return nn.Linear(8, 10).requires_grad_(False)


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.ones(8, 5, dtype=torch.cfloat))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x.squeeze(1)) * self.filter, n=10).sum(dim=1)


class Causal(nn.Module):
    """Attention over the rows of an image, of which each sees those above it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(8))
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(64, 10)

    def forward(self, x):
        rows = x.squeeze(1)
        return self.head(self.attention(rows, rows, rows, attn_mask=self.mask)[0].flatten(1))


def lazy():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))


def scripted():
    return nn.Sequential(nn.Flatten(), torch.jit.script(nn.Linear(64, 10)))


class Stops(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1)).detach()


def stops():
    return Stops(64, 10)


NETWORK = nn.Linear(64, 10)  # whose weights are drawn when the file is imported


def number():
    return 5


class Fails(nn.Linear):
    def forward(self, x):
        return x.flatten(1)[:, :, 0]


def fails():
    return Fails(64, 10)


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True), nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.lstm(x[:, 0])[0][:, -1])


class Functional(Drops):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        return self.head(nn.functional.dropout(self.lstm(x[:, 0])[0][:, -1], 0.5, self.training))


class Former(nn.Module):
    def __init__(self, classes, size=8):
        super().__init__()
        self.embed = nn.Embedding(30, size)
        self.layer = nn.TransformerEncoderLayer(size, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(size, classes)

    def forward(self, input_ids, attention_mask):
        hidden = self.layer(self.embed(input_ids), src_key_padding_mask=~attention_mask)
        return {"logits": self.head(hidden[:, 0]), "hidden": hidden}


def former(input_shape, num_classes):
    assert input_shape == {"input_ids": (6,), "attention_mask": (6,)}
    return Former(num_classes)


def texts(config):
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 30, (120, 6))
    ids[:, 0] = labels = rng.integers(0, 3, 120)
    mask = np.arange(6) < rng.integers(2, 7, 120)[:, None]
    return Arrays(({"input_ids": ids, "attention_mask": mask}, labels, np.arange(120) % 8))


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return {"value": self.layer(x)[:, 0], "features": (x,)}


def values(config):
    x = np.random.default_rng(0).normal(size=(80, 3))
    return Arrays((x, {"value": x @ [1.0, -2.0, 0.5]}))


class Several(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer, self.head = nn.Linear(64, 8), nn.Linear(8, classes)

    def forward(self, x):
        hidden = self.layer(x.flatten(1))
        return {"logits": self.head(hidden), "hidden": hidden, "value": hidden[:, 0]}


def several(input_shape, num_classes):
    return Several(num_classes)


def one_score(input_shape, num_classes):
    network = Several(num_classes)
    network.score = nn.Linear(8, 1)
    return network


def brightness(config):
    images = load_digits().images[:, None] / 16
    return Arrays((images, {"value": images.mean(axis=(1, 2, 3))}))


def weighted_digits(config):
    digits = load_digits()
    labels = {"label": digits.target, "weight": np.where(digits.target < 5, 1.0, 0.5)}
    return Arrays((digits.images[:, None] / 16, labels), class_names=[str(i) for i in range(10)])


class Weighted(Objective):
    def targets(self, outputs, targets):
        return outputs, targets["label"]

    def loss(self, outputs, targets):
        return (targets["weight"] * self.losses(outputs, targets)).mean()


def one_logit(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1))


class Odd(Objective):
    """Whether a digit is odd, by binary cross entropy of the only logit."""

    def losses(self, outputs, targets):
        return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], targets % 2.0, reduction="none")

    def loss(self, outputs, targets):
        return self.losses(outputs, targets).mean()

    def loss_sum(self, outputs, targets):
        return self.losses(outputs, targets).sum()

    def metric_sum(self, outputs, targets):
        return ((outputs[:, 0] > 0) == (targets % 2 == 1)).sum()


class Squares(Objective):
    def targets(self, outputs, targets):
        return outputs["value"], targets["value"]

    def losses(self, outputs, targets):
        value, wanted = self.targets(outputs, targets)
        return (value - wanted) ** 2

    def loss(self, outputs, targets):
        return self.losses(outputs, targets).mean()

    def loss_sum(self, outputs, targets):
        return self.losses(outputs, targets).sum()

    def metric_sum(self, outputs, targets):
        return (self.losses(outputs, targets) < 0.01).sum()
'''

Make = Callable[..., RunConfig]


@pytest.fixture(scope="module", autouse=True)
def my_net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A module of a user's, importable in this process."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "value").write_text("0.5")
    (folder / "my_net.py").write_text(SOURCE.replace("FILE", repr(str(folder / "value"))))
    sys.path.insert(0, str(folder))
    sys.modules.pop("my_net", None)  # the pages' code has one of this name, too
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("my_net", None)


@pytest.fixture
def config_of(tiny_config_in: Make) -> Make:
    def make(results: Path, build: str, space: Any = None, train: Any = None, **changes: Any) -> RunConfig:
        training = TrainingConfig(**{"rounds": 2, "clients_per_round": 3, "batch_size": 8, **(train or {})})
        named = SpaceConfig("module", build=f"my_net:{build}", **(space or {}))
        tiers = TiersConfig(count=1)
        return tiny_config_in(results, space=named, tiers=tiers, method=FedAvgConfig(train=training), **changes)

    return make


def own(build: str, seed: int = 1, **changes: Any) -> tuple[ModuleSpace, dict[str, torch.Tensor]]:
    """A space of digits, and the weights with which a run begins."""
    space = ModuleSpace(SpaceConfig("module", build=f"my_net:{build}", input_shape=[1, 8, 8], **changes))
    return space, space.initial_weights(torch.Generator().manual_seed(seed))


# -- what is trained and sent -----------------------------------------------------------------------------------------


def test_training_starts_from_the_networks_own_weights_drawn_with_the_runs_seed() -> None:
    space, weights = own("lora", seed=7)
    assert [*weights] == ["1.A", "1.B"]
    assert torch.equal(weights["1.B"], torch.zeros(10, 2)), "as it was, and not drawn anew"
    torch.manual_seed(7)
    assert torch.equal(weights["1.A"], sys.modules["my_net"].lora()[1].A)
    assert not torch.equal(weights["1.A"], own("lora", seed=8)[1]["1.A"])
    base = [space.build_subnet((0,))[1].base.weight for _ in range(2)]
    assert base[0].data_ptr() == base[1].data_ptr(), "constants are held once"


@pytest.mark.parametrize("build", ["vit", "resnet", "adapted"])
def test_a_run_begins_with_the_weights_that_a_network_has(config_of: Make, tmp_path: Path, build: str) -> None:
    first = build_stages(build_world(config_of(tmp_path, build)))[0].begin(RunState()).weights("fedavg")
    own_weights = travelling(getattr(sys.modules["my_net"], build)((1, 8, 8), 10))
    assert first.keys() == own_weights.keys()
    assert any(name.endswith("lora_B.default.weight") for name in first) == (build == "adapted")
    for name, tensor in own_weights.items():
        if isinstance(tensor, nn.Parameter):
            assert torch.equal(first[name], tensor.data), name


def test_what_a_file_draws_when_it_is_imported_changes_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "my_net")
    first, second = own("frozen"), own("frozen")
    assert first[0].constants_hash == second[0].constants_hash, "with the first, the file was imported"
    assert torch.equal(first[1]["1.weight"], second[1]["1.weight"])


def test_what_needs_no_gradient_is_neither_trained_nor_sent(config_of: Make, tmp_path: Path, results_of: Any) -> None:
    results = results_of(config_of(tmp_path, "frozen"))
    clients = results["clients"].query("stage == 'fedavg'")
    assert set(clients["bytes_up"]) == set(clients["bytes_down"]) == {4 * (32 * 10 + 10)}
    assert set(clients["parameters"]) == {330}
    assert set(clients["macs"] / clients["samples"]) == {64 * 32 + 32 * 10}
    assert set(clients["fallback"].isna()) == {True}
    assert [*load_model(results.paths, "fedavg")[0]] == ["1.weight", "1.bias"]
    assert len(results["runs"]["constants_hash"].iloc[0]) == 64


def test_shared_tensors_travel_once_and_buffers_with_them(config_of: Make, tmp_path: Path, results_of: Any) -> None:
    space, weights = own("Tied")
    norms = [f"norms.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")]
    statistics = [f"norms.0.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert [*weights] == ["encoder.weight", *norms, "head.weight", "head.bias", *statistics]
    module = space.build_subnet((0,))
    assert module.decoder.weight is module.encoder.weight
    rows = results_of(config_of(tmp_path, "Tied"))["clients"].query("stage == 'fedavg'")
    assert set(rows["status"]) == {"ok"}
    assert set(rows["bytes_up"]) == {4 * (8 * 64 + 4 * 64 + 64 * 10 + 10 + 2 * 64) + 8}


@pytest.mark.parametrize("build", ["Drops", "Functional"])
def test_dropout_inside_a_networks_layers_depends_on_nothing_but_the_client(
    config_of: Make, tmp_path: Path, build: str
) -> None:
    world = build_world(config_of(tmp_path, build))
    stage = build_stages(world)[0]
    state = stage.begin(RunState())
    plan = stage.plan(state)
    shared = SharedWeights(state.weights(plan.group), "v")
    of_clients = [a for a in plan.assignments if a.client_id is not None]

    def last_loss(assignments: list[Assignment]) -> float | None:
        worker = Worker(world.spec)
        return [run_assignment(worker, a, shared, KeptUpdates()) for a in assignments][-1].loss

    assert last_loss(of_clients) == last_loss(of_clients[-1:])


def test_a_network_trains_in_one_mode_whatever_mode_it_was_built_in(config_of: Make, tmp_path: Path) -> None:
    worker = Worker(build_world(config_of(tmp_path, "resting")).spec)
    for module in (worker.subnet((0,)), worker.supernet):
        assert {part.training for part in module.modules()} == {True}


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"privacy": PrivacyConfig(clip=0.01), "weighting": "plain"},
        {"privacy": PrivacyConfig(secure=True)},
        {"asynchronous": "fedasync", "arrivals": 1},
        *({"aggregator": name} for name in ("median", "multi_krum")),
        {"aggregator": "norm_bound", "options": {"bound": 0.01}},
    ],
    ids=str,
)
def test_a_buffer_of_infinite_values_is_no_sign_of_divergence(
    config_of: Make, tmp_path: Path, results_of: Any, train: dict[str, Any]
) -> None:
    results = results_of(config_of(tmp_path, "Causal", train=train))
    assert set(results["clients"]["status"]) == {"ok"}
    weights = load_model(results.paths, "fedavg")[0]
    assert torch.equal(weights["mask"], nn.Transformer.generate_square_subsequent_mask(8))
    assert not torch.equal(weights["head.weight"], own("Causal")[1]["head.weight"])


def test_the_steps_of_a_network_that_depend_on_values_are_counted_by_running_it() -> None:
    space, _ = own("Wanders")
    assert space.cost_table("macs").largest == 640


def test_latency_is_that_of_one_sample_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    space, _ = own("Wanders")
    space.tried(torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64))
    sizes, forward = set[int](), sys.modules["my_net"].Wanders.forward

    def seen(self: Any, x: torch.Tensor) -> torch.Tensor:
        sizes.add(len(x))
        result: torch.Tensor = forward(self, x)
        return result

    monkeypatch.setattr(sys.modules["my_net"].Wanders, "forward", seen)
    assert space.cost_table("latency_s").largest > 0
    assert sizes == {1}


# -- weights from elsewhere -------------------------------------------------------------------------------------------


def test_stored_weights_replace_the_networks_own_and_its_constants(tmp_path: Path) -> None:
    stored = {"model.1.weight": torch.full((10, 32), 2.0), "model.0.1.bias": torch.full((32,), 3.0)}
    save_file(stored, tmp_path / "w.safetensors")
    names = {"model.": ""}
    space, weights = own("frozen", weights=str(tmp_path / "w.safetensors"), weights_names=names)
    assert torch.equal(weights["1.weight"], stored["model.1.weight"])
    assert torch.equal(weights["1.bias"], own("frozen")[1]["1.bias"]), "which is not in the file"
    assert torch.equal(space.build_subnet((0,))[0][1].bias, stored["model.0.1.bias"])
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"model.1.weight": "w.safetensors", "model.0.1.bias": "w.safetensors"}}')
    assert own("frozen", weights=str(index), weights_names=names)[0].constants_hash == space.constants_hash
    for changes, message in (
        (
            {},
            r"its model.0.1.bias is \(32,\), the network has none; did you mean '0.1.bias'\?;",
        ),
        ({"weights_names": {"model.": "", "model.0.1.": "1."}}, r"bias is \(32,\), the network has it as \(10,\)"),
        ({"weights": str(tmp_path / "no")}, "no safetensors can be read from it"),
    ):
        with pytest.raises(ValueError, match=message):
            own("frozen", **{"weights": str(tmp_path / "w.safetensors"), **changes})


def test_a_run_goes_on_with_the_constants_with_which_it_began(config_of: Make, tmp_path: Path, my_net: Path) -> None:
    config = config_of(tmp_path, "file_body")
    run_id = start_run(config, make_serial)
    spec = build_world(config).spec
    (my_net / "value").write_text("0.25")
    try:
        with pytest.raises(ValueError, match=f"other constants than those with which run {run_id} began"):
            resume_run(config, run_id, make_serial)
        with pytest.raises(ValueError, match="builds other constants than the server"):
            assert Worker(spec).space
    finally:
        (my_net / "value").write_text("0.5")
    assert [paths.run_id for paths in list_runs(tmp_path)] == [run_id]


def test_a_run_with_constants_that_was_killed_before_its_row_was_written_starts_again(
    config_of: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise SystemExit  # unlike other exceptions, it leaves the run's files as a kill does

    config = config_of(tmp_path, "frozen", train={"rounds": 1})
    with monkeypatch.context() as patched:
        patched.setattr(RunWriter, "update_run", killed)
        with pytest.raises(SystemExit):
            start_run(config, make_serial)
    (paths,) = list_runs(tmp_path)
    resume_run(config, paths.run_id, make_serial)
    assert is_done(paths)


# -- samples of several tensors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [{}, {"local_rule": "scaffold", "momentum": 0.0}, {"local_rule": "fedprox"}])
def test_a_transformer_gets_its_inputs_by_name(
    config_of: Make, tmp_path: Path, results_of: Any, train: dict[str, Any]
) -> None:
    config = config_of(tmp_path, "former", train={"rounds": 3, "lr": 0.3, **train})
    config.data.dataset, config.data.partition = "my_net:texts", "natural"
    config.data.train_samples = config.data.test_samples = None
    config.executor.memory_format = "channels_last"  # as on GPUs
    results = results_of(config)
    clients = results["clients"].query("stage == 'fedavg'")
    assert set(clients["status"]) == {"ok"}
    assert clients["loss"].iloc[-3:].mean() < clients["loss"].iloc[:3].mean()
    final = results["evaluations"].query("stage == 'evaluation' and split == 'test' and metric == 'accuracy'")
    assert final["samples"].max() == 24, "a fifth is held out"


def test_a_run_that_is_stopped_goes_on_to_the_same_bits(config_of: Make, tmp_path: Path) -> None:
    seen, finals = list[str](), []
    for folder, stops in (("whole", False), ("stopped", True)):
        config = config_of(tmp_path / folder, "former", train={"rounds": 3})
        config.data.dataset, config.data.partition = "my_net:texts", "natural"
        config.data.train_samples = config.data.test_samples = None
        watcher = Watcher(started=lambda run_id, _: seen.append(run_id), should_stop=lambda stops=stops: stops)
        with suppress(InterruptedRunError):
            start_run(config, make_serial, watcher)
        if stops:
            resume_run(config, seen[-1], make_serial)
        finals.append(load_model(find_run(tmp_path / folder, seen[-1]), "fedavg")[0])
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])


def test_labels_may_be_anything_that_an_objective_takes(config_of: Make, tmp_path: Path, results_of: Any) -> None:
    config = config_of(tmp_path, "Line", train={"rounds": 8, "lr": 0.05, "clients_per_round": 8})
    config.data.dataset, config.data.partition, config.objective.name = "my_net:values", "iid", "my_net:Squares"
    config.data.train_samples = config.data.test_samples = None
    clients = results_of(config)["clients"].query("stage == 'fedavg'")
    assert clients["loss"].iloc[-1] < 0.5 * clients["loss"].iloc[0]
    with pytest.raises(ValueError, match=r"samples have no class label each; compare over clients$"):
        correct_by_sample(list_runs(tmp_path)[0])


def test_an_objective_of_ones_own_may_take_one_logit(config_of: Make, tmp_path: Path, results_of: Any) -> None:
    config = config_of(tmp_path, "one_logit")
    with pytest.raises(PluginError, match=r"gives \(4, 1\) for labels \(4,\) of 10 classes: expected \(4, 10\)"):
        build_world(config)
    config.objective.name = "my_net:Odd"
    results = results_of(config)
    assert set(results["clients"]["status"]) == {"ok"}
    assert "confusion" not in set(results["evaluations"]["metric"]), "one logit predicts no class"
    with pytest.raises(ValueError, match="its outputs are no logits of 10 classes; compare over clients"):
        correct_by_sample(results.paths)


def test_labels_by_name_go_with_any_network_and_an_objective_that_takes_them(
    tiny_config_in: Make, tmp_path: Path, results_of: Any
) -> None:
    training = TrainingConfig(rounds=2, clients_per_round=3)
    config = tiny_config_in(tmp_path, method=FedAvgConfig(train=training))
    config.data.dataset, config.data.partition = "my_net:weighted_digits", "iid"
    with pytest.raises(ValueError, match="classification needs single-tensor labels, given label, weight: use another"):
        build_world(config)
    config.objective.name = "my_net:Weighted"
    results = results_of(config)
    assert set(results["clients"]["status"]) == {"ok"}
    assert results["evaluations"].query("split == 'test' and metric == 'accuracy'")["value"].notna().all()


@pytest.mark.parametrize("method", [FedDFConfig, KnnPerConfig])
def test_methods_that_read_logits_take_networks_with_several_outputs(
    config_of: Make, tmp_path: Path, results_of: Any, method: Any
) -> None:
    config = config_of(tmp_path, "several")
    config.method = method()
    config.method.train.rounds, config.method.train.clients_per_round = 1, 3
    results = results_of(config)
    assert set(results["clients"]["status"]) == {"ok"}
    assert results["evaluations"].query("split == 'test' and metric == 'accuracy'")["value"].notna().all()


def test_several_tensors_are_stored_and_read_as_what_networks_take(config_of: Make, tmp_path: Path) -> None:
    config = config_of(tmp_path, "former")
    config.data.dataset, config.data.partition = "my_net:texts", "natural"
    config.data.train_samples = config.data.test_samples = None
    data = build_world(config).data
    x, y = data.client(3, "train")
    assert isinstance(x, dict)
    assert isinstance(y, torch.Tensor)
    assert (x["input_ids"].dtype, x["attention_mask"].dtype, y.dtype) == (torch.int64, torch.bool, torch.int64)
    given = sys.modules["my_net"].texts(None).train
    rows = [int(np.flatnonzero((given[0]["input_ids"] == row.numpy()).all(axis=1))[0]) for row in x["input_ids"]]
    assert {row % 8 for row in rows} == {3}
    assert torch.equal(y, torch.from_numpy(given[1][rows]))


# -- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            "short",
            r"network 'my_net:short' \(line \d+ of my_net.py\) fails in its layer 1, Linear\(in_features=63, .*\), "
            r"which gets \(4, 64\): RuntimeError: .*4x64 and 63x10",
        ),
        ("fails", r"my_net.py\) fails: IndexError: too many indices .* \(line \d+ of my_net.py\)"),
        ("thirteen", r"\(line \d+ of my_net.py\) gives \(4, 13\) for labels \(4,\) of 10 classes: expected \(4, 10\)"),
        ("still", "has no parameter that needs a gradient: there is nothing to train"),
        ("stops", "its outputs depend on no parameter that needs a gradient"),
        (
            "Spectrum",
            r"\(line \d+ of my_net.py\): its filter is complex, and only real numbers are averaged: hold its re",
        ),
        ("lazy", "1.weight has no shape yet: give sizes to its lazy layers"),
        ("number", "gives an int: give a torch.nn.Module"),
        ("scripted", r"\(line \d+ of my_net.py\) is compiled by torch.jit, in whole or in part: give "),
        ("NETWORK", "is a Linear: name a function that builds it"),
        ("Line", r"fails in its layer layer, Linear\(in_features=3, .* \(4, 1, 8, 8\): RuntimeError: .*8 and 3x1"),
    ],
)
def test_a_network_is_tried_on_a_batch_before_a_run(config_of: Make, tmp_path: Path, build: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        build_world(config_of(tmp_path, build))


def test_what_others_have_is_refused(config_of: Make, tmp_path: Path) -> None:
    from fedloom.platform.spaces.registry import build_space

    with pytest.raises(ValueError, match="space module has no channels; it has build, weights"):
        build_space(SpaceConfig("module", build="my_net:lora", channels=3))
    with pytest.raises(ValueError, match=r"needs space\.build=my_net:build"):
        build_space(SpaceConfig("module"))
    config = replace(config_of(tmp_path, "lora"), method=SuperFedNASConfig())
    with pytest.raises(ValueError, match="superfednas cannot use space module, which has one architecture; use fedavg"):
        build_stages(build_world(config))


@pytest.mark.parametrize("method", [FedProtoConfig, KnnPerConfig])
def test_data_without_class_labels_is_refused_by_methods_that_classify(
    config_of: Make, tmp_path: Path, method: Any
) -> None:
    config = config_of(tmp_path, "several")
    config.data.dataset, config.data.partition, config.objective.name = "my_net:brightness", "iid", "my_net:Squares"
    config.method = method()
    with pytest.raises(ValueError, match=rf"^method={config.method.name} classifies .* has no class label for each"):
        build_stages(build_world(config))


@pytest.mark.parametrize(
    ("experiment", "key"),
    [
        ("fjord_digits", "method.distillation=1"),
        ("depthfl_digits", "method.distillation=1"),
        ("scalefl_digits", "method.distillation="),
        ("feddf_digits", "method.distillation.steps="),
        ("ofa_digits", "method.train.teaching=1"),
    ],
)
def test_what_has_no_classes_is_not_distilled(monkeypatch: pytest.MonkeyPatch, experiment: str, key: str) -> None:
    world = build_world(compose_config([f"experiment={experiment}"]))
    build_stages(world)
    monkeypatch.setattr(type(world.data.dataset), "has_labels", False)
    with pytest.raises(ValueError, match=rf"^{key}.*: distillation compares logits of classes, and the data set has"):
        build_stages(world)


@pytest.mark.parametrize("experiment", ["fedproto_digits", "fedmn_cifar10_small", "knn_per_cifar10_small"])
def test_what_has_no_classes_is_not_classified(monkeypatch: pytest.MonkeyPatch, experiment: str) -> None:
    small = ["data.dataset=digits", "data.train_samples=null", "data.test_samples=null", "space.input_shape=[1,8,8]"]
    world = build_world(compose_config([f"experiment={experiment}", *(small if "cifar10" in experiment else ())]))
    monkeypatch.setattr(type(world.data.dataset), "has_labels", False)
    method = world.config.method.name
    with pytest.raises(ValueError, match=rf"^method={method} classifies samples, and digits has no class label for"):
        build_stages(world)


def test_fedproto_refuses_a_last_layer_without_an_output_for_each_class(config_of: Make, tmp_path: Path) -> None:
    config = replace(config_of(tmp_path, "one_score"), method=FedProtoConfig())
    with pytest.raises(ValueError, match=r"^method=fedproto needs .* this network's has 1 for 10 classes"):
        build_stages(build_world(config))


def test_keyword_only_parameters_of_what_builds_the_network_are_options(my_net: Path) -> None:
    from fedloom.platform.spaces.registry import build_space

    def built(**options: object) -> tuple[int, ...]:
        space = build_space(SpaceConfig("module", build="my_net:sized", input_shape=[1, 8, 8], options=options))
        return tuple(space.initial_weights(torch.Generator())["1.weight"].shape)

    assert (built(), built(hidden=6)) == ((4, 64), (6, 64))
    with pytest.raises(ValueError, match=r"space\.options\.hidden=1: must be at least 2 \(an option of network my_net"):
        built(hidden=1)
    with pytest.raises(ValueError, match=r"space\.options\.hiden: not an option of space module, network my_net:sized"):
        built(hiden=6)


def test_a_module_that_is_no_networks_part_is_no_constant() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False, track_running_stats=False))
    module.register_buffer("places", torch.arange(3), persistent=False)
    assert [*travelling(module)] == ["0.weight", "0.bias"], "no buffer that does not belong to its state"
