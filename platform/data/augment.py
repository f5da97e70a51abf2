"""Augmentations of training batches of images and of sounds, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.data.on_device import upload
from fedloom.platform.data.trees import Tree, single
from fedloom.platform.plugins import ComponentSpec, PluginError, Registry, is_import_path

if TYPE_CHECKING:
    from fedloom.platform.data.dataset import Dataset


# -- sounds as mel-frequency cepstral coefficients: background noise and a shift in time ------------------------------
# The coefficients (see `speech`) are an orthonormal transform of the mel bands' decibels, so that noise can be added
# to the bands' power while clients train: no waveform is kept, and no copy of a clip can end up in another split than
# the clip. Phases are lost: the powers of sound and noise are added, which is right on average. 40 coefficients of 128
# bands only restore a smoothed spectrum: mixing recorded noise into 40 words (a share of up to .1, as below) changes
# their coefficients by 22 (root mean square); adding it this way gives the same change up to an error of 2.5.

OF_ALL = {"rate": 8_000, "coefficients": 40, "window": 320, "hop": 160}
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "htk": {**OF_ALL, "fft": 400, "mels": 128, "scale": "htk", "resampler": "windowed sinc"},
    "slaney": {**OF_ALL, "mels": 40, "resampler": "soxr_hq"},
}
"""Parameters of the features: samples per second, samples per window and hop at that rate, coefficients, bands."""
COEFFICIENTS, TOP_HZ = 40, 4000.0
LOWEST_HZ = 50.0
"""Below it noise gets no louder: microphones do not record the power that brown noise has at a few hertz."""
LEAST_POWER, TOP_DB = 1e-10, 80.0
"""As in librosa's decibels: the least power, and the range below the loudest band of a clip."""
NOISE_COLOURS = 2.0
"""Noises lie between white (0) and brown (2): their power falls as 1 / f^colour."""
FLUCTUATION = 0.5
"""Standard deviation of the logarithm of a noise's power from frame to frame and band to band."""

FEATURES_OF_SOUND = Annotated[
    Literal["htk", "slaney"], "speech: htk (128 mel bands, FedorAS' code) or slaney (40 bands)"
]
FRAMES = Annotated[int, Interval(ge=0, le=1000), "noise_shift: largest shift of a clip, in frames of 20 ms"]
NORMALISED = Interval(ge=-1e6, le=1e6)
DECIBELS = Annotated[float, Interval(ge=-40, le=120), "noise_shift: signal-to-noise ratio of the clip, in decibels"]


@cache
def transform(mels: int) -> Tensor:
    """The first rows of the orthonormal cosine transform (40, mels), DCT-II."""
    k, n = np.arange(COEFFICIENTS)[:, None], np.arange(mels)[None]
    matrix = np.sqrt(2 / mels) * np.cos(np.pi * k * (2 * n + 1) / (2 * mels))
    matrix[0] /= np.sqrt(2)
    return torch.tensor(matrix, dtype=torch.float32)


@cache
def centres_hz(features: str) -> Tensor:
    """The bands' centres (mels,) in Hz, on HTK's mel scale or on Slaney's: linear up to 1000 Hz, then logarithmic."""
    mels = FEATURES[features]["mels"]
    if features == "htk":
        places = np.linspace(0, np.log10(1 + TOP_HZ / 700), mels + 2)[1:-1]
        return torch.tensor(700 * (10**places - 1), dtype=torch.float32)
    step, log_step = 200 / 3, np.log(6.4) / 27
    top = 1000 / step + np.log(TOP_HZ / 1000) / log_step
    places = np.linspace(0, top, mels + 2)[1:-1]
    linear = places * step
    return torch.tensor(
        np.where(linear < 1000, linear, 1000 * np.exp(log_step * (places - 1000 / step))), dtype=torch.float32
    )


def with_noise(mfcc_BMT: Tensor, noise_BMT: Tensor) -> Tensor:
    """The coefficients (B, 40, T) of sounds after noise of these powers (B, mels, T) is added to their mel bands."""
    matrix = upload(transform(noise_BMT.shape[1]), mfcc_BMT.device)
    power = 10 ** (torch.matmul(matrix.T, mfcc_BMT) / 10) + noise_BMT
    decibels = 10 * power.clamp_min(LEAST_POWER).log10()
    loudest = decibels.amax(dim=(1, 2), keepdim=True)
    return torch.matmul(matrix, torch.maximum(decibels, loudest - TOP_DB))


