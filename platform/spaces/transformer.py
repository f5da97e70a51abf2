"""Transformers for images and for text: elastic ones for SuperFedNAS, and spaces of widths and of depths.

Blocks normalise first (Radford et al. 2019, Sec. 2.3). Images are cut into patches; the mean of the patches' outputs is
classified instead of a class token (Dosovitskiy et al. 2021, App. D.3: as good). In text, attention is causal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.spaces.depth import SCALED_WIDTHS, DepthSpace, ScaledSpace
from fedloom.platform.spaces.elastic import ElasticNetwork, ElasticSpace
from fedloom.platform.spaces.genome import ElasticGenome, elastic_stage
from fedloom.platform.spaces.space_config import Spaces, spaces_of
from fedloom.platform.spaces.width import Keep, WidthDesign, WidthSpace, channels_kept, resize

# -- layers: their leading heads and channels are those of a narrower network -----------------------------------------

STD = 0.02
"""The standard deviation of initial weights unless a layer sets its own (Radford et al. 2018, Sec. 4.1)."""


def glorot(inputs: int, outputs: int) -> float:
    """The standard deviation of Glorot & Bengio (2010, Eq. 12)."""
    return math.sqrt(2 / (inputs + outputs))


class Normal:
    """Weights start from N(0, std), biases from zero."""

    std = STD

    def initialise_own(self, tensors_by_name: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Draws the weights."""
        for name, tensor in tensors_by_name.items():
            if name == "bias":
                tensor.zero_()
            else:
                tensor.normal_(std=self.std, generator=generator)


class Dense(Normal, nn.Linear):
    """A linear layer."""


class Tokens(Normal, nn.Embedding):
    """Tokens (N, T) -> (N, T, C)."""

    def __init__(self, count: int, size: int) -> None:
        # Given a weight, torch draws none, for which it would load its compiler on the meta device.
        super().__init__(count, size, _weight=torch.empty(count, size))


class Positions(Tokens):
    """(N, T, C) -> (N, T, C): adds a learnt vector per position."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[: x.shape[1]]


class Patches(Normal, nn.Conv2d):
    """Images (N, channels, H, W) -> (N, T, C), one token per patch."""

    def __init__(self, channels: int, size: int, patch_size: int) -> None:
        super().__init__(channels, size, patch_size, patch_size)
        self.std = 1 / math.sqrt(channels * patch_size**2)  # LeCun's, as in the vision transformer

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(2).transpose(1, 2)


class Heads(Normal, nn.Module):
    """(N, T, C) -> (3, N, heads, T, S): queries, keys and values. The weight is (heads, 3 S, C)."""

    channels_at = 2

    def __init__(self, size: int, heads: int, head_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, 3 * head_size, size))
        self.bias = nn.Parameter(torch.empty(heads, 3 * head_size))

    def narrow(self, inputs: int, keep: Keep, *, last: bool) -> None:
        """Reduces its inputs and heads."""
        heads, rows, _ = self.weight.shape
        num_heads = heads if last else keep(heads)
        resize(self, weight=(num_heads, rows, inputs), bias=(num_heads, rows))

    def forward(self, x: Tensor) -> Tensor:
        heads, rows, size = self.weight.shape
        y = F.linear(x, self.weight.reshape(-1, size), self.bias.reshape(-1))
        return y.reshape(*x.shape[:2], heads, 3, rows // 3).permute(3, 0, 2, 1, 4)


class Merge(Normal, nn.Module):
    """(N, heads, T, S) -> (N, T, C): the heads' outputs, projected. The weight is (heads, S, C)."""

    channels_at = 1

    def __init__(self, size: int, heads: int, head_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, head_size, size))
        self.bias = nn.Parameter(torch.empty(size))

    def narrow(self, inputs: int, keep: Keep, *, last: bool) -> None:
        """Reduces its heads and outputs."""
        _, head_size, size = self.weight.shape
        outputs = size if last else keep(size)
        resize(self, weight=(inputs, head_size, outputs), bias=(outputs,))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.transpose(1, 2).flatten(2), self.weight.flatten(0, 1).t(), self.bias)


class Block(nn.Module):
    """(N, T, C) -> (N, T, C): x + attention(norm(x)), then x + perceptron(norm(x)); `causal` hides later tokens.

    Text uses GPT-2's initialisation: residual branches start smaller by sqrt(2 depth), so that the sum of `depth`
    blocks does not grow. Images use Glorot's variance, as the vision transformer does: N(0, .02) is far too small for
    narrow networks that are trained with SGD (on digits with 32 channels 41 instead of 85 % after six epochs).
    """

    def __init__(
        self, size: int, heads: int, head_size: int, hidden: int, *, causal: bool, depth: int, dropout: float
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.heads, self.merge = Heads(size, heads, head_size), Merge(size, heads, head_size)
        self.hidden, self.out = Dense(size, hidden), Dense(hidden, size)
        if causal:
            self.merge.std = self.out.std = STD / math.sqrt(2 * depth)
        else:
            self.heads.std = self.merge.std = glorot(size, heads * head_size)
            self.hidden.std = self.out.std = glorot(size, hidden)
        self.dropout, self.causal = nn.Dropout(dropout), causal

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(self.norm1(x))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.dropout(self.merge(attended))
        y: Tensor = x + self.dropout(self.out(F.gelu(self.hidden(self.norm2(x)))))
        return y


class Head(nn.Module):
    """(N, T, C) -> logits (N, classes) of the mean token, or (N, vocabulary, T) of every one."""

    def __init__(self, size: int, classes: int, *, every_token: bool) -> None:
        super().__init__()
        self.norm, self.linear, self.every_token = nn.LayerNorm(size), Dense(size, classes), every_token

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        y: Tensor = self.linear(x).transpose(1, 2) if self.every_token else self.linear(x.mean(dim=1))
        return y


# -- designs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TransformerDesign:
    """The whole network: for images (C, H, W) if it has a `patch_size`, otherwise for text (T,).

    `blocks` are the numbers of blocks per stage; a subnet may end after a stage or leave some blocks out. `mlp_ratio`
    is the number of a block's hidden channels per channel; `dropout` applies to the embedding and residual branches.

    Raises:
        ValueError: a network that cannot be built.
    """

    name: str
    input_shape: tuple[int, ...] = (3, 32, 32)
    num_classes: int = 10
    patch_size: int | None = 4
    embedding_size: int = 192
    attention_heads: int = 6
    mlp_ratio: float = 4.0
    blocks: tuple[int, ...] = (3, 3, 3, 3)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        shape, patch = list(self.input_shape), self.patch_size
        if patch is None and len(shape) != 1:
            raise ValueError(f"space.input_shape={shape}: {self.name} takes tokens, of the shape (T,)")
        if patch is not None and (len(shape) != 3 or shape[1] % patch or shape[2] % patch):
            raise ValueError(
                f"space.patch_size={patch} cannot cut images (C, H, W) of space.input_shape={shape} into whole "
                "patches: give a divisor of the height and the width"
            )
        if self.embedding_size % self.attention_heads:
            raise ValueError(
                f"space.embedding_size={self.embedding_size} is not divisible by space.attention_heads="
                f"{self.attention_heads}: give a multiple, as heads have equal shares of it"
            )
        if not self.blocks:
            raise ValueError("space.blocks=[]: give the number of blocks of at least one stage")

    @property
    def input_dtype(self) -> torch.dtype:
        """Floats for images, int64 for tokens."""
        return torch.float32 if self.patch_size else torch.int64

    def build_stem(self) -> nn.Module:
        """Patches or tokens, their positions and dropout."""
        size, patch = self.embedding_size, self.patch_size
        if patch:
            channels, height, width = self.input_shape
            embed: nn.Module = Patches(channels, size, patch)
            count = height // patch * (width // patch)
        else:
            embed, (count,) = Tokens(self.num_classes, size), self.input_shape
        return nn.Sequential(embed, Positions(count, size), nn.Dropout(self.dropout))

    def block(self, head_share: float = 1.0, hidden_share: float = 1.0) -> Block:
        """A block with these shares of the heads and of the hidden channels."""
        return Block(
            self.embedding_size,
            channels_kept(head_share, self.attention_heads),
            self.embedding_size // self.attention_heads,
            channels_kept(hidden_share, round(self.mlp_ratio * self.embedding_size)),
            causal=self.patch_size is None,
            depth=sum(self.blocks),
            dropout=self.dropout,
        )

    def build_stages(self) -> list[nn.Module]:
        """The blocks of every stage, at full width."""
        return [nn.Sequential(*(self.block() for _ in range(count))) for count in self.blocks]

    def build_head(self) -> nn.Module:
        """Norm and classifier."""
        return Head(self.embedding_size, self.num_classes, every_token=self.patch_size is None)


MOST_OPTIONS = 100_000
"""The maximum number of options of a stage, since all are listed."""


@dataclass(frozen=True)
class ElasticTransformerDesign(TransformerDesign):
    """Subnets keep the first blocks of every stage, and in each block a share of the heads and of the hidden channels.

    `head_shares` and `expansions` are these shares, ascending to 1; a block chooses both independently. If `coupled`,
    the number of a stage's blocks decides both (CompOFA).
    """

    head_shares: tuple[float, ...] = (0.5, 1.0)
    expansions: tuple[float, ...] = (0.25, 0.5, 1.0)
    coupled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("head_shares", "expansions"):
            shares = getattr(self, name)
            if list(shares) != sorted(set(shares)) or not shares or shares[0] <= 0 or shares[-1] != 1.0:
                raise ValueError(
                    f"space.{name}={list(shares)}: give shares in ascending order, above 0, the last one 1.0"
                )
        widths = len(self.head_shares) * len(self.expansions)
        if not self.coupled and widths ** max(self.blocks) > MOST_OPTIONS:
            raise ValueError(
                f"space.blocks={list(self.blocks)}: {max(self.blocks)} blocks of {widths} widths have more than "
                f"{MOST_OPTIONS} combinations: give more stages of fewer blocks"
            )

    @property
    def genome(self) -> ElasticGenome:
        """Depths and widths per stage."""
        widths = (len(self.head_shares), len(self.expansions))
        return ElasticGenome(tuple(elastic_stage(1, most, *widths, coupled=self.coupled) for most in self.blocks))

    @property
    def keeps_statistics(self) -> bool:
        """Layer norms have no running statistics."""
        return False

    @property
    def widths(self) -> Mapping[str, tuple[float, ...]]:
        """The shares of the heads and of the hidden channels per width index, which enumerate all pairs."""
        heads, expansions = zip(*product(self.head_shares, self.expansions), strict=True)
        return {"heads": heads, "expansions": expansions}

    def distinct_widths(self, stage: int) -> int:
        """The number of distinct blocks."""
        del stage  # all are alike
        hidden = round(self.mlp_ratio * self.embedding_size)
        choices = [(self.head_shares, self.attention_heads), (self.expansions, hidden)]
        return math.prod(len({channels_kept(share, whole) for share in shares}) for shares, whole in choices)

    def build_block(self, stage: int, block: int, width: int) -> nn.Module:
        """One block of a width index."""
        del stage, block  # all are alike
        return self.block(*(values[width] for values in self.widths.values()))

    def join(self, stem: nn.Module, stages: Sequence[nn.Module], head: nn.Module) -> nn.Module:
        """The parts in sequence."""
        return ElasticNetwork(stem, stages, head)


@dataclass(frozen=True)
class TransformerWidthDesign(TransformerDesign, WidthDesign):
    """Subnets keep a share of the channels, of the heads (each of unchanged size) and of the hidden channels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scaler:
            raise ValueError(f"space.scaler=true: {self.name} has no scaler, as layer norms undo it; leave it out")

    def build(self) -> nn.Module:
        return ElasticNetwork(self.build_stem(), self.build_stages(), self.build_head())


@dataclass(frozen=True)
class TransformerDepthDesign(TransformerDesign):
    """Subnets are the first stages, each with an exit: a norm and a classifier of its own."""

    @property
    def num_exits(self) -> int:
        return len(self.blocks)

    def build_blocks(self) -> list[nn.Module]:
        first, *others = self.build_stages()
        return [nn.Sequential(self.build_stem(), first), *others]

    def build_exits(self) -> list[nn.Module]:
        return [self.build_head() for _ in self.blocks]


@dataclass(frozen=True)
class TransformerScaledDesign(TransformerDepthDesign):
    """Subnets of i stages have the share `widths[i - 1]` of the heads (of unchanged size) and of the channels."""

    widths: tuple[float, ...] = SCALED_WIDTHS

    def narrower(self, share: float) -> TransformerScaledDesign:
        heads = channels_kept(share, self.attention_heads)
        return replace(self, attention_heads=heads, embedding_size=self.embedding_size // self.attention_heads * heads)


SPACES: Spaces = {
    **spaces_of(
        ElasticSpace,
        ElasticTransformerDesign("vit_elastic"),
        ElasticTransformerDesign("gpt_elastic", (80,), 90, patch_size=None, blocks=(3, 3)),
    ),
    **spaces_of(
        WidthSpace,
        TransformerWidthDesign("vit_width"),
        TransformerWidthDesign("gpt_width", (80,), 90, patch_size=None, blocks=(3, 3)),
    ),
    **spaces_of(
        DepthSpace,
        TransformerDepthDesign("vit_depth"),
        TransformerDepthDesign("gpt_depth", (80,), 90, patch_size=None, blocks=(3, 3)),
    ),
    **spaces_of(
        ScaledSpace,
        TransformerScaledDesign("vit_scaled"),
        TransformerScaledDesign("gpt_scaled", (80,), 90, patch_size=None, blocks=(3, 3), widths=(0.7, 1.0)),
    ),
}
