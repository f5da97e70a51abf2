"""Allocation of samples to clients: by labels, by sizes, uniformly, or by the natural clients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fedloom.platform.data.artefact import AnyArray, Fields, FloatArray, IntArray
from fedloom.platform.data.config import BY_LABEL, WITH_ALPHA, DataConfig
from fedloom.platform.data.dataset import SPLITS, Dataset
from fedloom.platform.seeding import stream

# -- latent Dirichlet allocation with equal client sizes (Hsu, Qi and Brown 2019) -------------------------------------
# Each client has a label distribution q_k ~ Dirichlet and draws samples from it without replacement. Under `lda` all
# clients draw in turn, one sample per step, so that no client only gets the classes that the others left over. Under
# `lda_sequential` one client after the other draws all of its samples, as in Flower, on which FedorAS is built: the
# last clients get what is left over, and labels are more skewed at the same alpha.
# alpha is the concentration per class, as in Flower's partitions and in most papers' "Dirichlet(alpha)". Hsu et al.
# use alpha * prior, the same family with an alpha that is larger by the factor of the number of classes.

EXHAUSTED_MASS = 1e-5
"""Mass that Flower adds to every class with samples left: it matters once a client's own classes are exhausted."""
SMALLEST_MASS = 1e-300
"""Row sums below this count as zero, because dividing by them could underflow."""


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
    pools = _ClassPools.shuffled(q, labels, per_client, rng)
    drawn = np.full((len(q), per_client), -1, dtype=np.int64)
    for taken in drawn.T:
        waiting = np.arange(len(q))
        # Terminates: every pass that leaves a client waiting has exhausted a class.
        while len(waiting):
            cumulative = np.cumsum(q[waiting] * (pools.left > 0), axis=1)
            cumulative[cumulative[:, -1] < SMALLEST_MASS] = np.cumsum(pools.left)
            threshold = rng.random(len(waiting)) * cumulative[:, -1]
            # The first class whose cumulative mass exceeds the threshold; this is never a class without mass.
            wanted: IntArray = np.argmax(cumulative > threshold[:, None], axis=1)
            taken[waiting] = pools.take(wanted, rng)
            waiting = waiting[taken[waiting] < 0]
    return drawn


def draw_in_sequence(q: FloatArray, labels: IntArray, per_client: int, rng: np.random.Generator) -> IntArray:
    """Like `draw_samples`, but each client draws all of its samples before the next one begins.

    When a client's classes are exhausted, it draws from the others with equal probability, as Flower does.
    """
    pools = _ClassPools.shuffled(q, labels, per_client, rng)
    drawn = np.empty((len(q), per_client), dtype=np.int64)
    for client, distribution in enumerate(q):
        done = 0
        while done < per_client:
            mass = (distribution + EXHAUSTED_MASS) * (pools.left > 0)
            taken = pools.take_until_exhausted(mass / mass.sum(), per_client - done, rng)
            drawn[client, done : done + len(taken)] = taken
            done += len(taken)
    return drawn


@dataclass(slots=True, eq=False)
class _ClassPools:
    """The samples of each class in random order, the next unused one, and the number left."""

    samples: IntArray
    next: IntArray
    left: IntArray

    @classmethod
    def shuffled(cls, q: FloatArray, labels: IntArray, per_client: int, rng: np.random.Generator) -> "_ClassPools":
        if len(q) * per_client > len(labels):
            raise ValueError(f"{len(q)} clients x {per_client} samples: there are only {len(labels)} samples")
        order = rng.permutation(len(labels))
        counts = np.bincount(labels, minlength=q.shape[1])
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
        """Up to `count` samples with labels drawn one by one; ends early once one of the drawn classes is used up."""
        labels = rng.choice(len(self.left), size=count, p=probabilities)
        stop = count
        for label in np.flatnonzero(np.bincount(labels, minlength=len(self.left)) >= self.left):
            where = np.flatnonzero(labels == label)
            if self.left[label]:
                stop = min(stop, int(where[self.left[label] - 1]) + 1)
        return self.take(labels[:stop], rng)


