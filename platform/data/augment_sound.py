"""Augmentation of sounds as mel-frequency cepstral coefficients: background noise and a shift in time.

The coefficients (see `speech`) are an orthonormal transform of the mel bands' decibels, so that noise can be added to
the bands' power while clients train: no waveform is kept, and no copy of a clip can be in another split than the clip.
What is lost is the phase: powers of sound and noise are added, as they are on average. 40 coefficients of 128 bands
give back a smoothed spectrum: mixing recorded noise into 40 words (a share of up to .1, as below) changes their
coefficients by 22 in the root mean square, and this way by the same up to an error of 2.5.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from fedloom.platform.settings import OneOf, Range

OF_ALL = {"rate": 8_000, "coefficients": 40, "window": 320, "hop": 160}
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "htk": {**OF_ALL, "fft": 400, "mels": 128, "scale": "htk", "resampler": "windowed sinc"},
    "slaney": {**OF_ALL, "mels": 40, "resampler": "soxr_hq"},
}
"""What features are computed with: samples per second, and samples per window and hop at that rate."""
COEFFICIENTS, TOP_HZ = 40, 4000.0
LOWEST_HZ = 50.0
"""Below it noise does not get louder: microphones do not hear what a band of a few hertz of brown noise would hold."""
LEAST_POWER, TOP_DB = 1e-10, 80.0
"""As in librosa's decibels: the least power, and the range below the loudest band of a clip."""
COLOURS = 2.0
"""Noises lie between white (0) and brown (2): their power falls as 1 / f^colour."""
FLUCTUATION = 0.5
"""Standard deviation of the logarithm of a noise's power from frame to frame and band to band."""

FEATURES_OF_SOUND = Annotated[
    str, OneOf(tuple(FEATURES)), "speech: htk (128 mel bands, FedorAS' code) or slaney (40 bands)"
]
FRAMES = Annotated[int, Range(least=0, most=1000), "noise_shift: frames by which a clip moves at most; one is 20 ms"]
NORMALISED = Range(least=-1e6, most=1e6)
DECIBELS = Annotated[float, Range(least=-40, most=120), "noise_shift: decibels of the clip above the noise"]


@cache
def transform(mels: int) -> Tensor:
    """The first rows of the orthonormal cosine transform (40, mels), DCT-II."""
    k, n = np.arange(COEFFICIENTS)[:, None], np.arange(mels)[None]
    matrix = np.sqrt(2 / mels) * np.cos(np.pi * k * (2 * n + 1) / (2 * mels))
    matrix[0] /= np.sqrt(2)
    return torch.tensor(matrix, dtype=torch.float32)


@cache
def centres_hz(features: str) -> Tensor:
    """The bands' centres, on the HTK's mel scale, or on Slaney's: linear up to 1000 Hz, then logarithmic."""
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
    """The coefficients (B, 40, T) of sounds to whose mel bands these powers (B, mels, T) are added."""
    matrix = transform(noise_BMT.shape[1]).to(mfcc_BMT.device)
    power = 10 ** (torch.matmul(matrix.T, mfcc_BMT) / 10) + noise_BMT
    decibels = 10 * power.clamp_min(LEAST_POWER).log10()
    loudest = decibels.amax(dim=(1, 2), keepdim=True)
    return torch.matmul(matrix, torch.maximum(decibels, loudest - TOP_DB))


def shifted(x_BMT: Tensor, by_B: Tensor) -> Tensor:
    """The frames moved by so many places (later if positive); the first or last frame fills the gap."""
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
    probability: Annotated[float, Range(least=0, most=1), "noise_shift: share of the clips with noise"] = 0.8,
    black: Annotated[list[float] | None, NORMALISED, "noise_shift: normalised 0; null: the data set's"] = None,
    white: Annotated[list[float] | None, NORMALISED, "noise_shift: normalised 1; null: the data set's"] = None,
) -> Tensor:
    """Moves each clip (1, 40, T) by up to `shift` frames, and adds noise of a random colour to most.

    The noise is `loudest` to `quietest` decibels below the clip's mean power. Source: the usual augmentation of Speech
    Commands (Warden 2018), with which the authors of FedorAS train: a shift of up to 100 ms, and noise in 80 % of the
    clips. They shift waveforms by single samples, fill up with zeros, and blend a share of 0 to .1 of a recording in.
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
    clean = shifted(x_BCMT[:, 0], moves.to(device))
    mfcc = (clean - black[0]) / unit
    chosen, colour, level = (row.view(-1, 1, 1).to(device) for row in drawn)
    profile = (centres_hz(features).clamp_min(LOWEST_HZ).to(device) / 1000).view(1, -1, 1) ** (-COLOURS * colour)
    around_one = (FLUCTUATION * fluctuation.to(device) - FLUCTUATION**2 / 2).exp()
    profile = profile / profile.mean(dim=1, keepdim=True) * around_one
    power = (10 ** (torch.matmul(transform(mels).T.to(device), mfcc) / 10)).mean(dim=(1, 2), keepdim=True)
    below = loudest + (quietest - loudest) * level
    noise = power * 10 ** (-below / 10) * profile
    mixed = with_noise(mfcc, noise) * unit + black[0]
    # A clip without noise keeps its bits, not what two transforms make of them.
    return torch.where(chosen < probability, mixed, clean).unsqueeze(1)
