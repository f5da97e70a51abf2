"""A network of your own: any `nn.Module` that returns logits."""

from typing import Annotated

from torch import nn

from fedloom.platform.settings import ONE_OR_MORE


def build(
    input_shape: tuple[int, ...], num_classes: int, *, hidden: Annotated[int, ONE_OR_MORE, "hidden units"] = 16
) -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(nn.Linear(input_shape[0], hidden), nn.ReLU(), nn.Linear(hidden, num_classes))
