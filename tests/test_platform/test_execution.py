"""Assignments, chunks and the boundary at which whatever happens to a client becomes one row."""

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fedloom.platform.averaging.average import Update, WeightedSums
from fedloom.platform.clients import execution
from fedloom.platform.clients.assignments import Assignment, ClientResult, Measurement, Task, TaskError
from fedloom.platform.clients.execution import (
    Chunk,
    ChunkResult,
    SerialExecutor,
    SharedWeights,
    make_chunks,
    run_assignment,
    run_chunk,
)
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.loop import merge_chunks
from fedloom.platform.results.tables import check_row
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.slices import Slice, Weights
from fedloom.tiers.devices import DeviceProfile

PHONE = DeviceProfile("phone", macs_per_s=100.0, down_bytes_per_s=10.0, up_bytes_per_s=5.0)
OLD = {"w": torch.tensor([1.0, 1.0])}
SHARED = SharedWeights(OLD, "w@0")


class Guarded:
    """Counts how often the test split was opened."""

    def __init__(self) -> None:
        self.opened = 0
        self.is_open = False

    @contextmanager
    def reading_test(self) -> Iterator[None]:
        self.opened, self.is_open = self.opened + 1, True
        try:
            yield
        finally:
            self.is_open = False


def fake_worker() -> Worker:
    own = {"device": torch.device("cpu"), "node": "here", "spec": SimpleNamespace(threads=1)}
    return cast(Worker, SimpleNamespace(**own, data=Guarded(), uploaded=dict, expect=list))


def update_of(tensor: Tensor, weight: float = 1.0) -> Update:
    return Update({"w": tensor}, {"w": Slice("w")}, {"w": weight})


@dataclass
class Fake:
    """A task that does what it is told, one behaviour per attempt."""

    behaviours: list[Callable[[], ClientResult]]
    calls: list[bool] = field(default_factory=list)

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        self.calls.append(cast(Guarded, worker.data).is_open)
        return self.behaviours[min(len(self.calls), len(self.behaviours)) - 1]()


def good(value: float = 3.0) -> ClientResult:
    return ClientResult(
        update=update_of(torch.full((2,), value)),
        samples=10,
        steps=4,
        macs=200.0,
        bytes_down=30,
        bytes_up=10,
        loss=0.5,
        metric=0.75,
        architecture="1-2",
        parameters=2,
        measurements=(Measurement("m", "1-2", "validation", "loss", 0.5, 10),),
        state={"counter": torch.tensor(1)},
    )


def nan() -> ClientResult:
    return ClientResult(update=update_of(torch.tensor([1.0, math.nan])), samples=10)


def explode() -> ClientResult:
    raise KeyError("the battery")


def refuse() -> ClientResult:
    raise TaskError("too tired")


SHAPE = "the update's w has the shape (1,), and its slice of w the shape (2,): give new values of that shape"
ELSEWHERE = {
    "another shape": (Update({"w": torch.ones(1)}, {"w": Slice("w")}, {"w": 1.0}), SHAPE),
    "another region": (
        Update({"w": torch.ones(2)}, {"w": Slice("w", ((1, 2),))}, {"w": 1.0}),
        "the update's w has the shape (2,), and its slice of w the shape (1,): give new values of that shape",
    ),
    "another tensor": (
        Update({"v": torch.ones(2)}, {"v": Slice("v")}, {"v": 1.0}),
        "the update's v is for 'v', and the stage's initial weights have no such tensor",
    ),
    "another kind of number": (
        Update({"w": torch.ones(2, dtype=torch.int64)}, {"w": Slice("w")}, {"w": 1.0}),
        "the update's w is of torch.int64, and w of torch.float32: send numbers of the same kind",
    ),
    "no slice": (
        Update({"w": torch.ones(2)}, {}, {"w": 1.0}),
        "the update has no slice for w: give it one, Slice('w') for a whole tensor",
    ),
}
"""Updates that do not belong to the shared tensors, and why."""


