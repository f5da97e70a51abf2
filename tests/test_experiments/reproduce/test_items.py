"""Every item: its file is whole, what it runs can be composed, and what it counts is counted."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fedloom.experiments.analysis.tables import load_paths
from fedloom.experiments.reproduce.claims import NOT_RUN, SHOWN, in_the_paper, verdict
from fedloom.experiments.reproduce.frames import FRAMES
from fedloom.experiments.reproduce.items import Item, Read, Scale, item_names, load_given, load_item
from fedloom.experiments.reproduce.measure import measured
from fedloom.experiments.reproduce.plan import Asked, missing_data, parts_of, planned, without_common_keys
from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.data.registry import DATASETS

ROOT = Path(__file__).parents[3]
NAMES = item_names()
CONTRADICTED_COUNTS = {
    "fedoras/tab17": [
        (
            "With the published size as its budget speech sends what was published, to 5 %.",
            "Speech Commands; it is 170.4",
        )
    ],
    "superfed/tab4": [
        ("Every subnet has the published size.", "1 of 9: as published, d=1,2,1,2 e=.22; it is 1.945"),
    ],
}
"""Claims that the counts contradict."""
SLOW = (*(f"fedoras/{name}" for name in ("fig8", "objectives", "tab12", "tab17", "tab18")), "spider/fig4")
"""Items that are counted in seconds."""


@pytest.fixture(params=NAMES)
def item(request: pytest.FixtureRequest) -> Item:
    return load_item(request.param)


def test_what_is_run_can_be_composed_at_every_scale(item: Item, tmp_path: Path) -> None:
    if item.name not in item.runs_of or item.missing:
        pytest.skip("its runs are those of another item, or it has none")
    for scale in item.scales:
        for part in parts_of(item, Asked(scale)):
            plan = planned(item, part, Asked(scale), tmp_path)
            assert {trial.config["data"]["dataset"] for trial in plan.trials} == {part.dataset}
            assert len(plan.trials) == len(part.scale.settings) * len(part.scale.seeds)
    assert not [*tmp_path.glob("*")]


def test_a_setting_may_change_what_the_scale_overrides() -> None:
    settings = {"few": {"method.train.rounds": 2}, "all": {"data.alpha": 1}}
    scale = Scale("fedavg_digits", settings, overrides=("method.train.rounds=30", "data.num_clients=4"))
    assert without_common_keys(scale) == (
        {"few": {"method.train.rounds": 2}, "all": {"method.train.rounds": 30, "data.alpha": 1}},
        ["data.num_clients=4"],
    )


def test_a_claim_that_counts_elsewhere_names_an_item(item: Item) -> None:
    assert {claim.counted_in for claim in item.claims} <= {"", *NAMES} - {item.name}


def reads(item: Item) -> Iterator[Read]:
    return (q.source for q in item.quantities.values() if isinstance(q.source, Read))


@cache
def columns_of(frame: str) -> frozenset[str]:
    """The columns of a frame, which it has without any run."""
    return frozenset(FRAMES[frame](load_paths(())).columns)


def test_what_is_read_is_a_column_of_its_frame(item: Item) -> None:
    for read in reads(item):
        columns = columns_of(read.frame)
        assert {read.value, *read.where, *filter(None, [read.place])} <= {*columns}, read


def test_the_small_scale_needs_no_data_that_takes_hours_to_get(item: Item) -> None:
    if item.needs_runs:
        datasets = {part.dataset for part in parts_of(item, Asked("small"))}
        assert datasets <= {"digits", "cifar10", "synthetic", "shakespeare", "speech_commands"}
    scales = [] if item.missing else [*item.scales]
    assert {part.dataset for scale in scales for part in parts_of(item, Asked(scale))} <= {*DATASETS.known}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in NAMES])
def test_what_is_counted_is_counted_and_shows_its_claims(name: str) -> None:
    item = load_item(name)
    if item.needs_runs or item.missing:
        pytest.skip("it needs training, or cannot be run")
    (scale,) = item.scales.values()
    values = measured(item, scale, ())
    found = [verdict(claim, values, item, [*scale.settings]) for claim in item.claims]
    assert found
    assert [v.claim.text for v in found if v.state == NOT_RUN] == []
    assert [(v.claim.text, v.reason) for v in found if v.state != SHOWN] == CONTRADICTED_COUNTS.get(name, [])


def test_a_claim_can_be_judged_by_the_published_numbers(item: Item) -> None:
    """A direction that was typed the wrong way round, or a quantity in another unit, shows here."""
    for claim in item.claims:
        assert in_the_paper(claim, item) == SHOWN or claim.despite, claim.text


def test_the_readmes_item_is_one(tmp_path: Path) -> None:
    """The page's own example, composed as any other."""
    text = re.search(r"# mine/tab1.yaml\n.*?(?=```)", (ROOT / "docs" / "how-to" / "paper-tables.md").read_text(), re.S)
    assert text is not None
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tab1.yaml").write_text(text[0])
    item = load_given(str(tmp_path / "mine" / "tab1.yaml"))
    test_what_is_run_can_be_composed_at_every_scale(item, tmp_path / "results")
    test_what_is_read_is_a_column_of_its_frame(item)


def test_missing_data_is_said(tmp_path: Path) -> None:
    assert "cifar100 not found under" in missing_data("cifar100", [f"data.root={tmp_path}"])
    assert [missing_data(name) for name in ("digits", "folder", "table", "npz")] == [""] * 4


def test_a_transfers_clients_can_afford_the_model_of_its_tier() -> None:
    """A tier's model may cost as much as that tier's bound, so that lower tiers' clients cannot train it."""
    scale = load_item("fedoras/tab16_transfer").scales["paper"]
    trained = {name: compose_config(scale.overrides_of(name)).method for name in scale.settings if "tier" in name}
    assert len(trained) == 8
    for method in trained.values():
        assert int(method.model.removeprefix("tier").removesuffix("-fine_tuned")) <= method.tier
