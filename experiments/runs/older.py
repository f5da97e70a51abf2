"""Configurations stored before a key was there: what they meant without it, where that is not the key's default."""

from collections.abc import Mapping
from typing import Any

SEARCHED_BY_MASKS = ("spider", "global_nas", "fedpnas")


def completed(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The stored configuration with the values that older revisions had for keys that it lacks."""
    space, method = values.get("space"), values["method"]
    if isinstance(space, Mapping) and _is_without_norms(space) and "bias" not in space:
        values = {**values, "space": {**space, "bias": True, "initialisation": "he"}}
    data = values.get("data")
    if isinstance(data, Mapping) and data.get("dataset") == "speech_commands" and _is_before_balance(data):
        options = {"features": "slaney", "silence": None, **data["options"]}
        values = {**values, "data": {**data, "options": options}}
    objective = values.get("objective")
    if isinstance(objective, Mapping) and objective.get("name") == "masked_classes" and _is_before_balance(data):
        values = {**values, "objective": {**objective, "options": {"in_mean": False, **objective["options"]}}}
    search = method.get("search")
    if isinstance(search, Mapping) and method["name"] in SEARCHED_BY_MASKS and "statistics" not in search:
        values = {**values, "method": {**method, "search": {**search, "statistics": "running"}}}
    if isinstance(search, Mapping) and "searcher" in search:
        before = {"objectives": "metric_and_cost", "statistics": "averaged"}
        values = {**values, "method": {**method, "search": {**before, **search}}}
    return values


def _is_before_balance(data: object) -> bool:
    return isinstance(data, Mapping) and "balanced_classes" not in data


def _is_without_norms(space: Mapping[str, Any]) -> bool:
    return str(space.get("name")).startswith("resnet_elastic") and space.get("norm") in (None, "none")
