"""Adapters of unequal rank: what they compute, where they start, what is sent, which networks take them, refusals."""

import json
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.arrays import Arrays
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.fedrolex import FedRolexConfig
from fedloom.platform.methods.fjord import FjordConfig
from fedloom.platform.methods.heterofl import HeteroFLConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.plugins import PluginError
from fedloom.platform.results.checkpoint import load_model
from fedloom.platform.spaces.lora import LoraSpace, adapted_layers
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import extract
from fedloom.platform.spaces.space_config import LoraConfig, SpaceConfig

Make = Callable[..., RunConfig]


def perceptron(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A user's network, whose weights are torch's own."""
    layers = [nn.Flatten(), nn.Linear(math.prod(input_shape), 12), nn.ReLU(), nn.Linear(12, num_classes)]
    return nn.Sequential(OrderedDict(zip(("flat", "body", "relu", "head"), layers, strict=True)))


LORA = LoraConfig(ranks=[2, 4, 6], layers=["body"], trained=["head.*"], alpha=9.0)
SPACE = SpaceConfig("module", build=f"{__name__}:perceptron", input_shape=[1, 8, 8], lora=LORA)


@pytest.fixture
def config_of(tiny_config: Make) -> Make:
    """Makes runs of 8 clients in three tiers, a rank each."""

    def make(
        kind: type[Any], space: SpaceConfig = SPACE, train: dict[str, Any] | None = None, **method: Any
    ) -> RunConfig:
        training = TrainingConfig(
            **{"rounds": 2, "clients_per_round": 5, "batch_size": 16, "weighting": "plain", **(train or {})}
        )
        macs = build_space(space).cost_table("macs")
        bounds = [macs.cost((i,)) for i in range(len(space.lora.ranks or [0]))]
        owners = [0, 0, 0, 1, 1, 1, 2, 2] if len(bounds) == 3 else [0] * 8
        tiers = TiersConfig(count=len(bounds), clients=owners, upper_bounds=bounds)
        return tiny_config(method=kind(train=training, **method), space=space, tiers=tiers)

    return make


def drawn(space: LoraSpace) -> dict[str, Tensor]:
    """Weights none of which is zero."""
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(t.shape, generator=generator) for name, t in space.initial_weights(generator).items()}


def own_space(config: SpaceConfig = SPACE) -> LoraSpace:
    space = build_space(config)
    assert isinstance(space, LoraSpace)
    return space


# -- what they compute and where they start ---------------------------------------------------------------------------


def test_a_rank_computes_the_base_and_its_rows_and_columns_of_the_largest_pair() -> None:
    space, x = own_space(), torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    weights = drawn(space)
    torch.manual_seed(0)  # that of constants
    base = perceptron((1, 8, 8), 10)
    for i, rank in enumerate((2, 4, 6)):
        module = space.build_subnet((i,))
        module.load_state_dict(extract(weights, space.slices((i,))), strict=False)
        # The factor is 9 / 6 at every rank.
        dense = base.body.weight + 1.5 * weights["body.lora_B"][:, :rank] @ weights["body.lora_A"][:rank]
        hidden = F.linear(x.flatten(1), dense, base.body.bias).relu()
        expected = F.linear(hidden, weights["head.weight"], weights["head.bias"])
        torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)


def test_training_starts_from_the_networks_own_weights_and_loras() -> None:
    space = own_space()
    weights = space.initial_weights(torch.Generator().manual_seed(7))
    assert [*weights] == ["body.lora_A", "body.lora_B", "head.weight", "head.bias"]
    assert not weights["body.lora_B"].any()
    assert 0.9 / 8 < weights["body.lora_A"].abs().max() <= 1 / 8, "Kaiming's bound of 64 inputs, whatever the rank"
    torch.manual_seed(7)
    own = perceptron((1, 8, 8), 10)
    assert torch.equal(weights["head.weight"], own.head.weight), "of the run's seed"
    torch.manual_seed(0)
    constant = perceptron((1, 8, 8), 10).body.weight
    modules = [space.build_subnet((i,)) for i in range(3)] + [space.build_supernet()]
    assert all(torch.equal(module.body.weight, constant) for module in modules)
    assert len({module.body.weight.data_ptr() for module in modules}) == 1, "constants are held once for all ranks"
    assert not modules[0].body.weight.requires_grad


def encoder(_input_shape: object, num_classes: int) -> nn.Module:
    """Torch's own encoder, whose layers are scored by one function that reads their weights."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Flatten(1, 2), layer, nn.Flatten(), nn.Linear(64, num_classes))


def test_torchs_encoder_layers_are_scored_with_their_adapters() -> None:
    space = own_space(replace(SPACE, build=f"{__name__}:encoder", lora=LoraConfig(ranks=[2], layers=["1.linear?"])))
    weights, module = drawn(space), space.build_subnet((0,))
    module.load_state_dict(weights, strict=False)
    x = torch.randn(3, 1, 8, 8)
    trained = module.train()(x)
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(x), trained.detach())
    assert [*weights] == [f"1.linear{i}.lora_{kind}" for i in (1, 2) for kind in "AB"]