def shifted(x_BMT: Tensor, by_B: Tensor) -> Tensor:
    """Each clip's frames moved by `by_B` places (later if positive); the first or last frame fills the gap."""
    frames = x_BMT.shape[2]
    places = (torch.arange(frames, device=x_BMT.device)[None] - by_B[:, None]).clamp(0, frames - 1)
    return x_BMT.gather(2, places[:, None].expand_as(x_BMT))


def noise_shift(
    x_BCMT: Tensor,
    generator: torch.Generator,
    *,
    features: FEATURES_OF_SOUND = "htk",
    shift: FRAMES = 5,
    quietest: DECIBELS = 30.0,
    loudest: DECIBELS = 5.0,
    probability: Annotated[float, Interval(ge=0, le=1), "noise_shift: share of the clips with noise"] = 0.8,
    black: Annotated[
        list[Annotated[float, NORMALISED]] | None, "noise_shift: normalised value of 0; null: the data set's"
    ] = None,
    white: Annotated[
        list[Annotated[float, NORMALISED]] | None, "noise_shift: normalised value of 1; null: the data set's"
    ] = None,
) -> Tensor:
    """Moves each clip (1, 40, T) by up to `shift` frames, and adds noise of a random colour to most.

    The noise is `loudest` to `quietest` decibels below the clip's mean power. Source: the usual augmentation of Speech
    Commands (Warden 2018), with which the authors of FedorAS train: a shift of up to 100 ms, and noise in 80 % of the
    clips. They shift waveforms by single samples, pad with zeros, and mix in a recording with a share of 0 to .1.
    """
    if x_BCMT.dim() != 4 or x_BCMT.shape[1:3] != (1, COEFFICIENTS) or black is None or white is None:
        raise ValueError(
            f"data.augment=noise_shift is for sounds as {COEFFICIENTS} cepstral coefficients, (1, {COEFFICIENTS}, T)"
        )
    mels = FEATURES[features]["mels"]
    clips, frames = len(x_BCMT), x_BCMT.shape[3]
    moves = torch.randint(-shift, shift + 1, (clips,), generator=generator)
    drawn = torch.rand((3, clips), generator=generator)
    fluctuation = torch.randn((clips, mels, frames), generator=generator)
    device, unit = x_BCMT.device, white[0] - black[0]
    clean = shifted(x_BCMT[:, 0], upload(moves, device))
    mfcc = (clean - black[0]) / unit
    chosen, colour, level = upload(drawn, device).view(3, -1, 1, 1)
    centres = upload(centres_hz(features).clamp_min(LOWEST_HZ), device)
    profile = (centres / 1000).view(1, -1, 1) ** (-NOISE_COLOURS * colour)
    around_one = (FLUCTUATION * upload(fluctuation, device) - FLUCTUATION**2 / 2).exp()
    profile = profile / profile.mean(dim=1, keepdim=True) * around_one
    power = (10 ** (torch.matmul(upload(transform(mels), device).T, mfcc) / 10)).mean(dim=(1, 2), keepdim=True)
    below = loudest + (quietest - loudest) * level
    noise = power * 10 ** (-below / 10) * profile
    mixed = with_noise(mfcc, noise) * unit + black[0]
    # A clip without noise is returned bit for bit, not as two transforms would change it.
    return torch.where(chosen < probability, mixed, clean).unsqueeze(1)


# -- images -----------------------------------------------------------------------------------------------------------

Augmentation = Callable[[Tensor, torch.Generator], Tensor]
"""Maps a batch of normalised inputs and a CPU generator to a batch of the same shape and dtype."""

NO_AUGMENTATION = ComponentSpec("none")
PADDING = 4
RANDAUGMENT = "crop_flip_randaugment_cutout"
FAR = 10.0
"""Values beyond, where black is 0 and white 1, are no pixels: noise (`data.noise`) does not get there, 255 does."""


