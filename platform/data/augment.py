"""What is done to training batches: augmentations by name."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.plugins import Chosen, PluginError, Slot, is_import_path

Augmentation = Callable[[Tensor, torch.Generator], Tensor]
"""From a batch of normalised inputs and a generator, on the CPU, to a batch of the same shape and type."""

NO_AUGMENTATION = Chosen("none")
PADDING = 4


def crop_flip(x_BCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Each image shifted by up to 4 pixels either way and mirrored with probability 1/2; shape and type unchanged.

    The border that comes in is 0, which for normalised images is the mean colour. Random numbers are drawn on the
    generator's device, so that a CPU generator gives the same result for images on any device.
    Source: the usual CIFAR augmentation (He et al. 2016, section 4.2).
    """
    B, _, H, W = x_BCHW.shape
    offsets = torch.randint(0, 2 * PADDING + 1, (2, B), generator=generator, device=generator.device)
    mirrored = torch.randint(0, 2, (B,), generator=generator, device=generator.device).bool()
    dy, dx = offsets.to(x_BCHW.device)
    # A view of all windows (B, C, dy, dx, H, W), of which one per image is copied.
    windows = F.pad(x_BCHW, (PADDING,) * 4).unfold(2, H, 1).unfold(3, W, 1)
    cropped = windows[torch.arange(B, device=x_BCHW.device), :, dy, dx]
    return torch.where(mirrored.to(x_BCHW.device).view(-1, 1, 1, 1), cropped.flip(3), cropped)


def unchanged(x_B: Tensor, generator: torch.Generator) -> Tensor:
    """The batch as it is."""
    del generator
    return x_B


AUGMENTATIONS: Slot[Augmentation] = Slot(
    "augmentation", {"none": unchanged, "crop_flip": crop_flip}, ("x_B", "generator")
)


def augmentation(choice: Chosen) -> Augmentation | None:
    """The chosen augmentation, built in or a user's own; None for `none`."""
    return None if choice == NO_AUGMENTATION else AUGMENTATIONS.make(choice)


def check_augmentation(choice: Chosen, x_B: Tensor) -> None:
    """Raises PluginError for an augmentation that is not there, or that changes the shape or type of this batch."""
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
