"""From an ablation's definition to its trials: how many, which, with which configuration; and what is refused."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedloom.experiments.ablation.plan import override_text, plan_ablation, planned_ablation
from fedloom.experiments.runs.configuration import compose_config
from fedloom.experiments.runs.presets import ablations
from fedloom.experiments.store.ablations import Ablation, Trial, write_ablation
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.results.files import check_name
from fedloom.platform.results.paths import LONGEST_RUN_ID

Plan = Callable[..., Ablation]

FITTING = {
    "alpha": "fedoras_digits",
    "beta_schedule": "superfednas_digits",
    "comm_budget": "fedoras_digits",
    "distribution_averaging": "superfednas_digits",
    "init": "fedoras_digits",
    "participation": "fedoras_digits",
    "search": "fedoras_digits",
    "spider_lambda": "spider_digits",
    "tier_split": "fedoras_digits",
}


@pytest.fixture(scope="module", autouse=True)
def _composed_once() -> Iterator[None]:
    """Composing takes most of a plan's time: plans of one experiment share it."""

    @cache
    def composed(*overrides: str) -> RunConfig:
        return compose_config(overrides)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedloom.experiments.ablation.plan.compose_config", lambda given: deepcopy(composed(*given)))
        yield


@pytest.fixture(scope="module")
def ready_made() -> Mapping[str, Ablation]:
    """The plans of all ready-made ablations with a fitting experiment."""
    return {name: plan_ablation([f"ablation={name}", f"experiment={e}"]) for name, e in FITTING.items()}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Plans an ablation of one's own, with fedoras_digits."""
    monkeypatch.chdir(tmp_path)

    def make(text: str, *arguments: str, experiment: str = "fedoras_digits") -> Ablation:
        file = tmp_path / "mine.yaml"
        file.write_text(text)
        chosen = [f"experiment={experiment}"] if experiment else []
        return plan_ablation([f"ablation={file}", *chosen, *arguments])

    return make


