"""Plans the client actors of a run: their number, CPUs, share of a GPU, and tiers; and waits for these resources."""

import bisect
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import ray
from ray._private import state as ray_state
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.experimental import internal_kv
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

    def __str__(self) -> str:
        return _amounts({"CPU": self.num_cpus, "GPU": self.num_gpus})


ROUNDING = 1e-9
"""Tolerance for rounding errors in sums of fractional resources."""

Room = Mapping[str, float]
"""Resources (`CPU`, `GPU`) of one node, or of one bundle of a placement group: no actor is spread over two."""

Rooms = dict[str, Room]
"""Rooms by the ids of their nodes, or by the positions of their bundles."""


def groups_of_run(
    config: ExecutorConfig, tiers: Sequence[Tier], rooms: Sequence[Room], num_clients: int
) -> list[ActorGroup]:
    """The actor groups of a run with `num_clients` registered clients, resident or not, in these free rooms.

    Raises ValueError under the conditions of `plan_groups` and `resident_group`.
    """
    if config.resident:
        return [resident_group(config, tiers, rooms, num_clients)]
    return plan_groups(config, tiers, rooms)


def plan_groups(
    config: ExecutorConfig, tiers: Sequence[Tier], rooms: Sequence[Room], runs: int = 1
) -> list[ActorGroup]:
    """The actor groups of each of `runs` equal concurrent runs whose clients are not resident.

    Every group first gets one actor, then the groups grow in turn while there is room, or up to `config.actors`.
    Raises ValueError, naming the free resources, if there is no room for one actor per group or for `config.actors`.
    """
    least = least_groups(config, tiers)
    groups = filled(least, rooms, config.actors, runs)
    counts = [group.actors for group in groups]
    if all(counts) and config.actors in (None, sum(counts)):
        return groups
    needs = total(bundles_of(least))
    there = total([{"CPU": 0.0}, *rooms])
    nodes = f", on {len(rooms)} nodes" if len(rooms) > 1 else ""
    if "GPU" not in needs:
        (group,) = least
        raise ValueError(
            f"{group.actors} client actors of {group} need {needs['CPU']:g} CPUs, the cluster has {there['CPU']:g} "
            f"free{nodes}: lower executor.actors or give Ray more CPUs (ray.num_cpus)"
        )
    if nodes:
        nodes += f" ({'; '.join(_amounts(room) for room in rooms)})"
    wanted = " and ".join(f"{group.actors} client actors of {group} ({', '.join(group.tiers)})" for group in least)
    raise ValueError(
        f"{wanted} need {_amounts(needs)}, the cluster has {_amounts(there)} free{nodes}: lower tiers.num_cpus or "
        f"tiers.num_gpus{'' if config.actors is None else ' or executor.actors'}"
    )


def _amounts(room: Room) -> str:
    return f"{room.get('CPU', 0.0):g} CPUs" + (f" and {room['GPU']:g} GPUs" if room.get("GPU") else "")


