"""Planning of a round: its cohort, the clients' budgets, device dropout, the assignments, and expected costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.platform.clients.assignments import SERVER, Assignment, Task
from fedloom.platform.federation.selection import Choice, Cohort, select
from fedloom.platform.seeding import stream

if TYPE_CHECKING:
    from fedloom.platform.federation.history import History
    from fedloom.platform.federation.world import World
    from fedloom.platform.plugins import ComponentSpec
    from fedloom.tiers.costs import CostTable


TRAINING = 3.0
"""A training step costs its forward pass and about twice as much backwards."""


def choose_cohort(
    world: World,
    stage: str,
    round_: int,
    eligible: np.ndarray,
    size: int,
    rule: ComponentSpec,
    history: History,
    memory: Mapping[str, Any] | None = None,
    epochs: int = 1,
) -> Cohort:
    """The cohort chosen by a selection rule; all draws depend only on the selection seed, stage, round and client."""
    seed = world.config.seed_for("selection")

    def available(client_id: int) -> bool:
        draw = stream(seed, "available", stage, round_, client_id).random()
        return bool(draw < world.profile(client_id).availability)

    choice = Choice(
        round=round_,
        size=size,
        eligible=eligible,
        rng=stream(seed, "select", stage, round_),
        always=world.devices is None and all(p.availability == 1.0 for p in world.profiles),
        available=available,
        history=history,
        num_samples=lambda client_id: world.data.size(client_id, "train"),
        memory=memory or {},
        epochs=epochs,
        device=world.profile,
        tiers_of=lambda client_ids: world.tier_of_client[client_ids],
        sizes_of=lambda client_ids: world.data.sizes("train")[client_ids],
    )
    return select(choice, rule)


def in_plan_order(world: World, client_ids: tuple[int, ...]) -> list[int]:
    """The clients sorted by tier, then by id: the order of chunks, which do not mix tiers, and of summation."""
    return sorted(client_ids, key=lambda c: (int(world.tier_of_client[c]), c))


def assign(
    world: World, stage: str, round_: int, cohort: Cohort, client_id: int, task: Task, expected_macs: float = 0.0
) -> Assignment:
    """One client's assignment, with its simulated device and whether that drops out of the round."""
    profile = world.profile(client_id)
    dropped = ""
    if profile.dropout > 0:
        draw = stream(world.config.seed_for("selection"), "dropout", stage, round_, client_id).random()
        if draw < profile.dropout:
            dropped = f"the simulated device dropped out (probability {profile.dropout:g})"
    return Assignment(
        stage=stage,
        round=round_,
        client_id=client_id,
        tier=world.tier(client_id).name,
        task=task,
        profile=profile,
        deadline_s=world.config.devices.deadline_s,
        dropped=dropped,
        selection_probability=cohort.probability,
        selection_reason=cohort.reason_of(client_id),
        train_samples=world.data.size(client_id, "train"),
        expected_macs=expected_macs,
    )


def for_server(stage: str, round_: int, task: Task, *, reads_test: bool = False) -> Assignment:
    """An assignment of the server, on its own data."""
    return Assignment(stage, round_, None, SERVER, task, reads_test=reads_test)


def training_budget(world: World, client_id: int, stage: str, round_: int) -> float:
    """The largest cost of an architecture for the client in this round, at least the cost of the cheapest one."""
    rng = stream(world.config.seed_for("selection"), "budget", stage, round_, client_id)
    share, table = world.budget.factor(round_, rng), world.costs_by_tier[int(world.tier_of_client[client_id])]
    return max(world.tier(client_id).upper * share, table.cost(world.space.cheapest(table)))


def expected_macs(world: World, table: CostTable | None = None, lower: float = 0.0, upper: float = math.inf) -> float:
    """MACs of a middling architecture, of those whose cost in `table` is between the bounds if that counts MACs."""
    macs = world.macs_table
    least, most = macs.smallest, macs.largest if math.isfinite(macs.largest) else macs.smallest
    if table is None or table.measure != macs.measure:
        return (least + most) / 2
    return (min(max(lower, least), most) + max(min(upper, most), least)) / 2


def num_samples(world: World, split: str) -> int:
    """All clients' samples of a split together, or the data set's own validation samples."""
    return world.data.num_central(split)


def evaluation_macs(world: World, models: int) -> float:
    """MACs of a final evaluation, a guess, because test data may not even be counted before it.

    Validation data, the test set and the clients' test data are together about half as many samples as are trained on.
    """
    return models * num_samples(world, "train") / 2 * expected_macs(world)
