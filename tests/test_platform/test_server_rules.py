"""Server rules by hand: two rounds of each in literal numbers, and what nobody trained stays as it is."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fedloom.platform.averaging.average import Averaged, Update, WeightedSums
from fedloom.platform.averaging.server import SERVER_RULES, ServerRound, ServerStep, serve
from fedloom.platform.federation.training_config import TrainingConfig, rules_of
from fedloom.platform.plugins import ComponentSpec, PluginError
from fedloom.platform.spaces.slices import Region, Slice, bytes_of

OPTIMISERS = ("fedavgm", "fedadagrad", "fedadam", "fedyogi")
W = "layer.weight"
MEAN, COUNT = "layer.running_mean", "layer.num_batches_tracked"


@dataclass
class Server:
    """A server with one parameter of some entries, round after round."""

    weights: dict[str, Tensor]
    rule: ComponentSpec
    kept: dict[str, Tensor] = field(default_factory=dict)
    rounds: int = 0

    def served(self, averaged: Averaged) -> list[float]:
        """The parameter after a round with this mean."""
        about = ServerRound(self.rounds, 2, 10)
        rules = {W: (self.rule.name, SERVER_RULES.make(self.rule))}
        self.weights, self.kept = serve(rules, self.weights, averaged, self.kept, about)
        self.rounds += 1
        return self.weights[W].tolist()

    def after(self, mean: Sequence[float]) -> list[float]:
        """The parameter after a round in which the clients' mean was this, on all entries."""
        sums = WeightedSums()
        sums.add(Update({W: torch.tensor(mean)}, {W: Slice(W)}, {W: 1.0}))
        return self.served(sums.finish(self.weights))

    def slot(self, name: str) -> list[float]:
        """What is kept of the parameter."""
        return self.kept[f"{name}/{W}"].tolist()


def server(name: str, start: Sequence[float] = (1.0, 2.0), **options: Any) -> Server:
    return Server({W: torch.tensor(start)}, ComponentSpec(name, tuple(sorted(options.items()))))


def near(*values: float) -> Any:
    return pytest.approx(list(values), rel=1e-6, abs=1e-7)


# -- two rounds of each -----------------------------------------------------------------------------------------------
# The parameter is (1, 2) and the first mean (2, 0): the first change is (1, -2).


def test_replace_takes_the_mean() -> None:
    replace = server("replace")
    assert replace.after([2.0, 0.0]) == [2.0, 0.0]
    assert replace.after([-1.0, 0.5]) == [-1.0, 0.5]
    assert replace.kept == {}


def test_fedavgm_by_hand() -> None:
    fedavgm = server("fedavgm", server_lr=0.5, server_momentum=0.9)
    # v = (1, -2);  x = (1, 2) + 0.5 v
    assert fedavgm.after([2.0, 0.0]) == near(1.5, 1.0)
    assert fedavgm.slot("momentum") == near(1.0, -2.0)
    # The change is (2.5, 3) - (1.5, 1) = (1, 2);  v = 0.9 (1, -2) + (1, 2) = (1.9, 0.2);  x = (1.5, 1) + 0.5 v
    assert fedavgm.after([2.5, 3.0]) == near(2.45, 1.1)
    assert fedavgm.slot("momentum") == near(1.9, 0.2)


def test_the_state_of_a_parameter_of_half_precision_is_float32() -> None:
    run = server("fedadam", server_lr=1e-9)
    run.weights = {W: torch.zeros(2, dtype=torch.float16)}
    for _ in range(2):
        sums = WeightedSums()
        sums.add(Update({W: torch.full((2,), 2**-10, dtype=torch.float16)}, {W: Slice(W)}, {W: 1.0}))
        run.served(sums.finish(run.weights))
    assert run.weights[W].dtype == torch.float16
    assert run.slot("variance") == pytest.approx([0.99**2 * 1e-6 + 0.0199 * 2**-20] * 2, rel=1e-5)


def test_the_first_step_of_server_momentum_at_its_defaults_is_the_mean() -> None:
    assert server("fedavgm").after([2.0, 0.0]) == [2.0, 0.0]


