"""FedAvg of one architecture, and with other rules in its slots: what is averaged, kept, measured and refused."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.platform.averaging.average import Update, average
from fedloom.platform.clients.assignments import ClientResult, Measurement
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import Plan, RunState, TrainingStage
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import RunFailedError
from fedloom.platform.federation.selection import Choice, unpacked
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.results.checkpoint import load_model

Make = Callable[..., RunConfig]


def fedavg(make: Make, *folder: Path, architecture: str | None = "0-1-2", **train: Any) -> RunConfig:
    """Two rounds of three clients; keywords change the training."""
    training = replace(TrainingConfig(rounds=2, clients_per_round=3, batch_size=16), **train)
    return make(*folder, method=FedAvgConfig(architecture=architecture, train=training))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_config_in: Make, results_of: Any) -> Any:
    """One whole run, for all tests that only look at it."""
    return results_of(fedavg(tiny_config_in, tmp_path_factory.mktemp("fedavg"), evaluate_every=2))


# -- whole runs -------------------------------------------------------------------------------------------------------


def test_fedavg_trains_one_architecture(finished: Any) -> None:
    rounds, clients = finished["rounds"], finished["clients"]
    assert rounds["stage"].tolist() == ["fedavg", "fedavg", "evaluation"]
    assert rounds["clients_planned"].tolist() == [3, 3, 8]
    assert set(clients["architecture"]) == {"0-1-2"}
    (model,) = finished["models"].to_dict("records")
    assert (model["architecture"], model["tier"]) == ("0-1-2", "")
    assert load_model(finished.paths, "fedavg")[1]["architecture"] == "0-1-2"


def test_the_model_is_for_no_tier_and_is_scored_on_every_client(finished: Any) -> None:
    rows = finished["evaluations"]
    final = rows[(rows["stage"] == "evaluation") & (rows["metric"] == "accuracy")]
    assert set(final["model"]) == {"fedavg"}
    own, central = final[final["client_id"].notna()], final[final["client_id"].isna()]
    assert sorted(own["client_id"]) == list(range(8))
    assert dict(zip(central["split"], central["samples"], strict=True)) == {"validation": 32, "test": 80}
    assert set(central["tier"]) == {"server"}


def test_validation_scores_begin_before_the_first_round_and_end_after_the_last(finished: Any) -> None:
    rows = finished["evaluations"]
    watched = rows[(rows["stage"] == "fedavg") & (rows["metric"] == "accuracy")]
    assert watched["round"].tolist() == [0, 2], "evaluate_every=2, and two rounds"
    final = rows[(rows["stage"] == "evaluation") & (rows["split"] == "validation") & (rows["metric"] == "accuracy")]
    assert watched["value"].tolist()[-1] == final["value"].item(), "of the same weights"


def test_only_clients_of_a_tier_and_above_train_for_it(tiny_config: Make) -> None:
    config = fedavg(tiny_config, architecture="largest", clients_per_round=None)
    world = build_world(config)
    everybody, highest = range(world.num_clients), len(world.tiers)
    assert 0 < len(world.eligible_by_tier[-1]) < world.num_clients
    for tier, able in ((None, everybody), (highest, world.eligible_by_tier[-1])):
        config.method.tier = tier
        (training, _) = build_stages(build_world(config))
        planned = training.plan(training.begin(RunState()))
        assert sorted(a.client_id for a in planned.assignments if a.client_id is not None) == list(able)
    config.method.tier = 1
    with pytest.raises(ValueError, match=r"method.tier=1: tier1 may spend .*architecture 2-2-2 costs .* give a higher"):
        build_stages(build_world(config))
    config.method.tier = highest
    config.tiers.shares = [*[1.0 / (highest - 1)] * (highest - 1), 0.0]
    with pytest.raises(ValueError, match=rf"method.tier={highest}: no client is of tier{highest} or above"):
        build_stages(build_world(config))
    config.method.tier = highest + 1
    with pytest.raises(ValueError, match=rf"method.tier={highest + 1}: there are {highest} tiers"):
        build_stages(build_world(config))


def test_without_an_evaluation_the_training_is_all_there_is(tiny_config: Make) -> None:
    config = fedavg(tiny_config)
    config.method.evaluate = False
    assert [stage.name for stage in build_stages(build_world(config))] == ["fedavg"]


# -- devices that never answer ----------------------------------------------------------------------------------------


def test_lost_devices_cost_the_time_that_their_answers_would_have_cost(tiny_config: Make, train_in_memory: Any) -> None:
    config = fedavg(tiny_config, rounds=1, clients_per_round=8)
    config.devices.macs_per_s = [1e5, 3e5, 7e5][: config.tiers.count]
    times = []
    for dropout in (0.0, 0.5):
        config.devices.dropout = dropout
        written = train_in_memory(config)
        times.append(written.table("clients").set_index("client_id")[["status", "simulated_s"]])
        assert written.table("rounds")["simulated_s"].item() == times[-1]["simulated_s"].max()
    assert 0 < (times[1]["status"] == "dropped").sum() < 8
    assert times[1]["simulated_s"].tolist() == times[0]["simulated_s"].tolist()


def test_a_run_whose_clients_never_answer_warns_and_fails(
    tiny_config: Make, caplog: pytest.LogCaptureFixture, run_stages: Any
) -> None:
    config = fedavg(tiny_config)
    config.devices.dropout = 1.0
    world = build_world(config)
    with pytest.raises(RunFailedError, match=r"fedavg, at its end: no update arrived in any of the 2 rounds of fed"):
        run_stages(world, build_stages(world), RunState())
    assert "fedavg, round 2: no update arrived (3 dropped), so nothing was trained; 2 such rounds" in caplog.text
    stage, trained = build_stages(world)[0], replace(RunState(), stage=1, round=2)
    ended = stage.end(replace(stage.begin(trained).with_data("unanswered", 2), round=2))
    assert "unanswered" not in ended.state.data, "after a stage that has trained it is a warning"
    assert "no update arrived in any of the 2 rounds" in caplog.messages[-1]


def test_a_model_at_chance_whose_clients_are_not_is_warned_of_once(
    tiny_config: Make, caplog: pytest.LogCaptureFixture
) -> None:
    world, stage = training(fedavg(tiny_config, rounds=20))
    assert world.space.keeps_statistics

    def compared(index: int, clients: float, model: float) -> int:
        """The number of warnings so far."""
        score = Measurement("fedavg", "0-1-2", "validation", "accuracy", model, 32)
        reports = [ClientResult(client_id=0, tier="tier1", metric=clients, samples=10), ClientResult(tier="server")]
        results = [reports[0], replace(reports[1], measurements=(score,))]
        stage.warnings.after_round(index, {}, results)
        return len(caplog.messages)

    assert compared(4, 0.82, 0.10) == 0, "the first rounds say nothing"
    assert compared(6, 0.82, 0.16) == 0, "data of ten classes: chance is .1"
    assert compared(6, 0.45, 0.10) == 0
    assert compared(6, 0.82, 0.10) == 1
    assert "fedavg, round 7: the clients' accuracy is 0.82 with their own networks" in caplog.text
    assert "with running statistics on validation data is 0.10: the running statistics of its batch" in caplog.text
    assert compared(7, 0.82, 0.10) == 1


# -- what a round makes of the clients' work --------------------------------------------------------------------------


def training(config: RunConfig) -> tuple[World, TrainingStage]:
    world = build_world(config)
    stage = build_stages(world)[0]
    assert isinstance(stage, TrainingStage)
    return world, stage


def updates_of(world: World, plan: Plan, state: RunState) -> list[Update]:
    """What the clients of a plan send, each by a worker of its own."""
    weights, found = state.weights("fedavg"), []
    for assignment in plan.assignments:
        outcome = assignment.task.run(Worker(world.spec), assignment, weights)
        assert outcome.update is not None
        found.append(outcome.update)
    return found


def by_samples(world: World, plan: Plan, updates: list[Update]) -> dict[str, Tensor]:
    """The mean weighted by the clients' samples, of whatever floats, written out."""
    sizes = [world.data.size(a.client_id or 0, "train") for a in plan.assignments]
    total = sum(sizes)
    return {
        name: sum((n * u.tensors[name].detach().double() for n, u in zip(sizes, updates, strict=True)), torch.zeros(()))
        / total
        for name, tensor in updates[0].tensors.items()
        if tensor.is_floating_point()
    }


