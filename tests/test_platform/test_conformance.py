"""Rules and spaces by their laws: whatever is built in obeys them, and every law refuses what breaks it."""

import ast
import math
import re
import sys
from collections.abc import Callable, Mapping
from math import inf, nan
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.platform.averaging import average as averaging, conformance
from fedloom.platform.averaging.aggregators import AGGREGATORS, Cell, aggregated, mean
from fedloom.platform.averaging.average import Update
from fedloom.platform.averaging.conformance import (
    Law,
    aggregator_laws,
    aggregators,
    check_aggregator,
    check_server_rule,
    check_space,
    check_weighting_rule,
    server_rule_laws,
    server_rules,
    weighting_rule_laws,
    weighting_rules,
)
from fedloom.platform.averaging.conformance.law import differing, far_apart
from fedloom.platform.averaging.server import SERVER_RULES, ServerStep, serve
from fedloom.platform.averaging.weighting import WEIGHTING_RULES, Work, fedavg
from fedloom.platform.plugins import PluginError
from fedloom.platform.spaces.registry import SPACES
from fedloom.platform.spaces.slices import Slice
from fedloom.platform.spaces.space_config import LoraConfig, SpaceConfig

pytestmark = pytest.mark.usefixtures("one_thread")

PLUGINS = Path(__file__).resolve().parents[1] / "plugins"


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of a user's own files."""
    monkeypatch.syspath_prepend(str(PLUGINS))


# -- what there is ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", [law for name in WEIGHTING_RULES.known for law in weighting_rule_laws(name)])
def test_built_in_weighting_rules_obey(law: Law) -> None:
    law()


@pytest.mark.parametrize("law", [law for name in SERVER_RULES.known for law in server_rule_laws(name)])
def test_built_in_server_rules_obey(law: Law) -> None:
    law()


RANGE, ORDER = "attackers leave the result among the honest values", "the order of the clients does not matter"
EQUAL, SCALED = "equal updates are the result", "scaled weights scale the result"
JUDGED: tuple[tuple[str, Mapping[str, float], float, set[str]], ...] = (
    ("mean", {}, 0.0, set()),
    ("mean", {}, 0.04, {RANGE}),
    ("median", {}, 0.48, set()),
    ("trimmed_mean", {"byzantine_share": 0.4}, 0.4, set()),
    ("trimmed_mean", {"byzantine_share": 0.4}, 0.44, {RANGE}),
    ("krum", {"byzantine_share": 0.4}, 0.4, set()),
    ("multi_krum", {"byzantine_share": 0.4}, 0.4, set()),
    ("bulyan", {"byzantine_share": 0.2}, 0.2, set()),
    ("bulyan", {"byzantine_share": 0.1}, 0.1, {ORDER}),  # its last choice is between two that have one neighbour each
    ("rfa", {}, 0.2, {RANGE}),  # three iterations, those of the paper, are not enough where attackers are far away
    ("rfa", {"iterations": 50}, 0.4, set()),
    ("norm_bound", {"bound": 0.05}, 0.2, {EQUAL, SCALED}),  # the bound is a length
)
"""Aggregators with options, the share of attackers among the clients, and the laws that they break."""


@pytest.mark.parametrize(("rule", "options", "withstands", "broken"), JUDGED)
def test_built_in_aggregators_obey_all_laws_but_those_named(
    rule: str, options: Mapping[str, float], withstands: float, broken: set[str]
) -> None:
    check_aggregator(rule, options, withstands=withstands, skip=broken)
    for law in broken:
        with pytest.raises(AssertionError, match=f"^aggregator '{rule}' breaks the law '{law}': "):
            the(law, aggregator_laws(rule, options, withstands=withstands))()


def test_every_aggregator_is_checked() -> None:
    assert {rule for rule, *_ in JUDGED} == set(AGGREGATORS.known)


