"""Preparation: from a published data set to memory-mappable arrays in the cache, once."""

from pathlib import Path

import numpy as np

from fedloom.platform.data.artefact import (
    FORMAT,
    AnyArray,
    ByteArray,
    Fields,
    IntArray,
    atomic_folder,
    hash_of,
    write_artefact,
)
from fedloom.platform.data.config import DataConfig, cache_root, check
from fedloom.platform.data.dataset import MANIFEST, PARTS, Dataset
from fedloom.platform.data.sources import FIXED_SEED, Source, find_source
from fedloom.platform.data.stratify import stratified_rows
from fedloom.platform.seeding import stream

KEY_LENGTH = 16
CHUNK = 4096


def prepare_dataset(config: DataConfig, *, verify: bool = False) -> Path:
    """The folder of the prepared data set; written if it is not there yet.

    The folder's name depends on all that determines the content: the bytes of the originals and the sub-samples.
    `verify` reads all arrays of a folder that was there and compares their hashes (sizes are always compared).
    Raises ValueError for bad options, missing or foreign originals, and a damaged cache.
    """
    check(config)
    source = find_source(config)
    identity = {
        "format": FORMAT,
        "source": source.identity(),
        "train_samples": config.train_samples,
        "test_samples": config.test_samples,
    }
    folder = cache_root(config) / f"{config.dataset}-{hash_of(identity)[:KEY_LENGTH]}"
    if not folder.is_dir():
        _write(folder, config, source)
    dataset = Dataset.open(folder)
    if verify:
        dataset.verify()
    return folder


def _write(folder: Path, config: DataConfig, source: Source) -> None:
    arrays: dict[str, AnyArray] = {}
    for part, samples in zip(PARTS, (config.train_samples, config.test_samples), strict=True):
        y = source.labels(part)
        rows = _rows(config.dataset, part, y, samples)
        arrays[f"{part}_x"] = np.ascontiguousarray(source.images(part, rows))
        arrays[f"{part}_y"] = y[rows]
    mean, std = mean_and_std(arrays["train_x"], source.scale)
    fields: Fields = {
        "name": config.dataset,
        "num_classes": len(source.class_names),
        "class_names": list(source.class_names),
        "scale": source.scale,
        "mean": mean,
        "std": std,
        "source": source.identity(),
    }
    with atomic_folder(folder) as temporary:
        write_artefact(temporary, MANIFEST, fields, arrays)


def _rows(dataset: str, part: str, labels: IntArray, samples: int | None) -> IntArray:
    if samples is None or samples == len(labels):
        return np.arange(len(labels))
    if samples > len(labels):
        raise ValueError(f"data.{part}_samples={samples}: {dataset} has {len(labels)} {part} samples; ask for fewer")
    return stratified_rows(labels, samples, stream(FIXED_SEED, "sub-sample", dataset, part))


def mean_and_std(x_NCHW: ByteArray, scale: int) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel of the values divided by `scale`.

    Summed in integers, hence exact and the same on every machine. A constant channel has standard deviation 1.
    """
    n = x_NCHW.shape[0] * x_NCHW.shape[2] * x_NCHW.shape[3]
    mean, std = [], []
    for histogram in _histograms(x_NCHW).tolist():
        total = sum(value * count for value, count in enumerate(histogram))
        squares = sum(value * value * count for value, count in enumerate(histogram))
        variance = (n * squares - total * total) / (n * n)
        mean.append(total / (n * scale))
        std.append(variance**0.5 / scale if variance > 0 else 1.0)
    return mean, std


def _histograms(x_NCHW: ByteArray) -> IntArray:
    counts = np.zeros((x_NCHW.shape[1], 256), dtype=np.int64)
    # In chunks: bincount widens its input to eight bytes per value.
    for start in range(0, len(x_NCHW), CHUNK):
        for channel in range(x_NCHW.shape[1]):
            counts[channel] += np.bincount(x_NCHW[start : start + CHUNK, channel].ravel(), minlength=256)
    return counts
