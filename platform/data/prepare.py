"""Preparation: from a published data set to memory-mappable arrays in the cache, once."""

from collections.abc import Callable, Iterator
from functools import partial
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
from fedloom.platform.data.config import TEXTS, DataConfig, cache_root, check
from fedloom.platform.data.dataset import MANIFEST, PARTS, Dataset
from fedloom.platform.data.sources import FIXED_SEED, Source, find_source, find_text
from fedloom.platform.data.stratify import stratified_rows, uniform_rows
from fedloom.platform.data.tokens import TokenSource, compact
from fedloom.platform.seeding import stream

KEY_LENGTH = 16
CHUNK = 4096


Content = tuple[Fields, dict[str, AnyArray]]
"""What is written: the manifest's fields and the arrays."""


def prepare_dataset(config: DataConfig, *, verify: bool = False) -> Path:
    """The folder of the prepared data set; written if it is not there yet.

    The folder's name depends on all that determines the content: the originals, the sub-samples, and for text the
    length of sequences.
    `verify` reads all arrays of a folder that was there and compares their hashes (sizes are always compared).
    Raises ValueError for bad options, missing or foreign originals, and a damaged cache.
    """
    check(config)
    if config.dataset in TEXTS:
        text = find_text(config)
        folder = _prepare(config, text.identity(), lambda: _tokens(config, text))
    else:
        source = find_source(config)
        folder = _prepare(config, source.identity(), lambda: _images(config, source))
    dataset = Dataset.open(folder)
    if verify:
        dataset.verify()
    return folder


def _prepare(config: DataConfig, source: Fields, make: Callable[[], Content]) -> Path:
    identity = {
        "format": FORMAT,
        "source": source,
        "train_samples": config.train_samples,
        "test_samples": config.test_samples,
    }
    folder = cache_root(config) / f"{config.dataset}-{hash_of(identity)[:KEY_LENGTH]}"
    if not folder.is_dir():
        fields, arrays = make()
        with atomic_folder(folder) as temporary:
            write_artefact(temporary, MANIFEST, {"name": config.dataset, **fields, "source": source}, arrays)
    return folder


def _images(config: DataConfig, source: Source) -> Content:
    arrays: dict[str, AnyArray] = {}
    for part, samples in _parts(config):
        y = source.labels(part)
        rows = _rows(config.dataset, part, len(y), samples, partial(stratified_rows, y))
        arrays[f"{part}_x"] = np.ascontiguousarray(source.images(part, rows))
        arrays[f"{part}_y"] = y[rows]
    mean, std = mean_and_std(arrays["train_x"], source.scale)
    fields: Fields = {
        "num_classes": len(source.class_names),
        "class_names": list(source.class_names),
        "scale": source.scale,
        "mean": mean,
        "std": std,
    }
    return fields, arrays


def _tokens(config: DataConfig, source: TokenSource) -> Content:
    arrays: dict[str, AnyArray] = {}
    for part, samples in _parts(config):
        whole = compact(source.sequences(part), len(source.vocabulary))
        rows = _rows(config.dataset, part, len(whole.y), samples, partial(uniform_rows, len(whole.y)))
        arrays[f"{part}_x"], arrays[f"{part}_y"] = whole.x[rows], whole.y[rows]
        if whole.client is not None:
            arrays[f"{part}_client"] = whole.client[rows]
    fields: Fields = {
        "kind": "tokens",
        "num_classes": len(source.vocabulary),
        "class_names": list(source.vocabulary),
        "client_names": list(source.client_names),
    }
    return fields, arrays


def _parts(config: DataConfig) -> Iterator[tuple[str, int | None]]:
    return zip(PARTS, (config.train_samples, config.test_samples), strict=True)


def _rows(
    dataset: str,
    part: str,
    num_samples: int,
    samples: int | None,
    draw: Callable[[int, np.random.Generator], IntArray],
) -> IntArray:
    if samples is None or samples == num_samples:
        return np.arange(num_samples)
    if samples > num_samples:
        raise ValueError(f"data.{part}_samples={samples}: {dataset} has {num_samples} {part} samples; ask for fewer")
    return draw(samples, stream(FIXED_SEED, "sub-sample", dataset, part))


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