def test_a_round_is_the_mean_by_samples(tiny_config: Make, step_through: Any) -> None:
    world, stage = training(fedavg(tiny_config))
    stepper = step_through(world, stage, RunState())
    before = stepper.state
    stepper.step()
    (plan,) = stepper.plans
    for name, expected in by_samples(world, plan, updates_of(world, plan, before)).items():
        found = stepper.state.weights("fedavg")[name].double()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)


def test_server_momentum_goes_on_from_round_to_round_and_is_not_kept(tiny_config: Make, step_through: Any) -> None:
    config = fedavg(tiny_config, server="fedavgm", options={"server_momentum": 0.5, "server_lr": 2.0})
    world, stage = training(config)
    stepper = step_through(world, stage, RunState())
    states = [stepper.state]
    for _ in range(2):
        stepper.step()
        states.append(stepper.state)
    means = [by_samples(world, p, updates_of(world, p, s)) for p, s in zip(stepper.plans, states, strict=False)]
    weights = [state.weights("fedavg") for state in states]
    for name in weights[0]:
        if name not in world.space.parameter_names:
            continue
        first = means[0][name] - weights[0][name]
        velocity = 0.5 * first + (means[1][name] - weights[1][name])
        for after, before, change in ((1, 0, first), (2, 1, velocity)):
            found = weights[after][name].double()
            torch.testing.assert_close(found, weights[before][name] + 2.0 * change, rtol=1e-4, atol=1e-5, msg=name)
    assert "server-fedavg" in stepper.state.groups
    assert set(stage.end(stepper.state).state.groups) == {"fedavg"}


