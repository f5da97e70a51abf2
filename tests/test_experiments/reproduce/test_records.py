"""The records that fedloom ships belong to the items as they are."""

from functools import cache
from pathlib import Path

import pytest

from fedloom.experiments.reproduce.board import all_items
from fedloom.experiments.reproduce.files import ITEMS, load_item
from fedloom.experiments.reproduce.plan import Asked, parts_of
from fedloom.experiments.reproduce.records import computed, record_file, record_of
from fedloom.experiments.reproduce.schema import Item, Read

RECORDS = sorted(ITEMS.glob("*/recorded/*.json"))


@pytest.fixture(scope="module")
def known() -> dict[Path, tuple[Item, str]]:
    """The items with a scale, by the file of their record."""
    return {record_file(item, scale): (item, scale) for item in all_items() for scale in item.scales}


@cache
def computed_by(item: str, scale: str) -> str:
    """What the runs of an item compute; items that share runs share it."""
    return computed(load_item(item).scales[scale])


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: f"{file.parent.parent.name}/{file.stem}")
def test_a_record_is_of_what_the_item_runs_now(file: Path, known: dict[Path, tuple[Item, str]]) -> None:
    assert file in known, f"{file}: there is no such item or scale: delete it"
    item, name = known[file]
    scale, found = item.scales[name], record_of(item, Asked(name))
    again = f"the runs of {item.name} have changed: run it with --record again, or delete {file}"
    assert found is not None, again
    assert found.computed == computed_by(item.runs_of, name), again
    assert {*found.values} <= {name for name, quantity in item.quantities.items() if isinstance(quantity.source, Read)}
    spots = [(spot, seeds) for values in found.values.values() for spot, seeds in values.items()]
    assert {setting for (setting, _), _ in spots} <= {*scale.settings}
    assert all({*seeds} <= {*scale.seeds} for _, seeds in spots)
    assert found.runs[1] == sum(part.num_runs for part in parts_of(item, Asked(name)))
    assert 0 < len({(setting, seed) for (setting, _), seeds in spots for seed in seeds}) <= found.runs[0]
