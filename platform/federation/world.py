"""The world: space, data, costs, tiers, devices and the clients' tiers, which are fixed before the first round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.platform.averaging.attacks import ATTACKS, Attack, attack as made_attack
from fedloom.platform.clients.objectives import OBJECTIVES, check_objective
from fedloom.platform.clients.worker import WorkerSpec
from fedloom.platform.data.augment import check_augmentation, coloured, tried_samples
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.feature_skew import skewed_dataset
from fedloom.platform.data.federated import FederatedData
from fedloom.platform.data.partition import prepare_partition
from fedloom.platform.data.prepare import prepare_dataset
from fedloom.platform.data.registry import data_choices
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.tasks import Tasks, tasks_of
from fedloom.platform.federation.tiers import (
    RunCosts,
    assigned_tiers,
    configured_availability,
    configured_budget,
    device_profiles,
    device_table,
    measure_costs,
    split_into_tiers,
)
from fedloom.platform.plugins import ComponentSpec, is_import_path
from fedloom.platform.seeding import stream
from fedloom.platform.settings import component_specs
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import Architecture
from fedloom.tiers.availability import Availability
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
    availability: Availability | None
    """When the clients' devices are online; None if always."""
    augment: ComponentSpec
    spec: WorkerSpec
    tasks: Tasks
    attack: Attack
    attackers: frozenset[int]
    """The ids of the clients that attack."""

    @property
    def num_clients(self) -> int:
        """The number of registered clients."""
        return len(self.tier_of_client)

    @property
    def data_options(self) -> dict[str, Any]:
        """The options of the data set alone, by name: `data.options` may have the augmentation's, too."""
        return dict(data_choices(self.config.data)[0].options)

    @property
    def everyone(self) -> np.ndarray:
        """The ids of all clients, ascending."""
        # Without tasks an existing array is returned: there may be a hundred million clients.
        return np.arange(self.num_clients) if self.tasks.names else self.eligible_by_tier[0]

    def in_plan_order(self, client_ids: Iterable[int]) -> tuple[int, ...]:
        """The clients sorted by tier, then by id: the order of chunks, which do not mix tiers, and of summation."""
        return tuple(sorted(client_ids, key=lambda c: (int(self.tier_of_client[c]), c)))

    def tier(self, client_id: int) -> Tier:
        """A client's tier."""
        return self.tiers[int(self.tier_of_client[client_id])]

    def attacks(self, client_id: int) -> bool:
        """Whether a client is an attacker."""
        return client_id in self.attackers

    def profile(self, client_id: int) -> DeviceProfile:
        """A client's simulated device."""
        if self.devices is not None:
            return self.devices.profile(client_id)
        return self.profiles[int(self.tier_of_client[client_id])]

    def clients_from_tier(self, lowest: int | None, architecture: Architecture) -> np.ndarray:
        """The ids of the clients of a tier (from 1; None: all clients) and above, ascending.

        Raises ValueError if the tier cannot afford the architecture, or there is no such tier or client.
        """
        if lowest is None:
            return self.everyone
        if lowest > len(self.tiers):
            raise ValueError(f"method.tier={lowest}: there are {len(self.tiers)} tiers")
        tier, cost = self.tiers[lowest - 1], self.cost_table.cost(architecture)
        if cost > tier.upper:
            raise ValueError(
                f"method.tier={lowest}: {tier.name} may spend {tier.upper:.6g} {self.cost_table.measure}, architecture "
                f"{self.space.label(architecture)} costs {cost:.6g}; give a higher tier or a smaller one"
            )
        clients = self.eligible_by_tier[lowest - 1]
        if not len(clients):
            raise ValueError(f"method.tier={lowest}: no client is of {tier.name} or above; change tiers.shares")
        return clients

    def training_budget(self, client_id: int, stage: str, round_: int) -> float:
        """The largest cost of an architecture for the client in this round, at least the cost of the cheapest one."""
        rng = stream(self.config.seed_for("selection"), "budget", stage, round_, client_id)
        share, table = self.budget.factor(round_, rng), self.costs_by_tier[int(self.tier_of_client[client_id])]
        return max(self.tier(client_id).upper * share, table.cost(self.space.cheapest(table)))

    def expected_macs(self, table: CostTable | None = None, lower: float = 0.0, upper: float = math.inf) -> float:
        """MACs of a mid-sized architecture; if `table` counts MACs, of those whose cost is between the bounds."""
        macs = self.macs_table
        least, most = macs.smallest, macs.largest if math.isfinite(macs.largest) else macs.smallest
        if table is None or table.measure != macs.measure:
            return (least + most) / 2
        return (min(max(lower, least), most) + max(min(upper, most), least)) / 2

    def evaluation_macs(self, models: int) -> float:
        """Estimated MACs of a final evaluation; a guess, because test data may not even be counted before it.

        Validation data, the test set and the clients' test data together have about half as many samples as the
        training data.
        """
        return models * self.data.num_central("train") / 2 * self.expected_macs()

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


