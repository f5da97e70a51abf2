import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.platform.data.artefact import (
    ABANDONED_AFTER_S,
    BLOCK_BYTES,
    atomic_folder,
    check_blocks,
    read_manifest,
    write_artefact,
    write_blocks,
)
from fedloom.platform.data.augment import crop_flip
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset, TestGuard, TestReadError
from fedloom.platform.data.partition import prepare_partition
from fedloom.platform.data.prepare import mean_and_std, mean_and_std_of_floats, prepare_dataset


def digits(cache: Path, **options: Any) -> DataConfig:
    return DataConfig(cache=str(cache), **{"train_samples": 100, "test_samples": 30, **options})


def test_mean_and_std_literal() -> None:
    x = np.array([[[[0, 2]], [[5, 5]]], [[[4, 2]], [[5, 5]]]], dtype=np.uint8)  # (2, 2, 1, 2)
    mean, std = mean_and_std(x, scale=4)
    assert mean == [0.5, 1.25]
    assert std == [pytest.approx(2**0.5 / 4), 1.0]


def test_mean_and_std_of_floats_literal() -> None:
    x = np.array([[1.0, 0.1], [3.0, 0.1]] * 500, dtype=np.float32)  # sums of .1 are rounded
    mean, std = mean_and_std_of_floats(x, scale=2)
    assert mean == [1.0, pytest.approx(0.05)]
    assert std == [0.5, 1.0]


def test_prepared_arrays_and_description(tmp_path: Path) -> None:
    folder = prepare_dataset(digits(tmp_path))
    assert folder.parent == tmp_path
    assert folder.name.startswith("digits-")
    x = np.load(folder / "train_x.npy", allow_pickle=False)
    assert (x.shape, x.dtype) == ((100, 1, 8, 8), np.uint8)
    assert np.load(folder / "test_y.npy", allow_pickle=False).dtype == np.int64
    description = json.loads((folder / "dataset.json").read_text())
    assert description["num_classes"] == 10
    assert description["mean"] == [pytest.approx((x / 16).mean())]
    assert description["std"] == [pytest.approx((x / 16).std())]
    assert str(tmp_path) not in (folder / "dataset.json").read_text()


def test_prepared_once_and_the_key_follows_the_content(tmp_path: Path) -> None:
    first = prepare_dataset(digits(tmp_path))
    written = (first / "train_x.npy").stat().st_mtime_ns
    assert prepare_dataset(digits(tmp_path, alpha=7.0, num_clients=3), verify=True) == first
    assert (first / "train_x.npy").stat().st_mtime_ns == written
    other = prepare_dataset(digits(tmp_path, train_samples=90))
    assert other != first
    assert Dataset.open(other).hash != Dataset.open(first).hash


def test_the_hash_does_not_depend_on_the_place(tmp_path: Path) -> None:
    one, two = (Dataset.open(prepare_dataset(digits(tmp_path / name))) for name in ("one", "two"))
    assert one.path.name == two.path.name
    assert one.hash == two.hash


def test_images_that_were_prepared_long_ago_are_found_again(tmp_path: Path) -> None:
    config = digits(tmp_path, num_clients=8)
    dataset = Dataset.open(prepare_dataset(config))
    assert dataset.path.name == "digits-a10398fd5ddd65b4"
    assert dataset.hash == "99802ff2cc9bc9fd84532bb2a00621980fcc6b1e40757459136e0b075a4fadd5"
    assert prepare_partition(config, dataset, seed=3).name == "digits-fb0e39172d5f1a0a"


def test_images_have_no_clients_of_their_own(tmp_path: Path) -> None:
    dataset = Dataset.open(prepare_dataset(digits(tmp_path)))
    assert (dataset.kind, dataset.client_names) == ("image", ())
    with pytest.raises(ValueError, match="digits has no clients of its own"):
        dataset.clients("train")


def test_more_samples_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.train_samples=2000: digits has 1438 train samples"):
        prepare_dataset(digits(tmp_path, train_samples=2000))
    assert list(tmp_path.iterdir()) == []


