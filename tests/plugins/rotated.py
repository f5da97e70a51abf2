"""A data set with clients of its own: everybody sees scikit-learn's digits turned and brightened in their own way."""

from typing import Annotated

import numpy as np
from sklearn.datasets import load_digits

from fedloom.platform.data.arrays import Arrays
from fedloom.platform.data.config import DataConfig
from fedloom.platform.settings import ONE_OR_MORE


def rotated(_config: DataConfig, *, writers: Annotated[int, ONE_OR_MORE, "clients that there are"] = 12) -> Arrays:
    """Images (n, 8, 8) as bytes; the first fifth of each writer's samples is for testing."""
    digits = load_digits()
    writer = np.arange(len(digits.target)) * writers // len(digits.target)
    turned = [np.rot90(image, k) for image, k in zip(digits.images, writer % 4, strict=True)]
    x = np.clip(np.stack(turned) + (writer % 3)[:, None, None], 0, 16).astype(np.uint8)
    place = np.concatenate([np.arange(samples) for samples in np.bincount(writer)])
    test = place < len(writer) // writers // 5
    parts = [(x[rows], digits.target[rows], np.char.mod("writer %02d", writer[rows])) for rows in (~test, test)]
    return Arrays(train=parts[0], test=parts[1], class_names=[str(name) for name in digits.target_names], scale=16)
