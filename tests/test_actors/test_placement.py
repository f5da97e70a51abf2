"""Which actors there are: arithmetic on CPUs and GPU shares."""

import math
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from fedloom.actors import cluster
from fedloom.actors.placement import ActorGroup, bundles_of, groups_of_run, plan_groups, resident_group, total
from fedloom.platform.federation.config import ExecutorConfig
from fedloom.tiers.tier import Tier, make_tiers


def tiers(gpus: list[float], cpus: list[float] | float = 1.0) -> tuple[Tier, ...]:
    return make_tiers([10.0 * (i + 1) for i in range(len(gpus))], num_gpus=gpus, num_cpus=cpus)


ANY = ExecutorConfig()


def test_without_gpus_all_tiers_share_one_actor_per_cpu() -> None:
    assert plan_groups(ANY, tiers([0, 0, 0]), [{"CPU": 5.0}]) == [ActorGroup("clients", 5, 1.0, 0.0)]


def test_without_gpus_an_actor_has_the_cpus_of_the_hungriest_tier() -> None:
    assert plan_groups(ANY, tiers([0, 0], [1, 2]), [{"CPU": 5.0}]) == [ActorGroup("clients", 2, 2, 0.0)]


def test_the_configuration_may_ask_for_fewer_actors() -> None:
    assert plan_groups(ExecutorConfig(actors=2), tiers([0, 0]), [{"CPU": 5.0}])[0].actors == 2


