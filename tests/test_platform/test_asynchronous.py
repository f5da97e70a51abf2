"""Rounds that end with their first answers: by hand, beside a slow reference, their limits, and what is refused."""

import json
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, strategies as st

from fedloom.platform.averaging.average import Update
from fedloom.platform.averaging.staleness import Arrival, ArrivalRule, arrived, fedasync, fedbuff, weight_at
from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.clients.execution import SerialExecutor
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation import loop
from fedloom.platform.federation.algorithm import Plan, RunState, TrainingStage
from fedloom.platform.federation.asynchronous import Asynchronous, Begun, Flight, next_events
from fedloom.platform.federation.config import DevicesConfig, ExecutorConfig, RunConfig, TiersConfig
from fedloom.platform.federation.loop import RunFailedError
from fedloom.platform.federation.selection import Choice, Cohort
from fedloom.platform.federation.training_config import PrivacyConfig, TrainingConfig, rules_of
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.distribution import FEWEST_FOR_SANDWICH, Distribution, distribute
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.shares import SharesConfig
from fedloom.platform.spaces.slices import Slice

Make = Callable[..., RunConfig]


# -- what an answer counts for -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age", "decay", "weight"),
    [(0, "polynomial", 1.0), (3, "polynomial", 0.5), (9, "constant", 1.0), (4, "hinge", 1.0), (6, "hinge", 1 / 21)],
)
def test_the_weight_of_an_age(age: int, decay: str, weight: float) -> None:
    assert weight_at(age, decay, exponent=0.5, hinge_slope=10.0, hinge_start=4.0) == pytest.approx(weight)


def answer(value: float, received: float, old: float, age: int) -> Arrival:
    return Arrival("w", *(torch.tensor([number]) for number in (value, received, old)), age)


def test_two_rounds_of_fedbuff_by_hand() -> None:
    """Two answers a round; the second round has one from the weights of the first."""
    first = (fedbuff(answer(4.0, 0.0, 0.0, 0)) + fedbuff(answer(2.0, 0.0, 0.0, 0))) / 2
    assert first.tolist() == [3.0]
    fresh, stale = fedbuff(answer(2.0, 3.0, 3.0, 0)), fedbuff(answer(8.0, 0.0, 3.0, 3))
    assert (fresh.tolist(), stale.tolist()) == ([2.0], [7.0])  # 3 + (8 - 0) / sqrt(1 + 3)


def test_two_rounds_of_fedasync_by_hand() -> None:
    first = fedasync(answer(10.0, 0.0, 0.0, 0), mixing=0.5)
    assert first.tolist() == [5.0]
    assert fedasync(answer(10.0, 0.0, 5.0, 3), mixing=0.5).tolist() == [6.25]  # 5 + .5 * .5 * (10 - 5)


def test_a_slice_is_moved_where_it_lies() -> None:
    update = Update(
        {"head": torch.tensor([5.0, 6.0]), "steps": torch.tensor(7)},
        {"head": Slice("w", ((1, 3),)), "steps": Slice("steps")},
        {"head": 1.0, "steps": 1.0},
    )
    old, received = (
        {"w": torch.tensor(values), "steps": torch.tensor(9)} for values in ([0.0, 1.0, 2.0], [9.0, 3.0, 5.0])
    )
    moved = arrived(update, ("fedbuff", fedbuff), old, received, 3, {"w"})
    assert moved.tensors["head"].tolist() == [2.0, 2.5]  # 1 + (5 - 3) / 2, 2 + (6 - 5) / 2
    assert moved.tensors["steps"] is update.tensors["steps"]


def test_what_a_search_has_removed_meanwhile_does_not_arrive() -> None:
    tensors = {"kept": torch.tensor([4.0]), "removed": torch.tensor([1.0]), "removed_steps": torch.tensor(7)}
    update = Update(tensors, {name: Slice(name) for name in tensors}, dict.fromkeys(tensors, 1.0))
    received = {"kept": torch.tensor([0.0]), "removed": torch.tensor([0.0]), "removed_steps": torch.tensor(5)}
    late = arrived(update, ("fedbuff", fedbuff), {"kept": torch.tensor([1.0])}, received, 3, {"kept", "removed"})
    assert late.tensors == {"kept": torch.tensor([3.0])}  # 1 + (4 - 0) / 2


