import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.image_files import CINIC_CLASSES, FolderSource, find_cinic
from fedloom.platform.data.partition import Partition, prepare_partition
from fedloom.platform.data.prepare import prepare_dataset
from fedloom.platform.data.registry import find_source


def encoded(seed: int, mode: str = "RGB", size: int = 32) -> bytes:
    shape = (size, size, 3) if mode == "RGB" else (size, size)
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8), mode).save(file, format="PNG")
    return file.getvalue()


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8).transpose(2, 0, 1)


def fake_cinic(root: Path, name: str = "CINIC-10", per_class: int = 3) -> Path:
    """Writes a small data set in the published layout, files in no order; image i of class c has seed 10 c + i."""
    for part in ("train", "valid", "test"):
        for c, label in enumerate(CINIC_CLASSES):
            folder = root / name / part / label
            folder.mkdir(parents=True)
            for i in reversed(range(per_class)):
                (folder / f"cifar10-{part}-{i}.png").write_bytes(encoded(10 * c + i))
    return root / name


def config(root: Path, **options: object) -> DataConfig:
    return DataConfig(dataset="cinic10", root=str(root), cache=str(root / "cache"), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["CINIC-10", "cinic10"])
def test_images_are_in_order_of_class_and_file_name(tmp_path: Path, name: str) -> None:
    fake_cinic(tmp_path, name)
    source = find_source(config(tmp_path))
    assert isinstance(source, FolderSource)
    assert source.class_names == CINIC_CLASSES == tuple(sorted(CINIC_CLASSES))
    assert source.labels("train").tolist() == [c for c in range(10) for _ in range(3)]
    images = source.inputs("test", np.array([29, 0, 4]))
    assert np.array_equal(images, np.stack([pixels(92), pixels(0), pixels(11)]))


def test_grey_images_have_three_equal_channels(tmp_path: Path) -> None:
    folder = fake_cinic(tmp_path)
    (folder / "train" / "cat" / "cifar10-train-1.png").write_bytes(encoded(5, "L"))
    grey = find_source(config(tmp_path)).inputs("train", np.array([10]))[0]
    assert np.array_equal(grey[0], grey[1])
    assert np.array_equal(grey[0], np.random.default_rng(5).integers(0, 256, (32, 32), dtype=np.uint8))


def test_it_is_prepared_and_partitioned_without_its_validation_folder(tmp_path: Path) -> None:
    folder = fake_cinic(tmp_path, per_class=4)
    for file in (folder / "valid").rglob("*.png"):
        file.write_bytes(b"never read")
    options = config(tmp_path, num_clients=5, train_samples=30)
    dataset = Dataset.open(prepare_dataset(options))
    assert (dataset.kind, dataset.input_shape, dataset.num_classes) == ("image", (3, 32, 32), 10)
    assert (dataset.num_samples("train"), dataset.num_samples("test")) == (30, 40)
    assert np.bincount(dataset.labels("train")).tolist() == [3] * 10
    assert Partition.open(prepare_partition(options, dataset, 0), dataset).sizes("train").tolist() == [5] * 5


def test_the_identity_follows_names_and_sizes_and_not_the_place(tmp_path: Path) -> None:
    first, second = fake_cinic(tmp_path / "a"), fake_cinic(tmp_path / "b", "cinic10")

    def identity(folder: Path) -> object:
        source = find_cinic(folder.parent)
        assert source is not None
        return source.identity()

    same = identity(first)
    assert identity(second) == same
    (second / "valid" / "cat" / "cifar10-valid-0.png").unlink()
    assert identity(second) == same
    file = second / "test" / "dog" / "cifar10-test-2.png"
    file.rename(file.with_name("cifar10-test-3.png"))
    assert identity(second) != same
    with (first / "train" / "ship" / "cifar10-train-0.png").open("ab") as image:
        image.write(b"\0")
    assert identity(first) not in (same, identity(second))


def remove_class(folder: Path) -> None:
    for file in (folder / "test" / "truck").iterdir():
        file.unlink()
    (folder / "test" / "truck").rmdir()


def empty_class(folder: Path) -> None:
    for file in (folder / "train" / "bird").iterdir():
        file.rename(file.with_suffix(".part"))


def rename_part(folder: Path) -> None:
    (folder / "test").rename(folder / "tests")


def add_class(folder: Path) -> None:
    (folder / "train" / "boat").mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_class, r"test/truck: not found; CINIC-10 has one folder per class"),
        (empty_class, r"train/bird: has no .png files"),
        (rename_part, r"CINIC-10/test: not found; CINIC-10 has the folders train and test"),
        (add_class, r"train/boat: not a class of CINIC-10; expected airplane, .*, truck$"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(fake_cinic(tmp_path, per_class=1))
    with pytest.raises(ValueError, match=message) as error:
        prepare_dataset(config(tmp_path))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "cache").exists()


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    image = fake_cinic(tmp_path, per_class=1) / "train" / "frog" / "cifar10-train-0.png"
    image.write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"train/frog/cifar10-train-0.png is not an image"):
        prepare_dataset(config(tmp_path))
    image.write_bytes(encoded(0, size=28))
    with pytest.raises(ValueError, match=r"cifar10-train-0.png has shape \(28, 28, 3\); expected \(32, 32, 3\)"):
        prepare_dataset(config(tmp_path))


def test_a_missing_data_set_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cinic10 not found under .*CINIC-10/ or cinic10/.*FEDLOOM_DATA") as error:
        find_source(config(tmp_path))
    assert "data.download" not in str(error.value)
    with pytest.raises(ValueError, match=r"data.download=true fetches CIFAR and torchvision"):
        find_source(config(tmp_path, download=True))
