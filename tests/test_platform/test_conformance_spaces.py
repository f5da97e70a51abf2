"""Every law of spaces refuses a space that breaks it, and one that says no more than `SearchSpace` asks obeys all."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.averaging.conformance import check_space, space_laws
from fedloom.platform.plugins import PluginError
from fedloom.platform.spaces.base import Measure, SearchSpace
from fedloom.platform.spaces.genome import Floats, Ints, PlainGenome
from fedloom.platform.spaces.operator_choice import OperatorChoiceSpace
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import Architecture, Slice, SliceMap, Subspace
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.costs import CostTable

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTHS = (2, 3, 5)
FEATURES, CLASSES = 4, 3


class Perceptron(nn.Module):
    """(N, 4) -> logits (N, 3): a hidden layer whose first units are used, and a norm whose statistics all share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.hidden, self.head = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, architecture: Architecture | None = None) -> Tensor:
        width = len(self.hidden.bias) if architecture is None else WIDTHS[architecture[0]]
        x = F.relu(F.linear(self.norm(x), self.hidden.weight[:width], self.hidden.bias[:width]))
        return F.linear(x, self.head.weight[:, :width], self.head.bias)


class Widths(SearchSpace):
    """Nothing but what a space has to say of itself."""

    name = "widths"
    input_shape = (FEATURES,)
    options = (len(WIDTHS),)

    def build_supernet(self) -> nn.Module:
        return Perceptron(max(WIDTHS))

    def build_subnet(self, architecture: Architecture) -> nn.Module:
        return Perceptron(WIDTHS[architecture[0]])


def test_a_space_that_says_only_what_it_must_obeys() -> None:
    check_space(Widths())


def test_a_built_space_has_no_settings() -> None:
    with pytest.raises(ValueError, match="space widths is built already: give its name or its SpaceConfig"):
        check_space(Widths(), {"num_classes": 3})
    check_space(Widths(), skip=["texts are read back"])


