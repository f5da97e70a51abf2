"""Norm bounding: the mean of changes whose norms are limited (Sun et al. 2019).

    Sun, Kairouz, Suresh, McMahan: Can You Really Backdoor Federated Learning? arXiv:1911.07963, section 3:

        w_{t+1} = w_t + sum_k alpha_k Delta_k / max(1, ||Delta_k|| / M)

with weights alpha_k that sum to 1. The server limits the norms, because an attacker would not limit its own. On slices,
the norm is over all scalars that the client holds, and a scalar's mean is over the clients that hold it.
"""

from typing import Annotated

import torch
from torch import Tensor

from fedloom.platform.averaging.aggregators import Cell, mean
from fedloom.platform.settings import POSITIVE
from fedloom.platform.spaces.slices import difference


def norm_bound(cell: Cell, *, bound: Annotated[float, POSITIVE, "norm_bound: the largest norm of a change"]) -> Tensor:
    """The weighted mean of the changes, each shortened to the bound where it is longer."""
    factors_n = (bound / cell.norms_n).clamp(max=1)  # a change of 0 gives infinity, clamped to 1
    if bool((factors_n == 1).all()):
        return mean(cell)
    shares_n = cell.weights_n / cell.weights_n.sum() * factors_n.to(cell.weights_n.dtype)
    return cell.old + torch.einsum("n,n...->...", shares_n, difference(cell.values_n, cell.old))
