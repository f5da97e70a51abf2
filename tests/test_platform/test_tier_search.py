"""The search of one tier: what it asks of whom, what is sent for it, and how it ends."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import DevicesConfig, RunConfig, TiersConfig
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.methods.tier_search import TierSearchStage, winner_of
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.slices import Architecture, architecture_id, parse_architecture

Make = Callable[..., RunConfig]


def bytes_by_hand(world: World, architectures: list[Architecture]) -> int:
    """All tensors of the fixed part and of every operator that one of the architectures has."""
    used = {(layer, option) for a in architectures for layer, option in enumerate(a)}
    total = 0
    for name, tensor in world.space.build_supernet().state_dict().items():
        parts = name.split(".")
        if parts[0] == "fixed" or (int(parts[1]), int(parts[3])) in used:
            total += tensor.numel() * tensor.element_size()
    return total


def search_of(world: World) -> TierSearchStage:
    """The search of the lowest tier."""
    stage = next(stage for stage in build_stages(world) if stage.name == "search/tier1")
    assert isinstance(stage, TierSearchStage)
    return stage


def supernet_state(world: World) -> RunState:
    return RunState().with_group("supernet", world.space.initial_weights(torch_stream(1, "test")))


def federated(config: RunConfig, **changes: Any) -> RunConfig:
    config.method.search = replace(config.method.search, scoring="federated", **changes)
    return config


def test_central_search_scores_every_candidate_once_inside_its_tier(tiny_config: Make, results_of: Any) -> None:
    config = tiny_config()
    results = results_of(config)
    world = results.world
    candidates = results["candidates"]
    for index, tier in enumerate(world.tiers):
        own = candidates[candidates["tier"] == tier.name]
        assert len(own) == 6
        assert len(set(own["architecture"])) == 6
        assert all(tier.lower < macs <= tier.upper for macs in own["macs"])
        assert set(own["stage"]) == {f"search/tier{index + 1}"}
        best = own.sort_values(["metric", "macs"], ascending=[False, True]).iloc[0]
        models = results["models"]
        assert set(models[models["tier"] == tier.name]["architecture"]) == {best["architecture"]}
        assert best["on_front"]
        assert own[own["winner"]]["architecture"].tolist() == [best["architecture"]]


def test_federated_search_sends_the_union_once_to_distinct_clients(tiny_config: Make, results_of: Any) -> None:
    config = federated(tiny_config())
    results = results_of(config)
    world = results.world
    candidates, clients = results["candidates"], results["clients"]
    for index, tier in enumerate(world.tiers):
        own = candidates[candidates["tier"] == tier.name]
        asked = clients[clients["stage"] == f"search/{tier.name}"]
        generations = sorted(set(own["generation"]))
        assert len(generations) > 1
        assert sorted(set(asked["round"])) == list(range(2 * len(generations)))
        for generation in generations:
            architectures = [parse_architecture(a) for a in own[own["generation"] == generation]["architecture"]]
            rows = asked[asked["round"] // 2 == generation]
            payload = bytes_by_hand(world, architectures)
            assert set(rows["bytes_down"]) == {payload}
            assert payload < sum(bytes_by_hand(world, [a]) for a in architectures)
            # A loss and a metric of 8 bytes each come back.
            assert set(rows["bytes_up"]) == {16 * len(architectures)}
            assert len(rows) == 4
            assert len(set(rows["client_id"])) == 4, "nobody is asked twice in a generation"
            assert set(rows["selection_probability"]) == {2 / len(world.eligible_by_tier[index])}, "in each round"
            assert set(rows["client_id"]) <= set(world.eligible_by_tier[index].tolist())
            macs = sum(world.macs_table.cost(a) for a in architectures)
            trained = world.data.sizes("train")  # what their statistics are estimated from
            assert all(
                r["macs"] == macs * (r["samples"] + trained[int(r["client_id"])]) for r in rows.to_dict("records")
            )


def test_a_share_of_the_validation_data_is_said_to_be_the_servers(
    tiny_config: Make, caplog: pytest.LogCaptureFixture
) -> None:
    said = "method.search.validation_share=0.5 is for what the server scores: clients score on all of theirs"
    for scoring, warned in (("central", False), ("federated", True)):
        config = tiny_config()
        config.method.search = replace(config.method.search, scoring=scoring, validation_share=0.5)
        build_stages(build_world(config))
        assert (said in caplog.messages) == warned


def test_the_cohorts_of_a_generation_never_meet(tiny_config: Make) -> None:
    world = build_world(federated(tiny_config(), compare_with_central=False))
    stage = search_of(world)
    begun = stage.begin(supernet_state(world))
    asked = set()
    for generation in range(30):
        first = stage.plan(replace(begun, round=2 * generation))
        pending = begun.with_data("search/tier1/client_scores", [{}])
        second = stage.plan(replace(pending, round=2 * generation + 1))
        clients = [a.client_id for plan in (first, second) for a in plan.assignments]
        assert len(clients) == len(set(clients)) == 4
        asked.add(tuple(clients))
    assert len(asked) > 10, "every generation asks others"


def test_nor_do_they_where_devices_come_and_go(tiny_config: Make, results_of: Any) -> None:
    config = federated(tiny_config(), compare_with_central=False)
    config.devices = DevicesConfig(availability_table="generated", availability_period_s=2.0, availability_share=0.5)
    clients = results_of(config)["clients"]
    asked = clients[clients["stage"].str.startswith("search/")]
    assert (asked["status"] == "ok").any()
    for _, rows in asked.groupby(["stage", asked["round"] // 2]):
        assert rows["client_id"].is_unique


def test_federated_scores_are_the_means_over_the_clients_samples(tiny_config: Make, step_through: Any) -> None:
    world = build_world(federated(tiny_config(), compare_with_central=False))
    stage = search_of(world)
    stepper = step_through(world, stage, supernet_state(world))
    stepper.step()
    stepper.step()
    reports = [r for result in stepper.results for r in result.client_results]
    assert len(reports) == 4
    for scored in stage._searcher(stepper.state).history:
        name = architecture_id(scored.architecture)
        for metric, value in (("loss", scored.loss), ("accuracy", scored.metric)):
            own = [m for r in reports for m in r.measurements if (m.architecture, m.metric) == (name, metric)]
            assert len(own) == 4
            assert value == pytest.approx(sum(m.value * m.samples for m in own) / sum(m.samples for m in own))


def test_federated_search_reports_kendalls_tau_per_generation(tiny_config: Make, results_of: Any) -> None:
    results = results_of(federated(tiny_config(), budget=9, population=6))
    rows = results["evaluations"]
    taus = rows[rows["metric"] == "kendall_tau_federated"]
    firsts = []
    for tier in ("tier1", "tier2"):
        own = taus[taus["tier"] == tier]
        # Generations of 6, 2 and 1 models; the last has no ranking.
        assert own["samples"].tolist() == [6, 2, 1]
        assert own["round"].tolist() == [1, 3, 5]
        assert own["value"].tolist()[-1] is None
        assert all(value is None or -1 <= value <= 1 for value in own["value"])
        firsts.append(own["value"].tolist()[0])
    assert any(tau is not None for tau in firsts), "six models that all tie in both tiers"


def test_federated_search_by_all_clients_ranks_as_the_server_does(tiny_config: Make, step_through: Any) -> None:
    # All clients' validation data is the server's: the two scorings are the same, up to rounding.
    world = build_world(federated(tiny_config(), clients_per_round=4, scoring_rounds=2))
    stepper = step_through(world, search_of(world), supernet_state(world))
    stepper.step()
    stepper.step()
    (row,) = stepper.merged[1].rows
    assert row[1]["metric"] == "kendall_tau_federated"
    assert row[1]["value"] == pytest.approx(1.0)


def test_federated_search_without_enough_clients_ends_well(tiny_config: Make, results_of: Any) -> None:
    # One client in the upper tier, three rounds: two of them ask nobody.
    config = tiny_config(tiers=TiersConfig(count=2, paths=2000, clients=[0, 0, 0, 1, 0, 0, 0, 0]))
    config = federated(config, scoring_rounds=3, compare_with_central=False)
    results = results_of(config)
    clients = results["clients"]
    asked = clients[clients["stage"] == "search/tier2"]
    assert asked["client_id"].tolist() == [3] * (len(asked))
    assert set(asked["round"] % 3) == {0}
    candidates = results["candidates"]
    assert candidates[candidates["tier"] == "tier2"]["feasible"].all()


def test_who_comes_too_late_has_no_say_in_the_search(tiny_config: Make, step_through: Any) -> None:
    config = federated(tiny_config(devices=DevicesConfig(deadline_s=1e-9)))
    world = build_world(config)
    stage = search_of(world)
    stepper = step_through(world, stage, supernet_state(world))
    stepper.step()
    stepper.step()
    assert {r.status for result in stepper.results for r in result.client_results if r.client_id is not None} == {
        "timed_out"
    }
    history = stage._searcher(stepper.state).history
    assert history
    assert all(math.isnan(s.metric) and not s.feasible for s in history)


def test_a_diverged_supernet_has_no_feasible_model_and_no_winner(
    tiny_config: Make, step_through: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for scoring in ("central", "federated"):
        config = tiny_config()
        config.method.search.scoring = scoring
        world = build_world(config)
        weights = {n: torch.full_like(t, math.nan) if t.is_floating_point() else t
                   for n, t in supernet_state(world).weights("supernet").items()}  # fmt: skip
        stepper = step_through(world, search_of(world), RunState().with_group("supernet", weights))
        ended = stepper.finish()
        rows = [row for table, row in ended.rows if table == "candidates"]
        assert len(rows) == 6
        assert not any(row["feasible"] or row["on_front"] for row in rows)
        assert winner_of(ended.state, "tier1") is None
        assert "search/tier1: none of 6 models has a finite score, so that there is no winner" in caplog.messages
        caplog.clear()


def empty_tier(world: World) -> tuple[list[float], int]:
    """Bounds of three tiers of which the middle one holds no model, and how many the lowest holds."""
    costs = sorted({world.cost_table.cost(a) for a in world.space.enumerate()})
    lowest = costs[2]
    models = sum(world.cost_table.cost(a) <= lowest for a in world.space.enumerate())
    return [lowest, (lowest + costs[3]) / 2, costs[-1]], models


@pytest.mark.parametrize(("scoring", "searcher"), [("central", "nsga2"), ("federated", "random")])
def test_a_tier_without_models_and_one_with_few_end_cleanly(
    tiny_config: Make, scoring: str, searcher: str, results_of: Any
) -> None:
    bounds, models = empty_tier(build_world(tiny_config()))
    config = tiny_config(tiers=TiersConfig(count=3, upper_bounds=bounds))
    config.method.search = replace(config.method.search, scoring=scoring, searcher=searcher, budget=12)
    results = results_of(config)
    assert 1 < models < 12
    candidates = results["candidates"]
    assert candidates["tier"].value_counts().to_dict() == {"tier1": models, "tier3": 12}
    assert len(set(candidates["architecture"])) == len(candidates)
    stages = set(results["rounds"]["stage"])
    assert {"fine_tuned/tier1", "fine_tuned/tier3", "rand_init/tier1"} <= stages
    assert not any(stage.endswith("/tier2") for stage in stages)
    assert set(results["models"]["tier"]) == {"tier1", "tier3"}
    assert set(results["evaluations"]["tier"]) - {"server"} == {"tier1", "tier3"}
    assert results["runs"]["status"].tolist() == ["done"]


def test_a_tier_without_clients_is_searched_by_the_server_and_not_fine_tuned(
    tiny_config: Make, results_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(tiers=TiersConfig(count=2, paths=2000, clients=[0] * 8))
    results = results_of(config)
    untrained = [message.partition(":")[0] for message in caplog.messages if "keeps its initial weights" in message]
    assert untrained == ["fine_tuned/tier2", "rand_init/tier2"]
    assert set(results["models"]["tier"]) == {"tier1", "tier2"}
    assert "fine_tuned/tier2" not in set(results["rounds"]["stage"])
    evaluations = results["evaluations"]
    clients = evaluations[evaluations["client_id"].notna()]
    assert set(clients["tier"]) == {"tier1"}
