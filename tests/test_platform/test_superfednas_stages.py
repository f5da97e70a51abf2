"""SuperFedNAS and its baselines on a tiny federation: what is handed out, what it weighs, what is kept."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from fedloom.platform.averaging.average import average
from fedloom.platform.averaging.shares import SharesConfig
from fedloom.platform.clients.execution import Assignment, SerialExecutor, SharedWeights, make_chunks
from fedloom.platform.clients.tasks import ScoreSubnet, TrainSubnet, TrainSupernet
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import merge_chunks
from fedloom.platform.federation.stage import Plan, RoundResult
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.elastic_stage import (
    DistributionConfig,
    ElasticStage,
    ElasticTrainingConfig,
    ShrinkingConfig,
    bag_of,
)
from fedloom.platform.methods.evaluation_stage import EvaluationConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.results.models import load_model
from fedloom.platform.results.paths import list_runs
from fedloom.platform.runs.run import start_run
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.slices import Slice, architecture_id, bytes_of, extract

Make = Callable[..., RunConfig]


class Results:
    """The tables of a run of a configuration."""

    def __init__(self, config: RunConfig) -> None:
        start_run(config, lambda world: SerialExecutor(Worker(world.spec)))
        (self.paths,) = list_runs(Path(config.results))

    def __getitem__(self, table: str) -> pd.DataFrame:
        frame = pd.read_parquet(self.paths.table(table))
        return frame.astype(object).where(frame.notna(), None)

    def clients(self, stage: str) -> pd.DataFrame:
        frame = self["clients"]
        return frame[frame["stage"] == stage]


class Stepper:
    """Runs a training stage round by round, as the loop does."""

    def __init__(self, world: World, number: int = 0) -> None:
        stage = build_stages(world)[number]
        assert isinstance(stage, ElasticStage)
        self.stage, self.state = stage, replace(stage.begin(RunState()), round=0)
        self.worker = Worker(world.spec)
        self.executor = SerialExecutor(self.worker)

    def step(self) -> tuple[Plan, RoundResult]:
        plan = self.stage.plan(self.state)
        weights = SharedWeights(self.state.weights(plan.bag), self.state.version(plan.bag))
        result = merge_chunks(self.executor.run(make_chunks(plan.assignments, 2), weights))
        self.state = replace(self.stage.merge(self.state, plan, result).state, round=self.state.round + 1)
        return plan, result


def space_of(world: World) -> ElasticSpace:
    assert isinstance(world.space, ElasticSpace)
    return world.space


def training(plan: Plan) -> list[tuple[int, TrainSubnet]]:
    """Clients and their tasks, in plan order."""
    return [
        (a.client_id, a.task) for a in plan.assignments if a.client_id is not None and isinstance(a.task, TrainSubnet)
    ]


def plans(config: RunConfig, rounds: int) -> list[Plan]:
    """The plans of a run's first rounds; nothing is trained, but the counters go on."""
    stepper = Stepper(build_world(config))
    found = []
    for _ in range(rounds):
        found.append(stepper.stage.plan(stepper.state))
        merged = stepper.stage.merge(stepper.state, found[-1], RoundResult(merge_chunks([]).sums, []))
        stepper.state = replace(merged.state, round=stepper.state.round + 1)
    return found


# -- whole runs -------------------------------------------------------------------------------------------------------


def test_superfednas_from_end_to_end(elastic_config: Make) -> None:
    config = elastic_config("batch", method={"evaluation": EvaluationConfig(clients_per_tier=None)})
    results, world = Results(config), build_world(config)
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
    assert sorted(validation["architecture"]) == sorted(extremes), "evaluate_every=2: once, in round 0"
    final = evaluations[(evaluations["stage"] == "evaluation") & (evaluations["metric"] == "accuracy")]
    assert set(final["model"]) == {"supernet"}
    assert set(final["split"]) == {"validation", "test"}
    assert len(final[final["client_id"].notna()]) == 2 * 8
    (kept,) = results["models"].to_dict("records")
    assert kept["parameters"] == cost["parameters"].cost(space.largest)


