"""An ablation of one's own: its trials, what holds for all of them, and what a stored plan may change."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fedloom.experiments.ablation.plan import planned_ablation
from fedloom.experiments.store.ablations import Ablation, Trial, write_ablation

Plan = Callable[..., Ablation]
AssertComposed = Callable[[Ablation, Sequence[Trial]], None]

LR = "axes: {lr: {key: method.train.lr, values: [0.1, 0.2]}}\nseeds: [1]\n"
TWO = """
axes:
  lr: {key: method.train.lr, values: [0.3, 0.1]}
  averaging: {settings: {OPA: {method.train.weighting: opa}, none: {}}}
seeds: [7, 3]
"""


def without_ids(ablation: Ablation) -> Ablation:
    trials = tuple(replace(t, run_id="") for t in ablation.trials)
    return replace(ablation, ablation_id="", created="", trials=trials)


def test_the_last_axis_changes_first_and_seeds_before_it(plan: Plan) -> None:
    ablation = plan(TWO)
    assert [(*t.setting.values(), t.seed) for t in ablation.trials] == [
        (lr, averaging, seed) for lr in (0.3, 0.1) for averaging in ("OPA", "none") for seed in (7, 3)
    ]
    assert ablation.trials[0].overrides == ("method.train.lr=0.3", "method.train.weighting=opa")
    assert ablation.trials[-1].overrides == ("method.train.lr=0.1",)
    assert ablation.trials[-1].label() == "lr=0.1 averaging=none seed=3"
    assert ablation.reference == {"lr": 0.1, "averaging": "OPA"}


@pytest.mark.parametrize(
    ("axis", "reference"),
    [
        ("key: method, values: [fjord, heterofl]", "heterofl"),
        ("settings: {F: {method: fjord}, H: {method: heterofl}}", "H"),
        ("key: +method.train.lr, values: [.7, .1]", 0.1),
    ],
)
def test_the_reference_is_the_experiments_own_however_the_key_is_written(
    plan: Plan, axis: str, reference: object
) -> None:
    assert plan(f"axes: {{m: {{{axis}}}}}\nseeds: [1]\n", "experiment=heterofl_digits").reference == {"m": reference}


def test_the_same_arguments_plan_the_same_trials(plan: Plan) -> None:
    once, again = plan(TWO), plan(TWO)
    assert once.ablation_id != again.ablation_id
    assert without_ids(once) == without_ids(again)


def test_what_is_given_holds_for_all_trials(plan: Plan, tmp_path: Path) -> None:
    ablation = plan(LR + "overrides: [data.alpha=3, data.num_clients=12]\n", "data.alpha=5", "executor.kind=serial")
    for trial in ablation.trials:
        assert (trial.config["data"]["alpha"], trial.config["data"]["num_clients"]) == (5.0, 12)
        assert trial.config["executor"]["kind"] == "serial"
        assert trial.config["results"] == "results"
        assert trial.config["reuse_supernet"] is True
    assert ablation.overrides[:3] == ("reuse_supernet=true", "data.alpha=3", "data.num_clients=12")
    assert not (tmp_path / "results").exists()
    assert not plan(LR, "reuse_supernet=false").trials[0].config["reuse_supernet"]


def test_overrides_of_the_ablation_itself(plan: Plan) -> None:
    ablation = plan(LR, "ablation.axes.lr.values=[.9]", "ablation.seeds=[1,2,3]", "ablation.attempts=5")
    assert [(t.setting["lr"], t.seed) for t in ablation.trials] == [(0.9, 1), (0.9, 2), (0.9, 3)]
    assert ablation.attempts == 5
    assert not any(override.startswith("ablation") for override in ablation.overrides)


def test_values_of_every_kind(plan: Plan, assert_composed: AssertComposed) -> None:
    ablation = plan(
        """
axes:
  bounds: {key: tiers.upper_bounds, values: [null, [1e6, 2.5e7]]}
  mixed:
    settings:
      a: {method.train.communication: {value: 0.3}, data.root: a b=c, dry_run: true}
      b: {method.train.communication: {value: 100, unit: bytes}, data.root: "null", tiers.cost_weights.macs: 1.0}
