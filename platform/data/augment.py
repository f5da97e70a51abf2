"""Augmentations of training batches, by name."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.plugins import Chosen, PluginError, Slot, is_import_path

Augmentation = Callable[[Tensor, torch.Generator], Tensor]
"""Maps a batch of normalised inputs and a CPU generator to a batch of the same shape and dtype."""

NO_AUGMENTATION = Chosen("none")
PADDING = 4


def crop_flip(x_BCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Shifts each image by up to 4 pixels per axis and flips it horizontally with probability 1/2.

    Shape and dtype do not change. The padding is 0, the mean colour of normalised images. Random numbers are drawn on
    the generator's device, so that a CPU generator gives the same result for images on any device.
    Source: the usual CIFAR augmentation (He et al. 2016, section 4.2).
    """
    B, _, H, W = x_BCHW.shape
    offsets = torch.randint(0, 2 * PADDING + 1, (2, B), generator=generator, device=generator.device)
    mirrored = torch.randint(0, 2, (B,), generator=generator, device=generator.device).bool()
    dy, dx = offsets.to(x_BCHW.device)
    # A view of all windows (B, C, dy, dx, H, W); the indexing below copies one per image.
    windows = F.pad(x_BCHW, (PADDING,) * 4).unfold(2, H, 1).unfold(3, W, 1)
    cropped = windows[torch.arange(B, device=x_BCHW.device), :, dy, dx]
    return torch.where(mirrored.to(x_BCHW.device).view(-1, 1, 1, 1), cropped.flip(3), cropped)


def unchanged(x_B: Tensor, generator: torch.Generator) -> Tensor:
    """Returns the batch unchanged."""
    del generator
    return x_B


AUGMENTATIONS: Slot[Augmentation] = Slot(
    "augmentation", {"none": unchanged, "crop_flip": crop_flip}, ("x_B", "generator")
)


def augmentation(choice: Chosen) -> Augmentation | None:
    """The chosen augmentation, built-in or the user's own; None for `none`."""
    return None if choice == NO_AUGMENTATION else AUGMENTATIONS.make(choice)


def check_augmentation(choice: Chosen, x_B: Tensor) -> None:
    """Raises PluginError for an unknown augmentation, or one that changes the shape or dtype of this batch.

    Also raises PluginError for values that are not finite, and ValueError if the batch does not hold images.
    """
    augment = augmentation(choice)
    if augment is None:
        return
    if not is_import_path(choice.name):
        if x_B.dim() != 4:
            raise ValueError(f"data.augment={choice.name} is for images: the data set has none; use none")
        return
    result = augment(x_B.clone(), torch.Generator().manual_seed(0))
    if not isinstance(result, Tensor) or result.shape != x_B.shape or result.dtype != x_B.dtype:
        given = f"{tuple(result.shape)} of {result.dtype}" if isinstance(result, Tensor) else repr(result)[:60]
        raise PluginError(
            f"augmentation {choice.name!r} makes {given} of a batch of {tuple(x_B.shape)} of {x_B.dtype}: "
            "it must keep shape and type"
        )
    if result.is_floating_point() and not bool(torch.isfinite(result).all()):
        raise PluginError(f"augmentation {choice.name!r} gives values that are not finite")
