"""Allocation of samples to clients: by labels, uniformly, or by the natural clients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fedloom.platform.data.artefact import AnyArray, Fields, FloatArray, IntArray
from fedloom.platform.data.config import BY_LABEL, DataConfig
from fedloom.platform.data.dataset import SPLITS, Dataset
from fedloom.platform.seeding import stream

# -- latent Dirichlet allocation with equal client sizes (Hsu, Qi and Brown 2019) -------------------------------------
# Each client has a label distribution q_k ~ Dirichlet and draws samples from it without replacement. Under `lda` all
# clients draw in turn, one sample per step, so that no client only gets the classes that the others left over. Under
# `lda_sequential` client after client draws all of its samples, as in Flower, on which FedorAS is built: the last
# clients get what is left, and labels are more skewed at the same alpha.
# alpha is the concentration per class, as in Flower's partitions and in most papers' "Dirichlet(alpha)". Hsu et al.
# use alpha * prior, the same family with an alpha that is larger by the factor of the number of classes.

EXHAUSTED_MASS = 1e-5
"""What Flower adds to every class that is left: it decides where a client's own classes are exhausted."""
SMALLEST_MASS = 1e-300
"""Sums of a row below this count as zero, because dividing by them could underflow."""


def label_distributions(
    alpha: float, prior: npt.NDArray[np.floating], num_clients: int, rng: np.random.Generator
) -> FloatArray:
    """The clients' label distributions (num_clients, C): rows drawn from Dirichlet(alpha * C * prior).

    For equally frequent classes this is the symmetric Dirichlet(alpha). `prior` sums to 1 over the C classes; classes
    with prior 0 have probability 0.
    """
    present = np.flatnonzero(prior)
    weights = prior[present] / prior[present].sum()
    drawn = rng.dirichlet(np.maximum(alpha * len(present) * weights, np.finfo(np.float64).tiny), num_clients)
    total = drawn.sum(axis=1)
    # For very small alpha a row can underflow; the Dirichlet's limit is all mass on one class drawn from the prior.
    broken = np.flatnonzero(~(np.isfinite(total) & (total > 0.5)))
    drawn[broken] = np.eye(len(present))[rng.choice(len(present), size=len(broken), p=weights)]
    distributions = np.zeros((num_clients, len(prior)))
    distributions[:, present] = drawn
    return distributions


def draw_samples(q: FloatArray, labels: IntArray, per_client: int, rng: np.random.Generator) -> IntArray:
    """Distinct indices (num_clients, per_client) into `labels`: row k is drawn from the label distribution `q[k]`.

    When a client's classes are exhausted, it draws from the others in proportion to their remaining samples.
    Raises ValueError if there are not enough samples.
    """
    num_clients, num_classes = q.shape
    _check_enough(num_clients, per_client, labels)
    pools = _ClassPools.shuffled(labels, num_classes, rng)
    drawn = np.empty((num_clients, per_client), dtype=np.int64)
    for step in range(per_client):
        drawn[:, step] = _draw_one_each(q, pools, rng)
    return drawn


def _check_enough(num_clients: int, per_client: int, labels: IntArray) -> None:
    if num_clients * per_client > len(labels):
        raise ValueError(f"{num_clients} clients x {per_client} samples: there are only {len(labels)} samples")


def draw_in_sequence(q: FloatArray, labels: IntArray, per_client: int, rng: np.random.Generator) -> IntArray:
    """Like `draw_samples`, but each client draws all of its samples before the next one begins.

    When a client's classes are exhausted, it draws from the others with equal probability, as Flower does.
    """
    num_clients, num_classes = q.shape
    _check_enough(num_clients, per_client, labels)
    pools = _ClassPools.shuffled(labels, num_classes, rng)
    drawn = np.empty((num_clients, per_client), dtype=np.int64)
    for client in range(num_clients):
        done = 0
        while done < per_client:
            taken = pools.take_until_exhausted(_left_over(q[client], pools.left), per_client - done, rng)
            drawn[client, done : done + len(taken)] = taken
            done += len(taken)
    return drawn


def _left_over(q: FloatArray, left: IntArray) -> FloatArray:
    """A client's label distribution over the classes that still have samples."""
    probabilities = (q + EXHAUSTED_MASS) * (left > 0)
    remaining: FloatArray = probabilities / probabilities.sum()
    return remaining


