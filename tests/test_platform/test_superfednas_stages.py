"""SuperFedNAS on a tiny federation: what is handed out, what it weighs, what is kept, and what is refused."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.platform.averaging.average import average
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import Plan, RoundResult, RunState
from fedloom.platform.federation.config import DevicesConfig, RunConfig
from fedloom.platform.federation.loop import merge_chunks
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.evaluation import EvaluationConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.shares import SharesConfig
from fedloom.platform.methods.superfednas import DistributionConfig, ElasticTrainingConfig, ShrinkingConfig
from fedloom.platform.results.checkpoint import load_model
from fedloom.platform.results.paths import list_runs
from fedloom.platform.runs.run import make_serial, start_run
from fedloom.platform.search.fitness import fitness_of, path_of_the_fittest
from fedloom.platform.search.targets import TargetSearchConfig
from fedloom.platform.spaces.base import supernet_shapes
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.genome import as_array
from fedloom.platform.spaces.slices import Architecture, architecture_id, extract, parse_architecture

Make = Callable[..., RunConfig]


def space_of(world: World) -> ElasticSpace:
    assert isinstance(world.space, ElasticSpace)
    return world.space


@dataclass(frozen=True)
class Given:
    """What a client was given in a round."""

    client_id: int
    architecture: Architecture
    share: float


def given_to(plan: Plan) -> list[Given]:
    """By client, in plan order."""
    tasks = [(a.client_id, a.task) for a in plan.assignments if isinstance(a.task, Train)]
    return [
        Given(client_id, task.network.architecture, task.share)
        for client_id, task in tasks
        if client_id is not None and isinstance(task.network, Subnet)
    ]


def plans(config: RunConfig, rounds: int) -> list[Plan]:
    """The plans of a run's first rounds; nothing is trained, but the counters go on."""
    stage = build_stages(build_world(config))[0]
    state, found = replace(stage.begin(RunState()), round=0), []
    for round_ in range(rounds):
        found.append(stage.plan(state))
        merged = stage.merge(state, found[-1], RoundResult(merge_chunks([]).sums, []))
        state = replace(merged.state, round=round_ + 1)
    return found


# -- whole runs -------------------------------------------------------------------------------------------------------


def test_superfednas_from_end_to_end(elastic_config: Make, results_of: Any) -> None:
    config = elastic_config("batch", method={"evaluation": EvaluationConfig(clients_per_tier=None)})
    results = results_of(config)
    world = results.world
    space = space_of(world)
    rows = results.clients("supernet")
    assert len(rows) == 2 * 4
    assert set(rows["status"]) == {"ok"}
    extremes = [architecture_id(a) for a in (space.largest, space.smallest)]
    for _, of_round in rows.groupby("round"):
        assert set(extremes) <= set(of_round["architecture"])
    cost = {m: space.cost_table(m) for m in ("bytes", "macs", "parameters")}
    for row in rows.to_dict("records"):
        architecture = space.parse(row["architecture"])
        assert row["bytes_down"] == row["bytes_up"] == cost["bytes"].cost(architecture)
        assert row["parameters"] == cost["parameters"].cost(architecture)
        assert row["macs"] == cost["macs"].cost(architecture) * row["samples"] * 2  # epochs
    rounds = results["rounds"]
    of_training = rounds[rounds["stage"] == "supernet"]
    # T_d = 0.8 * 2 rounds: cos(pi / 1.6) = -0.38268 in round 1.
    assert list(of_training["beta"]) == pytest.approx([0.9, 0.25 + 0.65 * (1 - 0.3826834) / 2])
    assert list(of_training["lr"]) == [0.1, 0.1]
    evaluations = results["evaluations"]
    validation = evaluations[(evaluations["stage"] == "supernet") & (evaluations["metric"] == "loss")]
    # evaluate_every=2: before round 0, and after the two rounds.
    expected = [(round_, architecture) for round_ in (0, 2) for architecture in sorted(extremes)]
    assert sorted(zip(validation["round"], validation["architecture"], strict=True)) == expected
    final = evaluations[(evaluations["stage"] == "evaluation") & (evaluations["metric"] == "accuracy")]
    assert set(final["model"]) == {"supernet"}
    assert set(final["split"]) == {"validation", "test"}
    assert len(final[final["client_id"].notna()]) == 2 * 8
    (kept,) = results["models"].to_dict("records")
    assert kept["parameters"] == cost["parameters"].cost(space.largest)
    tensors, _ = load_model(results.paths, "supernet")
    assert {n: tuple(t.shape) for n, t in tensors.items()} == dict(supernet_shapes(space))
    for architecture in list(space.enumerate())[::5]:  # any subnet can be cut from what is kept
        subnet = space.build_subnet(architecture)
        subnet.load_state_dict(extract(tensors, space.slices(architecture)))
        with torch.no_grad():
            assert bool(subnet.eval()(torch.zeros(1, 1, 8, 8)).isfinite().all())


