"""What a trial needs of a cluster, in literal numbers; and what is refused before anything is started."""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import assume, given, strategies as st

from fedloom.actors.placement import bundles_of, groups_of_run
from fedloom.experiments.ablation import checks
from fedloom.experiments.ablation.checks import Bundles, Cluster, bundles_of_trial, check_fits, checked_trials
from fedloom.experiments.ablation.trial import Job
from fedloom.experiments.ablation.tuning import _group
from fedloom.experiments.runs.configuration import compose_config
from fedloom.experiments.store.ablations import Trial
from fedloom.platform.federation import world as world_module
from fedloom.platform.federation.config import (
    AttackConfig,
    CheckpointConfig,
    ExecutorConfig,
    ObjectiveConfig,
    RunConfig,
    TiersConfig,
)
from fedloom.platform.federation.world import World
from fedloom.platform.methods.fjord import FjordConfig
from fedloom.platform.methods.local_adaptation import LocalAdaptationConfig
from fedloom.platform.runs.run import RunIdentity
from fedloom.tiers.tier import Tier, make_tiers

TWO_TIERS = make_tiers([1.0, 2.0])
GPU_TIERS = make_tiers([1.0, 2.0], num_gpus=[0.25, 1.0])


def cluster(*nodes: tuple[float, float] | float) -> Cluster:
    """Of nodes of so many CPUs, or CPUs and GPUs."""
    sizes = [n if isinstance(n, tuple) else (n, 0.0) for n in nodes]
    return Cluster(tuple({"CPU": float(cpus), "GPU": float(gpus)} for cpus, gpus in sizes))


def need(
    there: Cluster, trials: int = 1, tiers: Sequence[Tier] = TWO_TIERS, clients: int = 8, **executor: Any
) -> Bundles:
    return bundles_of_trial(RunConfig(executor=ExecutorConfig(**executor)), tiers, clients, there, trials)


CPU = {"CPU": 1.0}

# -- how much ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "trials", "actors"),
    [([8], 1, 8), ([8], 2, 4), ([8], 3, 2), ([8], 8, 1), ([8], 24, 1), ([2], 24, 1), ([4, 4], 2, 4), ([3, 1], 1, 4)],
)
def test_without_a_number_of_actors_trials_share_the_cluster(nodes: list[float], trials: int, actors: int) -> None:
    assert need(cluster(*nodes), trials) == (CPU,) * actors


def test_a_number_of_actors_is_kept_to() -> None:
    assert need(cluster(8), 1, actors=3) == (CPU,) * 3
    assert need(cluster(8), 100, actors=3) == (CPU,) * 3
    assert need(cluster(2), 4, actors=2) == (CPU,) * 2
    mixed = make_tiers([1.0, 2.0], num_gpus=[1.0, 0.0])
    assert need(cluster((8, 1)), 3, mixed, actors=4) == ({"CPU": 1.0, "GPU": 1.0}, *(CPU,) * 3), "not evenly"


def test_an_actor_takes_the_cpus_of_the_hungriest_tier() -> None:
    tiers = make_tiers([1.0, 2.0], num_cpus=[1.0, 2.0])
    assert need(cluster(8), 1, tiers) == ({"CPU": 2.0},) * 4
    assert need(cluster(8), 4, tiers) == ({"CPU": 2.0},)
    assert need(cluster(8), 1, tiers, actors=3) == ({"CPU": 2.0},) * 3
    assert need(cluster(2), 1, make_tiers([1.0], num_cpus=0.5)) == ({"CPU": 0.5},) * 4


def test_what_is_left_over_on_nodes_is_not_counted() -> None:
    """Two nodes of three CPUs hold two actors of two, although six CPUs would be enough for three."""
    assert need(cluster(3, 3), 1, make_tiers([1.0], num_cpus=2.0)) == ({"CPU": 2.0},) * 2


