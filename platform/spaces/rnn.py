"""FedorAS' recurrent search space: two layers, each with a skip connection, of which all four choose an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fedloom.platform.spaces.operator_choice import Candidate, OperatorChoiceSpace
from fedloom.platform.spaces.recurrent_operators import build_of
from fedloom.platform.spaces.space_config import Spaces, from_design

OPERATORS = ("lstm", "gru", "ligru", "qrnn", "linear", "conv(5)", "identity", "zero")
"""In the order of their option indices."""
LAYERS = (("op1", ("identity", "zero")), ("skip1", ("identity",)), ("op2", ("zero",)), ("skip2", ()))
"""The searchable layers, and the operators that each cannot have: the first two change the number of channels."""


@dataclass(frozen=True)
class RnnDesign:
    """A recurrent network over characters with a choice of operators (FedorAS, App. E.3); `input_shape` is (T,).

    An embedding of `embedding_size`, the layers op1 + skip1 and op2 + skip2 of `channels` units, a linear decoder.
    """

    name: str = "rnn_shakespeare"
    input_shape: tuple[int, ...] = (80,)
    num_classes: int = 90
    embedding_size: int = 8
    channels: int = 128
    operators: tuple[str, ...] = OPERATORS

    def __post_init__(self) -> None:
        if len(self.input_shape) != 1:
            raise ValueError(f"space.input_shape={list(self.input_shape)}: {self.name} takes texts, [T]")
        for name in self.operators:
            build_of(name)
        if len(set(self.operators)) < len(self.operators):
            raise ValueError(f"space.operators={list(self.operators)}: name each operator once")
        if not self.allowed(("identity", "zero")):
            raise ValueError(f"space.operators={list(self.operators)}: add one that changes the number of channels")

    def allowed(self, excluded: Sequence[str]) -> list[str]:
        """The operators but for these."""
        return [name for name in self.operators if name not in excluded]


class RnnSkeleton(nn.Module):
    """Embedding and decoder: `forward(x_NT, layers)` gives logits (N, vocabulary, T)."""

    def __init__(self, design: RnnDesign) -> None:
        super().__init__()
        self.embedding = nn.Embedding(design.num_classes, design.embedding_size)
        self.decoder = nn.Linear(design.channels, design.num_classes)

    def forward(self, x: Tensor, layers: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        first, first_skip, second, second_skip = layers
        x = self.embedding(x)
        x = first(x) + first_skip(x)
        x = second(x) + second_skip(x)
        y: Tensor = self.decoder(x).transpose(1, 2)
        return y


def rnn_space(design: RnnDesign) -> OperatorChoiceSpace:
    """The operator-choice space of a design."""

    def candidates(inputs: int, excluded: Sequence[str]) -> list[Candidate]:
        return [Candidate(name, partial(build_of(name), inputs, design.channels)) for name in design.allowed(excluded)]

    widths = (design.embedding_size, design.embedding_size, design.channels, design.channels)
    return OperatorChoiceSpace(
        name=design.name,
        input_shape=design.input_shape,
        input_dtype=torch.int64,
        layers=[candidates(width, excluded) for width, (_, excluded) in zip(widths, LAYERS, strict=True)],
        build_fixed=partial(RnnSkeleton, design),
    )


SPACES: Spaces = {"rnn_shakespeare": partial(from_design, rnn_space, RnnDesign())}
