"""Training stages that end early: what their scores on validation data decide, and which weights are left."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import nan
from typing import Any, Literal

import pandas as pd
import pytest
import torch
from torch import Tensor

from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.ineffective_keys import keys_without_effect
from fedloom.platform.federation.loop import RoundProgress
from fedloom.platform.federation.stopping import Judgement, Score, StopConfig
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.apfl import APFLConfig
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.fednas import FedNasConfig
from fedloom.platform.methods.ofa import OFAConfig, OFATrainingConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.silo_search import ArchitectureSearchConfig
from fedloom.platform.methods.silos import SiloTrainingConfig
from fedloom.platform.runs.logs import round_line
from fedloom.platform.search.targets import TargetSearchConfig
from fedloom.platform.spaces.space_config import SpaceConfig

Run = Callable[[RunConfig], tuple[Any, Any, Any]]
Tiny = Callable[..., RunConfig]

ACCURACIES = [0.10, 0.40, 0.40, 0.70, 0.60, 0.65, 0.80, 0.90]
LOSSES = [2.3, 1.5, 1.6, 1.5, 1.2, 1.3, 1.4, 0.9]


@pytest.mark.parametrize(
    ("stop", "values", "ends_after", "best"),
    [
        (StopConfig(), ACCURACIES, None, (0.9, 8)),
        (StopConfig(patience=1), ACCURACIES, 3, (0.4, 2)),
        (StopConfig(patience=2), ACCURACIES, 6, (0.7, 4)),
        (StopConfig(patience=3), ACCURACIES, None, (0.9, 8)),
        (StopConfig(target=0.7), ACCURACIES, 4, (0.7, 4)),
        (StopConfig(target=0.75, patience=2), ACCURACIES, 6, (0.7, 4)),
        (StopConfig(target=0.75, patience=3), ACCURACIES, 7, (0.8, 7)),
        (StopConfig("loss", patience=2), LOSSES, 4, (1.5, 2)),
        (StopConfig("loss", target=1.25), LOSSES, 5, (1.2, 5)),
        (StopConfig(patience=2), [nan, 0.2, nan, nan, 0.9], 4, (0.2, 2)),
        (StopConfig(patience=2), [nan, nan], 2, (None, 0)),
        (StopConfig(target=0.3), [sum([0.1, 0.2, 0.6]) / 3, 0.5], 1, (pytest.approx(0.3), 1)),
    ],
)
def test_scores_end_a_stage(
    stop: StopConfig, values: list[float], ends_after: int | None, best: tuple[Any, int]
) -> None:
    judgement, ended = Judgement(), None
    for rounds, value in enumerate(values, 1):
        judgement = judgement.after(Score(value, rounds), stop)
        if judgement.stopped:
            ended = rounds
            break
    assert ended == ends_after
    assert (judgement.best, judgement.rounds) == best


def test_the_reason_says_what_was_measured_and_asked_for() -> None:
    reached = Judgement().after(Score(0.8125, 5), StopConfig(target=0.8))
    assert reached.stopped == "accuracy 0.8125 on validation data reaches stop.target=0.8"
    judgement = Judgement(best=0.5, rounds=10, since=2)
    assert judgement.after(Score(0.5, 25), StopConfig(patience=3)).stopped == (
        "accuracy on validation data is no better than 0.5 after round 10 (stop.patience=3); the weights are those"
    )
    assert Judgement().after(Score(nan, 5), StopConfig("loss", 1)).stopped == (
        "loss on validation data is no number (stop.patience=1)"
    )
    progress = RoundProgress("fedavg", 4, 60, 1.5, None, 10, 10, 0, 0, 1.0, left_s=3.0, stopped=reached.stopped)
    assert round_line(progress).endswith(f"left 0:03  the stage ends: {reached.stopped}")
    assert "left at most 0:03" in round_line(replace(progress, stopped=None, may_end_early=True))


def fedavg(tiny: Tiny, stop: StopConfig, **train: Any) -> RunConfig:
    training = TrainingConfig(rounds=7, clients_per_round=3, batch_size=16, lr=1.0, evaluate_every=1, schedule="cosine")
    return tiny(method=FedAvgConfig(train=replace(training, **train), evaluate=False), stop=stop)


@pytest.fixture(scope="module")
def plain(tiny_config_in: Tiny, run_stages: Any) -> Any:
    """Seven rounds without an early end, in memory."""
    world = build_world(fedavg(partial(tiny_config_in, "unused"), StopConfig()))
    return run_stages(world, build_stages(world), RunState())[0]


def scores(memory: Any, metric: str = "accuracy") -> "pd.Series[float]":
    """Those of validation data, by the number of rounds before them."""
    rows = memory.table("evaluations")
    rows = rows[(rows.split == "validation") & (rows.metric == metric)]
    means: pd.Series[float] = rows.groupby("round")["value"].mean()
    return means


def assert_equal_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_that_is_not_ended_has_the_rows_and_weights_of_one_without_stop(
    tiny_config: Tiny, run_in_memory: Run, plain: Any
) -> None:
    _, judged, state = run_in_memory(fedavg(tiny_config, StopConfig(patience=9, weights="last")))
    assert_equal_tensors(state.weights("fedavg"), plain.state(6).weights("fedavg"))
    assert {*state.groups} == {"fedavg"}
    assert not state.data
    pd.testing.assert_series_equal(scores(plain), scores(judged))
    assert [*scores(judged).index] == [*range(8)]
    assert judged.table("rounds")["stopped"].isna().all()


@pytest.mark.parametrize(("metric", "patience"), [("accuracy", 2), ("loss", 1)])
def test_patience_ends_a_stage_with_the_weights_of_its_best_evaluation_or_its_last(
    tiny_config: Tiny, run_in_memory: Run, plain: Any, metric: Any, patience: int
) -> None:
    known, best, end = scores(plain, metric), 1, 7
    for rounds in range(1, 8):  # the reference: the lengths of trainings are seen afterwards
        better = known[rounds] < known[best] if metric == "loss" else known[rounds] > known[best]
        best = rounds if better else best
        if rounds - best == patience:
            end = rounds
            break
    assert 1 <= best < end < 7, "the run must show something"
    kinds: tuple[tuple[Literal["best", "last"], int], ...] = (("best", best), ("last", end))
    for weights, after in kinds:
        _, memory, state = run_in_memory(fedavg(tiny_config, StopConfig(metric, patience, weights=weights)))
        rounds = memory.table("rounds")
        assert len(rounds) == end
        assert [*rounds["stopped"].isna()] == [True] * (end - 1) + [False]
        assert rounds["lr"].tolist() == plain.table("rounds")["lr"][:end].tolist(), "cosine keeps its length"
        assert_equal_tensors(state.weights("fedavg"), plain.state(after - 1).weights("fedavg"))
        assert {*state.groups} == {"fedavg"}
        assert not state.data


def test_a_target_ends_every_tiers_stage_by_its_own_scores(tiny_config: Tiny, run_in_memory: Run) -> None:
    config = tiny_config(stop=StopConfig(target=0.1))
    stages = {name: replace(getattr(config.method, name), rounds=4, evaluate_every=1) for name in ("train", "finetune")}
    config.method = replace(config.method, **stages)
    _, memory, _ = run_in_memory(config)
    rounds, rows = memory.table("rounds"), memory.table("evaluations")
    rows = rows[(rows.split == "validation") & (rows.metric == "accuracy") & (rows["round"] > 0)]
    ends = {}
    for stage in ("supernet", "fine_tuned/tier1", "fine_tuned/tier2"):
        means = rows[rows.stage == stage].groupby("round")["value"].mean()
        ends[stage] = next((number for number, mean in means.items() if mean >= 0.1), 4)
        assert (rounds.stage == stage).sum() == ends[stage]
    assert min(ends.values()) < 4, "the run must show something"
    assert (rounds.stage == "rand_init/tier1").sum() == 1, "it is not scored"
    assert [*keys_without_effect(config)] == [
        "stop.* has no effect on method.rand_init with method.rand_init.evaluate_every=0: it is for scored stages"
    ]


def test_silos_get_their_own_models_back_as_they_were_at_the_best_evaluation(
    silo_config: Callable[..., RunConfig], run_in_memory: Run
) -> None:
    training = SiloTrainingConfig(rounds=6, batch_size=8, lr=0.5, evaluate_every=1, use_validation=False)
    config = silo_config(
        APFLConfig(train=training),
        space=SpaceConfig(
            "resnet_elastic_small",
            input_shape=[1, 8, 8],
            stem_channels=4,
            stage_widths=[4],
            stage_strides=[2],
            depths=[0],
        ),
    )
    _, plain, _ = run_in_memory(config)
    known = scores(plain)
    assert [*known.index] == [*range(6)], "clients score their models after the rounds before, and their own"
    best = next(i for i in range(5) if known[i + 1] <= known[i])
    stop = StopConfig(patience=1)
    _, memory, state = run_in_memory(replace(config, stop=stop))
    assert memory.table("rounds").query("stage == 'apfl'").shape[0] == best + 2 < 6
    before = plain.state(best)
    assert {n for n in state.groups if n.startswith("client-")} == {f"client-{i}" for i in range(3)}
    for name, group in state.groups.items():
        assert_equal_tensors(group.tensors, before.weights(name))


def test_a_search_within_training_ends_before_its_stage_does(
    silo_config: Callable[..., RunConfig], run_in_memory: Run
) -> None:
    space = SpaceConfig("darts_s2_small", input_shape=[1, 8, 8], channels=4)
    training = SiloTrainingConfig(rounds=5, batch_size=16, evaluate_every=1, use_validation=False)
    method = FedNasConfig(train=training, search=ArchitectureSearchConfig(kind="milenas", rounds=3))
    config = replace(silo_config(method, space=space), stop=StopConfig(target=0.001))
    _, memory, state = run_in_memory(config)
    rounds = memory.table("rounds").query("stage == 'fednas'")
    assert len(rounds) == 3, "the first evaluation of what was found"
    assert "alphas" not in state.weights("supernet")


def test_phases_open_before_their_stage_ends_and_it_leaves_no_teacher(tiny_config: Tiny, run_in_memory: Run) -> None:
    space = SpaceConfig(
        *("resnet_elastic_small",), input_shape=[1, 8, 8], stem_channels=4, stage_widths=[4], stage_strides=[2],
        depths=[2], expansions=[0.5, 1.0], norm="none",
    )  # fmt: skip
    training = OFATrainingConfig(rounds=6, clients_per_round=2, batch_size=32, evaluate_every=1, depth_share=0.25)
    method = OFAConfig(train=training, search=TargetSearchConfig(samples=0))
    config = tiny_config(
        space=space, method=method, tiers=TiersConfig(count=1, paths=100), stop=StopConfig(target=0.01)
    )
    _, memory, state = run_in_memory(config)
    assert len(memory.table("rounds").query("stage == 'supernet'")) == 5, "widths open in the fifth round"
    assert not [name for name in state.weights("supernet") if "teacher" in name]


@pytest.mark.parametrize(
    ("stop", "train", "message"),
    [
        (
            StopConfig(target=0.8),
            {"evaluate_every": 0},
            "stop.target=0.8 needs scores on validation data, and no training stage has any: set "
            "method.train.evaluate_every to the rounds between two evaluations",
        ),
        (
            StopConfig(target=80.0),
            {},
            "stop.target=80: accuracy is a share, at most 1, such as 0.8",
        ),
    ],
)
def test_a_stage_that_cannot_end_is_refused(
    tiny_config: Tiny, refused: Callable[[RunConfig], str], stop: StopConfig, train: dict[str, Any], message: str
) -> None:
    assert refused(fedavg(tiny_config, stop, **train)) == message


def test_a_stage_without_validation_data_cannot_end(tiny_config: Tiny, refused: Callable[[RunConfig], str]) -> None:
    config = fedavg(tiny_config, StopConfig(patience=1))
    assert refused(replace(config, data=replace(config.data, validation_share=0.0))) == (
        "stop.patience and stop.target need validation data, and there is none: raise data.validation_share"
    )


def test_silos_that_train_on_their_validation_data_cannot_be_judged(
    silo_config: Callable[..., RunConfig], elastic_config: Tiny, refused: Callable[[RunConfig], str]
) -> None:
    stop = StopConfig(patience=2)
    assert refused(replace(silo_config(APFLConfig(train=SiloTrainingConfig(evaluate_every=1))), stop=stop)) == (
        "method.train.use_validation=true: the silos train on their validation data, so that no score on them can end "
        "the stage (stop.*); set it to false"
    )
    assert refused(elastic_config(train={"evaluate": []}, stop=stop)) == (
        "method.train.evaluate: no scores on validation data, so stop.* cannot end the stage; name what to score"
    )


def test_silos_that_answer_whenever_they_are_done_cannot_be_judged(
    silo_config: Callable[..., RunConfig], refused: Callable[[RunConfig], str]
) -> None:
    train = SiloTrainingConfig(evaluate_every=1, use_validation=False, asynchronous="fedbuff", arrivals=2)
    assert refused(replace(silo_config(APFLConfig(train=train)), stop=StopConfig(patience=2))) == (
        "method.train.asynchronous=fedbuff: clients of apfl score their own models, and every round has the scores of "
        "other clients, so stop.* cannot end it; leave one of both out"
    )


def test_keys_of_an_early_end_without_one_are_named(tiny_config: Tiny) -> None:
    lines = [*keys_without_effect(fedavg(tiny_config, StopConfig("loss", weights="last")))]
    assert lines == [
        f"stop.{key} has no effect with stop.patience=null and stop.target=null: it is for stages that may end early"
        for key in ("metric=loss", "weights=last")
    ]
    assert [*keys_without_effect(replace(fedavg(tiny_config, StopConfig(target=0.5)), dry_run=True))] == [
        "stop.target=0.5 has no effect with dry_run=True: it is for runs that train"
    ]
