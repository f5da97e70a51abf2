"""Median and trimmed mean of every scalar (Yin, Chen, Ramchandran, Bartlett 2018).

    Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates. ICML 2018, Algorithm 1.

    for every round t:
        the server sends w_t to all clients; client i answers g_i, an attacker anything
        for every coordinate k:
            option I    g_k = med{g_ik : i}
            option II   g_k = trmean_beta{g_ik : i}: the mean without the largest and the smallest share beta of them
        w_{t+1} = w_t - eta g

Here clients send weights, whose median is the old weight plus the median of the changes. A coordinate's values are
those of the clients that hold it. All of them count equally, because a client's number of samples is its own claim.

Flower's implementations give the same up to rounding, as does ByzantineMomentum's trimmed mean. ByzantineMomentum's
median of an even number of values is the lower of the two middle ones, and the trimmed mean of ALIE's authors averages
the values closest to the median.
"""

import numpy as np
import torch
from torch import Tensor

from fedloom.platform.averaging.aggregators import ByzantineShare, Cell, attackers_among


def median(cell: Cell) -> Tensor:
    """The median of every scalar; for an even number of values, the mean of the two middle ones."""
    return middle(ordered(cell.values_n))


def trimmed_mean(cell: Cell, *, byzantine_share: ByzantineShare = 0.2) -> Tensor:
    """The mean of every scalar without the share `byzantine_share` of largest and of smallest values (rounded down)."""
    clients = len(cell.values_n)
    trimmed = attackers_among(clients, byzantine_share)
    return ordered(cell.values_n)[trimmed : clients - trimmed].mean(dim=0)


def middle(ordered_n: Tensor) -> Tensor:
    """The median over the first dimension, of values in ascending order."""
    clients = len(ordered_n)
    return (ordered_n[(clients - 1) // 2] + ordered_n[clients // 2]) / 2


def ordered(values_n: Tensor) -> Tensor:
    """The values in ascending order along the first dimension, by NumPy, which takes a quarter of torch's time."""
    return torch.from_numpy(np.sort(values_n.numpy(), axis=0))
