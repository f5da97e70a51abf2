"""Augmentations of training batches, by name."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.data.on_device import upload
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
    return _moved(x_BCHW, _drawn(len(x_BCHW), generator))


def _drawn(count: int, generator: torch.Generator) -> Tensor:
    """What `crop_flip` draws for so many images: their shifts down and right, and whether they are mirrored (3, B)."""
    offsets = torch.randint(0, 2 * PADDING + 1, (2, count), generator=generator, device=generator.device)
    mirrored = torch.randint(0, 2, (1, count), generator=generator, device=generator.device)
    return torch.cat([offsets, mirrored])


def _moved(x_BCHW: Tensor, drawn_3B: Tensor) -> Tensor:
    B, _, H, W = x_BCHW.shape
    dy, dx, mirrored = upload(drawn_3B, x_BCHW.device)
    # A view of all windows (B, C, dy, dx, H, W); the indexing below copies one per image.
    windows = F.pad(x_BCHW, (PADDING,) * 4).unfold(2, H, 1).unfold(3, W, 1)
    cropped = windows[torch.arange(B, device=x_BCHW.device), :, dy, dx]
    return torch.where(mirrored.bool().view(-1, 1, 1, 1), cropped.flip(3), cropped)


def crop_flip_stack(x_KBCHW: Tensor, sizes: Sequence[int], generators: Sequence[torch.Generator]) -> Tensor:
    """`crop_flip` of the first `sizes` images of K clients' batches, in one step for all."""
    still = torch.tensor([PADDING, PADDING, 0]).view(3, 1)
    drawn = [
        torch.cat([_drawn(size, generator), still.expand(3, x_KBCHW.shape[1] - size)], dim=1)
        for size, generator in zip(sizes, generators, strict=True)
    ]
    return _moved(x_KBCHW.flatten(0, 1), torch.cat(drawn, dim=1)).view_as(x_KBCHW)


def augment_stack(
    augment: Augmentation, x_KB: Tensor, sizes: Sequence[int], generators: Sequence[torch.Generator]
) -> Tensor:
    """Batches of K clients, of which the first `sizes` samples count, each augmented with its own generator."""
    # A GPU takes as long for one client's images as for all; a processor would need memory for all at every step.
    if augment is crop_flip and x_KB.device.type != "cpu":
        return crop_flip_stack(x_KB, sizes, generators)
    for x_B, size, generator in zip(x_KB, sizes, generators, strict=True):
        x_B[:size] = augment(x_B[:size], generator)
    return x_KB


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
