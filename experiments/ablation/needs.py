"""What a trial needs of a cluster, and whether it fits; looked at before anything is started."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedloom.actors.placement import Lane, bundles_of, plan_lanes, resident_lane
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
        """The whole cluster's CPUs or GPUs."""
        return sum(node.get(name, 0.0) for node in self.nodes)


def bundles_of_trial(
    config: RunConfig, tiers: Sequence[Tier], num_clients: int, cluster: Cluster, trials: int
) -> Bundles:
    """One bundle per client actor of a trial; its server takes no CPU of its own.

    Without `executor.actors` a trial has as many actors as let all `trials` run at once, at least one (per tier, where
    tiers have GPU shares). Raises ValueError, saying what is missing, if the cluster cannot hold the trial.
    """
    if config.executor.kind == "serial":
        bundles: Bundles = ({"CPU": float(config.executor.threads)},)
    else:
        lanes = _lanes(config, tiers, cluster, trials)
        if config.executor.resident:
            cpus, nodes = lanes[0].actors * lanes[0].num_cpus, len(cluster.nodes)
            lanes = [resident_lane(lanes[0], cpus, num_clients, nodes)]
        bundles = tuple(bundles_of(lanes, num_clients if config.executor.resident else None))
    check_fits(bundles, cluster)
    return bundles


def _lanes(config: RunConfig, tiers: Sequence[Tier], cluster: Cluster, trials: int) -> list[Lane]:
    whole = {"CPU": _usable_cpus(config, tiers, cluster), "GPU": cluster.total("GPU")}
    least = _least(tiers)
    if config.executor.actors is not None and not any(t.num_gpus for t in tiers):
        least = {"CPU": config.executor.actors * max(t.num_cpus for t in tiers), "GPU": 0.0}
    share = {name: max(least[name], whole[name] / max(1, trials)) for name in whole}
    return plan_lanes(config.executor, tiers, share)


def _usable_cpus(config: RunConfig, tiers: Sequence[Tier], cluster: Cluster) -> float:
    """The cluster's CPUs, without what is left over on each node where actors of one size fill it."""
    if config.executor.resident or any(t.num_gpus for t in tiers):
        return cluster.total("CPU")
    size = max(t.num_cpus for t in tiers)
    return sum(math.floor(node.get("CPU", 0.0) / size + EPSILON) for node in cluster.nodes) * size


def _least(tiers: Sequence[Tier]) -> dict[str, float]:
    """What the smallest pool takes: one actor, or one per tier where tiers have GPU shares."""
    if not any(t.num_gpus for t in tiers):
        return {"CPU": max(t.num_cpus for t in tiers), "GPU": 0.0}
    return {"CPU": sum(t.num_cpus for t in tiers), "GPU": sum(t.num_gpus for t in tiers)}


def check_fits(bundles: Bundles, cluster: Cluster) -> None:
    """Raises ValueError naming the shortage if an empty cluster could not hold all bundles at once."""
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
