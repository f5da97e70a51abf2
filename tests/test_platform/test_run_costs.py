"""A run's cost tables: measured once, kept, and taken up again."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest

from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.tiers import load_costs, measure_costs, sampled_costs, split_into_tiers, store_costs
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.measure import MEASURES
from fedloom.tiers.tier import share_of_models

SPACE = build_space(SpaceConfig(name="cnn_digits", stem_channels=4))
CELLS = build_space(
    SpaceConfig("darts_s2_small", channels=4, operators=["skip_connect", "sep_conv_3x3", "dil_conv_3x3"])
)
BLOCKS = build_space(SpaceConfig("resnet18_modular_small", input_shape=[1, 8, 8], stem_channels=4))


def test_a_weighted_sum_of_measures_is_one_table() -> None:
    costs = measure_costs(TiersConfig(cost_weights={"macs": 2.0, "parameters": 10.0}), SPACE)
    path = (3, 1, 0, 8, 5)
    macs, parameters = SPACE.cost_table("macs").cost(path), SPACE.cost_table("parameters").cost(path)
    assert costs.budget.cost(path) == pytest.approx(2 * macs + 10 * parameters)
    assert costs.macs.cost(path) == macs


def test_the_help_of_the_cost_names_every_measure() -> None:
    *_, text = get_type_hints(TiersConfig, include_extras=True)["cost"].__metadata__
    assert set(text.rpartition("one of ")[2].split(", ")) == {*MEASURES, "bytes"}


def test_an_unsupported_operator_costs_infinity_in_every_layer() -> None:
    costs = measure_costs(TiersConfig(unsupported=["mb(3,2)"]), SPACE)
    assert all(row[7] == math.inf for row in costs.budget.options)
    assert math.isfinite(costs.budget.largest)


def test_an_unsupported_operator_is_spelt_as_in_the_space_or_as_in_its_configuration() -> None:
    costs = [measure_costs(TiersConfig(unsupported=[name]), SPACE) for name in ("ds(3,0.5)", "ds(3,.5)", "ds(3, 0.50)")]
    assert costs[0] == costs[1] == costs[2]
    assert all(row[1] == math.inf for row in costs[0].budget.options)


def test_edges_and_branches_are_operators_too(tmp_path: Path) -> None:
    for space, name, at in ((CELLS, "sep_conv_3x3", 1), (BLOCKS, "branch_0", 0)):
        costs = measure_costs(TiersConfig(unsupported=[name]), space)
        for row, whole in zip(costs.budget.options, space.cost_table("macs").options, strict=True):
            assert row == (*whole[:at], math.inf, *whole[at + 1 :])
        assert costs.macs == space.cost_table("macs"), "what is done is counted all the same"
        store_costs(tmp_path / "costs.json", costs)
        assert load_costs(tmp_path / "costs.json") == costs


def test_tiers_of_cells_are_those_of_the_supported_operators(tiny_config: Callable[..., RunConfig]) -> None:
    config = tiny_config(tiers=TiersConfig(count=2, paths=20_000, rho_high=0.5, unsupported=["sep_conv_3x3"]))
    table = measure_costs(config.tiers, CELLS).budget
    few = build_space(SpaceConfig("darts_s2_small", channels=4, operators=["skip_connect", "dil_conv_3x3"]))
    supported = few.cost_table("macs")
    assert table.cost(CELLS.cheapest(table)) == supported.smallest
    assert table.largest == supported.largest
    uppers = [tier.upper for tier in split_into_tiers(config, CELLS, table)]
    assert supported.smallest < uppers[0] < uppers[1] == supported.largest
    assert uppers == [tier.upper for tier in split_into_tiers(config, few, supported)]
    costs = sampled_costs(CELLS.genome, table, config.tiers.paths)
    assert costs.tolist() == sampled_costs(few.genome, supported, config.tiers.paths).tolist()
    assert sum(share_of_models(costs, uppers)) == pytest.approx(1), "no drawn path is unsupported"


def test_a_space_without_named_operators_has_none_that_are_unsupported() -> None:
    for name in ("resnet_elastic_small", "resnet18_small"):
        space = build_space(SpaceConfig(name, input_shape=[1, 8, 8]))
        with pytest.raises(ValueError, match="names operators, and this space has none to choose from"):
            measure_costs(TiersConfig(unsupported=["conv(1)"]), space)


def test_an_edge_without_a_supported_operator_is_named() -> None:
    with pytest.raises(ValueError, match="decision 0 is left without a supported option: keep at least one"):
        measure_costs(TiersConfig(unsupported=["skip_connect", "sep_conv_3x3", "dil_conv_3x3"]), CELLS)


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
