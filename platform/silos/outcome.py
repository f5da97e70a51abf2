"""What a silo's round comes to: its row, its update, and the state that it keeps."""

from torch import Tensor

from fedloom.platform.execution import Outcome
from fedloom.platform.silos.network import TrainedNetwork, update_of
from fedloom.platform.silos.state import Personal
from fedloom.platform.spaces.base import bytes_of


def shared_outcome(shared: TrainedNetwork, data: tuple[Tensor, Tensor], weighting: str) -> Outcome:
    """A round that trains the shared model alone: all of it is received, and sent."""
    samples, figures = len(data[1]), shared.figures
    update = update_of(shared, samples, weighting)
    size_bytes = bytes_of(update.tensors)
    return Outcome(
        update=update,
        samples=samples,
        steps=figures.steps,
        macs=shared.macs,
        bytes_down=size_bytes,
        bytes_up=size_bytes,
        loss=figures.loss,
        metric=figures.accuracy,
        parameters=shared.network.parameters,
        architecture=shared.network.architecture,
        subspace=shared.network.subspace,
    )


def pair_outcome(
    shared: TrainedNetwork, own: TrainedNetwork, data: tuple[Tensor, Tensor], weighting: str, silo: Personal
) -> Outcome:
    """A round that trains both: the row tells of the silo's own model, the update holds nothing of it."""
    samples, figures = len(data[1]), own.figures
    update = update_of(shared, samples, weighting)
    size_bytes = bytes_of(update.tensors)
    return Outcome(
        update=update,
        samples=samples,
        steps=shared.figures.steps + figures.steps,
        macs=shared.macs + own.macs,
        bytes_down=size_bytes,
        bytes_up=size_bytes,
        loss=figures.loss,
        metric=figures.accuracy,
        parameters=own.network.parameters,
        state=silo.packed(),
        architecture=own.network.architecture,
        subspace=own.network.subspace,
    )
