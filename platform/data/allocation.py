"""Allocation of samples to clients: by labels (LDA, or class by class), uniformly, or by the natural clients."""

from collections.abc import Callable, Sequence

import numpy as np

from fedloom.platform.data.artefact import AnyArray, Fields, FloatArray, IntArray
from fedloom.platform.data.by_class import FEWEST, by_shares, shuffled_classes, split_classes
from fedloom.platform.data.config import BY_LABEL, DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.guard import SPLITS
from fedloom.platform.data.lda import (
    draw_in_sequence,
    draw_samples,
    held_out_size,
    label_distributions,
    split_test,
    split_validation,
)
from fedloom.platform.seeding import stream


def describe(config: DataConfig, dataset: Dataset, seed: int) -> Fields:
    """Name, parameters and seed of the rule, which determine the partition of a data set."""
    uniform = "consecutive" if dataset.kind == "tokens" else "uniform"
    fields: Fields = {
        "name": {"lda": "lda_per_class", "iid": uniform}.get(config.partition, config.partition),
        "num_clients": config.num_clients,
        "validation_share": float(config.validation_share),
        "seed": seed,
    }
    if config.partition in BY_LABEL:
        fields["alpha"] = float(config.alpha)
    # Left out if unused, so that the hashes of partitions from before this option stay valid.
    if config.test_share is not None:
        fields["test_share"] = float(config.test_share)
    return fields


def check_enough(config: DataConfig, dataset: Dataset) -> None:
    """Raises ValueError if the data set has too few samples or natural clients, or does not fit these options."""
    if config.balanced_classes and dataset.labels("train").ndim > 1:
        raise ValueError(f"data.balanced_classes=true: {dataset.name} has no class labels to draw by; must be false")
    if config.partition in BY_LABEL and dataset.labels("train").ndim > 1:
        raise ValueError(
            f"data.partition={config.partition}: {dataset.name} has no class labels to draw by; use iid or natural"
        )
    if config.partition == "natural":
        _check_natural(config, dataset)
        return
    samples = dataset.num_samples("train")
    fewest = FEWEST if config.partition == "dirichlet_classes" else 1
    if config.num_clients * fewest > samples:
        raise ValueError(
            f"data.num_clients={config.num_clients}: {dataset.name} has {samples} training samples; "
            f"every client needs at least {'one' if fewest == 1 else fewest}"
        )


def _check_natural(config: DataConfig, dataset: Dataset) -> None:
    if not dataset.knows_clients("train"):
        raise ValueError(f"data.partition=natural: {dataset.name} has no clients of its own; use lda or iid")
    if config.test_share is None and not dataset.knows_clients("test"):
        raise ValueError(
            f"data.partition=natural: whose the test samples of {dataset.name} are is not known: set data.test_share"
        )
    there = len(_natural_clients(dataset))
    if config.num_clients > there:
        raise ValueError(
            f"data.num_clients={config.num_clients}: {there} of the {len(dataset.client_names)} clients of "
            f"{dataset.name} have a training sample; ask for at most {there}"
        )


def _natural_clients(dataset: Dataset) -> IntArray:
    """Indices into `dataset.client_names` of the clients with training samples, in order of their names.

    A client with a single sample trains on it and has no validation data.
    """
    counts = np.bincount(dataset.clients("train"), minlength=len(dataset.client_names))
    return np.flatnonzero(counts > 0)


def allocate(config: DataConfig, dataset: Dataset, seed: int) -> dict[str, AnyArray]:
    """The partition's arrays: per split the flat indices and the clients' offsets, and one array of the rule's own.

    The latter is `label_distributions` for partitions by label and `natural_clients` for natural.
    """
    rules = {
        "lda": _by_lda,
        "lda_sequential": _by_lda,
        "dirichlet_classes": _class_by_class,
        "iid": _uniformly,
        "natural": _naturally,
    }
    return rules[config.partition](config, dataset, seed)


