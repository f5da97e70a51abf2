"""Personalisation gains: every silo's architecture on every silo's data, and no silo's own state touched by it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch

from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.clients.evaluation import Score, evaluate
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.training import LocalSGD, Optimizer, train_locally
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import CLIENT, RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.method import Stage
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods import spider
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.silo_search import ArchitectureSearchConfig
from fedloom.platform.methods.silos import Personal, unpacked
from fedloom.platform.methods.spider import BestEpoch, GainConfig, GainStage, SpiderConfig, SpiderTrainingConfig
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.darts import DartsSpace
from fedloom.platform.spaces.slices import Subspace, Weights, subspace_id
from fedloom.platform.spaces.space_config import SpaceConfig

Make = Callable[..., RunConfig]
Run = Callable[[RunConfig], tuple[World, Any, RunState]]
RunStages = Callable[[World, Sequence[Stage], RunState], tuple[Any, RunState]]

KEPT: Sequence[Subspace] = (
    ((0,),) * 4,
    ((1,), (0,)) * 2,
    ((0,), (1,)) * 2,
)
"""An architecture for each of three silos."""


@pytest.fixture
def make_config(silo_config: Make) -> Make:
    def make(gains: GainConfig, rounds: int = 2) -> RunConfig:
        train = SpiderTrainingConfig(rounds=rounds, batch_size=16)
        method = SpiderConfig(train=train, search=ArchitectureSearchConfig(start=0, every=1), gains=gains)
        return silo_config(method, space=SpaceConfig("darts_s2_small", channels=4, nodes=1))

    return make


@dataclass(frozen=True)
class Gains:
    """A federation that stands before its gains: shared weights, and a model and architecture for each silo."""

    world: World
    stage: GainStage
    before: RunState

    def measure(self, run_stages: RunStages) -> tuple[pd.DataFrame, RunState]:
        """The pairs p_ij, as a row of `of` (j) and a column of `on` (i), and the state after the stage."""
        memory, after = run_stages(self.world, [self.stage], self.before)
        return memory.table("evaluations"), after


def own_weights(space: DartsSpace, kept: Subspace, client_id: int) -> dict[str, torch.Tensor]:
    weights = space.initial_weights(torch_stream(client_id + 10, "own"))
    return {name: weights[name] for name in space.subspace_slices(kept)}


def standing(config: RunConfig, kept: Sequence[Subspace] = KEPT) -> Gains:
    world = build_world(config)
    space = cast(DartsSpace, world.space)
    training, _evaluation, stage = build_stages(world)
    state = training.begin(RunState())
    for client_id, rows in enumerate(kept):
        own = own_weights(space, rows, client_id)
        momentum = {"head.bias": torch.ones(10)}
        personal = Personal(own, momentum, rows).packed()
        state = state.with_group(f"{CLIENT}{client_id}", personal)
    return Gains(world, cast(GainStage, stage), state)


def pairs(rows: pd.DataFrame, metric: str = "accuracy") -> pd.DataFrame:
    return rows[rows.metric == metric].pivot(index="model", columns="client_id", values="value")


def by_hand(gains: Gains, kept: Subspace, on: int, of: int, begin: Weights) -> tuple[float, float]:
    """Loss and accuracy on a silo's test data of a network of its own, trained on all else that the silo has."""
    worker = Worker(gains.world.spec)
    space = cast(DartsSpace, worker.space)
    module = space.build_subspace(kept).train()
    module.load_state_dict({name: begin[name] for name in module.state_dict()})
    (x, y), (more_x, more_y) = (worker.client_data(on, split) for split in ("train", "validation"))
    local = LocalSGD(epochs=2, batch_size=16, lr=0.02, momentum=0.9, clip_norm=5.0)
    generator = torch_stream(worker.spec.training_seed, "batches", "gains", of, on)
    data, sgd = (torch.cat([x, more_x]), torch.cat([y, more_y])), Optimizer(local, dict(module.named_parameters()))
    train_locally(module, sgd, data, local, generator, objective=Objective())
    with worker.data.reading_test():
        score = evaluate(module.eval(), worker.client_data(on, "test"), Objective())
    return score.loss, score.metric


@dataclass(frozen=True)
class Measured:
    """A federation whose gains were measured.

    `groups` are copies of the tensors that there were before, `rows` what was written, `after` the state that was left.
    """

    gains: Gains
    start: str
    groups: Mapping[str, Weights]
    rows: pd.DataFrame
    after: RunState


@pytest.fixture(scope="module")
def measured_before() -> dict[str, Measured]:
    """What was measured so far: several tests look at the same nine pairs."""
    return {}