def test_a_merged_sum_is_part_of_the_weight_and_costs_no_macs() -> None:
    space = own_space(replace(SPACE, lora=replace(LORA, merged=True)))
    plain, x = own_space(), torch.randn(3, 1, 8, 8)
    assert space.cost_table("macs") == plain.cost_table("macs")
    assert space.cost_table("bytes").smallest - plain.cost_table("bytes").smallest == 4 * 64 * 12
    assert "body.lora_merged" not in space.parameter_names
    weights = drawn(space)
    module = space.build_subnet((2,))
    module.load_state_dict(weights, strict=False)
    added = weights["body.lora_merged"] + 1.5 * weights["body.lora_B"] @ weights["body.lora_A"]
    hidden = F.linear(x.flatten(1), module.body.weight + added, module.body.bias).relu()
    torch.testing.assert_close(module(x), module.head(hidden), rtol=1e-5, atol=1e-5)


def test_the_order_of_ranks_does_not_matter_to_the_largest() -> None:
    space = own_space()
    weights = drawn(space)
    rolled = space.rolled(weights, 1)
    assert torch.equal(rolled["body.lora_A"][0], weights["body.lora_A"][1])
    products = [each["body.lora_B"] @ each["body.lora_A"] for each in (weights, rolled)]
    torch.testing.assert_close(*products)
    assert torch.equal(rolled["head.weight"], weights["head.weight"])


# -- what is sent -----------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_adapters_and_of_what_is_trained_besides(config_of: Make, run_in_memory: Any) -> None:
    space = own_space()
    for i, rank in enumerate((2, 4, 6)):
        adapter, head = rank * (64 + 12), 12 * 10 + 10
        assert space.cost_table("bytes").cost((i,)) == 4 * (adapter + head)
        assert space.cost_table("parameters").cost((i,)) == adapter + head
        assert space.cost_table("macs").cost((i,)) == 64 * 12 + 12 * 10 + adapter
        assert space.cost_table("activation_bytes").cost((i,)) == 4 * (64 + 64)
    _, memory, _ = run_in_memory(config_of(HeteroFLConfig))
    clients = memory.table("clients").query("stage == 'supernet'")
    sent = {f"tier{i + 1}": {4 * (rank * 76 + 130)} for i, rank in enumerate((2, 4, 6))}
    assert {tier: {*rows["bytes_up"]} for tier, rows in clients.groupby("tier")} == sent
    assert {tier: {*rows["bytes_down"]} for tier, rows in clients.groupby("tier")} == sent
    scores = memory.table("clients").query("stage == 'evaluation' and client_id >= 0")
    assert {tier: {*rows["bytes_down"]} for tier, rows in scores.groupby("tier")} == sent


@pytest.mark.parametrize("kind", [HeteroFLConfig, FjordConfig, FedRolexConfig])
def test_methods_of_widths_train_ranks(config_of: Make, run_in_memory: Any, kind: type[Any]) -> None:
    world, memory, _ = run_in_memory(config_of(kind, train={"rounds": 8, "lr": 0.3, "evaluate_every": 4}))
    clients = memory.table("clients")
    assert set(clients["status"]) == {"ok"}
    trained = clients.query("stage == 'supernet'")
    assert trained["loss"].iloc[-5:].mean() < 0.9 * trained["loss"].iloc[:5].mean()
    models = {m.name: m for record in memory.records for _, m in record.models}
    assert {name: tuple(m.tensors["body.lora_A"].shape) for name, m in models.items()} == {
        f"tier{i + 1}-{kind().name}": (rank, 64) for i, rank in enumerate((2, 4, 6))
    }
    assert world.space.constants_hash


