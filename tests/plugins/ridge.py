"""A predictor of accuracy and latency: ridge regression on one-hot architectures."""

from collections.abc import Callable
from typing import Annotated

import numpy as np
import torch

from fedloom.platform.settings import POSITIVE


def ridge(
    features: np.ndarray,
    values: np.ndarray,
    generator: torch.Generator,
    *,
    strength: Annotated[float, POSITIVE, "weight of the squared coefficients"] = 1.0,
) -> Callable[[np.ndarray], np.ndarray]:
    """From measured features (n, f) and values (n,) to a function of features (m, f) that gives values (m,)."""
    del generator  # nothing is drawn
    centre, mean = features.mean(axis=0), values.mean()
    x = features - centre
    gram = x.T @ x + strength * np.eye(x.shape[1])
    coefficients = np.linalg.solve(gram, x.T @ (values - mean))
    return lambda more: (more - centre) @ coefficients + mean
