"""Aggregators of single updates: literal values on slices, the mean as a slow reference, and whole runs."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fedloom.platform.averaging.aggregators import KeptUpdates
from fedloom.platform.averaging.average import Update, WeightedSums
from fedloom.platform.federation.config import ExecutorConfig, RunConfig
from fedloom.platform.federation.training_config import PrivacyConfig, TrainingConfig, rules_of
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.plugins import ComponentSpec, PluginError
from fedloom.platform.spaces.slices import Slice

PLUGINS = Path(__file__).resolve().parent.parent / "plugins"
MEDIAN = ComponentSpec("median:median")


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(PLUGINS))
    yield
    sys.modules.pop("median", None)


def sent(values: list[float], start: int = 0, weight: float = 1.0, counter: int = 1) -> Update:
    """What a client sends that holds a part of a tensor of five scalars, and a counter."""
    tensors = {"w": torch.tensor([float(value) for value in values]), "n": torch.tensor(counter)}
    slices = {"w": Slice("w", ((start, start + len(values)),)), "n": Slice("n")}
    return Update(tensors, slices, {"w": weight, "n": 1.0})


OLD = {"w": torch.full((5,), 9.0), "n": torch.tensor(0), "other": torch.tensor([7.0])}


def kept(updates: list[Update], rule: ComponentSpec) -> KeptUpdates:
    sums = KeptUpdates(rule=rule)
    for update in updates:
        sums.add(update)
    return sums


def test_the_median_of_every_scalar_is_that_of_the_clients_that_hold_it() -> None:
    updates = [sent([1, 2, 3, 4]), sent([5, 7], counter=8), sent([100, 8, 6], weight=50.0), sent([0, 0], 2, weight=0.0)]
    averaged = kept(updates, MEDIAN).finish(OLD, min_contributors=2)
    assert averaged.weights["w"].tolist() == [5.0, 7.0, 4.5, 9.0, 9.0]  # (3 + 6) / 2; one client alone; nobody
    assert averaged.weights["n"] == 8
    assert averaged.weights["other"] is OLD["other"]
    regions = {region: covered.contributors for region, covered in averaged.coverage["w"].items()}
    assert regions == {((0, 2),): 3, ((2, 3),): 2}
    assert OLD["w"].tolist() == [9.0] * 5


slices = st.tuples(st.integers(0, 3), st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=2))


@settings(deadline=None)
@given(st.lists(st.tuples(slices, st.floats(0.125, 8, width=32)), min_size=1, max_size=6), st.integers(1, 3))
def test_the_mean_of_single_updates_is_that_of_their_sums(
    clients: list[tuple[tuple[int, list[float]], float]], fewest: int
) -> None:
    updates = [sent(values, start, weight) for (start, values), weight in clients]
    sums = WeightedSums()
    for update in updates:
        sums.add(update)
    expected, found = sums.finish(OLD, fewest), kept(updates, ComponentSpec("mean")).finish(OLD, fewest)
    torch.testing.assert_close(found.weights["w"], expected.weights["w"], rtol=1e-5, atol=1e-5)
    assert found.weights["n"] == expected.weights["n"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["mean", "median", "multi_krum", "norm_bound"])
def test_rules_compute_in_float32_at_least(name: str, dtype: torch.dtype) -> None:
    rule = ComponentSpec(name, (("bound", 1e9),) if name == "norm_bound" else ())
    values = torch.tensor([3.0, 3.0, 3.0, 3.0, 3.0078125]).to(dtype)  # an ulp of float16 more
    updates = [Update({"w": value[None]}, {"w": Slice("w")}, {"w": 1000.0}) for value in values]
    new = kept(updates, rule).finish({"w": torch.zeros(1, dtype=dtype)}).weights["w"]
    assert new.dtype == dtype
    assert new.item() == pytest.approx(3.0, abs=0.002)


def test_chunks_are_joined_in_plan_order_and_an_update_is_a_copy() -> None:
    update = sent([1.0])
    first, second = kept([update], MEDIAN), kept([sent([2.0])], MEDIAN)
    first.merge(second)
    update.tensors["w"].fill_(50.0)
    assert [float(each.tensors["w"][0]) for each in first.kept] == [1.0, 2.0]
    assert first.updates == 2
    assert first.size_bytes == 2 * (4 + 8)


def test_a_rule_that_gives_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import median

    monkeypatch.setattr(median, "median", lambda cell: cell.values_n)
    with pytest.raises(PluginError, match=r"aggregator 'median:median' gives .* give finite values of shape \(1,\)"):
        kept([sent([1.0])], MEDIAN).finish(OLD)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"privacy": PrivacyConfig(secure=True)}, "needs every single update: x.privacy.secure=true hides all but"),
        ({"privacy": PrivacyConfig(clip=1.0)}, "the noise of x.privacy is for weighted sums"),
        ({"weighting": "fedavg_whole"}, "compares only clients that hold a scalar: x.weighting=fedavg_whole"),
        ({"aggregator": "medain:median"}, "x.aggregator: aggregator 'medain:median'"),
        ({"aggregator": "medain"}, "x.aggregator: unknown aggregator 'medain'"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(changes: dict[str, object], problem: str) -> None:
    config = replace(TrainingConfig(aggregator="median:median"), **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=problem):
        rules_of(config, "x")


@pytest.mark.parametrize("supernet", [False, True])
def test_a_run_gives_the_same_bits_whatever_the_chunks(
    supernet: bool, tiny_config: Callable[..., RunConfig], train_in_memory: Any
) -> None:
    """Single updates have no tree of sums: not even the chunk size changes a bit."""

    def trained(aggregator: str, chunk_size: int) -> list[float]:
        config = tiny_config(executor=ExecutorConfig(kind="serial", chunk_size=chunk_size))
        train = replace(config.method.train, aggregator=aggregator, rounds=2, clients_per_round=5, min_contributors=1)
        if supernet:
            config = replace(config, method=replace(config.method, train=train))
        else:
            plain = TrainingConfig(rounds=2, clients_per_round=5, aggregator=aggregator, evaluate_every=1)
            config = replace(config, method=FedAvgConfig(train=plain))
        values: list[float] = train_in_memory(config).table("evaluations")["value"].tolist()
        return values

    small = trained("median:median", 1)
    assert small == trained("median:median", 4)
    assert small != trained("mean", 1)
    assert len((PLUGINS / "median.py").read_text().splitlines()) <= 25
