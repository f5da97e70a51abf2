"""Data sets as published: which file belongs where, and how much is in it, so that an incomplete one is noticed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from fedloom.platform.data.artefact import IntArray
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import PARTS, Dataset


@dataclass(frozen=True)
class Published:
    """A data set's files and numbers.

    Attributes:
        where: the files, below `data.root`, and where they come from.
        samples: of the train and the test part; of texts the tokens to be predicted.
        classes: classes, or tokens of the vocabulary.
        even: whether all classes have as many samples.
        clients: natural clients of both parts; None if there are none.
        coarse: the classes of its label sets by name.
    """

    where: str
    samples: tuple[int, int]
    classes: int
    even: bool = False
    clients: int | None = None
    coarse: Mapping[str, int] | None = None


PUBLISHED: Mapping[str, Published] = {
    "cifar10": Published(
        "cifar-10-python.tar.gz (170 498 071 bytes, as the authors and torchvision have it) or cifar-10-batches-py/ "
        "unpacked of it, or the hub's cifar10/train-*.parquet with test-*.parquet",
        (50_000, 10_000),
        10,
        even=True,
    ),
    "cifar100": Published(
        "cifar-100-python.tar.gz (169 001 437 bytes, as the authors and torchvision have it) or cifar-100-python/ "
        "unpacked of it, or the hub's cifar100/train-*.parquet with test-*.parquet",
        (50_000, 10_000),
        100,
        even=True,
        coarse={"coarse": 20},
    ),
    "cinic10": Published(
        "CINIC-10/ or cinic10/ with train/CLASS/*.png and test/CLASS/*.png, unpacked of CINIC-10.tar.gz, or the hub's "
        "cinic10/train-*.parquet with test-*.parquet",
        (90_000, 90_000),
        10,
        even=True,
    ),
    "ptb": Published(
        "ptb.train.txt and ptb.test.txt in ptb/ or simple-examples/data/, of Mikolov's simple-examples.tgz, or the "
        "hub's ptb/train-*.parquet with test-*.parquet",
        (929_588, 82_429),
        10_000,
    ),
    "shakespeare": Published(
        "shakespeare/shakespeare_train.h5 and shakespeare_test.h5, of TensorFlow Federated's shakespeare.tar.bz2",
        (2_390_736, 343_749),
        90,
        clients=715,
    ),
}
"""Of Speech Commands and others the readers themselves check that every word and part is there."""


def differences(config: DataConfig, dataset: Dataset) -> list[str]:
    """In what a prepared data set differs from what was published, a line each; empty for a sub-sample."""
    known = PUBLISHED.get(config.dataset)
    return [] if known is None else list(_differences(known, config, dataset))


def _differences(known: Published, config: DataConfig, dataset: Dataset) -> Iterator[str]:
    if dataset.num_classes != known.classes:
        what = "tokens in its vocabulary" if dataset.kind == "tokens" else "classes"
        yield f"it has {dataset.num_classes} {what}, published are {known.classes}"
    for name, count in (known.coarse or {}).items():
        found = dataset.label_sets.get(name)
        if found is None or len(found.names) != count:
            yield f"it has {0 if found is None else len(found.names)} {name} classes, published are {count}"
    clients = len(dataset.client_names)
    if known.clients is not None and clients != known.clients:
        yield f"it has {clients} clients, published are {known.clients}"
    for part, count, asked in zip(PARTS, known.samples, (config.train_samples, config.test_samples), strict=True):
        if asked is None and not config.options:  # which change how a text is cut
            yield from _of_part(known, part, dataset.labels(part), count)


def _of_part(known: Published, part: str, labels: IntArray, count: int) -> Iterator[str]:
    predicted, what = (int((labels >= 0).sum()), "tokens") if labels.ndim == 2 else (len(labels), "samples")
    if predicted != count:
        yield f"its {part} part has {predicted} {what}, published are {count}: a file may be incomplete"
    elif known.even:
        of_class = np.bincount(labels, minlength=known.classes)
        if of_class.min() != of_class.max():
            most, least = int(of_class.argmax()), int(of_class.argmin())
            yield (
                f"its {part} part has {of_class[most]} samples of class {most} and {of_class[least]} of {least}; "
                "published are as many of each"
            )
