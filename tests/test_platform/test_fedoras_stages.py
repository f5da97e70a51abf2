"""FedorAS's training stages on a tiny federation: what they plan, what they send, what they keep, and how they end."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.clients.scoring import ScoreSubnet, ScoreSubnets
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import BudgetConfig, RunConfig, SeedsConfig, TiersConfig
from fedloom.platform.federation.method import Stage
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods import fedoras
from fedloom.platform.methods.fedoras import CommunicationConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.results.checkpoint import load_checkpoint, load_model
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.operator_choice import OperatorChoiceSpace
from fedloom.platform.spaces.slices import Architecture, Subspace, parse_architecture

Make = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_config_in: Make, results_of: Any) -> Any:
    """One whole run, for all tests that only look at it."""
    return results_of(tiny_config_in(tmp_path_factory.mktemp("fedoras")))


def stage_of(world: World, name: str) -> Any:
    """The run's stage of that name."""
    return next(stage for stage in build_stages(world) if stage.name == name)


def supernet_state(world: World, seed: int = 1) -> RunState:
    return RunState().with_group("supernet", world.space.initial_weights(torch_stream(seed, "test")))


# -- stage 1: the supernet --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "least"),
    [
        (BudgetConfig("static"), 1.0),
        (BudgetConfig("schedule", factors=[1.0, 0.1]), 0.1),
        (BudgetConfig("trace", states=[["idle", 1.0, 1.0], ["never", 0.01, 0.0]]), 1.0),
    ],
)
def test_a_round_of_the_least_budget_has_a_path_or_the_run_is_refused(
    tiny_config: Make, monkeypatch: pytest.MonkeyPatch, budget: BudgetConfig, least: float
) -> None:
    seen = list[float]()
    original = fedoras.sample_subspace

    def watched(*arguments: Any) -> Subspace:
        seen.append(arguments[-1])
        return original(*arguments)

    monkeypatch.setattr(fedoras, "sample_subspace", watched)
    world = build_world(tiny_config(tiers=TiersConfig(count=2, paths=100, budget=budget)))
    build_stages(world)
    cheapest = [costs.cost(world.space.cheapest(costs)) for costs in world.costs_by_tier]
    assert seen == [max(least * tier.upper, low) for tier, low in zip(world.tiers, cheapest, strict=True)]


def bytes_of_kept(world: World, kept: list[tuple[int, ...]]) -> int:
    """All tensors of the fixed part and of every kept operator."""
    used = {(layer, option) for layer, options in enumerate(kept) for option in options}
    total = 0
    for name, tensor in world.space.build_supernet().state_dict().items():
        parts = name.split(".")
        if parts[0] == "fixed" or (int(parts[1]), int(parts[3])) in used:
            total += tensor.numel() * tensor.element_size()
    return total


def test_every_row_of_the_supernet_stage_counts_the_bytes_of_its_subspace(finished: Any) -> None:
    world = finished.world
    assert isinstance(world.space, OperatorChoiceSpace)
    clients = finished["clients"]
    rows = clients[clients["stage"] == "supernet"]
    assert len(rows) == 8
    limit = 0.5 * world.space.num_parameters.supernet
    for row in rows.to_dict("records"):
        kept = [tuple(map(int, layer.split(","))) for layer in row["subspace"].split("/")]
        assert row["bytes_down"] == row["bytes_up"] == bytes_of_kept(world, kept)
        assert row["parameters"] <= limit
        assert all(3 in layer for layer in kept), "the identity is free and always travels"
    rounds = finished["rounds"]
    first = rounds[rounds["stage"] == "supernet"].iloc[0]
    assert first["bytes_down"] == rows[rows["round"] == 0]["bytes_down"].sum()
    assert len(set(rows["subspace"])) > 1, "every client has a subspace of its own"