def test_changes_are_detected(tmp_path: Path) -> None:
    folder = prepare_dataset(digits(tmp_path))
    x = folder / "train_x.npy"
    whole = x.read_bytes()
    x.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    prepare_dataset(digits(tmp_path))  # the size is right: only a full check reads it
    with pytest.raises(ValueError, match=r"train_x.npy: SHA-256 differs"):
        prepare_dataset(digits(tmp_path), verify=True)
    x.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"train_x.npy: 6527 bytes, expected 6528"):
        prepare_dataset(digits(tmp_path))
    x.unlink()
    with pytest.raises(ValueError, match=r"train_x.npy: not found"):
        Dataset.open(folder)
    description = folder / "dataset.json"
    description.write_text(description.read_text().replace('"scale": 16', '"scale": 17'))
    with pytest.raises(ValueError, match=r"dataset.json: was changed"):
        Dataset.open(folder)
    description.write_text("{")
    with pytest.raises(ValueError, match=r"dataset.json: not valid JSON"):
        Dataset.open(folder)
    description.write_text('{"format": 99}')
    with pytest.raises(ValueError, match=r"dataset.json: expected format 1"):
        Dataset.open(folder)
    with pytest.raises(ValueError, match=r"dataset.json: not found"):
        Dataset.open(tmp_path / "nowhere")


def test_what_a_killed_preparation_leaves_is_not_taken_for_data(tmp_path: Path) -> None:
    target = prepare_dataset(digits(tmp_path / "elsewhere")).name
    old, young = (tmp_path / f".{target}.{name}.tmp" for name in ("old", "young"))
    for leftover in (old, young):
        leftover.mkdir()
        (leftover / "train_x.npy").write_bytes(b"half")
    long_ago = time.time() - 2 * ABANDONED_AFTER_S
    os.utime(old, (long_ago, long_ago))
    assert prepare_dataset(digits(tmp_path)).name == target
    assert not old.exists()
    assert young.exists()  # it may belong to a process that still writes


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail_halfway() -> None:
        with atomic_folder(tmp_path / "final") as temporary:
            (temporary / "half").write_text("x")
            raise KeyError

    with pytest.raises(KeyError):
        fail_halfway()
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_writers_wins(tmp_path: Path) -> None:
    final = tmp_path / "final"
    with atomic_folder(final) as slow:
        (slow / "who").write_text("slow")
        with atomic_folder(final) as quick:
            (quick / "who").write_text("quick")
    assert (final / "who").read_text() == "quick"
    assert list(tmp_path.iterdir()) == [final]


