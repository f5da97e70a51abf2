"""The elastic temporal convolutional networks of SuperFedNAS, for words and characters (Bai et al., 2018)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.spaces.elastic import ElasticNetwork, ElasticSpace, row_lengths, weight_normed
from fedloom.platform.spaces.genome import ElasticGenome, elastic_stage
from fedloom.platform.spaces.space_config import spaces_of


@dataclass(frozen=True)
class TcnDesign:
    """An elastic temporal convolutional network for text (SuperFed); `input_shape` is (T,).

    A subnet has `blocks[0]` to `blocks[1]` temporal blocks, with dilations 1, 2, 4, ...; `expansions` scale the first
    convolution's output channels. With `tied`, the decoder uses the embedding's weights, which must have the blocks'
    width. `dropout` applies to the blocks, `embedding_dropout` (by default the same) to the embedding. If `coupled`,
    the number of blocks decides their width (CompOFA).

    Source: SuperFedNAS, App. (text); Bai et al. 2018.
    """

    name: str = "tcn_elastic"
    input_shape: tuple[int, ...] = (80,)
    num_classes: int = 90
    channels: int = 600
    embedding_size: int = 600
    blocks: tuple[int, ...] = (2, 4)
    kernel_size: int = 3
    expansions: tuple[float, ...] = (0.1, 0.2, 0.5, 1.0)
    dropout: float = 0.1
    embedding_dropout: float | None = None
    tied: bool = False
    coupled: bool = False
    input_dtype: ClassVar[torch.dtype] = torch.int64
    keeps_statistics: ClassVar[bool] = False
    """Weight normalisation has no running statistics."""

    def __post_init__(self) -> None:
        if len(self.blocks) != 2 or not 1 <= self.blocks[0] <= self.blocks[1]:
            raise ValueError(f"space.blocks={list(self.blocks)}: give the fewest and the most, such as [2,4]")
        if min(self.channels, self.embedding_size, self.kernel_size, self.num_classes) < 1:
            raise ValueError("space.channels, embedding_size, kernel_size and num_classes must be at least 1")
        for name, rate in (("dropout", self.dropout), ("embedding_dropout", self.embedding_dropout)):
            if rate is not None and not 0 <= rate < 1:
                raise ValueError(f"space.{name}={rate}: must be in [0, 1)")
        if list(self.expansions) != sorted(set(self.expansions)) or not self.expansions or self.expansions[0] <= 0:
            raise ValueError(f"space.expansions={list(self.expansions)}: give positive values in ascending order")
        if self.tied and self.embedding_size != self.channels:
            raise ValueError(
                f"space.tied=true needs space.embedding_size={self.embedding_size} equal to space.channels="
                f"{self.channels}: the decoder uses the embedding's weights"
            )

    @property
    def genome(self) -> ElasticGenome:
        """One stage: the number of temporal blocks and the width of each."""
        return ElasticGenome((elastic_stage(*self.blocks, len(self.expansions), coupled=self.coupled),))

    @property
    def widths(self) -> Mapping[str, tuple[float, ...]]:
        """The expansion of each width index."""
        return {"expansions": self.expansions}

    def mid_channels(self, width: int) -> int:
        """Output channels of a block's first convolution."""
        return max(1, round(self.channels * self.expansions[width]))

    def distinct_widths(self, stage: int) -> int:
        """The number of distinct widths of the blocks."""
        del stage  # there is one
        return len({self.mid_channels(width) for width in range(len(self.expansions))})

    def build_stem(self) -> nn.Module:
        """Embedding and dropout."""
        dropout = self.dropout if self.embedding_dropout is None else self.embedding_dropout
        return Embedding(self.num_classes, self.embedding_size, dropout, self.tied)

    def build_block(self, stage: int, block: int, width: int) -> nn.Module:
        """One temporal block."""
        del stage  # there is one
        in_channels = self.embedding_size if block == 0 else self.channels
        return TemporalBlock(
            in_channels, self.mid_channels(width), self.channels, self.kernel_size, 2**block, self.dropout
        )

    def build_head(self) -> nn.Module:
        """A linear decoder, or a tied one, which only has a bias."""
        return TiedDecoder(self.num_classes) if self.tied else Decoder(self.channels, self.num_classes)

    def join(self, stem: nn.Module, stages: Sequence[nn.Module], head: nn.Module) -> nn.Module:
        """The parts in sequence; a tied head gets the embedding's weights."""
        return (TiedNetwork if self.tied else ElasticNetwork)(stem, stages, head)