VARIANTS: dict[str, dict[str, Any]] = {
    "random and overlap": {"distribution": DistributionConfig("random"), "shares": SharesConfig("overlap")},
    "sandwich, plain, linear": {
        "distribution": DistributionConfig("sandwich"),
        "shares": SharesConfig(decay="linear"),
        "weighting": "plain",
    },
    "static family": {"distribution": DistributionConfig("static")},
    "dynamic family": {"distribution": DistributionConfig("dynamic", tier_aware=True)},
}


def test_deepfednas_trains_on_the_path_and_searches_by_fitness_without_samples(
    elastic_config: Make, results_of: Any
) -> None:
    search = TargetSearchConfig(predictor="fitness", population=16, generations=4, verify=2, samples=0)
    config = elastic_config(
        method={"family": [], "search": search},
        train={"distribution": DistributionConfig("pareto_path"), "options": {"limits": 4}, "evaluate_every": 0},
    )
    results = results_of(config)
    space = space_of(results.world)
    path = {*path_of_the_fittest(space, 4), space.smallest, space.largest}
    given = results.clients("supernet")["architecture"]
    assert set(given) <= {architecture_id(a) for a in path}
    stages = list(dict.fromkeys(results["rounds"]["stage"]))
    assert stages == ["supernet", "search/winners", "evaluation"], "no samples are measured"
    candidates = results["candidates"]
    assert set(candidates["tier"]) == {tier.name for tier in results.world.tiers}
    fitness, genome = fitness_of(space), space.genome
    for tier in results.world.tiers:
        own = candidates[candidates["tier"] == tier.name]["architecture"]
        found = fitness(genome.one_hot(as_array([space.parse(a) for a in own])))
        everything = [a for a in space.enumerate() if tier.lower < results.world.cost_table.cost(a) <= tier.upper]
        assert found.max() == fitness(genome.one_hot(as_array(everything))).max()
    final = results["evaluations"]
    assert set(final[final["stage"] == "evaluation"]["model"]) == {"searched"}


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_variant_trains(elastic_config: Make, name: str, begun: Any) -> None:
    stepper = begun(elastic_config(train={"rounds": 1, "evaluate_every": 0, **VARIANTS[name]}))
    stepper.step()
    assert {report.status for report in stepper.results[0].client_results} == {"ok"}
    assert ("beta" in stepper.plans[0].schedules) == (name != "random and overlap")


@pytest.mark.parametrize(("norm", "lr"), [("none", 1.0), ("batch", 0.2), ("group", 0.2)])
def test_training_lowers_the_loss(elastic_config: Make, norm: str, lr: float, train_in_memory: Any) -> None:
    # Without norms the first gradients are small: torch's weights shrink the signal from layer to layer.
    train = {"rounds": 4, "epochs": 3, "clients_per_round": 6, "lr": lr, "evaluate_every": 1, "evaluate": ["largest"]}
    evaluations = train_in_memory(elastic_config(norm, train=train)).table("evaluations")
    losses = evaluations[evaluations["metric"] == "loss"].sort_values("round")
    assert losses["round"].tolist() == [0, 1, 2, 3, 4]
    assert losses["value"].iloc[-1] < losses["value"].iloc[0] - 0.05


# -- what is handed out and what it weighs ----------------------------------------------------------------------------


def test_the_largests_client_weighs_beta_and_the_others_the_rest(elastic_config: Make) -> None:
    config = elastic_config(train={"rounds": 10, "shares": SharesConfig(beta_0=0.7, decay="constant")})
    world = build_world(config)
    largest = space_of(world).largest
    for plan in plans(config, 5):
        given_ = given_to(plan)
        holders = [i for i, each in enumerate(given_) if each.architecture == largest]
        shares = [each.share for each in given_]
        assert shares[holders[0]] == 0.7
        assert [s for i, s in enumerate(shares) if i != holders[0]] == pytest.approx([0.1] * 3)
        assert plan.schedules["beta"] == 0.7