@pytest.fixture(params=["shared", "own"])
def measured(
    request: pytest.FixtureRequest, make_config: Make, run_stages: RunStages, measured_before: dict[str, Measured]
) -> Measured:
    if request.param not in measured_before:
        gains = standing(make_config(GainConfig(epochs=2, lr=0.02, start=request.param)))
        groups = {
            n: {t: tensor.clone() for t, tensor in group.tensors.items()} for n, group in gains.before.groups.items()
        }
        measured_before[request.param] = Measured(gains, request.param, groups, *gains.measure(run_stages))
    return measured_before[request.param]


def test_every_pair_is_trained_from_the_given_weights_and_scored_on_the_silos_own_test_data(measured: Measured) -> None:
    gains, rows = measured.gains, measured.rows
    loss, accuracy = pairs(rows, "loss"), pairs(rows)
    assert loss.index.tolist() == ["silo-0", "silo-1", "silo-2"]
    assert [int(c) for c in loss.columns] == [0, 1, 2]
    assert loss.notna().all(axis=None)
    assert set(rows.split) == {"test"}
    space = cast(DartsSpace, gains.world.space)
    for of, kept in enumerate(KEPT):
        assert set(rows[rows.model == f"silo-{of}"].architecture) == {subspace_id(kept)}
        begin = gains.before.weights("supernet") if measured.start == "shared" else own_weights(space, kept, of)
        for on in range(3):
            expected = by_hand(gains, kept, on, of, begin)
            assert loss.loc[f"silo-{of}", on] == pytest.approx(expected[0], rel=1e-3)
            assert accuracy.loc[f"silo-{of}", on] == pytest.approx(expected[1], abs=0.05)


def test_no_silos_state_and_no_shared_weight_changes(measured: Measured) -> None:
    groups, after = measured.groups, measured.after
    assert after.groups.keys() == groups.keys() == {"supernet", "client-0", "client-1", "client-2"}
    for name, group in after.groups.items():
        assert group.version == measured.gains.before.groups[name].version
        assert group.tensors.keys() == groups[name].keys()
        assert [t for t, tensor in group.tensors.items() if not torch.equal(tensor, groups[name][t])] == []


def crossed(make_config: Make, run_stages: RunStages, **gains: Any) -> tuple[Gains, pd.DataFrame]:
    found = standing(make_config(GainConfig(lr=0.02, start="own", **gains)))
    return found, found.measure(run_stages)[0]


