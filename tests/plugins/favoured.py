"""A shares rule: clients with the largest subnet count `factor` times as much as the others, in every round."""

from typing import Annotated

from fedloom.platform.methods.shares import Shares, Sharing
from fedloom.platform.settings import POSITIVE


def favoured(sharing: Sharing, *, factor: Annotated[float, POSITIVE, "what the largest subnet counts"] = 2.0) -> Shares:
    """Shares need not sum to 1: only their proportions matter."""
    values = [factor if largest else 1.0 for largest in sharing.is_largest]
    return Shares(values, {"factor": factor})
