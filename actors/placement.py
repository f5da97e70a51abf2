"""Which client actors there are: how many, with which CPUs and share of a GPU, for which tiers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedloom.platform.config import ExecutorConfig
from fedloom.tiers.tier import Tier


@dataclass(frozen=True)
class Lane:
    """A group of equal actors. `tiers` are those that it serves; empty means all."""

    name: str
    actors: int
    num_cpus: float
    num_gpus: float
    tiers: tuple[str, ...] = ()


def plan_lanes(config: ExecutorConfig, tiers: Sequence[Tier], resources: Mapping[str, float]) -> list[Lane]:
    """The lanes for a cluster with these free resources (`CPU`, `GPU`).

    Without GPU shares the pool is shared by all tiers and sized by the CPUs. With them each tier has its own lane:
    every tier gets one actor first, then the lanes grow in turn while GPUs and CPUs last.

    Raises:
        ValueError: the cluster cannot hold one actor of each lane; says what is missing.
    """
    cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    if all(t.num_gpus == 0 for t in tiers):
        num_cpus = max(t.num_cpus for t in tiers)
        fitting = int(cpus // num_cpus)
        wanted = config.actors if config.actors is not None else fitting
        if wanted < 1 or wanted > fitting:
            raise ValueError(
                f"{max(1, wanted)} client actors of {num_cpus:g} CPUs need {max(1, wanted) * num_cpus:g} CPUs, "
                f"the cluster has {cpus:g} free: lower executor.actors or give Ray more CPUs (ray.num_cpus)"
            )
        return [Lane("clients", wanted, num_cpus, 0.0)]
    counts = _grow(tiers, cpus, gpus)
    return [Lane(t.name, n, t.num_cpus, t.num_gpus, (t.name,)) for t, n in zip(tiers, counts, strict=True)]


CPU_UNIT = 1e-4
"""Ray counts CPUs in these units."""


def resident_lane(lane: Lane, cpus: float, num_clients: int) -> Lane:
    """The lane with so few CPUs per actor that one for each client, and one for the server's data, fit into `cpus`.

    The CPUs of an actor are Ray's bookkeeping: fewer mean that clients share them, not that results differ.
    Raises ValueError if there are more clients than Ray can count fractions for.
    """
    share = math.floor(cpus / (num_clients + 1) / CPU_UNIT) * CPU_UNIT
    if share < CPU_UNIT:
        raise ValueError(
            f"executor.resident: {num_clients} clients with an actor each do not fit into {cpus:g} CPUs: "
            "set executor.resident=false"
        )
    return replace(lane, num_cpus=min(lane.num_cpus, round(share, 4)))


def _grow(tiers: Sequence[Tier], cpus: float, gpus: float) -> list[int]:
    counts = [1] * len(tiers)
    cpus -= sum(t.num_cpus for t in tiers)
    gpus -= sum(t.num_gpus for t in tiers)
    if cpus < 0 or gpus < -1e-9:
        raise ValueError(
            f"one client actor per tier needs {sum(t.num_cpus for t in tiers):g} CPUs and "
            f"{sum(t.num_gpus for t in tiers):g} GPUs, {max(0.0, -cpus):g} CPUs and {max(0.0, -gpus):g} GPUs are "
            "missing: lower tiers.num_cpus or tiers.num_gpus"
        )
    grown = True
    while grown:
        grown = False
        for i, tier in enumerate(tiers):
            if tier.num_cpus <= cpus and tier.num_gpus <= gpus + 1e-9 and tier.num_cpus + tier.num_gpus > 0:
                counts[i] += 1
                cpus, gpus, grown = cpus - tier.num_cpus, gpus - tier.num_gpus, True
    return counts