def test_as_in_the_paper_the_others_best_epoch_is_compared_with_the_final_model(
    make_config: Make, run_stages: RunStages
) -> None:
    gains, rows = crossed(make_config, run_stages, epochs=3, tune_own=False, epoch="test")
    space, last, best = cast(DartsSpace, gains.world.space), pairs(rows), pairs(rows, "best_test_accuracy")
    by_epochs = [pairs(crossed(make_config, run_stages, epochs=n)[1]) for n in (1, 2, 3)]
    number = pairs(rows, "best_epoch")
    worker = Worker(gains.world.spec)
    for of, kept in enumerate(KEPT):
        for on in range(3):
            name = f"silo-{of}"
            if on == of:
                module = space.build_subspace(kept).eval()
                module.load_state_dict(own_weights(space, kept, of))
                with worker.data.reading_test():
                    score = evaluate(module, worker.client_data(on, "test"), Objective())
                assert last.loc[name, on] == pytest.approx(score.metric, abs=1e-9), "p_ii is not trained"
                assert np.isnan(best.loc[name, on])
                continue
            each = [table.loc[name, on] for table in by_epochs]
            assert last.loc[name, on] == each[-1], "to look at every epoch changes none"
            assert best.loc[name, on] == max(each)
            assert number.loc[name, on] == 1 + each.index(max(each))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of samples of every training that is done in the test."""
    sizes: list[int] = []
    original = spider.train_network

    def spy(*given: Any, **more: Any) -> Any:
        sizes.append(len(given[4][1]))
        return original(*given, **more)

    monkeypatch.setattr(spider, "train_network", spy)
    return sizes


def test_validation_data_may_choose_the_epoch_and_is_then_not_trained_on(
    make_config: Make, run_stages: RunStages, trained: list[int]
) -> None:
    gains, rows = crossed(make_config, run_stages, epochs=3, epoch="validation")
    assert trained == gains.world.data.sizes("train").tolist() * 3
    assert set(rows.metric) == {"loss", "accuracy", "best_epoch"}
    assert pairs(rows, "best_epoch").isin([1, 2, 3]).all(axis=None)


@pytest.mark.parametrize("options", [{}, {"tune_own": False}, {"epoch": "validation"}, {"clients": 2}])
def test_the_macs_left_are_those_of_what_is_trained(
    make_config: Make,
    run_stages: RunStages,
    monkeypatch: pytest.MonkeyPatch,
    trained: list[int],
    options: dict[str, Any],
) -> None:
    monkeypatch.setattr(World, "expected_macs", lambda _: 7.0)
    gains, _ = crossed(make_config, run_stages, epochs=2, **options)
    assert gains.stage.macs_left(replace(gains.before, round=0)) == sum(trained) * 2 * 3 * 7
    silos = options.get("clients", 3)
    of_the_last = trained[-silos:] if options.get("tune_own", True) else trained[-silos + 1 :]
    assert gains.stage.macs_left(replace(gains.before, round=silos - 1)) == sum(of_the_last) * 2 * 3 * 7


def test_the_best_epoch_is_the_first_of_the_highest_metric() -> None:
    best, looked = BestEpoch(), []
    for metric in (0.5, 0.25, 0.75, 0.75):
        best.see(Score(1.0, metric, 4), lambda metric=metric: looked.append(metric) or Score(1.0, 1 - metric, 6))  # type: ignore[misc]
    assert best.on_test is not None
    assert (best.epoch, best.on_test.metric, looked) == (3, 0.25, [0.5, 0.75])
    assert best.samples == 4 * 4 + 2 * 6


def test_a_silo_gains_nothing_where_all_architectures_are_equal(make_config: Make, run_stages: RunStages) -> None:
    """From shared weights p_ij is then a matter of i alone, but for the order of the batches: here there is one."""
    equal = [KEPT[1]] * 3

    def losses(start: str) -> pd.DataFrame:
        config = make_config(GainConfig(epochs=1, start=start))
        config.method.train.batch_size = 1000
        return pairs(standing(config, equal).measure(run_stages)[0], "loss")

    shared, own = losses("shared"), losses("own")
    for on in range(3):
        assert shared[on].tolist() == pytest.approx([shared.loc["silo-0", on]] * 3, rel=1e-4)
        assert own[on].nunique() == 3
    assert shared.loc["silo-0"].nunique() == 3


def test_the_gains_may_be_those_of_the_first_few_silos(make_config: Make, run_stages: RunStages) -> None:
    gains = standing(make_config(GainConfig(epochs=1, clients=2)))
    table = pairs(gains.measure(run_stages)[0])
    assert list(table.index) == ["silo-0", "silo-1"]
    assert [int(c) for c in table.columns] == [0, 1]


def test_gains_are_measured_on_test_data_once_all_is_found(make_config: Make) -> None:
    gains = standing(make_config(GainConfig(epochs=3, lr=0.5)))
    planned: Sequence[Assignment] = gains.stage.plan(gains.before).assignments
    assert all(a.reads_test and not a.dropped and a.deadline_s is None for a in planned)
    task: Any = planned[0].task
    assert task.local == LocalSGD(epochs=3, batch_size=16, lr=0.5, momentum=0.9, clip_norm=5.0)
    assert [stage.name for stage in build_stages(gains.world)] == ["spider", "evaluation", "gains"]
    without = build_world(make_config(GainConfig()))
    assert [stage.name for stage in build_stages(without)] == ["spider", "evaluation"]


def test_a_whole_run_measures_the_architectures_that_its_silos_found(make_config: Make, run_in_memory: Run) -> None:
    _, memory, state = run_in_memory(make_config(GainConfig(epochs=1)))
    rows = memory.table("evaluations")
    measured = rows[rows.stage == "gains"]
    assert len(pairs(measured)) == 3
    for of in range(3):
        kept = unpacked(state.groups[f"client-{of}"].tensors).remaining
        assert set(measured[measured.model == f"silo-{of}"].architecture) == {subspace_id(kept)}
    clients = memory.table("clients")
    assert clients[clients.stage == "gains"].groupby("round").client_id.apply(list).tolist() == [[0, 1, 2]] * 3
    assert (clients.status == "ok").all()


def test_gains_that_cannot_be_are_refused_in_one_line(make_config: Make, refused: Callable[[RunConfig], str]) -> None:
    assert refused(make_config(GainConfig(start="mine"))) == "method.gains.start=mine: must be one of shared, own"
    assert refused(make_config(GainConfig(clients=4))) == (
        "method.gains.clients=4: must be between 2 and 3, the number of silos"
    )
    for clients in (0, 1):
        assert refused(make_config(GainConfig(clients=clients))) == (
            f"method.gains.clients={clients}: must be at least 2, or null"
        )
    assert refused(make_config(GainConfig(tune_own=False))) == (
        "method.gains.tune_own=false compares with the silos' final models, so training must start from them: set "
        "method.gains.start=own"
    )
    assert refused(make_config(GainConfig(epoch="x"))) == (
        "method.gains.epoch=x: must be one of last, validation, test"
    )
    assert refused(make_config(GainConfig(epochs=-1))) == "method.gains.epochs=-1: must be between 0 and 100000"
    assert refused(make_config(GainConfig(lr=0.0))) == "method.gains.lr=0.0: must be greater than 0"
