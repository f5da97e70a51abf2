"""Builds the world before the first round: data, partition, costs, tiers, devices, and the clients' tiers."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedloom.platform.clients.objectives import OBJECTIVES, check_objective
from fedloom.platform.clients.worker import WorkerSpec
from fedloom.platform.data.augment import check_augmentation, coloured, tried_samples
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.federated import FederatedData
from fedloom.platform.data.partition import prepare_partition
from fedloom.platform.data.prepare import prepare_dataset
from fedloom.platform.data.sources import data_choices
from fedloom.platform.federation.budgets import configured_budget
from fedloom.platform.federation.config import GENERATED, RunConfig
from fedloom.platform.federation.costs import RunCosts, measure_costs
from fedloom.platform.federation.tasks import Tasks, tasks_of
from fedloom.platform.federation.world import World
from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.seeding import stream
from fedloom.platform.settings import component_specs
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.genome import Genome
from fedloom.platform.spaces.registry import build_space
from fedloom.tiers.costs import CostTable
from fedloom.tiers.device_files import read_device_table
from fedloom.tiers.devices import DeviceProfile, DeviceTable, generate_device_table
from fedloom.tiers.tier import (
    Tier,
    by_device_table,
    by_list,
    by_shares,
    check_upper_bounds,
    make_tiers,
    tier_upper_bounds,
)

TOP_TIER_MACS_PER_S = 2e10
"""Assumed training speed of a recent phone; lower tiers are slower in proportion to their budgets."""

Check = Callable[[SearchSpace], object]
"""Raises ValueError for a space that cannot be used, before data is prepared, which may take minutes."""


def build_world(config: RunConfig, costs: RunCosts | None = None, check: Check = lambda _space: None) -> World:
    """Prepares (or opens) data and partition, and computes cost tables, tiers and devices.

    `costs` are the stored tables of a resumed run; they are measured if not given. `check` is called with the space.
    Raises ValueError for an invalid configuration: missing data, impossible budgets, shares that do not sum to 1.
    """
    _, augment = data_choices(config.data)
    objective = component_specs([(OBJECTIVES, config.objective.name)], config.objective.options, "objective.options")[0]
    space = build_space(config.space)
    check(space)
    dataset_path = prepare_dataset(config.data)
    dataset = _opened(dataset_path)
    _check_fit(space, dataset, config)
    augment = coloured(augment, dataset.colours)
    partition_path = prepare_partition(config.data, dataset, config.seed_for("partition"))
    costs = costs or measure_costs(config.tiers, space)
    cost_table, macs_table = costs.budget, costs.macs
    tiers = split_into_tiers(config, space, cost_table)
    data = FederatedData.open(dataset_path, partition_path)
    _try_on_data(data, augment, objective, config.space.num_classes)
    devices = _device_table(config, data.num_clients)
    tier_of_client = _assign_clients(config, tiers, data.num_clients, devices)
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
        profiles=_profiles(config, tiers),
        devices=devices,
        augment=augment,
        spec=_spec(config, (dataset_path, partition_path), costs, objective, tasks),
        tasks=tasks,
    )


def _spec(
    config: RunConfig, places: tuple[Path, Path], costs: RunCosts, objective: ComponentSpec, tasks: Tasks
) -> WorkerSpec:
    """From what the workers are built; `places` are the prepared data set and its partition."""
    return WorkerSpec(
        space=config.space,
        dataset_path=str(places[0]),
        partition_path=str(places[1]),
        training_seed=config.seed_for("training"),
        cost_table=costs.budget,
        macs_table=costs.macs,
        threads=config.executor.threads,
        precision=config.executor.precision,
        memory_format=config.executor.memory_format,
        deterministic=config.executor.deterministic,
        objective=objective,
        label_sets=tasks.labels,
    )


def _try_on_data(data: FederatedData, augment: ComponentSpec, objective: ComponentSpec, num_classes: int) -> None:
    """Raises a one-line ValueError for an augmentation or an objective that does not fit the data."""
    x, y = tried_samples(data.dataset)
    check_augmentation(augment, x)
    check_objective(objective, y, num_classes)


def _opened(path: Path) -> Dataset:
    """The prepared data set; ValueError if its content was changed, as far as can be told in milliseconds."""
    dataset = Dataset.open(path)
    dataset.verify_blocks()
    return dataset


def _check_fit(space: SearchSpace, dataset: Dataset, config: RunConfig) -> None:
    if tuple(space.input_shape) != tuple(dataset.input_shape) or config.space.num_classes != dataset.num_classes:
        raise ValueError(
            f"space {config.space.name} takes {tuple(space.input_shape)} and {config.space.num_classes} classes, "
            f"{config.data.dataset} has {tuple(dataset.input_shape)} and {dataset.num_classes}: "
            f"choose a space that fits, or set space.input_shape={list(dataset.input_shape)} and space.num_classes="
            f"{dataset.num_classes}"
        )


def split_into_tiers(config: RunConfig, space: SearchSpace, table: CostTable) -> tuple[Tier, ...]:
    """The tiers with their bounds, computed from random paths or taken from the configuration.

    Where all architectures cost the same, as in a space of one network, there is nothing to split: one tier.
    """
    tiers = config.tiers
    if tiers.upper_bounds is not None:
        uppers = check_upper_bounds(tiers.upper_bounds, table.cost(space.cheapest(table)), table.largest)
    else:
        costs = sampled_costs(space.genome, table, tiers.paths if space.num_architectures > 1 else 1)
        count = tiers.count if table.smallest < table.largest else 1
        start = space.common_cost(table)
        uppers = tier_upper_bounds(costs, start, table.largest, count, tiers.rho_low, tiers.rho_high)
    num_gpus = tiers.num_gpus if tiers.num_gpus is not None else 0.0
    num_cpus = tiers.num_cpus if tiers.num_cpus is not None else 1.0
    return make_tiers(uppers, num_gpus=num_gpus, num_cpus=num_cpus)


@lru_cache(maxsize=4)
def sampled_costs(genome: Genome, table: CostTable, paths: int) -> np.ndarray:
    """Costs (paths,) of uniformly drawn architectures, for any seed the same: tiers are a property of the space."""
    return table.costs(genome.draw(paths, stream(0, "tier_bounds")))


def _device_table(config: RunConfig, num_clients: int) -> DeviceTable | None:
    given = config.tiers.device_table
    if not given:
        return None
    if given == GENERATED:
        return generate_device_table(num_clients, stream(config.seed_for("partition"), "device_table"))
    return read_device_table(given)


def _assign_clients(
    config: RunConfig, tiers: tuple[Tier, ...], num_clients: int, devices: DeviceTable | None
) -> np.ndarray:
    given = config.tiers
    if devices is not None:
        if given.cost != "macs" or given.cost_weights:
            cost = given.cost_weights or given.cost
            raise ValueError(
                f"tiers.device_table: speeds in MAC/s say nothing about tiers.cost={cost}: use tiers.cost=macs"
            )
        if len(devices) < num_clients:
            raise ValueError(f"{given.device_table} has {len(devices)} devices: give each of {num_clients} clients one")
        uppers = [t.upper for t in tiers]
        table = by_device_table(devices, uppers, batch_size=given.step_batch_size, max_step_s=given.max_step_s)
        return table[:num_clients]
    if given.clients is not None:
        return by_list(given.clients, len(tiers), num_clients)
    shares = given.shares if given.shares is not None else [1 / len(tiers)] * len(tiers)
    if len(shares) != len(tiers):
        raise ValueError(f"tiers.shares has {len(shares)} values for {len(tiers)} tiers: give one per tier")
    return by_shares(num_clients, shares, stream(config.seed_for("partition"), "client_tiers"))


def _profiles(config: RunConfig, tiers: tuple[Tier, ...]) -> tuple[DeviceProfile, ...]:
    devices = config.devices
    rates = devices.macs_per_s or [TOP_TIER_MACS_PER_S * t.upper / tiers[-1].upper for t in tiers]
    if len(rates) == 1:
        rates = list(rates) * len(tiers)
    if len(rates) != len(tiers):
        raise ValueError(f"devices.macs_per_s has {len(rates)} values: give one, or one per tier ({len(tiers)})")
    if devices.deadline_s is not None and devices.deadline_s <= 0:
        raise ValueError(f"devices.deadline_s={devices.deadline_s}: must be greater than 0, or null for none")
    return tuple(
        DeviceProfile(
            t.name, rate, devices.down_bytes_per_s, devices.up_bytes_per_s, devices.availability, devices.dropout
        )
        for t, rate in zip(tiers, rates, strict=True)
    )