@pytest.mark.parametrize(
    ("actors", "cpus", "message"),
    [
        (3, 2.0, "3 client actors of 1 CPUs need 3 CPUs, the cluster has 2 free: lower executor.actors"),
        (None, 0.0, "1 client actors of 1 CPUs need 1 CPUs, the cluster has 0 free"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(actors: int | None, cpus: float, message: str) -> None:
    with pytest.raises(ValueError, match="CPUs") as refusal:
        plan_groups(ExecutorConfig(actors=actors), tiers([0, 0]), [{"CPU": cpus}])
    assert message in str(refusal.value)


def test_every_tier_gets_a_group_of_its_own_share_of_a_gpu() -> None:
    groups = plan_groups(ANY, tiers([0.25, 0.5]), [{"CPU": 2.0, "GPU": 1.0}])
    assert groups == [ActorGroup("tier1", 1, 1.0, 0.25, ("tier1",)), ActorGroup("tier2", 1, 1.0, 0.5, ("tier2",))]


def test_groups_grow_in_turn_while_gpus_last() -> None:
    # One each takes 3/4 of a GPU of two; then tier1 (1/4), tier2 (1/2), tier1 (1/4) and tier1 again are added.
    groups = plan_groups(ANY, tiers([0.25, 0.5]), [{"CPU": 100.0, "GPU": 2.0}])
    assert [(group.actors, group.num_gpus) for group in groups] == [(4, 0.25), (2, 0.5)]
    assert sum(group.actors * group.num_gpus for group in groups) == 2.0


def test_groups_grow_only_while_cpus_last() -> None:
    groups = plan_groups(ANY, tiers([0.25, 0.5]), [{"CPU": 3.0, "GPU": 8.0}])
    assert [group.actors for group in groups] == [2, 1]


def test_tiers_of_equal_resources_share_a_group() -> None:
    groups = plan_groups(ANY, tiers([0.25, 0.5, 0.25]), [{"CPU": 3.0, "GPU": 1.0}])
    assert groups == [
        ActorGroup("tier1+tier3", 2, 1.0, 0.25, ("tier1", "tier3")),
        ActorGroup("tier2", 1, 1.0, 0.5, ("tier2",)),
    ]
    one = plan_groups(ANY, tiers([0.25] * 4), [{"CPU": 1.0, "GPU": 1.0}])
    assert [(group.actors, group.tiers) for group in one] == [(1, ("tier1", "tier2", "tier3", "tier4"))]


def test_thirds_fill_a_gpu_in_spite_of_rounding() -> None:
    groups = plan_groups(ANY, tiers([1 / 3, 1 / 3, 1 / 3]), [{"CPU": 9.0, "GPU": 1.0}])
    assert [group.actors for group in groups] == [3]


@pytest.mark.parametrize(
    ("cpus", "clients", "share"),
    [
        ([2.0], 1, 1.0),
        ([2.0], 6, 0.2857),
        ([64.0], 3, 1.0),
        ([1.0], 99, 0.01),
        ([6.0, 1.0], 4, 1.0),
        ([6.0, 1.0], 6, 1.0),
        ([6.0, 1.0], 7, 0.8571),  # 7 fit into 6 CPUs, 1 into 1
    ],
)
def test_resident_actors_share_the_cpus_when_there_are_more_of_them(
    cpus: list[float], clients: int, share: float
) -> None:
    group = resident_group(ANY, tiers([0]), [{"CPU": of_node} for of_node in cpus], clients)
    assert group == ActorGroup("clients", clients + 1, share, 0.0)


@pytest.mark.parametrize(
    ("rooms", "clients", "share"),
    [
        ([(8, 1)], 3, (1.0, 0.25)),
        ([(8, 1)], 4, (1.0, 0.2)),
        ([(8, 1)], 12, (0.6153, 0.0769)),
        ([(8, 2)], 12, (0.6153, 0.1428)),  # 7 + 6
        ([(6, 0), (1, 1)], 4, (0.2, 0.2)),  # the node without a GPU is of no use
        ([(1, 0.5)], 3, (0.25, 0.125)),
    ],
)
def test_resident_actors_share_the_gpus_too(
    rooms: list[tuple[float, float]], clients: int, share: tuple[float, float]
) -> None:
    there = [{"CPU": cpus, "GPU": gpus} for cpus, gpus in rooms]
    assert resident_group(ANY, tiers([0.25]), there, clients) == ActorGroup("clients", clients + 1, *share)


def test_resident_actors_take_no_more_cpus_than_that_many_actors() -> None:
    group = resident_group(ExecutorConfig(actors=2), tiers([0]), [{"CPU": 64.0}], 3)
    assert group == ActorGroup("clients", 4, 0.5, 0.0)
    assert resident_group(ANY, tiers([0], [2]), [{"CPU": 3.0}], 1).num_cpus == 1.0, "1.5 are none that Ray gives"


@given(st.lists(st.integers(1, 32), min_size=1, max_size=8), st.integers(1, 40))
def test_resident_actors_fit_and_larger_ones_would_not(cpus_of_node: list[int], clients: int) -> None:
    group = resident_group(ANY, tiers([0]), [{"CPU": float(cpus)} for cpus in cpus_of_node], clients)

    def fit(share: float) -> int:
        return sum(math.floor(cpus / share + 1e-9) for cpus in cpus_of_node)

    assert fit(group.num_cpus) >= clients + 1
    assert group.num_cpus == 1 or fit(group.num_cpus + 1e-4) < clients + 1


# -- node by node ------------------------------------------------------------------------------------------------------


def rooms(*sizes: tuple[float, float]) -> list[dict[str, float]]:
    return [{"CPU": cpus, "GPU": gpus} for cpus, gpus in sizes]


def test_a_node_without_a_gpu_holds_no_actor_with_a_share() -> None:
    """One of 6 CPUs, and one of 1 CPU and a GPU: in sum there would be room for four."""
    assert [g.actors for g in plan_groups(ANY, tiers([0.25]), rooms((6, 0), (1, 1)))] == [1]
    assert [g.actors for g in plan_groups(ANY, tiers([0, 0.25]), rooms((6, 0), (1, 1)))] == [6, 1]
    with pytest.raises(ValueError, match=r"7 CPUs and 1 GPUs free, on 2 nodes \(6 CPUs; 1 CPUs and 1 GPUs\)"):
        plan_groups(ANY, tiers([0.25, 0.5]), rooms((6, 0), (1, 1)))


def test_what_is_left_over_on_nodes_is_of_no_use() -> None:
    assert plan_groups(ANY, tiers([0], [2]), rooms((3, 0), (3, 0)))[0].actors == 2


def test_a_share_is_one_of_a_single_gpu() -> None:
    """Two halves of two GPUs are no whole one."""
    assert [g.actors for g in plan_groups(ANY, tiers([0.5, 1]), rooms((9, 2)))] == [2, 1]
    with pytest.raises(ValueError, match="1 client actors of 1 CPUs and 1 GPUs"):
        plan_groups(ANY, tiers([1]), rooms((9, 0.5), (9, 0.5)))
    assert [g.actors for g in plan_groups(ANY, tiers([2, 1 / 3]), rooms((9, 3)))] == [1, 3]


def test_a_number_of_actors_is_shared_by_the_groups() -> None:
    assert [g.actors for g in plan_groups(ExecutorConfig(actors=3), tiers([0.25, 0.5]), rooms((9, 9)))] == [2, 1]
    with pytest.raises(ValueError, match=r"lower tiers.num_cpus or tiers.num_gpus or executor.actors"):
        plan_groups(ExecutorConfig(actors=9), tiers([0.25, 0.5]), rooms((9, 1)))
    with pytest.raises(ValueError, match=r"executor.actors=1: the tiers need actors of 2 sizes; give as many or more"):
        plan_groups(ExecutorConfig(actors=1), tiers([0.25, 0.5]), rooms((9, 9)))


def test_runs_at_once_have_equally_many() -> None:
    assert plan_groups(ANY, tiers([0]), rooms((5, 0)), runs=2)[0].actors == 2
    assert plan_groups(ANY, tiers([0]), rooms((3, 0), (3, 0)), runs=3)[0].actors == 2
    with pytest.raises(ValueError, match="1 client actors"):
        plan_groups(ANY, tiers([0]), rooms((3, 0)), runs=4)


def test_the_bundles_of_a_trial_are_its_actors() -> None:
    groups = [ActorGroup("tier1", 2, 1.0, 0.25, ("tier1",)), ActorGroup("tier2", 1, 2.0, 0.5, ("tier2",))]
    assert bundles_of(groups) == [{"CPU": 1.0, "GPU": 0.25}] * 2 + [{"CPU": 2.0, "GPU": 0.5}]
    assert total(bundles_of(groups)) == {"CPU": 4.0, "GPU": 1.0}


CPU_SHARES = [0.1, 0.3, 1 / 3, 0.5, 1.0, 2.0]
GPU_SHARES = [0.0, 0.1, 0.2, 0.25, 1 / 3, 0.5, 1.0]


@given(
    st.lists(st.tuples(st.sampled_from(CPU_SHARES), st.sampled_from(GPU_SHARES)), min_size=1, max_size=4),
    st.lists(st.tuples(st.floats(1.0, 16.0), st.integers(0, 4)), min_size=1, max_size=3),
    st.none() | st.integers(1, 30),
    st.none() | st.integers(1, 4),
)
def test_what_a_trial_reserves_gives_its_groups_again(
    shares: list[tuple[float, float]], nodes: list[tuple[float, int]], residents: int | None, actors: int | None
) -> None:
    config = ExecutorConfig(actors=actors, resident=residents is not None)
    of_tiers = tiers([g for _, g in shares], [c for c, _ in shares])
    try:
        groups = groups_of_run(config, of_tiers, rooms(*nodes), residents or 5)
    except ValueError:
        return  # it does not fit at all
    reserved = bundles_of(groups)
    assert total(reserved)["CPU"] <= sum(cpus for cpus, _ in nodes) + 1e-6
    assert groups_of_run(config, of_tiers, reserved, residents or 5) == groups


def test_more_resident_actors_than_ray_can_count_are_refused() -> None:
    with pytest.raises(ValueError, match=r"100000 clients with an actor each do not fit into 2 CPUs: set executor.res"):
        resident_group(ANY, tiers([0]), [{"CPU": 2.0}], 100_000)
    with pytest.raises(ValueError, match=r"5 clients with an actor each do not fit into 2 CPUs: set"):
        resident_group(ANY, tiers([0.5]), [{"CPU": 2.0}], 5)


def test_missing_gpus_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"need 2 CPUs and 1.5 GPUs, the cluster has 1 CPUs and 1 GPUs free: lower"):
        plan_groups(ANY, tiers([0.5, 1]), [{"CPU": 1.0, "GPU": 1.0}])


@pytest.mark.parametrize(("given", "nearest"), [(0.3, "0.333"), (0.7, "0.5"), (1.5, "2")])
def test_a_share_that_does_not_fill_a_gpu_is_refused_with_the_nearest(given: float, nearest: str) -> None:
    with pytest.raises(ValueError, match="1/k") as refusal:
        tiers([given])
    assert nearest in str(refusal.value)


@pytest.mark.parametrize(
    ("quota", "slurm", "cpus"),
    [
        ("max 100000", "", 8),
        ("250000 100000", "", 2),
        ("50000 100000", "", 1),
        ("250000 100000", "1", 1),
        ("1600000 100000", "", 8),
        (None, "3", 3),
    ],
)
def test_a_cluster_of_our_own_has_the_cpus_of_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, slurm: str, cpus: int
) -> None:
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(cluster, "CGROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", slurm)
    assert cluster.usable_cpus() == cpus