@dataclass(slots=True, eq=False)
class _ClassPools:
    """The samples of each class in random order, the next unused one, and the number left."""

    samples: IntArray
    next: IntArray
    left: IntArray

    @classmethod
    def shuffled(cls, labels: IntArray, num_classes: int, rng: np.random.Generator) -> "_ClassPools":
        order = rng.permutation(len(labels))
        counts = np.bincount(labels, minlength=num_classes)
        return cls(order[np.argsort(labels[order], kind="stable")], np.cumsum(counts) - counts, counts)

    def take(self, wanted: IntArray, rng: np.random.Generator) -> IntArray:
        """One sample per wanted label; -1 for the clients without a sample when a class has too few left."""
        order = rng.permutation(len(wanted))  # random priority when a class has too few samples
        order = order[np.argsort(wanted[order], kind="stable")]
        label = wanted[order]
        demand = np.bincount(wanted, minlength=len(self.left))
        rank = np.arange(len(wanted)) - (np.cumsum(demand) - demand)[label]
        wins = rank < self.left[label]
        taken = np.full(len(wanted), -1, dtype=np.int64)
        taken[order[wins]] = self.samples[(self.next[label] + rank)[wins]]
        served = np.minimum(demand, self.left)
        self.next += served
        self.left -= served
        return taken

    def take_until_exhausted(self, probabilities: FloatArray, count: int, rng: np.random.Generator) -> IntArray:
        """Up to `count` samples with labels drawn one by one; fewer if one of the classes has none left before that."""
        labels = rng.choice(len(self.left), size=count, p=probabilities)
        stop = count
        for label in np.flatnonzero(np.bincount(labels, minlength=len(self.left)) >= self.left):
            where = np.flatnonzero(labels == label)
            if self.left[label]:
                stop = min(stop, int(where[self.left[label] - 1]) + 1)
        return self.take(labels[:stop], rng)


def _draw_one_each(q: FloatArray, pools: _ClassPools, rng: np.random.Generator) -> IntArray:
    taken = np.full(len(q), -1, dtype=np.int64)
    waiting = np.arange(len(q))
    # Terminates: every pass that leaves a client waiting has exhausted a class.
    while len(waiting):
        taken[waiting] = pools.take(_draw_labels(q[waiting], pools.left, rng), rng)
        waiting = waiting[taken[waiting] < 0]
    return taken


def _draw_labels(q: FloatArray, left: IntArray, rng: np.random.Generator) -> IntArray:
    cumulative = np.cumsum(q * (left > 0), axis=1)
    cumulative[cumulative[:, -1] < SMALLEST_MASS] = np.cumsum(left)
    threshold = rng.random(len(q)) * cumulative[:, -1]
    # The first class whose cumulative mass exceeds the threshold; this is never a class without mass.
    labels: IntArray = np.argmax(cumulative > threshold[:, None], axis=1)
    return labels


