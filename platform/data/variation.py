"""How different clients' data are: what a partition's alpha means for the data set at hand."""

import numpy as np

from fedloom.platform.data.artefact import IntArray

CLIENTS_AT_ONCE = 10_000


def label_variation(labels: IntArray, offsets: IntArray, num_classes: int) -> float:
    """Mean over clients of the total variation distance of a client's labels from the uniform distribution.

    `labels` holds all clients' labels, client k's from `offsets[k]` to `offsets[k + 1]`. 0: every client has equally
    many samples of each class; 1 - 1/C: every client has one class. Clients without samples do not count.
    """
    total, clients = 0.0, 0
    for first in range(0, len(offsets) - 1, CLIENTS_AT_ONCE):
        bounds = offsets[first : first + CLIENTS_AT_ONCE + 1]
        owners = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        cells = owners * num_classes + labels[bounds[0] : bounds[-1]]
        counts = np.bincount(cells, minlength=(len(bounds) - 1) * num_classes).reshape(-1, num_classes)
        counts = counts[counts.sum(axis=1) > 0]
        shares = counts / counts.sum(axis=1, keepdims=True)
        total += float(np.abs(shares - 1 / num_classes).sum()) / 2
        clients += len(counts)
    return total / clients


def size_variation(sizes: IntArray) -> float:
    """Standard deviation of the clients' numbers of samples, in units of their mean."""
    return float(np.std(sizes) / np.mean(sizes))
