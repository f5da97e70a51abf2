"""Updates of which only the largest changes are sent: their values, and where they are."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedloom.platform.spaces.slices import FLOAT_BYTES


def kept_of(parameters: int, share: float) -> int:
    """The number of changes that are sent of so many parameters, at least one."""
    return max(1, math.ceil(share * parameters)) if parameters else 0


@torch.no_grad()
def thin_out(parameters: Mapping[str, Tensor], received: Mapping[str, Tensor], share: float, by: str = "change") -> int:
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
