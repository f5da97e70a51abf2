"""The gradient of all of a client's samples at the received weights, for local rules that ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedloom.platform.clients.assignments import TaskError
from fedloom.platform.clients.training import LocalSGD, Samples, epoch_sizes, minimised
from fedloom.platform.spaces.slices import Weights

if TYPE_CHECKING:
    from fedloom.platform.clients.networks import Network
    from fedloom.platform.clients.worker import Worker


def gradients_at(
    worker: Worker, network: Network, weights: Weights, data: Samples, local: LocalSGD, draws: torch.Generator
) -> dict[str, Tensor]:
    """The mean gradient of all samples at the received weights, by parameter; the module is as loaded afterwards.

    It is the gradient of what the network minimises in training. Raises TaskError for a network that is another one in
    every batch.
    """
    if network.architecture is None:
        raise TaskError("the local rule needs the gradient of one network, and the client trains paths of a supernet")
    tensors = worker.load(network.module, weights, network.slices)
    worker.set_mode(network.module, training=True)
    objective, (x, y) = worker.objective.for_client(data[1]), data
    batches = zip(*(torch.split(t, epoch_sizes(len(y), local.batch_size)) for t in (x, y)), strict=True)
    with worker.randomness(network.module, draws):
        for x_B, y_B in batches:
            share = len(y_B) / len(y)
            loss = minimised(objective, network.forward(x_B), y_B, network.loss)
            (loss * share).backward()  # type: ignore[no-untyped-call]
    found = {
        name: t.grad if t.grad is not None else torch.zeros_like(t) for name, t in tensors.items() if t.requires_grad
    }
    for tensor in tensors.values():
        tensor.grad = None
    worker.load(network.module, weights, network.slices)  # the passes have changed the running statistics
    return found
