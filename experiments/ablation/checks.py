"""Checks of trials before any of them starts: their configurations, data and resources."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedloom.actors.placement import ActorGroup, bundles_of, least_groups, plan_groups, resident_group
from fedloom.experiments.runs.configuration import config_from_dict
from fedloom.experiments.store.ablations import Trial
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.tiers import RunCosts
from fedloom.platform.federation.world import World, configured_attack, drawn_attackers
from fedloom.platform.methods.registry import check_space
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.runs.run import planned_stages, planned_world
from fedloom.platform.runs.run_files import begun_with, check_alike
from fedloom.platform.runs.supernets import supernet_key
from fedloom.tiers.tier import Tier, make_tiers

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


@dataclass(frozen=True)
class Checked:
    """A trial that can run.

    Attributes:
        bundles: the bundles of its placement group, without its server's.
        supernet: key of the supernet that it may share with other trials; None if it shares none.
        at_once: number of such trials that the cluster holds at the same time.
        compared_stage: the stage in which a scheduler compares trials; None without a scheduler.
    """

    trial: Trial
    bundles: Bundles
    supernet: str | None
    at_once: int
    compared_stage: str | None = None


def checked_trials(
    trials: Sequence[Trial],
    root: Path,
    cluster: Cluster,
    *,
    scheduler: Mapping[str, Any] | None = None,
    concurrent: int | None = None,
    beside: Sequence[Trial] = (),
) -> list[Checked]:
    """Checks the trials and computes their resources, for at most `concurrent` trials at the same time.

    `beside` are the trials that they will be compared with: those that have begun must have used the same data.
    Raises ValueError that names the trial. Missing resources are reported first, since that check needs no data.
    """
    at_once = min(len(trials), concurrent or len(trials))
    first_by_size: dict[str, Trial] = {}
    for trial in trials:
        tiers = {key: trial.config["tiers"][key] for key in ("count", "upper_bounds", "num_gpus", "num_cpus")}
        size = json.dumps([trial.config["executor"], tiers, trial.config["data"]["num_clients"]])
        first_by_size.setdefault(size, trial)
    for trial in first_by_size.values():
        config = config_from_dict(trial.config)
        if config.executor.resident and config.data.num_clients is None:
            continue  # the number of clients is known only from the data
        try:
            bundles_of_trial(config, _tiers(config), config.data.num_clients or 1, cluster, at_once)
        except ValueError as error:
            raise _of(trial, error) from error
    known = begun_with([RunPaths(root, trial.experiment, trial.run_id) for trial in beside])
    checked: dict[int, Checked] = {}
    spaces: dict[str, World] = {}
    for same_world in _by_world(trials):
        world: World | None = None
        for position, config in same_world:
            trial = trials[position]
            config.results = str(root)
            try:
                world = _changed(world or _world(config, spaces), config)
                check_alike(asdict(config), world.data, known)
                checked[position] = _checked(trial, world, cluster, at_once, scheduler)
            except ValueError as error:
                raise _of(trial, error) from error
    return [checked[position] for position in range(len(trials))]


def _by_world(trials: Sequence[Trial]) -> Iterable[Sequence[tuple[int, RunConfig]]]:
    """The trials' positions and configurations, grouped by what a world is built from, except for attacks.

    Consecutive trials have different seeds and therefore hardly ever share a world.
    """
    groups: dict[str, list[tuple[int, RunConfig]]] = {}
    for position, trial in enumerate(trials):
        config = config_from_dict(trial.config)
        parts = {name: trial.config[name] for name in ("data", "objective", "space", "tiers", "devices")}
        seeds = [config.seed_for("partition"), config.seed_for("training")]
        groups.setdefault(json.dumps([parts, seeds, config.executor.threads]), []).append((position, config))
    return groups.values()


def _tiers(config: RunConfig) -> tuple[Tier, ...]:
    """The tiers with their CPUs and GPU shares, and placeholder bounds."""
    count = len(config.tiers.upper_bounds) if config.tiers.upper_bounds is not None else config.tiers.count
    num_gpus = config.tiers.num_gpus if config.tiers.num_gpus is not None else 0.0
    num_cpus = config.tiers.num_cpus if config.tiers.num_cpus is not None else 1.0
    return make_tiers([float(i) for i in range(1, count + 1)], num_gpus=num_gpus, num_cpus=num_cpus)


def _world(config: RunConfig, spaces: dict[str, World]) -> World:
    """The configuration's world; `spaces` caches an earlier world of each space, whose measured costs are reused."""
    budgets = [config.tiers.cost, config.tiers.cost_weights, config.tiers.unsupported]
    key = json.dumps([asdict(config.space), budgets])
    before = spaces.get(key)
    if before is None:
        return spaces.setdefault(key, planned_world(config))
    return replace(planned_world(config, RunCosts(before.cost_table, before.macs_table)), space=before.space)