def at(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        config = config[part]
    return config


def without_ids(ablation: Ablation) -> Ablation:
    trials = tuple(replace(t, run_id="") for t in ablation.trials)
    return replace(ablation, ablation_id="", created="", trials=trials)


# -- the ready-made ones -----------------------------------------------------------------------------------------------

AXES: dict[str, tuple[dict[str, tuple[Any, ...]], dict[str, Any]]] = {
    "alpha": ({"alpha": (100.0, 1.0, 0.1)}, {"alpha": 1.0}),
    "beta_schedule": (
        {"beta_0": (0.9, 0.5), "decay": ("constant", "linear", "cosine"), "decay_share": (0.5, 0.8)},
        {"beta_0": 0.9, "decay": "cosine", "decay_share": 0.8},
    ),
    "comm_budget": (
        {"budget": (1.0, 0.5, 0.25), "averaging": ("opa", "fedavg", "plain")},
        {"budget": 0.5, "averaging": "opa"},
    ),
    "distribution_averaging": (
        {"heuristic": ("overlap + R", "overlap + S", "overlap + TS", "MaxNet")},
        {"heuristic": "MaxNet"},
    ),
    "init": ({"rounds": ("5 rounds", "15 rounds", "30 rounds")}, {"rounds": "30 rounds"}),
    "participation": ({"clients_per_round": (4, 8, 16)}, {}),
    "search": (
        {"searcher": ("nsga2", "random", "federated"), "validation_share": (1.0, 0.5, 0.2)},
        {"searcher": "nsga2", "validation_share": 1.0},
    ),
    "spider_lambda": ({"lambda": (0.0, 0.01, 0.1, 1.0)}, {"lambda": 0.01}),
    "tier_split": (
        {"split": ("4 equal", "2 equal", "3 equal", "4 mostly small", "4 mostly large", "4 by devices", "4 low rho")},
        {"split": "4 equal"},
    ),
}


def test_every_ready_made_ablation_is_looked_at() -> None:
    assert sorted(FITTING) == sorted(AXES) == ablations()


@pytest.mark.parametrize("name", FITTING)
def test_every_point_is_run_with_every_seed(name: str, ready_made: Mapping[str, Ablation]) -> None:
    ablation = ready_made[name]
    axes, reference = AXES[name]
    assert dict(ablation.axes) == axes
    assert list(ablation.axes) == list(axes)
    assert dict(ablation.reference) == reference
    assert (ablation.name, ablation.experiment, ablation.seeds) == (name, FITTING[name], (1, 2))
    assert len(ablation.trials) == 2 * math.prod(len(values) for values in axes.values())
    assert [t.index for t in ablation.trials] == list(range(len(ablation.trials)))
    assert [t.seed for t in ablation.trials] == [1, 2] * (len(ablation.trials) // 2)
    points = [tuple(t.setting[axis] for axis in axes) for t in ablation.trials]
    assert len(set(points)) * 2 == len(points)
    assert all(value in axes[axis] for t in ablation.trials for axis, value in t.setting.items())


def test_the_numbers_of_trials(ready_made: Mapping[str, Ablation]) -> None:
    assert {name: len(ablation.trials) for name, ablation in ready_made.items()} == {
        "alpha": 6,
        "beta_schedule": 24,
        "comm_budget": 18,
        "distribution_averaging": 8,
        "init": 6,
        "participation": 6,
        "search": 18,
        "spider_lambda": 8,
        "tier_split": 14,
    }


def settings_of(ablation: Ablation) -> list[tuple[str, ...]]:
    """The overrides of the trials of the first seed."""
    return [t.overrides for t in ablation.trials if t.seed == 1]


def test_beta_schedule_changes_beta_0_its_decay_and_share(ready_made: Mapping[str, Ablation]) -> None:
    shares = "method.train.shares"
    assert settings_of(ready_made["beta_schedule"]) == [
        (f"{shares}.beta_0={beta_0}", f"{shares}.decay={decay}", f"{shares}.decay_share={share}")
        for beta_0 in ("0.9", "0.5")
        for decay in ("constant", "linear", "cosine")
        for share in ("0.5", "0.8")
    ]
    assert all(at(t.config, "method.search.samples") == 0 for t in ready_made["beta_schedule"].trials)


def test_distribution_averaging_has_the_four_pairs_of_the_paper(ready_made: Mapping[str, Ablation]) -> None:
    heuristic, rule = "method.train.distribution.heuristic", "method.train.shares.rule"
    assert settings_of(ready_made["distribution_averaging"]) == [
        (f"{heuristic}=random", f"{rule}=overlap"),
        (f"{heuristic}=sandwich", f"{rule}=overlap"),
        (f"{heuristic}=tracking_sandwich", f"{rule}=overlap"),
        (f"{heuristic}=tracking_sandwich", f"{rule}=maxnet"),
    ]


def test_comm_budget_crosses_the_budget_with_the_averaging(ready_made: Mapping[str, Ablation]) -> None:
    trials = ready_made["comm_budget"].trials
    keys = ("method.train.communication.value", "method.train.weighting", "method.train.communication.unit", "seed")
    assert [tuple(at(t.config, key) for key in keys) for t in trials] == [
        (budget, rule, "fraction", seed)
        for budget in (1.0, 0.5, 0.25)
        for rule in ("opa", "fedavg", "plain")
        for seed in (1, 2)
    ]
    assert all(at(t.config, "method.rand_init.rounds") == 0 for t in trials)


def test_tier_split_sets_counts_shares_and_rho(ready_made: Mapping[str, Ablation]) -> None:
    assert settings_of(ready_made["tier_split"]) == [
        ("tiers.count=4",),
        ("tiers.count=2",),
        ("tiers.count=3",),
        ("tiers.count=4", "tiers.shares=[0.4,0.3,0.2,0.1]"),
        ("tiers.count=4", "tiers.shares=[0.1,0.2,0.3,0.4]"),
        ("tiers.count=4", "tiers.device_table=generated", "tiers.max_step_s=0.015"),
        ("tiers.count=4", "tiers.rho_high=0.75"),
    ]


def test_search_has_three_searchers_and_shares(ready_made: Mapping[str, Ablation]) -> None:
    keys = ("method.search.searcher", "method.search.scoring", "method.search.validation_share")
    found = [tuple(at(t.config, key) for key in keys) for t in ready_made["search"].trials if t.seed == 2]
    ways = (("nsga2", "central"), ("random", "central"), ("nsga2", "federated"))
    assert found == [(*way, share) for way in ways for share in (1.0, 0.5, 0.2)]


def test_the_others_vary_one_thing(ready_made: Mapping[str, Ablation]) -> None:
    rounds = ("method.finetune.rounds", "method.rand_init.rounds")
    assert settings_of(ready_made["init"]) == [tuple(f"{key}={n}" for key in rounds) for n in (5, 15, 30)]
    assert settings_of(ready_made["spider_lambda"]) == [
        (f"method.train.pull={v}",) for v in ("0.0", "0.01", "0.1", "1.0")
    ]
    assert settings_of(ready_made["alpha"]) == [(f"data.alpha={v}",) for v in ("100.0", "1.0", "0.1")]
    assert settings_of(ready_made["participation"]) == [(f"method.train.clients_per_round={v}",) for v in (4, 8, 16)]


@pytest.mark.parametrize("name", FITTING)
def test_a_trial_differs_from_the_experiment_in_its_overrides_alone(
    name: str, ready_made: Mapping[str, Ablation]
) -> None:
    """All trials, against values set one by one."""
    ablation = ready_made[name]
    parser = OverridesParser.create()
    base = asdict(compose_config(ablation.overrides))
    assert base["reuse_supernet"] is True
    for trial in ablation.trials:
        changed = {key: value for key, value in flat(trial.config).items() if value != flat(base)[key]}
        wanted = {o.key_or_group: o.value() for o in parser.parse_overrides([*trial.overrides, f"seed={trial.seed}"])}
        assert changed == {key: value for key, value in wanted.items() if value != flat(base)[key]}
        assert trial.config.keys() == base.keys()


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found


def assert_composed(ablation: Ablation, trials: Sequence[Trial]) -> None:
    for trial in trials:
        composed = compose_config([*ablation.overrides, *trial.overrides, f"seed={trial.seed}"])
        assert dict(trial.config) == asdict(composed)


@pytest.mark.parametrize("name", FITTING)
def test_the_fast_path_gives_what_composing_gives(name: str, ready_made: Mapping[str, Ablation]) -> None:
    ablation = ready_made[name]
    assert_composed(ablation, [ablation.trials[1], ablation.trials[-2]])


@pytest.mark.slow
@pytest.mark.parametrize("name", FITTING)
def test_the_fast_path_gives_what_composing_gives_for_all_trials(name: str, ready_made: Mapping[str, Ablation]) -> None:
    assert_composed(ready_made[name], ready_made[name].trials)


def test_run_ids_are_planned_unique_and_valid(ready_made: Mapping[str, Ablation]) -> None:
    ids = [t.run_id for ablation in ready_made.values() for t in ablation.trials]
    assert len(set(ids)) == len(ids)
    for ablation in ready_made.values():
        for trial in ablation.trials:
            assert trial.run_id == f"{ablation.ablation_id}-{trial.index:04d}"
            assert check_name("run id", trial.run_id, LONGEST_RUN_ID) == trial.run_id
    assert max(map(len, ids)) == LONGEST_RUN_ID == 40


# -- one's own ---------------------------------------------------------------------------------------------------------

LR = "axes: {lr: {key: method.train.lr, values: [0.1, 0.2]}}\nseeds: [1]\n"
TWO = """
axes:
  lr: {key: method.train.lr, values: [0.3, 0.1]}
  averaging: {settings: {OPA: {method.train.weighting: opa}, none: {}}}
seeds: [7, 3]
"""


def test_the_last_axis_changes_first_and_seeds_before_it(plan: Plan) -> None:
    ablation = plan(TWO)
    assert [(*t.setting.values(), t.seed) for t in ablation.trials] == [
        (lr, averaging, seed) for lr in (0.3, 0.1) for averaging in ("OPA", "none") for seed in (7, 3)
    ]
    assert ablation.trials[0].overrides == ("method.train.lr=0.3", "method.train.weighting=opa")
    assert ablation.trials[-1].overrides == ("method.train.lr=0.1",)
    assert ablation.trials[-1].label() == "lr=0.1 averaging=none seed=3"
    assert ablation.reference == {"lr": 0.1, "averaging": "OPA"}


def test_the_same_arguments_plan_the_same_trials(plan: Plan) -> None:
    once, again = plan(TWO), plan(TWO)
    assert once.ablation_id != again.ablation_id
    assert without_ids(once) == without_ids(again)


def test_what_is_given_holds_for_all_trials(plan: Plan, tmp_path: Path) -> None:
    ablation = plan(LR + "overrides: [data.alpha=3, data.num_clients=12]\n", "data.alpha=5", "executor.kind=serial")
    for trial in ablation.trials:
        assert (at(trial.config, "data.alpha"), at(trial.config, "data.num_clients")) == (5.0, 12)
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


def test_values_of_every_kind(plan: Plan) -> None:
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
    assert at(ablation.trials[0].config, "data.root") == "a b=c"


def test_a_mapping_of_the_experiment_is_added_to_as_hydra_does(plan: Plan) -> None:
    ablation = plan(
        "axes: {weights: {key: tiers.cost_weights, values: [{macs: 2}, {macs: 3}]}}\nseeds: [1]\n",
        "+tiers.cost_weights.macs=1",
        "+tiers.cost_weights.parameters=5",
    )
    for trial in ablation.trials:
        assert trial.config["tiers"]["cost_weights"] == {"macs": trial.setting["weights"]["macs"], "parameters": 5.0}
    assert_composed(ablation, ablation.trials[:1])


def test_an_axis_may_choose_the_method_and_the_experiment(plan: Plan) -> None:
    text = "axes: {how: {settings: {a: {method: fedavg, method.train.rounds: 3}, b: {method: fedoras}}}}\nseeds: [4]\n"
    methods = plan(text, experiment="")
    assert [t.config["method"]["name"] for t in methods.trials] == ["fedavg", "fedoras"]
    assert at(methods.trials[0].config, "method.train.rounds") == 3
    assert [t.config["seed"] for t in methods.trials] == [4, 4]
    presets = plan(
        "axes: {preset: {key: experiment, values: [fedoras_digits, spider_digits]}}\nseeds: [4]\n", experiment=""
    )
    assert [t.experiment for t in presets.trials] == ["fedoras_digits", "spider_digits"]


# -- random search -----------------------------------------------------------------------------------------------------

RANDOM = """
axes:
  lr: {key: method.train.lr, log_uniform: [0.001, 1]}
  pull: {key: data.alpha, uniform: [2, 3]}
  rounds: {key: method.train.rounds, integers: [1, 3]}
  rule: {key: method.train.weighting, values: [opa, plain]}
  shares: {key: tiers.shares, values: [[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]}
seeds: [1]
search: {kind: random, samples: 24, seed: 5}
"""


def drawn(ablation: Ablation) -> list[dict[str, Any]]:
    return [dict(t.setting) for t in ablation.trials if t.seed == 1]


def test_draws_lie_in_their_ranges(plan: Plan) -> None:
    ablation = plan(RANDOM)
    points = drawn(ablation)
    assert len(points) == len(ablation.trials) == 24
    assert all(0.001 <= p["lr"] <= 1 and 2 <= p["pull"] <= 3 for p in points)
    assert {p["rounds"] for p in points} == {1, 2, 3}
    assert {p["rule"] for p in points} == {"opa", "plain"}
    below = sum(p["lr"] < 0.0316 for p in points)
    assert 5 <= below <= 19, "half of a log-uniform range lies below its geometric middle"
    assert ablation.axes["rounds"] == (1, 2, 3)
    assert ablation.axes["lr"] == tuple(sorted(p["lr"] for p in points))
    assert len(ablation.axes["shares"]) == 2
    assert ablation.reference.keys() <= {"rule", "shares"}
    for trial in ablation.trials[:6]:
        assert at(trial.config, "method.train.lr") == trial.setting["lr"]
        assert type(at(trial.config, "method.train.rounds")) is int


def test_draws_are_those_of_the_seed(plan: Plan) -> None:
    few = "ablation.search.samples=4"
    first = drawn(plan(RANDOM, few))
    assert drawn(plan(RANDOM, few, "ablation.search.seed=6")) != first
    seeds = plan(RANDOM, few, "ablation.seeds=[1,5]")
    assert [(t.seed, dict(t.setting)) for t in seeds.trials] == [(s, point) for point in first for s in (1, 5)]
    assert drawn(plan(RANDOM, "ablation.search.samples=5"))[:4] == first


def test_an_axis_draws_the_same_whatever_the_others_are(plan: Plan) -> None:
    alone = RANDOM.splitlines(keepends=True)
    text = "".join(line for line in alone if "pull" not in line and "rule" not in line)
    few = "ablation.search.samples=4"
    assert [p["lr"] for p in drawn(plan(text, few))] == [p["lr"] for p in drawn(plan(RANDOM, few))]


# -- values as Hydra reads them ----------------------------------------------------------------------------------------

WORDS = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True).filter(
    lambda w: w not in ("null", "true", "false", "inf", "nan")
)
TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12) | st.from_regex(
    r"""[a-z ="'\\,:{}\[\]$#~+*/.\-]{0,10}""", fullmatch=True
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS | WORDS
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(WORDS, v, max_size=3), max_leaves=6)


