"""A plan is made fast, of exactly the configurations that composing one by one gives, and refused in the same words."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.experiments.ablation import plan as planning
from fedloom.experiments.ablation.plan import planned_ablation
from fedloom.experiments.runs import configuration, variants
from fedloom.experiments.runs.configuration import change_stored, compose_config, config_from_dict
from fedloom.experiments.runs.override_texts import override_text
from fedloom.experiments.runs.restored import is_settled, restored
from fedloom.experiments.runs.variants import Variants
from fedloom.experiments.store.ablations import Ablation, Trial, write_ablation
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.settings import Range, settings_of

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
    monkeypatch.setattr(variants, "composed_tree", configuration.composed_tree)
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
    large = plan(many, experiment=experiment)
    assert len(large.trials) >= 7 * len(small.trials)
    assert len(compositions) - for_few == for_few <= 4


def test_drawn_trials_are_what_composing_gives(plan: Plan, assert_composed: AssertComposed) -> None:
    ablation = plan(DRAWN.replace("SAMPLES", "4"))
    assert_composed(ablation, ablation.trials[::2])
    chosen = plan(CHOICES.replace("LRS", "[0.1, 3]"), experiment="")
    assert_composed(chosen, chosen.trials[1::2])


# -- random keys and values, against the slow way ----------------------------------------------------------------------


def number_of(rng: np.random.Generator, kind: str, allowed: object) -> Any:
    """A number of a kind, mostly allowed."""
    least = next((v for v in (allowed.least, allowed.above) if v is not None), 0.0) if isinstance(allowed, Range) else 0
    value = least + float(rng.choice([0.0, 0.25, 1.0, 2.0, 50.0, -3.0]))
    return int(value) if kind.startswith("int") and rng.random() < 0.9 else value


def value_of(rng: np.random.Generator, kind: str, default: Any, allowed: object) -> Any:
    """A value for a setting; one in five is of any kind."""
    anything = [None, True, 3, 0.5, "a b", "null", [1, 2.5], {"a": 1}, "${seed}", "???"]
    if rng.random() < 0.2:
        return anything[int(rng.integers(len(anything)))]
    if kind.startswith("list[float]"):
        return [number_of(rng, "float", allowed) for _ in range(int(rng.integers(0, 4)))]
    if kind.startswith(("int", "float")):
        return number_of(rng, kind, allowed)
    return not default if isinstance(default, bool) else default


def outcome(made: Callable[[], RunConfig]) -> Any:
    """The configuration as values, or the words in which it is refused."""
    try:
        return asdict(made())
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("preset", ["fedoras_digits", "superfednas_digits", "spider_digits"])
def test_random_changes_give_what_composing_gives(preset: str) -> None:
    overrides = [f"experiment={preset}", "tiers.cost_weights.macs=1"]
    settings = [s for s in settings_of(compose_config(overrides)) if s.key not in ("results", "method.name")]
    own = Variants(overrides)
    rng = np.random.default_rng(7)
    same = 0
    for _ in range(DRAWS):
        drawn = [settings[int(i)] for i in rng.choice(len(settings), size=int(rng.integers(1, 3)), replace=False)]
        changes: dict[str, Any] = {s.key: value_of(rng, s.kind, s.default, s.allowed) for s in drawn}
        if rng.random() < 0.2:
            changes["data.no_such_key"] = 1
        if rng.random() < 0.3:
            changes[f"tiers.cost_weights.{rng.choice(['macs', 'parameters'])}"] = float(rng.random())
        changes["seed"] = int(rng.integers(5))
        texts = [f"{key}={override_text(value)}" for key, value in changes.items()]
        fast = outcome(lambda changes=changes, texts=texts: own.config(changes, texts))  # type: ignore[misc]
        assert fast == outcome(lambda texts=texts: compose_config([*overrides, *texts])), texts  # type: ignore[misc]
        same += isinstance(fast, dict)
    assert DRAWS / 5 <= same <= DRAWS * 4 / 5, "both kinds were drawn"


def test_interpolations_are_of_the_trial_and_not_of_the_experiment() -> None:
    own = Variants(["experiment=fedoras_digits", "seeds.search=${seed}"])
    assert own.config({"seed": 5}, ["seed=5"]).seeds.search == 5
    plain = Variants(["experiment=fedoras_digits"])
    assert plain.config({"seeds.search": "${seed}", "seed": 6}, ["seeds.search=${seed}", "seed=6"]).seeds.search == 6


def test_a_key_inside_another_ones_value_is_set_in_order() -> None:
    own = Variants(["experiment=fedoras_digits"])
    changes = {"tiers.cost_weights": {"macs": 2, "parameters": 1}, "tiers.cost_weights.macs": 3.0}
    texts = ["tiers.cost_weights={macs:2,parameters:1}", "tiers.cost_weights.macs=3.0"]
    assert own.config(changes, texts).tiers.cost_weights == {"macs": 3.0, "parameters": 1.0}
    before = {"tiers.cost_weights.macs": 3.0, "tiers.cost_weights": {"parameters": 1}}
    texts = ["tiers.cost_weights.macs=3.0", "tiers.cost_weights={parameters:1}"]
    assert own.config(before, texts).tiers.cost_weights == {"macs": 3.0, "parameters": 1.0}, "added to, as Hydra does"


# -- stored configurations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["fedoras_digits", "superfednas_digits", "spider_digits", "fedprox_digits"])
def test_a_stored_configuration_is_restored_as_omegaconf_does(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = asdict(compose_config([f"experiment={preset}", "tiers.shares=[.5,.5]", "method.train.options.mu=3"]))
    with counted(configuration.OmegaConf, "merge") as merges:
        fast = config_from_dict(values)
    assert not merges
    monkeypatch.setattr(configuration, "restored_run", lambda *_: None)
    assert config_from_dict(values) == fast
    assert repr(config_from_dict(values)) == repr(fast), "of the same types, too"


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1.5},
        {"seed": "3"},
        {"data": {"alpha": 1}},
        {"nothing": 1},
        {"tiers": {"shares": [1, 0.5]}},
        {"tiers": None},
        {"experiment": "${seed}"},
        {"results": "???"},
        {"method": {"train": {"options": {"a": ["???"]}}}},
    ],
)
def test_what_has_to_be_converted_or_refused_is_left_to_omegaconf(
    change: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = merged(asdict(compose_config(["experiment=fedoras_digits"])), change)
    found = outcome(lambda: config_from_dict(values))
    monkeypatch.setattr(configuration, "restored_run", lambda *_: None)
    assert repr(found) == repr(outcome(lambda: config_from_dict(values)))


def merged(values: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    inner = {k: merged(values[k], v) if isinstance(v, dict) and k in values else v for k, v in change.items()}
    return {**values, **inner}


@dataclass
class Derived:
    """A configuration that changes what it is given."""

    value: int = 1
    known: dict[str, int] = field(default_factory=lambda: {"a": 1})

    def __post_init__(self) -> None:
        self.value += 1


def test_a_configuration_that_derives_its_values_is_left_to_omegaconf() -> None:
    assert not is_settled(Derived)
    assert restored(Derived, {"value": 3}) is None


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
