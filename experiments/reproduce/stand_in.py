"""Image data of a published set's size without its content, so that costs are counted where the data is not."""

from typing import Annotated

import numpy as np

from fedloom.platform.data.arrays import Arrays
from fedloom.platform.data.config import DataConfig
from fedloom.platform.settings import ONE_OR_MORE


def images(
    config: DataConfig,
    *,
    train: Annotated[int, ONE_OR_MORE, "training samples"],
    test: Annotated[int, ONE_OR_MORE, "test samples"],
    classes: Annotated[int, ONE_OR_MORE, "classes, of equal sizes"],
) -> Arrays:
    """Black images of 3 x 32 x 32."""
    del config
    parts = [(np.zeros((n, 3, 32, 32), dtype=np.uint8), np.arange(n) % classes) for n in (train, test)]
    return Arrays(parts[0], parts[1], mean=[0.0] * 3, std=[1.0] * 3)
