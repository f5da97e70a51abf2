"""Which actors there are: arithmetic on CPUs and GPU shares."""

import math

import pytest
from hypothesis import given, strategies as st

from fedloom.actors.placement import ActorGroup, bundles_of, groups_of_run, plan_groups, resident_group, total
from fedloom.platform.federation.config import ExecutorConfig
from fedloom.tiers.tier import Tier, make_tiers


def tiers(gpus: list[float], cpus: list[float] | float = 1.0) -> tuple[Tier, ...]:
    return make_tiers([10.0 * (i + 1) for i in range(len(gpus))], num_gpus=gpus, num_cpus=cpus)


ANY = ExecutorConfig()


def test_without_gpus_all_tiers_share_one_actor_per_cpu() -> None:
    assert plan_groups(ANY, tiers([0, 0, 0]), {"CPU": 5.0}) == [ActorGroup("clients", 5, 1.0, 0.0)]


def test_without_gpus_an_actor_has_the_cpus_of_the_hungriest_tier() -> None:
    assert plan_groups(ANY, tiers([0, 0], [1, 2]), {"CPU": 5.0}) == [ActorGroup("clients", 2, 2, 0.0)]


def test_the_configuration_may_ask_for_fewer_actors() -> None:
    assert plan_groups(ExecutorConfig(actors=2), tiers([0, 0]), {"CPU": 5.0})[0].actors == 2