class Embedding(nn.Module):
    """Tokens (N, T) -> (N, C, T)."""

    def __init__(self, vocabulary: int, size: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.embedding = (TiedEmbedding if tied else nn.Embedding)(vocabulary, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Embedded tokens, channels first."""
        y: Tensor = self.dropout(self.embedding(x)).transpose(1, 2)
        return y


class TiedEmbedding(nn.Embedding):
    """An embedding whose weights are the decoder's, too: those of an embedding alone would begin with huge logits."""

    def initialise_own(self, tensors_by_name: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Normal weights of standard deviation .01, as in the authors' code (Bai et al. 2018)."""
        tensors_by_name["weight"].normal_(std=0.01, generator=generator)


class Decoder(nn.Module):
    """(N, C, T) -> logits (N, vocabulary, T)."""

    def __init__(self, channels: int, vocabulary: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of every position."""
        y: Tensor = self.linear(x.transpose(1, 2)).transpose(1, 2)
        return y


class TiedDecoder(nn.Module):
    """(N, C, T) -> logits (N, vocabulary, T), by the embedding's weights (vocabulary, C)."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def initialise_own(self, tensors_by_name: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Sets the bias to zero."""
        del generator
        tensors_by_name["bias"].zero_()

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Logits of every position; without `weight` (when measured by itself) it uses a matrix of zeros."""
        if weight is None:
            weight = torch.zeros((len(self.bias), x.shape[1]), device=x.device, dtype=x.dtype)
        return F.linear(x.transpose(1, 2), weight, self.bias).transpose(1, 2)


class TiedNetwork(ElasticNetwork):
    """An elastic network whose decoder shares the embedding's weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits of every position."""
        x = self.features(x)
        y: Tensor = self.head(x, self.stem.embedding.weight)  # type: ignore[union-attr]
        return y


class TemporalBlock(nn.Module):
    """(N, in, T) -> (N, out, T): two causal, dilated, weight-normed convolutions plus a shortcut."""

    def __init__(
        self, in_channels: int, mid_channels: int, out_channels: int, kernel: int, dilation: int, dropout: float
    ) -> None:
        super().__init__()
        self.conv1 = CausalConv(in_channels, mid_channels, kernel, dilation)
        self.conv2 = CausalConv(mid_channels, out_channels, kernel, dilation)
        self.dropout = nn.Dropout(dropout)
        same = in_channels == out_channels
        self.shortcut = nn.Identity() if same else nn.Conv1d(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(F.relu(self.conv1(x)))
        y = self.dropout(F.relu(self.conv2(y)))
        return F.relu(y + self.shortcut(x))


class CausalConv(nn.Module):
    """(N, in, T) -> (N, out, T); position t depends on t, t - dilation, ...; weights are direction times magnitude.

    A slice is normalised over its own input channels, so that its direction has length 1 (Salimans & Kingma 2016).
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.empty(out_channels, in_channels, kernel))
        self.magnitude = nn.Parameter(torch.empty(out_channels, 1, 1))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.dilation, self.padding = dilation, (kernel - 1) * dilation

    def initialise_own(self, tensors_by_name: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """He normal initialisation (fan-in) of the direction, its length as the magnitude, zero bias."""
        direction = tensors_by_name["direction"]
        fan_in = max(direction.shape[1] * direction.shape[2], 1)
        direction.normal_(std=math.sqrt(2 / fan_in), generator=generator)
        tensors_by_name["magnitude"].copy_(row_lengths(direction))
        tensors_by_name["bias"].zero_()

    def forward(self, x: Tensor) -> Tensor:
        weight = weight_normed(self.direction, self.magnitude)
        return F.conv1d(F.pad(x, (self.padding, 0)), weight, self.bias, dilation=self.dilation)


SPACES = spaces_of(ElasticSpace, TcnDesign())