def test_any_subnet_can_be_cut_from_the_kept_supernet(elastic_config: Make) -> None:
    config = elastic_config()
    results, space = Results(config), space_of(build_world(config))
    tensors, _ = load_model(results.paths, "supernet")
    assert {n: tuple(t.shape) for n, t in tensors.items()} == dict(space.shapes)
    for architecture in list(space.enumerate())[::5]:
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


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_variant_trains(elastic_config: Make, name: str) -> None:
    config = elastic_config(train={"rounds": 1, "evaluate_every": 0, **VARIANTS[name]})
    results = Results(config)
    assert set(results.clients("supernet")["status"]) == {"ok"}
    beta = results["rounds"].set_index("stage")["beta"]["supernet"]
    assert (beta is None) == (name == "random and overlap")


@pytest.mark.parametrize("norm", ["none", "batch", "group"])
def test_training_lowers_the_loss(elastic_config: Make, norm: str) -> None:
    train = {"rounds": 4, "epochs": 3, "clients_per_round": 6, "lr": 0.2, "evaluate_every": 1, "evaluate": ["largest"]}
    evaluations = Results(elastic_config(norm, train=train))["evaluations"]
    losses = evaluations[(evaluations["stage"] == "supernet") & (evaluations["metric"] == "loss")].sort_values("round")
    assert len(losses) == 4
    assert losses["value"].iloc[-1] < losses["value"].iloc[0] - 0.05


# -- what is handed out and what it weighs ----------------------------------------------------------------------------


def test_the_largests_client_weighs_beta_and_the_others_the_rest(elastic_config: Make) -> None:
    config = elastic_config(train={"rounds": 10, "shares": SharesConfig(beta_0=0.7, decay="constant")})
    world = build_world(config)
    largest = space_of(world).largest
    for plan in plans(config, 5):
        tasks = training(plan)
        holders = [i for i, (_, task) in enumerate(tasks) if task.architecture == largest]
        shares = [task.share for _, task in tasks]
        assert shares[holders[0]] == 0.7
        assert [s for i, s in enumerate(shares) if i != holders[0]] == pytest.approx([0.1] * 3)
        assert plan.schedules["beta"] == 0.7


def test_plans_go_by_tier_and_then_by_client(elastic_config: Make) -> None:
    config = elastic_config(train={"clients_per_round": 8})
    world = build_world(config)
    (plan,) = plans(config, 1)
    order = [(int(world.tier_of_client[c]), c) for c, _ in training(plan)]
    assert order == sorted(order)
    # Ties go to the lowest id, wherever it stands in the plan.
    given_ = {c: task.architecture for c, task in training(plan)}
    assert given_[0] == space_of(world).largest
    assert given_[1] == space_of(world).smallest


def test_with_tier_awareness_nobody_is_over_its_budget(elastic_config: Make) -> None:
    aware = elastic_config(train={"rounds": 30, "distribution": DistributionConfig("tracking_sandwich", True)})
    world = build_world(aware)
    space, top = space_of(world), len(world.tiers) - 1
    drawn = []
    for plan in plans(aware, 30):
        for client, task in training(plan):
            assert world.macs_table.cost(task.architecture) <= world.tier(client).upper
            drawn.append(task.architecture)
            if task.architecture == space.largest:
                assert world.tier_of_client[client] == top
    assert len(set(drawn)) > 8
    blind = replace(aware.method.train, distribution=DistributionConfig("tracking_sandwich"))
    unaware = replace(aware, method=replace(aware.method, train=blind))
    over = [
        world.macs_table.cost(t.architecture) > world.tier(c).upper for p in plans(unaware, 30) for c, t in training(p)
    ]
    assert any(over)


def test_plans_are_pure(elastic_config: Make) -> None:
    stage = Stepper(build_world(elastic_config())).stage
    state = replace(stage.begin(RunState()), round=1)
    assert stage.plan(state).assignments == stage.plan(state).assignments
    assert stage.plan(state).assignments != stage.plan(replace(state, round=2)).assignments


def test_counters_are_kept_in_the_state(elastic_config: Make) -> None:
    stepper = Stepper(build_world(elastic_config(train={"rounds": 5})))
    assert stepper.state.data["served"] == {}
    plan, _ = stepper.step()
    space = stepper.stage.space
    for which, architecture in (("largest", space.largest), ("smallest", space.smallest)):
        expected = {str(c): 1 for c, task in training(plan) if task.architecture == architecture}
        assert stepper.state.data["served"][which] == expected


