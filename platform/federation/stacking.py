"""How many clients of a round are trained together, as one batch of a stack of networks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.platform.clients.stacks import common_subnet, skeleton

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedloom.platform.clients.assignments import Task
    from fedloom.platform.federation.world import World

LARGEST_STACK = 32
"""Clients of a stack: more hardly make the products larger than a processor's caches like."""
STACKS = 2
"""A round's clients are divided into at least so many stacks, for as many actors to train at once."""
GAINFUL_MACS = 2e8
"""MACs of a step of all clients of a stack, from which on nothing is gained."""


def clients_per_stack(world: World, tasks: Sequence[Task], batch_size: int) -> int:
    """The number of clients per stack; 1 if they train different networks, parts of a supernet, or large networks.

    It depends on the configuration alone, never on the machine or the number of actors, because rounding depends on it.
    """
    wanted, resident = world.config.executor.stack_clients, world.config.executor.resident
    subnet = None if wanted == "off" or resident else common_subnet(tasks)
    if subnet is None or skeleton(world.space, subnet.architecture) is None:
        return 1
    if wanted != "auto":
        return int(wanted)
    macs = world.macs_table.cost(subnet.architecture)
    return max(1, min(LARGEST_STACK, -(-len(tasks) // STACKS), int(GAINFUL_MACS // max(1.0, batch_size * macs))))
