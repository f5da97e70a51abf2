"""Every item: its file is whole, what it runs can be composed, and what it counts is counted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedloom.experiments.analysis.tables import load_paths
from fedloom.experiments.reproduce.claims import NOT_RUN, SHOWN, in_the_paper, verdict
from fedloom.experiments.reproduce.files import item_names, load_item
from fedloom.experiments.reproduce.measure import FRAMES, measured
from fedloom.experiments.reproduce.plan import Asked, parts_of, planned
from fedloom.experiments.reproduce.schema import Item, Read
from fedloom.experiments.reproduce.settings import missing_data
from fedloom.platform.data.sources import DATASETS

NAMES = item_names()


@pytest.fixture(params=NAMES)
def item(request: pytest.FixtureRequest) -> Item:
    return load_item(request.param)


def test_what_is_run_can_be_composed_at_every_scale(item: Item, tmp_path: Path) -> None:
    if item.runs_of != item.name:
        pytest.skip(f"composed with {item.runs_of}, whose runs it reads")
    for scale in item.scales:
        for part in parts_of(item, Asked(scale)):
            plan = planned(item, part, (), tmp_path)
            assert {trial.config["data"]["dataset"] for trial in plan.trials} == {part.dataset}
            assert len(plan.trials) == len(part.scale.settings) * len(part.scale.seeds)
    assert not [*tmp_path.iterdir()]


def reads(item: Item) -> Iterator[Read]:
    return (q.source for q in item.quantities.values() if isinstance(q.source, Read))


def test_what_is_read_is_a_column_of_its_frame(item: Item) -> None:
    nothing = load_paths(())
    for read in reads(item):
        columns = FRAMES[read.frame](nothing).columns
        assert {read.value, *read.where, *filter(None, [read.place])} <= {*columns}, read


def test_the_small_scale_needs_no_data_that_takes_hours_to_get(item: Item) -> None:
    if item.needs_runs:
        datasets = {part.dataset for part in parts_of(item, Asked("small"))}
        assert datasets <= {"digits", "cifar10", "synthetic", "shakespeare", "speech_commands"}
    assert {part.dataset for scale in item.scales for part in parts_of(item, Asked(scale))} <= {*DATASETS.known}


def test_what_is_counted_is_counted_and_shows_its_claims(item: Item) -> None:
    if item.needs_runs:
        pytest.skip("it needs training")
    (name,) = item.scales
    values = measured(item, item.scales[name], ())
    found = [verdict(claim, values, item, [*item.scales[name].settings]) for claim in item.claims]
    assert found
    assert [v.claim.text for v in found if v.state == NOT_RUN] == []
    assert [(v.claim.text, v.reason) for v in found if v.state != SHOWN] == []


def test_a_claim_can_be_judged_by_the_published_numbers(item: Item) -> None:
    """A direction that was typed the wrong way round, or a quantity in another unit, shows here."""
    for claim in item.claims:
        assert in_the_paper(claim, item) == SHOWN or claim.despite, claim.text


def test_missing_data_is_said(tmp_path: Path) -> None:
    assert "cifar100 not found under" in missing_data("cifar100", [f"data.root={tmp_path}"])
    assert missing_data("digits") == ""