def test_a_round_is_the_average_of_the_clients_slices(elastic_config: Make) -> None:
    world = build_world(elastic_config("batch", train={"rounds": 10}))
    stepper = Stepper(world)
    before = {n: t.clone() for n, t in stepper.state.weights("supernet").items()}
    plan, _ = stepper.step()
    updates = []
    for assignment in plan.assignments:
        if assignment.client_id is None:
            continue
        outcome = assignment.task.run(Worker(world.spec), assignment, before)
        assert isinstance(assignment.task, TrainSubnet)
        assert outcome.update is not None
        assert set(outcome.update.weights.values()) == {assignment.task.share * outcome.samples}
        updates.append(outcome.update)
    expected = average(before, updates)
    for name, tensor in stepper.state.weights("supernet").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    assert not torch.equal(expected["stem.0.weight"], before["stem.0.weight"])


def test_scalars_without_enough_contributors_keep_their_weights(elastic_config: Make) -> None:
    # The family's static hand-out: nobody has the second block of the second stage.
    config = elastic_config(
        method={"family": ["smallest", "d=1,0 e=2"]},
        train={"distribution": DistributionConfig("static"), "evaluate_every": 0, "evaluate": []},
    )
    stepper = Stepper(build_world(config))
    before = dict(stepper.state.weights("supernet"))
    stepper.step()
    after = stepper.state.weights("supernet")
    assert all(torch.equal(after[n], before[n]) for n in before if n.startswith("stages.1.1."))
    assert not torch.equal(after["stages.0.1.conv1.weight"], before["stages.0.1.conv1.weight"])


# -- the whole supernet travels ---------------------------------------------------------------------------------------


def test_the_whole_supernet_travels_and_widths_shrink_later(elastic_config: Make) -> None:
    train = {"rounds": 4, "travels": "supernet", "shrinking": ShrinkingConfig(2, 0.5), "evaluate_every": 0}
    config = elastic_config("batch", train=train)
    results, world = Results(config), build_world(config)
    rows, space = results.clients("supernet"), space_of(world)
    assert set(rows["bytes_down"]) == set(rows["bytes_up"]) == {space.cost_table("bytes").cost(space.largest)}
    assert set(rows["parameters"]) == {space.cost_table("parameters").cost(space.largest)}
    assert set(rows["architecture"]) == {None}
    # Two subnets per batch cost at most twice the largest and at least twice the smallest.
    per_sample = rows["macs"] / (rows["samples"] * 2 * 2)
    assert per_sample.max() < world.macs_table.largest
    assert per_sample.min() > world.macs_table.smallest
    tasks = [plan.assignments[0].task for plan in plans(config, 4)]
    assert [task.widest for task in tasks if isinstance(task, TrainSupernet)] == [True, True, False, False]


def test_shrinking_adds_up_the_gradients_of_the_drawn_subnets(elastic_config: Make) -> None:
    world = build_world(elastic_config())
    space, worker = space_of(world), Worker(world.spec)
    weights = space.initial_weights(torch_stream(1, "test"))
    stage = Stepper(build_world(elastic_config(train={"travels": "supernet", "epochs": 1, "clip_norm": 0.0}))).stage
    task = stage.plan(stage.begin(RunState())).assignments[0].task
    assert isinstance(task, TrainSupernet)
    task = replace(task, local=replace(task.local, batch_size=1000, clip_norm=0.0, lr=0.5), subnets_per_batch=3)
    assignment = Assignment("supernet", 0, 3, "tier1", task)
    outcome = task.run(worker, assignment, weights)
    assert outcome.update is not None
    x, y = Worker(world.spec).client_data(3, "train")
    module = space.build_supernet()
    module.load_state_dict(weights)
    module.train()
    draws = task._draws(worker, assignment)
    for _ in range(3):
        torch.nn.functional.cross_entropy(module(x, next(draws)), y).backward()  # type: ignore[no-untyped-call]
    for name, parameter in module.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        expected = weights[name] - 0.5 * gradient
        torch.testing.assert_close(outcome.update.tensors[name], expected, rtol=1e-4, atol=1e-5, msg=name)
    assert outcome.steps == 1
    assert outcome.update.slices["stem.0.weight"] == Slice("stem.0.weight")


# -- each member of the family alone ----------------------------------------------------------------------------------