def test_a_stale_clients_running_variance_is_mixed_and_stays_positive() -> None:
    """The server's variance has fallen from the received 1 to .1, and the client's to .02."""
    update = Update({"v": torch.tensor([0.02])}, {"v": Slice("v")}, {"v": 1.0})
    old, received = {"v": torch.tensor([0.1])}, {"v": torch.tensor([1.0])}
    mixed = arrived(update, ("fedbuff", fedbuff), old, received, 3, parameters=())
    assert mixed.tensors["v"].tolist() == pytest.approx([0.06])  # .1 + (.02 - .1) / 2; its change gives -.39


# -- the queue ---------------------------------------------------------------------------------------------------------

SECONDS = {0: 3.0, 1: 1.0, 2: 1.0, 3: 1.0}


def begins(lost: Sequence[int] = (), absent: Sequence[int] = ()) -> Callable[[int, float], Flight | None]:
    def begin(client_id: int, now_s: float) -> Flight | None:
        if client_id in absent:
            return None
        return Flight(client_id, 0, now_s, now_s + SECONDS[client_id], client_id not in lost)

    return begin


def test_two_rounds_of_the_queue_by_hand() -> None:
    """Two clients at work, two answers a round: 1 at 1 s makes room for 2, which answers at 2 s."""
    first = next_events([], [0, 1, 2], begins(), now_s=0.0, concurrency=2, arrivals=2)
    assert [(f.client_id, f.ends_s) for f in first.events] == [(1, 1.0), (2, 2.0)]
    assert ([f.client_id for f in first.at_work], first.now_s) == ([0], 2.0)
    second = next_events(first.at_work, [3], begins(), now_s=2.0, concurrency=2, arrivals=2)
    assert [(f.client_id, f.ends_s) for f in second.events] == [(0, 3.0), (3, 3.0)], "of equal times the lower id first"
    assert (second.at_work, second.now_s) == ([], 3.0)


def test_who_is_lost_makes_room_and_is_no_answer() -> None:
    ended = next_events([], [1, 2, 3], begins(lost=[1], absent=[2]), now_s=0.0, concurrency=1, arrivals=1)
    assert [(f.client_id, f.ends_s, f.answers) for f in ended.events] == [(1, 1.0, False), (3, 2.0, True)]


def test_others_are_drawn_while_answers_are_missing() -> None:
    """1 and 2 are lost after a second each; 3 is drawn then, and answers."""
    asked: list[tuple[float, int]] = []

    def more(now_s: float, count: int) -> list[int]:
        asked.append((now_s, count))
        return [len(asked) + 1]

    ended = next_events([], [1], begins(lost=[1, 2]), now_s=0.0, concurrency=1, arrivals=1, more=more)
    assert [(f.client_id, f.ends_s, f.answers) for f in ended.events] == [(1, 1, False), (2, 2, False), (3, 3, True)]
    assert asked == [(1.0, 1), (2.0, 1)]


def test_a_cohort_is_kept_with_all_that_it_asks_of_clients() -> None:
    cohort = Cohort((3, 5), 0.25, "own", {5: "late"}, {}, {3: 2}, {5: 0.5})
    begun = Begun.of(json.loads(json.dumps(Begun([cohort, Cohort((7,))], {"served": 1}).stored())))
    assert begun.cohorts[0] == cohort
    assert (begun.cohorts[1].client_ids, math.isnan(begun.cohorts[1].probability)) == ((7,), True)
    assert begun.data == {"served": 1}


@given(st.permutations([0, 1, 2, 3]), st.integers(1, 4), st.integers(1, 4))
def test_no_more_are_at_work_than_asked_for_and_time_never_goes_back(
    waiting: list[int], concurrency: int, arrivals: int
) -> None:
    ended = next_events([], waiting, begins(), now_s=5.0, concurrency=concurrency, arrivals=arrivals)
    times = [flight.ends_s for flight in ended.events]
    assert times == sorted(times)
    assert len(ended.events) == arrivals
    flights = [*ended.events, *ended.at_work]
    for moment in {flight.begun_s for flight in flights}:
        assert sum(f.begun_s <= moment < f.ends_s for f in flights) <= concurrency


# -- whole runs --------------------------------------------------------------------------------------------------------