def test_fedadagrad_by_hand() -> None:
    fedadagrad = server("fedadagrad", server_lr=0.1, tau=1.0)
    # v begins at tau^2 = 1;  v = 1 + (1, 4) = (2, 5);  m = (1, -2), as beta_1 is 0;  x = (1, 2) + 0.1 m / (sqrt(v) + 1)
    first = (1 + 0.1 / (sqrt(2) + 1), 2 - 0.2 / (sqrt(5) + 1))
    assert first == pytest.approx((1.0414214, 1.9381966))
    assert fedadagrad.after([2.0, 0.0]) == near(*first)
    assert fedadagrad.slot("variance") == near(2.0, 5.0)
    # The change is (1, 2);  v = (2, 5) + (1, 4) = (3, 9)
    second = (first[0] + 0.1 / (sqrt(3) + 1), first[1] + 0.2 / (3 + 1))
    assert second == pytest.approx((1.0780239, 1.9881966))
    assert fedadagrad.after([first[0] + 1, first[1] + 2]) == near(*second)
    assert fedadagrad.slot("variance") == near(3.0, 9.0)
    assert fedadagrad.slot("mean") == near(1.0, 2.0)


def test_fedadam_by_hand() -> None:
    fedadam = server("fedadam", server_lr=0.1, beta_1=0.9, beta_2=0.99, tau=1.0)
    # m = 0.1 (1, -2);  v = 0.99 * 1 + 0.01 (1, 4) = (1, 1.03)
    first = (1 + 0.1 * 0.1 / (1 + 1), 2 - 0.1 * 0.2 / (sqrt(1.03) + 1))
    assert first == pytest.approx((1.005, 1.9900739))
    assert fedadam.after([2.0, 0.0]) == near(*first)
    # The change is (1, 2):  m = 0.9 (0.1, -0.2) + 0.1 (1, 2) = (0.19, 0.02);  v = 0.99 (1, 1.03) + 0.01 (1, 4)
    second = (first[0] + 0.1 * 0.19 / (1 + 1), first[1] + 0.1 * 0.02 / (sqrt(1.0597) + 1))
    assert fedadam.after([first[0] + 1, first[1] + 2]) == near(*second)
    assert fedadam.slot("mean") == near(0.19, 0.02)
    assert fedadam.slot("variance") == near(1.0, 1.0597)


def test_fedyogi_by_hand() -> None:
    fedyogi = server("fedyogi", server_lr=0.1, beta_1=0.9, beta_2=0.99, tau=1.0)
    # change^2 = (1, 4);  sign(v - change^2) = (0, -1);  v = 1 - 0.01 (1, 4) (0, -1) = (1, 1.04);  m = (0.1, -0.2)
    first = (1 + 0.1 * 0.1 / (1 + 1), 2 - 0.1 * 0.2 / (sqrt(1.04) + 1))
    assert fedyogi.after([2.0, 0.0]) == near(*first)
    assert fedyogi.slot("variance") == near(1.0, 1.04)
    # The change is (0.5, 2), its square (0.25, 4), the sign (1, -1):  v = (1 - 0.0025, 1.04 + 0.04) = (0.9975, 1.08)
    # m = 0.9 (0.1, -0.2) + 0.1 (0.5, 2) = (0.14, 0.02)
    second = (first[0] + 0.1 * 0.14 / (sqrt(0.9975) + 1), first[1] + 0.1 * 0.02 / (sqrt(1.08) + 1))
    assert fedyogi.after([first[0] + 0.5, first[1] + 2]) == near(*second)
    assert fedyogi.slot("variance") == near(0.9975, 1.08)
    assert fedyogi.slot("mean") == near(0.14, 0.02)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        # Of the defaults: eta (1 - beta_1) change / (sqrt(v) + tau) for a change of 0.5 and tau = 0.001.
        ("fedadagrad", 0.1 * 0.5 / (sqrt(1e-6 + 0.25) + 1e-3)),
        ("fedadam", 0.01 * 0.05 / (sqrt(0.99e-6 + 0.0025) + 1e-3)),
        ("fedyogi", 0.01 * 0.05 / (sqrt(1e-6 + 0.0025) + 1e-3)),
    ],
)
def test_the_first_step_at_the_papers_defaults(name: str, step: float) -> None:
    assert server(name, (1.0,)).after([1.5]) == near(1.0 + step)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_no_change_is_no_step_even_in_the_first_round(name: str) -> None:
    still = server(name)
    assert still.after([1.0, 2.0]) == [1.0, 2.0]


@pytest.mark.parametrize("name", ["fedadagrad", "fedadam", "fedyogi"])
@given(change=st.floats(-1e6, 1e6))
@settings(deadline=None, max_examples=50)
def test_a_first_step_is_defined_and_no_larger_than_the_servers_learning_rate(name: str, change: float) -> None:
    (moved,) = server(name, (0.0,)).after([change])
    assert abs(moved) <= {"fedadagrad": 0.1}.get(name, 0.01) * (1 + 1e-5)
    assert moved * change >= 0