def crop_flip(x_BCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Shifts each image by up to 4 pixels per axis and flips it horizontally with probability 1/2.

    Shape and dtype do not change. The padding is 0, the mean colour of normalised images. Random numbers are drawn on
    the generator's device, so that a CPU generator gives the same result for images on any device.
    Source: the usual CIFAR augmentation (He et al. 2016, section 4.2).
    """
    return _moved(x_BCHW, _drawn(len(x_BCHW), generator))


def _drawn(count: int, generator: torch.Generator) -> Tensor:
    """The random numbers of `crop_flip` (3, count): each image's shifts down and right, and whether it is mirrored."""
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
    """`crop_flip` of the first `sizes[k]` images of each of K clients' batches, in one step for all clients."""
    still = torch.tensor([PADDING, PADDING, 0]).view(3, 1)
    drawn = [
        torch.cat([_drawn(size, generator), still.expand(3, x_KBCHW.shape[1] - size)], dim=1)
        for size, generator in zip(sizes, generators, strict=True)
    ]
    return _moved(x_KBCHW.flatten(0, 1), torch.cat(drawn, dim=1)).view_as(x_KBCHW)


def augment_stack(
    augment: Augmentation, x_KB: Tensor, sizes: Sequence[int], generators: Sequence[torch.Generator]
) -> Tensor:
    """The batches of K clients, each augmented with its own generator; only the first `sizes[k]` samples count."""
    # A GPU takes as long for one client's images as for all; a CPU would need memory for all of them at every step.
    if augment is crop_flip and x_KB.device.type != "cpu":
        return crop_flip_stack(x_KB, sizes, generators)
    for x_B, size, generator in zip(x_KB, sizes, generators, strict=True):
        x_B[:size] = augment(x_B[:size], generator)
    return x_KB


def unchanged(x_B: Tensor, generator: torch.Generator) -> Tensor:
    """Returns the batch unchanged."""
    del generator
    return x_B


SIDE = Annotated[int, Interval(ge=1, le=10_000), "cutout: side of the square, in pixels"]
COLOUR = Annotated[
    list[Annotated[float, Interval(ge=-1e6, le=1e6)]] | None,
    "randaugment: normalised value of this colour per channel; null: the data set's",
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
        (pixel := torch.arange(side, device=centre.device)).ge(centre - length // 2)
        & pixel.lt(centre - length // 2 + length)
        for side, centre in zip((H, W), centres, strict=True)
    )
    return x_BCHW.masked_fill(upload(rows[:, None, :, None] & columns[:, None, None, :], x_BCHW.device), 0)


def crop_flip_randaugment_cutout(
    x_BCHW: Tensor,
    generator: torch.Generator,
    *,
    operations: Annotated[int, Interval(ge=1, le=14), "randaugment: operations per image"] = 2,
    magnitude: Annotated[int, Interval(ge=0, le=30), "randaugment: strength of the operations, of 31 levels"] = 9,
    length: SIDE = 16,
    black: COLOUR = None,
    white: COLOUR = None,
) -> Tensor:
    """`crop_flip`, random operations on the pixels of each image, and a square set to the mean colour.

    Source: RandAugment (Cubuk et al. 2020) with torchvision's operations; FedorAS trains its supernet with (2, 9).
    Raises ValueError without `black` and `white`, which convert between normalised values and pixels.
    """
    low, high = upload(_black_and_white(black, white), x_BCHW.device)
    x_BCHW = crop_flip(x_BCHW, generator)
    pixels = ((x_BCHW - low) / (high - low) * 255).round_().clamp_(0, 255).to(torch.uint8)
    transform = Operators.of(magnitude, *x_BCHW.shape[2:])
    for drawn_B in torch.randint(0, transform.count, (operations, len(pixels)), generator=generator):
        pixels = transform.applied(pixels, drawn_B)
    return cut_out(pixels.to(x_BCHW.dtype).div_(255).mul_(high - low).add_(low), generator, length)


def _black_and_white(black: Sequence[float] | None, white: Sequence[float] | None) -> Tensor:
    """Both as a tensor (2, C, 1, 1)."""
    if black is None or white is None:
        raise ValueError(f"data.augment={RANDAUGMENT} needs images of pixels: the data set has none")
    return torch.tensor([[*black], [*white]]).view(2, -1, 1, 1)


def _check_pixels(x_BCHW: Tensor, black: Sequence[float] | None, white: Sequence[float] | None) -> None:
    """Raises ValueError without black and white, or for values so far from them that bytes cannot hold the images."""
    low, high = _black_and_white(black, white)
    values = (x_BCHW - low) / (high - low)
    least, most = float(values.min()), float(values.max())
    if least < -FAR or most > FAR:
        raise ValueError(
            f"data.augment={RANDAUGMENT} takes pixels from 0 (black) to 1 (white), and the data set has values from "
            f"{least:.3g} to {most:.3g}: bring images as bytes, or set data.options.black and data.options.white to "
            "the normalised values of both"
        )


@dataclass(frozen=True)
class Operators:
    """RandAugment's 14 operations of one magnitude, each with either sign, on batches of bytes, as in torchvision.

    They are numbered by kind (0 to 27): in a batch sorted by number, those that need the whole image work on slices.

    Attributes:
        sources: (28, H * W), the pixel that each pixel of the result comes from, counted from 1; 0 for black outside.
        values: (28, 256), the new value of each pixel value.
        factors: (28, 1, 1, 1), the image's weight when it is blended with its grey, its mean or its blurred version.
    """

    sources: Tensor
    values: Tensor
    factors: Tensor
    count: ClassVar[int] = 28

    @classmethod
    @cache
    def of(cls, magnitude: int, height: int, width: int) -> Operators:
        """The operations at one of the 31 magnitudes, for images of this size."""
        from torchvision.transforms.v2 import functional  # slow to import, and only this needs it

        def strength(most: float) -> float:
            return float(torch.linspace(0.0, most, 31)[magnitude])

        bits = int((8 - torch.arange(31) / 7.5).round()[magnitude])
        threshold = 255 * float(torch.linspace(1.0, 0.0, 31)[magnitude])
        affine = partial(functional.affine, angle=0.0, scale=1.0)
        sources, values = [], []
        places, levels = torch.arange(1.0, height * width + 1), torch.arange(256, dtype=torch.uint8)
        image, scale = places.view(1, height, width), levels.view(1, 1, 256)
        for sign in (1, -1):
            shear = math.degrees(math.atan(sign * strength(0.3)))
            right, down = (int(sign * strength(150.0 / 331.0 * side)) for side in (width, height))
            sources += [
                affine(image, translate=[0, 0], shear=[shear, 0.0], center=[0, 0]),
                affine(image, translate=[0, 0], shear=[0.0, shear], center=[0, 0]),
                affine(image, translate=[right, 0], shear=[0.0, 0.0]),
                affine(image, translate=[0, down], shear=[0.0, 0.0]),
                functional.rotate(image, sign * strength(30.0)),
            ]
            values += [
                scale,
                functional.adjust_brightness(scale, 1.0 + sign * strength(0.9)),
                functional.posterize(scale, bits),
                functional.solarize(scale, threshold),
            ]
        factors = torch.tensor([1.0 + strength(0.9), 1.0 - strength(0.9)]).repeat(14)
        return cls(
            torch.stack([*(x.flatten() for x in sources), *[places] * (cls.count - len(sources))]).long(),
            torch.stack([*[levels] * len(sources), *(x.flatten() for x in values), *[levels] * 10]),
            factors.view(-1, 1, 1, 1),
        )

    def applied(self, x_BCHW: Tensor, drawn_B: Tensor) -> Tensor:
        """Each image after the operation drawn for it, given the operations' numbers (B,) in main memory."""
        from torchvision.transforms.v2.functional import equalize, rgb_to_grayscale

        device = x_BCHW.device
        drawn_B, order_B = drawn_B.sort(stable=True)
        number_B, order_B, back_B = upload(torch.stack([drawn_B, order_B, order_B.argsort()]), device)
        sources_BP, values_BV = (upload(of, device).index_select(0, number_B) for of in (self.sources, self.values))
        x_BCP = F.pad(x_BCHW.index_select(0, order_B).flatten(2), (1, 0))
        x_BCP = x_BCP.gather(2, sources_BP[:, None].expand(-1, x_BCHW.shape[1], -1))
        x_BCHW = values_BV.gather(1, x_BCP.flatten(1).long()).view_as(x_BCHW)
        # Grey, contrast and sharpness are blends; the slice of an operation that was drawn for no image is empty.
        grey, contrast, sharp, auto, equal, end = torch.searchsorted(drawn_B, torch.arange(18, 29, 2)).tolist()
        if auto > grey:
            blended = x_BCHW[grey:auto].float()
            other = blended.clone()
            if contrast > grey or sharp > contrast:
                lightness = rgb_to_grayscale(blended[: sharp - grey]).floor_()
                other[: contrast - grey] = lightness[: contrast - grey]
                other[contrast - grey : sharp - grey] = lightness[contrast - grey :].mean((1, 2, 3), keepdim=True)
            other[sharp - grey :, :, 1:-1, 1:-1] = _blurred(blended[sharp - grey :])
            factor = upload(self.factors, device).index_select(0, number_B[grey:auto])
            x_BCHW[grey:auto] = blended.add_((other - blended) * (1.0 - factor)).clamp_(0, 255).to(torch.uint8)
        if equal > auto:
            x_BCHW[auto:equal] = _of_full_contrast(x_BCHW[auto:equal].float()).to(torch.uint8)
        if end > equal:
            x_BCHW[equal:end] = equalize(x_BCHW[equal:end])
        return x_BCHW.index_select(0, back_B)


def _blurred(x_BCHW: Tensor) -> Tensor:
    """The inner pixels, each averaged with its neighbours, which weigh a fifth of it, and rounded."""
    around = F.avg_pool2d(x_BCHW, 3, stride=1) * 9
    return ((around + 4 * x_BCHW[..., 1:-1, 1:-1]) / 13).round_()


def _of_full_contrast(x_BCHW: Tensor) -> Tensor:
    """Every channel of every image stretched to 0 to 255; a channel with a single value stays."""
    low, high = x_BCHW.amin((2, 3), keepdim=True), x_BCHW.amax((2, 3), keepdim=True)
    stretched = (x_BCHW - low) / ((high - low) * (1.0 / 255))
    return torch.where(high == low, x_BCHW, stretched.clamp(0, 255))


# -- by name ----------------------------------------------------------------------------------------------------------

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
    """The augmentation with options `black` and `white`, if not configured, set to the data set's normalised values."""
    parameters = AUGMENTATIONS.options_of(choice.name)
    # Inputs that are not normalised have no colours.
    named = zip(COLOURS, colours, strict=True)
    colours_by_name = {name: list(value) for name, value in named if name in parameters and value}
    configured = {name: value for name, value in choice.options if value is not None}
    return (
        replace(choice, options=tuple(sorted({**colours_by_name, **configured}.items()))) if colours_by_name else choice
    )


def augmentation(choice: ComponentSpec) -> Augmentation | None:
    """The chosen augmentation, built-in or the user's own; None for `none`."""
    return None if choice == NO_AUGMENTATION else AUGMENTATIONS.make(choice)


TRIED_SAMPLES = 4
"""Number of training samples on which augmentation and objective are tested before anything is written."""


def tried_samples(dataset: Dataset) -> tuple[Tree, Tree]:
    """The first training samples, on which code is tested before a run begins."""
    return dataset.tensors("train", np.arange(min(TRIED_SAMPLES, dataset.num_samples("train"))))


def check_augmentation(choice: ComponentSpec, inputs: Tree) -> None:
    """Raises PluginError for an unknown augmentation, or one that changes the shape or dtype of this batch.

    Also raises PluginError for values that are not finite, and ValueError if the batch does not hold images.
    """
    augment = augmentation(choice)
    if augment is None:
        return
    x_B = single(inputs, f"data.augment={choice.name}")
    if not is_import_path(choice.name):
        if choice.name == "noise_shift":
            augment(x_B.clone(), torch.Generator().manual_seed(0))
        elif x_B.dim() != 4:
            raise ValueError(f"data.augment={choice.name} is for images: the data set has none; use none")
        elif choice.name == RANDAUGMENT:
            options = {**dict.fromkeys(COLOURS), **dict(choice.options)}
            _check_pixels(x_B, *(options[colour] for colour in COLOURS))
        return
    result = augment(x_B.clone(), torch.Generator().manual_seed(0))
    if not isinstance(result, Tensor) or result.shape != x_B.shape or result.dtype != x_B.dtype:
        described = f"{tuple(result.shape)} of {result.dtype}" if isinstance(result, Tensor) else repr(result)[:60]
        raise PluginError(
            f"augmentation {choice.name!r} makes {described} of a batch of {tuple(x_B.shape)} of {x_B.dtype}: "
            "it must keep shape and type"
        )
    if result.is_floating_point() and not bool(torch.isfinite(result).all()):
        raise PluginError(f"augmentation {choice.name!r} gives values that are not finite")
