"""What is larger than memory: samples are scored and prepared block by block, with the results of the whole at once."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedloom.platform.clients import evaluation
from fedloom.platform.clients.evaluation import READ_BYTES, batches_of, evaluate
from fedloom.platform.clients.objectives import TopK
from fedloom.platform.data import prepare
from fedloom.platform.data.artefact import AnyArray, IntArray, atomic_folder, write_array, write_artefact
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import MANIFEST, Dataset, StoredSamples
from fedloom.platform.data.image_files import find_folders
from fedloom.platform.data.prepare import prepare_dataset
from fedloom.platform.data.source import FIRST_PIECE, Source

SHAPE = (3, 32, 32)
IMAGES = 6000
"""18 MB as bytes, and 74 MB as floats."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A data set whose test part has many images; every hundredth is random."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("large") / "data"
    x = np.zeros((IMAGES, *SHAPE), dtype=np.uint8)
    x[::100] = rng.integers(0, 256, (len(x[::100]), *SHAPE), dtype=np.uint8)
    y = rng.integers(0, 10, IMAGES)
    fields = {"name": "large", "num_classes": 10, "class_names": list("0123456789"), "scale": 255}
    with atomic_folder(folder) as temporary:
        arrays = {"train_x": x[:1], "train_y": y[:1], "test_x": x, "test_y": y}
        write_artefact(temporary, MANIFEST, {**fields, "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.3, 0.2]}, arrays)
    return Dataset.open(folder)


class LargestTensor(TorchDispatchMode):
    """Takes down the bytes of the largest tensor of floats that an operation returns."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if isinstance(returned, Tensor) and returned.is_floating_point():
            self.nbytes = max(self.nbytes, returned.nbytes)
        return returned


def test_an_evaluation_holds_a_part_of_the_samples_and_gives_the_score_of_the_whole(large: Dataset) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 10)).eval()
    data = StoredSamples(large, "test", np.arange(IMAGES)[::-1])
    with LargestTensor() as largest:
        score = evaluate(net, data, TopK(k=3))
    assert READ_BYTES / 4 < largest.nbytes < READ_BYTES < 4 * IMAGES * np.prod(SHAPE)
    assert score == evaluate(net, data.tensors(), TopK(k=3)), "to the last bit"
    assert score.samples == IMAGES


@pytest.mark.parametrize("sizes", [None, [7, 1, 12]])
@pytest.mark.parametrize("read_bytes", [READ_BYTES, 8 * 3072 * 8, 1])
def test_batches_of_stored_samples_are_those_of_their_tensors(
    large: Dataset, sizes: list[int] | None, read_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "READ_BYTES", read_bytes)
    labels = torch.arange(10).flip(0)
    data = StoredSamples(large, "test", np.array([0, 300, 100, 5] * 5), label_map=labels)
    batches = list(batches_of(data, sizes))
    assert [len(y_B) for _, y_B in batches] == (sizes or [20])
    for (x_B, y_B), (x, y) in zip(batches, batches_of(data.tensors(), sizes), strict=True):
        assert torch.equal(x_B, x)
        assert torch.equal(y_B, y)
    assert torch.equal(data.labels, data.tensors()[1])
    assert data.labels.tolist() == [9 - y for y in large.labels("test")[data.indices].tolist()]
    assert list(batches_of(StoredSamples(large, "test", data.indices[:0]))) == []


# -- preparation ------------------------------------------------------------------------------------------------------


class Drawn(Source):
    """Images that are drawn when they are asked for: 48 kB each."""

    class_names = ("a", "b")
    scale = 255
    asked: list[int]

    def __init__(self, images: int) -> None:
        self.images, self.asked = images, []

    def identity(self) -> dict[str, Any]:
        return {"drawn": self.images}

    def labels(self, part: str) -> IntArray:
        return np.arange(self.images if part == "train" else 10) % 2

    def inputs(self, part: str, rows: IntArray) -> AnyArray:
        self.asked.append(len(rows))
        return np.broadcast_to((rows % 251).astype(np.uint8)[:, None, None, None], (len(rows), 3, 128, 128)).copy()


def test_the_memory_of_a_preparation_is_bounded_by_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Drawn(1000)  # 49 MB
    monkeypatch.setattr("fedloom.platform.data.source.PIECE_BYTES", 2**22)
    monkeypatch.setattr(prepare, "find_source", lambda _config: source)
    monkeypatch.setattr(prepare, "check", lambda _config: None)
    monkeypatch.setattr(prepare, "CHUNK_PIXELS", 2**17)
    tracemalloc.start()
    try:
        folder = prepare_dataset(DataConfig(cache=str(tmp_path)))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * 2**22
    assert source.asked[:3] == [FIRST_PIECE, 2**22 // (3 * 128 * 128), 2**22 // (3 * 128 * 128)]
    dataset = Dataset.open(folder)
    dataset.verify()
    x = np.load(folder / "train_x.npy", mmap_mode="r")
    assert x[:, 2, 5, 7].tolist() == [row % 251 for row in range(1000)]
    assert dataset.mean == pytest.approx([x[:, 0, 0, 0].mean() / 255] * 3)


@pytest.mark.parametrize("shape", [(0, 3), (5,), (7, 2, 3)])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "int64"])
def test_an_array_in_pieces_has_the_bytes_of_the_whole(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    np.save(tmp_path / "whole.npy", array)
    written = write_array(tmp_path / "pieces.npy", [array[:2], array[2:]], len(array))
    assert (tmp_path / "pieces.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
    np.testing.assert_array_equal(written, array)


def test_images_of_folders_are_the_same_in_pieces(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / "ab"[i % 2]).mkdir(exist_ok=True)
        Image.new("RGB", (4 + i, 5), (i, 2 * i, 3 * i)).save(tmp_path / "ab"[i % 2] / f"{i:02}.png")
    source = find_folders(tmp_path, 6, grey=False)
    rows = np.array([5, 0, 17, 2])
    whole = source.inputs("train", np.arange(24))
    assert [len(source.labels(part)) for part in ("train", "test")] == [24, 6]
    assert np.array_equal(source.inputs("train", rows), whole[rows])
    assert np.array_equal(np.concatenate(list(source.pieces("train", np.arange(24)))), whole)
    colours = [(i, 2 * i, 3 * i) for i in [*range(0, 30, 2), *range(1, 30, 2)]]
    assert [colours.index(tuple(image[:, 0, 0].tolist())) // 15 for image in whole] == source.labels("train").tolist()


def test_a_preparation_that_fails_between_pieces_leaves_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Drawn):
        def pieces(self, part: str, rows: IntArray) -> Iterator[AnyArray]:
            yield self.inputs(part, rows[:FIRST_PIECE])
            raise ValueError("image 64 is damaged")

    monkeypatch.setattr(prepare, "find_source", lambda _config: cast(Source, Failing(100)))
    monkeypatch.setattr(prepare, "check", lambda _config: None)
    with pytest.raises(ValueError, match="image 64"):
        prepare_dataset(DataConfig(cache=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []
