"""The ready-made ablations: how many trials, which, and with which configurations."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from fedloom.experiments.ablation.plan import plan_ablation
from fedloom.experiments.runs.presets import ablations
from fedloom.experiments.store.ablations import Ablation, Trial
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.results.files import check_name
from fedloom.platform.results.paths import LONGEST_RUN_ID

Compose = Callable[[Sequence[str]], RunConfig]
AssertComposed = Callable[[Ablation, Sequence[Trial]], None]

FITTING = {  # empty where the settings have experiments of their own
    "alpha": "fedoras_digits",
    "asynchronous": "fedbuff_digits",
    "asynchronous_slices": "fedbuff_superfednas_digits",
    "beta_schedule": "superfednas_digits",
    "comm_budget": "fedoras_digits",
    "compression": "fedavg_digits",
    "distribution_averaging": "superfednas_digits",
    "fedmask": "",
    "fedoras_alpha": "fedoras_digits",
    "idle_momentum": "fedoras_digits",
    "init": "fedoras_digits",
    "methods": "",
    "methods_cifar10": "",
    "methods_cifar10_tuning": "",
    "methods_tuning": "",
    "optimisers": "fedavg_digits",
    "optimisers_tuning": "fedavg_digits",
    "participation": "fedoras_digits",
    "personal": "",
    "robust": "fedavg_digits",
    "search": "fedoras_digits",
    "selection": "fedavg_digits",
    "shrinking": "",
    "spider_lambda": "spider_digits",
    "spider_statistics": "spider_digits",
    "superfed_alpha": "superfednas_digits",
    "superfed_participation": "superfednas_digits",
    "supernet_optimisers": "fedoras_digits",
    "systems": "",
    "tier_split": "fedoras_digits",
}

SEEDS = {
    "fedoras_alpha": (1, 2, 3, 4),
    **dict.fromkeys(("optimisers_tuning", "methods_tuning", "methods_cifar10_tuning"), (11,)),
    **dict.fromkeys(
        (
            *(
                "idle_momentum",
                "superfed_alpha",
                "superfed_participation",
                "optimisers",
                "supernet_optimisers",
                "selection",
            ),
            *("methods", "methods_cifar10", "shrinking", "robust", "compression", "personal", "systems", "fedmask"),
            *("asynchronous", "asynchronous_slices"),
        ),
        (1, 2, 3),
    ),
}
"""Of ablations that have other seeds than 1 and 2."""

METHODS = (
    *("FedAvg", "FedAvg, tier 4", "ZeroFL", "HeteroFL", "FjORD", "FedRolex", "DepthFL", "random NAS", "SuperFedNAS"),
    *("E-FedSup", "FedorAS"),
)
ON_DIGITS = (*METHODS[:7], "ScaleFL", *METHODS[7:])
RATES = (0.03, 0.1, 0.3)

AXES: dict[str, tuple[dict[str, tuple[Any, ...]], dict[str, Any]]] = {
    "alpha": ({"alpha": (100.0, 1.0, 0.1)}, {"alpha": 1.0}),
    "beta_schedule": (
        {"beta_0": (0.9, 0.5), "decay": ("constant", "linear", "cosine"), "decay_share": (0.5, 0.8)},
        {"beta_0": 0.9, "decay": "cosine", "decay_share": 0.8},
    ),
    "comm_budget": (
        {"budget": (1.0, 0.5, 0.25), "averaging": ("opa", "fedavg", "fedavg_whole", "plain")},
        {"budget": 0.5, "averaging": "opa"},
    ),
    "compression": (
        {
            "compression": (
                *("none", "top_k 10 %", "top_k 1 %", "1 % without memory", "QSGD 4 bits"),
                *("8 bits both ways", "4 bits both ways"),
            )
        },
        {"compression": "none"},
    ),
    "distribution_averaging": (
        {"heuristic": ("overlap + R", "overlap + S", "overlap + TS", "MaxNet")},
        {"heuristic": "MaxNet"},
    ),
    **dict.fromkeys(
        ("asynchronous", "asynchronous_slices"),
        ({"federation": ("synchronous", "over-selection", "FedBuff", "FedAsync")}, {"federation": "FedBuff"}),
    ),
    "fedmask": ({"method": ("alone", "FedAvg", "FedMask")}, {}),
    "fedoras_alpha": ({"alpha": (1000.0, 1.0, 0.1)}, {"alpha": 1.0}),
    "idle_momentum": ({"idle": ("rest", "move on")}, {"idle": "rest"}),
    "init": ({"rounds": ("5 rounds", "15 rounds", "30 rounds", "30 rounds each")}, {"rounds": "30 rounds"}),
    "methods": ({"method": ON_DIGITS}, {}),
    "methods_cifar10": ({"method": METHODS}, {}),
    "methods_cifar10_tuning": ({"method": METHODS, "lr": RATES}, {"lr": 0.1}),
    "methods_tuning": ({"method": ON_DIGITS, "lr": RATES}, {"lr": 0.1}),
    "optimisers": (
        {
            "optimiser": (
                *("FedAvg", "FedProx", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "SCAFFOLD", "FedDyn", "FedNova"),
            )
        },
        {},
    ),
    "optimisers_tuning": (
        {
            "optimiser": (
                *("FedAvg", "FedAvg, momentum", "FedProx .01", "FedProx .1", "FedAvgM .5", "FedAvgM .9"),
                *("FedAdagrad .03", "FedAdagrad .1", "FedAdam .01", "FedAdam .03", "FedYogi .01", "FedYogi .03"),
                *("SCAFFOLD, option 1", "SCAFFOLD, option 2", "FedDyn .01", "FedDyn .1"),
                *("FedNova", "FedNova, momentum"),
            ),
            "lr": (0.03, 0.1, 0.3),
        },
        {"optimiser": "FedAvg, momentum", "lr": 0.1},
    ),
    "participation": ({"clients_per_round": (4, 8, 16)}, {}),
    "personal": (
        {
            "method": (
                *("alone", "FedAvg", "FedAvg, fine-tuned", "FedPer", "FedRep", "LG-FedAvg", "FedBN", "APFL", "Ditto"),
                "FedProto",
            ),
            "skew": ("two classes", "alpha .3", "turned images"),
        },
        {},
    ),
    "robust": (
        {
            "attack": (
                "none",
                *(
                    f"{attack} {share} %"
                    for attack in ("label flip", "sign flip", "Gaussian", "ALIE", "inner product")
                    for share in (20, 40)
                ),
            ),
            "rule": ("mean", "median", "trimmed mean", "Krum", "Multi-Krum", "Bulyan", "RFA", "norm bound"),
        },
        {"attack": "none", "rule": "mean"},
    ),
    "search": (
        {"searcher": ("nsga2", "random", "federated"), "validation_share": (1.0, 0.5, 0.2)},
        {"searcher": "nsga2", "validation_share": 1.0},
    ),
    "selection": (
        {"selection": ("uniform", "round robin", "power of choice", "Oort", "PyramidFL")},
        {"selection": "uniform"},
    ),
    "shrinking": ({"method": ("SuperFedNAS", "OFA", "CompOFA", "OFA, one client", "CompOFA, one client")}, {}),
    "spider_lambda": ({"lambda": (0.0, 0.01, 0.1, 1.0)}, {"lambda": 0.01}),
    "spider_statistics": ({"statistics": ("batch", "running")}, {"statistics": "batch"}),
    "superfed_alpha": ({"alpha": ("alpha 100", "alpha 1", "alpha .1")}, {}),
    "superfed_participation": ({"participation": ("C = .2", "C = .4", "C = .8")}, {}),
    "supernet_optimisers": (
        {"server": ("mean", "FedAvgM .5", "FedAdam .003", "FedAdam .01", "FedYogi .01")},
        {"server": "mean"},
    ),
    "systems": ({"method": ("HeteroFL", "SplitMix", "FedDF", "FedDF, not distilled")}, {}),
    "tier_split": (
        {"split": ("4 equal", "2 equal", "3 equal", "4 mostly small", "4 mostly large", "4 by devices", "4 low rho")},
        {"split": "4 equal"},
    ),
}


@pytest.fixture(scope="module")
def ready_made() -> Mapping[str, Ablation]:
    """The plans of all ready-made ablations with a fitting experiment."""
    given = {name: [f"experiment={e}"] if e else [] for name, e in FITTING.items()}
    return {name: plan_ablation([f"ablation={name}", *experiment]) for name, experiment in given.items()}


def at(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        config = config[part]
    return config


def test_every_ready_made_ablation_is_looked_at() -> None:
    assert sorted(FITTING) == sorted(AXES) == ablations()


@pytest.mark.parametrize("name", FITTING)
def test_every_point_is_run_with_every_seed(name: str, ready_made: Mapping[str, Ablation]) -> None:
    ablation = ready_made[name]
    axes, reference = AXES[name]
    assert dict(ablation.axes) == axes
    assert list(ablation.axes) == list(axes)
    assert dict(ablation.reference) == reference
    seeds = SEEDS.get(name, (1, 2))
    assert (ablation.name, ablation.experiment, ablation.seeds) == (name, FITTING[name] or "custom", seeds)
    assert len(ablation.trials) == len(seeds) * math.prod(len(values) for values in axes.values())
    assert [t.index for t in ablation.trials] == list(range(len(ablation.trials)))
    assert [t.seed for t in ablation.trials] == [*seeds] * (len(ablation.trials) // len(seeds))
    points = [tuple(t.setting[axis] for axis in axes) for t in ablation.trials]
    assert len(set(points)) * len(seeds) == len(points)
    assert all(value in axes[axis] for t in ablation.trials for axis, value in t.setting.items())


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
    train = "method.train"
    keys = (f"{train}.communication.value", f"{train}.weighting", f"{train}.communication.unit", "seed")
    assert [tuple(at(t.config, key) for key in keys) for t in trials] == [
        (budget, rule, "fraction", seed)
        for budget in (1.0, 0.5, 0.25)
        for rule in ("opa", "fedavg", "fedavg_whole", "plain")
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
    numbers = ((5, 60), (15, 60), (30, 60), (30, 30))
    assert settings_of(ready_made["init"]) == [
        tuple(f"{key}={n}" for key, n in zip(rounds, pair, strict=True)) for pair in numbers
    ]
    assert settings_of(ready_made["idle_momentum"]) == [(f"method.train.idle_momentum={v}",) for v in ("false", "true")]
    assert settings_of(ready_made["spider_lambda"]) == [
        (f"method.train.pull={v}",) for v in ("0.0", "0.01", "0.1", "1.0")
    ]
    assert settings_of(ready_made["alpha"]) == [(f"data.alpha={v}",) for v in ("100.0", "1.0", "0.1")]
    assert settings_of(ready_made["superfed_alpha"]) == [
        (f"data.alpha={alpha}", f"method.train.rounds={n}")
        for alpha, n in (("100.0", 1500), ("1.0", 1500), ("0.1", 2500))
    ]
    assert settings_of(ready_made["superfed_participation"]) == [
        (f"method.train.clients_per_round={c}", f"method.train.rounds={n}")
        for c, n in ((4, 1500), (8, 1500), (16, 1000))
    ]
    assert settings_of(ready_made["participation"]) == [(f"method.train.clients_per_round={v}",) for v in (4, 8, 16)]


@pytest.mark.parametrize("name", [name for name, experiment in FITTING.items() if experiment])
def test_a_trial_differs_from_the_experiment_in_its_overrides_alone(
    name: str, ready_made: Mapping[str, Ablation], composed: Compose
) -> None:
    """All trials, against values set one by one."""
    ablation = ready_made[name]
    parser = OverridesParser.create()
    base = asdict(composed(ablation.overrides))
    known = flat(base)
    assert base["reuse_supernet"] is True
    for trial in ablation.trials:
        # An option, such as method.train.options.mu, is a key that only some have.
        changed = {key: value for key, value in flat(trial.config).items() if value != known.get(key, ...)}
        wanted = {o.key_or_group: o.value() for o in parser.parse_overrides([*trial.overrides, f"seed={trial.seed}"])}
        assert changed == {key: value for key, value in wanted.items() if value != known.get(key, ...)}
        assert trial.config.keys() == base.keys()


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found


@pytest.mark.parametrize("name", FITTING)
def test_the_fast_path_gives_what_composing_gives(
    name: str, ready_made: Mapping[str, Ablation], assert_composed: AssertComposed
) -> None:
    ablation = ready_made[name]
    assert_composed(ablation, [ablation.trials[1], ablation.trials[-2]])


@pytest.mark.slow
@pytest.mark.parametrize("name", FITTING)
def test_the_fast_path_gives_what_composing_gives_for_all_trials(
    name: str, ready_made: Mapping[str, Ablation], composed: Compose
) -> None:
    """Every setting is composed once, and its seeds are set in the result: the test above composes with a seed."""
    ablation = ready_made[name]
    expected: dict[tuple[str, ...], dict[str, Any]] = {}
    for trial in ablation.trials:
        if trial.overrides not in expected:
            expected[trial.overrides] = asdict(composed([*ablation.overrides, *trial.overrides]))
        assert dict(trial.config) == expected[trial.overrides] | {"seed": trial.seed}


def test_run_ids_are_planned_unique_and_valid(ready_made: Mapping[str, Ablation]) -> None:
    ids = [t.run_id for ablation in ready_made.values() for t in ablation.trials]
    assert len(set(ids)) == len(ids)
    for ablation in ready_made.values():
        for trial in ablation.trials:
            assert trial.run_id == f"{ablation.ablation_id}-{trial.index:04d}"
            assert check_name("run id", trial.run_id, LONGEST_RUN_ID) == trial.run_id
    assert any("distribution_averaging" in run_id for run_id in ids), "names are whole"