def test_one_rank_for_all_is_fedavg_of_adapters(config_of: Make, tmp_path: Path, results_of: Any) -> None:
    config = config_of(FedAvgConfig, architecture="r=4")
    results = results_of(replace(config, results=str(tmp_path)))
    clients = results["clients"].query("stage == 'fedavg'")
    assert set(clients["bytes_up"]) == {4 * (4 * 76 + 130)}
    tensors, _ = load_model(results.paths, "fedavg")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "body.lora_A": (4, 64), "body.lora_B": (12, 4), "head.weight": (10, 12), "head.bias": (10,),
    }  # fmt: skip


def test_a_row_or_column_is_the_mean_over_those_who_hold_it(config_of: Make, step_through: Any) -> None:
    world = build_world(config_of(HeteroFLConfig, train={"rounds": 1, "clients_per_round": None}))
    steps, worker = step_through(world, build_stages(world)[0], RunState()), Worker(world.spec)
    before = dict(steps.state.weights("supernet"))
    steps.step()
    total, held = ({n: np.zeros(t.shape) for n, t in before.items()} for _ in range(2))
    for assignment in steps.plans[0].assignments:
        update = assignment.task.run(worker, assignment, before).update
        assert update is not None
        for name, tensor in update.tensors.items():
            leading = tuple(slice(0, n) for n in tensor.shape)
            total[name][leading] += tensor.detach().double().numpy()
            held[name][leading] += 1
    assert held["body.lora_A"][0, 0] == held["body.lora_B"][0, 0] == 8 > held["body.lora_A"][-1, 0] == 2
    for name, after in steps.state.weights("supernet").items():
        expected = np.where(held[name] > 0, total[name] / np.maximum(held[name], 1), before[name].double().numpy())
        np.testing.assert_allclose(after.numpy(), expected, rtol=1e-6, atol=1e-6, err_msg=name)


# -- weights from elsewhere -------------------------------------------------------------------------------------------


def test_the_network_of_a_built_in_space_takes_stored_weights(tmp_path: Path) -> None:
    plain = SpaceConfig("cnn_width", input_shape=[1, 8, 8], stage_widths=[4, 8], norm="none")
    stored = build_space(plain).initial_weights(torch.Generator().manual_seed(9))
    save_file(stored, tmp_path / "base.safetensors")
    lora = LoraConfig(ranks=[1, 2])
    space = own_space(replace(plain, lora=lora, weights=str(tmp_path / "base.safetensors")))
    module = space.build_subnet((0,))
    assert [*adapted_layers(module)] == ["9"], "the one linear layer"
    state = module.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in stored.items())
    assert space.parameter_names == {"9.lora_A", "9.lora_B"}
    assert space.constants_hash != own_space(replace(plain, lora=lora)).constants_hash