@pytest.mark.parametrize("case", ELSEWHERE)
def test_an_update_that_does_not_belong_to_the_shared_tensors_fails_its_client(case: str) -> None:
    update, why = ELSEWHERE[case]
    sums = WeightedSums()
    report = run_assignment(fake_worker(), planned(lambda: ClientResult(update=update)), SHARED, sums)
    assert (report.status, report.error, sums.updates) == ("failed", why, 0)


def planned(*behaviours: Callable[[], ClientResult], client_id: int | None = 7, **changes: object) -> Assignment:
    return Assignment("train", 3, client_id, "tier2", Fake(list(behaviours)), PHONE, **changes)  # type: ignore[arg-type]


# -- what becomes of an assignment ------------------------------------------------------------------------------------


def test_a_good_client_is_a_row_with_all_its_figures() -> None:
    sums = WeightedSums()
    report = run_assignment(
        fake_worker(), planned(good, selection_probability=0.25, selection_reason="uniform"), SHARED, sums
    )
    row = check_row("clients", report.row("train", 3))
    expected = {
        "stage": "train",
        "round": 3,
        "client_id": 7,
        "tier": "tier2",
        "status": "ok",
        "error": "",
        "samples": 10,
        "steps": 4,
        "macs": 200,
        "parameters": 2,
        "bytes_down": 30,
        "bytes_up": 10,
        "loss": 0.5,
        "metric": 0.75,
        "architecture": "1-2",
        # 30 bytes down at 10/s, three times 200 MACs at 100/s, 10 bytes up at 5/s
        "simulated_s": 3.0 + 6.0 + 2.0,
        "attempts": 1,
        "device": "cpu",
        "threads": 1,
        "selection_probability": 0.25,
        "selection_reason": "uniform",
    }
    assert {name: row[name] for name in expected} == expected
    assert "traceback" not in row
    assert row["wall_s"] >= 0.0  # type: ignore[operator]
    assert row["peak_memory_bytes"] > 0  # type: ignore[operator]
    assert report.state is not None
    assert sums.finish(OLD).weights["w"].tolist() == [3.0, 3.0]


def test_an_exception_is_a_failed_row_with_its_traceback() -> None:
    sums = WeightedSums()
    report = run_assignment(fake_worker(), planned(explode), SHARED, sums)
    where = f"(line {explode.__code__.co_firstlineno + 1} of test_execution.py)"
    assert (report.status, report.error, report.attempts) == ("failed", f"KeyError: 'the battery' {where}", 1)
    assert report.traceback is not None
    assert "in explode" in report.traceback
    assert report.traceback.endswith("KeyError: 'the battery'")
    assert sums.tensors == {}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ],
)
def test_an_exceeded_share_of_a_gpu_is_a_failed_row_that_says_what_to_do(error: RuntimeError) -> None:
    def overflow() -> ClientResult:
        raise error

    report = run_assignment(fake_worker(), planned(overflow), SHARED, WeightedSums())
    assert report.status == "failed"
    assert report.error.startswith("the client needs more than its share of the GPU's memory: raise tiers.num_gpus")
    assert str(error) in (report.traceback or "")


def test_a_refused_result_is_a_failed_row_in_the_tasks_own_words() -> None:
    report = run_assignment(fake_worker(), planned(refuse), SHARED, sums := WeightedSums())
    assert (report.status, report.error, report.traceback) == ("failed", "too tired", None)
    assert sums.tensors == {}


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_is_a_failed_row_and_not_in_the_sums(poison: float) -> None:
    task = planned(lambda: ClientResult(update=update_of(torch.tensor([poison, 1.0])), samples=10))
    report = run_assignment(fake_worker(), task, SHARED, sums := WeightedSums())
    assert report.status == "failed"
    assert report.error == "the update is not finite (first in w): it was left out of the average"
    assert sums.tensors == {}


