"""A weighting rule between plain averaging and FedAvg: a tensor counts by a power of the samples that trained it."""

from typing import Annotated

from fedloom.platform.averaging.weighting import Work
from fedloom.platform.settings import PART


def power(
    work: Work, *, exponent: Annotated[float, PART, "0: plain averaging, 1: by samples"] = 0.5
) -> dict[str, float]:
    """An operator that no sample went through was not trained, and counts 0."""
    return {name: seen**exponent if seen else 0.0 for name, seen in work.seen_by_tensor.items()}
