"""Options of the data: which data set, where it lies, and how it is spread over clients."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

IMAGES = ("digits", "cifar10", "cifar100", "synthetic", "cinic10")
TEXTS = ("shakespeare", "ptb")
DATASETS = (*IMAGES, *TEXTS)
WITH_CLIENTS = ("shakespeare",)
"""Data sets that are published with clients of their own."""
PARTITIONS = ("lda", "iid", "natural")
AUGMENTATIONS = ("none", "crop_flip")


@dataclass
class DataConfig:
    """Everything that determines the prepared data set and, with a seed, its partition."""

    dataset: str = "digits"
    """One of digits, cifar10, cifar100, synthetic, cinic10 (images), shakespeare, ptb (text)."""
    root: str | None = None
    """Folder of the originals; default: the environment's FEDLOOM_DATA, then ./data."""
    cache: str | None = None
    """Folder of the prepared arrays; default: the environment's FEDLOOM_CACHE, then ~/.cache/fedloom."""
    download: bool = False
    """Fetch the original with torchvision where it is missing (CIFAR only)."""
    train_samples: int | None = None
    """Keep this many training samples, stratified by class (text: sequences, uniformly); None keeps all."""
    test_samples: int | None = None
    """Keep this many test samples, stratified by class (text: sequences, uniformly); None keeps all."""
    sequence_length: int | None = None
    """Tokens per training sequence of a text; None is the data set's own (shakespeare 80, ptb 35)."""
    partition: str = "lda"
    """How samples go to clients: lda (by label, images), iid (uniform; text: equal consecutive pieces) or natural.

    Natural is by the clients that the data set is published with: the first `num_clients` in order of their names.
    """
    num_clients: int = 40
    alpha: float = 1.0
    """Concentration of the clients' label distributions under lda: Dirichlet(alpha) per class."""
    validation_share: float = 0.1
    """Share of every client's training samples that becomes its validation set."""
    test_share: float | None = None
    """Share of every client's training samples that becomes its test set; None gives it a share of the test part.

    Set aside before the validation samples. Both shares are of all of a client's samples: .2 and .2 leave .6 to train.
    The central evaluation reads the data set's test part either way.
    """
    augment: str = "none"
    """What is done to training batches: none or crop_flip."""
    objective: str = "classification"
    options: dict[str, Any] = field(default_factory=dict)


def check(config: DataConfig) -> None:
    """Raises ValueError, one line, for the first option that is out of range."""
    _one_of("dataset", config.dataset, DATASETS)
    _one_of("augment", config.augment, AUGMENTATIONS)
    _at_least_one("num_clients", config.num_clients)
    _at_least_one("train_samples", config.train_samples)
    _at_least_one("test_samples", config.test_samples)
    _at_least_one("sequence_length", config.sequence_length)
    _check_partition(config.partition, config.dataset)
    _check_kind(config)
    if not (config.alpha > 0 and math.isfinite(config.alpha)):
        raise ValueError(
            f"data.alpha={config.alpha}: must be > 0; small is skewed (0.1), large is nearly the same everywhere (1000)"
        )
    _check_shares(config)


def _check_partition(partition: str, dataset: str) -> None:
    _one_of("partition", partition, PARTITIONS)
    lacks = {"lda": dataset in TEXTS, "natural": dataset not in WITH_CLIENTS, "iid": False}
    if lacks[partition]:
        what = {"lda": "has no class labels to draw by", "natural": "has no clients of its own"}[partition]
        allowed = ", ".join(p for p in PARTITIONS if not lacks[p])
        raise ValueError(f"data.partition={partition}: {dataset} {what}; must be one of {allowed}")


def _check_kind(config: DataConfig) -> None:
    if config.dataset in IMAGES and config.sequence_length is not None:
        raise ValueError(f"data.sequence_length={config.sequence_length}: {config.dataset} holds images; leave it out")
    if config.dataset in TEXTS and config.augment != "none":
        raise ValueError(f"data.augment={config.augment}: {config.dataset} is text; must be none")


def _check_shares(config: DataConfig) -> None:
    validation, test = config.validation_share, config.test_share
    if not 0 <= validation < 1:
        raise ValueError(f"data.validation_share={validation}: must be in [0, 1); the rest of a client's data trains")
    if test is None:
        return
    if not 0 < test < 1:
        raise ValueError(
            f"data.test_share={test}: must be in (0, 1), or null to test clients on their shares of the test part"
        )
    if not validation + test < 1:
        raise ValueError(
            f"data.validation_share={validation} and data.test_share={test}: must sum to less than 1; "
            "the rest of a client's data trains"
        )


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"data.{option}={value}: must be one of {', '.join(allowed)}")


def _at_least_one(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"data.{option}={value}: must be >= 1")


def data_root(config: DataConfig) -> Path:
    """Folder of the originals."""
    return Path(config.root or os.environ.get("FEDLOOM_DATA") or "data").expanduser()


def cache_root(config: DataConfig) -> Path:
    """Folder of the prepared arrays and partitions."""
    return Path(config.cache or os.environ.get("FEDLOOM_CACHE") or "~/.cache/fedloom").expanduser()
