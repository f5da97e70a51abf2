"""The records that fedloom ships belong to the items as they are, and are repeated."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedloom.experiments.reproduce.items import ITEMS, Item, Quantity, Read, all_items, load_given
from fedloom.experiments.reproduce.measure import Measured
from fedloom.experiments.reproduce.outcome import outcome_of
from fedloom.experiments.reproduce.plan import Asked
from fedloom.experiments.reproduce.records import (
    Record,
    Repeated,
    claim_hash,
    computed,
    read_record,
    record_file,
    record_of,
    recorded_scale,
    repeated,
)
from fedloom.platform.runs.run_files import processor

RECORDS = sorted(ITEMS.glob("*/recorded/*.json"))
MOST_HOURS = 0.5
"""The most that `make test-all` spends on a record."""


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


def test_further_seeds_with_the_values_of_the_record_are_as_it_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of four .1 is .1, that of three is .1 only without rounding errors."""
    of_record = Record((), (4, 4), "", "", "", 0.0, {"q": {("s", ""): dict.fromkeys((1, 2, 3, 4), 0.1)}})
    monkeypatch.setattr("fedloom.experiments.reproduce.records.record_of", lambda _item, _asked: of_record)
    quantity = Quantity(read={"from": "models", "value": "accuracy"})
    item = Item("x/tab1", "", "", "", ("x/tab1",), {}, {"q": quantity}, ())
    again = {"q": Measured({("s", ""): dict.fromkeys((5, 6, 7), 0.1)})}
    assert repeated(item, Asked("small"), again) == Repeated(equal=0, values=0, within=1, spots=1)


def test_only_what_was_compared_with_a_record_is_counted() -> None:
    equal = "3 of 4 values measured again are equal to the record's to the bit"
    within = "1 of 2 means are within the 95 % prediction intervals of the record's other seeds"
    assert Repeated(equal=3, values=4, within=0, spots=0).text == f"{equal}."
    assert Repeated(equal=0, values=0, within=1, spots=2).text == f"{within}."
    assert Repeated(equal=3, values=4, within=1, spots=2).text == f"{equal}; {within}."


def test_a_claim_is_another_one_if_its_quantities_are_turned_round_or_published_otherwise(tmp_path: Path) -> None:
    text = (Path(__file__).parent / "tiny" / "tab1.yaml").read_text()
    ratio = "ratio: [{of: bytes, setting: long}, {of: bytes, setting: short}]"
    turned = "ratio: [{of: bytes, setting: short}, {of: bytes, setting: long}]"
    hashes = []
    for changed in (text, text.replace(ratio, turned), text.replace('{"": 2.0}', '{"": 3.0}')):
        (tmp_path / "tab1.yaml").write_text(changed)
        item = load_given(str(tmp_path / "tab1.yaml"))
        hashes.append([claim_hash(claim, item) for claim in item.claims[:2]])
    of_ratio, of_bytes = zip(*hashes, strict=True)
    assert (len({*of_ratio}), len({*of_bytes})) == (3, 1)


@pytest.mark.slow
@pytest.mark.parametrize("paper", sorted({file.parent.parent.name for file in RECORDS}))
def test_the_cheapest_item_of_every_paper_repeats_its_record(paper: str, tmp_path: Path) -> None:
    hours = {}
    for file in RECORDS:
        name, record = f"{paper}/{file.name.partition('.')[0]}", read_record(file)
        if file.parent.parent.name == paper and record.seeds and load_given(name).runs_of == (name,):
            hours[name, record.seeds[0], record.code] = record.hours / len(record.seeds)
    if not hours:
        pytest.skip(f"no record of {paper} names its seeds")
    name, seed, code = min(hours, key=lambda key: hours[key])
    if hours[name, seed, code] > MOST_HOURS:
        pytest.skip(f"{name}, the cheapest of {paper}, takes {hours[name, seed, code]:.1f} h per seed")
    command = [sys.executable, "-m", "fedloom.experiments", "reproduce", name, f"seeds=[{seed}]"]
    subprocess.run([*command, "executor.kind=serial", "--results", str(tmp_path)], check=True)
    found = outcome_of(load_given(name), Asked("small", seeds=(seed,)), tmp_path).repeated
    assert found is not None
    if f"torch {torch.__version__.partition('+')[0]}, processor {processor()}" in " ".join(code):
        assert 0 < found.equal == found.values
    assert found.within >= 0.9 * found.spots > 0
