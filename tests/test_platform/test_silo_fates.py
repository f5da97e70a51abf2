"""What becomes of silos in SPIDER: never heard, failed, and interrupted; the others shall not notice."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import fedloom.platform.runs.run as run_module
from fedloom.platform.averaging.average import WeightedSums
from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.evaluation import evaluate
from fedloom.platform.clients.execution import SerialExecutor
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import DevicesConfig, ExecutorConfig, FailuresConfig, RunConfig, TiersConfig
from fedloom.platform.federation.loop import InterruptedRunError, RunFailedError
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.silo_search import ArchitectureSearchConfig
from fedloom.platform.methods.silos import ScoreOwn, unpacked
from fedloom.platform.methods.spider import GainConfig, SpiderConfig, SpiderTrainingConfig, TrainSpider, stages
from fedloom.platform.results.checkpoint import load_checkpoint
from fedloom.platform.results.paths import find_run, list_runs
from fedloom.platform.results.status import read_status
from fedloom.platform.results.tables import TABLES, TIME_COLUMNS, read_table
from fedloom.platform.runs.run import Watcher, resume_run, start_run
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.darts import DartsSpace
from fedloom.platform.spaces.slices import Weights, subspace_id
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.device_files import write_device_table
from fedloom.tiers.devices import DeviceTable

SILOS = (0, 1, 2)
SHARED = "supernet"
Make = Callable[..., RunConfig]
TensorGroups = Mapping[str, Mapping[str, Tensor]]


@pytest.fixture(scope="module")
def worlds() -> dict[str, World]:
    """The worlds built so far: to split a space into tiers takes longer than a tiny run's rounds."""
    return {}


@pytest.fixture
def spider_config(
    tiny_config: Make, worlds: dict[str, World], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., RunConfig]:
    """Three silos with cells of one node; `train` and keywords of RunConfig change parts.

    `gains` are the epochs of those of the first two silos.
    """

    def remembered(config: RunConfig, *_costs: object) -> World:
        key = repr((config.data, config.space, config.tiers, config.devices))
        if key not in worlds:
            worlds[key] = build_world(config)
        return replace(worlds[key], config=config)

    monkeypatch.setattr(run_module, "build_world", remembered)

    def make(train: dict[str, Any] | None = None, gains: int = 0, **changes: Any) -> RunConfig:
        training = SpiderTrainingConfig(rounds=3, batch_size=16, evaluate_every=1, pull=0.1)
        method = SpiderConfig(
            train=replace(training, **(train or {})),
            search=ArchitectureSearchConfig(start=1, every=1),
            gains=GainConfig(epochs=gains, clients=2),
        )
        space, tiers = SpaceConfig("darts_s2_small", channels=4, nodes=1), TiersConfig(count=1, paths=100)
        config = tiny_config(**{"space": space, "tiers": tiers, "method": method, **changes})
        return replace(config, data=replace(config.data, num_clients=3, train_samples=72, validation_share=0.25))

    return make


def worker_of(world: World) -> Worker:
    """A fresh worker, but for the space, which does not change: to count its operators' costs takes a while."""
    worker = Worker(world.spec)
    worker.space = world.space
    return worker


def serial(world: World) -> SerialExecutor:
    return SerialExecutor(worker_of(world))


def world_of(config: RunConfig) -> World:
    """As runs build it here: once."""
    return run_module.build_world(config)


def elsewhere(config: RunConfig, name: str) -> RunConfig:
    return replace(config, results=str(Path(config.results).with_name(name)))


def rows_of(config: RunConfig, table: str, **where: object) -> pd.DataFrame:
    """The rows of the only run, without the columns that depend on when and where it ran."""
    frame = read_table(Path(config.results), table)
    for column, value in where.items():
        frame = frame[frame[column] == value]
    return frame.drop(columns=["experiment", "run_id", *TIME_COLUMNS[table]], errors="ignore").reset_index(drop=True)


def groups_of(config: RunConfig) -> TensorGroups:
    (paths,) = list_runs(Path(config.results))
    return {name: group.tensors for name, group in load_checkpoint(paths.checkpoint).groups.items()}


def same_bits(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def assert_same_groups(left: TensorGroups, right: TensorGroups) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not same_bits(left[name], right[name])] == []