def test_an_update_with_an_impossible_weight_is_a_failed_row_and_not_in_the_sums() -> None:
    both = {"a": torch.ones(1), "w": torch.ones(2)}
    update = Update(both, {name: Slice(name) for name in both}, {"a": 1.0, "w": -1.0})
    shared, sums = SharedWeights(both, "w@0"), WeightedSums()
    report = run_assignment(fake_worker(), planned(lambda: ClientResult(update=update)), shared, sums)
    assert report.status == "failed"
    assert "the weight of w is -1.0" in report.error
    assert sums.tensors == {}


def test_a_dropped_client_does_no_work_and_is_waited_for_until_the_deadline() -> None:
    assignment = planned(good, dropped="the device is gone", deadline_s=50.0)
    report = run_assignment(fake_worker(), assignment, SHARED, sums := WeightedSums())
    assert (report.status, report.error, report.simulated_s) == ("dropped", "the device is gone", 50.0)
    assert cast(Fake, assignment.task).calls == []
    assert sums.tensors == {}


def test_without_a_deadline_a_dropped_client_is_waited_for_as_long_as_its_work_is_expected_to_take() -> None:
    class Countable(Fake):
        def account(self, _worker: Worker, _assignment: Assignment) -> ClientResult:
            return replace(good(), update=None)

    assignment = planned(good, dropped="gone", expected_macs=300.0)
    # Down 8 bytes / 10, three seconds of 300 MACs, up 8 bytes / 5.
    waited = run_assignment(fake_worker(), assignment, SHARED, sums := WeightedSums())
    assert waited.simulated_s == pytest.approx(0.8 + 3.0 + 1.6)
    # What can be counted is exact: 30 bytes / 10, 3 x 200 MACs / 100, and 10 bytes / 5, as if it had arrived.
    counted = run_assignment(fake_worker(), replace(assignment, task=Countable([explode])), SHARED, sums)
    assert (counted.status, counted.simulated_s) == ("dropped", 3.0 + 6.0 + 2.0)
    assert (counted.macs, counted.bytes_down, sums.tensors) == (0.0, 0, {})

    class Uncountable(Fake):
        def account(self, _worker: Worker, _assignment: Assignment) -> ClientResult:
            raise ZeroDivisionError

    estimated = run_assignment(fake_worker(), replace(assignment, task=Uncountable([explode])), SHARED, sums)
    assert (estimated.status, estimated.error, estimated.simulated_s) == ("dropped", "gone", waited.simulated_s)


def test_who_misses_the_deadline_is_timed_out_and_not_in_the_sums() -> None:
    report = run_assignment(fake_worker(), planned(good, deadline_s=10.9), SHARED, sums := WeightedSums())
    assert report.status == "timed_out"
    assert report.error == "simulated time 11 s is over the deadline of 10.9 s"
    assert (report.samples, report.bytes_down, report.bytes_up) == (10, 30, 0)
    assert report.simulated_s == 11.0
    assert sums.tensors == {}
    # What it would have sent never arrived: neither scores nor a new state.
    assert report.measurements == ()
    assert report.state is None


def test_who_just_makes_the_deadline_is_in() -> None:
    report = run_assignment(fake_worker(), planned(good, deadline_s=11.0), SHARED, sums := WeightedSums())
    assert report.status == "ok"
    assert "w" in sums.tensors


