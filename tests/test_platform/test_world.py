"""What is given before the first round: tiers, devices, budgets, cohorts; and seeds that do not touch each other."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.algorithm import Plan, RunState
from fedloom.platform.federation.config import BudgetConfig, DevicesConfig, RunConfig, SeedsConfig, TiersConfig
from fedloom.platform.federation.selection import Cohort, choose_cohort, for_client
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.fedoras import Paths
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.device_files import write_device_table
from fedloom.tiers.devices import generate_device_table

Make = Callable[..., RunConfig]


TASK = Train(Subnet((0,)), LocalSGD(epochs=1, batch_size=1, lr=0.1))
"""What is assigned where nothing is done."""


def tiers(**changes: Any) -> TiersConfig:
    return replace(TiersConfig(count=2, paths=2000), **changes)


# -- tiers and who is in them -----------------------------------------------------------------------------------------


def test_tiers_join_without_gaps_and_hold_the_whole_space(tiny_config: Make) -> None:
    world = build_world(tiny_config(tiers=tiers(count=3)))
    assert [t.name for t in world.tiers] == ["tier1", "tier2", "tier3"]
    assert world.tiers[0].lower == 0
    assert [t.lower for t in world.tiers[1:]] == [t.upper for t in world.tiers[:-1]]
    assert world.tiers[-1].upper == world.cost_table.largest
    assert world.cost_table.smallest <= world.tiers[0].upper


def test_shares_are_exact_and_everyone_above_is_eligible(tiny_config: Make) -> None:
    world = build_world(tiny_config(tiers=tiers(shares=[0.75, 0.25])))
    assert np.bincount(world.tier_of_client).tolist() == [6, 2]
    assert world.eligible_by_tier[0].tolist() == list(range(8))
    assert world.eligible_by_tier[1].tolist() == np.flatnonzero(world.tier_of_client == 1).tolist()
    for client_id in range(8):
        assert world.tier(client_id).name == f"tier{world.tier_of_client[client_id] + 1}"


def test_an_explicit_list_of_tiers(tiny_config: Make) -> None:
    world = build_world(tiny_config(tiers=tiers(clients=[1, 0, 0, 0, 1, 0, 0, 0])))
    assert world.eligible_by_tier[1].tolist() == [0, 4]
    assert world.in_plan_order((0, 1, 3, 4)) == (1, 3, 0, 4)


def test_explicit_bounds(tiny_config: Make) -> None:
    table = build_world(tiny_config()).cost_table
    middle = (table.smallest + table.largest) / 2
    world = build_world(tiny_config(tiers=tiers(upper_bounds=[middle, table.largest])))
    assert [t.upper for t in world.tiers] == [middle, table.largest]


def device_table(folder: Path, num_devices: int = 10) -> str:
    path = folder / "devices.csv"
    write_device_table(path, generate_device_table(num_devices, np.random.default_rng(1)))
    return str(path)


def test_a_device_table_gives_tiers_and_devices(tiny_config: Make, tmp_path: Path) -> None:
    world = build_world(tiny_config(tiers=tiers(device_table=device_table(tmp_path), max_step_s=1e-4)))
    assert world.devices is not None
    speeds = world.devices.macs_per_s[:8]
    limit = world.tiers[1].upper * 3 * 32 / 1e-4
    assert world.tier_of_client.tolist() == (speeds >= limit).astype(int).tolist()
    assert 0 < world.tier_of_client.sum() < 8
    assert world.profile(3).macs_per_s == speeds[3]


def test_a_device_table_is_drawn_from_the_seed_of_the_partition(tiny_config: Make) -> None:
    first, other, again = (
        build_world(tiny_config(tiers=tiers(device_table="generated", max_step_s=1e-4), seed=seed))
        for seed in (1, 2, 1)
    )
    assert first.devices is not None
    assert other.devices is not None
    assert again.devices is not None
    assert first.devices.macs_per_s.tolist() == again.devices.macs_per_s.tolist() != other.devices.macs_per_s.tolist()
    assert first.tier_of_client.tolist() == again.tier_of_client.tolist()
    assert len(first.devices) == first.num_clients


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tiers": tiers(shares=[0.5, 0.6])}, "sum to 1.1"),
        ({"tiers": tiers(shares=[1.0])}, "tiers.shares has 1 values for 2 tiers"),
        ({"tiers": tiers(clients=[0, 1])}, "there are 8 clients"),
        ({"tiers": tiers(clients=[0, 1, 2, 0, 0, 0, 0, 0])}, "client 2 is in tier index 2"),
        ({"tiers": tiers(upper_bounds=[1.0, 2.0])}, "below the smallest model's cost"),
        ({"tiers": tiers(upper_bounds=[5.0, 4.0])}, "strictly increasing"),
        ({"tiers": tiers(cost="watts")}, "unknown measure 'watts'"),
        ({"tiers": tiers(device_table="/nowhere.csv")}, "no such file"),
        ({"tiers": tiers(budget=BudgetConfig("schedule"))}, "no factors"),
        ({"devices": DevicesConfig(macs_per_s=[1.0, 2.0, 3.0])}, "give one, or one per tier"),
        ({"devices": DevicesConfig(macs_per_s=[0.0])}, "positive and finite"),
        ({"devices": DevicesConfig(deadline_s=0.0)}, "deadline_s=0.0: must be greater than 0"),
        ({"devices": DevicesConfig(availability=1.5)}, "must be a probability"),
        ({"space": SpaceConfig("cnn_cifar")}, r"choose a space that fits, or set space.input_shape=\[1,8,8\] and"),
        ({"space": SpaceConfig("rnn_shakespeare")}, r"give samples of as many dimensions as \(80,\)$"),
        ({"space": SpaceConfig("cnn_digits", num_classes=7)}, "choose a space that fits"),
        ({"data": DataConfig(num_clients=1000, train_samples=320)}, "every client needs at least one"),
        ({"data": DataConfig(num_clients=8, alpha=0.0)}, r"data\.alpha=0\.0: must be greater than 0"),
    ],
)
def test_a_world_that_cannot_be_is_refused_in_one_line(
    tiny_config: Make, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build_world(tiny_config(**changes))
    assert "\n" not in str(caught.value)


def test_a_device_table_speaks_of_macs_and_so_must_the_tiers(tiny_config: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tiers.device_table.* tiers.cost=parameters"):
        build_world(tiny_config(tiers=tiers(device_table=device_table(tmp_path), cost="parameters")))


def test_too_few_devices_are_refused(tiny_config: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 5 devices: give each of 8 clients one"):
        build_world(tiny_config(tiers=tiers(device_table=device_table(tmp_path, 5))))


# -- devices ----------------------------------------------------------------------------------------------------------


def test_one_profile_per_tier_in_proportion_to_its_budget(tiny_config: Make) -> None:
    world = build_world(tiny_config())
    low, high = world.tiers
    assert [p.name for p in world.profiles] == ["tier1", "tier2"]
    assert world.profiles[1].macs_per_s == 2e10
    assert world.profiles[0].macs_per_s == pytest.approx(2e10 * low.upper / high.upper)


def cohort_of(world: World, round_: int, size: int) -> Cohort:
    """So many of the eight clients, uniformly."""
    return choose_cohort(world, "supernet", round_, np.arange(8), size, ComponentSpec("uniform"), {})


def test_unavailable_clients_are_not_selected_and_who_is_available_does_not_depend_on_who_asks(
    tiny_config: Make,
) -> None:
    config = tiny_config(devices=DevicesConfig(availability=0.5))
    world = build_world(config)
    available = {r: set(cohort_of(world, r, 8).client_ids) for r in range(40)}
    assert 0.4 < sum(map(len, available.values())) / (40 * 8) < 0.6
    for round_ in range(40):
        assert set(cohort_of(world, round_, 2).client_ids) <= available[round_]


def test_dropouts_follow_their_probability_and_are_the_same_every_time(tiny_config: Make) -> None:
    world = build_world(tiny_config(devices=DevicesConfig(dropout=0.3)))

    def dropped(round_: int) -> list[bool]:
        cohort = Cohort(tuple(range(8)), 1.0, "all")
        return [bool(for_client(world, "supernet", round_, cohort, c, TASK).dropped) for c in cohort.client_ids]

    drops = [dropped(r) for r in range(100)]
    assert 0.25 < np.mean(drops) < 0.35
    assert drops == [dropped(r) for r in range(100)]


def test_an_assignment_says_who_where_and_why(tiny_config: Make) -> None:
    world = build_world(tiny_config(devices=DevicesConfig(deadline_s=9.0)))
    cohort = cohort_of(world, 3, 4)
    assignment = for_client(world, "supernet", 3, cohort, cohort.client_ids[0], TASK)
    assert (assignment.stage, assignment.round, assignment.client_id) == ("supernet", 3, cohort.client_ids[0])
    assert (assignment.selection_probability, assignment.selection_reason) == (0.5, "uniform")
    assert (assignment.deadline_s, assignment.dropped) == (9.0, "")
    assert assignment.profile == world.profile(cohort.client_ids[0])


# -- budgets that change ----------------------------------------------------------------------------------------------


def test_a_schedule_scales_the_tiers_budget_but_never_below_the_smallest_path(tiny_config: Make) -> None:
    world = build_world(tiny_config(tiers=tiers(budget=BudgetConfig("schedule", factors=[1.0, 0.5, 0.001]))))
    for client_id in (0, 5):
        upper = world.tier(client_id).upper
        budgets = [world.training_budget(client_id, "supernet", r) for r in range(4)]
        assert budgets == [upper, max(0.5 * upper, world.cost_table.smallest), world.cost_table.smallest, upper]


def test_a_trace_gives_every_client_and_round_its_own_state(tiny_config: Make) -> None:
    states = [["idle", 1.0, 0.5], ["busy", 0.9, 0.5]]
    world = build_world(tiny_config(tiers=tiers(budget=BudgetConfig("trace", states=states))))
    shares = [[world.training_budget(c, "supernet", r) / world.tier(c).upper for c in range(8)] for r in range(50)]
    assert {round(s, 6) for row in shares for s in row} == {1.0, 0.9}
    assert 0.9 + 0.1 * 0.4 < np.mean(shares) < 0.9 + 0.1 * 0.6
    assert shares[0] == [world.training_budget(c, "supernet", 0) / world.tier(c).upper for c in range(8)]


# -- separate seeds ---------------------------------------------------------------------------------------------------


class Streams:
    """What a run draws with its seeds, as far as it can be told apart."""

    def __init__(self, config: RunConfig) -> None:
        world = build_world(config)
        self.partition = (world.data.partition_hash, tuple(world.tier_of_client.tolist()))
        stage = build_stages(world)[0]
        state = stage.begin(RunState())
        self.initialisation = dict(state.weights("supernet"))
        plans = [stage.plan(replace(state, round=r)) for r in range(6)]
        self.selection = tuple(tuple(sorted(clients(plan))) for plan in plans)
        self.batches = self._trained(world, state)

    @staticmethod
    def _trained(world: World, state: RunState) -> Tensor:
        """The classifier after one step of one fixed client on fixed weights."""
        weights = {n: torch.full_like(t, 0.1) for n, t in state.weights("supernet").items()}
        local = LocalSGD(epochs=1, batch_size=4, lr=0.1)
        task = Train(Paths(((0, 1), (0, 1), (0, 1)), 1e18), local)
        outcome = task.run(Worker(world.spec), Assignment("supernet", 0, 3, "tier1", task), weights)
        assert outcome.update is not None
        return outcome.update.tensors["fixed.classifier.weight"].detach().clone()


def clients(plan: Plan) -> list[int]:
    return [a.client_id for a in plan.assignments if a.client_id is not None]


def same_weights(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


PURPOSES = ("partition", "initialisation", "selection", "training", "search")


@pytest.mark.parametrize("changed", PURPOSES)
def test_changing_one_seed_leaves_the_other_streams_as_they_were(tiny_config: Make, changed: str) -> None:
    before = Streams(tiny_config())
    after = Streams(tiny_config(seeds=SeedsConfig(**{changed: 77})))
    assert (before.partition == after.partition) == (changed != "partition")
    assert same_weights(before.initialisation, after.initialisation) == (changed != "initialisation")
    assert (before.selection == after.selection) == (changed != "selection")
    if changed != "partition":  # another partition gives the client other samples
        assert torch.equal(before.batches, after.batches) == (changed != "training")


def test_the_common_seed_changes_all_of_them(tiny_config: Make) -> None:
    before, after = Streams(tiny_config()), Streams(tiny_config(seed=2))
    assert before.partition != after.partition
    assert not same_weights(before.initialisation, after.initialisation)
    assert before.selection != after.selection


def test_the_subspaces_follow_the_training_seed_and_not_the_selection(tiny_config: Make) -> None:
    def kept(config: RunConfig) -> dict[tuple[int, int], Any]:
        stage = build_stages(build_world(config))[0]
        state = stage.begin(RunState())
        return {
            (r, a.client_id): a.task.network.subspace  # type: ignore[attr-defined, misc]
            for r in range(6)
            for a in stage.plan(replace(state, round=r)).assignments
            if a.client_id is not None
        }

    base = kept(tiny_config())
    other = kept(tiny_config(seeds=SeedsConfig(selection=77)))
    common = base.keys() & other.keys()
    assert len(common) > 3
    assert all(base[key] == other[key] for key in common)
    trained = kept(tiny_config(seeds=SeedsConfig(training=77)))
    assert base.keys() == trained.keys()
    assert base != trained


def test_seeds_that_are_not_given_follow_the_common_one(tiny_config: Make) -> None:
    config = tiny_config(seed=5, seeds=SeedsConfig(training=9))
    assert {p: config.seed_for(p) for p in PURPOSES} == {**dict.fromkeys(PURPOSES, 5), "training": 9}
