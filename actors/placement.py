"""Plans the client actors of a run: their number, CPUs, share of a GPU, and tiers; and waits for these resources."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import ray
from ray.util import get_current_placement_group

from fedloom.platform.federation.config import ExecutorConfig
from fedloom.platform.federation.world import World
from fedloom.tiers.tier import Tier


@dataclass(frozen=True)
class ActorGroup:
    """Client actors with equal resources. `tiers` names the tiers they serve; empty means all."""

    name: str
    actors: int
    num_cpus: float
    num_gpus: float
    tiers: tuple[str, ...] = ()


ROUNDING = 1e-9
"""Tolerance for rounding errors in sums of fractional resources."""


def groups_of_run(
    config: ExecutorConfig, tiers: Sequence[Tier], resources: Mapping[str, float], num_clients: int, nodes: int = 1
) -> list[ActorGroup]:
    """The actor groups of a run with `num_clients` registered clients, resident or not, on these free resources.

    Raises ValueError under the conditions of `plan_groups` and `resident_group`.
    """
    groups = plan_groups(config, tiers, resources)
    if not config.resident:
        return groups
    return [resident_group(groups[0], resources.get("CPU", 0.0), num_clients, nodes)]


def plan_groups(config: ExecutorConfig, tiers: Sequence[Tier], resources: Mapping[str, float]) -> list[ActorGroup]:
    """The actor groups for a cluster with these free resources (`CPU`, `GPU`).

    Without GPU shares all tiers share one group, sized by the CPUs. With GPU shares tiers of equal resources share a
    group: every group first gets one actor, then the groups grow in turn until the GPUs or CPUs are used up.
    If every client has its own actor (`config.resident`), there is one group, and its actors have the resources of the
    largest tier; `resident_group` then divides the CPUs of these actors among the clients, so that all clients fit.

    Raises:
        ValueError: the cluster cannot hold one actor of each group; the message says what is missing.
    """
    cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    num_cpus = max(t.num_cpus for t in tiers)
    fitting = math.floor(cpus / num_cpus + ROUNDING)
    wanted = config.actors if config.actors is not None else fitting
    if config.resident:
        num_gpus = max(t.num_gpus for t in tiers)
        if num_gpus > gpus + ROUNDING:
            raise ValueError(
                f"a client actor needs {num_gpus:g} GPUs, the cluster has {gpus:g} free: lower tiers.num_gpus or give "
                "Ray more GPUs (ray.num_gpus)"
            )
        return [ActorGroup("clients", max(1, wanted), num_cpus, num_gpus)]
    if all(t.num_gpus == 0 for t in tiers):
        if wanted < 1 or wanted > fitting:
            raise ValueError(
                f"{max(1, wanted)} client actors of {num_cpus:g} CPUs need {max(1, wanted) * num_cpus:g} CPUs, "
                f"the cluster has {cpus:g} free: lower executor.actors or give Ray more CPUs (ray.num_cpus)"
            )
        return [ActorGroup("clients", wanted, num_cpus, 0.0)]
    return _grow(groups_by_size(tiers), cpus, gpus)


def groups_by_size(tiers: Sequence[Tier]) -> list[ActorGroup]:
    """One group of one actor for all tiers with the same CPUs and share of a GPU, in the order of the tiers."""
    names: dict[tuple[float, float], list[str]] = {}
    for tier in tiers:
        names.setdefault((tier.num_cpus, tier.num_gpus), []).append(tier.name)
    return [ActorGroup("+".join(of_size), 1, *size, tuple(of_size)) for size, of_size in names.items()]


def _grow(groups: Sequence[ActorGroup], cpus: float, gpus: float) -> list[ActorGroup]:
    counts = [1] * len(groups)
    least_cpus, least_gpus = sum(g.num_cpus for g in groups), sum(g.num_gpus for g in groups)
    cpus, gpus = cpus - least_cpus, gpus - least_gpus
    if cpus < -ROUNDING or gpus < -ROUNDING:
        raise ValueError(
            f"one client actor per tier (one for tiers of equal resources) needs {least_cpus:g} CPUs and "
            f"{least_gpus:g} GPUs, {max(0.0, -cpus):g} CPUs and {max(0.0, -gpus):g} GPUs are missing: lower "
            "tiers.num_cpus or tiers.num_gpus"
        )
    grown = True
    while grown:
        grown = False
        for i, group in enumerate(groups):
            if group.num_cpus <= cpus + ROUNDING and group.num_gpus <= gpus + ROUNDING:
                counts[i] += 1
                cpus, gpus, grown = cpus - group.num_cpus, gpus - group.num_gpus, True
    return [replace(group, actors=count) for group, count in zip(groups, counts, strict=True)]


CPU_UNIT = 1e-4
"""The smallest amount of CPU that Ray counts."""


def resident_group(group: ActorGroup, cpus: float, num_clients: int, nodes: int = 1) -> ActorGroup:
    """A group of one actor per client and one for the server's data, each with so few CPUs that all fit into `cpus`.

    On several nodes the actors fit for any distribution of the CPUs, since less than one actor's share is left over on
    each node. An actor's CPUs are only an entry in Ray's resource accounting: with fewer, clients share CPUs, and the
    results are the same.
    Raises ValueError if an actor's share would be below the smallest amount that Ray counts.
    """
    # n clients, N nodes, c CPUs (c_i on node i). With s = c / (n + N) at least n + 1 actors fit:
    # sum_i floor(c_i / s) > sum_i (c_i / s - 1) = c / s - N = n.
    share = cpus / (num_clients + nodes)
    if share >= group.num_cpus - ROUNDING:
        return replace(group, actors=num_clients + 1)
    units = math.floor(share / CPU_UNIT + 1e-6)
    if units < 1:
        raise ValueError(
            f"executor.resident: {num_clients} clients with an actor each do not fit into {cpus:g} CPUs: "
            "set executor.resident=false"
        )
    return replace(group, actors=num_clients + 1, num_cpus=round(units * CPU_UNIT, 4))


def bundles_of(groups: Sequence[ActorGroup], resident: int | None = None) -> list[dict[str, float]]:
    """One bundle of resources per client actor, for the placement group of a run with these actor groups.

    `groups` come from `groups_of_run`; the same call on the sum of the bundles returns the same groups. `resident` is
    the number of clients if each has its own actor; one more bundle is for the server's data.
    """
    counts = [group.actors if resident is None else resident + 1 for group in groups]
    needs = ((("CPU", group.num_cpus), ("GPU", group.num_gpus)) for group in groups)
    bundles = [{name: amount for name, amount in need if amount} for need in needs]
    return [dict(bundle) for bundle, count in zip(bundles, counts, strict=True) for _ in range(count)]


def total(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sum of the bundles' resources."""
    return {
        name: math.fsum(bundle.get(name, 0.0) for bundle in bundles)
        for name in sorted({name for bundle in bundles for name in bundle})
    }


