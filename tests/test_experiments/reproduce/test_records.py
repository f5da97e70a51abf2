"""The records that fedloom ships belong to the items as they are."""

from pathlib import Path

import pytest

from fedloom.experiments.reproduce.items import ITEMS, Item, Read, all_items
from fedloom.experiments.reproduce.plan import Asked
from fedloom.experiments.reproduce.records import computed, record_file, record_of, recorded_scale

RECORDS = sorted(ITEMS.glob("*/recorded/*.json"))


@pytest.fixture(scope="module")
def known() -> dict[Path, tuple[Item, str]]:
    """The items with a scale, by the file of their record."""
    return {record_file(item, scale): (item, scale) for item in all_items() for scale in item.scales}


@pytest.fixture(scope="module")
def hashes() -> dict[tuple[str, ...], str]:
    """What ablations compute, by their ids: items that share runs share it."""
    return {}


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: f"{file.parent.parent.name}/{file.stem}")
def test_a_record_is_of_what_the_item_runs_now(
    file: Path, known: dict[Path, tuple[Item, str]], hashes: dict[tuple[str, ...], str]
) -> None:
    assert file in known, f"{file}: there is no such item or scale: delete it"
    item, name = known[file]
    scale, found = item.scales[name], record_of(item, Asked(name))
    again = f"the runs of {item.name} have changed: --record them again, or say in {file} what they had otherwise"
    assert found is not None, again
    runs = (*found.ablations, str(found.earlier))
    if runs not in hashes:
        hashes[runs] = computed(recorded_scale(item, Asked(name), found.ablations, found.earlier))
    assert found.computed == hashes[runs], again
    assert {*found.values} <= {name for name, quantity in item.quantities.items() if isinstance(quantity.source, Read)}
    spots = [(spot, seeds) for values in found.values.values() for spot, seeds in values.items()]
    assert {setting for (setting, _), _ in spots} <= {*scale.settings}
    assert all({*seeds} <= {*scale.seeds} for _, seeds in spots)
    assert 0 < len({(setting, seed) for (setting, _), seeds in spots for seed in seeds}) <= found.runs[0]
