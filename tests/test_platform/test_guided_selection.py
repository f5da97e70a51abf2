"""Selection that uses what the server knows: Oort, PyramidFL, power of choice, round robin, quotas; thinned updates."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.stats import chisquare

from fedloom.platform.averaging.processors import kept_of, saved_by, smallest
from fedloom.platform.clients.assignments import Task
from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.config import DevicesConfig, RunConfig, TiersConfig
from fedloom.platform.federation.selection import Choice, ClientRecord, Cohort, as_asked, select
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.oort import oort, utilities_of
from fedloom.platform.methods.pyramidfl import pyramidfl
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.simple_selection import power_of_choice, round_robin, tier_quota
from fedloom.platform.plugins import ComponentSpec
from fedloom.tiers.devices import DeviceProfile

Make = Callable[..., RunConfig]


def record(loss_norm: float = 1.0, samples: int = 10, simulated_s: float = 1.0, **more: Any) -> ClientRecord:
    known = {"participations": 1, "answers": 1, "last_round": 0, "loss": loss_norm, **more}
    return ClientRecord(loss_norm=loss_norm, samples=samples, simulated_s=simulated_s, **known)


def choice(
    history: Mapping[int, ClientRecord], clients: int = 10, size: int = 4, round_: int = 1, seed: int = 0, **more: Any
) -> Choice:
    known = {"available": lambda _: True, "num_samples": lambda _: 10, "always": True, **more}
    return Choice(
        round=round_, size=size, eligible=np.arange(clients), rng=np.random.default_rng(seed), history=history, **known
    )


# -- Oort -------------------------------------------------------------------------------------------------------------


def test_oorts_utilities_by_hand() -> None:
    history = {
        0: record(2.0, 10, 1.0),  # 20
        1: record(1.0, 10, 4.0, last_round=1),  # 10, slow
        2: record(3.0, 10, 1.0),  # 30, the most
    }
    # Round 2 counts as 3.  T is one second.
    found = utilities_of(choice(history, round_=2), dict(history), 1.0, 2.0, 1.0)
    bonus = math.sqrt(0.1 * math.log(3))
    assert found == {
        0: pytest.approx(0.5 + bonus),  # (20 - 10) / (30 - 10)
        1: pytest.approx((0.0 + bonus / math.sqrt(2)) * (1 / 4) ** 2),
        2: pytest.approx(1.0 + bonus),
    }


def test_oort_clips_utilities_at_the_quantile() -> None:
    history = {i: record(1.0 + i, last_round=1) for i in range(9)} | {9: record(1000.0, last_round=1)}
    found = utilities_of(choice(history), dict(history), math.inf, 2.0, 0.8)
    assert found[9] == found[8] == max(found.values())
    assert found[8] - found[7] == pytest.approx(1 / 8)


def test_oort_without_exploration_is_greedy() -> None:
    history = {i: record(float(1 + (7 * i) % 10), last_round=1) for i in range(10)}
    best = sorted(history, key=lambda c: -(history[c].loss_norm or 0.0))[:4]
    for seed in range(20):
        cohort = oort(choice(history, seed=seed), exploration=0.0, least_exploration=0.0, cutoff=1.0, clip=1.0)
        assert list(cohort.client_ids) == sorted(best)


def test_oort_draws_those_above_the_cutoff_by_their_utility() -> None:
    history = {i: record(float(100 - i), last_round=1) for i in range(10)}
    counts = Counter[int]()
    for seed in range(600):
        drawn = oort(
            choice(history, size=2, seed=seed), exploration=0.0, least_exploration=0.0, cutoff=0.5, preferred=1.0
        )
        counts.update(drawn.client_ids)
    assert max(counts) < 8, "utilities below half of the second's are not drawn"
    assert counts[0] > counts[4] > counts[7]


def test_oort_explores_by_speed_and_less_and_less() -> None:
    devices = [DeviceProfile(str(i), 1e9 * (1 + 9 * (i % 2)), 1e6, 1e6) for i in range(60)]
    counts = Counter[int]()
    for seed in range(200):
        cohort = oort(choice({}, clients=60, size=10, round_=0, seed=seed, device=lambda c: devices[c]))
        assert set(cohort.reasons.values()) == {"explored"}
        counts.update(c % 2 for c in cohort.client_ids)
    # 50 of 60 are drawn to choose from; of these ten, one after the other: the fast ones are ten times as likely.
    assert counts[1] > 4 * counts[0]
    history = {i: record(last_round=1) for i in range(30)}
    explored = [
        sum(r == "explored" for r in oort(choice(history, 60, 10, round_)).reasons.values()) for round_ in (1, 30, 200)
    ]
    assert explored == [8, 4, 2]  # .9 * .98, .9 * .98^30 = .49, and the least: .2


def test_oort_explores_at_times_where_its_share_of_the_cohort_is_less_than_one_client() -> None:
    history = {i: record(last_round=1) for i in range(30)}
    cohorts = [oort(choice(history, 60, 2, 200, seed=seed)) for seed in range(100)]  # .2 of two clients
    explored = [sum(r == "explored" for r in cohort.reasons.values()) for cohort in cohorts]
    assert set(explored) == {0, 1}
    assert 25 < sum(explored) < 55


def test_oort_fills_the_cohort_when_everybody_is_explored() -> None:
    cohort = oort(choice({i: record() for i in range(10)}, size=6))
    assert len(cohort.client_ids) == 6


def test_oorts_blacklist_rests_at_most_thirty_percent() -> None:
    history = {i: record(100.0 if i < 5 else 1.0, participations=20 - i if i < 5 else 1) for i in range(10)}
    greedy = {"exploration": 0.0, "least_exploration": 0.0}
    resting = oort(choice(history, size=7), blacklist=10, **greedy)
    assert not {0, 1, 2} & set(resting.client_ids), "those who took part most often"
    assert {0, 1, 2} < set(oort(choice(history, size=7), **greedy).client_ids)


def test_oorts_pacer_allows_slower_clients_when_utility_falls() -> None:
    def quantile(sums: list[float]) -> float:
        memory = {"sums": sums[:-1], "exploited": [0], "quantile": 0.3}
        history = {0: record(sums[-1], 1)}
        cohort = oort(choice(history, round_=len(sums), memory=memory), window=2, pacer=0.05)
        assert cohort.memory["sums"] == sums
        return float(cohort.memory["quantile"])

    assert quantile([5.0, 5.0, 4.0, 3.0]) == pytest.approx(0.35)
    assert quantile([5.0, 5.0, 6.0, 5.0]) == 0.3
    assert quantile([5.0, 5.0, 4.0]) == 0.3, "no whole window"


def released(history: Mapping[int, ClientRecord], **more: Any) -> Cohort:
    greedy = {"exploration": 0.0, "least_exploration": 0.0, "variant": "released"}
    options = {name: more.pop(name) for name in [*more] if name in ("cutoff", "clip", "preferred", "window", "pacer")}
    return oort(choice(history, **more), **{**greedy, **options})


def test_oorts_released_utilities_by_hand() -> None:
    history = {
        i: record(v, 10, last_round=1, answered=1) for i, v in enumerate((2.0, 4.0, 6.0, 10.0))
    }  # 20, 40, 60, 100
    # Clients 4 and 5 are not explored; their 5 and 10 samples are utilities.  Of 5, 10, 20, 40, 60, 100 the quantile .7
    # is 60: the largest utility is cut there, but still divides.
    given_ = choice(history, clients=6, sizes_of=lambda ids: np.where(ids == 4, 5.0, 10.0), round_=3)
    found = utilities_of(given_, dict(history), math.inf, 2.0, 0.7, released=True)
    least, bonus = 0.999 * 5, math.sqrt(0.1 * math.log(4) / 2)
    assert found == {
        c: pytest.approx((value - least) / (100 - least) + bonus) for c, value in enumerate((20, 40, 60, 60))
    }


def test_oorts_released_cutoff_is_of_the_rank_below() -> None:
    history = {i: record(v, 1, last_round=0, answered=0) for i, v in enumerate((100.0, 90.0, 50.0, 45.0, 10.0))}
    drawn = Counter[int]()
    for seed in range(200):
        drawn.update(released(history, clients=5, size=1, seed=seed, cutoff=0.95).client_ids)
    assert set(drawn) == {0, 1}, "90 is the second's; the paper's rule takes .95 of the first's: it alone"


def test_oorts_released_exploration_is_by_samples_and_ends_for_good() -> None:
    samples = np.arange(1.0, 41.0)
    drawn = Counter[int]()
    for seed in range(300):
        given_ = choice({}, clients=40, size=2, round_=0, seed=seed, sizes_of=lambda ids: samples[ids])
        drawn.update(oort(given_, variant="released", exploration=1.0, exploration_decay=1.0).client_ids)
    assert min(drawn) == 30, "five times two, with most samples"
    history = {i: record(last_round=1, answered=1) for i in range(10)}
    cohort = oort(choice(history, size=10, memory={"exploited": []}), variant="released")
    assert (len(cohort.client_ids), cohort.memory["all_explored"]) == (10, True)
    later = oort(choice({}, size=4, round_=9, memory=cohort.memory), variant="released")
    assert later.memory["all_explored"], "also if there are new clients"


def test_oorts_released_durations_and_exploration_are_of_clients_that_are_offline_too() -> None:
    history = {0: record(samples=10, simulated_s=1.0), 1: record(samples=10, simulated_s=4.0)}
    # All others are offline, and with 100 samples each they take ten times the median: 25 s.
    given_ = choice(history, size=2, sizes_of=lambda ids: np.where(ids < 2, 10.0, 100.0))
    online = oort(given_.among(np.arange(2)), variant="released", preferred=0.3)
    assert not online.memory["all_explored"]
    assert online.reasons[0] == online.reasons[1], "T is 25 s, so that neither is slow"


@pytest.mark.parametrize(
    ("before", "now", "quantile"),
    [(100.0, 109.0, 0.35), (100.0, 91.0, 0.35), (100.0, 120.0, 0.3), (100.0, 60.0, 0.3), (100.0, 700.0, 0.25)],
)
def test_oorts_released_pacer(before: float, now: float, quantile: float) -> None:
    # Windows of two rounds. The last round's mean is that of client 0, which answered; client 1 did not.
    history = {0: record(now / 20, 10, last_round=2, answered=2), 1: record(9.0, 10, last_round=2, answered=1)}
    memory = {"means": [before / 2, before / 2, now / 2], "exploited": [0, 1], "quantile": 0.3}
    cohort = released(history, clients=2, round_=3, memory=memory, window=2, pacer=0.05)
    assert cohort.memory["means"][3] == pytest.approx(now / 2, rel=1e-3)
    assert cohort.memory["quantile"] == pytest.approx(quantile)


# -- PyramidFL ---------------------------------------------------------------------------------------------------------


def test_pyramidfl_by_hand() -> None:
    # Two clients of 10 MB: 1 s down at 10 MB/s, 2 s up at 5 MB/s.  They train for 3e9 * macs / 3e9 = 4 s and 1 s.
    device = DeviceProfile("d", 3e9, 10e6, 5e6)
    history = {
        0: record(9.0, 10, 7.0, last_round=1, macs=4e9, bytes_down=10_000_000),
        1: record(3.0, 10, 4.0, last_round=1, macs=1e9, bytes_down=10_000_000),
    }
    cohort = pyramidfl(
        choice(history, clients=2, size=2, device=lambda _: device, epochs=2),
        exploration=0.0,
        least_exploration=0.0,
        dropped_low=0.0,
        dropped_high=0.6,
    )
    assert cohort.client_ids == (0, 1)
    assert cohort.sends == {0: 1.0, 1: pytest.approx(0.7)}  # the second of two leaves out 0.3
    # Client 0: 4 + 1 + 2 = 7 s.  Client 1: 1 + 1 + 0.7 * 2 = 3.4 s, and half a second per epoch: 7 more.
    assert cohort.epochs == {1: 9}
    assert cohort.memory["epochs"] == {"0": [[1, 2]], "1": [[1, 9]]}


def test_pyramidfl_counts_the_epochs_of_the_last_answer() -> None:
    device = DeviceProfile("d", 3e9, 10e6, 5e6)
    # Client 1 answered in round 2 with 4 epochs, was asked for 11 in round 5, and dropped out.
    history = {
        0: record(9.0, 10, 9.0, last_round=5, macs=8e9, answered=5),
        1: record(3.0, 10, 4.0, last_round=5, macs=4e9, answered=2),
    }
    memory = {"epochs": {"0": [[5, 2]], "1": [[2, 4], [5, 11]]}}
    given_ = choice(history, clients=2, size=2, round_=6, device=lambda _: device, epochs=2, memory=memory)
    cohort = pyramidfl(given_, exploration=0.0, least_exploration=0.0)
    # Client 0 takes 2 x 4 s; client 1 one second per epoch: 2, and 6 more.
    assert cohort.epochs == {1: 8}
    assert cohort.memory["epochs"] == {"0": [[5, 2], [6, 2]], "1": [[2, 4], [6, 8]]}


# -- the simple ones ---------------------------------------------------------------------------------------------------


def test_power_of_choice_takes_unknown_losses_first_then_the_largest() -> None:
    history = {i: record(float(i)) for i in range(8)}
    cohort = power_of_choice(choice(history), candidates=10)
    assert cohort.client_ids == (6, 7, 8, 9)
    assert cohort.reasons == {6: "loss 6", 7: "loss 7", 8: "unknown loss", 9: "unknown loss"}


def test_power_of_choice_does_not_prefer_low_ids_among_equal_losses() -> None:
    counts = Counter[int]()
    for seed in range(500):
        counts.update(power_of_choice(choice({}, seed=seed), candidates=10).client_ids)
    assert chisquare([counts[c] for c in range(10)]).pvalue > 0.001


def test_power_of_choice_draws_by_samples() -> None:
    sizes = np.array([1.0, 1.0, 1.0, 97.0])
    counts = Counter[int]()
    for seed in range(400):
        one = choice({}, clients=4, size=1, seed=seed, sizes_of=lambda ids: sizes[ids])
        counts.update(power_of_choice(one, candidates=1).client_ids)
    assert 375 < counts[3] <= 398
    without = choice({}, clients=4, size=1, sizes_of=lambda _: np.array([0.0, 0.0, 1.0, 0.0]))
    assert power_of_choice(without, candidates=4).client_ids == (2,), "those without samples are never drawn"


def test_round_robin_gives_everybody_a_turn() -> None:
    memory: Mapping[str, Any] = {}
    turns: list[tuple[int, ...]] = []
    for _ in range(5):
        cohort = round_robin(choice({}, clients=7, size=3, memory=memory, always=False, available=lambda c: c != 4))
        turns.append(cohort.client_ids)
        memory = cohort.memory
    assert turns == [(0, 1, 2), (3, 5, 6), (0, 1, 2), (3, 5, 6), (0, 1, 2)]


def test_round_robin_goes_on_after_a_round_in_which_few_were_online() -> None:
    few = choice({}, clients=10, size=4, memory={"next": 6}).among(np.array([2, 5, 7]))
    cohort = round_robin(few)
    assert cohort.client_ids == (2, 5, 7)
    assert round_robin(choice({}, clients=10, size=4, memory=cohort.memory)).client_ids == (6, 7, 8, 9)


def test_quotas_of_tiers() -> None:
    tiers = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
    given_ = choice({}, size=5, tiers_of=lambda ids: tiers[ids])
    assert Counter(tiers[list(tier_quota(given_, quota=[1, 3, 1]).client_ids)].tolist()) == {0: 1, 1: 3, 2: 1}
    assert Counter(tiers[list(tier_quota(given_).client_ids)].tolist()) == {0: 2, 1: 2, 2: 1}
    with pytest.raises(ValueError, match=r"quota=\[4, 4, 4\]: give one number for each of the 3 tiers, 5 clients"):
        tier_quota(given_, quota=[4, 4, 4])
    highest = replace(given_, eligible=np.array([7, 8, 9]), size=3)
    assert tier_quota(highest).client_ids == (7, 8, 9), "of a stage for one tier's clients all are of that tier"


def test_fewer_clients_than_tiers_let_the_tiers_take_turns() -> None:
    one_of_each = {"clients": 3, "size": 2, "tiers_of": lambda ids: ids}
    turns = [tier_quota(choice({}, round_=round_, **one_of_each)).client_ids for round_ in range(4)]
    assert turns == [(0, 1), (0, 2), (1, 2), (0, 1)]


@pytest.mark.parametrize(
    "rule",
    [
        ComponentSpec("oort"),
        ComponentSpec("oort", (("variant", "released"),)),
        *map(ComponentSpec, ("pyramidfl", "power_of_choice", "round_robin", "tier_quota")),
    ],
    ids=lambda rule: "-".join([rule.name, *(str(value) for _, value in rule.options)]),
)
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 15), st.sets(st.integers(0, 11)), st.integers(0, 99))
def test_cohorts_are_distinct_ascending_available_and_full(
    rule: ComponentSpec, clients: int, size: int, known: set[int], seed: int
) -> None:
    def available(client_id: int) -> bool:
        return client_id % 4 != 3

    history = {c: record(1.0 + c, last_round=1, macs=1e9, bytes_down=1000) for c in known if c < clients}
    for always in (True, False):
        cohort = select(choice(history, clients, size, 3, seed, always=always, available=available), rule)
        ready = [c for c in range(clients) if always or available(c)]
        assert list(cohort.client_ids) == sorted(set(cohort.client_ids))
        assert set(cohort.client_ids) <= set(ready)
        assert len(cohort.client_ids) == min(size, len(ready))


# -- thinned updates ---------------------------------------------------------------------------------------------------


def test_only_the_largest_changes_are_sent() -> None:
    changes = {"a": torch.tensor([0.1, 3.0]), "b": torch.tensor([[-5.0, 0.2, 0.0]])}
    left_out = smallest(changes, 0.4)
    assert left_out["a"].tolist() == [True, False]
    assert left_out["b"].tolist() == [[False, True, True]]
    assert not any(part.any() for part in smallest(changes, 1.0).values())


def test_the_bytes_of_a_thinned_update_are_those_of_its_values_and_their_places() -> None:
    assert kept_of(1000, 0.1) == 100
    assert saved_by(1000, 900) == 3600 - 125, "a mask of a bit each"
    assert saved_by(1000, 999) == 3996 - 4, "one place"
    assert saved_by(1000, 10) == 0, "a mask would cost more than it saves"
    assert saved_by(1000, 0) == 0


# -- in runs -----------------------------------------------------------------------------------------------------------


def fedavg(tiny_config: Make, **train: Any) -> RunConfig:
    training = TrainingConfig(**{"rounds": 4, "clients_per_round": 3, "batch_size": 16, **train})
    tiers = TiersConfig(count=2, paths=2000, rho_high=0.5, device_table="generated")
    return tiny_config(method=FedAvgConfig(train=training), tiers=tiers, devices=DevicesConfig(dropout=0.1))


def test_pyramidfls_clients_train_longer_and_send_less(tiny_config: Make, run_in_memory: Any) -> None:
    options = {"exploration": 0.3, "dropped_low": 0.2}
    _, memory, _ = run_in_memory(fedavg(tiny_config, selection="pyramidfl", options=options, rounds=6))
    clients = [row for record in memory.records for table, row in record.rows if table == "clients"]
    trained = [row for row in clients if row["stage"] == "fedavg" and row["status"] == "ok"]
    explored = [row for row in trained if row["selection_reason"] == "explored"]
    exploited = [row for row in trained if row["selection_reason"].startswith("utility")]
    assert explored
    assert exploited
    assert all(row["bytes_up"] == row["bytes_down"] for row in explored)
    assert all(row["bytes_up"] < row["bytes_down"] for row in exploited)
    assert len({row["steps"] for row in exploited}) > 1 or {row["steps"] for row in exploited} > {1}


def test_what_a_rule_remembers_ends_with_its_stage(tiny_config: Make, run_in_memory: Any) -> None:
    config = replace(fedavg(tiny_config, selection="round_robin"), tiers=TiersConfig(count=2, paths=2000))
    _, memory, _ = run_in_memory(config)
    states = [record.state for record in memory.records if record.state is not None]
    kept = [state.data.get("selection") for state in states if state.stage == 0 and state.round]
    assert kept == [{"next": 3}, {"next": 6}, {"next": 1}, {"next": 4}]
    assert "selection" not in states[-1].data


def every_other_round(choice: Choice) -> Cohort:
    """A rule that remembers something in rounds 0, 2, ... alone."""
    return Cohort((0, 1, 2), memory={} if choice.round % 2 else {"round": choice.round})


def test_what_a_rule_does_not_return_again_is_forgotten(tiny_config: Make, run_in_memory: Any) -> None:
    _, memory, _ = run_in_memory(fedavg(tiny_config, selection=f"{__name__}:every_other_round"))
    kept = [memory.state(round_).data.get("selection") for round_ in range(4)]
    assert kept == [{"round": 0}, {}, {"round": 2}, {}]


def test_a_wrong_option_is_refused_before_a_run_begins(tiny_config: Make) -> None:
    config = fedavg(tiny_config, selection="tier_quota", options={"quota": [9, 9]})
    with pytest.raises(ValueError, match=r"quota=\[9, 9\]: give one number for each of the 2 tiers, 3 clients"):
        build_stages(build_world(config))


def test_tasks_that_take_no_epochs_of_their_own_refuse() -> None:
    task = cast(Task, object())
    assert as_asked(task, Cohort((3, 5), reason="own", epochs={5: 2}), 3) is task
    with pytest.raises(ValueError, match="selection rule own gives clients epochs or shares of their own"):
        as_asked(task, Cohort((3, 5), reason="own", epochs={5: 2}), 5)


def seconds_until(run_in_memory: Any, config: RunConfig, loss: float) -> float:
    """The simulated seconds until the validation loss is below a value."""
    _, memory, _ = run_in_memory(config)
    rows = [(table, row) for record in memory.records for table, row in record.rows]
    took_s = [row["simulated_s"] for table, row in rows if table == "rounds"]
    scored = [row for table, row in rows if table == "evaluations" and row["metric"] == "loss"]
    below = [row["round"] for row in scored if row["value"] <= loss]
    assert below, f"the loss ends at {scored[-1]['value']}"
    return float(sum(took_s[: min(below)]))


@pytest.mark.slow
def test_oort_and_pyramidfl_reach_a_loss_in_less_simulated_time_than_uniform(
    tiny_config: Make, run_in_memory: Any
) -> None:
    times_s = {}
    for rule, rounds in (("uniform", 24), ("oort", 25), ("pyramidfl", 10)):
        train = TrainingConfig(
            rounds=rounds,
            clients_per_round=6,
            batch_size=16,
            epochs=2,
            momentum=0.0,
            selection=rule,
            options={} if rule == "uniform" else {"exploration": 0.5},
            evaluate_every=1,
        )
        config = tiny_config(
            data=DataConfig(num_clients=60, alpha=0.5),
            method=FedAvgConfig(architecture="largest", train=train, evaluate=False),
            tiers=TiersConfig(count=2, paths=2000, rho_high=0.5, device_table="generated"),
        )
        times_s[rule] = seconds_until(run_in_memory, config, 1.9)
    assert times_s["oort"] < 0.75 * times_s["uniform"]
    assert times_s["pyramidfl"] < 0.75 * times_s["uniform"]