def test_an_operator_with_too_few_contributors_keeps_its_weights(tiny_config: Make, step_through: Any) -> None:
    config = tiny_config()
    config.method.train.communication = CommunicationConfig("fraction", 0.4)
    world = build_world(config)
    stepper = step_through(world, stage_of(world, "supernet"), RunState())
    before = dict(stepper.state.weights("supernet"))
    stepper.step()
    after = stepper.state.weights("supernet")
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
    tiny_config: Make, step_through: Any, budget: BudgetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tiers=TiersConfig(count=2, paths=2000, budget=budget))
    config.method.train.rounds = 3
    config.method.train.batch_size = 4
    world = build_world(config)
    drawn: list[tuple[float, float]] = []
    sampler_of = fedoras.path_sampler

    def recording(name: str, table: Any, kept: Any, limit: float) -> Any:
        sampler = sampler_of(name, table, kept, limit)

        class Recording:
            def sample(self, rng: np.random.Generator) -> Architecture:
                path = sampler.sample(rng)
                drawn.append((world.cost_table.cost(path), limit))
                return path

        return Recording()

    monkeypatch.setattr(fedoras, "path_sampler", recording)
    stage = stage_of(world, "supernet")
    limits = {
        a.task.network.budget
        for r in range(3)
        for a in stage.plan(replace(stage.begin(RunState()), round=r)).assignments
        if isinstance(a.task, Train)
    }
    step_through(world, stage, RunState()).finish()
    assert len(drawn) > 100
    assert all(cost <= limit for cost, limit in drawn)
    assert {limit for _, limit in drawn} == limits
    uppers = {t.upper for t in world.tiers}
    assert limits & uppers
    assert min(limits) < min(uppers) or min(limits) == world.cost_table.smallest


def test_a_round_has_a_subspace_per_client_or_one(tiny_config: Make) -> None:
    def subspaces(one_per_round: bool, rounds: int = 2) -> list[set[Subspace]]:
        config = tiny_config(tiers=TiersConfig(count=1, paths=100))
        config.method.train.communication.one_per_round = one_per_round
        stage = stage_of(build_world(config), "supernet")
        plans = [stage.plan(replace(stage.begin(RunState()), round=r)) for r in range(rounds)]
        return [{a.task.network.subspace for a in plan.assignments if a.client_id is not None} for plan in plans]

    assert all(len(found) > 1 for found in subspaces(False))
    first, second = subspaces(True)
    assert len(first) == len(second) == 1
    assert first != second


def test_the_top_tier_may_train_what_the_lower_tier_may_not(tiny_config: Make) -> None:
    world = build_world(tiny_config())
    stage = stage_of(world, "supernet")
    clients = [a for a in stage.plan(stage.begin(RunState())).assignments if a.client_id is not None]
    assert {a.task.network.budget for a in clients} == {tier.upper for tier in world.tiers}
    assert all(a.task.network.budget == world.tier(a.client_id).upper for a in clients)


def test_plans_are_pure(tiny_config: Make) -> None:
    world = build_world(tiny_config())
    stage = stage_of(world, "supernet")
    state = replace(stage.begin(RunState()), round=1)
    assert stage.plan(state) == stage.plan(state)
    other = stage_of(build_world(tiny_config()), "supernet")
    assert other.plan(state) == stage.plan(state)


# -- stage 3: fine-tuning, rand-init, evaluation ----------------------------------------------------------------------


def test_fine_tuning_begins_with_the_supernets_slices_and_rand_init_with_fresh_weights(tiny_config: Make) -> None:
    world = build_world(tiny_config())
    state = supernet_state(world).with_data("winners", {"tier1": "0-2-3"})
    begun = stage_of(world, "fine_tuned/tier1").begin(state)
    names = world.space.slices((0, 2, 3))
    tuned = begun.weights("tier1-fine_tuned")
    assert set(tuned) == set(names)
    assert all(torch.equal(tuned[n], state.weights("supernet")[n]) for n in names)
    rand_init: Stage = stage_of(world, "rand_init/tier1")
    fresh = rand_init.begin(state).weights("tier1-rand_init")
    assert set(fresh) == set(names)
    assert not torch.equal(fresh["fixed.stem.conv.weight"], tuned["fixed.stem.conv.weight"])
    again = rand_init.begin(supernet_state(world, 2).with_data("winners", {"tier1": "0-2-3"}))
    assert all(torch.equal(fresh[n], again.weights("tier1-rand_init")[n]) for n in names)


def test_only_clients_of_the_tier_and_above_take_part(tiny_config: Make, results_of: Any) -> None:
    config = tiny_config()
    config.method.finetune.rounds = 4
    results = results_of(config)
    clients = results["clients"]
    tuned = clients[clients["stage"] == "fine_tuned/tier2"]
    assert len(tuned) == 8
    assert set(tuned["client_id"]) <= set(results.world.eligible_by_tier[1].tolist())
    assert set(tuned["tier"]) == {"tier2"}
    rates = results["rounds"].query("stage == 'fine_tuned/tier2'")["lr"].tolist()
    assert rates[0] == 0.01
    assert rates[-1] == pytest.approx(0.001)


def test_the_final_evaluation_measures_every_model_on_every_client_of_its_tier(finished: Any) -> None:
    rows = finished["evaluations"]
    rows = rows[rows["stage"] == "evaluation"]
    for tier in range(2):
        own = sorted(np.flatnonzero(finished.world.tier_of_client == tier).tolist())
        for model in ("supernet_init", "fine_tuned", "rand_init"):
            part = rows[(rows["tier"] == f"tier{tier + 1}") & (rows["model"] == model)]
            central = part[part["client_id"].isna() & (part["metric"] != "confusion")]
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


