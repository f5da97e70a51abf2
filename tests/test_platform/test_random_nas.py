"""Random NAS: distinct architectures in each tier's bounds, the best of which is kept and evaluated."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.random_nas import RandomNasConfig, drawn
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.spaces.slices import architecture_id

Make = Callable[..., RunConfig]


def configured(config: RunConfig, **changes: Any) -> RunConfig:
    train = TrainingConfig(rounds=2, clients_per_round=3, lr=0.05, evaluate_every=1)
    return replace(config, method=RandomNasConfig(models=3, train=train, **changes))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_config_in: Make, results_of: Any) -> Any:
    return results_of(configured(tiny_config_in(tmp_path_factory.mktemp("random_nas"))))


def test_architectures_are_distinct_and_of_their_tier(tiny_config: Make) -> None:
    world = build_world(configured(tiny_config()))
    for index, tier in enumerate(world.tiers):
        architectures = drawn(world, index, 4)
        assert len(set(architectures)) == 4
        assert all(tier.lower < world.cost_table.cost(a) <= tier.upper for a in architectures)
    other = build_world(replace(configured(tiny_config()), seed=5))
    assert drawn(other, 1, 4) != drawn(world, 1, 4)


def test_every_model_is_trained_scored_and_the_best_one_evaluated(finished: Any) -> None:
    tiers = [tier.name for tier in finished.world.tiers]
    rounds, candidates, models = finished["rounds"], finished["candidates"], finished["models"]
    for index, tier in enumerate(tiers):
        expected = [architecture_id(a) for a in drawn(finished.world, index, 3)]
        own = candidates[candidates.tier == tier]
        assert own.architecture.tolist() == expected
        assert own.generation.tolist() == [0, 1, 2]
        best = own.sort_values(["metric", "macs"], ascending=[False, True]).iloc[0]
        (won,) = own[own.winner].architecture
        assert own[own.architecture == won].metric.item() == best.metric
        (kept,) = models[models.tier == tier].architecture
        assert kept == won
        for number in range(3):
            assert (rounds.stage == f"random_{number}/{tier}").sum() == 2
    tested = finished["evaluations"].query("split == 'test' and metric == 'accuracy' and client_id.isna()")
    assert sorted(tested.tier) == tiers
    assert set(tested.model) == {"random_nas"}


def test_models_are_ranked_by_what_is_asked_for(tiny_config: Make) -> None:
    world = build_world(configured(tiny_config()))
    scores = [["0-0-0", 0.5, 2.0], ["0-0-1", 0.4, 1.0], ["0-1-0", None, None]]  # the more accurate one has more loss
    state = RunState().with_data("random_nas", {world.tiers[0].name: scores})
    for metric, name in (("accuracy", "0-0-0"), ("loss", "0-0-1")):
        (*_, contest) = (s for s in build_stages(build_world(configured(tiny_config(), metric=metric)))
                         if s.name == f"choice_2/{world.tiers[0].name}")  # fmt: skip
        merged = contest.end(state)
        assert merged.state.data["winners"] == {world.tiers[0].name: name}
        rows = [row for _, row in merged.rows]
        assert [row["architecture"] for row in rows if row["winner"]] == [name]
        assert [row["metric"] for row in rows][:2] == [0.5, 0.4], "candidates' metric stays the accuracy"


def test_a_models_weights_are_kept_only_while_they_can_win(tiny_config: Make, step_through: Any) -> None:
    world, state = build_world(configured(tiny_config())), RunState()
    for stage in [s for s in build_stages(world) if s.name.endswith("tier1")]:
        stepper = step_through(world, stage, state)
        while stage.rounds_left(stepper.state) > 0:
            stepper.step()
        state = stage.end(stepper.state).state
        if stage.name.startswith("choice"):
            assert len(state.groups) == 1
            (group,) = state.groups
            assert group.startswith("tier1-random_")


def test_a_tier_with_fewer_models_than_asked_for_trains_those(
    tiny_config: Make, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(tiny_config())
    top = build_world(config).cost_table.largest
    few = replace(config, tiers=replace(config.tiers, count=2, upper_bounds=[top * 0.999999, top]))
    world = build_world(few)
    assert len(drawn(world, 1, 3)) == 1, "only the largest path costs so much"
    names = [stage.name for stage in build_stages(world) if stage.name.endswith("tier2")]
    assert names == ["random_0/tier2", "choice_0/tier2"]
    assert caplog.messages == ["tier2: method.models asks for 3 models, but its bounds hold only 1"]
