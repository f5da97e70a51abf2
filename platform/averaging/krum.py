"""Krum and Multi-Krum (Blanchard et al. 2017), and Bulyan over Krum (El Mhamdi et al. 2018).

    Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent.
    NeurIPS 2017, section 4. For n vectors, f of them from attackers, n >= 2 f + 3:

        score(i) = sum of ||V_i - V_j||^2 over the n - f - 2 vectors V_j that are closest to V_i
        Krum         the vector with the smallest score
        Multi-Krum   the mean of the m vectors with the smallest scores; here m = n - f - 2

    El Mhamdi, Guerraoui, Rouault: The Hidden Vulnerability of Distributed Learning in Byzantium. ICML 2018, section 4.
    For n >= 4 f + 3 vectors:

        S = {}; theta = n - 2 f times: move the vector that Krum chooses among the remaining ones to S
        for every coordinate: the mean of the beta = theta - 2 f values of S that are closest to their median

Distances are between whole updates. On slices, two updates are compared over the scalars that both hold, divided by
their number. Each scalar is aggregated over the clients that hold it: n is their number, and f the largest number that
`byzantine_share` allows.

On the same vectors, Flower's results are the same up to rounding. Two other published implementations deviate from the
papers: those of ByzantineMomentum and of ALIE's authors score by distances instead of their squares, over n - f - 1 and
n - f of them, and their Bulyan averages or trims differently; Krum's choice was the same in all cases tried.
"""

from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from fedloom.platform.averaging.aggregators import ByzantineShare, Cell, attackers_among
from fedloom.platform.averaging.median import middle, ordered


def krum(cell: Cell, *, byzantine_share: ByzantineShare = 0.2) -> Tensor | None:
    """The values of the client whose neighbours are closest; None for fewer than 2 f + 3 clients."""
    n, f = _counts(cell, byzantine_share)
    if n < 2 * f + 3:
        return None
    return cell.values_n[int(_by_score(cell.distances_nn, f)[0])]


def multi_krum(cell: Cell, *, byzantine_share: ByzantineShare = 0.2) -> Tensor | None:
    """The mean of the n - f - 2 clients with the smallest scores; None for fewer than 2 f + 3 clients."""
    n, f = _counts(cell, byzantine_share)
    if n < 2 * f + 3:
        return None
    chosen = _by_score(cell.distances_nn, f)[: n - f - 2].sort().values
    return cell.values_n[chosen].mean(dim=0)


def bulyan(
    cell: Cell,
    *,
    byzantine_share: Annotated[
        float, Interval(ge=0, lt=0.25), "bulyan: the largest share of attackers to tolerate"
    ] = 0.1,
) -> Tensor | None:
    """The mean of the n - 4 f values closest to the median of those that Krum chooses; None for n < 4 f + 3."""
    n, f = _counts(cell, byzantine_share)
    if n < 4 * f + 3:
        return None
    distances_nn, left = cell.distances_nn, list(range(n))
    chosen = [left.pop(int(_by_score(distances_nn[left][:, left], f)[0])) for _ in range(n - 2 * f)]
    values_s = ordered(cell.values_n[chosen])
    return _closest(values_s, middle(values_s), n - 4 * f).mean(dim=0)


def _closest(ordered_s: Tensor, centre: Tensor, count: int) -> Tensor:
    """The `count` values closest to the centre, ascending; of equally close ones the smaller."""
    nearest = (ordered_s - centre).abs().sort(dim=0, stable=True).indices[:count]
    return ordered_s.gather(0, nearest.sort(dim=0).values)


def _counts(cell: Cell, byzantine_share: float) -> tuple[int, int]:
    clients = len(cell.values_n)
    return clients, attackers_among(clients, byzantine_share)


def _by_score(distances_nn: Tensor, attackers: int) -> Tensor:
    """The clients' indices in ascending order of score; ties keep plan order.

    Bulyan's last choices are among so few clients that none would have a neighbour; then the closest one counts.
    """
    others_nn = distances_nn.clone().fill_diagonal_(torch.inf).sort(dim=1).values
    neighbours = max(1, len(distances_nn) - attackers - 2)
    return others_nn[:, :neighbours].sum(dim=1).sort(stable=True).indices