def split_test(drawn: IntArray, share: float, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """The remaining and the test indices (num_clients, n) of each client; test is a random `share` of its samples.

    At least one sample is a test sample, unless it is the only one.
    """
    return _set_aside(drawn, held_out_size(drawn.shape[1], share, drawn.shape[1]), rng)


def split_validation(
    drawn: IntArray, share: float, rng: np.random.Generator, num_test: int = 0
) -> tuple[IntArray, IntArray]:
    """Train and validation indices (num_clients, n) of each client; validation is a random `share` of its samples.

    The share refers to the drawn samples plus the `num_test` test samples already split off. At least one sample is
    for validation if the share is positive, and at least one is for training.
    """
    num_left = drawn.shape[1]
    return _set_aside(drawn, held_out_size(num_left, share, num_left + num_test), rng)


def _set_aside(drawn: IntArray, held_out: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    shuffled = rng.permuted(drawn, axis=1)
    # Sorted within a client, because ordered reads of a memory map are faster; training shuffles anyway.
    return np.sort(shuffled[:, held_out:], axis=1), np.sort(shuffled[:, :held_out], axis=1)


def held_out_size(num_left: int, share: float, num_all: int) -> int:
    """The number of a client's `num_left` samples to hold out for a share of its `num_all` samples.

    At least one if the share is positive, and never all of `num_left`.
    """
    return min(max(1, round(share * num_all)), num_left - 1) if share > 0 else 0


# -- each class split over the clients, with unequal sizes (Yurochkin et al. 2019; FedML) -----------------------------
# The partition of SPIDER (App. A.1), SuperFed and SuperFedNAS. alpha is the concentration per client: a class goes to
# few clients if it is small. A client that has its equal share of all samples gets none of the classes that follow,
# and everything is drawn again until each client has at least `FEWEST` samples.

FEWEST = 10
"""The fewest training samples of a client, before validation and test samples are set aside."""
TRIES = 10_000


def split_classes(
    alpha: float, labels: IntArray, num_classes: int, num_clients: int, rng: np.random.Generator
) -> tuple[list[IntArray], FloatArray]:
    """Every client's sample indices, ascending, and the shares (C, num_clients) by which each class was split.

    Raises ValueError if no draw gives each client at least `FEWEST` samples.
    """
    classes = shuffled_classes(labels, num_classes, rng)
    for _ in range(TRIES):
        shares, sizes = class_shares(alpha, [len(samples) for samples in classes], num_clients, rng)
        if sizes.min() >= FEWEST:
            return by_shares(classes, shares), shares
    raise ValueError(
        f"data.alpha={alpha:g}: {TRIES} draws left a client of {num_clients} with fewer than {FEWEST} samples; choose "
        "a larger alpha, fewer clients, or data.partition=lda"
    )


def class_shares(
    alpha: float, sizes: list[int], num_clients: int, rng: np.random.Generator
) -> tuple[FloatArray, IntArray]:
    """Shares (C, num_clients) of classes with these sizes, drawn class after class, and what the clients get in all.

    The rows of the shares sum to 1.
    """
    equal = sum(sizes) / num_clients
    owned = np.zeros(num_clients, dtype=np.int64)
    shares = np.zeros((len(sizes), num_clients))
    for label, size in enumerate(sizes):
        drawn = rng.dirichlet(np.full(num_clients, alpha)) * (owned < equal)
        # A small alpha can leave all mass with clients that have enough; then one of the others takes the class.
        if not drawn.sum() > 0:
            drawn = np.eye(num_clients)[rng.choice(np.flatnonzero(owned == owned.min()))]
        shares[label] = drawn / drawn.sum()
        owned += np.diff(_bounds(size, shares[label]))
    return shares, owned


def by_shares(classes: list[IntArray], shares: FloatArray) -> list[IntArray]:
    """Every client's samples, ascending, if each class's samples are cut by its row of the shares (C, num_clients)."""
    pieces = [cut_in_shares(samples, row) for samples, row in zip(classes, shares, strict=True)]
    return [np.sort(np.concatenate(client_pieces)) for client_pieces in zip(*pieces, strict=True)]


def shuffled_classes(labels: IntArray, num_classes: int, rng: np.random.Generator) -> list[IntArray]:
    """The indices of each class's samples, in random order."""
    order = rng.permutation(len(labels))
    return [order[labels[order] == label] for label in range(num_classes)]


def cut_in_shares(samples: IntArray, shares: FloatArray) -> list[IntArray]:
    """Consecutive pieces of the samples in proportion to the shares, rounded as FedML rounds them."""
    bounds = _bounds(len(samples), shares)
    return [samples[start:stop] for start, stop in pairwise(bounds.tolist())]


def _bounds(size: int, shares: FloatArray) -> IntArray:
    inner = (np.cumsum(shares) * size).astype(np.int64)[:-1]
    return np.concatenate([[0], np.minimum(inner, size), [size]])


# -- the rules by name ------------------------------------------------------------------------------------------------


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
    train_pieces, shares = split_classes(
        config.alpha, labels, C, config.num_clients, stream(seed, "partition", "train")
    )

    def pieces_of(part: str) -> list[IntArray]:
        if part == "train":
            return train_pieces
        return by_shares(shuffled_classes(dataset.labels(part), C, stream(seed, "partition", part)), shares)

    counts = np.stack([np.bincount(labels[piece], minlength=C) for piece in train_pieces])
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
    train_pieces = pieces_of("train")
    if config.test_share is None:
        rest, test = train_pieces, pieces_of("test")
    else:
        rest, test = _split_each(train_pieces, train_pieces, config.test_share, stream(seed, "partition", "test_share"))
    train, validation = _split_each(
        rest, train_pieces, config.validation_share, stream(seed, "partition", "validation")
    )
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
    return [rest for rest, _ in pairs], [aside for _, aside in pairs]


def _split_one(samples: IntArray, num_all: int, share: float, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Like `split_test` and `split_validation`, for one client."""
    held_out = held_out_size(len(samples), share, num_all)
    shuffled = rng.permutation(samples)
    return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])