# -- each class split over the clients, with unequal sizes (Yurochkin et al. 2019; FedML) -----------------------------
# The partition of SPIDER (App. A.1), SuperFed and SuperFedNAS. alpha is the concentration per client: the smaller it
# is, the fewer clients share a class. A client that has its equal share of all samples gets none of the following
# classes, and everything is drawn again until each client has at least `FEWEST` samples.

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
    """The clients' shares of each class (C, num_clients), drawn class by class, and their total numbers of samples.

    `sizes` are the classes' numbers of samples. Each row of the shares sums to 1.
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
    """Every client's samples, ascending: each class is cut in proportion to its row of the shares (C, num_clients)."""
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


# -- shards of samples in the order of their labels (McMahan et al. 2017, Sec. 3) -------------------------------------


def deal_shards(labels: IntArray, num_clients: int, shards_per_client: int, rng: np.random.Generator) -> list[IntArray]:
    """Every client's sample indices, ascending: equal shards of the samples sorted by label, dealt at random.

    Sizes of shards differ by at most one sample. Within a class the order is random.
    """
    order = rng.permutation(len(labels))
    shards = np.array_split(order[np.argsort(labels[order], kind="stable")], num_clients * shards_per_client)
    dealt = rng.permutation(len(shards)).reshape(num_clients, shards_per_client)
    return [np.sort(np.concatenate([shards[shard] for shard in row])) for row in dealt]


# -- quantity skew: sizes from a Dirichlet distribution (Li et al. 2022, Sec. IV-C) -----------------------------------


def dirichlet_sizes(alpha: float, samples: int, num_clients: int, rng: np.random.Generator) -> IntArray:
    """The clients' numbers of samples (num_clients,), in proportions drawn from Dirichlet(alpha).

    Every client gets one sample in advance, because it cannot train on none. The authors' code instead draws again
    until every client has ten, which takes practically for ever with many clients.
    """
    shares = label_distributions(alpha, np.full(num_clients, 1 / num_clients), 1, rng)[0]
    return 1 + np.diff(_bounds(samples - num_clients, shares))


# -- the rules by name ------------------------------------------------------------------------------------------------


def describe(config: DataConfig, dataset: Dataset, seed: int) -> Fields:
    """Name, parameters and seed of the rule, which determine the partition of a data set."""
    uniform = "consecutive" if dataset.per_position else "uniform"
    fields: Fields = {
        "name": {"lda": "lda_per_class", "iid": uniform}.get(config.partition, config.partition),
        "num_clients": config.num_clients,
        "validation_share": float(config.validation_share),
        "seed": seed,
    }
    if config.partition in WITH_ALPHA:
        fields["alpha"] = float(config.alpha)
    if config.partition == "shards":
        fields["shards_per_client"] = config.shards_per_client
    # Omitted if unused, so that the hashes of partitions from before these options stay valid.
    for key in ("test_share", "noise", "rotation"):
        if (value := getattr(config, key)) is not None:
            fields[key] = float(value)
    return fields


def check_enough(config: DataConfig, dataset: Dataset) -> None:
    """Raises ValueError if the data set has too few samples or natural clients, or does not fit these options."""
    has_classes = dataset.has_labels and not dataset.per_position
    if config.balanced_classes and not has_classes:
        raise ValueError(f"data.balanced_classes=true: {dataset.name} has no class labels to draw by; must be false")
    if config.partition in BY_LABEL and not has_classes:
        raise ValueError(
            f"data.partition={config.partition}: {dataset.name} has no class labels to draw by; use iid or natural"
        )
    if config.partition == "natural":
        if not dataset.knows_clients("train"):
            raise ValueError(f"data.partition=natural: {dataset.name} has no clients of its own; use lda or iid")
        if config.test_share is None and not dataset.knows_clients("test"):
            raise ValueError(
                f"data.partition=natural: the test samples of {dataset.name} have no known client: set data.test_share"
            )
        clients = len(_natural_clients(dataset))
        if config.num_clients > clients:
            raise ValueError(
                f"data.num_clients={config.num_clients}: {clients} of the {len(dataset.client_names)} clients of "
                f"{dataset.name} have a training sample; ask for at most {clients}"
            )
        return
    samples = dataset.num_samples("train")
    if config.partition == "shards" and config.num_clients <= samples < config.num_clients * config.shards_per_client:
        raise ValueError(
            f"data.shards_per_client={config.shards_per_client}: {config.num_clients} clients need "
            f"{config.num_clients * config.shards_per_client} shards, but {dataset.name} has {samples} training "
            f"samples; must be at most {samples // config.num_clients}"
        )
    fewest = FEWEST if config.partition == "dirichlet_classes" else 1
    if config.num_clients * fewest > samples:
        raise ValueError(
            f"data.num_clients={config.num_clients}: {dataset.name} has {samples} training samples; "
            f"every client needs at least {'one' if fewest == 1 else fewest}"
        )


