"""Several tasks at once: the labels of every tier, a classifier per task, and who receives which."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import BudgetConfig, RunConfig, TiersConfig
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.results.checkpoint import load_model
from fedloom.platform.spaces.operator_choice import OperatorChoiceSpace
from fedloom.platform.spaces.space_config import SpaceConfig
from tests.test_platform.test_spaces_operator_choice import tensors_of

Make = Callable[..., RunConfig]
PAIRS = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def of_tasks(config: RunConfig, **tiers: Any) -> RunConfig:
    """The configuration with clients of the lower tier that know pairs of digits."""
    return replace(
        config,
        data=replace(config.data, label_sets={"pairs": PAIRS}),
        space=replace(config.space, heads=[5, 10]),
        tiers=replace(config.tiers, tasks=["pairs", "all"], **tiers),
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_config_in: Make, results_of: Any) -> Any:
    return results_of(of_tasks(tiny_config_in(tmp_path_factory.mktemp("tasks"))))


def classifiers(world: World) -> list[set[str]]:
    """The tensors of each task's classifier."""
    space = world.space
    assert isinstance(space, OperatorChoiceSpace)
    return [set(tensors_of(space, (len(space.options) - 1, task))) for task in range(space.num_tasks)]


def test_a_supernet_has_a_classifier_for_each_task(tiny_config: Make) -> None:
    one, two = (build_world(config).space for config in (tiny_config(), of_tasks(tiny_config())))
    assert isinstance(one, OperatorChoiceSpace)
    assert isinstance(two, OperatorChoiceSpace)
    assert two.num_architectures == 2 * one.num_architectures
    width = one.build_supernet().get_parameter("fixed.classifier.weight").shape[1]
    # 10 classes in the fixed part become 5 and 10 in options of the last decision.
    assert two.num_parameters.supernet - one.num_parameters.supernet == 5 * (width + 1)
    table = two.cost_table("parameters")
    assert table.options[-1] == (5 * (width + 1), 10 * (width + 1))
    for task, classes in enumerate((5, 10)):
        path = (*two.smallest[:-1], task)
        assert two.task_of(path) == task
        assert two.build_subnet(path).state_dict()[f"layers.3.ops.{task}.weight"].shape == (classes, width)
        assert two.cost_table("macs").cost(path) == one.cost_table("macs").cost(path[:-1]) + (classes - 10) * width


def test_a_client_neither_receives_nor_changes_another_tasks_classifier(tiny_config: Make, step_through: Any) -> None:
    world = build_world(of_tasks(tiny_config()))
    stage = next(s for s in build_stages(world) if s.name == "supernet")
    stepper = step_through(world, stage, RunState())
    own = classifiers(world)
    sizes = world.space.cost_table("bytes")
    trained: set[int] = set()
    for _ in range(2):
        before = dict(stepper.state.weights("supernet"))
        stepper.step()
        clients = [a for a in stepper.plans[-1].assignments if a.client_id is not None]
        tasks = [int(world.tier_of_client[a.client_id]) for a in clients]  # tier 1 has task 0, tier 2 task 1
        for assignment, task in zip(clients, tasks, strict=True):
            network = assignment.task.network
            assert network.subspace[-1] == (task,)
            assert set(network.held(world.space)) & (own[0] | own[1]) == own[task]
        for report in stepper.results[-1].client_results:
            if report.client_id is not None:
                kept = tuple(tuple(map(int, row.split(","))) for row in report.subspace.split("/"))
                assert report.bytes_down == sizes.fixed + sum(
                    sizes.options[d][o] for d, row in enumerate(kept) for o in row
                )
        after = stepper.state.weights("supernet")
        for task in (0, 1):
            changed = any(not torch.equal(before[name], after[name]) for name in own[task])
            assert changed == (tasks.count(task) >= 2), "averages need two clients of the task"
            trained |= {task} if changed else set()
    assert trained, "nothing was seen to change"


def test_alone_a_task_leaves_the_others_classifier_as_it_is(tiny_config: Make, step_through: Any) -> None:
    world = build_world(of_tasks(tiny_config(), clients=[0] * 8))
    stage = next(s for s in build_stages(world) if s.name == "supernet")
    stepper = step_through(world, stage, RunState())
    before = dict(stepper.state.weights("supernet"))
    stepper.step()
    after = stepper.state.weights("supernet")
    pairs, digits = classifiers(world)
    assert all(torch.equal(before[name], after[name]) for name in digits)
    assert not any(torch.equal(before[name], after[name]) for name in pairs)


def test_every_tiers_model_is_of_its_task_and_trained_and_scored_with_its_labels(finished: Any) -> None:
    world = finished.world
    for index, name in enumerate(("tier1", "tier2")):
        own = set(np.flatnonzero(world.tier_of_client == index).tolist())
        assert set(world.eligible_by_tier[index].tolist()) == own
        for stage in ("fine_tuned", "rand_init"):
            assert set(finished.clients(f"{stage}/{name}")["client_id"]) <= own
        candidates = finished["candidates"].query("tier == @name")
        assert {text.split("-")[-1] for text in candidates["architecture"]} == {str(index)}
    scores = finished["evaluations"].query("stage == 'evaluation' and metric == 'accuracy'")
    assert set(scores["tier"]) == {"tier1", "tier2"}