def free_resources() -> dict[str, float]:
    """The resources available to client actors that this process starts.

    In a placement group (in the actor of a trial) these are the resources of the group's bundles, less those assigned
    to this process, because its actors are placed in the group. Otherwise they are the free resources of the cluster.
    """
    placement_group = get_current_placement_group()
    if placement_group is None:
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        return free
    resources = total(placement_group.bundle_specs)
    for name, amount in ray.get_runtime_context().get_assigned_resources().items():  # type: ignore[no-untyped-call]
        resources[name] = max(0.0, resources.get(name, 0.0) - amount)
    return resources


def nodes_to_fill() -> int:
    """Number of nodes over which `free_resources` may be spread, each with a rest too small for an actor.

    It is 1 in a placement group, because each of its bundles is sized for one actor.
    """
    if get_current_placement_group() is not None:
        return 1
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    with_cpus = [node for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0.0) > 0]
    return max(1, len(with_cpus))


# -- waiting for other runs -------------------------------------------------------------------------------------------

Resources = Mapping[str, float]
T = TypeVar("T")

POLL_S = 1.0


def groups_in_line(world: World, tell: Callable[[str], None]) -> list[ActorGroup]:
    """The actor groups of a run, as soon as they fit besides what else is on the cluster, for up to `ray.wait_s`.

    Raises ValueError under the conditions of `wait_for_room` and `groups_of_run`.
    """

    def whole_resources() -> Resources:
        """What `free_resources` would find if nothing else ran."""
        if get_current_placement_group() is not None:
            return free_resources()
        whole: Resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
        return whole

    def plan(resources: Resources) -> list[ActorGroup]:
        return groups_of_run(world.config.executor, world.tiers, resources, world.num_clients, nodes_to_fill())

    return wait_for_room(plan, free_resources, whole_resources, world.config.ray.wait_s, tell)


def wait_for_room(
    plan: Callable[[Resources], T],
    free: Callable[[], Resources],
    whole: Callable[[], Resources],
    wait_s: float,
    tell: Callable[[str], None],
) -> T:
    """What `plan` makes of the free resources, as soon as they suffice, with word to `tell` if that is not at once.

    Raises the ValueError of `plan` at once if not even the whole cluster suffices, and after `wait_s` one that says
    what helps then.
    """
    resources = free()
    try:
        return plan(resources)
    except ValueError:
        plan(whole())  # raises, if waiting would be in vain
    tell(f"waiting for other runs on this cluster: {_said(resources, whole())}; for up to {wait_s:g} s (ray.wait_s)")
    end_s = time.monotonic() + wait_s
    while (now_s := time.monotonic()) < end_s:
        time.sleep(min(POLL_S, end_s - now_s))
        resources = free()
        try:
            return plan(resources)
        except ValueError:
            continue
    raise ValueError(
        f"other runs hold this cluster: {_said(resources, whole())} after {wait_s:g} s; start this run when one has "
        "ended, wait longer (ray.wait_s=3600), or start a cluster of its own (ray.address=local)"
    )


def _said(free: Resources, whole: Resources) -> str:
    names = [name for name in ("CPU", "GPU") if whole.get(name, 0.0) > 0]
    return " and ".join(f"{free.get(name, 0.0):g} of {whole[name]:g} {name}s are free" for name in names)