@pytest.mark.parametrize(
    ("actors", "cpus", "message"),
    [
        (3, 2.0, "3 client actors of 1 CPUs need 3 CPUs, the cluster has 2 free: lower executor.actors"),
        (0, 2.0, "executor.actors"),
        (None, 0.0, "1 client actors of 1 CPUs need 1 CPUs, the cluster has 0 free"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(actors: int | None, cpus: float, message: str) -> None:
    with pytest.raises(ValueError, match="CPUs") as refusal:
        plan_groups(ExecutorConfig(actors=actors), tiers([0, 0]), {"CPU": cpus})
    assert message in str(refusal.value)


def test_every_tier_gets_a_group_of_its_own_share_of_a_gpu() -> None:
    groups = plan_groups(ANY, tiers([0.25, 0.5]), {"CPU": 2.0, "GPU": 1.0})
    assert groups == [ActorGroup("tier1", 1, 1.0, 0.25, ("tier1",)), ActorGroup("tier2", 1, 1.0, 0.5, ("tier2",))]


def test_groups_grow_in_turn_while_gpus_last() -> None:
    # One each takes 3/4 of a GPU of two; then tier1 (1/4), tier2 (1/2), tier1 (1/4) and tier1 again are added.
    groups = plan_groups(ANY, tiers([0.25, 0.5]), {"CPU": 100.0, "GPU": 2.0})
    assert [(group.actors, group.num_gpus) for group in groups] == [(4, 0.25), (2, 0.5)]
    assert sum(group.actors * group.num_gpus for group in groups) == 2.0


def test_groups_grow_only_while_cpus_last() -> None:
    groups = plan_groups(ANY, tiers([0.25, 0.5]), {"CPU": 3.0, "GPU": 8.0})
    assert [group.actors for group in groups] == [2, 1]


def test_tiers_of_equal_resources_share_a_group() -> None:
    groups = plan_groups(ANY, tiers([0.25, 0.5, 0.25]), {"CPU": 3.0, "GPU": 1.0})
    assert groups == [
        ActorGroup("tier1+tier3", 2, 1.0, 0.25, ("tier1", "tier3")),
        ActorGroup("tier2", 1, 1.0, 0.5, ("tier2",)),
    ]
    one = plan_groups(ANY, tiers([0.25] * 4), {"CPU": 1.0, "GPU": 1.0})
    assert [(group.actors, group.tiers) for group in one] == [(1, ("tier1", "tier2", "tier3", "tier4"))]


def test_thirds_fill_a_gpu_in_spite_of_rounding() -> None:
    groups = plan_groups(ANY, tiers([1 / 3, 1 / 3, 1 / 3]), {"CPU": 9.0, "GPU": 1.0})
    assert [group.actors for group in groups] == [3]


@pytest.mark.parametrize(
    ("cpus", "clients", "share"), [(2.0, 1, 1.0), (2.0, 6, 0.2857), (64.0, 3, 1.0), (1.0, 99, 0.01)]
)
def test_resident_actors_share_the_cpus_when_there_are_more_of_them(cpus: float, clients: int, share: float) -> None:
    group = resident_group(ActorGroup("clients", 2, 1.0, 0.0), cpus, clients)
    assert group == ActorGroup("clients", clients + 1, share, 0.0)
    assert group.num_cpus * (clients + 1) <= cpus + 1e-9


@given(st.lists(st.integers(1, 32), min_size=1, max_size=8), st.integers(1, 40))
def test_resident_actors_fit_however_the_cpus_are_spread_over_nodes(cpus_of_node: list[int], clients: int) -> None:
    group = resident_group(ActorGroup("clients", 1, 1.0, 0.0), float(sum(cpus_of_node)), clients, len(cpus_of_node))
    assert sum(math.floor(cpus / group.num_cpus + 1e-9) for cpus in cpus_of_node) >= clients + 1


def test_the_bundles_of_a_trial_are_its_actors() -> None:
    groups = [ActorGroup("tier1", 2, 1.0, 0.25, ("tier1",)), ActorGroup("tier2", 1, 2.0, 0.5, ("tier2",))]
    assert bundles_of(groups) == [{"CPU": 1.0, "GPU": 0.25}] * 2 + [{"CPU": 2.0, "GPU": 0.5}]
    assert total(bundles_of(groups)) == {"CPU": 4.0, "GPU": 1.0}
    assert bundles_of([ActorGroup("clients", 1, 0.5, 0.0)], resident=2) == [{"CPU": 0.5}] * 3


CPU_SHARES = [0.1, 0.3, 1 / 3, 0.5, 1.0, 2.0]
GPU_SHARES = [0.0, 0.1, 0.2, 0.25, 1 / 3, 0.5, 1.0]


@given(
    st.lists(st.tuples(st.sampled_from(CPU_SHARES), st.sampled_from(GPU_SHARES)), min_size=1, max_size=4),
    st.floats(1.0, 16.0),
    st.floats(0.0, 4.0),
    st.none() | st.integers(1, 30),
    st.none() | st.integers(1, 4),
)
def test_what_a_trial_reserves_gives_its_groups_again(
    shares: list[tuple[float, float]], cpus: float, gpus: float, residents: int | None, actors: int | None
) -> None:
    config = ExecutorConfig(actors=actors, resident=residents is not None)
    of_tiers = tiers([g for _, g in shares], [c for c, _ in shares])
    try:
        groups = groups_of_run(config, of_tiers, {"CPU": cpus, "GPU": gpus}, residents or 5)
    except ValueError:
        return  # it does not fit at all
    reserved = total(bundles_of(groups, residents))
    assert reserved["CPU"] <= cpus + 1e-6
    assert groups_of_run(config, of_tiers, reserved, residents or 5) == groups


def test_more_resident_actors_than_ray_can_count_are_refused() -> None:
    with pytest.raises(ValueError, match=r"100000 clients with an actor each do not fit into 2 CPUs"):
        resident_group(ActorGroup("clients", 2, 1.0, 0.0), 2.0, 100_000)


def test_missing_gpus_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"needs 2 CPUs and 1.5 GPUs, 1 CPUs and 0.5 GPUs are missing"):
        plan_groups(ANY, tiers([0.5, 1]), {"CPU": 1.0, "GPU": 1.0})


@pytest.mark.parametrize(("given", "nearest"), [(0.3, "0.333"), (0.7, "0.5"), (1.5, "2")])
def test_a_share_that_does_not_fill_a_gpu_is_refused_with_the_nearest(given: float, nearest: str) -> None:
    with pytest.raises(ValueError, match="1/k") as refusal:
        tiers([given])
    assert nearest in str(refusal.value)
