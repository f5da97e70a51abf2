"""Sparsification: of a client's changes only the largest are sent, their values and where they are."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedloom.platform.averaging.processors import Message, Processor, Processors, Traffic
from fedloom.platform.settings import SHARE
from fedloom.platform.spaces.slices import FLOAT_BYTES

By = Literal["change", "weight"]
"""What decides which changes are sent: their own size, or that of the trained values."""


@dataclass(frozen=True, kw_only=True)
class Sparsify(Processor):
    """Sends a share of the changes, the largest of all parameters together; the others count as no change."""

    share: Annotated[float, SHARE, "sparsify: the share of the changes that is sent"] = 0.1
    by: Annotated[By, "sparsify: largest by their own size, or by that of the trained values"] = "change"
    shortens_updates = True

    def on_client(self, message: Message) -> Message:
        """Resets the other parameters to the received values, in place."""
        parameters = {name: message.update.tensors[name] for name in message.parameters}
        if self.share < 1 and parameters:
            sparsified(parameters, message.received, self.share, self.by)
        return replace(message, traffic=self.expected(message.traffic))

    def expected(self, traffic: Traffic) -> Traffic:
        kept = kept_of(traffic.changes, self.share)
        saved_bytes = saved_by(traffic.changes, traffic.changes - kept)
        return traffic._replace(
            up_bytes=traffic.up_bytes - saved_bytes, changes=kept if saved_bytes else traffic.changes
        )


def with_share(processors: Processors, share: float) -> Processors:
    """The processors with another share of a client's changes to be sent."""
    if not any(isinstance(each, Sparsify) for each in processors):
        return (Sparsify(share=share), *processors)
    return tuple(replace(each, share=share) if isinstance(each, Sparsify) else each for each in processors)


def kept_of(parameters: int, share: float) -> int:
    """The number of changes that are sent of so many parameters, at least one."""
    return max(1, math.ceil(share * parameters)) if parameters else 0


@torch.no_grad()
def sparsified(
    parameters: Mapping[str, Tensor], received: Mapping[str, Tensor], share: float, by: str = "change"
) -> int:
    """Resets all but the largest changes, by magnitude over all parameters, to the received values, in place.

    With `by` weight, those of the largest trained values stay. Returns the number of changes that are left out; of
    equal ones the first are kept.
    """
    values = [parameters[name] if by == "weight" else parameters[name] - received[name] for name in parameters]
    size = torch.cat([value.flatten() for value in values]).abs()
    kept = kept_of(len(size), share)
    if kept == len(size):
        return 0
    order = torch.argsort(size, descending=True, stable=True)
    left_out = torch.ones(len(size), dtype=torch.bool, device=size.device)
    left_out[order[:kept]] = False
    parts = torch.split(left_out, [t.numel() for t in parameters.values()])
    for (name, parameter), part in zip(parameters.items(), parts, strict=True):
        parameter.copy_(torch.where(part.view_as(parameter), received[name], parameter))
    return len(size) - kept


def saved_by(parameters: int, left_out: int) -> int:
    """The bytes that are saved if the changes of `left_out` of so many parameters are not sent.

    A mask of one bit per parameter, or a list of places if that is smaller, says which are; if neither pays, everything
    is sent.
    """
    if not left_out:
        return 0
    where = min(math.ceil(parameters / 8), FLOAT_BYTES * (parameters - left_out))
    return max(0, FLOAT_BYTES * left_out - where)
