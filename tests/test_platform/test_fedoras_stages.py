"""FedorAS's stages on a tiny federation: what they plan, what they send, what they keep, and how they end."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from fedloom.platform.clients import tasks
from fedloom.platform.clients.execution import SerialExecutor, SharedWeights, make_chunks
from fedloom.platform.clients.tasks import ScoreSubnet, TrainPaths, TrainSubnet
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.config import BudgetConfig, DevicesConfig, RunConfig, TiersConfig
from fedloom.platform.federation.loop import merge_chunks
from fedloom.platform.federation.stage import Merged, RoundResult, Stage
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.search_stage import TierSearchStage, winner_of
from fedloom.platform.methods.subnet_stage import SubnetStage
from fedloom.platform.methods.supernet_stage import CommunicationConfig, SupernetStage
from fedloom.platform.methods.tiered.fedavg import FedAvgConfig
from fedloom.platform.results.checkpoint import load_checkpoint
from fedloom.platform.results.models import load_model
from fedloom.platform.results.paths import list_runs
from fedloom.platform.runs.run import start_run
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.operator_choice import OperatorChoiceSpace
from fedloom.platform.spaces.slices import Architecture, architecture_id, parse_architecture

Make = Callable[..., RunConfig]


def run(config: RunConfig) -> "Results":
    start_run(config, lambda world: SerialExecutor(Worker(world.spec)))
    return Results(config)


class Results:
    """The tables of the only run of a configuration."""

    def __init__(self, config: RunConfig) -> None:
        (self.paths,) = list_runs(Path(config.results))

    def __getitem__(self, table: str) -> pd.DataFrame:
        folder = self.paths.table(table)
        frame = pd.read_parquet(folder)
        return frame.astype(object).where(frame.notna(), None)

    def has(self, table: str) -> bool:
        return self.paths.table(table).is_dir() and len(self[table]) > 0


def bytes_by_hand(world: World, architectures: list[Architecture]) -> int:
    """All tensors of the fixed part and of every operator that one of the architectures has."""
    assert isinstance(world.space, OperatorChoiceSpace)
    used = {(layer, option) for a in architectures for layer, option in enumerate(a)}
    total = 0
    for name, tensor in world.space.build_supernet().state_dict().items():
        parts = name.split(".")
        if parts[0] == "fixed" or (int(parts[1]), int(parts[3])) in used:
            total += tensor.numel() * tensor.element_size()
    return total


# -- stage by stage, without a loop -----------------------------------------------------------------------------------


class Stepper:
    """Runs a stage round by round, as the loop does."""

    def __init__(self, stage: Stage, world: World, state: RunState) -> None:
        self.stage, self.state = stage, replace(stage.begin(state), round=0)
        self.executor = SerialExecutor(Worker(world.spec))
        self.merged: list[Merged] = []
        self.results: list[RoundResult] = []

    def step(self) -> None:
        plan = self.stage.plan(self.state)
        weights = SharedWeights(self.state.weights(plan.bag), self.state.version(plan.bag))
        result = merge_chunks(self.executor.run(make_chunks(plan.assignments, 2), weights))
        merged = self.stage.merge(self.state, plan, result)
        self.state = replace(merged.state, round=self.state.round + 1)
        self.merged.append(merged)
        self.results.append(result)

    def finish(self) -> Merged:
        while self.stage.rounds_left(self.state) > 0:
            self.step()
        return self.stage.end(self.state)


def stages_of(world: World, kind: type) -> list[Any]:
    return [stage for stage in build_stages(world) if isinstance(stage, kind)]


def supernet_state(world: World, seed: int = 1) -> RunState:
    return RunState().with_bag("supernet", world.space.initial_weights(torch_stream(seed, "test")))


# -- stage 1: the supernet --------------------------------------------------------------------------------------------


def test_every_row_of_the_supernet_stage_counts_the_bytes_of_its_subspace(tiny_config: Make) -> None:
    config = tiny_config()
    results, world = run(config), build_world(config)
    assert isinstance(world.space, OperatorChoiceSpace)
    clients = results["clients"]
    rows = clients[clients["stage"] == "supernet"]
    assert len(rows) == 8
    limit = 0.5 * world.space.num_parameters.supernet
    for row in rows.to_dict("records"):
        kept = [tuple(map(int, layer.split(","))) for layer in row["subspace"].split("/")]
        # As many "architectures" as the widest layer needs to name each kept operator once.
        longest = max(map(len, kept))
        union = [tuple(layer[min(i, len(layer) - 1)] for layer in kept) for i in range(longest)]
        assert row["bytes_down"] == row["bytes_up"] == bytes_by_hand(world, union)
        assert row["parameters"] <= limit
        assert all(3 in layer for layer in kept), "the identity is free and always travels"
    rounds = results["rounds"]
    first = rounds[rounds["stage"] == "supernet"].iloc[0]
    assert first["bytes_down"] == rows[rows["round"] == 0]["bytes_down"].sum()
    assert len(set(rows["subspace"])) > 1, "every client has a subspace of its own"


def test_an_operator_with_too_few_contributors_keeps_its_weights(tiny_config: Make) -> None:
    config = tiny_config()
    config.method.train.communication = CommunicationConfig("fraction", 0.4)
    world = build_world(config)
    stepper = Stepper(stages_of(world, SupernetStage)[0], world, RunState())
    before = dict(stepper.state.weights("supernet"))
    stepper.step()
    after = stepper.state.weights("supernet")
    assert isinstance(world.space, OperatorChoiceSpace)
    contributors = dict.fromkeys(before, 0)
    for name, tensor_sum in stepper.results[0].sums.tensors.items():
        contributors[name] = sum(c.contributors for c in tensor_sum.coverage.values())
    counts = set(contributors.values())
    assert {0, 1, 4} <= counts
    for name, tensor in after.items():
        if contributors[name] < 2:
            assert torch.equal(tensor, before[name]), name
        elif name.endswith("conv.weight"):
            assert not torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("budget", [BudgetConfig("schedule", factors=[1.0, 0.7, 0.4]), BudgetConfig("trace")])
def test_no_path_ever_exceeds_the_rounds_budget(
    tiny_config: Make, budget: BudgetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tiers=TiersConfig(count=2, paths=2000, budget=budget))
    config.method.train.rounds = 3
    config.method.train.batch_size = 4
    world = build_world(config)
    drawn: list[tuple[float, float]] = []
    sampler_of = tasks.path_sampler

    def recording(name: str, table: Any, kept: Any, limit: float) -> Any:
        sampler = sampler_of(name, table, kept, limit)

        class Recording:
            def sample(self, rng: np.random.Generator) -> Architecture:
                path = sampler.sample(rng)
                drawn.append((world.cost_table.cost(path), limit))
                return path

        return Recording()

    monkeypatch.setattr(tasks, "path_sampler", recording)
    stage = stages_of(world, SupernetStage)[0]
    limits = {
        a.task.budget
        for r in range(3)
        for a in stage.plan(replace(stage.begin(RunState()), round=r)).assignments
        if isinstance(a.task, TrainPaths)
    }
    Stepper(stage, world, RunState()).finish()
    assert len(drawn) > 100
    assert all(cost <= limit for cost, limit in drawn)
    assert {limit for _, limit in drawn} == limits
    uppers = {t.upper for t in world.tiers}
    assert limits & uppers
    assert min(limits) < min(uppers) or min(limits) == world.cost_table.smallest


def test_the_top_tier_may_train_what_the_lower_tier_may_not(tiny_config: Make) -> None:
    world = build_world(tiny_config())
    stage = stages_of(world, SupernetStage)[0]
    for assignment in stage.plan(stage.begin(RunState())).assignments:
        if assignment.client_id is not None:
            assert assignment.task.budget == world.tier(assignment.client_id).upper


def test_plans_are_pure(tiny_config: Make) -> None:
    world = build_world(tiny_config())
    stage = stages_of(world, SupernetStage)[0]
    state = replace(stage.begin(RunState()), round=1)
    assert stage.plan(state) == stage.plan(state)
    other = stages_of(build_world(tiny_config()), SupernetStage)[0]
    assert other.plan(state) == stage.plan(state)


# -- stage 2: search --------------------------------------------------------------------------------------------------


def federated(config: RunConfig, **changes: Any) -> RunConfig:
    config.method.search = replace(config.method.search, scoring="federated", **changes)
    return config


def test_central_search_scores_every_candidate_once_inside_its_tier(tiny_config: Make) -> None:
    config = tiny_config()
    results, world = run(config), build_world(config)
    candidates = results["candidates"]
    for index, tier in enumerate(world.tiers):
        own = candidates[candidates["tier"] == tier.name]
        assert len(own) == 6
        assert len(set(own["architecture"])) == 6
        assert all(tier.lower < macs <= tier.upper for macs in own["macs"])
        assert set(own["stage"]) == {f"search/tier{index + 1}"}
        best = own.sort_values(["metric", "macs"], ascending=[False, True]).iloc[0]
        models = results["models"]
        assert set(models[models["tier"] == tier.name]["architecture"]) == {best["architecture"]}
        assert best["on_front"]


def test_federated_search_sends_the_union_once_to_distinct_clients(tiny_config: Make) -> None:
    config = federated(tiny_config())
    results, world = run(config), build_world(config)
    candidates, clients = results["candidates"], results["clients"]
    for index, tier in enumerate(world.tiers):
        own = candidates[candidates["tier"] == tier.name]
        asked = clients[clients["stage"] == f"search/{tier.name}"]
        generations = sorted(set(own["generation"]))
        assert len(generations) > 1
        assert sorted(set(asked["round"])) == list(range(2 * len(generations)))
        for generation in generations:
            architectures = [parse_architecture(a) for a in own[own["generation"] == generation]["architecture"]]
            rows = asked[asked["round"] // 2 == generation]
            payload = bytes_by_hand(world, architectures)
            assert set(rows["bytes_down"]) == {payload}
            assert payload < sum(bytes_by_hand(world, [a]) for a in architectures)
            # A loss and a metric of 8 bytes each come back.
            assert set(rows["bytes_up"]) == {16 * len(architectures)}
            assert len(rows) == 4
            assert len(set(rows["client_id"])) == 4, "nobody is asked twice in a generation"
            assert set(rows["client_id"]) <= set(world.eligible_by_tier[index].tolist())
            macs = sum(world.macs_table.cost(a) for a in architectures)
            assert all(row["macs"] == macs * row["samples"] for row in rows.to_dict("records"))


def test_the_cohorts_of_a_generation_never_meet(tiny_config: Make) -> None:
    world = build_world(federated(tiny_config(), compare_with_central=False))
    stage = stages_of(world, TierSearchStage)[0]
    begun = stage.begin(supernet_state(world))
    asked = set()
    for generation in range(30):
        first = stage.plan(replace(begun, round=2 * generation))
        pending = begun.with_data("search/tier1/client_scores", [{}])
        second = stage.plan(replace(pending, round=2 * generation + 1))
        clients = [a.client_id for plan in (first, second) for a in plan.assignments]
        assert len(clients) == len(set(clients)) == 4
        asked.add(tuple(clients))
    assert len(asked) > 10, "every generation asks others"


def test_federated_scores_are_the_means_over_the_clients_samples(tiny_config: Make) -> None:
    world = build_world(federated(tiny_config(), compare_with_central=False))
    stage = stages_of(world, TierSearchStage)[0]
    stepper = Stepper(stage, world, supernet_state(world))
    stepper.step()
    stepper.step()
    reports = [r for result in stepper.results for r in result.reports]
    assert len(reports) == 4
    for scored in stage._searcher(stepper.state).history:
        name = architecture_id(scored.architecture)
        for metric, value in (("loss", scored.loss), ("accuracy", scored.metric)):
            own = [m for r in reports for m in r.measurements if (m.architecture, m.metric) == (name, metric)]
            assert len(own) == 4
            assert value == pytest.approx(sum(m.value * m.samples for m in own) / sum(m.samples for m in own))


def test_federated_search_reports_kendalls_tau_per_generation(tiny_config: Make) -> None:
    results = run(federated(tiny_config(), budget=9, population=6))
    rows = results["evaluations"]
    taus = rows[rows["metric"] == "kendall_tau_federated"]
    firsts = []
    for tier in ("tier1", "tier2"):
        own = taus[taus["tier"] == tier]
        # Generations of 6, 2 and 1 models; the last has no ranking.
        assert own["samples"].tolist() == [6, 2, 1]
        assert own["round"].tolist() == [1, 3, 5]
        assert own["value"].tolist()[-1] is None
        assert all(value is None or -1 <= value <= 1 for value in own["value"])
        firsts.append(own["value"].tolist()[0])
    assert any(tau is not None for tau in firsts), "six models that all tie in both tiers"


def test_federated_search_by_all_clients_ranks_as_the_server_does(tiny_config: Make) -> None:
    # All clients' validation data is the server's: the two scorings are the same, up to rounding.
    world = build_world(federated(tiny_config(), clients_per_round=4, scoring_rounds=2))
    stepper = Stepper(stages_of(world, TierSearchStage)[0], world, supernet_state(world))
    stepper.step()
    stepper.step()
    (row,) = stepper.merged[1].rows
    assert row[1]["metric"] == "kendall_tau_federated"
    assert row[1]["value"] == pytest.approx(1.0)


def test_federated_search_without_enough_clients_ends_well(tiny_config: Make) -> None:
    # One client in the upper tier, three rounds: two of them ask nobody.
    config = tiny_config(tiers=TiersConfig(count=2, paths=2000, clients=[0, 0, 0, 1, 0, 0, 0, 0]))
    config = federated(config, scoring_rounds=3, compare_with_central=False)
    results = run(config)
    clients = results["clients"]
    asked = clients[clients["stage"] == "search/tier2"]
    assert asked["client_id"].tolist() == [3] * (len(asked))
    assert set(asked["round"] % 3) == {0}
    candidates = results["candidates"]
    assert candidates[candidates["tier"] == "tier2"]["feasible"].all()


def test_who_comes_too_late_has_no_say_in_the_search(tiny_config: Make) -> None:
    config = federated(tiny_config(devices=DevicesConfig(deadline_s=1e-9)))
    world = build_world(config)
    stage = stages_of(world, TierSearchStage)[0]
    stepper = Stepper(stage, world, supernet_state(world))
    stepper.step()
    stepper.step()
    assert {r.status for result in stepper.results for r in result.reports if r.client_id is not None} == {"timed_out"}
    history = stage._searcher(stepper.state).history
    assert history
    assert all(math.isnan(s.metric) and not s.feasible for s in history)


def test_a_diverged_supernet_has_no_feasible_model_and_no_winner(tiny_config: Make) -> None:
    for scoring in ("central", "federated"):
        config = tiny_config()
        config.method.search.scoring = scoring
        world = build_world(config)
        weights = {n: torch.full_like(t, math.nan) if t.is_floating_point() else t
                   for n, t in supernet_state(world).weights("supernet").items()}  # fmt: skip
        stepper = Stepper(stages_of(world, TierSearchStage)[0], world, RunState().with_bag("supernet", weights))
        ended = stepper.finish()
        rows = [row for table, row in ended.rows if table == "candidates"]
        assert len(rows) == 6
        assert not any(row["feasible"] or row["on_front"] for row in rows)
        assert winner_of(ended.state, "tier1") is None


def empty_tier(world: World) -> tuple[list[float], int]:
    """Bounds of three tiers of which the middle one holds no model, and how many the lowest holds."""
    costs = sorted({world.cost_table.cost(a) for a in world.space.enumerate()})
    lowest = costs[2]
    models = sum(world.cost_table.cost(a) <= lowest for a in world.space.enumerate())
    return [lowest, (lowest + costs[3]) / 2, costs[-1]], models


@pytest.mark.parametrize("scoring", ["central", "federated"])
@pytest.mark.parametrize("searcher", ["nsga2", "random"])
def test_a_tier_without_models_and_one_with_few_end_cleanly(tiny_config: Make, scoring: str, searcher: str) -> None:
    bounds, models = empty_tier(build_world(tiny_config()))
    config = tiny_config(tiers=TiersConfig(count=3, upper_bounds=bounds))
    config.method.search = replace(config.method.search, scoring=scoring, searcher=searcher, budget=12)
    results = run(config)
    assert 1 < models < 12
    candidates = results["candidates"]
    assert candidates["tier"].value_counts().to_dict() == {"tier1": models, "tier3": 12}
    assert len(set(candidates["architecture"])) == len(candidates)
    stages = set(results["rounds"]["stage"])
    assert {"fine_tuned/tier1", "fine_tuned/tier3", "rand_init/tier1"} <= stages
    assert not any(stage.endswith("/tier2") for stage in stages)
    assert set(results["models"]["tier"]) == {"tier1", "tier3"}
    assert set(results["evaluations"]["tier"]) - {"server"} == {"tier1", "tier3"}
    assert results["runs"]["status"].tolist() == ["done"]


def test_a_tier_without_clients_is_searched_by_the_server_and_not_fine_tuned(tiny_config: Make) -> None:
    config = tiny_config(tiers=TiersConfig(count=2, paths=2000, clients=[0] * 8))
    results = run(config)
    assert set(results["models"]["tier"]) == {"tier1", "tier2"}
    assert "fine_tuned/tier2" not in set(results["rounds"]["stage"])
    evaluations = results["evaluations"]
    clients = evaluations[evaluations["client_id"].notna()]
    assert set(clients["tier"]) == {"tier1"}


# -- stage 3: fine-tuning, rand-init, evaluation ----------------------------------------------------------------------


def test_fine_tuning_begins_with_the_supernets_slices_and_rand_init_with_fresh_weights(tiny_config: Make) -> None:
    world = build_world(tiny_config())
    fine_tuned, _, rand_init, _ = stages_of(world, SubnetStage)
    state = supernet_state(world).with_data("winners", {"tier1": "0-2-3"})
    begun = fine_tuned.begin(state)
    names = world.space.slices((0, 2, 3))
    tuned = begun.weights("tier1-fine_tuned")
    assert set(tuned) == set(names)
    assert all(torch.equal(tuned[n], state.weights("supernet")[n]) for n in names)
    fresh = rand_init.begin(state).weights("tier1-rand_init")
    assert set(fresh) == set(names)
    assert not torch.equal(fresh["fixed.stem.conv.weight"], tuned["fixed.stem.conv.weight"])
    again = rand_init.begin(supernet_state(world, 2).with_data("winners", {"tier1": "0-2-3"}))
    assert all(torch.equal(fresh[n], again.weights("tier1-rand_init")[n]) for n in names)


def test_only_clients_of_the_tier_and_above_take_part(tiny_config: Make) -> None:
    config = tiny_config()
    config.method.finetune.rounds = 4
    results, world = run(config), build_world(config)
    clients = results["clients"]
    tuned = clients[clients["stage"] == "fine_tuned/tier2"]
    assert len(tuned) == 8
    assert set(tuned["client_id"]) <= set(world.eligible_by_tier[1].tolist())
    assert set(tuned["tier"]) == {"tier2"}
    rates = results["rounds"].query("stage == 'fine_tuned/tier2'")["lr"].tolist()
    assert rates[0] == 0.01
    assert rates[-1] == pytest.approx(0.001)


def test_the_final_evaluation_measures_every_model_on_every_client_of_its_tier(tiny_config: Make) -> None:
    config = tiny_config()
    results, world = run(config), build_world(config)
    rows = results["evaluations"]
    rows = rows[rows["stage"] == "evaluation"]
    for tier in range(2):
        own = sorted(np.flatnonzero(world.tier_of_client == tier).tolist())
        for model in ("supernet_init", "fine_tuned", "rand_init"):
            part = rows[(rows["tier"] == f"tier{tier + 1}") & (rows["model"] == model)]
            central = part[part["client_id"].isna()]
            assert sorted(zip(central["split"], central["metric"], central["samples"], strict=True)) == [
                ("test", "accuracy", 80),
                ("test", "loss", 80),
                ("validation", "accuracy", 32),
                ("validation", "loss", 32),
            ]
            clients = part[part["client_id"].notna() & (part["metric"] == "accuracy")]
            assert sorted(clients["client_id"]) == own
            assert set(clients["split"]) == {"test"}
            assert set(clients["samples"]) == {10}


def test_the_kept_model_scores_what_was_recorded(tiny_config: Make) -> None:
    config = tiny_config()
    results, world = run(config), build_world(config)
    worker = Worker(world.spec)
    recorded = results["evaluations"]
    for name in ("tier1-fine_tuned", "tier2-supernet_init", "tier2-rand_init"):
        tensors, card = load_model(results.paths, name)
        tier, _, model = name.partition("-")
        architecture = parse_architecture(card["architecture"])
        assert card["macs"] == world.macs_table.cost(architecture)
        assert card["parameters"] == sum(p.numel() for p in world.space.build_subnet(architecture).parameters())
        rows = recorded[(recorded["tier"] == tier) & (recorded["model"] == model) & recorded["client_id"].isna()]
        (value,) = rows[(rows["split"] == "test") & (rows["metric"] == "accuracy")]["value"]
        assert accuracy(world, worker, architecture, tensors) == pytest.approx(value)


def accuracy(world: World, worker: Worker, architecture: Architecture, tensors: dict[str, Tensor]) -> float:
    module = world.space.build_subnet(architecture)
    module.load_state_dict(tensors)
    module.eval()
    with worker.data.reading_test(), torch.no_grad():
        x, y = worker.central_data("test")
        value: float = (module(x).argmax(1) == y).float().mean().item()
    return value


def test_no_rounds_of_fine_tuning_evaluate_the_supernets_weights(tiny_config: Make) -> None:
    config = tiny_config()
    config.method.finetune.rounds = 0
    results = run(config)
    rows = results["evaluations"]
    rows = rows[rows["stage"] == "evaluation"]
    key = ["tier", "client_id", "split", "metric"]

    def values(model: str) -> list[Any]:
        part = rows[rows["model"] == model].sort_values(key, key=lambda column: column.astype(str))
        return [tuple(r) for r in part[[*key, "value", "samples"]].to_numpy().tolist()]

    assert values("fine_tuned") == values("supernet_init")
    assert len(values("fine_tuned")) > 10
    assert not any(s.startswith("fine_tuned") for s in results["rounds"]["stage"])


def test_no_rounds_of_rand_init_leave_it_out(tiny_config: Make) -> None:
    config = tiny_config()
    config.method.rand_init.rounds = 0
    results = run(config)
    assert set(results["evaluations"].query("stage == 'evaluation'")["model"]) == {"supernet_init", "fine_tuned"}
    assert len(results["models"]) == 4
    bags = load_checkpoint(results.paths.checkpoint).bags
    assert sorted(bags) == ["supernet", "tier1-fine_tuned", "tier2-fine_tuned"]


def test_no_rounds_of_supernet_training_search_the_fresh_weights(tiny_config: Make) -> None:
    config = tiny_config()
    config.method.train.rounds = 0
    results = run(config)
    assert len(results["models"]) == 6
    assert "supernet" not in set(results["rounds"]["stage"])


def test_evaluate_every_scores_on_validation_data(tiny_config: Make) -> None:
    world = build_world(tiny_config())
    stage = stages_of(world, SubnetStage)[0]
    stage.config.evaluate_every = 2
    state = stage.begin(supernet_state(world).with_data("winners", {"tier1": "0-2-3"}))
    scored = [stage.plan(replace(state, round=r)).assignments[-1].task for r in range(4)]
    assert [type(task) for task in scored] == [ScoreSubnet, TrainSubnet, ScoreSubnet, TrainSubnet]
    assert scored[0].split == "validation"


def test_fedavg_trains_one_architecture(tiny_config: Make) -> None:
    method = FedAvgConfig(architecture="0-1-2", train=TrainingConfig(rounds=2, clients_per_round=3, batch_size=16))
    results = run(tiny_config(method=method))
    assert set(results["clients"].query("stage != 'evaluation'")["architecture"]) == {"0-1-2"}
    assert results["rounds"]["clients_planned"].tolist()[:2] == [3, 3]
    assert results["models"]["architecture"].tolist() == ["0-1-2"]


# -- what cannot run is refused before anything is written ------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("train.communication.value", 1e-4, "below one operator per layer"),
        ("train.communication.unit", "stones", "unknown unit 'stones'"),
        ("train.paths", "greddy", "unknown path sampler 'greddy'"),
        ("train.weighting", "opq", "method.train.weighting: unknown weighting rule 'opq'"),
        ("train.clients_per_round", 9, "method.train.clients_per_round=9"),
        ("train.min_contributors", 5, "method.train.min_contributors=5"),
        ("search.scoring", "oracle", "method.search.scoring='oracle'"),
        ("search.searcher", "nsga3", "unknown searcher 'nsga3'"),
        ("search.budget", 0, "budget is 0"),
        ("search.budgets", [5], "method.search.budgets has 1 values for 2 tiers"),
        ("search.candidates_per_task", 0, "method.search.candidates_per_task=0"),
        ("search.scoring_rounds", 0, "method.search.scoring_rounds=0"),
        ("search.clients_per_round", 0, "method.search.clients_per_round=0"),
        ("search.validation_share", 0.0, "validation_share is 0"),
        ("finetune.lr", -1.0, "method.finetune.lr=-1.0"),
        ("rand_init.schedule", "linear", "method.rand_init.schedule='linear'"),
    ],
)
def test_a_method_that_cannot_run_is_refused_in_one_line(
    tiny_config: Make, path: str, value: Any, message: str
) -> None:
    config = tiny_config()
    target = config.method
    *parts, last = path.split(".")
    for part in parts:
        target = getattr(target, part)
    assert hasattr(target, last)
    setattr(target, last, value)
    with pytest.raises(ValueError, match=message) as caught:
        run(config)
    assert "\n" not in str(caught.value)
    assert not Path(config.results).exists()


def test_a_search_needs_validation_samples(tiny_config: Make) -> None:
    data = DataConfig(num_clients=8, train_samples=320, test_samples=80, validation_share=0.0)
    with pytest.raises(ValueError, match=r"data.validation_share=0 leaves no validation samples"):
        run(tiny_config(data=data))


def test_no_method_is_refused(tiny_config: Make) -> None:
    with pytest.raises(ValueError, match="no method was configured"):
        run(tiny_config(method=None))
