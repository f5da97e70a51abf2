"""Noise and shifts of sounds as cepstral coefficients: against sound itself, by the law of the powers, and by bits."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import fft

from fedloom.platform.data.augment import (
    AUGMENTATIONS,
    centres_hz,
    check_augmentation,
    coloured,
    noise_shift,
    shifted,
    transform,
    with_noise,
)
from fedloom.platform.data.speech import RATE, mfcc
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.plugins import ComponentSpec

needs_librosa = pytest.mark.skipif(
    importlib.util.find_spec("librosa") is None, reason="needs librosa: pip install 'fedloom[speech]'"
)
BANDS = {"htk": 128, "slaney": 40}
SCALE = {"black": [0.25], "white": [0.35]}
"""Normalised values of 0 and 1: mean -2.5 and standard deviation 10."""


def clips(count: int = 6, frames: int = 51) -> torch.Tensor:
    """Normalised coefficients (count, 1, 40, frames) of bands of -40 to 0 dB."""
    decibels = torch.rand((count, 40, frames), generator=torch.Generator().manual_seed(1)) * 40 - 40
    return (torch.matmul(transform(40), decibels) * 0.1 + 0.25).unsqueeze(1)


@pytest.mark.parametrize("mels", BANDS.values())
def test_the_transform_is_scipys_and_orthonormal(mels: int) -> None:
    bands = np.random.default_rng(0).normal(size=(mels, 7))
    expected = fft.dct(bands, axis=0, type=2, norm="ortho")[:40]
    np.testing.assert_allclose(transform(mels).double().numpy() @ bands, expected, atol=1e-5)
    np.testing.assert_allclose(transform(mels) @ transform(mels).T, np.eye(40), atol=1e-6)


@needs_librosa
@pytest.mark.parametrize("features", BANDS)
def test_the_bands_are_librosas(features: str) -> None:
    import librosa

    expected = librosa.mel_frequencies(BANDS[features] + 2, fmin=0, fmax=4000, htk=features == "htk")[1:-1]
    np.testing.assert_allclose(centres_hz(features).numpy(), expected, rtol=1e-5)


def test_powers_are_added_band_by_band() -> None:
    mfcc_BMT = (clips()[:, 0] - 0.25) / 0.1
    noise = torch.rand(mfcc_BMT.shape, generator=torch.Generator().manual_seed(2)) * 1e-3
    found = with_noise(mfcc_BMT, noise)
    decibels = fft.idct(mfcc_BMT.double().numpy(), axis=1, type=2, norm="ortho")
    expected = fft.dct(10 * np.log10(10 ** (decibels / 10) + noise.double().numpy()), axis=1, type=2, norm="ortho")
    np.testing.assert_allclose(found, expected, atol=1e-3)


def spectrum(coefficients: np.ndarray, features: str) -> np.ndarray:
    """The bands' power, as far as the coefficients tell it."""
    rest = np.zeros((BANDS[features] - 40, *coefficients.shape[1:]))
    return np.asarray(10 ** (fft.idct(np.concatenate([coefficients, rest]), axis=0, type=2, norm="ortho") / 10))


@pytest.mark.slow
@needs_librosa
@pytest.mark.parametrize("features", BANDS)
def test_noise_in_the_bands_is_as_loud_as_noise_in_the_sound(features: str) -> None:
    """The mean over draws of the sum's power is the sum of the powers; the phase, which is lost, is noise around it."""
    rng = np.random.default_rng(3)
    t = np.arange(RATE) / RATE
    sound = (0.1 * np.sin(2 * np.pi * 440 * t) * (t > 0.3)).astype(np.float32)
    noises = [(0.01 * rng.normal(size=RATE)).astype(np.float32) for _ in range(20)]
    bands = [spectrum(mfcc(s, features), features) for s in noises]
    mixed = [spectrum(mfcc(sound + s, features), features) for s in noises]
    noise = torch.tensor(np.mean(bands, axis=0), dtype=torch.float32)
    added = with_noise(torch.from_numpy(mfcc(sound, features))[None], noise[None])
    decibels = 10 * np.log10(spectrum(added[0].numpy(), features))
    difference = decibels - 10 * np.log10(np.mean(mixed, axis=0))
    assert np.abs(difference).mean() < 1.0, "decibels"


def test_a_shift_moves_frames_and_repeats_the_first_or_the_last() -> None:
    x = torch.arange(5.0).expand(3, 2, 5)
    moved = shifted(x, torch.tensor([0, 2, -1]))
    assert moved[:, 1].tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 1, 2], [1, 2, 3, 4, 4]]


@pytest.mark.parametrize("features", BANDS)
def test_most_clips_get_noise_below_them_and_others_keep_their_bits(features: str) -> None:
    x, draw = clips(200), torch.Generator().manual_seed(4)
    noisy = noise_shift(x, draw, shift=0, quietest=20.0, loudest=10.0, features=features, **SCALE)
    same = (noisy == x).flatten(1).all(dim=1)
    assert 0.1 < same.float().mean() < 0.3

    def power(of: torch.Tensor) -> torch.Tensor:
        return (10 ** (torch.matmul(transform(BANDS[features]).T, (of[:, 0] - 0.25) / 0.1) / 10)).mean(dim=(1, 2))

    added = (power(noisy) / power(x) - 1)[~same]
    below = -10 * added.log10()
    assert below.min() > 8.0
    assert 10.0 < below.median() < 20.0
    if features == "slaney":  # of 128 bands 40 coefficients tell a smoothed spectrum, which lowers peaks
        assert below.max() < 21.0
    again = noise_shift(
        x, torch.Generator().manual_seed(4), shift=0, quietest=20.0, loudest=10.0, features=features, **SCALE
    )
    assert torch.equal(again, noisy)
    assert torch.equal(noise_shift(x, draw, shift=0, probability=0.0, **SCALE), x)


def test_shifts_are_up_to_the_given_number_of_frames() -> None:
    x = clips(300, frames=51)
    moved = noise_shift(x, torch.Generator().manual_seed(5), shift=2, probability=0.0, **SCALE)
    found = {by for i in range(300) for by in range(-3, 4) if torch.equal(moved[i], shifted(x[i], torch.tensor([by])))}
    assert found == {-2, -1, 0, 1, 2}


def test_the_data_sets_scale_is_given_and_other_data_are_refused(tiny_config: Callable[..., RunConfig]) -> None:
    chosen = coloured(ComponentSpec("noise_shift", (("features", "slaney"),)), ([0.25], [0.35]))
    assert dict(chosen.options) == {**SCALE, "features": "slaney"}
    check_augmentation(chosen, clips())
    assert AUGMENTATIONS.make(chosen)(clips(), torch.Generator().manual_seed(0)).shape == (6, 1, 40, 51)
    config = tiny_config()
    with pytest.raises(ValueError, match=r"^data.augment=noise_shift is for sounds as 40 cepstral coefficients, "):
        build_world(replace(config, data=replace(config.data, augment="noise_shift")))