TINY_OPERATORS = ["conv(1)", "ds(3,.5)", "mb(1,2)", "identity"]
IMAGES: Mapping[str, Any] = {"input_shape": [1, 8, 8], "num_classes": 3}
CNN = {**IMAGES, "stem_channels": 4, "stage_layers": [1, 2], "stage_strides": [2, 2], "operators": TINY_OPERATORS}
STAGES = {"stem_channels": 8, "stage_widths": [8, 16], "stage_strides": [1, 2], "depths": [1, 1]}
ELASTIC = {**IMAGES, **STAGES, "expansions": [0.5, 1.0]}
DEEP = {**IMAGES, "stage_widths": [4, 6], "stage_layers": [1, 2], "stage_strides": [1, 2]}
CELLS = {**IMAGES, "channels": 4, "cells": 3, "nodes": 1}
FORMER: Mapping[str, Any] = {"embedding_size": 6, "attention_heads": 3, "mlp_ratio": 2.0, "blocks": [1, 2]}
RESNET = {**IMAGES, "blocks": [2, 1, 1, 1]}
VIT = {**FORMER, **IMAGES, "patch_size": 4}
GPT = {**FORMER, "input_shape": [6], "num_classes": 9}
SMALL: Mapping[str, Mapping[str, Any]] = {
    "cnn_cifar": CNN,
    "cnn_cifar_wide": CNN,
    "cnn_digits": CNN,
    "cnn_speech": {**CNN, "input_shape": [1, 9, 7]},
    "resnet_elastic": {**ELASTIC, "norm": "none"},
    "resnet_elastic_small": {**ELASTIC, "norm": "batch"},
    "tcn_elastic": {"input_shape": [6], "num_classes": 9, "channels": 8, "embedding_size": 8},
    "darts_s1": {**CELLS, "nodes": 4},  # its operators belong to the edges of four nodes
    "darts_s2": CELLS,
    "darts_s3": CELLS,
    "darts_s4": CELLS,
    "darts_full": CELLS,
    "darts_s2_small": {**CELLS, "nodes": 2},
    "resnet18": {**RESNET, "stem_channels": 8},
    "resnet18_small": {**RESNET, "stem_channels": 8, "norm": "group"},
    "resnet34": {**RESNET, "stem_channels": 8},
    "darts_v2": {**IMAGES, "channels": 4, "cells": 3},
    "darts_v2_small": {**IMAGES, "channels": 4, "cells": 3},
    "fednas_v1": {**IMAGES, "channels": 4},
    "resnet18_modular": {**RESNET, "stem_channels": 4},
    "resnet18_modular_small": {**RESNET, "stem_channels": 4, "modules": 3},
    "cnn_width": {**IMAGES, "stage_widths": [6, 9], "widths": [0.5, 1.0]},
    "resnet_width": {**IMAGES, "stem_channels": 4, "widths": [0.5, 1.0]},
    "lstm_width": {"input_shape": [7], "num_classes": 5, "channels": 6, "embedding_size": 4, "widths": [0.5, 1.0]},
    "cnn_split": {**IMAGES, "stage_widths": [6, 9], "widths": [0.5, 1.0]},
    "resnet_split": {**IMAGES, "stem_channels": 4, "widths": [0.5, 1.0]},
    "split": {**IMAGES, "widths": [0.5, 1.0], "options": {"network": f"{__name__}:perceptron"}},
    "cnn_depth": DEEP,
    "resnet_depth": {**RESNET, "stem_channels": 4},
    "cnn_scaled": {**DEEP, "widths": [0.5, 1.0]},
    "resnet_scaled": {**RESNET, "stem_channels": 4, "widths": [0.4, 0.6, 0.8, 1.0]},
    "vit_elastic": {**VIT, "head_shares": [0.5, 1.0], "expansions": [0.5, 1.0]},
    "gpt_elastic": {**GPT, "head_shares": [0.5, 1.0], "expansions": [0.5, 1.0]},
    "vit_width": {**VIT, "widths": [0.5, 1.0]},
    "gpt_width": {**GPT, "widths": [0.5, 1.0]},
    "vit_depth": VIT,
    "gpt_depth": GPT,
    "vit_scaled": {**VIT, "widths": [0.5, 1.0]},
    "gpt_scaled": {**GPT, "widths": [0.5, 1.0]},
    "rnn_shakespeare": {"input_shape": [6], "num_classes": 9, "channels": 8, "embedding_size": 4},
    "width": {**IMAGES, "widths": [0.5, 1.0], "options": {"network": f"{__name__}:perceptron"}},
    "module": {**IMAGES, "build": f"{__name__}:frozen"},
}
"""Every space, as small as it can be."""


