"""What is counted without training: functions of a setting's configuration that give facts by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Facts = Callable[[Sequence[str]], Mapping[str, Any]]
"""Counts the facts of a configuration, given as overrides `key=value`."""


def space_facts(overrides: Sequence[str]) -> Mapping[str, Any]:
    """What `fedloom describe` says of the space and its tiers, and the number of models per tier.

    Source: FedorAS, App. E.4, Tab. 8.
    """
    # Torch is loaded by what counts alone: to read the files of all items takes a moment.
    from fedloom.experiments.runs.describe import describe
    from fedloom.experiments.runs.described import described

    facts = described([o for o in overrides if not o.startswith("seed=")], describe)
    models = [share * facts["architectures"] for share in facts["share_of_models"]]
    return {**facts, "models_per_tier": models}


def family_facts(overrides: Sequence[str]) -> Mapping[str, Any]:
    """Costs of the subnets of a family (`counted_elastic.family_facts`)."""
    from fedloom.experiments.reproduce import counted_elastic

    return counted_elastic.family_facts(overrides)


def round_facts(overrides: Sequence[str]) -> Mapping[str, Any]:
    """Costs of a round of an elastic supernet's training, and of its baselines (`counted_elastic.round_facts`)."""
    from fedloom.experiments.reproduce import counted_elastic

    return counted_elastic.round_facts(overrides)


FACTS: Mapping[str, Facts] = {
    "space": space_facts,
    "family": family_facts,
    "elastic_round": round_facts,
}
"""The functions that an item's `count: {from: NAME}` may name."""


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
