"""The time left: whole runs, whose stages differ in cost, against a clock that goes by the MACs that were computed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fedloom.platform.clients.execution import Chunk, ChunkResult, SerialExecutor, SharedWeights
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.forecast import Forecast, Left
from fedloom.platform.federation.loop import RoundProgress
from fedloom.platform.federation.method import Stage
from fedloom.platform.runs.run import Watcher, start_run
from fedloom.tiers.devices import TRAINING_FACTOR

S_PER_MAC = 1e-9


class MacClock:
    """A clock that stands still but for the MACs of clients and of the server."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def executor(self, worker: Worker) -> SerialExecutor:
        clock = self

        class Timed(SerialExecutor):
            def run(self, chunks: Sequence[Chunk], weights: SharedWeights) -> Iterator[ChunkResult]:
                for result in super().run(chunks, weights):
                    macs = sum(
                        report.macs * (TRAINING_FACTOR if report.steps else 1.0) for report in result.client_results
                    )
                    clock.now_s += S_PER_MAC * macs
                    yield result

        return Timed(worker)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[[RunConfig], list[RoundProgress]]:
    """Runs a configuration by that clock; gives what its watcher was told."""

    def run(config: RunConfig) -> list[RoundProgress]:
        clock, rounds = MacClock(), list[RoundProgress]()
        monkeypatch.setattr("fedloom.platform.federation.loop.time", SimpleNamespace(perf_counter=lambda: clock.now_s))
        start_run(config, lambda world: clock.executor(Worker(world.spec)), Watcher(round=rounds.append))
        return rounds

    return run


def ratios(rounds: Sequence[RoundProgress], of: Callable[[RoundProgress], float | None]) -> list[float]:
    """The estimate after each round by the time that was left then, but for the last rounds, which hardly matter."""
    whole_s = sum(r.wall_s for r in rounds)
    passed_s, found = 0.0, []
    for progress in rounds:
        passed_s += progress.wall_s
        if (left_s := whole_s - passed_s) > 0.03 * whole_s:
            found.append((of(progress) or 0.0) / left_s)
    return found


def test_the_time_left_is_that_of_all_stages_to_come(
    tiny_config: Callable[..., RunConfig], told: Callable[[RunConfig], list[RoundProgress]]
) -> None:
    """Within a factor of two from the second round on, when half of the work is to come in stages of other costs."""
    config = tiny_config()
    config.method.train = replace(config.method.train, rounds=4, evaluate_every=0)
    config.method.search = replace(config.method.search, budget=12)
    config.method.finetune = replace(config.method.finetune, rounds=4, epochs=3, clients_per_round=2, batch_size=64)
    config.method.rand_init = replace(config.method.rand_init, rounds=12, epochs=3, clients_per_round=2, batch_size=64)
    rounds = told(config)
    estimated = ratios(rounds, lambda p: p.left_s)[1:]
    assert len(estimated) > 15
    assert all(0.5 < ratio < 2 for ratio in estimated), estimated
    naive = ratios(rounds, lambda p: p.wall_s * (p.rounds_total - p.round - 1))[1:]
    assert sum(ratio < 0.5 for ratio in naive) > len(naive) / 2, "the stage alone would mislead"
    assert rounds[-1].left_s == 0


def test_a_search_says_how_many_generations_are_to_come(
    tiny_config: Callable[..., RunConfig], told: Callable[[RunConfig], list[RoundProgress]]
) -> None:
    config = tiny_config()
    config.method.search = replace(config.method.search, population=4, offspring=2, budget=9)
    config.method.train.rounds = config.method.finetune.rounds = config.method.rand_init.rounds = 0
    search = [p for p in told(config) if p.stage == "search/tier1"]
    assert [(p.round + 1, p.rounds_total) for p in search] == [(1, 4), (2, 4), (3, 4), (4, 4)]


@dataclass
class Told(Stage):
    """A stage that expects as many MACs as it is told."""

    name: str
    macs: tuple[float | None, ...]
    training: bool = False

    @property
    def trains(self) -> bool:
        return self.training

    def macs_left(self, state: RunState) -> float | None:
        return self.macs[state.round]

    def rounds_left(self, state: RunState) -> int:
        return len(self.macs) - 1 - state.round

    plan = merge = cast(Any, None)