@settings(max_examples=80, deadline=None)
@given(VALUES)
@example("null")
@example("True")
@example("inf")
@example("1e-3")
@example("12")
@example("")
@example("é, a=b")
@example('C:\\data\\"x"\\')
@example([math.inf, -math.inf, 1e-7, 1e16, -0.001, -3])
@example({"a": {"b": [None, True, "x y"]}, "c": []})
def test_a_value_survives_being_an_override(value: Any) -> None:
    override = OverridesParser.create().parse_override(f"key={override_text(value)}")
    assert plain(override.value()) == value
    assert repr(plain(override.value())) == repr(value), "of the same kind, too"


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, str):
        return str(value)
    return [plain(v) for v in value] if isinstance(value, Sequence) else value


def test_overrides_can_be_read() -> None:
    assert override_text("opa") == "opa"
    assert override_text("mine.rules/x-1") == "mine.rules/x-1"
    assert override_text("a b") == '"a b"'
    assert override_text([1, None, True, 0.001, -2]) == "[1,null,true,0.001,-2]"
    assert override_text({"a": {"b": "x=1"}}) == '{a:{b:"x=1"}}'
    assert override_text(math.nan) == "nan"


# -- what is refused ---------------------------------------------------------------------------------------------------


def lr_of(values: str) -> str:
    return LR.replace("[0.1, 0.2]", values)


