"""An augmentation: a square of every image becomes 0, which is the mean colour (Random Erasing, Zhong et al. 2020)."""

from typing import Annotated

import torch
from torch import Tensor

from fedloom.platform.settings import ONE_OR_MORE


def erase(
    x_BCHW: Tensor, generator: torch.Generator, *, size: Annotated[int, ONE_OR_MORE, "pixels of the side"] = 2
) -> Tensor:
    """Draws from the given generator alone, which is on the CPU wherever the images are."""
    B, _, H, W = x_BCHW.shape
    top = torch.randint(0, H - size + 1, (B, 1, 1, 1), generator=generator)
    left = torch.randint(0, W - size + 1, (B, 1, 1, 1), generator=generator)
    row, column = torch.arange(H).view(H, 1), torch.arange(W)
    hole_B1HW = (row >= top) & (row < top + size) & (column >= left) & (column < left + size)
    return x_BCHW.masked_fill(hole_B1HW.to(x_BCHW.device), 0.0)
