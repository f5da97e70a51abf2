"""Batches beside those that a training epoch goes through."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fedloom.platform.clients.training import LocalSGD, batch_indices
from fedloom.platform.data.dataset import augment_crop_flip

Batches = Iterator[tuple[Tensor, Tensor]]


def endless_batches(data: tuple[Tensor, Tensor], local: LocalSGD, generator: torch.Generator) -> Batches:
    """Inputs and labels in random order, shuffled anew whenever all were seen; augmented as in training."""
    x, y = data
    while True:
        for index in batch_indices(len(y), local.batch_size, 1, generator):
            place = index.to(x.device)
            x_B = x.index_select(0, place)
            yield augment_crop_flip(x_B, generator) if local.augment else x_B, y.index_select(0, place)