# -- building a world --------------------------------------------------------------------------------------------------


Check = Callable[[SearchSpace], object]
"""Raises ValueError for a space that cannot be used, before data is prepared, which may take minutes."""


def build_world(config: RunConfig, costs: RunCosts | None = None, check: Check = lambda _space: None) -> World:
    """Prepares (or opens) data and partition, and computes cost tables, tiers and devices.

    `costs` are the stored tables of a resumed run; they are measured if not given. `check` is called with the space.
    Raises ValueError for an invalid configuration: missing data, impossible budgets, shares that do not sum to 1.
    """
    _, augment = data_choices(config.data)
    attack = configured_attack(config)
    objective = component_specs([(OBJECTIVES, config.objective.name)], config.objective.options, "objective.options")[0]
    space = build_space(config.space)
    check(space)
    dataset = Dataset.open(prepare_dataset(config.data))
    dataset.verify_blocks()  # its content was not changed, as far as can be told in milliseconds
    space, space_config = space.fitted(config.space, dataset)
    samples = tried_samples(dataset)
    if space.input_shape != dataset.input_shape or space_config.num_classes != dataset.num_classes:
        shape = list(dataset.input_shape) if isinstance(dataset.input_shape, tuple) else dataset.input_shape
        advice = f"set space.input_shape={str(shape).replace(' ', '')} and space.num_classes={dataset.num_classes}"
        if not isinstance(shape, list) or len(shape) != len(space.input_shape):
            advice = f"give samples of as many dimensions as {space.input_shape}"
        raise ValueError(
            f"space {config.space.name} takes {space.input_shape} and {space_config.num_classes} classes, "
            f"{config.data.dataset} has {dataset.input_shape} and {dataset.num_classes}: "
            f"choose a space that fits, or {advice}"
        )
    augment = coloured(augment, dataset.colours)
    outputs = space.tried(samples[0], None if is_import_path(objective.name) else samples[1])
    dataset = skewed_dataset(config.data, dataset, config.seed_for("partition"))
    partition_path = prepare_partition(config.data, dataset, config.seed_for("partition"))
    costs = costs or measure_costs(config.tiers, space)
    cost_table, macs_table = costs.budget, costs.macs
    tiers = split_into_tiers(config, space, cost_table)
    data = FederatedData.open(dataset.path, partition_path)
    check_augmentation(augment, samples[0])
    check_objective(objective, samples[1], space_config.num_classes, outputs)
    devices = device_table(config, data.num_clients)
    tier_of_client = assigned_tiers(config, tiers, data.num_clients, devices)
    tasks = tasks_of(config, space, dataset, len(tiers))
    return World(
        config=config,
        space=space,
        data=data,
        cost_table=cost_table,
        macs_table=macs_table,
        tiers=tiers,
        tier_of_client=tier_of_client,
        eligible_by_tier=tuple(tasks.of_same(i, tier_of_client) for i in range(len(tiers))),
        costs_by_tier=tuple(tasks.table(cost_table, i) for i in range(len(tiers))),
        budget=configured_budget(config.tiers.budget),
        profiles=device_profiles(config.devices, tiers),
        devices=devices,
        availability=configured_availability(config, data.num_clients, devices),
        augment=augment,
        spec=WorkerSpec(
            space=space_config,
            dataset_path=str(dataset.path),
            partition_path=str(partition_path),
            training_seed=config.seed_for("training"),
            cost_table=costs.budget,
            macs_table=costs.macs,
            threads=config.executor.threads,
            precision=config.executor.precision,
            memory_format=config.executor.memory_format,
            deterministic=config.executor.deterministic,
            compile=config.executor.compile,
            objective=objective,
            label_sets=tasks.labels,
            constants=space.constants_hash,
        ),
        tasks=tasks,
        attack=attack,
        attackers=drawn_attackers(config.attack.share, data.num_clients, config.seed_for("partition")),
    )


def configured_attack(config: RunConfig) -> Attack:
    """The attack of the configuration; ValueError for one that does not exist, and for wrong options."""
    return made_attack(component_specs([(ATTACKS, config.attack.name)], config.attack.options, "attack.options")[0])


def drawn_attackers(share: float, num_clients: int, seed: int) -> frozenset[int]:
    """Draws the ids of the attackers: this share of the clients, rounded, and the same for every attack.

    Raises ValueError for a share above 0 that is rounded to nobody.
    """
    if not share:
        return frozenset()
    if not (attackers := round(share * num_clients)):
        raise ValueError(
            f"attack.share={share:g} of {num_clients} clients is rounded to no attacker: give 0, or at least "
            f"{1 / num_clients:.2g}"
        )
    drawn = stream(seed, "attackers").choice(num_clients, size=attackers, replace=False)
    return frozenset(drawn.tolist())
