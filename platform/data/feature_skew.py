"""Feature skew: inputs rotated or made noisy differently for every client, stored as another prepared data set."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedloom.platform.data.allocation import allocate, check_enough, clients_of_rows, describe
from fedloom.platform.data.artefact import (
    FORMAT,
    AnyArray,
    Fields,
    IntArray,
    atomic_folder,
    hash_of,
    open_arrays,
    read_manifest,
    write_array,
    write_artefact,
    write_blocks,
)
from fedloom.platform.data.config import DataConfig, cache_root, check_cache
from fedloom.platform.data.dataset import MANIFEST, PARTS, Dataset
from fedloom.platform.data.source import write_label_sets
from fedloom.platform.seeding import stream

KEY_LENGTH = 16
ROWS = 1024
NOBODY = -1
"""Stands for the client of samples that no client has: their inputs stay unchanged."""

# -- how each client's inputs are skewed ------------------------------------------------------------------------------


def noise_variance(most: float, client: int, num_clients: int) -> float:
    """The variance of Gaussian noise in a client's inputs: `most` * i / N for the i-th of N, where i = client + 1.

    Source: Li et al. 2022, Sec. IV-B. Their code uses this as the standard deviation, and begins with i = 0.
    """
    return most * (client + 1) / num_clients


def angle_of(most_degrees: float, client: int, seed: int) -> float:
    """The angle in degrees by which a client's images are rotated, uniform in [-most_degrees, most_degrees]."""
    return float(stream(seed, "skew", "angle", client).uniform(-most_degrees, most_degrees))


def skewed_inputs(
    config: DataConfig, x: AnyArray, part: str, rows: IntArray, clients: IntArray, units: AnyArray, seed: int
) -> AnyArray:
    """The inputs (n, ...) of these rows of a part, rotated and made noisy as `config` says for their clients.

    `units` (channels, 1, ...) is what noise of deviation 1 is in the values of `x`. Each sample has its own stream.
    """
    if config.rotation is not None:
        x = x.copy()
        for client in np.unique(clients[clients != NOBODY]).tolist():
            x[clients == client] = _turned(x[clients == client], angle_of(config.rotation, client, seed))
    if config.noise is None:
        return x
    # Half precision represents bytes exactly, has an error far below any noise, and needs half of the memory.
    noisy = x.astype(np.float16 if x.dtype == np.uint8 else np.float32)
    for i, (row, client) in enumerate(zip(rows.tolist(), clients.tolist(), strict=True)):
        if client != NOBODY:
            deviation = noise_variance(config.noise, client, config.num_clients) ** 0.5
            drawn = stream(seed, "skew", "noise", part, row).standard_normal(x.shape[1:], dtype=np.float32)
            noisy[i] = x[i] + deviation * units * drawn
    return noisy


def _turned(x_NCHW: AnyArray, degrees: float) -> AnyArray:
    from scipy.ndimage import rotate  # slow to import

    # Bilinear, with black outside of the image.
    turned: AnyArray = rotate(x_NCHW, degrees, axes=(3, 2), reshape=False, order=1, mode="grid-constant")
    return turned


# -- the data set -----------------------------------------------------------------------------------------------------


def skewed_dataset(config: DataConfig, dataset: Dataset, seed: int) -> Dataset:
    """The data set with every client's inputs skewed as `config` says, written if it does not exist.

    Without a skew it is `dataset` itself. Labels, partition and normalisation stay those of the original.
    Raises ValueError for inputs that cannot be skewed, and too many clients for the data set.
    """
    if config.noise is None and config.rotation is None:
        return dataset
    if dataset.kind not in ("image", "features") or (config.rotation is not None and len(dataset.input_shape) != 3):
        what = (
            "data.noise is for labelled numbers" if config.rotation is None else "data.rotation is for images (C, H, W)"
        )
        raise ValueError(f"{what}: {dataset.name} has samples of {dataset.input_shape}; must be null")
    check_enough(config, dataset)
    skew: Fields = {"partition": describe(config, dataset, seed), "dataset": dataset.hash}
    folder = cache_root(config) / f"{dataset.name}-{hash_of({'format': FORMAT, 'skew': skew})[:KEY_LENGTH]}"
    if not folder.is_dir():
        check_cache(config)
        manifest, arrays = read_manifest(dataset.path / MANIFEST), allocate(config, dataset, seed)
        inputs = open_arrays(dataset.path, manifest)
        fields = {key: value for key, value in manifest.items() if key not in ("format", "files", "hash")}
        with atomic_folder(folder) as temporary:
            skewed_arrays = {
                name: array for name, array in inputs.items() if name not in [f"{part}_x" for part in PARTS]
            }
            for part in PARTS:
                clients = clients_of_rows(config, arrays, part, dataset.num_samples(part))
                pieces = _pieces(config, inputs[f"{part}_x"], part, clients, _units(dataset), seed)
                skewed_arrays[f"{part}_x"] = write_array(temporary / f"{part}_x.npy", pieces, len(clients))
            write_artefact(temporary, MANIFEST, {**fields, "skew": skew}, skewed_arrays)
            write_blocks(temporary)
        write_label_sets(folder, lambda: dataset.label_sets)
    skewed = Dataset.open(folder)
    skewed.verify_blocks()
    return skewed


def original_of(folder: Path) -> str | None:
    """The hash of the data set of which this prepared one is a skewed copy; None if it is not skewed."""
    skew = read_manifest(folder / MANIFEST).get("skew")
    return None if skew is None else str(skew["dataset"])


def _units(dataset: Dataset) -> AnyArray:
    """Stored values per unit of noise (channels, 1, ...): `scale` for pixels, 0 to 1 in the paper, else times `std`."""
    deviations = np.ones(len(dataset.std)) if dataset.kind == "image" else np.array(dataset.std)
    return (dataset.scale * deviations).astype(np.float32).reshape(-1, *[1] * (len(dataset.input_shape) - 1))


def _pieces(
    config: DataConfig, x: AnyArray, part: str, clients: IntArray, units: AnyArray, seed: int
) -> Iterator[AnyArray]:
    for start in range(0, len(x), ROWS):
        rows = np.arange(start, min(start + ROWS, len(x)))
        yield skewed_inputs(config, x[rows], part, rows, clients[rows], units, seed)