seeds: [0]
"""
    )
    assert ablation.reference == {"bounds": None}
    assert_composed(ablation, [ablation.trials[0], ablation.trials[-1]])
    last = ablation.trials[-1]
    assert last.overrides == (
        "tiers.upper_bounds=[1000000.0,25000000.0]",
        "method.train.communication={value:100,unit:bytes}",
        'data.root="null"',
        "tiers.cost_weights.macs=1.0",
    )
    assert last.config["data"]["root"] == "null"
    assert last.config["tiers"]["cost_weights"] == {"macs": 1.0}
    assert ablation.trials[0].config["data"]["root"] == "a b=c"


def test_a_mapping_of_the_experiment_is_added_to_as_hydra_does(plan: Plan, assert_composed: AssertComposed) -> None:
    ablation = plan(
        "axes: {weights: {key: tiers.cost_weights, values: [{macs: 2}, {macs: 3}]}}\nseeds: [1]\n",
        "+tiers.cost_weights.parameters=5",
    )
    for trial in ablation.trials:
        assert trial.config["tiers"]["cost_weights"] == {"macs": trial.setting["weights"]["macs"], "parameters": 5.0}
    assert_composed(ablation, ablation.trials[:1])


def test_an_axis_may_choose_the_method_and_the_experiment(plan: Plan) -> None:
    text = "axes: {how: {settings: {a: {method: fedavg, method.train.rounds: 3}, b: {method: fedoras}}}}\nseeds: [4]\n"
    methods = plan(text, experiment="")
    assert [t.config["method"]["name"] for t in methods.trials] == ["fedavg", "fedoras"]
    assert methods.trials[0].config["method"]["train"]["rounds"] == 3
    assert [t.config["seed"] for t in methods.trials] == [4, 4]
    presets = plan(
        "axes: {preset: {key: experiment, values: [fedoras_digits, spider_digits]}}\nseeds: [4]\n", experiment=""
    )
    assert [t.experiment for t in presets.trials] == ["fedoras_digits", "spider_digits"]


def test_a_stored_plan_may_change_where_it_runs_and_nothing_else(plan: Plan, tmp_path: Path) -> None:
    ablation = plan(LR)
    write_ablation(tmp_path, ablation)
    assert planned_ablation(tmp_path, ablation.ablation_id, []) == ablation
    changed = planned_ablation(tmp_path, ablation.ablation_id[:8], ["executor.actors=1", "+ray.num_cpus=2"])
    for before, after in zip(ablation.trials, changed.trials, strict=True):
        assert (after.config["executor"]["actors"], after.config["ray"]["num_cpus"]) == (1, 2)
        back = {
            **after.config,
            "executor": {**after.config["executor"], "actors": None},
            "ray": {**after.config["ray"], "num_cpus": None},
        }
        assert replace(after, config=back) == before
    for override in ("method.train.lr=1", "ablation.seeds=[1]", "seed=2", "results=x"):
        with pytest.raises(ValueError, match="cannot change on resume"):
            planned_ablation(tmp_path, ablation.ablation_id, [override])
    with pytest.raises(ValueError, match=r"^name=x: the trials of an ablation are named by their ids; use tags="):
        planned_ablation(tmp_path, ablation.ablation_id, ["name=x"])


def test_a_plan_that_is_older_than_a_section_takes_its_keys_on_resume(plan: Plan, tmp_path: Path) -> None:
    ablation = plan(LR)
    newer = ("tracking", "tensorboard", "tags")
    older = [
        replace(trial, config={name: value for name, value in trial.config.items() if name not in newer})
        for trial in ablation.trials
    ]
    write_ablation(tmp_path, replace(ablation, trials=tuple(older)))
    overrides = ["tracking.to=[tensorboard]", "tensorboard=true", "tags=[x]"]
    for trial in planned_ablation(tmp_path, ablation.ablation_id, overrides).trials:
        assert (trial.config["tracking"]["to"], trial.config["tensorboard"]) == (["tensorboard"], True)
        assert trial.config["tags"] == ["x"]


@pytest.mark.parametrize(
    ("axis", "override"),
    [
        ("executor.actors, values: [1, 2]", "executor.actors=1"),
        ("+executor.actors, values: [1, 2]", "executor.actors=1"),
        ("executor.failures, values: [{policy: stop}, {policy: tolerate}]", "executor.failures.policy=stop"),
        ("executor.failures.policy, values: [stop, tolerate]", "executor.failures={policy:stop}"),
    ],
)
def test_what_the_trials_vary_stays_on_resume(axis: str, override: str, plan: Plan, tmp_path: Path) -> None:
    ablation = plan(f"axes: {{a: {{key: {axis}}}}}\nseeds: [1]\n")
    write_ablation(tmp_path, ablation)
    with pytest.raises(ValueError, match=rf"^{re.escape(override)}: the trials of .* vary executor\."):
        planned_ablation(tmp_path, ablation.ablation_id, [override])


def test_an_axis_of_methods_goes_with_one_of_a_key_that_they_have(plan: Plan) -> None:
    axes = "how: {key: method, values: [fedavg, fedoras]}, lr: {key: method.train.lr, values: [0.1]}"
    trials = plan(f"axes: {{{axes}}}\nseeds: [4]\n", experiment="").trials
    assert [(t.config["method"]["name"], t.config["method"]["train"]["lr"]) for t in trials] == [
        ("fedavg", 0.1),
        ("fedoras", 0.1),
    ]