SLOW_AND_FAST = DevicesConfig(macs_per_s=[1e7, 3e7])


def federation(make: Make, devices: DevicesConfig = SLOW_AND_FAST, **train: Any) -> RunConfig:
    training = TrainingConfig(rounds=4, clients_per_round=4, batch_size=16, momentum=0.0)
    method = FedAvgConfig(architecture="0-1-2", train=replace(training, **train), evaluate=False)
    return make(method=method, devices=devices, executor=ExecutorConfig(stack_clients="off"))


def test_a_run_is_what_one_client_after_the_other_gives(tiny_config: Make, run_in_memory: Any) -> None:
    """Every client of FedBuff is trained alone, from the weights of its round; means and changes are written out."""
    config = federation(tiny_config, asynchronous="fedbuff", arrivals=2, rounds=6)
    world, memory, _ = run_in_memory(config)
    rows, worker = memory.table("clients"), Worker(world.spec)
    (stage, *_) = build_stages(world)
    assert isinstance(stage, TrainingStage)
    versions = [dict(stage.begin(RunState()).weights("fedavg"))]
    task = Train(Subnet((0, 1, 2), stand_alone=True), stage._local_sgd(0))
    for round_ in range(6):
        of_round, old = rows[rows["round"] == round_], versions[-1]
        assert len(of_round) == 2
        total = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in old.items()}
        for row in of_round.itertuples():
            received = versions[row.start_round]
            assignment = Assignment("fedavg", row.start_round, row.client_id, row.tier, task)
            update = task.run(worker, assignment, received).update
            assert update is not None
            assert row.staleness == round_ - row.start_round
            for name, value in update.tensors.items():
                if value.is_floating_point():
                    begins = received if name in world.space.parameter_names else old
                    change = (value - begins[name]).double() / (1 + row.staleness) ** 0.5
                    total[name] += change * row.samples / of_round["samples"].sum()
                else:
                    total[name] = torch.maximum(total[name], value.double())
        new = {n: old[n] + total[n] if old[n].is_floating_point() else total[n] for n in old}
        after = memory.state(round_)
        for name, tensor in after.weights("fedavg").items():
            torch.testing.assert_close(tensor, new[name].to(tensor.dtype), atol=1e-6, rtol=1e-5)
        versions.append(dict(after.weights("fedavg")))
        alive = {name for name in after.groups if name.startswith("received-")}
        assert alive == {f"received-fedavg-{n}" for n in after.data["begun"]}
        assert len(alive) <= 3
    assert rows["staleness"].max() >= 2
    begun = rows["ended_s"] - rows["simulated_s"]
    ends = {0.0, *rows["ended_s"].round(9)}
    assert all(round(time_s, 9) in ends for time_s in begun), "who begins takes the place of one that has ended"
    rounds = memory.table("rounds")
    assert rounds["simulated_s"].cumsum().tolist() == pytest.approx(rows.groupby("round")["ended_s"].max().tolist())


@pytest.mark.parametrize("changes", [{"asynchronous": "fedbuff", "arrivals": 8}, {"arrivals": 8}], ids=str)
def test_rounds_that_wait_for_all_clients_are_those_of_fedavg(
    tiny_config: Make, run_in_memory: Any, changes: dict[str, Any]
) -> None:
    """To the bit of such that sum their clients in one chunk, which are all of one tier."""

    def together(**train: Any) -> Any:
        config = federation(tiny_config, DevicesConfig(), clients_per_round=None, rounds=2, **train)
        executor = ExecutorConfig(stack_clients="off", chunk_size=8)
        return run_in_memory(replace(config, executor=executor, tiers=TiersConfig(count=1)))

    (_, plain, expected), (_, waiting, after) = together(), together(**changes)
    for name, tensor in expected.weights("fedavg").items():
        assert torch.equal(after.weights("fedavg")[name], tensor)
    assert waiting.table("rounds")["simulated_s"].tolist() == pytest.approx(
        plain.table("rounds")["simulated_s"].tolist()
    )


