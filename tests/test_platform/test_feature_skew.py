"""Feature skew: noise that grows from client to client (Li et al. 2022) and turned images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.platform.data.artefact import AnyArray
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.feature_skew import angle_of, noise_variance, original_of, skewed_dataset, skewed_inputs
from fedloom.platform.data.federated import FederatedData
from fedloom.platform.data.partition import prepare_partition
from fedloom.platform.data.prepare import prepare_dataset


def opened(cache: Path, seed: int = 3, **changes: Any) -> FederatedData:
    config = DataConfig(cache=str(cache), num_clients=8, **{"partition": "iid", **changes})
    dataset = skewed_dataset(config, Dataset.open(prepare_dataset(config)), seed)
    return FederatedData.open(dataset.path, prepare_partition(config, dataset, seed))


def pixels(data: FederatedData, client: int, split: str) -> AnyArray:
    """The client's images, with values from 0 to 1."""
    part = data.partition.part(split)
    return data.dataset.stored(part, data.indices(client, split))[0].numpy().astype(np.float64) / 16


def test_noise_grows_with_the_client() -> None:
    assert [noise_variance(0.1, client, 4) for client in range(4)] == pytest.approx([0.025, 0.05, 0.075, 0.1])


@pytest.mark.parametrize("test_share", [None, 0.2])
def test_every_client_has_its_noise_in_all_of_its_samples(tmp_path: Path, test_share: float | None) -> None:
    options: dict[str, Any] = {"validation_share": 0.2, "test_share": test_share}
    plain, noisy = opened(tmp_path, **options), opened(tmp_path, noise=0.04, **options)
    with plain.reading_test(), noisy.reading_test():
        for client in range(8):
            for split in ("train", "validation", "test"):
                assert np.array_equal(plain.indices(client, split), noisy.indices(client, split))
                noise = pixels(noisy, client, split) - pixels(plain, client, split)
                assert noise.var() == pytest.approx(0.04 * (client + 1) / 8, rel=0.15)
                assert abs(noise.mean()) < 0.02
        # The central test samples are the clients'; those of nobody stay as they are.
        central = (noisy.central("test").tensors()[0] != plain.central("test").tensors()[0]).any()
        assert bool(central) == (test_share is None)
    assert (noisy.dataset.mean, noisy.dataset.std) == (plain.dataset.mean, plain.dataset.std)
    assert noisy.partition.generator["noise"] == 0.04
    assert original_of(noisy.dataset.path) == plain.dataset.hash
    assert original_of(plain.dataset.path) is None
    assert noisy.partition_hash != plain.partition_hash
    assert noisy.client(7, "train")[0].dtype == plain.client(7, "train")[0].dtype


def test_an_image_is_turned_by_its_clients_angle() -> None:
    x = np.zeros((3, 1, 3, 3), dtype=np.uint8)
    x[:, 0, 0, 1] = 9
    config = DataConfig(num_clients=2, rotation=180.0)
    turned = skewed_inputs(config, x, "train", np.arange(3), np.array([0, -1, 1]), np.ones((1, 1, 1)), seed=1)
    angles = [angle_of(180.0, client, seed=1) for client in range(2)]
    assert angles[0] != angles[1]
    assert np.array_equal(turned[1], x[1]), "a sample that no client has"
    assert turned.dtype == np.uint8
    for image, degrees in zip(turned[[0, 2], 0], angles, strict=True):  # counter-clockwise from the top
        row, column = np.average(np.argwhere(image > 0), axis=0, weights=image[image > 0]) - 1
        # Bilinear weights pull the centre a little to the nearest pixels.
        assert np.degrees(np.arctan2(-column, -row)) == pytest.approx(degrees, abs=15)


def test_a_skewed_data_set_is_written_once_per_seed_and_strength(tmp_path: Path) -> None:
    first = opened(tmp_path, rotation=45.0)
    again = opened(tmp_path, rotation=45.0)
    assert again.dataset.path == first.dataset.path
    again.dataset.verify()
    others = [opened(tmp_path, rotation=30.0), opened(tmp_path, rotation=45.0, seed=4), opened(tmp_path, noise=0.1)]
    assert len({data.dataset.hash for data in (first, *others)}) == 4
    (elsewhere,) = [opened(tmp_path / "elsewhere", rotation=45.0)]
    assert (elsewhere.dataset.hash, elsewhere.partition_hash) == (first.dataset.hash, first.partition_hash)


def test_what_cannot_be_skewed_is_one_line(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.npz"
    np.savez(numbers, x=np.random.default_rng(0).normal(0, 5, (60, 4)), y=np.arange(60) % 3)
    options: dict[str, Any] = {"dataset": "npz", "options": {"path": str(numbers)}}
    with pytest.raises(ValueError, match=r"data.rotation is for images \(C, H, W\): npz has samples of \(4,\)"):
        opened(tmp_path, rotation=10.0, **options)
    plain, noisy = (opened(tmp_path, noise=noise, **options) for noise in (None, 1.0))
    noise = (noisy.client(7, "train")[0] - plain.client(7, "train")[0]).numpy()
    assert noise.std() == pytest.approx(1.0, abs=0.35), "in deviations of the inputs"
