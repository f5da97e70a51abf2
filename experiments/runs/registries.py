"""All registries: the places of a configuration where code is chosen by name."""

from typing import Any

import fedloom.platform.methods  # noqa: F401 - registers the built-in rules
from fedloom.platform.averaging.server import SERVER_RULES
from fedloom.platform.averaging.shares import SHARES_RULES
from fedloom.platform.averaging.weighting import WEIGHTING_RULES
from fedloom.platform.clients.local_rules import LOCAL_RULES
from fedloom.platform.clients.objectives import OBJECTIVES
from fedloom.platform.data.augment import AUGMENTATIONS
from fedloom.platform.data.sources import DATASETS
from fedloom.platform.federation.budgets import BUDGETS
from fedloom.platform.federation.distribution import HEURISTICS
from fedloom.platform.federation.selection import SELECTION_RULES
from fedloom.platform.plugins import Registry
from fedloom.platform.search.config import SEARCHERS
from fedloom.platform.search.predictors import PREDICTORS
from fedloom.platform.spaces.registry import SPACES

REGISTRIES: tuple[Registry[Any], ...] = (
    DATASETS,
    AUGMENTATIONS,
    OBJECTIVES,
    SPACES,
    BUDGETS,
    SELECTION_RULES,
    LOCAL_RULES,
    WEIGHTING_RULES,
    SERVER_RULES,
    HEURISTICS,
    SHARES_RULES,
    SEARCHERS,
    PREDICTORS,
)


def registry_of(kind: str) -> Registry[Any] | None:
    """The registry of code of this kind; None for a kind of a user's own method."""
    return next((registry for registry in REGISTRIES if registry.kind == kind), None)
