"""The resources that a trial needs, and whether the cluster holds them; computed before any actor starts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedloom.actors.placement import ActorGroup, bundles_of, plan_groups, resident_group
from fedloom.platform.federation.config import RunConfig
from fedloom.tiers.tier import Tier

Resources = Mapping[str, float]
Bundles = tuple[dict[str, float], ...]

EPSILON = 1e-6


@dataclass(frozen=True)
class Cluster:
    """The resources (`CPU`, `GPU`) of each node."""

    nodes: tuple[Resources, ...]

    def total(self, name: str) -> float:
        """Sum of a resource over all nodes."""
        return sum(node.get(name, 0.0) for node in self.nodes)


def bundles_of_trial(
    config: RunConfig, tiers: Sequence[Tier], num_clients: int, cluster: Cluster, trials: int
) -> Bundles:
    """One bundle per client actor of a trial; the trial's server reserves no CPU.

    Without `executor.actors` the number of actors is such that all `trials` fit at once, but at least one (one per tier
    if tiers have GPU shares). Raises ValueError that says what is missing if the cluster cannot hold the trial.
    """
    if config.executor.kind == "serial":
        bundles: Bundles = ({"CPU": float(config.executor.threads)},)
    else:
        groups = _groups(config, tiers, cluster, trials)
        if config.executor.resident:
            cpus, nodes = groups[0].actors * groups[0].num_cpus, len(cluster.nodes)
            groups = [resident_group(groups[0], cpus, num_clients, nodes)]
        bundles = tuple(bundles_of(groups, num_clients if config.executor.resident else None))
    check_fits(bundles, cluster)
    return bundles


def _groups(config: RunConfig, tiers: Sequence[Tier], cluster: Cluster, trials: int) -> list[ActorGroup]:
    whole = {"CPU": _usable_cpus(config, tiers, cluster), "GPU": cluster.total("GPU")}
    least = _least(tiers)
    if config.executor.actors is not None and not any(t.num_gpus for t in tiers):
        least = {"CPU": config.executor.actors * max(t.num_cpus for t in tiers), "GPU": 0.0}
    share = {name: max(least[name], whole[name] / max(1, trials)) for name in whole}
    return plan_groups(config.executor, tiers, share)


def _usable_cpus(config: RunConfig, tiers: Sequence[Tier], cluster: Cluster) -> float:
    """The cluster's CPUs, less those of each node that are too few for another actor if all have the same size."""
    if config.executor.resident or any(t.num_gpus for t in tiers):
        return cluster.total("CPU")
    size = max(t.num_cpus for t in tiers)
    return sum(math.floor(node.get("CPU", 0.0) / size + EPSILON) for node in cluster.nodes) * size


def _least(tiers: Sequence[Tier]) -> dict[str, float]:
    """Resources of the smallest pool: one actor, or one per tier if tiers have GPU shares."""
    if not any(t.num_gpus for t in tiers):
        return {"CPU": max(t.num_cpus for t in tiers), "GPU": 0.0}
    return {"CPU": sum(t.num_cpus for t in tiers), "GPU": sum(t.num_gpus for t in tiers)}


def check_fits(bundles: Bundles, cluster: Cluster) -> None:
    """Raises ValueError that names the missing resources if an empty cluster cannot hold all bundles at once."""
    for name in ("CPU", "GPU"):
        wanted, there = sum(b.get(name, 0.0) for b in bundles), cluster.total(name)
        if wanted > there + EPSILON:
            raise ValueError(
                f"{len(bundles)} client actors need {wanted:g} {name}s at once, the cluster has {there:g}: "
                f"{wanted - there:g} {name}s are missing; {_advice(name)}"
            )
    rooms = [dict(node) for node in cluster.nodes]
    for bundle in sorted(bundles, key=lambda b: (-b.get("GPU", 0.0), -b.get("CPU", 0.0))):
        room = next((r for r in rooms if _holds(r, bundle)), None)
        if room is None:
            size = " and ".join(f"{amount:g} {name}s" for name, amount in bundle.items() if amount)
            raise ValueError(
                f"a client actor of {size} has no place: {len(bundles)} of them do not fit on the cluster's "
                f"{len(cluster.nodes)} nodes ({_sizes(cluster)}); {_advice('CPU')}"
            )
        for name, amount in bundle.items():
            room[name] = room.get(name, 0.0) - amount


def _holds(room: Resources, bundle: Resources) -> bool:
    return all(room.get(name, 0.0) + EPSILON >= amount for name, amount in bundle.items())


def _sizes(cluster: Cluster) -> str:
    sizes = [f"{n.get('CPU', 0):g} CPUs" + (f", {n['GPU']:g} GPUs" if n.get("GPU") else "") for n in cluster.nodes]
    return "; ".join(sizes[:8]) + ("; ..." if len(sizes) > 8 else "")


def _advice(name: str) -> str:
    if name == "GPU":
        return "lower tiers.num_gpus, or add GPUs (ray.num_gpus)"
    return "lower executor.actors or tiers.num_cpus, or give Ray more CPUs (ray.num_cpus)"