def test_over_selection_counts_the_fastest_and_what_the_others_cost(tiny_config: Make, run_in_memory: Any) -> None:
    _, memory, _ = run_in_memory(federation(tiny_config, clients_per_round=5, arrivals=3, rounds=2))
    for round_, rows in memory.table("clients").groupby("round"):
        counted, others = rows[rows["status"] == "ok"], rows[rows["status"] == "over_selected"]
        assert (len(counted), len(others)) == (3, 2)
        assert counted["simulated_s"].max() <= others["simulated_s"].min()
        assert (others[["macs", "bytes_down", "bytes_up"]] > 0).all(axis=None)
        assert others["loss"].isna().all()
        assert others["error"].str.startswith("3 others had answered after ").all()
        row = memory.table("rounds").iloc[round_]
        assert row["simulated_s"] == pytest.approx(counted["simulated_s"].max())
        assert (row["clients_planned"], row["clients_ok"]) == (5, 3)


def test_a_round_has_its_answers_although_devices_drop_out(tiny_config: Make, run_in_memory: Any) -> None:
    lossy = replace(SLOW_AND_FAST, dropout=0.5)
    config = federation(tiny_config, lossy, asynchronous="fedbuff", arrivals=2, clients_per_round=3)
    _, memory, _ = run_in_memory(config)
    rows = memory.table("clients")
    assert memory.table("rounds")["clients_ok"].tolist() == [2, 2, 2, 2]
    assert (rows["status"] == "dropped").sum() > 2
    assert not rows.duplicated(["round", "client_id"]).any()


