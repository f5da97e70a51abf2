"""Latent Dirichlet allocation of labels to clients with equal client sizes (Hsu, Qi and Brown 2019).

Each client has a label distribution q_k ~ Dirichlet and draws samples from it without replacement. Under `lda` all
clients draw in turn, one sample per step, so that no client only gets the classes that the others left over. Under
`lda_sequential` client after client draws all of its samples, as in Flower, on which FedorAS is built: the last clients
get what is left, and labels are more skewed at the same alpha.

alpha is the concentration per class, as in Flower's partitions and in most papers' "Dirichlet(alpha)". Hsu et al. use
alpha * prior, the same family with an alpha that is larger by the factor of the number of classes.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedloom.platform.data.artefact import FloatArray, IntArray

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