@pytest.mark.parametrize("server", ["fedavgm", "fedadagrad", "fedadam", "fedyogi"])
def test_statistics_are_averaged_whatever_the_server_rule(tiny_config: Make, step_through: Any, server: str) -> None:
    world, stage = training(fedavg(tiny_config, server=server))
    stepper = step_through(world, stage, RunState())
    before = stepper.state
    stepper.step()
    (plan,) = stepper.plans
    mean = average(before.weights("fedavg"), updates_of(world, plan, before))
    after, parameters = stepper.state.weights("fedavg"), world.space.parameter_names
    buffers = {name for name in after if name not in parameters}
    assert any("running_var" in name for name in buffers)
    assert any("num_batches_tracked" in name for name in buffers)
    for name in buffers:
        torch.testing.assert_close(after[name], mean[name], msg=name)
    moved = [not torch.allclose(after[name], mean[name]) for name in after if name in parameters]
    assert any(moved) == (server != "fedavgm"), "the first step of server momentum is the mean"
    kept = stepper.state.weights("server-fedavg")
    assert {name.split("/", 1)[1] for name in kept} == {name for name in after if name in parameters}


def test_a_strong_pull_keeps_clients_where_they_began(tiny_config: Make, step_through: Any) -> None:
    def distance(**changes: Any) -> float:
        world, stage = training(fedavg(tiny_config, lr=0.05, momentum=0.0, epochs=3, **changes))
        stepper = step_through(world, stage, RunState())
        before = stepper.state.weights("fedavg")
        stepper.step()
        after = stepper.state.weights("fedavg")
        return sum((after[n] - before[n]).square().sum().item() for n in world.space.parameter_names if n in after)

    free, pulled = distance(), distance(local_rule="fedprox", options={"mu": 10.0})
    assert 0 < pulled < 0.5 * free
    assert distance(local_rule="fedprox", options={"mu": 0.0}) == free


def test_all_clients_take_part_if_no_number_is_given(tiny_config: Make) -> None:
    for changes in ({"clients_per_round": None}, {"clients_per_round": 8, "selection": "all"}):
        _, stage = training(fedavg(tiny_config, **changes))
        planned = stage.plan(stage.begin(RunState())).assignments
        assert sorted(a.client_id for a in planned) == list(range(8))
        assert {(a.selection_probability, a.selection_reason) for a in planned} == {(1.0, "all")}


def test_a_selection_rule_of_ones_own_remembers_the_clients(
    tiny_config: Make, run_in_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def newcomers(choice: Choice) -> list[int]:
        """Those that took part least often, the lowest ids first."""
        return sorted(choice.eligible.tolist(), key=lambda c: (choice.record(c).participations, c))[: choice.size]

    module = ModuleType("own_cohorts")
    module.newcomers = newcomers  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_cohorts", module)
    config = fedavg(tiny_config, rounds=3, selection="own_cohorts:newcomers", loss_norms=True)
    _, memory, ended = run_in_memory(config)
    rows = memory.table("clients")
    rows = rows[rows["stage"] == "fedavg"]
    chosen = [sorted(of_round["client_id"]) for _, of_round in rows.groupby("round")]
    assert chosen == [[0, 1, 2], [3, 4, 5], [0, 6, 7]]
    # What is remembered is in the checkpoint: a resumed run goes on with it.
    history = unpacked(memory.state(2).data["history"])
    last = {row["client_id"]: row for row in rows.to_dict("records")}
    assert {c: (record.participations, record.last_round) for c, record in history.items()} == {
        c: (2 if c == 0 else 1, row["round"]) for c, row in last.items()
    }
    assert all(history[c].loss == row["loss"] for c, row in last.items())
    assert all(history[c].loss_norm == row["loss_norm"] > 0 for c, row in last.items())
    assert "history" not in ended.data


def test_nothing_is_remembered_for_rules_that_do_not_look_at_it(tiny_config: Make) -> None:
    for selection in ("uniform", "all"):
        _, stage = training(fedavg(tiny_config, selection=selection, clients_per_round=8))
        assert "history" not in stage.begin(RunState()).data


# -- architectures ----------------------------------------------------------------------------------------------------


def test_the_first_architecture_is_trained_unless_another_is_named(tiny_config: Make) -> None:
    for text, architecture in ((None, (0, 0, 0)), ("3-1-2", (3, 1, 2))):
        _, stage = training(fedavg(tiny_config, architecture=text))
        assert {a.task.network.architecture for a in stage.plan(stage.begin(RunState())).assignments} == {architecture}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-1", "method.architecture: an architecture of cnn_digits has 3 layers, given 2"),
        ("0-1-9", r"method.architecture: layer 2 of cnn_digits has the operators .* given 9"),
        ("huge", "method.architecture: 'huge' is no architecture of cnn_digits: give smallest, largest, or an option"),
    ],
)
def test_an_architecture_outside_the_space_is_refused(tiny_config: Make, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build_stages(build_world(fedavg(tiny_config, architecture=text)))
    assert "\n" not in str(caught.value)