def perceptron(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network of one's own for the space `width`."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 6), nn.ReLU(), nn.Linear(6, classes))


def frozen(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network of one's own whose first layer is a constant."""
    network = perceptron(input_shape, classes)
    network[1].requires_grad_(False)  # type: ignore[index]
    return network


def test_every_space_is_checked() -> None:
    assert set(SMALL) == set(SPACES.known)


LARGE = ("darts_s1", "darts_s2", "darts_s3", "darts_s4", "darts_full", "darts_v2_small", "resnet_split", "resnet34")
"""As darts_s2_small with other operators, as darts_v2, as cnn_split on resnet_width's network, as resnet18."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in SMALL])
def test_built_in_spaces_obey(name: str) -> None:
    check_space(name, SMALL[name])


def test_a_tied_decoder_obeys() -> None:
    check_space(SpaceConfig("tcn_elastic", tied=True, **SMALL["tcn_elastic"]))


@pytest.mark.parametrize("name", ["gpt_width", "resnet18_small", "module"])
def test_adapters_on_spaces_obey(name: str) -> None:
    lora = LoraConfig(ranks=[1, 2, 3], trained=["*.bias"], alpha=6.0, merged=name == "module")
    check_space(SpaceConfig(name, lora=lora, **SMALL[name]))


@pytest.mark.usefixtures("plugins")
def test_plug_ins_obey() -> None:
    check_aggregator("median:median", withstands=0.48)
    check_space("mixers:mixers", {"num_classes": 3, "options": {"channels": 4}})
    # What SCAFFOLD's clients send is a change already.
    from scaffold import Scaffold  # type: ignore[import-not-found]  # it lies in the user's folder

    check_server_rule(Scaffold().merge, skip=["no change is no step"])


@pytest.mark.usefixtures("plugins")
def test_the_test_on_the_page_passes() -> None:
    page = (PLUGINS.parents[1] / "docs" / "extend" / "index.md").read_text()
    (block,) = re.findall(r"^```python\n(from fedloom.platform.averaging.conformance .*?)^```$", page, re.S | re.M)
    names: dict[str, Any] = {}
    exec(block, names)
    names["test_they_obey"]()


# -- how they are called ----------------------------------------------------------------------------------------------


@pytest.fixture
def own_rules(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("own_rules")
    monkeypatch.setitem(sys.modules, "own_rules", module)
    return module


def test_a_rule_is_checked_by_its_import_path_with_options(own_rules: ModuleType) -> None:
    def scaled(work: Work, *, factor: float = 0.5) -> dict[str, float]:
        return {name: factor * weight for name, weight in fedavg(work).items()}

    own_rules.scaled = scaled  # type: ignore[attr-defined]
    check_weighting_rule("own_rules:scaled")
    check_weighting_rule("own_rules:scaled", {"factor": 3})
    check_weighting_rule(scaled, {"factor": 3})
    with pytest.raises(AssertionError) as caught:
        check_weighting_rule("own_rules:scaled", {"factor": -1.0})
    assert str(caught.value) == (
        "weighting rule 'own_rules:scaled' breaks the law 'weights are finite and at least 0': "
        "fixed.weight has the weight -10.0"
    )


def test_what_a_rule_raises_is_one_line_that_names_the_rule_and_the_law(own_rules: ModuleType) -> None:
    own_rules.broken = lambda work: 1 / (work.samples - 10)  # type: ignore[attr-defined]
    for rule, name in (("own_rules:broken", "own_rules:broken"), (own_rules.broken, "<lambda>")):
        with pytest.raises(AssertionError) as caught:
            check_weighting_rule(rule)
        expected = f"weighting rule '{name}' breaks the law 'weights are finite and at least 0': it fails: ZeroDivision"
        assert str(caught.value).startswith(expected)
        assert "\n" not in str(caught.value)


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(PluginError, match=r"unknown weighting rule 'opaa'.*did you mean 'opa'"):
        check_weighting_rule("opaa")
    with pytest.raises(ValueError, match=r"options\.eta: not an option of server rule fedadam"):
        check_server_rule("fedadam", {"eta": 1.0})
    with pytest.raises(PluginError, match="unknown space 'cnn'"):
        check_space("cnn")
    with pytest.raises(ValueError, match=r"no law of a server rule is called 'no step'.*mean 'no change is no step'"):
        check_server_rule("fedadam", skip=["no step"])


def test_it_does_without_pytest() -> None:
    for file in Path(conformance.__file__).parent.glob("*.py"):
        imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Import)]
        assert not any(alias.name == "pytest" for node in imports for alias in node.names)


# -- comparing --------------------------------------------------------------------------------------------------------


def test_bits_are_compared_not_values() -> None:
    old = {"w": torch.tensor([[0.0, nan], [1.0, 2.0]])}
    assert [*differing({"w": old["w"].clone()}, old)] == []
    negative = {"w": torch.tensor([[-0.0, nan], [1.0, 3.0]])}
    assert [*differing(negative, old)] == ["w[0, 0] is -0, expected 0 (and 1 others of 4 differ)"]
    assert [*differing({"w": old["w"].double()}, old)] == ["w is float64 (2, 2), expected float32 (2, 2)"]
    assert [*differing({}, old)] == ["w is missing"]
    assert [*far_apart({"w": torch.tensor(1.0001)}, {"w": torch.tensor(1.0)})] == ["w is 1.00010002, expected 1"]
    assert [*far_apart({"w": torch.tensor(1.000001)}, {"w": torch.tensor(1.0)})] == []


def test_the_reference_by_hand() -> None:
    def sent(values: list[float], region: Any, weight: float) -> Update:
        return Update({"w": torch.tensor(values)}, {"w": Slice("w", region)}, {"w": weight})

    old = {"w": torch.tensor([9.0] * 5), "n": torch.tensor(3)}
    updates = [sent([1.0, 2.0, 3.0], ((0, 3),), 1.0), sent([7.0, 8.0], ((2, 4),), 3.0), sent([0.0] * 5, None, 0.0)]
    counted = [Update({"n": torch.tensor(n)}, {"n": Slice("n")}, {"n": 0.5}) for n in (4, 9)]
    found = weighting_rules.reference(old, [*updates, *counted])
    assert found["w"].tolist() == [1.0, 2.0, (3 + 21) / 4, 8.0, 9.0]
    assert found["n"].item() == 9.0


# -- broken weighting rules -------------------------------------------------------------------------------------------


class Alternating:
    """Every second client counts ninefold: what a rule must not remember."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, work: Work) -> dict[str, float]:
        self.calls += 1
        return dict.fromkeys(work.seen_by_tensor, 9.0 if self.calls % 2 else 1.0)


def reading_and_writing(work: Work) -> dict[str, float]:
    """Sets what it is given."""
    weights = fedavg(work)
    work.seen_by_tensor["fixed.weight"] = 1  # type: ignore[index]
    return weights


BROKEN_WEIGHTING: Mapping[str, tuple[Callable[[Work], Any], str]] = {
    "weights are finite and at least 0": (lambda _work: {"fixed.weight": 1.0}, "fixed.running_mean has no weight"),
    "weights depend on the work alone": (Alternating(), "fixed.weight has 9.0, and of 10 samples 1.0"),
    "the order of the tensors does not matter": (
        lambda work: {name: 1.0 + place for place, name in enumerate(work.seen_by_tensor)},
        "fixed.weight has 1.0, and named last to first 5.0",
    ),
    "the work is only read": (reading_and_writing, "fixed.weight has 20, and after the call 1"),
    "the average is the weighted mean": (
        lambda work: dict.fromkeys(work.seen_by_tensor, 1e-60),
        "it fails: ValueError: the weight of fixed.weight is 1e-60: sums of float32 need weights",
    ),
    "clients of the same work count alike": (Alternating(), "fixed.weight is 1.2.*, expected 2"),
    "what nobody trained keeps its bits": (
        lambda work: dict.fromkeys(work.seen_by_tensor, inf),
        "it fails: ValueError: the weight of fixed.weight is nan",
    ),
    "the order of arrival does not matter": (Alternating(), r"fixed.weight\[0, 0\] is .*, expected "),
}


@pytest.mark.parametrize("law", BROKEN_WEIGHTING)
def test_a_weighting_rule_that_breaks_a_law_is_refused(law: str) -> None:
    rule, line = BROKEN_WEIGHTING[law]
    with pytest.raises(AssertionError, match=f"^weighting rule '.*' breaks the law '{law}': {line}") as caught:
        the(law, weighting_rule_laws(rule))()
    assert "\n" not in str(caught.value)


def test_laws_have_names_that_tests_are_called_by() -> None:
    law = weighting_rule_laws("opa")[0]
    assert law.__name__ == "opa: weights are finite and at least 0"


def the(name: str, laws: list[Law]) -> Law:
    """The law of that name."""
    (found,) = [law for law in laws if law.law == name]
    return found


OF_THE_AVERAGE = ("the mean of equal values is that value", "equal slices are averaged as by fedavg")


def test_an_average_that_treats_slices_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(old: Any, updates: list[Update], fewest: int = 1) -> dict[str, Tensor]:
        new = averaging.average(old, updates, fewest)
        for piece in updates[0].slices.values():
            if piece.region is not None:
                piece.of(new[piece.source]).mul_(2)
        return new

    monkeypatch.setattr(weighting_rules, "average", doubled)
    for law in OF_THE_AVERAGE:
        with pytest.raises(AssertionError, match=rf"{law}': layers.0.ops.1.weight\[0, 0\] is .*, expected"):
            the(law, weighting_rule_laws("fedavg"))()


def test_every_law_of_weighting_rules_can_be_broken() -> None:
    laws = {law.law for law in weighting_rule_laws("fedavg")}
    assert laws == {*BROKEN_WEIGHTING, *OF_THE_AVERAGE}


# -- broken server rules ----------------------------------------------------------------------------------------------


def forgetting(step: ServerStep) -> Tensor:
    """Momentum that decays where nobody trained, too."""
    whole = step.state("momentum", 1.0)._base
    assert whole is not None
    whole.mul_(0.5)
    return step.mean + step.state("momentum")


def writing(step: ServerStep) -> Tensor:
    """Works in the memory that it is given."""
    return step.mean.mul_(0.5)


class Remembering:
    """Momentum of its own, which no checkpoint holds."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, step: ServerStep) -> Tensor:
        self.seen += 1
        return step.mean + 0.01 * self.seen


BROKEN_SERVER: Mapping[str, tuple[Callable[[ServerStep], Any], str]] = {
    "new values are finite and of the old kind": (
        lambda step: step.old + step.change.sqrt(),
        r"round 0, layer.weight is nan for a change of -",
    ),
    "what nobody trained keeps its bits": (forgetting, r"round 1, momentum/layer.weight\[0, 0\] is .*, expected 0.25"),
    "what goes in is only read": (writing, r"round 0, mean layer.weight\[0, 0\] is .*, expected"),
    "the same round gives the same bits": (
        lambda step: step.mean + torch.rand_like(step.mean),
        r"round 0, layer.weight\[0, 0\] is .*, expected",
    ),
    "a checkpoint in between changes nothing": (Remembering(), r"round 1, layer.weight\[.*\] is .*, expected"),
    "no change is no step": (lambda step: 0.9 * step.mean, r"layer.weight\[0, 0\] is 1.38.*, expected 1.54"),
}


@pytest.mark.parametrize("law", BROKEN_SERVER)
def test_a_server_rule_that_breaks_a_law_is_refused(law: str) -> None:
    rule, line = BROKEN_SERVER[law]
    with pytest.raises(AssertionError, match=f"^server rule '.*' breaks the law '{law}': {line}") as caught:
        the(law, server_rule_laws(rule))()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        (lambda step: step.mean.sum(), r"layer.weight is float32 \(\), expected float32 \(1, 4\)"),
        (lambda step: step.mean.double(), r"layer.weight is float64 \(1, 4\), expected float32 \(1, 4\)"),
        (lambda _step: 3.0, "layer.weight is 3.0, expected a tensor of new values"),
    ],
)
def test_values_of_another_kind_are_refused(rule: Callable[[ServerStep], Any], line: str) -> None:
    with pytest.raises(AssertionError, match=f"'new values are finite and of the old kind': round 0, {line}"):
        check_server_rule(rule)


def test_a_server_that_moves_what_is_no_parameter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def eager(*given: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        new, kept = serve(*given)
        return {**new, "layer.running_mean": new["layer.running_mean"] * 2}, kept

    monkeypatch.setattr(server_rules, "serve", eager)
    with pytest.raises(AssertionError, match=r"'buffers are the clients mean': round 0, layer.running_mean\[0\] is"):
        check_server_rule("fedadam")


def test_every_law_of_server_rules_can_be_broken() -> None:
    assert {law.law for law in server_rule_laws("replace")} == {*BROKEN_SERVER, "buffers are the clients mean"}


# -- broken aggregators -----------------------------------------------------------------------------------------------


BROKEN_AGGREGATORS: Mapping[str, tuple[Callable[[Cell], Any], str]] = {
    "new values are finite and of the old kind": (
        lambda cell: None if cell.name == "layer.slices" else mean(cell),
        "layer.slices keeps its old values, although 25 clients hold it",
    ),
    "the same round gives the same bits": (
        lambda cell: mean(cell) + torch.rand(()),
        r"layer.weight\[0, 0\] is .*, expected",
    ),
    ORDER: (lambda cell: cell.values_n[0], r"layer.weight\[0, 0\] is .*, expected"),
    EQUAL: (lambda cell: (mean(cell) + cell.old) / 2, r"layer.weight\[0, 0\] is 2.0.*, expected 2.5"),
    "shifted weights shift the result": (
        lambda cell: 0.9 * mean(cell),
        r"layer.weight\[0, 0\] is 2.28.*, expected 2.38",
    ),
    SCALED: (lambda cell: mean(cell).clamp(max=2), r"layer.weight\[0, 0\] is 2, expected 24.6"),
    RANGE: (
        lambda cell: cell.old + cell.values_n.sub(cell.old).sign().mean(dim=0),
        r"2 of 25 clients that attack all scalars move layer.weight\[0, 0\] to .*, and the others' values are 1.5",
    ),
    "clients without weight do not count": (
        lambda cell: mean(cell) + 0.001 * len(cell.updates),
        r"layer.weight\[0, 0\] is .*, expected",
    ),
    "disjoint slices are judged apart": (
        lambda cell: mean(cell) + 0.001 * len(cell.updates),
        r"layer.slices\[0\] is .*, expected",
    ),
}


@pytest.mark.parametrize("law", BROKEN_AGGREGATORS)
def test_an_aggregator_that_breaks_a_law_is_refused(law: str) -> None:
    rule, line = BROKEN_AGGREGATORS[law]
    with pytest.raises(AssertionError, match=f"^aggregator '<lambda>' breaks the law '{law}': {line}") as caught:
        the(law, aggregator_laws(rule, withstands=0.1))()
    assert "\n" not in str(caught.value)


def test_an_aggregator_of_other_shapes_is_refused() -> None:
    with pytest.raises(
        AssertionError, match=r"kind': it gives a tensor of shape \(\) for layer.weight: give finite val"
    ):
        check_aggregator(lambda cell: cell.values_n.mean())


def test_a_server_that_changes_what_too_few_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def for_any(updates: Any, rule: Any, old: Any, _fewest: int) -> Any:
        return aggregated(updates, rule, old)  # with whatever number of clients

    monkeypatch.setattr(aggregators, "aggregated", for_any)
    with pytest.raises(AssertionError, match=r"'what too few hold keeps its bits': layer.slices\[0\] is .*, expected"):
        check_aggregator("median")


def test_every_law_of_aggregators_can_be_broken() -> None:
    assert {law.law for law in aggregator_laws("mean")} == {*BROKEN_AGGREGATORS, "what too few hold keeps its bits"}