@pytest.mark.parametrize("name", ["tier1-fine_tuned", "tier2-supernet_init", "tier2-rand_init"])
def test_the_kept_model_scores_what_was_recorded(finished: Any, name: str) -> None:
    world, recorded = finished.world, finished["evaluations"]
    tensors, card = load_model(finished.paths, name)
    tier, _, model = name.partition("-")
    architecture = parse_architecture(card["architecture"])
    assert card["macs"] == world.macs_table.cost(architecture)
    assert card["parameters"] == sum(p.numel() for p in world.space.build_subnet(architecture).parameters())
    rows = recorded[(recorded["tier"] == tier) & (recorded["model"] == model) & recorded["client_id"].isna()]
    (value,) = rows[(rows["split"] == "test") & (rows["metric"] == "accuracy")]["value"]
    assert accuracy(world, architecture, tensors) == pytest.approx(value)


def test_a_reported_slice_scores_as_it_did_in_the_search(finished: Any) -> None:
    """With the statistics that were estimated for it; averaged ones would give another score."""
    slices = finished["evaluations"].query("model == 'supernet_init' and split == 'validation' and metric == 'loss'")
    searched = finished["candidates"].set_index(["tier", "architecture"])["loss"]
    assert len(slices) == 2
    for row in slices.itertuples():
        assert row.value == pytest.approx(searched[row.tier, row.architecture], rel=1e-6)


def accuracy(world: World, architecture: Architecture, tensors: dict[str, Tensor]) -> float:
    """On the whole test set, without what a worker does."""
    module = world.space.build_subnet(architecture)
    module.load_state_dict(tensors)
    module.eval()
    worker = Worker(world.spec)
    with worker.data.reading_test(), torch.no_grad():
        x, y = worker.central_data("test").tensors()
        value: float = (module(x).argmax(1) == y).float().mean().item()
    return value


def test_no_rounds_of_fine_tuning_evaluate_the_supernets_weights(tiny_config: Make, results_of: Any) -> None:
    config = tiny_config()
    config.method.finetune.rounds = 0
    results = results_of(config)
    rows = results["evaluations"]
    rows = rows[rows["stage"] == "evaluation"]
    key = ["tier", "client_id", "split", "metric"]

    def values(model: str) -> list[Any]:
        part = rows[rows["model"] == model].sort_values(key, key=lambda column: column.astype(str))
        return [tuple(r) for r in part[[*key, "value", "samples"]].to_numpy().tolist()]

    assert values("fine_tuned") == values("supernet_init")
    assert len(values("fine_tuned")) > 10
    assert not any(s.startswith("fine_tuned") for s in results["rounds"]["stage"])


def test_no_rounds_of_rand_init_leave_it_out(tiny_config: Make, results_of: Any) -> None:
    config = tiny_config()
    config.method.rand_init.rounds = 0
    results = results_of(config)
    assert set(results["evaluations"].query("stage == 'evaluation'")["model"]) == {"supernet_init", "fine_tuned"}
    assert len(results["models"]) == 4
    groups = load_checkpoint(results.paths.checkpoint).groups
    slices = ["tier1-supernet_init", "tier2-supernet_init"]
    assert sorted(groups) == sorted(["supernet", "tier1-fine_tuned", "tier2-fine_tuned", *slices])


def test_no_rounds_of_supernet_training_search_the_fresh_weights(tiny_config: Make, results_of: Any) -> None:
    config = tiny_config()
    config.method.train.rounds = 0
    results = results_of(config)
    assert len(results["models"]) == 6
    assert "supernet" not in set(results["rounds"]["stage"])


# -- what is watched on validation data -------------------------------------------------------------------------------


def test_evaluate_every_scores_on_validation_data_and_after_the_last_round(
    tiny_config: Make, step_through: Any
) -> None:
    config = tiny_config()
    config.method.finetune = replace(config.method.finetune, rounds=4, evaluate_every=2)
    world = build_world(config)
    state = supernet_state(world).with_data("winners", {"tier1": "0-2-3"})
    stepper = step_through(world, stage_of(world, "fine_tuned/tier1"), state)
    stepper.finish()
    last = [plan.assignments[-1].task for plan in stepper.plans]
    assert [type(task) for task in last] == [ScoreSubnet, Train, ScoreSubnet, Train]
    assert last[0].split == "validation"
    evaluations = [merged.evaluation for merged in stepper.merged]
    assert evaluations[:3] == [None] * 3
    assert [a.task for a in evaluations[3].plan.assignments] == [last[0]]


