"""Waits in line for the CPUs and GPUs that other runs on the same cluster hold."""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from fedloom.actors.placement import ActorGroup, free_resources, groups_of_run, nodes_to_fill, whole_resources
from fedloom.platform.federation.world import World

Resources = Mapping[str, float]
T = TypeVar("T")

POLL_S = 1.0


def groups_in_line(world: World, tell: Callable[[str], None]) -> list[ActorGroup]:
    """The actor groups of a run, as soon as they fit besides what else is on the cluster, for up to `ray.wait_s`.

    Raises ValueError under the conditions of `wait_for_room` and `groups_of_run`.
    """

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