def test_plans_go_by_tier_and_then_by_client(elastic_config: Make) -> None:
    config = elastic_config(train={"clients_per_round": 8})
    world = build_world(config)
    (plan,) = plans(config, 1)
    order = [(int(world.tier_of_client[each.client_id]), each.client_id) for each in given_to(plan)]
    assert order == sorted(order)
    # Ties go to the lowest id, wherever it stands in the plan.
    given_ = {each.client_id: each.architecture for each in given_to(plan)}
    assert given_[0] == space_of(world).largest
    assert given_[1] == space_of(world).smallest


def test_with_tier_awareness_nobody_is_over_its_budget(elastic_config: Make) -> None:
    aware = elastic_config(train={"rounds": 30, "distribution": DistributionConfig("tracking_sandwich", True)})
    world = build_world(aware)
    space, top = space_of(world), len(world.tiers) - 1
    drawn = []
    for plan in plans(aware, 30):
        for each in given_to(plan):
            assert world.macs_table.cost(each.architecture) <= world.tier(each.client_id).upper
            drawn.append(each.architecture)
            if each.architecture == space.largest:
                assert world.tier_of_client[each.client_id] == top
    assert len(set(drawn)) > 8
    blind = replace(aware.method.train, distribution=DistributionConfig("tracking_sandwich"))
    unaware = replace(aware, method=replace(aware.method, train=blind))
    given_ = [each for plan in plans(unaware, 30) for each in given_to(plan)]
    assert any(world.macs_table.cost(each.architecture) > world.tier(each.client_id).upper for each in given_)


def test_plans_are_pure(elastic_config: Make) -> None:
    stage = build_stages(build_world(elastic_config()))[0]
    state = replace(stage.begin(RunState()), round=1)
    assert stage.plan(state).assignments == stage.plan(state).assignments
    assert stage.plan(state).assignments != stage.plan(replace(state, round=2)).assignments


def test_counters_are_kept_in_the_state(elastic_config: Make, begun: Any) -> None:
    stepper = begun(elastic_config(train={"rounds": 5}))
    assert stepper.state.data["served"] == {}
    stepper.step()
    (plan,) = stepper.plans
    space = stepper.stage.world.space
    for which, architecture in (("largest", space.largest), ("smallest", space.smallest)):
        expected = {str(each.client_id): 1 for each in given_to(plan) if each.architecture == architecture}
        assert stepper.state.data["served"][which] == expected


def test_a_round_is_the_average_of_the_clients_slices(elastic_config: Make, begun: Any) -> None:
    config = elastic_config("batch", train={"rounds": 10})
    world, stepper = build_world(config), begun(config)
    before = {n: t.clone() for n, t in stepper.state.weights("supernet").items()}
    stepper.step()
    updates = []
    for assignment in stepper.plans[0].assignments:
        if assignment.client_id is None:
            continue
        outcome = assignment.task.run(Worker(world.spec), assignment, before)
        assert isinstance(assignment.task, Train)
        assert outcome.update is not None
        assert set(outcome.update.weights.values()) == {assignment.task.share * outcome.samples}
        updates.append(outcome.update)
    expected = average(before, updates)
    for name, tensor in stepper.state.weights("supernet").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    assert not torch.equal(expected["stem.0.weight"], before["stem.0.weight"])


