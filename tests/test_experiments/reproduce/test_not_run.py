"""An item that fedloom cannot run: published numbers, and claims that are not run, with the reason."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fedloom.experiments.reproduce.claims import NOT_RUN, SHOWN, in_the_paper
from fedloom.experiments.reproduce.items import load_item
from fedloom.experiments.reproduce.outcome import blocks, outcome_of
from fedloom.experiments.reproduce.plan import asked, parts_of

WHY = "the transfer to another label set is not part of fedloom"
PUBLISHED = {"transfer": {"tier1": [67.06, 2.12], "tier2": 66.87}}


def written(folder: Path, **changes: Any) -> Path:
    """A folder of items with one, `paper/tab`, that cannot be run."""
    values: dict[str, Any] = {
        "title": "Transfer",
        "source": "Paper, Tab. 1",
        "missing": WHY,
        "quantities": {
            "supernet": {"unit": "%", "published": PUBLISHED},
            "fresh": {"unit": "%", "published": {"transfer": {"tier1": 64.99, "tier2": 65.03}}},
            "gain": {"difference": ["supernet", "fresh"]},
        },
        "claims": [{"text": "The supernet helps.", "greater": {"of": "supernet", "than": "fresh"}}],
    }
    kept = {name: value for name, value in (values | changes).items() if value is not None}
    (folder / "paper").mkdir()
    (folder / "paper/tab.yaml").write_text(yaml.safe_dump(kept, sort_keys=False))
    return folder


def test_its_claims_are_not_run_and_say_why(tmp_path: Path) -> None:
    item = load_item("paper/tab", written(tmp_path))
    wanted = asked(item, [])
    assert not item.needs_runs
    assert parts_of(item, wanted) == []
    outcome = outcome_of(item, wanted, tmp_path)
    assert outcome.missing == (WHY,)
    assert [found.state for found in outcome.verdicts] == [NOT_RUN]
    assert [in_the_paper(claim, item) for claim in item.claims] == [SHOWN]
    numbers, claims = blocks(outcome)
    assert "it cannot be run" in numbers.text[0]
    assert [cells[-1] for cells in claims.rows] == [WHY]
    assert numbers.rows[0][3:] == ("67.06 (sd 2.120)", "66.87")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"runs_of": "paper/tab"}, "leave out runs_of"),
        ({"runs": {"paper": {"experiment": "fedoras_digits", "settings": {"a": {}}}}}, "leave out runs"),
        ({"quantities": {"supernet": {"count": {"from": "space", "value": "macs.largest"}}}, "claims": []}, "measured"),
        ({"missing": None}, "give what to run"),
        ({"missing": ""}, "missing is"),
    ],
)
def test_it_can_neither_run_nor_measure(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        load_item("paper/tab", written(tmp_path, **changes))
