"""The records that fedloom ships belong to the items as they are."""

from functools import cache

import pytest

from fedloom.experiments.reproduce.board import all_items
from fedloom.experiments.reproduce.files import ITEMS, load_item
from fedloom.experiments.reproduce.plan import Asked, parts_of
from fedloom.experiments.reproduce.records import computed, record_of
from fedloom.experiments.reproduce.schema import Read

RECORDS = sorted(ITEMS.glob("*/recorded/*.json"))


@cache
def computed_by(item: str, scale: str) -> str:
    """The hash of what the runs of an item compute; items that share runs share it."""
    return computed(load_item(item).scales[scale])


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: f"{file.parent.parent.name}/{file.stem}")
def test_a_record_is_of_what_the_item_runs_now(file: object) -> None:
    items = {f"{item.name}.{scale}": (item, scale) for item in all_items() for scale in item.scales}
    name = str(file).removesuffix(".json").replace("recorded/", "").removeprefix(f"{ITEMS}/")
    item, scale = items[name]
    found = record_of(item, Asked(scale))
    again = f"the runs of {item.name} have changed: run it with --record again, or delete {file}"
    assert found is not None, again
    assert found.computed == computed_by(item.runs_of, scale), again
    read = {name for name, quantity in item.quantities.items() if isinstance(quantity.source, Read)}
    assert {*found.values} <= read
    assert set(found.ablations) <= {part.ablation_id for part in parts_of(item, Asked(scale))}
    assert all(len(seeds) <= len(item.scales[scale].seeds) for v in found.values.values() for seeds in v.values())