def _changed(world: World, config: RunConfig) -> World:
    """The world with another configuration of its group: only the method, the attack and the execution may differ."""
    check_space(config.method, world.space)
    attackers = drawn_attackers(config.attack.share, world.num_clients, config.seed_for("partition"))
    return replace(world, config=config, attack=configured_attack(config), attackers=attackers)


def _checked(
    trial: Trial, world: World, cluster: Cluster, at_once: int, scheduler: Mapping[str, Any] | None
) -> Checked:
    config = world.config
    stages = [stage.name for stage in planned_stages(world)]
    bundles = bundles_of_trial(config, world.tiers, world.num_clients, cluster, at_once)
    compared = _compared(scheduler, stages)
    shared = supernet_key(config, world) if config.reuse_supernet else None
    return Checked(trial, bundles, shared, _holds(bundles, cluster), compared)


def _compared(scheduler: Mapping[str, Any] | None, stages: Sequence[str]) -> str | None:
    if scheduler is None or scheduler["kind"] == "none":
        return None
    stage = scheduler["stage"] or stages[0]
    if stage not in stages:
        raise ValueError(f"ablation.scheduler.stage={stage}: the run's stages are {', '.join(stages)}")
    return str(stage)


def _holds(bundles: Bundles, cluster: Cluster) -> int:
    """Approximate number of such bundle sets that the cluster holds at once, from total resources only."""
    sizes: Mapping[str, float] = {n: sum(b.get(n, 0.0) for b in bundles) for n in ("CPU", "GPU")}
    return max(1, min((int(cluster.total(n) / size + 1e-6) for n, size in sizes.items() if size), default=1))


def _of(trial: Trial, error: ValueError) -> ValueError:
    return ValueError(f"trial {trial.index} ({trial.label()}): {error}")


# -- resources ---------------------------------------------------------------------------------------------------------


def bundles_of_trial(
    config: RunConfig, tiers: Sequence[Tier], num_clients: int, cluster: Cluster, trials: int
) -> Bundles:
    """One bundle per client actor of a trial; the trial's server reserves no CPU.

    Without `executor.actors`, there are as many actors as let all `trials` fit at once, but at least one (one for each
    actor size if tiers have GPU shares). A serial trial gets a CPU per thread, and a whole GPU if any tier has a share;
    a dry run gets the CPUs alone. Raises ValueError, which says what is missing, if the cluster cannot hold the trial.
    """
    if config.executor.kind == "serial" or config.dry_run:
        whole_gpu = {"GPU": 1.0} if any(t.num_gpus for t in tiers) and not config.dry_run else {}
        bundles: Bundles = ({"CPU": float(config.executor.threads), **whole_gpu},)
    else:
        bundles = tuple(bundles_of(_groups(config, tiers, num_clients, cluster, trials)))
    check_fits(bundles, cluster)
    return bundles


def _groups(
    config: RunConfig, tiers: Sequence[Tier], num_clients: int, cluster: Cluster, trials: int
) -> list[ActorGroup]:
    """A trial's actor groups, as large as possible with all trials running at once, else the smallest possible ones."""
    executor, rooms = config.executor, cluster.nodes
    if executor.resident:
        least_cpus = max(tier.num_cpus for tier in tiers) * (executor.actors or 1)
        at_once = math.floor(cluster.total("CPU") / least_cpus + EPSILON)
        return [resident_group(executor, tiers, rooms, num_clients, max(1, min(trials, at_once)))]
    for runs in (trials, 1) if executor.actors is not None else (trials,):  # a given number may fit only one at a time
        with suppress(ValueError):
            return plan_groups(executor, tiers, rooms, runs)
    return least_groups(executor, tiers)


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
        fits = (r for r in rooms if all(r.get(name, 0.0) + EPSILON >= amount for name, amount in bundle.items()))
        room = next(fits, None)
        if room is None:
            size = " and ".join(f"{amount:g} {name}s" for name, amount in bundle.items() if amount)
            raise ValueError(
                f"a client actor of {size} has no place: {len(bundles)} of them do not fit on the cluster's "
                f"{len(cluster.nodes)} nodes ({_sizes(cluster)}); {_advice('CPU')}"
            )
        for name, amount in bundle.items():
            room[name] = room.get(name, 0.0) - amount


def _sizes(cluster: Cluster) -> str:
    sizes = [f"{n.get('CPU', 0):g} CPUs" + (f", {n['GPU']:g} GPUs" if n.get("GPU") else "") for n in cluster.nodes]
    return "; ".join(sizes[:8]) + ("; ..." if len(sizes) > 8 else "")


def _advice(name: str) -> str:
    if name == "GPU":
        return "lower tiers.num_gpus, or add GPUs (ray.num_gpus)"
    return "lower executor.actors or tiers.num_cpus, or give Ray more CPUs (ray.num_cpus)"