@pytest.mark.parametrize(
    ("offline_s", "deadline_s", "spent", "waited_s"),
    [
        (1.5, None, (15, 0.0, 0), 11.0),  # half of the download of 3 s
        (4.5, None, (30, 50.0, 0), 11.0),  # and a quarter of 6 s of training
        (10.0, 10.5, (30, 200.0, 5), 10.5),  # and half of the upload, but the server waits until the deadline
        (10.0, 20.0, (30, 200.0, 5), 11.0),
    ],
)
def test_who_goes_off_line_is_dropped_with_what_it_has_spent(
    offline_s: float, deadline_s: float | None, spent: tuple[int, float, int], waited_s: float
) -> None:
    assignment = planned(good, offline_s=offline_s, deadline_s=deadline_s)
    report = run_assignment(fake_worker(), assignment, SHARED, sums := WeightedSums())
    assert report.status == "dropped"
    assert report.error == f"the device went offline after {offline_s:g} s, its work takes 11 s"
    assert (report.bytes_down, report.macs, report.bytes_up) == spent
    assert report.simulated_s == waited_s
    assert (report.samples, report.steps, report.loss, report.metric) == (0, 0, None, None)
    assert (report.measurements, report.state, sums.tensors) == ((), None, {})
    check_row("clients", report.row("train", 3))


@pytest.mark.parametrize(
    ("offline_s", "until_s", "spent", "simulated_s"),
    [
        (4.5, math.inf, (30, 50.0, 0), 11.0),
        (4.5, 10.0, (30, 50.0, 0), 10.0),
        (10.0, 4.5, (30, 50.0, 0), 4.5),
        (None, math.inf, (30, 200.0, 10), 11.0),
    ],
)
def test_who_is_ignored_has_spent_what_it_did_until_it_was_told_or_went_off_line(
    offline_s: float | None, until_s: float, spent: tuple[int, float, int], simulated_s: float
) -> None:
    task = SimpleNamespace(run=explode, account=lambda *_: good())
    ignored = ("over_selected", "others were first", until_s)
    assignment = Assignment("train", 3, 7, "tier2", cast(Task, task), PHONE, offline_s=offline_s, ignored=ignored)
    report = run_assignment(fake_worker(), assignment, SHARED, WeightedSums())
    assert (report.status, report.bytes_down, report.macs, report.bytes_up) == ("over_selected", *spent)
    assert report.simulated_s == simulated_s


@pytest.mark.parametrize(("offline_s", "status"), [(11.0, "ok"), (10.95, "timed_out")])
def test_who_goes_off_line_after_its_work_or_the_deadline_is_not_dropped(offline_s: float, status: str) -> None:
    deadline_s = None if status == "ok" else 10.9
    assignment = planned(good, offline_s=offline_s, deadline_s=deadline_s)
    assert run_assignment(fake_worker(), assignment, SHARED, WeightedSums()).status == status


def test_the_servers_own_work_takes_no_simulated_time() -> None:
    report = run_assignment(fake_worker(), planned(good, client_id=None), SHARED, WeightedSums())
    assert report.simulated_s == 0.0


# -- attempts ---------------------------------------------------------------------------------------------------------


def test_a_retry_that_succeeds_is_an_ok_row_counted_once() -> None:
    assignment = planned(explode, nan, good)
    report = run_assignment(fake_worker(), assignment, SHARED, sums := WeightedSums(), attempts=5)
    assert (report.status, report.error, report.traceback, report.attempts) == ("ok", "", None, 3)
    assert len(cast(Fake, assignment.task).calls) == 3
    assert sums.tensors["w"].total.tolist() == [3.0, 3.0]


def test_after_the_last_attempt_the_last_failure_counts() -> None:
    report = run_assignment(fake_worker(), planned(explode, refuse), SHARED, sums := WeightedSums(), attempts=2)
    assert (report.status, report.error, report.traceback, report.attempts) == ("failed", "too tired", None, 2)
    assert sums.tensors == {}


def test_interrupts_are_not_a_clients_failure() -> None:
    def interrupt() -> ClientResult:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_assignment(fake_worker(), planned(interrupt), SHARED, WeightedSums())


# -- the lock on the test set -----------------------------------------------------------------------------------------