def test_many_at_once_prepare_one_data_set(tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(prepare_dataset(digits(tmp_path)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert list(tmp_path.iterdir()) == [found[0]]
    Dataset.open(found[0]).verify()


def flip(path: Path, place: int) -> None:
    """Changes a bit, and neither size nor shape."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("part", ["train_x", "train_y", "test_x"])
def test_a_changed_small_array_is_noticed_when_a_run_starts(part: str, tmp_path: Path) -> None:
    folder = prepare_dataset(digits(tmp_path))
    dataset = Dataset.open(folder)
    dataset.verify_blocks()
    (folder / "blocks.json").unlink()  # as an earlier version prepared it
    dataset.verify_blocks()
    flip(folder / f"{part}.npy", 150)
    with pytest.raises(ValueError, match=rf"{part}.npy: was changed after it was prepared; delete its folder and pre"):
        dataset.verify_blocks()
    with pytest.raises(ValueError, match=rf"{part}.npy: SHA-256 differs"):
        dataset.verify()


def test_of_a_large_array_blocks_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    arrays = {"a": np.arange(2**20, dtype=np.int64), "b": np.arange(9)}
    write_artefact(folder, "large.json", {}, arrays)
    manifest = read_manifest(folder / "large.json")
    check_blocks(folder, manifest)  # of an earlier version
    write_blocks(folder)
    check_blocks(folder, manifest)
    whole, size = (folder / "a.npy").read_bytes(), (folder / "a.npy").stat().st_size
    for place in (0, 100, BLOCK_BYTES - 1, size - BLOCK_BYTES, size - 1, (size - BLOCK_BYTES) // 31 * 7 + 100):
        flip(folder / "a.npy", place)
        with pytest.raises(ValueError, match=r"a.npy: was changed after it was prepared"):
            check_blocks(folder, manifest)
        (folder / "a.npy").write_bytes(whole)
    flip(folder / "blocks.json", 40)
    with pytest.raises(ValueError, match=r"blocks.json: was changed after it was written"):
        check_blocks(folder, manifest)


def test_tensors_are_normalised(tmp_path: Path) -> None:
    dataset = Dataset.open(prepare_dataset(DataConfig(dataset="synthetic", cache=str(tmp_path), train_samples=50)))
    rows = np.array([7, 3, 7])
    x, y = dataset.tensors("train", rows)
    raw = np.load(dataset.path / "train_x.npy")[rows].astype(np.float64)
    mean, std = (np.array(v)[:, None, None] for v in (dataset.mean, dataset.std))
    assert (x.shape, x.dtype, y.dtype) == ((3, 3, 32, 32), torch.float32, torch.int64)
    torch.testing.assert_close(x.double(), torch.from_numpy((raw / 255 - mean) / std), rtol=1e-5, atol=1e-5)
    assert y.tolist() == dataset.labels("train")[rows].tolist()
    everything, _ = dataset.tensors("train", np.arange(50))
    torch.testing.assert_close(everything.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(everything.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-4, rtol=0)
    empty, _ = dataset.tensors("test", np.array([], dtype=np.int64))
    assert empty.shape == (0, 3, 32, 32)
    with pytest.raises(ValueError, match="part=validation: must be one of train, test"):
        dataset.num_samples("validation")


def test_a_closed_guard_locks_the_test_part(tmp_path: Path) -> None:
    dataset = Dataset.open(prepare_dataset(digits(tmp_path)), TestGuard())
    assert dataset.num_samples("test") == 30
    with pytest.raises(TestReadError):
        dataset.labels("test")
    with pytest.raises(TestReadError):
        dataset.tensors("test", np.array([0]))


def reference_crop_flip(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One image and one pixel row at a time."""
    B, _, H, W = x.shape
    offsets = torch.randint(0, 9, (2, B), generator=generator)
    mirrored = torch.randint(0, 2, (B,), generator=generator)
    out = torch.zeros_like(x)
    for b in range(B):
        for h in range(H):
            for w in range(W):
                source_w = W - 1 - w if mirrored[b] else w
                row, column = h + int(offsets[0, b]) - 4, source_w + int(offsets[1, b]) - 4
                if 0 <= row < H and 0 <= column < W:
                    out[b, :, h, w] = x[b, :, row, column]
    return out


def test_augmentation_equals_the_slow_reference() -> None:
    x = torch.arange(6 * 2 * 8 * 9, dtype=torch.float32).view(6, 2, 8, 9) + 1
    quick = crop_flip(x, torch.Generator().manual_seed(3))
    assert torch.equal(quick, reference_crop_flip(x, torch.Generator().manual_seed(3)))
    assert not torch.equal(quick, crop_flip(x, torch.Generator().manual_seed(4)))


def test_augmentation_reaches_every_shift_and_both_mirrors_equally_often() -> None:
    x = torch.zeros(9720, 1, 16, 16)
    x[:, :, 8, 7] = 1
    moved = crop_flip(x, torch.Generator().manual_seed(0)).flatten(1).argmax(1)
    counts = torch.bincount(moved, minlength=256).view(16, 16)[4:13, :]
    # Rows 4..12; columns 3..11 as they are and 4..12 mirrored: 60 expected for each of the 162 cases.
    assert counts.sum() == 9720
    seen = counts[:, 3:13].double()
    expected = torch.full((9, 10), 120.0, dtype=torch.float64)
    expected[:, [0, -1]] = 60
    assert ((seen - expected) ** 2 / expected).sum() < 135  # chi-square, 89 degrees of freedom, p = 0.001