class Silent:
    """A stage of a user's own that does not derive from `Stage`."""

    name = "silent"


def after(forecast: Forecast, stage: int, round_: int, seconds: float, rounds_left: int) -> Left:
    before = RunState(stage=stage, round=round_)
    forecast.begins(before)
    done = replace(before, round=round_ + 1)
    forecast.finished(done, seconds)
    return forecast.left(rounds_left)


def test_a_kind_runs_at_its_own_rate_and_an_unknown_one_at_that_of_all() -> None:
    stages: list[Any] = [Told("a/1", (30.0, 20.0, 10.0, 0.0)), Told("b", (50.0, 0.0)), Told("a/2", (40.0, 0.0))]
    forecast = Forecast(stages)
    assert after(forecast, 0, 0, 90.0, 2) == Left(180.0, 180.0 + 450.0 + 360.0), "9 s per MAC, for want of others"
    assert after(forecast, 0, 1, 20.0, 1) == Left(20.0, 20.0 + 100.0 + 80.0), "the first round started the workers"
    assert after(forecast, 0, 2, 40.0, 0) == Left(0.0, 150.0 + 120.0), "3 s per MAC"
    assert after(forecast, 1, 0, 50.0, 0) == Left(0.0, 120.0), "b took 1 s per MAC, which is not a's"


def test_training_to_come_takes_as_long_as_training_and_scores_as_scores() -> None:
    train, search = Told("train", (30.0, 20.0, 0.0), training=True), Told("search", (50.0, 0.0))
    tune, evaluation = Told("tune", (40.0, 0.0), training=True), Told("evaluation", (10.0, 0.0))
    forecast = Forecast([train, search, tune, evaluation])
    after(forecast, 0, 0, 99.0, 1)
    assert after(forecast, 0, 1, 60.0, 0) == Left(0.0, 3.0 * (50 + 40 + 10)), "nothing was scored so far"
    # The search took .1 s per MAC; at the rate of all so far, 65 s for 70 MACs, training would seem far too fast.
    assert after(forecast, 1, 0, 5.0, 0) == Left(0.0, pytest.approx(3.0 * 40 + 0.1 * 10))


def test_the_first_rounds_of_a_small_network_do_not_say_how_long_large_ones_take() -> None:
    large = Told("supernet", (600.0, 500.0, 400.0), training=True)
    small, others = Told("tune/1", (20.0, 10.0, 0.0), training=True), Told("tune/2", (300.0, 0.0), training=True)
    forecast = Forecast([large, small, others])
    after(forecast, 0, 0, 50.0, 1)
    after(forecast, 0, 1, 100.0, 0)
    # Its round of 10 MACs took 4 s each, the others 1 s each: this stage goes on so, 300 MACs take 140 s / 110 MACs.
    assert after(forecast, 1, 0, 40.0, 1) == Left(40.0, pytest.approx(40.0 + 300 * 140 / 110))


def test_a_stage_that_does_not_tell_leaves_the_whole_unknown() -> None:
    stages: list[Any] = [Told("a", (None, None, None)), Told("b", (50.0, 0.0))]
    forecast = Forecast(stages)
    assert after(forecast, 0, 0, 8.0, 3) == Left(24.0, None)
    last = Forecast([*stages[:1]])
    assert after(last, 0, 0, 8.0, 3) == Left(24.0, 24.0), "nothing else is to come"
    silent = Forecast([Told("a", (20.0, 10.0, 0.0)), cast(Stage, Silent())])
    assert after(silent, 0, 0, 8.0, 1) == Left(8.0, None)


@pytest.mark.parametrize(("seconds", "known"), [(9.9, False), (10.0, True)])
def test_a_first_round_that_mostly_starts_workers_tells_nothing(seconds: float, known: bool) -> None:
    forecast = Forecast([Told("a", (30.0, 20.0, 10.0, 0.0))])
    after(forecast, 0, 0, seconds, 2)
    assert forecast.is_known is known
    after(forecast, 0, 1, 0.1, 1)
    assert forecast.is_known