class Attention(nn.Module):
    """The layers of a decoder's attention as Hugging Face names them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(size, size, bias=False) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (layer(x)[:, None] for layer in (self.q_proj, self.k_proj, self.v_proj))
        attended: Tensor = self.o_proj(F.scaled_dot_product_attention(q, k, v, mask[:, None, None, :])[:, 0])
        return attended


class Layer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.self_attn, self.input_layernorm = Attention(size), nn.LayerNorm(size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = x + self.self_attn(self.input_layernorm(x), mask)
        return y


class Backbone(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.embed_tokens, self.layers = nn.Embedding(30, size), nn.ModuleList([Layer(size), Layer(size)])


class Classifier(nn.Module):
    """A classifier in the form of those of `transformers`: inputs by name, outputs as a dictionary."""

    def __init__(self, classes: int, size: int = 8) -> None:
        super().__init__()
        self.model, self.score = Backbone(size), nn.Linear(size, classes, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            x = layer(x, attention_mask)
        return {"logits": self.score(x[:, 0])}


def classifier(_input_shape: object, num_classes: int) -> nn.Module:
    return Classifier(num_classes)


def texts(_config: object) -> Arrays:
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 30, (120, 6))
    ids[:, 0] = labels = rng.integers(0, 3, 120)
    mask = np.arange(6) < rng.integers(2, 7, 120)[:, None]
    return Arrays(({"input_ids": ids, "attention_mask": mask}, labels, np.arange(120) % 8))


def test_a_checkpoint_in_the_form_of_hugging_faces_is_adapted(config_of: Make, tmp_path: Path, results_of: Any) -> None:
    stored = {f"transformer.{n}": t.clone() for n, t in Classifier(3).state_dict().items() if n != "score.weight"}
    files = {"model-00001-of-00002.safetensors": [*stored][:4], "model-00002-of-00002.safetensors": [*stored][4:]}
    for file, names in files.items():
        save_file({name: stored[name] for name in names}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, names in files.items() for name in names}}))
    lora = LoraConfig(ranks=[1, 3], layers=["*.q_proj", "*.v_proj"], trained=["score.*"])
    space = SpaceConfig(
        "module", build=f"{__name__}:classifier", weights=str(index), weights_names={"transformer.": ""}, lora=lora
    )
    training = TrainingConfig(rounds=4, clients_per_round=4, batch_size=8, optimizer="adamw", lr=0.03)
    config = config_of(FedAvgConfig)
    data = replace(config.data, dataset=f"{__name__}:texts", partition="natural", train_samples=None, test_samples=None)
    config = replace(
        config,
        space=space,
        data=data,
        tiers=TiersConfig(count=1),
        method=FedAvgConfig("fedavg", "largest", train=training),
    )
    results = results_of(replace(config, results=str(tmp_path / "results")))
    clients = results["clients"].query("stage == 'fedavg'")
    assert set(clients["bytes_up"]) == {4 * (2 * 2 * 3 * (8 + 8) + 3 * 8)}
    assert clients["loss"].iloc[-4:].mean() < clients["loss"].iloc[:4].mean()
    module = results.world.space.build_subnet((0,))
    for name, tensor in stored.items():
        assert torch.equal(module.state_dict()[name.removeprefix("transformer.")], tensor), name


# -- what does not fit ------------------------------------------------------------------------------------------------


def attends(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A network whose attention reads the weight of a linear layer that it never calls."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, num_classes)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.attention(x[:, 0], x[:, 0], x[:, 0])[0].mean(dim=1))
            return y

    return Attends()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ["*.q_proj"]}, r"space.lora.layers: '\*.q_proj' names no linear layer; there are body, head$"),
        ({"trained": ["haed.*"]}, "space.lora.trained: 'haed.*' names no tensor; there are body.weight, body.bias, h"),
        (
            {"ranks": [2, 16]},
            r"space.lora.ranks=\[2, 16\]: layer body has 64 inputs and 12 outputs, too few for rank 16: give at",
        ),
        ({"ranks": [4, 2]}, r"space.lora.ranks=\[4, 2\]: give the adapters' ranks in ascending order"),
        ({"ranks": [2, 2]}, "in ascending order"),
        ({"ranks": None}, "space.lora.ranks=None: give the adapters' ranks in ascending order, such as"),
    ],
)
def test_impossible_adapters_are_refused_in_one_line(config_of: Make, changes: dict[str, Any], message: str) -> None:
    config = config_of(FedAvgConfig)
    space = replace(SPACE, lora=replace(LORA, **changes))
    with pytest.raises(ValueError, match=message) as caught:
        build_world(replace(config, space=space, tiers=TiersConfig(count=1)))
    assert "\n" not in str(caught.value)


def test_a_layer_that_is_never_called_gets_no_adapter(config_of: Make) -> None:
    space = replace(SPACE, build=f"{__name__}:attends", lora=LoraConfig(ranks=[1]))
    config = replace(config_of(FedAvgConfig), space=space, tiers=TiersConfig(count=1))
    with pytest.raises(PluginError, match=r"never calls its layer attention\.out_proj \(another layer may read"):
        build_world(config)