def _by_lda(config: DataConfig, dataset: Dataset, seed: int) -> dict[str, AnyArray]:
    K = config.num_clients
    train_labels = dataset.labels("train")
    prior = np.bincount(train_labels, minlength=dataset.num_classes) / len(train_labels)
    # One random stream per purpose: changing the validation or test share does not change a client's samples.
    q = label_distributions(config.alpha, prior, K, stream(seed, "partition", "labels"))
    drawn = _draw(config)(q, train_labels, len(train_labels) // K, stream(seed, "partition", "train"))
    splits = _split_drawn(config, dataset, q, drawn, seed)
    arrays: dict[str, AnyArray] = {"label_distributions": q}
    for split, indices in zip(SPLITS, splits, strict=True):
        arrays[split] = indices.reshape(-1)
        arrays[f"{split}_offsets"] = np.arange(K + 1, dtype=np.int64) * indices.shape[1]
    return arrays


def _draw(config: DataConfig) -> Callable[[FloatArray, IntArray, int, np.random.Generator], IntArray]:
    return draw_in_sequence if config.partition == "lda_sequential" else draw_samples


def _split_drawn(
    config: DataConfig, dataset: Dataset, q: FloatArray, drawn: IntArray, seed: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Train, validation and test indices (num_clients, n); without a test share, test indices are drawn by `q`."""
    if config.test_share is None:
        rest, num_own_test = drawn, 0
        labels = dataset.labels("test")
        test = np.sort(_draw(config)(q, labels, len(labels) // len(q), stream(seed, "partition", "test")), axis=1)
    else:
        rest, test = split_test(drawn, config.test_share, stream(seed, "partition", "test_share"))
        num_own_test = test.shape[1]
    rng = stream(seed, "partition", "validation")
    return *split_validation(rest, config.validation_share, rng, num_own_test), test


def _class_by_class(config: DataConfig, dataset: Dataset, seed: int) -> dict[str, AnyArray]:
    C, labels = dataset.num_classes, dataset.labels("train")
    own, shares = split_classes(config.alpha, labels, C, config.num_clients, stream(seed, "partition", "train"))

    def pieces_of(part: str) -> list[IntArray]:
        if part == "train":
            return own
        return by_shares(shuffled_classes(dataset.labels(part), C, stream(seed, "partition", part)), shares)

    counts = np.stack([np.bincount(labels[piece], minlength=C) for piece in own])
    return {"label_distributions": counts / counts.sum(axis=1, keepdims=True), **_arrays(config, pieces_of, seed)}


def _uniformly(config: DataConfig, dataset: Dataset, seed: int) -> dict[str, AnyArray]:
    return _arrays(config, lambda part: _equal_pieces(dataset, part, config.num_clients, seed), seed)


def _equal_pieces(dataset: Dataset, part: str, num_clients: int, seed: int) -> list[IntArray]:
    """All samples in pieces whose sizes differ by at most one: consecutive pieces of text, random ones of images."""
    order = np.arange(dataset.num_samples(part))
    if dataset.kind != "tokens":
        order = stream(seed, "partition", part).permutation(order)
    return [np.sort(piece) for piece in np.array_split(order, num_clients)]


def _naturally(config: DataConfig, dataset: Dataset, seed: int) -> dict[str, AnyArray]:
    chosen = _natural_clients(dataset)[: config.num_clients]
    arrays = _arrays(config, lambda part: _rows_of(dataset.clients(part), chosen), seed)
    return {"natural_clients": chosen, **arrays}


def _rows_of(clients: IntArray, chosen: IntArray) -> list[IntArray]:
    """The sorted rows of each of the chosen clients."""
    order = np.argsort(clients, kind="stable")
    starts, stops = (np.searchsorted(clients[order], chosen, side) for side in ("left", "right"))
    return [order[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


def _arrays(config: DataConfig, pieces_of: Callable[[str], list[IntArray]], seed: int) -> dict[str, AnyArray]:
    """All splits of every client; `pieces_of` returns the clients' samples of a part of the data set."""
    own = pieces_of("train")
    if config.test_share is None:
        rest, test = own, pieces_of("test")
    else:
        rest, test = _split_each(own, own, config.test_share, stream(seed, "partition", "test_share"))
    train, validation = _split_each(rest, own, config.validation_share, stream(seed, "partition", "validation"))
    arrays: dict[str, AnyArray] = {}
    for split, pieces in zip(SPLITS, (train, validation, test), strict=True):
        arrays[split] = np.concatenate(pieces)
        arrays[f"{split}_offsets"] = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    return arrays


def _split_each(
    pieces: Sequence[IntArray], wholes: Sequence[IntArray], share: float, rng: np.random.Generator
) -> tuple[list[IntArray], list[IntArray]]:
    """Splits off a random part of every client's piece, of the size `share` of its whole; returns rests and parts."""
    pairs = [_split_one(piece, len(whole), share, rng) for piece, whole in zip(pieces, wholes, strict=True)]
    return [kept for kept, _ in pairs], [aside for _, aside in pairs]


def _split_one(samples: IntArray, num_all: int, share: float, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Like `split_test` and `split_validation`, for one client."""
    held_out = held_out_size(len(samples), share, num_all)
    shuffled = rng.permutation(samples)
    return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])