def test_scalars_without_enough_contributors_keep_their_weights(elastic_config: Make, begun: Any) -> None:
    # The family's static hand-out: nobody has the second block of the second stage.
    config = elastic_config(
        method={"family": ["smallest", "d=1,0 e=2"]},
        train={"distribution": DistributionConfig("static"), "evaluate_every": 0, "evaluate": []},
    )
    stepper = begun(config)
    before = dict(stepper.state.weights("supernet"))
    stepper.step()
    after = stepper.state.weights("supernet")
    assert all(torch.equal(after[n], before[n]) for n in before if n.startswith("stages.1.1."))
    assert not torch.equal(after["stages.0.1.conv1.weight"], before["stages.0.1.conv1.weight"])


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "train", "message"),
    [
        ({}, {"clients_per_round": 2}, r"train\.clients_per_round=2: tracking_sandwich needs at least 3"),
        ({}, {"clients_per_round": 9}, r"clients_per_round=9: must be between 1 and the 8 clients"),
        (
            {},
            {"distribution": DistributionConfig("sandwhich")},
            r"distribution\.heuristic: unknown .*known are dynamic",
        ),
        ({"family": []}, {"distribution": DistributionConfig("static")}, r"heuristic=static hands out a fixed family"),
        ({}, {"travels": "all"}, r"train\.travels=all: must be one of slices, supernet"),
        ({}, {"shares": SharesConfig(beta_0=2.0)}, r"train\.shares\.beta_0=2\.0: must be above 0 and at most 1"),
        ({}, {"shrinking": ShrinkingConfig(0)}, r"shrinking\.subnets_per_batch=0: must be between 1 and 1000"),
        ({}, {"shrinking": ShrinkingConfig(1, 1.5)}, r"shrinking\.depth_share=1\.5: must be between 0 and 1"),
        ({"family": ["d=2,0 e=1"]}, {}, r"method\.family: 'd=2,0 e=1': depth 2 of stage 1: allowed are 0 to 1"),
        ({"family": ["largest", "d=1,1 e=2"]}, {}, r"method\.family: 'd=1,1 e=2' is named twice: d=1,1 e=2"),
        (
            {"family": [], "separately": True},
            {},
            r"separately=true trains the members of method\.family, which is empty",
        ),
        ({}, {"weighting": "none"}, r"train\.weighting: unknown weighting rule"),
        ({}, {"evaluate": ["huge"]}, r"method\.train\.evaluate: 'huge' is no architecture"),
        (
            {"search": TargetSearchConfig(predictor="fitness", front=3)},
            {},
            r"search\.front=3: the whole front is searched with predictors; use predictor=mlp",
        ),
        (
            {"search": TargetSearchConfig(predictor="fitness", latency_s=[1.0])},
            {},
            r"search\.latency_s: a latency target needs method\.search\.predictor=mlp",
        ),
        (
            {},
            {"distribution": DistributionConfig("pareto_path"), "options": {"limits": 1}},
            r"method\.train\.options\.limits=1: must be between 2 and 1000",
        ),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    elastic_config: Make, method: dict[str, Any], train: dict[str, Any], message: str
) -> None:
    config = elastic_config(method=method, train=train)
    with pytest.raises(ValueError, match=message) as caught:
        start_run(config, make_serial)
    assert "\n" not in str(caught.value)
    assert not list_runs(Path(config.results)), "nothing is written"


def test_any_space_can_be_handed_out(elastic_config: Make, tiny_config: Make, results_of: Any) -> None:
    config = replace(elastic_config(), space=tiny_config().space)
    results = results_of(config)
    world = results.world
    rows = results.clients("supernet")
    assert set(rows["status"]) == {"ok"}
    bytes_of_subnet = world.space.cost_table("bytes")
    for row in rows.to_dict("records"):
        assert row["bytes_down"] == row["bytes_up"] == bytes_of_subnet.cost(parse_architecture(row["architecture"]))
    extremes = {architecture_id(a) for a in (world.space.largest, world.space.smallest)}
    for _, of_round in rows.groupby("round"):
        assert extremes <= set(of_round["architecture"])


def test_two_clients_are_enough_where_all_get_the_same(elastic_config: Make) -> None:
    for changes in ({"method": {"separately": True}}, {"train": {"travels": "supernet"}}):
        train = {"clients_per_round": 2, **changes.get("train", {})}
        assert build_stages(build_world(elastic_config(method=changes.get("method"), train=train)))


def test_the_papers_settings_are_the_defaults() -> None:
    config = ElasticTrainingConfig()
    expected = {"epochs": 5, "batch_size": 64, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 1.0}
    assert {name: getattr(config, name) for name in expected} == expected
    assert dataclasses.asdict(config.shares) == {"rule": "maxnet", "beta_0": 0.9, "decay": "cosine", "decay_share": 0.8}
    assert config.distribution.heuristic == "tracking_sandwich"


def test_a_round_whose_only_weighted_client_is_lost_trains_nothing_and_the_run_goes_on(
    elastic_config: Callable[..., RunConfig], train_in_memory: Any
) -> None:
    shares = SharesConfig(beta_0=1.0, decay="constant")  # all of the weight is the largest subnet's
    train = {"rounds": 8, "evaluate_every": 0, "shares": shares}
    config = elastic_config(train=train, devices=DevicesConfig(dropout=0.5))
    memory = train_in_memory(config)
    clients, space = memory.table("clients"), build_world(config).space
    assert isinstance(space, ElasticSpace)
    largest = architecture_id(space.largest)
    came = clients[clients["status"] == "ok"].groupby("round")["architecture"].agg(list)
    assert len(memory.table("rounds")) == 8
    assert any(largest not in architectures for architectures in came)