def _natural_clients(dataset: Dataset) -> IntArray:
    """Indices into `dataset.client_names` of the clients with training samples, in order of their names.

    A client with a single sample trains on it and has no validation data.
    """
    counts = np.bincount(dataset.clients("train"), minlength=len(dataset.client_names))
    return np.flatnonzero(counts > 0)


PiecesOf = Callable[[str], Sequence[IntArray]]
"""Maps a part of the data set to every client's samples of it."""


def allocate(config: DataConfig, dataset: Dataset, seed: int) -> dict[str, AnyArray]:
    """The partition's arrays: per split the flat indices and the clients' offsets, and for some rules one more array.

    This is `label_distributions` for partitions by label and `natural_clients` for natural ones.
    """
    rules = {
        "lda": _by_lda,
        "lda_sequential": _by_lda,
        "dirichlet_classes": _class_by_class,
        "shards": _in_shards,
        "quantity": _by_quantity,
        "iid": _uniformly,
        "natural": _naturally,
    }
    arrays, pieces_of = rules[config.partition](config, dataset, seed)
    train_pieces = pieces_of("train")
    # One random stream per purpose: changing the validation or test share does not change a client's samples.
    if config.test_share is None:
        rest, test = train_pieces, [np.sort(piece) for piece in pieces_of("test")]
    else:
        rest, test = set_aside(train_pieces, train_pieces, config.test_share, stream(seed, "partition", "test_share"))
    rng = stream(seed, "partition", "validation")
    train, validation = set_aside(rest, train_pieces, config.validation_share, rng)
    for split, pieces in zip(SPLITS, (train, validation, test), strict=True):
        arrays[split] = np.concatenate(pieces)
        arrays[f"{split}_offsets"] = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    return arrays


def clients_of_rows(config: DataConfig, arrays: dict[str, AnyArray], part: str, num_samples: int) -> IntArray:
    """The client of each sample of a part (num_samples,), by the arrays of `allocate`; -1 for samples of no client."""
    clients = np.full(num_samples, -1, dtype=np.int64)
    in_train = SPLITS[:2] if config.test_share is None else SPLITS
    for split in in_train if part == "train" else SPLITS[len(in_train) :]:
        clients[arrays[split]] = np.repeat(np.arange(config.num_clients), np.diff(arrays[f"{split}_offsets"]))
    return clients


def set_aside(
    pieces: Sequence[IntArray], wholes: Sequence[IntArray], share: float, rng: np.random.Generator
) -> tuple[list[IntArray], list[IntArray]]:
    """Splits off a random part of every client's piece, a `share` of its whole in size; returns rests and parts.

    With a positive share, a part has at least one sample, unless its piece has only one: it is never the whole piece.
    """
    rests, parts = [], []
    for piece, whole in zip(pieces, wholes, strict=True):
        size = held_out_size(len(piece), share, len(whole))
        shuffled = rng.permutation(piece)
        # Sorted within a client, because ordered reads of a memory map are faster; training shuffles anyway.
        rests.append(np.sort(shuffled[size:]))
        parts.append(np.sort(shuffled[:size]))
    return rests, parts


def held_out_size(num_left: int, share: float, num_all: int) -> int:
    """The number of a client's `num_left` samples to hold out for a share of its `num_all` samples."""
    return min(max(1, round(share * num_all)), num_left - 1) if share > 0 else 0


