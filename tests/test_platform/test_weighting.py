"""The weighting rules: literal weights, and rules of a user's own."""

import math
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from fedloom.platform.averaging.average import Update, average
from fedloom.platform.averaging.weighting import (
    WEIGHTING_RULES,
    Work,
    fedavg,
    fedavg_whole,
    opa,
    plain,
    weighting_rule,
    weights_of,
)
from fedloom.platform.plugins import ComponentSpec, PluginError
from fedloom.platform.spaces.slices import Slice

WORK = Work(samples=45, seen_samples=90, seen_by_tensor={"fixed.weight": 90, "op.weight": 30, "idle.weight": 0})


def test_fedavg_weighs_every_tensor_by_the_clients_samples() -> None:
    assert fedavg(WORK) == {"fixed.weight": 45.0, "op.weight": 45.0, "idle.weight": 45.0}


def test_plain_weighs_all_alike() -> None:
    assert plain(WORK) == {"fixed.weight": 1.0, "op.weight": 1.0, "idle.weight": 1.0}


def test_opa_weighs_by_the_samples_that_went_through() -> None:
    assert opa(WORK) == {"fixed.weight": 90.0, "op.weight": 30.0, "idle.weight": 0.0}


def test_whole_supernets_weigh_what_a_client_does_not_hold() -> None:
    assert weights_of(fedavg_whole, WORK) == (fedavg(WORK), 45.0)
    assert weights_of(fedavg_whole, replace(WORK, share=0.5)) == (dict.fromkeys(ONE_EACH, 22.5), 22.5)
    assert weights_of(fedavg, WORK) == (fedavg(WORK), 0.0)


def test_what_clients_lack_dilutes_in_numbers() -> None:
    """Clients of 30 and 10 samples: the first holds a and b, the second a and half of b, and nobody holds c."""
    old = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0, 2.0]), "c": torch.tensor([5.0])}
    first = Update(
        {"a": torch.tensor([3.0]), "b": torch.tensor([4.0, 4.0])},
        {"a": Slice("a"), "b": Slice("b")},
        {"a": 30.0, "b": 30.0},
    )
    second = Update(
        {"a": torch.tensor([7.0]), "b": torch.tensor([8.0])},
        {"a": Slice("a"), "b": Slice("b", ((0, 1),))},
        {"a": 10.0, "b": 10.0},
    )
    naive = average(old, [replace(first, unheld=30.0), replace(second, unheld=10.0)])
    # b[1]: (30 * 4 + 10 * 2) / 40 = 3.5, not 4; c is held by nobody.
    assert {name: tensor.tolist() for name, tensor in naive.items()} == {"a": [4.0], "b": [5.0, 3.5], "c": [5.0]}
    assert average(old, [first, second])["b"].tolist() == [5.0, 4.0]
    both = [replace(first, unheld=30.0), replace(second, unheld=10.0)]
    assert average(old, both, min_contributors=2)["b"].tolist() == [5.0, 3.5], "both contribute to b[1]"
    assert average(old, both, min_contributors=3)["b"].tolist() == [1.0, 2.0]
    assert average(old, [first, second], min_contributors=2)["b"].tolist() == [5.0, 2.0]


def test_rules_are_found_by_name() -> None:
    found = {name: weighting_rule(ComponentSpec(name)) for name in WEIGHTING_RULES.known}
    assert found == {"fedavg": fedavg, "fedavg_whole": fedavg_whole, "plain": plain, "opa": opa}


def test_a_rule_of_ones_own_is_found_by_import_path() -> None:
    assert weighting_rule(ComponentSpec("fedloom.platform.averaging.weighting:plain"))(WORK) == plain(WORK)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "opq",
            r"unknown weighting rule 'opq': known are fedavg, fedavg_whole, opa, plain, or module:name; did you mean",
        ),
        ("no_such_module:rule", "weighting rule 'no_such_module:rule' cannot be imported: there is no module"),
        ("fedloom.platform.averaging.weighting:nope", r"cannot be imported: .*weighting\.py has no 'nope'"),
        (":rule", "':rule' cannot be imported: give module:name"),
        (".relative:rule", "'.relative:rule' cannot be imported: give module:name"),
    ],
)
def test_an_unknown_rule_is_one_clear_line(name: str, message: str) -> None:
    with pytest.raises(PluginError, match=message) as caught:
        weighting_rule(ComponentSpec(name))
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
        weighting_rule(ComponentSpec(f"own_weighting:{name}"))(WORK)
