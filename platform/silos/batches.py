"""Batches beside those that a training epoch goes through."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fedloom.platform.training import batch_indices

Batches = Iterator[tuple[Tensor, Tensor]]


def endless_batches(data: tuple[Tensor, Tensor], batch_size: int, generator: torch.Generator) -> Batches:
    """Inputs and labels in random order, shuffled anew whenever all were seen."""
    x, y = data
    while True:
        for index in batch_indices(len(y), batch_size, 1, generator):
            place = index.to(x.device)
            yield x.index_select(0, place), y.index_select(0, place)
