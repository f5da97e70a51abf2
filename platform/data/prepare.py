"""Preparation: converts a published data set to memory-mappable arrays in the cache, once."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from fedloom.platform.data.arrays import TreeArrays
from fedloom.platform.data.artefact import (
    FORMAT,
    AnyArray,
    ByteArray,
    Fields,
    IntArray,
    atomic_folder,
    hash_of,
    write_array,
    write_artefact,
    write_blocks,
)
from fedloom.platform.data.config import DataConfig, cache_root, check_cache
from fedloom.platform.data.dataset import MANIFEST, PARTS, VALIDATION, Dataset
from fedloom.platform.data.registry import FIXED_SEED, check, find_source
from fedloom.platform.data.source import Source, stratified_rows, uniform_rows, write_label_sets
from fedloom.platform.data.tokens import TokenSource, compact
from fedloom.platform.seeding import stream

KEY_LENGTH = 16
CHUNK = 4096
CHUNK_PIXELS = 2**22
"""Pixels counted at a time for a histogram: `bincount` converts its input to eight bytes per value."""


Content = tuple[Fields, dict[str, AnyArray]]
"""The manifest's fields and the arrays."""


def prepare_dataset(config: DataConfig, *, verify: bool = False) -> Path:
    """The folder of the prepared data set; written if it does not exist.

    The folder's name depends on everything that determines the content: the originals, the sub-samples, and for text
    the sequence length.
    `verify` reads all arrays of an existing folder and compares their hashes (sizes are always compared).
    Raises ValueError for invalid options, missing or unexpected originals, and a damaged cache.
    """
    check(config)
    source = find_source(config)
    identity = source.identity()
    folder, name = _folder(config, identity), _name(config)
    if not folder.is_dir():
        check_cache(config)
        read = source if isinstance(source, Source) else _in_memory(config, source)
        with atomic_folder(folder) as temporary:
            fields, arrays = _labelled(config, read, temporary) if isinstance(read, Source) else read
            write_artefact(temporary, MANIFEST, {"name": name, **fields, "source": identity}, arrays)
            write_blocks(temporary)
    if isinstance(source, Source):
        write_label_sets(folder, lambda: source.label_sets)
    dataset = Dataset.open(folder)
    if verify:
        dataset.verify()
    return folder


def prepared_folder(config: DataConfig) -> Path:
    """The folder where `prepare_dataset` puts the data set, given the originals as they are now; prepares nothing.

    Raises ValueError for invalid options and missing or unexpected originals.
    """
    check(config)
    return _folder(config, find_source(config).identity())


def _folder(config: DataConfig, source: Fields) -> Path:
    identity = {
        "format": FORMAT,
        "source": source,
        "train_samples": config.train_samples,
        "test_samples": config.test_samples,
    }
    return cache_root(config) / f"{_name(config)}-{hash_of(identity)[:KEY_LENGTH]}"


def _name(config: DataConfig) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "-", config.dataset)


def _labelled(config: DataConfig, source: Source, folder: Path) -> Content:
    """Like `_tokens`, but writes inputs to the folder as they are read, because they may not fit in memory."""
    arrays: dict[str, AnyArray] = {}
    for part, samples in [*_parts(config), *([(VALIDATION, None)] if source.has_validation else [])]:
        y, clients = source.labels(part), source.clients(part)
        rows = _rows(config.dataset, part, len(y), samples, partial(stratified_rows, y))
        arrays[f"{part}_x"] = write_array(folder / f"{part}_x.npy", source.pieces(part, rows), len(rows))
        shape, expected = arrays[f"{part}_x"].shape[1:], arrays["train_x"].shape[1:]
        if shape != expected:
            raise ValueError(
                f"data.dataset={config.dataset}: a sample of the train part has shape {expected}, one of the {part} "
                f"part {shape}; they must be alike"
            )
        arrays[f"{part}_y"] = y[rows]
        if clients is not None:
            arrays[f"{part}_client"] = clients[rows]
    of_training = mean_and_std if source.kind == "image" else mean_and_std_of_floats
    mean, std = source.normalisation or of_training(arrays["train_x"], source.scale)
    fields: Fields = {
        "num_classes": len(source.class_names),
        "class_names": list(source.class_names),
        "scale": source.scale,
        "mean": list(mean),
        "std": list(std),
    }
    if source.kind != "image":
        fields["kind"] = source.kind
    if source.client_names:
        fields["client_names"] = list(source.client_names)
    return fields, arrays


def _in_memory(config: DataConfig, source: TokenSource | TreeArrays) -> Content:
    return _tokens(config, source) if isinstance(source, TokenSource) else _trees(config, source)


def _trees(config: DataConfig, source: TreeArrays) -> Content:
    arrays: dict[str, AnyArray] = {}
    content = source.content
    for part, samples in _parts(config):
        whole = {**content.parts[part].arrays}
        if part in content.clients_by_part:
            whole["client"] = content.clients_by_part[part]
        number = len(whole[next(iter(whole))])
        rows = _rows(config.dataset, part, number, samples, partial(uniform_rows, number))
        arrays |= {f"{part}_{name}": array[rows] for name, array in whole.items()}
    names, clients = list(content.class_names), list(content.client_names)
    return {"kind": "tree", "num_classes": len(names), "class_names": names, "client_names": clients}, arrays


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


def mean_and_std(x_NCHW: ByteArray, scale: float) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel of the values divided by `scale`.

    Sums are integers, therefore exact and identical on every machine. A constant channel has standard deviation 1.
    """
    images, channels, height, width = x_NCHW.shape
    n, step = images * height * width, max(1, CHUNK_PIXELS // (height * width))
    histograms = np.zeros((channels, 256), dtype=np.int64)
    for start in range(0, images, step):
        for histogram, x_NHW in zip(histograms, x_NCHW[start : start + step].swapaxes(0, 1), strict=True):
            histogram += np.bincount(x_NHW.ravel(), minlength=256)
    mean, std = [], []
    for histogram in histograms:
        total = sum(value * count for value, count in enumerate(histogram.tolist()))
        squares = sum(value * value * count for value, count in enumerate(histogram.tolist()))
        variance = (n * squares - total * total) / (n * n)
        mean.append(total / (n * scale))
        std.append(variance**0.5 / scale if variance > 0 else 1.0)
    return mean, std


def mean_and_std_of_floats(x: AnyArray, scale: float) -> tuple[list[float], list[float]]:
    """Like `mean_and_std` for floats (n, channels, ...), summed in double precision and in order."""
    n, total, squares = 0, np.zeros(x.shape[1]), np.zeros(x.shape[1])
    least, most = np.full(x.shape[1], np.inf), np.full(x.shape[1], -np.inf)
    others = (0, *range(2, x.ndim))
    for start in range(0, len(x), CHUNK):
        values = x[start : start + CHUNK].astype(np.float64) / scale
        n += values.size // x.shape[1]
        total, squares = total + values.sum(axis=others), squares + np.square(values).sum(axis=others)
        least, most = np.minimum(least, values.min(axis=others)), np.maximum(most, values.max(axis=others))
    mean = total / n
    # Rounding leaves many constants a tiny variance, by which their values would be divided.
    variance = np.where(least < most, np.maximum(squares / n - np.square(mean), 0.0), 0.0)
    return mean.tolist(), np.where(variance > 0, np.sqrt(variance), 1.0).tolist()
