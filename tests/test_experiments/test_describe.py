"""`fedloom describe` gives the published numbers of the spaces (FedorAS, Sec. 4, App. E.4, Tab. 8, 19)."""

import json
from typing import Any

import pytest

from fedloom.experiments.cli import main
from fedloom.experiments.runs.configuration import compose_config
from fedloom.experiments.runs.describe import describe
from fedloom.platform.methods.fedoras import epochs_per_operator
from fedloom.platform.spaces.registry import build_space

FEW_PATHS = "tiers.paths=1000"


@pytest.fixture(scope="module")
def cifar() -> dict[str, Any]:
    return describe(["space=cnn_cifar"])


def test_a_space_named_alone_has_the_classes_of_its_design() -> None:
    own = describe(["space=rnn_shakespeare", FEW_PATHS])
    assert own == describe(["space.name=rnn_shakespeare", "space.num_classes=90", FEW_PATHS])
    fewer = describe(["space=rnn_shakespeare", "space.num_classes=10", FEW_PATHS])
    assert own["parameters"]["fixed"] - fewer["parameters"]["fixed"] == 80 * (8 + 128 + 1), "embedding and decoder"


def millions(values: list[float]) -> list[float]:
    return [value / 1e6 for value in values]


def test_cnn_cifar_has_the_published_size(cifar: dict[str, Any]) -> None:
    assert cifar["architectures"] == 1_853_020_188_851_841
    assert cifar["layers"] == 16
    assert cifar["operators"][:1]
    assert len(cifar["operators"]) == 9
    parameters = cifar["parameters"]
    assert round(parameters["supernet"] / 1e6, 2) == 20.80
    assert round(parameters["fixed"] / 1e6, 3) == 0.619
    assert round(parameters["largest"] / 1e6, 2) == 9.68


def test_cnn_cifars_largest_path_costs_what_was_published(cifar: dict[str, Any]) -> None:
    assert cifar["macs"]["largest"] == pytest.approx(716.0e6, rel=0.015)
    assert cifar["macs"]["fixed"] <= cifar["macs"]["smallest"] < cifar["macs"]["largest"]


def test_tier_bounds_of_cifar10(cifar: dict[str, Any]) -> None:
    assert cifar["tier_cost"] == "macs"
    assert millions(cifar["tier_upper_bounds"]) == pytest.approx([120.9, 223.2, 325.4, 716.0], rel=0.02)


def test_tier_bounds_of_cifar100() -> None:
    bounds = describe(["experiment=fedoras_cifar100"])["tier_upper_bounds"]
    assert millions(bounds) == pytest.approx([111.5, 204.3, 297.1, 716.0], rel=0.02)


def test_the_shares_of_models_sum_to_1(cifar: dict[str, Any]) -> None:
    assert len(cifar["share_of_models"]) == 4
    assert sum(cifar["share_of_models"]) == pytest.approx(1.0, abs=1e-5)


def test_cnn_cifar_wide_has_the_published_size() -> None:
    wide = describe(["space=cnn_cifar_wide", FEW_PATHS])
    assert (wide["layers"], wide["architectures"]) == (32, 9**32)
    assert round(wide["parameters"]["supernet"] / 1e6, 2) == 191.24
    assert wide["macs"]["largest"] == pytest.approx(4.44e9, rel=0.015)


def test_json_is_the_same_as_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["describe", "--json", "space=cnn_digits", FEW_PATHS])
    assert ending.value.code == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == describe(["space=cnn_digits", FEW_PATHS])


def test_what_macs_count_is_said(cifar: dict[str, Any]) -> None:
    assert cifar["macs_count"] == "convolutions and matrix products only (no norms, activations, pooling, additions)"


def test_text_shows_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["describe", "space=cnn_digits", FEW_PATHS])
    assert ending.value.code == 0
    found = describe(["space=cnn_digits", FEW_PATHS])
    out = capsys.readouterr().out
    assert f"{found['architectures']:,}" in out
    assert f"{found['parameters']['supernet']:,}" in out


def test_the_tiers_cost_is_the_one_that_a_run_would_use() -> None:
    plain = describe(["space=cnn_digits", FEW_PATHS])
    fewer = describe(["space=cnn_digits", FEW_PATHS, f"tiers.unsupported=[{plain['operators'][-1]}]"])
    assert fewer["tier_upper_bounds"] != plain["tier_upper_bounds"]
    assert fewer["macs"] == plain["macs"]
    parameters = describe(["space=cnn_digits", FEW_PATHS, "tiers.cost=parameters"])
    assert parameters["tier_cost"] == "parameters"


def test_an_unknown_space_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown space 'cnn_cifr'.*did you mean 'cnn_cifar'"):
        describe(["space=cnn_cifr"])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["tiers.tasks=[pairs,all]"], r"tiers.tasks has 2 values for 4 tiers: give one per tier"),
        (["space.heads=[5,10]"], r"space.heads=\[5, 10\] is for several tasks: give each tier's"),
        (
            ["tiers.tasks=[pairs,pairs,all,all]", "space.heads=[5]"],
            r"space.heads=\[5\]: give the number of classes of each task \(pairs, all\)",
        ),
        (["tiers.tasks=[pairs,pairs,all,all]"], r"space.heads=null: give the number of classes of each task"),
    ],
)
def test_tasks_that_fit_neither_tiers_nor_classifiers_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        describe(["space=cnn_digits", FEW_PATHS, *overrides])


@pytest.mark.parametrize(
    ("preset", "ratio"),
    [
        ("fedoras_cifar10", 5.56),  # 500 rounds of 10 clients and 50 epochs over 9 operators, to 500 of 10 and 1
        ("fedoras_speech", 3.41),  # 750 rounds of 21 and 25 over 11, to 500 of 21 and 1
        ("fedoras_shakespeare", 0.72),  # 500 of 16 and 5 over 6, 7, 7 and 8, to 500 of 16 and 1
        ("fedoras_digits", 2.0),
        ("fedoras_digits_tasks", 2.0),  # the choice of the classifier does not count
        ("fedoras_cifar10_small", 2.22),
        ("fedoras_shakespeare_small", 2.02),
        ("fedoras_speech_small", 2.0),
    ],
)
def test_how_long_an_operator_is_trained(preset: str, ratio: float) -> None:
    config = compose_config([f"experiment={preset}"])
    assert epochs_per_operator(config, build_space(config.space)) == pytest.approx(ratio, abs=0.005)


def test_fedoras_says_how_long_an_operator_is_trained_beside_the_paper() -> None:
    published = {"CIFAR-10": 5.6, "Speech Commands": 3.4}
    said = describe(["experiment=fedoras_digits", FEW_PATHS])["epochs_per_operator"]
    assert said == {"supernet_to_rand_init": 2.0, "published": published}
    alone = describe(["experiment=fedoras_digits", FEW_PATHS, "method.rand_init.rounds=0"])["epochs_per_operator"]
    assert alone["supernet_to_rand_init"] is None
    assert "epochs_per_operator" not in describe(["experiment=fedavg_digits", FEW_PATHS])
