"""A run's cost tables: measured once, kept, and taken up again."""

import math
from pathlib import Path

import pytest

from fedloom.platform.config import TiersConfig
from fedloom.platform.run_costs import load_costs, measure_costs, store_costs
from fedloom.platform.spaces.config import SpaceConfig
from fedloom.platform.spaces.registry import build_space

SPACE = build_space(SpaceConfig(name="cnn_digits", stem_channels=4))


def test_a_weighted_sum_of_measures_is_one_table() -> None:
    costs = measure_costs(TiersConfig(cost_weights={"macs": 2.0, "parameters": 10.0}), SPACE)
    path = (3, 1, 0, 8, 5)
    macs, parameters = SPACE.cost_table("macs").cost(path), SPACE.cost_table("parameters").cost(path)
    assert costs.budget.cost(path) == pytest.approx(2 * macs + 10 * parameters)
    assert costs.macs.cost(path) == macs


def test_an_unsupported_operator_costs_infinity_in_every_layer() -> None:
    costs = measure_costs(TiersConfig(unsupported=["mb(3,2)"]), SPACE)
    assert all(row[7] == math.inf for row in costs.budget.options)
    assert math.isfinite(costs.budget.largest)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (TiersConfig(unsupported=["conv(9)"]), "no operator 'conv\\(9\\)'; there are"),
        (TiersConfig(cost_weights={"activation_bytes": 1.0}), "only additive tables combine"),
    ],
)
def test_what_cannot_be_costed_is_refused(config: TiersConfig, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        measure_costs(config, SPACE)


def test_stored_tables_come_back_exactly(tmp_path: Path) -> None:
    costs = measure_costs(TiersConfig(cost="latency_s", unsupported=["mb(3,2)"]), SPACE)
    store_costs(tmp_path / "costs.json", costs)
    assert load_costs(tmp_path / "costs.json") == costs


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text('{"budget": 3}')
    with pytest.raises(ValueError, match=r"costs.json does not hold"):
        load_costs(tmp_path / "costs.json")
