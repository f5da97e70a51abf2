"""The weighting rules: literal weights, and rules of a user's own."""

import pytest

from fedloom.platform.averaging.weighting import RULES, Work, fedavg, opa, plain, weighting_rule

WORK = Work(samples=45, seen_samples=90, seen_by_tensor={"fixed.weight": 90, "op.weight": 30, "idle.weight": 0})


def test_fedavg_weighs_every_tensor_by_the_clients_samples() -> None:
    assert fedavg(WORK) == {"fixed.weight": 45.0, "op.weight": 45.0, "idle.weight": 45.0}


def test_plain_weighs_all_alike() -> None:
    assert plain(WORK) == {"fixed.weight": 1.0, "op.weight": 1.0, "idle.weight": 1.0}


def test_opa_weighs_by_the_samples_that_went_through() -> None:
    assert opa(WORK) == {"fixed.weight": 90.0, "op.weight": 30.0, "idle.weight": 0.0}


def test_rules_are_found_by_name() -> None:
    assert {name: weighting_rule(name) for name in RULES} == {"fedavg": fedavg, "plain": plain, "opa": opa}


def test_a_rule_of_ones_own_is_found_by_import_path() -> None:
    assert weighting_rule("fedloom.platform.averaging.weighting:plain") is plain


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "opq",
            r"unknown weighting rule 'opq': known are fedavg, opa, plain, or module:attribute; did you mean 'opa'\?",
        ),
        ("no_such_module:rule", "weighting rule 'no_such_module:rule' cannot be imported"),
        ("fedloom.platform.averaging.weighting:nope", "cannot be imported"),
        (":rule", "cannot be imported"),
        (".relative:rule", "cannot be imported"),
    ],
)
def test_an_unknown_rule_is_one_clear_line(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        weighting_rule(name)
    assert "\n" not in str(caught.value)