def least_groups(config: ExecutorConfig, tiers: Sequence[Tier]) -> list[ActorGroup]:
    """The smallest groups with which a run can start: one actor each, or `config.actors` dealt out in turn.

    Tiers with the same CPUs and share of a GPU form one group; without GPU shares all tiers form one, with the CPUs of
    the largest. Raises ValueError if `config.actors` are fewer than the groups.
    """
    names: dict[tuple[float, float], list[str]] = {}
    for tier in tiers:
        names.setdefault((tier.num_cpus, tier.num_gpus), []).append(tier.name)
    sizes = [ActorGroup("+".join(of_size), 1, *size, tuple(of_size)) for size, of_size in names.items()]
    if all(tier.num_gpus == 0 for tier in tiers):
        sizes = [ActorGroup("clients", 1, max(tier.num_cpus for tier in tiers), 0.0)]
    actors = len(sizes) if config.actors is None else config.actors
    if actors < len(sizes):
        raise ValueError(f"executor.actors={actors}: the tiers need actors of {len(sizes)} sizes; give as many or more")
    return [replace(size, actors=(actors + len(sizes) - 1 - i) // len(sizes)) for i, size in enumerate(sizes)]


def filled(groups: Sequence[ActorGroup], rooms: Sequence[Room], most: int | None, runs: int = 1) -> list[ActorGroup]:
    """The groups with as many actors as fit into the rooms `runs` times, but at most `most` in total.

    Groups grow in turn: each gets its first actor (the largest group first) before any gets a second. An actor goes to
    the room with the fewest free GPUs, and among those the fewest free CPUs, in which it fits.
    """
    insides = [_Inside(room) for room in rooms]
    counts = dict.fromkeys(range(len(groups)), 0)
    growing = sorted(counts, key=lambda i: (-groups[i].num_gpus, -groups[i].num_cpus))
    while growing:
        for i in tuple(growing):
            before = deepcopy(insides) if runs > 1 else insides
            fits = sum(counts.values()) != most and all(_put(groups[i], insides) for _ in range(runs))
            if fits:
                counts[i] += 1
            else:
                insides = before
                growing.remove(i)
        growing.sort()
    return [replace(group, actors=counts[i]) for i, group in enumerate(groups)]


def _put(group: ActorGroup, insides: Sequence["_Inside"]) -> bool:
    return any(inside.put(group) for inside in sorted(insides, key=lambda inside: (sum(inside.gpus), inside.cpus)))


class _Inside:
    """The free resources of a room, with separate GPUs, because a share of a GPU is part of a single device."""

    def __init__(self, room: Room) -> None:
        gpus = room.get("GPU", 0.0) + ROUNDING
        self.cpus, self.gpus = room.get("CPU", 0.0), [1.0] * math.floor(gpus) + [gpus % 1.0]

    def holds(self, share: float) -> float:
        """How many GPU shares of this size are free; infinitely many for a share of 0."""
        if share > 1:
            return self.gpus.count(1.0) // share
        return sum(math.floor(free / share + ROUNDING) for free in self.gpus) if share else math.inf

    def put(self, group: ActorGroup) -> bool:
        """Takes an actor's resources out of the room if it fits; returns whether it does."""
        number, share = math.ceil(group.num_gpus), min(1.0, group.num_gpus)
        devices = sorted(free for free in self.gpus if free + ROUNDING >= share)[:number]
        if group.num_cpus > self.cpus + ROUNDING or len(devices) < number:
            return False
        self.cpus -= group.num_cpus
        for free in devices:
            self.gpus[self.gpus.index(free)] = free - share
        return True


UNITS = 10_000
"""Ray counts CPUs and GPUs in units of 1e-4."""


def resident_group(
    config: ExecutorConfig, tiers: Sequence[Tier], rooms: Sequence[Room], num_clients: int, runs: int = 1
) -> ActorGroup:
    """A group of one actor per client and one for the server's data, with resources such that `runs` runs fit.

    Each actor gets the CPUs and the share of a GPU of the largest tier or, where these do not fit, the most CPUs and
    the largest 1/k of a GPU that do; together they get at most the CPUs of `config.actors` actors. CPUs are only an
    entry in Ray's accounting: with fewer, clients share CPUs, and the results are the same. A GPU share limits memory.
    Raises ValueError if an actor's share would be below the smallest amount that Ray counts.
    """
    actors, insides = num_clients + 1, [_Inside(room) for room in rooms]
    num_cpus, num_gpus = max(tier.num_cpus for tier in tiers), max(tier.num_gpus for tier in tiers)

    def fit(cpus: float, gpus: float) -> bool:
        counts = ((math.floor(inside.cpus / cpus + ROUNDING), inside.holds(gpus)) for inside in insides)
        return sum(map(min, counts)) >= actors * runs

    kth = range(max(1, math.ceil(1 / num_gpus - ROUNDING)), UNITS + 1) if num_gpus else ()
    shares = chain([num_gpus], (math.floor(UNITS / k) / UNITS for k in kth))
    gpus = next((share for share in shares if fit(1 / UNITS, share)), None)
    if gpus is None:
        there = total([{"CPU": 0.0}, *rooms])
        raise ValueError(
            f"executor.resident: {num_clients} clients with an actor each do not fit into "
            f"{_amounts(there)}: set executor.resident=false"
        )
    most = num_cpus if config.actors is None else min(num_cpus, config.actors * num_cpus / actors)
    if not fit(most, gpus):  # bisects from 1 unit, which fits, to the most units that fit
        units = bisect.bisect_left(
            range(1, math.ceil(most * UNITS)), True, key=lambda unit: not fit(unit / UNITS, gpus)
        )
        most = units / UNITS
    whole = UNITS if most > 1 else 1  # more than one CPU has to be a whole number
    units = math.floor(most * UNITS / whole + ROUNDING) * whole
    return ActorGroup("clients", actors, units / UNITS, gpus)


def bundles_of(groups: Sequence[ActorGroup]) -> list[dict[str, float]]:
    """One bundle of resources per client actor, for the placement group of a run with these groups of `groups_of_run`.

    Called on the bundles as rooms, `groups_of_run` returns the same groups.
    """
    needs = [{"CPU": group.num_cpus, **({"GPU": group.num_gpus} if group.num_gpus else {})} for group in groups]
    return [dict(need) for need, group in zip(needs, groups, strict=True) for _ in range(group.actors)]


def total(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sum of the bundles' resources."""
    return {
        name: math.fsum(bundle.get(name, 0.0) for bundle in bundles)
        for name in sorted({name for bundle in bundles for name in bundle})
    }


def free_rooms() -> Rooms:
    """The free resources, by node, for client actors that this process starts.

    In a placement group (in the actor of a trial) these are the group's bundles, less what is assigned to this process,
    because its actors are placed in the group.
    """
    group = get_current_placement_group()
    if group is not None:
        rooms = [dict(bundle) for bundle in group.bundle_specs]
        assigned = ray.get_runtime_context().get_assigned_resources()  # type: ignore[no-untyped-call]
        taken = next((room for room in rooms if all(room.get(n, 0.0) + ROUNDING >= assigned[n] for n in assigned)), {})
        for name in assigned:
            taken[name] = taken.get(name, 0.0) - assigned[name]
        return {str(index): room for index, room in enumerate(rooms)}
    if ray.util.client.ray.is_connected():  # type: ignore[no-untyped-call] # the server will see the nodes
        return {"cluster": _counted(ray.available_resources())}  # type: ignore[no-untyped-call]
    free = ray_state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return {node: _counted(free[node]) for node in whole_rooms() if node in free}


def whole_rooms() -> Rooms:
    """What `free_rooms` would find if nothing else ran."""
    if get_current_placement_group() is not None:
        return free_rooms()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: _counted(node["Resources"]) for node in nodes if node["Alive"]}


def _counted(resources: Mapping[str, float]) -> Room:
    return {name: resources.get(name, 0.0) for name in ("CPU", "GPU")}


# -- waiting for other runs and for nodes -----------------------------------------------------------------------------

T = TypeVar("T")

POLL_S = 1.0

READ_ONLY = re.compile("node_[0-9a-f]+")
"""How Ray's autoscaler names the types of nodes that it has not started and cannot start: by their ids."""


def can_grow() -> bool:
    """Whether the cluster has an autoscaler, which starts nodes when actors wait for them."""
    is_client = ray.util.client.ray.is_connected()  # type: ignore[no-untyped-call] # the server will see it
    if not is_client and is_autoscaler_v2():  # version 2 does not tell what it can start
        return True
    status = internal_kv._internal_kv_get("__autoscaling_status")
    report = json.loads(status).get("autoscaler_report") if status else None  # there is none for the first seconds
    types: Mapping[str, str] = (report or {}).get("node_type_mapping") or {}
    return any(not READ_ONLY.fullmatch(name) for name in types.values())


def groups_in_line(world: World, tell: Callable[[str], None]) -> list[ActorGroup]:
    """Waits up to `ray.wait_s` until a run's actor groups fit beside the cluster's other work, and returns them.

    On a cluster that can grow they need not fit, because waiting actors make it grow.
    Raises ValueError under the conditions of `wait_for_room` and `groups_of_run`.
    """
    config = world.config.executor

    def plan(rooms: Rooms) -> list[ActorGroup]:
        return groups_of_run(config, world.tiers, list(rooms.values()), world.num_clients)

    if config.resident or get_current_placement_group() is not None or not can_grow():
        return wait_for_room(plan, free_rooms, whole_rooms, world.config.ray.wait_s, tell)
    try:
        return plan(free_rooms())
    except ValueError as error:
        tell(f"asking this cluster to grow: {error}")
        return least_groups(config, world.tiers)


def wait_for_room(
    plan: Callable[[Rooms], T],
    free: Callable[[], Rooms],
    whole: Callable[[], Rooms],
    wait_s: float,
    tell: Callable[[str], None],
) -> T:
    """Returns `plan` of the free rooms as soon as they suffice; calls `tell` with a message if it has to wait.

    Raises the ValueError of `plan` at once if not even the whole cluster suffices, and one that says what helps after
    `wait_s`.
    """

    def said(rooms: Rooms) -> str:
        return f"{said_free(total(list(rooms.values())), total(list(whole().values())))} are free"

    rooms = free()
    try:
        return plan(rooms)
    except ValueError:
        plan(whole())  # raises, if waiting would be in vain
    tell(f"waiting for other runs on this cluster: {said(rooms)}; for up to {wait_s:g} s (ray.wait_s)")
    end_s = time.monotonic() + wait_s
    while (now_s := time.monotonic()) < end_s:
        time.sleep(min(POLL_S, end_s - now_s))
        rooms = free()
        try:
            return plan(rooms)
        except ValueError:
            continue
    raise ValueError(
        f"other runs hold this cluster: {said(rooms)} after {wait_s:g} s; start this run when one has "
        "ended, wait longer (ray.wait_s=3600), or start a cluster of its own (ray.address=local)"
    )


def said_free(free: Room, whole: Room) -> str:
    """The free and the total resources, such as `2 of 8 CPUs`, for a message."""
    names = [name for name in ("CPU", "GPU") if whole.get(name, 0.0) > 0]
    return " and ".join(f"{free.get(name, 0.0):g} of {whole[name]:g} {name}s" for name in names)