# -- what nobody trained does not move --------------------------------------------------------------------------------


def covering(old: Mapping[str, Tensor], *parts: tuple[Region, float], fewest: int = 1) -> Averaged:
    """The mean of clients that each send one value on a region of the parameter."""
    sums = WeightedSums()
    for region, value in parts:
        shape = [stop - start for start, stop in region]
        sums.add(Update({W: torch.full(shape, value)}, {W: Slice(W, region)}, {W: 1.0}))
    return sums.finish(old, fewest)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_an_uncovered_scalar_keeps_its_value_and_the_servers_state(name: str) -> None:
    rule = server(name, (1.0, 1.0, 1.0, 1.0))
    first = rule.served(covering(rule.weights, (((0, 2),), 2.0)))
    assert first[0] == first[1] > 1.0
    assert first[2:] == [1.0, 1.0]
    slots = {slot.split("/")[0]: tensor.clone() for slot, tensor in rule.kept.items()}
    # Now entry 0 is not covered, though it has momentum; entry 3 never is.
    second = rule.served(covering(rule.weights, (((1, 3),), 3.0)))
    assert second[0] == first[0]
    assert second[1] > first[1]
    assert second[2] > 1.0
    assert second[3] == 1.0
    for slot, before in slots.items():
        after = rule.kept[f"{slot}/{W}"]
        assert after[0] == before[0], f"{slot} of what was not covered"
        assert after[3] == before[3]
        assert after[1] != before[1]
    # Entry 3 does in its first round what entry 1 did in its own: it has no past.
    third = rule.served(covering(rule.weights, (((3, 4),), 2.0)))
    assert third[3] == first[1]
    assert third[:3] == second[:3]


def test_momentum_waits_for_the_next_round_that_covers_it() -> None:
    rule = server("fedavgm", (0.0, 0.0), server_momentum=0.5)
    assert rule.served(covering(rule.weights, (((0, 2),), 1.0))) == [1.0, 1.0]
    assert rule.served(covering(rule.weights, (((0, 1),), 2.0))) == [2.5, 1.0]  # v = 0.5 * 1 + 1
    # Entry 1 goes on where it stood: v = 0.5 * 1 + 1, not 0.25 * 1 + 1.
    assert rule.served(covering(rule.weights, (((1, 2),), 2.0))) == [2.5, 2.5]


@pytest.mark.parametrize("name", OPTIMISERS)
def test_too_few_contributors_are_nobody(name: str) -> None:
    rule, alike = (server(name, (1.0, 1.0, 1.0)) for _ in range(2))
    # Two clients on the first entry, one on the second, none on the third; two are needed.
    found = rule.served(covering(rule.weights, (((0, 1),), 2.0), (((0, 2),), 4.0), fewest=2))
    assert found[1:] == [1.0, 1.0]
    assert found == alike.served(covering(alike.weights, (((0, 1),), 3.0)))  # their mean
    for slot, tensor in rule.kept.items():
        assert tensor[1] == tensor[2], slot
    nothing = rule.served(covering(rule.weights, (((0, 3),), 9.0), fewest=2))
    assert nothing == found


def test_a_rule_is_told_of_every_region_apart() -> None:
    seen: list[tuple[list[float], list[float], int]] = []

    def watch(step: ServerStep) -> Tensor:
        seen.append((step.old.tolist(), step.mean.tolist(), step.contributors))
        assert (step.name, step.about) == (W, ServerRound(7, 2, 10))
        assert torch.equal(step.change, step.mean - step.old)
        return step.old + 10 * step.contributors

    old = {W: torch.tensor([1.0, 2.0, 3.0])}
    averaged = covering(old, (((0, 2),), 4.0), (((1, 2),), 8.0))
    new, kept = serve({W: ("watch", watch)}, old, averaged, {}, ServerRound(7, 2, 10))
    assert sorted(seen) == [([1.0], [4.0], 1), ([2.0], [6.0], 2)]
    assert new[W].tolist() == [11.0, 22.0, 3.0]
    assert kept == {}