def test_labels_are_those_of_the_task_that_is_trained_or_scored(tiny_config: Make) -> None:
    world = build_world(of_tasks(tiny_config()))
    worker = Worker(world.spec)
    data = worker.client_data(0, "train")
    path = world.space.smallest
    assert torch.equal(worker.in_task(data, (*path[:-1], 1))[1], data[1])
    assert torch.equal(worker.in_task(data, (*path[:-1], 0))[1], data[1] // 2)
    kept = tuple((option,) for option in path[:-1])
    assert torch.equal(worker.in_task(data, (*kept, (0,)))[1], data[1] // 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tiers": {"tasks": ["pairs"]}}, "tiers.tasks has 1 values for 2 tiers: give one per tier"),
        (
            {"tiers": {"tasks": ["pairs", "odd"]}},
            "tiers.tasks: digits has no label set 'odd': known are all, pairs; data.label_sets.NAME=[...] adds one",
        ),
        (
            {"tiers": {"tasks": ["pairs", "pairs"]}},
            "space.heads=[5, 10]: tasks have 5 (pairs) classes; set space.heads=[5]",
        ),
        (
            {"tiers": {"tasks": None}},
            "space.heads=[5, 10] is for several tasks: give each tier's task in tiers.tasks",
        ),
        (
            {"space": {"heads": [10, 5]}},
            "space.heads=[10, 5]: tasks have 5 (pairs), 10 (all) classes; set space.heads=[5, 10]",
        ),
        (
            {"space": {"heads": None}},
            "space.heads=null: tasks have 5 (pairs), 10 (all) classes; set space.heads=[5, 10]",
        ),
        ({"space": {"heads": [5, 1]}}, "heads=[5, 1]: give the classes of every task, each at least 2"),
        (
            {"data": {"label_sets": {"pairs": [0, 1]}}},
            "data.label_sets.pairs has 2 values: give the coarser class of each of the 10 classes",
        ),
        (
            {"data": {"label_sets": {"pairs": [0, 0, 2, 2, 3, 3, 4, 4, 5, 5]}}},
            "data.label_sets.pairs has the coarser classes [0, 2, 3, 4, 5]: give two or more, numbered 0, 1, ...",
        ),
        (
            {"data": {"label_sets": {"all": PAIRS}}},
            "data.label_sets.all: digits already has label sets named all; choose another",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(
    tiny_config: Make, refused: Callable[[RunConfig], str], changes: dict[str, dict[str, Any]], message: str
) -> None:
    config = of_tasks(tiny_config())
    parts = {part: replace(getattr(config, part), **values) for part, values in changes.items()}
    assert refused(replace(config, **parts)) == message


def test_other_methods_and_spaces_refuse_several_tasks(
    elastic_config: Make, tiny_config: Make, refused: Callable[[RunConfig], str]
) -> None:
    given = {"tiers": TiersConfig(count=2, paths=2000, tasks=["pairs", "all"])}
    given["data"] = DataConfig(num_clients=8, train_samples=320, test_samples=80, label_sets={"pairs": PAIRS})
    said = refused(elastic_config(**given))
    assert said.startswith("tiers.tasks cannot use space resnet_elastic_small, which has no ")
    said = refused(replace(tiny_config(**given), space=SpaceConfig("resnet_elastic_small", heads=[5, 10])))
    assert "space resnet_elastic_small has no heads; it has " in said
    said = refused(of_tasks(tiny_config(method=FedAvgConfig())))
    assert said == "tiers.tasks: fedavg trains one task for all tiers; leave it out (null), or use fedoras"


def test_all_tiers_may_have_the_same_coarser_labels(tiny_config: Make, step_through: Any) -> None:
    config = of_tasks(tiny_config())
    config = replace(config, tiers=replace(config.tiers, tasks=["pairs"] * 2), space=replace(config.space, heads=[5]))
    world = build_world(config)
    assert world.eligible_by_tier[0].tolist() == list(range(8))
    worker = Worker(world.spec)
    data = worker.client_data(0, "train")
    assert torch.equal(worker.in_task(data, world.space.smallest)[1], data[1] // 2)
    stepper = step_through(world, next(s for s in build_stages(world) if s.name == "supernet"), RunState())
    stepper.step()
    assert stepper.state.weights("supernet")["layers.3.ops.0.weight"].shape[0] == 5


def test_a_kept_model_has_its_own_classifier_alone(finished: Any) -> None:
    for task, tier in enumerate(("tier1", "tier2")):
        tensors, card = load_model(finished.paths, f"{tier}-fine_tuned")
        assert card["architecture"].endswith(f"-{task}")
        assert set(tensors) & set().union(*classifiers(finished.world)) == classifiers(finished.world)[task]


def test_a_changing_budget_affords_the_cheapest_path_of_the_clients_task(tiny_config: Make, step_through: Any) -> None:
    """The cheapest path of all has the other task's smaller classifier."""
    config = of_tasks(tiny_config(), budget=BudgetConfig("schedule", factors=[0.05]))
    world = build_world(config)
    stepper = step_through(world, next(s for s in build_stages(world) if s.name == "supernet"), RunState())
    stepper.step()
    budgets = {a.task.network.budget for a in stepper.plans[0].assignments if a.client_id is not None}
    assert budgets == {costs.smallest for costs in world.costs_by_tier}


def test_label_sets_are_checked_without_tasks(tiny_config: Make, refused: Callable[[RunConfig], str]) -> None:
    config = tiny_config()
    said = refused(replace(config, data=replace(config.data, label_sets={"odd": [1, 2]})))
    assert said == "data.label_sets.odd has 2 values: give the coarser class of each of the 10 classes"
    said = refused(replace(config, data=replace(config.data, label_sets={"one": [0] * 10})))
    assert said == "data.label_sets.one has the coarser classes [0]: give two or more, numbered 0, 1, ..."
