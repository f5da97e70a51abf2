"""Cutout and RandAugment, and augmentations of single stages."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.platform.data.augment import (
    Operators,
    augmentation,
    check_augmentation,
    coloured,
    crop_flip,
    crop_flip_cutout,
    cut_out,
)
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.prepare import prepare_dataset
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.training_config import TrainingConfig, augmentation_of, own_augmentation, rules_of
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.plugins import ComponentSpec

RANDOM = "crop_flip_randaugment_cutout"


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def reference_cutout(x: Tensor, generator: torch.Generator, length: int) -> Tensor:
    """One pixel at a time."""
    B, _, H, W = x.shape
    rows = torch.randint(0, H, (B, 1), generator=generator).flatten().tolist()
    columns = torch.randint(0, W, (B, 1), generator=generator).flatten().tolist()
    out = x.clone()
    for b in range(B):
        for h in range(H):
            for w in range(W):
                top, left = rows[b] - length // 2, columns[b] - length // 2
                if top <= h < top + length and left <= w < left + length:
                    out[b, :, h, w] = 0
    return out


@pytest.mark.parametrize("length", [1, 4, 5, 30])
def test_cutout_equals_the_slow_reference(length: int) -> None:
    x = torch.arange(5 * 3 * 8 * 9, dtype=torch.float32).view(5, 3, 8, 9) + 1
    assert torch.equal(cut_out(x, seeded(1), length), reference_cutout(x, seeded(1), length))


def test_cutout_follows_crop_and_flip() -> None:
    x = torch.randn(6, 3, 32, 32, generator=seeded(9))
    generator = seeded(2)
    expected = cut_out(crop_flip(x, generator), generator, 16)
    assert torch.equal(crop_flip_cutout(x, seeded(2)), expected)
    removed = (crop_flip_cutout(torch.ones(400, 1, 32, 32), seeded(3), length=16) == 0).double().mean().item()
    # A 16 x 16 square whose centre is uniform covers (.4375)^2 of 32 x 32 on average, 12 of 16 per axis being inside.
    assert removed > (15.99 / 32 * 12 / 16) ** 2


@pytest.fixture
def images(tmp_path: Path) -> tuple[Dataset, Tensor]:
    generator = np.random.default_rng(0)
    parts = {f"{part}_x": generator.integers(0, 256, (40, 3, 12, 12)).astype(np.uint8) for part in ("train", "test")}
    np.savez(tmp_path / "images.npz", **parts, train_y=np.arange(40) % 4, test_y=np.arange(40) % 4)
    config = DataConfig(dataset="npz", cache=str(tmp_path / "cache"), options={"path": str(tmp_path / "images.npz")})
    dataset = Dataset.open(prepare_dataset(config))
    return dataset, dataset.tensors("train", np.arange(8))[0]


MOVING = ["ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"]
BY_VALUE = ["Identity", "Brightness", "Posterize", "Solarize"]
BLENDS, BY_IMAGE = ["Color", "Contrast", "Sharpness"], ["AutoContrast", "Equalize"]
OPERATIONS = [
    *((name, sign) for names in (MOVING, BY_VALUE) for sign in (1, -1) for name in names),
    *((name, sign) for name in (*BLENDS, *BY_IMAGE) for sign in (1, -1)),
]


@pytest.mark.parametrize("magnitude", [9, 30])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_operation_is_that_of_torchvisions_randaugment(channels: int, magnitude: int) -> None:
    """Each image of a batch changes as torchvision changes it alone."""
    from torchvision.transforms.v2 import RandAugment  # three seconds, which not every worker has to take

    x = torch.randint(0, 256, (len(OPERATIONS), channels, 9, 14), generator=seeded(5)).to(torch.uint8)
    theirs, space = RandAugment(2, magnitude), RandAugment._AUGMENTATION_SPACE
    expected = []
    for image, (name, sign) in zip(x, OPERATIONS, strict=True):
        levels, signed = space[name]
        strengths = levels(31, 9, 14)
        strength = 0.0 if strengths is None else float(strengths[magnitude]) * (sign if signed else 1)
        fill: dict[Any, Any] = {Tensor: None}
        expected.append(theirs._apply_image_or_video_transform(image, name, strength, "nearest", fill))
    drawn = torch.randperm(len(OPERATIONS), generator=seeded(6))
    result = Operators.of(magnitude, 9, 14).applied(x[drawn], drawn)
    for index, image in zip(drawn.tolist(), result, strict=True):
        difference = (image.int() - expected[index].int()).abs()
        assert difference.max() <= (1 if OPERATIONS[index][0] in BLENDS else 0), OPERATIONS[index]
        assert (difference > 0).float().mean() < 0.05, "blends round in another order"


def test_randaugment_works_on_the_pixels(images: tuple[Dataset, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, x = images
    seen: list[Tensor] = []

    def kept(_: Operators, pixels: Tensor, drawn: Tensor) -> Tensor:
        assert len(drawn) == len(pixels)
        seen.append(pixels)
        return pixels

    choice = coloured(ComponentSpec(RANDOM), dataset.colours)
    monkeypatch.setattr(Operators, "applied", kept)
    result = augmentation(choice)(x, seeded(4))  # type: ignore[misc]
    generator = seeded(4)
    moved = crop_flip(x, generator)
    torch.randint(0, 28, (2, 8), generator=generator)
    # An image that is not changed keeps its values, but that the padding (the mean colour) is rounded to a pixel.
    torch.testing.assert_close(result, cut_out(moved, generator, 16), atol=0.5 / 255 / min(dataset.std), rtol=0)
    assert [(pixels.dtype, tuple(pixels.shape)) for pixels in seen] == [(torch.uint8, (8, 3, 12, 12))] * 2
    stored, _ = dataset.stored("train", np.arange(8))
    assert set(seen[0][0].flatten().tolist()) <= {*stored[0].flatten().tolist(), *range(110, 145)}


def test_randaugment_follows_its_generator_alone(images: tuple[Dataset, Tensor]) -> None:
    dataset, x = images
    augment = augmentation(coloured(ComponentSpec(RANDOM, (("magnitude", 20),)), dataset.colours))
    assert augment is not None
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = augment(x, seeded(5))
    assert torch.equal(torch.get_rng_state(), before), "torch's global generator is left as it was"
    torch.manual_seed(2)
    assert torch.equal(augment(x, seeded(5)), first)
    assert not torch.equal(augment(x, seeded(6)), first)
    assert first.shape == x.shape
    assert first.dtype == x.dtype
    black, white = (torch.tensor(colour).view(-1, 1, 1) for colour in dataset.colours)
    assert bool((first >= black - 1e-5).all())
    assert bool((first <= white + 1e-5).all())


def test_colours_are_those_of_the_data_set(images: tuple[Dataset, Tensor]) -> None:
    dataset, _ = images
    stored = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 12, 12)
    expected = dataset.normalised(stored)[:, :, 0, 0].tolist()
    assert np.allclose(dataset.colours, expected, atol=1e-6)
    assert coloured(ComponentSpec("crop_flip"), dataset.colours) == ComponentSpec("crop_flip")
    own = dict(coloured(ComponentSpec(RANDOM, (("black", [0.0]), ("white", None))), dataset.colours).options)
    assert own["black"] == [0.0], "what is given stays"
    assert own["white"] == dataset.colours[1]


def test_features_have_no_pixels() -> None:
    with pytest.raises(ValueError, match="needs images of pixels: the data set has none"):
        check_augmentation(coloured(ComponentSpec(RANDOM), ([], [])), torch.zeros(2, 3, 8, 8))


def test_numbers_far_from_black_and_white_are_no_pixels() -> None:
    values = torch.linspace(0, 255, 2 * 64).view(2, 1, 8, 8)
    normalised = (values - 127.5) / 74
    with pytest.raises(
        ValueError, match=r"takes pixels from 0 \(black\) to 1 \(white\), .* from 0 to 255: bring images"
    ):
        check_augmentation(coloured(ComponentSpec(RANDOM), ([-127.5 / 74], [-126.5 / 74])), normalised)
    check_augmentation(coloured(ComponentSpec(RANDOM), ([-127.5 / 74], [127.5 / 74])), normalised)


# -- per stage --------------------------------------------------------------------------------------------------------


def options(**changes: Any) -> TrainingConfig:
    return TrainingConfig(**changes)


@pytest.fixture
def world(tmp_path: Path) -> World:
    config = RunConfig()
    config.data = DataConfig(cache=str(tmp_path), train_samples=80, test_samples=20, num_clients=4, augment="crop_flip")
    config.space.name, config.tiers.count = "cnn_digits", 1
    return build_world(config)


def test_a_stage_has_its_own_augmentation_or_the_datas(world: World) -> None:
    assert augmentation_of(world, options()) == ComponentSpec("crop_flip")
    assert augmentation_of(world, options(augment="none")) == ComponentSpec("none")
    cut = options(augment="crop_flip_cutout", options={"length": 3, "server_lr": 0.5}, server="fedavgm")
    assert augmentation_of(world, cut) == ComponentSpec("crop_flip_cutout", (("length", 3),))
    assert dict(augmentation_of(world, options(augment=RANDOM)).options)["black"] == world.data.dataset.colours[0]


def test_the_data_sets_options_are_those_of_a_stages_augmentation_too(world: World) -> None:
    data = DataConfig("speech_commands", options={"features": "slaney", "length": 3}, augment="crop_flip_cutout")
    world = replace(world, config=replace(world.config, data=data))
    assert dict(augmentation_of(world, options(augment="noise_shift")).options)["features"] == "slaney"
    given = options(augment="noise_shift", options={"features": "htk"})
    assert dict(augmentation_of(world, given).options)["features"] == "htk"
    other = options(augment="crop_flip_cutout")
    assert augmentation_of(world, other) == ComponentSpec("crop_flip_cutout"), "length is for the data's augmentation"


def test_options_of_the_augmentation_stand_among_the_stages() -> None:
    given = options(augment="crop_flip_cutout", options={"length": 3})
    assert own_augmentation(given, {}) == ComponentSpec("crop_flip_cutout", (("length", 3),))
    rules_of(given, "method.train")
    with pytest.raises(ValueError, match=r"method.train.options.lenght: not an option of .*did you mean 'length'"):
        rules_of(options(augment="crop_flip_cutout", options={"lenght": 3}), "method.train")
    with pytest.raises(ValueError, match=r"method.train.options.length: not an option"):
        rules_of(options(options={"length": 3}), "method.train")
    with pytest.raises(ValueError, match=r"method.train.augment: unknown augmentation 'cutout'"):
        rules_of(options(augment="cutout"), "method.train")


def test_a_stages_augmentation_has_to_fit_the_data() -> None:
    with pytest.raises(ValueError, match="is for images: the data set has none"):
        check_augmentation(ComponentSpec("crop_flip_cutout"), torch.zeros(2, 7))
