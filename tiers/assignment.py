"""Assigns each registered client to a tier: by a share per tier, by a list, or by the speed of its device."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedloom.tiers.clock import TRAINING_FACTOR
from fedloom.tiers.devices import DeviceTable

TierOfClient = npt.NDArray[np.int16]
"""Shape (clients,): the index of each client's tier, 0 for tier1; two bytes per client."""


def by_shares(num_clients: int, shares: Sequence[float], rng: np.random.Generator) -> TierOfClient:
    """Assigns clients to tiers at random, independently of their data, with an exact number of clients per tier.

    `shares` holds one share per tier. Every tier gets its share of the clients rounded down; the remaining clients go
    to the tiers with the largest remainders (ties: the lower tier). The assignment is a uniform permutation.
    Raises ValueError if a share is negative or if the shares do not sum to 1 within 1e-6.

    Source: FedorAS, App. E.4, Tab. 8.
    """
    if num_clients < 1:
        raise ValueError(f"num_clients={num_clients} must be at least 1")
    counts = _exact_counts(num_clients, shares)
    return rng.permutation(np.repeat(np.arange(len(counts), dtype=np.int16), counts))


def by_list(tier_of_client: Sequence[int] | npt.NDArray[np.integer], num_tiers: int, num_clients: int) -> TierOfClient:
    """Checks an explicit tier index per client and returns the indices.

    Raises ValueError if the number of entries is not `num_clients` or if an entry is not the index of a tier.
    """
    given = np.asarray(tier_of_client)
    if given.shape != (num_clients,):
        raise ValueError(
            f"the list of tiers has shape {given.shape}, but there are {num_clients} clients: give one each"
        )
    if given.size and given.dtype.kind not in "iu":
        raise ValueError(f"the list of tiers must hold whole numbers, not {given.dtype}")
    outside = (given < 0) | (given >= num_tiers)
    if outside.any():
        client = int(np.argmax(outside))
        raise ValueError(
            f"client {client} is in tier index {given[client]}, which must be from 0 (tier1) to {num_tiers - 1}"
        )
    return given.astype(np.int16)


def by_device_table(
    table: DeviceTable, tier_uppers: Sequence[float], *, batch_size: int, max_step_s: float
) -> TierOfClient:
    """Assigns each client to the highest tier whose largest model its device trains in time; client i has device row i.

    A device can train a tier if `TRAINING_FACTOR * upper_macs * batch_size / macs_per_s <= max_step_s`, where
    `upper_macs` is the tier's upper bound in MACs of one forward pass of one sample: one step on a batch takes at most
    `max_step_s` seconds. (`TRAINING_FACTOR` is 3: one forward pass, and a backward pass that costs two.)
    A device that is too slow for every tier belongs to tier 0, which has the smallest models.
    Raises ValueError if the bounds do not increase or a limit is not positive.

    Source: FedorAS, App. J.3, assigns tiers by a device trace; the rule itself is our own.
    """
    if batch_size < 1 or not max_step_s > 0:
        raise ValueError(f"batch_size={batch_size} and max_step_s={max_step_s:g} must be positive")
    if not len(tier_uppers) or not (np.diff([0.0, *tier_uppers]) > 0).all():
        raise ValueError(f"tier bounds {list(tier_uppers)} must be positive and strictly increasing")
    tiers = np.zeros(len(table), dtype=np.int16)
    for index, upper_macs in enumerate(tier_uppers):
        step_s = TRAINING_FACTOR * upper_macs * batch_size / table.macs_per_s
        tiers[step_s <= max_step_s] = index
    return tiers


def _exact_counts(num_clients: int, shares: Sequence[float]) -> npt.NDArray[np.int64]:
    wanted = np.asarray(shares, dtype=np.float64)
    if not wanted.size or not (wanted >= 0).all():
        raise ValueError(f"shares {list(shares)} must be one number per tier, none negative")
    total = float(wanted.sum())
    if abs(total - 1) > 1e-6:
        raise ValueError(f"shares {list(shares)} sum to {total:.10g}, but must sum to 1")
    # 0.29 * 100 is 28.999999999999996: without rounding, floating-point errors would decide remainders and ties.
    exact = np.round(wanted / total * num_clients, 6)
    counts = np.floor(exact).astype(np.int64)
    left_over = num_clients - int(counts.sum())
    by_remainder = np.argsort(-np.round(exact - counts, 6), kind="stable")
    counts[by_remainder[:left_over]] += 1
    return counts
