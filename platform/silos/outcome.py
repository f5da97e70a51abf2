"""What a silo's round comes to: its row, its update, and the state that it keeps."""

from dataclasses import replace

from torch import Tensor

from fedloom.platform.averaging.average import Update
from fedloom.platform.clients.execution import Outcome
from fedloom.platform.silos.network import TrainedNetwork, update_of
from fedloom.platform.silos.state import Personal
from fedloom.platform.spaces.base import bytes_of


def shared_outcome(
    shared: TrainedNetwork, data: tuple[Tensor, Tensor], weighting: str, update: Update | None = None
) -> Outcome:
    """A round that trains the shared model alone: what is received is what is sent, all of it if no `update` is given.

    Raises ValueError for an unknown weighting rule.
    """
    samples, figures = len(data[1]), shared.figures
    sent = update_of(shared, samples, weighting) if update is None else update
    size_bytes = bytes_of(sent.tensors)
    return Outcome(
        update=sent,
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
    return replace(
        shared_outcome(shared, data, weighting),
        steps=shared.figures.steps + own.figures.steps,
        macs=shared.macs + own.macs,
        loss=own.figures.loss,
        metric=own.figures.accuracy,
        parameters=own.network.parameters,
        state=silo.packed(),
        architecture=own.network.architecture,
        subspace=own.network.subspace,
    )