def test_what_goes_in_is_only_read() -> None:
    rule = server("fedadam")
    rule.after([2.0, 0.0])
    old, kept = rule.weights, rule.kept
    copies = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in (old, kept)]
    rule.after([3.0, 3.0])
    for tensors, copy in zip((old, kept), copies, strict=True):
        assert all(torch.equal(tensor, copy[name]) for name, tensor in tensors.items())
    assert bytes_of(rule.kept) == 2 * bytes_of(rule.weights)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_buffers_are_averaged_and_no_optimiser_touches_them(name: str) -> None:
    old = {W: torch.tensor([1.0]), MEAN: torch.tensor([5.0]), COUNT: torch.tensor(3)}
    rules = {W: (name, SERVER_RULES.make(ComponentSpec(name)))}
    kept: dict[str, Tensor] = {}
    weights = old
    for round_, (mean, count) in enumerate(((7.0, 9), (2.0, 4))):
        sums = WeightedSums()
        update = {W: torch.tensor([2.0]), MEAN: torch.tensor([mean]), COUNT: torch.tensor(count)}
        sums.add(Update(update, {n: Slice(n) for n in update}, dict.fromkeys(update, 1.0)))
        weights, kept = serve(rules, weights, sums.finish(weights), kept, ServerRound(round_, 1, 1))
        assert (weights[MEAN].tolist(), weights[COUNT].item()) == ([mean], count)
    assert {place.split("/", 1)[1] for place in kept} == {W}


# -- rules of one's own -----------------------------------------------------------------------------------------------


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("own_server")
    monkeypatch.setitem(sys.modules, "own_server", module)
    return module


def test_a_rule_of_ones_own_has_options_and_keeps_tensors(own_module: ModuleType) -> None:
    def slowly(step: ServerStep, *, share: float = 0.5) -> Tensor:
        times = step.state("times", 1.0)
        times.add_(1.0)
        return step.old + share * step.change / times

    own_module.slowly = slowly  # type: ignore[attr-defined]
    rule = server("own_server:slowly", (0.0, 0.0), share=1.0)
    assert rule.served(covering(rule.weights, (((0, 1),), 6.0))) == [3.0, 0.0]  # 6 / 2
    assert rule.slot("times") == [2.0, 1.0]
    assert rule.after([9.0, 6.0]) == [5.0, 3.0]  # 3 + 6 / 3, and 6 / 2


@pytest.mark.parametrize("options", [{"levels": [2.0, 4.0]}, {"by_name": {W: 3.0}}])
def test_an_option_may_be_a_list_or_a_dictionary(own_module: ModuleType, options: dict[str, Any]) -> None:
    def scaled(
        step: ServerStep, *, levels: list[float] | None = None, by_name: dict[str, float] | None = None
    ) -> Tensor:
        level = levels[step.about.round] if levels else 1.0
        return step.mean * level * (by_name or {}).get(step.name, 1.0)

    own_module.scaled = scaled  # type: ignore[attr-defined]
    rules = rules_of(TrainingConfig(server="own_server:scaled", options=options), "method.train")
    assert dict(rules.server.options) == options
    rule = server("own_server:scaled", **options)
    assert [rule.after([1.0, 1.0])[0], rule.after([1.0, 1.0])[0]] == ([2.0, 4.0] if "levels" in options else [3.0, 3.0])


WRONG: dict[str, tuple[Callable[[ServerStep], Any], str]] = {
    "flat": (lambda step: step.mean.sum(), r"gave the shape \(\) for a region of layer\.weight of the shape \("),
    "longer": (lambda step: torch.cat([step.mean, step.mean]), r"gave the shape \(.*\) for a region of layer\.weight"),
    "number": (lambda _step: 3.0, r"gave 3\.0 for a region of layer\.weight"),
    "undefined": (lambda step: step.mean * float("nan"), r"gave values for layer\.weight that are not finite"),
    "endless": (lambda step: step.mean + float("inf"), r"gave values for layer\.weight that are not finite"),
    "broken": (lambda step: step.means, "fails: AttributeError: 'ServerStep' object has no attribute 'means'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_rule_that_does_not_do_its_work_is_named(own_module: ModuleType, name: str) -> None:
    rule, message = WRONG[name]
    setattr(own_module, name, rule)
    with pytest.raises(PluginError, match=f"^server rule 'own_server:{name}' {message}"):
        server(f"own_server:{name}").after([2.0, 0.0])
    # A run tries it before anything is written.
    with pytest.raises(PluginError, match=f"^server rule 'own_server:{name}' {message}") as caught:
        rules_of(TrainingConfig(server=f"own_server:{name}"), "method.train")
    assert "\n" not in str(caught.value)
