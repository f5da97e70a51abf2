"""Each class split over the clients by a Dirichlet distribution, with unequal sizes (Yurochkin et al. 2019; FedML).

The partition of SPIDER (App. A.1), SuperFed and SuperFedNAS. alpha is the concentration per client: a class goes to
few clients if it is small. A client that has its equal share of all samples gets none of the classes that follow, and
everything is drawn again until each client has at least `FEWEST` samples.
"""

from itertools import pairwise

import numpy as np

from fedloom.platform.data.artefact import FloatArray, IntArray

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
    pieces = [cut(samples, row) for samples, row in zip(classes, shares, strict=True)]
    return [np.sort(np.concatenate(own)) for own in zip(*pieces, strict=True)]


def shuffled_classes(labels: IntArray, num_classes: int, rng: np.random.Generator) -> list[IntArray]:
    """The indices of each class's samples, in random order."""
    order = rng.permutation(len(labels))
    return [order[labels[order] == label] for label in range(num_classes)]


def cut(samples: IntArray, shares: FloatArray) -> list[IntArray]:
    """Consecutive pieces of the samples in proportion to the shares, rounded as FedML rounds them."""
    bounds = _bounds(len(samples), shares)
    return [samples[start:stop] for start, stop in pairwise(bounds.tolist())]


def _bounds(size: int, shares: FloatArray) -> IntArray:
    inner = (np.cumsum(shares) * size).astype(np.int64)[:-1]
    return np.concatenate([[0], np.minimum(inner, size), [size]])
