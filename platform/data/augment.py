"""Augmentations of training batches, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.data.augment_sound import noise_shift
from fedloom.platform.data.on_device import upload
from fedloom.platform.plugins import ComponentSpec, PluginError, Registry, is_import_path
from fedloom.platform.settings import Range

if TYPE_CHECKING:
    from fedloom.platform.data.dataset import Dataset

Augmentation = Callable[[Tensor, torch.Generator], Tensor]
"""Maps a batch of normalised inputs and a CPU generator to a batch of the same shape and dtype."""

NO_AUGMENTATION = ComponentSpec("none")
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


SIDE = Annotated[int, Range(least=1, most=10_000), "cutout: side of the square, in pixels"]
COLOUR = Annotated[
    list[float] | None,
    Range(least=-1e6, most=1e6),
    "randaugment: a channel's value of this colour; null: the data set's",
]


def crop_flip_cutout(x_BCHW: Tensor, generator: torch.Generator, *, length: SIDE = 16) -> Tensor:
    """`crop_flip`, then a square of each image is set to 0, the mean colour.

    The square's centre is uniform over the image, so that a part of it may lie outside.
    Source: DeVries and Taylor 2017, as in DARTS and in the code of SPIDER and FedorAS.
    """
    return cut_out(crop_flip(x_BCHW, generator), generator, length)


def cut_out(x_BCHW: Tensor, generator: torch.Generator, length: int) -> Tensor:
    """A square of each image set to 0, centred at a uniformly drawn pixel."""
    B, _, H, W = x_BCHW.shape
    centres = [torch.randint(0, side, (B, 1), generator=generator, device=generator.device) for side in (H, W)]
    rows, columns = (
        (place := torch.arange(side, device=centre.device)).ge(centre - length // 2)
        & place.lt(centre - length // 2 + length)
        for side, centre in zip((H, W), centres, strict=True)
    )
    return x_BCHW.masked_fill(upload(rows[:, None, :, None] & columns[:, None, None, :], x_BCHW.device), 0)


def crop_flip_randaugment_cutout(
    x_BCHW: Tensor,
    generator: torch.Generator,
    *,
    operations: Annotated[int, Range(least=1, most=14), "randaugment: operations per image"] = 2,
    magnitude: Annotated[int, Range(least=0, most=30), "randaugment: their strength, of 31 levels"] = 9,
    length: SIDE = 16,
    black: COLOUR = None,
    white: COLOUR = None,
) -> Tensor:
    """`crop_flip`, random operations on the pixels of each image, and a square set to the mean colour.

    Source: RandAugment (Cubuk et al. 2020), in torchvision's implementation; for FedorAS' supernet (2, 9).
    Raises ValueError without `black` and `white`, which tell the pixels of normalised images.
    """
    from torchvision.transforms.v2 import RandAugment  # slow to import, and only this needs it

    if black is None or white is None:
        raise ValueError("data.augment=crop_flip_randaugment_cutout needs images of pixels: the data set has none")
    x_BCHW = crop_flip(x_BCHW, generator)
    low, high = (torch.tensor(colour, device=x_BCHW.device).view(-1, 1, 1) for colour in (black, white))
    pixels = ((x_BCHW - low) / (high - low) * 255).round_().clamp_(0, 255).to(torch.uint8)
    transform = RandAugment(operations, magnitude)
    # torchvision draws from torch's global generator, image by image.
    seed = int(torch.randint(0, 2**62, (), generator=generator, device=generator.device))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        changed = torch.stack([transform(image) for image in pixels])
    return cut_out(changed.to(x_BCHW.dtype).div_(255).mul_(high - low).add_(low), generator, length)


AUGMENTATIONS: Registry[Augmentation] = Registry(
    "augmentation",
    {
        "none": unchanged,
        "crop_flip": crop_flip,
        "crop_flip_cutout": crop_flip_cutout,
        "crop_flip_randaugment_cutout": crop_flip_randaugment_cutout,
        "noise_shift": noise_shift,
    },
    ("x_B", "generator"),
)
COLOURS = ("black", "white")


def coloured(choice: ComponentSpec, colours: Sequence[Sequence[float]]) -> ComponentSpec:
    """The augmentation with the data set's normalised values of black and white, if it asks for them by these names."""
    own = AUGMENTATIONS.options_of(choice.name)
    asked = {name: list(value) for name, value in zip(COLOURS, colours, strict=True) if name in own}
    given = {name: value for name, value in choice.options if value is not None}
    return replace(choice, options=tuple(sorted({**asked, **given}.items()))) if asked else choice


def augmentation(choice: ComponentSpec) -> Augmentation | None:
    """The chosen augmentation, built-in or the user's own; None for `none`."""
    return None if choice == NO_AUGMENTATION else AUGMENTATIONS.make(choice)


TRIED_SAMPLES = 4
"""Number of training samples on which augmentation and objective are tested before anything is written."""


def tried_samples(dataset: Dataset) -> tuple[Tensor, Tensor]:
    """The first training samples, on which code is tested before a run begins."""
    return dataset.tensors("train", np.arange(min(TRIED_SAMPLES, dataset.num_samples("train"))))


def check_augmentation(choice: ComponentSpec, x_B: Tensor) -> None:
    """Raises PluginError for an unknown augmentation, or one that changes the shape or dtype of this batch.

    Also raises PluginError for values that are not finite, and ValueError if the batch does not hold images.
    """
    augment = augmentation(choice)
    if augment is None:
        return
    if not is_import_path(choice.name):
        if choice.name == "noise_shift":
            augment(x_B.clone(), torch.Generator().manual_seed(0))
        elif x_B.dim() != 4:
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
