"""What is counted of a configuration is counted once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedloom.experiments.reproduce import counting
from fedloom.experiments.reproduce.counting import facts_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Counter:
    """Counts a space and notes that it was asked to."""

    def __init__(self) -> None:
        self.asked: list[Sequence[str]] = []

    def __call__(self, overrides: Sequence[str]) -> dict[str, Any]:
        self.asked.append(overrides)
        return {"space": overrides[0], "bounds": (1.5, 2)}


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    monkeypatch.setattr(counting, "FACTS", {"space": counter})
    return counter


def test_a_space_is_counted_once_and_others_for_themselves(cache: Path, count: Counter) -> None:
    facts = {"space": "space=a", "bounds": [1.5, 2]}
    assert [facts_of("space", ["space=a"]) for _ in range(3)] == [facts] * 3
    assert count.asked == [["space=a"]]
    facts_of("space", ["space=a", "tiers.count=2"])
    assert len(count.asked) == 2
    for file in (cache / "described").iterdir():
        file.write_text("{")
    assert facts_of("space", ["space=a"]) == facts
    assert len(count.asked) == 3, "what cannot be read is counted again"


def test_a_change_of_the_code_that_counts_counts_again(count: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    read_bytes = Path.read_bytes
    for change in (b"", b"# changed"):
        monkeypatch.setattr(
            Path, "read_bytes", lambda file, more=change: read_bytes(file) + (more if file.name == "facts.py" else b"")
        )
        counting._revision.cache_clear()
        facts_of("space", ["space=a"])
    counting._revision.cache_clear()
    assert len(count.asked) == 2


@pytest.mark.parametrize(
    "other",
    ["space=own_module:space", "experiment=./mine.yaml", "tiers.cost=latency_s", "data.options.path=mine.npz"],
)
def test_what_may_change_is_counted_every_time(other: str, count: Counter) -> None:
    facts_of("space", [other])
    facts_of("space", [other])
    assert len(count.asked) == 2


def test_a_cache_that_cannot_be_written_is_no_failure(cache: Path, count: Counter) -> None:
    cache.write_text("a file")
    assert facts_of("space", ["space=a"])["space"] == "space=a"
