"""Who gets which samples: by label distributions (LDA), uniformly, or by the clients that the data set came with."""

from collections.abc import Sequence

import numpy as np

from fedloom.platform.data.artefact import AnyArray, Fields, IntArray
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.guard import SPLITS
from fedloom.platform.data.lda import draw_samples, label_distributions, split_validation, validation_size
from fedloom.platform.seeding import stream


def describe(config: DataConfig, dataset: Dataset, seed: int) -> Fields:
    """Name, parameters and seed of the rule: with the data set, all that determines the partition."""
    uniform = "consecutive" if dataset.kind == "tokens" else "uniform"
    fields: Fields = {
        "name": {"lda": "lda_per_class", "iid": uniform, "natural": "natural"}[config.partition],
        "num_clients": config.num_clients,
        "validation_share": float(config.validation_share),
        "seed": seed,
    }
    return fields | ({"alpha": float(config.alpha)} if config.partition == "lda" else {})


def check_enough(config: DataConfig, dataset: Dataset) -> None:
    """Raises ValueError if there are more clients than the data set has training samples, or clients, for."""
    if config.partition == "natural":
        _check_natural(config, dataset)
        return
    samples = dataset.num_samples("train")
    if config.num_clients > samples:
        raise ValueError(
            f"data.num_clients={config.num_clients}: {dataset.name} has {samples} training samples; "
            "every client needs at least one"
        )


def _check_natural(config: DataConfig, dataset: Dataset) -> None:
    there = len(_natural_clients(dataset))
    if config.num_clients > there:
        raise ValueError(
            f"data.num_clients={config.num_clients}: {there} of the {len(dataset.client_names)} clients of "
            f"{dataset.name} have a training sample; ask for at most {there}"
        )


def _natural_clients(dataset: Dataset) -> IntArray:
    """Places in `dataset.client_names` of those with training samples, hence in order of their names.

    One that has a single sample trains on it and validates nothing.
    """
    counts = np.bincount(dataset.clients("train"), minlength=len(dataset.client_names))
    return np.flatnonzero(counts > 0)


def allocate(config: DataConfig, dataset: Dataset, seed: int) -> dict[str, AnyArray]:
    """The partition's arrays: per split the flat indices and the clients' offsets, and what the rule has to tell.

    That is `label_distributions` under LDA and `natural_clients` under natural.
    """
    return {"lda": _by_lda, "iid": _uniformly, "natural": _naturally}[config.partition](config, dataset, seed)


def _by_lda(config: DataConfig, dataset: Dataset, seed: int) -> dict[str, AnyArray]:
    K = config.num_clients
    train_labels, test_labels = dataset.labels("train"), dataset.labels("test")
    prior = np.bincount(train_labels, minlength=dataset.num_classes) / len(train_labels)
    # One stream per purpose: another validation share leaves everybody's samples and test shares as they were.
    q = label_distributions(config.alpha, prior, K, stream(seed, "partition", "labels"))
    drawn = draw_samples(q, train_labels, len(train_labels) // K, stream(seed, "partition", "train"))
    train, validation = split_validation(drawn, config.validation_share, stream(seed, "partition", "validation"))
    test = np.sort(draw_samples(q, test_labels, len(test_labels) // K, stream(seed, "partition", "test")), axis=1)
    arrays: dict[str, AnyArray] = {"label_distributions": q}
    for split, indices in zip(SPLITS, (train, validation, test), strict=True):
        arrays[split] = indices.reshape(-1)
        arrays[f"{split}_offsets"] = np.arange(K + 1, dtype=np.int64) * indices.shape[1]
    return arrays


def _uniformly(config: DataConfig, dataset: Dataset, seed: int) -> dict[str, AnyArray]:
    pieces = {part: _equal_pieces(dataset, part, config.num_clients, seed) for part in ("train", "test")}
    return _arrays(pieces["train"], pieces["test"], config.validation_share, seed)


def _equal_pieces(dataset: Dataset, part: str, num_clients: int, seed: int) -> list[IntArray]:
    """All samples, in pieces whose sizes differ by one at most: of text consecutive ones, of images random ones."""
    order = np.arange(dataset.num_samples(part))
    if dataset.kind == "image":
        order = stream(seed, "partition", part).permutation(order)
    return [np.sort(piece) for piece in np.array_split(order, num_clients)]


def _naturally(config: DataConfig, dataset: Dataset, seed: int) -> dict[str, AnyArray]:
    chosen = _natural_clients(dataset)[: config.num_clients]
    train, test = (_rows_of(dataset.clients(part), chosen) for part in ("train", "test"))
    return {"natural_clients": chosen, **_arrays(train, test, config.validation_share, seed)}


def _rows_of(clients: IntArray, chosen: IntArray) -> list[IntArray]:
    """The sorted rows of each of the chosen clients."""
    order = np.argsort(clients, kind="stable")
    starts, stops = (np.searchsorted(clients[order], chosen, side) for side in ("left", "right"))
    return [order[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


def _arrays(
    train_and_validation: Sequence[IntArray], test: Sequence[IntArray], validation_share: float, seed: int
) -> dict[str, AnyArray]:
    rng = stream(seed, "partition", "validation")
    pairs = [_split_one(samples, validation_share, rng) for samples in train_and_validation]
    arrays: dict[str, AnyArray] = {}
    for split, pieces in zip(SPLITS, ([t for t, _ in pairs], [v for _, v in pairs], test), strict=True):
        arrays[split] = np.concatenate(pieces)
        arrays[f"{split}_offsets"] = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    return arrays


def _split_one(samples: IntArray, share: float, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """As `split_validation`, for one client."""
    held_out = validation_size(len(samples), share)
    shuffled = rng.permutation(samples)
    return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])