REFUSED = {
    "unknown key": (LR.replace("train.lr", "train.lrr"), [], "key 'method.train.lrr'; did you mean 'method.train.lr'?"),
    "new key of a mapping": (
        LR.replace("method.train.lr", "tiers.budget.macs"),
        [],
        "unknown configuration key 'tiers.budget.macs'",
    ),
    "wrong type": (lr_of("[0.1, abc]"), [], "method.train.lr: Value 'abc' of type 'str' could not be converted"),
    "wrong type, deep": (lr_of("[0.1, {a: 1}]"), [], "method.train.lr"),
    "out of range": (
        LR.replace("method.train.lr", "executor.chunk_size").replace("0.1, 0.2", "1, 0"),
        [],
        "executor.chunk_size=0: must be at least 1",
    ),
    "varied twice": (
        LR.replace("axes: {", "axes: {a: {settings: {x: {method.train.lr: 1}}}, "),
        [],
        "ablation.axes.lr: method.train.lr is set by another axis, too",
    ),
    "varied and fixed": (
        LR,
        ["method.train.lr=3"],
        "method.train.lr=3: the ablation varies method.train.lr; change its values instead (ablation.axes.lr.values=",
    ),
    "varied and forced": (LR, ["++method.train.lr=3"], "++method.train.lr=3: the ablation varies method.train.lr"),
    "seed": (LR, ["seed=3"], "seed=3: an ablation has several seeds; give ablation.seeds=[1,2]"),
    "forced seed": (LR, ["++seed=3"], "++seed=3: an ablation has several seeds"),
    "unknown experiment": (LR, ["experiment=fedoras_digit"], "experiment=fedoras_digit: no such preset"),
    "method of another preset": (
        LR.replace("method.train.lr, values: [0.1, 0.2]", "method, values: [fedavg]"),
        [],
        "experiment=fedoras_digits and method=fedavg do not go together",
    ),
    "unknown common key": (LR, ["data.alfa=1"], "unknown configuration key 'data.alfa'; did you mean 'data.alpha'?"),
    "unknown key in the file": (LR + "overrides: [data.alfa=1]", [], "did you mean 'data.alpha'?"),
    "two ablations": (LR, ["ablation=alpha"], "give one ablation=NAME"),
    "unknown key of the ablation": (LR, ["ablation.seed=[1]"], "unknown key 'seed'; did you mean 'seeds'?"),
    "far too many": (
        f"axes: {{{', '.join(f'a{i}: {{key: k{i}, values: {list(range(10))}}}' for i in range(12))}}}\nseeds: [1]\n",
        [],
        "has 1000000000000 trials: 10000 at most",
    ),
    "too many": (
        LR,
        ["ablation.search.kind=random", "ablation.search.samples=5001", "ablation.seeds=[1,2]"],
        "mine.yaml has 10002 trials: 10000 at most; take fewer values",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_planned_is_refused_in_one_line(case: str, plan: Plan, tmp_path: Path) -> None:
    text, arguments, expected = REFUSED[case]
    experiment = "" if any(a.startswith("experiment=") for a in arguments) else "fedoras_digits"
    with pytest.raises(ValueError, match=r"\w") as refusal:
        plan(text, *arguments, experiment=experiment)
    assert expected in str(refusal.value)
    assert "\n" not in str(refusal.value).strip()
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("arguments", [[], ["experiment=fedoras_digits"], ["ablation=", "experiment=fedoras_digits"]])
def test_no_ablation_is_named(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match=r"give one ablation=NAME \(or a YAML file of your own\)"):
        plan_ablation(arguments)


# -- stored ------------------------------------------------------------------------------------------------------------


def test_a_stored_plan_may_change_where_it_runs_and_nothing_else(plan: Plan, tmp_path: Path) -> None:
    ablation = plan(LR)
    write_ablation(tmp_path, ablation)
    assert planned_ablation(tmp_path, ablation.ablation_id, []) == ablation
    changed = planned_ablation(tmp_path, ablation.ablation_id[:8], ["executor.actors=1", "ray.num_cpus=2"])
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


def test_without_an_experiment_nothing_is_planned() -> None:
    with pytest.raises(ValueError, match="give the experiment that the ablation varies, such as experiment="):
        plan_ablation(["ablation=alpha"])


def test_an_ablation_for_another_method_says_so() -> None:
    with pytest.raises(ValueError, match=r"ablation=tier_split does not fit superfednas_digits: .*rand_init"):
        plan_ablation(["ablation=tier_split", "experiment=superfednas_digits"])


def test_random_points_are_different_and_as_many_as_there_are() -> None:
    asked = ["ablation=alpha", "experiment=fedoras_digits", "ablation.seeds=[1]", "ablation.search.kind=random"]
    found = [t.setting["alpha"] for t in plan_ablation([*asked, "ablation.search.samples=3"]).trials]
    assert sorted(found) == [0.1, 1.0, 100.0]
    with pytest.raises(ValueError, match=r"samples=4: the axes have only about 3 different points"):
        plan_ablation([*asked, "ablation.search.samples=4"])