def test_members_are_trained_separately_from_fresh_weights_of_their_own(elastic_config: Make) -> None:
    family = ["smallest", "d=1,0 e=1", "largest"]
    config = elastic_config("batch", method={"separately": True, "family": family}, train={"clients_per_round": 2})
    results, world = Results(config), build_world(config)
    space = space_of(world)
    members = [space.parse(text) for text in family]
    names = [f"alone/{architecture_id(m)}" for m in members]
    assert list(dict.fromkeys(results["rounds"].sort_values("stage")["stage"])) == sorted([*names, "evaluation"])
    for member, name in zip(members, names, strict=True):
        rows = results.clients(name)
        assert len(rows) == 4
        assert set(rows["bytes_up"]) == {space.cost_table("bytes").cost(member)}
    models = results["models"].set_index("architecture")
    assert set(models.index) == {architecture_id(m) for m in members}
    evaluations = results["evaluations"]
    final = evaluations[evaluations["stage"] == "evaluation"]
    assert set(final["model"]) == {"alone"}
    assert set(final["architecture"]) == {architecture_id(m) for m in members}


def test_a_member_alone_is_fedavg(elastic_config: Make) -> None:
    config = elastic_config(method={"separately": True, "family": ["d=1,0 e=1"]})
    world = build_world(config)
    stepper = Stepper(world)
    member = stepper.stage.alone
    assert member is not None
    bag = bag_of(member)
    before = dict(stepper.state.weights(bag))
    assert bytes_of(before) == space_of(world).cost_table("bytes").cost(member)
    plan, _ = stepper.step()
    tensors: list[tuple[int, dict[str, Tensor]]] = []
    for assignment in plan.assignments:
        if assignment.client_id is not None:
            outcome = assignment.task.run(Worker(world.spec), assignment, before)
            assert outcome.update is not None
            tensors.append((outcome.samples, dict(outcome.update.tensors)))
    total = sum(n for n, _ in tensors)
    for name, tensor in stepper.state.weights(bag).items():
        by_hand = sum(n * own[name].double() for n, own in tensors) / total
        torch.testing.assert_close(tensor.double(), by_hand, rtol=1e-5, atol=1e-6, msg=name)


def test_the_server_scores_the_member_itself(elastic_config: Make) -> None:
    stepper = Stepper(build_world(elastic_config(method={"separately": True})), number=1)
    plan, result = stepper.step()
    (score,) = [a.task for a in plan.assignments if a.client_id is None]
    assert score == ScoreSubnet(stepper.stage.space.largest, "alone", "validation", stand_alone=True)
    assert all(r.status == "ok" for r in result.reports)


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
        ({}, {"travels": "all"}, r"train\.travels='all': allowed are slices, supernet"),
        ({}, {"shares": SharesConfig(beta_0=2.0)}, r"train\.shares\.beta_0=2\.0: must be above 0 and at most 1"),
        ({}, {"shrinking": ShrinkingConfig(0)}, r"shrinking\.subnets_per_batch=0: must be at least 1"),
        ({}, {"shrinking": ShrinkingConfig(1, 1.5)}, r"shrinking\.depth_share=1\.5: must be between 0 and 1"),
        ({"family": ["d=2,0 e=1"]}, {}, r"method\.family: 'd=2,0 e=1': depth 2 of stage 1: allowed are 0 to 1"),
        ({"family": ["largest", "d=1,1 e=2"]}, {}, r"method\.family: 'd=1,1 e=2' is named twice: d=1,1 e=2"),
        (
            {"family": [], "separately": True},
            {},
            r"separately=true trains the members of method\.family, which is empty",
        ),
        ({}, {"weighting": "none"}, r"train\.weighting: unknown weighting rule"),
        ({}, {"evaluate": ["huge"]}, r"method\.train\.evaluate: 'huge' is no subnet"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    elastic_config: Make, method: dict[str, Any], train: dict[str, Any], message: str
) -> None:
    config = elastic_config(method=method, train=train)
    with pytest.raises(ValueError, match=message) as caught:
        start_run(config, lambda world: SerialExecutor(Worker(world.spec)))
    assert "\n" not in str(caught.value)
    assert not list_runs(Path(config.results)), "nothing is written"


def test_a_space_that_is_not_elastic_is_refused(elastic_config: Make, tiny_config: Make) -> None:
    config = replace(elastic_config(), space=tiny_config().space)
    with pytest.raises(ValueError, match="cnn_digits is not an elastic space: choose resnet_elastic or tcn_elastic"):
        build_stages(build_world(config))


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
