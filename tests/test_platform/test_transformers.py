"""Transformers: attention by torch's own, costs and slices by hand, causality, narrow networks, runs, and refusals."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.base import SearchSpace, samples_of
from fedloom.platform.spaces.depth import DepthSpace
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import Architecture, bytes_of, extract
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.platform.spaces.transformer import Block
from fedloom.platform.spaces.width import WidthSpace
from fedloom.tiers.measure import macs_of

SIZE: dict[str, Any] = {"embedding_size": 8, "attention_heads": 2, "mlp_ratio": 2.0, "blocks": [1, 2]}
VIT = SpaceConfig("vit_elastic", 3, input_shape=[1, 8, 8], patch_size=4, expansions=[0.5, 1.0], **SIZE)
GPT = SpaceConfig("gpt_elastic", 9, input_shape=[6], expansions=[0.5, 1.0], **SIZE)


def inputs(space: SearchSpace) -> Tensor:
    shape, generator = (2, *space.input_shape), torch_stream(1, "inputs")
    if space.input_dtype == torch.int64:
        return torch.randint(0, 9, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def loaded(space: SearchSpace, architecture: Architecture) -> nn.Module:
    module = space.build_subnet(architecture)
    weights = space.initial_weights(torch_stream(2, "weights"))
    module.load_state_dict(extract(weights, space.slices(architecture)))
    return module.eval()


# -- what a block computes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_that_of_torch(causal: bool) -> None:
    size, heads, tokens = 6, 3, 5
    block = Block(size, heads, size // heads, 4, causal=causal, depth=1, dropout=0.0)
    theirs = nn.MultiheadAttention(size, heads, batch_first=True)
    x = torch.randn((2, tokens, size), generator=torch_stream(3, "x"))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(generator=torch_stream(4, "values"))
        # Ours are stored by head, each with its query, key and value; torch's by query, key and value, each by head.
        for own, torchs in ((block.heads.weight, theirs.in_proj_weight), (block.heads.bias, theirs.in_proj_bias)):
            by_head = own.unflatten(1, (3, size // heads))
            torchs.copy_(by_head.transpose(0, 1).reshape(torchs.shape))
        theirs.out_proj.weight.copy_(block.merge.weight.flatten(0, 1).t())
        theirs.out_proj.bias.copy_(block.merge.bias)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens) if causal else None
        normed = block.norm1(x)
        between = x + theirs(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        expected = between + block.out(nn.functional.gelu(block.hidden(block.norm2(between))))
        torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("text", ["smallest", "d=0,1 h=1,0.5,0.5 e=0.5,1,0.5", "largest"])
def test_no_logit_sees_a_later_token(text: str) -> None:
    space = build_space(GPT)
    module, x = loaded(space, space.parse(text)), inputs(space)
    before = module(x)
    assert before.shape == (2, 9, 6)
    for t in range(6):
        changed = x.clone()
        changed[:, t:] = (x[:, t:] + 1) % 9
        after = module(changed)
        assert torch.equal(after[:, :, :t], before[:, :, :t]), t
        assert not torch.allclose(after[:, :, t], before[:, :, t]), t


def test_initial_weights_are_gpt_2s_and_the_vision_transformers() -> None:
    large = {"embedding_size": 96, "mlp_ratio": 4.0}
    text, images = (build_space(replace(c, **large)).initial_weights(torch_stream(1, "weights")) for c in (GPT, VIT))
    std = {name: float(tensor.std()) for name, tensor in text.items() if name.endswith("weight")}
    for name in ("stages.0.0.heads", "stages.1.1.hidden", "head.linear", "stem.0", "stem.1"):
        assert std[f"{name}.weight"] == pytest.approx(0.02, rel=0.1), name
    for name in ("stages.0.0.merge", "stages.1.1.out"):
        assert std[f"{name}.weight"] == pytest.approx(0.02 / math.sqrt(2 * 3), rel=0.05), name
    assert float(images["stages.0.0.hidden.weight"].std()) == pytest.approx(math.sqrt(2 / (96 + 384)), rel=0.05)
    assert float(images["stages.0.0.merge.weight"].std()) == pytest.approx(math.sqrt(2 / (96 + 96)), rel=0.05)
    assert not text["stages.0.0.heads.bias"].any()


# -- costs and slices -------------------------------------------------------------------------------------------------


def test_costs_by_hand() -> None:
    # A block of h heads of 4 and m hidden channels on T tokens of 8 channels: projections, both layers of the
    # perceptron, and the two products of attention.
    def block(tokens: int, heads: int, hidden: int) -> int:
        return tokens * (8 * 12 * heads + 4 * heads * 8 + 2 * 8 * hidden) + 2 * heads * tokens**2 * 4

    vit, gpt = build_space(VIT), build_space(GPT)
    smallest, largest = vit.parse("d=0,0 h=0.5 e=0.5"), gpt.parse("d=0,1 h=1 e=1")
    # Four patches of 16 pixels, two blocks of one head and eight channels, three classes of one mean.
    assert vit.cost_table("macs").cost(smallest) == 4 * 16 * 8 + 2 * block(4, 1, 8) + 8 * 3 == 2_840
    # Tokens cost nothing; three blocks of two heads and 16 channels; nine logits of each of six tokens.
    assert gpt.cost_table("macs").cost(largest) == 3 * block(6, 2, 16) + 6 * 8 * 9 == 11_376
    assert macs_of(gpt.build_subnet(largest), samples_of(gpt)) == 11_376
    per_block = 2 * 16 + (12 * 8 + 12) + (4 * 8 + 8) + (8 * 8 + 8) + (8 * 8 + 8)
    parameters = (16 * 8 + 8) + 4 * 8 + 2 * per_block + 16 + (8 * 3 + 3)
    assert bytes_of(vit.build_subnet(smallest).state_dict()) == 4 * parameters == 3_436
    assert vit.num_architectures == 4 * (4 + 16), "one, then one or two blocks, of 2 x 2 widths each"


@pytest.mark.parametrize("config", [VIT, GPT])
def test_random_subnets_are_the_supernet_on_their_slices(config: SpaceConfig) -> None:
    space = build_space(config)
    supernet, x = space.build_supernet().eval(), inputs(space)
    supernet.load_state_dict(space.initial_weights(torch_stream(2, "weights")))
    for architecture in space.genome.draw(8, np.random.default_rng(1)).tolist():
        torch.testing.assert_close(
            loaded(space, tuple(architecture))(x), supernet(x, tuple(architecture)), rtol=1e-6, atol=1e-6
        )


def test_heads_and_hidden_channels_are_chosen_independently() -> None:
    space = build_space(VIT)
    architecture = space.parse("d=0,1 h=1,0.5,0.5 e=0.5,1,0.5")
    assert space.label(architecture) == "d=0,1 h=1,0.5,0.5 e=0.5,1,0.5"
    assert space.meaning(architecture)["heads"] == [[1.0], [0.5, 0.5]]
    regions = {name: piece.region for name, piece in space.slices(architecture).items()}
    assert regions["stages.0.0.heads.weight"] is None
    assert regions["stages.0.0.hidden.weight"] == ((0, 8), (0, 8))
    assert regions["stages.1.0.merge.weight"] == ((0, 1), (0, 4), (0, 8))
    with pytest.raises(ValueError, match=r"head 0\.3: allowed are 0\.5, 1$"):
        space.parse("d=0,1 h=0.3 e=1")
    with pytest.raises(ValueError, match="is no architecture of vit_elastic"):
        space.parse("d=0,1 e=1")


@pytest.mark.parametrize("name", ["vit_width", "gpt_width"])
def test_narrow_networks_keep_whole_heads_and_their_channels_can_be_permuted(name: str) -> None:
    config = replace(VIT if name == "vit_width" else GPT, name=name, expansions=None, widths=[0.4, 1.0])
    space = build_space(config)
    assert isinstance(space, WidthSpace)
    shapes = {name: tuple(t.shape) for name, t in space.build_subnet((0,)).state_dict().items()}
    # ceil(.4 * 8) channels, one of two heads of four, ceil(.4 * 16) hidden channels.
    assert shapes["stages.0.0.heads.weight"] == (1, 12, 4)
    assert shapes["stages.0.0.merge.weight"] == (1, 4, 4)
    assert shapes["stages.0.0.hidden.weight"] == (7, 4)
    assert shapes["stages.0.0.norm1.weight"] == shapes["stages.0.0.out.bias"] == (4,)
    weights, x = space.initial_weights(torch_stream(2, "weights")), inputs(space)
    whole = loaded(space, space.largest)
    expected = whole(x)
    whole.load_state_dict(space.rolled(weights, 1))
    torch.testing.assert_close(whole(x), expected)


@pytest.mark.parametrize("config", [VIT, GPT])
def test_every_stage_has_an_exit(config: SpaceConfig) -> None:
    space = build_space(replace(config, name=config.name.replace("elastic", "depth"), expansions=None))
    assert isinstance(space, DepthSpace)
    exits: list[Tensor] = []
    mean = loaded(space, (1,))(inputs(space), exits)
    torch.testing.assert_close(mean, (exits[0] + exits[1]) / 2)


# -- runs and refusals ------------------------------------------------------------------------------------------------


TINY = [
    *("space.embedding_size=8", "space.attention_heads=2", "space.patch_size=4", "tiers.upper_bounds=null"),
    *("tiers.count=1", "method.train.rounds=1", "method.train.clients_per_round=3", "method.train.epochs=1"),
]
OFA = ["experiment=superfednas_vit_digits", "method=ofa", "method.family=[smallest,largest]", "method.search.samples=0"]
RUNS = {
    "superfednas": ["experiment=superfednas_vit_digits", "method.family=[smallest,largest]", "method.search.samples=0"],
    "ofa": [*OFA, "method.train.rounds=5", "method.train.depth_share=0.2"],
    "compofa": [*OFA, "method.train.rounds=2", "method.train.depth_share=0.0", "space.coupled=true"],
    "heterofl": ["experiment=heterofl_vit_digits"],
    "fjord": ["experiment=fjord_vit_digits"],
    "fedrolex": ["experiment=fjord_vit_digits", "method=fedrolex"],
    "depthfl": ["experiment=fjord_vit_digits", "method=depthfl", "space.name=vit_depth", "space.widths=null"],
    "scalefl": ["experiment=fjord_vit_digits", "method=scalefl", "space.name=vit_scaled", "space.widths=[0.5,1.0]"],
}


@pytest.mark.parametrize("method", RUNS)
def test_every_method_trains_them(method: str, tmp_path: Path, run_in_memory: Any) -> None:
    config = compose_config([*TINY, *RUNS[method], "executor.kind=serial", f"results={tmp_path}"])
    _, memory, _ = run_in_memory(config)
    assert {row["status"] for r in memory.records for t, row in r.rows if t == "clients"} == {"ok"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(VIT, embedding_size=9), "space.embedding_size=9 is not divisible by space.attention_heads=2: give a"),
        (
            replace(VIT, patch_size=3),
            r"space.patch_size=3 cannot cut images .* of space.input_shape=\[1, 8, 8\] into",
        ),
        (replace(GPT, patch_size=2), r"space.patch_size=2 cannot cut images .* of space.input_shape=\[6\]"),
        (replace(GPT, input_shape=[1, 8, 8]), r"space.input_shape=\[1, 8, 8\]: gpt_elastic takes tokens, of the shape"),
        (replace(VIT, head_shares=[1.0, 0.5]), r"space.head_shares=\[1.0, 0.5\]: give shares in ascending order"),
        (replace(VIT, expansions=[0.5]), r"space.expansions=\[0.5\]: .* the last one 1.0"),
        (
            replace(VIT, name="vit_width", expansions=None, scaler=True),
            "space.scaler=true: vit_width has no scaler",
        ),
        (replace(VIT, blocks=[]), r"space.blocks=\[\]: give the number of blocks of at least one stage"),
        (replace(VIT, blocks=[12]), r"space.blocks=\[12\]: 12 blocks of 4 widths have more than 100000 combinations"),
    ],
)
def test_impossible_networks_are_refused_in_one_line(config: SpaceConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build_space(config)
    assert "\n" not in str(caught.value)