def test_only_marked_assignments_may_read_test_data() -> None:
    worker = fake_worker()
    for reads_test in (False, True):
        assignment = planned(good, reads_test=reads_test)
        run_assignment(worker, assignment, SHARED, WeightedSums())
        assert cast(Fake, assignment.task).calls == [reads_test]
    assert not cast(Guarded, worker.data).is_open


# -- client state -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Count:
    """Counts its client's rounds in the client's own state."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        before = assignment.state or {"rounds": torch.tensor(0)}
        return ClientResult(state={"rounds": before["rounds"] + 1})


def test_a_clients_state_travels_with_it_from_worker_to_worker() -> None:
    workers, state = [fake_worker(), fake_worker()], None
    for round_ in range(4):
        assignment = Assignment("train", round_, 7, "tier1", Count(), PHONE, state=state)
        report = run_assignment(workers[round_ % 2], assignment, SHARED, WeightedSums())
        assert report.state is not None
        state = report.state
        assert state["rounds"].item() == round_ + 1


@dataclass(frozen=True)
class CountInPlace:
    """Counts in the very tensor that it was given, and fails the first time."""

    fails: list[bool]

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        assert assignment.state is not None
        assignment.state["rounds"].add_(1)
        if self.fails and self.fails.pop():
            raise OSError("too late: it has counted")
        return ClientResult(state=assignment.state)


def test_a_failed_attempt_leaves_the_clients_state_as_it_was() -> None:
    state = {"rounds": torch.tensor(4)}
    assignment = Assignment("train", 0, 7, "tier1", CountInPlace([True]), PHONE, state=state)
    report = run_assignment(fake_worker(), assignment, SHARED, WeightedSums(), attempts=2)
    assert report.state is not None
    assert (report.state["rounds"].item(), state["rounds"].item()) == (5, 4)


def test_a_client_whose_state_cannot_be_kept_has_not_contributed() -> None:
    sums, broken = WeightedSums(), replace(good(), state=cast(Weights, {"counter": 1.0}))
    for behaviours, status, updates in (([lambda: broken], "failed", 0), ([lambda: broken, good], "ok", 1)):
        report = run_assignment(fake_worker(), planned(*behaviours), SHARED, sums, attempts=2)
        assert (report.status, sums.updates) == (status, updates)


def test_a_clients_state_is_its_own_copy() -> None:
    # A task may hand out its module's tensors, which the next client is trained with.
    of_the_module = torch.tensor(1.0)
    report = run_assignment(
        fake_worker(), planned(lambda: ClientResult(state={"kept": of_the_module})), SHARED, WeightedSums()
    )
    of_the_module.fill_(9.0)
    assert report.state is not None
    assert report.state["kept"].item() == 1.0


# -- chunks -----------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["tier1", "tier2", "server"]), max_size=20), st.integers(1, 6))
def test_chunks_hold_the_plan_in_order_and_never_mix_tiers(tiers: list[str], size: int) -> None:
    plan = [Assignment("train", 0, i, tier, Count()) for i, tier in enumerate(tiers)]
    chunks = make_chunks(plan, size, attempts_per_client=2)
    assert [a for chunk in chunks for a in chunk.assignments] == plan
    for chunk in chunks:
        assert 1 <= len(chunk.assignments) <= size
        assert {a.tier for a in chunk.assignments} == {chunk.tier}
        assert chunk.attempts_per_client == 2
    for left, right in pairwise(chunks):
        # No chunk is cut short without need.
        assert left.tier != right.tier or len(left.assignments) == size


def test_chunks_by_hand() -> None:
    plan = [Assignment("train", 0, i, tier, Count()) for i, tier in enumerate(["a", "a", "a", "b", "b", "a"])]
    sizes = [(c.tier, [a.client_id for a in c.assignments]) for c in make_chunks(plan, 2)]
    assert sizes == [("a", [0, 1]), ("a", [2]), ("b", [3, 4]), ("a", [5])]


def plan_of_many() -> list[Assignment]:
    generator = torch_stream(5, "test")
    plan = []
    for i in range(12):
        tensor, weight = torch.randn(2, generator=generator), float(torch.rand((), generator=generator)) + 0.1
        outcome = ClientResult(update=update_of(tensor, weight), samples=i)
        behaviour = explode if i % 5 == 4 else (lambda outcome=outcome: outcome)
        plan.append(Assignment("train", 0, i, "tier1" if i < 7 else "tier2", Fake([behaviour]), PHONE))
    return plan


def test_every_planned_client_is_exactly_one_row_in_plan_order() -> None:
    executor = SerialExecutor(fake_worker())
    result = merge_chunks(executor.run(make_chunks(plan_of_many(), 4), SHARED))
    assert [r.client_id for r in result.client_results] == list(range(12))
    assert [r.client_id for r in result.client_results if r.status == "failed"] == [4, 9]
    assert all(r.status == "ok" for r in result.client_results if r.client_id not in (4, 9))


def run_in_any_order(chunks: list[Chunk], order: list[int]) -> list[ChunkResult]:
    """What an executor with many workers does: chunks end in any order, results come in plan order."""
    done = {i: run_chunk(fake_worker(), chunks[i], SHARED) for i in order}
    return [done[i] for i in range(len(chunks))]


def test_the_sums_are_bitwise_the_same_whatever_order_chunks_finish_in() -> None:
    chunks = make_chunks(plan_of_many(), 3)
    count = len(chunks)
    serial = merge_chunks(SerialExecutor(fake_worker()).run(chunks, SHARED)).sums.finish(OLD).weights["w"]
    for order in (list(range(count))[::-1], [*range(1, count, 2), *range(0, count, 2)]):
        chunks = make_chunks(plan_of_many(), 3)
        assert torch.equal(merge_chunks(run_in_any_order(chunks, order)).sums.finish(OLD).weights["w"], serial)


def test_chunk_sizes_change_rounding_and_nothing_else() -> None:
    results = []
    for size in (1, 2, 5, 12):
        result = merge_chunks(SerialExecutor(fake_worker()).run(make_chunks(plan_of_many(), size), SHARED))
        results.append(result.sums.finish(OLD).weights["w"])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def test_the_sums_of_consecutive_chunks_may_be_added_first() -> None:
    """In float32 1e8 + 1 is 1e8: one after the other the last 1 is left, in pairs none."""
    results = [summed(value) for value in (1e8, 1.0, -1e8, 1.0, 2.0)]
    sums = [merge_chunks(deepcopy(results), together=together).sums for together in (1, 2, 5, 9)]
    assert [s.tensors["w"].total.item() for s in sums if isinstance(s, WeightedSums)] == [3.0, 2.0, 3.0, 3.0]


def summed(value: float) -> ChunkResult:
    sums = WeightedSums()
    sums.add(Update({"w": torch.tensor([value])}, {"w": Slice("w")}, {"w": 1.0}))
    return ChunkResult(sums)


def test_a_client_that_hangs_in_this_process_is_found_from_the_log_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(execution, "SLOW_S", 0.1)

    def nap() -> ClientResult:
        time.sleep(0.6)
        return good()

    plan = [planned(good, client_id=1), planned(nap, client_id=2), planned(good, client_id=3)]
    began = time.monotonic()
    result = merge_chunks(SerialExecutor(fake_worker()).run(make_chunks(plan, 3), SHARED))
    assert [r.status for r in result.client_results] == ["ok"] * 3
    since = r"has been at work for \d s, since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, in this process"
    doubled = math.log2((time.monotonic() - began) / execution.SLOW_S)  # 2, but more where the nap lasts longer
    assert 1 <= len(caplog.messages) <= 1 + doubled, "once, and again whenever the time has doubled"
    assert all(re.fullmatch(rf"client 2 \(tier2, train round 4, Fake\) {since}", text) for text in caplog.messages)
