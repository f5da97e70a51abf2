"""What is counted without training: facts of a setting's configuration, by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedloom.experiments.runs.described import described
from fedloom.platform.data.sources import PUBLISHED
from fedloom.platform.plugins import Shipped

Facts = Callable[[Sequence[str]], dict[str, Any]]
"""Counts the facts of a configuration, given as overrides `key=value`; all figures are numbers, or by place."""

_HERE = "fedloom.experiments.reproduce"
FACTS: Mapping[str, Facts] = Shipped(
    {
        "space": f"{_HERE}.facts:space_facts",
        "family": f"{_HERE}.facts:family_facts",
        "partition": f"{_HERE}.facts:partition_facts",
        "training": f"{_HERE}.facts:training_facts",
        "work": f"{_HERE}.facts:work_facts",
        "searches": f"{_HERE}.facts:search_facts",
        "elastic_round": f"{_HERE}.counted_elastic:round_facts",
        "accounts": f"{_HERE}.accounting:accounts",
    }
)
"""The functions that an item's `count: {from: NAME}` may name, imported when they count: that takes seconds."""
OF_DATA = ("partition", "training", "work")
"""Those that count a federation, for which text has to be there: images are stood in for."""

SIZES: Mapping[str, tuple[int, int, int]] = {
    "cifar10": (50_000, 10_000, 10),
    "cifar100": (50_000, 10_000, 100),
    "cinic10": (90_000, 90_000, 10),
}
"""Training samples, test samples and classes of the sets of 3 x 32 x 32 images."""
STAND_IN = "fedloom.experiments.reproduce.stand_in:images"


def stood_in(dataset: str) -> list[str]:
    """The overrides that put the stand-in in the place of a data set; none for a set that has no stand-in."""
    if dataset not in SIZES:
        return []
    train, test, classes = SIZES[dataset]
    coarse = (PUBLISHED[dataset].coarse or {}).items()
    sets = [f"data.label_sets.{name}={[c * count // classes for c in range(classes)]}" for name, count in coarse]
    return [f"data.dataset={STAND_IN}", f"data.options={{train:{train},test:{test},classes:{classes}}}", *sets]


def facts_of(name: str, overrides: Sequence[str]) -> Mapping[str, Any]:
    """The facts of a configuration, counted once for every revision of fedloom."""
    return described(overrides, lambda of: FACTS[name](of), name)  # what is known needs no import


def fact(facts: Mapping[str, Any], name: str) -> Mapping[str, float]:
    """The numbers of a fact by place; ValueError, with those that there are, for one that is not there.

    The places of a list are tier1, tier2, ..., those of a mapping its keys; a single number has the place "".
    """
    found: Any = facts
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            known = ", ".join(found) if isinstance(found, Mapping) else "none below it"
            raise ValueError(f"there is no fact {name!r}: at {part!r} there are {known}")
        found = found[part]
    if isinstance(found, Mapping):
        return {str(place): float(value) for place, value in found.items()}
    if isinstance(found, list | tuple):
        return {f"tier{number}": float(value) for number, value in enumerate(found, 1)}
    return {"": float(found)}