def test_tiers_with_gpus_have_one_actor_each_first() -> None:
    small, large = {"CPU": 1.0, "GPU": 0.25}, {"CPU": 1.0, "GPU": 1.0}
    assert need(cluster((8, 2)), 1, GPU_TIERS) == (*(small,) * 4, large)
    assert need(cluster((8, 2)), 2, GPU_TIERS) == (small, large)
    assert need(cluster((8, 2)), 9, GPU_TIERS) == (small, large)
    assert need(cluster((16, 4)), 2, GPU_TIERS) == (*(small,) * 4, large)


def test_resident_clients_share_the_cpus_with_the_servers_data() -> None:
    assert need(cluster(16), clients=8, resident=True) == (CPU,) * 9
    assert need(cluster(2), clients=8, resident=True) == ({"CPU": 0.2222},) * 9
    assert need(cluster(2), trials=4, clients=3, resident=True) == ({"CPU": 0.25},) * 4
    assert need(cluster(3, 3), clients=8, resident=True) == ({"CPU": 0.6},) * 9, "however the nodes are cut"


def test_a_serial_trial_takes_its_threads() -> None:
    assert need(cluster(8), 3, kind="serial") == (CPU,)
    assert need(cluster(8), 3, kind="serial", threads=4) == ({"CPU": 4.0},)
    assert need(cluster((8, 2)), 3, GPU_TIERS, kind="serial") == ({"CPU": 1.0, "GPU": 1.0},), "and a GPU to itself"
    assert "need 1 GPUs at once, the cluster has 0" in refusal(lambda: need(cluster(8), 3, GPU_TIERS, kind="serial"))


@pytest.mark.parametrize("kind", ["serial", "ray"])
def test_a_dry_run_takes_no_actors_and_no_gpu(kind: Literal["serial", "ray"]) -> None:
    config = RunConfig(executor=ExecutorConfig(kind=kind, actors=16), dry_run=True)
    bundles = bundles_of_trial(config, GPU_TIERS, 8, cluster(1), 3)
    assert bundles == (CPU,)
    group = _group(Job(0, asdict(config), RunIdentity()), {"node:here": 0.001}, bundles)
    assert group.bundles == [{"CPU": 1.0, "node:here": 0.001}]


# -- what does not fit -------------------------------------------------------------------------------------------------


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError, match=r"\w") as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_shortage_is_a_number() -> None:
    line = refusal(lambda: need(cluster(2), actors=3))
    assert line.startswith("3 client actors need 3 CPUs at once, the cluster has 2: 1 CPUs are missing; lower")
    assert "executor.actors" in line
    assert "ray.num_cpus" in line
    line = refusal(lambda: need(cluster(2), kind="serial", threads=4))
    assert "need 4 CPUs at once, the cluster has 2: 2 CPUs are missing" in line
    line = refusal(lambda: need(cluster((8, 1)), 2, GPU_TIERS))
    assert "2 client actors need 1.25 GPUs at once, the cluster has 1: 0.25 GPUs are missing" in line
    assert "tiers.num_gpus" in line
    assert "1 CPUs are missing" in refusal(lambda: need(cluster((1, 2)), 2, GPU_TIERS))
    assert "the cluster has 0" in refusal(lambda: need(Cluster(())))


def test_what_fits_in_the_sum_but_on_no_node_is_refused_with_the_sizes() -> None:
    four = make_tiers([1.0, 2.0], num_cpus=[1.0, 4.0])
    line = refusal(lambda: need(cluster(3, (3, 1)), tiers=four))
    assert "a client actor of 4 CPUs has no place" in line
    assert "2 nodes (3 CPUs; 3 CPUs, 1 GPUs)" in line
    line = refusal(lambda: need(cluster(3, 3), tiers=make_tiers([1.0], num_cpus=2.0), actors=3))
    assert (
        "a client actor of 2 CPUs has no place: 3 of them do not fit on the cluster's 2 nodes (3 CPUs; 3 CPUs)" in line
    )
    line = refusal(lambda: need(cluster((4, 0), (0, 2)), tiers=GPU_TIERS))
    assert "a client actor of 1 CPUs and 1 GPUs has no place" in line
    many = refusal(lambda: check_fits(({"CPU": 2.0},), cluster(*[1.0] * 20)))
    assert "20 nodes (" in many
    assert "; ...)" in many


