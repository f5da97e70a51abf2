"""A plan is made fast, of exactly the configurations that composing one by one gives, and refused in the same words."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fedloom.experiments.ablation import plan as planning
from fedloom.experiments.ablation.plan import planned_ablation
from fedloom.experiments.runs import configuration
from fedloom.experiments.runs.configuration import change_stored, compose_config, config_from_dict
from fedloom.experiments.store.ablations import Ablation, Trial, write_ablation

Plan = Callable[..., Ablation]
AssertComposed = Callable[[Ablation, Sequence[Trial]], None]

DRAWN = """
axes:
  lr: {key: method.train.lr, log_uniform: [0.001, 1]}
  mu: {key: method.train.options.mu, uniform: [0, 1]}
  bounds: {key: tiers.cost_weights, values: [{macs: 2}, {parameters: 3}]}
  more: {settings: {a: {data.alpha: 3}, b: {tiers.count: 2, method.finetune.rounds: 1}}}
seeds: [1, 2]
search: {kind: random, samples: SAMPLES}
"""
DRAWS = 15
CHOICES = """
axes:
  how:
    settings:
      fedavg: {method: fedavg, method.train.rounds: 3}
      fedoras: {method: fedoras}
  lr: {key: method.train.lr, values: LRS}
seeds: [1, 2]
"""


@contextmanager
def counted(module: object, name: str) -> Iterator[list[Any]]:
    """The calls of a function of a module."""
    calls: list[Any] = []
    own = getattr(module, name)

    def count(*arguments: Any, **keywords: Any) -> Any:
        calls.append((arguments, keywords))
        return own(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, count)
        yield calls


@pytest.fixture
def compositions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Hydra's compositions, of plans that share none."""
    configuration._composed.cache_clear()
    calls: list[Any] = []
    own = configuration.compose

    def count(**keywords: Any) -> Any:
        calls.append(keywords)
        return own(**keywords)

    monkeypatch.setattr(configuration, "compose", count)
    return calls


@pytest.mark.parametrize(
    ("text", "few", "many"),
    [
        (DRAWN, DRAWN.replace("SAMPLES", "2"), DRAWN.replace("SAMPLES", "30")),
        (CHOICES, CHOICES.replace("LRS", "[0.1]"), CHOICES.replace("LRS", "[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]")),
    ],
)
def test_the_number_of_compositions_does_not_grow_with_the_trials(
    text: str, few: str, many: str, plan: Plan, compositions: list[Any]
) -> None:
    experiment = "" if text is CHOICES else "fedoras_digits"
    small = plan(few, experiment=experiment)
    for_few = len(compositions)
    configuration._composed.cache_clear()
    large = plan(many, experiment=experiment)
    assert len(large.trials) >= 7 * len(small.trials)
    assert len(compositions) - for_few == for_few <= 4


def test_drawn_trials_are_what_composing_gives(plan: Plan, assert_composed: AssertComposed) -> None:
    ablation = plan(DRAWN.replace("SAMPLES", "4"))
    assert_composed(ablation, ablation.trials[::2])
    chosen = plan(CHOICES.replace("LRS", "[0.1, 3]"), experiment="")
    assert_composed(chosen, chosen.trials[1::2])


def test_interpolations_are_of_the_trial_and_not_of_the_experiment() -> None:
    assert compose_config(["experiment=fedoras_digits", "seeds.search=${seed}", "seed=5"]).seeds.search == 5


def test_a_key_inside_another_ones_value_is_set_in_order() -> None:
    for texts, weights in (
        (["tiers.cost_weights={macs:2,parameters:1}", "tiers.cost_weights.macs=3.0"], {"macs": 3.0, "parameters": 1.0}),
        (["tiers.cost_weights.macs=3.0", "tiers.cost_weights={parameters:1}"], {"macs": 3.0, "parameters": 1.0}),
    ):
        assert compose_config(["experiment=fedoras_digits", *texts]).tiers.cost_weights == weights


# -- stored configurations ---------------------------------------------------------------------------------------------


def test_what_a_stored_plan_changes_is_changed_once_for_all_that_agree(plan: Plan, tmp_path: Path) -> None:
    ablation = plan(DRAWN.replace("SAMPLES", "6"))
    write_ablation(tmp_path, ablation)
    with counted(planning, "change_stored") as changes:
        changed = planned_ablation(tmp_path, ablation.ablation_id, ["executor.actors=1", "data.root=here"])
    assert len(ablation.trials) == 12
    assert len(changes) == 2, "data.alpha has two values"
    for before, after in zip(ablation.trials, changed.trials, strict=True):
        alone = change_stored(config_from_dict(before.config), ["executor.actors=1", "data.root=here"])
        assert dict(after.config) == asdict(alone)
