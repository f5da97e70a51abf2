"""What a subnet is made of on a worker: its slices, its module with the right tensors, and ready to be scored."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedloom.platform.clients.training import estimate_statistics
from fedloom.platform.clients.worker import Worker
from fedloom.platform.spaces.base import Architecture, Slice, SliceMap, Weights
from fedloom.platform.spaces.operator_choice import OperatorChoiceSpace

CALIBRATION_SAMPLES = 512
"""Unlabelled validation samples from which a subnet's running statistics are estimated before it is scored."""


def subnet_slices(worker: Worker, architecture: Architecture, stand_alone: bool) -> SliceMap:
    """Where the subnet's tensors lie in the shared weights: in the supernet's, or under their own names."""
    if not stand_alone:
        return worker.space.slices(architecture)
    return {name: Slice(name) for name in worker.tensors_of(worker.subnet(architecture))}


def loaded_subnet(worker: Worker, architecture: Architecture, weights: Weights, stand_alone: bool) -> nn.Module:
    """The stand-alone module of the subnet in evaluation mode, with its tensors copied from the shared weights."""
    module = worker.subnet(architecture)
    worker.load(module, weights, subnet_slices(worker, architecture, stand_alone))
    worker.set_mode(module, training=False)
    return module


def scored_subnet(worker: Worker, architecture: Architecture, weights: Weights, stand_alone: bool) -> nn.Module:
    """As `loaded_subnet`, ready to be scored.

    Cut from a supernet, batch norms get statistics of their own; a model trained alone has its own already.
    """
    module = loaded_subnet(worker, architecture, weights, stand_alone)
    if not stand_alone and getattr(worker.space, "keeps_statistics", False):
        estimate_statistics(module, calibration_samples(worker))
    return module


def calibration_samples(worker: Worker) -> Tensor:
    """Evenly spaced samples of the server's validation data, without labels; kept, as every subnet needs them."""
    if worker.calibration is None:
        x, _ = worker.central_data("validation")
        if len(x) == 0:
            raise ValueError(
                "running statistics need validation data to be estimated from: raise data.validation_share"
            )
        places = torch.linspace(0, len(x) - 1, min(CALIBRATION_SAMPLES, len(x))).round().long()
        worker.calibration = x[places.to(x.device)]
    return worker.calibration


def paths_scorer(
    worker: Worker, weights: Weights, version: str
) -> Callable[[Architecture], Callable[[Tensor], Tensor]]:
    """From an architecture to its forward pass: through the one supernet module where that is cheaper."""
    if isinstance(worker.space, OperatorChoiceSpace):
        module = worker.load_whole(weights, version)
        worker.set_mode(module, training=False)
        return lambda architecture: lambda x: module(x, architecture)
    return lambda architecture: scored_subnet(worker, architecture, weights, stand_alone=False)
