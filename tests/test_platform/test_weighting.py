"""The weighting rules: literal weights, and rules of a user's own."""

import math
import sys
from types import ModuleType
from typing import Any

import pytest

from fedloom.platform.averaging.weighting import WEIGHTING_RULES, Work, fedavg, opa, plain, weighting_rule
from fedloom.platform.plugins import Chosen, PluginError

WORK = Work(samples=45, seen_samples=90, seen_by_tensor={"fixed.weight": 90, "op.weight": 30, "idle.weight": 0})


def test_fedavg_weighs_every_tensor_by_the_clients_samples() -> None:
    assert fedavg(WORK) == {"fixed.weight": 45.0, "op.weight": 45.0, "idle.weight": 45.0}


def test_plain_weighs_all_alike() -> None:
    assert plain(WORK) == {"fixed.weight": 1.0, "op.weight": 1.0, "idle.weight": 1.0}


def test_opa_weighs_by_the_samples_that_went_through() -> None:
    assert opa(WORK) == {"fixed.weight": 90.0, "op.weight": 30.0, "idle.weight": 0.0}


def test_rules_are_found_by_name() -> None:
    found = {name: weighting_rule(Chosen(name)) for name in WEIGHTING_RULES.known}
    assert found == {"fedavg": fedavg, "plain": plain, "opa": opa}


def test_a_rule_of_ones_own_is_found_by_import_path() -> None:
    assert weighting_rule(Chosen("fedloom.platform.averaging.weighting:plain"))(WORK) == plain(WORK)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "opq",
            r"unknown weighting rule 'opq': known are fedavg, opa, plain, or module:name; did you mean 'opa'\?",
        ),
        ("no_such_module:rule", "weighting rule 'no_such_module:rule' cannot be imported: there is no module"),
        ("fedloom.platform.averaging.weighting:nope", r"cannot be imported: .*weighting\.py has no 'nope'"),
        (":rule", "':rule' cannot be imported: give module:name"),
        (".relative:rule", "'.relative:rule' cannot be imported: give module:name"),
    ],
)
def test_an_unknown_rule_is_one_clear_line(name: str, message: str) -> None:
    with pytest.raises(PluginError, match=message) as caught:
        weighting_rule(Chosen(name))
    assert "\n" not in str(caught.value)


ONE_EACH = {"fixed.weight": 1.0, "op.weight": 1.0, "idle.weight": 1.0}


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("bare", [1.0, 1.0, 1.0], "gives list: give a dictionary of one weight per tensor"),
        ("partial", {"fixed.weight": 1.0}, r"gives no weight for op\.weight: give one to every tensor of"),
        ("negative", {**ONE_EACH, "op.weight": -1.0}, r"gives op\.weight the weight -1\.0: weights are finite numbers"),
        ("undefined", {**ONE_EACH, "op.weight": math.nan}, r"gives op\.weight the weight nan"),
        ("endless", {**ONE_EACH, "op.weight": math.inf}, r"gives op\.weight the weight inf"),
    ],
)
def test_a_rule_that_gives_no_weights_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, given: Any, message: str
) -> None:
    module = ModuleType("own_weighting")
    setattr(module, name, lambda _work: given)
    monkeypatch.setitem(sys.modules, "own_weighting", module)
    with pytest.raises(PluginError, match=f"^weighting rule 'own_weighting:{name}' {message}"):
        weighting_rule(Chosen(f"own_weighting:{name}"))(WORK)
