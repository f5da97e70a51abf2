"""Rounds with devices that are not always online, jitter, and a link that a round's clients share."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import DevicesConfig, RunConfig
from fedloom.platform.federation.selection import Cohort, choose_cohort, first_online_s, for_client, simulated_devices
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.plugins import ComponentSpec
from fedloom.tiers.availability import DailyAvailability, Intervals, TraceAvailability
from fedloom.tiers.device_files import write_device_table
from fedloom.tiers.devices import generate_device_table

Make = Callable[..., RunConfig]
TASK = Train(Subnet((0,)), LocalSGD(epochs=1, batch_size=1, lr=0.1))
"""What is assigned where nothing is done."""


def with_table(make: Make, path: Path, lines: list[str], **changes: Any) -> RunConfig:
    """Three clients per round of FedAvg's eight, which are online as the lines of a table say, again every 100 s."""
    path.write_text("\n".join(["device_id,on_s,off_s", *lines]))
    train = TrainingConfig(rounds=2, clients_per_round=3, batch_size=16)
    devices = DevicesConfig(availability_table=str(path), availability_period_s=100.0, **changes)
    return make(method=FedAvgConfig(architecture="0-1-2", train=train), devices=devices)


# -- from the configuration --------------------------------------------------------------------------------------------


def test_clients_have_the_intervals_of_their_devices(tiny_config: Make, tmp_path: Path) -> None:
    lines = [f"{device},{device},{device + 2}" for device in (*range(8), 50)]
    config = with_table(tiny_config, tmp_path / "on.csv", lines)
    availability = build_world(config).availability
    assert availability is not None
    assert [availability.interval(c, 0.0) for c in range(8)] == [(c, c + 2.0) for c in range(8)]
    devices = generate_device_table(9, np.random.default_rng(1))
    ids = np.array([7, 50, 5, 4, 3, 2, 1, 0, 6])
    write_device_table(tmp_path / "devices.csv", replace(devices, device_id=ids))
    config.tiers.device_table = str(tmp_path / "devices.csv")
    availability = build_world(config).availability
    assert availability is not None
    assert [availability.interval(c, 0.0)[0] for c in range(8)] == ids[:8].tolist()