class TwoWidths(nn.Module):
    """(N, 4) -> logits (N, 3): two hidden layers in a row, whose first units are used."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(FEATURES, first), nn.Linear(first, second), nn.Linear(second, CLASSES)

    def forward(self, x: Tensor, architecture: Architecture = (-1, -1)) -> Tensor:
        first, second = (WIDTHS[option] for option in architecture)
        x = F.linear(x, self.a.weight[:first], self.a.bias[:first])
        x = F.linear(x, self.b.weight[:second, :first], self.b.bias[:second])
        return F.linear(x, self.c.weight[:, :second], self.c.bias)


class Interacting(Widths):
    options = (len(WIDTHS),) * 2

    def build_supernet(self) -> nn.Module:
        return TwoWidths(max(WIDTHS), max(WIDTHS))

    def build_subnet(self, architecture: Architecture) -> nn.Module:
        return TwoWidths(*(WIDTHS[option] for option in architecture))


class InteractingWithItsOwnTable(Interacting):
    def _table_of(self, measure: Measure) -> CostTable:
        return super()._table_of(measure)


def test_a_space_whose_decisions_depend_on_each_other_in_cost_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("own_spaces")
    module.two, module.own = lambda _config: Interacting(), lambda _config: InteractingWithItsOwnTable()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_spaces", module)
    # 18 MACs with two narrow layers, 36 and 33 with one wide layer, 4 * 5 + 5 * 5 + 5 * 3 = 60 with both.
    line = r"architecture 2-2 has 60 macs, and 51 as a sum over its decisions.* or override `_table_of`$"
    with pytest.raises(PluginError, match=line):
        build_space(SpaceConfig("own_spaces:two", num_classes=CLASSES))
    build_space(SpaceConfig("own_spaces:own", num_classes=CLASSES))


# -- spaces that break a law ------------------------------------------------------------------------------------------


class Anything(Widths):
    def validate(self, architecture: Architecture) -> None:
        pass


class Moody(Widths):
    def __init__(self) -> None:
        self.draws = 0

    def sample(self, rng: np.random.Generator) -> Architecture:
        self.draws += 1
        return (self.draws % len(WIDTHS),)


class Backwards(Widths):
    def enumerate(self) -> Iterator[Architecture]:
        return reversed([*super().enumerate()])


class Mute(Widths):
    def label(self, architecture: Architecture) -> str:
        return "2"


@dataclass(frozen=True)
class Growing(PlainGenome):
    def cross(self, mothers: Ints, fathers: Ints, rng: np.random.Generator) -> Ints:
        return mothers + 1


@dataclass(frozen=True)
class Blind(PlainGenome):
    def one_hot(self, architectures: Ints) -> Floats:
        return 0 * super().one_hot(architectures)


class WithGenome(Widths):
    def __init__(self, kind: type[PlainGenome]) -> None:
        self.kind = kind

    @property
    def genome(self) -> PlainGenome:
        return self.kind(self.options)


class Priced(Widths):
    def __init__(self, measure: str, more: float) -> None:
        self.measure, self.more = measure, more

    def cost_table(self, measure: str) -> CostTable:
        table = super().cost_table(measure)
        return replace(table, fixed=table.fixed + self.more) if measure == self.measure else table


class UpsideDown(Widths):
    @property
    def smallest(self) -> Architecture:
        return (2,)


class Lucky(Widths):
    def initial_weights(self, generator: torch.Generator) -> dict[str, Tensor]:
        return {name: tensor + torch.rand(()) for name, tensor in super().initial_weights(generator).items()}


class Precise(Widths):
    def initial_weights(self, generator: torch.Generator) -> dict[str, Tensor]:
        weights = super().initial_weights(generator)
        return {**weights, "head.bias": weights["head.bias"].double()}


class TrainsStatistics(Widths):
    @property
    def parameter_names(self) -> frozenset[str]:
        return super().parameter_names | {"norm.running_mean"}


class Whole(Widths):
    def slices(self, architecture: Architecture) -> SliceMap:
        return {name: Slice(name) for name in super().slices(architecture)}


class Overlapping(Widths):
    def slices(self, architecture: Architecture) -> SliceMap:
        return {**super().slices(architecture), "norm.bias": Slice("norm.weight")}


class Louder(Widths):
    def build_subnet(self, architecture: Architecture) -> nn.Module:
        module = super().build_subnet(architecture)
        module.register_forward_hook(lambda _module, _given, logits: 2 * logits)
        return module


class Spilling(Widths):
    def build_supernet(self) -> nn.Module:
        module = super().build_supernet()
        module.register_forward_hook(lambda module, _given, logits: logits + module.hidden.weight.sum())
        return module


class Forgetful(OperatorChoiceSpace):
    def subspace_slices(self, kept: Subspace) -> SliceMap:
        return {name: piece for name, piece in super().subspace_slices(kept).items() if not name.endswith("bias")}


def forgetful() -> SearchSpace:
    """An operator-choice space that does not send biases."""
    space = build_space(SpaceConfig("cnn_digits", stem_channels=4, stage_layers=[1, 1], operators=["conv(1)"]))
    assert isinstance(space, OperatorChoiceSpace)
    space.__class__ = Forgetful
    return space


BROKEN: Mapping[str, tuple[Callable[[], Any], str]] = {
    "it has the members of a space": (lambda: SimpleNamespace(name="bare"), "SimpleNamespace has no .* and 27 more$"),
    "architectures are valid and others are refused": (Anything, r"\(3,\) passes, though the numbers of options are"),
    "drawing depends on the generator alone": (Moody, r"sample gives \(1,\), and then \(0,\)"),
    "architectures are counted": (Backwards, r"the first 3 of 3 are out of order.*\[\(2,\), \(1,\), \(0,\)\]"),
    "texts are read back": (Mute, r"'2' is read as \(2,\), expected \(1,\)"),
    "a genomes children are architectures": (partial(WithGenome, Growing), r"cross makes \[1\] of \[0\]"),
    "a genomes features tell architectures apart": (partial(WithGenome, Blind), r"\[0\] and \[2\] are told apart by"),
    "costs are those of the built subnet": (
        partial(Priced, "parameters", 5),
        "architecture 0 costs 32 parameters by the table, and 27 as it is built",
    ),
    "nothing costs less than the smallest": (UpsideDown, "architecture 1 costs 21 macs, smallest 35"),
    "bytes on the wire are the tensors bytes": (
        partial(Priced, "bytes", 4),
        "architecture 0: the table has 152, the tensors 148, a file 148",
    ),
    "fresh weights depend on the generator alone": (Lucky, r"norm.weight\[0\] is .*, expected "),
    "fresh weights fit the modules": (Precise, r"head.bias is float64 \(3,\), in the module float32 \(3,\)"),
    "what is trained are the parameters": (TrainsStatistics, "norm.running_mean is named and no parameter"),
    "slices are the subnets tensors": (Whole, r"architecture 0: hidden.weight is float32 \(5, 4\) there, .* \(2, 4\)"),
    "what is extracted is inserted again": (Overlapping, r"architecture 0: norm.weight\[0\] is .*, expected "),
    "equal subnets are averaged as by fedavg": (Overlapping, r"architecture 0: norm.weight\[0\] is .*, expected "),
    "subspaces hold their architectures": (forgetful, "the largest subspace is not the supernet"),
    "a subnet computes what the supernet does": (Louder, r"architecture 0: logits\[0, 0\] is .*, expected "),
    "training touches the slices alone": (Spilling, "architecture 0: hidden.weight has a gradient of .* beside its sl"),
}


@pytest.mark.parametrize("law", BROKEN)
def test_a_space_that_breaks_a_law_is_refused(law: str) -> None:
    make, line = BROKEN[law]
    space = make()
    (checked,) = [each for each in space_laws(space) if each.law == law]
    with pytest.raises(AssertionError, match=f"^space '{space.name}' breaks the law '{law}': .*{line}") as caught:
        checked()
    assert "\n" not in str(caught.value)


def test_every_law_of_spaces_can_be_broken() -> None:
    assert [law.law for law in space_laws(Widths())] == [*BROKEN]


def test_overlapping_slices_are_named() -> None:
    with pytest.raises(AssertionError, match=r"norm.weight and norm.bias overlap in norm.weight: \(\(0, 4\),\) and"):
        check_space(Overlapping(), skip=["what is trained are the parameters"])


def test_what_a_function_of_the_users_builds_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("own_spaces")
    module.widths, module.number = lambda _config: Widths(), lambda _config: 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_spaces", module)
    check_space("own_spaces:widths", {"num_classes": CLASSES})
    with pytest.raises(AssertionError, match=r"^space 'own_spaces:widths' .*logits are \(4, 3\), expected \(4, 10, "):
        check_space(SpaceConfig("own_spaces:widths"))
    with pytest.raises(AssertionError, match=r"^space 'own_spaces:number' .* members of a space': int has no "):
        check_space("own_spaces:number")
