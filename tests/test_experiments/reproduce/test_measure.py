"""Quantities are read from the rows of the runs that are done, by setting, place and seed."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import pytest

from fedloom.experiments.analysis.tables import load_paths
from fedloom.experiments.reproduce import measure
from fedloom.experiments.reproduce.items import Item, Quantity, Scale, load_item
from fedloom.experiments.reproduce.measure import Runs, measured

PLACES = {"run1": ("s", 1), "run2": ("s", 2), "run3": ("r", 1)}
FRAME = pd.DataFrame(
    {
        "run_id": ["run1", "run1", "run1", "run2", "run2", "run3", "other"],
        "tier": ["t1", "t2", "t2", "t1", "t2", "t1", "t1"],
        "model": ["m", "m", None, "m", "m", "m", "m"],
        "value": [0.1, 0.2, 0.4, 0.3, None, 0.5, 9.0],
    }
)


def read(**changes: Any) -> Mapping[tuple[str, str], Mapping[int, float]]:
    quantity = Quantity(read={"from": "frame", "value": "value", **changes})
    item = Item("x/tab1", "", "", "", ("x/tab1",), {}, {"q": quantity}, ())
    scale = Scale("fedavg_digits", {"s": {}, "r": {}})
    return measured(item, scale, [Runs(load_paths(()), PLACES)])["q"].values


@pytest.fixture(autouse=True)
def frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure.FRAMES, "frame", lambda _tables: FRAME)


def test_a_value_per_setting_place_and_seed() -> None:
    """Other runs and missing values are left out."""
    assert read(place="tier", where={"model": ("m",)}) == {
        ("s", "t1"): {1: 0.1, 2: 0.3},
        ("s", "t2"): {1: 0.2},
        ("r", "t1"): {1: 0.5},
    }


def test_rows_of_one_place_are_reduced_or_refused() -> None:
    with pytest.raises(ValueError, match="x/tab1: q: 2 rows of one run and place"):
        read(place="tier")
    assert read(place="tier", reduce="last")["s", "t2"] == {1: 0.4}
    assert read(reduce="sum", where={"tier": ("t2",)}, times=10.0)["s", ""] == {1: pytest.approx(6.0)}
    assert read(reduce="count")["s", ""] == {1: 3.0, 2: 1.0}
    assert read(where={"model": (None,)})["s", ""] == {1: 0.4}
    assert read(where={"model": ("m", None)}, reduce="max")["s", ""][1] == 0.4


def test_a_number_is_converted_before_its_factor() -> None:
    assert read(where={"tier": ("t1",)}, convert="error", times=100.0)["r", ""] == {1: pytest.approx(50.0)}
    assert read(where={"tier": ("t1",)}, convert="perplexity")["r", ""] == {1: pytest.approx(1.6487, rel=1e-4)}


def test_a_column_that_is_not_there_is_said() -> None:
    with pytest.raises(ValueError, match="frame has no column 'silo'; it has run_id, tier, model, value"):
        read(place="silo")


def test_what_is_counted_is_exact_in_every_setting() -> None:
    item = load_item("fedoras/tab8")
    (scale,) = item.scales.values()
    found = measured(item, scale, ())["models"]
    assert found.is_exact
    assert {setting for setting, _ in found.values} == {"CIFAR-10", "CIFAR-100"}
    assert sum(values[1] for (setting, _), values in found.values.items() if setting == "CIFAR-10") == pytest.approx(
        9**16 / 1e12, rel=1e-4
    )