def halves(choice: Choice) -> tuple[int, ...]:
    """A rule that divides by the number that is asked for."""
    return tuple(int(c) for c in choice.eligible[:: max(1, len(choice.eligible) // choice.size)][: choice.size])


def test_no_rule_is_asked_about_nobody(tiny_config: Make, run_in_memory: Any) -> None:
    """All eight clients are at work: for a lost one there is no other."""
    train = {"clients_per_round": 8, "arrivals": 8, "rounds": 3, "selection": f"{__name__}:halves"}
    lossy = DevicesConfig(dropout=0.4)
    _, memory, _ = run_in_memory(federation(tiny_config, lossy, asynchronous="fedbuff", **train))
    answers = memory.table("rounds").query("stage == 'fedavg'").clients_ok
    assert 0 < answers.min() < 8


def impatient(arrival: Arrival) -> torch.Tensor:
    if arrival.staleness >= 2:
        raise ValueError("too old")
    return arrival.value


def test_a_rule_that_fails_in_a_later_round_ends_the_run_in_that_round(tiny_config: Make, run_in_memory: Any) -> None:
    config = federation(tiny_config, asynchronous=f"{__name__}:impatient", arrivals=1, rounds=9)
    with pytest.raises(RunFailedError, match=r"^fedavg, round \d: .*too old"):
        run_in_memory(config)


def test_work_ahead_is_bounded_by_the_lanes(tiny_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been executed for later rounds is kept until these come."""
    train = {"clients_per_round": 8, "arrivals": 1, "rounds": 6}
    world = build_world(federation(tiny_config, asynchronous="fedasync", **train))
    monkeypatch.setattr(loop, "AHEAD_PER_LANE", 1)
    monkeypatch.setattr(SerialExecutor, "lanes", 3)
    executor = SerialExecutor(Worker(world.spec))
    status = SimpleNamespace(write=lambda **_: None, beat=lambda: None)
    recorder = SimpleNamespace(submit=lambda _: kept.append(len(ran._ahead)), start=list, wait=list)
    kept: list[int] = []
    execution, checkpoint = world.config.executor, world.config.checkpoint
    ran = loop.Loop(
        *(build_stages(world), executor, cast(Any, recorder), cast(Any, status)),
        execution=execution,
        checkpoint=checkpoint,
        deadline_s=None,
    )
    ran.run(RunState())
    assert 0 < max(kept) <= 3


def test_who_replaces_a_lost_client_has_had_its_turn(tiny_config: Make, run_in_memory: Any) -> None:
    """What a selection rule remembers of a round's further draws lasts: round robin selects all clients equally."""
    lossy = DevicesConfig(macs_per_s=[1e7, 1e7], dropout=0.5)
    train = {"asynchronous": "fedbuff", "arrivals": 2, "clients_per_round": 2, "rounds": 10}
    _, memory, _ = run_in_memory(federation(tiny_config, lossy, selection="round_robin", **train))
    turns = memory.table("clients")["client_id"].value_counts()
    assert (turns.min(), turns.max()) == (6, 7)


def test_clients_whose_weights_are_too_old_are_told_to_stop(tiny_config: Make, run_in_memory: Any) -> None:
    slow = DevicesConfig(macs_per_s=[2e6, 3e7])
    config = federation(tiny_config, slow, asynchronous="fedasync", arrivals=1, max_staleness=1, rounds=8)
    _, memory, _ = run_in_memory(config)
    rows = memory.table("clients")
    stale = rows[rows["status"] == "stale"]
    assert rows[rows["status"] == "ok"]["staleness"].max() == 1
    assert set(stale["staleness"]) == {2}
    assert set(stale["error"]) == {"what it received is over 1 rounds old (max_staleness)"}
    assert stale["loss"].isna().all()
    told = memory.table("rounds")["simulated_s"].cumsum()
    assert (stale["ended_s"] == [told[round_ - 1] for round_ in stale["round"]]).all()
    assert (stale["bytes_up"] == 0).any(), "some are told before they send"


def test_maxnet_shares_a_round_among_those_who_answer(
    elastic_config: Make, run_in_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their cohorts, of which most have one client, would give each of them all of it."""
    rounds: list[list[float]] = []
    counted = Asynchronous.counted

    def seen(self: Asynchronous, *given: Any) -> Callable[[Assignment, Update], Update]:
        of_round = counted(self, *given)
        rounds.append([])

        def weighed(assignment: Assignment, update: Update) -> Update:
            counts = of_round(assignment, update)
            before, after = (each.weights["head.2.bias"] for each in (update, counts))
            rounds[-1].append(after / before)
            return counts

        return weighed

    monkeypatch.setattr(Asynchronous, "counted", seen)
    train = {"rounds": 8, "asynchronous": "fedbuff", "arrivals": 3, "shares": SharesConfig(decay="constant")}
    run_in_memory(elastic_config(train={**train, "evaluate_every": 0}, devices=SLOW_AND_FAST))
    assert len(rounds) == 8
    for shares in rounds:
        assert sorted(shares) == pytest.approx([0.05, 0.05, 0.9]) or shares == [1, 1, 1], "none has the largest subnet"
    assert [1, 1, 1] in rounds
    assert any(max(shares) < 1 for shares in rounds)


def test_over_selection_shares_a_round_among_those_who_answer(
    elastic_config: Make, run_in_memory: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plans: list[Plan] = []
    plan = TrainingStage.plan

    def seen(self: TrainingStage, state: RunState) -> Plan:
        plans.append(plan(self, state))
        return plans[-1]

    monkeypatch.setattr(TrainingStage, "plan", seen)
    train = {"clients_per_round": 5, "arrivals": 3, "rounds": 6, "shares": SharesConfig(decay="constant")}
    run_in_memory(elastic_config(train={**train, "evaluate_every": 0}, devices=replace(SLOW_AND_FAST, dropout=0.1)))
    rounds = []
    for each in plans:
        assert each.answers is not None
        shares = {a.client_id: a.task.share for a in each.assignments if isinstance(a.task, Train)}
        rounds.append([share for client, share in shares.items() if client in each.answers.answering])
        assert each.schedules["beta"] == 0.9
    assert all(sorted(shares) == pytest.approx([0.05, 0.05, 0.9]) or shares == [1, 1, 1] for shares in rounds)
    assert any(max(shares) < 1 for shares in rounds)
    assert "arrivals=3: the slowest clients are given up, on equal devices always that with the largest" in caplog.text


def test_every_cohort_of_a_round_draws_subnets_of_its_own(
    elastic_config: Make, run_in_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: dict[tuple[int, tuple[int, ...]], float] = {}
    rules = set[tuple[bool, str]]()

    def seen(heuristic: Any, distribution: Distribution) -> Any:
        rules.add((len(distribution.client_ids) < FEWEST_FOR_SANDWICH, heuristic.name))
        cohort = (distribution.round, distribution.client_ids)
        value = deepcopy(distribution.rng).random()
        assert streams.setdefault(cohort, value) == value, "a cohort that is planned again gets the same"
        return distribute(heuristic, distribution)

    monkeypatch.setattr("fedloom.platform.methods.superfednas.distribute", seen)
    lossy = replace(SLOW_AND_FAST, dropout=0.5)
    train = {"rounds": 4, "asynchronous": "fedbuff", "arrivals": 3, "evaluate_every": 0}
    run_in_memory(elastic_config(train=train, devices=lossy))
    assert len(streams) > len({round_ for round_, _ in streams}), "lost clients make room for others in the same round"
    assert len({*streams.values()}) == len(streams)
    assert rules == {(True, "random"), (False, "tracking_sandwich")}, "a lost one's successor is no sandwich"


def test_a_rule_of_ones_own_is_asked_for_every_tensor() -> None:
    seen = set[tuple[str, int]]()

    def first_only(arrival: Arrival, *, most: int = 1) -> torch.Tensor:
        seen.add((arrival.name, min(arrival.staleness, most)))
        return arrival.value if arrival.staleness < most else arrival.old

    rule: ArrivalRule = first_only
    update = Update({"w": torch.ones(2)}, {"w": Slice("w")}, {"w": 1.0})
    old, received = {"w": torch.zeros(2)}, {"w": torch.zeros(2)}
    assert arrived(update, ("own:rule", rule), old, received, 0, {"w"}).tensors["w"].tolist() == [1, 1]
    assert arrived(update, ("own:rule", rule), old, received, 5, {"w"}).tensors["w"].tolist() == [0, 0]
    assert seen == {("w", 0), ("w", 1)}


def silent(_arrival: Arrival) -> None:
    pass


def test_a_rule_of_ones_own_is_tried_before_a_run() -> None:
    with pytest.raises(ValueError, match=r"silent' gave None for a region of layer.weight of the shape \(1, 2\)"):
        rules_of(TrainingConfig(asynchronous=f"{__name__}:silent"), "method.train")


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"arrivals": 5},
            "method.train.arrivals=5: only 4 clients are at work in a round; lower it",
        ),
        (
            {"asynchronous": "fedbuff", "arrivals": 9},
            "method.train.arrivals=9: only 8 clients exist, and each begins at most once in a round; lower it",
        ),
        (
            {"asynchronous": "fedbuff", "arrivals": 2, "selection": "oort"},
            "method.train.asynchronous=fedbuff and method.train.selection=oort, which needs rounds whose clients all "
            "begin and answer in it: use another selection rule",
        ),
        (
            {"asynchronous": "fedbuff", "arrivals": 2, "selection": "tier_quota"},
            "method.train.asynchronous=fedbuff and method.train.selection=tier_quota, which needs rounds whose clients "
            "all begin and answer in it: use another selection rule",
        ),
        (
            {"asynchronous": "fedbuff"},
            "method.train.asynchronous=fedbuff needs method.train.arrivals, the number of answers that make a round "
            "(FedBuff's K)",
        ),
        (
            {"asynchronous": "fedasync", "arrivals": 2},
            "method.train.asynchronous=fedasync mixes every answer into the weights: set method.train.arrivals=1, "
            "given 2",
        ),
        (
            {"asynchronous": "fedasync", "arrivals": 1, "processors": ["qsgd"], "options": {"direction": "down"}},
            "method.train.options.direction=down: fedasync would mix the rounding errors of what clients receive into "
            "the weights; use up, or method.train.asynchronous=fedbuff, which adds changes",
        ),
        (
            {"asynchronous": "fedbuff", "arrivals": 2, "selection": "poisson"},
            "method.train.asynchronous=fedbuff and method.train.selection=poisson: a client begins whenever another "
            "ends, so the number at work is fixed; use uniform, or a rule that selects as many clients as asked for",
        ),
        (
            {"arrivals": 2, "privacy": PrivacyConfig(secure=True)},
            "method.train.arrivals=2 and method.train.privacy: which clients count depends on their speed; leave "
            "one out",
        ),
        (
            {"asynchronous": "fedbuff", "arrivals": 2, "local_rule": "scaffold", "server": "replace"},
            "method.train.asynchronous=fedbuff and method.train.local_rule=scaffold: what clients send besides their "
            "change fits only the weights of one round; use sgd or fedprox",
        ),
        (
            {"arrivals": 2, "min_contributors": 3},
            "method.train.min_contributors=3: a round has 2 answers (method.train.arrivals), so that nothing would "
            "ever be trained; lower it",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    tiny_config: Make, refused: Any, changes: dict[str, Any], message: str
) -> None:
    assert refused(federation(tiny_config, **changes)) == message