def test_what_is_generated_depends_on_the_partitions_seed_and_its_keys(tiny_config: Make) -> None:
    def made(seed: int, **changes: Any) -> Any:
        config = tiny_config(devices=DevicesConfig(availability_table="generated", **changes))
        config.seeds.partition = seed
        availability = build_world(config).availability
        assert isinstance(availability, DailyAvailability)
        return availability.seed, availability.share, availability.day_s

    assert made(5) == (5, 0.35, 86400.0)
    assert made(6, availability_share=0.5, availability_period_s=60.0) == (6, 0.5, 60.0)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([f"{c},0,5" for c in range(7)], "on.csv: device 7 has no interval: give each of 8 clients' devices"),
        ([f"{c},0,105" for c in range(8)], "on.csv: device 0 is online until 105 s, after the period of 100 s"),
        (["0,5,0"], "on.csv: column off_s, row 0: 0 must be after the row's on_s"),
    ],
)
def test_a_table_that_does_not_fit_is_one_line(
    tiny_config: Make, tmp_path: Path, lines: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_world(with_table(tiny_config, tmp_path / "on.csv", lines))


# -- who takes part ----------------------------------------------------------------------------------------------------


def test_few_on_line_among_many_are_all_of_the_cohort(tiny_config: Make) -> None:
    """Three of 100 000 devices: draws among all would miss them, and who is on changes with time."""
    many = np.arange(100_000)
    rows = [(c, 10.0, 20.0) if c in (7, 50_000, 99_999) else (c, 30.0, 40.0 + c % 2) for c in range(100_000)]
    ids, on_s, off_s = (np.array(column) for column in zip(*rows, strict=True))
    availability = TraceAvailability(Intervals(ids, on_s, off_s), many, 100.0)
    world = replace(build_world(tiny_config()), availability=availability, tier_of_client=np.zeros(100_000, dtype=int))
    assert [first_online_s(world, many, now_s) for now_s in (0.0, 15.0, 20.0, 30.0, 41.0)] == [10, 15, 30, 30, 110]

    def chosen(now_s: float, size: int) -> tuple[int, ...]:
        return choose_cohort(world, "s", 0, many, size, ComponentSpec("uniform"), {}, now_s=now_s).client_ids

    assert chosen(10.0, 5) == chosen(10.0, 3) == (7, 50_000, 99_999)
    assert len(chosen(35.0, 5)) == 5
    assert all(c % 2 for c in chosen(40.5, 20))
    assert chosen(25.0, 5) == ()


@given(st.integers(0, 1000), st.floats(0, 1e6), st.integers(1, 8), st.sampled_from(["uniform", "all", "oort"]))
@settings(max_examples=40, deadline=None)
def test_every_rule_selects_only_who_is_on_line(
    some_world: World, seed: int, now_s: float, size: int, rule: str
) -> None:
    world = replace(some_world, availability=DailyAvailability(seed, 0.4))
    everyone = np.arange(8)
    cohort = choose_cohort(world, "s", 3, everyone, size, ComponentSpec(rule), {}, now_s=now_s)
    assert world.availability is not None
    online = world.availability.on_of(everyone, now_s).tolist()
    assert set(cohort.client_ids) <= set(online)
    assert len(cohort.client_ids) == (len(online) if rule == "all" else min(size, len(online)))


@pytest.fixture(scope="module")
def some_world(tmp_path_factory: pytest.TempPathFactory, tiny_config_in: Make) -> World:
    return build_world(tiny_config_in(tmp_path_factory.mktemp("world")))


# -- a round -----------------------------------------------------------------------------------------------------------


def test_the_server_waits_for_the_first_device_and_loses_who_goes_off_line(
    tiny_config: Make, tmp_path: Path, run_stages: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """At 50 s three of eight are online, one of them for a millisecond; at 50.5 s five others."""
    lines = [f"{c},50,60" for c in (0, 1)] + ["2,50,50.001"] + [f"{c},50.5,60" for c in range(3, 8)]
    config = with_table(tiny_config, tmp_path / "on.csv", lines, macs_per_s=[1e6])
    config.method.train.clients_per_round = 4
    world = build_world(config)
    written, state = run_stages(world, build_stages(world)[:1], RunState())
    rounds, clients = written.table("rounds"), written.table("clients")
    first, second = (clients[clients["round"] == r].set_index("client_id") for r in range(2))
    assert set(first.index) == {0, 1, 2}
    assert first["status"].to_dict() == {0: "ok", 1: "ok", 2: "dropped"}
    assert first.loc[2, "error"].startswith("the device went offline after 0.001 s, its work takes ")
    assert first.loc[2, "macs"] == first.loc[2, "bytes_up"] == first.loc[2, "samples"] == 0
    assert first.loc[2, "bytes_down"] == 2500, "a thousandth of 2.5 MB/s"
    lasts_s = first["simulated_s"].max()
    assert rounds["simulated_s"][0] == pytest.approx(50.0 + lasts_s)
    assert state.simulated_s == pytest.approx(rounds["simulated_s"].sum())
    assert 0.5 < lasts_s < 9.0, "so that the others are online when the second round starts"
    assert len(second) == 4
    assert 2 not in second.index
    told = [record.getMessage() for record in caplog.records]
    assert "fedavg: no device is online at 0 s of simulated time, and the server waits for 50 s" in told[0]
    assert "at 50 s of simulated time 3 of 8 devices are online, and the round has 3 of its 4 clients" in told[1]


def test_measurements_go_on_off_line(tiny_config: Make, tmp_path: Path, some_world: World) -> None:
    config = with_table(tiny_config, tmp_path / "on.csv", [f"{c},0,5" for c in range(8)])
    world = build_world(config)
    cohort = Cohort((3,), 1.0, "all")
    assert for_client(world, "evaluation", 0, cohort, 3, TASK).offline_s is None
    assert [for_client(world, "s", 0, cohort, 3, TASK, starts_s=t).offline_s for t in (1.0, 7.0)] == [4.0, 0.0]
    assert for_client(some_world, "s", 0, cohort, 3, TASK, starts_s=1.0).offline_s is None


# -- a round's devices -------------------------------------------------------------------------------------------------


def test_a_round_shares_the_servers_link(tiny_config: Make) -> None:
    config = tiny_config(devices=DevicesConfig(down_bytes_per_s=10.0, up_bytes_per_s=4.0, server_bytes_per_s=24.0))
    world = build_world(config)
    rates = [(p.down_bytes_per_s, p.up_bytes_per_s) for p in simulated_devices(world, "s", 0, [1, 2, 3])]
    assert rates == [(8.0, 4.0)] * 3
    assert simulated_devices(world, "s", 0, []) == []


def test_jitter_is_of_a_client_in_a_round_whoever_else_takes_part(tiny_config: Make) -> None:
    world = build_world(tiny_config(devices=DevicesConfig(jitter=0.5)))
    alone = simulated_devices(world, "s", 4, [3])[0]
    assert alone == simulated_devices(world, "s", 4, [1, 3, 5])[1]
    others = [simulated_devices(world, stage, r, [c])[0] for stage, r, c in (("s", 5, 3), ("t", 4, 3), ("s", 4, 2))]
    assert len({p.macs_per_s / world.profile(3).macs_per_s for p in (alone, *others)}) == 4


def test_the_table_shows_jitter_and_the_link(tiny_config: Make, run_in_memory: Any) -> None:
    """Of three clients with the same samples, each takes its own time, and longer on a link that they share."""

    def times(**devices: Any) -> list[float]:
        train = TrainingConfig(rounds=1, clients_per_round=3, batch_size=16)
        config = tiny_config(
            method=FedAvgConfig(architecture="0-1-2", train=train, evaluate=False), devices=DevicesConfig(**devices)
        )
        written = run_in_memory(config)[1]
        return list(written.table("clients")["simulated_s"])

    plain, shared, jittered = times(), times(server_bytes_per_s=3e5), times(jitter=0.5)
    assert all(s > p for s, p in zip(shared, plain, strict=True))
    factors = {j / p for j, p in zip(jittered, plain, strict=True)}
    assert len(factors) == 3
    assert min(factors) > 0.1
