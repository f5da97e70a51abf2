"""Digits of which a client sees a part: samples of two tensors, and a network that takes both by their names."""

from typing import Annotated

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedloom.platform.data.arrays import Arrays
from fedloom.platform.data.config import DataConfig
from fedloom.platform.settings import ONE_OR_MORE, SHARE


def hidden(config: DataConfig, *, share: Annotated[float, SHARE, "share of the rows that are seen"] = 0.75) -> Arrays:
    """The rows of every image as a sequence (8, 8), and which of them are seen (8,)."""
    digits, rng = load_digits(), np.random.default_rng(0)
    seen = rng.random((len(digits.target), 8)) < share
    rows = digits.images / 16 * seen[:, :, None]
    return Arrays(({"rows": rows, "seen": seen}, digits.target))


class Reader(nn.Module):
    """One layer of attention over the rows that are seen; its embedding of places is fixed."""

    def __init__(self, classes: int, size: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, size)
        self.places = nn.Parameter(torch.randn(8, size), requires_grad=False)
        self.layer = nn.TransformerEncoderLayer(size, 4, 2 * size, dropout=0.0, batch_first=True)
        self.head = nn.Linear(size, classes)

    def forward(self, rows: Tensor, seen: Tensor) -> dict[str, Tensor]:
        hidden = self.layer(self.embed(rows) + self.places, src_key_padding_mask=~seen & seen.any(1, keepdim=True))
        return {"logits": self.head(hidden.mean(dim=1)), "hidden": hidden}


def reader(_shapes: dict[str, tuple[int, ...]], num_classes: int, *, size: Annotated[int, ONE_OR_MORE] = 32) -> Reader:
    """The network for these shapes of a sample, here {"rows": (8, 8), "seen": (8,)}."""
    return Reader(num_classes, size)