def test_bundles_are_placed_largest_first() -> None:
    check_fits(({"CPU": 1.0}, {"CPU": 1.0}, {"CPU": 2.0}), cluster(2, 2))
    check_fits(({"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}), cluster(1, (1, 1)))
    check_fits(({"CPU": 0.1},) * 10, cluster(1))
    with pytest.raises(ValueError, match="has no place"):
        check_fits(({"CPU": 2.0}, {"CPU": 2.0}), cluster(3, 1))


NODES = st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0, 4.0, 8.0, 64.0]), min_size=1, max_size=4)


@given(
    nodes=NODES,
    num_cpus=st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0]),
    trials=st.integers(1, 40),
    clients=st.integers(1, 60),
    resident=st.booleans(),
)
def test_wherever_one_actor_fits_a_trial_fits(
    nodes: list[float], num_cpus: float, trials: int, clients: int, resident: bool
) -> None:
    assume(max(nodes) >= num_cpus)
    tiers = make_tiers([1.0, 2.0], num_cpus=num_cpus)
    bundles = need(cluster(*nodes), trials, tiers, clients, resident=resident)
    check_fits(bundles, cluster(*nodes))
    assert len(bundles) == clients + 1 if resident else len(bundles) >= 1
    at_once = min(trials, max(1, sum(nodes) // num_cpus))
    assert sum(b["CPU"] for b in bundles) <= sum(nodes) / at_once + 1e-6


@given(
    actors=st.none() | st.integers(1, 8), trials=st.integers(1, 9), clients=st.integers(1, 30), resident=st.booleans()
)
def test_in_its_group_a_trial_makes_the_actors_that_were_reserved(
    actors: int | None, trials: int, clients: int, resident: bool
) -> None:
    config = ExecutorConfig(actors=actors, resident=resident)
    bundles = bundles_of_trial(RunConfig(executor=config), TWO_TIERS, clients, cluster(8, 2), trials)
    groups = groups_of_run(config, TWO_TIERS, bundles, clients)
    assert bundles_of(groups) == list(bundles)


# -- trials, looked at before any is started ---------------------------------------------------------------------------


@pytest.fixture
def trial(tmp_path: Path, tiny_config: Callable[..., RunConfig]) -> Callable[..., Trial]:
    """Makes trials of a tiny run; keywords replace fields of its configuration."""

    def make(index: int = 0, **changes: Any) -> Trial:
        config = asdict(tiny_config(reuse_supernet=True, **changes))
        return Trial(index, f"run-{index}", 1, {"lr": 0.1}, (), config)

    return make


def test_a_trial_that_can_run_is_given_its_bundles_and_supernet(tmp_path: Path, trial: Callable[..., Trial]) -> None:
    executor = ExecutorConfig(actors=2)
    found = checked_trials([trial(0, executor=executor), trial(1, executor=executor, seed=2)], tmp_path, cluster(4))
    assert [c.trial.index for c in found] == [0, 1]
    assert [c.bundles for c in found] == [(CPU, CPU)] * 2
    assert [c.at_once for c in found] == [2, 2]
    assert all(c.supernet and re.fullmatch("[0-9a-f]{32}", c.supernet) for c in found)
    assert found[0].supernet != found[1].supernet, "another seed is another training"


def test_trials_that_share_a_training_share_its_key(tmp_path: Path, trial: Callable[..., Trial]) -> None:
    plain = trial(0)
    method = {**plain.config["method"], "search": {**plain.config["method"]["search"], "budget": 8}}
    searched = replace(plain, index=1, config={**plain.config, "method": method})
    alone = replace(plain, index=2, config={**plain.config, "reuse_supernet": False})
    keys = [c.supernet for c in checked_trials([plain, searched, alone], tmp_path, cluster(2))]
    assert keys[0] == keys[1] is not None
    assert keys[2] is None
    assert not list(tmp_path.iterdir())


def test_what_trials_share_is_built_once(
    tmp_path: Path, trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds change from one trial to the next, and every one of them has a world of its own."""
    built: list[RunConfig] = []
    measured: list[object] = []
    build, measure = checks.planned_world, world_module.measure_costs

    def counted(config: RunConfig, *costs: Any) -> World:
        built.append(config)
        return build(config, *costs)

    monkeypatch.setattr(checks, "planned_world", counted)
    monkeypatch.setattr(world_module, "measure_costs", lambda *given: measured.append(given) or measure(*given))
    trials = [trial(i, seed=1 + i % 2, checkpoint=CheckpointConfig(every=1 + i)) for i in range(6)]
    found = checked_trials(trials, tmp_path, cluster(2))
    assert [c.trial for c in found] == trials
    assert [c.supernet for c in found] == [found[0].supernet, found[1].supernet] * 3
    assert sorted(config.seed for config in built) == [1, 2]
    assert len(measured) == 1, "both worlds have the same space"
    alone = [checked_trials([each], tmp_path, cluster(2))[0] for each in trials[:2]]
    assert [c.supernet for c in alone] == [c.supernet for c in found[:2]]
    with pytest.raises(ValueError, match=r"trial 1 .*objective"):
        checked_trials([trial(0), trial(1, objective=ObjectiveConfig("nothing"))], tmp_path, cluster(2))


def test_a_trial_that_does_not_fit_is_named_before_any_data_is_read(
    tmp_path: Path, trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "planned_world", lambda _: pytest.fail("data was read"))
    trials = [trial(0), trial(1, executor=ExecutorConfig(actors=3))]
    line = refusal(lambda: checked_trials(trials, tmp_path, cluster(2)))
    assert line.startswith("trial 1 (lr=0.1 seed=1): 3 client actors need 3 CPUs at once, the cluster has 2: 1 CPUs")


def test_a_trial_that_cannot_begin_is_named(tmp_path: Path, trial: Callable[..., Trial]) -> None:
    bad = trial(1)
    bad = replace(bad, config={**bad.config, "data": {**bad.config["data"], "num_clients": 3}})
    line = refusal(lambda: checked_trials([trial(0), bad], tmp_path, cluster(2)))
    assert line.startswith("trial 1 (lr=0.1 seed=1): ")
    assert "clients_per_round=4: must be between 1 and the 3 clients" in line


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("method", FjordConfig(), "fjord cannot use space cnn_digits, whose subnets are not widths of one network"),
        ("attack", AttackConfig(0.5, "nonsense"), "unknown attack 'nonsense'"),
    ],
)
def test_what_differs_between_trials_of_the_same_data_is_checked_for_each(
    tmp_path: Path, trial: Callable[..., Trial], key: str, value: Any, message: str
) -> None:
    bad = trial(1, **{key: value})
    with pytest.raises(ValueError, match=rf"^trial 1 \(lr=0.1 seed=1\): {re.escape(message)}"):
        checked_trials([trial(0), bad], tmp_path, cluster(2))


def test_a_trial_has_no_attackers_because_another_has(tmp_path: Path, trial: Callable[..., Trial]) -> None:
    attacked = trial(0, tiers=TiersConfig(count=1), attack=AttackConfig(0.5))
    alone = trial(1, tiers=TiersConfig(count=1), method=LocalAdaptationConfig())  # which refuses attackers
    assert len(checked_trials([attacked, alone], tmp_path, cluster(2))) == 2


def test_presets_fit_on_two_cpus() -> None:
    for preset in ("fedoras_digits", "superfednas_digits", "spider_digits"):
        config = compose_config([f"experiment={preset}"])
        tiers = make_tiers([float(i + 1) for i in range(config.tiers.count)])
        assert bundles_of_trial(config, tiers, config.data.num_clients or 1, cluster(2), 24) == (CPU,)
