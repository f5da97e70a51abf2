"""The world: space, data, costs, tiers, devices and the clients' tiers, which are fixed before the first round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fedloom.platform.clients.worker import WorkerSpec
    from fedloom.platform.data.federated import FederatedData
    from fedloom.platform.federation.config import RunConfig
    from fedloom.platform.federation.tasks import Tasks
    from fedloom.platform.plugins import ComponentSpec
    from fedloom.platform.spaces.base import SearchSpace
    from fedloom.platform.spaces.slices import Architecture
    from fedloom.tiers.budgets import Budget
    from fedloom.tiers.costs import CostTable
    from fedloom.tiers.devices import DeviceProfile, DeviceTable
    from fedloom.tiers.tier import Tier


@dataclass(frozen=True)
class World:
    """Everything that does not change during a run."""

    config: RunConfig
    space: SearchSpace
    data: FederatedData
    cost_table: CostTable
    macs_table: CostTable
    tiers: tuple[Tier, ...]
    tier_of_client: np.ndarray
    eligible_by_tier: tuple[np.ndarray, ...]
    """Per tier, the ids of the clients of that tier and above that have its task, ascending."""
    costs_by_tier: tuple[CostTable, ...]
    """Per tier, the costs of what its clients may train: other tasks' classifiers cost infinity."""
    budget: Budget
    profiles: tuple[DeviceProfile, ...]
    devices: DeviceTable | None
    augment: ComponentSpec
    spec: WorkerSpec
    tasks: Tasks

    @property
    def num_clients(self) -> int:
        """The number of registered clients."""
        return len(self.tier_of_client)

    @property
    def everyone(self) -> np.ndarray:
        """The ids of all clients, ascending."""
        # Without tasks the array that is there: there may be a hundred million clients.
        return np.arange(self.num_clients) if self.tasks.names else self.eligible_by_tier[0]

    def in_plan_order(self, client_ids: Iterable[int]) -> tuple[int, ...]:
        """The clients sorted by tier, then by id: the order of chunks, which do not mix tiers, and of summation."""
        return tuple(sorted(client_ids, key=lambda c: (int(self.tier_of_client[c]), c)))

    def tier(self, client_id: int) -> Tier:
        """A client's tier."""
        return self.tiers[int(self.tier_of_client[client_id])]

    def profile(self, client_id: int) -> DeviceProfile:
        """A client's simulated device."""
        if self.devices is not None:
            return self.devices.profile(client_id)
        return self.profiles[int(self.tier_of_client[client_id])]

    def architecture(self, text: str | None, key: str) -> Architecture:
        """The architecture that a configuration names; the space's first if `text` is None.

        Raises ValueError naming the configuration key.
        """
        if text is None:
            return tuple(0 for _ in self.space.options)
        try:
            return self.space.parse(text)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error


def expected_macs(world: World, table: CostTable | None = None, lower: float = 0.0, upper: float = math.inf) -> float:
    """MACs of a middling architecture, of those whose cost in `table` is between the bounds if that counts MACs."""
    macs = world.macs_table
    least, most = macs.smallest, macs.largest if math.isfinite(macs.largest) else macs.smallest
    if table is None or table.measure != macs.measure:
        return (least + most) / 2
    return (min(max(lower, least), most) + max(min(upper, most), least)) / 2


def evaluation_macs(world: World, models: int) -> float:
    """MACs of a final evaluation, a guess, because test data may not even be counted before it.

    Validation data, the test set and the clients' test data are together about half as many samples as are trained on.
    """
    return models * world.data.num_central("train") / 2 * expected_macs(world)