def _by_lda(config: DataConfig, dataset: Dataset, seed: int) -> tuple[dict[str, AnyArray], PiecesOf]:
    clients, labels = config.num_clients, dataset.labels("train")
    draw = draw_in_sequence if config.partition == "lda_sequential" else draw_samples
    prior = np.bincount(labels, minlength=dataset.num_classes) / len(labels)
    q = label_distributions(config.alpha, prior, clients, stream(seed, "partition", "labels"))

    def pieces_of(part: str) -> Sequence[IntArray]:
        labels = dataset.labels(part)
        return list(draw(q, labels, len(labels) // clients, stream(seed, "partition", part)))

    return {"label_distributions": q}, pieces_of


def _class_by_class(config: DataConfig, dataset: Dataset, seed: int) -> tuple[dict[str, AnyArray], PiecesOf]:
    classes, labels = dataset.num_classes, dataset.labels("train")
    rng = stream(seed, "partition", "train")
    train_pieces, shares = split_classes(config.alpha, labels, classes, config.num_clients, rng)

    def pieces_of(part: str) -> Sequence[IntArray]:
        if part == "train":
            return train_pieces
        return by_shares(shuffled_classes(dataset.labels(part), classes, stream(seed, "partition", part)), shares)

    counts = np.stack([np.bincount(labels[piece], minlength=classes) for piece in train_pieces])
    return {"label_distributions": counts / counts.sum(axis=1, keepdims=True)}, pieces_of


def _in_shards(config: DataConfig, dataset: Dataset, seed: int) -> tuple[dict[str, AnyArray], PiecesOf]:
    """Test samples of a class are shared in proportion to the clients' training samples of it."""
    classes, labels = dataset.num_classes, dataset.labels("train")
    rng = stream(seed, "partition", "shards")
    train_pieces = deal_shards(labels, config.num_clients, config.shards_per_client, rng)
    counts = np.stack([np.bincount(labels[piece], minlength=classes) for piece in train_pieces])

    def pieces_of(part: str) -> Sequence[IntArray]:
        if part == "train":
            return train_pieces
        samples = shuffled_classes(dataset.labels(part), classes, stream(seed, "partition", part))
        pieces = [_in_proportion(of_class, counts_N) for of_class, counts_N in zip(samples, counts.T, strict=True)]
        return [np.sort(np.concatenate(of_client)) for of_client in zip(*pieces, strict=True)]

    return {"label_distributions": counts / counts.sum(axis=1, keepdims=True)}, pieces_of


def _by_quantity(config: DataConfig, dataset: Dataset, seed: int) -> tuple[dict[str, AnyArray], PiecesOf]:
    rng = stream(seed, "partition", "sizes")
    sizes = dirichlet_sizes(config.alpha, dataset.num_samples("train"), config.num_clients, rng)

    def pieces_of(part: str) -> Sequence[IntArray]:
        return [np.sort(piece) for piece in _in_proportion(_in_order(dataset, part, seed), sizes)]

    return {}, pieces_of


def _in_proportion(samples: IntArray, counts: IntArray) -> list[IntArray]:
    """Consecutive pieces in proportion to these counts, or equal ones if all counts are 0.

    In integers: rounded shares could leave a client without its only sample, or give it one of a class it lacks.
    """
    counts = counts if counts.any() else np.ones_like(counts)
    return np.split(samples, np.cumsum(counts)[:-1] * len(samples) // counts.sum())


def _in_order(dataset: Dataset, part: str, seed: int) -> IntArray:
    """The samples of a part in the order in which they are cut into pieces: as stored for text, else random."""
    order = np.arange(dataset.num_samples(part))
    return order if dataset.per_position else stream(seed, "partition", part).permutation(order)


def _uniformly(config: DataConfig, dataset: Dataset, seed: int) -> tuple[dict[str, AnyArray], PiecesOf]:
    """All samples in pieces whose sizes differ by at most one: consecutive pieces of text, else random ones."""

    def pieces_of(part: str) -> Sequence[IntArray]:
        return [np.sort(piece) for piece in np.array_split(_in_order(dataset, part, seed), config.num_clients)]

    return {}, pieces_of


def _naturally(config: DataConfig, dataset: Dataset, seed: int) -> tuple[dict[str, AnyArray], PiecesOf]:
    del seed
    chosen = _natural_clients(dataset)[: config.num_clients]

    def pieces_of(part: str) -> Sequence[IntArray]:
        clients = dataset.clients(part)
        order = np.argsort(clients, kind="stable")
        starts, stops = (np.searchsorted(clients[order], chosen, side) for side in ("left", "right"))
        return [order[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]

    return {"natural_clients": chosen}, pieces_of