def test_the_supernet_is_scored_before_its_rounds_and_after_the_last(finished: Any) -> None:
    rows = finished["evaluations"]
    rows = rows[(rows["stage"] == "supernet") & (rows["metric"] == "accuracy")]
    assert sorted(rows["round"]) == [0, 0, 2, 2], "two paths, every second round; two rounds were trained"
    assert set(rows["split"]) == {"validation"}
    paths = [set(rows[rows["round"] == round_]["architecture"]) for round_ in (0, 2)]
    assert paths[0] == paths[1], "the same paths every time"
    # The last score is that of the weights that the next stages begin with.
    worker, weights = Worker(finished.world.spec), load_checkpoint(finished.paths.checkpoint).groups["supernet"].tensors
    for row in rows[rows["round"] == 2].to_dict("records"):
        task = ScoreSubnets((parse_architecture(row["architecture"]),), "afterwards")
        outcome = task.run(worker, Assignment("supernet", 2, None, "server", task), weights)
        assert {m.metric: m.value for m in outcome.measurements}["accuracy"] == row["value"]


def test_the_scored_paths_do_not_depend_on_the_searchs_seed(tiny_config: Make) -> None:
    """They may end the training early, and runs with other seeds of the search share the trained supernet."""
    worlds = [build_world(tiny_config(seeds=SeedsConfig(search=seed))) for seed in (1, 2)]
    first, second = (stage_of(world, "supernet").score(supernet_state(world)) for world in worlds)
    assert first == second


def test_without_evaluate_every_nothing_is_scored(tiny_config: Make, step_through: Any) -> None:
    config = tiny_config()
    config.method.train.evaluate_every = 0
    world = build_world(config)
    stepper = step_through(world, stage_of(world, "supernet"), RunState())
    stepper.finish()
    assert all(a.client_id is not None for plan in stepper.plans for a in plan.assignments)
    assert [merged.evaluation for merged in stepper.merged] == [None, None]


# -- what cannot run is refused before anything is written ------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("train.communication.value", 1e-4, "below one operator per layer"),
        ("train.communication.unit", "stones", "method.train.communication.unit=stones: must be one of fraction, par"),
        (
            "train.paths",
            "greddy",
            r"method.train.paths=greddy: must be one of greedy, rejection; did you mean",
        ),
        ("train.weighting", "opq", "method.train.weighting: unknown weighting rule 'opq'"),
        ("train.clients_per_round", 9, "method.train.clients_per_round=9"),
        ("train.min_contributors", 5, "method.train.min_contributors=5"),
        ("search.scoring", "oracle", "method.search.scoring=oracle: must be one of central, federated"),
        ("search.searcher", "nsga3", "unknown searcher 'nsga3': known are evolution, nsga2, random, or module:name"),
        ("search.budget", 0, "method.search.budget=0: must be at least 1"),
        ("search.budgets", [5], "method.search.budgets has 1 values for 2 tiers"),
        ("search.candidates_per_task", 0, "method.search.candidates_per_task=0"),
        ("search.scoring_rounds", 0, "method.search.scoring_rounds=0"),
        ("search.clients_per_round", 0, "method.search.clients_per_round=0"),
        ("search.validation_share", 0.0, r"method.search.validation_share=0\.0: must be above 0 and at most 1"),
        ("finetune.lr", -1.0, "method.finetune.lr=-1.0: must be greater than 0"),
        ("rand_init.schedule", "linear", "method.rand_init.schedule=linear: must be one of fixed, cosine, step, steps"),
    ],
)
def test_a_method_that_cannot_run_is_refused_in_one_line(
    tiny_config: Make, path: str, value: Any, message: str, results_of: Any
) -> None:
    config = tiny_config()
    target = config.method
    *parts, last = path.split(".")
    for part in parts:
        target = getattr(target, part)
    assert hasattr(target, last)
    setattr(target, last, value)
    with pytest.raises(ValueError, match=message) as caught:
        results_of(config)
    assert "\n" not in str(caught.value)
    assert not Path(config.results).exists()


def test_a_search_needs_validation_samples(tiny_config: Make, results_of: Any) -> None:
    data = DataConfig(num_clients=8, train_samples=320, test_samples=80, validation_share=0.0)
    with pytest.raises(ValueError, match=r"data.validation_share=0 leaves no validation samples"):
        results_of(tiny_config(data=data))


def test_no_method_is_refused(tiny_config: Make, results_of: Any) -> None:
    with pytest.raises(ValueError, match="no method was configured: choose method=fedoras or method="):
        results_of(tiny_config(method=None))
