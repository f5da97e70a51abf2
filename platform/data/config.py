"""Options of the data: the data set, its location, and its partition over clients."""

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, get_args

from annotated_types import Interval

from fedloom.platform.settings import ONE_OR_MORE, PATH, POSITIVE, UP_TO_A_MILLION, ComponentName
from fedloom.platform.words import in_words

Partition = Literal["lda", "lda_sequential", "dirichlet_classes", "shards", "quantity", "iid", "natural"]
PARTITIONS = get_args(Partition)
BY_LABEL = ("lda", "lda_sequential", "dirichlet_classes", "shards")
"""The partitions that are drawn by class labels."""
WITH_ALPHA = ("lda", "lda_sequential", "dirichlet_classes", "quantity")
"""The partitions that are drawn with `data.alpha`."""
SAMPLES = Interval(ge=1, le=1_000_000_000)


@dataclass
class DataConfig:
    """Everything that determines the prepared data set and, with a seed, its partition."""

    dataset: Annotated[str, ComponentName("data set"), "the data set; `fedloom plugins data` lists all"] = "digits"
    root: Annotated[str | None, PATH, "folder of the originals; null: the environment's FEDLOOM_DATA, then ./data"] = (
        None
    )
    cache: Annotated[
        str | None, PATH, "folder of the prepared arrays; null: the environment's FEDLOOM_CACHE, then ~/.cache/fedloom"
    ] = None
    download: Annotated[bool, "download the original if it is missing (CIFAR and torchvision's)"] = False
    train_samples: Annotated[
        int | None, SAMPLES, "number of training samples to use, stratified by class (text: uniform); null: all"
    ] = None
    test_samples: Annotated[int | None, SAMPLES, "number of test samples to use, likewise; null: all"] = None
    sequence_length: Annotated[
        int | None, UP_TO_A_MILLION, "tokens per sequence of a text; null: the data set's own (shakespeare 80, ptb 35)"
    ] = None
    partition: Annotated[
        Partition,
        "by label: lda (equal sizes, all clients draw in turn), lda_sequential (equal sizes, client after client), "
        "dirichlet_classes (each class split over the clients, unequal sizes) or shards (of samples sorted by "
        "label); quantity (uniform, unequal sizes), iid (uniform; text: equal consecutive pieces) or "
        "natural (the data set's own clients, the first num_clients in order of their names)",
    ] = "lda"
    num_clients: Annotated[int, Interval(ge=1, le=100_000_000), "number of registered clients"] = 40
    alpha: Annotated[
        float,
        POSITIVE,
        "concentration of the Dirichlet distribution per client or class (quantity: of the clients' sizes); small is "
        "skewed (0.1), large nearly uniform (1000)",
    ] = 1.0
    shards_per_client: Annotated[int, ONE_OR_MORE, "shards: number of shards per client"] = 2
    noise: Annotated[
        float | None,
        POSITIVE,
        "feature skew: variance of Gaussian noise in the last client's inputs; the i-th of N clients has i/N of it. "
        "Pixels range from 0 to 1; other inputs are in units of their channel's standard deviation",
    ] = None
    rotation: Annotated[
        float | None,
        Interval(gt=0, le=180),
        "feature skew: largest angle in degrees by which a client's images are rotated, drawn uniformly either way",
    ] = None
    validation_share: Annotated[
        float, Interval(ge=0, lt=1), "share of every client's training samples used for validation"
    ] = 0.1
    test_share: Annotated[
        float | None,
        Interval(gt=0, lt=1),
        "share of every client's training samples used as its test samples; null: clients get samples of the test "
        "part. The central evaluation always uses the test part",
    ] = None
    label_sets: Annotated[
        dict[str, Any], "label sets by name, for tiers.tasks: each lists the coarser class of every class"
    ] = field(default_factory=dict)
    augment: Annotated[str, ComponentName("augmentation"), "augmentation of training batches"] = "none"
    balanced_classes: Annotated[
        bool, "whether clients draw training samples with replacement so that all of their classes are equally likely"
    ] = False
    options: Annotated[dict[str, Any], "options of the data set and the augmentation, by name"] = field(
        default_factory=dict
    )


def data_root(config: DataConfig) -> Path:
    """The folder of the original files."""
    return Path(config.root or os.environ.get("FEDLOOM_DATA") or "data").expanduser()


def cache_root(config: DataConfig) -> Path:
    """Folder of the prepared arrays and partitions."""
    return Path(config.cache).expanduser() if config.cache else machine_cache()


def machine_cache() -> Path:
    """This machine's default cache, for commands that have no configuration; ignores a run's `data.cache`."""
    return Path(os.environ.get("FEDLOOM_CACHE") or "~/.cache/fedloom").expanduser()


def check_cache(config: DataConfig) -> None:
    """Raises a one-line ValueError if the cache folder, which need not exist, cannot be written."""
    root = cache_root(config)
    try:
        existing = root.absolute()
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(root))
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(root))
        with TemporaryDirectory(dir=existing):  # fails in /proc, for example, although os.access allows writing
            pass
    except OSError as error:
        error.filename = str(root)
        raise ValueError(
            f"the cache of prepared data cannot be written ({in_words(error)}): choose another folder by data.cache "
            "or FEDLOOM_CACHE"
        ) from error