def darts(world: World) -> DartsSpace:
    assert isinstance(world.space, DartsSpace)
    return world.space


def failing(task: type[Any], when: Callable[[Assignment], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the tasks of a kind raise for some assignments."""
    original = task.run

    def run(self: Any, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        if when(assignment):
            raise OSError("bad sector")
        outcome: ClientResult = original(self, worker, assignment, weights)
        return outcome

    monkeypatch.setattr(task, "run", run)


def tolerating(share: float) -> ExecutorConfig:
    return ExecutorConfig(kind="serial", failures=FailuresConfig(policy="tolerate", max_share=share))


# -- some silos per round ---------------------------------------------------------------------------------------------


def test_as_many_silos_take_part_as_are_configured_and_each_keeps_the_state_of_its_last_round(
    spider_config: Make,
) -> None:
    config = spider_config(train={"clients_per_round": 2, "min_contributors": 1})
    start_run(config, serial)
    rows = rows_of(config, "clients", stage="spider")
    cohorts = [sorted(rows.loc[rows["round"] == round_, "client_id"]) for round_ in range(3)]
    assert [len(cohort) for cohort in cohorts] == [2] * 3
    assert len({*map(tuple, cohorts)}) > 1, "another draw in another round"
    assert set(rows["selection_reason"]) == {"uniform"}
    assert rows["selection_probability"].tolist() == [2 / 3] * 6
    assert rows_of(config, "rounds", stage="spider")["clients_planned"].tolist() == [2] * 3
    evaluated = rows_of(config, "clients", stage="evaluation")
    assert sorted(evaluated["client_id"]) == [0, 1, 2], "every silo is evaluated, whenever it took part"
    groups = groups_of(config)
    assert {name for name in groups if name != SHARED} == {f"client-{c}" for cohort in cohorts for c in cohort}


def test_more_silos_per_round_than_there_are_is_refused(spider_config: Make) -> None:
    config = spider_config(train={"clients_per_round": 4})
    with pytest.raises(ValueError, match=r"method\.train\.clients_per_round=4: must be between 1 and the 3 clients"):
        start_run(config, serial)


# -- never heard ------------------------------------------------------------------------------------------------------


def one_gone_one_slow(file: Path) -> TiersConfig:
    """Silo 0 is fast, silo 1 always drops out, silo 2 computes a thousand MACs per second."""
    rates = [np.array(values) for values in ([1e15, 1e15, 1e3], [1e12] * 3, [1e12] * 3)]
    write_device_table(file, DeviceTable(np.arange(3), *rates, np.ones(3), np.array([0.0, 1.0, 0.0])))
    return TiersConfig(count=1, paths=100, device_table=str(file))


def shared_score(world: World, groups: TensorGroups, silo: int) -> float:
    """The accuracy of the shared supernet on a silo's test data, by a module of its own."""
    module = world.space.build_supernet()
    module.load_state_dict(dict(groups[SHARED]))
    with world.data.reading_test():
        data = world.data.client(silo, "test")
    return evaluate(module.eval(), data, Objective()).metric


def test_silos_that_are_never_heard_have_their_rows_and_leave_the_others_alone(
    spider_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = DevicesConfig(deadline_s=0.5)
    config = spider_config(tiers=one_gone_one_slow(tmp_path / "devices.csv"), devices=devices)
    run_id = start_run(config, serial)
    assert read_status(find_run(Path(config.results), run_id).status).state == "done"

    rows = rows_of(config, "clients", stage="spider").sort_values(["client_id", "round"])
    assert [*zip(rows["client_id"], rows["round"], rows["status"], strict=True)] == [
        (silo, round_, status) for silo, status in enumerate(("ok", "dropped", "timed_out")) for round_ in range(3)
    ]
    gone, late = rows[rows["client_id"] == 1], rows[rows["client_id"] == 2]
    assert set(gone["error"]) == {"the simulated device dropped out (probability 1)"}
    assert (gone[["macs", "bytes_down", "bytes_up", "samples"]] == 0).all(axis=None)
    assert all(error.endswith("s is over the deadline of 0.5 s") for error in late["error"])
    assert (late["bytes_up"] == 0).all()
    assert (late["bytes_down"] == sum(t.numel() * t.element_size() for t in groups_of(config)[SHARED].values())).all()
    rounds = rows_of(config, "rounds", stage="spider")
    counts = rounds[["clients_planned", "clients_ok", "clients_failed"]]
    assert counts.values.tolist() == [[3, 1, 0]] * 3
    assert rounds["simulated_s"].tolist() == [0.5] * 3, "the server waits for them until the deadline"
    assert set(rows_of(config, "evaluations", split="validation")["client_id"]) == {0}

    groups, world = groups_of(config), world_of(config)
    assert groups.keys() == {SHARED, "client-0"}
    measured = rows_of(config, "clients", stage="evaluation")
    assert [*zip(measured["client_id"], measured["status"], strict=True)] == [(0, "ok"), (1, "ok"), (2, "ok")]
    tested = rows_of(config, "evaluations", split="test", metric="accuracy").set_index("client_id")
    assert sorted(tested.index) == [*SILOS]
    for silo in (1, 2):
        assert tested.loc[silo, "architecture"] == subspace_id(darts(world).largest_subspace)
        assert tested.loc[silo, "value"] == shared_score(world, groups, silo)
    assert tested.loc[0, "architecture"] == subspace_id(unpacked(groups["client-0"]).remaining)

    # Whatever keeps silos from being heard, what is left of the run is the same.
    failed = elsewhere(replace(config, devices=DevicesConfig(), executor=tolerating(0.7)), "failed")
    failed = replace(failed, tiers=TiersConfig(count=1, paths=100))
    failing(TrainSpider, lambda a: a.client_id != 0, monkeypatch)
    start_run(failed, serial)
    assert_same_groups(groups_of(failed), groups)
    pd.testing.assert_frame_equal(rows_of(failed, "evaluations"), rows_of(config, "evaluations"))


def test_a_run_whose_silos_all_drop_out_fails_with_what_it_began_with(spider_config: Make) -> None:
    config = spider_config(devices=DevicesConfig(dropout=1.0))
    with pytest.raises(RunFailedError, match="no update arrived in any of the 3 rounds of spider"):
        start_run(config, serial)
    assert set(rows_of(config, "clients", stage="spider")["status"]) == {"dropped"}
    assert len(rows_of(config, "clients", stage="spider")) == 9
    groups, world = groups_of(config), world_of(config)
    assert groups.keys() == {SHARED}
    assert same_bits(groups[SHARED], darts(world).initial_weights(torch_stream(config.seed, SHARED)))


# -- failed -----------------------------------------------------------------------------------------------------------


def by_hand(config: RunConfig, heard: Callable[[int, int], bool]) -> tuple[dict[str, Mapping[str, Tensor]], Worker]:
    """The training of a run, one silo after the other: its shared weights and its silos' states in the end."""
    world = world_of(config)
    worker = worker_of(world)
    stage, *_ = stages(config.method, world)
    begun = stage.begin(RunState())
    groups: dict[str, Mapping[str, Tensor]] = {SHARED: darts(world).initial_weights(torch_stream(config.seed, SHARED))}
    for round_ in range(config.method.train.rounds):
        task = stage.plan(replace(begun, round=round_)).assignments[0].task
        weights, sums = groups[SHARED], WeightedSums()
        for silo in (s for s in SILOS if heard(round_, s)):
            state = groups.get(f"client-{silo}")
            outcome = task.run(worker, Assignment("spider", round_, silo, "tier1", task, state=state), weights)
            assert outcome.update is not None
            assert outcome.state is not None
            of_silo = WeightedSums()  # a chunk holds one silo
            of_silo.add(outcome.update)
            sums.merge(of_silo)
            groups[f"client-{silo}"] = {name: tensor.clone() for name, tensor in outcome.state.items()}
        groups[SHARED] = sums.finish(weights).weights
    return groups, worker


def scores_by_hand(groups: TensorGroups, worker: Worker, silos: Collection[int]) -> dict[int, float]:
    found = {}
    for silo in silos:
        task = ScoreOwn()
        assignment = Assignment("evaluation", 0, silo, "tier1", task, state=groups.get(f"client-{silo}"))
        with worker.data.reading_test():
            outcome = task.run(worker, assignment, groups[SHARED])
        (found[silo],) = (m.value for m in outcome.measurements if m.metric == "accuracy")
    return found


def test_a_tolerated_failure_costs_its_silo_a_round_and_the_others_nothing_but_its_update(
    spider_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = spider_config(executor=tolerating(0.4))
    expected, worker = by_hand(config, lambda round_, silo: (round_, silo) != (0, 1))
    scores = scores_by_hand(expected, worker, SILOS)
    failing(TrainSpider, lambda a: (a.round, a.client_id) == (0, 1), monkeypatch)
    failing(ScoreOwn, lambda a: a.client_id == 2, monkeypatch)
    run_id = start_run(config, serial)
    assert read_status(find_run(Path(config.results), run_id).status).state == "done"

    rows = rows_of(config, "clients")
    failed = rows[rows["status"] != "ok"]
    assert [*zip(failed["stage"], failed["round"], failed["client_id"], strict=True)] == [
        ("spider", 0, 1),
        ("evaluation", 0, 2),
    ]
    assert set(failed["status"]) == {"failed"}
    assert failed["error"].str.fullmatch(r"OSError: bad sector \(line \d+ of test_silo_fates.py\)").all()
    assert len(rows) == 3 * 3 + 3
    rounds = rows_of(config, "rounds")
    assert rounds["clients_failed"].tolist() == [1, 0, 0, 1]
    assert rounds["clients_ok"].tolist() == [2, 3, 3, 2]

    assert_same_groups(groups_of(config), expected)
    tested = rows_of(config, "evaluations", split="test", metric="accuracy")
    assert dict(zip(tested["client_id"], tested["value"], strict=True)) == {s: scores[s] for s in (0, 1)}


def test_more_failures_than_are_tolerated_stop_the_run_in_the_evaluation_too(
    spider_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = spider_config(train={"rounds": 1}, executor=tolerating(0.4))
    with monkeypatch.context() as patch:
        failing(ScoreOwn, lambda a: a.client_id != 0, patch)
        with pytest.raises(
            RunFailedError, match=r"evaluation, round 1: client 1 \(tier1\) failed: OSError: bad sector"
        ):
            start_run(config, serial)
    assert rows_of(config, "evaluations", split="test").empty
    assert rows_of(config, "clients", stage="evaluation")["status"].tolist() == ["ok", "failed", "failed"]
    (paths,) = list_runs(Path(config.results))
    resume_run(config, paths.run_id, serial)
    assert rows_of(config, "clients", stage="evaluation")["status"].tolist() == ["ok"] * 3
    assert sorted(rows_of(config, "evaluations", split="test", metric="accuracy")["client_id"]) == [*SILOS]


# -- again, and interrupted -------------------------------------------------------------------------------------------


def test_a_second_run_that_is_interrupted_where_it_measures_is_the_same_to_the_bit(
    spider_config: Make,
) -> None:
    config = spider_config({"rounds": 2}, gains=1)
    broken = elsewhere(config, "broken")
    start_run(config, serial)

    ids: list[str] = []
    last_of_training = iter([False, True])
    watcher = Watcher(started=lambda run_id, _: ids.append(run_id), should_stop=lambda: next(last_of_training))
    with pytest.raises(InterruptedRunError, match=r"stopped after round 2 of spider"):
        start_run(broken, serial, watcher)
    for place in ("round 1 of evaluation", "round 1 of gains"):
        with pytest.raises(InterruptedRunError, match=f"stopped after {place}"):
            resume_run(broken, ids[0], serial, Watcher(should_stop=lambda: True))
    resume_run(broken, ids[0], serial)

    for table in set(TABLES) - {"runs"}:
        expected, found = rows_of(config, table), rows_of(broken, table)
        assert len(expected) or table in ("candidates", "models")
        pd.testing.assert_frame_equal(found, expected, check_exact=True)
    assert_same_groups(groups_of(broken), groups_of(config))
    rounds = rows_of(config, "rounds")
    assert rounds["stage"].tolist() == ["spider"] * 2 + ["evaluation"] + ["gains"] * 2
    assert (rounds["simulated_s"] > 0).all()
    assert (rows_of(config, "clients")["simulated_s"] > 0).all()
    gains = rows_of(config, "evaluations", stage="gains", metric="accuracy")
    pairs = {*zip(gains["client_id"], gains["model"], strict=True)}
    assert pairs == {(i, f"silo-{j}") for i in (0, 1) for j in (0, 1)}
