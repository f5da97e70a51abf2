"""What a watcher is told of a round: of which data its accuracy is, and what was scored on validation data."""

from collections.abc import Callable
from typing import Any

import pytest

from fedloom.platform.clients.assignments import ClientResult, Evaluation, Measurement
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import RoundProgress, Validated, split_of, validated
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.runs.run import Watcher, make_serial, start_run


def report(steps: int, *splits: str | None) -> ClientResult:
    measured = tuple(Measurement("m", "0", split, "accuracy", 0.5, 1) for split in splits)
    return ClientResult(client_id=0, tier="tier1", steps=steps, measurements=measured)


def test_the_metric_is_of_training_data_unless_nobody_trained() -> None:
    assert split_of([report(0), report(3, "validation")]) == "train"
    assert split_of([report(0, None, "test")]) == "test"
    assert split_of([report(0, "validation")]) == "validation"
    assert split_of([]) == "train"


def measured(
    value: float, client_id: int | None = None, metric: str = "accuracy", round_: int | None = None
) -> Evaluation:
    return Evaluation("m", "tier1", "0", client_id, "validation", metric, value, 1, None, round_)


@pytest.mark.parametrize(
    ("evaluations", "expected"),
    [
        ([], None),
        ([measured(9.0, metric="loss")], None),
        ([measured(0.2), measured(0.4), measured(7.0, metric="loss")], Validated(pytest.approx(0.3), 5)),
        ([measured(0.2, client_id=1), measured(0.4, client_id=2)], Validated(pytest.approx(0.3), 6)),
        ([measured(0.2), measured(0.8, round_=6)], Validated(0.8, 6)),
        ([measured(float("nan"))], None),
    ],
    ids=["nothing", "no accuracy", "the server before", "silos after", "after the round", "not a number"],
)
def test_validation_is_the_latest_of_a_round(evaluations: Any, expected: Validated | None) -> None:
    assert validated(evaluations, 5) == expected


def test_validation_where_nobody_trained_is_after_no_number_of_rounds() -> None:
    assert validated([measured(0.25)], 0, trained=False) == Validated(0.25, None)


def test_a_run_tells_of_validation_after_its_last_round(tiny_config: Callable[..., RunConfig]) -> None:
    told: list[RoundProgress] = []
    train = TrainingConfig(rounds=3, clients_per_round=3, batch_size=16, evaluate_every=2)
    config = tiny_config(method=FedAvgConfig(architecture="0-1-2", train=train))
    start_run(config, make_serial, Watcher(round=told.append))
    of_training = [p for p in told if p.stage == "fedavg"]
    assert [p.validated and p.validated.rounds for p in of_training] == [0, None, 3]
    assert {p.metric_of for p in of_training} == {"train"}
    scored = [p for p in told if p.stage == "evaluation"]
    assert {p.metric_of for p in scored} == {"test"}
    assert all(p.validated is not None and p.validated.rounds is None for p in scored)
