"""`fedloom describe` gives the published numbers of the spaces (FedorAS, Sec. 4, App. E.4, Tab. 8, 19)."""

import json
from typing import Any

import pytest

from fedloom.experiments.cli import main
from fedloom.experiments.runs.describe import describe

FEW_PATHS = "tiers.paths=1000"


@pytest.fixture(scope="module")
def cifar() -> dict[str, Any]:
    return describe(["space=cnn_cifar"])


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
        (["space.heads=[5,10]"], r"space.heads=\[5, 10\] are the classes of several tasks: give each tier's"),
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
