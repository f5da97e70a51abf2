"""Which client actors there are: how many, with which CPUs and share of a GPU, for which tiers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util import get_current_placement_group

from fedloom.platform.federation.config import ExecutorConfig
from fedloom.tiers.tier import Tier


@dataclass(frozen=True)
class Lane:
    """A group of equal actors. `tiers` are those that it serves; empty means all."""

    name: str
    actors: int
    num_cpus: float
    num_gpus: float
    tiers: tuple[str, ...] = ()


ROUNDING = 1e-9
"""What sums of fractions may lack."""


def lanes_of_run(
    config: ExecutorConfig, tiers: Sequence[Tier], resources: Mapping[str, float], num_clients: int, nodes: int = 1
) -> list[Lane]:
    """The lanes of a run with `num_clients` registered clients, resident or not, on these free resources.

    Raises ValueError as `plan_lanes` and `resident_lane`.
    """
    lanes = plan_lanes(config, tiers, resources)
    if not config.resident:
        return lanes
    return [resident_lane(lanes[0], resources.get("CPU", 0.0), num_clients, nodes)]


def plan_lanes(config: ExecutorConfig, tiers: Sequence[Tier], resources: Mapping[str, float]) -> list[Lane]:
    """The lanes for a cluster with these free resources (`CPU`, `GPU`).

    Without GPU shares the pool is shared by all tiers and sized by the CPUs. With them each tier has its own lane:
    every tier gets one actor first, then the lanes grow in turn while GPUs and CPUs last.
    Where every client has an actor of its own (`config.resident`) there is one lane, of the hungriest tier's size:
    `resident_lane` divides the CPUs of its actors among the clients, so that more of them need not fit.

    Raises:
        ValueError: the cluster cannot hold one actor of each lane; says what is missing.
    """
    cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    num_cpus = max(t.num_cpus for t in tiers)
    fitting = math.floor(cpus / num_cpus + ROUNDING)
    wanted = config.actors if config.actors is not None else fitting
    if config.resident:
        return [_one_size(max(1, wanted), num_cpus, max(t.num_gpus for t in tiers), gpus)]
    if all(t.num_gpus == 0 for t in tiers):
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


def resident_lane(lane: Lane, cpus: float, num_clients: int, nodes: int = 1) -> Lane:
    """A lane of one actor for each client and one for the server's data, with so few CPUs that all fit into `cpus`.

    On several nodes they fit however the CPUs are spread: each node may have less than an actor's share left over.
    The CPUs of an actor are Ray's bookkeeping: fewer mean that clients share them, not that results differ.
    Raises ValueError if there are more clients than Ray can count fractions for.
    """
    # With s = c / (n + N) at least n + 1 fit: sum_i floor(c_i / s) > sum_i (c_i / s - 1) = c / s - N = n.
    share = cpus / (num_clients + nodes)
    if share >= lane.num_cpus - ROUNDING:
        return replace(lane, actors=num_clients + 1)
    units = math.floor(share / CPU_UNIT + 1e-6)
    if units < 1:
        raise ValueError(
            f"executor.resident: {num_clients} clients with an actor each do not fit into {cpus:g} CPUs: "
            "set executor.resident=false"
        )
    return replace(lane, actors=num_clients + 1, num_cpus=round(units * CPU_UNIT, 4))


def bundles_of(lanes: Sequence[Lane], resident: int | None = None) -> list[dict[str, float]]:
    """One bundle of resources per client actor: what a placement group for a run with these lanes has to reserve.

    `lanes` are those of `lanes_of_run`, which on the sum of the bundles gives them again; `resident` is the number of
    clients if each has an actor of its own (one more is for the server's data).
    """
    counts = [lane.actors if resident is None else resident + 1 for lane in lanes]
    return [dict(_needs(lane)) for lane, count in zip(lanes, counts, strict=True) for _ in range(count)]


def total(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The resources of all bundles together."""
    return {
        name: math.fsum(bundle.get(name, 0.0) for bundle in bundles)
        for name in sorted({name for bundle in bundles for name in bundle})
    }


def free_resources() -> dict[str, float]:
    """What client actors that this process starts can have.

    In a placement group (an actor of a trial) that is what its bundles hold, less what the process was given itself:
    its actors are placed in the group. Elsewhere it is what the whole cluster has free.
    """
    group = get_current_placement_group()
    if group is None:
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        return free
    resources = total(group.bundle_specs)
    for name, amount in ray.get_runtime_context().get_assigned_resources().items():  # type: ignore[no-untyped-call]
        resources[name] = max(0.0, resources.get(name, 0.0) - amount)
    return resources


def nodes_to_fill() -> int:
    """Over how many nodes `free_resources` may be spread in pieces that do not fit an actor.

    One in a placement group: each of its bundles is made for an actor.
    """
    if get_current_placement_group() is not None:
        return 1
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    with_cpus = [node for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0.0) > 0]
    return max(1, len(with_cpus))


def _needs(lane: Lane) -> dict[str, float]:
    return {name: amount for name, amount in (("CPU", lane.num_cpus), ("GPU", lane.num_gpus)) if amount}


def _one_size(actors: int, num_cpus: float, num_gpus: float, gpus: float) -> Lane:
    if num_gpus > gpus + ROUNDING:
        raise ValueError(
            f"a client actor needs {num_gpus:g} GPUs, the cluster has {gpus:g} free: lower tiers.num_gpus or give "
            "Ray more GPUs (ray.num_gpus)"
        )
    return Lane("clients", actors, num_cpus, num_gpus)


def _grow(tiers: Sequence[Tier], cpus: float, gpus: float) -> list[int]:
    counts = [1] * len(tiers)
    cpus -= sum(t.num_cpus for t in tiers)
    gpus -= sum(t.num_gpus for t in tiers)
    if cpus < -ROUNDING or gpus < -ROUNDING:
        raise ValueError(
            f"one client actor per tier needs {sum(t.num_cpus for t in tiers):g} CPUs and "
            f"{sum(t.num_gpus for t in tiers):g} GPUs, {max(0.0, -cpus):g} CPUs and {max(0.0, -gpus):g} GPUs are "
            "missing: lower tiers.num_cpus or tiers.num_gpus"
        )
    grown = True
    while grown:
        grown = False
        for i, tier in enumerate(tiers):
            if tier.num_cpus <= cpus + ROUNDING and tier.num_gpus <= gpus + ROUNDING:
                counts[i] += 1
                cpus, gpus, grown = cpus - tier.num_cpus, gpus - tier.num_gpus, True
    return counts
