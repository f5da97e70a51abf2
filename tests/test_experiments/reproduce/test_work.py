"""The work of every item, and what else is counted without training: recorded, because to count all takes minutes.

FEDLOOM_RECORD=all python -m pytest tests/test_experiments/reproduce/test_work.py
FEDLOOM_RECORD=fedoras/tab6,spider/tab1 python -m pytest ...    only these items; the others stay as they are
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedloom.experiments.cli import main
from fedloom.experiments.reproduce.board import WORK, need_of
from fedloom.experiments.reproduce.counting import SIZES, facts_of
from fedloom.experiments.reproduce.items import Counted, Item, Scale, all_items, load_item, read_counted
from fedloom.experiments.reproduce.measure import measured
from fedloom.experiments.reproduce.plan import Asked, missing_data
from fedloom.experiments.reproduce.records import COUNTED, counted_of, recorded_counts
from fedloom.experiments.runs.configuration import compose_config

QUICK = ("fedoras/tab21", "superfed/fig8")
"""Items that are counted again by the tests: to count all takes minutes."""
LAPTOP_CORE_HOURS = 3


def counted(scale: Scale) -> dict[str, float]:
    """The MACs of a run of every setting, but for those of which text or speech is not there, or not all of it."""
    return {
        setting: facts_of("work", scale.overrides_of(setting))["macs"]
        for setting in scale.settings
        if ((dataset := scale.dataset_of(setting)) in SIZES or not missing_data(dataset, scale.overrides))
        and not is_partial(scale, setting)
    }


def is_partial(scale: Scale, setting: str) -> bool:
    """Whether the setting needs all of the spoken words, of which the tests have those of 50 speakers."""
    return (
        scale.dataset_of(setting) == "speech_commands"
        and compose_config(scale.overrides_of(setting)).data.num_clients > 50
    )


def to_record(items: list[Item]) -> list[Item]:
    """Those of the items that FEDLOOM_RECORD names; all of them if it is `all`, none if it is not set."""
    names = os.environ.get("FEDLOOM_RECORD", "").split(",")
    return [item for item in items if item.name in names or names == ["all"]]


def own_scales(item: Item) -> dict[str, Scale]:
    """The scales with the settings that the item runs itself."""
    return {name: scale.only([s for s in scale.settings if scale.run_by[s] == item.name])
            for name, scale in item.scales.items()}  # fmt: skip


@pytest.fixture(scope="module")
def own() -> list[Item]:
    """The items that have runs of their own."""
    return [item for item in all_items() if item.needs_runs and item.name in item.runs_of]


def test_the_work_of_every_item_is_recorded(own: list[Item]) -> None:
    if items := to_record(own):
        work = dict(read_counted(WORK))
        for item in items:
            before, work[item.name] = work.get(item.name, {}), {}
            for name, scale in own_scales(item).items():
                macs = {setting: float(f"{value:.3g}") for setting, value in counted(scale).items()}
                kept = {s: value for s, value in before.get(name, {}).items() if s in scale.settings}
                work[item.name][name] = {**kept, **macs}  # kept if its data is not here
        head = "# MACs of a run of every setting: a training step counts as three passes. A test counts and records.\n"
        WORK.write_text(head + yaml.safe_dump(work, sort_keys=True))
        read_counted.cache_clear()
    assert {item.name for item in own} == {*read_counted(WORK)}


def test_the_small_scale_fits_a_laptop(own: list[Item]) -> None:
    hours = {item.name: need_of(item, "small").core_hours for item in own if "small" in item.scales}
    known = {name: each for name, each in hours.items() if each is not None}
    assert len(known) > len(hours) / 2
    assert {name: each for name, each in known.items() if each > LAPTOP_CORE_HOURS} == {}


@pytest.mark.slow
def test_the_recorded_work_is_what_is_counted(own: list[Item]) -> None:
    for item in (item for item in own if item.name in QUICK):
        for name, scale in own_scales(item).items():
            assert read_counted(WORK)[item.name][name] == pytest.approx(counted(scale), rel=0.01), (item.name, name)


# -- quantities that are counted --------------------------------------------------------------------------------------


def counts(item: Item) -> dict[str, Any]:
    """The counted quantities of an item by scale and name, as far as their data is here: what of, and the values."""
    found: dict[str, Any] = {}
    for name, scale in item.scales.items():
        for quantity, values in measured(counted_alone(item), scale, []).items():
            entry = {"of": counted_of(item, scale, quantity), "values": (by_setting := {})}
            for (setting, place), by_seed in values.values.items():
                by_setting.setdefault(setting, {})[place] = next(iter(by_seed.values()))
            found.setdefault(name, {})[quantity] = entry
    return found


def counted_alone(item: Item) -> Item:
    own = {name: q for name, q in item.quantities.items() if isinstance(q.source, Counted)}
    return replace(item, quantities=own)


@pytest.mark.slow
def test_what_is_counted_is_recorded() -> None:
    items = [item for item in all_items() if counted_alone(item).quantities]
    if named := to_record(items):
        known = {**read_counted(COUNTED), **{item.name: counts(item) for item in named}}
        head = "# What is counted without training, for --recorded. A test counts and records it.\n"
        COUNTED.write_text(head + yaml.safe_dump(known, sort_keys=True))
        read_counted.cache_clear()
    assert {item.name: counts(item) for item in named or items} == {
        name: values for name, values in read_counted(COUNTED).items() if not named or name in {i.name for i in named}
    }


def test_what_is_counted_otherwise_now_is_counted_anew() -> None:
    item = load_item("fedoras/tab8")
    scale = item.scales["paper"]
    known = recorded_counts(item, scale, Asked("paper"))
    assert {*known} == {*counted_alone(item).quantities}
    other = replace(scale, overrides=(*scale.overrides, "tiers.rho_low=0.1"))
    assert recorded_counts(item, other, Asked("paper")) == {}
    assert recorded_counts(item, scale, Asked("paper", ("tiers.rho_low=0.1",))) == {}


def test_a_board_of_what_is_recorded_counts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("counted, or drawn")

    monkeypatch.setattr("fedloom.experiments.reproduce.measure.facts_of", refuse)
    monkeypatch.setattr("fedloom.experiments.reproduce.page.write_page", refuse)
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "reproduce",
                "--scoreboard",
                "--recorded",
                "fedoras/tab8",
                "fedoras/tab6",
                "--json",
                "--results",
                str(tmp_path),
            ]
        )
    assert ended.value.code == 0
    assert not any(tmp_path.iterdir())
